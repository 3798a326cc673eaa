//! The strike counter: it counts the offences of each VM's workers, and reports when they suffice to fence the VM.

use std::{
    collections::{BTreeMap, VecDeque},
    time::{Duration, Instant},
};

use crate::configuration::FencePolicy;

/// The recent offences of each VM's workers.
#[derive(Debug)]
pub(crate) struct StrikeCounter {
    policy: FencePolicy,
    /// The times of the last offences, at most as many as the policy counts.
    offences: BTreeMap<u32, VecDeque<Instant>>,
}

impl StrikeCounter {
    pub(crate) fn new(policy: FencePolicy) -> Self {
        Self { policy, offences: BTreeMap::new() }
    }

    /// Counts an offence; true if it is the one that fences the VM.
    pub(crate) fn note(&mut self, vm: u32, now: Instant) -> bool {
        let window = Duration::from_secs(self.policy.seconds.into());
        let offences = self.offences.entry(vm).or_default();
        offences.retain(|then| now.saturating_duration_since(*then) < window);
        offences.push_back(now);
        let enough = u32::try_from(offences.len()).is_ok_and(|count| count >= self.policy.count);
        if enough {
            self.offences.remove(&vm);
        }
        enough
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strike_counter_reports_the_third_offence_in_the_window() {
        let mut strikes = StrikeCounter::new(FencePolicy { count: 3, seconds: 10, ..FencePolicy::default() });
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        assert!(!strikes.note(1, at(0)));
        assert!(!strikes.note(1, at(1)));
        assert!(!strikes.note(2, at(1)), "offences of another VM count separately");
        assert!(!strikes.note(1, at(10)), "the first offence is outside the window");
        assert!(strikes.note(1, at(10)));
        assert!(!strikes.note(1, at(10)), "the count begins anew after a fence");
    }
}
