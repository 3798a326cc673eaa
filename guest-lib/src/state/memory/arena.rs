//! Host memory shared with the worker at equal addresses: pinned memory of the program, and staging for everything else. In one file: both
//! are cut from the same arenas.
//!
//! The arena grows by resources laid side by side into one reservation; allocations never move. Staging memory is freed when
//! the work that reads it is complete, which its stream's sequence shows.
//!
//! A VM may have fixed arenas: then the session comes with one, which never grows. A quarter of it is for staging, so that a program
//! that pins all the rest can still copy; a copy that finds no staging memory waits for its turn in its stream and goes through the
//! reserve, one at a time. So it waits for no other stream.
//!
//! If the worker cannot map guest pages side by side (huge pages, or too many pieces) it gathers them, and if no memory is
//! shared, a stream carries their content to it. Such memory serves for staging, but the device does not reach it. A
//! session that has only such memory from its beginning reports that its devices reach no host memory; memory that a program
//! then pins is private memory of the process, copied through staging like any other, and has no address on the device. If the
//! worker begins to gather later, when the program may already have received another answer, there is no pinned memory.

use crate::{
    error::{Error, Result},
    log,
    session::{FixedArena, Reach, Session},
    state::{
        memory::{
            registered::{Registered, RegisteredRange},
            windows,
        },
        streams::Streams,
    },
};
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use offset_allocator::{Allocation, Allocator};
use sluice_protocol::limits;
use sluice_shared_memory::{Mapping, Reservation};
use std::{
    collections::{BTreeMap, VecDeque},
    sync::{Mutex, MutexGuard, Once, OnceLock},
};

/// Unit of allocations: the alignment of pinned memory natively. Programs rely on it: XLA ends if its memory is not aligned to 256 bytes.
const UNIT: u64 = 512;
/// Fewest bytes by which the arena grows.
const GROWTH: u64 = 32 << 20;
/// Staging bytes that work of one stream may hold; beyond them a copy waits for earlier ones on its own stream.
const STAGED_PER_STREAM: u64 = 32 << 20;
/// Pieces of staging memory that an allocation looks at: more than it adds, so that their number stays bounded.
const LOOKS: usize = 4;

/// Bytes of one portion of a staged copy: small enough to stay in a cache while it is staged and fetched.
pub(crate) const PORTION: u64 = 1 << 20;
/// A fixed arena has this fraction of it for staging, the reserve included.
const STAGING: u64 = 4;

const _: () =
    assert!(*limits::FIXED_ARENAS.start() / STAGING >= 4 * PORTION, "room for copies beside the reserve");

/// The arena of the session.
pub(crate) struct Arena {
    reservation: OnceLock<Reservation>,
    /// Set if the arena cannot grow.
    fixed: Option<Fixed>,
    /// Bytes of the reservation in use. Locked while the arena grows, which takes the host a while; an allocation that fits into
    /// the present blocks needs only `state`.
    used: Mutex<u64>,
    /// Set when the worker has gathered a new resource: it would gather any later one, too.
    gathers: AtomicBool,
    /// Bytes of staging memory that work still reads, by stream slot.
    staged: Box<[AtomicU64]>,
    state: Mutex<ArenaState>,
    /// Memory of the program that it registered.
    pub(crate) registered: Registered,
}

#[derive(Default)]
struct ArenaState {
    blocks: Vec<ArenaBlock>,
    /// Staging memory that work may still read.
    staged: VecDeque<Staged>,
    /// Pinned memory of the program by address on the device; registered memory has another address in the program.
    pinned: BTreeMap<u64, Pinned>,
}

struct ArenaBlock {
    base: u64,
    bytes: u64,
    reach: Reach,
    /// The use for which it gives no memory.
    except: Option<RoomUse>,
    allocator: Allocator<u32>,
}

