//! The functions of the C API, by their C names, in the order of the call table.
//!
//! The exports call it. It owns nothing: it combines the answers of the process's tables, and alone uses all of them. Each
//! function takes the C caller's arguments, in the types of [`crate::arguments`], and returns a result code; nothing here is
//! unsafe. A function that acts on the host makes a wire call; one that the state of the process can answer is answered here.

#![allow(non_snake_case, clippy::too_many_arguments, reason = "the names and signatures of cuda.h")]

mod array_copy;
mod batch;
mod context;
mod context_end;
mod copy;
mod device;
mod event;
mod fill;
mod forward;
mod graphs;
mod green;
mod images;
mod ipc;
mod jit;
mod launch;
mod linker;
mod managed;
mod memory;
mod module;
mod old_launch;
mod peers;
mod pools;
mod shared_events;
mod staging;
mod startup;
mod stream;
mod stream_values;
mod tables;
mod tensor_map;
mod virtual_memory;

pub(crate) use array_copy::*;
pub(crate) use batch::*;
pub(crate) use context::*;
pub(crate) use copy::*;
pub(crate) use device::*;
pub(crate) use event::*;
pub(crate) use fill::*;
pub(crate) use forward::*;
pub(crate) use graphs::*;
pub(crate) use green::*;
pub(crate) use images::*;
pub(crate) use ipc::*;
pub(crate) use launch::*;
pub(crate) use linker::*;
pub(crate) use managed::*;
pub(crate) use memory::*;
pub(crate) use module::*;
pub(crate) use old_launch::*;
pub(crate) use peers::*;
pub(crate) use pools::*;
pub(crate) use startup::*;
pub(crate) use stream::*;
pub(crate) use stream_values::*;
pub(crate) use tensor_map::*;
pub(crate) use virtual_memory::*;
