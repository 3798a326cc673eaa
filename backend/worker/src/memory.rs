//! Device memory of the session: chunks mapped into its address windows, and the sub-allocator over them.
//!
//! Memory comes in chunks from a [`ChunkSource`]. An allocation of [`LARGE`] bytes or more gets chunks of its own, laid
//! side by side; smaller ones share a pool chunk. The driver's own allocator is never called: what it gives would be
//! outside custody.

mod pool;
mod source;
mod space;

pub(crate) use source::{Ledger, OwnChunks};

use pool::{Pool, Size};
use sluice_driver::{Code, code};
use sluice_protocol::{
    custody::{CLASSES, UNIT},
    limits,
};
use space::Space;
use std::collections::{BTreeMap, BTreeSet};

/// Bytes from which an allocation has chunks of its own.
pub(crate) const LARGE: u64 = UNIT;

/// A chunk of device memory: the source's to make and to take back.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Chunk {
    pub(crate) handle: u64,
    pub(crate) bytes: u64,
    pub(crate) device: i32,
    pub(crate) lease: Lease,
}

/// Whose a chunk is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lease {
    /// Lent, under this number.
    Lent(u64),
    /// Made here.
    Own,
}

/// Where chunks come from.
pub(crate) trait ChunkSource {
    /// A chunk of `bytes`, one of [`CLASSES`]. `CUDA_ERROR_OUT_OF_MEMORY` when the quota or the device has none.
    fn take(&mut self, device: i32, bytes: u64) -> Result<Chunk, Code>;
    /// Takes a chunk back that is mapped nowhere.
    fn give(&mut self, chunk: Chunk);
    /// Is told how many of the bytes taken of a device nothing is allocated in: they count as free.
    fn idle(&mut self, device: i32, bytes: u64);
    /// Whether `bytes` more could be had, idle ones included.
    fn affords(&mut self, device: i32, bytes: u64) -> bool;
}

/// What the devices have, as the session's guest sees it; read by any thread.
pub(crate) trait Books: core::fmt::Debug + Send + Sync {
    /// Free and total bytes.
    fn info(&self, device: i32) -> (u64, u64);
    /// Whether [`Books::info`] shows everything that was taken and given so far.
    fn is_settled(&self, device: i32) -> bool;
    /// Waits until it does.
    fn settle(&self, device: i32);
    /// How many devices there are, if it is known here.
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
    fn affords(&mut self, device: i32, bytes: u64) -> bool {
        (**self).affords(device, bytes)
    }
}

/// Address windows and what is mapped in them.
pub(crate) trait Mapper {
    /// Reserves exactly these addresses.
    fn reserve(&mut self, base: u64, bytes: u64) -> Result<(), Code>;
    /// Maps a chunk for its device.
    fn map(&mut self, at: u64, chunk: &Chunk) -> Result<(), Code>;
    /// Unmaps what [`Mapper::map`] mapped.
    fn unmap(&mut self, at: u64, chunk: &Chunk) -> Result<(), Code>;
}

#[derive(Debug)]
enum Allocation {
    Small { pool: u64, place: pool::Place },
    Large { chunks: Vec<Chunk>, bytes: u64 },
}

/// The session's device memory.
#[derive(Debug)]
pub(crate) struct Memory<S, M> {
    source: S,
    mapper: M,
    space: Space,
    windows: usize,
    /// Pool chunks by address.
    pools: BTreeMap<u64, Pool>,
    /// Those that are not full, by device and by what they are for.
    open: BTreeSet<(i32, Size, u64)>,
    /// Bytes of idle pools, per device, and what the source was told.
    idle: BTreeMap<i32, (u64, u64)>,
    /// Live allocations by address.
    live: BTreeMap<u64, Allocation>,
}

impl<S: ChunkSource, M: Mapper> Memory<S, M> {
    pub(crate) const fn new(source: S, mapper: M) -> Memory<S, M> {
        Memory {
            source,
            mapper,
            space: Space::new(),
            windows: 0,
            pools: BTreeMap::new(),
            open: BTreeSet::new(),
            idle: BTreeMap::new(),
            live: BTreeMap::new(),
        }
    }

