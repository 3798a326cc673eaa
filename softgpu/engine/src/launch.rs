//! One launch of a kernel, as a device requests it.

use std::sync::atomic::AtomicBool;
use std::time::Instant;

use crate::api::{Memory, Runtime};
use crate::image::Images;
use crate::module::Linked;

/// One launch of a kernel. The caller has checked grid, block and shared-memory limits.
pub struct Launch<'a> {
    /// The linked module.
    pub module: &'a Linked,
    /// Index into [`crate::Module::kernels`].
    pub kernel: usize,
    /// Number of blocks.
    pub grid: [u32; 3],
    /// Number of threads per block.
    pub block: [u32; 3],
    /// Dynamic shared memory per block, in bytes.
    pub dynamic_shared: u32,
    /// The parameter block; bytes beyond its end read as zero.
    pub params: &'a [u8],
    /// Address of a zeroed 32-byte workspace in mapped device memory. If set, the launch is cooperative and all blocks are
    /// resident.
    pub cooperative: Option<u64>,
    /// Maximum number of parked blocks.
    pub resident_ctas: u32,
    /// The mapping table.
    pub memory: &'a dyn Memory,
    /// The table of texture and surface handles.
    pub images: &'a dyn Images,
    /// The handle of each of [`crate::Module::references`]; one that is missing is 0.
    pub references: &'a [u64],
    /// The host services.
    pub runtime: &'a dyn Runtime,
    /// Ends the launch with [`crate::FaultKind::Stopped`] if set.
    pub stop: &'a AtomicBool,
    /// Ends the launch with [`crate::FaultKind::Timeout`] when this time has come.
    pub deadline: Option<Instant>,
    /// Value of `%gridid`.
    pub grid_id: u64,
}
