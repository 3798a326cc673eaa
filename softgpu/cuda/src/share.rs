//! The processor's division between processes: the number of threads of this one that may execute kernels of a device at a
//! time.
//!
//! Alone on a device, a process uses as many threads as it likes. When kernels of several processes run, each takes its part of
//! the cores and no more, however many kernels it has: its threads sit on so many *seats* and pass them on in turn, so that
//! kernels which wait for each other all go on. The system shares the cores between the processes; where it is short of them, a
//! process that is ahead of another stands back, for threads that take turns are favoured by schedulers over one that always
//! runs.
//!
//! A process reports by a time in its owner slot that its kernels run, and keeps the time fresh while they do. A process that
//! is stopped or dead no longer refreshes it, and soon counts no more.

use std::cell::Cell;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use softgpu_device::{Owner, monotonic_nanoseconds, thread_nanoseconds};

use crate::context::lock;

/// How long a thread may sit while others of its process stand.
const TURN: u64 = 2_000_000;
/// How often somebody looks who else runs kernels, and how often a thread counts its time.
const LOOK: u64 = 1_000_000;
/// A wait for a seat looks around that often, whatever happens.
const PATIENCE: Duration = Duration::from_millis(10);
/// The same for the one who is next and only stands back.
const STEP_BACK: Duration = Duration::from_millis(1);

/// A thread's seat.
#[derive(Debug, Clone, Copy, Default)]
struct Seat {
    /// When it was taken.
    since: u64,
    /// When its time was last counted: by the clock, which is 0 when nobody counts, and of the thread.
    wall: u64,
    processor: u64,
}

thread_local! {
    static SEAT: Cell<Seat> = const { Cell::new(Seat { since: 0, wall: 0, processor: 0 }) };
}

#[derive(Default)]
struct Seats {
    taken: usize,
    /// Those who stand, in the order in which they came.
    standing: VecDeque<u64>,
    next: u64,
}

/// See the module.
pub(crate) struct Share {
    owner: Arc<Owner>,
    cores: usize,
    /// How many may sit.
    limit: AtomicUsize,
    /// When somebody last looked.
    looked: AtomicU64,
    seats: Mutex<Seats>,
    /// How many stand, to be read without the lock.
    standing: AtomicUsize,
    risen: Condvar,
}

impl Share {
    /// The share of a process that has so many cores when it is alone.
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

    /// Keeps the sign of life fresh and the limit right.
    fn look(&self, now: u64) {
        let looked = self.looked.load(Ordering::Relaxed);
        if now.saturating_sub(looked) < LOOK {
            return;
        }
        // One thread is enough.
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

    /// Takes a seat, and waits for one.
    pub(crate) fn sit(&self) {
        let mut seats = lock(&self.seats);
        if seats.taken == 0 {
            // Also says that kernels run, before anybody has looked.
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
            let patience = match next {
                true if limit == usize::MAX || !self.owner.is_ahead(monotonic_nanoseconds()) => break,
                true => STEP_BACK,
                false => PATIENCE,
            };
            seats = self.risen.wait_timeout(seats, patience).unwrap_or_else(PoisonError::into_inner).0;
            self.look(monotonic_nanoseconds());
        }
        seats.standing.pop_front();
        seats.taken += 1;
        self.standing.store(seats.standing.len(), Ordering::Relaxed);
        drop(seats);
        self.risen.notify_all();
        let now = monotonic_nanoseconds();
        // Alone, nobody counts; beside others, from the first moment.
        let counted = self.limit.load(Ordering::Relaxed) != usize::MAX;
        let (wall, processor) = if counted { (now, thread_nanoseconds()) } else { (0, 0) };
        SEAT.set(Seat { since: now, wall, processor });
    }

    /// Gives the seat up.
    pub(crate) fn rise(&self) {
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

    /// Between two pieces of work: lets others of this process have the seat when it is their turn, or when there are
    /// fewer seats now, or when another process is behind.
    pub(crate) fn breathe(&self) {
        let now = monotonic_nanoseconds();
        self.look(now);
        let limit = self.limit.load(Ordering::Relaxed);
        let mut seat = SEAT.get();
        let passed = now.saturating_sub(seat.wall);
        if limit == usize::MAX {
            SEAT.set(Seat { wall: 0, ..seat });
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
        SEAT.set(seat);
        let over = lock(&self.seats).taken > limit;
        let due = self.standing.load(Ordering::Relaxed) > 0 && now.saturating_sub(seat.since) >= TURN;
        if over || due || self.owner.is_ahead(now) {
            self.leave(false);
            self.sit();
        }
    }
}
