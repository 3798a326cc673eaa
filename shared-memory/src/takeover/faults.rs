//! userfaultfd(2): threads that touch a missing page of a range are held.

#![expect(unsafe_code, reason = "ioctls of userfaultfd(2)")]

use core::sync::atomic::{AtomicBool, Ordering};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fd::{AsFd as _, AsRawFd as _, OwnedFd},
    io::Errno,
    mm::{self, UserfaultfdFlags},
};

/// `UFFD_API` of `linux/userfaultfd.h`; also the type of its ioctls.
const UFFD_API: u64 = 0xaa;
const UFFD_USER_MODE_ONLY: u32 = 1;
/// Moves of mappings are events, and the registration moves along.
pub(super) const UFFD_FEATURE_EVENT_REMAP: u64 = 1 << 2;
const UFFDIO_REGISTER_MODE_MISSING: u64 = 1;
/// `UFFDIO_API`, `UFFDIO_REGISTER` and `UFFDIO_COPY`.
const UFFDIO_API: libc::c_ulong = request(0x3f, size_of::<UserfaultApi>());
const UFFDIO_REGISTER: libc::c_ulong = request(0x00, size_of::<Register>());
const UFFDIO_COPY: libc::c_ulong = request(0x03, size_of::<Copy>());
/// The first byte of a `struct uffd_msg` about a move.
const UFFD_EVENT_REMAP: u8 = 0x14;
/// Bytes of a `struct uffd_msg`.
const EVENT_BYTES: usize = 32;

/// `_IOWR` of `asm-generic/ioctl.h`.
const fn request(number: libc::c_ulong, bytes: usize) -> libc::c_ulong {
    (3 << 30) | ((bytes as libc::c_ulong) << 16) | ((UFFD_API as libc::c_ulong) << 8) | number
}

#[repr(C)]
struct UserfaultApi {
    api: u64,
    features: u64,
    ioctls: u64,
}

#[repr(C)]
struct Register {
    start: u64,
    bytes: u64,
    mode: u64,
    ioctls: u64,
}

#[repr(C)]
struct Copy {
    to: u64,
    from: u64,
    bytes: u64,
    mode: u64,
    copied: i64,
}

/// A descriptor of userfaultfd(2). When it is closed, the threads that it holds go on.
pub(super) struct Faults(OwnedFd);

impl Faults {
    pub(super) fn open(features: u64) -> Result<Faults, Errno> {
        let flags = UserfaultfdFlags::CLOEXEC | UserfaultfdFlags::NONBLOCK;
        // Without the privilege the kernel holds threads only when they run the program's code: a system call that touches the range fails
        // with EFAULT.
        // SAFETY: ranges that the callers own are registered, for a moment.
        let file = unsafe { mm::userfaultfd(flags) }.or_else(|_| unsafe {
            mm::userfaultfd(flags | UserfaultfdFlags::from_bits_retain(UFFD_USER_MODE_ONLY))
        })?;
        let faults = Faults(file);
        faults.control(UFFDIO_API, &mut UserfaultApi { api: UFFD_API, features, ioctls: 0 })?;
        Ok(faults)
    }

    /// Holds every thread that touches a missing page of the range.
    pub(super) fn register(&self, at: usize, bytes: usize) -> Result<(), Errno> {
        let (start, bytes) = (at as u64, bytes as u64);
        self.control(
            UFFDIO_REGISTER,
            &mut Register { start, bytes, mode: UFFDIO_REGISTER_MODE_MISSING, ioctls: 0 },
        )
    }

    /// Gives the missing pages at `to` the bytes of those at `from`.
    pub(super) fn fill(&self, to: usize, from: usize, bytes: usize) -> Result<(), Errno> {
        let mut done = 0;
        while done < bytes {
            let mut copy = Copy {
                to: (to + done) as u64,
                from: (from + done) as u64,
                bytes: (bytes - done) as u64,
                mode: 0,
                copied: 0,
            };
            let result = self.control(UFFDIO_COPY, &mut copy);
            match result {
                Err(error) if error != Errno::AGAIN => return Err(error),
                _ => done += usize::try_from(copy.copied).unwrap_or(0),
            }
        }
        Ok(())
    }

    /// Reads events up to that of one move of a mapping, unless there is to be none.
    pub(super) fn read_event(&self, ended: &AtomicBool) {
        let mut event = [0; EVENT_BYTES];
        while !ended.load(Ordering::Acquire) {
            let mut polled = [PollFd::new(&self.0, PollFlags::IN)];
            let tick = Timespec { tv_sec: 0, tv_nsec: 2_000_000 };
            // Faults of held threads come along; nothing is to be done for them here.
            let read =
                poll(&mut polled, Some(&tick)) == Ok(1) && rustix::io::read(&self.0, &mut event).is_ok();
            if read && event.first() == Some(&UFFD_EVENT_REMAP) {
                return;
            }
        }
    }

    fn control<T>(&self, request: libc::c_ulong, value: &mut T) -> Result<(), Errno> {
        // SAFETY: the request's structure is `T`, which lives during the call.
        match unsafe { libc::ioctl(self.0.as_fd().as_raw_fd(), request, core::ptr::from_mut(value)) } {
            0 => Ok(()),
            _ => Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)),
        }
    }
}
