//! Parameters of nodes: from structures of the header to [`Work`], and back.

use std::ffi::c_void;

use sluice_cuda_abi::sys::{CUgraphNodeType as NodeType, CUresult as Code};
use sluice_cuda_frontend::launch_parameters;

use super::{Graphs, In, Result, failed, invalid};
use crate::driver::{GraphDriver, KernelFacts};
use crate::layout::{
    BODY, BatchAnswer, BatchOperation, BatchParameters, ChildParameters, CopyNodeParameters, CopyParameters,
    EventRecordParameters, FillNodeParameters, FillParameters, HostNodeParameters, HostParameters,
    KernelAnswer, KernelParameters, NoOperation, NodeParameters,
};
use crate::plan::{HostWork, KernelWork, MemoryOperation, Work};

/// Most operations of a node, as of a stream call.
const MOST_OPERATIONS: u32 = 256;

/// A description of a node: its work, or the graph that becomes its child.
pub(crate) enum NodeDescription {
    Plain(Work),
    /// A graph to clone.
    Clone(u64),
    /// A graph to take.
    Move(u64),
    /// An allocation: its node is made with its memory.
    Allocation,
    /// A conditional node, which is made with its bodies.
    Conditional,
}

impl<D: GraphDriver> Graphs<D> {
    /// A kernel, with the attributes that its node has.
    pub(crate) fn kernel_work(&self, kernel: &KernelParameters<D::Error>) -> Result<Work, D> {
        let first = &kernel.first;
        let (function, context) = match first.function {
            0 => (kernel.kernel, kernel.context),
            function => (function, 0),
        };
        let facts = self.driver.kernel(function, context)?;
        let parameters = pack::<D>(&facts, first.parameters, first.extra)?;
        Ok(Work::Kernel(KernelWork {
            function,
            context: facts.context,
            grid: first.grid,
            block: first.block,
            shared: first.shared,
            parameters,
            attributes: Vec::new(),
        }))
    }

    /// A context argument; 0 means the current one.
    pub(super) fn context_or_current(&self, context: u64) -> Result<u64, D> {
        if context == 0 { self.driver.context() } else { Ok(context) }
    }

    pub(crate) fn copy_work(&self, copy: CopyParameters, context: u64) -> Result<Work, D> {
        Ok(Work::Copy { copy: copy.into(), context: self.context_or_current(context)? })
    }

    pub(crate) fn fill_work(&self, fill: FillParameters, context: u64) -> Result<Work, D> {
        Ok(Work::Fill { fill: fill.into(), context: self.context_or_current(context)? })
    }

    pub(crate) fn host_work(&self, host: HostParameters) -> Result<Work, D> {
        if host.function == 0 {
            return Err(invalid::<D>());
        }
        Ok(Work::Host(HostWork { function: host.function, data: host.data }))
    }

    pub(crate) fn batch_work(&self, batch: &BatchParameters<D::Error>) -> Result<Work, D> {
        if batch.flags != 0 || !(1..=MOST_OPERATIONS).contains(&batch.count) {
            return Err(invalid::<D>());
        }
        let list = batch.operations.list(batch.count as usize)?;
        let read = |operation: BatchOperation| match operation.operation() {
            Ok(operation) => Ok(operation),
            Err(NoOperation::Unknown) => Err(invalid::<D>()),
            Err(NoOperation::Unsupported) => {
                self.refuse_feature("memory operation other than wait and write")
            }
        };
        let operations = list.into_iter().map(read).collect::<Result<Vec<MemoryOperation>, D>>()?;
        Ok(Work::MemoryOperations { operations, context: self.context_or_current(batch.context)? })
    }

