//! Copies.
//!
//! Device memory is the worker's, so a copy is a post. Host memory that the worker sees (pinned) is named in place; other host
//! memory goes through staging memory of the arena: copied in before the post, copied out after a wait. Long copies are cut
//! into portions, so that staging one overlaps with the transfer of another.

use super::{
    array_copy,
    staging::{WaitMode, is_captured, length, memcpy_2d, stage_2d, staged, wait_for_host_functions},
};
use crate::{
    arguments::{Call, In, Out},
    checks::{self, CopyShape, MemorySide, Strided, host_side, side, span},
    error::{Error, Result},
    graphs, host_memory,
    process::{self, ProcessState},
    state::{
        memory::arena::{PORTION, Room},
        streams::StreamRef,
    },
    turns,
};
use core::ffi::c_void;
use sluice_cuda_graphs::{
    Copy3D, CopySide,
    layout::{CopyParameters, RectangleParameters},
    memory_type,
};
use sluice_protocol::{
    calls::wire,
    field::{ArenaIn, ArenaOut, ArenaRowsIn, ArenaRowsOut, DeviceAddress},
};
use std::collections::VecDeque;

/// Portions of one copy from the device that are under way at once, and of a copy that is no longer than they are.
const PORTIONS: usize = 8;
/// Bytes of a portion at least: the transfer of fewer takes less time than the call of the driver for it.
const SHORT_PORTION: u64 = 128 << 10;

/// Bytes of a portion of a staged copy. Of a short copy they are few: neither the staging of the first one nor the transfer of the last
/// overlaps with anything.
fn portion_of(bytes: u64) -> u64 {
    (bytes / PORTIONS as u64).next_multiple_of(SHORT_PORTION).clamp(SHORT_PORTION, PORTION)
}

fn to_device(
    process: &ProcessState,
    stream: StreamRef<'_>,
    to: u64,
    from: u64,
    bytes: u64,
    mode: WaitMode,
) -> Result {
    if process.arena.is_pinned(to, bytes) {
        // Host memory by its address on the device, which is the same.
        return host_side(process, from, bytes).and_then(|_| on_host(process, stream, to, from, bytes));
    }
    process.device_map.check(to, bytes)?;
    let post = |to: u64, from: u64, bytes: u64| {
        process.session.post(
            stream.context,
            Some(stream.target()),
            &wire::memcpy_htod::Args { to: DeviceAddress(to), from: ArenaIn { address: from, bytes } },
        )
    };
    if host_side(process, from, bytes)? == MemorySide::Pinned {
        return mode.finish(process, stream, post(to, from, bytes)?);
    }
    let mode = mode.of_pageable(bytes);
    wait_for_host_functions(process, stream, mode)?;
    let (mut done, mut last, most) = (0, 0, portion_of(bytes));
    while done < bytes {
        let portion = (bytes - done).min(most);
        last = staged(process, stream, portion, |at| {
            host_memory::stage(at, from + done, length(portion)?);
            post(to + done, at, portion)
        })?;
        done += portion;
    }
    mode.finish(process, stream, last)
}

