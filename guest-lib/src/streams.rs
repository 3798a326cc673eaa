//! Streams: which slot of the session page each one counts in, and what was posted there.
//!
//! A slot's counters only grow, across the streams that use it one after the other, so a sequence once complete stays
//! complete and nothing has to be reset.

use crate::{
    error::{Error, Result},
    exports::Call,
    process::Process,
    session::Target,
    thread,
};
use core::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, Ordering};
use sluice_protocol::{
    calls::wire,
    field::Mint,
    handle::{Id, Stream as Kind},
    limits,
};
use std::sync::{Mutex, MutexGuard};

/// `CU_STREAM_PER_THREAD`, the larger of the two special values; `CU_STREAM_LEGACY` is 1.
pub(crate) const PER_THREAD: u64 = 2;
/// `CU_STREAM_NON_BLOCKING`.
pub(crate) const NON_BLOCKING: u32 = 1;

struct Slot {
    posted: AtomicU64,
    /// Raw id of the context, 0 while the slot is free.
    context: AtomicU64,
    generation: AtomicU32,
    flags: AtomicU32,
    priority: AtomicI32,
    /// Bytes of staging memory that work on the stream still reads.
    staged: AtomicU64,
}

/// The streams of the session.
pub(crate) struct Streams {
    slots: Box<[Slot]>,
    free: Mutex<Vec<u32>>,
}

/// A stream, resolved from a handle.
#[derive(Clone, Copy)]
pub(crate) struct Stream<'a> {
    pub(crate) slot: u32,
    /// Raw id of its context.
    pub(crate) context: u64,
    entry: &'a Slot,
}

impl<'a> Stream<'a> {
    /// Where posted work counts.
    pub(crate) fn target(&self) -> Target<'a> {
        Target { slot: self.slot, posted: &self.entry.posted }
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

    /// Bytes of staging memory in use by the stream's work.
    pub(crate) fn staged(&self) -> &'a AtomicU64 {
        &self.entry.staged
    }
}

impl Streams {
    pub(crate) fn new() -> Streams {
        let slot = |_| Slot {
            posted: AtomicU64::new(0),
            context: AtomicU64::new(0),
            generation: AtomicU32::new(0),
            flags: AtomicU32::new(0),
            priority: AtomicI32::new(0),
            staged: AtomicU64::new(0),
        };
        Streams {
            slots: (0..limits::STREAMS).map(slot).collect(),
            free: Mutex::new((0..limits::STREAMS).rev().collect()),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<u32>> {
        self.free.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Takes a slot for a stream of a context.
    pub(crate) fn take(&self, context: u64, flags: u32, priority: i32) -> Result<u32> {
        let slot = self.lock().pop().ok_or(Error::OUT_OF_MEMORY)?;
        let entry = &self.slots[slot as usize];
        entry.flags.store(flags, Ordering::Relaxed);
        entry.priority.store(priority, Ordering::Relaxed);
        entry.generation.fetch_add(1, Ordering::Relaxed);
        entry.context.store(context, Ordering::Release);
        Ok(slot)
    }

    /// Gives a slot back; the next stream in it goes on counting.
    pub(crate) fn give(&self, slot: u32) {
        self.slots[slot as usize].context.store(0, Ordering::Release);
        // At the far end, so that a slot rests as long as possible.
        self.lock().insert(0, slot);
    }

    fn at(&self, slot: u32) -> Result<Stream<'_>> {
        let entry = self.slots.get(slot as usize).ok_or(Error::INVALID_HANDLE)?;
        match entry.context.load(Ordering::Acquire) {
            0 => Err(Error::INVALID_HANDLE),
            context => Ok(Stream { slot, context, entry }),
        }
    }

    /// The id of the explicit stream in a slot.
    pub(crate) fn id(&self, slot: u32) -> Id<Kind> {
        Id::new(slot, self.slots[slot as usize].generation.load(Ordering::Relaxed))
    }

    /// The stream of a handle as a call got it; 0 and the two special values mean streams of the current context.
    pub(crate) fn resolve<'a>(&'a self, process: &'a Process, call: Call, handle: u64) -> Result<Stream<'a>> {
        let per_thread = handle == PER_THREAD || (handle == 0 && call.per_thread);
        if handle > PER_THREAD {
            let id = Id::<Kind>::from_raw(handle).ok_or(Error::INVALID_HANDLE)?;
            let stream = self.at(u32::try_from(id.index()).map_err(|_| Error::INVALID_HANDLE)?)?;
            return if self.id(stream.slot) == id { Ok(stream) } else { Err(Error::INVALID_HANDLE) };
        }
        let context = process.contexts.current(process)?;
        if per_thread { self.of_thread(process, context.raw) } else { self.at(context.legacy) }
    }

    /// The calling thread's default stream in a context, created at first use.
    fn of_thread<'a>(&'a self, process: &Process, context: u64) -> Result<Stream<'a>> {
        if let Some(stream) = thread::default_stream(context).and_then(|slot| self.at(slot).ok())
            && stream.context == context
        {
            return Ok(stream);
        }
        let id = self.create(process, context, 0, 0)?;
        let slot = u32::try_from(id.index()).map_err(|_| Error::UNKNOWN)?;
        thread::set_default_stream(context, slot);
        self.at(slot)
    }

