//! CUDA graphs as a program describes them: nodes, edges and stream capture.
//!
//! A graph is a description until it is instantiated, and everything that a program may ask about a description is answered here,
//! without a driver: nodes, edges, parameters, clones, comparisons, and the rules of capture with their error codes. So one
//! implementation serves the guest's `libcuda.so.1` and the software GPU's. Each of them is a [`GraphDriver`]: it checks
//! arguments against its own objects, and makes an executable graph from a [`Plan`].
//!
//! - [`Graphs`]: the functions of the C interface, and those that a library calls at each use of a stream or an event;
//! - [`plan`]: the work of nodes, and graphs in the form that a driver instantiates;
//! - [`driver`]: the functions that a library supplies;
//! - [`layout`]: structures of the header.
//!
//! The crate runs in the process of a program and trusts it as C does. It knows nothing of transport, sessions or devices, and it
//! never waits.

mod calls;
mod capture;
mod dot;
pub mod driver;
mod graph;
pub mod layout;
mod memory;
mod objects;
pub mod plan;
mod update;

pub use calls::{CaptureInfo, Graphs};
pub use capture::{Stream, StreamOrder};
pub use driver::{ConditionalHandle, GraphDriver, KernelFacts, Refusal};
pub use objects::{HostFunction, Kept};
pub use plan::{
    AllocationWork, ConditionalKind, ConditionalWork, Copy3D, CopySide, Dependency, EdgeData, FillWork,
    HostWork, KernelAttribute, KernelWork, MemoryOperation, Plan, PlanNode, Work, memory_type,
};
