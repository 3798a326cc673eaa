//! Completion: it finds complete work and publishes it.
//!
//! A pass looks at the oldest marker of every stream that has one; a stream that is held back delays no other. The completion
//! thread makes passes while markers are under way and sleeps when there are none. The dispatcher makes a pass itself when its
//! ring runs empty, so that short work is published without a thread switch. The thread that makes a pass holds the lock of
//! [`Completion`]; no thread waits for it.

use crate::{
    arenas::Attached,
    helper::{Helper, jobs::MemoryJob},
    session::Session,
    submit::{
        event_clock::{Becomes, EventClock},
        lanes::{ContextRef, Lane, Lanes, Marker},
        time::{Passed, Time},
    },
};
use core::{
    sync::atomic::{AtomicBool, Ordering, fence},
    time::Duration,
};
use sluice_driver::Driver;
use sluice_runtime::clock::nanoseconds as now;
use sluice_scheduler::Nanos;
use std::{
    sync::{Arc, Mutex, OnceLock, PoisonError},
    thread::Thread,
};

/// The driver's current context of one of our threads, remembered so that it is set only when it changes.
#[derive(Debug, Default)]
pub(crate) struct Current {
    context: Option<ContextRef>,
}

impl Current {
    pub(crate) fn set(&mut self, driver: &Driver, context: ContextRef) -> Result<(), u32> {
        if self.context != Some(context) {
            self.context = None;
            driver.set_current(context.handle)?;
            self.context = Some(context);
        }
        Ok(())
    }

    /// Leaves a context that is about to be destroyed: no later call of this thread may find it current.
    pub(crate) fn leave(&mut self, driver: &Driver, context: ContextRef) -> Result<(), u32> {
        if self.context == Some(context) {
            self.context = None;
            driver.set_current(0)?;
        }
        Ok(())
    }
}

/// What the passes share.
#[derive(Debug)]
pub(crate) struct Completion {
    driver: Arc<Driver>,
    session: Arc<Session>,
    lanes: Arc<Lanes>,
    attached: Arc<Attached>,
    helper: Helper,
    time: Arc<Time>,
    /// What is to be freed when a stream slot has come to a sequence, and whether there is anything.
    frees: Mutex<Vec<(u32, u64, u64)>>,
    any_frees: AtomicBool,
    /// Held during a pass: the lanes have one consumer.
    passing: Mutex<EventClock>,
    /// Set while the completion thread sleeps.
    sleeping: AtomicBool,
    thread: OnceLock<Thread>,
}

impl Completion {
    pub(crate) fn new(
        driver: Arc<Driver>,
        session: Arc<Session>,
        lanes: Arc<Lanes>,
        attached: Arc<Attached>,
        helper: Helper,
        time: Arc<Time>,
    ) -> Completion {
        Completion {
            driver,
            session,
            lanes,
            attached,
            helper,
            time,
            frees: Mutex::default(),
            any_frees: AtomicBool::new(false),
            passing: Mutex::default(),
            sleeping: AtomicBool::new(false),
            thread: OnceLock::new(),
        }
    }

    /// Has an allocation freed when a stream slot has come to a sequence, which is not published yet.
    pub(crate) fn free_after(&self, slot: u32, sequence: u64, address: u64) {
        self.frees.lock().unwrap_or_else(PoisonError::into_inner).push((slot, sequence, address));
        self.any_frees.store(true, Ordering::Release);
    }

    /// Takes back what [`Completion::free_after`] was told: there is no such sequence.
    pub(crate) fn keep(&self, address: u64) {
        self.frees.lock().unwrap_or_else(PoisonError::into_inner).retain(|(_, _, other)| *other != address);
    }

    /// Frees what a slot has come to. Before that is published, so that whoever sees it finds the memory free.
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

    /// Makes sure that the completion thread looks at what is under way.
    pub(crate) fn notify(&self) {
        fence(Ordering::SeqCst);
        if self.sleeping.load(Ordering::Relaxed)
            && self.sleeping.swap(false, Ordering::SeqCst)
            && let Some(thread) = self.thread.get()
        {
            thread.unpark();
        }
    }

    /// Whether any work is under way.
    pub(crate) fn is_pending(&self) -> bool {
        self.lanes.is_pending()
    }

    /// Looks once at every stream with work under way; `true` when something was published. Returns at once when another
    /// thread is looking.
    pub(crate) fn pass(&self, current: &mut Current) -> bool {
        let Ok(mut clock) = self.passing.try_lock() else { return false };
        let mut progress = false;
        self.lanes.for_each_pending(|slot, lane| progress |= self.look(slot, lane, current, &mut clock));
        if progress {
            self.session.wake_guest();
        }
        progress
    }

    /// Forgets a context, which is going away with its events.
    pub(crate) fn forget(&self, context: ContextRef) {
        self.passing.lock().unwrap_or_else(PoisonError::into_inner).forget(context);
    }

