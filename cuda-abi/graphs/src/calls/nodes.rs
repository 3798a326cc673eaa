//! Nodes of graphs: how they are made, and their parameters. In one file: kinds share their checks.

use sluice_cuda_abi::sys::{CUgraphNodeType, CUresult as Code};

use super::parameters::NodeDescription;
use super::{Graphs, In, Out, Result, failed, invalid};
use crate::driver::GraphDriver;
use crate::graph::{Edge, NodeWork};
use crate::layout::{
    BODY, BatchAnswer, BatchParameters, ChildParameters, CopyNodeParameters, CopyParameters,
    EventRecordParameters, FillNodeParameters, FillParameters, HostNodeParameters, HostParameters,
    KernelAnswer, KernelParameters, KernelParametersV1, NodeParameters,
};
use crate::plan::{KernelWork, Work};

/// Attributes of kernel nodes, with the numbers of the header.
mod attribute {
    pub(super) const COOPERATIVE: u32 = 2;
    pub(super) const MEMORY_DOMAIN_MAP: u32 = 9;
    pub(super) const DEVICE_UPDATABLE: u32 = 13;
    pub(super) const CARVEOUT: u32 = 14;

    /// True for an attribute that a kernel node may have.
    pub(super) fn is_known(id: u32) -> bool {
        matches!(id, 1 | COOPERATIVE | 4 | 5 | 8..=11 | DEVICE_UPDATABLE | CARVEOUT | 16..=18)
    }

    /// The value of an attribute that was not set.
    pub(super) fn default(id: u32) -> [u8; 64] {
        let mut value = [0; 64];
        match id {
            // The default and the remote domain.
            MEMORY_DOMAIN_MAP => value[1] = 1,
            CARVEOUT => value[..4].copy_from_slice(&(-1_i32).to_ne_bytes()),
            _ => {}
        }
        value
    }
}

/// `CUgraphNodeType`.
pub(super) fn kind(work: &NodeWork) -> u32 {
    match work {
        NodeWork::Plain(work) => work.kind() as u32,
        NodeWork::Child(_) => CUgraphNodeType::CU_GRAPH_NODE_TYPE_GRAPH as u32,
        NodeWork::Conditional(_) => CUgraphNodeType::CU_GRAPH_NODE_TYPE_CONDITIONAL as u32,
    }
}

impl<E: Copy> From<KernelParametersV1<E>> for KernelParameters<E> {
    fn from(first: KernelParametersV1<E>) -> KernelParameters<E> {
        KernelParameters { first, kernel: 0, context: 0 }
    }
}

/// Adding a node.
impl<D: GraphDriver> Graphs<D> {
    fn add(&self, place: Out<u64, D>, graph: u64, before: &[Edge], work: Work) -> Result<(), D> {
        self.driver.check(&work)?;
        place.set(self.with(|state| state.model.add(graph, NodeWork::Plain(work), before))?)
    }

    fn add_plain(
        &self,
        place: Out<u64, D>,
        graph: u64,
        before: (In<u64, D>, usize),
        work: impl FnOnce() -> Result<Work, D>,
    ) -> Result<(), D> {
        place.required()?;
        let before = self.dependencies(before.0, In::<[u8; 8], D>::missing(), before.1)?;
        self.add(place, graph, &before, work()?)
    }

    fn add_child(
        &self,
        place: Out<u64, D>,
        graph: u64,
        before: &[Edge],
        child: u64,
        is_moved: bool,
    ) -> Result<(), D> {
        place.set(self.with(|state| {
            state.model.graph(graph)?;
            let child = if is_moved { child } else { state.model.clone_graph(child)? };
            let added = state.model.add(graph, NodeWork::Child(child), before);
            if added.is_err() && !is_moved {
                state.model.remove(child);
            }
            added
        })?)
    }

    /// `cuGraphAddKernelNode`.
    ///
    /// # Errors
    /// The driver's code.
    pub fn graph_add_kernel_node(
        &self,
        place: Out<u64, D>,
        graph: u64,
        before: In<u64, D>,
        count: usize,
        parameters: In<KernelParametersV1<D::Error>, D>,
    ) -> Result<(), D> {
        self.add_plain(place, graph, (before, count), || self.kernel_work(&parameters.get()?.into()))
    }

    /// `cuGraphAddKernelNode_v2`.
    ///
    /// # Errors
    /// The driver's code.
    pub fn graph_add_kernel_node_v2(
        &self,
        place: Out<u64, D>,
        graph: u64,
        before: In<u64, D>,
        count: usize,
        parameters: In<KernelParameters<D::Error>, D>,
    ) -> Result<(), D> {
        self.add_plain(place, graph, (before, count), || self.kernel_work(&parameters.get()?))
    }

