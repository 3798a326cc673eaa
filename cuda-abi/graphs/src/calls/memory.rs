//! Nodes for memory: allocations, their ends, and the calls of a program that free an allocation of a graph.

use std::sync::atomic::Ordering;
use std::sync::{MutexGuard, PoisonError};

use sluice_cuda_abi::sys::CUresult as Code;

use super::{GraphState, Graphs, In, Out, Result, failed, invalid};
use crate::capture::{Added, CaptureStatus, Stream};
use crate::driver::GraphDriver;
use crate::graph::{Edge, NodeWork, Owner};
use crate::layout::{ALLOCATION_ADDRESS, AllocationAnswer, AllocationParameters, PoolProperties};
use crate::memory::{GraphMemory, MemoryNodes};
use crate::objects::{Kept, MemoryKeeper};
use crate::plan::{AllocationWork, Work};

/// `CU_MEM_ALLOCATION_TYPE_PINNED`.
const PINNED: u32 = 1;
/// `CU_MEM_LOCATION_TYPE_DEVICE`.
const ON_DEVICE: u32 = 1;
/// The last kind of place of the header.
const LAST_PLACE: u32 = 5;
/// `CU_MEM_ACCESS_FLAGS_PROT_READWRITE`.
const READ_WRITE: u32 = 3;
/// More descriptions of access than any machine has GPUs.
const MOST_ACCESS: usize = 256;

/// An instantiation of graphs with nodes for memory, of which each has one at a time.
pub(crate) struct Instantiated<D: GraphDriver> {
    graphs: &'static Graphs<D>,
    owners: Vec<Owner>,
}

impl<D: GraphDriver> Drop for Instantiated<D> {
    fn drop(&mut self) {
        if !self.owners.is_empty() {
            self.graphs.change_memory(|memory| memory.executable_gone(&self.owners));
        }
    }
}

impl<D: GraphDriver> MemoryKeeper for Graphs<D> {
    fn release_memory(&self, owners: &[Owner]) {
        self.change_memory(|memory| memory.release(owners));
    }
}

/// An allocation that a program asks for.
pub(crate) struct AllocationRequest {
    device: i32,
    bytes: u64,
    access: Box<[[u32; 3]]>,
}

impl<D: GraphDriver> Graphs<D> {
    fn lock_memory(&self) -> MutexGuard<'_, GraphMemory> {
        self.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs a change of the number of allocations.
    fn with_memory<T>(&self, change: impl FnOnce(&mut GraphMemory) -> T) -> T {
        let mut memory = self.lock_memory();
        let result = change(&mut memory);
        self.allocations.store(memory.count(), Ordering::Relaxed);
        result
    }

    /// Runs a change, and frees the allocations that it returns.
    pub(super) fn change_memory(&self, change: impl FnOnce(&mut GraphMemory) -> Vec<u64>) {
        let gone = self.with_memory(change);
        gone.into_iter().for_each(|address| self.driver.free_memory(address));
    }

    /// The number of a graph among those with memory.
    fn owner(&self, graph: u64) -> Result<Owner, D> {
        self.with(|state| Ok(Owner::from(state.model.graph(graph)?.id)))
    }

    /// Allocates memory, and adds its node by `add`. Returns the node and the address.
    fn allocate(
        &self,
        graph: u64,
        request: AllocationRequest,
        add: impl FnOnce(&mut GraphState, Work) -> std::result::Result<u64, Code>,
    ) -> Result<(u64, u64), D> {
        let owner = self.owner(graph)?;
        let AllocationRequest { device, bytes, access } = request;
        let context = self.driver.context()?;
        let address = self.driver.allocate_memory(device, bytes)?;
        let place = (device, context);
        self.with_memory(|memory| memory.add(owner, address, bytes, place));
        let added = self
            .with(|state| add(state, Work::Allocation(AllocationWork { device, bytes, address, access })));
        match added {
            Ok(node) => Ok((node, address)),
            Err(error) => {
                self.with_memory(|memory| memory.withdraw(address));
                self.driver.free_memory(address);
                Err(error)
            }
        }
    }

    /// Adds the end of an allocation by `add`, and returns the node.
    fn end_allocation(
        &self,
        graph: u64,
        address: u64,
        add: impl FnOnce(&mut GraphState, Work) -> std::result::Result<u64, Code>,
    ) -> Result<u64, D> {
        let owner = self.owner(graph)?;
        let before = self.lock_memory().add_free_node(owner, address).map_err(failed::<D>)?;
        self.with(|state| add(state, Work::Free { address }))
            .inspect_err(|_| self.lock_memory().restore_free_node(address, before))
    }

