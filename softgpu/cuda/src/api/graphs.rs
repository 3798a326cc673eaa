//! The entry points for graphs. All of them are forwarded to the implementation that the guest's library has, too.

use std::ffi::{c_char, c_void};

use sluice_cuda_graphs::HostFunction;
use sluice_cuda_graphs::layout::{
    AllocationParameters, BatchParameters, CopyParameters, FillParameters, HostParameters,
    InstantiateParameters, KernelParameters, KernelParametersV1, NodeParameters, UpdateResult,
};

use crate::error::Error;
use crate::ffi::{In, Out};
use crate::graphs::GRAPHS;
use crate::stream::Implicit;

calls! {
    fn cuGraphCreate(place: Out<u64>, flags: u32) { GRAPHS.graph_create(place, flags) }

    fn cuGraphDestroy(graph: u64) { GRAPHS.graph_destroy(graph) }

    fn cuGraphClone(place: Out<u64>, original: u64) { GRAPHS.graph_clone(place, original) }

    fn cuGraphNodeFindInClone(place: Out<u64>, original: u64, clone: u64) {
        GRAPHS.graph_node_find_in_clone(place, original, clone)
    }

    fn cuGraphGetNodes(graph: u64, nodes: Out<u64>, count: Out<usize>) { GRAPHS.graph_get_nodes(graph, nodes, count) }

    fn cuGraphGetRootNodes(graph: u64, nodes: Out<u64>, count: Out<usize>) {
        GRAPHS.graph_get_root_nodes(graph, nodes, count)
    }

    fn cuGraphGetEdges(graph: u64, from: Out<u64>, to: Out<u64>, count: Out<usize>) {
        GRAPHS.graph_get_edges(graph, from, to, Out::missing(), count)
    }

    fn cuGraphGetEdges_v2(graph: u64, from: Out<u64>, to: Out<u64>, data: Out<[u8; 8]>, count: Out<usize>) {
        GRAPHS.graph_get_edges(graph, from, to, data, count)
    }

    fn cuGraphNodeGetDependencies(node: u64, nodes: Out<u64>, count: Out<usize>) {
        GRAPHS.graph_node_get_dependencies(node, nodes, Out::missing(), count)
    }

    fn cuGraphNodeGetDependencies_v2(node: u64, nodes: Out<u64>, data: Out<[u8; 8]>, count: Out<usize>) {
        GRAPHS.graph_node_get_dependencies(node, nodes, data, count)
    }

    fn cuGraphNodeGetDependentNodes(node: u64, nodes: Out<u64>, count: Out<usize>) {
        GRAPHS.graph_node_get_dependent_nodes(node, nodes, Out::missing(), count)
    }

    fn cuGraphNodeGetDependentNodes_v2(node: u64, nodes: Out<u64>, data: Out<[u8; 8]>, count: Out<usize>) {
        GRAPHS.graph_node_get_dependent_nodes(node, nodes, data, count)
    }

    fn cuGraphAddDependencies(graph: u64, from: In<u64>, to: In<u64>, count: usize) {
        GRAPHS.graph_add_dependencies(graph, from, to, In::missing(), count)
    }

    fn cuGraphAddDependencies_v2(graph: u64, from: In<u64>, to: In<u64>, data: In<[u8; 8]>, count: usize) {
        GRAPHS.graph_add_dependencies(graph, from, to, data, count)
    }

    fn cuGraphRemoveDependencies(graph: u64, from: In<u64>, to: In<u64>, count: usize) {
        GRAPHS.graph_remove_dependencies(graph, from, to, In::missing(), count)
    }

    fn cuGraphRemoveDependencies_v2(graph: u64, from: In<u64>, to: In<u64>, data: In<[u8; 8]>, count: usize) {
        GRAPHS.graph_remove_dependencies(graph, from, to, data, count)
    }

    fn cuGraphDestroyNode(node: u64) { GRAPHS.graph_destroy_node(node) }

    fn cuGraphNodeGetType(node: u64, kind: Out<u32>) { GRAPHS.graph_node_get_type(node, kind) }

    fn cuGraphNodeGetContainingGraph(node: u64, graph: Out<u64>) { GRAPHS.graph_node_get_containing_graph(node, graph) }

    fn cuGraphNodeGetLocalId(node: u64, id: Out<u32>) { GRAPHS.graph_node_get_local_id(node, id) }

    fn cuGraphNodeGetToolsId(node: u64, id: Out<u64>) { GRAPHS.graph_node_get_tools_id(node, id) }

    fn cuGraphGetId(graph: u64, id: Out<u32>) { GRAPHS.graph_get_id(graph, id) }

    fn cuGraphDebugDotPrint(graph: u64, path: In<c_char>, flags: u32) {
        GRAPHS.graph_debug_dot_print(graph, path, flags)
    }

    fn cuGraphAddKernelNode(
        place: Out<u64>, graph: u64, before: In<u64>, count: usize, parameters: In<KernelParametersV1<Error>>,
    ) {
        GRAPHS.graph_add_kernel_node(place, graph, before, count, parameters)
    }

    fn cuGraphAddKernelNode_v2(
        place: Out<u64>, graph: u64, before: In<u64>, count: usize, parameters: In<KernelParameters<Error>>,
    ) {
        GRAPHS.graph_add_kernel_node_v2(place, graph, before, count, parameters)
    }

    fn cuGraphAddMemcpyNode(
        place: Out<u64>, graph: u64, before: In<u64>, count: usize, parameters: In<CopyParameters>, context: u64,
    ) {
        GRAPHS.graph_add_memcpy_node(place, graph, before, count, parameters, context)
    }

    fn cuGraphAddMemsetNode(
        place: Out<u64>, graph: u64, before: In<u64>, count: usize, parameters: In<FillParameters>, context: u64,
    ) {
        GRAPHS.graph_add_memset_node(place, graph, before, count, parameters, context)
    }

    fn cuGraphAddHostNode(
        place: Out<u64>, graph: u64, before: In<u64>, count: usize, parameters: In<HostParameters>,
    ) {
        GRAPHS.graph_add_host_node(place, graph, before, count, parameters)
    }

    fn cuGraphAddChildGraphNode(place: Out<u64>, graph: u64, before: In<u64>, count: usize, child: u64) {
        GRAPHS.graph_add_child_graph_node(place, graph, before, count, child)
    }

    fn cuGraphChildGraphNodeGetGraph(node: u64, graph: Out<u64>) {
        GRAPHS.graph_child_graph_node_get_graph(node, graph)
    }

    fn cuGraphAddEmptyNode(place: Out<u64>, graph: u64, before: In<u64>, count: usize) {
        GRAPHS.graph_add_empty_node(place, graph, before, count)
    }

    fn cuGraphAddEventRecordNode(place: Out<u64>, graph: u64, before: In<u64>, count: usize, event: u64) {
        GRAPHS.graph_add_event_record_node(place, graph, before, count, event)
    }

    fn cuGraphAddEventWaitNode(place: Out<u64>, graph: u64, before: In<u64>, count: usize, event: u64) {
        GRAPHS.graph_add_event_wait_node(place, graph, before, count, event)
    }

    fn cuGraphAddBatchMemOpNode(
        place: Out<u64>, graph: u64, before: In<u64>, count: usize, parameters: In<BatchParameters<Error>>,
    ) {
        GRAPHS.graph_add_batch_mem_op_node(place, graph, before, count, parameters)
    }

    fn cuGraphAddNode(place: Out<u64>, graph: u64, before: In<u64>, count: usize, parameters: Out<NodeParameters>) {
        GRAPHS.graph_add_node(place, graph, before, In::missing(), count, parameters)
    }

    fn cuGraphAddNode_v2(
        place: Out<u64>, graph: u64, before: In<u64>, data: In<[u8; 8]>, count: usize, parameters: Out<NodeParameters>,
    ) {
        GRAPHS.graph_add_node(place, graph, before, data, count, parameters)
    }

    fn cuGraphAddNode_v3(
        place: Out<u64>, graph: u64, before: In<u64>, data: In<[u8; 8]>, count: usize, parameters: Out<NodeParameters>,
    ) {
        GRAPHS.graph_add_node(place, graph, before, data, count, parameters)
    }

    fn cuGraphAddMemAllocNode(
        place: Out<u64>, graph: u64, before: In<u64>, count: usize, parameters: Out<AllocationParameters<Error>>,
    ) {
        GRAPHS.graph_add_mem_alloc_node(place, graph, before, count, parameters)
    }

    fn cuGraphAddMemFreeNode(place: Out<u64>, graph: u64, before: In<u64>, count: usize, address: u64) {
        GRAPHS.graph_add_mem_free_node(place, graph, before, count, address)
    }

    fn cuGraphMemAllocNodeGetParams(node: u64, parameters: Out<AllocationParameters<Error>>) {
        GRAPHS.graph_mem_alloc_node_get_params(node, parameters)
    }

    fn cuGraphMemFreeNodeGetParams(node: u64, address: Out<u64>) {
        GRAPHS.graph_mem_free_node_get_params(node, address)
    }

    fn cuGraphConditionalHandleCreate(place: Out<u64>, graph: u64, context: u64, value: u32, flags: u32) {
        GRAPHS.graph_conditional_handle_create(place, graph, context, value, flags)
    }

    fn cuGraphKernelNodeGetParams(node: u64, parameters: Out<KernelParametersV1<Error>>) {
        GRAPHS.graph_kernel_node_get_params(node, parameters)
    }

    fn cuGraphKernelNodeGetParams_v2(node: u64, parameters: Out<KernelParameters<Error>>) {
        GRAPHS.graph_kernel_node_get_params_v2(node, parameters)
    }

    fn cuGraphKernelNodeSetParams(node: u64, parameters: In<KernelParametersV1<Error>>) {
        GRAPHS.graph_kernel_node_set_params(node, parameters)
    }

    fn cuGraphKernelNodeSetParams_v2(node: u64, parameters: In<KernelParameters<Error>>) {
        GRAPHS.graph_kernel_node_set_params_v2(node, parameters)
    }

    fn cuGraphMemcpyNodeGetParams(node: u64, parameters: Out<CopyParameters>) {
        GRAPHS.graph_memcpy_node_get_params(node, parameters)
    }

    fn cuGraphMemcpyNodeSetParams(node: u64, parameters: In<CopyParameters>) {
        GRAPHS.graph_memcpy_node_set_params(node, parameters)
    }

    fn cuGraphMemsetNodeGetParams(node: u64, parameters: Out<FillParameters>) {
        GRAPHS.graph_memset_node_get_params(node, parameters)
    }

    fn cuGraphMemsetNodeSetParams(node: u64, parameters: In<FillParameters>) {
        GRAPHS.graph_memset_node_set_params(node, parameters)
    }

    fn cuGraphHostNodeGetParams(node: u64, parameters: Out<HostParameters>) {
        GRAPHS.graph_host_node_get_params(node, parameters)
    }

    fn cuGraphHostNodeSetParams(node: u64, parameters: In<HostParameters>) {
        GRAPHS.graph_host_node_set_params(node, parameters)
    }

    fn cuGraphEventRecordNodeGetEvent(node: u64, event: Out<u64>) {
        GRAPHS.graph_event_record_node_get_event(node, event)
    }

    fn cuGraphEventRecordNodeSetEvent(node: u64, event: u64) { GRAPHS.graph_event_record_node_set_event(node, event) }

    fn cuGraphEventWaitNodeGetEvent(node: u64, event: Out<u64>) { GRAPHS.graph_event_wait_node_get_event(node, event) }

    fn cuGraphEventWaitNodeSetEvent(node: u64, event: u64) { GRAPHS.graph_event_wait_node_set_event(node, event) }

    fn cuGraphBatchMemOpNodeGetParams(node: u64, parameters: Out<BatchParameters<Error>>) {
        GRAPHS.graph_batch_mem_op_node_get_params(node, parameters)
    }

    fn cuGraphBatchMemOpNodeSetParams(node: u64, parameters: In<BatchParameters<Error>>) {
        GRAPHS.graph_batch_mem_op_node_set_params(node, parameters)
    }

    fn cuGraphNodeSetParams(node: u64, parameters: In<NodeParameters>) { GRAPHS.graph_node_set_params(node, parameters) }

    fn cuGraphNodeSetParams_v2(node: u64, parameters: In<NodeParameters>) {
        GRAPHS.graph_node_set_params(node, parameters)
    }

    fn cuGraphNodeGetParams(node: u64, parameters: Out<NodeParameters>) { GRAPHS.graph_node_get_params(node, parameters) }

    fn cuGraphKernelNodeGetAttribute(node: u64, id: u32, value: Out<[u8; 64]>) {
        GRAPHS.graph_kernel_node_get_attribute(node, id, value)
    }

    fn cuGraphKernelNodeSetAttribute(node: u64, id: u32, value: In<[u8; 64]>) {
        GRAPHS.graph_kernel_node_set_attribute(node, id, value)
    }

    fn cuGraphKernelNodeCopyAttributes(to: u64, from: u64) { GRAPHS.graph_kernel_node_copy_attributes(to, from) }

    fn cuGraphInstantiate(place: Out<u64>, graph: u64, node: Out<u64>, text: Out<c_char>, room: usize) {
        GRAPHS.graph_instantiate(place, graph, node, text, room)
    }

    fn cuGraphInstantiate_v2(place: Out<u64>, graph: u64, node: Out<u64>, text: Out<c_char>, room: usize) {
        GRAPHS.graph_instantiate(place, graph, node, text, room)
    }

    fn cuGraphInstantiateWithFlags(place: Out<u64>, graph: u64, flags: u64) {
        GRAPHS.graph_instantiate_with_flags(place, graph, flags)
    }

    fn cuGraphExecDestroy(executable: u64) { GRAPHS.graph_exec_destroy(executable) }

    fn cuGraphExecGetFlags(executable: u64, flags: Out<u64>) { GRAPHS.graph_exec_get_flags(executable, flags) }

    fn cuGraphExecGetId(executable: u64, id: Out<u32>) { GRAPHS.graph_exec_get_id(executable, id) }

    fn cuGraphExecKernelNodeSetParams(executable: u64, node: u64, parameters: In<KernelParametersV1<Error>>) {
        GRAPHS.graph_exec_kernel_node_set_params(executable, node, parameters)
    }

    fn cuGraphExecKernelNodeSetParams_v2(executable: u64, node: u64, parameters: In<KernelParameters<Error>>) {
        GRAPHS.graph_exec_kernel_node_set_params_v2(executable, node, parameters)
    }

    fn cuGraphExecMemcpyNodeSetParams(executable: u64, node: u64, parameters: In<CopyParameters>, context: u64) {
        GRAPHS.graph_exec_memcpy_node_set_params(executable, node, parameters, context)
    }

    fn cuGraphExecMemsetNodeSetParams(executable: u64, node: u64, parameters: In<FillParameters>, context: u64) {
        GRAPHS.graph_exec_memset_node_set_params(executable, node, parameters, context)
    }

    fn cuGraphExecHostNodeSetParams(executable: u64, node: u64, parameters: In<HostParameters>) {
        GRAPHS.graph_exec_host_node_set_params(executable, node, parameters)
    }

    fn cuGraphExecChildGraphNodeSetParams(executable: u64, node: u64, child: u64) {
        GRAPHS.graph_exec_child_graph_node_set_params(executable, node, child)
    }

    fn cuGraphExecEventRecordNodeSetEvent(executable: u64, node: u64, event: u64) {
        GRAPHS.graph_exec_event_record_node_set_event(executable, node, event)
    }

    fn cuGraphExecEventWaitNodeSetEvent(executable: u64, node: u64, event: u64) {
        GRAPHS.graph_exec_event_wait_node_set_event(executable, node, event)
    }

    fn cuGraphExecBatchMemOpNodeSetParams(executable: u64, node: u64, parameters: In<BatchParameters<Error>>) {
        GRAPHS.graph_exec_batch_mem_op_node_set_params(executable, node, parameters)
    }

    fn cuGraphExecNodeSetParams(executable: u64, node: u64, parameters: In<NodeParameters>) {
        GRAPHS.graph_exec_node_set_params(executable, node, parameters)
    }

    fn cuGraphNodeSetEnabled(executable: u64, node: u64, enabled: u32) {
        GRAPHS.graph_node_set_enabled(executable, node, enabled)
    }

    fn cuGraphNodeGetEnabled(executable: u64, node: u64, enabled: Out<u32>) {
        GRAPHS.graph_node_get_enabled(executable, node, enabled)
    }

    fn cuGraphExecUpdate(executable: u64, graph: u64, node: Out<u64>, result: Out<u32>) {
        GRAPHS.graph_exec_update(executable, graph, node, result)
    }

    fn cuGraphExecUpdate_v2(executable: u64, graph: u64, result: Out<UpdateResult>) {
        GRAPHS.graph_exec_update_v2(executable, graph, result)
    }

    fn cuUserObjectCreate(
        place: Out<u64>, data: *mut c_void, destroy: Option<HostFunction>, references: u32, flags: u32,
    ) {
        GRAPHS.user_object_create(place, data, destroy, references, flags)
    }

    fn cuUserObjectRetain(object: u64, count: u32) { GRAPHS.user_object_retain(object, count) }

    fn cuUserObjectRelease(object: u64, count: u32) { GRAPHS.user_object_release(object, count) }

    fn cuGraphRetainUserObject(graph: u64, object: u64, count: u32, flags: u32) {
        GRAPHS.graph_retain_user_object(graph, object, count, flags)
    }

    fn cuGraphReleaseUserObject(graph: u64, object: u64, count: u32) {
        GRAPHS.graph_release_user_object(graph, object, count)
    }
}

twins! {
    fn cuGraphInstantiateWithParams, cuGraphInstantiateWithParams_ptsz(
        implicit; place: Out<u64>, graph: u64, parameters: Out<InstantiateParameters>,
    ) {
        GRAPHS.graph_instantiate_with_params(place, graph, parameters, implicit == Implicit::PerThread)
    }

    fn cuGraphLaunch, cuGraphLaunch_ptsz(implicit; executable: u64, stream: u64) {
        GRAPHS.graph_launch(executable, stream, implicit == Implicit::PerThread)
    }

    fn cuGraphUpload, cuGraphUpload_ptsz(implicit; executable: u64, stream: u64) {
        GRAPHS.graph_upload(executable, stream, implicit == Implicit::PerThread)
    }
}
