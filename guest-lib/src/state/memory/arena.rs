//! Host memory shared with the worker at equal addresses: pinned memory of the program, and staging for everything else.
//!
//! The arena grows by resources laid side by side into one reservation; allocations never move. Staging memory is freed when
//! the work that reads it is complete, which its stream's sequence shows.
//!
//! If the worker cannot map guest pages side by side (huge pages, or too many pieces) it gathers them, and if no memory is
//! shared, a stream carries their content to it. Such memory serves for staging, but the device does not reach it. A
//! session that has only such memory from its beginning reports that its devices reach no host memory; memory that a program
//! then pins is private memory of the process, copied through staging like any other, and has no address on the device. If the
//! worker begins to gather later, when the program may already have received another answer, there is no pinned memory.

use crate::{
    error::{Error, Result},
    log,
    session::{Reach, Session},
    state::streams::Streams,
};
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use offset_allocator::{Allocation, Allocator};
use sluice_protocol::limits;
use sluice_shared_memory::{Mapping, Reservation};
use std::{
    collections::BTreeMap,
    sync::{Mutex, MutexGuard, Once, OnceLock},
};

/// Unit of allocations: a cache line, so that neighbours do not share one.
const UNIT: u64 = 64;
/// Fewest bytes by which the arena grows.
const GROWTH: u64 = 32 << 20;
/// Staging bytes that work of one stream may hold; beyond them a copy waits for earlier ones on its own stream.
const STAGED_PER_STREAM: u64 = 32 << 20;

/// The arena of the session.
pub(crate) struct Arena {
    reservation: OnceLock<Reservation>,
    /// Bytes of the reservation in use. Locked while the arena grows, which takes the host a while; an allocation that fits into
    /// the present blocks needs only `state`.
    used: Mutex<u64>,
    /// Set when the worker has gathered a new resource: it would gather any later one, too.
    gathers: AtomicBool,
    /// Bytes of staging memory that work still reads, by stream slot.
    staged: Box<[AtomicU64]>,
    state: Mutex<ArenaState>,
}

#[derive(Default)]
struct ArenaState {
    blocks: Vec<ArenaBlock>,
    /// Staging memory that work may still read.
    staged: Vec<Staged>,
    /// Pinned memory of the program by address.
    pinned: BTreeMap<u64, Pinned>,
}

struct ArenaBlock {
    base: u64,
    bytes: u64,
    reach: Reach,
    allocator: Allocator<u32>,
}

struct Staged {
    slot: u32,
    sequence: u64,
    room: Room,
}

/// Pinned host memory of the program.
pub(crate) struct Pinned {
    place: PinnedPlace,
    pub(crate) bytes: u64,
    /// Distinguishes it from an earlier allocation at its address.
    pub(crate) identity: u64,
    /// Flags as given to `cuMemHostAlloc`.
    pub(crate) flags: u32,
    /// Raw id of the context it was allocated in.
    pub(crate) context: u64,
}

impl Pinned {
    /// True if the device reaches it, at its own address.
    pub(crate) const fn is_mapped(&self) -> bool {
        matches!(self.place, PinnedPlace::Arena(_))
    }
}

