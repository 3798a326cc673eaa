//! The context functions of the C API.

use super::{context_end::end_context, green};
use crate::{
    arguments::{Call, Out},
    error::{Error, Result},
    graphs::{self, GRAPHS},
    process::{self, ProcessState},
    state::thread,
    turns,
};
use core::ffi::{c_int, c_uint, c_void};
use sluice_cuda_frontend::{given, retains::Retainer};

/// Bits of `CUctx_flags` that exist.
const FLAGS: u32 = 0xff;

pub(crate) fn cuDevicePrimaryCtxRetain(_: Call, place: Out<u64>, dev: c_int) -> Result {
    let process = process::get()?;
    process.session.healthy()?;
    let place = place.required()?;
    let ProcessState { contexts, session, streams, devices, .. } = process;
    place.set(contexts.retain_primary(session, streams, devices, dev, Retainer::Program)?)
}

/// Releases a primary context, with this error if the program has not retained it.
fn release_primary(dev: c_int, unheld: Error) -> Result {
    let process = process::get()?;
    let end = |id| end_context(process, id);
    if process.contexts.release_primary(dev, Retainer::Program, end)? { Ok(()) } else { Err(unheld) }
}

pub(crate) fn cuDevicePrimaryCtxRelease(_: Call, dev: c_int) -> Result {
    release_primary(dev, Error::NOT_PERMITTED)
}

pub(crate) fn cuDevicePrimaryCtxRelease_v2(_: Call, dev: c_int) -> Result {
    release_primary(dev, Error::INVALID_CONTEXT)
}

pub(crate) fn cuDevicePrimaryCtxReset(_: Call, dev: c_int) -> Result {
    let process = process::get()?;
    process.contexts.reset_primary(dev, |id| end_context(process, id))
}

pub(crate) fn cuDevicePrimaryCtxReset_v2(call: Call, dev: c_int) -> Result {
    cuDevicePrimaryCtxReset(call, dev)
}

pub(crate) fn cuDevicePrimaryCtxSetFlags(_: Call, dev: c_int, flags: c_uint) -> Result {
    let process = process::get()?;
    if flags & !FLAGS != 0 {
        return Err(Error::INVALID_VALUE);
    }
    process.contexts.set_flags(process.contexts.primary(dev)?, flags)
}

pub(crate) fn cuDevicePrimaryCtxSetFlags_v2(call: Call, dev: c_int, flags: c_uint) -> Result {
    cuDevicePrimaryCtxSetFlags(call, dev, flags)
}

pub(crate) fn cuDevicePrimaryCtxGetState(
    _: Call,
    dev: c_int,
    flags: Out<c_uint>,
    active: Out<c_int>,
) -> Result {
    let process = process::get()?;
    let (value, is_active) = process.contexts.primary_state(dev)?;
    active.required()?;
    flags.set(value)?;
    active.set(c_int::from(is_active))
}

fn create(place: Out<u64>, flags: c_uint, dev: c_int) -> Result {
    let process = process::get()?;
    process.session.healthy()?;
    let place = place.required()?;
    if flags & !FLAGS != 0 {
        return Err(Error::INVALID_VALUE);
    }
    place.set(process.contexts.create(&process.session, &process.streams, &process.devices, dev, flags)?)
}

pub(crate) fn cuCtxCreate_v2(_: Call, place: Out<u64>, flags: c_uint, dev: c_int) -> Result {
    create(place, flags, dev)
}

pub(crate) fn cuCtxCreate_v3(
    _: Call,
    place: Out<u64>,
    affinity: Out<c_void>,
    count: c_int,
    flags: c_uint,
    dev: c_int,
) -> Result {
    // Execution affinity is an MPS feature; its device attribute says that there is none.
    if affinity.address() != 0 && count != 0 {
        return Err(Error::UNSUPPORTED_EXEC_AFFINITY);
    }
    create(place, flags, dev)
}

pub(crate) fn cuCtxCreate_v4(
    _: Call,
    place: Out<u64>,
    parameters: Out<c_void>,
    flags: c_uint,
    dev: c_int,
) -> Result {
    // A pointer to affinities, their number, and a pointer to a graphics interface.
    match if parameters.is_given() { parameters.cast::<[u64; 3]>().get()? } else { [0; 3] } {
        [0, _, 0] => create(place, flags, dev),
        [0, ..] => Err(Error::NOT_SUPPORTED),
        _ => Err(Error::UNSUPPORTED_EXEC_AFFINITY),
    }
}

pub(crate) fn cuCtxDestroy_v2(_: Call, context: u64) -> Result {
    let process = process::get()?;
    process.contexts.destroy(given::<Error>(context)?, |id| end_context(process, id))
}

pub(crate) fn cuCtxDestroy(call: Call, context: u64) -> Result {
    cuCtxDestroy_v2(call, context)
}

pub(crate) fn cuCtxAttach(_: Call, place: Out<u64>, flags: c_uint) -> Result {
    let process = process::get()?;
    process.current()?;
    if flags != 0 {
        return Err(Error::INVALID_VALUE);
    }
    place.set(thread::current_context())
}

pub(crate) fn cuCtxDetach(_: Call, context: u64) -> Result {
    // Attachments are not counted: a context lives until it is destroyed.
    process::get()?.contexts.get(context).map(|_| ())
}

