//! Memory of the process: allocations, mappings and access rights.
//!
//! The entry points, modules and launches call this folder to allocate, map, share and free. Kernels and copies look addresses up
//! in [`MappingTable`], never in the host's page tables: an address that is not in it does not exist for the device. [`Space`] keeps the
//! book of a GPU's addresses: blocks of `cuMemAlloc`, reservations, mappings and pinned host memory. [`Overhead`] is the memory
//! that the driver takes for itself, [`Pools`] stream-ordered memory. [`Running`] lists the executing operations, so that a
//! mapping changes only when no operation uses it.
//!
//! The folder owns every address of the process. Nothing here knows a context, a stream or a GPU: calls name the [`Maker`] of a block and the queue that orders it.

mod arena;
mod block;
mod book;
pub(crate) mod descriptor;
mod host;
mod ipc;
mod managed;
mod name;
mod overhead;
mod pages;
mod peers;
mod pool;
mod running;
mod space;
mod table;
mod virtual_memory;

pub(crate) use arena::DeviceHeap;
pub(crate) use block::{Block, BlockKind, Maker};
pub(crate) use book::Scope;
pub(crate) use host::HostFlags;
pub(crate) use name::{Name, Named};
pub(crate) use overhead::{Overhead, Rates};
pub(crate) use pool::{POOLS, Pool, Pools, SharedPool};
pub(crate) use running::Running;
pub(crate) use space::Space;
pub(crate) use table::{MappingTable, Spans};
pub(crate) use virtual_memory::{MEMORY, MappingInfo, POSIX_FD, export, release};

/// Alignment of blocks of `cuMemAlloc`.
pub(crate) const ALIGNMENT: u64 = 512;
