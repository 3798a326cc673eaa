//! Streams: the slot of the session page in which each one counts, and the work posted there.
//!
//! A slot's counters only grow, across the streams that use it one after the other, so a sequence once complete stays complete
//! and nothing has to be reset. A stream that is destroyed leaves its slot at once, but its work belongs to its context until
//! it is complete: the slot keeps the context's id and rests until then.

use crate::{
    error::{Error, Result},
    session::{PostTarget, Session},
    state::thread,
};
use core::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, Ordering};
use sluice_cuda_frontend::stream_attributes::StreamAttributes;
use sluice_protocol::{
    calls::wire,
    field::Mint,
    handle::{GreenContext, Id, Stream as Kind},
    limits,
};
use std::{
    collections::VecDeque,
    sync::{Mutex, MutexGuard},
};

/// `CU_STREAM_NON_BLOCKING`.
pub(crate) const NON_BLOCKING: u32 = 1;

struct StreamSlot {
    posted: AtomicU64,
    /// Generation of the stream in the slot, 0 while there is none. The thread that makes it 0 destroys the stream.
    live: AtomicU32,
    /// Generation of the stream in the slot if it takes part in the waits of its whole context, else 0.
    held_with_context: AtomicU32,
    /// Streams that were in the slot; changed under the lock of the free list.
    generation: AtomicU32,
    /// Raw id of the context of the stream, or of the last one.
    context: AtomicU64,
    /// Raw id of the green context of the stream, or of the last one; 0 for none.
    green: AtomicU64,
    /// Generation of the stream in the slot if it has lost its green context, else 0.
    detached: AtomicU32,
    flags: AtomicU32,
    priority: AtomicI32,
}

/// The streams of the session.
pub(crate) struct Streams {
    slots: Box<[StreamSlot]>,
    /// Number of slots, from the first, that have had a stream: no work was posted to the others.
    used: AtomicU32,
    /// Slots without a stream: those that have had one in front, so that few slots are ever used.
    free: Mutex<VecDeque<u32>>,
    /// The attributes that the program has set, by raw id.
    pub(crate) attributes: StreamAttributes,
}

/// A stream, resolved from a handle.
#[derive(Clone, Copy)]
pub(crate) struct StreamRef<'a> {
    pub(crate) slot: u32,
    /// Raw id of its context.
    pub(crate) context: u64,
    generation: u32,
    entry: &'a StreamSlot,
}

impl<'a> StreamRef<'a> {
    /// The target of posted work, as long as the stream exists.
    pub(crate) fn target(&self) -> PostTarget<'a> {
        let StreamSlot { posted, live, .. } = self.entry;
        let credits = limits::STREAM_CREDITS;
        PostTarget { slot: self.slot, posted, live, generation: self.generation, credits }
    }

    /// False if the stream has ended.
    pub(crate) fn is_live(&self) -> bool {
        self.entry.live.load(Ordering::Acquire) == self.generation
    }

    pub(crate) fn id(&self) -> Id<Kind> {
        Id::new(self.slot, self.generation)
    }

    /// The sequence of the work posted last.
    pub(crate) fn posted(&self) -> u64 {
        self.entry.posted.load(Ordering::Acquire)
    }

    /// Raw id of its green context, 0 for none.
    pub(crate) fn green(&self) -> u64 {
        self.entry.green.load(Ordering::Relaxed)
    }

    pub(crate) fn flags(&self) -> u32 {
        self.entry.flags.load(Ordering::Relaxed)
    }

    pub(crate) fn priority(&self) -> i32 {
        self.entry.priority.load(Ordering::Relaxed)
    }
}

