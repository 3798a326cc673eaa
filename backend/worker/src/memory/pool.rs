//! A chunk that small allocations share, at a granularity of 512 bytes.

use super::{Chunk, Ledger};
use offset_allocator::Allocator;

/// Bytes of a pool chunk; a smaller class is taken when the quota has no more.
pub(super) const BYTES: u64 = 32 << 20;
/// What the vendor's allocator aligns to, too.
const GRAIN: u64 = 512;
/// Allocations in one chunk at most, which bounds the allocator's own tables.
const ALLOCATIONS: u32 = 16 << 10;

/// A place in a pool.
pub(super) struct Place(offset_allocator::Allocation);

impl core::fmt::Debug for Place {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_tuple("Place").field(&self.0.offset).finish()
    }
}

/// A pool chunk and its allocator.
pub(super) struct Pool {
    chunk: Chunk,
    allocator: Allocator,
    used: u32,
}

impl core::fmt::Debug for Pool {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Pool").field("chunk", &self.chunk).field("used", &self.used).finish_non_exhaustive()
    }
}

impl Pool {
    pub(super) fn new(chunk: Chunk, ledger: &Ledger) -> Pool {
        ledger.idle(chunk.device, chunk.bytes);
        // A chunk has at most 32 MiB here, so its grains fit 32 bits.
        let grains = u32::try_from(chunk.bytes / GRAIN).unwrap_or(u32::MAX);
        Pool { chunk, allocator: Allocator::with_max_allocs(grains, ALLOCATIONS), used: 0 }
    }

    pub(super) const fn device(&self) -> i32 {
        self.chunk.device
    }

    pub(super) const fn is_idle(&self) -> bool {
        self.used == 0
    }

    /// Takes `bytes` of the pool at `base`. An idle pool counts as free in the ledger; its first user makes it used again,
    /// if the quota still has that much.
    pub(super) fn take(&mut self, base: u64, bytes: u64, ledger: &Ledger) -> Option<(u64, Place)> {
        let grains = u32::try_from(bytes.div_ceil(GRAIN)).ok()?;
        let place = self.allocator.allocate(grains)?;
        if self.used == 0 {
            ledger.busy(self.chunk.device, self.chunk.bytes);
        }
        self.used += 1;
        Some((base + u64::from(place.offset) * GRAIN, Place(place)))
    }

    /// Gives a place back; `true` when the pool is idle now.
    pub(super) fn give(&mut self, place: Place, ledger: &Ledger) -> bool {
        self.allocator.free(place.0);
        self.used -= 1;
        if self.used == 0 {
            ledger.idle(self.chunk.device, self.chunk.bytes);
        }
        self.used == 0
    }

    /// The chunk of an idle pool.
    pub(super) fn into_chunk(self, ledger: &Ledger) -> Chunk {
        ledger.busy(self.chunk.device, self.chunk.bytes);
        self.chunk
    }
}
