//! The worker's objects behind the ids of a session.

use sluice_driver::Handle;
use sluice_protocol::handle::{self, Id};

/// A context of the driver, with a serial that distinguishes it from a later context at the same address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ContextRef {
    pub(crate) handle: Handle,
    pub(crate) serial: u64,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct GuestContext {
    pub(crate) context: ContextRef,
    pub(crate) device: i32,
    pub(crate) primary: bool,
}

/// A stream that the guest created.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GuestStream {
    pub(crate) handle: Handle,
    pub(crate) slot: u32,
    pub(crate) context: ContextRef,
    /// Its green context, if it has one.
    pub(crate) green: Option<Id<handle::GreenContext>>,
}

/// An event that the guest created.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GuestEvent {
    pub(crate) handle: Handle,
    pub(crate) context: ContextRef,
}

/// An object of a plain kind.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GuestObject {
    pub(crate) handle: Handle,
    /// `None` for an object that belongs to no context.
    pub(crate) context: Option<ContextRef>,
}

/// The driver's object behind a module id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum GuestImage {
    /// A `CUmodule`, of one context.
    Module(Handle),
    /// A `CUlibrary`, of all contexts.
    Library(Handle),
}

/// A module or a library.
#[derive(Debug)]
pub(crate) struct GuestModule {
    pub(crate) image: GuestImage,
    /// `None` for a library.
    pub(crate) context: Option<ContextRef>,
    /// Ids that become invalid with it.
    pub(crate) functions: Vec<Id<handle::Function>>,
}

/// The driver's object behind a function id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FunctionCode {
    /// A `CUfunction` of a module.
    Function(Handle),
    /// A `CUkernel` of a library; the driver accepts it in the place of a function.
    Kernel(Handle),
}

impl FunctionCode {
    pub(crate) const fn handle(self) -> Handle {
        match self {
            FunctionCode::Function(handle) | FunctionCode::Kernel(handle) => handle,
        }
    }
}

/// A function or a kernel.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GuestFunction {
    pub(crate) code: FunctionCode,
    pub(crate) module: Id<handle::Module>,
    /// Bytes of all its parameters.
    pub(crate) parameters: usize,
    /// Bytes of local memory of each of its threads.
    pub(crate) local: u32,
    /// The context of its module; `None` for a kernel.
    pub(crate) context: Option<ContextRef>,
}