fn from_device(
    process: &ProcessState,
    stream: StreamRef<'_>,
    to: u64,
    from: u64,
    bytes: u64,
    mode: WaitMode,
) -> Result {
    if process.arena.is_pinned(from, bytes) {
        return host_side(process, to, bytes).and_then(|_| on_host(process, stream, to, from, bytes));
    }
    process.device_map.check(from, bytes)?;
    let post = |to: u64, from: u64, bytes: u64| {
        process.session.post(
            stream.context,
            Some(stream.target()),
            &wire::memcpy_dtoh::Args { to: ArenaOut { address: to, bytes }, from: DeviceAddress(from) },
        )
    };
    if host_side(process, to, bytes)? == MemorySide::Pinned {
        return mode.finish(process, stream, post(to, from, bytes)?);
    }
    // Into pageable memory a copy blocks by contract.
    let mut under_way = VecDeque::with_capacity(PORTIONS);
    let (mut posted, mut result, most) = (0, Ok(()), portion_of(bytes));
    let arrive = |(at, portion, sequence, room): (u64, u64, u64, Room)| {
        let arrived = process.session.wait_complete(stream.slot, sequence);
        if arrived.is_ok() {
            host_memory::copy(to + at, room.address(), length(portion)?);
            process.arena.free(room);
        }
        // After a failure the worker may still write there: the session is over, and its staging memory with it.
        arrived
    };
    while posted < bytes && result.is_ok() {
        if under_way.len() == PORTIONS
            && let Some(portion) = under_way.pop_front()
        {
            result = arrive(portion);
            continue;
        }
        let portion = (bytes - posted).min(most);
        match process.arena.allocate(&process.session, portion) {
            Ok(Some(room)) => match post(room.address(), from + posted, portion) {
                Ok(sequence) => under_way.push_back((posted, portion, sequence, room)),
                Err(error) => {
                    process.arena.free(room);
                    result = Err(error);
                }
            },
            // A fixed arena has no more staging memory; perhaps when this copy needs less of it.
            Ok(None) => {
                if let Some(oldest) = under_way.pop_front() {
                    result = arrive(oldest);
                    continue;
                }
                result = process.wait_turn(stream).and_then(|()| {
                    process.arena.in_reserve(portion, |at| {
                        let sequence = post(at, from + posted, portion)?;
                        process.session.wait_complete(stream.slot, sequence)?;
                        host_memory::copy(to + posted, at, length(portion)?);
                        Ok(())
                    })
                });
            }
            Err(error) => result = Err(error),
        }
        posted += portion;
    }
    for portion in under_way {
        result = result.and(arrive(portion));
    }
    result.and_then(|()| process.session.report(stream.context))
}

fn on_device(
    process: &ProcessState,
    stream: StreamRef<'_>,
    to: u64,
    from: u64,
    bytes: u64,
    mode: WaitMode,
) -> Result {
    if process.arena.is_pinned(to, bytes) || process.arena.is_pinned(from, bytes) {
        return any(process, stream, to, from, bytes, mode);
    }
    process.device_map.check(to, bytes)?;
    process.device_map.check(from, bytes)?;
    process
        .session
        .post(
            stream.context,
            Some(stream.target()),
            &wire::memcpy_dtod::Args { to: DeviceAddress(to), from: DeviceAddress(from), bytes },
        )
        .map(drop)
}

/// A copy within host memory, in the order of the stream.
fn on_host(process: &ProcessState, stream: StreamRef<'_>, to: u64, from: u64, bytes: u64) -> Result {
    process.wait_turn(stream)?;
    host_memory::copy(to, from, length(bytes)?);
    Ok(())
}

/// A copy whose addresses define its direction.
fn any(
    process: &ProcessState,
    stream: StreamRef<'_>,
    to: u64,
    from: u64,
    bytes: u64,
    mode: WaitMode,
) -> Result {
    match (side(process, to, bytes)?, side(process, from, bytes)?) {
        (MemorySide::Device, MemorySide::Device) => on_device(process, stream, to, from, bytes, mode),
        (MemorySide::Device, _) => to_device(process, stream, to, from, bytes, mode),
        (_, MemorySide::Device) => from_device(process, stream, to, from, bytes, mode),
        _ => on_host(process, stream, to, from, bytes),
    }
}

/// The directions of flat copies.
#[derive(Clone, Copy)]
pub(super) enum Direction {
    ToDevice,
    FromDevice,
    OnDevice,
    /// The addresses define it.
    Any,
}

impl Direction {
    /// The memory types of destination and source.
    const fn kinds(self) -> (u32, u32) {
        match self {
            Direction::ToDevice => (memory_type::DEVICE, memory_type::HOST),
            Direction::FromDevice => (memory_type::HOST, memory_type::DEVICE),
            Direction::OnDevice => (memory_type::DEVICE, memory_type::DEVICE),
            Direction::Any => (memory_type::UNIFIED, memory_type::UNIFIED),
        }
    }
}

/// Makes a flat copy, if there is anything to copy.
fn run(
    call: Call,
    stream: u64,
    (to, from, bytes): (u64, u64, usize),
    direction: Direction,
    mode: WaitMode,
) -> Result {
    let process = process::get()?;
    process.session.healthy()?;
    let stream = process.stream_or_default(call, stream)?;
    flat(process, stream, (to, from, bytes as u64), direction, mode)
}

