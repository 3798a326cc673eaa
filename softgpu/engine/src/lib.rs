//! A PTX parser and warp-wide interpreter.
//!
//! The software CUDA driver calls it: PTX text becomes a [`Module`] of flat decoded instructions, and a [`Pool`] executes
//! launches of its kernels, 32 lanes per dispatched instruction. The engine owns decoded code and the threads that execute it. It
//! knows nothing of CUDA handles, contexts or files, and accesses memory only in ranges that [`Memory`] returns.
//!
//! From the bottom up: `api`, `image`, `ptx`, `regs`, `code_area`, `code_pages` and `ir` are types, and so are a `module` and its `launch`. `exec` has
//! the handlers of instructions, makes machine code of many at once, and runs a launch. `lower` makes code that names those
//! handlers, `load` makes a module of it, and `pool` has the threads.
//!
//! Folders from top to bottom: lower, exec, ptx.

mod api;
mod code_area;
mod code_pages;
mod exec;
mod image;
mod ir;
mod launch;
mod load;
mod lower;
mod module;
mod pool;
mod ptx;
mod regs;

/// Reserves addresses for the machine code of the process, which needs no other mapping for code afterwards. Without it, the first code
/// does. `log` gets messages about machine code.
pub fn reserve_code(log: fn(core::fmt::Arguments<'_>)) {
    exec::machine::reserve_code(log);
}

pub use api::{
    Fault, FaultKind, Global, Kernel, LOCAL_WINDOW, LoadError, LoadErrorKind, Memory, Param, Runtime,
    SHARED_WINDOW,
};
pub use image::{
    AddressMode, ChannelType, Filter, Format, Image, ImageError, Images, Level, NoImages, Reference,
    ReferenceKind, Sampler, Shape, Storage, Surface, Texture,
};
pub use launch::Launch;
pub use load::{SourceUnit, SourceUnitError};
pub use module::{Linked, Module};
pub use pool::Pool;
pub use ptx::NEWEST_ISA;
