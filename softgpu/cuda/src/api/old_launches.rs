//! The entry points for launches whose block and parameters are set by calls before.

use sluice_cuda_frontend::launch_parameters;
use sluice_cuda_frontend::old_launches::{self, OldLaunches};

use super::launches::launch as launch_or_capture;
use crate::error::{Error, Result};
use crate::ffi::In;
use crate::launch::LaunchRequest;
use crate::module::described;
use crate::stream::Implicit;

static LAUNCHES: OldLaunches = OldLaunches::new();

/// The launch in the making of a function that exists.
fn of(function: u64) -> Result<&'static OldLaunches> {
    described(function)?;
    Ok(&LAUNCHES)
}

fn set(function: u64, offset: i32, bytes: &[u8]) -> Result {
    of(function)?.set_parameter(function, offset, bytes, Error::INVALID_VALUE)
}

fn run(function: u64, grid: [u32; 3], stream: u64) -> Result {
    let bytes =
        usize::try_from(described(function)?.entry().param_bytes).map_err(|_| Error::INVALID_VALUE)?;
    let made = LAUNCHES.get(function, bytes);
    let size = made.parameters.len() as u64;
    let extra = launch_parameters::list(&made.parameters, &size);
    let request = LaunchRequest {
        function,
        grid,
        block: made.block,
        dynamic_shared: made.shared,
        parameters: In::missing(),
        // SAFETY: the list and everything that it points to live until the launch has copied them.
        extra: unsafe { In::new(extra.as_ptr().cast()) },
        cooperative: false,
    };
    launch_or_capture(Implicit::Legacy, stream, &request, &[])
}

calls! {
    fn cuFuncSetBlockShape(function: u64, x: i32, y: i32, z: i32) {
        of(function)?.set_block(function, [x, y, z], Error::INVALID_VALUE)
    }

    fn cuFuncSetSharedSize(function: u64, bytes: u32) { of(function)?.set_shared(function, bytes); Ok(()) }

    fn cuParamSetSize(function: u64, bytes: u32) { of(function)?.set_size(function, bytes, Error::INVALID_VALUE) }

    fn cuParamSeti(function: u64, offset: i32, value: u32) { set(function, offset, &value.to_ne_bytes()) }

    fn cuParamSetf(function: u64, offset: i32, value: f32) { set(function, offset, &value.to_ne_bytes()) }

    fn cuParamSetv(function: u64, offset: i32, value: In<u8>, bytes: u32) {
        of(function)?;
        set(function, offset, &value.bytes(bytes as usize)?)
    }

    fn cuLaunch(function: u64) { run(function, [1; 3], 0) }

    fn cuLaunchGrid(function: u64, width: i32, height: i32) {
        run(function, old_launches::grid(width, height, Error::INVALID_VALUE)?, 0)
    }

    fn cuLaunchGridAsync(function: u64, width: i32, height: i32, stream: u64) {
        run(function, old_launches::grid(width, height, Error::INVALID_VALUE)?, stream)
    }
}
