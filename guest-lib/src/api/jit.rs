//! The options of the compiler and linker as C callers pass them.

use crate::{
    arguments::Out,
    error::{Error, Result},
    log,
    state::jit::JitOptions,
};
use core::ffi::{c_uint, c_void};
use sluice_cuda_abi::jit::{JitValue, is_for_input, value_of};
use sluice_protocol::limits;

/// Reads the two lists of a load or a link.
pub(super) fn read(count: c_uint, options: Out<c_uint>, values: Out<*mut c_void>) -> Result<JitOptions> {
    if count as usize > limits::JIT_OPTIONS {
        return Err(Error::INVALID_VALUE);
    }
    let mut read = JitOptions::default();
    for index in 0..count as usize {
        let option = options.get_at(index)?;
        let meaning = value_of(option).ok_or(Error::INVALID_VALUE)?;
        let value = values.get_at(index)?.addr() as u64;
        // Numbers stand in the low half of the pointer, and results take its place.
        #[expect(clippy::cast_possible_truncation, reason = "an `unsigned int`")]
        let number = value as u32;
        let place = || Ok::<_, Error>(values.at(index)?.address());
        let places = &mut read.places;
        match meaning {
            JitValue::Number => read.carry(option, number),
            JitValue::Threads => {
                places.threads.push(place()?);
                read.carry(option, number);
            }
            JitValue::WallTime => {
                places.wall_times.push(place()?);
                read.carry(option, 0);
            }
            JitValue::InfoLog => places.info.buffer = value,
            JitValue::ErrorLog => places.error.buffer = value,
            JitValue::InfoLogBytes => {
                places.info.room = number;
                places.info.used.push(place()?);
            }
            JitValue::ErrorLogBytes => {
                places.error.room = number;
                places.error.used.push(place()?);
            }
            // The host compiles with as many threads as it gives to the session.
            JitValue::HostThreads => {}
            JitValue::Addresses => {
                log::warn(format_args!(
                    "JIT option {option} names addresses or symbols of the program, which the host cannot use"
                ));
                return Err(Error::NOT_SUPPORTED);
            }
        }
    }
    Ok(read)
}

/// Reads the two lists of one input of a link.
pub(super) fn read_for_input(
    count: c_uint,
    options: Out<c_uint>,
    values: Out<*mut c_void>,
) -> Result<JitOptions> {
    let listed = (count as usize).min(limits::JIT_OPTIONS);
    for index in 0..listed {
        if !is_for_input(options.get_at(index)?) {
            return Err(Error::INVALID_VALUE);
        }
    }
    read(count, options, values)
}
