//! The graph functions of the C API, and those of stream capture. All of them are forwarded to the implementation that the software
//! GPU has, too.

use crate::{
    arguments::{Call, HostFunction, In, Out},
    error::Result,
    graphs::{GRAPHS, GuestGraphs},
    process,
};
use core::ffi::{c_char, c_uint, c_void};
use sluice_cuda_graphs::CaptureInfo;

/// The places that an early form of `cuStreamGetCaptureInfo` does not have.
fn capture_info(status: Out<c_uint>, id: Out<u64>) -> CaptureInfo<GuestGraphs> {
    let (graph, nodes, edges, count) = (Out::missing(), Out::missing(), Out::missing(), Out::missing());
    CaptureInfo { status, id, graph, nodes, edges, count }
}

pub(crate) fn cuThreadExchangeStreamCaptureMode(_: Call, mode: Out<c_uint>) -> Result {
    process::get()?;
    GRAPHS.thread_exchange_stream_capture_mode(mode)
}

pub(crate) fn cuStreamIsCapturing(call: Call, stream: u64, status: Out<c_uint>) -> Result {
    process::get()?;
    GRAPHS.stream_is_capturing(stream, call.per_thread, status)
}

pub(crate) fn cuStreamGetCaptureInfo_v2(
    call: Call,
    stream: u64,
    status: Out<c_uint>,
    id: Out<u64>,
    graph: Out<u64>,
    nodes: Out<*const c_void>,
    count: Out<usize>,
) -> Result {
    process::get()?;
    let info = CaptureInfo { graph, nodes: nodes.cast(), count, ..capture_info(status, id) };
    GRAPHS.stream_get_capture_info(stream, call.per_thread, info)
}

pub(crate) fn cuStreamGetCaptureInfo_v3(
    call: Call,
    stream: u64,
    status: Out<c_uint>,
    id: Out<u64>,
    graph: Out<u64>,
    nodes: Out<*const c_void>,
    edges: Out<*const c_void>,
    count: Out<usize>,
) -> Result {
    process::get()?;
    let info = CaptureInfo { status, id, graph, nodes: nodes.cast(), edges: edges.cast(), count };
    GRAPHS.stream_get_capture_info(stream, call.per_thread, info)
}

pub(crate) fn cuGraphCreate(_: Call, place: Out<u64>, flags: c_uint) -> Result {
    process::get()?;
    GRAPHS.graph_create(place, flags)
}

pub(crate) fn cuGraphDestroy(_: Call, graph: u64) -> Result {
    process::get()?;
    GRAPHS.graph_destroy(graph)
}

pub(crate) fn cuGraphClone(_: Call, place: Out<u64>, original: u64) -> Result {
    process::get()?;
    GRAPHS.graph_clone(place, original)
}

pub(crate) fn cuGraphNodeFindInClone(_: Call, place: Out<u64>, original: u64, clone: u64) -> Result {
    process::get()?;
    GRAPHS.graph_node_find_in_clone(place, original, clone)
}

pub(crate) fn cuGraphGetNodes(_: Call, graph: u64, nodes: Out<u64>, count: Out<usize>) -> Result {
    process::get()?;
    GRAPHS.graph_get_nodes(graph, nodes, count)
}

pub(crate) fn cuGraphGetRootNodes(_: Call, graph: u64, nodes: Out<u64>, count: Out<usize>) -> Result {
    process::get()?;
    GRAPHS.graph_get_root_nodes(graph, nodes, count)
}

pub(crate) fn cuGraphGetEdges(
    _: Call,
    graph: u64,
    from: Out<u64>,
    to: Out<u64>,
    count: Out<usize>,
) -> Result {
    process::get()?;
    GRAPHS.graph_get_edges(graph, from, to, Out::missing(), count)
}

pub(crate) fn cuGraphGetEdges_v2(
    _: Call,
    graph: u64,
    from: Out<u64>,
    to: Out<u64>,
    data: Out<c_void>,
    count: Out<usize>,
) -> Result {
    process::get()?;
    GRAPHS.graph_get_edges(graph, from, to, data.cast(), count)
}

