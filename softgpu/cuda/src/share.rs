//! The division of the processor between processes: the number of threads of this one that may execute kernels of a device at a
//! time.
//!
//! Alone on a device, a process uses any number of threads. When kernels of several processes run, each process is limited to its
//! share of the cores, however many kernels it has: its threads take that many *seats* and pass them on in turn, so that kernels
//! that wait for each other all make progress. The system shares the cores between the processes. If cores are short, a process
//! that is ahead of another pauses, because schedulers favour threads that take turns over one that always runs.
//!
//! A process reports that its kernels run by a time in its owner slot, and refreshes the time while they do. A process that is
//! stopped or dead no longer refreshes it, and soon no longer counts.

use std::cell::Cell;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use softgpu_device::{Owner, monotonic_nanoseconds, thread_nanoseconds};

use crate::lock::lock;

/// Nanoseconds for which a thread may keep a seat while others of its process wait.
const TURN: u64 = 2_000_000;
/// Nanoseconds between checks of other processes' kernels, and between counts of a thread's time.
const LOOK: u64 = 1_000_000;
/// Interval at which a thread that waits for a seat checks again.
const TIMEOUT: Duration = Duration::from_millis(10);
/// The interval for the first waiting thread, when it only pauses for another process.
const STEP_BACK: Duration = Duration::from_millis(1);

#[derive(Debug, Clone, Copy, Default)]
struct Slice {
    /// Time at which the seat was taken.
    since: u64,
    /// Clock time and processor time at the last count; the clock time is 0 while no time is counted.
    wall: u64,
    processor: u64,
}

thread_local! {
    static SLICE: Cell<Slice> = const { Cell::new(Slice { since: 0, wall: 0, processor: 0 }) };
}

#[derive(Default)]
struct Seats {
    taken: usize,
    /// Numbers of waiting threads, in order of arrival.
    standing: VecDeque<u64>,
    next: u64,
}

/// The share of one process.
pub(crate) struct Share {
    owner: Arc<Owner>,
    cores: usize,
    /// Maximum number of taken seats.
    limit: AtomicUsize,
    /// Time of the last check.
    looked: AtomicU64,
    seats: Mutex<Seats>,
    /// Number of waiting threads, readable without the lock.
    standing: AtomicUsize,
    risen: Condvar,
}

impl Share {
    /// Creates the share of a process that uses `cores` cores when it is alone.
    pub(crate) fn new(owner: Arc<Owner>, cores: usize) -> Share {
        Share {
            owner,
            cores,
            limit: AtomicUsize::new(usize::MAX),
            looked: AtomicU64::new(0),
            seats: Mutex::default(),
            standing: AtomicUsize::new(0),
            risen: Condvar::new(),
        }
    }

    /// Refreshes the mark in the owner slot, and updates the limit.
    fn look(&self, now: u64) {
        let looked = self.looked.load(Ordering::Relaxed);
        if now.saturating_sub(looked) < LOOK {
            return;
        }
        // One thread does this at a time.
        if self.looked.compare_exchange(looked, now, Ordering::Relaxed, Ordering::Relaxed).is_err() {
            return;
        }
        self.owner.kernels_run(now);
        let others = self.owner.others_running(now);
        let limit = if others == 0 { usize::MAX } else { (self.cores / (others + 1)).max(1) };
        if self.limit.swap(limit, Ordering::Relaxed) < limit {
            self.risen.notify_all();
        }
    }

    /// Waits for a seat and takes it.
    pub(crate) fn begin_slice(&self) {
        let mut seats = lock(&self.seats);
        if seats.taken == 0 {
            // Forces a check, which reports that kernels run.
            self.looked.store(0, Ordering::Relaxed);
        }
        self.look(monotonic_nanoseconds());
        let number = seats.next;
        seats.next += 1;
        seats.standing.push_back(number);
        self.standing.store(seats.standing.len(), Ordering::Relaxed);
        loop {
            let limit = self.limit.load(Ordering::Relaxed);
            let next = seats.standing.front() == Some(&number) && seats.taken < limit;
            let timeout = match next {
                true if limit == usize::MAX || !self.owner.is_ahead(monotonic_nanoseconds()) => break,
                true => STEP_BACK,
                false => TIMEOUT,
            };
            seats = self.risen.wait_timeout(seats, timeout).unwrap_or_else(PoisonError::into_inner).0;
            self.look(monotonic_nanoseconds());
        }
        seats.standing.pop_front();
        seats.taken += 1;
        self.standing.store(seats.standing.len(), Ordering::Relaxed);
        drop(seats);
        self.risen.notify_all();
        let now = monotonic_nanoseconds();
        // Time is not counted while the process is alone; beside others it is counted from the start.
        let counted = self.limit.load(Ordering::Relaxed) != usize::MAX;
        let (wall, processor) = if counted { (now, thread_nanoseconds()) } else { (0, 0) };
        SLICE.set(Slice { since: now, wall, processor });
    }

    /// Gives up the seat.
    pub(crate) fn end_slice(&self) {
        self.leave(true);
    }

    fn leave(&self, for_good: bool) {
        let mut seats = lock(&self.seats);
        seats.taken -= 1;
        if for_good && seats.taken == 0 && seats.standing.is_empty() {
            self.owner.kernels_rest();
        }
        drop(seats);
        self.risen.notify_all();
    }

    /// Called between two pieces of work. Passes the seat on if another thread's turn has come, if there are fewer seats now, or
    /// if another process is behind.
    pub(crate) fn yield_now(&self) {
        let now = monotonic_nanoseconds();
        self.look(now);
        let limit = self.limit.load(Ordering::Relaxed);
        let mut seat = SLICE.get();
        let passed = now.saturating_sub(seat.wall);
        if limit == usize::MAX {
            SLICE.set(Slice { wall: 0, ..seat });
            return;
        }
        if passed < LOOK {
            return;
        }
        let processor = thread_nanoseconds();
        if seat.wall != 0 {
            let got = processor.saturating_sub(seat.processor);
            self.owner.kernels_worked(now, got / limit as u64, got * 4 < passed * 3);
        }
        (seat.wall, seat.processor) = (now, processor);
        SLICE.set(seat);
        let over = lock(&self.seats).taken > limit;
        let due = self.standing.load(Ordering::Relaxed) > 0 && now.saturating_sub(seat.since) >= TURN;
        if over || due || self.owner.is_ahead(now) {
            self.leave(false);
            self.begin_slice();
        }
    }
}
