//! The entry points for copies and fills.

use sluice_cuda_graphs::layout::{CopyParameters, RectangleParameters};
use sluice_cuda_graphs::{self as graphs, Copy3D, CopySide, memory_type};

use crate::context::CONTEXTS;
use crate::copy::{self, CopyExtent, Pattern, Side, StatedMemory, When};
use crate::error::{Error, Result};
use crate::ffi::In;
use crate::graphs::GRAPHS;
use crate::images;
use crate::stream::{Implicit, StreamTarget, target};

/// Makes a copy, or adds its node to a capture.
fn copy(implicit: Implicit, stream: u64, request: Copy3D, when: When) -> Result {
    copy_in(&target(stream, implicit)?, request, when)
}

pub(super) fn copy_in(target: &StreamTarget, request: Copy3D, when: When) -> Result {
    let Copy3D { ref to, ref from, width, height, depth } = request;
    let extent = CopyExtent { width, height, depth };
    if when != When::Queued {
        GRAPHS.synchronous(target.facts())?;
    }
    if extent.is_empty() {
        return Ok(());
    }
    let (to, from) = (images::side(to, extent)?, images::side(from, extent)?);
    let describe = || Ok(graphs::Work::Copy { copy: request, context: target.core.handle });
    if GRAPHS.capture(target.facts(), describe)? {
        return Ok(());
    }
    copy::copy(target, to, from, extent, when)
}

pub(super) fn copy_flat(
    implicit: Implicit,
    stream: u64,
    to: CopySide,
    from: CopySide,
    bytes: u64,
    when: When,
) -> Result {
    copy(implicit, stream, Copy3D { from, to, width: bytes, height: 1, depth: 1 }, when)
}

fn copy_2d(implicit: Implicit, stream: u64, request: In<RectangleParameters>, when: When) -> Result {
    copy(implicit, stream, request.get()?.into(), when)
}

fn copy_3d(implicit: Implicit, stream: u64, request: In<CopyParameters>, when: When) -> Result {
    let request = request.get()?;
    if request.contexts() != [0; 2] {
        return Err(Error::INVALID_VALUE);
    }
    copy(implicit, stream, request.into(), when)
}

/// Checks the contexts of a copy between contexts; null is the current one. The addresses determine the devices.
fn exist(contexts: [u64; 2]) -> Result {
    let mut named = contexts.into_iter().filter(|context| *context != 0);
    named.try_for_each(|context| CONTEXTS.get(context).map(drop))
}

fn copy_3d_peer(implicit: Implicit, stream: u64, request: In<CopyParameters>, when: When) -> Result {
    let request = request.get()?;
    exist(request.contexts())?;
    copy(implicit, stream, request.into(), when)
}

fn copy_peer(
    implicit: Implicit,
    stream: u64,
    to: (u64, u64),
    from: (u64, u64),
    bytes: u64,
    when: When,
) -> Result {
    exist([to.1, from.1])?;
    copy_flat(implicit, stream, device(to.0), device(from.0), bytes, when)
}

struct Fill {
    to: u64,
    pitch: u64,
    width: u64,
    height: u64,
}

/// Fills memory, or adds the node to a capture.
fn fill(implicit: Implicit, stream: u64, fill: &Fill, pattern: Pattern, when: When) -> Result {
    let target = target(stream, implicit)?;
    if when != When::Queued {
        GRAPHS.synchronous(target.facts())?;
    }
    let &Fill { to, pitch, width, height } = fill;
    if width == 0 || height == 0 {
        return Ok(());
    }
    let describe = || {
        let value = u32::try_from(pattern.value).map_err(|_| Error::INVALID_VALUE)?;
        let element = u32::try_from(pattern.bytes).map_err(|_| Error::INVALID_VALUE)?;
        let fill = graphs::FillWork { to, pitch, value, element, width, height };
        Ok(graphs::Work::Fill { fill, context: target.core.handle })
    };
    if GRAPHS.capture(target.facts(), describe)? {
        return Ok(());
    }
    let to = Side { start: to, pitch, slice: 0, place: StatedMemory::Device };
    copy::fill(&target, to, pattern, CopyExtent { width, height, depth: 1 }, when)
}

