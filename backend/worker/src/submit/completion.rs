//! Completion: it finds complete work and publishes it.
//!
//! A pass polls the oldest marker of every stream that has one; a stream that is held back delays no other. The completion
//! thread makes passes while markers are in flight and sleeps when there are none. The dispatcher makes a pass itself when its
//! ring runs empty, so that short work is published without a thread switch. The thread that makes a pass holds the lock of
//! [`Completion`]; no thread that serves the guest's work waits for it.

use crate::{
    arenas::Attached,
    current::Current,
    helper::{Helper, jobs::MemoryJob},
    session::{Session, objects::ContextRef},
    submit::{
        event_clock::{Becomes, EventClock},
        fences::{InFlightFences, Marker, StreamFences},
        time::{Passed, Time},
    },
};
use core::{
    sync::atomic::{AtomicBool, AtomicU64, Ordering, fence},
    time::Duration,
};
use sluice_driver::Driver;
use sluice_runtime::clock::nanoseconds as now;
use sluice_scheduler::{Nanos, estimate::WorkKind};
use std::{
    sync::{Arc, Mutex, OnceLock, PoisonError},
    thread::Thread,
};

/// The state that the passes share.
#[derive(Debug)]
pub(crate) struct Completion {
    driver: Arc<Driver>,
    session: Arc<Session>,
    fences: Arc<InFlightFences>,
    attached: Arc<Attached>,
    helper: Helper,
    time: Arc<Time>,
    /// The frees that are due when a stream slot has reached a sequence, and a flag that there are any.
    frees: Mutex<Vec<(u32, u64, u64)>>,
    any_frees: AtomicBool,
    /// Held during a pass: each queue of fences has one consumer.
    passing: Mutex<EventClock>,
    /// Passes that were requested, and the requests that a pass has answered: one that began after them.
    requested: AtomicU64,
    answered: AtomicU64,
    /// The thread that waits for the latest request.
    waiter: Mutex<Option<Thread>>,
    /// Set when the completion thread is to look often.
    hurried: AtomicBool,
    /// Set while the completion thread sleeps.
    sleeping: AtomicBool,
    thread: OnceLock<Thread>,
}

impl Completion {
    pub(crate) fn new(
        driver: Arc<Driver>,
        session: Arc<Session>,
        fences: Arc<InFlightFences>,
        attached: Arc<Attached>,
        helper: Helper,
        time: Arc<Time>,
    ) -> Completion {
        Completion {
            driver,
            session,
            fences,
            attached,
            helper,
            time,
            frees: Mutex::default(),
            any_frees: AtomicBool::new(false),
            passing: Mutex::default(),
            requested: AtomicU64::new(0),
            answered: AtomicU64::new(0),
            waiter: Mutex::default(),
            hurried: AtomicBool::new(false),
            sleeping: AtomicBool::new(false),
            thread: OnceLock::new(),
        }
    }

    /// Frees an allocation when a stream slot has reached a sequence, which is not published yet.
    pub(crate) fn free_after(&self, slot: u32, sequence: u64, address: u64) {
        self.frees.lock().unwrap_or_else(PoisonError::into_inner).push((slot, sequence, address));
        self.any_frees.store(true, Ordering::Release);
    }

    /// Cancels [`Completion::free_after`]: there is no such sequence.
    pub(crate) fn keep(&self, address: u64) {
        self.frees.lock().unwrap_or_else(PoisonError::into_inner).retain(|(_, _, other)| *other != address);
    }

    /// Frees the allocations that are due at a sequence of a slot. Called before the sequence is published, so that the guest
    /// finds the memory free.
    fn free_due(&self, slot: u32, sequence: u64) {
        if !self.any_frees.load(Ordering::Acquire) {
            return;
        }
        let mut frees = self.frees.lock().unwrap_or_else(PoisonError::into_inner);
        let due = frees.extract_if(.., |(of, at, _)| *of == slot && *at <= sequence);
        let due: Vec<u64> = due.map(|(_, _, address)| address).collect();
        self.any_frees.store(!frees.is_empty(), Ordering::Release);
        drop(frees);
        if !due.is_empty() {
            self.helper.memory(MemoryJob::FreeAll(due));
        }
    }

    /// Runs a piece of work that the worker itself makes for the VM on a device, up to the piece's end. It waits for the permit, and counts
    /// as work of the VM while it runs. For a thread that may wait.
    pub(crate) fn charge<R>(&self, device: u8, bytes: u64, work: impl FnOnce() -> R) -> R {
        self.time.wait_open(device);
        let kind = WorkKind::new(OWN_WORK, bytes.checked_ilog2().unwrap_or(0).into());
        let ticket = self.time.begin(device, kind, true);
        let pass = || self.passing.lock().unwrap_or_else(PoisonError::into_inner);
        let from = now();
        let begins = pass();
        self.time.free(ticket, from);
        drop(begins);
        let result = work();
        let mut passed = Passed::new(from);
        passed.add(ticket);
        let ends = pass();
        passed.settle(&self.time, now());
        drop(ends);
        result
    }

