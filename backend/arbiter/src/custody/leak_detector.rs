//! The leak detector: workers that take memory and never give it back.

use super::{Custody, Millis, WorkerState};
use crate::ids::WorkerId;
use sluice_messages::control::ArbiterEvent;

/// Milliseconds between looks. Loading a model or preparing a batch takes one or two of them, whatever the number of
/// chunks.
const LOOK: Millis = 60_000;
/// Looks that each find more lent than the one before, with no chunk given back since the first: ten minutes at least.
/// By then, the caches of a serving program have their final size; a leak per request still grows.
const LOOKS: u32 = 10;

/// The time for which a worker's lent bytes have only risen.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct LeakDetector {
    /// True if a chunk was taken since the last look.
    taken: bool,
    /// Looks with a chunk taken, since the last one was given back.
    looks: u32,
    reported: bool,
}

impl LeakDetector {
    /// A chunk was lent.
    pub(super) const fn note_growth(&mut self) {
        self.taken = true;
    }

    /// A chunk was given back, so the count starts again.
    pub(super) const fn note_return(&mut self) {
        self.taken = false;
        self.looks = 0;
    }

    /// Handles a look. `true` once, when the growth has lasted long enough.
    const fn look(&mut self) -> bool {
        if self.taken {
            self.taken = false;
            self.looks = self.looks.saturating_add(1);
        }
        let news = self.looks >= LOOKS && !self.reported;
        self.reported |= news;
        news
    }
}

impl Custody {
    /// Looks for workers whose memory only grows, if it is time. Returns the time of the next look.
    pub fn watch_growth(&mut self, now: Millis) -> Millis {
        if now < self.look_at {
            return self.look_at;
        }
        self.look_at = now.saturating_add(LOOK);
        let alive = self.workers.iter_mut().filter(|(_, worker)| worker.life == WorkerState::Alive);
        let growing: Vec<WorkerId> =
            alive.filter_map(|(id, worker)| worker.leak_detector.look().then_some(*id)).collect();
        for id in growing {
            let Some(worker) = self.workers.get(&id) else { continue };
            let (vm, process, bytes) = (worker.vm.vm, worker.process, worker.lent);
            tracing::info!(vm, process, bytes, "a worker's memory has only grown for a long time");
            self.event(ArbiterEvent::Growing, vm, process, bytes);
        }
        self.look_at
    }
}
