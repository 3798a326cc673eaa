//! The life of sessions: from the arrival of a worker until it has ended, and the restart and stop of the device.

use super::{Body, Device};
use crate::{
    link::Arrival,
    poller,
    sessions::{SessionOwner, SessionPhase, UNAVAILABLE},
    waiters::Waiters,
    workers::Worker,
};
use rustix::fd::OwnedFd;
use sluice_protocol::{gpu::answer, limits, session};
use sluice_runtime::endable::EndableProcess;
use std::time::{Duration, Instant};

/// Longest wait for an event while the queue stops.
const LOOK: Duration = Duration::from_millis(10);
/// Looks after the time for a stop is over. They find all events that are ready: three of each session at most, of its socket, its process
/// and its eventfd.
const LAST_LOOKS: usize = (3 * limits::SESSIONS).div_ceil(poller::ROUND);

impl Device {
    /// The guest no longer needs a session. Its worker is killed, after `grace` if it may still say goodbye.
    pub(super) fn abandon(&mut self, number: u32, grace: Option<Duration>) {
        let Some(session) = self.sessions.get_mut(&number) else { return };
        match session.owner.take() {
            Some(SessionOwner::Context(id)) => self.contexts.set_session(id, None),
            Some(SessionOwner::Control(id)) => drop(self.controls.remove(id)),
            None => {}
        }
        session.pages = None;
        self.end(number, grace);
        let waiters = self.waiters.take(number);
        self.answer_waiters(&waiters);
    }

    /// A session has no worker any more, or gets none: tells its guest, wherever it waits.
    pub(super) fn lose(&mut self, number: u32, error: u32) {
        let Some(session) = self.sessions.get_mut(&number) else { return };
        if let (Some(memory), Some(pages)) = (&self.memory, session.pages.take()) {
            session::set_lost(&pages.words(memory), error);
            self.counters.lost = self.counters.lost.wrapping_add(1);
        }
        self.end(number, None);
        let waiters = self.waiters.take(number);
        self.answer_waiters(&waiters);
    }

    /// Ends a session's worker.
    fn end(&mut self, number: u32, grace: Option<Duration>) {
        let Some(session) = self.sessions.get_mut(&number) else { return };
        let phase = core::mem::replace(&mut session.phase, SessionPhase::Lost);
        session.orders.clear();
        match phase {
            SessionPhase::Waiting(_) | SessionPhase::Lost => {
                let resources = session.release_all();
                self.released(resources);
                self.remove_if_over(number);
            }
            SessionPhase::Running(worker) => {
                worker.hang_up(&self.poller);
                self.link.ending(number);
                let until = grace.and_then(|grace| Instant::now().checked_add(grace));
                match until {
                    Some(until) => self.poller.at_most(until),
                    None => worker.kill(),
                }
                session.phase = SessionPhase::Dying(worker, until);
            }
            SessionPhase::Dying(worker, until) => {
                // If the guest dies meanwhile, its worker gets no more time.
                if until.is_some() && grace.is_none() {
                    worker.kill();
                }
                session.phase = SessionPhase::Dying(worker, until.filter(|_| grace.is_some()));
            }
        }
    }

    /// A worker is gone, and all its mappings with it.
    pub(super) fn exited(&mut self, number: u32) {
        let Some(session) = self.sessions.get_mut(&number) else { return };
        match core::mem::replace(&mut session.phase, SessionPhase::Lost) {
            SessionPhase::Running(worker) | SessionPhase::Dying(worker, _) => {
                drop(worker.release(&self.poller))
            }
            other => {
                session.phase = other;
                return;
            }
        }
        let resources = session.release_all();
        self.lose(number, UNAVAILABLE);
        self.released(resources);
        self.link.ended(number);
        self.remove_if_over(number);
        if !self.probes.is_empty() {
            self.answer_probes(Some(Instant::now()));
        }
    }

    /// Removes a session that has no owner, no worker and no pending request. A session whose guest is alive stays, so that every
    /// wait in it is answered at once.
    fn remove_if_over(&mut self, number: u32) {
        let over = self.sessions.get(&number).is_some_and(|session| {
            session.owner.is_none() && !session.unanswered && matches!(session.phase, SessionPhase::Lost)
        });
        if over {
            self.sessions.remove(&number);
            self.link.close(number);
        }
    }

    /// Handles an answer of `sluiced` without the link, for a fuzz target or a test that plays `sluiced`.
    #[cfg(any(test, fuzzing))]
    pub fn arrive(&mut self, arrival: Arrival) {
        self.arrived(arrival);
    }