fn known(process: &ProcessState, context: u64) -> Result {
    if process.contexts.exists(context) { Ok(()) } else { Err(Error::INVALID_CONTEXT) }
}

pub(crate) fn cuCtxPushCurrent_v2(_: Call, context: u64) -> Result {
    let process = process::get()?;
    known(process, given::<Error>(context)?)?;
    thread::push(context);
    Ok(())
}

pub(crate) fn cuCtxPushCurrent(call: Call, context: u64) -> Result {
    cuCtxPushCurrent_v2(call, context)
}

pub(crate) fn cuCtxPopCurrent_v2(_: Call, place: Out<u64>) -> Result {
    process::get()?;
    let popped = thread::pop().ok_or(Error::INVALID_CONTEXT)?;
    place.set_if_given(popped);
    Ok(())
}

pub(crate) fn cuCtxPopCurrent(call: Call, place: Out<u64>) -> Result {
    cuCtxPopCurrent_v2(call, place)
}

pub(crate) fn cuCtxSetCurrent(_: Call, context: u64) -> Result {
    let process = process::get()?;
    if context != 0 {
        known(process, context)?;
    }
    thread::set_current(context);
    Ok(())
}

pub(crate) fn cuCtxGetCurrent(_: Call, place: Out<u64>) -> Result {
    process::get()?;
    place.set(thread::current_context())
}

/// The context that a call names; 0 names the current one.
fn named(process: &ProcessState, context: u64) -> Result<u64> {
    let context = if context == 0 { thread::current_context() } else { context };
    known(process, context)?;
    Ok(context)
}

pub(crate) fn cuCtxGetDevice(call: Call, device: Out<c_int>) -> Result {
    cuCtxGetDevice_v2(call, device, 0)
}

pub(crate) fn cuCtxGetDevice_v2(_: Call, device: Out<c_int>, context: u64) -> Result {
    let process = process::get()?;
    device.set(process.contexts.device(named(process, context)?)?)
}

pub(crate) fn cuCtxGetFlags(_: Call, flags: Out<c_uint>) -> Result {
    let process = process::get()?;
    flags.set(process.current()?.flags)
}

pub(crate) fn cuCtxSetFlags(_: Call, flags: c_uint) -> Result {
    let process = process::get()?;
    if flags & !FLAGS != 0 {
        return Err(Error::INVALID_VALUE);
    }
    process.contexts.set_flags(process.current()?.raw, flags)
}

pub(crate) fn cuCtxGetId(_: Call, context: u64, id: Out<u64>) -> Result {
    id.set(process::get()?.contexts.unique_id(context)?)
}

pub(crate) fn cuCtxGetApiVersion(_: Call, context: u64, version: Out<c_uint>) -> Result {
    let process = process::get()?;
    named(process, context)?;
    // The version of the context API, which has been this one since CUDA 4.
    version.set(3020)
}

pub(crate) fn cuCtxSynchronize(call: Call) -> Result {
    cuCtxSynchronize_v2(call, 0)
}

pub(crate) fn cuCtxSynchronize_v2(_: Call, context: u64) -> Result {
    let process = process::get()?;
    let context = match context {
        0 => process.current()?,
        raw => process.contexts.get(raw)?,
    };
    process.session.healthy()?;
    if context.green != 0 {
        return green::synchronize(process, &*process.contexts.greens.get(context.green)?);
    }
    GRAPHS.synchronize_context(context.raw)?;
    // Work posted after this point is not waited for.
    process.session.wait_all(process.streams.posted(context.raw, false))?;
    graphs::sweep(process);
    process.session.healthy()?;
    turns::of_program(process)?;
    process.session.report(context.raw)
}

pub(crate) fn cuCtxGetStreamPriorityRange(_: Call, least: Out<c_int>, greatest: Out<c_int>) -> Result {
    let process = process::get()?;
    let (low, high) = process.devices.get(process.current()?.device)?.priorities;
    least.set_if_given(low);
    greatest.set_if_given(high);
    Ok(())
}

// Preferences that change nothing here: hardware takes them as hints.

pub(crate) fn cuCtxGetCacheConfig(_: Call, config: Out<c_uint>) -> Result {
    let process = process::get()?;
    process.current()?;
    config.set(0)
}

pub(crate) fn cuCtxSetCacheConfig(_: Call, config: c_uint) -> Result {
    let process = process::get()?;
    process.current()?;
    if config <= 3 { Ok(()) } else { Err(Error::INVALID_VALUE) }
}

pub(crate) fn cuCtxGetSharedMemConfig(_: Call, config: Out<c_uint>) -> Result {
    let process = process::get()?;
    process.current()?;
    config.set(1)
}

pub(crate) fn cuCtxSetSharedMemConfig(_: Call, config: c_uint) -> Result {
    let process = process::get()?;
    process.current()?;
    if config <= 2 { Ok(()) } else { Err(Error::INVALID_VALUE) }
}

pub(crate) fn cuCtxResetPersistingL2Cache(_: Call) -> Result {
    let process = process::get()?;
    process.current().map(|_| ())
}

pub(crate) fn cuCtxGetExecAffinity(_: Call, affinity: Out<c_void>, kind: c_uint) -> Result {
    let process = process::get()?;
    process.current()?;
    affinity.required()?;
    if kind != 0 {
        return Err(Error::UNSUPPORTED_EXEC_AFFINITY);
    }
    Err(Error::NOT_SUPPORTED)
}
