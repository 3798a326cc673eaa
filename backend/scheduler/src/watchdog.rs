//! The watchdog: it checks that work that a worker has submitted ends.
//!
//! A kernel that never ends is allowed: its VM pays for the time, and others go on beside it. It is ended only while its VM is
//! fenced or drained, since the end of its work is waited for then, or if the VM's policy requires it.

use crate::Nanos;

/// How long nothing may end of a worker's work where it is waited for: while its VM is fenced or drained.
pub const PATIENCE: Nanos = 10_000_000_000;

/// What a worker's work does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// There is none.
    Idle,
    /// Some is under way, of which something ended or began not long ago.
    Working,
    /// Nothing ended for too long.
    Hung,
}

/// When it counts that nothing ends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Policy {
    /// Whether somebody waits for the end: the VM is fenced or drained.
    pub ending: bool,
    /// For how long nothing may end in any case.
    pub limit: Option<Nanos>,
}

impl Policy {
    const fn patience(self) -> Option<Nanos> {
        match (self.ending, self.limit) {
            (true, Some(limit)) if limit < PATIENCE => Some(limit),
            (true, _) => Some(PATIENCE),
            (false, limit) => limit,
        }
    }
}

/// The watch over one worker.
#[derive(Clone, Copy, Debug, Default)]
pub struct Watchdog {
    ended: u64,
    under_way: bool,
    since: Nanos,
}

impl Watchdog {
    /// Takes in how much of the worker's work began and ended so far.
    pub const fn see(&mut self, begun: u64, ended: u64, now: Nanos) {
        let under_way = begun != ended;
        if ended != self.ended || under_way != self.under_way {
            *self = Watchdog { ended, under_way, since: now };
        }
    }

    /// What is to be thought of it.
    #[must_use]
    pub const fn state(&self, policy: Policy, now: Nanos) -> State {
        if !self.under_way {
            return State::Idle;
        }
        match policy.patience() {
            Some(patience) if now.saturating_sub(self.since) >= patience => State::Hung,
            _ => State::Working,
        }
    }

    /// When it is to be looked at again, if nothing ends.
    #[must_use]
    pub const fn due(&self, policy: Policy) -> Option<Nanos> {
        match policy.patience() {
            Some(patience) if self.under_way => Some(self.since.saturating_add(patience)),
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
    fn only_what_is_waited_for_can_hang() {
        let mut dog = Watchdog::default();
        let (calm, fenced) = (Policy::default(), Policy { ending: true, limit: None });
        assert_eq!(dog.state(fenced, 100 * SECOND), State::Idle);
        dog.see(5, 4, 100 * SECOND);
        assert_eq!(dog.state(calm, 1000 * SECOND), State::Working, "a long kernel is no crime");
        assert_eq!(dog.due(calm), None);
        assert_eq!(dog.state(fenced, 109 * SECOND), State::Working);
        assert_eq!(dog.state(fenced, 110 * SECOND), State::Hung);
        assert_eq!(dog.due(fenced), Some(110 * SECOND));
        let strict = Policy { ending: false, limit: Some(2 * SECOND) };
        assert_eq!(dog.state(strict, 102 * SECOND), State::Hung);
        assert_eq!(dog.due(Policy { ending: true, ..strict }), Some(102 * SECOND), "the shorter one");
    }

    #[test]
    fn whatever_ends_is_a_sign_of_life() {
        let mut dog = Watchdog::default();
        let fenced = Policy { ending: true, limit: None };
        for second in 0..100 {
            dog.see(second + 2, second, second * SECOND);
            assert_eq!(dog.state(fenced, (second + 9) * SECOND), State::Working);
        }
        // More work behind work that does not end is none.
        dog.see(500, 99, 105 * SECOND);
        assert_eq!(dog.state(fenced, 109 * SECOND), State::Hung);
        dog.see(500, 500, 110 * SECOND);
        assert_eq!(dog.state(fenced, 1000 * SECOND), State::Idle);
    }
}
