//! The functions that a library supplies.

use crate::capture::Stream;
use crate::objects::Kept;
use crate::plan::{Plan, Work};
use sluice_cuda_frontend::ErrorCode;

/// A library that serves graphs: it knows contexts, kernels and memory, and it executes plans.
///
/// The crate calls it without a lock. Nodes are checked when they are made, as a driver does; a plan has only nodes that passed [`GraphDriver::check`].
pub trait GraphDriver: Send + Sync + 'static {
    /// The library's errors.
    type Error: ErrorCode + From<u32>;

    /// An executable graph. Dropping it destroys it; work of it that was launched still completes.
    type Executable: Send + Sync;

    /// A graph in which handles for conditional nodes live: device code sets the value of a handle by its number, so the library must
    /// have the graph before it has a plan of it. Executables of the graph need it no more when they are made.
    type ConditionalGraph: Send + Sync;

    /// The calling thread's current context.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_CONTEXT` if there is none.
    fn context(&self) -> Result<u64, Self::Error>;

    /// Facts about a stream. `per_thread` says which stream handle 0 means.
    ///
    /// # Errors
    /// The driver's code.
    fn stream(&self, stream: u64, per_thread: bool) -> Result<Stream, Self::Error>;

    /// Facts about a function or kernel, for a launch in `context`, or if it is 0 in the current one.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_HANDLE` for other handles.
    fn kernel(&self, function: u64, context: u64) -> Result<KernelFacts, Self::Error>;

    /// Checks work as the driver does when a node is made, and at a call in capture. Child graphs have been checked.
    ///
    /// # Errors
    /// The driver's code.
    fn check(&self, work: &Work) -> Result<(), Self::Error>;

    /// Makes a graph for conditional handles.
    ///
    /// # Errors
    /// The driver's code.
    fn conditional_graph(&self, context: u64) -> Result<Self::ConditionalGraph, Self::Error>;

    /// Creates a handle for a conditional node in a graph, and returns the number by which device code sets it.
    ///
    /// # Errors
    /// The driver's code.
    fn create_handle(
        &self,
        of: &Self::ConditionalGraph,
        condition: ConditionalHandle,
    ) -> Result<u64, Self::Error>;

    /// Makes an executable graph. `conditional` is the graph of the plan's handles, if it has any. `flags` are
    /// `CUgraphInstantiate_flags`. The library drops `kept` when the executable is destroyed and all work of it that was launched is
    /// complete.
    ///
    /// # Errors
    /// The driver's code, and the node that is the reason.
    fn instantiate(
        &self,
        plan: &Plan,
        conditional: Option<&Self::ConditionalGraph>,
        flags: u64,
        kept: Kept,
    ) -> Result<Self::Executable, Refusal<Self::Error>>;

    /// Replaces the work of one node, `path` being its number, preceded by the numbers of the child nodes around it. The kind of
    /// work stays, and the caller has checked the new work.
    ///
    /// # Errors
    /// The driver's code; then nothing has changed.
    fn set_work(
        &self,
        executable: &Self::Executable,
        path: &[u32],
        work: &Work,
        enabled: bool,
    ) -> Result<(), Self::Error>;

    /// Replaces the work of all nodes. The caller has compared the graphs: they differ in nothing but parameters, and in their handles
    /// for conditional nodes, which live in `conditional`.
    ///
    /// # Errors
    /// The driver's code, and the node that is the reason; then nothing has changed.
    fn update(
        &self,
        executable: &Self::Executable,
        plan: &Plan,
        conditional: Option<&Self::ConditionalGraph>,
    ) -> Result<(), Refusal<Self::Error>>;

    /// Launches an executable graph in a stream. `per_thread` says which stream handle 0 means.
    ///
    /// # Errors
    /// The driver's code.
    fn launch(&self, executable: &Self::Executable, stream: u64, per_thread: bool)
    -> Result<(), Self::Error>;

    /// Prepares a launch in a stream, which need not do anything.
    ///
    /// # Errors
    /// The driver's code.
    fn upload(&self, executable: &Self::Executable, stream: u64, per_thread: bool)
    -> Result<(), Self::Error>;

    /// Allocates memory of a device for a node.
    ///
    /// # Errors
    /// The driver's code.
    fn allocate_memory(&self, device: i32, bytes: u64) -> Result<u64, Self::Error>;

    /// Frees memory that no work uses any more. It may have ended with its context.
    fn free_memory(&self, address: u64);

    /// Drops `kept` when the work in a stream so far is complete. `per_thread` says which stream handle 0 means.
    ///
    /// # Errors
    /// The driver's code.
    fn keep_until_reached(&self, stream: u64, per_thread: bool, kept: Kept) -> Result<(), Self::Error>;

    /// A program asked for a feature of graphs that no library serves yet. A library may log it.
    fn refused(&self, _feature: &'static str) {}
}

/// The arguments of a handle for a conditional node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConditionalHandle {
    /// Context of the handle.
    pub context: u64,
    /// The default.
    pub value: u32,
    /// Each launch begins with the default.
    pub is_assigned: bool,
}

/// Facts about a kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KernelFacts {
    /// Context of a launch.
    pub context: u64,
    /// True for a `CUkernel`, which has a function in each context.
    pub is_kernel: bool,
    /// Offset and bytes of each parameter in the packed block.
    pub parameters: Vec<(u16, u16)>,
    /// Bytes of the packed block.
    pub bytes: u16,
}

/// An error of a whole graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refusal<E> {
    /// The driver's code.
    pub error: E,
    /// Number of the node that is the reason.
    pub node: Option<u32>,
}
