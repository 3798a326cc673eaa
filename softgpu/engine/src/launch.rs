//! One launch of a kernel, as a device requests it.

use std::sync::atomic::AtomicBool;

use crate::api::{Memory, Runtime};
use crate::module::Linked;

/// One launch of a kernel. The caller has checked grid, block and shared-memory limits.
pub struct Launch<'a> {
    /// The module with addresses.
    pub module: &'a Linked,
    /// Index into [`crate::Module::kernels`].
    pub kernel: usize,
    /// Blocks.
    pub grid: [u32; 3],
    /// Threads per block.
    pub block: [u32; 3],
    /// Dynamic shared memory per block.
    pub dynamic_shared: u32,
    /// The parameter block; shorter ones read as zero beyond their end.
    pub params: &'a [u8],
    /// Address of a zeroed 32-byte workspace in mapped device memory: a cooperative launch, all blocks resident.
    pub cooperative: Option<u64>,
    /// How many blocks may be parked beside each other.
    pub resident_ctas: u32,
    /// The mapping table.
    pub memory: &'a dyn Memory,
    /// The host side.
    pub runtime: &'a dyn Runtime,
    /// Ends the launch with [`crate::FaultKind::Stopped`] when set.
    pub stop: &'a AtomicBool,
    /// What `%gridid` reads.
    pub grid_id: u64,
}
