//! The terminal of this process.
#![expect(unsafe_code, reason = "a system call that the libraries of this crate do not offer")]

use std::mem::MaybeUninit;

/// Lines of the terminal on standard output; `None` if standard output is no terminal.
pub(crate) fn terminal_lines() -> Option<usize> {
    let mut size = MaybeUninit::<libc::winsize>::zeroed();
    // SAFETY: the call fills the structure, for which every bit pattern is valid, or leaves it unchanged.
    let result = unsafe { libc::ioctl(libc::STDOUT_FILENO, libc::TIOCGWINSZ, size.as_mut_ptr()) };
    // SAFETY: as above.
    let lines = unsafe { size.assume_init() }.ws_row;
    (result == 0 && lines > 0).then(|| lines.into())
}
