//! The strike counter: it counts the offences of each VM's workers, and reports when they suffice to fence the VM.
//!
//! A VM is counted by its name on the host, so that a tenant that deletes its VM and creates it again keeps the offences.

use std::{
    collections::{BTreeMap, VecDeque},
    time::{Duration, Instant},
};

use crate::configuration::FencePolicy;

/// The recent offences of each VM's workers.
#[derive(Debug)]
pub(crate) struct StrikeCounter {
    policy: FencePolicy,
    /// By VM: the times of the offences in the window, at most as many as the policy counts.
    offences: BTreeMap<String, VecDeque<Instant>>,
}

impl StrikeCounter {
    pub(crate) fn new(policy: FencePolicy) -> Self {
        Self { policy, offences: BTreeMap::new() }
    }

    /// Counts an offence; true if it is the one that fences the VM.
    pub(crate) fn note(&mut self, host_name: &str, now: Instant) -> bool {
        let window = Duration::from_secs(self.policy.seconds.into());
        self.offences.retain(|_, offences| {
            offences.retain(|then| now.saturating_duration_since(*then) < window);
            !offences.is_empty()
        });
        let offences = self.offences.entry(host_name.to_owned()).or_default();
        offences.push_back(now);
        let enough = u32::try_from(offences.len()).is_ok_and(|count| count >= self.policy.count);
        if enough {
            self.offences.remove(host_name);
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
        assert!(!strikes.note("a", at(0)));
        assert!(!strikes.note("a", at(1)));
        assert!(!strikes.note("b", at(1)), "offences of another VM count separately");
        assert!(!strikes.note("a", at(10)), "the first offence is outside the window");
        assert!(strikes.note("a", at(10)));
        assert!(!strikes.note("a", at(10)), "the count begins anew after a fence");
        assert!(!strikes.note("c", at(20)));
        assert_eq!(strikes.offences.len(), 1, "VMs without an offence in the window are kept");
    }
}
