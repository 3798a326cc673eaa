//! Streams: the slot of the session page in which each one counts, and the work posted there.
//!
//! A slot's counters only grow, across the streams that use it one after the other, so a sequence once complete stays complete
//! and nothing has to be reset. A stream that is destroyed leaves its slot at once, but its work belongs to its context until
//! it is complete: the slot keeps the context's name and rests until then.

use crate::{
    error::{Error, Result},
    session::{Session, Target},
    state::thread,
};
use core::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, Ordering};
use sluice_protocol::{
    calls::wire,
    field::Mint,
    handle::{Id, Stream as Kind},
    limits,
};
use std::{
    collections::VecDeque,
    sync::{Mutex, MutexGuard},
};

/// `CU_STREAM_PER_THREAD`, the larger of the two special values; `CU_STREAM_LEGACY` is 1.
pub(crate) const PER_THREAD: u64 = 2;
/// `CU_STREAM_NON_BLOCKING`.
pub(crate) const NON_BLOCKING: u32 = 1;

struct Slot {
    posted: AtomicU64,
    /// Generation of the stream in the slot, 0 while there is none. Whoever makes it 0 destroys the stream.
    live: AtomicU32,
    /// Streams that were in the slot; changed under the lock of the free list.
    generation: AtomicU32,
    /// Raw id of the context of the stream, or of the last one.
    context: AtomicU64,
    flags: AtomicU32,
    priority: AtomicI32,
}

/// The streams of the session.
pub(crate) struct Streams {
    slots: Box<[Slot]>,
    /// Slots without a stream, the one that rests longest in front.
    free: Mutex<VecDeque<u32>>,
}

/// A stream, resolved from a handle.
#[derive(Clone, Copy)]
pub(crate) struct Stream<'a> {
    pub(crate) slot: u32,
    /// Raw id of its context.
    pub(crate) context: u64,
    generation: u32,
    entry: &'a Slot,
}

