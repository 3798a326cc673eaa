//! Descriptors of this library in a foreign program.
//!
//! Programs close descriptors that they did not open (daemons, shells, test harnesses close all above 2) and open their own, which
//! then have the same numbers. So the library moves its descriptors to high numbers, and checks each before use.

use super::interface::TransportError;
use rustix::{
    fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
    fs::fstat,
    io::{Errno, fcntl_dupfd_cloexec},
};
use std::{
    mem::ManuallyDrop,
    sync::atomic::{AtomicI32, Ordering},
};

/// The lowest numbers to try, depending on the process's limit of descriptors.
const HIGH: [i32; 3] = [512, 128, 32];

/// Every held descriptor, for a forked child to close; -1 in free entries. A transport has a handful.
static ALL: [AtomicI32; 32] = [const { AtomicI32::new(-1) }; 32];

/// Replaces one entry of the list.
fn list(from: i32, to: i32) {
    let found = ALL
        .iter()
        .find(|entry| entry.compare_exchange(from, to, Ordering::AcqRel, Ordering::Relaxed).is_ok());
    debug_assert!(found.is_some(), "more descriptors than the list has room for");
}

/// Closes a forked child's copies. They keep the session of a killed parent alive and are of no use to the child. Calls
/// nothing but `close`, since other threads' locks stay locked for ever in the child.
#[expect(unsafe_code, reason = "closing by number in a forked child")]
pub(crate) extern "C" fn abandon() {
    for entry in &ALL {
        let fd = entry.swap(-1, Ordering::AcqRel);
        if fd >= 0 {
            // SAFETY: the number is held until it is taken off the list; the child's transport fails every call from here on,
            // so the number has no user.
            unsafe { libc::close(fd) };
        }
    }
}

/// A descriptor and the identity of its file when it was moved here.
#[derive(Debug)]
pub(super) struct HeldDescriptor {
    fd: ManuallyDrop<OwnedFd>,
    identity: (u64, u64),
}

impl HeldDescriptor {
    /// Moves a descriptor to a high number, if one is free.
    pub(super) fn new(fd: OwnedFd) -> Result<HeldDescriptor, Errno> {
        let moved = HIGH.iter().find_map(|lowest| fcntl_dupfd_cloexec(&fd, *lowest).ok());
        let fd = moved.unwrap_or(fd);
        let identity = identity(fd.as_fd())?;
        list(-1, fd.as_raw_fd());
        Ok(HeldDescriptor { fd: ManuallyDrop::new(fd), identity })
    }

    /// The descriptor, if it still refers to the same file.
    pub(super) fn get(&self) -> Result<BorrowedFd<'_>, TransportError> {
        if identity(self.fd.as_fd()) == Ok(self.identity) {
            Ok(self.fd.as_fd())
        } else {
            Err(TransportError::Lost)
        }
    }
}

fn identity(fd: BorrowedFd<'_>) -> Result<(u64, u64), Errno> {
    fstat(fd).map(|status| (status.st_dev, status.st_ino))
}

impl Drop for HeldDescriptor {
    #[expect(unsafe_code, reason = "closing only a descriptor that is still ours")]
    fn drop(&mut self) {
        list(self.fd.as_raw_fd(), -1);
        if self.get().is_ok() {
            // SAFETY: dropped nowhere else, and not used after.
            unsafe { ManuallyDrop::drop(&mut self.fd) }
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(unsafe_code, reason = "tests close descriptors behind the library's back")]
    use super::*;
    use rustix::fs::{MemfdFlags, memfd_create};

    fn memfd() -> OwnedFd {
        memfd_create(c"test", MemfdFlags::CLOEXEC).unwrap()
    }

    #[test]
    fn descriptor_moves_to_a_high_number() {
        let held = HeldDescriptor::new(memfd()).unwrap();
        assert!(held.get().unwrap().as_raw_fd() >= 32);
    }

    #[test]
    fn reused_number_is_reported_and_left_open() {
        let held = HeldDescriptor::new(memfd()).unwrap();
        let number = held.get().unwrap().as_raw_fd();
        let other = memfd();
        // SAFETY: a program may do this to any number.
        assert_eq!(unsafe { libc::dup2(other.as_raw_fd(), number) }, number);
        assert!(matches!(held.get(), Err(TransportError::Lost)));
        drop(held);
        // SAFETY: as above; the program's descriptor is still open, so this closes it.
        assert_eq!(unsafe { libc::close(number) }, 0);
    }

    #[test]
    fn closed_number_is_reported() {
        let held = HeldDescriptor::new(memfd()).unwrap();
        let number = held.get().unwrap().as_raw_fd();
        // SAFETY: a program may do this to any number.
        assert_eq!(unsafe { libc::close(number) }, 0);
        assert!(matches!(held.get(), Err(TransportError::Lost)));
    }
}
