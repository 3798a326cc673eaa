//! Launches of the oldest form, whose block and parameters are set by calls before.

use super::launch::launch_packed;
use crate::{
    arguments::{Call, In},
    error::{Error, Result},
    process,
};
use core::ffi::{c_int, c_uint, c_void};
use sluice_cuda_frontend::old_launches::{self, OldLaunches};

static LAUNCHES: OldLaunches = OldLaunches::new();

/// The launches in the making, for a function that exists.
fn of(function: u64) -> Result<&'static OldLaunches> {
    process::get()?.modules.functions.resolve(function)?;
    Ok(&LAUNCHES)
}

pub(crate) fn cuFuncSetBlockShape(_: Call, function: u64, x: c_int, y: c_int, z: c_int) -> Result {
    of(function)?.set_block(function, [x, y, z], Error::INVALID_VALUE)
}

pub(crate) fn cuFuncSetSharedSize(_: Call, function: u64, bytes: c_uint) -> Result {
    of(function)?.set_shared(function, bytes);
    Ok(())
}

pub(crate) fn cuParamSetSize(_: Call, function: u64, bytes: c_uint) -> Result {
    of(function)?.set_size(function, bytes, Error::INVALID_VALUE)
}

pub(crate) fn cuParamSeti(_: Call, function: u64, offset: c_int, value: c_uint) -> Result {
    of(function)?.set_parameter(function, offset, &value.to_ne_bytes(), Error::INVALID_VALUE)
}

pub(crate) fn cuParamSetf(_: Call, function: u64, offset: c_int, value: f32) -> Result {
    of(function)?.set_parameter(function, offset, &value.to_ne_bytes(), Error::INVALID_VALUE)
}

pub(crate) fn cuParamSetv(_: Call, function: u64, offset: c_int, value: In<c_void>, bytes: c_uint) -> Result {
    let launches = of(function)?;
    let value = value.cast::<u8>().bytes(bytes as usize)?;
    launches.set_parameter(function, offset, &value, Error::INVALID_VALUE)
}

fn launch(call: Call, function: u64, grid: [u32; 3], stream: u64) -> Result {
    let bytes = process::get()?.modules.functions.resolve(function)?.parameter_bytes();
    let made = LAUNCHES.get(function, bytes);
    launch_packed(call, function, (grid, made.block, made.shared), &made.parameters, stream)
}

pub(crate) fn cuLaunch(call: Call, function: u64) -> Result {
    launch(call, function, [1; 3], 0)
}

pub(crate) fn cuLaunchGrid(call: Call, function: u64, width: c_int, height: c_int) -> Result {
    cuLaunchGridAsync(call, function, width, height, 0)
}

pub(crate) fn cuLaunchGridAsync(
    call: Call,
    function: u64,
    width: c_int,
    height: c_int,
    stream: u64,
) -> Result {
    launch(call, function, old_launches::grid(width, height, Error::INVALID_VALUE)?, stream)
}