pub(crate) fn cuGraphNodeGetDependencies(_: Call, node: u64, nodes: Out<u64>, count: Out<usize>) -> Result {
    process::get()?;
    GRAPHS.graph_node_get_dependencies(node, nodes, Out::missing(), count)
}

pub(crate) fn cuGraphNodeGetDependencies_v2(
    _: Call,
    node: u64,
    nodes: Out<u64>,
    data: Out<c_void>,
    count: Out<usize>,
) -> Result {
    process::get()?;
    GRAPHS.graph_node_get_dependencies(node, nodes, data.cast(), count)
}

pub(crate) fn cuGraphNodeGetDependentNodes(_: Call, node: u64, nodes: Out<u64>, count: Out<usize>) -> Result {
    process::get()?;
    GRAPHS.graph_node_get_dependent_nodes(node, nodes, Out::missing(), count)
}

pub(crate) fn cuGraphNodeGetDependentNodes_v2(
    _: Call,
    node: u64,
    nodes: Out<u64>,
    data: Out<c_void>,
    count: Out<usize>,
) -> Result {
    process::get()?;
    GRAPHS.graph_node_get_dependent_nodes(node, nodes, data.cast(), count)
}

pub(crate) fn cuGraphAddDependencies(
    _: Call,
    graph: u64,
    from: In<u64>,
    to: In<u64>,
    count: usize,
) -> Result {
    process::get()?;
    GRAPHS.graph_add_dependencies(graph, from, to, In::missing(), count)
}

pub(crate) fn cuGraphAddDependencies_v2(
    _: Call,
    graph: u64,
    from: In<u64>,
    to: In<u64>,
    data: In<c_void>,
    count: usize,
) -> Result {
    process::get()?;
    GRAPHS.graph_add_dependencies(graph, from, to, data.cast(), count)
}

pub(crate) fn cuGraphRemoveDependencies(
    _: Call,
    graph: u64,
    from: In<u64>,
    to: In<u64>,
    count: usize,
) -> Result {
    process::get()?;
    GRAPHS.graph_remove_dependencies(graph, from, to, In::missing(), count)
}

pub(crate) fn cuGraphRemoveDependencies_v2(
    _: Call,
    graph: u64,
    from: In<u64>,
    to: In<u64>,
    data: In<c_void>,
    count: usize,
) -> Result {
    process::get()?;
    GRAPHS.graph_remove_dependencies(graph, from, to, data.cast(), count)
}

pub(crate) fn cuGraphDestroyNode(_: Call, node: u64) -> Result {
    process::get()?;
    GRAPHS.graph_destroy_node(node)
}

pub(crate) fn cuGraphNodeGetType(_: Call, node: u64, kind: Out<c_uint>) -> Result {
    process::get()?;
    GRAPHS.graph_node_get_type(node, kind)
}

pub(crate) fn cuGraphNodeGetContainingGraph(_: Call, node: u64, graph: Out<u64>) -> Result {
    process::get()?;
    GRAPHS.graph_node_get_containing_graph(node, graph)
}

pub(crate) fn cuGraphNodeGetLocalId(_: Call, node: u64, id: Out<c_uint>) -> Result {
    process::get()?;
    GRAPHS.graph_node_get_local_id(node, id)
}

pub(crate) fn cuGraphNodeGetToolsId(_: Call, node: u64, id: Out<u64>) -> Result {
    process::get()?;
    GRAPHS.graph_node_get_tools_id(node, id)
}

pub(crate) fn cuGraphGetId(_: Call, graph: u64, id: Out<c_uint>) -> Result {
    process::get()?;
    GRAPHS.graph_get_id(graph, id)
}

pub(crate) fn cuGraphDebugDotPrint(_: Call, graph: u64, path: In<c_char>, flags: c_uint) -> Result {
    process::get()?;
    GRAPHS.graph_debug_dot_print(graph, path, flags)
}

