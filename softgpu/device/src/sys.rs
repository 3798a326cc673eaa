//! The system calls of this crate, and its reads of `/proc`. Only this file, `header` and `mapping` contain unsafe code.
#![expect(unsafe_code, reason = "system calls that the standard library does not offer")]

use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// Returns the effective user id.
pub(crate) fn user() -> u32 {
    // SAFETY: no preconditions.
    unsafe { libc::geteuid() }
}

/// True if this process may create entries in the directory.
pub(crate) fn writable(directory: &Path) -> bool {
    let Ok(path) = CString::new(directory.as_os_str().as_bytes()) else { return false };
    // SAFETY: `path` is a C string.
    unsafe { libc::access(path.as_ptr(), libc::W_OK | libc::X_OK) == 0 }
}

/// True if a process with that id exists in this PID namespace, even as a zombie.
pub(crate) fn process_exists(pid: u32) -> bool {
    let Ok(pid) = libc::pid_t::try_from(pid) else { return false };
    // SAFETY: signal 0 is never delivered.
    let sent = unsafe { libc::kill(pid, 0) } == 0;
    sent || io::Error::last_os_error().raw_os_error() != Some(libc::ESRCH)
}

/// Start time of a process, in clock ticks: field 22 of `/proc/<pid>/stat`, counted from the end of the command name, which may
/// contain any characters.
pub(crate) fn start_time(pid: u32) -> Option<u64> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    text.rsplit_once(')')?.1.split_whitespace().nth(19)?.parse().ok()
}

/// The PID namespace of this process.
pub(crate) fn namespace() -> Option<u64> {
    Some(File::open("/proc/self/ns/pid").ok()?.metadata().ok()?.ino())
}

/// Device and inode number of an open file. Uses the plain system call: the standard library uses calls that can look up files by
/// name, which a confined process may not make.
pub(crate) fn identity(file: BorrowedFd<'_>) -> io::Result<(u64, u64)> {
    // SAFETY: the structure is plain data, all zeroes are a valid value.
    let mut status: libc::stat = unsafe { std::mem::zeroed() };
    // SAFETY: the descriptor is open, and the structure is the kernel's on 64-bit systems.
    let result = unsafe { libc::syscall(libc::SYS_fstat, file.as_raw_fd(), &raw mut status) };
    if result == 0 { Ok((status.st_dev, status.st_ino)) } else { Err(io::Error::last_os_error()) }
}

/// Current position of an open file.
pub(crate) fn position(file: BorrowedFd<'_>) -> io::Result<u64> {
    seek(file, 0, libc::SEEK_CUR)
}

/// Sets the position of an open file, which may be far past its end.
pub(crate) fn set_position(file: &File, position: u64) -> io::Result<()> {
    let position = i64::try_from(position).map_err(io::Error::other)?;
    seek(file.as_fd(), position, libc::SEEK_SET).map(drop)
}

fn seek(file: BorrowedFd<'_>, offset: i64, from: i32) -> io::Result<u64> {
    // SAFETY: the descriptor is open.
    let position = unsafe { libc::lseek(file.as_raw_fd(), offset, from) };
    u64::try_from(position).map_err(|_| io::Error::last_os_error())
}

/// Fills `bytes` with random bytes from the kernel.
pub(crate) fn random(bytes: &mut [u8]) -> io::Result<()> {
    // SAFETY: the pointer and the length describe `bytes`.
    let got = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), 0) };
    if usize::try_from(got) == Ok(bytes.len()) { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Waits for the advisory lock of an open file. Closing the file's last descriptor releases it.
pub(crate) fn lock_file(file: &File) -> io::Result<()> {
    loop {
        // SAFETY: the descriptor is open.
        if unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX) } == 0 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

/// Releases the advisory lock of an open file.
pub(crate) fn unlock_file(file: &File) -> io::Result<()> {
    // SAFETY: the descriptor is open.
    if unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_UN) } == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

