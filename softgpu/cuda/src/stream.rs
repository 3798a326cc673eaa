//! Streams: handles of queues.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use sluice_cuda_frontend::handles::{LEGACY_STREAM, PER_THREAD_STREAM};
use sluice_cuda_frontend::stream_attributes::StreamAttributes;
use sluice_cuda_graphs::{Stream as Captured, StreamOrder};

use crate::context::{Context, Core, current_core, current_green};
use crate::error::{Error, Result};
use crate::green::Green;
use crate::handles::{Kind, Registry};
use crate::lock::lock;
use crate::schedule::{Key, Order, scheduler};

/// All streams that programs created.
pub(crate) static STREAMS: Registry<Stream> = Registry::new(Kind::Stream, Error::INVALID_HANDLE);

/// The attributes that programs have set, by the streams' ids.
pub(crate) static ATTRIBUTES: StreamAttributes = StreamAttributes::new();

/// Next id of a created stream. The ids of the default streams are made from the id of their context.
static NEXT_ID: AtomicU64 = AtomicU64::new(16);
/// The bit that distinguishes the ids of green contexts' default streams.
const GREEN_DEFAULT: u64 = 1 << 63;

pub(crate) const NON_BLOCKING: u32 = 1;
/// Priorities of streams, the highest first.
pub(crate) const PRIORITIES: std::ops::RangeInclusive<i32> = -5..=0;

/// The stream that handle 0 means in a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Implicit {
    /// The one that all threads share.
    Legacy,
    /// The calling thread's own.
    PerThread,
}

/// A stream that a program created.
pub(crate) struct Stream {
    pub(crate) core: Arc<Core>,
    pub(crate) queue: Key,
    pub(crate) flags: u32,
    pub(crate) priority: i32,
    pub(crate) id: u64,
    /// Its green context, if it has one.
    pub(crate) green: Option<Arc<Green>>,
}

impl Drop for Stream {
    fn drop(&mut self) {
        ATTRIBUTES.forget(self.id);
    }
}

/// A resolved stream argument: a stream, or one of the current context's default streams.
pub(crate) struct StreamTarget {
    pub(crate) core: Arc<Core>,
    pub(crate) queue: Key,
    pub(crate) flags: u32,
    pub(crate) priority: i32,
    pub(crate) id: u64,
    pub(crate) green: Option<Arc<Green>>,
}

impl StreamTarget {
    pub(crate) fn of(stream: &Stream) -> StreamTarget {
        let Stream { ref core, queue, flags, priority, id, ref green } = *stream;
        StreamTarget { core: Arc::clone(core), queue, flags, priority, id, green: green.clone() }
    }

    /// The number of multiprocessors for its launches.
    pub(crate) fn multiprocessors(&self) -> u32 {
        let part = self.green.as_ref().map(|green| green.multiprocessors.count());
        part.unwrap_or_else(|| self.core.gpu.multiprocessors())
    }

    /// The stream, as captures know it.
    pub(crate) fn facts(&self) -> Captured {
        let order = if self.queue == self.core.queues.legacy {
            StreamOrder::Legacy
        } else if self.flags & NON_BLOCKING != 0 {
            StreamOrder::NonBlocking
        } else {
            StreamOrder::Blocking
        };
        Captured { key: self.queue.number(), context: self.core.handle, order }
    }
}

