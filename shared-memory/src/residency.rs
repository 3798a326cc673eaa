//! The pages of a memory file that exist.

#![expect(unsafe_code, reason = "a system call that rustix does not have")]

use rustix::{
    fd::{AsRawFd as _, BorrowedFd},
    io::Errno,
};

/// The number of cachestat(2) on every architecture (`asm-generic/unistd.h`, from Linux 6.5 on).
const SYS_CACHESTAT: libc::c_long = 451;

/// `struct cachestat_range` of `linux/mman.h`.
#[repr(C)]
struct Range {
    offset: u64,
    bytes: u64,
}

/// `struct cachestat` of `linux/mman.h`.
#[repr(C)]
#[derive(Default)]
struct Statistics {
    cached: u64,
    dirty: u64,
    writeback: u64,
    evicted: u64,
    recently_evicted: u64,
}

/// Number of pages of a range of a file in tmpfs that exist, in memory or in swap; the others are holes. The range consists of whole
/// pages. It takes a time in proportion to the range.
///
/// # Errors
/// NOSYS before Linux 6.5; OPNOTSUPP for a file of huge pages; INVAL for an empty range.
pub fn existing_pages(file: BorrowedFd<'_>, offset: u64, bytes: u64) -> Result<u64, Errno> {
    // The kernel takes 0 for the rest of the file.
    if bytes == 0 {
        return Err(Errno::INVAL);
    }
    let (range, mut statistics) = (Range { offset, bytes }, Statistics::default());
    let flags: libc::c_uint = 0;
    // SAFETY: both structures are as the kernel defines them, and live during the call.
    let result = unsafe {
        libc::syscall(SYS_CACHESTAT, file.as_raw_fd(), &raw const range, &raw mut statistics, flags)
    };
    if result == 0 {
        Ok(statistics.cached.saturating_add(statistics.evicted))
    } else {
        Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO))
    }
}

#[cfg(test)]
mod tests {
    use super::existing_pages;
    use rustix::{
        fd::AsFd as _,
        fs::{FallocateFlags, MemfdFlags, fallocate, ftruncate, memfd_create},
        io::{Errno, pwrite},
    };

    const PAGE: u64 = 4096;

    // Promise: F94
    #[test]
    fn touched_pages_exist_until_they_are_punched_out() {
        let file = memfd_create(c"ram", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&file, 64 * PAGE).unwrap();
        let count = |first: u64, pages: u64| existing_pages(file.as_fd(), first * PAGE, pages * PAGE);
        if count(0, 64) == Err(Errno::NOSYS) {
            return sluice_skip::skip("needs Linux 6.5");
        }
        assert_eq!(count(0, 64), Ok(0));
        for page in 8..24 {
            pwrite(&file, &[1], page * PAGE).unwrap();
        }
        assert_eq!((count(0, 64), count(8, 16), count(10, 4), count(24, 40)), (Ok(16), Ok(16), Ok(4), Ok(0)));
        fallocate(&file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, 12 * PAGE, 2 * PAGE)
            .unwrap();
        assert_eq!((count(8, 16), count(12, 2)), (Ok(14), Ok(0)));
        assert_eq!(count(8, 0), Err(Errno::INVAL));
    }
}