pub(crate) fn cuGraphAddKernelNode(
    _: Call,
    place: Out<u64>,
    graph: u64,
    before: In<u64>,
    count: usize,
    parameters: In<c_void>,
) -> Result {
    process::get()?;
    GRAPHS.graph_add_kernel_node(place, graph, before, count, parameters.cast())
}

pub(crate) fn cuGraphAddKernelNode_v2(
    _: Call,
    place: Out<u64>,
    graph: u64,
    before: In<u64>,
    count: usize,
    parameters: In<c_void>,
) -> Result {
    process::get()?;
    GRAPHS.graph_add_kernel_node_v2(place, graph, before, count, parameters.cast())
}

pub(crate) fn cuGraphAddMemcpyNode(
    _: Call,
    place: Out<u64>,
    graph: u64,
    before: In<u64>,
    count: usize,
    parameters: In<c_void>,
    context: u64,
) -> Result {
    process::get()?;
    GRAPHS.graph_add_memcpy_node(place, graph, before, count, parameters.cast(), context)
}

pub(crate) fn cuGraphAddMemsetNode(
    _: Call,
    place: Out<u64>,
    graph: u64,
    before: In<u64>,
    count: usize,
    parameters: In<c_void>,
    context: u64,
) -> Result {
    process::get()?;
    GRAPHS.graph_add_memset_node(place, graph, before, count, parameters.cast(), context)
}

pub(crate) fn cuGraphAddHostNode(
    _: Call,
    place: Out<u64>,
    graph: u64,
    before: In<u64>,
    count: usize,
    parameters: In<c_void>,
) -> Result {
    process::get()?;
    GRAPHS.graph_add_host_node(place, graph, before, count, parameters.cast())
}

pub(crate) fn cuGraphAddChildGraphNode(
    _: Call,
    place: Out<u64>,
    graph: u64,
    before: In<u64>,
    count: usize,
    child: u64,
) -> Result {
    process::get()?;
    GRAPHS.graph_add_child_graph_node(place, graph, before, count, child)
}

pub(crate) fn cuGraphChildGraphNodeGetGraph(_: Call, node: u64, graph: Out<u64>) -> Result {
    process::get()?;
    GRAPHS.graph_child_graph_node_get_graph(node, graph)
}

pub(crate) fn cuGraphAddEmptyNode(
    _: Call,
    place: Out<u64>,
    graph: u64,
    before: In<u64>,
    count: usize,
) -> Result {
    process::get()?;
    GRAPHS.graph_add_empty_node(place, graph, before, count)
}

pub(crate) fn cuGraphAddEventRecordNode(
    _: Call,
    place: Out<u64>,
    graph: u64,
    before: In<u64>,
    count: usize,
    event: u64,
) -> Result {
    process::get()?;
    GRAPHS.graph_add_event_record_node(place, graph, before, count, event)
}

pub(crate) fn cuGraphAddEventWaitNode(
    _: Call,
    place: Out<u64>,
    graph: u64,
    before: In<u64>,
    count: usize,
    event: u64,
) -> Result {
    process::get()?;
    GRAPHS.graph_add_event_wait_node(place, graph, before, count, event)
}

pub(crate) fn cuGraphAddBatchMemOpNode(
    _: Call,
    place: Out<u64>,
    graph: u64,
    before: In<u64>,
    count: usize,
    parameters: In<c_void>,
) -> Result {
    process::get()?;
    GRAPHS.graph_add_batch_mem_op_node(place, graph, before, count, parameters.cast())
}

pub(crate) fn cuGraphAddNode(
    _: Call,
    place: Out<u64>,
    graph: u64,
    before: In<u64>,
    count: usize,
    parameters: In<c_void>,
) -> Result {
    process::get()?;
    GRAPHS.graph_add_node(place, graph, before, In::missing(), count, parameters.cast())
}

