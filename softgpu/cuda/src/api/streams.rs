//! The entry points for streams.

use std::ffi::c_void;

use sluice_cuda_frontend::stream_attributes;
use sluice_cuda_graphs::{self as graphs, CaptureInfo, HostWork};

use crate::error::{Error, Result};
use crate::event::EVENTS;
use crate::ffi::{In, Out};
use crate::graphs::GRAPHS;
use crate::schedule::{QueuedWork, scheduler};
use crate::stream::{self, ATTRIBUTES, Implicit, PRIORITIES, StreamTarget, target};
use crate::threads;

type HostFunction = Option<unsafe extern "C" fn(*mut c_void)>;
type StreamCallback = Option<unsafe extern "C" fn(u64, u32, *mut c_void)>;

/// A pointer of the program, passed back to its callback.
struct Opaque(*mut c_void);

// SAFETY: never dereferenced here; the API lets the callback run on another thread.
unsafe impl Send for Opaque {}

fn launch_host(target: &StreamTarget, function: HostFunction, data: *mut c_void) -> Result {
    let function = function.ok_or(Error::INVALID_VALUE)?;
    let host = HostWork {
        function: (function as *const ()).expose_provenance() as u64,
        data: data.expose_provenance() as u64,
    };
    if GRAPHS.capture(target.facts(), || Ok(graphs::Work::Host(host)))? {
        return Ok(());
    }
    let data = Opaque(data);
    let task = Box::new(move || {
        let data = data;
        // SAFETY: the program requested this call.
        threads::in_host_function(|| unsafe { function(data.0) });
        Ok(())
    });
    scheduler().submit(target.queue, Vec::new(), QueuedWork::Task(task));
    Ok(())
}

fn add_callback(target: &StreamTarget, stream: u64, function: StreamCallback, data: *mut c_void) -> Result {
    let function = function.ok_or(Error::INVALID_VALUE)?;
    GRAPHS.refuse(target.facts())?;
    let data = Opaque(data);
    let call = Box::new(move |code: u32| {
        let data = data;
        // SAFETY: the program requested this call.
        threads::in_host_function(|| unsafe { function(stream, code, data.0) });
    });
    scheduler().submit(target.queue, Vec::new(), QueuedWork::Callback(call));
    Ok(())
}

fn wait_event(target: &StreamTarget, event: u64, flags: u32) -> Result {
    if flags & !EXTERNAL != 0 {
        return Err(Error::INVALID_VALUE);
    }
    let found = EVENTS.get(event)?;
    if !GRAPHS.wait_event(|| Ok(target.facts()), event, flags == EXTERNAL)? {
        found.wait(target);
    }
    Ok(())
}

fn destroy(stream: u64) -> Result {
    GRAPHS.stream_destroyed(stream::destroy(stream)?.number());
    Ok(())
}

/// Stream 0 means the calling thread's own.
fn per_thread(implicit: Implicit) -> bool {
    implicit == Implicit::PerThread
}

/// The flag by which waiting for an event becomes a node, which is only allowed in a capture.
const EXTERNAL: u32 = 1;

fn set_attribute(target: &StreamTarget, attribute: u32, value: [u8; stream_attributes::BYTES]) {
    // The other attributes are hints that change nothing on this device.
    if let Some(priority) = stream_attributes::priority(attribute, &value) {
        scheduler().set_priority(target.queue, priority.clamp(*PRIORITIES.start(), *PRIORITIES.end()));
    }
    ATTRIBUTES.set(target.id, attribute, value);
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

    fn cuStreamDestroy(stream: u64) { destroy(stream) }

    fn cuStreamDestroy_v2(stream: u64) { destroy(stream) }
}

