//! Chunks: parts of a memory file, which other processes import by a descriptor.

use super::{Handle, next, pointer};
use core::ffi::c_int;
use std::{
    collections::{BTreeMap, HashMap},
    sync::{LazyLock, Mutex, MutexGuard, PoisonError},
};

/// Granularity of chunks.
pub(super) const GRANULARITY: usize = 2 << 20;
/// Bytes of each device, for each process of its own; `SLUICE_NULL_MEMORY_MIB` overrides it.
const MEMORY: usize = 2 << 30;
/// Bytes of the memory file, which has pages only for written ranges.
const FILE: i64 = 1 << 46;
/// An export's file position: the first granule of its part in the upper bits, the number of granules in the lower.
const COUNT_BITS: u32 = 20;

static BYTES: LazyLock<usize> = LazyLock::new(|| {
    let text = std::env::var("SLUICE_NULL_MEMORY_MIB").ok();
    text.and_then(|text| text.parse::<usize>().ok()).map_or(MEMORY, |mib| mib << 20)
});

static STATE: LazyLock<Mutex<Memory>> = LazyLock::new(Mutex::default);

pub(super) fn memory_bytes() -> usize {
    *BYTES
}

pub(super) fn memory() -> MutexGuard<'static, Memory> {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

struct Chunk {
    file: c_int,
    granule: usize,
    bytes: usize,
    /// True for a chunk of this process's own file.
    own: bool,
    exported: bool,
    /// Number of users: its handle, and its mappings.
    holds: usize,
}

/// Memory of this process.
#[derive(Default)]
pub(super) struct Memory {
    file: Option<c_int>,
    /// Bytes of own chunks.
    pub(super) used: usize,
    next_granule: usize,
    /// Free parts, by their bytes.
    free: HashMap<usize, Vec<usize>>,
    chunks: HashMap<Handle, Chunk>,
    /// Mappings by address.
    mapped: BTreeMap<u64, Handle>,
    /// Files of other processes, one descriptor each.
    files: HashMap<(u64, u64), c_int>,
}

const fn offset(granule: usize) -> i64 {
    // The file is far smaller than the largest position.
    granule.wrapping_mul(GRANULARITY).cast_signed() as i64
}

impl Memory {
    fn file(&mut self) -> Option<c_int> {
        if let Some(file) = self.file {
            return Some(file);
        }
        // SAFETY: makes a descriptor.
        let file = unsafe { libc::memfd_create(c"null-gpu".as_ptr(), libc::MFD_CLOEXEC) };
        // SAFETY: our own descriptor.
        if file < 0 || unsafe { libc::ftruncate(file, FILE) } != 0 {
            return None;
        }
        Some(*self.file.insert(file))
    }

    pub(super) fn create(&mut self, bytes: usize) -> Option<Handle> {
        let used = self.used.checked_add(bytes).filter(|used| *used <= memory_bytes())?;
        let file = self.file()?;
        let granule = self.free.get_mut(&bytes).and_then(Vec::pop).unwrap_or_else(|| {
            let granule = self.next_granule;
            self.next_granule += bytes / GRANULARITY;
            granule
        });
        self.used = used;
        Some(self.insert(Chunk { file, granule, bytes, own: true, exported: false, holds: 1 }))
    }

    fn insert(&mut self, chunk: Chunk) -> Handle {
        let handle = next();
        self.chunks.insert(handle, chunk);
        handle
    }

    pub(super) fn export(&mut self, handle: Handle) -> Option<c_int> {
        let chunk = self.chunks.get_mut(&handle)?;
        let path = std::ffi::CString::new(format!("/proc/self/fd/{}", chunk.file)).ok()?;
        // SAFETY: a C string.
        let file = unsafe { libc::open(path.as_ptr(), libc::O_RDWR | libc::O_CLOEXEC) };
        let position = i64::try_from((chunk.granule << COUNT_BITS) | (chunk.bytes / GRANULARITY)).ok()?;
        // SAFETY: our own descriptor.
        if file < 0 || unsafe { libc::lseek(file, position, libc::SEEK_SET) } != position {
            return None;
        }
        chunk.exported = true;
        Some(file)
    }

    pub(super) fn import(&mut self, descriptor: c_int) -> Option<Handle> {
        // SAFETY: the caller's descriptor; a wrong one is an error.
        let position = unsafe { libc::lseek(descriptor, 0, libc::SEEK_CUR) };
        let position = usize::try_from(position).ok()?;
        let (granule, count) = (position >> COUNT_BITS, position & ((1 << COUNT_BITS) - 1));
        // SAFETY: an all-zero `stat` is valid.
        let mut stat: libc::stat = unsafe { core::mem::zeroed() };
        // The C library would use a path, which the filter of a settled worker does not allow.
        // SAFETY: the caller's descriptor, and our own structure.
        if count == 0 || unsafe { libc::syscall(libc::SYS_fstat, descriptor, &raw mut stat) } != 0 {
            return None;
        }
        let file = match self.files.get(&(stat.st_dev, stat.st_ino)) {
            Some(file) => *file,
            None => {
                // SAFETY: the caller's descriptor.
                let file = unsafe { libc::fcntl(descriptor, libc::F_DUPFD_CLOEXEC, 0) };
                if file < 0 {
                    return None;
                }
                self.files.insert((stat.st_dev, stat.st_ino), file);
                file
            }
        };
        let bytes = count * GRANULARITY;
        Some(self.insert(Chunk { file, granule, bytes, own: false, exported: false, holds: 1 }))
    }

    pub(super) fn map(&mut self, at: u64, bytes: usize, handle: Handle) -> bool {
        let Some(chunk) = self.chunks.get_mut(&handle).filter(|chunk| chunk.bytes == bytes) else {
            return false;
        };
        let flags = libc::MAP_SHARED | libc::MAP_FIXED | libc::MAP_NORESERVE;
        // SAFETY: a range that `cuMemAddressReserve` gave out.
        let got = unsafe {
            libc::mmap(pointer(at), bytes, libc::PROT_NONE, flags, chunk.file, offset(chunk.granule))
        };
        if got == libc::MAP_FAILED {
            return false;
        }
        chunk.holds += 1;
        self.mapped.insert(at, handle);
        true
    }

    pub(super) fn unmap(&mut self, at: u64, bytes: usize) {
        let end = at.saturating_add(bytes as u64);
        let gone: Vec<(u64, Handle)> =
            self.mapped.range(at..end).map(|(at, handle)| (*at, *handle)).collect();
        for (at, handle) in gone {
            self.mapped.remove(&at);
            self.drop_hold(handle);
        }
    }

    /// Gives up the handle or a mapping. Parts that others may have imported are not reused.
    pub(super) fn drop_hold(&mut self, handle: Handle) -> bool {
        let Some(chunk) = self.chunks.get_mut(&handle) else { return false };
        chunk.holds -= 1;
        if chunk.holds == 0
            && let Some(chunk) = self.chunks.remove(&handle)
            && chunk.own
        {
            self.used -= chunk.bytes;
            if !chunk.exported {
                let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
                let bytes = offset(chunk.bytes / GRANULARITY);
                // SAFETY: our own descriptor. If the call fails, the pages stay until they are reused.
                unsafe { libc::fallocate(chunk.file, mode, offset(chunk.granule), bytes) };
                self.free.entry(chunk.bytes).or_default().push(chunk.granule);
            }
        }
        true
    }
}