impl Streams {
    pub(crate) fn new() -> Streams {
        let slot = |_| StreamSlot {
            posted: AtomicU64::new(0),
            live: AtomicU32::new(0),
            held_with_context: AtomicU32::new(0),
            generation: AtomicU32::new(0),
            context: AtomicU64::new(0),
            green: AtomicU64::new(0),
            detached: AtomicU32::new(0),
            flags: AtomicU32::new(0),
            priority: AtomicI32::new(0),
        };
        Streams {
            slots: (0..limits::STREAMS).map(slot).collect(),
            used: AtomicU32::new(0),
            free: Mutex::new((0..limits::STREAMS).collect()),
            attributes: StreamAttributes::new(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<u32>> {
        self.free.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Takes a slot for a stream of a context: one in which all work of earlier streams is complete.
    pub(crate) fn take(
        &self,
        session: &Session,
        context: u64,
        flags: u32,
        priority: i32,
    ) -> Result<StreamRef<'_>> {
        self.take_for(session, (context, 0), flags, priority)
    }

    /// The same for a stream of a green context in a context.
    fn take_for(
        &self,
        session: &Session,
        (context, green): (u64, u64),
        flags: u32,
        priority: i32,
    ) -> Result<StreamRef<'_>> {
        let mut free = self.lock();
        let rested = free.iter().position(|slot| {
            session.is_complete(*slot, self.slots[*slot as usize].posted.load(Ordering::Acquire))
        });
        let slot = rested.and_then(|at| free.remove(at)).ok_or(Error::OUT_OF_MEMORY)?;
        self.used.fetch_max(slot + 1, Ordering::Release);
        let entry = &self.slots[slot as usize];
        // The generation of an id has 24 bits and is not 0.
        let generation = (entry.generation.load(Ordering::Relaxed) % 0xff_ffff) + 1;
        entry.generation.store(generation, Ordering::Relaxed);
        entry.flags.store(flags, Ordering::Relaxed);
        entry.priority.store(priority, Ordering::Relaxed);
        entry.context.store(context, Ordering::Relaxed);
        entry.green.store(green, Ordering::Relaxed);
        entry.held_with_context.store(0, Ordering::Relaxed);
        entry.live.store(generation, Ordering::Release);
        Ok(StreamRef { slot, context, generation, entry })
    }

    /// Ends a stream here: from now on no work is posted to it. `false` if another thread did so before.
    fn retire(&self, stream: StreamRef<'_>) -> bool {
        let StreamSlot { live, .. } = stream.entry;
        let ended = live.compare_exchange(stream.generation, 0, Ordering::AcqRel, Ordering::Relaxed).is_ok();
        if ended {
            self.attributes.forget(stream.id().raw());
        }
        ended
    }

    /// Returns the slot of a retired stream; the next stream in it continues the count.
    fn give(&self, slot: u32) {
        self.lock().push_front(slot);
    }

    /// Undoes [`Streams::take`].
    pub(crate) fn put_back(&self, stream: StreamRef<'_>) {
        if self.retire(stream) {
            self.give(stream.slot);
        }
    }

    /// The stream in a slot.
    pub(crate) fn at(&self, slot: u32) -> Result<StreamRef<'_>> {
        let entry = self.slots.get(slot as usize).ok_or(Error::INVALID_HANDLE)?;
        match entry.live.load(Ordering::Acquire) {
            0 => Err(Error::INVALID_HANDLE),
            generation => {
                Ok(StreamRef { slot, context: entry.context.load(Ordering::Relaxed), generation, entry })
            }
        }
    }

    /// The stream of an id.
    pub(crate) fn by_id(&self, raw: u64) -> Result<StreamRef<'_>> {
        let id = Id::<Kind>::from_raw(raw).ok_or(Error::INVALID_HANDLE)?;
        let slot = u32::try_from(id.index()).map_err(|_| Error::INVALID_HANDLE)?;
        if self.is_detached(id) {
            return Err(Error::STREAM_DETACHED);
        }
        let stream = self.at(slot)?;
        if stream.id() == id { Ok(stream) } else { Err(Error::INVALID_HANDLE) }
    }

    /// The calling thread's default stream in a context, created at first use; `enter` is called for a new one.
    pub(crate) fn of_thread(
        &self,
        session: &Session,
        context: u64,
        enter: impl FnOnce(StreamRef<'_>) -> Result,
    ) -> Result<StreamRef<'_>> {
        if let Some(stream) = thread::default_stream(context).and_then(|id| self.by_id(id).ok()) {
            return Ok(stream);
        }
        let stream = self.create(session, context, 0, 0)?;
        enter(stream)?;
        thread::set_default_stream(context, stream.id().raw());
        Ok(stream)
    }

