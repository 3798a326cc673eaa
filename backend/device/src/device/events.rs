//! Events of workers, and time limits.

use super::Device;
use crate::{
    poller::PollEvent,
    sessions::{Arenas, CONTROL, SessionPhase, SessionState, UNAVAILABLE},
    workers::WorkerNews,
};
use sluice_messages::control::FromWorker;
use sluice_protocol::limits;
use sluice_runtime::limited;
use std::time::Instant;

/// Messages of one worker handled in a row; the others wait for the next round.
const MESSAGES_PER_ROUND: usize = 64;

impl Device {
    /// Handles an event of the poller.
    pub fn event(&mut self, event: PollEvent) {
        match event {
            PollEvent::Inbox => self.take_arrivals(),
            PollEvent::Again => {}
            PollEvent::Timer => self.expire(),
            PollEvent::Wake(number) => self.wake(number),
            PollEvent::Socket(number) => self.receive_from_worker(number),
            PollEvent::Exited(number) => self.exited(number),
        }
        self.settle();
    }

    fn take_arrivals(&mut self) {
        for arrival in self.inbox.take() {
            self.arrived(arrival);
        }
    }

    pub(super) fn receive_from_worker(&mut self, number: u32) {
        self.flush(number);
        for _ in 0..MESSAGES_PER_ROUND {
            let Some(SessionState { phase: SessionPhase::Running(worker), .. }) = self.sessions.get(&number)
            else {
                return;
            };
            let lawful = match worker.receive() {
                WorkerNews::Nothing => return,
                // Only a probe, which has no device, reports its driver.
                WorkerNews::Gone | WorkerNews::Message(FromWorker::Unfit { .. } | FromWorker::Fit {}) => {
                    false
                }
                WorkerNews::Message(FromWorker::Attached { slot, error }) => {
                    self.attached(number, slot, error)
                }
                WorkerNews::Message(FromWorker::Detached { slot }) => self.detached(number, slot),
            };
            if !lawful {
                return self.lose(number, UNAVAILABLE);
            }
        }
    }

    /// A worker has mapped a resource, or failed to. Returns false if that was not requested.
    fn attached(&mut self, number: u32, slot: u32, error: u32) -> bool {
        let Some(session) = self.sessions.get_mut(&number) else { return false };
        if !session.attachments.contains_key(&slot) {
            return false;
        }
        if error != 0 {
            // The pages of a fixed arena go back to the guest when the worker is gone, and not for its word.
            if slot == CONTROL || session.arenas == Arenas::Complete {
                self.lose(number, error);
                return true;
            }
            // Also if it is leaving: a worker does not answer a request to unmap a resource that it never mapped.
            let resource = session.release(slot);
            self.released(resource);
        }
        true
    }

    /// A worker has unmapped a resource. Returns false if that was not requested.
    fn detached(&mut self, number: u32, slot: u32) -> bool {
        let Some(session) = self.sessions.get_mut(&number) else { return false };
        if session.attachments.get(&slot).is_none_or(|attachment| !attachment.leaving) {
            return false;
        }
        let resource = session.release(slot);
        self.released(resource);
        true
    }

    fn expire(&mut self) {
        let now = Instant::now();
        let expired = self.waiters.expire(now);
        self.counters.expired =
            self.counters.expired.saturating_add(u64::try_from(expired.len()).unwrap_or(u64::MAX));
        self.answer_waiters(&expired);
        self.answer_probes(Some(now));
        // A process that was stopped finds its time limits passed before it finds the answers that came in time.
        self.take_arrivals();
        for _ in 0..=limits::ATTACHMENTS as usize / MESSAGES_PER_ROUND {
            for number in self.due(now) {
                self.receive_from_worker(number);
            }
        }
        for number in self.due(now) {
            let Some(session) = self.sessions.get_mut(&number) else { continue };
            match &mut session.phase {
                SessionPhase::Waiting(_) => self.lose(number, UNAVAILABLE),
                SessionPhase::Running(_) => {
                    limited!(warn, session = number, "a worker did not give back guest pages and is killed");
                    self.lose(number, UNAVAILABLE);
                }
                SessionPhase::Dying(worker, until) => {
                    *until = None;
                    worker.kill();
                }
                SessionPhase::Lost => {}
            }
        }
        self.continue_freed_search(now);
        let probes = self.probes.iter().map(|(_, _, deadline)| *deadline);
        let sessions = self.sessions.values().filter_map(SessionState::deadline);
        let next = sessions.chain(self.waiters.deadline()).chain(probes);
        let next = next.chain(self.freed_search.deadline()).min();
        self.poller.rearm(next);
    }

    /// The sessions with a time limit that has passed.
    fn due(&self, now: Instant) -> Vec<u32> {
        let is_due = |session: &SessionState| session.deadline().is_some_and(|deadline| deadline <= now);
        self.sessions.iter().filter(|(_, session)| is_due(session)).map(|(number, _)| *number).collect()
    }
}
