//! Memory of this process in unusual shapes, and a crash.

#![expect(unsafe_code, reason = "maps memory at chosen addresses, and crashes for a test")]

use core::ffi::c_void;
use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap};

/// Size of a small page.
const PAGE: usize = 4096;

/// The kind of pages behind an area.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pages {
    /// Pages of 4 KiB.
    Small,
    /// Pages that the kernel may make huge.
    Transparent,
    /// Pages of the host's pool of huge pages.
    Huge,
}

/// Bytes of the host's memory that programs can take without swapping.
pub(crate) fn available_memory() -> Option<u64> {
    memory_figure("MemAvailable:")
}

/// A figure of the kernel about the host's memory, in bytes.
pub(crate) fn memory_figure(name: &str) -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    Some(line.split_whitespace().next()?.parse::<u64>().ok()? << 10)
}

/// Memory of this process. It is never borrowed as Rust memory.
#[derive(Debug)]
pub(crate) struct Area {
    at: *mut c_void,
    bytes: usize,
}

impl Area {
    /// Reserves addresses that no access is permitted to, at a multiple of 2 MiB.
    pub(crate) fn reserve(bytes: usize) -> Result<Area, Errno> {
        const HUGE: usize = 2 << 20;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: the kernel chooses the address, so no other mapping changes.
        let at = unsafe { mmap_anonymous(core::ptr::null_mut(), bytes + HUGE, ProtFlags::empty(), flags) }?;
        let skip = at.addr().next_multiple_of(HUGE) - at.addr();
        let area = Area { at: at.wrapping_byte_add(skip), bytes };
        for (from, length) in [(at, skip), (area.at.wrapping_byte_add(bytes), HUGE - skip)] {
            if length > 0 {
                // SAFETY: these are the ends of the new mapping, which nothing uses.
                unsafe { munmap(from, length) }?;
            }
        }
        Ok(area)
    }

    /// Maps writable memory.
    pub(crate) fn pages(bytes: usize, pages: Pages) -> Result<Area, Errno> {
        let area = Area::reserve(bytes)?;
        let flags = MapFlags::PRIVATE | MapFlags::FIXED;
        let flags = if pages == Pages::Huge { flags | MapFlags::HUGETLB } else { flags };
        // SAFETY: the mapping replaces the reservation above, which nothing uses.
        unsafe { mmap_anonymous(area.at, bytes, ProtFlags::READ | ProtFlags::WRITE, flags) }?;
        if pages == Pages::Transparent {
            // SAFETY: the advice changes the kind of the pages and not their contents.
            unsafe { madvise(area.at, bytes, Advice::LinuxHugepage) }?;
        }
        Ok(area)
    }

    /// Maps `count` pages of a file next to one another, in descending order of the file, so that each is a mapping of its own.
    pub(crate) fn pieces(count: usize) -> Result<Area, Errno> {
        let file = rustix::fs::memfd_create("pieces", rustix::fs::MemfdFlags::CLOEXEC)?;
        rustix::fs::ftruncate(&file, (count * PAGE) as u64)?;
        let area = Area::reserve(count * PAGE)?;
        for piece in 0..count {
            let at = area.at.wrapping_byte_add(piece * PAGE);
            let offset = ((count - 1 - piece) * PAGE) as u64;
            let flags = MapFlags::SHARED | MapFlags::FIXED;
            // SAFETY: the page lies in the reservation above, which nothing uses.
            unsafe { mmap(at, PAGE, ProtFlags::READ | ProtFlags::WRITE, flags, &file, offset) }?;
        }
        Ok(area)
    }

    /// First address.
    pub(crate) fn address(&self) -> u64 {
        self.at.expose_provenance() as u64
    }

    /// Length.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes as u64
    }

    /// Gives the addresses back.
    pub(crate) fn release(&mut self) -> Result<(), Errno> {
        let bytes = core::mem::take(&mut self.bytes);
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: the area is this value's own, and nothing borrows from it.
        unsafe { munmap(self.at, bytes) }
    }
}

impl Drop for Area {
    fn drop(&mut self) {
        // Memory that cannot be unmapped stays until the process ends, which is soon.
        let _ = self.release();
    }
}

/// A page that device and host both read, with a flag.
#[repr(C, align(4096))]
pub(crate) struct Flag([AtomicU32; PAGE / 4]);

impl Flag {
    /// A lowered flag, for the life of the process: a kernel may look at it.
    pub(crate) fn new() -> &'static Flag {
        Box::leak(Box::new(Flag([const { AtomicU32::new(0) }; PAGE / 4])))
    }

    /// Address of the flag.
    pub(crate) fn address(&self) -> u64 {
        core::ptr::from_ref(self).expose_provenance() as u64
    }

    /// Length of its page.
    pub(crate) fn bytes(&self) -> u64 {
        PAGE as u64
    }

    /// Raises the flag.
    pub(crate) fn raise(&self) {
        self.0[0].store(1, Ordering::Release);
    }
}

/// A word on the stack that a kernel may write.
pub(crate) struct Word(UnsafeCell<u32>);

impl Word {
    /// Zero.
    pub(crate) const fn new() -> Word {
        Word(UnsafeCell::new(0))
    }

    /// Its address.
    pub(crate) fn address(&self) -> u64 {
        self.0.get().expose_provenance() as u64
    }

    /// Its value.
    pub(crate) fn read(&self) -> u32 {
        // SAFETY: the word is live; the kernel that may write it is complete.
        unsafe { self.0.get().read_volatile() }
    }
}

/// Ends the process by a signal, as a fault in the driver does.
pub(crate) fn crash() {
    // SAFETY: there is no memory at address 8; the fault is the purpose, and a test's only.
    unsafe { core::ptr::without_provenance_mut::<u32>(8).write_volatile(1) };
}
