//! The answer to a driver's call that is on no list: it fails with EPERM, and the first of its kind leaves a line on standard error.
//!
//! The kernel sends SIGSYS to the thread that makes such a call (`SECCOMP_RET_TRAP`), and the handler here answers it. The kernel would end a
//! process that blocks this signal, and drivers start threads with all signals blocked. So the filter lets no call change the blocked
//! signals, either: the handler does it, and leaves SIGSYS out.
//!
//! This is a report of a driver that does what its list does not foresee. It protects nothing: a process that removes the handler is killed by
//! its next call that is on no list.

#![expect(unsafe_code, reason = "a signal handler")]

use core::{
    fmt::Write as _,
    sync::atomic::{AtomicU64, Ordering},
};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fd::BorrowedFd,
};
use std::{io, sync::OnceLock};

/// Largest number of lines of a process.
const LINES: usize = 32;
/// Longest line, in bytes.
const LINE_BYTES: usize = 192;
/// `si_code` of a SIGSYS that a filter sends.
const BY_FILTER: i32 = 1;
/// The bit of SIGSYS in a set of signals.
const SIGSYS_BIT: u64 = 1 << (libc::SIGSYS - 1);
/// Bytes of the kernel's set of signals.
const SET_BYTES: u64 = size_of::<u64>() as u64;

/// The calls that have left a line; 0 is a free place.
static REPORTED: [AtomicU64; LINES] = [const { AtomicU64::new(0) }; LINES];

/// The descriptor of the log, if it is not standard error.
static LOG: OnceLock<BorrowedFd<'static>> = OnceLock::new();

/// Sets the descriptor to which lines go instead of standard error; the first one counts.
pub(crate) fn set_log(log: BorrowedFd<'static>) {
    LOG.get_or_init(|| log);
}

