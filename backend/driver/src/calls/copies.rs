//! Copies, fills and written values, all asynchronous.

use super::{Result, input, pointer, size};
use crate::{
    DeviceRange, Driver, Handle, HostRange, Rows,
    abi::{BarrierOperation, BoxCopy, Copy2D, CopySide, CopySide3D},
    code,
};
use core::ffi::c_void;

/// The pitch of a side of a copy: none for one row, which may be longer than the greatest pitch.
fn pitch(pitch: u64, rows: Rows) -> Result<usize> {
    if rows.height == 1 { Ok(0) } else { size(pitch) }
}

impl Driver {
    /// `cuMemcpyHtoDAsync_v2`.
    pub fn memcpy_htod(&self, to: DeviceRange, from: HostRange, stream: Handle) -> Result<()> {
        let (source, bytes) = (pointer::<c_void>(from.address())?, size(to.bytes().min(from.bytes()))?);
        call!(self.cuMemcpyHtoDAsync_v2(to.address(), source.cast_const(), bytes, stream))
    }

    /// `cuMemcpyDtoHAsync_v2`.
    pub fn memcpy_dtoh(&self, to: HostRange, from: DeviceRange, stream: Handle) -> Result<()> {
        let (target, bytes) = (pointer::<c_void>(to.address())?, size(to.bytes().min(from.bytes()))?);
        call!(self.cuMemcpyDtoHAsync_v2(target, from.address(), bytes, stream))
    }

    /// `cuMemcpyDtoDAsync_v2`.
    pub fn memcpy_dtod(&self, to: DeviceRange, from: DeviceRange, stream: Handle) -> Result<()> {
        let bytes = size(to.bytes().min(from.bytes()))?;
        call!(self.cuMemcpyDtoDAsync_v2(to.address(), from.address(), bytes, stream))
    }

    /// `cuMemcpyPeerAsync`: copies between contexts of different devices, which need not reach each other's memory.
    pub fn memcpy_peer(
        &self,
        (to, to_context): (DeviceRange, Handle),
        (from, from_context): (DeviceRange, Handle),
        stream: Handle,
    ) -> Result<()> {
        let bytes = size(to.bytes().min(from.bytes()))?;
        call!(self.cuMemcpyPeerAsync(to.address(), to_context, from.address(), from_context, bytes, stream))
    }

    /// `cuMemcpy2DAsync_v2`.
    pub fn memcpy_2d_htod(
        &self,
        to: (DeviceRange, u64),
        from: (HostRange, u64),
        rows: Rows,
        stream: Handle,
    ) -> Result<()> {
        let (to, from) = (
            CopySide::device(to.0.address(), pitch(to.1, rows)?),
            CopySide::host(from.0.address(), pitch(from.1, rows)?),
        );
        self.memcpy_2d(to, from, rows, stream)
    }

    /// `cuMemcpy2DAsync_v2`.
    pub fn memcpy_2d_dtoh(
        &self,
        to: (HostRange, u64),
        from: (DeviceRange, u64),
        rows: Rows,
        stream: Handle,
    ) -> Result<()> {
        let (to, from) = (
            CopySide::host(to.0.address(), pitch(to.1, rows)?),
            CopySide::device(from.0.address(), pitch(from.1, rows)?),
        );
        self.memcpy_2d(to, from, rows, stream)
    }

    /// `cuMemcpy2DAsync_v2`.
    pub fn memcpy_2d_dtod(
        &self,
        to: (DeviceRange, u64),
        from: (DeviceRange, u64),
        rows: Rows,
        stream: Handle,
    ) -> Result<()> {
        let (to, from) = (
            CopySide::device(to.0.address(), pitch(to.1, rows)?),
            CopySide::device(from.0.address(), pitch(from.1, rows)?),
        );
        self.memcpy_2d(to, from, rows, stream)
    }

