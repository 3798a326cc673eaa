//! The event functions of the C API.

use super::{
    green,
    shared_events::{self, is_complete, wait_in},
};
use crate::{
    arguments::{Call, Out},
    error::{Error, Result},
    graphs::{self, GRAPHS},
    process,
    session::PostTarget,
    state::{
        events::{EventRef, INTERPROCESS},
        gates::Whole,
        streams::StreamRef,
    },
    turns,
};
use core::ffi::c_uint;
use sluice_protocol::calls::wire;

/// `CU_EVENT_DISABLE_TIMING`.
const DISABLE_TIMING: u32 = 2;
/// The flag by which the recording of an event becomes a node, which is only allowed in a capture.
const EXTERNAL: u32 = 1;

pub(crate) fn cuEventCreate(_: Call, place: Out<u64>, flags: c_uint) -> Result {
    let process = process::get()?;
    let place = place.required()?;
    let context = process.current()?;
    if flags > 7 {
        return Err(Error::INVALID_VALUE);
    }
    // An event of several processes must not measure time.
    if flags & INTERPROCESS != 0 && flags & DISABLE_TIMING == 0 {
        return Err(Error::INVALID_VALUE);
    }
    place.set(process.events.create(&process.session, context.raw, flags)?.raw())
}

pub(crate) fn cuEventDestroy_v2(_: Call, event: u64) -> Result {
    let process = process::get()?;
    process.events.destroy(&process.session, process.events.resolve(event)?)?;
    GRAPHS.event_destroyed(event);
    shared_events::destroyed(process, event)
}

pub(crate) fn cuEventDestroy(call: Call, event: u64) -> Result {
    cuEventDestroy_v2(call, event)
}

pub(crate) fn cuEventRecord(call: Call, event: u64, stream: u64) -> Result {
    cuEventRecordWithFlags(call, event, stream, 0)
}

pub(crate) fn cuEventRecordWithFlags(call: Call, event: u64, stream: u64, flags: c_uint) -> Result {
    let process = process::get()?;
    let found = process.events.resolve(event)?;
    let stream = process.stream_or_default(call, stream)?;
    if flags & !EXTERNAL != 0 {
        return Err(Error::INVALID_VALUE);
    }
    if found.context != stream.context {
        return Err(Error::INVALID_HANDLE);
    }
    if GRAPHS.record_event(|| graphs::facts(process, stream), event, flags == EXTERNAL)? {
        return Ok(());
    }
    match shared_events::of(process, &found) {
        Some(shared) => shared_events::record(process, &shared, stream),
        None => found.record(&process.session, stream),
    }
}

/// The first driver with `cuCtxRecordEvent`.
const CONTEXT_EVENTS_SINCE: u32 = 12050;

pub(crate) fn cuCtxRecordEvent(_: Call, context: u64, event: u64) -> Result {
    let process = process::get()?;
    process.session.healthy()?;
    let context = process.contexts.get(context)?;
    if context.green != 0 {
        return green::record(process, &process.contexts.greens.get(context.green)?, event);
    }
    let found = process.events.resolve(event)?;
    if found.context != context.raw {
        return Err(Error::INVALID_HANDLE);
    }
    if process.session.driver_version < CONTEXT_EVENTS_SINCE {
        return Err(Error::NOT_SUPPORTED);
    }
    GRAPHS.use_context(context.raw)?;
    let session = &process.session;
    let record = |stream: StreamRef<'_>| {
        let call = wire::context_record::Args { event: found.id };
        // A recording that the driver cannot take would hold up all streams in the worker; here it waits for its own.
        let target = stream.target();
        let target = PostTarget { credits: target.credits.min(session.room), ..target };
        let sequence = session.post(stream.context, Some(target), &call)?;
        found.recorded_at(stream, sequence);
        shared_events::of(process, &found)
            .map_or(Ok(()), |shared| shared_events::record(process, &shared, stream))
    };
    process.gates.record(session, &process.streams, &process.events, Whole::of_context(context.raw), record)
}

pub(crate) fn cuCtxWaitEvent(_: Call, context: u64, event: u64) -> Result {
    let process = process::get()?;
    process.session.healthy()?;
    let context = process.contexts.get(context)?;
    if context.green != 0 {
        return green::wait(process, &process.contexts.greens.get(context.green)?, event);
    }
    let found = process.events.resolve(event)?;
    GRAPHS.check_event(event)?;
    GRAPHS.use_context(context.raw)?;
    if is_complete(process, event)? {
        return Ok(());
    }
    let wait = |stream: StreamRef<'_>| wait_in(process, &found, stream);
    let whole = Whole::of_context(context.raw);
    process.gates.wait(&process.session, &process.streams, &process.events, whole, wait)
}

pub(crate) fn cuEventQuery(_: Call, event: u64) -> Result {
    let process = process::get()?;
    process.session.healthy()?;
    let context = process.events.resolve(event)?.context;
    GRAPHS.synchronize_event(event)?;
    let complete = is_complete(process, event)?;
    graphs::sweep(process);
    if !complete {
        return Err(Error::NOT_READY);
    }
    turns::of_program(process)?;
    process.session.report(context)
}

pub(crate) fn cuEventSynchronize(_: Call, event: u64) -> Result {
    let process = process::get()?;
    process.session.healthy()?;
    let found = process.events.resolve(event)?;
    GRAPHS.synchronize_event(event)?;
    match (shared_events::of(process, &found), found.recorded()) {
        (Some(shared), _) => shared_events::synchronize(process, &shared)?,
        (None, Some((slot, sequence))) => process.session.wait_complete(slot, sequence)?,
        (None, None) => {}
    }
    graphs::sweep(process);
    process.session.healthy()?;
    turns::of_program(process)?;
    process.session.report(found.context)
}

pub(crate) fn cuEventElapsedTime(_: Call, milliseconds: Out<f32>, start: u64, end: u64) -> Result {
    let process = process::get()?;
    // NVIDIA's driver has this code for a missing place, too.
    let place = milliseconds.required().map_err(|_| Error::INVALID_HANDLE)?;
    let (from, to) = (process.events.resolve(start)?, process.events.resolve(end)?);
    GRAPHS.check_event(start)?;
    GRAPHS.check_event(end)?;
    let timed = |event: &EventRef<'_>| event.flags() & DISABLE_TIMING == 0 && event.recorded().is_some();
    if !timed(&from) || !timed(&to) {
        return Err(Error::INVALID_HANDLE);
    }
    process.session.healthy()?;
    if !is_complete(process, start)? || !is_complete(process, end)? {
        return Err(Error::NOT_READY);
    }
    let answer =
        process.session.sync(from.context, &wire::event_elapsed::Args { start: from.id, end: to.id })?;
    place.set(answer.milliseconds)
}

pub(crate) fn cuEventElapsedTime_v2(call: Call, milliseconds: Out<f32>, start: u64, end: u64) -> Result {
    cuEventElapsedTime(call, milliseconds, start, end)
}
