//! A chunk that small allocations share, at a granularity of 512 bytes.

use super::Chunk;
use offset_allocator::Allocator;
use sluice_messages::custody::{CLASSES, UNIT};

/// The vendor's allocator uses the same alignment.
pub(super) const GRAIN: u64 = 512;
/// Limit on allocations in one chunk, which bounds the allocator's own tables.
const ALLOCATIONS: u64 = 16 << 10;
/// Pools of one unit before further ones of a kind get larger chunks: a program with few allocations takes little of its quota.
const SMALL_ONES: usize = 8;

/// The size class of a pool. Each fills its chunk before it reaches its limit of allocations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum PoolSize {
    /// Allocations so small that the smallest chunk has room for as many as a pool may have.
    Fine,
    /// All others.
    Coarse,
}

impl PoolSize {
    /// The size class of an allocation.
    pub(super) const fn of(bytes: u64) -> PoolSize {
        if bytes < CLASSES[1] / ALLOCATIONS { PoolSize::Fine } else { PoolSize::Coarse }
    }
}

/// The chunk class for one more pool beside `others` that are not full; a smaller one is taken if the quota has no more.
pub(super) const fn class(size: PoolSize, others: usize) -> u64 {
    match size {
        PoolSize::Coarse if others >= SMALL_ONES => CLASSES[1],
        _ => UNIT,
    }
}

/// A place in a pool.
pub(super) struct PoolPlace(offset_allocator::Allocation, u32);

impl core::fmt::Debug for PoolPlace {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_tuple("PoolPlace").field(&self.0.offset).finish()
    }
}

/// A pool chunk and its allocator.
pub(super) struct ChunkPool {
    chunk: Chunk,
    size: PoolSize,
    /// The group of its allocations.
    group: u32,
    allocator: Allocator,
    used: u32,
    /// Grains that are not allocated.
    free: u32,
}

impl core::fmt::Debug for ChunkPool {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("ChunkPool")
            .field("chunk", &self.chunk)
            .field("used", &self.used)
            .finish_non_exhaustive()
    }
}

impl ChunkPool {
    pub(super) fn new(chunk: Chunk, size: PoolSize, group: u32) -> ChunkPool {
        // A chunk has at most 32 MiB here, so its grains fit 32 bits.
        let grains = u32::try_from(chunk.bytes / GRAIN).unwrap_or(u32::MAX);
        // Two more than there are allocations: the rest of the chunk takes one, and the last one is never used.
        let most = u32::try_from(ALLOCATIONS).unwrap_or(u32::MAX).min(grains) + 2;
        ChunkPool {
            chunk,
            size,
            group,
            allocator: Allocator::with_max_allocs(grains, most),
            used: 0,
            free: grains,
        }
    }

    pub(super) const fn device(&self) -> i32 {
        self.chunk.device
    }

    pub(super) const fn size(&self) -> PoolSize {
        self.size
    }

    pub(super) const fn group(&self) -> u32 {
        self.group
    }

    pub(super) const fn chunk(&self) -> &Chunk {
        &self.chunk
    }

    /// Bytes of its chunk.
    pub(super) const fn bytes(&self) -> u64 {
        self.chunk.bytes
    }

    pub(super) const fn is_idle(&self) -> bool {
        self.used == 0
    }

    /// True if it has exactly one allocation.
    pub(super) const fn is_last(&self) -> bool {
        self.used == 1
    }

    /// True if not even the smallest allocation fits.
    pub(super) const fn is_full(&self) -> bool {
        self.free == 0 || self.used as u64 >= ALLOCATIONS
    }

    /// Takes `bytes`; returns their offset.
    pub(super) fn take(&mut self, bytes: u64) -> Option<(u64, PoolPlace)> {
        let grains = u32::try_from(bytes.div_ceil(GRAIN)).ok()?;
        if grains > self.free || u64::from(self.used) >= ALLOCATIONS {
            return None;
        }
        let place = self.allocator.allocate(grains)?;
        self.used += 1;
        self.free -= grains;
        Some((u64::from(place.offset) * GRAIN, PoolPlace(place, grains)))
    }

    /// Gives a place back.
    pub(super) fn give(&mut self, place: PoolPlace) {
        self.allocator.free(place.0);
        self.used -= 1;
        self.free += place.1;
    }

    /// The chunk of an idle pool.
    pub(super) fn into_chunk(self) -> Chunk {
        self.chunk
    }
}