pub(crate) fn cuGraphAddNode_v2(
    _: Call,
    place: Out<u64>,
    graph: u64,
    before: In<u64>,
    data: In<c_void>,
    count: usize,
    parameters: In<c_void>,
) -> Result {
    process::get()?;
    GRAPHS.graph_add_node(place, graph, before, data.cast(), count, parameters.cast())
}

pub(crate) fn cuGraphAddNode_v3(
    _: Call,
    place: Out<u64>,
    graph: u64,
    before: In<u64>,
    data: In<c_void>,
    count: usize,
    parameters: In<c_void>,
) -> Result {
    process::get()?;
    GRAPHS.graph_add_node(place, graph, before, data.cast(), count, parameters.cast())
}

pub(crate) fn cuGraphAddMemAllocNode(
    _: Call,
    _: Out<u64>,
    _: u64,
    _: In<u64>,
    _: usize,
    _: Out<c_void>,
) -> Result {
    process::get()?;
    GRAPHS.graph_add_memory_node()
}

pub(crate) fn cuGraphAddMemFreeNode(_: Call, _: Out<u64>, _: u64, _: In<u64>, _: usize, _: u64) -> Result {
    process::get()?;
    GRAPHS.graph_add_memory_node()
}

pub(crate) fn cuGraphConditionalHandleCreate(
    _: Call,
    _: Out<u64>,
    _: u64,
    _: u64,
    _: c_uint,
    _: c_uint,
) -> Result {
    process::get()?;
    GRAPHS.graph_conditional_handle_create()
}

pub(crate) fn cuGraphKernelNodeGetParams(_: Call, node: u64, parameters: Out<c_void>) -> Result {
    process::get()?;
    GRAPHS.graph_kernel_node_get_params(node, parameters.cast())
}

pub(crate) fn cuGraphKernelNodeGetParams_v2(_: Call, node: u64, parameters: Out<c_void>) -> Result {
    process::get()?;
    GRAPHS.graph_kernel_node_get_params_v2(node, parameters.cast())
}

pub(crate) fn cuGraphKernelNodeSetParams(_: Call, node: u64, parameters: In<c_void>) -> Result {
    process::get()?;
    GRAPHS.graph_kernel_node_set_params(node, parameters.cast())
}

pub(crate) fn cuGraphKernelNodeSetParams_v2(_: Call, node: u64, parameters: In<c_void>) -> Result {
    process::get()?;
    GRAPHS.graph_kernel_node_set_params_v2(node, parameters.cast())
}

pub(crate) fn cuGraphMemcpyNodeGetParams(_: Call, node: u64, parameters: Out<c_void>) -> Result {
    process::get()?;
    GRAPHS.graph_memcpy_node_get_params(node, parameters.cast())
}

pub(crate) fn cuGraphMemcpyNodeSetParams(_: Call, node: u64, parameters: In<c_void>) -> Result {
    process::get()?;
    GRAPHS.graph_memcpy_node_set_params(node, parameters.cast())
}

pub(crate) fn cuGraphMemsetNodeGetParams(_: Call, node: u64, parameters: Out<c_void>) -> Result {
    process::get()?;
    GRAPHS.graph_memset_node_get_params(node, parameters.cast())
}

pub(crate) fn cuGraphMemsetNodeSetParams(_: Call, node: u64, parameters: In<c_void>) -> Result {
    process::get()?;
    GRAPHS.graph_memset_node_set_params(node, parameters.cast())
}

pub(crate) fn cuGraphHostNodeGetParams(_: Call, node: u64, parameters: Out<c_void>) -> Result {
    process::get()?;
    GRAPHS.graph_host_node_get_params(node, parameters.cast())
}

pub(crate) fn cuGraphHostNodeSetParams(_: Call, node: u64, parameters: In<c_void>) -> Result {
    process::get()?;
    GRAPHS.graph_host_node_set_params(node, parameters.cast())
}

pub(crate) fn cuGraphEventRecordNodeGetEvent(_: Call, node: u64, event: Out<u64>) -> Result {
    process::get()?;
    GRAPHS.graph_event_record_node_get_event(node, event)
}