    /// Retires the markers of one lane that are done, and counts what was held behind waits that are over. What ends after the
    /// session has failed is counted and not published.
    fn look(&self, slot: u32, lane: &Lane, current: &mut Current, clock: &mut EventClock) -> bool {
        // Asked first: what is seen to be done after a failure may be done only because of it.
        let publishes = self.session.sticky().is_none();
        let mut done = 0;
        while done < lane.pending() {
            let marker = lane.peek(done);
            let state = if marker.has_event() {
                current.set(&self.driver, marker.context).and_then(|()| self.driver.event_done(marker.event))
            } else {
                Ok(true)
            };
            match state {
                Ok(true) => done += 1,
                Ok(false) => break,
                Err(failed) => {
                    // Whatever is queued behind the failure must not appear done, on any stream.
                    // The driver hands out what was printed before the failure, and what an assertion says, when it is
                    // waited for; what has failed is not waited for long.
                    self.publish_text(marker);
                    self.session.set_sticky(failed);
                    // Its context runs nothing any more, and says nothing of what it ran.
                    self.time.abandon(marker.ticket);
                    while lane.pending() > 0 {
                        lane.drop_oldest();
                    }
                    return false;
                }
            }
        }
        if done > 0 {
            let last = lane.peek(done - 1);
            let passed = self.retire(lane, done, current, clock);
            if publishes {
                lane.settle(last.sequence, |to, rows| self.attached.deliver(to, rows));
                self.publish_text(last);
                self.free_due(slot, last.sequence);
                self.session.set_completed(slot, last.sequence);
            }
            if let Some((passed, at)) = passed {
                passed.settle(&self.time, at);
            }
        }
        // What can run now is what stands before the first wait that is not over.
        while lane.ahead() < lane.pending() {
            let ticket = lane.peek(lane.ahead()).ticket;
            if ticket.is_wait() {
                break;
            }
            if ticket.is_held() {
                self.time.free(ticket, lane.started());
            }
            lane.pass();
        }
        publishes && done > 0
    }

    /// Takes off the markers of one lane that are done. Returns what has ended with them, and when.
    fn retire(
        &self,
        lane: &Lane,
        done: u64,
        current: &mut Current,
        clock: &mut EventClock,
    ) -> Option<(Passed, Nanos)> {
        let seen = now();
        let mut passed = Passed::new(lane.started());
        let mut at = seen;
        for left in (0..done).rev() {
            let marker = lane.peek(0);
            // When the last one was reached is when all of them were; when a wait was over is when what it held began.
            let counts = marker.ticket.is_work() || !passed.is_empty();
            if marker.has_event() && ((left == 0 && counts) || marker.ticket.is_wait()) {
                let elapsed = |from, to| self.driver.event_elapsed(from, to).ok();
                at = match current.set(&self.driver, marker.context) {
                    Ok(()) => clock.reached(&marker, seen, elapsed),
                    Err(_) => seen,
                };
            }
            if marker.ticket.is_wait() {
                lane.release();
                lane.start(at);
                passed.wait_ended(at);
            } else {
                if lane.ahead() == 0 && marker.ticket.is_held() {
                    self.time.free(marker.ticket, lane.started());
                }
                passed.add(marker.ticket);
            }
            let last = left == 0 && marker.has_event();
            let becomes = if last { clock.adopt(&marker, at, seen) } else { Becomes::Free };
            match becomes {
                Becomes::Free => lane.retire(),
                Becomes::Anchor(before) => {
                    lane.drop_oldest();
                    if let Some(Err(failed)) = before.map(|event| self.driver.event_destroy(event)) {
                        tracing::debug!(code = failed, "event not destroyed");
                    }
                }
            }
        }
        (!passed.is_empty()).then(|| {
            lane.end(at);
            (passed, at)
        })
    }

    /// Offers the text of kernels up to a marker, which is reached or never will be.
    fn publish_text(&self, marker: Marker) {
        self.session.publish_text(|| match marker.has_event() {
            true => self.driver.event_synchronize(marker.event),
            false => Ok(()),
        });
    }

    /// The completion thread.
    pub(crate) fn run(&self, cpus: usize) {
        // A second initialisation cannot be: one thread runs this.
        let _ = self.thread.set(std::thread::current());
        let mut current = Current::default();
        let mut idle = 0_u32;
        loop {
            if !self.lanes.is_pending() {
                self.sleep();
                idle = 0;
            } else if self.pass(&mut current) {
                idle = 0;
            } else {
                idle = idle.saturating_add(1);
                pause(idle, cpus);
            }
        }
    }

    fn sleep(&self) {
        self.sleeping.store(true, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        if self.lanes.is_pending() {
            self.sleeping.store(false, Ordering::SeqCst);
            return;
        }
        while self.sleeping.load(Ordering::SeqCst) {
            std::thread::park();
        }
    }
}

/// Longest sleep between two looks at work under way.
const LONGEST: Duration = Duration::from_micros(50);

/// Waits a little before the next look: spins while that cannot take a CPU from the work itself, then yields, then sleeps
/// in growing steps.
fn pause(idle: u32, cpus: usize) {
    let spins = if cpus >= 3 { 200 } else { 0 };
    if idle <= spins {
        core::hint::spin_loop();
    } else if idle <= spins + 8 {
        std::thread::yield_now();
    } else {
        let step = idle - spins - 8;
        std::thread::sleep(Duration::from_micros(5 * u64::from(step)).min(LONGEST));
    }
}