    pub(super) fn arrived(&mut self, arrival: Arrival) {
        let (Arrival::Worker { session: number, .. } | Arrival::None { session: number, .. }) = arrival;
        let Some(session) = self.sessions.get_mut(&number) else {
            return self.link.bury_arrival(arrival);
        };
        session.unanswered = false;
        match arrival {
            Arrival::Worker { socket, process, .. } if matches!(session.phase, SessionPhase::Waiting(_)) => {
                self.adopt(number, socket, process);
            }
            Arrival::Worker { .. } => {
                self.link.bury_arrival(arrival);
                self.remove_if_over(number);
            }
            Arrival::None { error, .. } => {
                self.lose(number, error);
                self.remove_if_over(number);
            }
        }
    }

    fn adopt(&mut self, number: u32, socket: OwnedFd, process: EndableProcess) {
        match Worker::adopt(number, socket, process, self.program_signals.take(), &self.poller) {
            Ok(worker) => {
                if let Some(session) = self.sessions.get_mut(&number) {
                    session.phase = SessionPhase::Running(worker);
                }
                self.flush(number);
            }
            Err((error, process)) => {
                tracing::error!(session = number, %error, "cannot adopt a worker");
                self.link.reap(number, process, None);
                self.lose(number, UNAVAILABLE);
            }
        }
    }

    /// Ends all state of a driver instance that is gone.
    pub fn restart(&mut self) {
        let numbers: Vec<u32> = self.sessions.keys().copied().collect();
        for number in numbers {
            self.abandon(number, None);
            // The ids in its attach table will soon belong to other resources.
            if let Some(session) = self.sessions.get_mut(&number) {
                session.release_all();
            }
        }
        self.contexts.clear();
        self.controls.clear();
        self.resources.clear(&mut self.table);
    }

    pub(super) fn is_dying(&self) -> bool {
        self.sessions.values().any(|session| matches!(session.phase, SessionPhase::Dying(..)))
    }

    /// Answers starting drivers whose time is up, or all of them if no worker of the driver before is left.
    pub(super) fn answer_probes(&mut self, now: Option<Instant>) {
        let all = now.is_none() || !self.is_dying();
        let (due, left): (Vec<_>, Vec<_>) = core::mem::take(&mut self.probes)
            .into_iter()
            .partition(|(_, _, deadline)| all || now.is_some_and(|now| *deadline <= now));
        self.probes = left;
        for (header, place, _) in due {
            self.answer(place, &header, answer::OK_CAPSET_INFO, &Body::CapsetInfo);
        }
    }

    /// Stops the queue: answers all withheld commands, so that none is in flight when it starts again. Waits a limited time
    /// for pages that a worker still has, for half of it before the worker is killed; the front-end waits meanwhile.
    pub fn stop(&mut self, limit: Duration) {
        let waiters = self.waiters.take_all();
        self.answer_waiters(&waiters);
        self.answer_probes(None);
        let half = limit.mul_f64(0.5);
        self.wait_for_pages(half);
        if self.resources.withheld() > 0 {
            let numbers: Vec<u32> = self.sessions.keys().copied().collect();
            for number in numbers {
                if self.sessions.get(&number).is_some_and(|session| session.unmap_deadline.is_some()) {
                    self.lose(number, UNAVAILABLE);
                }
            }
            self.wait_for_pages(half);
        }
        let leaked = self.resources.withheld();
        if leaked > 0 {
            // An answer would give the guest pages that a GPU may still write to.
            self.counters.leaked =
                self.counters.leaked.saturating_add(u64::try_from(leaked).unwrap_or(u64::MAX));
            tracing::error!(leaked, "killed workers are not gone; their guest pages are not given back");
        }
    }

    /// Handles events until no worker has pages that the guest requested, at most for `limit`.
    fn wait_for_pages(&mut self, limit: Duration) {
        let started = Instant::now();
        let mut last_looks = LAST_LOOKS;
        let mut events = Vec::new();
        while self.resources.withheld() > 0 && last_looks > 0 {
            // Read before the look: a process that was stopped handles all that is ready before its time counts as over.
            let left = limit.saturating_sub(started.elapsed());
            last_looks = last_looks.saturating_sub(usize::from(left.is_zero()));
            events.clear();
            if self.poller.wait(left.min(LOOK), &mut events).is_err() {
                return;
            }
            for event in &events {
                self.event(*event);
            }
        }
    }

    /// Ends the connection: kills the workers and leaves waiting for them to the link.
    pub fn disconnect(&mut self) {
        for (number, session) in core::mem::take(&mut self.sessions) {
            if let SessionPhase::Running(worker) | SessionPhase::Dying(worker, _) = session.phase {
                self.link.reap(number, worker.release(&self.poller), self.kept.clone());
            }
            // The link counts a session that `sluiced` has not answered until it does.
            if !session.unanswered {
                self.link.close(number);
            }
        }
        for arrival in self.inbox.close() {
            self.link.turn_away(arrival);
        }
        self.waiters = Waiters::default();
        self.contexts.clear();
        self.controls.clear();
        self.resources.clear(&mut self.table);
        self.memory = None;
        self.settle();
    }
}