    /// Creates a stream of the program in a context.
    pub(crate) fn create(
        &self,
        session: &Session,
        context: u64,
        flags: u32,
        priority: i32,
    ) -> Result<StreamRef<'_>> {
        self.create_apart(session, context, flags, priority).inspect(|stream| self.hold_with_context(*stream))
    }

    /// Lets a stream that the worker knows take part in the waits of its whole context.
    pub(crate) fn hold_with_context(&self, stream: StreamRef<'_>) {
        stream.entry.held_with_context.store(stream.generation, Ordering::Release);
    }

    /// Creates a stream of this library in a context: one that waits of the whole context do not hold. The id is ours; the answer is an
    /// error if the driver had no room for the stream.
    pub(crate) fn create_apart(
        &self,
        session: &Session,
        context: u64,
        flags: u32,
        priority: i32,
    ) -> Result<StreamRef<'_>> {
        let stream = self.take(session, context, flags, priority)?;
        let posted = session.post_checked(
            context,
            None,
            &wire::stream_create::Args { stream: Mint(stream.id()), slot: stream.slot, flags, priority },
        );
        match posted {
            Ok(_) => Ok(stream),
            Err(error) => {
                self.put_back(stream);
                Err(error)
            }
        }
    }

    /// Creates a stream of a green context.
    pub(crate) fn create_green(
        &self,
        session: &Session,
        context: u64,
        green: Id<GreenContext>,
        priority: i32,
    ) -> Result<StreamRef<'_>> {
        let stream = self.take_for(session, (context, green.raw()), NON_BLOCKING, priority)?;
        let call =
            wire::green_stream_create::Args { stream: Mint(stream.id()), green, slot: stream.slot, priority };
        match session.post_checked(context, None, &call) {
            Ok(_) => {
                self.hold_with_context(stream);
                Ok(stream)
            }
            Err(error) => {
                self.put_back(stream);
                Err(error)
            }
        }
    }

    fn is_detached(&self, id: Id<Kind>) -> bool {
        let entry = self.slots.get(id.index());
        entry.is_some_and(|entry| entry.detached.load(Ordering::Acquire) == id.generation())
    }

    /// The streams of a green context.
    pub(crate) fn of_green(&self, green: u64) -> impl Iterator<Item = StreamRef<'_>> {
        let streams = (0..self.used.load(Ordering::Acquire)).filter_map(|slot| self.at(slot).ok());
        streams.filter(move |stream| stream.green() == green)
    }

    /// Slots and sequences of everything posted so far to streams of a green context, destroyed ones included.
    pub(crate) fn posted_of_green(&self, green: u64) -> impl Iterator<Item = (u32, u64)> + '_ {
        self.all_posted()
            .filter(move |(slot, _)| self.slots[*slot as usize].green.load(Ordering::Relaxed) == green)
    }

    /// Ends the streams of a green context on the host. The program still has to destroy each, except the default stream.
    pub(crate) fn detach(&self, session: &Session, green: u64, default: Option<u32>) -> Result {
        for stream in self.of_green(green) {
            if !self.retire(stream) {
                continue;
            }
            session.post(stream.context, None, &wire::stream_destroy::Args { stream: stream.id() })?;
            if default == Some(stream.slot) {
                self.give(stream.slot);
            } else {
                stream.entry.detached.store(stream.generation, Ordering::Release);
            }
        }
        Ok(())
    }

    /// Ends a detached stream; `false` if a handle names none.
    pub(crate) fn destroy_detached(&self, raw: u64) -> bool {
        let Some(id) = Id::<Kind>::from_raw(raw).filter(|id| self.is_detached(*id)) else { return false };
        self.end_detached(id.index(), id.generation())
    }

    fn end_detached(&self, slot: usize, generation: u32) -> bool {
        let entry = &self.slots[slot];
        let ended =
            entry.detached.compare_exchange(generation, 0, Ordering::AcqRel, Ordering::Relaxed).is_ok();
        if ended && let Ok(slot) = u32::try_from(slot) {
            self.give(slot);
        }
        ended
    }

    /// The streams that take part in waits of a whole context.
    pub(crate) fn held_with(&self, context: u64) -> impl Iterator<Item = StreamRef<'_>> {
        self.of_context(context)
            .filter(|stream| stream.entry.held_with_context.load(Ordering::Acquire) == stream.generation)
    }

    /// The streams of a context.
    fn of_context(&self, context: u64) -> impl Iterator<Item = StreamRef<'_>> {
        let streams = (0..self.used.load(Ordering::Acquire)).filter_map(|slot| self.at(slot).ok());
        streams.filter(move |stream| stream.context == context)
    }

    /// Destroys an explicit stream.
    pub(crate) fn destroy(&self, session: &Session, stream: StreamRef<'_>) -> Result {
        if !self.retire(stream) {
            return Err(Error::INVALID_HANDLE);
        }
        session.post(stream.context, None, &wire::stream_destroy::Args { stream: stream.id() })?;
        self.give(stream.slot);
        Ok(())
    }

    /// Slots and sequences of everything posted so far in a context, by destroyed streams, too: all of it, or only the work
    /// with which the legacy stream synchronises.
    pub(crate) fn posted(&self, context: u64, blocking_only: bool) -> impl Iterator<Item = (u32, u64)> + '_ {
        self.all_posted().filter(move |(slot, _)| {
            let entry = &self.slots[*slot as usize];
            entry.context.load(Ordering::Relaxed) == context
                && !(blocking_only && entry.flags.load(Ordering::Relaxed) & NON_BLOCKING != 0)
        })
    }

    /// The slots and sequences that a synchronisation with a stream waits for: its own work and, for the legacy stream of its
    /// context, which is in slot `legacy`, that of the streams it synchronises with.
    pub(crate) fn extent(&self, legacy: u32, stream: StreamRef<'_>) -> Vec<(u32, u64)> {
        if legacy == stream.slot {
            return self.posted(stream.context, true).collect();
        }
        vec![(stream.slot, stream.posted())]
    }

    /// Waits until the stream has completed its earlier work, before work that the guest does itself.
    pub(crate) fn wait_turn(&self, session: &Session, legacy: u32, stream: StreamRef<'_>) -> Result {
        let mut before = self.extent(legacy, stream);
        if stream.flags() & NON_BLOCKING == 0 {
            // Work of the legacy stream comes before later work of blocking streams.
            let legacy = self.at(legacy)?;
            before.push((legacy.slot, legacy.posted()));
        }
        session.wait_all(before)
    }

    /// Waits until everything that was posted so far, to any stream, is complete.
    pub(crate) fn wait_all(&self, session: &Session) -> Result {
        session.wait_all(self.all_posted())
    }

    /// Ends every stream of a context that is being destroyed: no more work is posted to it.
    pub(crate) fn retire_context(&self, context: u64) -> Vec<u32> {
        self.of_context(context).filter(|stream| self.retire(*stream)).map(|stream| stream.slot).collect()
    }

    /// Returns the slots of a context that is gone, those of its detached streams included.
    pub(crate) fn give_all(&self, context: u64, slots: Vec<u32>) {
        slots.into_iter().for_each(|slot| self.give(slot));
        for (slot, entry) in self.slots.iter().enumerate() {
            let detached = entry.detached.load(Ordering::Acquire);
            if detached != 0 && entry.context.load(Ordering::Relaxed) == context {
                self.end_detached(slot, detached);
            }
        }
    }

    /// Slots and sequences of everything posted so far, to any stream.
    pub(crate) fn all_posted(&self) -> impl Iterator<Item = (u32, u64)> + '_ {
        (0..self.used.load(Ordering::Acquire)).zip(&self.slots).filter_map(|(slot, entry)| {
            let posted = entry.posted.load(Ordering::Acquire);
            (posted > 0).then_some((slot, posted))
        })
    }

    /// Ends a default stream of a thread that ends.
    pub(crate) fn recycle(&self, session: &Session, stream: u64) {
        if let Ok(stream) = self.by_id(stream) {
            // The session is over if this fails, and the stream with it.
            let _ = self.destroy(session, stream);
        }
    }
}