    /// `cuGraphAddMemcpyNode`.
    ///
    /// # Errors
    /// The driver's code.
    pub fn graph_add_memcpy_node(
        &self,
        place: Out<u64, D>,
        graph: u64,
        before: In<u64, D>,
        count: usize,
        parameters: In<CopyParameters, D>,
        context: u64,
    ) -> Result<(), D> {
        self.add_plain(place, graph, (before, count), || self.copy_work(parameters.get()?, context))
    }

    /// `cuGraphAddMemsetNode`.
    ///
    /// # Errors
    /// The driver's code.
    pub fn graph_add_memset_node(
        &self,
        place: Out<u64, D>,
        graph: u64,
        before: In<u64, D>,
        count: usize,
        parameters: In<FillParameters, D>,
        context: u64,
    ) -> Result<(), D> {
        self.add_plain(place, graph, (before, count), || self.fill_work(parameters.get()?, context))
    }

    /// `cuGraphAddHostNode`.
    ///
    /// # Errors
    /// The driver's code.
    pub fn graph_add_host_node(
        &self,
        place: Out<u64, D>,
        graph: u64,
        before: In<u64, D>,
        count: usize,
        parameters: In<HostParameters, D>,
    ) -> Result<(), D> {
        self.add_plain(place, graph, (before, count), || self.host_work(parameters.get()?))
    }

    /// `cuGraphAddChildGraphNode`.
    ///
    /// # Errors
    /// The driver's code.
    pub fn graph_add_child_graph_node(
        &self,
        place: Out<u64, D>,
        graph: u64,
        before: In<u64, D>,
        count: usize,
        child: u64,
    ) -> Result<(), D> {
        place.required()?;
        let before = self.dependencies(before, In::<[u8; 8], D>::missing(), count)?;
        self.add_child(place, graph, &before, child, false)
    }

    /// `cuGraphAddEmptyNode`.
    ///
    /// # Errors
    /// The driver's code.
    pub fn graph_add_empty_node(
        &self,
        place: Out<u64, D>,
        graph: u64,
        before: In<u64, D>,
        count: usize,
    ) -> Result<(), D> {
        self.add_plain(place, graph, (before, count), || Ok(Work::Empty))
    }

    /// `cuGraphAddEventRecordNode`.
    ///
    /// # Errors
    /// The driver's code.
    pub fn graph_add_event_record_node(
        &self,
        place: Out<u64, D>,
        graph: u64,
        before: In<u64, D>,
        count: usize,
        event: u64,
    ) -> Result<(), D> {
        self.add_plain(place, graph, (before, count), || Ok(Work::EventRecord { event }))
    }

    /// `cuGraphAddEventWaitNode`.
    ///
    /// # Errors
    /// The driver's code.
    pub fn graph_add_event_wait_node(
        &self,
        place: Out<u64, D>,
        graph: u64,
        before: In<u64, D>,
        count: usize,
        event: u64,
    ) -> Result<(), D> {
        self.add_plain(place, graph, (before, count), || Ok(Work::EventWait { event }))
    }

    /// `cuGraphAddBatchMemOpNode`.
    ///
    /// # Errors
    /// The driver's code.
    pub fn graph_add_batch_mem_op_node(
        &self,
        place: Out<u64, D>,
        graph: u64,
        before: In<u64, D>,
        count: usize,
        parameters: In<BatchParameters<D::Error>, D>,
    ) -> Result<(), D> {
        self.add_plain(place, graph, (before, count), || self.batch_work(&parameters.get()?))
    }

    /// `cuGraphAddNode_v2` and `_v3`; the first form has no `data`.
    ///
    /// # Errors
    /// The driver's code.
    pub fn graph_add_node(
        &self,
        place: Out<u64, D>,
        graph: u64,
        before: In<u64, D>,
        data: In<[u8; 8], D>,
        count: usize,
        parameters: Out<NodeParameters, D>,
    ) -> Result<(), D> {
        place.required()?;
        let before = self.dependencies(before, data, count)?;
        match self.description(parameters.input())? {
            NodeDescription::Allocation => {
                let body = parameters.cast::<u64>().at(BODY)?;
                self.add_allocation(place, graph, &before, body.cast())
            }
            NodeDescription::Conditional => {
                let body = parameters.cast::<u64>().at(BODY)?;
                self.add_conditional(place, graph, &before, body.cast())
            }
            NodeDescription::Plain(Work::Free { address }) => self.add_end(place, graph, &before, address),
            NodeDescription::Plain(work) => self.add(place, graph, &before, work),
            NodeDescription::Clone(child) => self.add_child(place, graph, &before, child, false),
            NodeDescription::Move(child) => self.add_child(place, graph, &before, child, true),
        }
    }
}

