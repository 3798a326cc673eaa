//! The memset functions of the C API. Device memory is written by a post, pinned memory here when it is the stream's turn.

use super::staging::length;
use crate::{
    arguments::Call,
    checks::{FillShape, MemorySide, Strided},
    error::Result,
    graphs, host_memory,
    process::{self, ProcessState},
    state::streams::StreamRef,
    turns,
};
use core::ffi::c_uint;
use sluice_cuda_graphs::{FillWork, Work};
use sluice_protocol::{
    calls::wire,
    field::{DeviceAddress, ElementSize},
};

/// Fills rows of elements.
fn fill(
    call: Call,
    when: When,
    (to, pitch): (u64, u64),
    element: ElementSize,
    value: u32,
    [width, height]: [usize; 2],
) -> Result {
    let process = process::get()?;
    process.session.healthy()?;
    let stream = process.stream_or_default(call, when.stream())?;
    if when == When::Now {
        graphs::synchronous(process, stream)?;
    }
    if width == 0 || height == 0 {
        return Ok(());
    }
    let (width, height) = (width as u64, height as u64);
    let (rows, memory) = FillShape { to, pitch, element, width, height }.side(process, stream.context)?;
    let work = || {
        let fill = FillWork { to, pitch: rows.pitch, value, element: element as u32, width, height };
        Ok(Work::Fill { fill, context: stream.context })
    };
    if when != When::Now && graphs::captured(process, stream, work)? {
        return Ok(());
    }
    if memory == MemorySide::Pinned {
        return fill_host(process, stream, rows, element, value, width, height);
    }
    let turn = turns::of_device(process)?;
    process.session.post(
        stream.context,
        Some(stream.target()),
        &wire::memset::Args { to: DeviceAddress(to), pitch: rows.pitch, element, value, width, height },
    )?;
    turns::end(process, stream, turn, when == When::Now && process.managed.variables.hold(to))
}

/// The stream of a fill.
#[derive(Clone, Copy, PartialEq, Eq)]
enum When {
    /// The legacy default stream: the function has no parameter for another one.
    Now,
    /// The one with this handle.
    In(u64),
}

impl When {
    const fn stream(self) -> u64 {
        match self {
            When::Now => 0,
            When::In(stream) => stream,
        }
    }
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

pub(crate) fn cuMemsetD8_v2(call: Call, to: u64, value: u8, count: usize) -> Result {
    fill(call, When::Now, (to, 0), ElementSize::Byte, value.into(), [count, 1])
}

pub(crate) fn cuMemsetD16_v2(call: Call, to: u64, value: u16, count: usize) -> Result {
    fill(call, When::Now, (to, 0), ElementSize::Half, value.into(), [count, 1])
}

pub(crate) fn cuMemsetD32_v2(call: Call, to: u64, value: c_uint, count: usize) -> Result {
    fill(call, When::Now, (to, 0), ElementSize::Word, value, [count, 1])
}

pub(crate) fn cuMemsetD8Async(call: Call, to: u64, value: u8, count: usize, stream: u64) -> Result {
    fill(call, When::In(stream), (to, 0), ElementSize::Byte, value.into(), [count, 1])
}

pub(crate) fn cuMemsetD16Async(call: Call, to: u64, value: u16, count: usize, stream: u64) -> Result {
    fill(call, When::In(stream), (to, 0), ElementSize::Half, value.into(), [count, 1])
}

pub(crate) fn cuMemsetD32Async(call: Call, to: u64, value: c_uint, count: usize, stream: u64) -> Result {
    fill(call, When::In(stream), (to, 0), ElementSize::Word, value, [count, 1])
}

pub(crate) fn cuMemsetD2D8_v2(
    call: Call,
    to: u64,
    pitch: usize,
    value: u8,
    width: usize,
    height: usize,
) -> Result {
    fill(call, When::Now, (to, pitch as u64), ElementSize::Byte, value.into(), [width, height])
}

pub(crate) fn cuMemsetD2D16_v2(
    call: Call,
    to: u64,
    pitch: usize,
    value: u16,
    width: usize,
    height: usize,
) -> Result {
    fill(call, When::Now, (to, pitch as u64), ElementSize::Half, value.into(), [width, height])
}

pub(crate) fn cuMemsetD2D32_v2(
    call: Call,
    to: u64,
    pitch: usize,
    value: c_uint,
    width: usize,
    height: usize,
) -> Result {
    fill(call, When::Now, (to, pitch as u64), ElementSize::Word, value, [width, height])
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
    fill(call, When::In(stream), (to, pitch as u64), ElementSize::Byte, value.into(), [width, height])
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
    fill(call, When::In(stream), (to, pitch as u64), ElementSize::Half, value.into(), [width, height])
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
    fill(call, When::In(stream), (to, pitch as u64), ElementSize::Word, value, [width, height])
}