impl<'a> Stream<'a> {
    /// Where posted work counts, as long as the stream exists.
    pub(crate) fn target(&self) -> Target<'a> {
        let Slot { posted, live, .. } = self.entry;
        Target { slot: self.slot, posted, live, generation: self.generation }
    }

    /// Its id.
    pub(crate) fn id(&self) -> Id<Kind> {
        Id::new(self.slot, self.generation)
    }

    /// The sequence of the work posted last.
    pub(crate) fn posted(&self) -> u64 {
        self.entry.posted.load(Ordering::Acquire)
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
        let slot = |_| Slot {
            posted: AtomicU64::new(0),
            live: AtomicU32::new(0),
            generation: AtomicU32::new(0),
            context: AtomicU64::new(0),
            flags: AtomicU32::new(0),
            priority: AtomicI32::new(0),
        };
        Streams {
            slots: (0..limits::STREAMS).map(slot).collect(),
            free: Mutex::new((0..limits::STREAMS).collect()),
        }
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<u32>> {
        self.free.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Takes a slot for a stream of a context: one in which nothing is left of earlier streams.
    pub(crate) fn take(
        &self,
        session: &Session,
        context: u64,
        flags: u32,
        priority: i32,
    ) -> Result<Stream<'_>> {
        let mut free = self.lock();
        let rested = free.iter().position(|slot| {
            session.is_complete(*slot, self.slots[*slot as usize].posted.load(Ordering::Acquire))
        });
        let slot = rested.and_then(|at| free.remove(at)).ok_or(Error::OUT_OF_MEMORY)?;
        let entry = &self.slots[slot as usize];
        // The generation of an id has 24 bits and is not 0.
        let generation = (entry.generation.load(Ordering::Relaxed) % 0xff_ffff) + 1;
        entry.generation.store(generation, Ordering::Relaxed);
        entry.flags.store(flags, Ordering::Relaxed);
        entry.priority.store(priority, Ordering::Relaxed);
        entry.context.store(context, Ordering::Relaxed);
        entry.live.store(generation, Ordering::Release);
        Ok(Stream { slot, context, generation, entry })
    }

    /// Ends a stream here: from now on nothing is posted to it. `false` when somebody else was faster.
    fn retire(&self, stream: Stream<'_>) -> bool {
        let Slot { live, .. } = stream.entry;
        live.compare_exchange(stream.generation, 0, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }

    /// Gives the slot of a retired stream back; the next stream in it goes on counting.
    fn give(&self, slot: u32) {
        self.lock().push_back(slot);
    }

    /// Undoes [`Streams::take`].
    pub(crate) fn put_back(&self, stream: Stream<'_>) {
        if self.retire(stream) {
            self.give(stream.slot);
        }
    }

    /// The stream in a slot.
    pub(crate) fn at(&self, slot: u32) -> Result<Stream<'_>> {
        let entry = self.slots.get(slot as usize).ok_or(Error::INVALID_HANDLE)?;
        match entry.live.load(Ordering::Acquire) {
            0 => Err(Error::INVALID_HANDLE),
            generation => {
                Ok(Stream { slot, context: entry.context.load(Ordering::Relaxed), generation, entry })
            }
        }
    }

    /// The stream of an id.
    pub(crate) fn by_id(&self, raw: u64) -> Result<Stream<'_>> {
        let id = Id::<Kind>::from_raw(raw).ok_or(Error::INVALID_HANDLE)?;
        let stream = self.at(u32::try_from(id.index()).map_err(|_| Error::INVALID_HANDLE)?)?;
        if stream.id() == id { Ok(stream) } else { Err(Error::INVALID_HANDLE) }
    }

    /// The calling thread's default stream in a context, created at first use.
    pub(crate) fn of_thread(&self, session: &Session, context: u64) -> Result<Stream<'_>> {
        if let Some(stream) = thread::default_stream(context).and_then(|id| self.by_id(id).ok()) {
            return Ok(stream);
        }
        let stream = self.create(session, context, 0, 0)?;
        thread::set_default_stream(context, stream.id().raw());
        Ok(stream)
    }

    /// Creates a stream in a context. The id is ours; the answer says whether the driver had room for the stream.
    pub(crate) fn create(
        &self,
        session: &Session,
        context: u64,
        flags: u32,
        priority: i32,
    ) -> Result<Stream<'_>> {
        let stream = self.take(session, context, flags, priority)?;
        let posted = session.post_checked(context, wire::stream_create::CALL, None, |writer| {
            wire::stream_create::put(writer, Mint(stream.id()), stream.slot, flags, priority)
        });
        match posted {
            Ok(_) => Ok(stream),
            Err(error) => {
                self.put_back(stream);
                Err(error)
            }
        }
    }

    /// Destroys an explicit stream.
    pub(crate) fn destroy(&self, session: &Session, stream: Stream<'_>) -> Result {
        if !self.retire(stream) {
            return Err(Error::INVALID_HANDLE);
        }
        session.post(stream.context, wire::stream_destroy::CALL, None, |writer| {
            wire::stream_destroy::put(writer, stream.id())
        })?;
        self.give(stream.slot);
        Ok(())
    }

    /// Slots and sequences of everything posted so far in a context, by streams that are gone, too: all of it, or only what
    /// the legacy stream synchronises with.
    pub(crate) fn posted(&self, context: u64, blocking_only: bool) -> impl Iterator<Item = (u32, u64)> + '_ {
        self.all_posted().filter(move |(slot, _)| {
            let entry = &self.slots[*slot as usize];
            entry.context.load(Ordering::Relaxed) == context
                && !(blocking_only && entry.flags.load(Ordering::Relaxed) & NON_BLOCKING != 0)
        })
    }

    /// What a synchronisation with a stream has to see complete: its own work and, for the legacy stream of its context, which
    /// is in slot `legacy`, that of the streams it synchronises with.
    pub(crate) fn extent(&self, legacy: u32, stream: Stream<'_>) -> Vec<(u32, u64)> {
        if legacy == stream.slot {
            return self.posted(stream.context, true).collect();
        }
        vec![(stream.slot, stream.posted())]
    }

    /// Waits until it is a stream's turn, for what is done here instead of on the device.
    pub(crate) fn wait_turn(&self, session: &Session, legacy: u32, stream: Stream<'_>) -> Result {
        let mut before = self.extent(legacy, stream);
        if stream.flags() & NON_BLOCKING == 0 {
            // What the legacy stream does comes before what blocking streams do after it.
            let legacy = self.at(legacy)?;
            before.push((legacy.slot, legacy.posted()));
        }
        before.into_iter().try_for_each(|(slot, sequence)| session.wait_complete(slot, sequence))
    }

    /// Waits until everything that was posted so far, to any stream, is complete.
    pub(crate) fn wait_all(&self, session: &Session) -> Result {
        self.all_posted().try_for_each(|(slot, sequence)| session.wait_complete(slot, sequence))
    }

    /// Ends every stream of a context that is going away: nothing is posted there any more.
    pub(crate) fn retire_context(&self, context: u64) -> Vec<u32> {
        let streams = (0..limits::STREAMS).filter_map(|slot| self.at(slot).ok());
        let of_context = streams.filter(|stream| stream.context == context);
        of_context.filter(|stream| self.retire(*stream)).map(|stream| stream.slot).collect()
    }

    /// Gives back the slots of a context that is gone.
    pub(crate) fn give_all(&self, slots: Vec<u32>) {
        slots.into_iter().for_each(|slot| self.give(slot));
    }

    /// What everything that was posted to any stream counts to.
    pub(crate) fn all_posted(&self) -> impl Iterator<Item = (u32, u64)> + '_ {
        (0u32..).zip(self.slots.iter()).filter_map(|(slot, entry)| {
            let posted = entry.posted.load(Ordering::Acquire);
            (posted > 0).then_some((slot, posted))
        })
    }

    /// A thread ends, and a default stream of its own with it.
    pub(crate) fn recycle(&self, session: &Session, stream: u64) {
        if let Ok(stream) = self.by_id(stream) {
            // The session is over if this fails, and the stream with it.
            let _ = self.destroy(session, stream);
        }
    }
}
