//! Copies from and to arrays. The worker sees no host memory but that of the arena: other memory is staged, as for copies of rectangles.

use super::staging::{WaitMode, is_captured, length, memcpy_2d, stage_2d, staged, wait_for_host_functions};
use crate::{
    arguments::{Call, In, Out},
    checks::{self, ArrayCopyShape, ArrayPlace, CopyPlace, MemorySide, Strided, side},
    error::{Error, Result},
    graphs,
    process::{self, ProcessState},
    state::{memory::arena::PORTION, streams::StreamRef},
};
use core::ffi::c_void;
use sluice_cuda_graphs::{Copy3D, CopySide, memory_type};
use sluice_protocol::{
    calls::wire,
    field::{ArenaRowsIn, ArenaRowsOut, DeviceAddress},
};

/// The direction of a copy between an array and memory.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    ToArray,
    FromArray,
}

/// Copies a box of which at least one end is an array.
pub(super) fn boxed(process: &ProcessState, stream: StreamRef<'_>, copy: &Copy3D, mode: WaitMode) -> Result {
    if mode == WaitMode::Sync {
        graphs::synchronous(process, stream)?;
    }
    if copy.is_empty() {
        return Ok(());
    }
    let shape = ArrayCopyShape::of(copy)?.ok_or(Error::INVALID_VALUE)?;
    shape.check_pitch(process, process.contexts.device(stream.context)?)?;
    checks::stated(process, &copy.from)?;
    checks::stated(process, &copy.to)?;
    if is_captured(process, stream, mode, copy)? {
        return Ok(());
    }
    match (shape.to, shape.from) {
        (CopyPlace::Array(to), CopyPlace::Array(from)) => {
            let ArrayCopyShape { extent, .. } = shape;
            let (to_at, from_at) = (to.at, from.at);
            let call = wire::memcpy_atoa::Args { to: to.array, to_at, from: from.array, from_at, extent };
            process.session.post(stream.context, Some(stream.target()), &call).map(drop)
        }
        (CopyPlace::Array(array), CopyPlace::Memory(memory)) => {
            with_memory(process, stream, &shape, (Way::ToArray, array, memory, copy.from.kind), mode)
        }
        (CopyPlace::Memory(memory), CopyPlace::Array(array)) => {
            with_memory(process, stream, &shape, (Way::FromArray, array, memory, copy.to.kind), mode)
        }
        (CopyPlace::Memory(_), CopyPlace::Memory(_)) => Err(Error::INVALID_VALUE),
    }
}

fn with_memory(
    process: &ProcessState,
    stream: StreamRef<'_>,
    shape: &ArrayCopyShape,
    (way, array, memory, stated): (Way, ArrayPlace, Strided, u32),
    mode: WaitMode,
) -> Result {
    let [width, height, depth] = shape.extent;
    let bytes = shape.span(memory)?;
    let memory = Strided { start: process.arena.on_device(memory.start, bytes), ..memory };
    let found = side(process, memory.start, bytes)?;
    if found == MemorySide::Device {
        // A managed variable is on both sides.
        if stated == memory_type::HOST && !process.managed.variables.hold(memory.start) {
            return Err(Error::INVALID_VALUE);
        }
        return on_device(process, stream, shape, (way, array, memory));
    }
    let mut last = None;
    for slice in 0..depth {
        let memory = Strided { start: memory.start + slice * memory.layer, ..memory };
        let place = moved(array, [0, 0, slice])?;
        match (found, way) {
            (MemorySide::Pinned, _) => {
                last = Some(rows(process, stream, way, place, memory, [width, height])?)
            }
            (_, Way::ToArray) => {
                last = from_pageable(process, stream, place, memory, ([width, height], mode))?
            }
            (_, Way::FromArray) => to_pageable(process, stream, place, memory, [width, height])?,
        }
    }
    match last {
        Some(sequence) => mode.finish(process, stream, sequence),
        // Copies to pageable memory are complete.
        None => process.session.report(stream.context),
    }
}

fn on_device(
    process: &ProcessState,
    stream: StreamRef<'_>,
    shape: &ArrayCopyShape,
    (way, place, memory): (Way, ArrayPlace, Strided),
) -> Result {
    let ArrayPlace { array, at } = place;
    let (address, pitch, extent) = (DeviceAddress(memory.start), memory.pitch, shape.extent);
    // A layer is a whole number of rows.
    let rows = memory.layer.checked_div(pitch).unwrap_or(0);
    let (session, target) = (&process.session, Some(stream.target()));
    match way {
        Way::ToArray => {
            let (from_pitch, from_rows) = (pitch, rows);
            let call =
                wire::memcpy_dtoa::Args { to: array, at, from: address, from_pitch, from_rows, extent };
            session.post(stream.context, target, &call).map(drop)
        }
        Way::FromArray => {
            let (to_pitch, to_rows) = (pitch, rows);
            let call = wire::memcpy_atod::Args { to: address, to_pitch, to_rows, from: array, at, extent };
            session.post(stream.context, target, &call).map(drop)
        }
    }
}

/// A place further on in an array, in which it lies.
fn moved(place: ArrayPlace, by: [u64; 3]) -> Result<ArrayPlace> {
    let mut at = place.at;
    for (first, by) in at.iter_mut().zip(by) {
        let by = u32::try_from(by).map_err(|_| Error::INVALID_VALUE)?;
        *first = first.checked_add(by).ok_or(Error::INVALID_VALUE)?;
    }
    Ok(ArrayPlace { at, ..place })
}