    /// `cuMemcpy3DPeerAsync`: as [`Driver::memcpy_peer`], for rows.
    pub fn memcpy_2d_peer(
        &self,
        to: (DeviceRange, u64, Handle),
        from: (DeviceRange, u64, Handle),
        rows: Rows,
        stream: Handle,
    ) -> Result<()> {
        let height = size(rows.height)?;
        let side = |(range, step, context): (DeviceRange, u64, Handle)| -> Result<CopySide3D> {
            Ok(CopySide3D::device(range.address(), pitch(step, rows)?, height).of_context(context))
        };
        let copy = BoxCopy { from: side(from)?, to: side(to)?, width: size(rows.width)?, height, depth: 1 };
        call!(self.cuMemcpy3DPeerAsync(input(&copy), stream))
    }

    fn memcpy_2d(&self, to: CopySide, from: CopySide, rows: Rows, stream: Handle) -> Result<()> {
        let copy = Copy2D { from, to, width: size(rows.width)?, height: size(rows.height)? };
        call!(self.cuMemcpy2DAsync_v2(input(&copy), stream))
    }

    /// `cuMemsetD8Async` and its relatives: fills rows of `width` elements of `element` bytes.
    #[expect(clippy::cast_possible_truncation, reason = "the low bytes of the value are the element")]
    pub fn memset(
        &self,
        to: DeviceRange,
        element: u32,
        value: u32,
        rows: Rows,
        stream: Handle,
    ) -> Result<()> {
        let (at, pitch) = (to.address(), size(rows.pitch)?);
        let (width, height) = (size(rows.width)?, size(rows.height)?);
        match (element, height) {
            (1, 1) => call!(self.cuMemsetD8Async(at, value as u8, width, stream)),
            (2, 1) => call!(self.cuMemsetD16Async(at, value as u16, width, stream)),
            (4, 1) => call!(self.cuMemsetD32Async(at, value, width, stream)),
            (1, _) => call!(self.cuMemsetD2D8Async(at, pitch, value as u8, width, height, stream)),
            (2, _) => call!(self.cuMemsetD2D16Async(at, pitch, value as u16, width, height, stream)),
            (4, _) => call!(self.cuMemsetD2D32Async(at, pitch, value, width, height, stream)),
            _ => Err(code::INVALID_VALUE),
        }
    }

    /// `cuStreamWriteValue32` or `cuStreamWriteValue64`: writes a value as long as `to`, of 4 or 8 bytes.
    #[expect(clippy::cast_possible_truncation, reason = "a value of 4 bytes is the low half")]
    pub fn write_value(&self, to: DeviceRange, value: u64, stream: Handle) -> Result<()> {
        match to.bytes() {
            4 => call!(self.cuStreamWriteValue32_v2(stream, to.address(), value as u32, 0)),
            8 => call!(self.cuStreamWriteValue64_v2(stream, to.address(), value, 0)),
            _ => Err(code::INVALID_VALUE),
        }
    }
    /// `cuStreamWaitValue32` or `cuStreamWaitValue64`: holds the stream until a comparison (`CUstreamWaitValue_flags`) of the value at
    /// `at`, of 4 or 8 bytes, is true.
    #[expect(clippy::cast_possible_truncation, reason = "a value of 4 bytes is the low half")]
    pub fn wait_value(&self, at: DeviceRange, value: u64, comparison: u32, stream: Handle) -> Result<()> {
        match at.bytes() {
            4 => call!(self.cuStreamWaitValue32_v2(stream, at.address(), value as u32, comparison)),
            8 => call!(self.cuStreamWaitValue64_v2(stream, at.address(), value, comparison)),
            _ => Err(code::INVALID_VALUE),
        }
    }

    /// `cuStreamBatchMemOp_v2` of one memory barrier.
    pub fn stream_barrier(&self, kind: u32, stream: Handle) -> Result<()> {
        let operation = BarrierOperation::new(kind);
        call!(self.cuStreamBatchMemOp_v2(stream, 1, input(&operation), 0))
    }
}
