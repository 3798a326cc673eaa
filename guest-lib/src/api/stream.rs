//! The stream functions of the C API.

use super::{green, shared_events};
use crate::{
    arguments::{Call, HostFunction, HostTask, In, Out, StreamCallback},
    error::{Error, Result},
    graphs::{self, GRAPHS},
    process::{self, ProcessState},
    state::{
        green::view,
        streams::{NON_BLOCKING, StreamRef},
    },
    turns,
};
use core::ffi::{c_int, c_uint, c_void};
use sluice_cuda_frontend::{handles::PER_THREAD_STREAM, stream_attributes};
use sluice_cuda_graphs::Work;
use sluice_protocol::calls::wire;

/// `CU_HOST_TASK_SPINWAIT`, the larger of the two modes.
const HOST_TASK_SPINWAIT: c_uint = 1;

pub(crate) fn cuStreamCreate(call: Call, place: Out<u64>, flags: c_uint) -> Result {
    cuStreamCreateWithPriority(call, place, flags, 0)
}

pub(crate) fn cuStreamCreateWithPriority(_: Call, place: Out<u64>, flags: c_uint, priority: c_int) -> Result {
    let process = process::get()?;
    let place = place.required()?;
    if flags & !NON_BLOCKING != 0 {
        return Err(Error::INVALID_VALUE);
    }
    let context = process.current()?;
    if context.green != 0 {
        // All streams of a green context are non-blocking.
        let green = process.contexts.greens.get(context.green)?;
        return place.set(green::create_stream(process, &green, priority)?);
    }
    let priority = process.devices.get(context.device)?.clamped_priority(priority);
    let stream = process.streams.create(&process.session, context.raw, flags, priority)?;
    process.gates.enter(&process.session, stream)?;
    place.set(stream.id().raw())
}

pub(crate) fn cuStreamDestroy_v2(call: Call, stream: u64) -> Result {
    let process = process::get()?;
    if stream <= PER_THREAD_STREAM {
        return Err(Error::INVALID_HANDLE);
    }
    if process.streams.destroy_detached(stream) {
        GRAPHS.stream_destroyed(stream);
        return Ok(());
    }
    let stream = process.stream_or_default(call, stream)?;
    if stream.green() != 0 {
        process.gates.leave(&process.session, &process.streams, &process.events, stream)?;
    }
    process.streams.destroy(&process.session, stream)?;
    GRAPHS.stream_destroyed(stream.id().raw());
    Ok(())
}

pub(crate) fn cuStreamDestroy(call: Call, stream: u64) -> Result {
    cuStreamDestroy_v2(call, stream)
}

pub(crate) fn cuStreamSynchronize(call: Call, stream: u64) -> Result {
    let process = process::get()?;
    process.session.healthy()?;
    let stream = process.stream_or_default(call, stream)?;
    graphs::refuse(process, stream)?;
    process.session.wait_all(process.extent(stream)?)?;
    graphs::sweep(process);
    process.session.healthy()?;
    turns::of_program(process)?;
    process.session.report(stream.context)
}

pub(crate) fn cuStreamQuery(call: Call, stream: u64) -> Result {
    let process = process::get()?;
    process.session.healthy()?;
    let stream = process.stream_or_default(call, stream)?;
    graphs::refuse(process, stream)?;
    let extent = process.extent(stream)?;
    let complete = extent.iter().all(|(slot, sequence)| process.session.is_complete(*slot, *sequence));
    graphs::sweep(process);
    if !complete {
        return Err(Error::NOT_READY);
    }
    turns::of_program(process)?;
    process.session.report(stream.context)
}

/// The flag by which a wait for an event becomes a node, which is only allowed in a capture.
const EXTERNAL: u32 = 1;

pub(crate) fn cuStreamWaitEvent(call: Call, stream: u64, event: u64, flags: c_uint) -> Result {
    let process = process::get()?;
    let stream = process.stream_or_default(call, stream)?;
    let found = process.events.resolve(event)?;
    if flags & !EXTERNAL != 0 {
        return Err(Error::INVALID_VALUE);
    }
    if GRAPHS.wait_event(|| graphs::facts(process, stream), event, flags == EXTERNAL)? {
        return Ok(());
    }
    let event = found;
    if let Some(shared) = shared_events::of(process, &event) {
        process.session.healthy()?;
        return shared_events::wait(process, &shared, stream);
    }
    match event.recorded() {
        // Never recorded, or already complete: there is nothing to wait for.
        None => process.session.healthy(),
        Some((slot, sequence)) if process.session.is_complete(slot, sequence) => process.session.healthy(),
        Some(_) => process
            .session
            .post(stream.context, Some(stream.target()), &wire::stream_wait::Args { event: event.id })
            .map(drop),
    }
}

fn look<R>(
    call: Call,
    stream: u64,
    what: impl FnOnce(&'static ProcessState, StreamRef<'_>) -> Result<R>,
) -> Result<R> {
    let process = process::get()?;
    what(process, process.stream_or_default(call, stream)?)
}

