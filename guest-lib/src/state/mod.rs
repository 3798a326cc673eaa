//! The state of the process: devices, contexts, streams, events, modules and memory, as the program sees them.
//!
//! The functions of the C API call it, through the process that composes it. It owns the handles that a program holds, and the
//! data that make an answer possible without the host. A table receives the session and the tables that it depends on, and never
//! the process, a C pointer, or its caller.

pub(crate) mod contexts;
pub(crate) mod devices;
pub(crate) mod events;
pub(crate) mod functions;
pub(crate) mod gates;
pub(crate) mod green;
pub(crate) mod host_functions;
pub(crate) mod jit;
pub(crate) mod links;
pub(crate) mod memory;
pub(crate) mod modules;
pub(crate) mod objects;
pub(crate) mod peers;
pub(crate) mod shared_events;
pub(crate) mod streams;
pub(crate) mod thread;
