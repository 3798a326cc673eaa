//! Events that several processes of the system share: the places of their words in device memory.
//!
//! The words of an event are the number of its latest recording, and slots. The number names a slot, which gets the number when the
//! recording is reached. No two recordings that are not reached have the same slot, so recordings may be reached in any order. The
//! functions of events make, read and write the words; this file keeps the memory in which they lie: chunks of this process, and chunks
//! of others that are open here.
//!
//! A slot has two more words, by which a recording takes it for itself alone, although processes can only read and write: the
//! recording writes an id of its own to the first, goes elsewhere if the second is set, sets it, and has the slot if the first
//! still holds its id. Of several that try at once at most one has it; if none does, the slot stays unused. The stream that reaches
//! the recording clears the second word. Each process uses the same slot again while it can, so attempts seldom meet.

use crate::error::{Error, Result};
use core::sync::atomic::{AtomicU64, Ordering};
use std::{
    collections::{BTreeMap, hash_map::RandomState},
    hash::{BuildHasher as _, Hasher as _},
    sync::{Arc, Mutex, MutexGuard},
};

/// Words that tell if an event is reached: the number of the latest recording, and one of each slot.
pub(crate) const WORDS: usize = 512;
/// All words of one event.
pub(crate) const ALL_WORDS: usize = 3 * WORDS;
/// Bytes of one event.
pub(crate) const BYTES: u64 = 8 * ALL_WORDS as u64;
/// Bytes of a chunk: what the host shares as a whole. No other memory of the process lies in it.
pub(crate) const CHUNK_BYTES: u64 = 2 << 20;
/// Events of one chunk.
const EVENTS: usize = (CHUNK_BYTES / BYTES) as usize;

/// The slot of a recording, whatever another process has written there.
#[expect(clippy::cast_possible_truncation, reason = "a remainder of the number of words")]
pub(crate) const fn slot_of(number: u64) -> usize {
    (number % WORDS as u64) as usize
}

/// The words of an event: [`WORDS`] or [`ALL_WORDS`].
pub(crate) struct EventWords<const N: usize>(pub(crate) [u64; N]);

impl<const N: usize> EventWords<N> {
    /// The number of the latest recording; 0 before the first.
    pub(crate) const fn latest(&self) -> u64 {
        self.0[0]
    }

    /// True if a recording is reached.
    pub(crate) const fn reached(&self, number: u64) -> bool {
        number == 0 || self.0[slot_of(number)].wrapping_sub(number).cast_signed() >= 0
    }

    /// True if the latest recording is reached.
    pub(crate) const fn is_reached(&self) -> bool {
        self.reached(self.latest())
    }
}

impl EventWords<ALL_WORDS> {
    /// A slot that no recording has, the first one from `from`.
    fn free_slot(&self, from: usize) -> Option<usize> {
        (from..WORDS).chain(1..from).find(|slot| self.0[taken_at(*slot)] == 0)
    }

    /// The number of the next recording, in a slot: greater than the latest and than all earlier ones of the slot.
    const fn next(&self, slot: usize) -> u64 {
        let words = WORDS as u64;
        let (latest, earlier) = (self.latest() / words, self.0[slot] / words);
        let last = if latest > earlier { latest } else { earlier };
        last.wrapping_add(1).wrapping_mul(words) | slot as u64
    }
}

/// Index of the word with the id of the recording that tried last to take a slot.
const fn id_at(slot: usize) -> usize {
    WORDS + slot
}

/// Index of the word that is not 0 while a recording has the slot.
pub(crate) const fn taken_at(slot: usize) -> usize {
    2 * WORDS + slot
}

/// A place that depends on all bits of an id.
const fn elsewhere(id: u64) -> u64 {
    // The golden ratio, as in Fibonacci hashing.
    id.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32
}

/// Takes a slot for a recording and returns its number; none if all are taken. `id` is of this attempt only, and `access` writes a word
/// and reads all of them afterwards.
pub(crate) fn take_slot(
    from: usize,
    id: u64,
    mut access: impl FnMut(usize, u64) -> Result<EventWords<ALL_WORDS>>,
) -> Result<Option<u64>> {
    let mut candidate = Some(from.clamp(1, WORDS - 1));
    // An attempt that others disturb leaves its slot, so there are hardly ever more than a few.
    for attempt in 0..2 * WORDS as u64 {
        let Some(slot) = candidate else { return Ok(None) };
        let mut words = access(id_at(slot), id)?;
        if words.0[taken_at(slot)] == 0 {
            words = access(taken_at(slot), 1)?;
            if words.0[id_at(slot)] == id {
                return Ok(Some(words.next(slot)));
            }
        }
        // Somewhere else than the others.
        candidate = words.free_slot(slot_of(elsewhere(id.wrapping_add(attempt))).max(1));
    }
    Ok(None)
}

