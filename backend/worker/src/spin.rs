//! How long the dispatcher polls before it sleeps.
//!
//! Polling saves the guest a doorbell and itself a wake-up, if the next record comes soon. Whether it does is learnt from
//! recent waits: after several that outlasted the budget nothing is spent, but for an occasional trial.

use std::time::{Duration, Instant};

/// Polling time with CPUs to spare.
const AMPLE: Duration = Duration::from_micros(50);
/// Polling time on two CPUs, where the guest needs the other one.
const SCARCE: Duration = Duration::from_micros(30);
/// Waits that outlasted the budget before polling stops.
const PATIENCE: u32 = 4;
/// One of so many waits is polled all the same, to find out whether times have changed.
const TRIAL: u32 = 8;
/// Looks between two readings of the clock.
const LOOKS: u32 = 64;

/// The dispatcher's memory of recent waits.
#[derive(Debug)]
pub(crate) struct Spin {
    cpus: usize,
    /// Waits in a row that outlasted the budget.
    missed: u32,
}

impl Spin {
    pub(crate) const fn new(cpus: usize) -> Spin {
        Spin { cpus, missed: 0 }
    }

    /// The time to spend on the next wait. `busy`: the driver has work under way, which may need the CPU.
    fn budget(&self, busy: bool) -> Option<Duration> {
        let worthwhile = self.missed < PATIENCE || self.missed.is_multiple_of(TRIAL);
        match self.cpus {
            0 | 1 => None,
            2 => (!busy && worthwhile).then_some(SCARCE),
            _ => worthwhile.then_some(AMPLE),
        }
    }

    /// Polls until `ready` or the budget is spent; `true` when ready.
    pub(crate) fn until(&mut self, busy: bool, mut ready: impl FnMut() -> bool) -> bool {
        let Some(budget) = self.budget(busy) else {
            self.missed = self.missed.wrapping_add(1);
            return ready();
        };
        let mut start = None;
        loop {
            for _ in 0..LOOKS {
                if ready() {
                    self.missed = 0;
                    return true;
                }
                core::hint::spin_loop();
            }
            if start.get_or_insert_with(Instant::now).elapsed() >= budget {
                self.missed = self.missed.wrapping_add(1);
                return false;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn polling_stops_when_waits_are_long_and_comes_back() {
        let mut spin = Spin::new(4);
        for _ in 0..PATIENCE {
            assert!(spin.budget(false).is_some());
            assert!(!spin.until(false, || false));
        }
        let polled = (0..TRIAL).filter(|_| {
            let polls = spin.budget(false).is_some();
            spin.until(false, || false);
            polls
        });
        assert_eq!(polled.count(), 1, "one trial");
        while spin.budget(false).is_none() {
            spin.until(false, || false);
        }
        assert!(spin.until(false, || true));
        assert!(spin.budget(false).is_some());
    }

    #[test]
    fn scarce_cpus_are_left_to_the_driver() {
        assert!(Spin::new(2).budget(true).is_none());
        assert!(Spin::new(2).budget(false).is_some());
        assert!(Spin::new(3).budget(true).is_some());
        assert!(Spin::new(1).budget(false).is_none());
    }
}
