//! Device memory of the session: chunks mapped into its address windows, and the sub-allocator over them.
//!
//! Memory comes in chunks from a [`ChunkSource`]. An allocation of [`LARGE`] bytes or more gets chunks of its own, mapped at
//! adjacent addresses; smaller ones share a pool chunk. The driver's own allocator is never called: its memory would be outside
//! custody. The memory helper ([`helper`]) calls it, and the dispatcher for allocations that need no chunk. It owns the chunks and the
//! addresses of the session, and must never use memory without a lease. Allocations belong to a [`Group`]: number 0, or one for each memory pool of the guest.

pub(crate) mod address;
mod blocks;
pub(crate) mod custody;
mod groups;
pub(crate) mod heaps;
pub(crate) mod helper;
mod kept;
pub(crate) mod memory_source;
#[cfg(any(test, fuzzing))]
mod own_chunks;
mod peers;
mod pool;
mod shares;
mod space;
pub(crate) mod tools;
mod windows;

pub(crate) use blocks::AccessedBlock;
pub(crate) use groups::GroupUsage;
#[cfg(any(test, fuzzing))]
pub(crate) use own_chunks::{Ledger, OwnChunks};
pub(crate) use shares::SharedAllocation;
pub(crate) use windows::Windows;

use blocks::{MappedBlock, PhysicalBlock};
use groups::Group;
use kept::Kept;
use pool::{ChunkPool, PoolSize};
use sluice_driver::{Code, code};
use sluice_messages::custody::{CLASSES, UNIT};
use sluice_protocol::{field::AccessFlags, limits};
use space::AddressSpace;
use std::collections::{BTreeMap, BTreeSet};

/// Bytes from which an allocation has chunks of its own.
pub(crate) const LARGE: u64 = UNIT;
/// The access flags for reading and writing.
const READ_WRITE: u32 = 3;

/// A chunk of device memory, which the source makes and takes back.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Chunk {
    pub(crate) handle: u64,
    pub(crate) bytes: u64,
    pub(crate) device: i32,
    pub(crate) lease: Lease,
}

/// The origin of a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lease {
    /// Lent by the arbiter, under this number.
    Lent(u64),
    /// Made by this process.
    #[cfg(any(test, fuzzing))]
    Own,
}

impl Lease {
    /// The number of a lease.
    pub(crate) const fn number(self) -> Option<u64> {
        match self {
            Lease::Lent(number) => Some(number),
            #[cfg(any(test, fuzzing))]
            Lease::Own => None,
        }
    }
}

/// The source of chunks.
pub(crate) trait ChunkSource {
    /// A chunk of `bytes`, one of [`CLASSES`]. `CUDA_ERROR_OUT_OF_MEMORY` when the quota or the device has none.
    fn take(&mut self, device: i32, bytes: u64) -> Result<Chunk, Code>;
    /// Takes a chunk back that is mapped nowhere.
    fn give(&mut self, chunk: Chunk);
    /// Reports the bytes of a device's chunks without allocations: they count as free.
    fn idle(&mut self, device: i32, bytes: u64);
    /// Bytes that can be taken, idle bytes included.
    fn free(&mut self, device: i32) -> u64;
    /// Adds a chunk to a share, 0 for a new one; returns the share.
    fn share(&mut self, _share: u128, _chunk: &Chunk) -> Result<u128, Code> {
        Err(code::NOT_SUPPORTED)
    }
    /// Ends a share.
    fn unshare(&mut self, _device: i32, _share: u128) {}
    /// The chunks of a share of the same VM.
    fn open(&mut self, _device: i32, _share: u128) -> Result<Vec<Chunk>, Code> {
        Err(code::NOT_SUPPORTED)
    }
}

/// The memory statistics of the devices, as the session's guest sees them; any thread may read them.
pub(crate) trait MemoryStats: core::fmt::Debug + Send + Sync {
    /// Free and total bytes.
    fn info(&self, device: i32) -> (u64, u64);
    /// True if [`MemoryStats::info`] includes every chunk that was taken and given so far.
    fn is_settled(&self, device: i32) -> bool;
    /// Waits until [`MemoryStats::info`] is up to date.
    fn settle(&self, device: i32);
    /// The number of devices, if it is known here.
    fn devices(&self) -> Option<usize>;
}