    fn request(&self, parameters: &AllocationParameters<D::Error>) -> Result<AllocationRequest, D> {
        let PoolProperties { kind, handles, place, device, rest, .. } = parameters.pool;
        if kind != PINNED || handles != 0 || rest != [0; 7] || parameters.bytes == 0 {
            return Err(invalid::<D>());
        }
        match place {
            ON_DEVICE => {}
            2..=LAST_PLACE => return self.refuse_feature("memory node of the host"),
            _ => return Err(invalid::<D>()),
        }
        if parameters.count > MOST_ACCESS {
            return Err(invalid::<D>());
        }
        let access = parameters.access.list(parameters.count)?;
        if access
            .iter()
            .any(|[kind, to, flags]| (*kind, to.cast_signed(), *flags) != (ON_DEVICE, device, READ_WRITE))
        {
            // No device reaches the memory of another.
            return Err(invalid::<D>());
        }
        Ok(AllocationRequest { device, bytes: parameters.bytes as u64, access: access.into() })
    }

    pub(super) fn add_allocation(
        &self,
        place: Out<u64, D>,
        graph: u64,
        before: &[Edge],
        parameters: Out<AllocationParameters<D::Error>, D>,
    ) -> Result<(), D> {
        let request = self.request(&parameters.get()?)?;
        let add = |state: &mut GraphState, work| state.model.add(graph, NodeWork::Plain(work), before);
        let (node, address) = self.allocate(graph, request, add)?;
        parameters.cast::<u64>().set_at(ALLOCATION_ADDRESS, address)?;
        place.set(node)
    }

    pub(super) fn add_end(
        &self,
        place: Out<u64, D>,
        graph: u64,
        before: &[Edge],
        address: u64,
    ) -> Result<(), D> {
        let add = |state: &mut GraphState, work| state.model.add(graph, NodeWork::Plain(work), before);
        place.set(self.end_allocation(graph, address, add)?)
    }

    /// `cuGraphAddMemAllocNode`.
    ///
    /// # Errors
    /// The driver's code.
    pub fn graph_add_mem_alloc_node(
        &self,
        place: Out<u64, D>,
        graph: u64,
        before: In<u64, D>,
        count: usize,
        parameters: Out<AllocationParameters<D::Error>, D>,
    ) -> Result<(), D> {
        place.required()?;
        let before = self.dependencies(before, In::<[u8; 8], D>::missing(), count)?;
        self.add_allocation(place, graph, &before, parameters)
    }

    /// `cuGraphAddMemFreeNode`.
    ///
    /// # Errors
    /// The driver's code.
    pub fn graph_add_mem_free_node(
        &self,
        place: Out<u64, D>,
        graph: u64,
        before: In<u64, D>,
        count: usize,
        address: u64,
    ) -> Result<(), D> {
        place.required()?;
        let before = self.dependencies(before, In::<[u8; 8], D>::missing(), count)?;
        self.add_end(place, graph, &before, address)
    }

    pub(super) fn allocation_answer(&self, node: u64, work: &AllocationWork) -> Result<AllocationAnswer, D> {
        let words: Vec<u32> = work.access.iter().flatten().copied().collect();
        let access = self.with(|state| {
            let room = state.model.node_mut(node)?.room(words.len().div_ceil(2));
            for (place, pair) in room.iter_mut().zip(words.chunks(2)) {
                let half = |index: usize| u64::from(pair.get(index).copied().unwrap_or(0));
                *place = half(0) | half(1) << 32;
            }
            Ok(if words.is_empty() { 0 } else { room.as_mut_ptr().expose_provenance() as u64 })
        })?;
        let pool =
            PoolProperties { kind: PINNED, place: ON_DEVICE, device: work.device, ..Default::default() };
        let bytes = usize::try_from(work.bytes).map_err(|_| invalid::<D>())?;
        Ok(AllocationAnswer { pool, access, count: work.access.len(), bytes, address: work.address })
    }

    /// `cuGraphMemAllocNodeGetParams`.
    ///
    /// # Errors
    /// The driver's code.
    pub fn graph_mem_alloc_node_get_params(
        &self,
        node: u64,
        parameters: Out<AllocationParameters<D::Error>, D>,
    ) -> Result<(), D> {
        parameters.required()?;
        match self.work(node)? {
            Work::Allocation(work) => parameters.cast().set(self.allocation_answer(node, &work)?),
            _ => Err(invalid::<D>()),
        }
    }

    /// `cuGraphMemFreeNodeGetParams`.
    ///
    /// # Errors
    /// The driver's code.
    pub fn graph_mem_free_node_get_params(&self, node: u64, address: Out<u64, D>) -> Result<(), D> {
        address.required()?;
        match self.work(node)? {
            Work::Free { address: found } => address.set(found),
            _ => Err(invalid::<D>()),
        }
    }

    /// An allocation in the order of a stream becomes a node if the stream is captured. Returns its address then.
    ///
    /// # Errors
    /// The driver's code.
    pub fn capture_allocation(&self, stream: Stream, device: i32, bytes: u64) -> Result<Option<u64>, D> {
        let Some(graph) = self.captured_graph(stream)? else { return Ok(None) };
        let is_same = |work: &Work| matches!(work, Work::Allocation(old) if (old.device, old.bytes, old.access.len()) == (device, bytes, 0));
        let again = self.with(|state| state.captures.memory_again(&state.model, stream.key, is_same))?;
        if let Some(Work::Allocation(work)) = again {
            return Ok(Some(work.address));
        }
        let request = AllocationRequest { device, bytes, access: Box::default() };
        self.allocate(graph, request, |state, work| captured(state, stream, work))
            .map(|(_, address)| Some(address))
    }

