//! The compute capability of the device, and its limits.

/// The compute capability that every model reports, times 10.
pub(crate) const CAPABILITY: u32 = softgpu_device::CAPABILITY.0 * 10 + softgpu_device::CAPABILITY.1;
/// Limits of a multiprocessor of this capability.
pub(crate) const THREADS_PER_MULTIPROCESSOR: u32 = 2048;
pub(crate) const BLOCKS_PER_MULTIPROCESSOR: u32 = 32;
pub(crate) const REGISTERS_PER_MULTIPROCESSOR: u32 = 65_536;
pub(crate) const SHARED_PER_MULTIPROCESSOR: u32 = 164 << 10;
/// Shared memory that the system reserves in each block.
pub(crate) const SHARED_RESERVED: u32 = 1 << 10;
/// Default shared memory of a block, and its opt-in maximum.
pub(crate) const SHARED_PER_BLOCK: u32 = 48 << 10;
pub(crate) const SHARED_PER_BLOCK_OPTIN: u32 = 163 << 10;
pub(crate) const WARP: u32 = 32;
/// Maximum pitch of a two-dimensional copy.
pub(crate) const MAX_PITCH: u32 = 0x7fff_ffff;