/// The location of pinned memory.
enum PinnedPlace {
    /// In the arena.
    Arena(Room),
    /// In private memory of this process.
    Private(#[expect(dead_code, reason = "unmaps it when it is dropped")] Mapping),
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
    /// An arena without memory: it shares none until the first allocation.
    pub(crate) fn new() -> Result<Arena> {
        Ok(Arena {
            reservation: OnceLock::new(),
            used: Mutex::default(),
            gathers: AtomicBool::new(false),
            staged: (0..limits::STREAMS).map(|_| AtomicU64::new(0)).collect(),
            state: Mutex::default(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, ArenaState> {
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// The addresses of the arena: 64 GiB at the start of the window bounds, or a smaller or higher range.
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

    /// Allocates `bytes` of shared host memory for copies.
    pub(crate) fn allocate(&self, session: &Session, bytes: u64) -> Result<Room> {
        self.allocate_for(session, bytes, Reach::Gathered)
    }

    /// Allocates shared host memory with at least this reach.
    fn allocate_for(&self, session: &Session, bytes: u64, reach: Reach) -> Result<Room> {
        {
            let mut state = self.lock();
            state.reclaim(session, &self.staged);
            if let Some(room) = state.allocate(bytes, reach) {
                return Ok(room);
            }
        }
        let mut used = self.used.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        // Another thread may have made room while this one waited.
        if let Some(room) = self.lock().allocate(bytes, reach) {
            return Ok(room);
        }
        if reach == Reach::InPlace && self.gathers.load(Ordering::Relaxed) {
            return Err(Arena::refuse_pinned());
        }
        let reservation = self.reservation()?;
        let growth = growth(bytes, *used).ok_or(Error::OUT_OF_MEMORY)?;
        if growth > reservation.bytes() - *used {
            return Err(Error::OUT_OF_MEMORY);
        }
        // A resource is limited, so a large block is stitched from several.
        let base = reservation.base() + *used;
        let (mut attached, mut result, mut reached) = (0, Ok(()), Reach::InPlace);
        while attached < growth && result.is_ok() {
            let part = (growth - attached).min(limits::RESOURCE_BYTES);
            match session.attach(reservation, base + attached, part) {
                Ok(Reach::InPlace) => attached += part,
                Ok(Reach::Gathered) => {
                    attached += part;
                    reached = Reach::Gathered;
                    self.gathers.store(true, Ordering::Relaxed);
                    if reach == Reach::InPlace {
                        result = Err(Arena::refuse_pinned());
                    }
                }
                Err(error) => result = Err(error),
            }
        }
        // The attached part stays even if it is too small: its addresses cannot be used again.
        *used += attached;
        let mut state = self.lock();
        if attached > 0 {
            state.blocks.push(ArenaBlock::new(base, attached, reached)?);
        }
        result?;
        state.allocate(bytes, reach).ok_or(Error::OUT_OF_MEMORY)
    }

    /// The error of a driver that cannot lock pages.
    fn refuse_pinned() -> Error {
        static SAID: Once = Once::new();
        SAID.call_once(|| {
            log::warn(format_args!(
                "no pinned host memory: this machine's memory is made of huge pages or lies in too many pieces, so the \
                 device cannot reach it in place; copies of other memory work"
            ));
        });
        Error::OUT_OF_MEMORY
    }

    /// Frees an allocation that has no user.
    pub(crate) fn free(&self, room: Room) {
        self.lock().free(room);
    }

    /// Allocates staging memory for a copy on a stream, within the bound of one stream: a stream that makes no progress makes only
    /// its own callers wait.
    pub(crate) fn stage(&self, session: &Session, slot: u32, bytes: u64) -> Result<Room> {
        while self.staged[slot as usize].load(Ordering::Relaxed).saturating_add(bytes) > STAGED_PER_STREAM {
            let oldest = {
                let mut state = self.lock();
                state.reclaim(session, &self.staged);
                state.staged.iter().filter(|staged| staged.slot == slot).map(|staged| staged.sequence).min()
            };
            match oldest {
                Some(sequence) => session.wait_complete(slot, sequence)?,
                None => break,
            }
        }
        self.allocate(session, bytes)
    }

    /// Frees staging memory once the stream's work up to `sequence` is complete.
    pub(crate) fn free_after(&self, slot: u32, sequence: u64, room: Room) {
        self.staged[slot as usize].fetch_add(room.bytes, Ordering::Relaxed);
        self.lock().staged.push(Staged { slot, sequence, room });
    }

    /// Allocates pinned memory for the program.
    pub(crate) fn pin(&self, session: &Session, context: u64, bytes: u64, flags: u32) -> Result<u64> {
        if bytes == 0 {
            return Err(Error::INVALID_VALUE);
        }
        let (address, place) = if session.gathers() {
            let whole = bytes.checked_next_multiple_of(4096).ok_or(Error::OUT_OF_MEMORY)?;
            let pinned: u64 = self.lock().pinned.values().map(|pinned| pinned.bytes).sum();
            // Bounded like shared memory: private memory is not locked, so it has no other bound.
            if whole > limits::SESSION_BYTES.saturating_sub(pinned) {
                return Err(Error::OUT_OF_MEMORY);
            }
            let memory = Mapping::private(0, whole).map_err(|_| Error::OUT_OF_MEMORY)?;
            (memory.base(), PinnedPlace::Private(memory))
        } else {
            let room = self.allocate_for(session, bytes, Reach::InPlace)?;
            (room.address, PinnedPlace::Arena(room))
        };
        let identity = crate::state::memory::device_map::identity();
        self.lock().pinned.insert(address, Pinned { place, bytes, identity, flags, context });
        Ok(address)
    }

    /// Frees pinned memory when no work uses it.
    pub(crate) fn unpin(&self, session: &Session, streams: &Streams, address: u64) -> Result {
        // Removed first, so that it is freed once, even if several threads try.
        let pinned = self.lock().pinned.remove(&address).ok_or(Error::INVALID_VALUE)?;
        streams.wait_all(session)?;
        self.lock().free_place(pinned.place);
        Ok(())
    }

    /// Frees the pinned memory of a context that is gone.
    pub(crate) fn forget_context(&self, context: u64) {
        let mut state = self.lock();
        let gone: Vec<u64> =
            state.pinned.iter().filter(|(_, pinned)| pinned.context == context).map(|(at, _)| *at).collect();
        for address in gone {
            if let Some(pinned) = state.pinned.remove(&address) {
                state.free_place(pinned.place);
            }
        }
    }

    /// The result of `look` for the pinned allocation that contains an address.
    pub(crate) fn pinned<R>(&self, address: u64, look: impl FnOnce(u64, &Pinned) -> R) -> Option<R> {
        let state = self.lock();
        let (start, pinned) = state.pinned.range(..=address).next_back()?;
        (address - start < pinned.bytes).then(|| look(*start, pinned))
    }

    /// True if `bytes` from `address` are pinned memory of one allocation that the worker reaches in place.
    pub(crate) fn is_pinned(&self, address: u64, bytes: u64) -> bool {
        // Cheap and without the lock for addresses outside the arena.
        let Some(reservation) = self.reservation.get() else { return false };
        address.wrapping_sub(reservation.base()) < reservation.bytes()
            && self.pinned(address, |start, pinned| bytes <= pinned.bytes - (address - start)) == Some(true)
    }
}

/// Bytes by which the arena grows for an allocation: a fraction of its present size, so that the few resources of a session
/// suffice for all its memory; and a size that is a class of the allocator (a power of two and eighths of it),
/// or the allocator would not find the block for an allocation that fills it.
fn growth(bytes: u64, used: u64) -> Option<u64> {
    let wanted = bytes.max(1).max((used / 8).min(limits::RESOURCE_BYTES));
    let class = (1 << wanted.ilog2()) / 8;
    wanted.checked_next_multiple_of(class.max(GROWTH))
}

impl ArenaBlock {
    fn new(base: u64, bytes: u64, reach: Reach) -> Result<ArenaBlock> {
        let units = u32::try_from(bytes / UNIT).map_err(|_| Error::OUT_OF_MEMORY)?;
        Ok(ArenaBlock { base, bytes, reach, allocator: Allocator::with_max_allocs(units, 64 << 10) })
    }
}

impl ArenaState {
    fn allocate(&mut self, bytes: u64, reach: Reach) -> Option<Room> {
        let units = u32::try_from(bytes.div_ceil(UNIT).max(1)).ok()?;
        self.blocks.iter_mut().enumerate().find_map(|(block, of)| {
            if bytes > of.bytes || (reach == Reach::InPlace && of.reach != reach) {
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

    fn free_place(&mut self, place: PinnedPlace) {
        match place {
            PinnedPlace::Arena(room) => self.free(room),
            PinnedPlace::Private(_) => {}
        }
    }

    /// Frees the staging memory whose readers are complete.
    fn reclaim(&mut self, session: &Session, held: &[AtomicU64]) {
        let mut index = 0;
        while index < self.staged.len() {
            let staged = &self.staged[index];
            if !session.is_complete(staged.slot, staged.sequence) {
                index += 1;
                continue;
            }
            let staged = self.staged.swap_remove(index);
            held[staged.slot as usize].fetch_sub(staged.room.bytes, Ordering::Relaxed);
            self.free(staged.room);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn block_holds_the_allocation_for_which_the_arena_grew() {
        for bytes in
            [1, 4096, GROWTH, GROWTH + 1, 544 << 20, 600 << 20, 700 << 20, (1 << 30) + 1, 3 << 30, 47 << 30]
        {
            let growth = growth(bytes, 0).unwrap();
            let mut block = ArenaBlock::new(0, growth, Reach::InPlace).unwrap();
            let units = u32::try_from(bytes.div_ceil(UNIT)).unwrap();
            assert!(block.allocator.allocate(units).is_some(), "{bytes} in {growth}");
        }
        assert_eq!(growth(u64::MAX, 0), None);
    }

    #[test]
    fn resources_of_a_session_suffice_for_its_memory() {
        let (mut used, mut resources) = (0, 1);
        while used < limits::SESSION_BYTES {
            let growth = growth(4096, used).unwrap();
            used += growth;
            resources += growth.div_ceil(limits::RESOURCE_BYTES);
        }
        assert!(resources < u64::from(limits::ATTACHMENTS), "{resources}");
    }
}
