//! A safety net under shared pages: a process that touches a missing page reports it and ends, with a status of its own.
//!
//! Memory is checked before it is touched, so this happens only if a VMM is trusted with memory that it can cut, if the host
//! has no huge page left, or if a page of the host's memory is faulty.

#![expect(unsafe_code, reason = "a signal handler")]

use std::{
    io,
    os::fd::{AsRawFd as _, BorrowedFd},
    sync::{
        OnceLock,
        atomic::{AtomicI32, Ordering},
    },
};

/// Exit status of a process that ends because a shared page is missing.
pub const STATUS: i32 = 87;

/// The line for the log, prepared because a handler may not allocate.
static LINE: OnceLock<String> = OnceLock::new();
/// The descriptor of the log.
static LOG: AtomicI32 = AtomicI32::new(2);

/// Makes this process end with [`STATUS`] and a line on `log`, instead of by the signal, when a shared page is missing.
///
/// # Errors
/// The kernel's error of `sigaction`.
pub fn catch(process: &str, log: BorrowedFd<'static>) -> io::Result<()> {
    LOG.store(log.as_raw_fd(), Ordering::Relaxed);
    LINE.get_or_init(|| {
        format!("{process}: a page of shared memory is not there any more (SIGBUS); this process ends\n")
    });
    let handler: extern "C" fn(libc::c_int) = ended;
    // SAFETY: a structure of numbers, for which zero is a value.
    let mut action: libc::sigaction = unsafe { core::mem::zeroed() };
    action.sa_sigaction = handler as libc::sighandler_t;
    action.sa_flags = libc::SA_ONSTACK;
    // SAFETY: the action is complete, and its handler makes only calls that a handler may make.
    match unsafe { libc::sigaction(libc::SIGBUS, &raw const action, core::ptr::null_mut()) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

extern "C" fn ended(_signal: libc::c_int) {
    let line = LINE.get().map_or(&[][..], |line| line.as_bytes());
    let log = LOG.load(Ordering::Relaxed);
    let mut error = libc::pollfd { fd: log, events: libc::POLLOUT, revents: 0 };
    let now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: both structures outlive the call, which a handler may make. It does not wait.
    let room = unsafe { libc::ppoll(&raw mut error, 1, &raw const now, core::ptr::null()) };
    if room == 1 && error.revents & libc::POLLOUT != 0 {
        // SAFETY: the line is never dropped, and a handler may write. A failed write is ignored.
        let _ = unsafe { libc::write(log, line.as_ptr().cast(), line.len()) };
    }
    // SAFETY: ends the process without its destructors or buffers; a handler may do that.
    unsafe { libc::_exit(STATUS) }
}
