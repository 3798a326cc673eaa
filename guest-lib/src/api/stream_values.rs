//! Values in memory for which streams wait, and which they write.
//!
//! Each is a post of its own. A batch is read and checked in whole before its first post, so a refused batch does nothing. Pinned memory
//! that devices do not reach is written here when it is the stream's turn.

use crate::{
    arguments::{Call, In},
    checks::{self, MemorySide},
    error::{Error, Result},
    graphs, host_memory,
    process::{self, ProcessState},
    state::{devices::attribute, streams::StreamRef},
};
use core::ffi::{c_uint, c_void};
use sluice_cuda_graphs::{
    MemoryOperation, Work,
    layout::{BatchOperation, StreamOperation, stream_operations},
};
use sluice_protocol::{calls::wire, field::DeviceAddress};

/// The flag of the functions of version 1 that frees a write from the order of its stream. All writes keep it.
const NO_MEMORY_BARRIER: c_uint = 1;
/// `CU_STREAM_MEMORY_BARRIER_TYPE_GPU`, the last type.
const LAST_BARRIER: u32 = 1;

/// The version of a function. A driver has version 1 only if its device reports that.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Version {
    One,
    Two,
}

const fn wait(value: u64, wide: bool, at: u64, flags: c_uint) -> StreamOperation {
    StreamOperation::Value(MemoryOperation::Wait { at, value, wide, flags })
}

const fn write(value: u64, wide: bool, to: u64, flags: c_uint) -> StreamOperation {
    StreamOperation::Value(MemoryOperation::Write { to, value, wide, flags })
}

const fn is_wide(operation: &StreamOperation) -> bool {
    matches!(
        operation,
        StreamOperation::Value(
            MemoryOperation::Wait { wide: true, .. } | MemoryOperation::Write { wide: true, .. }
        )
    )
}

fn submit(call: Call, stream: u64, version: Version, list: &[StreamOperation]) -> Result {
    let process = process::get()?;
    process.session.healthy()?;
    let stream = process.stream_or_default(call, stream)?;
    let context = process.contexts.get(stream.context)?;
    if version == Version::One {
        let device = process.devices.get(context.device)?;
        let wide = list.iter().any(is_wide);
        if device.bound(attribute::CAN_USE_STREAM_MEM_OPS_V1) == 0
            || (wide && device.bound(attribute::CAN_USE_64_BIT_STREAM_MEM_OPS_V1) == 0)
        {
            return Err(Error::NOT_SUPPORTED);
        }
    }
    let mut sides = Vec::with_capacity(list.len());
    for operation in list {
        sides.push(match operation {
            StreamOperation::Value(value) => checks::stream_value(process, context, value)?,
            StreamOperation::Barrier { flags } if *flags > LAST_BARRIER => return Err(Error::INVALID_VALUE),
            StreamOperation::Barrier { .. } => MemorySide::Device,
        });
    }
    // A device does not see such memory change.
    let waits_apart = |(operation, side): (&StreamOperation, &MemorySide)| {
        *side == MemorySide::Pinned
            && matches!(operation, StreamOperation::Value(MemoryOperation::Wait { .. }))
    };
    if process.session.gathers() && list.iter().zip(&sides).any(waits_apart) {
        return Err(Error::NOT_SUPPORTED);
    }
    if list.is_empty() || graphs::captured(process, stream, || node(list, stream.context))? {
        return Ok(());
    }
    list.iter().zip(sides).try_for_each(|(operation, side)| post(process, stream, operation, side))
}

/// The node of a capture; no node has a barrier.
fn node(list: &[StreamOperation], context: u64) -> Result<Work> {
    let value = |operation: &StreamOperation| match *operation {
        StreamOperation::Value(value) => Ok(value),
        StreamOperation::Barrier { .. } => Err(Error::NOT_SUPPORTED),
    };
    Ok(Work::MemoryOperations { operations: list.iter().map(value).collect::<Result<_>>()?, context })
}