/// Makes a flat copy in a stream.
pub(super) fn flat(
    process: &ProcessState,
    stream: StreamRef<'_>,
    (to, from, bytes): (u64, u64, u64),
    direction: Direction,
    mode: WaitMode,
) -> Result {
    let (to, from) = (process.arena.on_device(to, bytes), process.arena.on_device(from, bytes));
    let (to_kind, from_kind) = direction.kinds();
    let (to_side, from_side) = (CopySide::flat(to_kind, to), CopySide::flat(from_kind, from));
    let copy = Copy3D { from: from_side, to: to_side, width: bytes, height: 1, depth: 1 };
    if (bytes > 0 || mode == WaitMode::Sync) && is_captured(process, stream, mode, &copy)? {
        return Ok(());
    }
    let variables = &process.managed.variables;
    // A managed variable is on both sides.
    let direction = if variables.hold(to) || variables.hold(from) { Direction::Any } else { direction };
    in_turn(process, stream, mode, || match direction {
        _ if bytes == 0 => Ok(()),
        Direction::ToDevice => to_device(process, stream, to, from, bytes, mode),
        Direction::FromDevice => from_device(process, stream, to, from, bytes, mode),
        Direction::OnDevice => on_device(process, stream, to, from, bytes, mode),
        Direction::Any => any(process, stream, to, from, bytes, mode),
    })
}

/// Makes a copy in the device's turn with managed variables, and ends the turn if the copy is synchronous.
fn in_turn(
    process: &ProcessState,
    stream: StreamRef<'_>,
    mode: WaitMode,
    copy: impl FnOnce() -> Result,
) -> Result {
    let turn = turns::of_device(process)?;
    copy()?;
    turns::end(process, stream, turn, mode == WaitMode::Sync)
}

pub(crate) fn cuMemcpy(call: Call, to: u64, from: u64, bytes: usize) -> Result {
    run(call, 0, (to, from, bytes), Direction::Any, WaitMode::Sync)
}

pub(crate) fn cuMemcpyAsync(call: Call, to: u64, from: u64, bytes: usize, stream: u64) -> Result {
    run(call, stream, (to, from, bytes), Direction::Any, WaitMode::Async)
}

pub(crate) fn cuMemcpyHtoD_v2(call: Call, to: u64, from: In<c_void>, bytes: usize) -> Result {
    run(call, 0, (to, from.address(), bytes), Direction::ToDevice, WaitMode::Sync)
}

pub(crate) fn cuMemcpyHtoDAsync_v2(
    call: Call,
    to: u64,
    from: In<c_void>,
    bytes: usize,
    stream: u64,
) -> Result {
    run(call, stream, (to, from.address(), bytes), Direction::ToDevice, WaitMode::Async)
}

pub(crate) fn cuMemcpyDtoH_v2(call: Call, to: Out<c_void>, from: u64, bytes: usize) -> Result {
    run(call, 0, (to.address(), from, bytes), Direction::FromDevice, WaitMode::Sync)
}

pub(crate) fn cuMemcpyDtoHAsync_v2(
    call: Call,
    to: Out<c_void>,
    from: u64,
    bytes: usize,
    stream: u64,
) -> Result {
    run(call, stream, (to.address(), from, bytes), Direction::FromDevice, WaitMode::Async)
}

pub(crate) fn cuMemcpyDtoD_v2(call: Call, to: u64, from: u64, bytes: usize) -> Result {
    run(call, 0, (to, from, bytes), Direction::OnDevice, WaitMode::Sync)
}

pub(crate) fn cuMemcpyDtoDAsync_v2(call: Call, to: u64, from: u64, bytes: usize, stream: u64) -> Result {
    run(call, stream, (to, from, bytes), Direction::OnDevice, WaitMode::Async)
}

fn copy_2d(descriptor: In<c_void>) -> Result<Copy3D> {
    descriptor.cast::<RectangleParameters>().get().map(Copy3D::from)
}

fn copy_3d(descriptor: In<c_void>) -> Result<Copy3D> {
    let copy = descriptor.cast::<CopyParameters>().get()?;
    if copy.contexts() == [0; 2] { Ok(copy.into()) } else { Err(Error::INVALID_VALUE) }
}

fn run_shape(call: Call, stream: u64, copy: &Copy3D, mode: WaitMode) -> Result {
    let process = process::get()?;
    process.session.healthy()?;
    boxed(process, process.stream_or_default(call, stream)?, copy, mode)
}

