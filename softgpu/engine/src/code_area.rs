//! The one area of a process for machine code: reserved at once, with memory only for the code in it.
//!
//! The driver reserves it when it starts, because a Sluice worker may map no code later. Code gets into it through its file: no page of it
//! is ever mapped for writing, so a stray write of the process cannot change code, and a full file system gives an error and no
//! signal. Later, only `fstat`, `pwrite64` and `fallocate` are needed. A forked child has neither the area nor a driver, and leaves the file,
//! which it shares with its parent, as it is.

#![expect(unsafe_code, reason = "the system maps the area")]

use core::ffi::c_void;
use core::fmt::Arguments;
use core::ops::Range;
use core::ptr::NonNull;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd as _, FromRawFd as _};
use std::os::unix::fs::FileExt as _;
use std::sync::{Mutex, Once, OnceLock, PoisonError};

/// Size of the area: room for the hot functions of some thousand kernels, of which each usually takes two or three pages, and a bound
/// for the memory that a program takes from its host by them.
const AREA_BYTES: usize = 64 << 20;

/// Code is placed at pages, so that the memory of unloaded code can go back.
const PAGE: usize = 4096;

/// A reader of messages.
type Log = fn(Arguments<'_>);

static LOG: OnceLock<Log> = OnceLock::new();

/// Tells the reader that the driver gave, if it gave one.
pub(crate) fn tell(text: Arguments<'_>) {
    LOG.get().into_iter().for_each(|log| log(text));
}

pub(crate) struct CodeArea {
    start: NonNull<c_void>,
    file: File,
    identity: (u64, u64),
    /// The process that made it.
    process: u32,
    /// The unused ranges, in their order; no two of them touch.
    free: Mutex<Vec<Range<usize>>>,
    full: Once,
}

// SAFETY: the mapping is read and executed only, and the rest is safe to share.
unsafe impl Send for CodeArea {}
// SAFETY: as above.
unsafe impl Sync for CodeArea {}

impl CodeArea {
    /// The area of the process. The first call makes it. `None` if the system refuses memory for code.
    pub(crate) fn of_process() -> Option<&'static CodeArea> {
        static AREA: OnceLock<Option<CodeArea>> = OnceLock::new();
        let made = || {
            CodeArea::new(AREA_BYTES)
                .inspect_err(|error| {
                    tell(format_args!(
                        "the system refuses memory for machine code: {error}; kernels are interpreted"
                    ));
                })
                .ok()
        };
        AREA.get_or_init(made).as_ref()
    }

    /// As [`CodeArea::of_process`], with the reader of messages about machine code.
    pub(crate) fn reserve(log: Log) {
        LOG.get_or_init(|| log);
        CodeArea::of_process();
    }

    fn new(bytes: usize) -> io::Result<CodeArea> {
        let file = memory_file()?;
        file.set_len(bytes as u64)?;
        let (access, kind) = (libc::PROT_READ | libc::PROT_EXEC, libc::MAP_SHARED);
        // SAFETY: a new mapping at an address that the system chooses.
        let start = unsafe { libc::mmap(core::ptr::null_mut(), bytes, access, kind, file.as_raw_fd(), 0) };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the mapping is ours. On failure a child inherits code that it never calls.
        unsafe { libc::madvise(start, bytes, libc::MADV_DONTFORK) };
        let start = NonNull::new(start).ok_or(io::ErrorKind::OutOfMemory)?;
        let identity = identity(&file)?;
        #[expect(clippy::single_range_in_vec_init, reason = "one range is free at first")]
        let free = Mutex::new(vec![0..bytes]);
        Ok(CodeArea { start, file, identity, process: std::process::id(), free, full: Once::new() })
    }

    pub(crate) fn start(&self) -> NonNull<c_void> {
        self.start
    }

    /// Puts code into the area. Returns its range, which the caller gives back. `None` if the area is full, or the host's memory.
    pub(crate) fn place(&self, code: &[u8]) -> Option<Range<usize>> {
        let Some(range) = self.take(code.len().next_multiple_of(PAGE)) else {
            self.full.call_once(|| {
                tell(format_args!(
                    "no room for more machine code: functions that become hot meanwhile are interpreted"
                ));
            });
            return None;
        };
        // A program that closes all descriptors may have another file in this one's place.
        let written = self.is_ours() && self.file.write_all_at(code, range.start as u64).is_ok();
        if !written {
            tell(format_args!("machine code cannot be written: a function is interpreted"));
            self.give_back(range);
            return None;
        }
        Some(range)
    }

    /// Takes back a range of [`CodeArea::place`] that no thread executes any more.
    pub(crate) fn give_back(&self, range: Range<usize>) {
        if self.is_ours() {
            let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
            let (offset, len) = (range.start.cast_signed() as i64, range.len().cast_signed() as i64);
            // SAFETY: the descriptor is open, and no thread executes the code. On failure the memory stays until other code is there.
            unsafe { libc::fallocate(self.file.as_raw_fd(), mode, offset, len) };
        }
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        let at = free.partition_point(|other| other.start < range.start);
        free.insert(at, range);
        free.dedup_by(|next, before| {
            let touch = before.end == next.start;
            if touch {
                before.end = next.end;
            }
            touch
        });
    }

    /// Takes the first range with that many bytes.
    fn take(&self, bytes: usize) -> Option<Range<usize>> {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        let at = free.iter().position(|range| range.len() >= bytes)?;
        let range = &mut free[at];
        let taken = range.start..range.start + bytes;
        range.start = taken.end;
        if range.start == range.end {
            free.remove(at);
        }
        Some(taken)
    }

    fn is_ours(&self) -> bool {
        std::process::id() == self.process && identity(&self.file).is_ok_and(|found| found == self.identity)
    }
}