    /// Adds an address window.
    pub(crate) fn reserve(&mut self, base: u64, bytes: u64) -> Result<(), Code> {
        let bounds = limits::WINDOW_BOUNDS;
        let end = base.checked_add(bytes).ok_or(code::INVALID_VALUE)?;
        let whole = bytes > 0 && bytes.is_multiple_of(UNIT) && base.is_multiple_of(UNIT);
        let inside = base >= bounds.start && end <= bounds.end && bytes <= limits::SESSION_WINDOW_BYTES;
        if !whole || !inside || self.windows >= limits::WINDOWS {
            return Err(code::INVALID_VALUE);
        }
        self.mapper.reserve(base, bytes)?;
        self.windows += 1;
        self.space.give(base, bytes);
        Ok(())
    }

    /// Allocates `bytes` of a device's memory.
    pub(crate) fn allocate(&mut self, device: i32, bytes: u64) -> Result<u64, Code> {
        let address = match bytes {
            0 => Err(code::INVALID_VALUE),
            LARGE.. => self.allocate_large(device, bytes),
            _ => self.allocate_small(device, bytes),
        };
        self.tell_idle();
        address
    }

    /// Tells the source what is idle now, if that has changed.
    fn tell_idle(&mut self) {
        for (device, (bytes, told)) in &mut self.idle {
            if bytes != told {
                self.source.idle(*device, *bytes);
                *told = *bytes;
            }
        }
    }

    /// Bytes of a pool became idle, or are no longer.
    fn count_idle(&mut self, device: i32, bytes: u64, idle: bool) {
        let (count, _) = self.idle.entry(device).or_default();
        *count = if idle { *count + bytes } else { count.saturating_sub(bytes) };
    }

    fn allocate_large(&mut self, device: i32, bytes: u64) -> Result<u64, Code> {
        let bytes = bytes.checked_next_multiple_of(UNIT).ok_or(code::OUT_OF_MEMORY)?;
        if !self.source.affords(device, bytes) {
            return Err(code::OUT_OF_MEMORY);
        }
        let at = self.space.take(bytes).ok_or(code::OUT_OF_MEMORY)?;
        let mut chunks = Vec::new();
        let mut mapped = 0;
        while mapped < bytes {
            // The classes end with the unit, of which `bytes` is a multiple, so one always fits.
            let class = CLASSES.into_iter().find(|class| *class <= bytes - mapped).unwrap_or(UNIT);
            match self.map_smaller(device, at + mapped, class) {
                Ok(chunk) => {
                    mapped += chunk.bytes;
                    chunks.push(chunk);
                }
                Err(failed) => {
                    self.give_up(at, bytes, chunks);
                    return Err(failed);
                }
            }
        }
        self.live.insert(at, Allocation::Large { chunks, bytes });
        Ok(at)
    }

    /// Takes and maps a chunk of `class`, or of a smaller class when the device has no such piece left.
    fn map_smaller(&mut self, device: i32, at: u64, class: u64) -> Result<Chunk, Code> {
        let mut result = Err(code::OUT_OF_MEMORY);
        for bytes in CLASSES.into_iter().filter(|bytes| *bytes <= class) {
            result = self.map_new(device, at, bytes);
            if result.as_ref().err() != Some(&code::OUT_OF_MEMORY) {
                return result;
            }
        }
        // What lies idle in empty pools goes back before the guest is refused.
        if self.drop_idle(device, u64::MAX) > 0 { self.map_new(device, at, UNIT) } else { result }
    }

    fn map_new(&mut self, device: i32, at: u64, bytes: u64) -> Result<Chunk, Code> {
        let chunk = self.source.take(device, bytes)?;
        match self.mapper.map(at, &chunk) {
            Ok(()) => Ok(chunk),
            Err(failed) => {
                self.source.give(chunk);
                Err(failed)
            }
        }
    }

    /// Unmaps chunks that lie side by side from `at` and gives them and their addresses back.
    fn give_up(&mut self, at: u64, bytes: u64, chunks: Vec<Chunk>) {
        let mut next = at;
        let mut clean = true;
        for chunk in chunks {
            let here = next;
            next += chunk.bytes;
            match self.mapper.unmap(here, &chunk) {
                Ok(()) => self.source.give(chunk),
                Err(failed) => {
                    // A chunk that may still be mapped is not given back, and its addresses are not used again.
                    tracing::error!(code = failed, "cannot unmap a chunk; it is lost to the session");
                    clean = false;
                }
            }
        }
        if clean {
            self.space.give(at, bytes);
        }
    }