pub(crate) fn cuGraphEventRecordNodeSetEvent(_: Call, node: u64, event: u64) -> Result {
    process::get()?;
    GRAPHS.graph_event_record_node_set_event(node, event)
}

pub(crate) fn cuGraphEventWaitNodeGetEvent(_: Call, node: u64, event: Out<u64>) -> Result {
    process::get()?;
    GRAPHS.graph_event_wait_node_get_event(node, event)
}

pub(crate) fn cuGraphEventWaitNodeSetEvent(_: Call, node: u64, event: u64) -> Result {
    process::get()?;
    GRAPHS.graph_event_wait_node_set_event(node, event)
}

pub(crate) fn cuGraphBatchMemOpNodeGetParams(_: Call, node: u64, parameters: Out<c_void>) -> Result {
    process::get()?;
    GRAPHS.graph_batch_mem_op_node_get_params(node, parameters.cast())
}

pub(crate) fn cuGraphBatchMemOpNodeSetParams(_: Call, node: u64, parameters: In<c_void>) -> Result {
    process::get()?;
    GRAPHS.graph_batch_mem_op_node_set_params(node, parameters.cast())
}

pub(crate) fn cuGraphNodeSetParams(_: Call, node: u64, parameters: In<c_void>) -> Result {
    process::get()?;
    GRAPHS.graph_node_set_params(node, parameters.cast())
}

pub(crate) fn cuGraphNodeSetParams_v2(_: Call, node: u64, parameters: In<c_void>) -> Result {
    process::get()?;
    GRAPHS.graph_node_set_params(node, parameters.cast())
}

pub(crate) fn cuGraphNodeGetParams(_: Call, node: u64, parameters: Out<c_void>) -> Result {
    process::get()?;
    GRAPHS.graph_node_get_params(node, parameters.cast())
}

pub(crate) fn cuGraphKernelNodeGetAttribute(_: Call, node: u64, id: c_uint, value: Out<c_void>) -> Result {
    process::get()?;
    GRAPHS.graph_kernel_node_get_attribute(node, id, value.cast())
}

pub(crate) fn cuGraphKernelNodeSetAttribute(_: Call, node: u64, id: c_uint, value: In<c_void>) -> Result {
    process::get()?;
    GRAPHS.graph_kernel_node_set_attribute(node, id, value.cast())
}

pub(crate) fn cuGraphKernelNodeCopyAttributes(_: Call, to: u64, from: u64) -> Result {
    process::get()?;
    GRAPHS.graph_kernel_node_copy_attributes(to, from)
}

pub(crate) fn cuGraphInstantiate(
    _: Call,
    place: Out<u64>,
    graph: u64,
    node: Out<u64>,
    text: Out<c_char>,
    room: usize,
) -> Result {
    process::get()?;
    GRAPHS.graph_instantiate(place, graph, node, text, room)
}

pub(crate) fn cuGraphInstantiate_v2(
    _: Call,
    place: Out<u64>,
    graph: u64,
    node: Out<u64>,
    text: Out<c_char>,
    room: usize,
) -> Result {
    process::get()?;
    GRAPHS.graph_instantiate(place, graph, node, text, room)
}

pub(crate) fn cuGraphInstantiateWithFlags(_: Call, place: Out<u64>, graph: u64, flags: u64) -> Result {
    process::get()?;
    GRAPHS.graph_instantiate_with_flags(place, graph, flags)
}

pub(crate) fn cuGraphExecDestroy(_: Call, executable: u64) -> Result {
    process::get()?;
    GRAPHS.graph_exec_destroy(executable)
}

pub(crate) fn cuGraphExecGetFlags(_: Call, executable: u64, flags: Out<u64>) -> Result {
    process::get()?;
    GRAPHS.graph_exec_get_flags(executable, flags)
}

pub(crate) fn cuGraphExecGetId(_: Call, executable: u64, id: Out<c_uint>) -> Result {
    process::get()?;
    GRAPHS.graph_exec_get_id(executable, id)
}

