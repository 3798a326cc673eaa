//! The time that the dispatcher polls and naps before it sleeps.
//!
//! Polling saves the guest a doorbell and the worker a wake-up, if the next record comes soon. The dispatcher predicts this
//! from recent waits: after several that outlasted the budget it no longer polls, except for an occasional trial. Naps do the
//! same for records that come a little later, such as the next copy of a program that reads the result of each, and leave the
//! processor free meanwhile.

use std::time::{Duration, Instant};

/// Polling time on more than two CPUs.
const AMPLE: Duration = Duration::from_micros(50);
/// Polling time on two CPUs, where the guest needs the other one.
const SCARCE: Duration = Duration::from_micros(30);
/// Waits that outlasted the budget before polling stops.
const VAIN_SPINS: u32 = 4;
/// After polling has stopped, one wait in this many is polled as a trial.
const TRIAL: u32 = 8;
/// Polls between two readings of the clock.
const LOOKS: u32 = 64;

/// True if the next wait should be polled after `in_vain` waits in a row that outlasted the budget.
const fn is_worthwhile(in_vain: u32) -> bool {
    in_vain < VAIN_SPINS || in_vain.is_multiple_of(TRIAL)
}

/// A nap lasts this fraction of the wait so far, within bounds; the kernel adds about 20 µs.
const PART: u32 = 64;
const SHORTEST_NAP: Duration = Duration::from_micros(5);
const LONGEST_NAP: Duration = Duration::from_micros(20);
/// Total time of naps in one wait.
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

    /// The time to spend on the next wait. `busy`: the driver has work in flight, which may need the CPU.
    fn budget(&self, busy: bool) -> Option<Duration> {
        let worthwhile = is_worthwhile(self.missed);
        match self.cpus {
            0 | 1 => None,
            2 => (!busy && worthwhile).then_some(SCARCE),
            _ => worthwhile.then_some(AMPLE),
        }
    }

    /// Polls until `ready` or until the budget is spent; returns `true` if ready.
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
    /// Naps until `ready` or until the limit is reached; returns `true` if ready. Does not nap if recent waits outlasted the
    /// limit.
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
    fn polling_stops_after_long_waits_and_resumes_after_a_short_trial() {
        let mut spin = Spin::new(4);
        for _ in 0..VAIN_SPINS {
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
    fn dispatcher_with_few_cpus_does_not_poll_beside_the_driver() {
        assert!(Spin::new(2).budget(true).is_none());
        assert!(Spin::new(2).budget(false).is_some());
        assert!(Spin::new(3).budget(true).is_some());
        assert!(Spin::new(1).budget(false).is_none());
    }
}
