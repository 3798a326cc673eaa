//! Executable graphs: how they are made, changed and launched.

use std::ffi::c_char;
use std::sync::{Arc, Mutex, PoisonError};

use sluice_cuda_abi::sys::{
    CUgraphExecUpdateResult as Outcome, CUgraphInstantiateResult as Instantiated, CUresult as Code,
};

use super::parameters::NodeDescription;
use super::{Executable, Graphs, In, Out, Result, failed, invalid};
use crate::driver::{GraphDriver, Refusal};
use crate::graph::{NoPlan, NodeWork};
use crate::layout::{
    BatchParameters, CopyParameters, FillParameters, HostParameters, InstantiateParameters, KernelParameters,
    KernelParametersV1, NodeParameters, UpdateResult,
};
use crate::memory::MemoryNodes;
use crate::plan::{Plan, Work};
use crate::update::{self, Change};

// `CUgraphInstantiate_flags`.
const FREE_ON_LAUNCH: u64 = 1;
const UPLOAD: u64 = 2;
const DEVICE_LAUNCH: u64 = 4;
const USE_PRIORITY: u64 = 8;

/// A graph that was not instantiated.
struct NotMade<E> {
    error: E,
    node: u64,
    result: Instantiated,
}

impl<E> NotMade<E> {
    fn of(error: E) -> NotMade<E> {
        NotMade { error, node: 0, result: Instantiated::CUDA_GRAPH_INSTANTIATE_ERROR }
    }
}

/// Making executable graphs.
impl<D: GraphDriver> Graphs<D> {
    fn make(&'static self, graph: u64, flags: u64) -> std::result::Result<u64, NotMade<D::Error>> {
        if flags & !(FREE_ON_LAUNCH | UPLOAD | DEVICE_LAUNCH | USE_PRIORITY) != 0 {
            return Err(NotMade::of(invalid::<D>()));
        }
        if flags & DEVICE_LAUNCH != 0 {
            let refused: Result<u64, D> = self.refuse_feature("graph launched by a device");
            return refused.map_err(|error| NotMade {
                result: Instantiated::CUDA_GRAPH_INSTANTIATE_NODE_OPERATION_NOT_SUPPORTED,
                ..NotMade::of(error)
            });
        }
        let described = self.with(|state| {
            if state.model.graph(graph)?.is_capturing {
                return Err(Code::CUDA_ERROR_INVALID_VALUE);
            }
            match state.model.plan(graph) {
                Ok(plan) => {
                    let objects = state.model.objects(graph)?;
                    // The references are taken while no other call can release those of the graph.
                    let owners = state.model.owners(graph)?;
                    Ok(Ok((plan, self.objects.keep(&objects), owners, state.model.take_id())))
                }
                Err(NoPlan::Failed(code)) => Err(code),
                Err(reason) => Ok(Err(reason)),
            }
        });
        let (plan, mut kept, owners, id) = described.map_err(NotMade::of)?.map_err(Self::not_made)?;
        let only = self.instantiate_only(graph).map_err(NotMade::of)?;
        let instantiated = self.begin_instantiation(owners, &mut kept).map_err(NotMade::of)?;
        let conditional = self.conditional_graph(graph).map_err(NotMade::of)?;
        let made = self.driver.instantiate(&plan, conditional.as_deref(), flags & !UPLOAD, kept);
        let executable = made.map_err(|refusal| NotMade {
            node: self.node_of(graph, &refusal),
            ..NotMade::of(refusal.error)
        })?;
        let memory = MemoryNodes::of(&plan);
        let executable = Executable {
            id,
            flags,
            graph,
            memory,
            _instantiated: instantiated,
            _only: only,
            plan: Mutex::new(plan),
            executable,
        };
        let mut executables = self.executables.write().unwrap_or_else(PoisonError::into_inner);
        let handle = executables.insert(Arc::new(executable));
        handle.ok_or_else(|| NotMade::of(failed::<D>(Code::CUDA_ERROR_OUT_OF_MEMORY)))
    }

