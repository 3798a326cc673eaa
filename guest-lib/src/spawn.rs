//! The start of threads of the shim in a foreign process.

#![expect(unsafe_code, reason = "signal masks")]

/// Bytes of the stack of a thread that runs functions of the program: the usual size of a program's threads.
const PROGRAM_STACK: usize = 8 << 20;
/// Signals that a thread sends itself by an instruction. If they were blocked, the kernel would end the process although the program
/// handles them.
const OF_INSTRUCTIONS: [libc::c_int; 5] =
    [libc::SIGSEGV, libc::SIGBUS, libc::SIGFPE, libc::SIGILL, libc::SIGTRAP];

/// Starts a thread of the shim with a small stack and all signals blocked.
pub(crate) fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> std::io::Result<()> {
    start(name, 256 << 10, &[], body)
}

/// Starts a thread of the shim that runs functions of the program.
pub(crate) fn spawn_for_program(name: &str, body: impl FnOnce() + Send + 'static) -> std::io::Result<()> {
    start(name, PROGRAM_STACK, &OF_INSTRUCTIONS, body)
}

fn start(
    name: &str,
    stack: usize,
    open: &[libc::c_int],
    body: impl FnOnce() + Send + 'static,
) -> std::io::Result<()> {
    // SAFETY: an all-zero set is a valid value for sigfillset to fill.
    let mut blocked: libc::sigset_t = unsafe { core::mem::zeroed() };
    // SAFETY: as above.
    let mut before: libc::sigset_t = unsafe { core::mem::zeroed() };
    // SAFETY: a set of this function.
    unsafe { libc::sigfillset(&raw mut blocked) };
    for signal in open {
        // SAFETY: as above, and a signal that exists.
        unsafe { libc::sigdelset(&raw mut blocked, *signal) };
    }
    // SAFETY: both sets are valid; the mask is inherited by the new thread and put back below.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const blocked, &raw mut before) };
    let started = std::thread::Builder::new().name(name.into()).stack_size(stack).spawn(body);
    // SAFETY: the mask as it was.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, core::ptr::null_mut()) };
    started.map(drop)
}
