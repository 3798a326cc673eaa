//! The entry points for contexts and the context stack of each thread.

use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use sluice_cuda_frontend::given;

use super::devices::valid_context_flags;
use crate::context::{self, CONTEXTS, Context, Core, current_core};
use crate::error::{Error, Result};
use crate::ffi::{In, Out};
use crate::graphs::GRAPHS;
use crate::green_contexts::refuse_captures;
use crate::images::IMAGES;
use crate::stream::{self, PRIORITIES};
use crate::{ending, gpu, peers};

/// The bit of the numbers of green contexts.
const GREEN: u64 = 1 << 63;

fn create(place: Out<u64>, flags: u32, device: i32, version: u32) -> Result {
    place.required()?;
    let gpu = gpu::at(device)?;
    let context = Context::register(gpu, valid_context_flags(flags)?, version, false)?;
    if let Err(error) = context.activate() {
        CONTEXTS.remove(context.handle)?;
        return Err(error);
    }
    place.set(context.handle)?;
    context::push(context)
}

/// Resolves a context argument; null means the current context.
fn named(handle: u64) -> Result<Arc<Context>> {
    match handle {
        0 => context::current()?.ok_or(Error::INVALID_CONTEXT),
        handle => CONTEXTS.get(handle),
    }
}

fn pop(place: Out<u64>) -> Result {
    let context = context::pop()?;
    place.set_if_given(context.handle);
    Ok(())
}

fn current() -> Result<Arc<Context>> {
    context::current()?.ok_or(Error::INVALID_CONTEXT)
}

fn destroy(handle: u64) -> Result {
    if CONTEXTS.get(given::<Error>(handle)?)?.green().is_some() {
        return Err(Error::INVALID_CONTEXT);
    }
    // First: another allocation may get an address of its memory at once.
    GRAPHS.memory_ends_with(handle);
    ending::destroy(handle)?;
    GRAPHS.context_destroyed(handle);
    IMAGES.context_ended(handle);
    Ok(())
}

fn synchronize(context: &Context) -> Result {
    match context.green() {
        Some(green) => {
            refuse_captures(&green)?;
            GRAPHS.potentially_unsafe()?;
        }
        None => GRAPHS.synchronize_context(context.handle)?,
    }
    stream::synchronize_context(context)
}

/// The number of a context; those of green contexts have a bit of their own.
fn unique_id(context: &Context) -> Result<u64> {
    let core = context.core()?;
    Ok(context.green().map_or(core.id, |green| GREEN | green.id))
}

/// The settable limits with their maximum on this device.
fn limit_bound(limit: i32) -> Option<u64> {
    match limit {
        0 => Some(512 << 10), // stack of a thread
        1 => Some(1 << 30),   // output of kernels
        2 => Some(1 << 40),   // heap of kernels
        3 => Some(24),        // depth of launches from kernels
        4 => Some(1 << 31),   // pending launches from kernels
        5 => Some(128),       // fetch granularity, a hint
        6 => Some(0),         // persisting cache: none
        _ => None,
    }
}

/// The current context and another living one.
fn pair(handle: u64) -> Result<[Arc<Core>; 2]> {
    let core = current_core()?;
    let other = CONTEXTS.get(handle)?.core()?;
    if other.id == core.id { Err(Error::INVALID_CONTEXT) } else { Ok([core, other]) }
}

