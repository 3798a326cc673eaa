//! Pages that an arbiter and a worker share: the grants, which the worker reads, and the worker's report.

use core::{sync::atomic::Ordering, time::Duration};
use rustix::{
    fd::{AsFd as _, OwnedFd},
    fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create},
    io::Errno,
};
use sluice_messages::{
    custody::{page, report},
    figures::WorkCounts,
};
use sluice_protocol::shared::Shared as _;
use sluice_shared_memory::{
    Mapping, Run,
    mapping::{MapError, Words},
};

/// The reason why a page cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum PageError {
    /// The kernel refuses a call.
    #[error(transparent)]
    Kernel(#[from] Errno),
    /// The page cannot be mapped.
    #[error(transparent)]
    Map(#[from] MapError),
}

fn shared(name: &str, bytes: usize, seals: SealFlags) -> Result<(Mapping, OwnedFd), PageError> {
    let file = memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    ftruncate(&file, bytes as u64)?;
    let run = Run { offset: 0, bytes: bytes as u64 };
    let mapping = Mapping::scattered(0, bytes as u64, [(file.as_fd(), run)])?;
    fcntl_add_seals(&file, seals | SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok((mapping, file))
}

/// A worker's custody page. The arbiter alone can write it.
#[derive(Debug)]
pub struct Page {
    mapping: Mapping,
}

impl Page {
    /// Makes a page and the descriptor for its worker, sealed so that no mapping made by the worker can be written.
    ///
    /// # Errors
    /// The kernel's error if it has no descriptor or memory for it.
    pub fn new(epoch: u64) -> Result<(Page, OwnedFd), PageError> {
        let (mapping, file) = shared("custody", page::BYTES, SealFlags::FUTURE_WRITE)?;
        let page = Page { mapping };
        let words = page.words();
        words.store_u64(page::EPOCH, epoch, Ordering::Relaxed);
        words.store_u64(page::MAGIC_AT, page::MAGIC, Ordering::Release);
        Ok((page, file))
    }

    fn words(&self) -> Words {
        self.mapping.words()
    }

    /// Writes the VM's limit and use, and whether its drivers may use their margins.
    pub fn write(&self, limit: u64, used: u64, open: bool) {
        let words = self.words();
        words.store_u64(page::LIMIT, limit, Ordering::Release);
        words.store_u64(page::USED, used, Ordering::Release);
        words.store_u32(page::OPEN, u32::from(open), Ordering::Release);
    }

    /// Writes the permit, and wakes threads that wait for it: no more than a worker has, because the kernel wakes them in this thread's time.
    pub fn permit(&self, permit: u32) {
        let words = self.words();
        let before = words.load_u32(page::PERMIT, Ordering::Relaxed);
        words.store_u32(page::PERMIT, permit, Ordering::SeqCst);
        if before & !page::TELL == 0 && permit & !page::TELL != 0 {
            words.wake(page::PERMIT, page::SLEEPERS);
        }
    }
}

/// A worker's report page. The worker can write anything to it at any time.
#[derive(Debug)]
pub struct Report {
    mapping: Mapping,
}

/// The content of a worker's report.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reported {
    /// True if work waits to be submitted.
    pub waiting: bool,
    /// Pieces of submitted work that could run at once.
    pub submitted: u64,
    /// Pieces of work that run, ran, or could run.
    pub begun: u64,
    /// Pieces of work that ended.
    pub ended: u64,
    /// Total time in which some work was under way.
    pub busy: Duration,
}

impl Report {
    /// Makes a page and the descriptor for its worker.
    ///
    /// # Errors
    /// The kernel's error if it has no descriptor or memory for it.
    pub fn new() -> Result<(Report, OwnedFd), PageError> {
        let (mapping, file) = shared("report", report::BYTES, SealFlags::empty())?;
        Ok((Report { mapping }, file))
    }

    /// The work that the worker reports to have done.
    #[must_use]
    pub fn work(&self) -> WorkCounts {
        let words = self.mapping.words();
        let count = |at| words.load_u64(at, Ordering::Relaxed);
        WorkCounts {
            launches: count(report::LAUNCHES),
            copies: count(report::COPIES),
            copied: count(report::COPIED),
            calls: count(report::CALLS),
        }
    }
    /// The worker's report at a time of the monotonic clock, in nanoseconds.
    #[must_use]
    pub fn read(&self, now: u64) -> Reported {
        let words = self.mapping.words();
        // The count of ended work is read first: work that ends between the reads counts as under way.
        let ended = words.load_u64(report::ENDED, Ordering::Acquire);
        let freed = words.load_u64(report::FREED, Ordering::Acquire);
        let submitted = words.load_u64(report::BEGUN, Ordering::Acquire);
        let begun = submitted.wrapping_add(freed);
        let busy = words.load_u64(report::BUSY, Ordering::Acquire);
        let counted = words.load_u64(report::COUNTED, Ordering::Acquire);
        let since = if begun == ended { 0 } else { now.saturating_sub(counted) };
        Reported {
            waiting: words.load_u32(report::WAITING, Ordering::Acquire) != 0,
            submitted,
            begun,
            ended,
            busy: Duration::from_nanos(busy.saturating_add(since)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{
        fs,
        sync::{Arc, mpsc::channel},
        thread,
    };

    use sluice_kit::wait::{TIMEOUT, eventually};

    /// True if a thread of this process sleeps; false if it has ended.
    fn is_asleep(thread: i32) -> bool {
        let Ok(stat) = fs::read_to_string(format!("/proc/self/task/{thread}/stat")) else { return false };
        stat.rsplit(')').next().is_some_and(|rest| rest.starts_with(" S"))
    }

    // Promise: F120
    #[test]
    #[cfg(not(miri))]
    fn permit_wakes_no_crowd_of_a_worker_s_threads() {
        const CROWD: usize = 64;
        let (page, _descriptor) = Page::new(1).expect("a page");
        let page = Arc::new(page);
        let (sender, receiver) = channel();
        let crowd: Vec<_> = (0..CROWD)
            .map(|_| {
                let (page, sender) = (Arc::clone(&page), sender.clone());
                thread::spawn(move || {
                    sender.send(rustix::thread::gettid().as_raw_nonzero().get()).expect("the test goes on");
                    page.words().sleep_while(page::PERMIT, 0, 2 * TIMEOUT);
                })
            })
            .collect();
        let threads: Vec<i32> = receiver.iter().take(CROWD).collect();
        let asleep = || threads.iter().filter(|thread| is_asleep(**thread)).count();
        eventually("the crowd sleeps", || asleep() == CROWD);
        let mut left = CROWD;
        while left > 0 {
            page.permit(1);
            left = left.saturating_sub(page::SLEEPERS as usize);
            eventually("the permit wakes some", || asleep() <= left);
            assert!(asleep() >= left, "the permit has woken more");
            page.permit(0);
        }
        crowd.into_iter().for_each(|thread| thread.join().expect("it has slept"));
    }
}