fn post(
    process: &ProcessState,
    stream: StreamRef<'_>,
    operation: &StreamOperation,
    side: MemorySide,
) -> Result {
    let (session, context, target) = (&process.session, stream.context, Some(stream.target()));
    match *operation {
        StreamOperation::Value(MemoryOperation::Write { to, value, wide, .. }) => {
            if side == MemorySide::Pinned && session.gathers() {
                process.wait_turn(stream)?;
                host_memory::store(to, value, wide);
                return Ok(());
            }
            let call = wire::stream_write_value::Args { to: DeviceAddress(to), value, wide };
            session.post(context, target, &call).map(drop)
        }
        StreamOperation::Value(MemoryOperation::Wait { at, value, wide, flags }) => {
            let call =
                wire::stream_wait_value::Args { at: DeviceAddress(at), value, wide, comparison: flags };
            session.post(context, target, &call).map(drop)
        }
        StreamOperation::Barrier { flags } => {
            session.post(context, target, &wire::stream_barrier::Args { kind: flags }).map(drop)
        }
    }
}

fn batch(
    call: Call,
    stream: u64,
    version: Version,
    count: c_uint,
    list: In<c_void>,
    flags: c_uint,
) -> Result {
    process::get()?;
    let list: In<BatchOperation> = list.cast();
    let list = stream_operations(list, count, flags, (Error::INVALID_VALUE, Error::NOT_SUPPORTED))?;
    submit(call, stream, version, &list)
}

pub(crate) fn cuStreamWaitValue32(call: Call, stream: u64, at: u64, value: c_uint, flags: c_uint) -> Result {
    submit(call, stream, Version::One, &[wait(value.into(), false, at, flags)])
}

pub(crate) fn cuStreamWaitValue32_v2(
    call: Call,
    stream: u64,
    at: u64,
    value: c_uint,
    flags: c_uint,
) -> Result {
    submit(call, stream, Version::Two, &[wait(value.into(), false, at, flags)])
}

pub(crate) fn cuStreamWaitValue64(call: Call, stream: u64, at: u64, value: u64, flags: c_uint) -> Result {
    submit(call, stream, Version::One, &[wait(value, true, at, flags)])
}

pub(crate) fn cuStreamWaitValue64_v2(call: Call, stream: u64, at: u64, value: u64, flags: c_uint) -> Result {
    submit(call, stream, Version::Two, &[wait(value, true, at, flags)])
}

pub(crate) fn cuStreamWriteValue32(call: Call, stream: u64, to: u64, value: c_uint, flags: c_uint) -> Result {
    submit(call, stream, Version::One, &[write(value.into(), false, to, flags & !NO_MEMORY_BARRIER)])
}

pub(crate) fn cuStreamWriteValue32_v2(
    call: Call,
    stream: u64,
    to: u64,
    value: c_uint,
    flags: c_uint,
) -> Result {
    submit(call, stream, Version::Two, &[write(value.into(), false, to, flags)])
}

pub(crate) fn cuStreamWriteValue64(call: Call, stream: u64, to: u64, value: u64, flags: c_uint) -> Result {
    submit(call, stream, Version::One, &[write(value, true, to, flags & !NO_MEMORY_BARRIER)])
}

pub(crate) fn cuStreamWriteValue64_v2(call: Call, stream: u64, to: u64, value: u64, flags: c_uint) -> Result {
    submit(call, stream, Version::Two, &[write(value, true, to, flags)])
}

pub(crate) fn cuStreamBatchMemOp(
    call: Call,
    stream: u64,
    count: c_uint,
    list: In<c_void>,
    flags: c_uint,
) -> Result {
    batch(call, stream, Version::One, count, list, flags)
}

pub(crate) fn cuStreamBatchMemOp_v2(
    call: Call,
    stream: u64,
    count: c_uint,
    list: In<c_void>,
    flags: c_uint,
) -> Result {
    batch(call, stream, Version::Two, count, list, flags)
}
