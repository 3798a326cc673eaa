//! The graph functions of the C API, and those of stream capture. All of them are forwarded to the implementation that the software
//! GPU has, too.

use crate::{
    arguments::{Call, HostFunction, In, Out},
    error::Result,
    graphs::GRAPHS,
    process,
};
use core::ffi::{c_char, c_uint, c_void};
use sluice_cuda_graphs::CaptureInfo;

/// Defines functions that need `cuInit`.
macro_rules! calls {
    ($(fn $name:ident($call:tt; $($argument:tt: $type:ty),* $(,)?) $body:block)*) => {$(
        pub(crate) fn $name($call: Call, $($argument: $type),*) -> Result {
            process::get()?;
            $body
        }
    )*};
}

calls! {
    fn cuThreadExchangeStreamCaptureMode(_; mode: Out<c_uint>) { GRAPHS.thread_exchange_stream_capture_mode(mode) }

    fn cuStreamIsCapturing(call; stream: u64, status: Out<c_uint>) {
        GRAPHS.stream_is_capturing(stream, call.per_thread, status)
    }

    fn cuStreamGetCaptureInfo_v2(
        call; stream: u64, status: Out<c_uint>, id: Out<u64>, graph: Out<u64>, nodes: Out<*const c_void>,
        count: Out<usize>,
    ) {
        let info = CaptureInfo { graph, nodes: nodes.cast(), count, ..CaptureInfo::early(status, id) };
        GRAPHS.stream_get_capture_info(stream, call.per_thread, info)
    }

    fn cuStreamGetCaptureInfo_v3(
        call; stream: u64, status: Out<c_uint>, id: Out<u64>, graph: Out<u64>, nodes: Out<*const c_void>,
        edges: Out<*const c_void>, count: Out<usize>,
    ) {
        let info = CaptureInfo { status, id, graph, nodes: nodes.cast(), edges: edges.cast(), count };
        GRAPHS.stream_get_capture_info(stream, call.per_thread, info)
    }

    fn cuGraphCreate(_; place: Out<u64>, flags: c_uint) { GRAPHS.graph_create(place, flags) }

    fn cuGraphDestroy(_; graph: u64) { GRAPHS.graph_destroy(graph) }

    fn cuGraphClone(_; place: Out<u64>, original: u64) { GRAPHS.graph_clone(place, original) }

    fn cuGraphNodeFindInClone(_; place: Out<u64>, original: u64, clone: u64) {
        GRAPHS.graph_node_find_in_clone(place, original, clone)
    }

    fn cuGraphGetNodes(_; graph: u64, nodes: Out<u64>, count: Out<usize>) {
        GRAPHS.graph_get_nodes(graph, nodes, count)
    }

    fn cuGraphGetRootNodes(_; graph: u64, nodes: Out<u64>, count: Out<usize>) {
        GRAPHS.graph_get_root_nodes(graph, nodes, count)
    }

    fn cuGraphGetEdges(_; graph: u64, from: Out<u64>, to: Out<u64>, count: Out<usize>) {
        GRAPHS.graph_get_edges(graph, from, to, Out::missing(), count)
    }

    fn cuGraphGetEdges_v2(_; graph: u64, from: Out<u64>, to: Out<u64>, data: Out<c_void>, count: Out<usize>) {
        GRAPHS.graph_get_edges(graph, from, to, data.cast(), count)
    }

    fn cuGraphNodeGetDependencies(_; node: u64, nodes: Out<u64>, count: Out<usize>) {
        GRAPHS.graph_node_get_dependencies(node, nodes, Out::missing(), count)
    }

    fn cuGraphNodeGetDependencies_v2(_; node: u64, nodes: Out<u64>, data: Out<c_void>, count: Out<usize>) {
        GRAPHS.graph_node_get_dependencies(node, nodes, data.cast(), count)
    }

    fn cuGraphNodeGetDependentNodes(_; node: u64, nodes: Out<u64>, count: Out<usize>) {
        GRAPHS.graph_node_get_dependent_nodes(node, nodes, Out::missing(), count)
    }

    fn cuGraphNodeGetDependentNodes_v2(_; node: u64, nodes: Out<u64>, data: Out<c_void>, count: Out<usize>) {
        GRAPHS.graph_node_get_dependent_nodes(node, nodes, data.cast(), count)
    }

    fn cuGraphAddDependencies(_; graph: u64, from: In<u64>, to: In<u64>, count: usize) {
        GRAPHS.graph_add_dependencies(graph, from, to, In::missing(), count)
    }

    fn cuGraphAddDependencies_v2(_; graph: u64, from: In<u64>, to: In<u64>, data: In<c_void>, count: usize) {
        GRAPHS.graph_add_dependencies(graph, from, to, data.cast(), count)
    }

    fn cuGraphRemoveDependencies(_; graph: u64, from: In<u64>, to: In<u64>, count: usize) {
        GRAPHS.graph_remove_dependencies(graph, from, to, In::missing(), count)
    }

    fn cuGraphRemoveDependencies_v2(_; graph: u64, from: In<u64>, to: In<u64>, data: In<c_void>, count: usize) {
        GRAPHS.graph_remove_dependencies(graph, from, to, data.cast(), count)
    }

    fn cuGraphDestroyNode(_; node: u64) { GRAPHS.graph_destroy_node(node) }

    fn cuGraphNodeGetType(_; node: u64, kind: Out<c_uint>) { GRAPHS.graph_node_get_type(node, kind) }

    fn cuGraphNodeGetContainingGraph(_; node: u64, graph: Out<u64>) {
        GRAPHS.graph_node_get_containing_graph(node, graph)
    }

    fn cuGraphNodeGetLocalId(_; node: u64, id: Out<c_uint>) { GRAPHS.graph_node_get_local_id(node, id) }

    fn cuGraphNodeGetToolsId(_; node: u64, id: Out<u64>) { GRAPHS.graph_node_get_tools_id(node, id) }

    fn cuGraphGetId(_; graph: u64, id: Out<c_uint>) { GRAPHS.graph_get_id(graph, id) }

    fn cuGraphDebugDotPrint(_; graph: u64, path: In<c_char>, flags: c_uint) {
        GRAPHS.graph_debug_dot_print(graph, path, flags)
    }

    fn cuGraphAddKernelNode(_; place: Out<u64>, graph: u64, before: In<u64>, count: usize, parameters: In<c_void>) {
        GRAPHS.graph_add_kernel_node(place, graph, before, count, parameters.cast())
    }

    fn cuGraphAddKernelNode_v2(
        _; place: Out<u64>, graph: u64, before: In<u64>, count: usize, parameters: In<c_void>,
    ) {
        GRAPHS.graph_add_kernel_node_v2(place, graph, before, count, parameters.cast())
    }

    fn cuGraphAddMemcpyNode(
        _; place: Out<u64>, graph: u64, before: In<u64>, count: usize, parameters: In<c_void>, context: u64,
    ) {
        GRAPHS.graph_add_memcpy_node(place, graph, before, count, parameters.cast(), context)
    }

    fn cuGraphAddMemsetNode(
        _; place: Out<u64>, graph: u64, before: In<u64>, count: usize, parameters: In<c_void>, context: u64,
    ) {
        GRAPHS.graph_add_memset_node(place, graph, before, count, parameters.cast(), context)
    }

    fn cuGraphAddHostNode(_; place: Out<u64>, graph: u64, before: In<u64>, count: usize, parameters: In<c_void>) {
        GRAPHS.graph_add_host_node(place, graph, before, count, parameters.cast())
    }

    fn cuGraphAddChildGraphNode(_; place: Out<u64>, graph: u64, before: In<u64>, count: usize, child: u64) {
        GRAPHS.graph_add_child_graph_node(place, graph, before, count, child)
    }

    fn cuGraphChildGraphNodeGetGraph(_; node: u64, graph: Out<u64>) {
        GRAPHS.graph_child_graph_node_get_graph(node, graph)
    }

    fn cuGraphAddEmptyNode(_; place: Out<u64>, graph: u64, before: In<u64>, count: usize) {
        GRAPHS.graph_add_empty_node(place, graph, before, count)
    }

    fn cuGraphAddEventRecordNode(_; place: Out<u64>, graph: u64, before: In<u64>, count: usize, event: u64) {
        GRAPHS.graph_add_event_record_node(place, graph, before, count, event)
    }

    fn cuGraphAddEventWaitNode(_; place: Out<u64>, graph: u64, before: In<u64>, count: usize, event: u64) {
        GRAPHS.graph_add_event_wait_node(place, graph, before, count, event)
    }

    fn cuGraphAddBatchMemOpNode(
        _; place: Out<u64>, graph: u64, before: In<u64>, count: usize, parameters: In<c_void>,
    ) {
        GRAPHS.graph_add_batch_mem_op_node(place, graph, before, count, parameters.cast())
    }

    fn cuGraphAddNode(_; place: Out<u64>, graph: u64, before: In<u64>, count: usize, parameters: Out<c_void>) {
        GRAPHS.graph_add_node(place, graph, before, In::missing(), count, parameters.cast())
    }

    fn cuGraphAddNode_v2(
        _; place: Out<u64>, graph: u64, before: In<u64>, data: In<c_void>, count: usize, parameters: Out<c_void>,
    ) {
        GRAPHS.graph_add_node(place, graph, before, data.cast(), count, parameters.cast())
    }

    fn cuGraphAddNode_v3(
        _; place: Out<u64>, graph: u64, before: In<u64>, data: In<c_void>, count: usize, parameters: Out<c_void>,
    ) {
        GRAPHS.graph_add_node(place, graph, before, data.cast(), count, parameters.cast())
    }

    fn cuGraphAddMemAllocNode(
        _; place: Out<u64>, graph: u64, before: In<u64>, count: usize, parameters: Out<c_void>,
    ) {
        GRAPHS.graph_add_mem_alloc_node(place, graph, before, count, parameters.cast())
    }

    fn cuGraphAddMemFreeNode(_; place: Out<u64>, graph: u64, before: In<u64>, count: usize, address: u64) {
        GRAPHS.graph_add_mem_free_node(place, graph, before, count, address)
    }

    fn cuGraphMemAllocNodeGetParams(_; node: u64, parameters: Out<c_void>) {
        GRAPHS.graph_mem_alloc_node_get_params(node, parameters.cast())
    }

    fn cuGraphMemFreeNodeGetParams(_; node: u64, address: Out<u64>) {
        GRAPHS.graph_mem_free_node_get_params(node, address)
    }

    fn cuGraphConditionalHandleCreate(_; place: Out<u64>, graph: u64, context: u64, value: c_uint, flags: c_uint) {
        GRAPHS.graph_conditional_handle_create(place, graph, context, value, flags)
    }

    fn cuGraphKernelNodeGetParams(_; node: u64, parameters: Out<c_void>) {
        GRAPHS.graph_kernel_node_get_params(node, parameters.cast())
    }

    fn cuGraphKernelNodeGetParams_v2(_; node: u64, parameters: Out<c_void>) {
        GRAPHS.graph_kernel_node_get_params_v2(node, parameters.cast())
    }

    fn cuGraphKernelNodeSetParams(_; node: u64, parameters: In<c_void>) {
        GRAPHS.graph_kernel_node_set_params(node, parameters.cast())
    }

    fn cuGraphKernelNodeSetParams_v2(_; node: u64, parameters: In<c_void>) {
        GRAPHS.graph_kernel_node_set_params_v2(node, parameters.cast())
    }

    fn cuGraphMemcpyNodeGetParams(_; node: u64, parameters: Out<c_void>) {
        GRAPHS.graph_memcpy_node_get_params(node, parameters.cast())
    }

    fn cuGraphMemcpyNodeSetParams(_; node: u64, parameters: In<c_void>) {
        GRAPHS.graph_memcpy_node_set_params(node, parameters.cast())
    }

    fn cuGraphMemsetNodeGetParams(_; node: u64, parameters: Out<c_void>) {
        GRAPHS.graph_memset_node_get_params(node, parameters.cast())
    }

    fn cuGraphMemsetNodeSetParams(_; node: u64, parameters: In<c_void>) {
        GRAPHS.graph_memset_node_set_params(node, parameters.cast())
    }

    fn cuGraphHostNodeGetParams(_; node: u64, parameters: Out<c_void>) {
        GRAPHS.graph_host_node_get_params(node, parameters.cast())
    }

    fn cuGraphHostNodeSetParams(_; node: u64, parameters: In<c_void>) {
        GRAPHS.graph_host_node_set_params(node, parameters.cast())
    }

    fn cuGraphEventRecordNodeGetEvent(_; node: u64, event: Out<u64>) {
        GRAPHS.graph_event_record_node_get_event(node, event)
    }

    fn cuGraphEventRecordNodeSetEvent(_; node: u64, event: u64) {
        GRAPHS.graph_event_record_node_set_event(node, event)
    }

    fn cuGraphEventWaitNodeGetEvent(_; node: u64, event: Out<u64>) {
        GRAPHS.graph_event_wait_node_get_event(node, event)
    }

    fn cuGraphEventWaitNodeSetEvent(_; node: u64, event: u64) { GRAPHS.graph_event_wait_node_set_event(node, event) }

    fn cuGraphBatchMemOpNodeGetParams(_; node: u64, parameters: Out<c_void>) {
        GRAPHS.graph_batch_mem_op_node_get_params(node, parameters.cast())
    }

    fn cuGraphBatchMemOpNodeSetParams(_; node: u64, parameters: In<c_void>) {
        GRAPHS.graph_batch_mem_op_node_set_params(node, parameters.cast())
    }

    fn cuGraphNodeSetParams(_; node: u64, parameters: In<c_void>) {
        GRAPHS.graph_node_set_params(node, parameters.cast())
    }

    fn cuGraphNodeSetParams_v2(_; node: u64, parameters: In<c_void>) {
        GRAPHS.graph_node_set_params(node, parameters.cast())
    }

    fn cuGraphNodeGetParams(_; node: u64, parameters: Out<c_void>) {
        GRAPHS.graph_node_get_params(node, parameters.cast())
    }

    fn cuGraphKernelNodeGetAttribute(_; node: u64, id: c_uint, value: Out<c_void>) {
        GRAPHS.graph_kernel_node_get_attribute(node, id, value.cast())
    }

    fn cuGraphKernelNodeSetAttribute(_; node: u64, id: c_uint, value: In<c_void>) {
        GRAPHS.graph_kernel_node_set_attribute(node, id, value.cast())
    }

    fn cuGraphKernelNodeCopyAttributes(_; to: u64, from: u64) { GRAPHS.graph_kernel_node_copy_attributes(to, from) }

    fn cuGraphInstantiate(_; place: Out<u64>, graph: u64, node: Out<u64>, text: Out<c_char>, room: usize) {
        GRAPHS.graph_instantiate(place, graph, node, text, room)
    }

    fn cuGraphInstantiate_v2(_; place: Out<u64>, graph: u64, node: Out<u64>, text: Out<c_char>, room: usize) {
        GRAPHS.graph_instantiate(place, graph, node, text, room)
    }

    fn cuGraphInstantiateWithFlags(_; place: Out<u64>, graph: u64, flags: u64) {
        GRAPHS.graph_instantiate_with_flags(place, graph, flags)
    }

    fn cuGraphExecDestroy(_; executable: u64) { GRAPHS.graph_exec_destroy(executable) }

    fn cuGraphExecGetFlags(_; executable: u64, flags: Out<u64>) { GRAPHS.graph_exec_get_flags(executable, flags) }

    fn cuGraphExecGetId(_; executable: u64, id: Out<c_uint>) { GRAPHS.graph_exec_get_id(executable, id) }

    fn cuGraphExecKernelNodeSetParams(_; executable: u64, node: u64, parameters: In<c_void>) {
        GRAPHS.graph_exec_kernel_node_set_params(executable, node, parameters.cast())
    }

    fn cuGraphExecKernelNodeSetParams_v2(_; executable: u64, node: u64, parameters: In<c_void>) {
        GRAPHS.graph_exec_kernel_node_set_params_v2(executable, node, parameters.cast())
    }

    fn cuGraphExecMemcpyNodeSetParams(_; executable: u64, node: u64, parameters: In<c_void>, context: u64) {
        GRAPHS.graph_exec_memcpy_node_set_params(executable, node, parameters.cast(), context)
    }

    fn cuGraphExecMemsetNodeSetParams(_; executable: u64, node: u64, parameters: In<c_void>, context: u64) {
        GRAPHS.graph_exec_memset_node_set_params(executable, node, parameters.cast(), context)
    }

    fn cuGraphExecHostNodeSetParams(_; executable: u64, node: u64, parameters: In<c_void>) {
        GRAPHS.graph_exec_host_node_set_params(executable, node, parameters.cast())
    }

    fn cuGraphExecChildGraphNodeSetParams(_; executable: u64, node: u64, child: u64) {
        GRAPHS.graph_exec_child_graph_node_set_params(executable, node, child)
    }

    fn cuGraphExecEventRecordNodeSetEvent(_; executable: u64, node: u64, event: u64) {
        GRAPHS.graph_exec_event_record_node_set_event(executable, node, event)
    }

    fn cuGraphExecEventWaitNodeSetEvent(_; executable: u64, node: u64, event: u64) {
        GRAPHS.graph_exec_event_wait_node_set_event(executable, node, event)
    }

    fn cuGraphExecBatchMemOpNodeSetParams(_; executable: u64, node: u64, parameters: In<c_void>) {
        GRAPHS.graph_exec_batch_mem_op_node_set_params(executable, node, parameters.cast())
    }

    fn cuGraphExecNodeSetParams(_; executable: u64, node: u64, parameters: In<c_void>) {
        GRAPHS.graph_exec_node_set_params(executable, node, parameters.cast())
    }

    fn cuGraphNodeSetEnabled(_; executable: u64, node: u64, enabled: c_uint) {
        GRAPHS.graph_node_set_enabled(executable, node, enabled)
    }

    fn cuGraphNodeGetEnabled(_; executable: u64, node: u64, enabled: Out<c_uint>) {
        GRAPHS.graph_node_get_enabled(executable, node, enabled)
    }

    fn cuGraphExecUpdate(_; executable: u64, graph: u64, node: Out<u64>, result: Out<c_uint>) {
        GRAPHS.graph_exec_update(executable, graph, node, result)
    }

    fn cuGraphExecUpdate_v2(_; executable: u64, graph: u64, result: Out<c_void>) {
        GRAPHS.graph_exec_update_v2(executable, graph, result.cast())
    }

    fn cuUserObjectCreate(
        _; place: Out<u64>, data: Out<c_void>, destroy: Option<HostFunction>, references: c_uint, flags: c_uint,
    ) {
        let data = usize::try_from(data.address()).map_err(|_| crate::error::Error::INVALID_VALUE)?;
        let data = core::ptr::with_exposed_provenance_mut(data);
        GRAPHS.user_object_create(place, data, destroy, references, flags)
    }

    fn cuUserObjectRetain(_; object: u64, count: c_uint) { GRAPHS.user_object_retain(object, count) }

    fn cuUserObjectRelease(_; object: u64, count: c_uint) { GRAPHS.user_object_release(object, count) }

    fn cuGraphRetainUserObject(_; graph: u64, object: u64, count: c_uint, flags: c_uint) {
        GRAPHS.graph_retain_user_object(graph, object, count, flags)
    }

    fn cuGraphReleaseUserObject(_; graph: u64, object: u64, count: c_uint) {
        GRAPHS.graph_release_user_object(graph, object, count)
    }

    fn cuGraphInstantiateWithParams(call; place: Out<u64>, graph: u64, parameters: Out<c_void>) {
        GRAPHS.graph_instantiate_with_params(place, graph, parameters.cast(), call.per_thread)
    }

    fn cuGraphLaunch(call; executable: u64, stream: u64) { GRAPHS.graph_launch(executable, stream, call.per_thread) }

    fn cuGraphUpload(call; executable: u64, stream: u64) { GRAPHS.graph_upload(executable, stream, call.per_thread) }

    fn cuStreamGetCaptureInfo(call; stream: u64, status: Out<c_uint>, id: Out<u64>) {
        GRAPHS.stream_get_capture_info(stream, call.per_thread, CaptureInfo::early(status, id))
    }

    fn cuStreamBeginCapture(call; stream: u64) { GRAPHS.stream_begin_capture(stream, call.per_thread, 0) }

    fn cuStreamBeginCapture_v2(call; stream: u64, mode: c_uint) {
        GRAPHS.stream_begin_capture(stream, call.per_thread, mode)
    }

    fn cuStreamBeginCaptureToGraph(
        call; stream: u64, graph: u64, before: In<u64>, data: In<c_void>, count: usize, mode: c_uint,
    ) {
        GRAPHS.stream_begin_capture_to_graph(stream, call.per_thread, graph, before, data.cast(), count, mode)
    }

    fn cuStreamBeginRecaptureToGraph(
        call; stream: u64, mode: c_uint, graph: u64, judge: Out<c_void>, data: Out<c_void>,
    ) {
        let judge = (judge.address(), data.address());
        GRAPHS.stream_begin_recapture_to_graph(stream, call.per_thread, mode, graph, judge)
    }

    fn cuStreamEndCapture(call; stream: u64, graph: Out<u64>) {
        GRAPHS.stream_end_capture(stream, call.per_thread, graph)
    }

    fn cuStreamUpdateCaptureDependencies(call; stream: u64, nodes: In<u64>, count: usize, flags: c_uint) {
        let (of_thread, data) = (call.per_thread, In::missing());
        GRAPHS.stream_update_capture_dependencies(stream, of_thread, nodes, data, count, flags)
    }

    fn cuStreamUpdateCaptureDependencies_v2(
        call; stream: u64, nodes: In<u64>, data: In<c_void>, count: usize, flags: c_uint,
    ) {
        GRAPHS.stream_update_capture_dependencies(stream, call.per_thread, nodes, data.cast(), count, flags)
    }
}
