//! Copies.
//!
//! Device memory is the worker's, so a copy is a post. Host memory that the worker sees (pinned) is named in place; other host
//! memory goes through staging memory of the arena: copied in before the post, copied out after a wait. Long copies are cut
//! into portions, so that staging one overlaps with the transfer of another.

use crate::{
    arguments::{Call, In, Out},
    error::{Error, Result},
    host_memory,
    process::{self, ProcessState},
    state::{
        devices::attribute,
        memory::arena::{PORTION, Room},
        streams::StreamRef,
    },
};
use core::ffi::c_void;
use sluice_protocol::{
    calls::wire,
    field::{ArenaIn, ArenaOut, ArenaRowsIn, ArenaRowsOut, DeviceAddress},
};
use std::collections::VecDeque;

/// Portions of one copy from the device that are under way at once.
const PORTIONS: usize = 8;

/// The kind of memory that a range is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum MemorySide {
    Device,
    Pinned,
    Pageable,
}

fn side(process: &ProcessState, address: u64, bytes: u64) -> Result<MemorySide> {
    match process.device_map.find(address) {
        Some(_) => process.device_map.check(address, bytes).map(|()| MemorySide::Device),
        None if process.arena.is_pinned(address, bytes) => Ok(MemorySide::Pinned),
        // An address that can never be host memory is refused instead of touched.
        None if address == 0 || process.device_map.reserves(address) => Err(Error::INVALID_VALUE),
        None => Ok(MemorySide::Pageable),
    }
}

/// The side of a range that the call declares as host memory.
fn host_side(process: &ProcessState, address: u64, bytes: u64) -> Result<MemorySide> {
    match side(process, address, bytes)? {
        MemorySide::Device => Err(Error::INVALID_VALUE),
        host => Ok(host),
    }
}

/// The completion that the caller waits for: of the copy, or of its submission.
#[derive(Clone, Copy, PartialEq, Eq)]
enum WaitMode {
    Sync,
    Async,
}

impl WaitMode {
    /// Ends a call whose work was posted: waits for the work of a synchronous call.
    fn finish(self, process: &ProcessState, stream: StreamRef<'_>, sequence: u64) -> Result {
        match self {
            WaitMode::Sync => {
                process.session.wait_complete(stream.slot, sequence)?;
                process.session.report(stream.context)
            }
            WaitMode::Async => Ok(()),
        }
    }
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
    process.wait_for_host_functions(stream)?;
    // Once staged the caller's buffer is free, and neither form promises more for pageable memory.
    let mut done = 0;
    while done < bytes {
        let portion = (bytes - done).min(PORTION);
        staged(process, stream, portion, |at| {
            host_memory::copy(at, from + done, length(portion)?);
            post(to + done, at, portion)
        })?;
        done += portion;
    }
    Ok(())
}