/// Installs the handler, for all threads.
pub(crate) fn answer() -> io::Result<()> {
    let handler: extern "C" fn(i32, *mut libc::siginfo_t, *mut libc::c_void) = refuse;
    // SAFETY: a structure of numbers, for which zero is a value.
    let mut action: libc::sigaction = unsafe { core::mem::zeroed() };
    action.sa_sigaction = handler as libc::sighandler_t;
    action.sa_flags = libc::SA_SIGINFO | libc::SA_RESTART;
    // SAFETY: the action is complete, and its handler makes only calls that a handler may make.
    match unsafe { libc::sigaction(libc::SIGSYS, &raw const action, core::ptr::null_mut()) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

extern "C" fn refuse(_signal: i32, information: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel passes a valid structure.
    if unsafe { (*information).si_code } != BY_FILTER {
        return;
    }
    let context = context.cast::<libc::ucontext_t>();
    // SAFETY: the registers of the interrupted thread, which the kernel restores from here.
    let registers = unsafe { &raw mut (*context).uc_mcontext.gregs };
    let register = |index: i32| {
        // SAFETY: the array has all registers that are named below.
        let value = unsafe { (*registers)[index.unsigned_abs() as usize] };
        value.cast_unsigned()
    };
    let call = register(libc::REG_RAX) & 0xffff_ffff;
    let result = if call == libc::SYS_rt_sigprocmask.cast_unsigned() {
        // SAFETY: the kernel's set of signals begins there; it has fewer bytes than the C library's.
        let blocked = unsafe { (&raw mut (*context).uc_sigmask).cast::<u64>() };
        let (how, set) = (register(libc::REG_RDI), register(libc::REG_RSI));
        let (old, bytes) = (register(libc::REG_RDX), register(libc::REG_R10));
        // SAFETY: `blocked` is valid as above.
        unsafe { change(blocked, how, set as *const u64, old as *mut u64, bytes) }
    } else {
        let request = register(libc::REG_RSI);
        report(call, (call == libc::SYS_ioctl.cast_unsigned()).then_some(request));
        libc::EPERM
    };
    // SAFETY: the register of the call's result.
    unsafe { (*registers)[libc::REG_RAX as usize] = -i64::from(result) };
}

/// Changes a set of blocked signals as `rt_sigprocmask(2)`, but never blocks SIGSYS. Returns the number of an error, or 0. A bad pointer
/// is EFAULT, as from the kernel, unless another thread unmaps its memory at this moment.
///
/// # Safety
/// `blocked` is valid.
unsafe fn change(blocked: *mut u64, how: u64, set: *const u64, old: *mut u64, bytes: u64) -> i32 {
    if bytes != SET_BYTES {
        return libc::EINVAL;
    }
    if !is_readable(set) {
        return libc::EFAULT;
    }
    // SAFETY: promised by the caller.
    let before = unsafe { blocked.read() };
    // SAFETY: the kernel has just read it.
    let set = unsafe { set.read_unaligned() };
    // The kernel reads an `int`.
    let after = match i32::try_from(how & 0xffff_ffff) {
        Ok(libc::SIG_BLOCK) => before | set,
        Ok(libc::SIG_UNBLOCK) => before & !set,
        Ok(libc::SIG_SETMASK) => set,
        _ => return libc::EINVAL,
    };
    // SAFETY: promised by the caller.
    unsafe { blocked.write(after & !SIGSYS_BIT) };
    if !old.is_null() {
        // As in the kernel, the signals have changed even if this fails.
        if !is_writable(old) {
            return libc::EFAULT;
        }
        // SAFETY: the kernel has just written it.
        unsafe { old.write_unaligned(before) };
    }
    0
}

/// True if a set of signals can be read: the kernel reads it before it refuses to wait for too many descriptors.
fn is_readable(set: *const u64) -> bool {
    let ppoll = [0, u32::MAX.into(), 0, set as u64, SET_BYTES];
    // SAFETY: the call fails in any case, without a wait.
    !set.is_null() && unsafe { error_of(libc::SYS_ppoll, ppoll) } != libc::EFAULT
}

/// True if a set of signals can be written: the kernel writes the handler's own set there, and changes none.
fn is_writable(old: *mut u64) -> bool {
    let query = [0, 0, old as u64, SET_BYTES, 0];
    // SAFETY: the caller of the call that is answered wants a set there.
    unsafe { error_of(libc::SYS_rt_sigprocmask, query) == 0 }
}

/// The error of a system call, or 0; the interrupted thread keeps its `errno`.
///
/// # Safety
/// As of the call.
unsafe fn error_of(call: libc::c_long, arguments: [u64; 5]) -> i32 {
    let [a, b, c, d, e] = arguments;
    // SAFETY: a pointer to a variable of this thread.
    let errno = unsafe { libc::__errno_location() };
    // SAFETY: valid, as above.
    let before = unsafe { errno.read() };
    // SAFETY: promised by the caller.
    let result = unsafe { libc::syscall(call, a, b, c, d, e) };
    // SAFETY: valid, as above.
    let error = unsafe { errno.replace(before) };
    if result == -1 { error } else { 0 }
}

/// Writes a line about the first call with this number, or with this number and request; about [`LINES`] such calls at most.
fn report(call: u64, request: Option<u64>) {
    // Of both, the kernel reads 32 bits; the number after that of a call is not 0.
    let key = (call + 1) << 32 | request.unwrap_or(0) & 0xffff_ffff;
    for (place, taken) in REPORTED.iter().enumerate() {
        match taken.compare_exchange(0, key, Ordering::Relaxed, Ordering::Relaxed) {
            Ok(_) => return write_line(&RefusalLine::about(call, request, place + 1 == LINES)),
            Err(other) if other == key => return,
            Err(_) => {}
        }
    }
}

/// A line, made without an allocation.
struct RefusalLine {
    bytes: [u8; LINE_BYTES],
    length: usize,
}

impl RefusalLine {
    fn about(call: u64, request: Option<u64>, last: bool) -> Self {
        let mut line = Self { bytes: [0; LINE_BYTES], length: 0 };
        let ioctl = request.map_or(Ok(()), |request| write!(line, "request {request:#x} of "));
        let rest = if last { "; others leave no line any more" } else { "" };
        let text = writeln!(
            line,
            "system call {call} is not on the list of this process and its driver: EPERM{rest}"
        );
        debug_assert!(ioctl.is_ok() && text.is_ok(), "a line with the largest numbers has room");
        line
    }
}

impl core::fmt::Write for RefusalLine {
    fn write_str(&mut self, text: &str) -> core::fmt::Result {
        let end = self.length + text.len();
        let room = self.bytes.get_mut(self.length..end).ok_or(core::fmt::Error)?;
        room.copy_from_slice(text.as_bytes());
        self.length = end;
        Ok(())
    }
}

/// Writes a line to the log if that does not wait; no driver waits for a reader.
fn write_line(line: &RefusalLine) {
    let log = LOG.get().copied().unwrap_or(rustix::stdio::stderr());
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    let mut polled = [PollFd::from_borrowed_fd(log, PollFlags::OUT)];
    if matches!(poll(&mut polled, Some(&now)), Ok(1..)) && polled[0].revents().contains(PollFlags::OUT) {
        // A line that is lost has no further effect.
        _ = rustix::io::write(log, &line.bytes[..line.length]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn changed(before: u64, how: i32, set: u64) -> (i32, u64, u64) {
        let (mut blocked, mut old) = (before, 0);
        let how = u64::from(how.cast_unsigned());
        // SAFETY: three valid pointers.
        let error = unsafe { change(&raw mut blocked, how, &raw const set, &raw mut old, SET_BYTES) };
        (error, blocked, old)
    }

    #[test]
    fn bad_set_of_signals_is_refused_and_changes_nothing() {
        let (mut blocked, set) = (1, u64::MAX);
        let mut change = |set, old, bytes| {
            // SAFETY: `blocked` is valid.
            let error = unsafe { change(&raw mut blocked, 0, set, old, bytes) };
            (error, blocked)
        };
        let (none, bad) = (core::ptr::null_mut(), core::ptr::without_provenance_mut(8));
        assert_eq!(change(bad, none, 4), (libc::EINVAL, 1), "the size comes first");
        assert_eq!(change(bad, none, SET_BYTES), (libc::EFAULT, 1));
        assert_eq!(change(none, none, SET_BYTES), (libc::EFAULT, 1));
        assert_eq!(change(&raw const set, bad, SET_BYTES), (libc::EFAULT, !SIGSYS_BIT), "as in the kernel");
    }

    // Promise: F98
    #[test]
    fn blocked_signals_change_as_requested_but_for_sigsys() {
        let one = 1 << (libc::SIGUSR1 - 1);
        assert_eq!(changed(one, libc::SIG_BLOCK, u64::MAX), (0, !SIGSYS_BIT, one));
        assert_eq!(changed(one | 1, libc::SIG_UNBLOCK, one), (0, 1, one | 1));
        assert_eq!(changed(one, libc::SIG_SETMASK, SIGSYS_BIT | 1), (0, 1, one));
        assert_eq!(changed(one, 3, u64::MAX), (libc::EINVAL, one, 0));
    }

    #[test]
    fn longest_line_has_room() {
        let line = RefusalLine::about(u64::MAX, Some(u64::MAX), true);
        assert!(line.bytes[..line.length].ends_with(b"any more\n"));
    }
}