/// Copies a box layer by layer, a rectangle at a time.
pub(super) fn boxed(process: &ProcessState, stream: StreamRef<'_>, copy: &Copy3D, mode: WaitMode) -> Result {
    in_turn(process, stream, mode, || boxed_in_turn(process, stream, copy, mode))
}

fn boxed_in_turn(process: &ProcessState, stream: StreamRef<'_>, copy: &Copy3D, mode: WaitMode) -> Result {
    if copy.to.kind == memory_type::ARRAY || copy.from.kind == memory_type::ARRAY {
        return array_copy::boxed(process, stream, copy, mode);
    }
    let shape = &CopyShape::of(copy)?.on_device(process)?;
    if mode == WaitMode::Sync {
        graphs::synchronous(process, stream)?;
    }
    if shape.is_empty() {
        return Ok(());
    }
    shape.check_pitch(process, process.contexts.device(stream.context)?)?;
    checks::stated(process, &copy.from)?;
    checks::stated(process, &copy.to)?;
    if is_captured(process, stream, mode, copy)? {
        return Ok(());
    }
    let mut last = None;
    for layer in 0..shape.depth {
        let at = |side: Strided| -> Result<Strided> {
            let offset = layer.checked_mul(side.layer).ok_or(Error::INVALID_VALUE)?;
            let start = side.start.checked_add(offset).ok_or(Error::INVALID_VALUE)?;
            Ok(Strided { start, ..side })
        };
        last = rectangle(process, stream, at(shape.to)?, at(shape.from)?, shape.width, shape.height, mode)?;
    }
    last.map_or(Ok(()), |sequence| mode.finish(process, stream, sequence))
}

/// Copies rows. Returns the sequence of the last rows of pageable memory that were posted to the device, for which the caller may have to
/// wait.
fn rectangle(
    process: &ProcessState,
    stream: StreamRef<'_>,
    to: Strided,
    from: Strided,
    width: u64,
    height: u64,
    mode: WaitMode,
) -> Result<Option<u64>> {
    let sides = (
        side(process, to.start, span(to, width, height)?)?,
        side(process, from.start, span(from, width, height)?)?,
    );
    let (session, target) = (&process.session, Some(stream.target()));
    let to_device = |to: Strided, from: Strided, height: u64| {
        let from = ArenaRowsIn { address: from.start, pitch: from.pitch, width, height };
        let call = wire::memcpy_2d_htod::Args { to: DeviceAddress(to.start), to_pitch: to.pitch, from };
        session.post(stream.context, target, &call)
    };
    let from_device = |to: Strided, from: Strided, height: u64| {
        let to = ArenaRowsOut { address: to.start, pitch: to.pitch, width, height };
        let call = wire::memcpy_2d_dtoh::Args { to, from: DeviceAddress(from.start), from_pitch: from.pitch };
        session.post(stream.context, target, &call)
    };
    // Staged rows lie without gaps; as many at a time as make up a portion.
    let rows_at_once = (PORTION / width).clamp(1, height);
    let skip = |side: Strided, rows: u64| Strided { start: side.start + rows * side.pitch, ..side };
    let staged_ways =
        [(MemorySide::Device, MemorySide::Pageable), (MemorySide::Pageable, MemorySide::Device)];
    if width > PORTION && staged_ways.contains(&sides) {
        // Staging memory for a whole row could be more than a fixed arena has.
        let mut last = None;
        for column in (0..width).step_by(length(PORTION)?) {
            let right = |side: Strided| Strided { start: side.start + column, ..side };
            let columns = PORTION.min(width - column);
            last = rectangle(process, stream, right(to), right(from), columns, height, mode)?;
        }
        return Ok(last);
    }
    match sides {
        (MemorySide::Device, MemorySide::Device) => {
            let (to, to_pitch) = (DeviceAddress(to.start), to.pitch);
            let (from, from_pitch) = (DeviceAddress(from.start), from.pitch);
            let call = wire::memcpy_2d_dtod::Args { to, to_pitch, from, from_pitch, width, height };
            session.post(stream.context, target, &call)?;
        }
        (MemorySide::Device, MemorySide::Pinned) => {
            mode.finish(process, stream, to_device(to, from, height)?)?;
        }
        (MemorySide::Pinned, MemorySide::Device) => {
            mode.finish(process, stream, from_device(to, from, height)?)?;
        }
        (MemorySide::Device, MemorySide::Pageable) => {
            wait_for_host_functions(process, stream, mode)?;
            let mut last = None;
            for first in (0..height).step_by(length(rows_at_once)?) {
                let rows = rows_at_once.min(height - first);
                last = Some(staged(process, stream, rows * width, |at| {
                    let staged = Strided { start: at, pitch: width, layer: 0 };
                    stage_2d(staged, skip(from, first), width, rows)?;
                    to_device(skip(to, first), staged, rows)
                })?);
            }
            return Ok(last);
        }
        (MemorySide::Pageable, MemorySide::Device) => {
            for first in (0..height).step_by(length(rows_at_once)?) {
                let rows = rows_at_once.min(height - first);
                let turn = || process.wait_turn(stream);
                process.arena.with_room(&process.session, rows * width, turn, |at| {
                    let staged = Strided { start: at, pitch: width, layer: 0 };
                    let sequence = from_device(staged, skip(from, first), rows)?;
                    process.session.wait_complete(stream.slot, sequence)?;
                    memcpy_2d(skip(to, first), staged, width, rows)
                })?;
            }
            process.session.report(stream.context)?;
        }
        _ => {
            process.wait_turn(stream)?;
            memcpy_2d(to, from, width, height)?;
        }
    }
    Ok(None)
}

