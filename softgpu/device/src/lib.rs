//! The memory of a soft device, shared by every process that uses it.
//!
//! A device is a directory of files: `hbm`, sparse and of fixed size, is the memory itself; `header`, mapped by each process,
//! records the owner of each 2 MiB page of it. A third, `exported`, is empty: descriptors of it name allocations. There is no
//! server and no lock that a killed process could leave behind: every change of the header is one compare-and-swap, and the
//! kernel's file locks witness which processes are alive.
//!
//! Nothing here ever clears memory, neither when pages are taken nor when they are given back: the next owner reads the content
//! that the last one left, as on the least helpful GPU. And nothing here is a security boundary: each process maps the files
//! whole.
//!
//! The crate knows nothing of CUDA. It opens its files in [`Device::open`] and later only to export an allocation, so that a
//! process may give up the right to open files after start-up.

mod allocations;
mod config;
mod device;
mod export;
mod geometry;
mod header;
mod instances;
mod mapping;
mod model;
mod owners;
mod running;
mod sys;

pub use allocations::{Allocation, AllocationError, Held, Run, Use};
pub use config::{Booking, Config, ConfigError, MemoryPolicy};
pub use device::{Device, Identity, OpenError};
pub use export::ImportError;
pub use geometry::{ComputeProfile, Geometry, Profile};
pub use instances::{ComputeInstance, Confinement, GpuInstance, InstanceError};
pub use mapping::{Reservation, map_pages, page_size, unmap_pages};
pub use model::{MODELS, Model};
pub use owners::{AttachError, Client, Owner, Process};
pub use sys::{anonymous, monotonic_nanoseconds, thread_nanoseconds};

/// The compute capability that every model reports: what is executed is PTX for it.
pub const CAPABILITY: (u32, u32) = (8, 0);
/// The unit in which device memory is owned and mapped.
pub const PAGE_BYTES: u64 = 2 << 20;
