//! Completion: it finds complete work and publishes it.
//!
//! A pass polls the oldest marker of every stream that has one; a stream that is held back delays no other. The completion
//! thread makes passes while markers are in flight and sleeps when there are none. Between two passes it rests: up to shortly before
//! the work is expected to end, and otherwise for a small part of the time that it has waited. Around the expected end it does not rest,
//! where there are processors enough: the end of a rest costs more than many passes. The dispatcher makes passes itself when its
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
        time::{Passed, SequenceTicket, Time},
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

/// The side that may wait until work in flight ends, because a stream of the driver is full.
pub(crate) trait AwaitsRoom: core::fmt::Debug + Send + Sync {
    /// Work has ended, or the session has failed.
    fn made_room(&self);
}

/// The state that the passes share.
#[derive(Debug)]
pub(crate) struct Completion {
    driver: Arc<Driver>,
    session: Arc<Session>,
    fences: Arc<InFlightFences>,
    attached: Arc<Attached>,
    helper: Helper,
    time: Arc<Time>,
    room: Arc<dyn AwaitsRoom>,
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
    /// Set while the completion thread sleeps, or rests so long that new markers have to wake it.
    sleeping: AtomicBool,
    /// The number of calls of [`Completion::notify`].
    notified: AtomicU64,
    /// The time at which the first of the markers in flight is expected to be reached, as of the latest pass; and whether there are
    /// markers of which that is unknown.
    expected: AtomicU64,
    unexpected: AtomicBool,
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
        room: Arc<impl AwaitsRoom + 'static>,
    ) -> Completion {
        Completion {
            driver,
            session,
            fences,
            attached,
            helper,
            time,
            room,
            frees: Mutex::default(),
            any_frees: AtomicBool::new(false),
            passing: Mutex::default(),
            requested: AtomicU64::new(0),
            answered: AtomicU64::new(0),
            waiter: Mutex::default(),
            hurried: AtomicBool::new(false),
            sleeping: AtomicBool::new(false),
            notified: AtomicU64::new(0),
            expected: AtomicU64::new(Nanos::MAX),
            unexpected: AtomicBool::new(false),
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
        // With this store and that of `sleeping` before the loads on both sides, one of the two threads sees the other's.
        self.notified.fetch_add(1, Ordering::SeqCst);
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
        let (mut progress, mut first, mut unexpected) = (false, Nanos::MAX, false);
        self.fences.for_each_pending(|slot, stream_fences| {
            progress |= self.look(slot, stream_fences, current, &mut clock);
            if stream_fences.pending() > 0 {
                match expected_end(stream_fences) {
                    Some(end) => first = first.min(end),
                    None => unexpected = true,
                }
            }
        });
        self.expected.store(first, Ordering::Relaxed);
        self.unexpected.store(unexpected, Ordering::Relaxed);
        // Under the lock, so that the count never falls.
        let answers = self.answered.swap(requested, Ordering::AcqRel) != requested;
        drop(clock);
        // A failed session refuses the work that waits.
        if progress || self.session.sticky().is_some() {
            self.room.made_room();
        }
        if answers && let Some(waiter) = self.waiter.lock().unwrap_or_else(PoisonError::into_inner).take() {
            // It wakes the guest once, for these publications and its own.
            waiter.unpark();
        } else if progress {
            self.session.wake_guest();
        }
        progress
    }

    /// Waits until everything that is complete now is published, for a thread that may not call the driver. `slot` and
    /// `sequence` are those of work of the caller, which is not complete. The caller publishes something itself then, and wakes
    /// the guest. One thread at a time calls this.
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
                    if let Some(Err(failed)) = before.map(|event| self.driver.cuEventDestroy_v2(event)) {
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
            true => self.driver.cuEventSynchronize(marker.event),
            false => Ok(()),
        });
    }

    /// The completion thread.
    pub(crate) fn run(&self, cpus: usize) {
        // One thread runs this, so the cell is not set twice.
        let _ = self.thread.set(std::thread::current());
        let mut current = Current::default();
        let (mut idle, mut since, mut seen) = (0_u32, now(), 0);
        loop {
            let notified = self.notified.load(Ordering::SeqCst);
            if notified != core::mem::replace(&mut seen, notified) {
                (idle, since) = (0, now());
            }
            if !self.fences.is_pending() && !self.is_requested() {
                self.sleep();
            } else if self.pass(&mut current) || self.hurried.swap(false, Ordering::Relaxed) {
                (idle, since) = (0, now());
            } else {
                idle = idle.saturating_add(1);
                self.pause(idle, cpus, since, notified);
            }
        }
    }

    /// Waits before the next pass: spins while that cannot take a CPU from the work itself, then yields, then rests.
    fn pause(&self, idle: u32, cpus: usize, since: Nanos, notified: u64) {
        let now = now();
        let waited = now.saturating_sub(since);
        let expected = Some(self.expected.load(Ordering::Relaxed)).filter(|expected| *expected != Nanos::MAX);
        let unexpected = self.unexpected.load(Ordering::Relaxed);
        if cpus >= 3 && spins(waited, expected, unexpected, now) {
            core::hint::spin_loop();
        } else if cpus < 3 && idle <= YIELDS {
            std::thread::yield_now();
        } else {
            self.rest(rest_time(waited, expected, unexpected, now), notified);
        }
    }

    /// Rests before the next pass. A request for a pass ends the rest, and a new marker ends a long one: the thread that submits work, or
    /// ends a wait, then wakes this one.
    fn rest(&self, time: Nanos, notified: u64) {
        let is_long = time > UNINTERRUPTED;
        self.sleeping.store(is_long, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        if self.notified.load(Ordering::SeqCst) == notified && !self.is_requested() {
            std::thread::park_timeout(Duration::from_nanos(time));
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
/// Time for which the completion thread spins for work whose end is not expected later.
const SPIN: Nanos = 20_000;
/// Time for which it spins before and after an expected end: as long as the end of a rest takes on a virtual machine.
const NEAR: Nanos = 50_000;
/// Passes between which it yields, where it does not spin.
const YIELDS: u32 = 8;
/// A rest is this part of the time waited so far, unless the end of the work is expected.
const PART: Nanos = 16;
/// Bounds of a rest.
const SHORTEST: Nanos = 5_000;
const LONGEST: Nanos = 1_000_000;
/// The first rest where the end of the work is expected. Each rest at most doubles the wait, should the work end early.
const FIRST: Nanos = 20_000;
/// The longest rest that a new marker does not end.
const UNINTERRUPTED: Nanos = 50_000;

/// The time at which the oldest marker of a stream is expected to be reached, if it ends work of known kinds that runs.
fn expected_end(stream_fences: &StreamFences) -> Option<Nanos> {
    let ticket = stream_fences.peek(0).ticket;
    let is_known = ticket.is_work() && !ticket.is_guessed() && !ticket.is_held();
    let work = || ticket.estimate() + stream_fences.staged().map(SequenceTicket::estimate).sum::<u64>();
    is_known.then(|| stream_fences.started().saturating_add(work().saturating_mul(1000)))
}

/// True if the next pass is due at once at `now`, after `waited`: an end is near, or nothing is known of it yet. Work whose end is
/// expected later does not need the queries, which delay launches in the driver.
fn spins(waited: Nanos, expected: Option<Nanos>, unexpected: bool, now: Nanos) -> bool {
    match expected {
        Some(end) if now.abs_diff(end) <= NEAR => true,
        Some(end) if end > now && !unexpected => false,
        _ => waited < SPIN,
    }
}

/// The time to rest at `now`, after `waited`: most of the time to the expected end of the work, and then no longer than the end is late,
/// so that it is seen soon. `unexpected`: there is also other work.
fn rest_time(waited: Nanos, expected: Option<Nanos>, unexpected: bool, now: Nanos) -> Nanos {
    let part = waited / PART;
    let rest = match expected {
        Some(end) if end > now => ((end - now) / 8 * 7).min(waited.max(FIRST)),
        Some(end) => part.min(now - end),
        None => part,
    };
    let rest = if unexpected { rest.min(part) } else { rest };
    rest.clamp(SHORTEST, LONGEST)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The number of rests until work that takes `takes` is seen to be complete, and the time by which that is late.
    fn rests(takes: Nanos, expected: Option<Nanos>, unexpected: bool) -> (u64, Nanos) {
        let (mut now, mut count) = (0, 0);
        while now < takes {
            now += rest_time(now, expected, unexpected, now);
            count += 1;
        }
        (count, now - takes)
    }

    #[test]
    fn end_of_expected_work_is_seen_soon_after_few_rests() {
        for takes in [50_000, 500_000, 5_000_000, 50_000_000] {
            for percent in [90, 99, 100] {
                let (count, late) = rests(takes, Some(takes / 100 * percent), false);
                assert!(late <= SHORTEST.max(takes / PART), "{takes} at {percent} %: {late}");
                assert!(count <= 30 + takes / LONGEST, "{takes} at {percent} %: {count}");
            }
            let (_, late) = rests(takes, Some(takes * 10), false);
            assert!(late <= takes.min(LONGEST), "{takes}: {late} although it was expected much later");
            let (_, late) = rests(takes, Some(takes * 10), true);
            assert!(
                late <= SHORTEST.max(takes / PART),
                "{takes}: {late} beside work that is expected much later"
            );
        }
    }

    // Promise: P64
    #[test]
    fn passes_follow_each_other_around_the_expected_end_only() {
        for takes in [200_000, 5_000_000] {
            assert!(
                spins(takes, Some(takes), true, takes - NEAR)
                    && spins(takes, Some(takes), false, takes + NEAR)
            );
            assert!(!spins(takes, Some(takes), false, takes + NEAR + 1), "an end that does not come");
            assert!(!spins(0, Some(takes), false, 0), "launches go on in the driver");
        }
        for unknown in [None, Some(1_000_000)] {
            assert!(spins(SPIN - 1, unknown, true, SPIN - 1) && !spins(SPIN, unknown, true, SPIN));
        }
    }

    #[test]
    fn rests_of_unexpected_work_grow_with_the_wait() {
        let (count, late) = rests(500_000, None, true);
        assert!(count <= 50 && late <= 500_000 / PART, "{count}, {late}");
        let (count, late) = rests(1_000_000_000, None, true);
        assert!(count <= 1_200 && late <= LONGEST, "{count}, {late}");
    }
}
