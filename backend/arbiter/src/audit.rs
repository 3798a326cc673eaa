//! The audit of the arbiter: checks of sums and states, and the tolerance between the inventory's figures and the arbiter's.

use crate::{
    custody::{Custody, Millis},
    ids::Class,
    ledger::Broken,
};
use sluice_messages::custody::UNIT;
use std::time::{Duration, Instant};

/// Milliseconds between audits while something changes, and while nothing does.
const EVERY: [Millis; 2] = [5, 500];
/// An audit takes at most this part of the arbiter's time.
const SHARE: u32 = 20;

/// The audit.
#[derive(Debug)]
pub struct Audit {
    last: Millis,
    cost: Duration,
    /// What was reported; the same is not reported again until it was right once.
    reported: Option<Broken>,
    /// Drift in a row.
    drifted: u32,
    /// How much it was the last time; none while it is normal.
    drift: u64,
    /// What is used on the device and not by us, measured while no worker lived.
    beside: Option<u64>,
}

impl Default for Audit {
    fn default() -> Audit {
        Audit { last: 0, cost: Duration::ZERO, reported: None, drifted: 0, drift: 0, beside: None }
    }
}

impl Audit {
    /// When the next audit is due.
    #[must_use]
    pub fn due(&self, changed: bool) -> Millis {
        let every = if changed { EVERY[0] } else { EVERY[1] };
        let cost = u64::try_from((self.cost * SHARE).as_millis()).unwrap_or(u64::MAX);
        self.last.saturating_add(every.max(cost))
    }

    /// Checks. What is wrong for the first time is returned.
    pub fn run(&mut self, custody: &Custody, now: Millis) -> Option<Broken> {
        let started = Instant::now();
        let broken = custody.check().err();
        self.cost = started.elapsed();
        self.last = now;
        let news = broken.filter(|broken| self.reported != Some(*broken));
        self.reported = broken;
        news
    }

    /// Compares the device's used bytes with what we know of. Returns the drift when it is more than normal twice in a row:
    /// figures that are taken one after the other may differ once.
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

    /// How far the device's figure is from ours, where that is more than normal.
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
    }
}
