//! The leak detector: workers that take and never give.

use super::{Custody, Life, Millis};
use crate::ids::WorkerId;
use sluice_messages::control::ArbiterEvent;

/// Milliseconds between looks. A model that is loaded or a batch that is prepared takes in one or two of them, however
/// many chunks that is.
const LOOK: Millis = 60_000;
/// Looks at which more was lent than at the one before, without anything given back since the first: ten minutes at least.
/// Caches of a serving program have their size by then; what allocates per request and forgets has not.
const LOOKS: u32 = 10;

/// How long a worker's lent bytes have only risen.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Rise {
    /// Something was taken since the last look.
    taken: bool,
    /// Looks with something taken, since something was given back.
    looks: u32,
    reported: bool,
}

impl Rise {
    /// A chunk was lent.
    pub(super) const fn rose(&mut self) {
        self.taken = true;
    }

    /// A chunk was given back: whoever does that does not only grow.
    pub(super) const fn fell(&mut self) {
        self.taken = false;
        self.looks = 0;
    }

    /// A look. `true` once, when it has gone on for long.
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
    /// Looks at whose memory only grows, when it is time. Returns when to look again.
    pub fn watch_growth(&mut self, now: Millis) -> Millis {
        if now < self.look_at {
            return self.look_at;
        }
        self.look_at = now.saturating_add(LOOK);
        let alive = self.workers.iter_mut().filter(|(_, worker)| worker.life == Life::Alive);
        let growing: Vec<WorkerId> =
            alive.filter_map(|(id, worker)| worker.rise.look().then_some(*id)).collect();
        for id in growing {
            let Some(worker) = self.workers.get(&id) else { continue };
            let (vm, process, bytes) = (worker.vm.vm, worker.process, worker.lent);
            tracing::info!(vm, process, bytes, "a worker's memory has only grown for a long time");
            self.event(ArbiterEvent::Growing, vm, process, bytes);
        }
        self.look_at
    }
}
