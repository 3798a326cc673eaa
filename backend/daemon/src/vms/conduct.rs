//! The strike counter: it counts the offences of each VM's workers, and reports when they suffice to fence the VM.

use std::{
    collections::{BTreeMap, VecDeque},
    time::{Duration, Instant},
};

use crate::configuration::FencePolicy;

/// What each VM's workers did of late.
#[derive(Debug)]
pub(crate) struct Conduct {
    policy: FencePolicy,
    /// The last times, at most as many as it takes.
    offences: BTreeMap<u32, VecDeque<Instant>>,
}

impl Conduct {
    pub(crate) fn new(policy: FencePolicy) -> Self {
        Self { policy, offences: BTreeMap::new() }
    }

    /// Notes an offence; true when it was one too many.
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
    fn so_many_in_so_long_is_too_many() {
        let mut conduct = Conduct::new(FencePolicy { count: 3, seconds: 10, ..FencePolicy::default() });
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        assert!(!conduct.note(1, at(0)));
        assert!(!conduct.note(1, at(1)));
        assert!(!conduct.note(2, at(1)), "another VM's are its own");
        assert!(!conduct.note(1, at(10)), "the first is forgotten");
        assert!(conduct.note(1, at(10)));
        assert!(!conduct.note(1, at(10)), "and it begins anew");
    }
}