    /// Makes sure that the completion thread polls the markers in flight.
    pub(crate) fn notify(&self) {
        fence(Ordering::SeqCst);
        if self.sleeping.load(Ordering::Relaxed)
            && self.sleeping.swap(false, Ordering::SeqCst)
            && let Some(thread) = self.thread.get()
        {
            thread.unpark();
        }
    }

    /// True if any work is in flight.
    pub(crate) fn is_pending(&self) -> bool {
        self.fences.is_pending()
    }

    /// Polls every stream with work in flight once; returns `true` if a completion was published. Returns at once if another
    /// thread makes a pass.
    pub(crate) fn pass(&self, current: &mut Current) -> bool {
        let Ok(mut clock) = self.passing.try_lock() else { return false };
        let requested = self.requested.load(Ordering::SeqCst);
        let mut progress = false;
        self.fences.for_each_pending(|slot, stream_fences| {
            progress |= self.look(slot, stream_fences, current, &mut clock)
        });
        // Under the lock, so that the count never falls.
        let answers = self.answered.swap(requested, Ordering::AcqRel) != requested;
        drop(clock);
        if answers && let Some(waiter) = self.waiter.lock().unwrap_or_else(PoisonError::into_inner).take() {
            // It wakes the guest once, for these publications and its own.
            waiter.unpark();
        } else if progress {
            self.session.wake_guest();
        }
        progress
    }

    /// Waits until everything that is complete now is published, for a thread that may not call the driver. `slot` and
    /// `sequence` are those of work of the caller, which is not complete. The caller publishes something itself then, and wakes the guest. One thread at a time calls this.
    pub(crate) fn settle_for(&self, (slot, sequence): (u32, u64)) {
        // A slot counts as pending until its completed work is published.
        if !self.fences.is_pending_beside(slot) && self.session.completed(slot) + 1 >= sequence {
            return;
        }
        self.settle();
    }

    /// The same, for a thread whose work has no sequence of its own.
    pub(crate) fn settle(&self) {
        *self.waiter.lock().unwrap_or_else(PoisonError::into_inner) = Some(std::thread::current());
        let request = self.requested.fetch_add(1, Ordering::SeqCst) + 1;
        self.hurry();
        while self.answered.load(Ordering::Acquire) < request {
            std::thread::park();
        }
    }

    /// Makes the completion thread look soon and often: work is about to be complete.
    pub(crate) fn hurry(&self) {
        self.hurried.store(true, Ordering::Relaxed);
        self.notify();
        // The thread may also be in the pause between two passes.
        if let Some(thread) = self.thread.get() {
            thread.unpark();
        }
    }

    /// True if a thread waits for a pass.
    fn is_requested(&self) -> bool {
        self.answered.load(Ordering::Acquire) < self.requested.load(Ordering::SeqCst)
    }

    /// Removes a context that is being destroyed with its events.
    pub(crate) fn forget(&self, context: ContextRef) {
        self.passing.lock().unwrap_or_else(PoisonError::into_inner).forget(context);
    }

    /// Retires the complete markers of one stream, and counts the work behind waits that are over as begun. Work that ends
    /// after the session has failed is counted and not published.
    fn look(
        &self,
        slot: u32,
        stream_fences: &StreamFences,
        current: &mut Current,
        clock: &mut EventClock,
    ) -> bool {
        // Read first: work that appears complete after a failure may be complete only because of it.
        let publishes = self.session.sticky().is_none();
        let mut done = 0;
        while done < stream_fences.pending() {
            let marker = stream_fences.peek(done);
            let state = if marker.has_event() {
                current.set(&self.driver, marker.context).and_then(|()| self.driver.event_done(marker.event))
            } else {
                Ok(true)
            };
            match state {
                Ok(true) => done += 1,
                Ok(false) => break,
                Err(failed) => {
                    // Work queued behind the failure must not appear complete, on any stream. The driver hands out the text
                    // that was printed before the failure, and that of an assertion, in a call that waits; for failed work that
                    // call is short.
                    self.publish_text(marker);
                    self.session.set_sticky(failed);
                    // Its context runs no work any more, and the driver reports no completion of its work.
                    self.time.abandon(marker.ticket);
                    while stream_fences.pending() > 0 {
                        stream_fences.drop_oldest();
                    }
                    return false;
                }
            }
        }
        if done > 0 {
            let last = stream_fences.peek(done - 1);
            let passed = self.retire(stream_fences, done, current, clock);
            if publishes {
                stream_fences.settle(last.sequence, |to, rows| self.attached.deliver(to, rows));
                self.publish_text(last);
                self.free_due(slot, last.sequence);
                self.session.set_completed(slot, last.sequence);
            }
            if let Some((passed, at)) = passed {
                passed.settle(&self.time, at);
            }
        }
        // Work can run if it stands before the first wait that is not over.
        while stream_fences.ahead() < stream_fences.pending() {
            let ticket = stream_fences.peek(stream_fences.ahead()).ticket;
            if ticket.is_wait() {
                break;
            }
            if ticket.is_held() {
                self.time.free(ticket, stream_fences.started());
            }
            stream_fences.pass();
        }
        publishes && done > 0
    }