    /// The end of an allocation in the order of a stream becomes a node if the stream is captured. True then.
    ///
    /// # Errors
    /// The driver's code.
    pub fn capture_free(&self, stream: Stream, address: u64) -> Result<bool, D> {
        let Some(graph) = self.captured_graph(stream)? else { return Ok(false) };
        let is_same = |work: &Work| matches!(work, Work::Free { address: old } if *old == address);
        if self.with(|state| state.captures.memory_again(&state.model, stream.key, is_same))?.is_some() {
            return Ok(true);
        }
        self.end_allocation(graph, address, |state, work| captured(state, stream, work)).map(|_| true)
    }

    fn captured_graph(&self, stream: Stream) -> Result<Option<u64>, D> {
        if !self.is_capturing() {
            return Ok(None);
        }
        self.with(|state| {
            if !state.captures.enter(stream)? {
                return Ok(None);
            }
            Ok(match state.captures.status(stream)? {
                CaptureStatus::Active(_, graph) => Some(graph),
                CaptureStatus::None | CaptureStatus::Invalidated => None,
            })
        })
    }

    /// The program frees memory by a call. `None` if it is none of a graph's; otherwise a value to be dropped when no earlier work uses the
    /// memory any more.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` for an allocation that no launch has made, or that its own graph frees.
    pub fn free_outside(&'static self, address: u64) -> Result<Option<Kept>, D> {
        if self.allocations.load(Ordering::Relaxed) == 0 {
            return Ok(None);
        }
        match self.lock_memory().free(address) {
            None => Ok(None),
            Some(freed) => Ok(Some(self.held(vec![freed.map_err(failed::<D>)?]))),
        }
    }

    /// A context is about to be destroyed, with the memory of its allocations.
    pub fn memory_ends_with(&self, context: u64) {
        self.change_memory(|memory| memory.context_gone(context));
    }

    /// A value that ends a hold of each owner when it is dropped.
    fn held(&'static self, owners: Vec<Owner>) -> Kept {
        let mut kept = Kept::default();
        kept.hold(self, owners);
        kept
    }

    /// The executable of these graphs begins; `kept` then holds their memory.
    pub(super) fn begin_instantiation(
        &'static self,
        owners: Vec<Owner>,
        kept: &mut Kept,
    ) -> Result<Instantiated<D>, D> {
        if !owners.is_empty() {
            self.lock_memory().instantiate(&owners).map_err(failed::<D>)?;
            kept.hold(self, owners.clone());
        }
        Ok(Instantiated { graphs: self, owners })
    }

    /// Launches an executable with nodes for memory by `launch`.
    pub(super) fn launch_with_memory(
        &'static self,
        nodes: &MemoryNodes,
        frees_first: bool,
        stream: (u64, bool),
        launch: impl FnOnce() -> Result<(), D>,
    ) -> Result<(), D> {
        let mut effect = self.lock_memory().launch(nodes, frees_first).map_err(failed::<D>)?;
        if let Err(error) = launch() {
            self.change_memory(|memory| memory.undo(effect));
            return Err(error);
        }
        match std::mem::take(&mut effect.owners) {
            freed if freed.is_empty() => Ok(()),
            freed => self.driver.keep_until_reached(stream.0, stream.1, self.held(freed)),
        }
    }

    /// `cuDeviceGetGraphMemAttribute`, for a device that exists.
    ///
    /// # Errors
    /// The driver's code.
    pub fn memory_attribute(&self, device: i32, attribute: u32, value: Out<u64, D>) -> Result<(), D> {
        value.set(self.lock_memory().attribute(device, attribute).map_err(failed::<D>)?)
    }

    /// `cuDeviceSetGraphMemAttribute`, for a device that exists: a program can only reset the high-water marks.
    ///
    /// # Errors
    /// The driver's code.
    pub fn set_memory_attribute(&self, device: i32, attribute: u32, value: In<u64, D>) -> Result<(), D> {
        if value.get()? != 0 {
            return Err(invalid::<D>());
        }
        self.lock_memory().reset(device, attribute).map_err(failed::<D>)
    }
}

/// Adds work to a capture that has not ended since.
fn captured(state: &mut GraphState, stream: Stream, work: Work) -> std::result::Result<u64, Code> {
    if !state.captures.enter(stream)? {
        return Err(Code::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    }
    match state.captures.add(&mut state.model, stream.key, NodeWork::Plain(work))? {
        Added::Node(node) => Ok(node),
        // A capture that makes nodes again finds its memory nodes before.
        Added::Differs { .. } => Err(Code::CUDA_ERROR_GRAPH_RECAPTURE_FAILURE),
    }
}