/// Posts a copy from staging memory, which `post` fills first, and frees that memory when the copy is complete. If there is none, the
/// copy goes through the reserve and is complete on return; before that it waits for its stream, so that it delays no other.
fn staged(
    process: &ProcessState,
    stream: StreamRef<'_>,
    bytes: u64,
    post: impl FnOnce(u64) -> Result<u64>,
) -> Result {
    match process.arena.stage(&process.session, stream.slot, bytes)? {
        Some(room) => match post(room.address()) {
            Ok(sequence) => process.arena.free_after(stream.slot, sequence, room),
            Err(error) => {
                process.arena.free(room);
                return Err(error);
            }
        },
        None => {
            process.wait_turn(stream)?;
            process.arena.in_reserve(bytes, |at| process.session.wait_complete(stream.slot, post(at)?))?;
        }
    }
    Ok(())
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
    let (mut posted, mut result) = (0, Ok(()));
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
        let portion = (bytes - posted).min(PORTION);
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

pub(super) fn length(bytes: u64) -> Result<usize> {
    usize::try_from(bytes).map_err(|_| Error::INVALID_VALUE)
}

/// Resolves the stream and runs a copy, if there is anything to copy.
fn run(
    call: Call,
    stream: u64,
    bytes: usize,
    copy: impl FnOnce(&'static ProcessState, StreamRef<'_>, u64) -> Result,
) -> Result {
    let process = process::get()?;
    process.session.healthy()?;
    let stream = process.stream_or_default(call, stream)?;
    if bytes == 0 { Ok(()) } else { copy(process, stream, bytes as u64) }
}

pub(crate) fn cuMemcpy(call: Call, to: u64, from: u64, bytes: usize) -> Result {
    run(call, 0, bytes, |process, stream, bytes| any(process, stream, to, from, bytes, WaitMode::Sync))
}

pub(crate) fn cuMemcpyAsync(call: Call, to: u64, from: u64, bytes: usize, stream: u64) -> Result {
    run(call, stream, bytes, |process, stream, bytes| any(process, stream, to, from, bytes, WaitMode::Async))
}

pub(crate) fn cuMemcpyHtoD_v2(call: Call, to: u64, from: In<c_void>, bytes: usize) -> Result {
    let from = from.address();
    run(call, 0, bytes, |process, stream, bytes| to_device(process, stream, to, from, bytes, WaitMode::Sync))
}

pub(crate) fn cuMemcpyHtoDAsync_v2(
    call: Call,
    to: u64,
    from: In<c_void>,
    bytes: usize,
    stream: u64,
) -> Result {
    let from = from.address();
    run(call, stream, bytes, |process, stream, bytes| {
        to_device(process, stream, to, from, bytes, WaitMode::Async)
    })
}

pub(crate) fn cuMemcpyDtoH_v2(call: Call, to: Out<c_void>, from: u64, bytes: usize) -> Result {
    let to = to.address();
    run(call, 0, bytes, |process, stream, bytes| {
        from_device(process, stream, to, from, bytes, WaitMode::Sync)
    })
}

pub(crate) fn cuMemcpyDtoHAsync_v2(
    call: Call,
    to: Out<c_void>,
    from: u64,
    bytes: usize,
    stream: u64,
) -> Result {
    let to = to.address();
    run(call, stream, bytes, |process, stream, bytes| {
        from_device(process, stream, to, from, bytes, WaitMode::Async)
    })
}

pub(crate) fn cuMemcpyDtoD_v2(call: Call, to: u64, from: u64, bytes: usize) -> Result {
    run(call, 0, bytes, |process, stream, bytes| on_device(process, stream, to, from, bytes, WaitMode::Sync))
}

pub(crate) fn cuMemcpyDtoDAsync_v2(call: Call, to: u64, from: u64, bytes: usize, stream: u64) -> Result {
    run(call, stream, bytes, |process, stream, bytes| {
        on_device(process, stream, to, from, bytes, WaitMode::Async)
    })
}

/// One side of a rectangle or box: the address of its first byte and the strides.
#[derive(Clone, Copy)]
pub(super) struct Strided {
    pub(super) start: u64,
    pub(super) pitch: u64,
    /// Bytes from one layer to the next.
    pub(super) layer: u64,
}

/// A box of `depth` layers of `height` rows of `width` bytes.
struct CopyShape {
    to: Strided,
    from: Strided,
    width: u64,
    height: u64,
    depth: u64,
}

/// `CUmemorytype`.
mod memory_type {
    pub(super) const HOST: u64 = 1;
    pub(super) const DEVICE: u64 = 2;
    pub(super) const ARRAY: u64 = 3;
    pub(super) const UNIFIED: u64 = 4;
}

/// Words of a copy descriptor: all its fields are 8 bytes wide, memory types in the low half of theirs.
struct Words<const N: usize>([u64; N]);

impl<const N: usize> Words<N> {
    fn read<const BYTES: usize>(descriptor: In<c_void>) -> Result<Words<N>> {
        let bytes = descriptor.cast::<[u8; BYTES]>().get()?;
        let mut words = [0; N];
        for (word, chunk) in words.iter_mut().zip(bytes.chunks_exact(8)) {
            *word = u64::from_ne_bytes(chunk.try_into().map_err(|_| Error::INVALID_VALUE)?);
        }
        Ok(Words(words))
    }

    /// The address at which a side starts, by its memory type.
    fn base(&self, kind: usize, host: usize, device: usize) -> Result<u64> {
        match self.0[kind] & 0xffff_ffff {
            memory_type::HOST => Ok(self.0[host]),
            memory_type::DEVICE | memory_type::UNIFIED => Ok(self.0[device]),
            memory_type::ARRAY => Err(Error::NOT_SUPPORTED),
            _ => Err(Error::INVALID_VALUE),
        }
    }
}

/// Reads a side from its words: x, y, z; address; pitch and rows per layer. A pitch of 0 means rows without gaps.
fn strided(
    base: u64,
    [x, y, z]: [u64; 3],
    pitch: u64,
    rows: u64,
    width: u64,
    height: u64,
) -> Result<Strided> {
    let end = x.checked_add(width).ok_or(Error::INVALID_VALUE)?;
    let pitch = if pitch == 0 { width } else { pitch };
    let below = rows != 0 && y.checked_add(height).is_none_or(|end| rows < end);
    let rows = if rows == 0 { height } else { rows };
    if below || pitch < width || (pitch < end && height > 1) {
        return Err(Error::INVALID_VALUE);
    }
    let layer = pitch.checked_mul(rows).ok_or(Error::INVALID_VALUE)?;
    let offset =
        y.checked_mul(pitch).and_then(|rows| rows.checked_add(z.checked_mul(layer)?)?.checked_add(x));
    let start = base.checked_add(offset.ok_or(Error::INVALID_VALUE)?).ok_or(Error::INVALID_VALUE)?;
    Ok(Strided { start, pitch, layer })
}

fn shape_2d(descriptor: In<c_void>) -> Result<CopyShape> {
    // srcX srcY srcType srcHost srcDevice srcArray srcPitch, dst the same, width height
    let words = Words::<16>::read::<128>(descriptor)?;
    let (width, height) = (words.0[14], words.0[15]);
    let from = words.base(2, 3, 4)?;
    let to = words.base(9, 10, 11)?;
    Ok(CopyShape {
        from: strided(from, [words.0[0], words.0[1], 0], words.0[6], 0, width, height)?,
        to: strided(to, [words.0[7], words.0[8], 0], words.0[13], 0, width, height)?,
        width,
        height,
        depth: 1,
    })
}

fn shape_3d(descriptor: In<c_void>) -> Result<CopyShape> {
    // srcX srcY srcZ srcLOD srcType srcHost srcDevice srcArray reserved srcPitch srcHeight, dst the same, width height depth
    let words = Words::<25>::read::<200>(descriptor)?;
    let (width, height, depth) = (words.0[22], words.0[23], words.0[24]);
    if words.0[3] != 0 || words.0[14] != 0 {
        return Err(Error::NOT_SUPPORTED);
    }
    let from = words.base(4, 5, 6)?;
    let to = words.base(15, 16, 17)?;
    Ok(CopyShape {
        from: strided(from, [words.0[0], words.0[1], words.0[2]], words.0[9], words.0[10], width, height)?,
        to: strided(to, [words.0[11], words.0[12], words.0[13]], words.0[20], words.0[21], width, height)?,
        width,
        height,
        depth,
    })
}

/// Copies a box layer by layer, a rectangle at a time.
fn run_shape(call: Call, stream: u64, shape: &CopyShape, mode: WaitMode) -> Result {
    let process = process::get()?;
    process.session.healthy()?;
    let stream = process.stream_or_default(call, stream)?;
    if shape.width == 0 || shape.height == 0 {
        return Ok(());
    }
    let device = process.devices.get(process.contexts.device(stream.context)?)?;
    if shape.to.pitch.max(shape.from.pitch) > u64::from(device.bound(attribute::MAX_PITCH)) {
        return Err(Error::INVALID_VALUE);
    }
    for layer in 0..shape.depth {
        let at = |side: Strided| {
            let offset = layer.checked_mul(side.layer).ok_or(Error::INVALID_VALUE)?;
            let start = side.start.checked_add(offset).ok_or(Error::INVALID_VALUE)?;
            Ok(Strided { start, ..side })
        };
        rectangle(process, stream, at(shape.to)?, at(shape.from)?, shape.width, shape.height, mode)?;
    }
    Ok(())
}

/// Bytes from the first to the last byte of a rectangle.
pub(super) fn span(side: Strided, width: u64, height: u64) -> Result<u64> {
    (height - 1).checked_mul(side.pitch).and_then(|rows| rows.checked_add(width)).ok_or(Error::INVALID_VALUE)
}

fn rectangle(
    process: &ProcessState,
    stream: StreamRef<'_>,
    to: Strided,
    from: Strided,
    width: u64,
    height: u64,
    mode: WaitMode,
) -> Result {
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
        for column in (0..width).step_by(length(PORTION)?) {
            let right = |side: Strided| Strided { start: side.start + column, ..side };
            let columns = PORTION.min(width - column);
            rectangle(process, stream, right(to), right(from), columns, height, mode)?;
        }
        return Ok(());
    }
    match sides {
        (MemorySide::Device, MemorySide::Device) => {
            let (to, to_pitch) = (DeviceAddress(to.start), to.pitch);
            let (from, from_pitch) = (DeviceAddress(from.start), from.pitch);
            let call = wire::memcpy_2d_dtod::Args { to, to_pitch, from, from_pitch, width, height };
            session.post(stream.context, target, &call).map(drop)
        }
        (MemorySide::Device, MemorySide::Pinned) => {
            mode.finish(process, stream, to_device(to, from, height)?)
        }
        (MemorySide::Pinned, MemorySide::Device) => {
            mode.finish(process, stream, from_device(to, from, height)?)
        }
        (MemorySide::Device, MemorySide::Pageable) => {
            process.wait_for_host_functions(stream)?;
            for first in (0..height).step_by(length(rows_at_once)?) {
                let rows = rows_at_once.min(height - first);
                staged(process, stream, rows * width, |at| {
                    let staged = Strided { start: at, pitch: width, layer: 0 };
                    copy_rows(staged, skip(from, first), width, rows)?;
                    to_device(skip(to, first), staged, rows)
                })?;
            }
            Ok(())
        }
        (MemorySide::Pageable, MemorySide::Device) => {
            for first in (0..height).step_by(length(rows_at_once)?) {
                let rows = rows_at_once.min(height - first);
                let turn = || process.wait_turn(stream);
                process.arena.with_room(&process.session, rows * width, turn, |at| {
                    let staged = Strided { start: at, pitch: width, layer: 0 };
                    let sequence = from_device(staged, skip(from, first), rows)?;
                    process.session.wait_complete(stream.slot, sequence)?;
                    copy_rows(skip(to, first), staged, width, rows)
                })?;
            }
            process.session.report(stream.context)
        }
        _ => {
            process.wait_turn(stream)?;
            copy_rows(to, from, width, height)
        }
    }
}