    fn not_made(reason: NoPlan) -> NotMade<D::Error> {
        let (code, node, result) = match reason {
            NoPlan::Cycle(node) => {
                (Code::CUDA_ERROR_INVALID_VALUE, node, Instantiated::CUDA_GRAPH_INSTANTIATE_INVALID_STRUCTURE)
            }
            NoPlan::InBody(node) => (
                Code::CUDA_ERROR_NOT_SUPPORTED,
                node,
                Instantiated::CUDA_GRAPH_INSTANTIATE_NODE_OPERATION_NOT_SUPPORTED,
            ),
            NoPlan::UnusedHandle => (
                Code::CUDA_ERROR_INVALID_VALUE,
                0,
                Instantiated::CUDA_GRAPH_INSTANTIATE_CONDITIONAL_HANDLE_UNUSED,
            ),
            NoPlan::Failed(code) => (code, 0, Instantiated::CUDA_GRAPH_INSTANTIATE_ERROR),
        };
        NotMade { error: failed::<D>(code), node, result }
    }

    fn node_of(&self, graph: u64, refusal: &Refusal<D::Error>) -> u64 {
        let found: Result<u64, D> =
            self.with(|state| Ok(refusal.node.map_or(0, |number| state.model.find(graph, &[number]))));
        found.unwrap_or(0)
    }

    /// `cuGraphInstantiateWithFlags`.
    ///
    /// # Errors
    /// The driver's code.
    pub fn graph_instantiate_with_flags(
        &'static self,
        place: Out<u64, D>,
        graph: u64,
        flags: u64,
    ) -> Result<(), D> {
        self.driver.context()?;
        place.required()?;
        // Only the parameters of the other function name the stream of an upload.
        if flags & UPLOAD != 0 {
            return Err(invalid::<D>());
        }
        place.set(self.make(graph, flags).map_err(|failure| failure.error)?)
    }

    /// `cuGraphInstantiate` and its second form: with a text that explains a failure.
    ///
    /// # Errors
    /// The driver's code.
    pub fn graph_instantiate(
        &'static self,
        place: Out<u64, D>,
        graph: u64,
        node: Out<u64, D>,
        text: Out<c_char, D>,
        room: usize,
    ) -> Result<(), D> {
        self.driver.context()?;
        place.required()?;
        let failure = match self.make(graph, 0) {
            Ok(handle) => return place.set(handle),
            Err(failure) => failure,
        };
        node.set_if_given(failure.node);
        if text.is_given() && room > 0 {
            let reason = match failure.result {
                Instantiated::CUDA_GRAPH_INSTANTIATE_INVALID_STRUCTURE => "the graph has a cycle",
                Instantiated::CUDA_GRAPH_INSTANTIATE_CONDITIONAL_HANDLE_UNUSED => {
                    "no conditional node uses a handle of the graph"
                }
                Instantiated::CUDA_GRAPH_INSTANTIATE_NODE_OPERATION_NOT_SUPPORTED => {
                    "a conditional node must not have such a node in its body"
                }
                _ => "the graph was not instantiated",
            };
            text.set_text_cut(reason, room)?;
        }
        Err(failure.error)
    }

    /// `cuGraphInstantiateWithParams`.
    ///
    /// # Errors
    /// The driver's code.
    pub fn graph_instantiate_with_params(
        &'static self,
        place: Out<u64, D>,
        graph: u64,
        parameters: Out<InstantiateParameters, D>,
        per_thread: bool,
    ) -> Result<(), D> {
        place.required()?;
        let mut answer = parameters.get()?;
        let made = self.make(graph, answer.flags);
        answer.node = made.as_ref().map_or_else(|failure| failure.node, |_| 0);
        answer.result = made.as_ref().map_or_else(|failure| failure.result as u32, |_| 0);
        parameters.set(answer)?;
        let handle = made.map_err(|failure| failure.error)?;
        if answer.flags & UPLOAD != 0 {
            let uploaded = self.graph_upload(handle, answer.stream, per_thread);
            if uploaded.is_err() {
                self.graph_exec_destroy(handle)?;
                return uploaded;
            }
        }
        place.set(handle)
    }

    /// `cuGraphExecDestroy`.
    ///
    /// # Errors
    /// The driver's code.
    pub fn graph_exec_destroy(&self, executable: u64) -> Result<(), D> {
        let mut executables = self.executables.write().unwrap_or_else(PoisonError::into_inner);
        let ended = executables.remove(executable);
        // The library may call its worker for the end.
        drop(executables);
        ended.map(drop).ok_or_else(invalid::<D>)
    }

    /// `cuGraphExecGetFlags`.
    ///
    /// # Errors
    /// The driver's code.
    pub fn graph_exec_get_flags(&self, executable: u64, flags: Out<u64, D>) -> Result<(), D> {
        flags.set(self.executable(executable)?.flags)
    }

