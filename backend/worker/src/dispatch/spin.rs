//! The time that the dispatcher polls and naps before it sleeps.
//!
//! While marked work is in flight, the dispatcher watches it: it looks for its end itself, since a wake-up of the completion thread, whose
//! processor sleeps, takes longer than a short kernel. It does so for a limited time, and not after several waits that outlasted it. Beyond
//! the time of a wake-up it yields its processor after each look.
//!
//! When no work is in flight, polling saves the guest a doorbell and the worker a wake-up, if the next record comes soon. The dispatcher predicts this
//! from recent waits: after several that outlasted the budget it no longer polls, except for an occasional trial. Naps do the
//! same for records that come a little later, such as the next copy of a program that reads the result of each, and leave the
//! processor free meanwhile.

use sluice_protocol::park::{VAIN, is_worthwhile};
use std::time::{Duration, Instant};

/// Polling time on more than two CPUs.
const AMPLE: Duration = Duration::from_micros(50);
/// Polling time on two CPUs, where the guest needs the other one.
const SCARCE: Duration = Duration::from_micros(30);
/// Polls between two readings of the clock.
const LOOKS: u32 = 64;
/// Time for which work in flight is watched, since its latest end: as long as the kernels between which a program waits.
const WATCH: Duration = Duration::from_micros(500);
/// Polls of the ring between two looks at the work in flight: together they take about as long as a query of an event.
const WATCH_LOOKS: u32 = 16;

/// A nap lasts this fraction of the wait so far, within bounds; the kernel adds about 20 µs.
const PART: u32 = 64;
/// A shorter nap gives way to no other thread of this processor on a virtual machine, as in the guest's waits.
const SHORTEST_NAP: Duration = Duration::from_micros(10);
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
    /// Waits in a row in which the work in flight outlasted the watch.
    unended: u32,
    /// Time for which the work in flight was watched since its latest end, in watches that a record interrupted.
    watched: Duration,
}

/// The state of the marked work in flight after a look at it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Watched {
    /// None is left.
    Over,
    /// An end was published, and more is in flight.
    Ended,
    Unchanged,
}

/// The outcome of a watch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EndWatch {
    /// A record or a notice is there.
    Ready,
    /// No work is in flight.
    Over,
    /// Work is in flight, which others have to watch.
    Left,
}

impl Spin {
    pub(crate) const fn new(cpus: usize) -> Spin {
        Spin { cpus, missed: 0, outlasted: 0, unended: 0, watched: Duration::ZERO }
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
    /// Looks for the end of the work in flight until `ready`, until there is none, or until the limit is reached. A record that comes meanwhile
    /// extends no limit: a guest could have endless work watched for ever. With few processors the work itself or the guest may need this one.
    pub(crate) fn watch(
        &mut self,
        mut ready: impl FnMut() -> bool,
        mut look: impl FnMut() -> Watched,
    ) -> EndWatch {
        if self.cpus > 2 && is_worthwhile(self.unended) {
            let mut start = Instant::now();
            let mut elapsed = Duration::ZERO;
            while self.watched + elapsed < WATCH {
                for _ in 0..WATCH_LOOKS {
                    if ready() {
                        self.watched += elapsed;
                        return EndWatch::Ready;
                    }
                    core::hint::spin_loop();
                }
                match look() {
                    Watched::Over => {
                        (self.unended, self.watched) = (0, Duration::ZERO);
                        return EndWatch::Over;
                    }
                    Watched::Ended => {
                        (self.unended, self.watched, start) = (0, Duration::ZERO, Instant::now());
                    }
                    Watched::Unchanged if self.watched + elapsed > AMPLE => std::thread::yield_now(),
                    Watched::Unchanged => {}
                }
                elapsed = start.elapsed();
            }
        }
        self.watched = Duration::ZERO;
        self.unended = self.unended.wrapping_add(1);
        EndWatch::Left
    }

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
                    // The record may have come early in the nap, or late only because the guest napped: one poll finds out.
                    if elapsed <= AMPLE {
                        self.missed = self.missed.min(VAIN - 1);
                    }
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
    use sluice_protocol::park::FIRST_TRIAL;

    #[test]
    fn polling_stops_after_long_waits_and_resumes_after_a_short_trial() {
        let mut spin = Spin::new(4);
        for _ in 0..VAIN {
            assert!(spin.budget(false).is_some());
            assert!(!spin.until(false, || false));
        }
        let polled = (0..FIRST_TRIAL).filter(|_| {
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

    /// A wait for a record that does not come; every look finds the work `watched`. Returns the outcome and the number of looks.
    fn watch(spin: &mut Spin, watched: Watched) -> (EndWatch, u32) {
        let mut looks = 0;
        let outcome = spin.watch(
            || false,
            || {
                looks += 1;
                watched
            },
        );
        (outcome, looks)
    }

    // Promise: P63
    #[test]
    fn work_in_flight_is_watched_to_its_end_and_no_longer_after_long_waits() {
        let mut spin = Spin::new(4);
        assert_eq!(watch(&mut spin, Watched::Over), (EndWatch::Over, 1));
        assert_eq!(spin.watch(|| true, || Watched::Unchanged), EndWatch::Ready);
        for _ in 0..VAIN {
            let (outcome, looks) = watch(&mut spin, Watched::Unchanged);
            assert!(outcome == EndWatch::Left && looks > 0, "{outcome:?} after {looks} looks");
        }
        let watched = (0..FIRST_TRIAL).filter(|_| watch(&mut spin, Watched::Unchanged).1 > 0);
        assert_eq!(watched.count(), 1, "one trial");
        // A trial that sees an end ends this.
        while watch(&mut spin, Watched::Over).1 == 0 {}
        assert!(watch(&mut spin, Watched::Unchanged).1 > 0);
        assert_eq!(
            watch(&mut Spin::new(2), Watched::Over),
            (EndWatch::Left, 0),
            "the guest needs the processor"
        );
    }

    // Promise: P63
    #[test]
    fn records_beside_endless_work_do_not_have_it_watched_for_ever() {
        let mut spin = Spin::new(4);
        let mut is_watched = || {
            let start = Instant::now();
            let mut looks = 0;
            spin.watch(
                || start.elapsed() >= WATCH / 2,
                || {
                    looks += 1;
                    Watched::Unchanged
                },
            );
            looks > 0
        };
        let waits = 8 * FIRST_TRIAL;
        let watched = (0..waits).filter(|_| is_watched()).count();
        assert!(watched < waits as usize / 2, "{watched} of {waits} waits were watched");
    }

    #[test]
    fn dispatcher_with_few_cpus_does_not_poll_beside_the_driver() {
        assert!(Spin::new(2).budget(true).is_none());
        assert!(Spin::new(2).budget(false).is_some());
        assert!(Spin::new(3).budget(true).is_some());
        assert!(Spin::new(1).budget(false).is_none());
    }
}
