//! The limits that all compute capabilities share. Those that differ are the model's.

pub(crate) use sluice_cuda_abi::occupancy::WARP;

/// Shared memory of a block by default.
pub(crate) const SHARED_PER_BLOCK: u32 = 48 << 10;
/// Maximum pitch of a two-dimensional copy.
pub(crate) const MAX_PITCH: u32 = 0x7fff_ffff;