/// Parameters of nodes.
impl<D: GraphDriver> Graphs<D> {
    /// The work of a node that is not a child graph.
    pub(super) fn work(&self, node: u64) -> Result<Work, D> {
        self.with(|state| state.model.work(node).cloned())
    }

    fn kernel(&self, node: u64) -> Result<KernelWork, D> {
        match self.work(node)? {
            Work::Kernel(kernel) => Ok(kernel),
            _ => Err(invalid::<D>()),
        }
    }

    /// Replaces the work of a node. A kernel keeps its attributes.
    fn set(&self, node: u64, mut work: Work) -> Result<(), D> {
        if work.is_of_memory() {
            return Err(invalid::<D>());
        }
        // The driver reports a wrong node before a wrong object of its work.
        let attributes = self.with(|state| {
            Ok(match state.model.work(node)? {
                Work::Kernel(kernel) => Some(kernel.attributes.clone()),
                _ => None,
            })
        })?;
        if let Work::Kernel(kernel) = &mut work {
            kernel.attributes = attributes.ok_or_else(invalid::<D>)?;
        }
        self.driver.check(&work)?;
        self.with(|state| state.model.set_work(node, work))
    }

    fn kernel_parameters(&self, node: u64) -> Result<KernelAnswer, D> {
        self.kernel_answer(node, &self.kernel(node)?)
    }

    fn batch_parameters(&self, node: u64) -> Result<BatchAnswer, D> {
        match self.work(node)? {
            Work::MemoryOperations { operations, context } => self.batch_answer(node, &operations, context),
            _ => Err(invalid::<D>()),
        }
    }

    /// `cuGraphKernelNodeGetParams`.
    ///
    /// # Errors
    /// The driver's code.
    pub fn graph_kernel_node_get_params(
        &self,
        node: u64,
        parameters: Out<KernelParametersV1<D::Error>, D>,
    ) -> Result<(), D> {
        parameters.required()?;
        let mut answer = self.kernel_parameters(node)?;
        if answer.function == 0 {
            answer.function = answer.kernel;
        }
        parameters.cast::<KernelAnswer>().set_first(&answer, size_of::<KernelParametersV1<D::Error>>())
    }

    /// `cuGraphKernelNodeGetParams_v2`.
    ///
    /// # Errors
    /// The driver's code.
    pub fn graph_kernel_node_get_params_v2(
        &self,
        node: u64,
        parameters: Out<KernelParameters<D::Error>, D>,
    ) -> Result<(), D> {
        parameters.required()?;
        parameters.cast().set(self.kernel_parameters(node)?)
    }

    /// `cuGraphKernelNodeSetParams`.
    ///
    /// # Errors
    /// The driver's code.
    pub fn graph_kernel_node_set_params(
        &self,
        node: u64,
        parameters: In<KernelParametersV1<D::Error>, D>,
    ) -> Result<(), D> {
        self.set(node, self.kernel_work(&parameters.get()?.into())?)
    }

    /// `cuGraphKernelNodeSetParams_v2`.
    ///
    /// # Errors
    /// The driver's code.
    pub fn graph_kernel_node_set_params_v2(
        &self,
        node: u64,
        parameters: In<KernelParameters<D::Error>, D>,
    ) -> Result<(), D> {
        self.set(node, self.kernel_work(&parameters.get()?)?)
    }

    /// `cuGraphMemcpyNodeGetParams`.
    ///
    /// # Errors
    /// The driver's code.
    pub fn graph_memcpy_node_get_params(
        &self,
        node: u64,
        parameters: Out<CopyParameters, D>,
    ) -> Result<(), D> {
        parameters.required()?;
        match self.work(node)? {
            Work::Copy { copy, .. } => parameters.set(copy.into()),
            _ => Err(invalid::<D>()),
        }
    }

    /// `cuGraphMemcpyNodeSetParams`.
    ///
    /// # Errors
    /// The driver's code.
    pub fn graph_memcpy_node_set_params(
        &self,
        node: u64,
        parameters: In<CopyParameters, D>,
    ) -> Result<(), D> {
        match self.work(node)? {
            Work::Copy { context, .. } => self.set(node, self.copy_work(parameters.get()?, context)?),
            _ => Err(invalid::<D>()),
        }
    }