/// An event that is shared.
pub(crate) struct SharedEvent {
    /// Raw id of the context of its memory.
    pub(crate) context: u64,
    /// Address of its words.
    pub(crate) words: u64,
    chunk: u64,
    /// Locked while a recording of this process begins.
    pub(crate) recordings: Mutex<Recordings>,
}

/// The recordings of an event by this process.
pub(crate) struct Recordings {
    /// The slot that the next one tries first.
    pub(crate) next: usize,
    /// Stream slots and sequences of those that may not be reached.
    pub(crate) under_way: Vec<(u32, u64)>,
}

/// A place for the words of an event.
enum EventPlace {
    Used,
    /// Slots and sequences of the work that may still use the words of the last event.
    Free(Vec<(u32, u64)>),
}

/// A chunk with words of events.
struct EventChunk {
    context: u64,
    start: u64,
    /// Its share, and its offset there.
    share: u128,
    offset: u64,
    /// The places of a chunk of this process.
    places: Option<Box<[EventPlace; EVENTS]>>,
    /// Events of another process's chunk that are open here.
    open: usize,
    /// When the last one was closed: slots and sequences of the work that may use it.
    until: Vec<(u32, u64)>,
}

/// A chunk's name for other processes.
#[derive(Clone, Copy)]
pub(crate) struct ChunkName {
    pub(crate) share: u128,
    pub(crate) offset: u64,
}

#[derive(Default)]
struct SharedEventsState {
    /// By raw id of the event.
    events: BTreeMap<u64, Arc<SharedEvent>>,
    chunks: Vec<EventChunk>,
    /// Raw ids of the streams in which words are read and written, by context.
    notes: BTreeMap<u64, u64>,
}

/// The shared events of the session.
pub(crate) struct SharedEvents {
    state: Mutex<SharedEventsState>,
    /// The id of the next recording; those of other processes begin elsewhere.
    next_id: AtomicU64,
    /// Locked while an event of this process is shared, which happens once.
    pub(crate) sharing: Mutex<()>,
}

impl Default for SharedEvents {
    fn default() -> SharedEvents {
        SharedEvents {
            state: Mutex::default(),
            next_id: AtomicU64::new(RandomState::new().build_hasher().finish()),
            sharing: Mutex::default(),
        }
    }
}

impl SharedEvents {
    /// An id that no other recording of any process has.
    pub(crate) fn id(&self) -> u64 {
        self.next_id.fetch_add(1, Ordering::Relaxed)
    }

    fn event(&self, context: u64, chunk: u64, place: u64) -> Arc<SharedEvent> {
        let words = chunk + place * BYTES;
        let recordings = Recordings { next: slot_of(self.id()).max(1), under_way: Vec::new() };
        Arc::new(SharedEvent { context, words, chunk, recordings: Mutex::new(recordings) })
    }

    fn lock(&self) -> MutexGuard<'_, SharedEventsState> {
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// A shared event, by raw id.
    pub(crate) fn get(&self, event: u64) -> Option<Arc<SharedEvent>> {
        self.lock().events.get(&event).cloned()
    }

    /// The stream for words in a context, created by `create` at first use.
    pub(crate) fn notes(&self, context: u64, create: impl FnOnce() -> Result<u64>) -> Result<u64> {
        let mut state = self.lock();
        if let Some(stream) = state.notes.get(&context) {
            return Ok(*stream);
        }
        let stream = create()?;
        state.notes.insert(context, stream);
        Ok(stream)
    }

    /// Finds a place for the words of an event of this process, one that no work uses any more. `allocate` returns a new chunk and its
    /// name. Returns the event, which is not shared yet, the chunk's name and the number of the place in it.
    pub(crate) fn place(
        &self,
        context: u64,
        is_complete: impl Fn(u32, u64) -> bool,
        allocate: impl FnOnce() -> Result<(u64, ChunkName)>,
    ) -> Result<(Arc<SharedEvent>, ChunkName, u64)> {
        let mut state = self.lock();
        let is_free = |place: &EventPlace| match place {
            EventPlace::Used => false,
            EventPlace::Free(until) => until.iter().all(|(slot, sequence)| is_complete(*slot, *sequence)),
        };
        let free = |chunk: &EventChunk| Some((chunk.start, chunk.places.as_ref()?.iter().position(is_free)?));
        let known = state.chunks.iter().filter(|chunk| chunk.context == context).find_map(free);
        let (start, place) = match known {
            Some(found) => found,
            None => {
                let (start, ChunkName { share, offset }) = allocate()?;
                let places = Some(Box::new([const { EventPlace::Free(Vec::new()) }; EVENTS]));
                state.chunks.push(EventChunk {
                    context,
                    start,
                    share,
                    offset,
                    places,
                    open: 0,
                    until: Vec::new(),
                });
                (start, 0)
            }
        };
        let chunk = state.chunks.iter_mut().find(|chunk| chunk.start == start).ok_or(Error::UNKNOWN)?;
        if let Some(places) = &mut chunk.places {
            places[place] = EventPlace::Used;
        }
        let name = ChunkName { share: chunk.share, offset: chunk.offset };
        Ok((self.event(context, start, place as u64), name, place as u64))
    }

