//! Host memory shared with the worker at equal addresses: pinned memory of the program, and staging for everything else.
//!
//! The arena grows by resources laid side by side into one reservation; allocations never move. Staging memory is freed
//! when the work that reads it is complete, which its stream's sequence tells.

use crate::{
    error::{Error, Result},
    log,
    process::Process,
    streams::Stream,
};
use core::sync::atomic::Ordering;
use offset_allocator::{Allocation, Allocator};
use sluice_protocol::limits;
use sluice_shared_memory::Reservation;
use std::{
    collections::BTreeMap,
    sync::{Mutex, MutexGuard, OnceLock},
};

/// Granule of allocations: a cache line, so that neighbours do not share one.
const UNIT: u64 = 64;
/// Bytes by which the arena grows at least.
const GROWTH: u64 = 32 << 20;
/// Staging bytes that work of one stream may hold; beyond that a copy waits for earlier ones on its own stream.
const STAGED_PER_STREAM: u64 = 32 << 20;

/// The arena of the session.
pub(crate) struct Arena {
    reservation: OnceLock<Reservation>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    blocks: Vec<Block>,
    /// Bytes of the reservation in use.
    used: u64,
    /// Staging memory whose readers may not be done.
    staged: Vec<Staged>,
    /// Pinned memory of the program by address.
    pinned: BTreeMap<u64, Pinned>,
}

struct Block {
    base: u64,
    bytes: u64,
    allocator: Allocator<u32>,
}

struct Staged {
    slot: u32,
    sequence: u64,
    room: Room,
}

/// Pinned host memory of the program.
pub(crate) struct Pinned {
    room: Room,
    pub(crate) bytes: u64,
    /// Flags as given to `cuMemHostAlloc`.
    pub(crate) flags: u32,
    /// Raw id of the context it was allocated in.
    pub(crate) context: u64,
}

/// An allocation in the arena.
pub(crate) struct Room {
    block: usize,
    allocation: Allocation<u32>,
    address: u64,
    bytes: u64,
}

impl Room {
    /// Its address, the same in this process and the worker.
    pub(crate) const fn address(&self) -> u64 {
        self.address
    }
}

