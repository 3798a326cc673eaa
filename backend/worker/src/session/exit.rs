//! The exit of the worker process.

#![expect(unsafe_code, reason = "ends the process without running the exit handlers of libraries")]

/// Ends the process at once. The driver is not torn down, neither by this process nor by the driver's exit handlers: that may
/// wait for the GPU for ever, and the kernel releases everything in any case. The log is not buffered.
pub(crate) fn exit(status: i32) -> ! {
    // SAFETY: it does not return, so nothing is used after it.
    unsafe { libc::_exit(status) }
}