pub(crate) fn cuStreamGetFlags(call: Call, stream: u64, flags: Out<c_uint>) -> Result {
    look(call, stream, |_, stream| flags.set(stream.flags()))
}

pub(crate) fn cuStreamGetPriority(call: Call, stream: u64, priority: Out<c_int>) -> Result {
    look(call, stream, |_, stream| priority.set(stream.priority()))
}

pub(crate) fn cuStreamGetCtx(call: Call, stream: u64, context: Out<u64>) -> Result {
    look(call, stream, |_, stream| {
        context.set(if stream.green() == 0 { stream.context } else { view(stream.green()) })
    })
}

pub(crate) fn cuStreamGetCtx_v2(call: Call, stream: u64, context: Out<u64>, green: Out<c_void>) -> Result {
    look(call, stream, |_, stream| {
        context.set(stream.context)?;
        if green.address() != 0 {
            green.set_bytes(&stream.green().to_ne_bytes())?;
        }
        Ok(())
    })
}

pub(crate) fn cuStreamGetId(call: Call, stream: u64, id: Out<u64>) -> Result {
    look(call, stream, |_, stream| id.set(stream.id().raw()))
}

pub(crate) fn cuStreamGetDevice(call: Call, stream: u64, device: Out<c_int>) -> Result {
    look(call, stream, |process, stream| device.set(process.contexts.device(stream.context)?))
}

/// Runs a function of the program in the order of a stream.
fn run_in_order(call: Call, stream: u64, task: Option<HostTask>) -> Result {
    let process = process::get()?;
    let stream = process.stream_or_default(call, stream)?;
    process.session.healthy()?;
    let task = task.ok_or(Error::INVALID_VALUE)?;
    match task.as_node() {
        Some(node) if graphs::captured(process, stream, || Ok(Work::Host(node)))? => return Ok(()),
        Some(_) => {}
        // No node calls a callback.
        None => graphs::refuse(process, stream)?,
    }
    process.host_functions.post(&process.session, task, |token| {
        process.session.post(stream.context, Some(stream.target()), &wire::host_call::Args { token })
    })
}

pub(crate) fn cuLaunchHostFunc(
    call: Call,
    stream: u64,
    function: Option<HostFunction>,
    data: Out<c_void>,
) -> Result {
    run_in_order(call, stream, function.map(|function| HostTask::plain(function, data.address())))
}

pub(crate) fn cuLaunchHostFunc_v2(
    call: Call,
    stream: u64,
    function: Option<HostFunction>,
    data: Out<c_void>,
    sync_mode: c_uint,
) -> Result {
    // The driver blocks or spins for the function, at its choice here.
    if sync_mode > HOST_TASK_SPINWAIT {
        process::get()?;
        return Err(Error::INVALID_VALUE);
    }
    cuLaunchHostFunc(call, stream, function, data)
}

pub(crate) fn cuStreamAddCallback(
    call: Call,
    stream: u64,
    callback: Option<StreamCallback>,
    data: Out<c_void>,
    flags: c_uint,
) -> Result {
    if flags != 0 {
        process::get()?;
        return Err(Error::INVALID_VALUE);
    }
    let task = callback.map(|callback| HostTask::callback(callback, stream, data.address()));
    run_in_order(call, stream, task)
}

pub(crate) fn cuStreamGetAttribute(call: Call, stream: u64, id: c_uint, value: Out<c_void>) -> Result {
    look(call, stream, |process, stream| {
        let (raw, priority) = (stream.id().raw(), stream.priority());
        value.set_bytes(&process.streams.attributes.get(raw, id, priority, Error::INVALID_VALUE)?)
    })
}

fn set_attribute(
    process: &ProcessState,
    stream: StreamRef<'_>,
    attribute: c_uint,
    value: [u8; stream_attributes::BYTES],
) -> Result {
    if !stream_attributes::is_of_host(attribute) {
        let mut words = [0; 8];
        words
            .iter_mut()
            .zip(value.as_chunks().0)
            .for_each(|(word, bytes)| *word = u64::from_ne_bytes(*bytes));
        let call = wire::stream_set_attribute::Args { slot: stream.slot, attribute, value: words };
        process.session.sync(stream.context, &call)?;
    }
    process.streams.attributes.set(stream.id().raw(), attribute, value);
    Ok(())
}

pub(crate) fn cuStreamSetAttribute(call: Call, stream: u64, id: c_uint, value: In<c_void>) -> Result {
    look(call, stream, |process, stream| {
        let value = value.cast().get()?;
        stream_attributes::check(id, &value, Error::INVALID_VALUE)?;
        set_attribute(process, stream, id, value)
    })
}

pub(crate) fn cuStreamCopyAttributes(call: Call, to: u64, from: u64) -> Result {
    look(call, to, |process, to| {
        let from = process.stream_or_default(call, from)?;
        let values = process.streams.attributes.of(from.id().raw());
        values.into_iter().try_for_each(|(id, value)| set_attribute(process, to, id, value))
    })
}
