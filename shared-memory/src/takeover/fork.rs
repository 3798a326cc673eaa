//! Forks: a child has private memory where its parent has shared pages, as with all memory that the program has not shared itself.

#![expect(unsafe_code, reason = "mappings that replace memory of the program")]

use super::{
    FilePages, TakeOverError, kernel,
    maps::{FilePart, MappedPart, maps, parts_of_file},
    pointer,
};
use rustix::{
    fd::OwnedFd,
    io::{Errno, read, retry_on_intr},
    mm::{self, MapFlags, MremapFlags, ProtFlags},
    pipe::{PipeFlags, pipe_with},
};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The ranges of the program's memory that have shared pages. Held while a range is empty: a child that is forked then would find it
/// empty for ever.
static RANGES: Mutex<Vec<SharedRange>> = Mutex::new(Vec::new());

pub(super) fn ranges() -> MutexGuard<'static, Vec<SharedRange>> {
    RANGES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A range of the program's memory that has pages of one file.
#[derive(Clone, Copy, Debug)]
pub(super) struct SharedRange {
    pub(super) at: usize,
    bytes: usize,
    inode: u64,
    /// Offset of the first page in the file.
    pub(super) offset: u64,
}

impl SharedRange {
    /// The ranges from `at` on that have these pages.
    pub(super) fn of(at: usize, pages: &[FilePages<'_>]) -> Result<Vec<SharedRange>, TakeOverError> {
        let mut next = at;
        let range = |&FilePages { file, offset, bytes }: &FilePages<'_>| {
            let inode = rustix::fs::fstat(file).map_err(kernel("fstat"))?.st_ino;
            let range = SharedRange { at: next, bytes, inode, offset };
            next += bytes;
            Ok(range)
        };
        pages.iter().map(range).collect()
    }

    /// The parts that still have the pages: a program may have unmapped some, or mapped something else over them.
    pub(super) fn parts(&self, maps: &[u8]) -> Vec<FilePart> {
        parts_of_file(maps, MappedPart { at: self.at, bytes: self.bytes }, self.inode, self.offset)
    }
}

/// A fork of this process, from before it until the child has its memory. No range is taken over or handed back meanwhile.
#[derive(Debug)]
pub struct Fork {
    ranges: MutexGuard<'static, Vec<SharedRange>>,
    /// The parent reads the end of a pipe whose other end the child closes.
    pipe: Option<(OwnedFd, OwnedFd)>,
}

impl Fork {
    /// In the parent, before the fork.
    #[must_use]
    pub fn prepare() -> Fork {
        let ranges = ranges();
        // Without a pipe the child may see writes of its parent after the fork.
        let pipe = if ranges.is_empty() { None } else { pipe_with(PipeFlags::CLOEXEC).ok() };
        Fork { ranges, pipe }
    }

    /// In the parent, after the fork: waits until the child has copied the ranges, or is gone. Other threads of the parent run
    /// meanwhile, so the child may see a write of theirs to a range shortly after the fork.
    pub fn parent(self) {
        let Fork { ranges, pipe } = self;
        if let Some((from_child, to_parent)) = pipe {
            drop(to_parent);
            // The end of the pipe and an error both mean that there is nothing to wait for.
            let _ = retry_on_intr(|| read(&from_child, &mut [0u8; 1]));
        }
        drop(ranges);
    }

    /// In the child, after the fork: its ranges become private memory with the same bytes.
    ///
    /// # Errors
    /// [`TakeOverError`]; some memory of the child then stays shared with the parent.
    pub fn child(self) -> Result<(), TakeOverError> {
        let Fork { mut ranges, pipe } = self;
        if ranges.is_empty() {
            return Ok(());
        }
        let maps = maps()?;
        for range in ranges.drain(..) {
            for FilePart { at, bytes, readable } in range.parts(&maps) {
                if readable {
                    // SAFETY: the part has the pages that this process put there, and the child has one thread.
                    unsafe { make_private(at, bytes) }.map_err(kernel("private memory of a child"))?;
                }
            }
        }
        drop(pipe);
        Ok(())
    }
}

