//! The functions of the C API for start-up, versions, look-ups and error texts.

use crate::{
    arguments::{Call, Callback, In, Out},
    error::{Error, Result},
    graphs, lifetime, process,
};
use core::ffi::{c_char, c_int, c_uint, c_void};
use sluice_cuda_abi::{
    status,
    symbols::{self, Lookup},
};
use sluice_cuda_frontend::tables;
use sluice_protocol::limits;
use std::{ffi::OsStr, fs::File, os::unix::ffi::OsStrExt as _};

pub(crate) fn cuInit(_: Call, flags: c_uint) -> Result {
    if flags != 0 {
        return Err(Error::INVALID_VALUE);
    }
    // Before a thread can have a stream.
    graphs::end_streams_of_threads();
    process::initialise()
}

pub(crate) fn cuDriverGetVersion(_: Call, version: Out<c_int>) -> Result {
    // Works before cuInit, and runtimes call it first; without a device the library still has a version.
    let reported = process::connect().map_or(symbols::CUDA_VERSION, |process| process.session.driver_version);
    version.set(reported.cast_signed())
}

/// Status words of `cuGetProcAddress_v2`.
pub(crate) mod symbol_status {
    pub(crate) const FOUND: u32 = 0;
    pub(super) const NOT_FOUND: u32 = 1;
    pub(super) const VERSION_TOO_LOW: u32 = 2;
}

/// `cuGetProcAddress` and its second version. Returns the status word of the second version. The exports know their addresses, by
/// index in [`symbols::EXPORTS`], so they pass the look-up in.
pub(crate) fn look_up(
    address: impl FnOnce(usize) -> Option<*mut c_void>,
    symbol: In<c_char>,
    pfn: Out<*mut c_void>,
    version: c_int,
    flags: u64,
) -> Result<u32> {
    let place = pfn.required()?;
    let name = symbol.text().get_within(limits::NAME_BYTES)?;
    let newest = process::connect().map_or(symbols::CUDA_VERSION, |process| process.session.driver_version);
    let version = u32::try_from(version).map_err(|_| Error::INVALID_VALUE)?;
    if !symbols::valid_flags(flags) || version > newest {
        return Err(Error::INVALID_VALUE);
    }
    let (symbol, outcome) = match symbols::lookup(name, version, flags) {
        Lookup::Found(index) => match address(index) {
            Some(address) => (address, symbol_status::FOUND),
            None => (core::ptr::null_mut(), symbol_status::NOT_FOUND),
        },
        Lookup::NotFound => (core::ptr::null_mut(), symbol_status::NOT_FOUND),
        Lookup::VersionTooLow => (core::ptr::null_mut(), symbol_status::VERSION_TOO_LOW),
    };
    place.set(symbol)?;
    Ok(outcome)
}

pub(crate) fn cuGetExportTable(_: Call, table: Out<*const c_void>, id: In<c_void>) -> Result {
    table.set(core::ptr::null())?;
    let id = id.cast::<[u8; 16]>().get()?;
    // The tables answer for the devices, so the devices must be known first.
    process::connect()?;
    super::tables::install();
    table.set(tables::get(id).ok_or(Error::INVALID_VALUE)?)
}

pub(crate) fn cuGetErrorName(_: Call, error: c_uint, text: Out<*const c_char>) -> Result {
    error_text(status::name(error), text)
}

pub(crate) fn cuGetErrorString(_: Call, error: c_uint, text: Out<*const c_char>) -> Result {
    error_text(status::text(error), text)
}

fn error_text(found: Option<&'static core::ffi::CStr>, text: Out<*const c_char>) -> Result {
    text.set(found.map_or(core::ptr::null(), core::ffi::CStr::as_ptr))?;
    found.map(|_| ()).ok_or(Error::INVALID_VALUE)
}

// Driver logs: a callback may be registered, and is never called.

pub(crate) fn cuLogsRegisterCallback(
    _: Call,
    callback: Option<Callback>,
    _: Out<c_void>,
    handle: Out<u64>,
) -> Result {
    lifetime::usable()?;
    if callback.is_none() {
        return Err(Error::INVALID_VALUE);
    }
    handle.set_if_given(1);
    Ok(())
}

pub(crate) fn cuLogsUnregisterCallback(_: Call, handle: u64) -> Result {
    if handle == 1 { Ok(()) } else { Err(Error::INVALID_VALUE) }
}

pub(crate) fn cuLogsCurrent(_: Call, iterator: Out<c_void>, _: c_uint) -> Result {
    iterator.cast::<u32>().set(0)
}

pub(crate) fn cuLogsDumpToFile(_: Call, _: Out<c_void>, path: In<c_char>, flags: c_uint) -> Result {
    let path = path.text().get()?;
    if flags != 0 {
        return Err(Error::INVALID_VALUE);
    }
    // The log of this library has no lines.
    File::create(OsStr::from_bytes(path)).map(drop).map_err(|_| Error::INVALID_VALUE)
}

pub(crate) fn cuLogsDumpToMemory(
    _: Call,
    _: Out<c_void>,
    buffer: Out<c_char>,
    size: Out<usize>,
    _: c_uint,
) -> Result {
    let room = size.get()?;
    if room > 0 {
        buffer.set_text("", 1)?;
    }
    size.set(0)
}

// There is no profiler to start or stop.

pub(crate) fn cuProfilerStart(_: Call) -> Result {
    process::get()?.current().map(drop)
}

pub(crate) fn cuProfilerStop(_: Call) -> Result {
    process::get()?.current().map(drop)
}
