//! The entry points for values in memory: streams wait for them and write them.
//!
//! The functions of version 1 are not supported, as attributes 92 to 94 report. NVIDIA's driver has them only if its module is told so.

use sluice_cuda_graphs::layout::{BatchOperation, StreamOperation, stream_operations};
use sluice_cuda_graphs::{self as graphs, MemoryOperation};

use crate::error::{Error, Result};
use crate::ffi::In;
use crate::graphs::GRAPHS;
use crate::schedule::{QueuedWork, scheduler};
use crate::stream::{Implicit, target};
use crate::stream_values;

fn wait(value: u64, wide: bool, at: u64, flags: u32) -> StreamOperation {
    StreamOperation::Value(MemoryOperation::Wait { at, value, wide, flags })
}

fn write(value: u64, wide: bool, to: u64, flags: u32) -> StreamOperation {
    StreamOperation::Value(MemoryOperation::Write { to, value, wide, flags })
}

/// Checks all operations before the first is queued.
fn submit(implicit: Implicit, stream: u64, list: &[StreamOperation]) -> Result {
    let target = target(stream, implicit)?;
    let mut values = Vec::new();
    let mut work = Vec::new();
    for operation in list {
        match operation {
            StreamOperation::Value(value) => {
                work.push(stream_values::prepare(target.core.gpu, value)?);
                values.push(*value);
            }
            // Work of a stream is done in order, and its memory is the host's.
            StreamOperation::Barrier { flags } if *flags > GPU_BARRIER => return Err(Error::INVALID_VALUE),
            StreamOperation::Barrier { .. } => work.push(QueuedWork::Marker),
        }
    }
    let describe = || {
        if values.len() != list.len() {
            return Err(Error::NOT_SUPPORTED);
        }
        Ok(graphs::Work::MemoryOperations { operations: values, context: target.core.handle })
    };
    if list.is_empty() || GRAPHS.capture(target.facts(), describe)? {
        return Ok(());
    }
    for work in work {
        scheduler().submit(target.queue, Vec::new(), work);
    }
    Ok(())
}

/// `CU_STREAM_MEMORY_BARRIER_TYPE_GPU`, the last type.
const GPU_BARRIER: u32 = 1;

fn batch(implicit: Implicit, stream: u64, count: u32, list: In<BatchOperation>, flags: u32) -> Result {
    let refusals = (Error::INVALID_VALUE, Error::NOT_SUPPORTED);
    submit(implicit, stream, &stream_operations(list, count, flags, refusals)?)
}

twins! {
    fn cuStreamWaitValue32_v2, cuStreamWaitValue32_v2_ptsz(implicit; stream: u64, at: u64, value: u32, flags: u32) {
        submit(implicit, stream, &[wait(value.into(), false, at, flags)])
    }

    fn cuStreamWaitValue64_v2, cuStreamWaitValue64_v2_ptsz(implicit; stream: u64, at: u64, value: u64, flags: u32) {
        submit(implicit, stream, &[wait(value, true, at, flags)])
    }

    fn cuStreamWriteValue32_v2, cuStreamWriteValue32_v2_ptsz(implicit; stream: u64, to: u64, value: u32, flags: u32) {
        submit(implicit, stream, &[write(value.into(), false, to, flags)])
    }

    fn cuStreamWriteValue64_v2, cuStreamWriteValue64_v2_ptsz(implicit; stream: u64, to: u64, value: u64, flags: u32) {
        submit(implicit, stream, &[write(value, true, to, flags)])
    }

    fn cuStreamBatchMemOp_v2, cuStreamBatchMemOp_v2_ptsz(
        implicit; stream: u64, count: u32, list: In<BatchOperation>, flags: u32,
    ) {
        batch(implicit, stream, count, list, flags)
    }
}