/// Looks up a stream argument; its context must be sound.
pub(crate) fn target(handle: u64, implicit: Implicit) -> Result<StreamTarget> {
    let implicit = match handle {
        0 => implicit,
        LEGACY_STREAM => Implicit::Legacy,
        PER_THREAD_STREAM => Implicit::PerThread,
        _ => {
            let stream = STREAMS.get(handle)?;
            stream.core.health.check()?;
            stream.green.as_ref().map_or(Ok(()), |green| green.attached())?;
            return Ok(StreamTarget::of(&stream));
        }
    };
    let core = current_core()?;
    if let Some(green) = current_green()? {
        // A green context has the default stream that it was made with, and none of threads.
        let queue = green.default.filter(|_| implicit == Implicit::Legacy).ok_or(Error::INVALID_HANDLE)?;
        let id = GREEN_DEFAULT | green.id;
        return Ok(StreamTarget { core, queue, flags: NON_BLOCKING, priority: 0, id, green: Some(green) });
    }
    let queue = match implicit {
        Implicit::Legacy => core.queues.legacy,
        Implicit::PerThread => core.queues.of_thread(),
    };
    let id = if implicit == Implicit::Legacy { LEGACY_STREAM } else { PER_THREAD_STREAM };
    // The context's id distinguishes the default streams of different contexts.
    let id = core.id << 32 | id;
    Ok(StreamTarget { core, queue, flags: 0, priority: 0, id, green: None })
}

/// `cuStreamCreateWithPriority`; a priority out of range is clamped.
pub(crate) fn create(flags: u32, priority: i32) -> Result<u64> {
    if flags & !NON_BLOCKING != 0 {
        return Err(Error::INVALID_VALUE);
    }
    let core = current_core()?;
    if let Some(green) = current_green()? {
        return create_green(&green, &core, priority);
    }
    let priority = priority.clamp(*PRIORITIES.start(), *PRIORITIES.end());
    let order =
        if flags & NON_BLOCKING != 0 { Order::NonBlocking } else { Order::Blocking(core.queues.legacy) };
    let queue = core.queues.open(order, priority);
    let id = NEXT_ID.fetch_add(1, Ordering::Relaxed);
    let (handle, stream) =
        STREAMS.insert_with(|_| Stream { core, queue, flags, priority, id, green: None })?;
    lock(&stream.core.streams).push(handle);
    Ok(handle)
}

/// `cuGreenCtxStreamCreate`, and the creation of a stream while a green context is current.
pub(crate) fn create_green(green: &Arc<Green>, core: &Arc<Core>, priority: i32) -> Result<u64> {
    let priority = priority.clamp(*PRIORITIES.start(), *PRIORITIES.end());
    let (queue, id) = (green.queues.open(priority), NEXT_ID.fetch_add(1, Ordering::Relaxed));
    let core = Arc::clone(core);
    let of = Some(Arc::clone(green));
    let stream = |_| Stream { core, queue, flags: NON_BLOCKING, priority, id, green: of };
    let (handle, stream) = STREAMS.insert_with(stream)?;
    lock(&stream.core.streams).push(handle);
    lock(&green.streams).push(handle);
    Ok(handle)
}

/// `cuStreamDestroy`: returns at once; the work continues. Returns the queue that the stream had.
pub(crate) fn destroy(handle: u64) -> Result<Key> {
    let stream = STREAMS.remove(handle)?;
    lock(&stream.core.streams).retain(|other| *other != handle);
    match &stream.green {
        Some(green) => {
            lock(&green.streams).retain(|other| *other != handle);
            green.queues.let_go(stream.queue);
        }
        None => stream.core.queues.let_go(stream.queue),
    }
    Ok(stream.queue)
}

/// `cuStreamQuery`.
pub(crate) fn query(target: &StreamTarget) -> Result {
    let busy = !scheduler().tail(target.queue).is_empty();
    target.core.health.check()?;
    if busy { Err(Error::NOT_READY) } else { Ok(()) }
}

/// `cuStreamSynchronize`: waits for all work submitted to the stream so far.
pub(crate) fn synchronize(target: &StreamTarget) -> Result {
    let scheduler = scheduler();
    for point in scheduler.tail(target.queue) {
        scheduler.wait(point);
    }
    target.core.gpu.pools.trim();
    target.core.flush_printed();
    target.core.health.check()
}

/// `cuCtxSynchronize` and its form with a context.
pub(crate) fn synchronize_context(context: &Context) -> Result {
    // Text printed before a fault is written even if the fault came first.
    let core = context.core()?;
    match context.green() {
        Some(green) => core.synchronize_queues(&green.queues),
        None => core.synchronize(),
    }
}
