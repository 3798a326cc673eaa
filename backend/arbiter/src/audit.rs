//! The audit of the arbiter: checks of sums and states, and the tolerance between the inventory's figures and the arbiter's.

use crate::{
    custody::{Custody, Millis},
    ids::Class,
    ledger::Broken,
};
use sluice_messages::custody::UNIT;
use std::time::{Duration, Instant};

/// Milliseconds between audits while state changes, and while it does not.
const EVERY: [Millis; 2] = [5, 500];
/// An audit takes at most one part in this many of the arbiter's time.
const SHARE: u32 = 20;

/// The state of the audit.
#[derive(Debug)]
pub struct Audit {
    last: Millis,
    cost: Duration,
    /// The contradiction that was reported last. It is reported again only after an audit found none.
    reported: Option<Broken>,
    /// Looks in a row that found drift.
    drifted: u32,
    /// The drift at the last look; 0 while it is normal.
    drift: u64,
    /// Bytes of the device that are not in custody, measured while no worker lived.
    beside: Option<u64>,
}

impl Default for Audit {
    fn default() -> Audit {
        Audit { last: 0, cost: Duration::ZERO, reported: None, drifted: 0, drift: 0, beside: None }
    }
}

impl Audit {
    /// The time at which the next audit is due.
    #[must_use]
    pub fn due(&self, changed: bool) -> Millis {
        let every = if changed { EVERY[0] } else { EVERY[1] };
        let cost = u64::try_from((self.cost * SHARE).as_millis()).unwrap_or(u64::MAX);
        self.last.saturating_add(every.max(cost))
    }

    /// Checks. Returns a contradiction the first time it is found.
    pub fn run(&mut self, custody: &Custody, now: Millis) -> Option<Broken> {
        let started = Instant::now();
        let broken = custody.check().err();
        self.cost = started.elapsed();
        self.last = now;
        let news = broken.filter(|broken| self.reported != Some(*broken));
        self.reported = broken;
        news
    }

    /// Compares the device's used bytes with the known ones. Returns the drift if it is more than normal twice in a row: figures that
    /// are taken one after the other may differ once.
    pub fn reconcile(&mut self, known: u64, used: u64, total: u64, workers: bool) -> Option<u64> {
        let beside = match self.beside {
            Some(beside) => beside,
            None if workers => return None,
            None => *self.beside.insert(used.saturating_sub(known)),
        };
        let tolerance = (UNIT * Class::ALL.len() as u64).max(total / 100);
        let drift = used.abs_diff(known.saturating_add(beside));
        self.drifted = if drift > tolerance { self.drifted.saturating_add(1) } else { 0 };
        self.drift = if self.drifted >= 2 { drift } else { 0 };
        (self.drifted == 2).then_some(drift)
    }

    /// Measures the memory beside custody anew: other processes have given some back.
    pub const fn measure_again(&mut self) {
        self.beside = None;
        self.drifted = 0;
        self.drift = 0;
    }

    /// The difference between the device's figure and the arbiter's, if it is more than normal.
    #[must_use]
    pub const fn drift(&self) -> u64 {
        self.drift
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Promise: Q21
    #[test]
    fn drift_is_reported_once_and_only_when_it_stays() {
        const TOTAL: u64 = 1000 << 20;
        let mut audit = Audit::default();
        assert_eq!(audit.reconcile(100 << 20, 130 << 20, TOTAL, true), None, "nothing to compare with yet");
        assert_eq!(audit.reconcile(100 << 20, 130 << 20, TOTAL, false), None, "30 MiB are not ours");
        assert_eq!(audit.reconcile(200 << 20, 240 << 20, TOTAL, true), None, "1 % is normal");
        assert_eq!(audit.reconcile(200 << 20, 241 << 20, TOTAL, true), None, "once is not yet drift");
        assert_eq!(audit.reconcile(200 << 20, 241 << 20, TOTAL, true), Some(11 << 20));
        assert_eq!(audit.reconcile(200 << 20, 241 << 20, TOTAL, true), None, "said already");
        assert_eq!(audit.reconcile(200 << 20, 230 << 20, TOTAL, true), None);
        assert_eq!(audit.reconcile(200 << 20, 180 << 20, TOTAL, true), None);
        assert_eq!(audit.reconcile(200 << 20, 180 << 20, TOTAL, true), Some(50 << 20), "less is drift, too");
        audit.measure_again();
        assert_eq!((audit.drift(), audit.reconcile(200 << 20, 180 << 20, TOTAL, true)), (0, None));
        assert_eq!(audit.reconcile(200 << 20, 200 << 20, TOTAL, false), None, "none is beside now");
    }
}