impl ChunkSource for Box<dyn ChunkSource + Send> {
    fn take(&mut self, device: i32, bytes: u64) -> Result<Chunk, Code> {
        (**self).take(device, bytes)
    }
    fn give(&mut self, chunk: Chunk) {
        (**self).give(chunk);
    }
    fn idle(&mut self, device: i32, bytes: u64) {
        (**self).idle(device, bytes);
    }
    fn free(&mut self, device: i32) -> u64 {
        (**self).free(device)
    }
    fn share(&mut self, share: u128, chunk: &Chunk) -> Result<u128, Code> {
        (**self).share(share, chunk)
    }
    fn unshare(&mut self, device: i32, share: u128) {
        (**self).unshare(device, share);
    }
    fn open(&mut self, device: i32, share: u128) -> Result<Vec<Chunk>, Code> {
        (**self).open(device, share)
    }
}

/// Address windows and their mappings.
pub(crate) trait Mapper {
    /// Reserves exactly these addresses.
    fn reserve(&mut self, base: u64, bytes: u64) -> Result<(), Code>;
    /// Maps the first `bytes` of a chunk, without access for any device.
    fn map(&mut self, at: u64, bytes: u64, chunk: &Chunk) -> Result<(), Code>;
    /// Sets a device's access to whole, adjacent mappings: 0 none, 1 reading, 3 reading and writing.
    fn allow(&mut self, at: u64, bytes: u64, device: i32, access: u32) -> Result<(), Code>;
    /// Removes the mapping of one [`Mapper::map`].
    fn unmap(&mut self, at: u64, bytes: u64) -> Result<(), Code>;
    /// True if memory is cleared when it is freed.
    fn clears(&self) -> bool;
    /// Clears freed memory, if [`Mapper::clears`], before it can be allocated again.
    fn clear(&mut self, at: u64, bytes: u64, device: i32) -> Result<(), Code>;
}

#[derive(Debug)]
enum AllocationPlace {
    Small {
        pool: u64,
        place: pool::PoolPlace,
    },
    Large {
        chunks: Vec<Chunk>,
        bytes: u64,
    },
    /// Opened from another process's share, mapped from `base`.
    Opened {
        base: u64,
        chunks: Vec<Chunk>,
        bytes: u64,
    },
}

#[derive(Debug)]
struct Allocation {
    place: AllocationPlace,
    group: u32,
    /// Bytes that it counts in its group.
    counted: u64,
}

/// The session's device memory.
#[derive(Debug)]
pub(crate) struct Memory<S, M> {
    source: S,
    mapper: M,
    space: AddressSpace,
    windows: usize,
    /// Pool chunks by address.
    pools: BTreeMap<u64, ChunkPool>,
    /// Pools that are not full: device, group, size class, address.
    open: BTreeSet<(i32, u32, PoolSize, u64)>,
    groups: BTreeMap<u32, Group>,
    /// The access of other devices to the memory of a group and device.
    peers: BTreeMap<(u32, i32), BTreeMap<i32, AccessFlags>>,
    kept: Kept,
    /// Idle bytes per device, and the last value that the source received.
    idle: BTreeMap<i32, (u64, u64)>,
    /// True if a thread is about to report the idle bytes.
    is_watched: bool,
    /// True if a thread is about to give back what is kept for long.
    is_ageing: bool,
    /// Live allocations by address.
    live: BTreeMap<u64, Allocation>,
    /// Shares of chunks, by the address of their mapping.
    shares: BTreeMap<u64, u128>,
    /// Physical memory that the guest maps itself.
    blocks: BTreeMap<u64, PhysicalBlock>,
    next_block: u64,
    /// The guest's own reservations, and its mappings in them.
    reserved: BTreeMap<u64, u64>,
    mapped: BTreeMap<u64, MappedBlock>,
}

/// The memory of a real session. The memory helper holds its lock while it calls the driver, so the dispatcher must not wait
/// for the lock.
pub(crate) type SessionMemory = Memory<Box<dyn ChunkSource + Send>, Windows>;

impl<S: ChunkSource, M: Mapper> Memory<S, M> {
    pub(crate) const fn new(source: S, mapper: M) -> Memory<S, M> {
        Memory {
            source,
            mapper,
            space: AddressSpace::new(),
            windows: 0,
            pools: BTreeMap::new(),
            open: BTreeSet::new(),
            groups: BTreeMap::new(),
            peers: BTreeMap::new(),
            kept: Kept::new(),
            idle: BTreeMap::new(),
            is_watched: false,
            is_ageing: false,
            live: BTreeMap::new(),
            shares: BTreeMap::new(),
            blocks: BTreeMap::new(),
            next_block: 1,
            reserved: BTreeMap::new(),
            mapped: BTreeMap::new(),
        }
    }

