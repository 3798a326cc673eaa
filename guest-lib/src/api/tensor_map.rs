//! Descriptors of tensors. The driver encodes them, because their layout belongs to the device.

use crate::{
    arguments::{Call, In, Out},
    error::{Error, Result},
    process::{self, ProcessState},
};
use core::ffi::{c_uint, c_void};
use sluice_protocol::calls::wire;

/// The process and its current context. The driver takes a descriptor at any place, though the header requires an aligned one.
fn ready() -> Result<(&'static ProcessState, u64)> {
    let process = process::get()?;
    Ok((process, process.current()?.raw))
}

pub(crate) fn cuTensorMapEncodeTiled(
    _: Call,
    descriptor: Out<c_void>,
    format: c_uint,
    rank: c_uint,
    address: Out<c_void>,
    dimensions: In<u64>,
    strides: In<u64>,
    tile: In<c_uint>,
    steps: In<c_uint>,
    interleave: c_uint,
    swizzle: c_uint,
    promotion: c_uint,
    fill: c_uint,
) -> Result {
    let (process, context) = ready()?;
    if rank == 0 {
        return Err(Error::INVALID_VALUE);
    }
    let call = wire::tensor_map_tiled::Args {
        format,
        rank,
        address: address.address(),
        dimensions: dimensions.array(rank)?,
        strides: strides.array(rank - 1)?,
        tile: tile.array(rank)?,
        steps: steps.array(rank)?,
        interleave,
        swizzle,
        promotion,
        fill,
    };
    descriptor.set_bytes(&process.session.sync(context, &call)?.descriptor)
}

pub(crate) fn cuTensorMapEncodeIm2col(
    _: Call,
    descriptor: Out<c_void>,
    format: c_uint,
    rank: c_uint,
    address: Out<c_void>,
    dimensions: In<u64>,
    strides: In<u64>,
    lower: In<c_uint>,
    upper: In<c_uint>,
    channels: c_uint,
    pixels: c_uint,
    steps: In<c_uint>,
    interleave: c_uint,
    swizzle: c_uint,
    promotion: c_uint,
    fill: c_uint,
) -> Result {
    let (process, context) = ready()?;
    // Two dimensions are the channels and the images.
    let pixel_dimensions = rank.checked_sub(2).filter(|rest| *rest > 0).ok_or(Error::INVALID_VALUE)?;
    let call = wire::tensor_map_im2col::Args {
        format,
        rank,
        address: address.address(),
        dimensions: dimensions.array(rank)?,
        strides: strides.array(rank - 1)?,
        lower: lower.array(pixel_dimensions)?,
        upper: upper.array(pixel_dimensions)?,
        channels,
        pixels,
        steps: steps.array(rank)?,
        interleave,
        swizzle,
        promotion,
        fill,
    };
    descriptor.set_bytes(&process.session.sync(context, &call)?.descriptor)
}

pub(crate) fn cuTensorMapEncodeIm2colWide(
    _: Call,
    descriptor: Out<c_void>,
    format: c_uint,
    rank: c_uint,
    address: Out<c_void>,
    dimensions: In<u64>,
    strides: In<u64>,
    lower: c_uint,
    upper: c_uint,
    channels: c_uint,
    pixels: c_uint,
    steps: In<c_uint>,
    interleave: c_uint,
    mode: c_uint,
    swizzle: c_uint,
    promotion: c_uint,
    fill: c_uint,
) -> Result {
    let (process, context) = ready()?;
    if rank < 3 {
        return Err(Error::INVALID_VALUE);
    }
    let call = wire::tensor_map_im2col_wide::Args {
        format,
        rank,
        address: address.address(),
        dimensions: dimensions.array(rank)?,
        strides: strides.array(rank - 1)?,
        lower,
        upper,
        channels,
        pixels,
        steps: steps.array(rank)?,
        interleave,
        mode,
        swizzle,
        promotion,
        fill,
    };
    descriptor.set_bytes(&process.session.sync(context, &call)?.descriptor)
}

pub(crate) fn cuTensorMapReplaceAddress(_: Call, descriptor: Out<c_void>, address: Out<c_void>) -> Result {
    let (process, context) = ready()?;
    let bytes = descriptor.cast::<[u8; 128]>().get()?;
    let call = wire::tensor_map_replace::Args { descriptor: bytes, address: address.address() };
    descriptor.set_bytes(&process.session.sync(context, &call)?.replaced)
}

pub(crate) fn cuTensorMapSetAllocationClass(
    _: Call,
    descriptor: Out<c_void>,
    class: c_uint,
    effective: Out<c_uint>,
) -> Result {
    /// `CU_TENSOR_MAP_ALLOC_CLASS_SMALL`, the answer of a call that fails.
    const SMALL: c_uint = 1;
    effective.set_if_given(SMALL);
    let (process, context) = ready()?;
    let bytes = descriptor.cast::<[u8; 128]>().get()?;
    let answer =
        process.session.sync(context, &wire::tensor_map_set_class::Args { descriptor: bytes, class })?;
    descriptor.set_bytes(&answer.changed)?;
    effective.set_if_given(answer.effective);
    Ok(())
}
