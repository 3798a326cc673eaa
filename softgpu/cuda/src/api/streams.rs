//! The entry points for streams.

use std::ffi::c_void;

use crate::error::{Error, Result};
use crate::event;
use crate::ffi::Out;
use crate::schedule::{Work, scheduler};
use crate::stream::{self, Implicit, StreamTarget, target};
use crate::threads;

type HostFunction = Option<unsafe extern "C" fn(*mut c_void)>;
type StreamCallback = Option<unsafe extern "C" fn(u64, u32, *mut c_void)>;

/// A pointer of the program, passed back to its callback.
struct Opaque(*mut c_void);

// SAFETY: never dereferenced here; the API lets the callback run on another thread.
unsafe impl Send for Opaque {}

fn launch_host(target: &StreamTarget, function: HostFunction, data: *mut c_void) -> Result {
    let function = function.ok_or(Error::INVALID_VALUE)?;
    let data = Opaque(data);
    let task = Box::new(move || {
        let data = data;
        // SAFETY: the program requested this call.
        threads::in_host_function(|| unsafe { function(data.0) });
        Ok(())
    });
    scheduler().submit(target.queue, Vec::new(), Work::Task(task));
    Ok(())
}

fn add_callback(target: &StreamTarget, stream: u64, function: StreamCallback, data: *mut c_void) -> Result {
    let function = function.ok_or(Error::INVALID_VALUE)?;
    let data = Opaque(data);
    let call = Box::new(move |code: u32| {
        let data = data;
        // SAFETY: the program requested this call.
        threads::in_host_function(|| unsafe { function(stream, code, data.0) });
    });
    scheduler().submit(target.queue, Vec::new(), Work::Callback(call));
    Ok(())
}

/// This driver never captures.
const NOT_CAPTURING: u32 = 0;

fn capture_status(stream: u64, implicit: Implicit, status: Out<u32>) -> Result {
    target(stream, implicit)?;
    status.set(NOT_CAPTURING)
}

calls! {
    fn cuStreamCreate(place: Out<u64>, flags: u32) {
        place.required()?;
        place.set(stream::create(flags, 0)?)
    }

    fn cuStreamCreateWithPriority(place: Out<u64>, flags: u32, priority: i32) {
        place.required()?;
        place.set(stream::create(flags, priority)?)
    }

    fn cuStreamDestroy(stream: u64) { stream::destroy(stream) }

    fn cuStreamDestroy_v2(stream: u64) { stream::destroy(stream) }
}

twins! {
    fn cuStreamQuery, cuStreamQuery_ptsz(implicit; stream: u64) { stream::query(&target(stream, implicit)?) }

    fn cuStreamSynchronize, cuStreamSynchronize_ptsz(implicit; stream: u64) {
        stream::synchronize(&target(stream, implicit)?)
    }

    fn cuStreamWaitEvent, cuStreamWaitEvent_ptsz(implicit; stream: u64, event: u64, flags: u32) {
        // Flag 1 requests a node of a graph, which is not allowed outside of a graph.
        if flags != 0 {
            return Err(Error::INVALID_VALUE);
        }
        event::wait(event, &target(stream, implicit)?)
    }

    fn cuStreamGetFlags, cuStreamGetFlags_ptsz(implicit; stream: u64, flags: Out<u32>) {
        flags.set(target(stream, implicit)?.flags)
    }

    fn cuStreamGetPriority, cuStreamGetPriority_ptsz(implicit; stream: u64, priority: Out<i32>) {
        priority.set(target(stream, implicit)?.priority)
    }

    fn cuStreamGetId, cuStreamGetId_ptsz(implicit; stream: u64, id: Out<u64>) { id.set(target(stream, implicit)?.id) }

    fn cuStreamGetCtx, cuStreamGetCtx_ptsz(implicit; stream: u64, context: Out<u64>) {
        context.set(target(stream, implicit)?.core.handle)
    }

    fn cuStreamGetCtx_v2, cuStreamGetCtx_v2_ptsz(implicit; stream: u64, context: Out<u64>, green: Out<u64>) {
        let target = target(stream, implicit)?;
        context.set(target.core.handle)?;
        green.set_if_given(0);
        Ok(())
    }

    fn cuStreamGetDevice, cuStreamGetDevice_ptsz(implicit; stream: u64, device: Out<i32>) {
        device.set(target(stream, implicit)?.core.gpu.ordinal)
    }

    fn cuLaunchHostFunc, cuLaunchHostFunc_ptsz(implicit; stream: u64, function: HostFunction, data: *mut c_void) {
        launch_host(&target(stream, implicit)?, function, data)
    }

    fn cuLaunchHostFunc_v2, cuLaunchHostFunc_v2_ptsz(
        implicit; stream: u64, function: HostFunction, data: *mut c_void, sync_mode: u32,
    ) {
        // The driver may wait for a host function blocked or spinning; this one has no use for the choice.
        if sync_mode > 1 {
            return Err(Error::INVALID_VALUE);
        }
        launch_host(&target(stream, implicit)?, function, data)
    }

    fn cuStreamAddCallback, cuStreamAddCallback_ptsz(
        implicit; stream: u64, function: StreamCallback, data: *mut c_void, flags: u32,
    ) {
        if flags != 0 {
            return Err(Error::INVALID_VALUE);
        }
        add_callback(&target(stream, implicit)?, stream, function, data)
    }

    fn cuStreamIsCapturing, cuStreamIsCapturing_ptsz(implicit; stream: u64, status: Out<u32>) {
        capture_status(stream, implicit, status)
    }

    fn cuStreamGetCaptureInfo, cuStreamGetCaptureInfo_ptsz(implicit; stream: u64, status: Out<u32>, _id: Out<u64>) {
        capture_status(stream, implicit, status)
    }

    fn cuStreamGetCaptureInfo_v2, cuStreamGetCaptureInfo_v2_ptsz(
        implicit; stream: u64, status: Out<u32>, _id: Out<u64>, _graph: Out<u64>, _nodes: Out<u64>, _count: Out<usize>,
    ) {
        capture_status(stream, implicit, status)
    }

    fn cuStreamGetCaptureInfo_v3, cuStreamGetCaptureInfo_v3_ptsz(
        implicit; stream: u64, status: Out<u32>, _id: Out<u64>, _graph: Out<u64>, _nodes: Out<u64>, _edges: Out<u64>,
        _count: Out<usize>,
    ) {
        capture_status(stream, implicit, status)
    }
}
