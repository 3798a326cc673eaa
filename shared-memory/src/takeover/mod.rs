//! Memory of this process whose pages are replaced, at the same addresses, while its other threads use it.
//!
//! The guest's library calls it to register memory. It owns the moment of the exchange, and a handler of faults during it. It must never
//! lose a write of another thread.
//!
//! A program may ask that memory it already has be shared ([`take_over`]), and later that it be its own again
//! ([`hand_back`]). Both move the bytes to other pages, and no write of another thread may be lost between the copy and the new
//! mapping: the pages at the range's edges hold other objects of the program, the records of its allocator among them. So the range is
//! empty for a moment, and userfaultfd(2) holds every thread that touches it until the new pages are there.
//!
//! While the range is empty, the calling thread uses its stack and system calls only. It allocates nothing, takes no lock
//! and handles no signal, because any of these may touch the range and wait for this very thread.

#![expect(unsafe_code, reason = "mappings that replace memory of the program")]

mod faults;
mod fork;
mod maps;

pub use fork::Fork;

use crate::signals::{BlockedSignals, OF_INSTRUCTIONS};
use core::{
    ffi::c_void,
    sync::atomic::{AtomicBool, Ordering},
};
use faults::{Faults, UFFD_FEATURE_EVENT_REMAP};
use fork::SharedRange;
use maps::{maps, private_parts};
use rustix::{
    fd::BorrowedFd,
    io::Errno,
    mm::{self, MapFlags, MremapFlags, ProtFlags},
};

const PAGE: usize = 4096;
/// Mappings that a range may consist of, and files that may replace them.
const MOST: usize = 128;
/// Pages are moved, and their mapping stays behind, empty: an address that is free could be taken by another thread.
const MOVE: MremapFlags = MremapFlags::MAYMOVE.union(MremapFlags::DONTUNMAP);

/// The reason why the pages of a range cannot be replaced. The range is as it was.
#[derive(Debug, thiserror::Error)]
pub enum TakeOverError {
    /// A part of the range is not mapped.
    #[error("{0:#x} is not mapped")]
    Unmapped(usize),
    /// A part of the range is memory of a kind that cannot be replaced.
    #[error("the memory at {at:#x} is {kind}")]
    Kind {
        /// The first address of the part.
        at: usize,
        /// Its kind.
        kind: &'static str,
    },
    /// The kernel refused a step.
    #[error("{what}: {error}")]
    Kernel {
        /// The step.
        what: &'static str,
        /// The kernel's error.
        error: Errno,
    },
}

fn kernel(what: &'static str) -> impl Fn(Errno) -> TakeOverError {
    move |error| TakeOverError::Kernel { what, error }
}

/// Whole pages of a file.
#[derive(Clone, Copy, Debug)]
pub struct FilePages<'f> {
    /// The file.
    pub file: BorrowedFd<'f>,
    /// Offset of the first page in the file.
    pub offset: u64,
    /// Length in bytes.
    pub bytes: usize,
}

/// True if the kernel lets this process replace pages under its threads: Linux 5.11, and no filter of system calls against it.
#[must_use]
pub fn is_possible() -> bool {
    Faults::open(UFFD_FEATURE_EVENT_REMAP).is_ok()
}