    /// `cuGraphExecGetId`.
    ///
    /// # Errors
    /// The driver's code.
    pub fn graph_exec_get_id(&self, executable: u64, id: Out<u32, D>) -> Result<(), D> {
        id.set(self.executable(executable)?.id)
    }

    /// An executable for work in a stream. The driver reports a missing context before a wrong handle.
    fn executable_for_launch(&self, executable: u64) -> Result<Arc<Executable<D>>, D> {
        self.executable(executable).or_else(|error| self.driver.context().and(Err(error)))
    }

    /// `cuGraphLaunch`. In a capture it becomes a child graph, and one that no child graph can be makes the capture invalid, as NVIDIA's
    /// driver does.
    ///
    /// # Errors
    /// The driver's code.
    pub fn graph_launch(&'static self, executable: u64, stream: u64, per_thread: bool) -> Result<(), D> {
        let executable = self.executable_for_launch(executable)?;
        if self.is_capturing() {
            let stream = self.driver.stream(stream, per_thread)?;
            if self.with(|state| state.captures.enter(stream))? {
                let plan = executable.plan.lock().unwrap_or_else(PoisonError::into_inner).clone();
                let mut works = plan.nodes.iter().map(|node| &node.work);
                if !executable.memory.is_empty() || works.any(|work| matches!(work, Work::Conditional(_))) {
                    self.refuse(stream)?;
                }
                let child = self.with(|state| state.model.import(&described(plan)))?;
                let added = self.add_captured(stream, NodeWork::Child(child));
                if added.is_err() {
                    // It has no owner yet, or was removed already.
                    self.with(|state| {
                        if state.model.graph(child).is_ok_and(|graph| graph.owner == 0) {
                            state.model.remove(child);
                        }
                        Ok(())
                    })?;
                }
                return added;
            }
        }
        let launch = || self.driver.launch(&executable.executable, stream, per_thread);
        if executable.memory.is_empty() {
            return launch();
        }
        let frees_first = executable.flags & FREE_ON_LAUNCH != 0;
        self.launch_with_memory(&executable.memory, frees_first, (stream, per_thread), launch)
    }

    /// `cuGraphUpload`.
    ///
    /// # Errors
    /// The driver's code.
    pub fn graph_upload(&self, executable: u64, stream: u64, per_thread: bool) -> Result<(), D> {
        let executable = self.executable_for_launch(executable)?;
        if self.is_capturing() {
            self.refuse(self.driver.stream(stream, per_thread)?)?;
        }
        self.driver.upload(&executable.executable, stream, per_thread)
    }
}

/// A plan whose disabled nodes are empty ones, which do the same: a description has no disabled nodes.
fn described(mut plan: Plan) -> Plan {
    for node in &mut plan.nodes {
        if let Work::Child(child) = &mut node.work {
            *child = described(std::mem::take(child));
        }
        if !node.enabled {
            (node.enabled, node.work) = (true, Work::Empty);
        }
    }
    plan
}

/// Changing executable graphs.
impl<D: GraphDriver> Graphs<D> {
    /// The path of a node in an executable graph.
    fn path_in(&self, executable: &Executable<D>, node: u64) -> Result<Vec<u32>, D> {
        let (graph, path) = self.with(|state| state.model.path(node))?;
        if graph == executable.graph { Ok(path) } else { Err(invalid::<D>()) }
    }

    /// Replaces the work of a node of an executable graph.
    fn change(
        &self,
        executable: u64,
        node: u64,
        new: impl FnOnce(&Work) -> Result<Work, D>,
    ) -> Result<(), D> {
        let executable = self.executable(executable)?;
        let path = self.path_in(&executable, node)?;
        let mut plan = executable.plan.lock().unwrap_or_else(PoisonError::into_inner);
        let node = plan.node_mut(&path).ok_or_else(invalid::<D>)?;
        let mut work = new(&node.work)?;
        if let (Work::Kernel(old), Work::Kernel(new)) = (&node.work, &mut work) {
            new.attributes.clone_from(&old.attributes);
        }
        if let (Work::Copy { copy: old, .. }, Work::Copy { copy: new, .. }) = (&node.work, &work)
            && !update::are_flat(old, new)
        {
            return Err(invalid::<D>());
        }
        if !matches!(work, Work::Child(_)) {
            self.driver.check(&work)?;
        }
        let uses_priority = executable.flags & USE_PRIORITY != 0;
        let work = update::change(&node.work, &work, uses_priority).map_err(|_| invalid::<D>())?;
        self.driver.set_work(&executable.executable, &path, &work, node.enabled)?;
        node.work = work;
        Ok(())
    }

