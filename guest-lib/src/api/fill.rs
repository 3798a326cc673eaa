//! The memset and write-value functions of the C API. Device memory is written by a post, pinned memory here when it is the
//! stream's turn.

use super::copy::{Strided, length, span};
use crate::{
    arguments::Call,
    error::{Error, Result},
    host_memory,
    process::{self, ProcessState},
    state::streams::StreamRef,
};
use core::ffi::c_uint;
use sluice_protocol::{
    calls::wire,
    field::{DeviceAddress, ElementSize},
};

/// Fills rows of elements.
fn fill(
    call: Call,
    stream: u64,
    to: u64,
    pitch: u64,
    element: ElementSize,
    value: u32,
    [width, height]: [usize; 2],
) -> Result {
    let process = process::get()?;
    process.session.healthy()?;
    let stream = process.stream_or_default(call, stream)?;
    if width == 0 || height == 0 {
        return Ok(());
    }
    let (width, height) = (width as u64, height as u64);
    let row = width.checked_mul(element.bytes()).ok_or(Error::INVALID_VALUE)?;
    let side = Strided { start: to, pitch: if height == 1 { row } else { pitch }, layer: 0 };
    if !to.is_multiple_of(element.bytes()) || !side.pitch.is_multiple_of(element.bytes()) || side.pitch < row
    {
        return Err(Error::INVALID_VALUE);
    }
    if process.arena.is_pinned(to, span(side, row, height)?) {
        return fill_host(process, stream, side, element, value, width, height);
    }
    process.device_map.check(to, span(side, row, height)?)?;
    process
        .session
        .post(
            stream.context,
            Some(stream.target()),
            &wire::memset::Args { to: DeviceAddress(to), pitch: side.pitch, element, value, width, height },
        )
        .map(drop)
}

/// Fills pinned memory here, in the order of the stream.
fn fill_host(
    process: &ProcessState,
    stream: StreamRef<'_>,
    to: Strided,
    element: ElementSize,
    value: u32,
    width: u64,
    height: u64,
) -> Result {
    process.wait_turn(stream)?;
    let row: Vec<u8> = value.to_ne_bytes()[..length(element.bytes())?].repeat(length(width)?);
    let from = row.as_ptr().expose_provenance() as u64;
    for at in 0..height {
        host_memory::copy(to.start + at * to.pitch, from, row.len());
    }
    Ok(())
}

/// Writes one value of 8 bytes if `wide`, else of 4. Only flag 0 exists: functions of version 2 do not support another order than
/// that of the stream (`CUstreamWriteValue_flags` in cuda.h).
fn write_value(call: Call, stream: u64, to: u64, value: u64, wide: bool, flags: c_uint) -> Result {
    let process = process::get()?;
    process.session.healthy()?;
    let stream = process.stream_or_default(call, stream)?;
    let bytes = if wide { 8 } else { 4 };
    if flags != 0 || !to.is_multiple_of(bytes) {
        return Err(Error::INVALID_VALUE);
    }
    if process.arena.is_pinned(to, bytes) {
        process.wait_turn(stream)?;
        host_memory::store(to, value, wide);
        return Ok(());
    }
    process.device_map.check(to, bytes)?;
    let call = wire::stream_write_value::Args { to: DeviceAddress(to), value, wide };
    process.session.post(stream.context, Some(stream.target()), &call).map(drop)
}

pub(crate) fn cuStreamWriteValue32_v2(
    call: Call,
    stream: u64,
    to: u64,
    value: c_uint,
    flags: c_uint,
) -> Result {
    write_value(call, stream, to, value.into(), false, flags)
}

pub(crate) fn cuStreamWriteValue64_v2(call: Call, stream: u64, to: u64, value: u64, flags: c_uint) -> Result {
    write_value(call, stream, to, value, true, flags)
}

pub(crate) fn cuMemsetD8_v2(call: Call, to: u64, value: u8, count: usize) -> Result {
    fill(call, 0, to, 0, ElementSize::Byte, value.into(), [count, 1])
}

pub(crate) fn cuMemsetD16_v2(call: Call, to: u64, value: u16, count: usize) -> Result {
    fill(call, 0, to, 0, ElementSize::Half, value.into(), [count, 1])
}

pub(crate) fn cuMemsetD32_v2(call: Call, to: u64, value: c_uint, count: usize) -> Result {
    fill(call, 0, to, 0, ElementSize::Word, value, [count, 1])
}

pub(crate) fn cuMemsetD8Async(call: Call, to: u64, value: u8, count: usize, stream: u64) -> Result {
    fill(call, stream, to, 0, ElementSize::Byte, value.into(), [count, 1])
}

pub(crate) fn cuMemsetD16Async(call: Call, to: u64, value: u16, count: usize, stream: u64) -> Result {
    fill(call, stream, to, 0, ElementSize::Half, value.into(), [count, 1])
}

pub(crate) fn cuMemsetD32Async(call: Call, to: u64, value: c_uint, count: usize, stream: u64) -> Result {
    fill(call, stream, to, 0, ElementSize::Word, value, [count, 1])
}

pub(crate) fn cuMemsetD2D8_v2(
    call: Call,
    to: u64,
    pitch: usize,
    value: u8,
    width: usize,
    height: usize,
) -> Result {
    fill(call, 0, to, pitch as u64, ElementSize::Byte, value.into(), [width, height])
}

pub(crate) fn cuMemsetD2D16_v2(
    call: Call,
    to: u64,
    pitch: usize,
    value: u16,
    width: usize,
    height: usize,
) -> Result {
    fill(call, 0, to, pitch as u64, ElementSize::Half, value.into(), [width, height])
}

pub(crate) fn cuMemsetD2D32_v2(
    call: Call,
    to: u64,
    pitch: usize,
    value: c_uint,
    width: usize,
    height: usize,
) -> Result {
    fill(call, 0, to, pitch as u64, ElementSize::Word, value, [width, height])
}

pub(crate) fn cuMemsetD2D8Async(
    call: Call,
    to: u64,
    pitch: usize,
    value: u8,
    width: usize,
    height: usize,
    stream: u64,
) -> Result {
    fill(call, stream, to, pitch as u64, ElementSize::Byte, value.into(), [width, height])
}

pub(crate) fn cuMemsetD2D16Async(
    call: Call,
    to: u64,
    pitch: usize,
    value: u16,
    width: usize,
    height: usize,
    stream: u64,
) -> Result {
    fill(call, stream, to, pitch as u64, ElementSize::Half, value.into(), [width, height])
}

pub(crate) fn cuMemsetD2D32Async(
    call: Call,
    to: u64,
    pitch: usize,
    value: c_uint,
    width: usize,
    height: usize,
    stream: u64,
) -> Result {
    fill(call, stream, to, pitch as u64, ElementSize::Word, value, [width, height])
}