    pub(crate) const fn mapper(&mut self) -> &mut M {
        &mut self.mapper
    }

    /// Adds an address window.
    pub(crate) fn reserve(&mut self, base: u64, bytes: u64) -> Result<(), Code> {
        let end = base.checked_add(bytes).ok_or(code::INVALID_VALUE)?;
        let whole = bytes > 0 && bytes.is_multiple_of(UNIT) && base.is_multiple_of(UNIT);
        let kinds = [
            (limits::WINDOW_BOUNDS, limits::SESSION_WINDOW_BYTES),
            (limits::WIDE_WINDOW_BOUNDS, limits::WIDE_WINDOW_BYTES),
        ];
        let inside =
            kinds.iter().any(|(bounds, most)| base >= bounds.start && end <= bounds.end && bytes <= *most);
        if !whole || !inside || self.windows >= limits::WINDOWS {
            return Err(code::INVALID_VALUE);
        }
        self.mapper.reserve(base, bytes)?;
        self.windows += 1;
        self.space.give(base, bytes);
        Ok(())
    }

    /// Allocates `bytes` of a device's memory for group 0.
    #[cfg(test)]
    pub(crate) fn allocate(&mut self, device: i32, bytes: u64) -> Result<u64, Code> {
        self.allocate_in(0, device, bytes)
    }

    /// Allocates `bytes` of a device's memory.
    pub(crate) fn allocate_in(&mut self, group: u32, device: i32, bytes: u64) -> Result<u64, Code> {
        if bytes == 0 || bytes > limits::ALLOCATION_BYTES {
            return Err(if bytes == 0 { code::INVALID_VALUE } else { code::OUT_OF_MEMORY });
        }
        self.group(group, device)?;
        let allocated = if bytes >= LARGE {
            self.allocate_large(group, device, bytes)
        } else {
            self.allocate_small(group, device, bytes)
        };
        let allocated = allocated.map(|(address, place)| self.allocated(group, bytes, address, place));
        self.report_idle();
        allocated
    }

    /// Allocates without the source and the mapper: in a pool chunk that has room, or kept memory. `None`:
    /// [`Memory::allocate_in`] allocates or returns the reason for a refusal.
    pub(crate) fn allocate_at_hand(&mut self, group: u32, device: i32, bytes: u64) -> Option<u64> {
        if bytes == 0 || self.group(group, device).is_err() {
            return None;
        }
        let (address, place) = if bytes < LARGE {
            self.take_small(group, device, bytes)?
        } else {
            self.take_kept(group, device, bytes.checked_next_multiple_of(UNIT)?)?
        };
        Some(self.allocated(group, bytes, address, place))
    }

    /// Records an allocation.
    fn allocated(&mut self, group: u32, bytes: u64, address: u64, place: AllocationPlace) -> u64 {
        let counted = bytes.next_multiple_of(pool::GRAIN);
        self.count_used(group, counted);
        self.live.insert(address, Allocation { place, group, counted });
        address
    }

    fn allocate_large(
        &mut self,
        group: u32,
        device: i32,
        bytes: u64,
    ) -> Result<(u64, AllocationPlace), Code> {
        let bytes = bytes.checked_next_multiple_of(UNIT).ok_or(code::OUT_OF_MEMORY)?;
        if let Some(kept) = self.take_kept(group, device, bytes) {
            return Ok(kept);
        }
        let (at, chunks) = self.take_range(group, device, bytes)?;
        self.count_reserved(group, bytes, true);
        Ok((at, AllocationPlace::Large { chunks, bytes }))
    }

    /// Takes new chunks for `bytes`, a multiple of the unit, and maps them at adjacent addresses.
    fn take_range(&mut self, group: u32, device: i32, bytes: u64) -> Result<(u64, Vec<Chunk>), Code> {
        let chunks = self.take_chunks(device, bytes)?;
        match self.map_side_by_side((device, Some(group)), bytes, &chunks) {
            Ok(at) => Ok((at, chunks)),
            Err(failed) => {
                chunks.into_iter().for_each(|chunk| self.source.give(chunk));
                Err(failed)
            }
        }
    }

