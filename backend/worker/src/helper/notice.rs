//! Notices to the dispatcher from the other threads.
//!
//! The session's tables belong to the dispatcher alone, so it needs no lock to read them. Another thread leaves a new object (a
//! module, an allocation, an arena) here *before* it is published to the guest; the dispatcher reads the notices before every
//! record. A guest can name an object only after it saw the answer, so by then the dispatcher knows the object.

use crate::{
    arenas::Arena,
    graphs::{executables::GraphEnd, plan::ConditionalSerial},
    session::{
        images::{GuestArray, GuestMipmapped, GuestReference},
        objects::{ContextRef, GuestContext, GuestFunction, GuestModule},
    },
};
use core::sync::atomic::{AtomicBool, Ordering};
use sluice_driver::Handle;
use sluice_protocol::handle::{self, Id};
use std::sync::{Arc, Mutex, PoisonError};

/// A change for the dispatcher's tables. `None`: the object was not created and its id is free again.
#[derive(Debug)]
pub(crate) enum Notice {
    Context {
        id: Id<handle::Context>,
        slot: u32,
        context: Option<GuestContext>,
    },
    Allocated {
        address: u64,
        bytes: u64,
        context: ContextRef,
    },
    /// A mapping of the guest's own, of memory of a device, becomes accessible or inaccessible.
    Reach {
        address: u64,
        bytes: u64,
        device: i32,
        may: bool,
    },
    Module {
        id: Id<handle::Module>,
        module: Option<GuestModule>,
    },
    Function {
        id: Id<handle::Function>,
        function: Option<(Id<handle::Module>, GuestFunction)>,
    },
    Link {
        id: Id<handle::Link>,
        link: Option<Handle>,
    },
    GreenContext {
        id: Id<handle::GreenContext>,
        object: Option<(Handle, ContextRef)>,
    },
    ConditionalGraph {
        id: Id<handle::ConditionalGraph>,
        object: Option<ConditionalSerial>,
    },
    Array {
        id: Id<handle::Array>,
        object: Option<GuestArray>,
    },
    MipmappedArray {
        id: Id<handle::MipmappedArray>,
        object: Option<GuestMipmapped>,
    },
    TextureReference {
        id: Id<handle::TextureReference>,
        object: Option<GuestReference>,
    },
    SurfaceReference {
        id: Id<handle::SurfaceReference>,
        object: Option<GuestReference>,
    },
    Global {
        module: Id<handle::Module>,
        /// None for a managed variable of a library, which all contexts share.
        context: Option<ContextRef>,
        address: u64,
        bytes: u64,
    },
    /// The making or a change of an executable graph has ended.
    Graph {
        id: Id<handle::GraphExecutable>,
        serial: u64,
        end: GraphEnd,
    },
    /// The driver has destroyed an executable graph.
    GraphGone {
        serial: u64,
    },
    Adopted(Arc<Arena>),
    /// The device requests that a slot be detached.
    DetachWanted {
        slot: u32,
    },
}

/// The queue of notices.
#[derive(Debug, Default)]
pub(crate) struct Notices {
    any: AtomicBool,
    list: Mutex<Vec<Notice>>,
}

impl Notices {
    pub(crate) fn push(&self, notice: Notice) {
        self.list.lock().unwrap_or_else(PoisonError::into_inner).push(notice);
        self.any.store(true, Ordering::Release);
    }

    /// True if there is a notice; one load.
    pub(crate) fn any(&self) -> bool {
        self.any.load(Ordering::Acquire)
    }

    /// Takes all notices. A later push sets the flag again.
    pub(crate) fn take(&self) -> Vec<Notice> {
        self.any.store(false, Ordering::Release);
        core::mem::take(&mut *self.list.lock().unwrap_or_else(PoisonError::into_inner))
    }
}
