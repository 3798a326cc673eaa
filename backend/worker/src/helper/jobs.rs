//! The jobs that the dispatcher and the submitter give to the helper threads.

use crate::{
    arenas::{Arena, Mapped},
    memory::{Shared, address::HeldRange},
    session::{
        ReplyTo,
        objects::{self, Context, Image},
    },
    submit::lanes::ContextRef,
};
use sluice_driver::{Handle, Launch, LaunchAttribute};
use sluice_protocol::handle::{self, Id};
use std::{ffi::CString, sync::Arc};

/// A job for the memory helper.
#[derive(Debug)]
pub(crate) enum MemoryJob {
    ContextCreate {
        to: ReplyTo,
        id: Id<handle::Context>,
        device: u32,
        flags: u32,
        primary: bool,
        slot: u32,
    },
    ContextDestroy {
        to: ReplyTo,
        context: Context,
        allocations: Vec<u64>,
    },
    Limit {
        to: ReplyTo,
        context: ContextRef,
        limit: u32,
    },
    SetLimit {
        to: ReplyTo,
        context: Context,
        limit: u32,
        value: u64,
    },
    Window {
        to: ReplyTo,
        base: u64,
        bytes: u64,
    },
    Allocate {
        to: ReplyTo,
        context: ContextRef,
        device: i32,
        pool: u32,
        bytes: u64,
    },
    /// The streams of these allocations have come to their end.
    FreeAll(Vec<u64>),
    Pool(PoolJob),
    Virtual {
        to: ReplyTo,
        job: VirtualJob,
    },
    Share {
        to: ReplyTo,
        address: u64,
    },
    Open {
        to: ReplyTo,
        context: ContextRef,
        device: i32,
        shared: Shared,
        bytes: u64,
    },
    Free {
        to: ReplyTo,
        address: u64,
    },
    Info {
        to: ReplyTo,
        device: i32,
    },
    /// The guest's own number of its process.
    Hello {
        process: u32,
    },
    /// A process of the VM.
    Process {
        to: ReplyTo,
        device: i32,
        index: u32,
    },
    /// Not a guest's: a lender wants memory back.
    Recall,
    Adopt {
        slot: u32,
        mapped: Mapped,
    },
    Detach {
        arena: Arc<Arena>,
    },
}

/// A job that concerns a pool.
#[derive(Clone, Copy, Debug)]
pub(crate) enum PoolJob {
    Threshold { to: ReplyTo, pool: u32, device: i32, bytes: u64 },
    Trim { to: ReplyTo, pool: u32, keep: u64 },
    Usage { to: ReplyTo, pool: u32, device: i32, reset: u32 },
    End { to: ReplyTo, pool: u32 },
}

/// A job that concerns the guest's own mappings.
#[derive(Clone, Copy, Debug)]
pub(crate) enum VirtualJob {
    Create { device: i32, bytes: u64 },
    Release { block: u64 },
    Map { block: u64, address: u64, bytes: u64 },
    Access { address: u64, bytes: u64, device: i32, access: u32 },
    Unmap { address: u64, bytes: u64 },
    Reserve { bytes: u64, alignment: u64, hint: u64 },
    FreeRange { address: u64, bytes: u64 },
    Share { block: u64 },
    Open { device: i32, share: u128 },
}

/// A job for the module helper.
#[derive(Debug)]
pub(crate) struct ModuleJob {
    pub(crate) to: ReplyTo,
    /// The caller's current context and its device.
    pub(crate) context: Option<(ContextRef, i32)>,
    pub(crate) question: Question,
}

/// One question.
#[derive(Debug)]
pub(crate) enum Question {
    Load {
        id: Id<handle::Module>,
        library: bool,
        image: HeldRange,
        log: HeldRange,
    },
    Unload {
        image: Image,
    },
    Function {
        module: Id<handle::Module>,
        image: Image,
        id: Id<handle::Function>,
        name: CString,
    },
    Global {
        module: Id<handle::Module>,
        image: Image,
        name: CString,
    },
    FunctionCount {
        image: Image,
    },
    FunctionName {
        image: Image,
        index: u32,
        into: HeldRange,
    },
    SetAttribute {
        code: objects::Code,
        attribute: u32,
        value: i32,
    },
    Blocks {
        function: Handle,
        block: i32,
        shared: u64,
        flags: u32,
    },
    BlockSize {
        function: Handle,
        shared: u64,
        limit: i32,
        flags: u32,
    },
    Shared {
        function: Handle,
        blocks: i32,
        block: i32,
    },
    Clusters {
        potential: bool,
        launch: Launch,
        attributes: Vec<LaunchAttribute>,
    },
    /// Passes on that a context ends, behind all that was asked about its modules.
    ContextDestroy {
        context: Context,
        allocations: Vec<u64>,
    },
    /// Not a guest's: passes on a wish to detach once every image that lies in the arena is copied.
    Detach {
        arena: Arc<Arena>,
    },
}
