//! Events: each is a point in a queue, captured when the event is recorded.

use std::sync::{Arc, Mutex};

use crate::context::{Core, current_core};
use crate::error::{Error, Result};
use crate::handles::{Kind, Registry};
use crate::lock::lock;
use crate::schedule::{Point, QueuedWork, Stamp, scheduler};
use crate::stream::StreamTarget;

pub(crate) static EVENTS: Registry<Event> = Registry::new(Kind::Event, Error::INVALID_HANDLE);

const BLOCKING_SYNC: u32 = 1;
const DISABLE_TIMING: u32 = 2;
const INTERPROCESS: u32 = 4;

/// An event. It counts as complete until it is recorded.
pub(crate) struct Event {
    core: Arc<Core>,
    flags: u32,
    recorded: Mutex<Option<Recorded>>,
}

#[derive(Clone)]
struct Recorded {
    point: Point,
    stamp: Arc<Stamp>,
}

/// `cuEventCreate`.
pub(crate) fn create(flags: u32) -> Result<u64> {
    if flags & !(BLOCKING_SYNC | DISABLE_TIMING | INTERPROCESS) != 0 {
        return Err(Error::INVALID_VALUE);
    }
    if flags & INTERPROCESS != 0 {
        // An event of several processes must not measure time; this device does not support such events.
        return Err(if flags & DISABLE_TIMING == 0 { Error::INVALID_VALUE } else { Error::NOT_SUPPORTED });
    }
    let core = current_core()?;
    let (handle, event) = EVENTS.insert_with(|_| Event { core, flags, recorded: Mutex::new(None) })?;
    lock(&event.core.events).push(handle);
    Ok(handle)
}

/// `cuEventDestroy`: waits for the event continue until its point.
pub(crate) fn destroy(handle: u64) -> Result {
    let event = EVENTS.remove(handle)?;
    lock(&event.core.events).retain(|other| *other != handle);
    Ok(())
}

/// An event of a context.
pub(crate) fn of_context(handle: u64, core: &Core) -> Result<Arc<Event>> {
    let event = EVENTS.get(handle)?;
    if event.core.id == core.id { Ok(event) } else { Err(Error::INVALID_HANDLE) }
}

/// An event that may be recorded in a stream: one of its context.
pub(crate) fn find(handle: u64, target: &StreamTarget) -> Result<Arc<Event>> {
    of_context(handle, &target.core)
}

impl Event {
    /// Records the event in a stream.
    pub(crate) fn record(&self, target: &StreamTarget) {
        // A query of the event must not wait, too.
        scheduler().wait_for_room(target.queue);
        // Holds the event's lock, so that the last record in the queue is also the stored one.
        let mut recorded = lock(&self.recorded);
        let stamp = Arc::new(Stamp::default());
        let work = QueuedWork::Stamp(Arc::clone(&stamp));
        let point = scheduler().submit_now(target.queue, Vec::new(), work);
        *recorded = Some(Recorded { point, stamp });
    }

    /// Records the event behind all work that its context has.
    pub(crate) fn record_context(&self) {
        // The lock as for `record`.
        let mut recorded = lock(&self.recorded);
        let stamp = Arc::new(Stamp::default());
        let point = self.core.queues.record(Arc::clone(&stamp));
        *recorded = Some(Recorded { point, stamp });
    }

    /// Makes all later work of a context wait for the last record before the call.
    pub(crate) fn hold_context(&self, core: &Core) {
        let recorded = lock(&self.recorded).clone();
        if let Some(recorded) = recorded.filter(|recorded| recorded.stamp.nanoseconds().is_none()) {
            core.queues.wait(recorded.point);
        }
    }

    /// Makes a stream wait for the last record before the call.
    pub(crate) fn wait(&self, target: &StreamTarget) {
        let recorded = lock(&self.recorded).clone();
        if let Some(recorded) = recorded.filter(|recorded| recorded.stamp.nanoseconds().is_none()) {
            scheduler().submit(target.queue, vec![recorded.point], QueuedWork::Marker);
        }
    }
}

/// `cuEventQuery`.
pub(crate) fn query(handle: u64) -> Result {
    let event = EVENTS.get(handle)?;
    let recorded = lock(&event.recorded).clone();
    let passed = recorded.is_none_or(|recorded| recorded.stamp.nanoseconds().is_some());
    // Checked after the stamp: a fault of earlier work is set before the stamp.
    event.core.health.check()?;
    if passed { Ok(()) } else { Err(Error::NOT_READY) }
}

/// `cuEventSynchronize`.
pub(crate) fn synchronize(handle: u64) -> Result {
    let event = EVENTS.get(handle)?;
    let recorded = lock(&event.recorded).clone();
    if let Some(recorded) = recorded {
        scheduler().wait(recorded.point);
    }
    event.core.gpu.pools.trim();
    event.core.flush_printed();
    event.core.health.check()
}

/// `cuEventElapsedTime` in milliseconds.
pub(crate) fn elapsed(start: u64, end: u64) -> Result<f32> {
    let (start, end) = (EVENTS.get(start)?, EVENTS.get(end)?);
    if start.core.id != end.core.id || (start.flags | end.flags) & DISABLE_TIMING != 0 {
        return Err(Error::INVALID_HANDLE);
    }
    let times = [&start, &end].map(|event| lock(&event.recorded).clone());
    let stamps = times.each_ref().map(|time| time.as_ref().and_then(|time| time.stamp.nanoseconds()));
    start.core.health.check()?;
    let [Some(_), Some(_)] = times else { return Err(Error::INVALID_HANDLE) };
    let [Some(start), Some(end)] = stamps else { return Err(Error::NOT_READY) };
    let span = i128::from(end) - i128::from(start);
    #[expect(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        reason = "the interface is a float"
    )]
    Ok((span as f64 / 1e6) as f32)
}