fn copy_rows(to: Strided, from: Strided, width: u64, rows: u64) -> Result {
    for row in 0..rows {
        host_memory::copy(to.start + row * to.pitch, from.start + row * from.pitch, length(width)?);
    }
    Ok(())
}

pub(crate) fn cuMemcpy2D_v2(call: Call, descriptor: In<c_void>) -> Result {
    run_shape(call, 0, &shape_2d(descriptor)?, WaitMode::Sync)
}

pub(crate) fn cuMemcpy2DUnaligned_v2(call: Call, descriptor: In<c_void>) -> Result {
    cuMemcpy2D_v2(call, descriptor)
}

pub(crate) fn cuMemcpy2DAsync_v2(call: Call, descriptor: In<c_void>, stream: u64) -> Result {
    run_shape(call, stream, &shape_2d(descriptor)?, WaitMode::Async)
}

pub(crate) fn cuMemcpy3D_v2(call: Call, descriptor: In<c_void>) -> Result {
    run_shape(call, 0, &shape_3d(descriptor)?, WaitMode::Sync)
}

pub(crate) fn cuMemcpy3DAsync_v2(call: Call, descriptor: In<c_void>, stream: u64) -> Result {
    run_shape(call, stream, &shape_3d(descriptor)?, WaitMode::Async)
}
