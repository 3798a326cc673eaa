//! Streams and events.

use super::{Result, input};
use crate::{Driver, Handle, HostFunction, code};
use core::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Calls the function of [`Driver::launch_host`] and frees it.
unsafe extern "C" fn call_once<F: FnOnce()>(function: *mut c_void) {
    // SAFETY: the driver passes the pointer that `launch_host` made of a box, and passes it once.
    let function = unsafe { Box::from_raw(function.cast::<F>()) };
    without_unwinding(*function);
}

/// Runs a function for the driver, through whose frames no panic may unwind.
pub(super) fn without_unwinding(function: impl FnOnce()) {
    if catch_unwind(AssertUnwindSafe(function)).is_err() {
        std::process::abort();
    }
}

impl Driver {
    /// `cuStreamSetAttribute`; the value is a union of 64 bytes.
    pub fn stream_set_attribute(&self, stream: Handle, attribute: u32, value: &[u64; 8]) -> Result<()> {
        call!(self.cuStreamSetAttribute(stream, attribute, input(value)))
    }

    /// `cuLaunchHostFunc`: the driver calls the function on a thread of its own once the stream's earlier work is complete, and holds
    /// the stream until the function returns. The function must not call the driver. If earlier work fails, it is never called, and its
    /// memory stays allocated.
    pub fn launch_host<F: FnOnce() + Send + 'static>(&self, stream: Handle, function: F) -> Result<()> {
        let data: *mut c_void = Box::into_raw(Box::new(function)).cast();
        call!(self.cuLaunchHostFunc(stream, Some(call_once::<F> as HostFunction), data)).inspect_err(|_| {
            // SAFETY: the pointer made above. A driver that refuses the call never calls the function.
            drop(unsafe { Box::from_raw(data.cast::<F>()) });
        })
    }

    /// True if all work before the event's last recording is complete.
    pub fn event_done(&self, event: Handle) -> Result<bool> {
        match call!(self.cuEventQuery(event)) {
            Ok(()) => Ok(true),
            Err(code::NOT_READY) => Ok(false),
            Err(failed) => Err(failed),
        }
    }

    /// `cuEventElapsedTime_v2`.
    pub fn event_elapsed(&self, start: Handle, end: Handle) -> Result<f32> {
        let mut milliseconds = 0.0;
        match call!(self.cuEventElapsedTime_v2(&raw mut milliseconds, start, end)) {
            Err(code::NOT_SUPPORTED) => call!(self.cuEventElapsedTime(&raw mut milliseconds, start, end))?,
            other => other?,
        }
        Ok(milliseconds)
    }
}
