//! Address space: inaccessible reservations, and pages mapped into them.
//!
//! A forked child inherits none of it, and has no device.
#![expect(unsafe_code, reason = "maps memory at fixed addresses")]
#![expect(clippy::cast_possible_truncation, reason = "addresses of the device are those of a 64-bit host")]

use std::io;
use std::os::fd::AsRawFd;

use crate::PAGE_BYTES;
use crate::owners::Allocation;

const _: () = assert!(usize::BITS == 64);

/// A range of addresses that belongs to the device: without access or memory until pages are mapped into it.
#[derive(Debug)]
pub struct Reservation {
    address: u64,
    bytes: u64,
}

/// Returns the page size of the host.
#[must_use]
pub fn page_size() -> u64 {
    // SAFETY: no preconditions.
    u64::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(4096)
}

fn size(bytes: u64) -> io::Result<usize> {
    usize::try_from(bytes).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))
}

const NO_ACCESS: i32 = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;

impl Reservation {
    /// Reserves exactly this range; fails if any part of it is in use.
    ///
    /// # Errors
    /// The error of `mmap`.
    pub fn at(address: u64, bytes: u64) -> io::Result<Reservation> {
        let hint = std::ptr::without_provenance_mut(size(address)?);
        // SAFETY: MAP_FIXED_NOREPLACE never replaces a mapping; kernels without it treat the address as a hint.
        let got = unsafe {
            libc::mmap(hint, size(bytes)?, libc::PROT_NONE, NO_ACCESS | libc::MAP_FIXED_NOREPLACE, -1, 0)
        };
        if got == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let reservation = Reservation { address: got.addr() as u64, bytes };
        if reservation.address != address {
            return Err(io::Error::from(io::ErrorKind::AddrInUse));
        }
        reservation.keep_from_children();
        Ok(reservation)
    }

    /// Reserves a range at an address that the kernel chooses, aligned to `align`, a power of two.
    ///
    /// # Errors
    /// The error of `mmap`.
    pub fn anywhere(bytes: u64, align: u64) -> io::Result<Reservation> {
        let padded = bytes.checked_add(align).ok_or_else(|| io::Error::from(io::ErrorKind::OutOfMemory))?;
        // SAFETY: a new mapping at an address that the kernel chooses replaces nothing.
        let got =
            unsafe { libc::mmap(std::ptr::null_mut(), size(padded)?, libc::PROT_NONE, NO_ACCESS, -1, 0) };
        if got == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let start = got.addr() as u64;
        let address = start.next_multiple_of(align);
        let cut = |from: u64, to: u64| {
            if from < to {
                // SAFETY: both ends are unused parts of the mapping made above.
                unsafe {
                    libc::munmap(std::ptr::without_provenance_mut(from as usize), (to - from) as usize)
                };
            }
        };
        cut(start, address);
        cut(address + bytes, start + padded);
        let reservation = Reservation { address, bytes };
        reservation.keep_from_children();
        Ok(reservation)
    }

    fn keep_from_children(&self) {
        let start = std::ptr::without_provenance_mut(self.address as usize);
        // SAFETY: the range is this reservation's. On failure a child inherits the range but cannot use it.
        unsafe { libc::madvise(start, self.bytes as usize, libc::MADV_DONTFORK) };
    }

    /// Returns the first address.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Returns the length in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        // SAFETY: the range is this reservation's, and all pages mapped into it are unmapped by now.
        unsafe { libc::munmap(std::ptr::without_provenance_mut(self.address as usize), self.bytes as usize) };
    }
}

/// Maps `bytes` of an allocation, from `offset` on, at an address inside a reservation. All are multiples of 2 MiB.
///
/// # Safety
/// The range must lie in a live [`Reservation`] of the caller, and its present mapping must have no user.
///
/// # Errors
/// The error of `mmap`; the range is then reserved without pages.
pub unsafe fn map_pages(address: u64, allocation: &Allocation, offset: u64, bytes: u64) -> io::Result<()> {
    let mut skip = offset / PAGE_BYTES;
    let mut left = bytes / PAGE_BYTES;
    let mut at = address;
    for run in allocation.runs() {
        let skipped = run.count.min(skip);
        skip -= skipped;
        let count = (run.count - skipped).min(left);
        if count == 0 {
            continue;
        }
        let length = count * PAGE_BYTES;
        let start = std::ptr::without_provenance_mut(at as usize);
        // SAFETY: the caller owns the range, and the pages lie within `hbm`.
        let got = unsafe {
            libc::mmap(
                start,
                length as usize,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED | libc::MAP_FIXED,
                allocation.device().hbm.as_raw_fd(),
                ((run.first + skipped) * PAGE_BYTES).cast_signed(),
            )
        };
        if got == libc::MAP_FAILED {
            let error = io::Error::last_os_error();
            // SAFETY: the same range as above.
            let _ = unsafe { unmap_pages(address, at - address) };
            return Err(error);
        }
        // SAFETY: the range was just mapped. On failure a child inherits it.
        unsafe { libc::madvise(start, length as usize, libc::MADV_DONTFORK) };
        at += length;
        left -= count;
    }
    if left == 0 { Ok(()) } else { Err(io::Error::from(io::ErrorKind::InvalidInput)) }
}

/// Removes access to a range; it stays reserved.
///
/// # Safety
/// The range must lie in a live [`Reservation`] of the caller, and its mapping must have no user.
///
/// # Errors
/// The error of `mmap`.
pub unsafe fn unmap_pages(address: u64, bytes: u64) -> io::Result<()> {
    if bytes == 0 {
        return Ok(());
    }
    let start = std::ptr::without_provenance_mut(address as usize);
    // SAFETY: the caller owns the range.
    let got =
        unsafe { libc::mmap(start, bytes as usize, libc::PROT_NONE, NO_ACCESS | libc::MAP_FIXED, -1, 0) };
    if got == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the range was just mapped. On failure a child inherits the range but cannot use it.
    unsafe { libc::madvise(start, bytes as usize, libc::MADV_DONTFORK) };
    Ok(())
}