/// A new file in memory that no process can execute as a program.
fn memory_file() -> io::Result<File> {
    // Kernels before 6.3 do not know the second flag, and later ones warn without it.
    let mut number = -1;
    for flags in [libc::MFD_CLOEXEC | libc::MFD_NOEXEC_SEAL, libc::MFD_CLOEXEC] {
        // SAFETY: the name is a C string.
        number = unsafe { libc::memfd_create(c"softgpu-code".as_ptr(), flags) };
        if number >= 0 {
            break;
        }
    }
    if number < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor is new, and no other code has it.
    Ok(unsafe { File::from_raw_fd(number) })
}

/// Device and inode number of a file. The standard library uses a call that can look up names, which a worker may not make.
fn identity(file: &File) -> io::Result<(u64, u64)> {
    // SAFETY: the structure is plain data, all zeroes are a valid value.
    let mut status: libc::stat = unsafe { core::mem::zeroed() };
    // SAFETY: the structure is the kernel's on 64-bit systems; the kernel checks the descriptor.
    let result = unsafe { libc::syscall(libc::SYS_fstat, file.as_raw_fd(), &raw mut status) };
    if result == 0 { Ok((status.st_dev, status.st_ino)) } else { Err(io::Error::last_os_error()) }
}

#[cfg(all(test, not(miri)))]
mod tests {
    use super::*;

    const CODE: [u8; PAGE] = [0xcc; PAGE];

    fn read(area: &CodeArea, at: usize) -> u8 {
        let place = area.start.as_ptr().cast::<u8>().wrapping_add(at);
        // SAFETY: the tests read inside the area.
        unsafe { place.read_volatile() }
    }

    // Promise: S73
    #[test]
    fn area_takes_code_until_it_is_full_and_again_after_code_went() {
        let area = CodeArea::new(4 * PAGE).unwrap();
        let places: Vec<_> = std::iter::from_fn(|| area.place(&CODE)).collect();
        assert_eq!(places, [0, 1, 2, 3].map(|n| n * PAGE..(n + 1) * PAGE));
        for range in [1, 3, 2].map(|n| places[n].clone()) {
            area.give_back(range);
        }
        assert_eq!(area.free.lock().unwrap().len(), 1, "ranges that touch are one");
        assert_eq!((read(&area, 0), read(&area, PAGE)), (0xcc, 0), "memory of code that went goes back");
        assert_eq!(area.place(&[0x90; 2 * PAGE + 1]), Some(PAGE..4 * PAGE));
        assert_eq!(read(&area, 3 * PAGE), 0x90);
        assert_eq!(area.place(&[0x90]), None);
    }

    // Promise: S73
    #[test]
    fn file_in_the_place_of_the_area_stays_as_it_is() {
        let area = CodeArea::new(2 * PAGE).unwrap();
        let code = area.place(&CODE).unwrap();
        let other = memory_file().unwrap();
        other.write_all_at(b"text", 0).unwrap();
        // SAFETY: both descriptors are open; the area's becomes a copy of the other.
        assert!(unsafe { libc::dup2(other.as_raw_fd(), area.file.as_raw_fd()) } >= 0);
        assert_eq!(area.place(&CODE), None);
        area.give_back(code);
        let mut text = [0; 4];
        other.read_exact_at(&mut text, 0).unwrap();
        assert_eq!((&text, other.metadata().unwrap().len()), (b"text", 4));
        assert_eq!(read(&area, 0), 0xcc);
    }
}