    /// Takes new chunks of `bytes` in total, a multiple of the unit.
    fn take_chunks(&mut self, device: i32, bytes: u64) -> Result<Vec<Chunk>, Code> {
        self.report_idle();
        let (free, idle) = (self.source.free(device), self.idle_bytes(device));
        if bytes > free {
            return Err(code::OUT_OF_MEMORY);
        }
        // The source does not recall memory of the process that asks for more.
        let short = bytes.saturating_sub(free.saturating_sub(idle));
        if short > 0 {
            self.drop_idle(device, short);
        }
        let (mut chunks, mut taken) = (Vec::new(), 0);
        while taken < bytes {
            // The smallest class is the unit, of which `bytes` is a multiple, so one class always fits.
            let class = CLASSES.into_iter().find(|class| *class <= bytes - taken).unwrap_or(UNIT);
            match self.take_smaller(device, class) {
                Ok(chunk) => {
                    taken += chunk.bytes;
                    chunks.push(chunk);
                }
                Err(failed) => {
                    chunks.into_iter().for_each(|chunk| self.source.give(chunk));
                    return Err(failed);
                }
            }
        }
        Ok(chunks)
    }

    /// Takes a chunk of `class`, or of a smaller class if the device has no such piece left.
    fn take_smaller(&mut self, device: i32, class: u64) -> Result<Chunk, Code> {
        let mut result = Err(code::OUT_OF_MEMORY);
        for bytes in CLASSES.into_iter().filter(|bytes| *bytes <= class) {
            result = self.source.take(device, bytes);
            if result.as_ref().err() != Some(&code::OUT_OF_MEMORY) {
                return result;
            }
        }
        // Idle memory goes back before the guest is refused.
        if self.drop_idle(device, u64::MAX) > 0 { self.source.take(device, UNIT) } else { result }
    }

    /// Maps chunks at free, adjacent addresses of `bytes`, with access for their device and for the peers of their group, if they
    /// belong to one.
    fn map_side_by_side(
        &mut self,
        (device, group): (i32, Option<u32>),
        bytes: u64,
        chunks: &[Chunk],
    ) -> Result<u64, Code> {
        let at = self.space.take(bytes).ok_or(code::OUT_OF_MEMORY)?;
        let mapped = self.map_chunks(at, bytes, chunks);
        let allowed = mapped.and_then(|()| {
            let own = self.mapper.allow(at, bytes, device, READ_WRITE);
            let allowed = own.and_then(|()| self.allow_peers(group, device, at, bytes));
            if allowed.is_err() && !self.unmap_chunks(at, bytes, chunks) {
                return Err(code::UNKNOWN);
            }
            allowed
        });
        match allowed {
            Ok(()) => Ok(at),
            Err(failed) => {
                self.space.give(at, bytes);
                Err(failed)
            }
        }
    }

    /// Maps the first `bytes` of chunks at adjacent addresses; all or nothing.
    fn map_chunks(&mut self, at: u64, bytes: u64, chunks: &[Chunk]) -> Result<(), Code> {
        let mut done = 0;
        for chunk in chunks {
            let part = chunk.bytes.min(bytes - done);
            if part == 0 {
                break;
            }
            if let Err(failed) = self.mapper.map(at + done, part, chunk) {
                self.unmap_chunks(at, done, chunks);
                return Err(failed);
            }
            done += part;
        }
        Ok(())
    }

    /// Unmaps the chunks of [`Memory::map_chunks`]; returns `false` if a mapping may remain.
    fn unmap_chunks(&mut self, at: u64, bytes: u64, chunks: &[Chunk]) -> bool {
        let (mut done, mut clean) = (0, true);
        for chunk in chunks {
            let part = chunk.bytes.min(bytes - done);
            if part == 0 {
                break;
            }
            if let Err(failed) = self.mapper.unmap(at + done, part) {
                tracing::error!(code = failed, "cannot unmap a chunk; the session can no longer use it");
                clean = false;
            }
            done += part;
        }
        clean
    }

    /// Unmaps adjacent chunks from `at` and gives them and their addresses back.
    fn give_up(&mut self, at: u64, bytes: u64, chunks: Vec<Chunk>) {
        // Chunks that may still be mapped are not given back, and their addresses are not used again.
        if self.unmap_chunks(at, bytes, &chunks) {
            chunks.into_iter().for_each(|chunk| self.source.give(chunk));
            self.space.give(at, bytes);
        }
    }

    fn allocate_small(
        &mut self,
        group: u32,
        device: i32,
        bytes: u64,
    ) -> Result<(u64, AllocationPlace), Code> {
        if let Some(taken) = self.take_small(group, device, bytes) {
            return Ok(taken);
        }
        let size = PoolSize::of(bytes);
        let (base, mut pool) = self.new_pool(group, device, size)?;
        let taken = pool.take(bytes);
        self.pools.insert(base, pool);
        self.open.insert((device, group, size, base));
        let (offset, place) = taken.ok_or(code::OUT_OF_MEMORY)?;
        Ok((base + offset, AllocationPlace::Small { pool: base, place }))
    }