    fn allocate_small(&mut self, device: i32, bytes: u64) -> Result<u64, Code> {
        let size = Size::of(bytes);
        let range = (device, size, 0)..=(device, size, u64::MAX);
        let mut full = Vec::new();
        let mut found = None;
        for entry @ (.., base) in self.open.range(range) {
            let Some(pool) = self.pools.get_mut(base) else { continue };
            let was_idle = pool.is_idle();
            if let Some((offset, place)) = pool.take(bytes) {
                found = Some((*base, offset, place, was_idle.then_some(pool.bytes())));
                break;
            }
            if pool.is_full() {
                full.push(*entry);
            }
        }
        for entry in full {
            self.open.remove(&entry);
        }
        let (base, offset, place, idle) = match found {
            Some(found) => found,
            None => {
                let (base, mut pool) = self.new_pool(device, size)?;
                let taken = pool.take(bytes);
                self.pools.insert(base, pool);
                self.open.insert((device, size, base));
                let (offset, place) = taken.ok_or(code::OUT_OF_MEMORY)?;
                (base, offset, place, None)
            }
        };
        if let Some(bytes) = idle {
            self.count_idle(device, bytes, false);
        }
        self.live.insert(base + offset, Allocation::Small { pool: base, place });
        Ok(base + offset)
    }

    fn new_pool(&mut self, device: i32, size: Size) -> Result<(u64, Pool), Code> {
        let others = self.open.range((device, size, 0)..=(device, size, u64::MAX)).count();
        let first = pool::class(size, others);
        let mut result = Err(code::OUT_OF_MEMORY);
        for class in CLASSES.into_iter().filter(|class| *class <= first) {
            let at = self.space.take(class).ok_or(code::OUT_OF_MEMORY)?;
            match self.map_new(device, at, class) {
                Ok(chunk) => return Ok((at, Pool::new(chunk, size))),
                Err(failed) => {
                    self.space.give(at, class);
                    result = Err(failed);
                }
            }
        }
        result
    }

    /// Frees what [`Memory::allocate`] gave.
    pub(crate) fn free(&mut self, address: u64) -> Result<(), Code> {
        match self.live.remove(&address).ok_or(code::INVALID_VALUE)? {
            Allocation::Large { chunks, bytes } => self.give_up(address, bytes, chunks),
            Allocation::Small { pool: base, place } => {
                let pool = self.pools.get_mut(&base).ok_or(code::UNKNOWN)?;
                let (device, size, bytes) = (pool.device(), pool.size(), pool.bytes());
                pool.give(place);
                let is_idle = pool.is_idle();
                self.open.insert((device, size, base));
                if is_idle {
                    self.count_idle(device, bytes, true);
                    // One idle pool of a kind stays, so that a program that allocates and frees a little in turn does not
                    // make and unmake a chunk each time.
                    let of_kind =
                        |pool: &&Pool| pool.device() == device && pool.size() == size && pool.is_idle();
                    if self.pools.values().filter(of_kind).count() > 1 {
                        self.drop_pool(base);
                    }
                }
            }
        }
        self.tell_idle();
        Ok(())
    }

    /// Gives an idle pool back.
    fn drop_pool(&mut self, base: u64) {
        if let Some(pool) = self.pools.remove(&base) {
            self.open.remove(&(pool.device(), pool.size(), base));
            self.count_idle(pool.device(), pool.bytes(), false);
            // Before the chunk is given: what is idle is always among what is lent.
            self.tell_idle();
            let chunk = pool.into_chunk();
            self.give_up(base, chunk.bytes, vec![chunk]);
        }
    }

    /// Gives idle pools of a device back, until there are `wanted` bytes; answers how many there were.
    fn drop_idle(&mut self, device: i32, wanted: u64) -> u64 {
        let idle = self.pools.iter().filter(|(_, pool)| pool.device() == device && pool.is_idle());
        let idle: Vec<(u64, u64)> = idle.map(|(base, pool)| (*base, pool.bytes())).collect();
        let mut given = 0;
        for (base, bytes) in idle {
            if given >= wanted {
                break;
            }
            self.drop_pool(base);
            given += bytes;
        }
        given
    }

    /// The lender wants idle memory back.
    pub(crate) fn recall(&mut self, device: i32, bytes: u64) {
        self.drop_idle(device, bytes);
        self.tell_idle();
    }
}

#[cfg(test)]
mod tests;
