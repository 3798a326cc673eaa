//! The watchdog: it checks that the submitted work of a worker ends.
//!
//! A kernel that never ends is allowed: its VM pays for the time, and other VMs continue beside it. Its worker is ended only
//! while its VM is fenced or drained, because that waits for the end of its work, or if the VM's policy requires it.

use crate::Nanos;

/// Longest time without a completion while the VM is fenced or drained.
pub const TIMEOUT: Nanos = 10_000_000_000;

/// The state of a worker's work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WorkState {
    /// No work is under way.
    Idle,
    /// Work is under way, and some began or ended recently.
    Working,
    /// No work has ended for too long.
    Hung,
}

/// The policy for work that does not end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WatchdogPolicy {
    /// True if the end is awaited: the VM is fenced or drained.
    pub ending: bool,
    /// Longest time without a completion in any case; `None` for no limit.
    pub limit: Option<Nanos>,
}

impl WatchdogPolicy {
    const fn timeout(self) -> Option<Nanos> {
        match (self.ending, self.limit) {
            (true, Some(limit)) if limit < TIMEOUT => Some(limit),
            (true, _) => Some(TIMEOUT),
            (false, limit) => limit,
        }
    }
}

/// The watchdog of one worker.
#[derive(Clone, Copy, Debug, Default)]
pub struct Watchdog {
    ended: u64,
    under_way: bool,
    since: Nanos,
}

impl Watchdog {
    /// Takes the worker's numbers of begun and ended work so far.
    pub const fn see(&mut self, begun: u64, ended: u64, now: Nanos) {
        let under_way = begun != ended;
        if ended != self.ended || under_way != self.under_way {
            *self = Watchdog { ended, under_way, since: now };
        }
    }

    /// The present state of the work.
    #[must_use]
    pub const fn state(&self, policy: WatchdogPolicy, now: Nanos) -> WorkState {
        if !self.under_way {
            return WorkState::Idle;
        }
        match policy.timeout() {
            Some(timeout) if now.saturating_sub(self.since) >= timeout => WorkState::Hung,
            _ => WorkState::Working,
        }
    }

    /// The time of the next check, if no work ends before.
    #[must_use]
    pub const fn due(&self, policy: WatchdogPolicy) -> Option<Nanos> {
        match policy.timeout() {
            Some(timeout) if self.under_way => Some(self.since.saturating_add(timeout)),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Nanos = 1_000_000_000;

    // Promise: T29
    #[test]
    fn long_work_is_hung_only_if_its_vm_ends_or_has_a_limit() {
        let mut dog = Watchdog::default();
        let (calm, fenced) = (WatchdogPolicy::default(), WatchdogPolicy { ending: true, limit: None });
        assert_eq!(dog.state(fenced, 100 * SECOND), WorkState::Idle);
        dog.see(5, 4, 100 * SECOND);
        assert_eq!(dog.state(calm, 1000 * SECOND), WorkState::Working, "a long kernel is no crime");
        assert_eq!(dog.due(calm), None);
        assert_eq!(dog.state(fenced, 109 * SECOND), WorkState::Working);
        assert_eq!(dog.state(fenced, 110 * SECOND), WorkState::Hung);
        assert_eq!(dog.due(fenced), Some(110 * SECOND));
        let strict = WatchdogPolicy { ending: false, limit: Some(2 * SECOND) };
        assert_eq!(dog.state(strict, 102 * SECOND), WorkState::Hung);
        assert_eq!(dog.due(WatchdogPolicy { ending: true, ..strict }), Some(102 * SECOND), "the shorter one");
    }

    #[test]
    fn completed_work_resets_the_hang_deadline() {
        let mut dog = Watchdog::default();
        let fenced = WatchdogPolicy { ending: true, limit: None };
        for second in 0..100 {
            dog.see(second + 2, second, second * SECOND);
            assert_eq!(dog.state(fenced, (second + 9) * SECOND), WorkState::Working);
        }
        // More work behind work that does not end is not progress.
        dog.see(500, 99, 105 * SECOND);
        assert_eq!(dog.state(fenced, 109 * SECOND), WorkState::Hung);
        dog.see(500, 500, 110 * SECOND);
        assert_eq!(dog.state(fenced, 1000 * SECOND), WorkState::Idle);
    }
}
