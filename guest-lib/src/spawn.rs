//! The start of threads of the shim in a foreign process.

#![expect(unsafe_code, reason = "signal masks")]

/// Starts a thread of the shim with a small stack and all signals blocked.
pub(crate) fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> std::io::Result<()> {
    // SAFETY: an all-zero set is a valid value for sigfillset to fill.
    let mut all: libc::sigset_t = unsafe { core::mem::zeroed() };
    // SAFETY: as above.
    let mut before: libc::sigset_t = unsafe { core::mem::zeroed() };
    // SAFETY: a set of this function.
    unsafe { libc::sigfillset(&raw mut all) };
    // SAFETY: both sets are valid; the mask is inherited by the new thread and put back below.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before) };
    let started = std::thread::Builder::new().name(name.into()).stack_size(256 << 10).spawn(body);
    // SAFETY: the mask as it was.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, core::ptr::null_mut()) };
    started.map(drop)
}