twins! {
    fn cuStreamQuery, cuStreamQuery_ptsz(implicit; stream: u64) {
        let target = target(stream, implicit)?;
        GRAPHS.refuse(target.facts())?;
        stream::query(&target)
    }

    fn cuStreamSynchronize, cuStreamSynchronize_ptsz(implicit; stream: u64) {
        let target = target(stream, implicit)?;
        GRAPHS.refuse(target.facts())?;
        stream::synchronize(&target)
    }

    fn cuStreamWaitEvent, cuStreamWaitEvent_ptsz(implicit; stream: u64, event: u64, flags: u32) {
        wait_event(&target(stream, implicit)?, event, flags)
    }

    fn cuStreamGetFlags, cuStreamGetFlags_ptsz(implicit; stream: u64, flags: Out<u32>) {
        flags.set(target(stream, implicit)?.flags)
    }

    fn cuStreamGetPriority, cuStreamGetPriority_ptsz(implicit; stream: u64, priority: Out<i32>) {
        priority.set(target(stream, implicit)?.priority)
    }

    fn cuStreamGetId, cuStreamGetId_ptsz(implicit; stream: u64, id: Out<u64>) { id.set(target(stream, implicit)?.id) }

    fn cuStreamGetCtx, cuStreamGetCtx_ptsz(implicit; stream: u64, context: Out<u64>) {
        let target = target(stream, implicit)?;
        context.set(target.green.map_or(target.core.handle, |green| green.view()))
    }

    fn cuStreamGetCtx_v2, cuStreamGetCtx_v2_ptsz(implicit; stream: u64, context: Out<u64>, green: Out<u64>) {
        let target = target(stream, implicit)?;
        context.set(target.core.handle)?;
        green.set_if_given(target.green.map_or(0, |green| green.handle));
        Ok(())
    }

    fn cuStreamGetDevice, cuStreamGetDevice_ptsz(implicit; stream: u64, device: Out<i32>) {
        device.set(target(stream, implicit)?.core.gpu.ordinal)
    }

    fn cuStreamGetAttribute, cuStreamGetAttribute_ptsz(
        implicit; stream: u64, attribute: u32, value: Out<[u8; stream_attributes::BYTES]>,
    ) {
        let target = target(stream, implicit)?;
        value.set(ATTRIBUTES.get(target.id, attribute, target.priority, Error::INVALID_VALUE)?)
    }

    fn cuStreamSetAttribute, cuStreamSetAttribute_ptsz(
        implicit; stream: u64, attribute: u32, value: In<[u8; stream_attributes::BYTES]>,
    ) {
        let (target, value) = (target(stream, implicit)?, value.get()?);
        stream_attributes::check(attribute, &value, Error::INVALID_VALUE)?;
        set_attribute(&target, attribute, value);
        Ok(())
    }

    fn cuStreamCopyAttributes, cuStreamCopyAttributes_ptsz(implicit; to: u64, from: u64) {
        let (to, from) = (target(to, implicit)?, target(from, implicit)?);
        ATTRIBUTES.of(from.id).into_iter().for_each(|(attribute, value)| set_attribute(&to, attribute, value));
        Ok(())
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
        GRAPHS.stream_is_capturing(stream, per_thread(implicit), status)
    }

    fn cuStreamGetCaptureInfo, cuStreamGetCaptureInfo_ptsz(implicit; stream: u64, status: Out<u32>, id: Out<u64>) {
        GRAPHS.stream_get_capture_info(stream, per_thread(implicit), CaptureInfo::early(status, id))
    }

    fn cuStreamGetCaptureInfo_v2, cuStreamGetCaptureInfo_v2_ptsz(
        implicit; stream: u64, status: Out<u32>, id: Out<u64>, graph: Out<u64>, nodes: Out<u64>, count: Out<usize>,
    ) {
        let info = CaptureInfo { graph, nodes, count, ..CaptureInfo::early(status, id) };
        GRAPHS.stream_get_capture_info(stream, per_thread(implicit), info)
    }

    fn cuStreamGetCaptureInfo_v3, cuStreamGetCaptureInfo_v3_ptsz(
        implicit; stream: u64, status: Out<u32>, id: Out<u64>, graph: Out<u64>, nodes: Out<u64>, edges: Out<u64>,
        count: Out<usize>,
    ) {
        let info = CaptureInfo { status, id, graph, nodes, edges, count };
        GRAPHS.stream_get_capture_info(stream, per_thread(implicit), info)
    }

    fn cuStreamBeginCapture, cuStreamBeginCapture_ptsz(implicit; stream: u64) {
        GRAPHS.stream_begin_capture(stream, per_thread(implicit), 0)
    }

    fn cuStreamBeginCapture_v2, cuStreamBeginCapture_v2_ptsz(implicit; stream: u64, mode: u32) {
        GRAPHS.stream_begin_capture(stream, per_thread(implicit), mode)
    }

    fn cuStreamBeginCaptureToGraph, cuStreamBeginCaptureToGraph_ptsz(
        implicit; stream: u64, graph: u64, before: In<u64>, data: In<[u8; 8]>, count: usize, mode: u32,
    ) {
        GRAPHS.stream_begin_capture_to_graph(stream, per_thread(implicit), graph, before, data, count, mode)
    }

    fn cuStreamBeginRecaptureToGraph, cuStreamBeginRecaptureToGraph_ptsz(
        implicit; stream: u64, mode: u32, graph: u64, judge: *mut c_void, data: *mut c_void,
    ) {
        let judge = (judge.expose_provenance() as u64, data.expose_provenance() as u64);
        GRAPHS.stream_begin_recapture_to_graph(stream, per_thread(implicit), mode, graph, judge)
    }

    fn cuStreamEndCapture, cuStreamEndCapture_ptsz(implicit; stream: u64, graph: Out<u64>) {
        GRAPHS.stream_end_capture(stream, per_thread(implicit), graph)
    }

    fn cuStreamUpdateCaptureDependencies, cuStreamUpdateCaptureDependencies_ptsz(
        implicit; stream: u64, nodes: In<u64>, count: usize, flags: u32,
    ) {
        let (of_thread, data) = (per_thread(implicit), In::missing());
        GRAPHS.stream_update_capture_dependencies(stream, of_thread, nodes, data, count, flags)
    }

    fn cuStreamUpdateCaptureDependencies_v2, cuStreamUpdateCaptureDependencies_v2_ptsz(
        implicit; stream: u64, nodes: In<u64>, data: In<[u8; 8]>, count: usize, flags: u32,
    ) {
        GRAPHS.stream_update_capture_dependencies(stream, per_thread(implicit), nodes, data, count, flags)
    }
}
