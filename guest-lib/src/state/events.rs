//! Events: the last record of each, so that queries and waits need no host.

use crate::{
    error::{Error, Result},
    session::Session,
    state::streams::StreamRef,
};
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use sluice_protocol::{
    calls::wire,
    field::Mint,
    handle::{Event as Kind, Id},
    limits,
};
use std::sync::{Mutex, OnceLock};

const CHUNK: usize = 1024;

/// `CU_EVENT_INTERPROCESS`.
pub(crate) const INTERPROCESS: u32 = 4;

#[derive(Default)]
struct EventSlot {
    /// Raw id of the context, 0 while free.
    context: AtomicU64,
    generation: AtomicU32,
    flags: AtomicU32,
    /// Stream slot in the low 10 bits, sequence above; 0 for never recorded.
    recorded: AtomicU64,
}

const SLOT_BITS: u32 = limits::STREAMS.ilog2();
const _: () = assert!(limits::STREAMS.is_power_of_two());

/// The events of the session.
pub(crate) struct Events {
    chunks: [OnceLock<Box<[EventSlot]>>; limits::EVENTS as usize / CHUNK],
    free: Mutex<FreeEvents>,
}

#[derive(Default)]
struct FreeEvents {
    returned: Vec<u32>,
    fresh: u32,
}

/// An event, resolved from a handle.
#[derive(Clone, Copy)]
pub(crate) struct EventRef<'a> {
    pub(crate) id: Id<Kind>,
    pub(crate) context: u64,
    slot: &'a EventSlot,
}

impl EventRef<'_> {
    /// The stream slot and sequence of its latest recording.
    pub(crate) fn recorded(&self) -> Option<(u32, u64)> {
        match self.slot.recorded.load(Ordering::Acquire) {
            0 => None,
            packed => {
                let slot = u32::try_from(packed % u64::from(limits::STREAMS)).ok()?;
                Some((slot, packed >> SLOT_BITS))
            }
        }
    }

    pub(crate) fn flags(&self) -> u32 {
        self.slot.flags.load(Ordering::Relaxed)
    }

    /// Records that work of a stream records the event.
    pub(crate) fn recorded_at(&self, stream: StreamRef<'_>, sequence: u64) {
        self.slot.recorded.store(sequence << SLOT_BITS | u64::from(stream.slot), Ordering::Release);
    }

    /// Records the event in a stream.
    pub(crate) fn record(&self, session: &Session, stream: StreamRef<'_>) -> Result {
        let id = self.id;
        let sequence =
            session.post(stream.context, Some(stream.target()), &wire::event_record::Args { event: id })?;
        self.recorded_at(stream, sequence);
        Ok(())
    }
}

impl Events {
    pub(crate) fn new() -> Events {
        Events {
            chunks: [const { OnceLock::new() }; limits::EVENTS as usize / CHUNK],
            free: Mutex::default(),
        }
    }

    fn slot(&self, index: usize) -> Result<&EventSlot> {
        let chunk = self.chunks.get(index / CHUNK).and_then(OnceLock::get).ok_or(Error::INVALID_HANDLE)?;
        chunk.get(index % CHUNK).ok_or(Error::INVALID_HANDLE)
    }

    /// Creates an event of a context. The id is ours; the answer is an error if the driver had no room for the event.
    pub(crate) fn create(&self, session: &Session, context: u64, flags: u32) -> Result<Id<Kind>> {
        let index = {
            let mut free = self.free.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
            match free.returned.pop() {
                Some(index) => index,
                None if free.fresh < limits::EVENTS => {
                    free.fresh += 1;
                    free.fresh - 1
                }
                None => return Err(Error::OUT_OF_MEMORY),
            }
        };
        let chunk = self.chunks.get(index as usize / CHUNK).ok_or(Error::OUT_OF_MEMORY)?;
        let slot =
            &chunk.get_or_init(|| (0..CHUNK).map(|_| EventSlot::default()).collect())[index as usize % CHUNK];
        let generation = slot.generation.fetch_add(1, Ordering::Relaxed).wrapping_add(1);
        slot.flags.store(flags, Ordering::Relaxed);
        slot.recorded.store(0, Ordering::Relaxed);
        slot.context.store(context, Ordering::Release);
        let id = Id::new(index, generation);
        // The driver of the worker shares no event with other processes; see `shared_events`.
        let of_driver = flags & !INTERPROCESS;
        let call = wire::event_create::Args { event: Mint(id), flags: of_driver };
        let posted = session.post_checked(context, None, &call);
        match posted {
            Ok(_) => Ok(id),
            Err(error) => {
                if Self::retire(context, slot) {
                    self.give(index);
                }
                Err(error)
            }
        }
    }

    /// Ends the event in a slot; `false` if another thread did so before.
    fn retire(context: u64, slot: &EventSlot) -> bool {
        slot.context.compare_exchange(context, 0, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }

    /// Returns the slot of a retired event to the free list.
    fn give(&self, index: u32) {
        self.free.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).returned.push(index);
    }

    /// The event of a handle.
    pub(crate) fn resolve(&self, handle: u64) -> Result<EventRef<'_>> {
        let id = Id::<Kind>::from_raw(handle).ok_or(Error::INVALID_HANDLE)?;
        let slot = self.slot(id.index())?;
        let context = slot.context.load(Ordering::Acquire);
        let current = slot.generation.load(Ordering::Relaxed) & 0xff_ffff;
        if context == 0 || current != id.generation() {
            return Err(Error::INVALID_HANDLE);
        }
        Ok(EventRef { id, context, slot })
    }

    pub(crate) fn destroy(&self, session: &Session, event: EventRef<'_>) -> Result {
        if !Self::retire(event.context, event.slot) {
            return Err(Error::INVALID_HANDLE);
        }
        session.post(event.context, None, &wire::event_destroy::Args { event: event.id })?;
        self.give(u32::try_from(event.id.index()).map_err(|_| Error::UNKNOWN)?);
        Ok(())
    }

    /// Returns the events of a context that is gone to the free list.
    pub(crate) fn forget_context(&self, context: u64) {
        for (first, slots) in (0..limits::EVENTS).step_by(CHUNK).zip(self.chunks.iter()) {
            for (index, slot) in (first..).zip(slots.get().into_iter().flatten()) {
                if Self::retire(context, slot) {
                    self.give(index);
                }
            }
        }
    }
}
