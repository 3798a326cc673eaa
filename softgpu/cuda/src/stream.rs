//! Streams: handles of queues.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::context::{Context, Core, Implicit, current_core, lock};
use crate::error::{Error, Result};
use crate::handles::{Kind, Registry};
use crate::process;
use crate::schedule::{Key, Order};

/// All streams that programs made.
pub(crate) static STREAMS: Registry<Stream> = Registry::new(Kind::Stream, Error::INVALID_HANDLE);

/// Ids of streams; the two default streams have theirs from here, too.
static NEXT_ID: AtomicU64 = AtomicU64::new(16);

pub(crate) const LEGACY: u64 = 1;
pub(crate) const PER_THREAD: u64 = 2;
const NON_BLOCKING: u32 = 1;
/// Priorities of streams, the highest first.
pub(crate) const PRIORITIES: std::ops::RangeInclusive<i32> = -5..=0;

/// A stream made by a program.
pub(crate) struct Stream {
    pub(crate) core: Arc<Core>,
    pub(crate) queue: Key,
    pub(crate) flags: u32,
    pub(crate) priority: i32,
    pub(crate) id: u64,
}

/// What a stream argument stands for: a stream, or one of the current context's default streams.
pub(crate) struct Target {
    pub(crate) core: Arc<Core>,
    pub(crate) queue: Key,
    pub(crate) flags: u32,
    pub(crate) priority: i32,
    pub(crate) id: u64,
}

/// Looks a stream argument up; its context must be sound.
pub(crate) fn target(handle: u64, implicit: Implicit) -> Result<Target> {
    let implicit = match handle {
        0 => implicit,
        LEGACY => Implicit::Legacy,
        PER_THREAD => Implicit::PerThread,
        _ => {
            let stream = STREAMS.get(handle)?;
            stream.core.health.check()?;
            let Stream { ref core, queue, flags, priority, id } = *stream;
            return Ok(Target { core: Arc::clone(core), queue, flags, priority, id });
        }
    };
    let core = current_core()?;
    let queue = core.default_queue(implicit);
    let id = if implicit == Implicit::Legacy { LEGACY } else { PER_THREAD };
    // The default streams of a context are told apart from those of others by the context's id.
    let id = core.id << 32 | id;
    Ok(Target { core, queue, flags: 0, priority: 0, id })
}

/// `cuStreamCreateWithPriority`; a priority out of range is brought into it.
pub(crate) fn create(flags: u32, priority: i32) -> Result<u64> {
    if flags & !NON_BLOCKING != 0 {
        return Err(Error::INVALID_VALUE);
    }
    let core = current_core()?;
    let priority = priority.clamp(*PRIORITIES.start(), *PRIORITIES.end());
    let order = if flags & NON_BLOCKING != 0 { Order::NonBlocking } else { Order::Blocking(core.legacy) };
    let queue = process::scheduler().open(order, priority, Arc::clone(&core.health));
    let id = NEXT_ID.fetch_add(1, Ordering::Relaxed);
    let (handle, stream) = STREAMS.insert_with(|_| Stream { core, queue, flags, priority, id })?;
    lock(&stream.core.streams).push(handle);
    Ok(handle)
}

/// `cuStreamDestroy`: returns at once, the work goes on.
pub(crate) fn destroy(handle: u64) -> Result {
    let stream = STREAMS.remove(handle)?;
    lock(&stream.core.streams).retain(|other| *other != handle);
    stream.core.let_go(stream.queue);
    Ok(())
}

/// `cuStreamQuery`.
pub(crate) fn query(target: &Target) -> Result {
    let busy = !process::scheduler().tail(target.queue).is_empty();
    target.core.health.check()?;
    if busy { Err(Error::NOT_READY) } else { Ok(()) }
}

/// `cuStreamSynchronize`: for everything submitted to it so far, nothing later.
pub(crate) fn synchronize(target: &Target) -> Result {
    let scheduler = process::scheduler();
    for point in scheduler.tail(target.queue) {
        scheduler.wait(point);
    }
    target.core.gpu.trim_pools();
    target.core.flush_printed();
    target.core.health.check()
}

/// `cuCtxSynchronize` and its form with a context.
pub(crate) fn synchronize_context(context: &Context) -> Result {
    // What was printed before a fault comes out also where the fault was there before.
    context.core()?.synchronize()
}