pub(crate) fn cuGraphExecKernelNodeSetParams(
    _: Call,
    executable: u64,
    node: u64,
    parameters: In<c_void>,
) -> Result {
    process::get()?;
    GRAPHS.graph_exec_kernel_node_set_params(executable, node, parameters.cast())
}

pub(crate) fn cuGraphExecKernelNodeSetParams_v2(
    _: Call,
    executable: u64,
    node: u64,
    parameters: In<c_void>,
) -> Result {
    process::get()?;
    GRAPHS.graph_exec_kernel_node_set_params_v2(executable, node, parameters.cast())
}

pub(crate) fn cuGraphExecMemcpyNodeSetParams(
    _: Call,
    executable: u64,
    node: u64,
    parameters: In<c_void>,
    context: u64,
) -> Result {
    process::get()?;
    GRAPHS.graph_exec_memcpy_node_set_params(executable, node, parameters.cast(), context)
}

pub(crate) fn cuGraphExecMemsetNodeSetParams(
    _: Call,
    executable: u64,
    node: u64,
    parameters: In<c_void>,
    context: u64,
) -> Result {
    process::get()?;
    GRAPHS.graph_exec_memset_node_set_params(executable, node, parameters.cast(), context)
}

pub(crate) fn cuGraphExecHostNodeSetParams(
    _: Call,
    executable: u64,
    node: u64,
    parameters: In<c_void>,
) -> Result {
    process::get()?;
    GRAPHS.graph_exec_host_node_set_params(executable, node, parameters.cast())
}

pub(crate) fn cuGraphExecChildGraphNodeSetParams(_: Call, executable: u64, node: u64, child: u64) -> Result {
    process::get()?;
    GRAPHS.graph_exec_child_graph_node_set_params(executable, node, child)
}

pub(crate) fn cuGraphExecEventRecordNodeSetEvent(_: Call, executable: u64, node: u64, event: u64) -> Result {
    process::get()?;
    GRAPHS.graph_exec_event_record_node_set_event(executable, node, event)
}

pub(crate) fn cuGraphExecEventWaitNodeSetEvent(_: Call, executable: u64, node: u64, event: u64) -> Result {
    process::get()?;
    GRAPHS.graph_exec_event_wait_node_set_event(executable, node, event)
}

pub(crate) fn cuGraphExecBatchMemOpNodeSetParams(
    _: Call,
    executable: u64,
    node: u64,
    parameters: In<c_void>,
) -> Result {
    process::get()?;
    GRAPHS.graph_exec_batch_mem_op_node_set_params(executable, node, parameters.cast())
}

pub(crate) fn cuGraphExecNodeSetParams(
    _: Call,
    executable: u64,
    node: u64,
    parameters: In<c_void>,
) -> Result {
    process::get()?;
    GRAPHS.graph_exec_node_set_params(executable, node, parameters.cast())
}

pub(crate) fn cuGraphNodeSetEnabled(_: Call, executable: u64, node: u64, enabled: c_uint) -> Result {
    process::get()?;
    GRAPHS.graph_node_set_enabled(executable, node, enabled)
}

pub(crate) fn cuGraphNodeGetEnabled(_: Call, executable: u64, node: u64, enabled: Out<c_uint>) -> Result {
    process::get()?;
    GRAPHS.graph_node_get_enabled(executable, node, enabled)
}

pub(crate) fn cuGraphExecUpdate(
    _: Call,
    executable: u64,
    graph: u64,
    node: Out<u64>,
    result: Out<c_uint>,
) -> Result {
    process::get()?;
    GRAPHS.graph_exec_update(executable, graph, node, result)
}

pub(crate) fn cuGraphExecUpdate_v2(_: Call, executable: u64, graph: u64, result: Out<c_void>) -> Result {
    process::get()?;
    GRAPHS.graph_exec_update_v2(executable, graph, result.cast())
}