    /// Opens the words of an event of another process. `open` maps its chunk.
    pub(crate) fn open(
        &self,
        context: u64,
        name: ChunkName,
        place: u64,
        open: impl FnOnce() -> Result<u64>,
    ) -> Result<Arc<SharedEvent>> {
        if place >= EVENTS as u64 {
            return Err(Error::INVALID_VALUE);
        }
        let mut state = self.lock();
        let ChunkName { share, offset } = name;
        let is_it = |chunk: &&mut EventChunk| {
            chunk.places.is_none() && (chunk.context, chunk.share, chunk.offset) == (context, share, offset)
        };
        let start = match state.chunks.iter_mut().find(is_it) {
            Some(chunk) => {
                chunk.open += 1;
                chunk.until.clear();
                chunk.start
            }
            None => {
                let start = open()?;
                let places = None;
                state.chunks.push(EventChunk {
                    context,
                    start,
                    share,
                    offset,
                    places,
                    open: 1,
                    until: Vec::new(),
                });
                start
            }
        };
        Ok(self.event(context, start, place))
    }

    /// The name of an own event's chunk, and its place there; none for an event of another process.
    pub(crate) fn name_of(&self, event: &SharedEvent) -> Option<(ChunkName, u64)> {
        let state = self.lock();
        let chunk = state.chunks.iter().find(|chunk| chunk.start == event.chunk && chunk.places.is_some())?;
        let name = ChunkName { share: chunk.share, offset: chunk.offset };
        Some((name, (event.words - event.chunk) / BYTES))
    }

    /// Shares an event: from now on it is the one with these words.
    pub(crate) fn insert(&self, raw: u64, event: Arc<SharedEvent>) {
        self.lock().events.insert(raw, event);
    }

    /// Gives a place back, of an event that `remove` returned or that was never inserted. `posted` is all work that may use it.
    pub(crate) fn give(&self, event: &SharedEvent, posted: impl FnOnce() -> Vec<(u32, u64)>) {
        let mut state = self.lock();
        let Some(chunk) = state.chunks.iter_mut().find(|chunk| chunk.start == event.chunk) else { return };
        match &mut chunk.places {
            Some(places) => {
                let index = usize::try_from((event.words - event.chunk) / BYTES).unwrap_or(0);
                if let Some(place) = places.get_mut(index) {
                    *place = EventPlace::Free(posted());
                }
            }
            None => {
                chunk.open = chunk.open.saturating_sub(1);
                if chunk.open == 0 {
                    chunk.until = posted();
                }
            }
        }
    }

    /// Ends the sharing of an event that is destroyed.
    pub(crate) fn remove(&self, raw: u64) -> Option<Arc<SharedEvent>> {
        self.lock().events.remove(&raw)
    }

    /// Takes the chunks of other processes that nothing uses any more: contexts and addresses.
    pub(crate) fn take_unused(&self, is_complete: impl Fn(u32, u64) -> bool) -> Vec<(u64, u64)> {
        let mut state = self.lock();
        let is_unused = |chunk: &mut EventChunk| {
            let done = chunk.until.iter().all(|(slot, sequence)| is_complete(*slot, *sequence));
            chunk.places.is_none() && chunk.open == 0 && done
        };
        state.chunks.extract_if(.., is_unused).map(|chunk| (chunk.context, chunk.start)).collect()
    }

