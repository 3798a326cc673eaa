//! The limits that all compute capabilities share. Those that differ are the model's.

/// Shared memory of a block by default.
pub(crate) const SHARED_PER_BLOCK: u32 = 48 << 10;
pub(crate) const WARP: u32 = 32;
/// Maximum pitch of a two-dimensional copy.
pub(crate) const MAX_PITCH: u32 = 0x7fff_ffff;
