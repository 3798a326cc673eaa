//! Signals of a thread in a foreign process.

#![expect(unsafe_code, reason = "signal masks")]

/// Signals that a thread sends itself by an instruction. If they were blocked, the kernel would end the process although the program
/// handles them.
pub const OF_INSTRUCTIONS: [libc::c_int; 5] =
    [libc::SIGSEGV, libc::SIGBUS, libc::SIGFPE, libc::SIGILL, libc::SIGTRAP];

/// The signals of the calling thread are blocked until this is dropped, on the same thread. Threads that it starts meanwhile inherit the
/// mask.
#[derive(Debug)]
pub struct BlockedSignals(libc::sigset_t);

impl BlockedSignals {
    /// Blocks all signals but these.
    #[must_use]
    pub fn new(open: &[libc::c_int]) -> BlockedSignals {
        // SAFETY: an all-zero set is a valid value for the calls below to fill.
        let mut blocked: libc::sigset_t = unsafe { core::mem::zeroed() };
        // SAFETY: as above.
        let mut before: libc::sigset_t = unsafe { core::mem::zeroed() };
        // SAFETY: a set of this function.
        unsafe { libc::sigfillset(&raw mut blocked) };
        for signal in open {
            // SAFETY: as above, and a signal that exists.
            unsafe { libc::sigdelset(&raw mut blocked, *signal) };
        }
        // SAFETY: both sets are valid.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const blocked, &raw mut before) };
        BlockedSignals(before)
    }
}

impl Drop for BlockedSignals {
    fn drop(&mut self) {
        // SAFETY: the mask as it was.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.0, core::ptr::null_mut()) };
    }
}