/// Replaces the pages at `at` by private memory with the same bytes.
///
/// # Safety
/// The range is mapped, readable, and no other thread uses it.
unsafe fn make_private(at: usize, bytes: usize) -> Result<(), Errno> {
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
    // SAFETY: fresh memory at the kernel's choice.
    let fresh = unsafe {
        mm::mmap_anonymous(core::ptr::null_mut(), bytes, ProtFlags::READ | ProtFlags::WRITE, flags)
    }?;
    // SAFETY: both are mapped, and apart.
    unsafe { core::ptr::copy_nonoverlapping(pointer(at).cast::<u8>(), fresh.cast(), bytes) };
    // SAFETY: the range is replaced by its copy.
    unsafe { mm::mremap_fixed(fresh, bytes, bytes, MremapFlags::MAYMOVE, pointer(at)) }.map(drop)
}

#[cfg(test)]
mod tests {
    use super::super::{tests::*, *};
    use super::*;
    use core::sync::atomic::{AtomicBool, Ordering};
    use rustix::fd::AsFd as _;

    /// The child's exit status: 0 if `check` holds in it.
    fn forked(check: impl FnOnce() -> bool) -> i32 {
        let fork = Fork::prepare();
        // SAFETY: the child calls only what a child of several threads may call, and ends.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let good = fork.child().is_ok() && check();
            // SAFETY: ends the child.
            unsafe { libc::_exit(i32::from(!good)) };
        }
        fork.parent();
        let mut status = -1;
        // SAFETY: a child of this function.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        status
    }

    // Promise: C110
    #[test]
    fn child_has_memory_of_its_own_although_other_threads_take_ranges_over() {
        let Some(_alone) = alone() else { return };
        let (at, other) = (memory(4 * PAGE), memory(4 * PAGE));
        let (file, window) = shared(4 * PAGE);
        let (other_file, other_window) = shared(4 * PAGE);
        let pages = [FilePages { file: file.as_fd(), offset: 0, bytes: 4 * PAGE }];
        let other_pages = [FilePages { file: other_file.as_fd(), offset: 0, bytes: 4 * PAGE }];
        let base = |window: &crate::Mapping| usize::try_from(window.base()).unwrap();
        words(at, 4 * PAGE)[700].store(1, Ordering::Relaxed);
        words(other, 4 * PAGE)[9].store(4, Ordering::Relaxed);
        // SAFETY: memory of the test.
        unsafe { take_over(at, 4 * PAGE, base(&window), &pages) }.unwrap();
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    // SAFETY: memory of the test.
                    unsafe { take_over(other, 4 * PAGE, base(&other_window), &other_pages) }.unwrap();
                    // SAFETY: as above.
                    unsafe { hand_back(other, 4 * PAGE, base(&other_window), &other_pages) }.unwrap();
                }
            });
            let wrong = (1..100).find_map(|round| {
                let status = forked(|| {
                    let mine = &words(at, 4 * PAGE)[700];
                    let same = mine.load(Ordering::Relaxed) == round
                        && words(other, 4 * PAGE)[9].load(Ordering::Relaxed) == 4;
                    mine.store(0, Ordering::Relaxed);
                    same
                });
                // The child's write is the child's.
                let value = words(at, 4 * PAGE)[700].fetch_add(1, Ordering::Relaxed);
                (status != 0 || value != round).then_some((round, status, value))
            });
            stop.store(true, Ordering::Relaxed);
            assert_eq!(wrong, None, "round, status of the child, value in the parent");
        });
    }

    #[test]
    fn child_keeps_what_the_program_has_mapped_over_a_range() {
        let Some(_alone) = alone() else { return };
        let at = memory(4 * PAGE);
        let (file, window) = shared(4 * PAGE);
        let pages = [FilePages { file: file.as_fd(), offset: 0, bytes: 4 * PAGE }];
        words(at, 4 * PAGE)[0].store(5, Ordering::Relaxed);
        // SAFETY: memory of the test.
        unsafe { take_over(at, 4 * PAGE, usize::try_from(window.base()).unwrap(), &pages) }.unwrap();
        // SAFETY: as above.
        unsafe { mm::munmap(pointer(at + PAGE), PAGE) }.unwrap();
        let flags = MapFlags::PRIVATE | MapFlags::FIXED;
        // SAFETY: as above.
        unsafe { mm::mmap_anonymous(pointer(at + 2 * PAGE), PAGE, ProtFlags::empty(), flags) }.unwrap();
        let status = forked(|| words(at, PAGE)[0].swap(6, Ordering::Relaxed) == 5);
        assert_eq!((status, words(at, PAGE)[0].load(Ordering::Relaxed)), (0, 5));
    }
}
