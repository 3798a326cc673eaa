//! The entry points for copies and fills of linear memory.

use crate::attributes::MAX_PITCH;
use crate::context::CONTEXTS;
use crate::copy::{self, CopyExtent, Pattern, Side, StatedMemory, When};
use crate::error::{Error, Result};
use crate::ffi::In;
use crate::stream::{Implicit, target};

/// `CUDA_MEMCPY2D`: the source, then the destination.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(super) struct Copy2D {
    from: Side2D,
    to: Side2D,
    width: u64,
    height: u64,
}

#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct Side2D {
    x: u64,
    y: u64,
    kind: u32,
    host: u64,
    device: u64,
    array: u64,
    pitch: u64,
}

/// `CUDA_MEMCPY3D`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(super) struct Copy3D {
    from: Side3D,
    to: Side3D,
    width: u64,
    height: u64,
    depth: u64,
}

#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct Side3D {
    x: u64,
    y: u64,
    z: u64,
    level: u64,
    kind: u32,
    host: u64,
    device: u64,
    array: u64,
    /// Reserved in `CUDA_MEMCPY3D`; the context in `CUDA_MEMCPY3D_PEER`.
    context: u64,
    pitch: u64,
    height: u64,
}

const _: () = assert!(size_of::<Copy2D>() == size_of::<sluice_cuda_abi::sys::CUDA_MEMCPY2D>());
const _: () = assert!(size_of::<Copy3D>() == size_of::<sluice_cuda_abi::sys::CUDA_MEMCPY3D>());

/// The address and kind of memory that a `CUmemorytype` selects.
fn place(kind: u32, host: u64, device: u64) -> Result<(u64, StatedMemory)> {
    match kind {
        1 => Ok((host, StatedMemory::Host)),
        2 => Ok((device, StatedMemory::Device)),
        3 => Err(Error::NOT_SUPPORTED), // arrays
        4 => Ok((device, StatedMemory::Either)),
        _ => Err(Error::INVALID_VALUE),
    }
}

impl Side2D {
    fn side(&self, width: u64) -> Result<Side> {
        let (base, place) = place(self.kind, self.host, self.device)?;
        let row_end = self.x.checked_add(width).ok_or(Error::INVALID_VALUE)?;
        let pitch = if self.pitch == 0 { row_end } else { self.pitch };
        if pitch < row_end || pitch > u64::from(MAX_PITCH) {
            return Err(Error::INVALID_VALUE);
        }
        let start = self.y.checked_mul(pitch).and_then(|rows| base.checked_add(rows)?.checked_add(self.x));
        Ok(Side { start: start.ok_or(Error::INVALID_VALUE)?, pitch, slice: 0, place })
    }
}

impl Side3D {
    fn side(&self, extent: CopyExtent) -> Result<Side> {
        if self.level != 0 {
            return Err(Error::INVALID_VALUE);
        }
        let Side3D { x, y, kind, host, device, array, pitch, .. } = *self;
        let flat = Side2D { x, y, kind, host, device, array, pitch }.side(extent.width)?;
        let rows = if self.height == 0 { extent.height } else { self.height };
        if self.height != 0 && y.checked_add(extent.height).is_none_or(|end| end > rows) {
            return Err(Error::INVALID_VALUE);
        }
        let slice = flat.pitch.checked_mul(rows).ok_or(Error::INVALID_VALUE)?;
        let start = self.z.checked_mul(slice).and_then(|slices| flat.start.checked_add(slices));
        Ok(Side { start: start.ok_or(Error::INVALID_VALUE)?, slice, ..flat })
    }
}

fn copy_flat(implicit: Implicit, stream: u64, to: Side, from: Side, bytes: u64, when: When) -> Result {
    let target = target(stream, implicit)?;
    copy::copy(&target, to, from, CopyExtent { width: bytes, height: 1, depth: 1 }, when)
}

fn copy_2d(implicit: Implicit, stream: u64, request: In<Copy2D>, when: When) -> Result {
    let request = request.get()?;
    let target = target(stream, implicit)?;
    let extent = CopyExtent { width: request.width, height: request.height, depth: 1 };
    if extent.width == 0 || extent.height == 0 {
        return Ok(());
    }
    copy::copy(&target, request.to.side(extent.width)?, request.from.side(extent.width)?, extent, when)
}

fn copy_3d(implicit: Implicit, stream: u64, request: In<Copy3D>, when: When) -> Result {
    let request = request.get()?;
    if request.from.context != 0 || request.to.context != 0 {
        return Err(Error::INVALID_VALUE);
    }
    copy_box(implicit, stream, request, when)
}

/// As [`copy_peer`].
fn copy_3d_peer(implicit: Implicit, stream: u64, request: In<Copy3D>, when: When) -> Result {
    let request = request.get()?;
    CONTEXTS.get(request.from.context)?;
    CONTEXTS.get(request.to.context)?;
    copy_box(implicit, stream, request, when)
}

