//! Descriptors of tensors. The driver encodes them, because their layout belongs to the device.

use crate::{
    arguments::{Call, In, Out},
    error::{Error, Result},
    process,
};
use core::ffi::{c_uint, c_void};
use sluice_protocol::calls::wire;

/// Alignment of a descriptor in bytes.
const ALIGNMENT: u64 = 64;

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
    let process = process::get()?;
    let context = process.current()?.raw;
    if !descriptor.address().is_multiple_of(ALIGNMENT) || rank == 0 {
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