fn row(to: u64, count: u64) -> Fill {
    Fill { to, pitch: 0, width: count, height: 1 }
}

fn pattern(value: impl Into<u64>, bytes: u64) -> Pattern {
    Pattern { value: value.into(), bytes }
}

pub(super) fn host(start: u64) -> CopySide {
    CopySide::flat(memory_type::HOST, start)
}

pub(super) fn device(start: u64) -> CopySide {
    CopySide::flat(memory_type::DEVICE, start)
}

pub(super) fn either(start: u64) -> CopySide {
    CopySide::flat(memory_type::UNIFIED, start)
}

twins! {
    fn cuMemcpyHtoD_v2, cuMemcpyHtoD_v2_ptds(implicit; to: u64, from: u64, bytes: u64) {
        copy_flat(implicit, 0, device(to), host(from), bytes, When::Returned)
    }

    fn cuMemcpyDtoH_v2, cuMemcpyDtoH_v2_ptds(implicit; to: u64, from: u64, bytes: u64) {
        copy_flat(implicit, 0, host(to), device(from), bytes, When::Returned)
    }

    fn cuMemcpyDtoD_v2, cuMemcpyDtoD_v2_ptds(implicit; to: u64, from: u64, bytes: u64) {
        copy_flat(implicit, 0, device(to), device(from), bytes, When::Started)
    }

    fn cuMemcpy, cuMemcpy_ptds(implicit; to: u64, from: u64, bytes: u64) {
        copy_flat(implicit, 0, either(to), either(from), bytes, When::Returned)
    }

    fn cuMemcpyHtoDAsync_v2, cuMemcpyHtoDAsync_v2_ptsz(implicit; to: u64, from: u64, bytes: u64, stream: u64) {
        copy_flat(implicit, stream, device(to), host(from), bytes, When::Queued)
    }

    fn cuMemcpyDtoHAsync_v2, cuMemcpyDtoHAsync_v2_ptsz(implicit; to: u64, from: u64, bytes: u64, stream: u64) {
        copy_flat(implicit, stream, host(to), device(from), bytes, When::Queued)
    }

    fn cuMemcpyDtoDAsync_v2, cuMemcpyDtoDAsync_v2_ptsz(implicit; to: u64, from: u64, bytes: u64, stream: u64) {
        copy_flat(implicit, stream, device(to), device(from), bytes, When::Queued)
    }

    fn cuMemcpyAsync, cuMemcpyAsync_ptsz(implicit; to: u64, from: u64, bytes: u64, stream: u64) {
        copy_flat(implicit, stream, either(to), either(from), bytes, When::Queued)
    }

    fn cuMemcpyPeer, cuMemcpyPeer_ptds(implicit; to: u64, to_context: u64, from: u64, from_context: u64, bytes: u64) {
        copy_peer(implicit, 0, (to, to_context), (from, from_context), bytes, When::Started)
    }

    fn cuMemcpyPeerAsync, cuMemcpyPeerAsync_ptsz(
        implicit; to: u64, to_context: u64, from: u64, from_context: u64, bytes: u64, stream: u64,
    ) {
        copy_peer(implicit, stream, (to, to_context), (from, from_context), bytes, When::Queued)
    }

    fn cuMemcpy2D_v2, cuMemcpy2D_v2_ptds(implicit; request: In<RectangleParameters>) {
        copy_2d(implicit, 0, request, When::Returned)
    }

    fn cuMemcpy2DUnaligned_v2, cuMemcpy2DUnaligned_v2_ptds(implicit; request: In<RectangleParameters>) {
        copy_2d(implicit, 0, request, When::Returned)
    }

    fn cuMemcpy2DAsync_v2, cuMemcpy2DAsync_v2_ptsz(implicit; request: In<RectangleParameters>, stream: u64) {
        copy_2d(implicit, stream, request, When::Queued)
    }

    fn cuMemcpy3D_v2, cuMemcpy3D_v2_ptds(implicit; request: In<CopyParameters>) {
        copy_3d(implicit, 0, request, When::Returned)
    }

    fn cuMemcpy3DAsync_v2, cuMemcpy3DAsync_v2_ptsz(implicit; request: In<CopyParameters>, stream: u64) {
        copy_3d(implicit, stream, request, When::Queued)
    }

    fn cuMemcpy3DPeer, cuMemcpy3DPeer_ptds(implicit; request: In<CopyParameters>) {
        copy_3d_peer(implicit, 0, request, When::Returned)
    }

    fn cuMemcpy3DPeerAsync, cuMemcpy3DPeerAsync_ptsz(implicit; request: In<CopyParameters>, stream: u64) {
        copy_3d_peer(implicit, stream, request, When::Queued)
    }

    fn cuMemsetD8_v2, cuMemsetD8_v2_ptds(implicit; to: u64, value: u8, count: u64) {
        fill(implicit, 0, &row(to, count), pattern(value, 1), When::Returned)
    }

    fn cuMemsetD16_v2, cuMemsetD16_v2_ptds(implicit; to: u64, value: u16, count: u64) {
        fill(implicit, 0, &row(to, count), pattern(value, 2), When::Returned)
    }

    fn cuMemsetD32_v2, cuMemsetD32_v2_ptds(implicit; to: u64, value: u32, count: u64) {
        fill(implicit, 0, &row(to, count), pattern(value, 4), When::Returned)
    }

    fn cuMemsetD2D8_v2, cuMemsetD2D8_v2_ptds(implicit; to: u64, pitch: u64, value: u8, width: u64, height: u64) {
        fill(implicit, 0, &Fill { to, pitch, width, height }, pattern(value, 1), When::Returned)
    }

    fn cuMemsetD2D16_v2, cuMemsetD2D16_v2_ptds(implicit; to: u64, pitch: u64, value: u16, width: u64, height: u64) {
        fill(implicit, 0, &Fill { to, pitch, width, height }, pattern(value, 2), When::Returned)
    }

    fn cuMemsetD2D32_v2, cuMemsetD2D32_v2_ptds(implicit; to: u64, pitch: u64, value: u32, width: u64, height: u64) {
        fill(implicit, 0, &Fill { to, pitch, width, height }, pattern(value, 4), When::Returned)
    }

    fn cuMemsetD8Async, cuMemsetD8Async_ptsz(implicit; to: u64, value: u8, count: u64, stream: u64) {
        fill(implicit, stream, &row(to, count), pattern(value, 1), When::Queued)
    }

    fn cuMemsetD16Async, cuMemsetD16Async_ptsz(implicit; to: u64, value: u16, count: u64, stream: u64) {
        fill(implicit, stream, &row(to, count), pattern(value, 2), When::Queued)
    }

    fn cuMemsetD32Async, cuMemsetD32Async_ptsz(implicit; to: u64, value: u32, count: u64, stream: u64) {
        fill(implicit, stream, &row(to, count), pattern(value, 4), When::Queued)
    }

    fn cuMemsetD2D8Async, cuMemsetD2D8Async_ptsz(
        implicit; to: u64, pitch: u64, value: u8, width: u64, height: u64, stream: u64,
    ) {
        fill(implicit, stream, &Fill { to, pitch, width, height }, pattern(value, 1), When::Queued)
    }

    fn cuMemsetD2D16Async, cuMemsetD2D16Async_ptsz(
        implicit; to: u64, pitch: u64, value: u16, width: u64, height: u64, stream: u64,
    ) {
        fill(implicit, stream, &Fill { to, pitch, width, height }, pattern(value, 2), When::Queued)
    }

    fn cuMemsetD2D32Async, cuMemsetD2D32Async_ptsz(
        implicit; to: u64, pitch: u64, value: u32, width: u64, height: u64, stream: u64,
    ) {
        fill(implicit, stream, &Fill { to, pitch, width, height }, pattern(value, 4), When::Queued)
    }
}