/// The use of an allocation.
#[derive(Clone, Copy, PartialEq, Eq)]
enum RoomUse {
    /// Staging of work for which the caller may not wait.
    Staging,
    /// Memory that the same call frees.
    Brief,
    /// Pinned memory of the program.
    Pinned,
}

/// The parts of a fixed arena that are no blocks.
struct Fixed {
    /// Staging memory that work of one stream may hold.
    staged_per_stream: u64,
    /// Address of a portion through which copies go one at a time if there is no other staging memory.
    reserve: u64,
    /// Held while a copy uses the reserve.
    turn: Mutex<()>,
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
    /// True if the device reaches it.
    pub(crate) const fn is_mapped(&self) -> bool {
        !matches!(self.place, PinnedPlace::Private(_))
    }

    /// The address in the program of memory that begins at `start` on the device.
    pub(crate) const fn in_program(&self, start: u64) -> u64 {
        match self.place {
            PinnedPlace::Registered(pointer) => pointer,
            _ => start,
        }
    }
}

/// The location of pinned memory.
enum PinnedPlace {
    /// In the arena.
    Arena(Room),
    /// At this address of the program, which registered it.
    Registered(u64),
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
    /// The fixed arena of the session, or one that grows and shares no memory until the first allocation.
    pub(crate) fn new(fixed: Option<FixedArena>) -> Result<Arena> {
        let mut arena = Arena {
            reservation: OnceLock::new(),
            fixed: None,
            used: Mutex::default(),
            gathers: AtomicBool::new(false),
            staged: (0..limits::STREAMS).map(|_| AtomicU64::new(0)).collect(),
            state: Mutex::default(),
            registered: Registered::default(),
        };
        if let Some(FixedArena { reservation, bytes, reach }) = fixed {
            arena.set_fixed(reservation.base(), bytes, reach)?;
            arena.reservation = OnceLock::from(reservation);
        }
        Ok(arena)
    }