pub(crate) fn cuMemcpy2D_v2(call: Call, descriptor: In<c_void>) -> Result {
    run_shape(call, 0, &copy_2d(descriptor)?, WaitMode::Sync)
}

pub(crate) fn cuMemcpy2DUnaligned_v2(call: Call, descriptor: In<c_void>) -> Result {
    cuMemcpy2D_v2(call, descriptor)
}

pub(crate) fn cuMemcpy2DAsync_v2(call: Call, descriptor: In<c_void>, stream: u64) -> Result {
    run_shape(call, stream, &copy_2d(descriptor)?, WaitMode::Async)
}

pub(crate) fn cuMemcpy3D_v2(call: Call, descriptor: In<c_void>) -> Result {
    run_shape(call, 0, &copy_3d(descriptor)?, WaitMode::Sync)
}

pub(crate) fn cuMemcpy3DAsync_v2(call: Call, descriptor: In<c_void>, stream: u64) -> Result {
    run_shape(call, stream, &copy_3d(descriptor)?, WaitMode::Async)
}

/// Addresses are those of the whole process, so the contexts of a copy between contexts only have to exist; null is the current one.
fn exist(contexts: [u64; 2]) -> Result {
    let process = process::get()?;
    let mut named = contexts.into_iter().filter(|context| *context != 0);
    named.try_for_each(|context| process.contexts.get(context).map(drop))
}

/// Copies between contexts.
fn peer(
    call: Call,
    stream: u64,
    (to, to_context): (u64, u64),
    (from, from_context): (u64, u64),
    bytes: usize,
    mode: WaitMode,
) -> Result {
    exist([to_context, from_context])?;
    run(call, stream, (to, from, bytes), Direction::OnDevice, mode)
}

pub(crate) fn cuMemcpyPeer(
    call: Call,
    to: u64,
    to_context: u64,
    from: u64,
    from_context: u64,
    bytes: usize,
) -> Result {
    peer(call, 0, (to, to_context), (from, from_context), bytes, WaitMode::Sync)
}

pub(crate) fn cuMemcpyPeerAsync(
    call: Call,
    to: u64,
    to_context: u64,
    from: u64,
    from_context: u64,
    bytes: usize,
    stream: u64,
) -> Result {
    peer(call, stream, (to, to_context), (from, from_context), bytes, WaitMode::Async)
}

fn peer_3d(call: Call, descriptor: In<c_void>, stream: u64, mode: WaitMode) -> Result {
    let copy = descriptor.cast::<CopyParameters>().get()?;
    exist(copy.contexts())?;
    run_shape(call, stream, &copy.into(), mode)
}

pub(crate) fn cuMemcpy3DPeer(call: Call, descriptor: In<c_void>) -> Result {
    peer_3d(call, descriptor, 0, WaitMode::Sync)
}

pub(crate) fn cuMemcpy3DPeerAsync(call: Call, descriptor: In<c_void>, stream: u64) -> Result {
    peer_3d(call, descriptor, stream, WaitMode::Async)
}
