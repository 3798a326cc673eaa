//! The worker's objects behind the ids of a session.

use crate::submit::lanes::ContextRef;
use sluice_driver::Handle;
use sluice_protocol::handle::{self, Id};

/// A context.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Context {
    pub(crate) context: ContextRef,
    pub(crate) device: i32,
    pub(crate) primary: bool,
}

/// A stream that the guest created.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stream {
    pub(crate) handle: Handle,
    pub(crate) slot: u32,
    pub(crate) context: ContextRef,
}

/// An event that the guest created.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Event {
    pub(crate) handle: Handle,
    pub(crate) context: ContextRef,
}

/// What a module's handle is to the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Image {
    /// A `CUmodule`, of one context.
    Module(Handle),
    /// A `CUlibrary`, of all contexts.
    Library(Handle),
}

/// A module or a library.
#[derive(Debug)]
pub(crate) struct Module {
    pub(crate) image: Image,
    /// `None` for a library.
    pub(crate) context: Option<ContextRef>,
    /// Ids that die with it.
    pub(crate) functions: Vec<Id<handle::Function>>,
}

/// What a function's handle is to the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Code {
    /// A `CUfunction` of a module.
    Function(Handle),
    /// A `CUkernel` of a library; the driver takes it where it takes a function.
    Kernel(Handle),
}

impl Code {
    pub(crate) const fn handle(self) -> Handle {
        match self {
            Code::Function(handle) | Code::Kernel(handle) => handle,
        }
    }
}

/// A function or a kernel.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Function {
    pub(crate) code: Code,
    /// Bytes of all its parameters.
    pub(crate) parameters: usize,
    /// Bytes of local memory of each of its threads.
    pub(crate) local: u32,
    /// The context of its module; `None` for a kernel.
    pub(crate) context: Option<ContextRef>,
}
