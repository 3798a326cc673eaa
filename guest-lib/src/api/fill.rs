//! The memset functions of the C API. Device memory is filled by a post, pinned memory here when it is the stream's turn.

use super::copy::{Strided, length, span};
use crate::{
    arguments::Call,
    error::{Error, Result},
    host_memory,
    process::{self, Process},
    state::streams::Stream,
};
use core::ffi::c_uint;
use sluice_protocol::{calls::wire, field::DeviceAddress};

/// Fills rows of elements.
fn fill(
    call: Call,
    stream: u64,
    to: u64,
    pitch: u64,
    element: u32,
    value: u32,
    [width, height]: [usize; 2],
) -> Result {
    let process = process::get()?;
    process.session.healthy()?;
    let stream = process.stream(call, stream)?;
    if width == 0 || height == 0 {
        return Ok(());
    }
    let (width, height) = (width as u64, height as u64);
    let row = width.checked_mul(u64::from(element)).ok_or(Error::INVALID_VALUE)?;
    let side = Strided { start: to, pitch: if height == 1 { row } else { pitch }, layer: 0 };
    if !to.is_multiple_of(u64::from(element))
        || !side.pitch.is_multiple_of(u64::from(element))
        || side.pitch < row
    {
        return Err(Error::INVALID_VALUE);
    }
    if process.arena.is_pinned(to, span(side, row, height)?) {
        return fill_host(process, stream, side, element, value, width, height);
    }
    process.device_map.check(to, span(side, row, height)?)?;
    process
        .session
        .post(stream.context, wire::fill::CALL, Some(stream.target()), |writer| {
            wire::fill::put(writer, DeviceAddress(to), side.pitch, element, value, width, height)
        })
        .map(drop)
}

/// Fills pinned memory here, in the order of the stream.
fn fill_host(
    process: &Process,
    stream: Stream<'_>,
    to: Strided,
    element: u32,
    value: u32,
    width: u64,
    height: u64,
) -> Result {
    process.wait_turn(stream)?;
    let row: Vec<u8> = value.to_ne_bytes()[..element as usize].repeat(length(width)?);
    let from = row.as_ptr().expose_provenance() as u64;
    for at in 0..height {
        host_memory::copy(to.start + at * to.pitch, from, row.len());
    }
    Ok(())
}

pub(crate) fn cuMemsetD8_v2(call: Call, to: u64, value: u8, count: usize) -> Result {
    fill(call, 0, to, 0, 1, value.into(), [count, 1])
}

pub(crate) fn cuMemsetD16_v2(call: Call, to: u64, value: u16, count: usize) -> Result {
    fill(call, 0, to, 0, 2, value.into(), [count, 1])
}

pub(crate) fn cuMemsetD32_v2(call: Call, to: u64, value: c_uint, count: usize) -> Result {
    fill(call, 0, to, 0, 4, value, [count, 1])
}

pub(crate) fn cuMemsetD8Async(call: Call, to: u64, value: u8, count: usize, stream: u64) -> Result {
    fill(call, stream, to, 0, 1, value.into(), [count, 1])
}

pub(crate) fn cuMemsetD16Async(call: Call, to: u64, value: u16, count: usize, stream: u64) -> Result {
    fill(call, stream, to, 0, 2, value.into(), [count, 1])
}

pub(crate) fn cuMemsetD32Async(call: Call, to: u64, value: c_uint, count: usize, stream: u64) -> Result {
    fill(call, stream, to, 0, 4, value, [count, 1])
}

pub(crate) fn cuMemsetD2D8_v2(
    call: Call,
    to: u64,
    pitch: usize,
    value: u8,
    width: usize,
    height: usize,
) -> Result {
    fill(call, 0, to, pitch as u64, 1, value.into(), [width, height])
}

pub(crate) fn cuMemsetD2D16_v2(
    call: Call,
    to: u64,
    pitch: usize,
    value: u16,
    width: usize,
    height: usize,
) -> Result {
    fill(call, 0, to, pitch as u64, 2, value.into(), [width, height])
}

pub(crate) fn cuMemsetD2D32_v2(
    call: Call,
    to: u64,
    pitch: usize,
    value: c_uint,
    width: usize,
    height: usize,
) -> Result {
    fill(call, 0, to, pitch as u64, 4, value, [width, height])
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
    fill(call, stream, to, pitch as u64, 1, value.into(), [width, height])
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
    fill(call, stream, to, pitch as u64, 2, value.into(), [width, height])
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
    fill(call, stream, to, pitch as u64, 4, value, [width, height])
}