    /// Creates a stream in a context. The id is ours, so this is a post.
    pub(crate) fn create(
        &self,
        process: &Process,
        context: u64,
        flags: u32,
        priority: i32,
    ) -> Result<Id<Kind>> {
        let slot = self.take(context, flags, priority)?;
        let id = self.id(slot);
        let posted = process.session.post(context, wire::stream_create::CALL, None, |writer| {
            wire::stream_create::put(writer, Mint(id), slot, flags, priority)
        });
        match posted {
            Ok(_) => Ok(id),
            Err(error) => {
                self.give(slot);
                Err(error)
            }
        }
    }

    /// Destroys an explicit stream.
    pub(crate) fn destroy(&self, process: &Process, stream: Stream<'_>) -> Result {
        let id = self.id(stream.slot);
        process.session.post(stream.context, wire::stream_destroy::CALL, None, |writer| {
            wire::stream_destroy::put(writer, id)
        })?;
        self.give(stream.slot);
        Ok(())
    }

    /// The streams of a context, all of them or only those that the legacy stream synchronises with.
    pub(crate) fn of_context(&self, context: u64, blocking_only: bool) -> impl Iterator<Item = Stream<'_>> {
        (0..limits::STREAMS).filter_map(move |slot| {
            let stream = self.at(slot).ok()?;
            (stream.context == context && !(blocking_only && stream.flags() & NON_BLOCKING != 0))
                .then_some(stream)
        })
    }

    /// Gives back every slot of a context that is gone.
    pub(crate) fn forget_context(&self, context: u64) {
        let slots: Vec<u32> = self.of_context(context, false).map(|stream| stream.slot).collect();
        slots.into_iter().for_each(|slot| self.give(slot));
    }

    /// What everything that was posted to any stream counts to.
    pub(crate) fn all_posted(&self) -> impl Iterator<Item = (u32, u64)> + '_ {
        (0u32..).zip(self.slots.iter()).filter_map(|(slot, entry)| {
            let posted = entry.posted.load(Ordering::Acquire);
            (posted > 0).then_some((slot, posted))
        })
    }

    /// Staging memory of a stream slot was freed.
    pub(crate) fn unstage(&self, slot: u32, bytes: u64) {
        self.slots[slot as usize].staged.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// A thread ends: its default streams are destroyed in order.
    pub(crate) fn recycle(&self, streams: &[(u64, u32)]) {
        let Ok(process) = crate::process::get() else { return };
        for (context, slot) in streams {
            if let Ok(stream) = self.at(*slot)
                && stream.context == *context
            {
                // The session is over if this fails, and the stream with it.
                let _ = self.destroy(process, stream);
            }
        }
    }
}