    /// `cuGraphExecKernelNodeSetParams`.
    ///
    /// # Errors
    /// The driver's code.
    pub fn graph_exec_kernel_node_set_params(
        &self,
        executable: u64,
        node: u64,
        parameters: In<KernelParametersV1<D::Error>, D>,
    ) -> Result<(), D> {
        self.change(executable, node, |_| self.kernel_work(&parameters.get()?.into()))
    }

    /// `cuGraphExecKernelNodeSetParams_v2`.
    ///
    /// # Errors
    /// The driver's code.
    pub fn graph_exec_kernel_node_set_params_v2(
        &self,
        executable: u64,
        node: u64,
        parameters: In<KernelParameters<D::Error>, D>,
    ) -> Result<(), D> {
        self.change(executable, node, |_| self.kernel_work(&parameters.get()?))
    }

    /// `cuGraphExecMemcpyNodeSetParams`.
    ///
    /// # Errors
    /// The driver's code.
    pub fn graph_exec_memcpy_node_set_params(
        &self,
        executable: u64,
        node: u64,
        parameters: In<CopyParameters, D>,
        context: u64,
    ) -> Result<(), D> {
        self.change(executable, node, |_| self.copy_work(parameters.get()?, context))
    }

    /// `cuGraphExecMemsetNodeSetParams`.
    ///
    /// # Errors
    /// The driver's code.
    pub fn graph_exec_memset_node_set_params(
        &self,
        executable: u64,
        node: u64,
        parameters: In<FillParameters, D>,
        context: u64,
    ) -> Result<(), D> {
        self.change(executable, node, |_| self.fill_work(parameters.get()?, context))
    }

    /// `cuGraphExecHostNodeSetParams`.
    ///
    /// # Errors
    /// The driver's code.
    pub fn graph_exec_host_node_set_params(
        &self,
        executable: u64,
        node: u64,
        parameters: In<HostParameters, D>,
    ) -> Result<(), D> {
        self.change(executable, node, |_| self.host_work(parameters.get()?))
    }

    /// `cuGraphExecChildGraphNodeSetParams`.
    ///
    /// # Errors
    /// The driver's code.
    pub fn graph_exec_child_graph_node_set_params(
        &self,
        executable: u64,
        node: u64,
        child: u64,
    ) -> Result<(), D> {
        let plan = self.plan(child)?;
        self.change(executable, node, |_| Ok(Work::Child(plan)))
    }

    /// The plan of a graph without a cycle.
    fn plan(&self, graph: u64) -> Result<Plan, D> {
        self.with(|state| {
            state.model.plan(graph).map_err(|reason| match reason {
                NoPlan::Cycle(_) | NoPlan::UnusedHandle => Code::CUDA_ERROR_INVALID_VALUE,
                NoPlan::InBody(_) => Code::CUDA_ERROR_NOT_SUPPORTED,
                NoPlan::Failed(code) => code,
            })
        })
    }

    /// `cuGraphExecEventRecordNodeSetEvent`.
    ///
    /// # Errors
    /// The driver's code.
    pub fn graph_exec_event_record_node_set_event(
        &self,
        executable: u64,
        node: u64,
        event: u64,
    ) -> Result<(), D> {
        self.change(executable, node, |_| Ok(Work::EventRecord { event }))
    }

    /// `cuGraphExecEventWaitNodeSetEvent`.
    ///
    /// # Errors
    /// The driver's code.
    pub fn graph_exec_event_wait_node_set_event(
        &self,
        executable: u64,
        node: u64,
        event: u64,
    ) -> Result<(), D> {
        self.change(executable, node, |_| Ok(Work::EventWait { event }))
    }

    /// `cuGraphExecBatchMemOpNodeSetParams`.
    ///
    /// # Errors
    /// The driver's code.
    pub fn graph_exec_batch_mem_op_node_set_params(
        &self,
        executable: u64,
        node: u64,
        parameters: In<BatchParameters<D::Error>, D>,
    ) -> Result<(), D> {
        self.change(executable, node, |_| self.batch_work(&parameters.get()?))
    }

