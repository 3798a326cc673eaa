//! A PTX parser and warp-wide interpreter.
//!
//! PTX text becomes a [`Module`] of flat decoded instructions; a [`Pool`] executes launches of its kernels, 32 lanes per
//! dispatched instruction. The engine knows nothing of CUDA handles, contexts or files, and touches memory only where
//! [`Memory`] vouches for it.

mod api;
mod dispatch;
mod exec;
mod ir;
mod launch;
mod lower;
mod module;
mod pool;
mod ptx;
mod regs;

pub use api::{
    Fault, FaultKind, Global, Kernel, LOCAL_WINDOW, LoadError, LoadErrorKind, Memory, Param, Runtime,
    SHARED_WINDOW,
};
pub use launch::Launch;
pub use module::{Linked, Module};
pub use pool::Pool;