pub(crate) fn cuUserObjectCreate(
    _: Call,
    place: Out<u64>,
    data: Out<c_void>,
    destroy: Option<HostFunction>,
    references: c_uint,
    flags: c_uint,
) -> Result {
    process::get()?;
    let data = usize::try_from(data.address()).map_err(|_| crate::error::Error::INVALID_VALUE)?;
    let data = core::ptr::with_exposed_provenance_mut(data);
    GRAPHS.user_object_create(place, data, destroy, references, flags)
}

pub(crate) fn cuUserObjectRetain(_: Call, object: u64, count: c_uint) -> Result {
    process::get()?;
    GRAPHS.user_object_retain(object, count)
}

pub(crate) fn cuUserObjectRelease(_: Call, object: u64, count: c_uint) -> Result {
    process::get()?;
    GRAPHS.user_object_release(object, count)
}

pub(crate) fn cuGraphRetainUserObject(
    _: Call,
    graph: u64,
    object: u64,
    count: c_uint,
    flags: c_uint,
) -> Result {
    process::get()?;
    GRAPHS.graph_retain_user_object(graph, object, count, flags)
}

pub(crate) fn cuGraphReleaseUserObject(_: Call, graph: u64, object: u64, count: c_uint) -> Result {
    process::get()?;
    GRAPHS.graph_release_user_object(graph, object, count)
}

pub(crate) fn cuGraphInstantiateWithParams(
    call: Call,
    place: Out<u64>,
    graph: u64,
    parameters: Out<c_void>,
) -> Result {
    process::get()?;
    GRAPHS.graph_instantiate_with_params(place, graph, parameters.cast(), call.per_thread)
}

pub(crate) fn cuGraphLaunch(call: Call, executable: u64, stream: u64) -> Result {
    process::get()?;
    GRAPHS.graph_launch(executable, stream, call.per_thread)
}

pub(crate) fn cuGraphUpload(call: Call, executable: u64, stream: u64) -> Result {
    process::get()?;
    GRAPHS.graph_upload(executable, stream, call.per_thread)
}

pub(crate) fn cuStreamGetCaptureInfo(call: Call, stream: u64, status: Out<c_uint>, id: Out<u64>) -> Result {
    process::get()?;
    GRAPHS.stream_get_capture_info(stream, call.per_thread, capture_info(status, id))
}

pub(crate) fn cuStreamBeginCapture(call: Call, stream: u64) -> Result {
    process::get()?;
    GRAPHS.stream_begin_capture(stream, call.per_thread, 0)
}

pub(crate) fn cuStreamBeginCapture_v2(call: Call, stream: u64, mode: c_uint) -> Result {
    process::get()?;
    GRAPHS.stream_begin_capture(stream, call.per_thread, mode)
}

pub(crate) fn cuStreamBeginCaptureToGraph(
    call: Call,
    stream: u64,
    graph: u64,
    before: In<u64>,
    data: In<c_void>,
    count: usize,
    mode: c_uint,
) -> Result {
    process::get()?;
    GRAPHS.stream_begin_capture_to_graph(stream, call.per_thread, graph, before, data.cast(), count, mode)
}

pub(crate) fn cuStreamEndCapture(call: Call, stream: u64, graph: Out<u64>) -> Result {
    process::get()?;
    GRAPHS.stream_end_capture(stream, call.per_thread, graph)
}

pub(crate) fn cuStreamUpdateCaptureDependencies(
    call: Call,
    stream: u64,
    nodes: In<u64>,
    count: usize,
    flags: c_uint,
) -> Result {
    process::get()?;
    let (of_thread, data) = (call.per_thread, In::missing());
    GRAPHS.stream_update_capture_dependencies(stream, of_thread, nodes, data, count, flags)
}

pub(crate) fn cuStreamUpdateCaptureDependencies_v2(
    call: Call,
    stream: u64,
    nodes: In<u64>,
    data: In<c_void>,
    count: usize,
    flags: c_uint,
) -> Result {
    process::get()?;
    GRAPHS.stream_update_capture_dependencies(stream, call.per_thread, nodes, data.cast(), count, flags)
}
