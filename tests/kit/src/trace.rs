//! Follows the system calls of a process and of all its threads by `ptrace`.

#![expect(unsafe_code, reason = "calls ptrace and waitpid, which the safe wrappers lack")]

use core::ffi::{c_int, c_uint, c_void};
use std::io;

/// A system call at its entry.
#[derive(Clone, Copy, Debug)]
pub struct Call {
    /// The thread that makes it.
    pub thread: i32,
    /// Its number.
    pub number: u64,
    /// Its arguments.
    pub arguments: [u64; 6],
}

/// `struct ptrace_syscall_info` for an entry.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Info {
    op: u8,
    pad: [u8; 3],
    arch: u32,
    instruction: u64,
    stack: u64,
    number: u64,
    arguments: [u64; 6],
    /// The kernel's structure is longer for other stops.
    rest: [u64; 2],
}

const OPTIONS: usize = (libc::PTRACE_O_TRACESYSGOOD
    | libc::PTRACE_O_TRACECLONE
    | libc::PTRACE_O_TRACEFORK
    | libc::PTRACE_O_TRACEVFORK
    | libc::PTRACE_O_EXITKILL)
    .cast_unsigned() as usize;
/// `PTRACE_GET_SYSCALL_INFO`.
const GET_SYSCALL_INFO: c_uint = 0x420e;
/// `PTRACE_SYSCALL_INFO_ENTRY`.
const ENTRY: u8 = 1;
/// The signal of a stop at a system call.
const AT_CALL: c_int = libc::SIGTRAP | 0x80;

/// Begins to follow a process, a child of this one or, with the privilege, any other. This thread must also [`follow`] it.
pub fn seize(process: u32) -> io::Result<()> {
    let process = c_int::try_from(process).map_err(io::Error::other)?;
    request(libc::PTRACE_SEIZE, process, 0, OPTIONS)?;
    request(libc::PTRACE_INTERRUPT, process, 0, 0)?;
    Ok(())
}

/// Follows all processes that this thread has seized, and those that they start, until they ended. Reports each entry of a system call.
pub fn follow(mut report: impl FnMut(Call)) -> io::Result<()> {
    loop {
        let mut status = 0;
        // Another thread waits for its own children.
        // SAFETY: the kernel writes a number to a live variable.
        let thread = unsafe { libc::waitpid(-1, &raw mut status, libc::__WALL | libc::__WNOTHREAD) };
        if thread < 0 {
            let error = io::Error::last_os_error();
            match error.raw_os_error() {
                Some(libc::EINTR) => continue,
                Some(libc::ECHILD) => return Ok(()),
                _ => return Err(error),
            }
        }
        if !libc::WIFSTOPPED(status) {
            continue;
        }
        let (signal, event) = (libc::WSTOPSIG(status), status >> 16);
        let mut deliver = 0;
        if signal == AT_CALL {
            if let Some(call) = entry(thread)? {
                report(call);
            }
        } else if event == 0 {
            deliver = signal;
        }
        resume(thread, deliver)?;
    }
}

/// The call of a stopped thread, if it is at the entry.
fn entry(thread: c_int) -> io::Result<Option<Call>> {
    let mut info = Info::default();
    // The kernel writes at most this many bytes.
    let bytes = size_of::<Info>();
    match request(GET_SYSCALL_INFO, thread, bytes, (&raw mut info).expose_provenance()) {
        Ok(()) => {
            Ok((info.op == ENTRY).then_some(Call { thread, number: info.number, arguments: info.arguments }))
        }
        // The thread was killed in the meantime; its end comes next.
        Err(error) if error.raw_os_error() == Some(libc::ESRCH) => Ok(None),
        Err(error) => Err(error),
    }
}

fn resume(thread: c_int, signal: c_int) -> io::Result<()> {
    match request(libc::PTRACE_SYSCALL, thread, 0, signal.cast_unsigned() as usize) {
        Err(error) if error.raw_os_error() == Some(libc::ESRCH) => Ok(()),
        other => other,
    }
}

fn request(request: c_uint, process: c_int, address: usize, data: usize) -> io::Result<()> {
    let pointer = core::ptr::with_exposed_provenance_mut::<c_void>;
    // SAFETY: the only request that writes to this process gets the address and the length of a live structure.
    let result = unsafe { libc::ptrace(request, process, pointer(address), pointer(data)) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
