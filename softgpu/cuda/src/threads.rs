//! The driver's own threads: their start, and the host functions that they run.
#![expect(unsafe_code, reason = "threads of a confined process need the C library")]

use std::cell::Cell;
use std::ffi::c_void;
use std::{io, ptr};

use crate::error::{Error, Result};

thread_local! {
    static IN_HOST_FUNCTION: Cell<bool> = const { Cell::new(false) };
}

/// Runs a function of the program, during which this thread may not call the driver.
pub(crate) fn in_host_function(function: impl FnOnce()) {
    IN_HOST_FUNCTION.set(true);
    function();
    IN_HOST_FUNCTION.set(false);
}

/// An error if the calling thread runs a host function.
pub(crate) fn may_call() -> Result {
    if IN_HOST_FUNCTION.get() { Err(Error::NOT_PERMITTED) } else { Ok(()) }
}

/// Starts a thread with all signals blocked: signals belong to the program. Uses plain `pthread_create`, which works even in a
/// process that has restricted its own system calls.
pub(crate) fn start(entry: extern "C" fn(*mut c_void) -> *mut c_void) -> io::Result<()> {
    // SAFETY: signal sets are plain data that the calls below fill.
    let (mut all, mut before): (libc::sigset_t, libc::sigset_t) = unsafe { std::mem::zeroed() };
    // SAFETY: the set is a local variable.
    unsafe { libc::sigfillset(&raw mut all) };
    // SAFETY: both sets are local variables. The new thread inherits the mask.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before) };
    let mut thread = 0;
    // SAFETY: the entry is a safe function for any argument, and this one is null.
    let code = unsafe { libc::pthread_create(&raw mut thread, ptr::null(), entry, ptr::null_mut()) };
    // SAFETY: the set was filled above.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, ptr::null_mut()) };
    if code != 0 {
        return Err(io::Error::from_raw_os_error(code));
    }
    // SAFETY: the thread was just created and is never joined.
    unsafe { libc::pthread_detach(thread) };
    Ok(())
}
