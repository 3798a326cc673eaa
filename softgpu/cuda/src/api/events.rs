//! The entry points for events.

use std::sync::Arc;

use crate::context::{CONTEXTS, Core};
use crate::error::{Error, Result};
use crate::event::{self, EVENTS};
use crate::ffi::Out;
use crate::graphs::GRAPHS;
use crate::green::Green;
use crate::green_contexts::refuse_captures;
use crate::stream::{Implicit, target};

/// The flag by which recording an event becomes a node, which is only allowed in a capture.
const EXTERNAL: u32 = 1;

fn record(implicit: Implicit, event: u64, stream: u64, flags: u32) -> Result {
    if flags & !EXTERNAL != 0 {
        return Err(Error::INVALID_VALUE);
    }
    let target = target(stream, implicit)?;
    let found = event::find(event, &target)?;
    if !GRAPHS.record_event(|| Ok(target.facts()), event, flags == EXTERNAL)? {
        found.record(&target);
    }
    Ok(())
}

fn destroy(event: u64) -> Result {
    event::destroy(event)?;
    GRAPHS.event_destroyed(event);
    Ok(())
}

fn elapsed(start: u64, end: u64) -> Result<f32> {
    GRAPHS.check_event(start)?;
    GRAPHS.check_event(end)?;
    event::elapsed(start, end)
}

/// A context of a call about all its work, alive and sound, and its green context if it is one.
fn whole_context(context: u64) -> Result<(Arc<Core>, Option<Arc<Green>>)> {
    let context = CONTEXTS.get(context)?;
    let core = context.core()?;
    core.health.check()?;
    Ok((core, context.green()))
}

/// Applies the rules of captures to such a call.
fn use_context(core: &Core, green: Option<&Green>) -> Result {
    match green {
        Some(green) => refuse_captures(green),
        None => GRAPHS.use_context(core.handle),
    }
}

fn elapsed_time(milliseconds: Out<f32>, start: u64, end: u64) -> Result {
    // NVIDIA's driver has this code for a missing place, too.
    let place = milliseconds.required().map_err(|_| Error::INVALID_HANDLE)?;
    place.set(elapsed(start, end)?)
}

calls! {
    fn cuCtxRecordEvent(context: u64, event: u64) {
        let (core, green) = whole_context(context)?;
        let event = event::of_context(event, &core)?;
        use_context(&core, green.as_deref())?;
        match green {
            Some(green) => event.record_behind(&green.queues),
            None => event.record_behind(&*core.queues),
        }
        Ok(())
    }

    fn cuCtxWaitEvent(context: u64, event: u64) {
        let (core, green) = whole_context(context)?;
        let found = EVENTS.get(event)?;
        GRAPHS.check_event(event)?;
        use_context(&core, green.as_deref())?;
        match green {
            Some(green) => found.hold(&green.queues),
            None => found.hold(&*core.queues),
        }
        Ok(())
    }

    fn cuEventCreate(place: Out<u64>, flags: u32) {
        place.required()?;
        place.set(event::create(flags)?)
    }

    fn cuEventDestroy(event: u64) { destroy(event) }

    fn cuEventDestroy_v2(event: u64) { destroy(event) }

    fn cuEventQuery(event: u64) {
        GRAPHS.synchronize_event(event)?;
        event::query(event)
    }

    fn cuEventSynchronize(event: u64) {
        GRAPHS.synchronize_event(event)?;
        event::synchronize(event)
    }

    fn cuEventElapsedTime(milliseconds: Out<f32>, start: u64, end: u64) { elapsed_time(milliseconds, start, end) }

    fn cuEventElapsedTime_v2(milliseconds: Out<f32>, start: u64, end: u64) { elapsed_time(milliseconds, start, end) }
}

twins! {
    fn cuEventRecord, cuEventRecord_ptsz(implicit; event: u64, stream: u64) {
        record(implicit, event, stream, 0)
    }

    fn cuEventRecordWithFlags, cuEventRecordWithFlags_ptsz(implicit; event: u64, stream: u64, flags: u32) {
        record(implicit, event, stream, flags)
    }
}