fn byte_lock(kind: libc::c_int, at: i64) -> libc::flock {
    // SAFETY: the structure is plain data, all zeroes are a valid value.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    // The constants are 0, 1 and 2; the field is a short.
    lock.l_type = i16::try_from(kind).unwrap_or(0);
    lock.l_whence = 0; // SEEK_SET
    lock.l_start = at;
    lock.l_len = 1;
    lock
}

/// Locks one byte for this open file description; false if another description has it.
pub(crate) fn try_lock_byte(file: &File, at: i64, exclusive: bool) -> io::Result<bool> {
    let lock = byte_lock(if exclusive { libc::F_WRLCK } else { libc::F_RDLCK }, at);
    // SAFETY: the descriptor is open and the structure lives through the call.
    if unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const lock) } == 0 {
        return Ok(true);
    }
    let error = io::Error::last_os_error();
    match error.raw_os_error() {
        Some(libc::EAGAIN | libc::EACCES) => Ok(false),
        _ => Err(error),
    }
}

pub(crate) fn unlock_byte(file: &File, at: i64) -> io::Result<()> {
    let lock = byte_lock(libc::F_UNLCK, at);
    // SAFETY: the descriptor is open and the structure lives through the call.
    if unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const lock) } == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// True if another open file description holds a lock on that byte.
pub(crate) fn byte_is_locked(file: &File, at: i64) -> io::Result<bool> {
    let mut lock = byte_lock(libc::F_WRLCK, at);
    // SAFETY: the descriptor is open and the structure lives through the call.
    if unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_GETLK, &raw mut lock) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(i32::from(lock.l_type) != libc::F_UNLCK)
}

/// Allocates storage for a range of a file; existing content stays.
pub(crate) fn back(file: &File, offset: i64, length: i64) -> io::Result<()> {
    allocate(file, 0, offset, length)
}

/// Gives the storage of a range of a file back, with its content.
pub(crate) fn give_back(file: &File, offset: i64, length: i64) -> io::Result<()> {
    allocate(file, libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE, offset, length)
}

/// Writes one byte to a range of a file, whose offset is a multiple of the page size. Uses a mapping, since not every process may
/// write to files.
pub(crate) fn fill(file: &File, offset: i64, length: usize, byte: u8) -> io::Result<()> {
    let access = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a new mapping at an address that the kernel chooses replaces nothing.
    let got = unsafe {
        libc::mmap(std::ptr::null_mut(), length, access, libc::MAP_SHARED, file.as_raw_fd(), offset)
    };
    if got == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the range was just mapped, it lies in the file, and no reference to it exists.
    unsafe { std::ptr::write_bytes(got.cast::<u8>(), byte, length) };
    // SAFETY: the range that was mapped above.
    unsafe { libc::munmap(got, length) };
    Ok(())
}

fn allocate(file: &File, mode: libc::c_int, offset: i64, length: i64) -> io::Result<()> {
    loop {
        // SAFETY: the descriptor is open.
        if unsafe { libc::fallocate(file.as_raw_fd(), mode, offset, length) } == 0 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

/// Returns the system's monotonic clock, the same for all processes; never 0.
#[must_use]
pub fn monotonic_nanoseconds() -> u64 {
    clock(libc::CLOCK_MONOTONIC).max(1)
}

/// Returns the processor time of the calling thread.
#[must_use]
pub fn thread_nanoseconds() -> u64 {
    clock(libc::CLOCK_THREAD_CPUTIME_ID)
}

fn clock(which: libc::clockid_t) -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the structure lives through the call.
    unsafe { libc::clock_gettime(which, &raw mut time) };
    let part = |value: i64| u64::try_from(value).unwrap_or(0);
    part(time.tv_sec) * 1_000_000_000 + part(time.tv_nsec)
}

/// Allocates private, page-aligned, zeroed memory.
///
/// # Errors
/// The error of `mmap`.
pub fn anonymous(bytes: usize) -> io::Result<u64> {
    // SAFETY: a new mapping at an address that the kernel chooses replaces nothing.
    let address = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            bytes,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            -1,
            0,
        )
    };
    if address == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(address.addr() as u64) }
}