    /// `cuGraphExecNodeSetParams`.
    ///
    /// # Errors
    /// The driver's code.
    pub fn graph_exec_node_set_params(
        &self,
        executable: u64,
        node: u64,
        parameters: In<NodeParameters, D>,
    ) -> Result<(), D> {
        match self.description(parameters)? {
            NodeDescription::Plain(work) => self.change(executable, node, |_| Ok(work)),
            NodeDescription::Allocation => Err(invalid::<D>()),
            NodeDescription::Conditional => Err(failed::<D>(Code::CUDA_ERROR_NOT_SUPPORTED)),
            NodeDescription::Clone(child) | NodeDescription::Move(child) => {
                self.graph_exec_child_graph_node_set_params(executable, node, child)
            }
        }
    }

    /// `cuGraphNodeSetEnabled`.
    ///
    /// # Errors
    /// The driver's code.
    pub fn graph_node_set_enabled(&self, executable: u64, node: u64, enabled: u32) -> Result<(), D> {
        let executable = self.executable(executable)?;
        let path = self.path_in(&executable, node)?;
        let mut plan = executable.plan.lock().unwrap_or_else(PoisonError::into_inner);
        let node = plan.node_mut(&path).filter(|node| can_be_disabled(&node.work));
        let node = node.ok_or_else(invalid::<D>)?;
        self.driver.set_work(&executable.executable, &path, &node.work, enabled != 0)?;
        node.enabled = enabled != 0;
        Ok(())
    }

    /// `cuGraphNodeGetEnabled`.
    ///
    /// # Errors
    /// The driver's code.
    pub fn graph_node_get_enabled(&self, executable: u64, node: u64, enabled: Out<u32, D>) -> Result<(), D> {
        enabled.required()?;
        let executable = self.executable(executable)?;
        let path = self.path_in(&executable, node)?;
        let plan = executable.plan.lock().unwrap_or_else(PoisonError::into_inner);
        let node = plan.node(&path).filter(|node| can_be_disabled(&node.work)).ok_or_else(invalid::<D>)?;
        enabled.set(u32::from(node.enabled))
    }

    /// `cuGraphExecUpdate_v2`.
    ///
    /// # Errors
    /// The driver's code.
    pub fn graph_exec_update_v2(
        &self,
        executable: u64,
        graph: u64,
        result: Out<UpdateResult, D>,
    ) -> Result<(), D> {
        result.required()?;
        let updated = self.update(executable, graph)?;
        let UpdateOutcome { error, outcome, node, from } = updated;
        result.set(UpdateResult { result: outcome as u32, node, from })?;
        error.map_or(Ok(()), Err)
    }

    /// `cuGraphExecUpdate`.
    ///
    /// # Errors
    /// The driver's code.
    pub fn graph_exec_update(
        &self,
        executable: u64,
        graph: u64,
        node: Out<u64, D>,
        result: Out<u32, D>,
    ) -> Result<(), D> {
        result.required()?;
        let updated = self.update(executable, graph)?;
        node.set_if_given(updated.node);
        result.set(updated.outcome as u32)?;
        updated.error.map_or(Ok(()), Err)
    }

    fn update(&self, executable: u64, graph: u64) -> Result<UpdateOutcome<D::Error>, D> {
        let executable = self.executable(executable)?;
        let new = self.plan(graph)?;
        let conditional = self.conditional_graph(graph)?;
        let mut plan = executable.plan.lock().unwrap_or_else(PoisonError::into_inner);
        let uses_priority = executable.flags & USE_PRIORITY != 0;
        let (outcome, error, node, from) = match update::adopt(&plan, &new, uses_priority) {
            Ok(adopted) => match self.driver.update(&executable.executable, &adopted, conditional.as_deref())
            {
                Ok(()) => {
                    *plan = adopted;
                    (Outcome::CU_GRAPH_EXEC_UPDATE_SUCCESS, None, Vec::new(), Vec::new())
                }
                // The number is that of the adopted plan, so it names no node of the new graph.
                Err(refusal) => {
                    (Outcome::CU_GRAPH_EXEC_UPDATE_ERROR, Some(refusal.error), Vec::new(), Vec::new())
                }
            },
            Err(Change { outcome, node, from }) => {
                (outcome, Some(failed::<D>(Code::CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE)), node, from)
            }
        };
        self.with(|state| {
            let find = |path: &[u32]| state.model.find(graph, path);
            Ok(UpdateOutcome { error, outcome, node: find(&node), from: find(&from) })
        })
    }
}

/// The answer of `cuGraphExecUpdate`.
struct UpdateOutcome<E> {
    error: Option<E>,
    outcome: Outcome,
    node: u64,
    from: u64,
}

fn can_be_disabled(work: &Work) -> bool {
    matches!(work, Work::Kernel(_) | Work::Copy { .. } | Work::Fill { .. })
}
