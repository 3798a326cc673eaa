//! Device memory of the session: chunks mapped into its address windows, and the sub-allocator over them.
//!
//! Memory comes in chunks from a [`ChunkSource`]. An allocation of [`LARGE`] bytes or more gets chunks of its own, laid
//! side by side; smaller ones share a pool chunk. The driver's own allocator is never called: what it gives would be
//! outside custody.

mod pool;
mod source;
mod space;

pub(crate) use source::{Ledger, OwnChunks};

use pool::Pool;
use sluice_driver::{Code, code};
use sluice_protocol::limits;
use space::Space;
use std::{collections::BTreeMap, sync::Arc};

const MIB: u64 = 1 << 20;
/// Sizes of chunks, largest first.
pub(crate) const CLASSES: [u64; 3] = [512 * MIB, 32 * MIB, 2 * MIB];
/// The unit of addresses and of the quota.
pub(crate) const UNIT: u64 = 2 * MIB;
/// Bytes from which an allocation has chunks of its own.
pub(crate) const LARGE: u64 = UNIT;

/// A chunk of device memory: the source's to make and to take back.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Chunk {
    pub(crate) handle: u64,
    pub(crate) bytes: u64,
    pub(crate) device: i32,
}

/// Where chunks come from.
pub(crate) trait ChunkSource {
    /// A chunk of `bytes`, one of [`CLASSES`]. `CUDA_ERROR_OUT_OF_MEMORY` when the quota or the device has none.
    fn take(&mut self, device: i32, bytes: u64) -> Result<Chunk, Code>;
    /// Takes a chunk back that is mapped nowhere.
    fn give(&mut self, chunk: Chunk);
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
    ledger: Arc<Ledger>,
    space: Space,
    windows: usize,
    /// Pool chunks by address.
    pools: BTreeMap<u64, Pool>,
    /// Live allocations by address.
    live: BTreeMap<u64, Allocation>,
}

impl<S: ChunkSource, M: Mapper> Memory<S, M> {
    pub(crate) fn new(source: S, mapper: M, ledger: Arc<Ledger>) -> Memory<S, M> {
        Memory {
            source,
            mapper,
            ledger,
            space: Space::new(),
            windows: 0,
            pools: BTreeMap::new(),
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
        match bytes {
            0 => Err(code::INVALID_VALUE),
            LARGE.. => self.allocate_large(device, bytes),
            _ => self.allocate_small(device, bytes),
        }
    }

    fn allocate_large(&mut self, device: i32, bytes: u64) -> Result<u64, Code> {
        let bytes = bytes.checked_next_multiple_of(UNIT).ok_or(code::OUT_OF_MEMORY)?;
        if !self.ledger.affords(device, bytes) {
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
        if self.drop_idle_pools() { self.map_new(device, at, UNIT) } else { result }
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
        for (base, pool) in &mut self.pools {
            if pool.device() == device
                && let Some((address, place)) = pool.take(*base, bytes, &self.ledger)
            {
                self.live.insert(address, Allocation::Small { pool: *base, place });
                return Ok(address);
            }
        }
        let (base, mut pool) = self.new_pool(device)?;
        let taken = pool.take(base, bytes, &self.ledger);
        self.pools.insert(base, pool);
        let (address, place) = taken.ok_or(code::OUT_OF_MEMORY)?;
        self.live.insert(address, Allocation::Small { pool: base, place });
        Ok(address)
    }

    fn new_pool(&mut self, device: i32) -> Result<(u64, Pool), Code> {
        let mut result = Err(code::OUT_OF_MEMORY);
        for class in CLASSES.into_iter().filter(|class| *class <= pool::BYTES) {
            let at = self.space.take(class).ok_or(code::OUT_OF_MEMORY)?;
            match self.map_new(device, at, class) {
                Ok(chunk) => return Ok((at, Pool::new(chunk, &self.ledger))),
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
                let device = pool.device();
                if pool.give(place, &self.ledger) {
                    // One idle pool of a device stays, so that a program that allocates and frees a little in turn does
                    // not make and unmake a chunk each time.
                    let idle =
                        self.pools.values().filter(|pool| pool.device() == device && pool.is_idle()).count();
                    if idle > 1 {
                        self.drop_pool(base);
                    }
                }
            }
        }
        Ok(())
    }

    fn drop_pool(&mut self, base: u64) {
        if let Some(pool) = self.pools.remove(&base) {
            let chunk = pool.into_chunk(&self.ledger);
            self.give_up(base, chunk.bytes, vec![chunk]);
        }
    }

    /// Gives idle pools back; `true` when there were any.
    fn drop_idle_pools(&mut self) -> bool {
        let idle: Vec<u64> =
            self.pools.iter().filter(|(_, pool)| pool.is_idle()).map(|(base, _)| *base).collect();
        for base in &idle {
            self.drop_pool(*base);
        }
        !idle.is_empty()
    }
}

#[cfg(test)]
mod tests;