    /// Forgets a context that has ended with its memory, streams and events.
    pub(crate) fn forget_context(&self, context: u64) {
        let mut state = self.lock();
        state.events.retain(|_, event| event.context != context);
        state.chunks.retain(|chunk| chunk.context != context);
        state.notes.remove(&context);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Promise: C94
    #[test]
    fn recording_is_reached_when_its_own_slot_has_its_number() {
        let mut words = EventWords([0; ALL_WORDS]);
        assert!(words.is_reached(), "never recorded");
        let first = words.next(5);
        words.0[0] = first;
        assert!(!words.is_reached());
        let second = words.next(7);
        assert!(second > first && slot_of(second) == 7);
        words.0[0] = second;
        words.0[5] = first;
        assert!(!words.is_reached(), "another one is");
        words.0[7] = second;
        assert!(words.is_reached());
        // The latest number may be that of a recording that began before others.
        words.0[0] = first;
        assert!(words.next(7) > second, "a slot's numbers grow");
        // A process may write anything.
        words.0 = [u64::MAX; ALL_WORDS];
        assert!(words.is_reached());
        assert!(slot_of(words.next(511)) < WORDS);
    }

    // Promise: C94
    #[test]
    fn slot_of_a_recording_that_is_not_reached_is_taken_by_no_other() {
        let mut words = [0; ALL_WORDS];
        let mut take = |from, id| {
            let access = |at: usize, value| {
                words[at] = value;
                Ok(EventWords(words))
            };
            let number = take_slot(from, id, access).unwrap();
            number.inspect(|number| words[0] = *number)
        };
        let mut slots: Vec<_> = (1..WORDS as u64).map(|id| slot_of(take(509, id).unwrap())).collect();
        slots.sort_unstable();
        assert!(slots.iter().copied().eq(1..WORDS), "each slot once");
        assert_eq!(take(1, 1000), None);
        words[taken_at(77)] = 0;
        let again = take_slot(1, 1001, |at, value| {
            words[at] = value;
            Ok(EventWords(words))
        });
        assert_eq!(slot_of(again.unwrap().unwrap()), 77);
    }

    // Promise: C94
    #[test]
    fn slot_is_taken_by_one_of_several_that_try_at_once() {
        let events = SharedEvents::default();
        let (mut taken, doubly) = (0, AtomicU64::new(0));
        for _ in 0..200 {
            let words: Vec<AtomicU64> = (0..ALL_WORDS).map(|_| AtomicU64::new(0)).collect();
            let owners: Vec<AtomicU64> = (0..WORDS).map(|_| AtomicU64::new(0)).collect();
            let (count, barrier) = (AtomicU64::new(0), std::sync::Barrier::new(3));
            let access = |at: usize, value| {
                words[at].store(value, Ordering::SeqCst);
                std::thread::yield_now();
                let mut read = [0; ALL_WORDS];
                read.iter_mut().zip(&words).for_each(|(to, from)| *to = from.load(Ordering::SeqCst));
                Ok(EventWords(read))
            };
            let act = || {
                barrier.wait();
                for _ in 0..10 {
                    let Some(number) = take_slot(1, events.id(), access).unwrap() else { continue };
                    let slot = slot_of(number);
                    doubly.fetch_add(owners[slot].fetch_add(1, Ordering::SeqCst), Ordering::SeqCst);
                    std::thread::yield_now();
                    owners[slot].fetch_sub(1, Ordering::SeqCst);
                    words[slot].store(number, Ordering::SeqCst);
                    words[taken_at(slot)].store(0, Ordering::SeqCst);
                    count.fetch_add(1, Ordering::SeqCst);
                }
            };
            std::thread::scope(|scope| (0..3).for_each(|_| _ = scope.spawn(act)));
            taken += count.load(Ordering::SeqCst);
        }
        assert_eq!((taken, doubly.load(Ordering::SeqCst)), (200 * 30, 0), "taken, and taken twice");
    }

    // Promise: C94
    #[test]
    fn place_is_used_again_only_after_its_event_and_the_work_with_it_have_ended() {
        let events = SharedEvents::default();
        let name = ChunkName { share: 1, offset: 0 };
        let done = |slot, sequence| (slot, sequence) != (3, 5);
        let place = |start: u64| events.place(9, done, || Ok((start, name))).unwrap();
        let mut all: Vec<_> = (0..EVENTS).map(|_| place(CHUNK_BYTES)).collect();
        let (other, ..) = place(4 * CHUNK_BYTES);
        assert_eq!(other.words, 4 * CHUNK_BYTES);
        let (last, _, number) = all.pop().unwrap();
        events.give(&last, || vec![(3, 4)]);
        let again = place(0);
        assert_eq!((again.0.words, again.2), (last.words, number));
        events.give(&last, || vec![(2, 9), (3, 5)]);
        let (other, ..) = place(0);
        assert_eq!(other.words, 4 * CHUNK_BYTES + BYTES, "work still uses the words");
    }

    // Promise: C94
    #[test]
    fn chunk_of_another_process_goes_when_its_events_are_closed_and_their_work_is_done() {
        let events = SharedEvents::default();
        let name = ChunkName { share: 1, offset: 0 };
        let open = |place| events.open(9, name, place, || Ok(CHUNK_BYTES));
        let [one, two] = [0, 3].map(|place| open(place).unwrap());
        assert_eq!(two.words, CHUNK_BYTES + 3 * BYTES);
        assert!(open(EVENTS as u64).is_err());
        events.give(&one, || vec![(1, 1)]);
        assert!(events.take_unused(|_, _| true).is_empty());
        events.give(&two, || vec![(1, 5)]);
        assert!(events.take_unused(|_, sequence| sequence < 5).is_empty());
        assert_eq!(events.take_unused(|_, _| true), [(9, CHUNK_BYTES)]);
    }
}