    /// Removes the complete markers of one stream. Returns the pieces of work that ended with them, and the time of the end.
    fn retire(
        &self,
        stream_fences: &StreamFences,
        done: u64,
        current: &mut Current,
        clock: &mut EventClock,
    ) -> Option<(Passed, Nanos)> {
        let seen = now();
        let mut passed = Passed::new(stream_fences.started());
        let mut at = seen;
        for left in (0..done).rev() {
            let marker = stream_fences.peek(0);
            stream_fences.staged().for_each(|ticket| passed.add(ticket));
            // All markers count as reached when the last one was; work held by a wait begins when the wait is over.
            let counts = marker.ticket.is_work() || !passed.is_empty();
            if marker.has_event() && ((left == 0 && counts) || marker.ticket.is_wait()) {
                let elapsed = |from, to| self.driver.event_elapsed(from, to).ok();
                at = match current.set(&self.driver, marker.context) {
                    Ok(()) => clock.reached(&marker, seen, elapsed),
                    Err(_) => seen,
                };
            }
            if marker.ticket.is_wait() {
                stream_fences.release();
                stream_fences.start(at);
                passed.wait_ended(at);
            } else {
                if stream_fences.ahead() == 0 && marker.ticket.is_held() {
                    self.time.free(marker.ticket, stream_fences.started());
                }
                passed.add(marker.ticket);
            }
            let last = left == 0 && marker.has_event();
            let becomes = if last { clock.adopt(&marker, at, seen) } else { Becomes::Free };
            match becomes {
                Becomes::Free => stream_fences.retire(),
                Becomes::Anchor(before) => {
                    stream_fences.drop_oldest();
                    if let Some(Err(failed)) = before.map(|event| self.driver.event_destroy(event)) {
                        tracing::debug!(code = failed, "cannot destroy an event");
                    }
                }
            }
        }
        (!passed.is_empty()).then(|| {
            stream_fences.end(at);
            (passed, at)
        })
    }

    /// Offers the text of kernels up to a marker that is reached or never will be.
    fn publish_text(&self, marker: Marker) {
        self.session.publish_text(|| match marker.has_event() {
            true => self.driver.event_synchronize(marker.event),
            false => Ok(()),
        });
    }

    /// The completion thread.
    pub(crate) fn run(&self, cpus: usize) {
        // One thread runs this, so the cell is not set twice.
        let _ = self.thread.set(std::thread::current());
        let mut current = Current::default();
        let mut idle = 0_u32;
        loop {
            if !self.fences.is_pending() && !self.is_requested() {
                self.sleep();
                idle = 0;
            } else if self.pass(&mut current) {
                idle = 0;
            } else {
                idle = if self.hurried.swap(false, Ordering::Relaxed) { 0 } else { idle };
                idle = idle.saturating_add(1);
                if idle > OFTEN && self.time.is_held() {
                    self.rest(idle);
                } else {
                    pause(idle, cpus);
                }
            }
        }
    }

    /// Waits before the next pass while all work in flight stands behind waits, such as for a host function: no device ends work, and
    /// each thread that ends a wait or submits work wakes this one.
    fn rest(&self, idle: u32) {
        self.sleeping.store(true, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        if self.time.is_held() && !self.is_requested() {
            std::thread::park_timeout(Duration::from_micros(idle.into()).min(LONGEST_HELD));
        }
        self.sleeping.store(false, Ordering::SeqCst);
    }

    fn sleep(&self) {
        self.sleeping.store(true, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        if self.fences.is_pending() || self.is_requested() {
            self.sleeping.store(false, Ordering::SeqCst);
            return;
        }
        while self.sleeping.load(Ordering::SeqCst) {
            std::thread::park();
        }
    }
}

/// The name of the kinds of work that the worker itself makes, beside those of [`crate::submit::Operation`].
const OWN_WORK: u64 = 10;
/// Longest sleep between two passes with work in flight.
const LONGEST: Duration = Duration::from_micros(50);
/// Longest sleep while all of it is held.
const LONGEST_HELD: Duration = Duration::from_millis(1);
/// Passes without progress after which held work is polled less often: some 20 ms of them.
const OFTEN: u32 = 400;

/// Waits a little before the next pass: spins while that cannot take a CPU from the work itself, then yields, then sleeps in
/// growing steps.
fn pause(idle: u32, cpus: usize) {
    let spins = if cpus >= 3 { 200 } else { 0 };
    if idle <= spins {
        core::hint::spin_loop();
    } else if idle <= spins + 8 {
        std::thread::yield_now();
    } else {
        let step = idle - spins - 8;
        // A request for a pass ends it.
        std::thread::park_timeout(Duration::from_micros(5 * u64::from(step)).min(LONGEST));
    }
}
