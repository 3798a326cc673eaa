//! The `header` file: its layout, and the mapping through which every process reads and changes it.
//!
//! All of it is atomic words. One instruction changes a word, so a process killed at any point leaves nothing half written, and
//! there is no lock to recover.
#![expect(unsafe_code, reason = "maps a file that other processes change and views it as atomics")]

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64};

/// `softgpu` and the version of this layout; written last when a header is created.
pub(crate) const MAGIC: u64 = u64::from_le_bytes(*b"softgpu\x02");
/// Maximum number of owners of a device.
pub(crate) const OWNERS: usize = 512;
/// Words that hold one bit per owner.
pub(crate) const HOLDER_WORDS: usize = OWNERS / 64;
/// Maximum number of allocations of a device.
pub(crate) const RECORDS: usize = 1 << 16;

/// Page 0: the properties of the device. Only `magic` and `high_water` are written after creation.
#[repr(C, align(4096))]
pub(crate) struct IdentityPage {
    pub(crate) magic: AtomicU64,
    pub(crate) pages: AtomicU64,
    pub(crate) scale: AtomicU64,
    /// The model's key, padded with zeroes.
    pub(crate) model: [AtomicU64; 4],
    pub(crate) uuid: [AtomicU64; 2],
    pub(crate) index: AtomicU64,
    /// One more than the highest record ever used: bounds every scan.
    pub(crate) high_water: AtomicU64,
}

/// Words of a copy of the state of instances.
pub(crate) const INSTANCE_WORDS: usize = 3583;

/// The state of instances in two copies, and the number of changes, which selects the valid copy. See `instances`.
#[repr(C, align(4096))]
pub(crate) struct Instances {
    pub(crate) valid: AtomicU64,
    pub(crate) copies: [[AtomicU64; INSTANCE_WORDS]; 2],
}

/// One process that uses the device. A lock on the file proves that the process is alive, see [`owner_byte`].
#[repr(C, align(256))]
pub(crate) struct OwnerSlot {
    /// Process id; 0 in a free slot.
    pub(crate) pid: AtomicU64,
    /// Field 22 of `/proc/<pid>/stat`.
    pub(crate) start_time: AtomicU64,
    /// PID namespace of `pid`.
    pub(crate) namespace: AtomicU64,
    pub(crate) client: AtomicU64,
    /// Instance that the process is confined to, as `slots` writes it; 0 means the whole device.
    pub(crate) instance: AtomicU64,
    pub(crate) busy_nanoseconds: AtomicU64,
    pub(crate) launches: AtomicU64,
    /// Number of living contexts.
    pub(crate) contexts: AtomicU64,
    /// Time at which its kernels last ran, by the system's monotonic clock; 0 if none run.
    pub(crate) running: AtomicU64,
    /// Processor time per thread that its kernels got while others ran kernels. The owner with less has priority when processors
    /// are short.
    pub(crate) worked: AtomicU64,
    /// Time at which its kernels last got much less processor time than they could use.
    pub(crate) starved: AtomicU64,
}

/// One allocation: see `records` for the meaning of `state`.
#[repr(C, align(128))]
pub(crate) struct Record {
    pub(crate) state: AtomicU64,
    /// One bit per owner that holds or maps the allocation.
    pub(crate) holders: [AtomicU64; HOLDER_WORDS],
    pub(crate) pages: AtomicU64,
    /// Purpose of the allocation, and whether it was ever exported.
    pub(crate) flags: AtomicU32,
    /// Epoch of the instance that the pages belong to; 0 for the whole device.
    pub(crate) instance: AtomicU32,
    /// The owner that made the allocation, plus one; 0 after that owner has ended.
    pub(crate) maker: AtomicU32,
    /// Time at which a holder's process last ended while it held the record, by the system's monotonic clock; 0 before that.
    pub(crate) ended: AtomicU64,
}

const IDENTITY: usize = 0;
const INSTANCES: usize = 0x1000;
const OWNER_SLOTS: usize = 0x10000;
const RECORD_SLOTS: usize = 0x30000;
const PAGES: usize = RECORD_SLOTS + RECORDS * size_of::<Record>();

const _: () = {
    assert!(size_of::<IdentityPage>() == INSTANCES);
    assert!(INSTANCES + size_of::<Instances>() <= OWNER_SLOTS);
    assert!(OWNER_SLOTS + OWNERS * size_of::<OwnerSlot>() == RECORD_SLOTS);
    assert!(size_of::<Record>() == 128);
};

/// Bytes of the file for a device with `pages` pages.
pub(crate) const fn bytes(pages: usize) -> usize {
    (PAGES + pages * 8).next_multiple_of(4096)
}

/// Offset of the byte, far past the end of the file, whose lock proves that the owner of this slot is alive.
pub(crate) fn owner_byte(slot: usize) -> i64 {
    (1 << 40) + i64::try_from(slot).unwrap_or(0)
}

pub(crate) struct Header {
    base: NonNull<u8>,
    length: usize,
    pages: usize,
}

// SAFETY: the mapping is shared memory of atomics; it may be used from any thread.
unsafe impl Send for Header {}
// SAFETY: as above.
unsafe impl Sync for Header {}

impl Header {
    /// Maps a header for `pages` pages; the file must be long enough.
    pub(crate) fn map(file: &File, pages: usize) -> io::Result<Header> {
        let length = bytes(pages);
        if file.metadata()?.len() < length as u64 {
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the header is too short"));
        }
        // SAFETY: a new shared mapping of an open file, at an address that the kernel chooses.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                length,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                file.as_raw_fd(),
                0,
            )
        };
        let base = if base == libc::MAP_FAILED { None } else { NonNull::new(base.cast::<u8>()) };
        let Some(base) = base else { return Err(io::Error::last_os_error()) };
        // SAFETY: the range was just mapped. On failure a child inherits the range but never uses it.
        unsafe { libc::madvise(base.as_ptr().cast(), length, libc::MADV_DONTFORK) };
        Ok(Header { base, length, pages })
    }

    fn at<T>(&self, offset: usize, count: usize) -> &[T] {
        assert!(offset + count * size_of::<T>() <= self.length);
        let start = self.base.as_ptr().wrapping_add(offset).cast::<T>();
        // SAFETY: the range lies in the mapping, which lives as long as `self`; each T used here is made of atomics,
        // for which any bit pattern is valid, and the offsets are multiples of their alignment.
        unsafe { std::slice::from_raw_parts(start, count) }
    }

    pub(crate) fn identity(&self) -> &IdentityPage {
        &self.at::<IdentityPage>(IDENTITY, 1)[0]
    }

    pub(crate) fn instances(&self) -> &Instances {
        &self.at::<Instances>(INSTANCES, 1)[0]
    }

    pub(crate) fn owners(&self) -> &[OwnerSlot] {
        self.at(OWNER_SLOTS, OWNERS)
    }

    pub(crate) fn records(&self) -> &[Record] {
        self.at(RECORD_SLOTS, RECORDS)
    }

    /// One word per page of `hbm`: see `crate::records`.
    pub(crate) fn pages(&self) -> &[AtomicU64] {
        self.at(PAGES, self.pages)
    }
}

impl Drop for Header {
    fn drop(&mut self) {
        // SAFETY: the range was mapped by `map` and no reference to it outlives `self`.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.length) };
    }
}
