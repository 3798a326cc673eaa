//! A VM's charge of GPU time, compared with the time that the driver measured.
//!
//! The driver samples the device a few times per second and reports the last second, so its figures come late: work that has just
//! begun is charged before the driver reports it. The excess of a charge is kept as credit for figures that follow, and is bounded, so
//! that a worker cannot save it up.

use sluice_scheduler::Nanos;

/// Length of a comparison.
const PERIOD: Nanos = 5_000_000_000;
/// A charge that is this much below the driver's figures is no error of measurement.
const LARGE: Nanos = PERIOD / 4;
/// The largest credit: the delay of the driver's figures.
const CREDIT: Nanos = PERIOD / 4;
/// Rounds further apart than this leave the time between unknown.
const ROUND: Nanos = 2_000_000_000;
/// The unit of a part of the time.
pub(crate) const WHOLE: u64 = 1000;

/// A VM's charge and the driver's figures for the same time.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Comparison {
    since: Nanos,
    last: Nanos,
    /// The charge at `since`.
    charged: Nanos,
    /// The time that the driver reported since.
    measured: Nanos,
    /// Time that was charged before `since` and that the driver has not reported yet.
    credit: Nanos,
}

/// Time that the driver measured and that is not charged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Missing {
    pub(crate) time: Nanos,
    /// True if the workers hide it; a smaller difference may be one of measurement.
    pub(crate) is_large: bool,
}

impl Comparison {
    /// Begins a comparison with the present charge.
    pub(crate) const fn begin(charged: Nanos, now: Nanos) -> Self {
        Self { since: now, last: now, charged, measured: 0, credit: 0 }
    }

    /// Adds a round of the driver's figures: the VM's part of the time since the last, in thousandths. After each period, returns the
    /// time that is to be charged in addition, and begins the next period.
    pub(crate) fn add(&mut self, part: u64, charged: Nanos, now: Nanos) -> Option<Missing> {
        let passed = now.saturating_sub(self.last);
        if passed > ROUND {
            *self = Self::begin(charged, now);
            return None;
        }
        self.measured += passed / WHOLE * part.min(WHOLE);
        self.last = now;
        if now.saturating_sub(self.since) < PERIOD {
            return None;
        }
        let own = charged.saturating_sub(self.charged);
        let is_large = self.measured.saturating_sub(own) > LARGE;
        let missing = self.measured.saturating_sub(own.saturating_add(self.credit));
        let credit = own.saturating_add(self.credit).saturating_sub(self.measured).min(CREDIT);
        *self = Self { credit, ..Self::begin(charged.saturating_add(missing), now) };
        (missing > 0).then_some(Missing { time: missing, is_large })
    }
}

#[cfg(test)]
mod tests {
    use super::{Comparison, Missing, Nanos, PERIOD};

    const SECOND: Nanos = 1_000_000_000;

    /// The sum of what is charged in addition, for seconds with this charge and this figure of the driver, both in thousandths.
    fn added(seconds: &[(u64, u64)]) -> (Nanos, bool) {
        let (mut charged, mut added, mut large) = (0, 0, false);
        let mut comparison = Comparison::begin(0, 0);
        for ((own, measured), second) in seconds.iter().zip(1..) {
            charged += own * SECOND / 1000;
            if let Some(Missing { time, is_large }) = comparison.add(*measured, charged, second * SECOND) {
                (charged, added, large) = (charged + time, added + time, large || is_large);
            }
        }
        (added, large)
    }

    // Promise: T35
    #[test]
    fn hidden_time_is_charged_as_the_driver_measured_it() {
        assert_eq!(added(&[(0, 1000); 5]), (PERIOD, true));
        assert_eq!(added(&[(0, 500); 20]), (10 * SECOND, true));
        // A worker that hides a little is charged, too, and not reported.
        assert_eq!(added(&[(900, 1000); 20]), (2 * SECOND, false));
    }

    // Promise: T35
    #[test]
    fn charge_at_or_above_the_figures_is_never_corrected() {
        assert_eq!(added(&[(1000, 1000); 20]), (0, false));
        assert_eq!(added(&[(1000, 400); 20]), (0, false));
        assert_eq!(added(&[(0, 0); 20]), (0, false));
    }

    // Promise: T35
    #[test]
    fn figures_that_come_a_second_late_cost_nothing() {
        for length in 1..=20 {
            let mut seconds = vec![(1000, 0)];
            seconds.extend(vec![(1000, 1000); length - 1]);
            seconds.push((0, 1000));
            seconds.extend([(0, 0); 10]);
            assert_eq!(added(&seconds), (0, false), "{length} seconds of work");
        }
    }

    // Promise: T35
    #[test]
    fn credit_does_not_grow_without_bound() {
        let mut seconds = vec![(1000, 0); 100];
        seconds.extend([(0, 1000); 10]);
        let (added, large) = added(&seconds);
        assert!(added >= 10 * SECOND - super::CREDIT && large, "{added}");
    }

    #[test]
    fn time_between_distant_rounds_is_not_judged() {
        let mut comparison = Comparison::begin(0, 0);
        assert_eq!(comparison.add(1000, 0, 60 * SECOND), None);
        assert_eq!(comparison.add(1000, 0, 61 * SECOND), None);
        let after = (62..70).find_map(|second| comparison.add(1000, 0, second * SECOND));
        assert_eq!(after.map(|missing| missing.time), Some(PERIOD));
    }
}