/// Replaces the private memory at `at` by pages of files, which receive its bytes first.
///
/// # Errors
/// [`TakeOverError`]; the range is then as it was.
///
/// # Safety
/// `at` and `bytes` are whole pages of memory that the program hands over. `window` is the address of a mapping of the same pages of the
/// files, readable and writable, which nothing else uses until this function returns.
pub unsafe fn take_over(
    at: usize,
    bytes: usize,
    window: usize,
    pages: &[FilePages<'_>],
) -> Result<(), TakeOverError> {
    let too_many = TakeOverError::Kind { at, kind: "made of too many mappings" };
    let (parts, count) = on_stack(&private_parts(&maps()?, at, bytes)?).ok_or(too_many)?;
    let parts = parts.get(..count).unwrap_or_default();
    let (pages, count) = on_stack(pages).ok_or(TakeOverError::Kind { at, kind: "too large" })?;
    let pages = pages.get(..count).unwrap_or_default();
    let faults = Faults::open(0).map_err(kernel("userfaultfd"))?;
    let scratch = Scratch::new(bytes, ProtFlags::empty())?;
    let shared = SharedRange::of(at, pages)?;
    let _signals = BlockedSignals::new(&OF_INSTRUCTIONS);
    let mut ranges = fork::ranges();
    ranges.reserve(shared.len());
    faults.register(at, bytes).map_err(kernel("userfaultfd: the range"))?;
    let mut moved = Ok(());
    let mut done = 0;
    for part in parts {
        // SAFETY: the part is one mapping of the range, which the caller hands over; its new place is in the scratch range.
        moved = unsafe {
            mm::mremap_fixed(
                pointer(part.at),
                part.bytes,
                part.bytes,
                MOVE,
                pointer(scratch.base + (part.at - at)),
            )
        }
        .map(drop)
        .map_err(kernel("mremap"));
        if moved.is_err() {
            break;
        }
        done += 1;
    }
    let mapped = moved.and_then(|()| {
        // SAFETY: the scratch range has the program's pages, the window those of the file. Threads that touch the range wait.
        unsafe {
            core::ptr::copy_nonoverlapping(pointer(scratch.base).cast::<u8>(), pointer(window).cast(), bytes)
        };
        // SAFETY: the range is the program's, and empty.
        unsafe { map_over(at, pages) }.map_err(kernel("mmap"))
    });
    if mapped.is_err() {
        for part in parts.get(..done).unwrap_or_default() {
            // SAFETY: back to the place from where the part was moved, which is empty or maps the file.
            let back = unsafe {
                mm::mremap_fixed(
                    pointer(scratch.base + (part.at - at)),
                    part.bytes,
                    part.bytes,
                    MOVE,
                    pointer(part.at),
                )
            };
            // The move needs no more mappings than there were, so it has no reason to fail; if it does, the memory is lost.
            assert!(back.is_ok(), "the program's memory cannot be put back");
        }
    }
    // Now the held threads go on and find the new pages, or the old ones.
    drop(faults);
    if mapped.is_ok() {
        ranges.extend(shared);
    }
    mapped
}

/// Replaces pages of files at `at`, which [`take_over`] put there, by private memory with the same bytes. A part that the program has
/// unmapped since, or mapped something else over, stays as it is.
///
/// # Errors
/// [`TakeOverError`]; the range is then as it was, or a part of it is private memory already.
///
/// # Safety
/// As for [`take_over`]; `pages` and `window` are those of that call, and nothing else writes to the window any more.
pub unsafe fn hand_back(
    at: usize,
    bytes: usize,
    window: usize,
    pages: &[FilePages<'_>],
) -> Result<(), TakeOverError> {
    let maps = maps()?;
    let mut ranges = fork::ranges();
    for (pages, range) in pages.iter().zip(SharedRange::of(at, pages)?) {
        for part in range.parts(&maps) {
            let offset = range.offset + (part.at - range.at) as u64;
            let pages = FilePages { file: pages.file, offset, bytes: part.bytes };
            // SAFETY: as for the whole range; this part has these pages.
            unsafe { hand_back_part(part.at, window + (part.at - at), pages) }?;
        }
    }
    ranges.retain(|range| range.at < at || range.at >= at + bytes);
    Ok(())
}

/// As [`hand_back`], for pages that are contiguous in one file and mapped as one. The caller holds the list of ranges.
///
/// # Safety
/// As for [`hand_back`].
unsafe fn hand_back_part(at: usize, window: usize, pages: FilePages<'_>) -> Result<(), TakeOverError> {
    let bytes = pages.bytes;
    let faults = Faults::open(UFFD_FEATURE_EVENT_REMAP).map_err(kernel("userfaultfd"))?;
    let fresh = Scratch::new(bytes, ProtFlags::READ | ProtFlags::WRITE)?;
    faults.register(fresh.base, bytes).map_err(kernel("userfaultfd: fresh memory"))?;
    let _signals = BlockedSignals::new(&OF_INSTRUCTIONS);
    let (reads, ended) = (AtomicBool::new(false), AtomicBool::new(false));
    std::thread::scope(|scope| {
        // The kernel lets the move return when its event has been read.
        let reader = std::thread::Builder::new().name("sluice-remap".into()).stack_size(64 << 10);
        reader
            .spawn_scoped(scope, || {
                reads.store(true, Ordering::Release);
                faults.read_event(&ended);
            })
            .map_err(|error| kernel("a thread")(Errno::from_io_error(&error).unwrap_or(Errno::AGAIN)))?;
        // A thread that starts uses the heap, which may be in the range.
        while !reads.load(Ordering::Acquire) {
            std::thread::yield_now();
        }
        // SAFETY: the range maps the file's pages, which the program hands over; from now on threads that touch it wait.
        let moved = unsafe { mm::mremap_fixed(pointer(fresh.base), bytes, bytes, MOVE, pointer(at)) };
        let filled = moved.map(drop).and_then(|()| faults.fill(at, window, bytes));
        if filled.is_err() {
            // SAFETY: as it was before.
            let back = unsafe { map_over(at, &[pages]) };
            assert!(back.is_ok() || moved.is_err(), "the program's memory cannot be put back");
        }
        ended.store(true, Ordering::Release);
        filled.map_err(kernel("mremap"))
    })
}

/// Maps pages of files at `at`, over everything that is there.
///
/// # Safety
/// The range is the caller's.
unsafe fn map_over(at: usize, pages: &[FilePages<'_>]) -> Result<(), Errno> {
    let mut at = at;
    for FilePages { file, offset, bytes } in pages {
        let flags = MapFlags::SHARED | MapFlags::FIXED;
        // SAFETY: a part of the range.
        unsafe { mm::mmap(pointer(at), *bytes, ProtFlags::READ | ProtFlags::WRITE, flags, file, *offset) }?;
        at += bytes;
    }
    Ok(())
}

fn pointer(address: usize) -> *mut c_void {
    core::ptr::with_exposed_provenance_mut(address)
}

/// A copy of a list for the time when the range is empty: the heap, which has the list, may be in the range.
fn on_stack<T: Copy>(list: &[T]) -> Option<([T; MOST], usize)> {
    let mut copy = [*list.first()?; MOST];
    copy.get_mut(..list.len())?.copy_from_slice(list);
    Some((copy, list.len()))
}

/// Addresses of this process for pages on their way; unmapped when dropped.
struct Scratch {
    base: usize,
    bytes: usize,
}

impl Scratch {
    fn new(bytes: usize, access: ProtFlags) -> Result<Scratch, TakeOverError> {
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: an anonymous mapping at the kernel's choice.
        let base = unsafe { mm::mmap_anonymous(core::ptr::null_mut(), bytes, access, flags) }
            .map_err(kernel("mmap"))?;
        Ok(Scratch { base: base.expose_provenance(), bytes })
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // SAFETY: the range is this value's alone; moves leave it mapped.
        let unmapped = unsafe { mm::munmap(pointer(self.base), self.bytes) };
        debug_assert!(unmapped.is_ok(), "the range was mapped by us");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::sync::atomic::AtomicU64;
    use rustix::{
        fd::{AsFd as _, OwnedFd},
        fs::{MemfdFlags, ftruncate, memfd_create},
    };
    use std::sync::{Mutex, MutexGuard, PoisonError};

    /// Serialises the tests: some unmap pages, and the kernel would give these addresses to another. `None` if no test can run.
    pub(super) fn alone() -> Option<MutexGuard<'static, ()>> {
        static TURN: Mutex<()> = Mutex::new(());
        if !is_possible() {
            sluice_skip::skip("needs userfaultfd(2)");
            return None;
        }
        Some(TURN.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// A file and its window.
    pub(super) fn shared(bytes: usize) -> (OwnedFd, crate::Mapping) {
        let file = memfd_create(c"pages", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&file, bytes as u64).unwrap();
        let run = crate::Run { offset: 0, bytes: bytes as u64 };
        let window = crate::Mapping::scattered(0, bytes as u64, [(file.as_fd(), run)]).unwrap();
        (file, window)
    }

    /// Private memory of the test that is left mapped, in two mappings.
    pub(super) fn memory(bytes: usize) -> usize {
        let scratch = Scratch::new(bytes, ProtFlags::READ | ProtFlags::WRITE).unwrap();
        let base = scratch.base;
        core::mem::forget(scratch);
        // SAFETY: advice about fresh memory, which divides its mapping.
        unsafe { mm::madvise(pointer(base), PAGE, mm::Advice::LinuxDontDump) }.unwrap();
        base
    }

    pub(super) fn words<'m>(at: usize, bytes: usize) -> &'m [AtomicU64] {
        // SAFETY: mapped memory of the test that is never unmapped.
        unsafe { core::slice::from_raw_parts(pointer(at).cast::<AtomicU64>(), bytes / 8) }
    }

    // Promise: C110
    #[test]
    fn no_write_of_another_thread_is_lost_while_pages_are_replaced() {
        const BYTES: usize = 64 * PAGE;
        const ROUNDS: u64 = 200;
        let Some(_alone) = alone() else { return };
        let at = memory(BYTES);
        let (file, window) = shared(BYTES);
        let pages = [FilePages { file: file.as_fd(), offset: 0, bytes: BYTES }];
        let here = usize::try_from(window.base()).unwrap();
        let stop = AtomicBool::new(false);
        let counts = [AtomicU64::new(0), AtomicU64::new(0)];
        let written = || counts.iter().map(|count| count.load(Ordering::Relaxed)).sum::<u64>();
        std::thread::scope(|scope| {
            for (thread, count) in counts.iter().enumerate() {
                let stop = &stop;
                scope.spawn(move || {
                    let words = words(at, BYTES);
                    let mut index = thread;
                    while !stop.load(Ordering::Relaxed) {
                        // Plain loads and stores, each word by one thread: a lost one shows in the sum.
                        for word in [&words[index], count] {
                            word.store(word.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
                        }
                        index = (index + 2 * 37) % words.len();
                    }
                });
            }
            let mut rounds = 0;
            // Until the threads have run meanwhile, also on a busy machine.
            while rounds < ROUNDS || written() <= ROUNDS {
                rounds += 1;
                // SAFETY: memory of the test; the window is used by these calls alone.
                unsafe { take_over(at, BYTES, here, &pages) }.unwrap();
                // SAFETY: as above.
                unsafe { hand_back(at, BYTES, here, &pages) }.unwrap();
            }
            stop.store(true, Ordering::Relaxed);
        });
        let found: u64 = words(at, BYTES).iter().map(|word| word.load(Ordering::Relaxed)).sum();
        assert_eq!(found, written());
    }

    #[test]
    fn replaced_range_and_window_are_the_same_pages() {
        let Some(_alone) = alone() else { return };
        let at = memory(3 * PAGE);
        let (file, window) = shared(3 * PAGE);
        let here = usize::try_from(window.base()).unwrap();
        // Two files would do as well as two parts of one.
        let pages = [
            FilePages { file: file.as_fd(), offset: 0, bytes: PAGE },
            FilePages { file: file.as_fd(), offset: PAGE as u64, bytes: 2 * PAGE },
        ];
        words(at, 3 * PAGE)[600].store(7, Ordering::Relaxed);
        // SAFETY: memory of the test.
        unsafe { take_over(at, 3 * PAGE, here, &pages) }.unwrap();
        assert_eq!(words(here, 3 * PAGE)[600].load(Ordering::Relaxed), 7);
        words(here, 3 * PAGE)[1200].store(8, Ordering::Relaxed);
        assert_eq!(words(at, 3 * PAGE)[1200].load(Ordering::Relaxed), 8);
        // SAFETY: as above.
        unsafe { hand_back(at, 3 * PAGE, here, &pages) }.unwrap();
        words(here, 3 * PAGE)[1200].store(9, Ordering::Relaxed);
        assert_eq!(words(at, 3 * PAGE)[600].load(Ordering::Relaxed), 7);
        assert_eq!(words(at, 3 * PAGE)[1200].load(Ordering::Relaxed), 8, "private again");
    }

    /// The whole heap of the process, with everything that the functions allocate for themselves.
    #[test]
    fn heap_with_the_lists_of_the_functions_is_replaced() {
        let Some(_alone) = alone() else { return };
        let heap = || {
            let maps = String::from_utf8(maps().unwrap()).unwrap();
            let line = maps.lines().find(|line| line.ends_with("[heap]"))?;
            let (from, to) = line.split(' ').next()?.split_once('-')?;
            Some((usize::from_str_radix(from, 16).ok()?, usize::from_str_radix(to, 16).ok()?))
        };
        let Some((from, to)) = heap() else { return sluice_skip::skip("the allocator has no [heap]") };
        let (file, window) = shared(to - from);
        let here = usize::try_from(window.base()).unwrap();
        for _ in 0..20 {
            let pages = vec![FilePages { file: file.as_fd(), offset: 0, bytes: to - from }];
            // SAFETY: the heap stays the heap.
            unsafe { take_over(from, to - from, here, &pages) }.unwrap();
            // SAFETY: as above.
            unsafe { hand_back(from, to - from, here, &pages) }.unwrap();
        }
    }

    #[test]
    fn memory_that_is_not_the_programs_own_is_refused_and_left_alone() {
        let Some(_alone) = alone() else { return };
        let (file, window) = shared(2 * PAGE);
        let here = usize::try_from(window.base()).unwrap();
        let pages = [FilePages { file: file.as_fd(), offset: 0, bytes: PAGE }];
        // SAFETY: the calls refuse the memory.
        let refused = |at: usize| unsafe { take_over(at, PAGE, here, &pages) };
        assert!(matches!(refused(here + PAGE), Err(TakeOverError::Kind { .. })), "shared memory");
        let local = 0u8;
        let stack = core::ptr::from_ref(&local).addr() / PAGE * PAGE;
        assert!(matches!(refused(stack), Err(TakeOverError::Kind { .. })), "a stack");
        let code = (maps as fn() -> _) as usize / PAGE * PAGE;
        assert!(matches!(refused(code), Err(TakeOverError::Kind { .. })), "code");
        let gone = memory(3 * PAGE);
        // SAFETY: memory of the test.
        unsafe { mm::munmap(pointer(gone + PAGE), PAGE) }.unwrap();
        assert!(matches!(refused(gone + PAGE), Err(TakeOverError::Unmapped(_))));
        // SAFETY: as above.
        let half = unsafe { take_over(gone, 2 * PAGE, here, &pages) };
        assert!(matches!(half, Err(TakeOverError::Unmapped(at)) if at == gone + PAGE));
    }

    #[test]
    fn part_that_the_program_has_mapped_anew_is_left_alone() {
        let Some(_alone) = alone() else { return };
        let at = memory(4 * PAGE);
        let (file, window) = shared(4 * PAGE);
        let here = usize::try_from(window.base()).unwrap();
        let pages = [FilePages { file: file.as_fd(), offset: 0, bytes: 4 * PAGE }];
        // SAFETY: memory of the test.
        unsafe { take_over(at, 4 * PAGE, here, &pages) }.unwrap();
        for word in words(here, 4 * PAGE) {
            word.store(3, Ordering::Relaxed);
        }
        // SAFETY: as above.
        unsafe { mm::munmap(pointer(at + PAGE), PAGE) }.unwrap();
        let flags = MapFlags::PRIVATE | MapFlags::FIXED;
        // SAFETY: as above.
        unsafe { mm::mmap_anonymous(pointer(at + 2 * PAGE), PAGE, ProtFlags::READ, flags) }.unwrap();
        // SAFETY: as above.
        unsafe { hand_back(at, 4 * PAGE, here, &pages) }.unwrap();
        for word in words(here, 4 * PAGE) {
            word.store(4, Ordering::Relaxed);
        }
        let first = |page: usize| words(at + page * PAGE, PAGE)[0].load(Ordering::Relaxed);
        assert_eq!([first(0), first(2), first(3)], [3, 0, 3]);
        // SAFETY: the call only finds out whether the page is mapped.
        assert!(unsafe { mm::msync(pointer(at + PAGE), PAGE, mm::MsyncFlags::ASYNC) }.is_err());
    }

    #[test]
    fn range_is_as_it_was_if_the_new_pages_cannot_be_mapped() {
        let Some(_alone) = alone() else { return };
        let at = memory(2 * PAGE);
        let (_file, window) = shared(2 * PAGE);
        let here = usize::try_from(window.base()).unwrap();
        let directory = std::fs::File::open("/").unwrap();
        let pages = [FilePages { file: directory.as_fd(), offset: 0, bytes: 2 * PAGE }];
        words(at, 2 * PAGE)[700].store(5, Ordering::Relaxed);
        // SAFETY: memory of the test.
        let failed = unsafe { take_over(at, 2 * PAGE, here, &pages) };
        assert!(matches!(failed, Err(TakeOverError::Kernel { what: "mmap", .. })), "{failed:?}");
        assert_eq!(words(at, 2 * PAGE)[700].load(Ordering::Relaxed), 5);
    }
}