    /// Takes a place in an existing pool.
    fn take_small(&mut self, group: u32, device: i32, bytes: u64) -> Option<(u64, AllocationPlace)> {
        let size = PoolSize::of(bytes);
        let range = (device, group, size, 0)..=(device, group, size, u64::MAX);
        let mut full = Vec::new();
        let mut found = None;
        for entry @ (.., base) in self.open.range(range) {
            let Some(pool) = self.pools.get_mut(base) else { continue };
            let was_idle = pool.is_idle();
            if let Some((offset, place)) = pool.take(bytes) {
                let place = AllocationPlace::Small { pool: *base, place };
                found = Some((*base + offset, place, *base, if was_idle { pool.bytes() } else { 0 }));
                break;
            }
            if pool.is_full() {
                full.push(*entry);
            }
        }
        for entry in full {
            self.open.remove(&entry);
        }
        let (address, place, base, idle) = found?;
        if idle > 0 {
            self.count_idle(device, idle, false);
            self.kept.set_pool(base, false);
        }
        Some((address, place))
    }

    fn new_pool(&mut self, group: u32, device: i32, size: PoolSize) -> Result<(u64, ChunkPool), Code> {
        let others = self.open.range((device, group, size, 0)..=(device, group, size, u64::MAX)).count();
        let chunk = self.take_smaller(device, pool::class(size, others))?;
        match self.map_side_by_side((device, Some(group)), chunk.bytes, core::slice::from_ref(&chunk)) {
            Ok(at) => {
                self.count_reserved(group, chunk.bytes, true);
                Ok((at, ChunkPool::new(chunk, size, group)))
            }
            Err(failed) => {
                self.source.give(chunk);
                Err(failed)
            }
        }
    }

    /// Frees an allocation of [`Memory::allocate_in`] or [`Memory::open_share`].
    pub(crate) fn free(&mut self, address: u64) -> Result<(), Code> {
        let freed = self.release(address);
        self.report_idle();
        freed
    }

    /// As [`Memory::free`], without a report of the idle bytes.
    fn release(&mut self, address: u64) -> Result<(), Code> {
        let Allocation { place, group, counted } = self.live.remove(&address).ok_or(code::INVALID_VALUE)?;
        self.count_freed(group, counted);
        match place {
            AllocationPlace::Large { chunks, bytes } => self.free_large(group, address, bytes, chunks),
            AllocationPlace::Opened { base, chunks, bytes } => self.give_up(base, bytes, chunks),
            AllocationPlace::Small { pool: base, place } => self.free_small(address, counted, base, place)?,
        }
        Ok(())
    }

    fn free_small(
        &mut self,
        address: u64,
        bytes: u64,
        base: u64,
        place: pool::PoolPlace,
    ) -> Result<(), Code> {
        let pool = self.pools.get_mut(&base).ok_or(code::UNKNOWN)?;
        let (device, group, size) = (pool.device(), pool.group(), pool.size());
        if let Err(failed) = self.mapper.clear(address, bytes, device) {
            // Not cleared, so it is never allocated again.
            tracing::error!(code = failed, "cannot clear freed memory; the session can no longer use it");
            return Ok(());
        }
        pool.give(place);
        let (is_idle, bytes) = (pool.is_idle(), pool.bytes());
        self.open.insert((device, group, size, base));
        if is_idle {
            self.count_idle(device, bytes, true);
            if self.keeps_pool(base) {
                self.kept.set_pool(base, group == 0);
            } else {
                self.drop_pool(base);
            }
        }
        Ok(())
    }

    /// Gives an idle pool's chunk back.
    fn drop_pool(&mut self, base: u64) {
        if let Some(pool) = self.pools.remove(&base) {
            let (device, group, bytes) = (pool.device(), pool.group(), pool.bytes());
            self.open.remove(&(device, group, pool.size(), base));
            self.kept.set_pool(base, false);
            self.count_idle(device, bytes, false);
            self.count_reserved(group, bytes, false);
            // Before the chunk is given: idle bytes are always a part of the lent bytes.
            self.report_idle();
            let chunk = pool.into_chunk();
            self.unshare(base, core::slice::from_ref(&chunk));
            self.give_up(base, bytes, vec![chunk]);
        }
    }
}

#[cfg(test)]
mod tests;
