//! Parts of copies, with arrays or without: the wait for their end, captures, and staging memory.

use crate::{
    checks::Strided,
    error::{Error, Result},
    graphs, host_memory,
    process::ProcessState,
    state::streams::StreamRef,
};
use sluice_cuda_graphs::{Copy3D, Work};

/// The completion that the caller waits for: of the copy, or of its submission.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum WaitMode {
    Sync,
    Async,
}

/// Bytes of pageable memory up to which a synchronous copy to the device returns once they are staged. A longer one is complete when it
/// returns (CUDA Driver API, "API synchronization behavior").
const STAGED_BYTES: u64 = 64 << 10;

impl WaitMode {
    /// The completion for which a copy of `bytes` of pageable memory to the device waits.
    pub(super) fn of_pageable(self, bytes: u64) -> WaitMode {
        if bytes <= STAGED_BYTES { WaitMode::Async } else { self }
    }

    /// Ends a call whose work was posted: waits for the work of a synchronous call.
    pub(super) fn finish(self, process: &ProcessState, stream: StreamRef<'_>, sequence: u64) -> Result {
        match self {
            WaitMode::Sync => {
                process.session.wait_complete(stream.slot, sequence)?;
                process.session.report(stream.context)
            }
            WaitMode::Async => Ok(()),
        }
    }
}

/// Waits until the stream has completed its earlier work, if a host function of this stream, or of one that it waits for, may yet write
/// the memory that the caller is about to stage. A copy that is complete on return reads it in its turn, and so does one of pinned memory
/// that is staged because it is not shared.
pub(super) fn wait_for_host_functions(
    process: &ProcessState,
    stream: StreamRef<'_>,
    mode: WaitMode,
) -> Result {
    let in_turn = mode == WaitMode::Sync || process.session.gathers();
    if in_turn && process.host_functions.any(&process.session) { process.wait_turn(stream) } else { Ok(()) }
}

/// Posts a copy from staging memory, which `post` fills first, and frees that memory when the copy is complete. Returns its sequence. If
/// there is none, the copy goes through the reserve and is complete on return; before that it waits for its stream, so that it delays no
/// other.
pub(super) fn staged(
    process: &ProcessState,
    stream: StreamRef<'_>,
    bytes: u64,
    post: impl FnOnce(u64) -> Result<u64>,
) -> Result<u64> {
    match process.arena.stage(&process.session, stream.slot, bytes)? {
        Some(room) => match post(room.address()) {
            Ok(sequence) => {
                process.arena.free_after(&process.session, stream.slot, sequence, room);
                Ok(sequence)
            }
            Err(error) => {
                process.arena.free(room);
                Err(error)
            }
        },
        None => {
            process.wait_turn(stream)?;
            process.arena.in_reserve(bytes, |at| {
                let sequence = post(at)?;
                process.session.wait_complete(stream.slot, sequence)?;
                Ok(sequence)
            })
        }
    }
}

/// True if a copy is not to be made now: a capture has it. A synchronous copy is refused if a capture forbids it.
pub(super) fn is_captured(
    process: &ProcessState,
    stream: StreamRef<'_>,
    mode: WaitMode,
    copy: &Copy3D,
) -> Result<bool> {
    match mode {
        WaitMode::Sync => graphs::synchronous(process, stream).map(|()| false),
        WaitMode::Async => {
            graphs::captured(process, stream, || Ok(Work::Copy { copy: *copy, context: stream.context }))
        }
    }
}

/// Copies rows within host memory.
pub(super) fn memcpy_2d(to: Strided, from: Strided, width: u64, rows: u64) -> Result {
    each_row(host_memory::copy, to, from, width, rows)
}

/// Copies rows of the program into staging memory.
pub(super) fn stage_2d(to: Strided, from: Strided, width: u64, rows: u64) -> Result {
    each_row(host_memory::stage, to, from, width, rows)
}

fn each_row(copy: fn(u64, u64, usize), to: Strided, from: Strided, width: u64, rows: u64) -> Result {
    for row in 0..rows {
        copy(to.start + row * to.pitch, from.start + row * from.pitch, length(width)?);
    }
    Ok(())
}

/// A number of bytes as a length of this process.
pub(super) fn length(bytes: u64) -> Result<usize> {
    usize::try_from(bytes).map_err(|_| Error::INVALID_VALUE)
}