    /// `cuGraphMemsetNodeGetParams`.
    ///
    /// # Errors
    /// The driver's code.
    pub fn graph_memset_node_get_params(
        &self,
        node: u64,
        parameters: Out<FillParameters, D>,
    ) -> Result<(), D> {
        parameters.required()?;
        match self.work(node)? {
            Work::Fill { fill, .. } => parameters.set(fill.into()),
            _ => Err(invalid::<D>()),
        }
    }

    /// `cuGraphMemsetNodeSetParams`.
    ///
    /// # Errors
    /// The driver's code.
    pub fn graph_memset_node_set_params(
        &self,
        node: u64,
        parameters: In<FillParameters, D>,
    ) -> Result<(), D> {
        match self.work(node)? {
            Work::Fill { context, .. } => self.set(node, self.fill_work(parameters.get()?, context)?),
            _ => Err(invalid::<D>()),
        }
    }

    /// `cuGraphHostNodeGetParams`.
    ///
    /// # Errors
    /// The driver's code.
    pub fn graph_host_node_get_params(&self, node: u64, parameters: Out<HostParameters, D>) -> Result<(), D> {
        parameters.required()?;
        match self.work(node)? {
            Work::Host(host) => parameters.set(HostParameters { function: host.function, data: host.data }),
            _ => Err(invalid::<D>()),
        }
    }

    /// `cuGraphHostNodeSetParams`.
    ///
    /// # Errors
    /// The driver's code.
    pub fn graph_host_node_set_params(&self, node: u64, parameters: In<HostParameters, D>) -> Result<(), D> {
        self.set(node, self.host_work(parameters.get()?)?)
    }

    /// `cuGraphEventRecordNodeGetEvent`.
    ///
    /// # Errors
    /// The driver's code.
    pub fn graph_event_record_node_get_event(&self, node: u64, event: Out<u64, D>) -> Result<(), D> {
        event.required()?;
        match self.work(node)? {
            Work::EventRecord { event: found } => event.set(found),
            _ => Err(invalid::<D>()),
        }
    }

    /// `cuGraphEventRecordNodeSetEvent`.
    ///
    /// # Errors
    /// The driver's code.
    pub fn graph_event_record_node_set_event(&self, node: u64, event: u64) -> Result<(), D> {
        self.set(node, Work::EventRecord { event })
    }

    /// `cuGraphEventWaitNodeGetEvent`.
    ///
    /// # Errors
    /// The driver's code.
    pub fn graph_event_wait_node_get_event(&self, node: u64, event: Out<u64, D>) -> Result<(), D> {
        event.required()?;
        match self.work(node)? {
            Work::EventWait { event: found } => event.set(found),
            _ => Err(invalid::<D>()),
        }
    }

    /// `cuGraphEventWaitNodeSetEvent`.
    ///
    /// # Errors
    /// The driver's code.
    pub fn graph_event_wait_node_set_event(&self, node: u64, event: u64) -> Result<(), D> {
        self.set(node, Work::EventWait { event })
    }

    /// `cuGraphBatchMemOpNodeGetParams`.
    ///
    /// # Errors
    /// The driver's code.
    pub fn graph_batch_mem_op_node_get_params(
        &self,
        node: u64,
        parameters: Out<BatchParameters<D::Error>, D>,
    ) -> Result<(), D> {
        parameters.required()?;
        parameters.cast().set(self.batch_parameters(node)?)
    }

    /// `cuGraphBatchMemOpNodeSetParams`.
    ///
    /// # Errors
    /// The driver's code.
    pub fn graph_batch_mem_op_node_set_params(
        &self,
        node: u64,
        parameters: In<BatchParameters<D::Error>, D>,
    ) -> Result<(), D> {
        self.set(node, self.batch_work(&parameters.get()?)?)
    }

