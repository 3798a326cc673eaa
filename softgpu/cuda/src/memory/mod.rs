//! Memory of the process: allocations, mappings and access rights.
//!
//! Kernels and copies look addresses up in [`Table`], never in the host's page tables: an address that is not in it does not
//! exist for the device. [`Space`] is the book of a GPU's addresses: blocks of `cuMemAlloc`, reservations, mappings and pinned
//! host memory. [`Overhead`] is the memory that the driver takes for itself, [`Pool`] stream-ordered memory. [`Running`] lists
//! the operations that are executing, so that a mapping changes only when nothing uses it.

mod arena;
mod block;
mod host;
mod ipc;
mod managed;
mod overhead;
mod pool;
mod running;
mod space;
mod table;
mod virtual_memory;

pub(crate) use arena::DeviceHeap;
pub(crate) use block::{Block, BlockKind};
pub(crate) use host::HostFlags;
pub(crate) use ipc::Name;
pub(crate) use overhead::{Overhead, Rates};
pub(crate) use pool::{POOLS, Pool};
pub(crate) use running::Running;
pub(crate) use space::Space;
pub(crate) use table::{Spans, Table};
pub(crate) use virtual_memory::{MEMORY, MappingInfo, POSIX_FD, export, release};

/// Alignment of what `cuMemAlloc` hands out.
pub(crate) const ALIGNMENT: u64 = 512;