    /// Divides a fixed arena: the reserve, the block for staging, the block for pinned memory.
    fn set_fixed(&mut self, base: u64, bytes: u64, reach: Reach) -> Result {
        let (staging, pinned) = (base + PORTION, base + bytes / STAGING);
        let mut state = self.lock();
        let block = ArenaBlock::new(staging, pinned - staging, reach)?;
        state.blocks.push(ArenaBlock { except: Some(RoomUse::Pinned), ..block });
        let block = ArenaBlock::new(pinned, base + bytes - pinned, reach)?;
        state.blocks.push(ArenaBlock { except: Some(RoomUse::Staging), ..block });
        drop(state);
        let staged_per_stream = ((pinned - staging) / 2).min(STAGED_PER_STREAM);
        self.fixed = Some(Fixed { staged_per_stream, reserve: base, turn: Mutex::default() });
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, ArenaState> {
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// The addresses of the arena.
    fn reservation(&self) -> Result<&Reservation> {
        if let Some(reservation) = self.reservation.get() {
            return Ok(reservation);
        }
        let reservation = windows::reserve()?;
        Ok(self.reservation.get_or_init(|| reservation))
    }

    /// Allocates staging memory that the caller frees itself; `None` if a fixed arena has none left.
    pub(crate) fn allocate(&self, session: &Session, bytes: u64) -> Result<Option<Room>> {
        self.allocate_for(session, bytes, RoomUse::Staging)
    }

    /// Allocates shared host memory; `None` if a fixed arena has none left.
    fn allocate_for(&self, session: &Session, bytes: u64, wanted: RoomUse) -> Result<Option<Room>> {
        {
            let mut state = self.lock();
            state.reclaim_some(|slot, sequence| session.is_published(slot, sequence), &self.staged);
            let mut room = state.allocate(bytes, wanted);
            if room.is_none() {
                state.reclaim(session, &self.staged);
                room = state.allocate(bytes, wanted);
            }
            if room.is_some() || self.fixed.is_some() {
                return Ok(room);
            }
        }
        self.grow_for(session, bytes, wanted).map(Some)
    }

    /// Grows the arena and allocates.
    fn grow_for(&self, session: &Session, bytes: u64, wanted: RoomUse) -> Result<Room> {
        let mut used = self.used.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        // Another thread may have made room while this one waited.
        if let Some(room) = self.lock().allocate(bytes, wanted) {
            return Ok(room);
        }
        if wanted == RoomUse::Pinned && self.gathers.load(Ordering::Relaxed) {
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
                Ok((Reach::InPlace, _)) => attached += part,
                Ok((Reach::Gathered, _)) => {
                    attached += part;
                    reached = Reach::Gathered;
                    self.gathers.store(true, Ordering::Relaxed);
                    if wanted == RoomUse::Pinned {
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
        state.allocate(bytes, wanted).ok_or(Error::OUT_OF_MEMORY)
    }

    /// Gives `act` the address of shared memory, until it returns. If a fixed arena has no other memory left this is the reserve, for
    /// which `act` may have to wait; `turn` runs before that, so that `act` then waits only for work that completes by itself.
    pub(crate) fn with_room<R>(
        &self,
        session: &Session,
        bytes: u64,
        turn: impl FnOnce() -> Result,
        act: impl FnOnce(u64) -> Result<R>,
    ) -> Result<R> {
        match self.allocate_for(session, bytes, RoomUse::Brief)? {
            Some(room) => {
                let result = act(room.address);
                // After a failure that ends all work, the worker may still write there.
                if result.is_ok() || session.healthy().is_ok() {
                    self.free(room);
                }
                result
            }
            None => {
                turn()?;
                self.in_reserve(bytes, act)
            }
        }
    }

    /// Gives `act` the address of the reserve, one caller at a time. Its work there must be complete when it returns.
    pub(crate) fn in_reserve<R>(&self, bytes: u64, act: impl FnOnce(u64) -> Result<R>) -> Result<R> {
        match &self.fixed {
            Some(fixed) if bytes <= PORTION => {
                let _turn = fixed.turn.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
                act(fixed.reserve)
            }
            _ => {
                log::warn(format_args!(
                    "{bytes} bytes do not fit into the free part of this process's fixed arena"
                ));
                Err(Error::OUT_OF_MEMORY)
            }
        }
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
    /// its own callers wait. `None` if a fixed arena has none left.
    pub(crate) fn stage(&self, session: &Session, slot: u32, bytes: u64) -> Result<Option<Room>> {
        let most = self.fixed.as_ref().map_or(STAGED_PER_STREAM, |fixed| fixed.staged_per_stream);
        while self.staged[slot as usize].load(Ordering::Relaxed).saturating_add(bytes) > most {
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
    pub(crate) fn free_after(&self, session: &Session, slot: u32, sequence: u64, room: Room) {
        let bytes = room.bytes;
        let before = self.staged[slot as usize].fetch_add(bytes, Ordering::Relaxed);
        self.lock().staged.push_back(Staged { slot, sequence, room });
        // The worker publishes the ends of many short copies together. Memory that is used again soon is still in a cache.
        if before / PORTION != (before + bytes) / PORTION {
            let _ = session.is_complete(slot, sequence);
        }
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
            let room = self.allocate_for(session, bytes, RoomUse::Pinned)?.ok_or(Error::OUT_OF_MEMORY)?;
            (room.address, PinnedPlace::Arena(room))
        };
        let identity = crate::state::memory::device_map::identity();
        self.lock().pinned.insert(address, Pinned { place, bytes, identity, flags, context });
        Ok(address)
    }

    /// Frees pinned memory when no work uses it.
    pub(crate) fn unpin(&self, session: &Session, streams: &Streams, address: u64) -> Result {
        // Removed first, so that it is freed once, even if several threads try.
        let pinned = {
            let mut state = self.lock();
            match state.pinned.get(&address) {
                None | Some(Pinned { place: PinnedPlace::Registered(_), .. }) => None,
                Some(_) => state.pinned.remove(&address),
            }
        };
        let pinned = pinned.ok_or(Error::INVALID_VALUE)?;
        streams.wait_all(session)?;
        self.lock().free_place(pinned.place);
        Ok(())
    }

    /// Pins memory that the program already has.
    pub(crate) fn register(
        &self,
        session: &Session,
        context: u64,
        address: u64,
        bytes: u64,
        flags: u32,
    ) -> Result {
        let RegisteredRange { device, .. } = self.registered.register(session, context, address, bytes)?;
        let identity = crate::state::memory::device_map::identity();
        let place = PinnedPlace::Registered(address);
        self.lock().pinned.insert(device, Pinned { place, bytes, identity, flags, context });
        Ok(())
    }

    /// Unpins memory that the program registered, when no work uses it.
    pub(crate) fn unregister(&self, session: &Session, streams: &Streams, address: u64) -> Result {
        self.registered.unregister(session, address, |range| {
            self.lock().pinned.remove(&range.device);
            streams.wait_all(session)
        })
    }

    /// The address by which devices and records name host memory: for `bytes` of registered memory it is another one than the program's.
    pub(crate) fn on_device(&self, address: u64, bytes: u64) -> u64 {
        match self.registered.find(address) {
            Some(range) if bytes <= range.bytes - (address - range.pointer) => {
                range.device + (address - range.pointer)
            }
            _ => address,
        }
    }

    /// Frees the pinned memory of a context that is gone.
    pub(crate) fn forget_context(&self, session: &Session, streams: &Streams, context: u64) {
        for pointer in self.registered.of_context(context) {
            if let Err(error) = self.unregister(session, streams, pointer) {
                log::warn(format_args!(
                    "registered memory of a context that is gone stays pinned: {error:?}"
                ));
            }
        }
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
        let arena = self.reservation.get();
        let inside = arena.is_some_and(|arena| address.wrapping_sub(arena.base()) < arena.bytes());
        (inside || self.registered.has_device_address(address))
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
        Ok(ArenaBlock {
            base,
            bytes,
            reach,
            except: None,
            allocator: Allocator::with_max_allocs(units, 64 << 10),
        })
    }
}

impl ArenaState {
    fn allocate(&mut self, bytes: u64, wanted: RoomUse) -> Option<Room> {
        let units = u32::try_from(bytes.div_ceil(UNIT).max(1)).ok()?;
        self.blocks.iter_mut().enumerate().find_map(|(block, of)| {
            let reached = wanted != RoomUse::Pinned || of.reach == Reach::InPlace;
            if bytes > of.bytes || !reached || of.except == Some(wanted) {
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
            PinnedPlace::Private(_) | PinnedPlace::Registered(_) => {}
        }
    }

    /// Frees all staging memory whose readers are complete, and has the worker publish the ends of the others.
    fn reclaim(&mut self, session: &Session, held: &[AtomicU64]) {
        // The last piece of a stream comes first: a request for its end covers the earlier ones.
        self.staged.make_contiguous().sort_unstable_by_key(|staged| staged.sequence);
        for _ in 0..self.staged.len() {
            let Some(staged) = self.staged.pop_back() else { break };
            if session.is_complete(staged.slot, staged.sequence) {
                self.free_staged(staged, held);
            } else {
                self.staged.push_front(staged);
            }
        }
    }

    /// Frees the pieces of staging memory whose turn it is, if their readers are known to be complete. The turn of one that is kept
    /// comes again after all others, so a stream that makes no progress keeps only its own pieces.
    fn reclaim_some(&mut self, is_complete: impl Fn(u32, u64) -> bool, held: &[AtomicU64]) {
        for _ in 0..LOOKS.min(self.staged.len()) {
            let Some(staged) = self.staged.pop_front() else { break };
            if is_complete(staged.slot, staged.sequence) {
                self.free_staged(staged, held);
            } else {
                self.staged.push_back(staged);
            }
        }
    }

    fn free_staged(&mut self, staged: Staged, held: &[AtomicU64]) {
        held[staged.slot as usize].fetch_sub(staged.room.bytes, Ordering::Relaxed);
        self.free(staged.room);
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

    // Promise: C130
    #[test]
    fn pinned_memory_of_odd_sizes_is_aligned_as_natively() {
        let arena = fixed(*limits::FIXED_ARENAS.start());
        let mut state = arena.lock();
        for bytes in [1, 100, 511, 513, 4097, 3] {
            let room = state.allocate(bytes, RoomUse::Pinned).unwrap();
            assert_eq!(room.address() % 512, 0, "{bytes} bytes");
        }
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

    fn fixed(bytes: u64) -> Arena {
        let mut arena = Arena::new(None).unwrap();
        arena.set_fixed(0x1000_0000, bytes, Reach::InPlace).unwrap();
        arena
    }

    #[test]
    fn stream_without_progress_keeps_only_its_own_staging_memory() {
        let arena = fixed(*limits::FIXED_ARENAS.start());
        let mut state = arena.lock();
        let stage = |state: &mut ArenaState, slot: u32| {
            let room = state.allocate(UNIT, RoomUse::Staging).unwrap();
            arena.staged[slot as usize].fetch_add(UNIT, Ordering::Relaxed);
            state.staged.push_back(Staged { slot, sequence: 1, room });
        };
        (0..100).for_each(|_| stage(&mut state, 1));
        let mut most = 0;
        for _ in 0..1000 {
            state.reclaim_some(|slot, _| slot != 1, &arena.staged);
            stage(&mut state, 2);
            most = most.max(arena.staged[2].load(Ordering::Relaxed) / UNIT);
        }
        assert_eq!(arena.staged[1].load(Ordering::Relaxed), 100 * UNIT);
        assert!(most <= 100 / (LOOKS as u64 - 1) + 1, "{most} pieces of the other stream");
        state.reclaim_some(|_, _| true, &arena.staged);
        assert_eq!(
            state.staged.len() as u64 * UNIT,
            arena.staged.iter().map(|held| held.load(Ordering::Relaxed)).sum::<u64>()
        );
    }

    // Promise: C53
    #[test]
    fn fixed_arena_keeps_staging_memory_apart_from_pinned_memory() {
        let arena = fixed(*limits::FIXED_ARENAS.start());
        let mut state = arena.lock();
        let mut rooms = Vec::new();
        while let Some(room) = state.allocate(PORTION, RoomUse::Pinned) {
            rooms.push(room);
        }
        assert_eq!(rooms.len(), 12, "three quarters of 16 MiB");
        let mut staged = 0;
        while state.allocate(PORTION, RoomUse::Staging).is_some() {
            staged += 1;
        }
        assert_eq!(staged, 3, "a quarter, less the reserve");
        assert!(state.allocate(64, RoomUse::Brief).is_none());
        // Memory of one call may be that of the program, as long as the program does not need it.
        let last = rooms.pop().unwrap();
        state.free(last);
        let brief = state.allocate(PORTION, RoomUse::Brief).unwrap();
        assert!(
            state.allocate(PORTION, RoomUse::Staging).is_none()
                && state.allocate(64, RoomUse::Pinned).is_none()
        );
        state.free(brief);
        assert!(state.allocate(PORTION, RoomUse::Pinned).is_some());
        drop(state);
        // The reserve is left in any case, for one portion.
        assert_eq!(arena.in_reserve(PORTION, Ok), Ok(0x1000_0000));
        assert_eq!(arena.in_reserve(PORTION + 1, Ok), Err(Error::OUT_OF_MEMORY));
        assert!(rooms.iter().all(|room| room.address >= 0x1000_0000 + PORTION));
    }
}