    /// `cuGraphNodeSetParams`, in both forms.
    ///
    /// # Errors
    /// The driver's code.
    pub fn graph_node_set_params(&self, node: u64, parameters: In<NodeParameters, D>) -> Result<(), D> {
        match self.description(parameters)? {
            NodeDescription::Plain(work) => self.set(node, work),
            NodeDescription::Clone(graph) => self.with(|state| {
                let NodeWork::Child(old) = state.model.node(node)?.work else {
                    return Err(Code::CUDA_ERROR_INVALID_VALUE);
                };
                state.model.without_conditions(graph)?;
                let new = state.model.clone_graph(graph)?;
                state.model.graph_mut(new)?.owner = node;
                state.model.node_mut(node)?.work = NodeWork::Child(new);
                state.model.remove(old);
                Ok(())
            }),
            NodeDescription::Move(_) | NodeDescription::Allocation => Err(invalid::<D>()),
            NodeDescription::Conditional => Err(failed::<D>(Code::CUDA_ERROR_NOT_SUPPORTED)),
        }
    }

    /// `cuGraphNodeGetParams`.
    ///
    /// # Errors
    /// The driver's code.
    pub fn graph_node_get_params(&self, node: u64, parameters: Out<NodeParameters, D>) -> Result<(), D> {
        parameters.required()?;
        let (kind, child) = self.with(|state| {
            let work = &state.model.node(node)?.work;
            let child = if let NodeWork::Child(child) = work { Some(*child) } else { None };
            Ok((kind(work), child))
        })?;
        parameters.set(NodeParameters { kind, reserved: [0; 3], body: [0; 29], end: 0 })?;
        let body = parameters.cast::<u64>().at(BODY)?;
        if let Some(graph) = child {
            return body.cast().set(ChildParameters { graph, ownership: 0 });
        }
        if let Some(conditional) = self.conditional_answer(node)? {
            return body.cast().set(conditional);
        }
        match self.work(node)? {
            Work::Kernel(_) => body.cast().set(self.kernel_parameters(node)?),
            Work::Copy { copy, context } => {
                body.cast().set(CopyNodeParameters { context, copy: copy.into(), ..Default::default() })
            }
            Work::Fill { fill, context } => {
                body.cast().set(FillNodeParameters { fill: fill.into(), context })
            }
            Work::Host(host) => {
                let host = HostParameters { function: host.function, data: host.data };
                body.cast().set(HostNodeParameters { host, ..Default::default() })
            }
            Work::EventWait { event } => body.set(event),
            Work::EventRecord { event } => body.cast().set(EventRecordParameters { event, context: 0 }),
            Work::MemoryOperations { .. } => body.cast().set(self.batch_parameters(node)?),
            Work::Allocation(work) => body.cast().set(self.allocation_answer(node, &work)?),
            Work::Free { address } => body.set(address),
            Work::Empty | Work::Child(_) | Work::Conditional(_) => Ok(()),
        }
    }
}

/// Attributes of kernel nodes.
impl<D: GraphDriver> Graphs<D> {
    /// `cuGraphKernelNodeGetAttribute`.
    ///
    /// # Errors
    /// The driver's code.
    pub fn graph_kernel_node_get_attribute(
        &self,
        node: u64,
        id: u32,
        value: Out<[u8; 64], D>,
    ) -> Result<(), D> {
        value.required()?;
        let kernel = self.kernel(node)?;
        if !attribute::is_known(id) {
            return Err(invalid::<D>());
        }
        value.set(kernel.attribute(id).copied().unwrap_or_else(|| attribute::default(id)))
    }

    /// `cuGraphKernelNodeSetAttribute`.
    ///
    /// # Errors
    /// The driver's code.
    pub fn graph_kernel_node_set_attribute(
        &self,
        node: u64,
        id: u32,
        value: In<[u8; 64], D>,
    ) -> Result<(), D> {
        let value = value.get()?;
        let mut kernel = self.kernel(node)?;
        if !attribute::is_known(id) {
            return Err(invalid::<D>());
        }
        if id == attribute::DEVICE_UPDATABLE {
            // No node is one that a device updates, and a program may say so.
            if value[..4] == [0; 4] {
                return Ok(());
            }
            return self.refuse_feature("kernel node that a device updates");
        }
        kernel.set_attribute(id, value);
        self.replace_kernel(node, kernel)
    }

    /// `cuGraphKernelNodeCopyAttributes`.
    ///
    /// # Errors
    /// The driver's code.
    pub fn graph_kernel_node_copy_attributes(&self, to: u64, from: u64) -> Result<(), D> {
        let attributes = self.kernel(from)?.attributes;
        let kernel = KernelWork { attributes, ..self.kernel(to)? };
        self.replace_kernel(to, kernel)
    }

    fn replace_kernel(&self, node: u64, kernel: KernelWork) -> Result<(), D> {
        let work = Work::Kernel(kernel);
        self.driver.check(&work)?;
        self.with(|state| state.model.set_work(node, work))
    }
}