impl Arena {
    /// An arena without memory: it shares nothing until something is needed.
    pub(crate) fn new() -> Result<Arena> {
        Ok(Arena { reservation: OnceLock::new(), state: Mutex::default() })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// The addresses of the arena: 64 GiB at the start of the window bounds, or less, or higher up.
    fn reservation(&self) -> Result<&Reservation> {
        if let Some(reservation) = self.reservation.get() {
            return Ok(reservation);
        }
        let bounds = limits::WINDOW_BOUNDS;
        let half = (bounds.end - bounds.start) / 2;
        let found = (0..4).flat_map(|shift| {
            let bytes = limits::SESSION_BYTES >> shift;
            (0..half / bytes).map(move |place| (bounds.start + place * bytes, bytes))
        });
        for (base, bytes) in found {
            if let Ok(reservation) = Reservation::new(base, bytes) {
                return Ok(self.reservation.get_or_init(|| reservation));
            }
        }
        log::error(format_args!("no range of addresses is free for host memory in {bounds:#x?}"));
        Err(Error::OUT_OF_MEMORY)
    }

    /// Allocates `bytes` of shared host memory.
    pub(crate) fn allocate(&self, process: &Process, bytes: u64) -> Result<Room> {
        let mut state = self.lock();
        state.reclaim(process);
        if let Some(room) = state.allocate(bytes) {
            return Ok(room);
        }
        let reservation = self.reservation()?;
        let growth = bytes.max(1).checked_next_multiple_of(GROWTH).ok_or(Error::OUT_OF_MEMORY)?;
        let end = state
            .used
            .checked_add(growth)
            .filter(|end| *end <= reservation.bytes())
            .ok_or(Error::OUT_OF_MEMORY)?;
        let base = reservation.base() + state.used;
        // A resource is limited, so a large block is stitched from several.
        let mut at = base;
        while at < base + growth {
            let part = (base + growth - at).min(limits::RESOURCE_BYTES);
            process.session.attach(reservation, at, part)?;
            at += part;
        }
        state.used = end;
        let units = u32::try_from(growth / UNIT).map_err(|_| Error::OUT_OF_MEMORY)?;
        state.blocks.push(Block {
            base,
            bytes: growth,
            allocator: Allocator::with_max_allocs(units, 64 << 10),
        });
        state.allocate(bytes).ok_or(Error::OUT_OF_MEMORY)
    }

    /// Frees an allocation nobody uses.
    pub(crate) fn free(&self, room: Room) {
        self.lock().free(room);
    }

    /// Allocates staging memory for a copy on a stream, within what one stream may hold: a stream that is held up makes its
    /// own callers wait and nobody else's.
    pub(crate) fn stage(&self, process: &Process, stream: Stream<'_>, bytes: u64) -> Result<Room> {
        while stream.staged().load(Ordering::Relaxed).saturating_add(bytes) > STAGED_PER_STREAM {
            let oldest = {
                let mut state = self.lock();
                state.reclaim(process);
                state
                    .staged
                    .iter()
                    .filter(|staged| staged.slot == stream.slot)
                    .map(|staged| staged.sequence)
                    .min()
            };
            match oldest {
                Some(sequence) => process.session.wait_complete(stream.slot, sequence)?,
                None => break,
            }
        }
        self.allocate(process, bytes)
    }

    /// Frees staging memory once the stream's work up to `sequence` is complete.
    pub(crate) fn free_after(&self, stream: Stream<'_>, sequence: u64, room: Room) {
        stream.staged().fetch_add(room.bytes, Ordering::Relaxed);
        self.lock().staged.push(Staged { slot: stream.slot, sequence, room });
    }

    /// Allocates pinned memory for the program.
    pub(crate) fn pin(&self, process: &Process, context: u64, bytes: u64, flags: u32) -> Result<u64> {
        if bytes == 0 {
            return Err(Error::INVALID_VALUE);
        }
        let room = self.allocate(process, bytes)?;
        let address = room.address;
        self.lock().pinned.insert(address, Pinned { room, bytes, flags, context });
        Ok(address)
    }

    /// Frees pinned memory once nothing uses it any more.
    pub(crate) fn unpin(&self, process: &Process, address: u64) -> Result {
        if !self.lock().pinned.contains_key(&address) {
            return Err(Error::INVALID_VALUE);
        }
        process.wait_all()?;
        let mut state = self.lock();
        let pinned = state.pinned.remove(&address).ok_or(Error::INVALID_VALUE)?;
        state.free(pinned.room);
        Ok(())
    }

    /// What `look` finds out about the pinned allocation that contains an address.
    pub(crate) fn pinned<R>(&self, address: u64, look: impl FnOnce(u64, &Pinned) -> R) -> Option<R> {
        let state = self.lock();
        let (start, pinned) = state.pinned.range(..=address).next_back()?;
        (address - start < pinned.bytes).then(|| look(*start, pinned))
    }

    /// Whether `bytes` from `address` are pinned memory of one allocation: the worker reaches them in place.
    pub(crate) fn is_pinned(&self, address: u64, bytes: u64) -> bool {
        // Cheap and without the lock for everything that cannot be.
        let Some(reservation) = self.reservation.get() else { return false };
        address.wrapping_sub(reservation.base()) < reservation.bytes()
            && self.pinned(address, |start, pinned| bytes <= pinned.bytes - (address - start)) == Some(true)
    }
}

impl State {
    fn allocate(&mut self, bytes: u64) -> Option<Room> {
        let units = u32::try_from(bytes.div_ceil(UNIT).max(1)).ok()?;
        self.blocks.iter_mut().enumerate().find_map(|(block, of)| {
            if bytes > of.bytes {
                return None;
            }
            let allocation = of.allocator.allocate(units)?;
            let address = of.base + u64::from(allocation.offset) * UNIT;
            Some(Room { block, allocation, address, bytes })
        })
    }

    fn free(&mut self, room: Room) {
        if let Some(block) = self.blocks.get_mut(room.block) {
            block.allocator.free(room.allocation);
        }
    }

    /// Frees the staging memory whose readers are done.
    fn reclaim(&mut self, process: &Process) {
        let mut index = 0;
        while index < self.staged.len() {
            let staged = &self.staged[index];
            if !process.session.is_complete(staged.slot, staged.sequence) {
                index += 1;
                continue;
            }
            let staged = self.staged.swap_remove(index);
            process.streams.unstage(staged.slot, staged.room.bytes);
            self.free(staged.room);
        }
    }
}