    /// Reads a `CUgraphNodeParams`.
    pub(crate) fn description(&self, place: In<NodeParameters, D>) -> Result<NodeDescription, D> {
        let head = place.get()?;
        if head.reserved != [0; 3] || head.end != 0 {
            return Err(invalid::<D>());
        }
        let body = place.cast::<u64>().at(BODY)?;
        const KERNEL: u32 = NodeType::CU_GRAPH_NODE_TYPE_KERNEL as u32;
        const COPY: u32 = NodeType::CU_GRAPH_NODE_TYPE_MEMCPY as u32;
        const FILL: u32 = NodeType::CU_GRAPH_NODE_TYPE_MEMSET as u32;
        const HOST: u32 = NodeType::CU_GRAPH_NODE_TYPE_HOST as u32;
        const CHILD: u32 = NodeType::CU_GRAPH_NODE_TYPE_GRAPH as u32;
        const EMPTY: u32 = NodeType::CU_GRAPH_NODE_TYPE_EMPTY as u32;
        const WAIT: u32 = NodeType::CU_GRAPH_NODE_TYPE_WAIT_EVENT as u32;
        const RECORD: u32 = NodeType::CU_GRAPH_NODE_TYPE_EVENT_RECORD as u32;
        const BATCH: u32 = NodeType::CU_GRAPH_NODE_TYPE_BATCH_MEM_OP as u32;
        const SIGNAL_SEMAPHORES: u32 = NodeType::CU_GRAPH_NODE_TYPE_EXT_SEMAS_SIGNAL as u32;
        const WAIT_SEMAPHORES: u32 = NodeType::CU_GRAPH_NODE_TYPE_EXT_SEMAS_WAIT as u32;
        const ALLOCATION: u32 = NodeType::CU_GRAPH_NODE_TYPE_MEM_ALLOC as u32;
        const FREE: u32 = NodeType::CU_GRAPH_NODE_TYPE_MEM_FREE as u32;
        const CONDITIONAL: u32 = NodeType::CU_GRAPH_NODE_TYPE_CONDITIONAL as u32;
        Ok(NodeDescription::Plain(match head.kind {
            KERNEL => self.kernel_work(&body.cast().get()?)?,
            COPY => {
                let CopyNodeParameters { flags, reserved, context, copy } = body.cast().get()?;
                if flags != 0 || reserved != 0 {
                    return Err(invalid::<D>());
                }
                self.copy_work(copy, context)?
            }
            FILL => {
                let FillNodeParameters { fill, context } = body.cast().get()?;
                self.fill_work(fill, context)?
            }
            // The mode only says how a thread waits for the function, and the context is a preference.
            HOST => self.host_work(body.cast::<HostNodeParameters>().get()?.host)?,
            CHILD => match body.cast().get()? {
                ChildParameters { graph, ownership: 0 } => return Ok(NodeDescription::Clone(graph)),
                ChildParameters { graph, ownership: 1 } => return Ok(NodeDescription::Move(graph)),
                ChildParameters { .. } => return Err(invalid::<D>()),
            },
            EMPTY => Work::Empty,
            WAIT => Work::EventWait { event: body.get()? },
            RECORD => Work::EventRecord { event: body.cast::<EventRecordParameters>().get()?.event },
            BATCH => self.batch_work(&body.cast().get()?)?,
            SIGNAL_SEMAPHORES | WAIT_SEMAPHORES => return self.refuse_feature("node of external semaphores"),
            ALLOCATION => return Ok(NodeDescription::Allocation),
            FREE => Work::Free { address: body.get()? },
            CONDITIONAL => return Ok(NodeDescription::Conditional),
            _ => return Err(invalid::<D>()),
        }))
    }

    /// The parameters of a kernel in the form of the header. The array of its parameters lies in memory of the node.
    pub(crate) fn kernel_answer(&self, node: u64, kernel: &KernelWork) -> Result<KernelAnswer, D> {
        let KernelWork { function, context, grid, block, shared, ref parameters, .. } = *kernel;
        let facts = self.driver.kernel(function, context)?;
        let count = facts.parameters.len();
        let parameters = self.with(|state| {
            let room = state.model.node_mut(node)?.room(count + parameters.len().div_ceil(8));
            let start = address(room);
            let (pointers, values) = room.split_at_mut(count);
            for (value, bytes) in values.iter_mut().zip(parameters.chunks(8)) {
                *value = word(bytes);
            }
            for (pointer, (offset, _)) in pointers.iter_mut().zip(&facts.parameters) {
                *pointer = start + 8 * count as u64 + u64::from(*offset);
            }
            Ok(if count == 0 { 0 } else { start })
        })?;
        let answer = KernelAnswer { grid, block, shared, parameters, context, ..KernelAnswer::default() };
        Ok(if facts.is_kernel {
            KernelAnswer { kernel: function, ..answer }
        } else {
            KernelAnswer { function, ..answer }
        })
    }

    /// The parameters of a node of memory operations. The array lies in memory of the node.
    pub(crate) fn batch_answer(
        &self,
        node: u64,
        operations: &[MemoryOperation],
        context: u64,
    ) -> Result<BatchAnswer, D> {
        let count = u32::try_from(operations.len()).map_err(|_| failed::<D>(Code::CUDA_ERROR_UNKNOWN))?;
        let operations = self.with(|state| {
            let room = state.model.node_mut(node)?.room(6 * operations.len());
            for (words, operation) in room.chunks_mut(6).zip(operations) {
                words.copy_from_slice(&BatchOperation::of(operation).0);
            }
            Ok(address(room))
        })?;
        Ok(BatchAnswer { context, count, operations, flags: 0 })
    }
}

fn address(words: &mut [u64]) -> u64 {
    words.as_mut_ptr().expose_provenance() as u64
}

fn word(bytes: &[u8]) -> u64 {
    let mut word = [0; 8];
    word[..bytes.len()].copy_from_slice(bytes);
    u64::from_ne_bytes(word)
}

/// Packs the parameters of a kernel into one block.
fn pack<D: GraphDriver>(
    facts: &KernelFacts,
    parameters: In<In<u8, D>, D>,
    extra: In<In<c_void, D>, D>,
) -> Result<Box<[u8]>, D> {
    let bytes = usize::from(facts.bytes);
    if !extra.is_given() {
        let mut block = vec![0; bytes];
        for (index, (offset, size)) in facts.parameters.iter().enumerate() {
            let start = usize::from(*offset);
            let place = block.get_mut(start..start + usize::from(*size)).ok_or_else(invalid::<D>)?;
            parameters.get_at(index)?.read(place)?;
        }
        return Ok(block.into());
    }
    if parameters.is_given() {
        return Err(invalid::<D>());
    }
    Ok(launch_parameters::block(extra, bytes, invalid::<D>())?.into())
}
