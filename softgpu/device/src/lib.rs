//! The memory of a soft device, shared by every process that uses it.
//!
//! A device is a directory of files: `hbm`, sparse and of fixed size, is the memory itself; `header`, mapped by each process,
//! records the owner of each 2 MiB page of it. A third file, `exported`, is empty: its descriptors name allocations. There is no
//! server, and no lock that a killed process could leave behind: every change of the header is one compare-and-swap, and the
//! kernel's file locks show which processes are alive.
//!
//! Nothing here ever clears memory, neither when pages are taken nor when they are given back: the next owner reads the content
//! that the last one left, as on a GPU whose driver clears nothing. If no process computes on the device, its storage may go back
//! to the host; such memory reads as bytes that no program wrote, and never as fresh memory. Nothing here is a security boundary:
//! each process maps the whole files.
//!
//! From the bottom up: `header` is the shared layout, `device` opens it, `records` has the allocations and pages, `slots` the
//! processes, `storage` the memory of the host behind the pages, `instances` the parts of a divided device. `owners` is this
//! process as an owner; it uses `export`, `mapping` and `running`.
//!
//! The software CUDA driver, the software NVML and the host tools that inspect a soft device call this crate. It knows nothing of
//! CUDA. It opens its files in [`Device::open`] and later only to export an allocation, so that a process may give up the right
//! to open files after start-up.

mod capability;
mod config;
mod device;
mod export;
mod geometry;
mod header;
mod instances;
mod mapping;
mod model;
mod owners;
mod records;
mod running;
mod settings;
mod slots;
mod storage;
mod sys;

pub use capability::Capability;
pub use config::{Booking, Config, ConfigError, Has, Lack, MemoryPolicy, StartDelay};
pub use device::{Device, Identity, OpenError};
pub use export::ImportError;
pub use geometry::{ComputeProfile, Geometry, Profile};
pub use instances::{ComputeInstance, GpuInstance, InstanceError};
pub use mapping::{Reservation, map_pages, page_size, unmap_pages};
pub use model::{MODELS, Model, PAGE_BYTES};
pub use owners::{Allocation, Owner};
pub use records::{AllocationError, Held, Run, Use};
pub use settings::{SETTINGS, Setting};
pub use slots::{AttachError, Client, Confinement, Process};
pub use storage::LOST;
pub use sys::{anonymous, monotonic_nanoseconds, thread_nanoseconds};