calls! {
    fn cuCtxCreate_v2(place: Out<u64>, flags: u32, device: i32) { create(place, flags, device, 3020) }

    fn cuCtxCreate_v3(place: Out<u64>, affinity: In<c_void>, count: i32, flags: u32, device: i32) {
        if affinity.is_given() && count != 0 {
            return Err(Error::UNSUPPORTED_EXEC_AFFINITY);
        }
        create(place, flags, device, 3021)
    }

    // The parameters are a pointer to affinities, their number, and a pointer to a graphics interface.
    fn cuCtxCreate_v4(place: Out<u64>, parameters: In<[u64; 3]>, flags: u32, device: i32) {
        match if parameters.is_given() { parameters.get()? } else { [0; 3] } {
            [0, _, 0] => create(place, flags, device, 3020),
            [0, ..] => Err(Error::NOT_SUPPORTED),
            _ => Err(Error::UNSUPPORTED_EXEC_AFFINITY),
        }
    }

    fn cuCtxDestroy(handle: u64) { destroy(handle) }

    fn cuCtxDestroy_v2(handle: u64) { destroy(handle) }

    fn cuCtxAttach(place: Out<u64>, flags: u32) {
        let current = current()?;
        if flags != 0 {
            return Err(Error::INVALID_VALUE);
        }
        place.set(current.handle)
    }

    // Attachments are not counted: a context lives until it is destroyed.
    fn cuCtxDetach(handle: u64) { CONTEXTS.get(handle).map(drop) }

    fn cuCtxPushCurrent(handle: u64) { context::push(CONTEXTS.get(given::<Error>(handle)?)?) }

    fn cuCtxPushCurrent_v2(handle: u64) { context::push(CONTEXTS.get(given::<Error>(handle)?)?) }

    fn cuCtxPopCurrent(place: Out<u64>) { pop(place) }

    fn cuCtxPopCurrent_v2(place: Out<u64>) { pop(place) }

    fn cuCtxSetCurrent(handle: u64) {
        let context = if handle == 0 { None } else { Some(CONTEXTS.get(handle)?) };
        context::set_current(context)
    }

    fn cuCtxGetCurrent(place: Out<u64>) { place.set(context::current()?.map_or(0, |context| context.handle)) }

    fn cuCtxGetDevice(device: Out<i32>) { device.set(current()?.gpu.ordinal) }

    fn cuCtxGetDevice_v2(device: Out<i32>, handle: u64) { device.set(named(handle)?.gpu.ordinal) }

    fn cuCtxGetFlags(flags: Out<u32>) { flags.set(current()?.flags.load(Relaxed)) }

    fn cuCtxSetFlags(flags: u32) {
        current()?.flags.store(valid_context_flags(flags)?, Relaxed);
        Ok(())
    }

    fn cuCtxGetId(handle: u64, id: Out<u64>) { id.set(unique_id(&*named(handle)?)?) }

    fn cuCtxGetApiVersion(handle: u64, version: Out<u32>) { version.set(named(handle)?.version) }

    fn cuCtxSynchronize() { synchronize(&*current()?) }

    fn cuCtxSynchronize_v2(handle: u64) { synchronize(&*named(handle)?) }

    fn cuCtxEnablePeerAccess(handle: u64, flags: u32) {
        current_core()?;
        if flags != 0 {
            return Err(Error::INVALID_VALUE);
        }
        let [core, other] = pair(handle)?;
        peers::enable(&core, &other)
    }

    fn cuCtxDisablePeerAccess(handle: u64) {
        let [core, other] = pair(handle)?;
        peers::disable(&core, &other)
    }

    fn cuCtxGetStreamPriorityRange(least: Out<i32>, greatest: Out<i32>) {
        current_core()?;
        least.set_if_given(*PRIORITIES.end());
        greatest.set_if_given(*PRIORITIES.start());
        Ok(())
    }

    fn cuCtxGetLimit(value: Out<u64>, limit: i32) {
        limit_bound(limit).ok_or(Error::INVALID_VALUE)?;
        value.set(current_core()?.limit(limit)?)
    }

    fn cuCtxSetLimit(limit: i32, value: u64) {
        let bound = limit_bound(limit).ok_or(Error::INVALID_VALUE)?;
        let core = current_core()?;
        if value > bound {
            return Err(Error::INVALID_VALUE);
        }
        core.set_limit(usize::try_from(limit).map_err(|_| Error::UNSUPPORTED_LIMIT)?, value)
    }

    // Writes of other devices are visible at once.
    fn cuFlushGPUDirectRDMAWrites(target: u32, scope: u32) {
        const CURRENT_CONTEXT: u32 = 0;
        const OWNER: u32 = 100;
        const ALL_DEVICES: u32 = 200;
        current_core()?;
        let is_known = target == CURRENT_CONTEXT && [OWNER, ALL_DEVICES].contains(&scope);
        if is_known { Ok(()) } else { Err(Error::INVALID_VALUE) }
    }

    // The preference between caches; this device has none.
    fn cuCtxGetCacheConfig(config: Out<u32>) { current_core()?; config.set(0) }

    fn cuCtxSetCacheConfig(config: u32) {
        current_core()?;
        if config > 3 { Err(Error::INVALID_VALUE) } else { Ok(()) }
    }

    fn cuCtxGetSharedMemConfig(config: Out<u32>) { current_core()?; config.set(1) }

    fn cuCtxSetSharedMemConfig(config: u32) {
        current_core()?;
        if config > 2 { Err(Error::INVALID_VALUE) } else { Ok(()) }
    }

    // Affinity of execution is a feature of MPS.
    fn cuCtxGetExecAffinity(affinity: Out<c_void>, kind: u32) {
        current_core()?;
        affinity.required()?;
        if kind != 0 {
            return Err(Error::UNSUPPORTED_EXEC_AFFINITY);
        }
        Err(Error::NOT_SUPPORTED)
    }

    fn cuCtxResetPersistingL2Cache() { current_core()?; Ok(()) }
}
