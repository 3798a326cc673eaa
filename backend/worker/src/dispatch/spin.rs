//! The length of time that the dispatcher polls and naps before it sleeps.
//!
//! Polling saves the guest a doorbell and itself a wake-up, if the next record comes soon. The dispatcher learns from recent
//! waits whether it does: after several that outlasted the budget it no longer polls, but for an occasional trial. Naps do the
//! same for records that come a little later, such as the next copy of a program that looks at each, and leave the processor
//! free meanwhile.

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

/// Whether to spend time on the next wait after so many in a row for which it was in vain.
const fn is_worthwhile(in_vain: u32) -> bool {
    in_vain < PATIENCE || in_vain.is_multiple_of(TRIAL)
}

/// A nap lasts such a part of the wait so far, within bounds; the kernel adds some twenty microseconds.
const PART: u32 = 64;
const SHORTEST_NAP: Duration = Duration::from_micros(5);
const LONGEST_NAP: Duration = Duration::from_micros(20);
/// How long one wait may nap.
const NAPS: Duration = Duration::from_millis(4);

/// The dispatcher's memory of recent waits.
#[derive(Debug)]
pub(crate) struct Spin {
    cpus: usize,
    /// Waits in a row that outlasted the budget.
    missed: u32,
    /// Waits in a row that outlasted the naps.
    outlasted: u32,
}

impl Spin {
    pub(crate) const fn new(cpus: usize) -> Spin {
        Spin { cpus, missed: 0, outlasted: 0 }
    }

    /// The time to spend on the next wait. `busy`: the driver has work under way, which may need the CPU.
    fn budget(&self, busy: bool) -> Option<Duration> {
        let worthwhile = is_worthwhile(self.missed);
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

impl Spin {
    /// Naps until `ready` or it has lasted long enough; `true` when ready. Not when recent waits outlasted it.
    pub(crate) fn nap(&mut self, mut ready: impl FnMut() -> bool) -> bool {
        if is_worthwhile(self.outlasted) {
            let start = Instant::now();
            let mut elapsed = Duration::ZERO;
            while elapsed < NAPS {
                std::thread::sleep((elapsed / PART).clamp(SHORTEST_NAP, LONGEST_NAP));
                elapsed = start.elapsed();
                if ready() {
                    self.outlasted = 0;
                    return true;
                }
            }
        }
        self.outlasted = self.outlasted.wrapping_add(1);
        false
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