fn copy_box(implicit: Implicit, stream: u64, request: Copy3D, when: When) -> Result {
    let target = target(stream, implicit)?;
    let extent = CopyExtent { width: request.width, height: request.height, depth: request.depth };
    if extent.width == 0 || extent.height == 0 || extent.depth == 0 {
        return Ok(());
    }
    copy::copy(&target, request.to.side(extent)?, request.from.side(extent)?, extent, when)
}

/// A copy between contexts; the addresses determine the devices.
fn copy_peer(implicit: Implicit, stream: u64, to: (u64, u64), from: (u64, u64), bytes: u64) -> Result {
    CONTEXTS.get(to.1)?;
    CONTEXTS.get(from.1)?;
    copy_flat(implicit, stream, device(to.0), device(from.0), bytes, When::Queued)
}

struct Fill {
    to: u64,
    pitch: u64,
    width: u64,
    height: u64,
}

fn fill(implicit: Implicit, stream: u64, fill: &Fill, pattern: Pattern, when: When) -> Result {
    let target = target(stream, implicit)?;
    let to = Side { start: fill.to, pitch: fill.pitch, slice: 0, place: StatedMemory::Device };
    copy::fill(&target, to, pattern, CopyExtent { width: fill.width, height: fill.height, depth: 1 }, when)
}

fn row(to: u64, count: u64) -> Fill {
    Fill { to, pitch: 0, width: count, height: 1 }
}

fn pattern(value: impl Into<u64>, bytes: u64) -> Pattern {
    Pattern { value: value.into(), bytes }
}

fn write_value(implicit: Implicit, stream: u64, to: u64, pattern: Pattern, flags: u32) -> Result {
    // The functions of version 2 support no flag.
    if flags != 0 {
        return Err(Error::INVALID_VALUE);
    }
    fill(implicit, stream, &row(to, 1), pattern, When::Queued)
}

fn host(start: u64) -> Side {
    Side::flat(start, StatedMemory::Host)
}

fn device(start: u64) -> Side {
    Side::flat(start, StatedMemory::Device)
}

fn either(start: u64) -> Side {
    Side::flat(start, StatedMemory::Either)
}

twins! {
    fn cuMemcpyHtoD_v2, cuMemcpyHtoD_v2_ptds(implicit; to: u64, from: u64, bytes: u64) {
        copy_flat(implicit, 0, device(to), host(from), bytes, When::Returned)
    }

    fn cuMemcpyDtoH_v2, cuMemcpyDtoH_v2_ptds(implicit; to: u64, from: u64, bytes: u64) {
        copy_flat(implicit, 0, host(to), device(from), bytes, When::Returned)
    }

    fn cuMemcpyDtoD_v2, cuMemcpyDtoD_v2_ptds(implicit; to: u64, from: u64, bytes: u64) {
        copy_flat(implicit, 0, device(to), device(from), bytes, When::Queued)
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
        copy_peer(implicit, 0, (to, to_context), (from, from_context), bytes)
    }

    fn cuMemcpyPeerAsync, cuMemcpyPeerAsync_ptsz(
        implicit; to: u64, to_context: u64, from: u64, from_context: u64, bytes: u64, stream: u64,
    ) {
        copy_peer(implicit, stream, (to, to_context), (from, from_context), bytes)
    }

    fn cuMemcpy2D_v2, cuMemcpy2D_v2_ptds(implicit; request: In<Copy2D>) {
        copy_2d(implicit, 0, request, When::Returned)
    }

    fn cuMemcpy2DUnaligned_v2, cuMemcpy2DUnaligned_v2_ptds(implicit; request: In<Copy2D>) {
        copy_2d(implicit, 0, request, When::Returned)
    }

    fn cuMemcpy2DAsync_v2, cuMemcpy2DAsync_v2_ptsz(implicit; request: In<Copy2D>, stream: u64) {
        copy_2d(implicit, stream, request, When::Queued)
    }

    fn cuMemcpy3D_v2, cuMemcpy3D_v2_ptds(implicit; request: In<Copy3D>) {
        copy_3d(implicit, 0, request, When::Returned)
    }

    fn cuMemcpy3DAsync_v2, cuMemcpy3DAsync_v2_ptsz(implicit; request: In<Copy3D>, stream: u64) {
        copy_3d(implicit, stream, request, When::Queued)
    }

    fn cuMemcpy3DPeer, cuMemcpy3DPeer_ptds(implicit; request: In<Copy3D>) {
        copy_3d_peer(implicit, 0, request, When::Returned)
    }

    fn cuMemcpy3DPeerAsync, cuMemcpy3DPeerAsync_ptsz(implicit; request: In<Copy3D>, stream: u64) {
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

    fn cuStreamWriteValue32_v2, cuStreamWriteValue32_v2_ptsz(implicit; stream: u64, to: u64, value: u32, flags: u32) {
        write_value(implicit, stream, to, pattern(value, 4), flags)
    }

    fn cuStreamWriteValue64_v2, cuStreamWriteValue64_v2_ptsz(implicit; stream: u64, to: u64, value: u64, flags: u32) {
        write_value(implicit, stream, to, pattern(value, 8), flags)
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