/// Posts a copy between arena memory and rows of one slice. Returns its sequence.
fn rows(
    process: &ProcessState,
    stream: StreamRef<'_>,
    way: Way,
    ArrayPlace { array, at }: ArrayPlace,
    Strided { start: address, pitch, .. }: Strided,
    [width, height]: [u64; 2],
) -> Result<u64> {
    let (session, target) = (&process.session, Some(stream.target()));
    match way {
        Way::ToArray => {
            let from = ArenaRowsIn { address, pitch, width, height };
            session.post(stream.context, target, &wire::memcpy_htoa::Args { to: array, at, from })
        }
        Way::FromArray => {
            let to = ArenaRowsOut { address, pitch, width, height };
            session.post(stream.context, target, &wire::memcpy_atoh::Args { to, from: array, at })
        }
    }
}

/// Calls `act` for each part of rows that fits a portion: with its first byte and row, and its bytes and rows.
fn portions([width, height]: [u64; 2], mut act: impl FnMut([u64; 2], [u64; 2]) -> Result) -> Result {
    // Elements have up to 16 bytes, so none is cut.
    let columns = width.min(PORTION);
    let rows = (PORTION / columns).clamp(1, height);
    for column in (0..width).step_by(length(columns)?) {
        for row in (0..height).step_by(length(rows)?) {
            act([column, row], [columns.min(width - column), rows.min(height - row)])?;
        }
    }
    Ok(())
}

fn from_pageable(
    process: &ProcessState,
    stream: StreamRef<'_>,
    place: ArrayPlace,
    memory: Strided,
    (extent, mode): ([u64; 2], WaitMode),
) -> Result<Option<u64>> {
    wait_for_host_functions(process, stream, mode)?;
    let mut last = None;
    portions(extent, |[column, row], [width, height]| {
        let part = Strided { start: memory.start + row * memory.pitch + column, ..memory };
        let place = moved(place, [column, row, 0])?;
        last = Some(staged(process, stream, width * height, |at| {
            let room = Strided { start: at, pitch: width, layer: 0 };
            stage_2d(room, part, width, height)?;
            rows(process, stream, Way::ToArray, place, room, [width, height])
        })?);
        Ok(())
    })?;
    Ok(last)
}

fn to_pageable(
    process: &ProcessState,
    stream: StreamRef<'_>,
    place: ArrayPlace,
    memory: Strided,
    extent: [u64; 2],
) -> Result {
    portions(extent, |[column, row], [width, height]| {
        let part = Strided { start: memory.start + row * memory.pitch + column, ..memory };
        let place = moved(place, [column, row, 0])?;
        let turn = || process.wait_turn(stream);
        process.arena.with_room(&process.session, width * height, turn, |at| {
            let room = Strided { start: at, pitch: width, layer: 0 };
            let sequence = rows(process, stream, Way::FromArray, place, room, [width, height])?;
            process.session.wait_complete(stream.slot, sequence)?;
            memcpy_2d(part, room, width, height)
        })
    })
}

/// A side that begins at a byte of the first row of an array.
fn array(array: u64, offset: usize) -> CopySide {
    CopySide { kind: memory_type::ARRAY, array, x: offset as u64, ..CopySide::default() }
}

fn device(address: u64) -> CopySide {
    CopySide::flat(memory_type::DEVICE, address)
}

fn host(address: u64) -> CopySide {
    CopySide::flat(memory_type::HOST, address)
}

/// Copies bytes of one row.
fn flat(call: Call, stream: u64, to: CopySide, from: CopySide, bytes: usize, mode: WaitMode) -> Result {
    let process = process::get()?;
    process.session.healthy()?;
    let stream = process.stream_or_default(call, stream)?;
    let copy = Copy3D { from, to, width: bytes as u64, height: 1, depth: 1 };
    boxed(process, stream, &copy, mode)
}

pub(crate) fn cuMemcpyAtoA_v2(
    call: Call,
    to: u64,
    to_offset: usize,
    from: u64,
    from_offset: usize,
    bytes: usize,
) -> Result {
    flat(call, 0, array(to, to_offset), array(from, from_offset), bytes, WaitMode::Sync)
}

pub(crate) fn cuMemcpyAtoD_v2(call: Call, to: u64, from: u64, offset: usize, bytes: usize) -> Result {
    flat(call, 0, device(to), array(from, offset), bytes, WaitMode::Sync)
}

pub(crate) fn cuMemcpyDtoA_v2(call: Call, to: u64, offset: usize, from: u64, bytes: usize) -> Result {
    flat(call, 0, array(to, offset), device(from), bytes, WaitMode::Sync)
}

pub(crate) fn cuMemcpyAtoH_v2(call: Call, to: Out<c_void>, from: u64, offset: usize, bytes: usize) -> Result {
    flat(call, 0, host(to.address()), array(from, offset), bytes, WaitMode::Sync)
}

pub(crate) fn cuMemcpyHtoA_v2(call: Call, to: u64, offset: usize, from: In<c_void>, bytes: usize) -> Result {
    flat(call, 0, array(to, offset), host(from.address()), bytes, WaitMode::Sync)
}

pub(crate) fn cuMemcpyAtoHAsync_v2(
    call: Call,
    to: Out<c_void>,
    from: u64,
    offset: usize,
    bytes: usize,
    stream: u64,
) -> Result {
    flat(call, stream, host(to.address()), array(from, offset), bytes, WaitMode::Async)
}

pub(crate) fn cuMemcpyHtoAAsync_v2(
    call: Call,
    to: u64,
    offset: usize,
    from: In<c_void>,
    bytes: usize,
    stream: u64,
) -> Result {
    flat(call, stream, array(to, offset), host(from.address()), bytes, WaitMode::Async)
}
