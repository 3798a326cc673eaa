//! Descriptors of this library in a foreign program.
//!
//! Programs close descriptors they do not know (daemons, shells, test harnesses close all above 2) and open their own,
//! which then have the same numbers. So ours live at high numbers, and what a number means is checked before use.

use super::TransportError;
use rustix::{
    fd::{AsFd, BorrowedFd, OwnedFd},
    fs::fstat,
    io::{Errno, fcntl_dupfd_cloexec},
};
use std::mem::ManuallyDrop;

/// Lowest numbers that are tried, depending on how many descriptors the process may have.
const HIGH: [i32; 3] = [512, 128, 32];

/// A descriptor and what it stood for when it was taken into custody.
#[derive(Debug)]
pub(super) struct Held {
    fd: ManuallyDrop<OwnedFd>,
    identity: (u64, u64),
}

impl Held {
    /// Moves a descriptor to a high number, if there is one.
    pub(super) fn new(fd: OwnedFd) -> Result<Held, Errno> {
        let moved = HIGH.iter().find_map(|lowest| fcntl_dupfd_cloexec(&fd, *lowest).ok());
        let fd = moved.unwrap_or(fd);
        let identity = identity(fd.as_fd())?;
        Ok(Held { fd: ManuallyDrop::new(fd), identity })
    }

    /// The descriptor, if it still is what it was.
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

impl Drop for Held {
    #[expect(unsafe_code, reason = "closing only what is still ours")]
    fn drop(&mut self) {
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
    use rustix::{
        fd::AsRawFd,
        fs::{MemfdFlags, memfd_create},
    };

    fn memfd() -> OwnedFd {
        memfd_create(c"test", MemfdFlags::CLOEXEC).unwrap()
    }

    #[test]
    fn lives_at_a_high_number() {
        let held = Held::new(memfd()).unwrap();
        assert!(held.get().unwrap().as_raw_fd() >= 32);
    }

    #[test]
    fn a_number_that_means_something_else_is_noticed_and_left_alone() {
        let held = Held::new(memfd()).unwrap();
        let number = held.get().unwrap().as_raw_fd();
        let other = memfd();
        // SAFETY: what a program may do to any number.
        assert_eq!(unsafe { libc::dup2(other.as_raw_fd(), number) }, number);
        assert!(matches!(held.get(), Err(TransportError::Lost)));
        drop(held);
        // SAFETY: as above; the program's descriptor is still open, so this closes it.
        assert_eq!(unsafe { libc::close(number) }, 0);
    }

    #[test]
    fn a_closed_number_is_noticed() {
        let held = Held::new(memfd()).unwrap();
        let number = held.get().unwrap().as_raw_fd();
        // SAFETY: what a program may do to any number.
        assert_eq!(unsafe { libc::close(number) }, 0);
        assert!(matches!(held.get(), Err(TransportError::Lost)));
    }
}
