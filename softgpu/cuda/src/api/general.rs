//! The entry points for start-up, versions, error names and look-up.

use std::ffi::{OsStr, c_char, c_void};
use std::fs::File;
use std::os::unix::ffi::OsStrExt as _;

use sluice_cuda_abi::status;
use sluice_cuda_abi::symbols::{self, CUDA_VERSION, Lookup};
use sluice_cuda_frontend::tables;

use super::refused::FUNCTIONS;
use crate::context::current_core;
use crate::error::{Error, Result};
use crate::ffi::{In, Out, Text};
use crate::graphs::GRAPHS;
use crate::process;

/// Values of `CUdriverProcAddressQueryResult`.
const FOUND: u32 = 0;
const NOT_FOUND: u32 = 1;
const VERSION_TOO_LOW: u32 = 2;

/// Returns the status word of the second version.
fn look_up(name: Text<'_>, place: Out<u64>, version: i32, flags: u64) -> Result<u32> {
    let name = name.get()?;
    place.required()?;
    let version = u32::try_from(version).map_err(|_| Error::INVALID_VALUE)?;
    if version > CUDA_VERSION || !symbols::valid_flags(flags) {
        return Err(Error::INVALID_VALUE);
    }
    let (function, word) = match symbols::lookup(name, version, flags) {
        Lookup::Found(index) => (FUNCTIONS[index].address(), FOUND),
        Lookup::NotFound => (0, NOT_FOUND),
        Lookup::VersionTooLow => (0, VERSION_TOO_LOW),
    };
    place.set(function)?;
    Ok(word)
}

always! {
    fn cuInit(flags: u32) {
        process::start(flags)?;
        crate::tables::install();
        Ok(())
    }

    fn cuDriverGetVersion(version: Out<i32>) {
        version.set(i32::try_from(CUDA_VERSION).map_err(|_| Error::UNKNOWN)?)
    }

    fn cuGetErrorName(error: u32, text: Out<*const c_char>) {
        let name = status::name(error);
        text.set(name.map_or(std::ptr::null(), std::ffi::CStr::as_ptr))?;
        name.map(|_| ()).ok_or(Error::INVALID_VALUE)
    }

    fn cuGetErrorString(error: u32, text: Out<*const c_char>) {
        let known = status::text(error);
        text.set(known.map_or(std::ptr::null(), std::ffi::CStr::as_ptr))?;
        known.map(|_| ()).ok_or(Error::INVALID_VALUE)
    }

    fn cuGetProcAddress(name: Text<'_>, place: Out<u64>, version: i32, flags: u64) {
        if look_up(name, place, version, flags)? == FOUND { Ok(()) } else { Err(Error::NOT_FOUND) }
    }

    fn cuGetProcAddress_v2(name: Text<'_>, place: Out<u64>, version: i32, flags: u64, status: Out<u32>) {
        // Like NVIDIA's driver, it succeeds without a function.
        status.set_if_given(look_up(name, place, version, flags)?);
        Ok(())
    }

    fn cuGetExportTable(table: Out<*const c_void>, id: In<[u8; 16]>) {
        let found = tables::get(id.get()?);
        table.set(found.unwrap_or(std::ptr::null()))?;
        found.map(|_| ()).ok_or(Error::INVALID_VALUE)
    }
}

calls! {
    fn cuThreadExchangeStreamCaptureMode(mode: Out<u32>) { GRAPHS.thread_exchange_stream_capture_mode(mode) }

    fn cuProfilerStart() { current_core().map(drop) }

    fn cuProfilerStop() { current_core().map(drop) }

    // All messages go to standard error, so a callback is never called.
    fn cuLogsRegisterCallback(callback: *const c_void, _data: *const c_void, handle: Out<u64>) {
        if callback.is_null() {
            return Err(Error::INVALID_VALUE);
        }
        handle.set_if_given(callback.addr() as u64);
        Ok(())
    }

    fn cuLogsUnregisterCallback(handle: u64) {
        if handle == 0 { Err(Error::INVALID_VALUE) } else { Ok(()) }
    }

    fn cuLogsCurrent(iterator: Out<u32>, flags: u32) {
        if flags != 0 {
            return Err(Error::INVALID_VALUE);
        }
        iterator.set(0)
    }

    fn cuLogsDumpToFile(_iterator: Out<u32>, path: Text<'_>, flags: u32) {
        let path = path.get()?;
        if flags != 0 {
            return Err(Error::INVALID_VALUE);
        }
        // The log of this driver has no lines.
        File::create(OsStr::from_bytes(path)).map(drop).map_err(|_| Error::INVALID_VALUE)
    }

    fn cuLogsDumpToMemory(_iterator: Out<u32>, buffer: Out<u8>, size: Out<usize>, flags: u32) {
        if flags != 0 || size.get()? == 0 {
            return Err(Error::INVALID_VALUE);
        }
        buffer.set(0)?;
        size.set(0)
    }
}
