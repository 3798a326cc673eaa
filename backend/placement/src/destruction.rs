//! The end of a MIG instance: first its compute instance, then the GPU instance, with retries up to a limit.
//!
//! The driver refuses while any process holds a handle, monitors included, and counts its own scrubber as a holder: `IN_USE` is
//! common and passes. So each call is tried again after 50 ms, then after twice as long each time up to 1.6 s, and after 10 s
//! the instance is quarantined: it stays in place, keeps its slices, and is tried again once per audit.
//!
//! A state machine without a clock. Its caller gets the next action at a given time from [`Destruction::next`], executes it, and
//! passes the result to [`Destruction::answer`]. Times are those of any monotonic clock.

use std::time::Duration;

/// Wait after the first refusal.
pub const FIRST_RETRY: Duration = Duration::from_millis(50);
/// Longest wait between two tries.
pub const LONGEST_RETRY: Duration = Duration::from_millis(1600);
/// Time from the first try until the instance is quarantined.
pub const TIMEOUT: Duration = Duration::from_secs(10);

/// The next action.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Destroy the compute instance, and answer.
    DestroyCompute,
    /// Destroy the GPU instance, and answer.
    DestroyInstance,
    /// Wait until this time.
    WaitUntil(Duration),
    /// The instance no longer exists. Its slices are free; its memory counts as dirty until proven clean.
    Gone,
    /// It could not be destroyed. Wait for [`Destruction::audit`].
    Quarantined,
}

/// Result of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DestructionAnswer {
    /// It is destroyed, or was already.
    Gone,
    /// It is in use, or the call did not return in time: the result is unknown, and a further try will show it.
    InUse,
    /// A permanent failure.
    Failed,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum DestructionPhase {
    Compute,
    Instance,
    Gone,
}

/// The end of one instance.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Destruction {
    phase: DestructionPhase,
    /// Time at which the instance is quarantined.
    deadline: Duration,
    next: Duration,
    retry: Duration,
    quarantined: bool,
}

impl Destruction {
    /// Starts the destruction. All clients must have ended before.
    pub fn new(now: Duration) -> Self {
        Self {
            phase: DestructionPhase::Compute,
            deadline: now.saturating_add(TIMEOUT),
            next: now,
            retry: FIRST_RETRY,
            quarantined: false,
        }
    }

    /// For an instance that was found in quarantine: it waits for the next audit.
    pub fn quarantined() -> Self {
        Self { quarantined: true, ..Self::new(Duration::ZERO) }
    }

    /// The action at this time.
    pub fn next(&self, now: Duration) -> Step {
        match self.phase {
            DestructionPhase::Gone => Step::Gone,
            _ if self.quarantined => Step::Quarantined,
            _ if now < self.next => Step::WaitUntil(self.next),
            DestructionPhase::Compute => Step::DestroyCompute,
            DestructionPhase::Instance => Step::DestroyInstance,
        }
    }

    /// Passes the result of the call that [`Self::next`] requested. An unrequested answer changes nothing.
    pub fn answer(&mut self, now: Duration, answer: DestructionAnswer) {
        if self.quarantined || self.phase == DestructionPhase::Gone {
            return;
        }
        match answer {
            DestructionAnswer::Gone => {
                self.phase = if self.phase == DestructionPhase::Compute {
                    DestructionPhase::Instance
                } else {
                    DestructionPhase::Gone
                };
                self.next = now;
                self.retry = FIRST_RETRY;
            }
            // The last try is made at the deadline itself, independent of the sum of the waits.
            DestructionAnswer::InUse if now < self.deadline => {
                self.next = now.saturating_add(self.retry).min(self.deadline);
                self.retry = (self.retry * 2).min(LONGEST_RETRY);
            }
            DestructionAnswer::InUse | DestructionAnswer::Failed => self.quarantined = true,
        }
    }

    /// Tries a quarantined instance once more; another refusal quarantines it again.
    pub fn audit(&mut self, now: Duration) {
        if self.quarantined {
            (self.quarantined, self.next, self.deadline) = (false, now, now);
        }
    }

    /// True if it waits for an audit.
    pub const fn is_quarantined(&self) -> bool {
        self.quarantined
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs until gone or quarantined; `answer` supplies the result of each call.
    fn run(
        destruction: &mut Destruction,
        mut answer: impl FnMut(Duration, Step) -> DestructionAnswer,
    ) -> Vec<(u128, Step)> {
        let (mut now, mut calls) = (Duration::ZERO, Vec::new());
        loop {
            match destruction.next(now) {
                Step::WaitUntil(then) => now = then,
                step @ (Step::Gone | Step::Quarantined) => {
                    calls.push((now.as_millis(), step));
                    return calls;
                }
                step => {
                    calls.push((now.as_millis(), step));
                    let how = answer(now, step);
                    destruction.answer(now, how);
                }
            }
        }
    }

    // Promise: P7
    #[test]
    fn instance_in_use_is_retried_for_ten_seconds_and_then_quarantined() {
        let mut destruction = Destruction::new(Duration::ZERO);
        let calls = run(&mut destruction, |_, _| DestructionAnswer::InUse);
        let times: Vec<u128> = calls.iter().map(|call| call.0).collect();
        assert_eq!(times, [0, 50, 150, 350, 750, 1550, 3150, 4750, 6350, 7950, 9550, 10_000, 10_000]);
        assert_eq!(calls.last().map(|call| call.1), Some(Step::Quarantined));
        assert_eq!(destruction.next(Duration::from_secs(3600)), Step::Quarantined);

        // One try per audit.
        let audit = Duration::from_secs(60);
        destruction.audit(audit);
        assert_eq!(destruction.next(audit), Step::DestroyCompute);
        destruction.answer(audit, DestructionAnswer::InUse);
        assert_eq!(destruction.next(audit), Step::Quarantined);
        destruction.audit(audit * 2);
        destruction.answer(audit * 2, DestructionAnswer::Gone);
        assert_eq!(destruction.next(audit * 2), Step::DestroyInstance);
        destruction.answer(audit * 2, DestructionAnswer::Gone);
        assert_eq!(destruction.next(audit * 2), Step::Gone);
    }

    // Promise: P7
    #[test]
    fn compute_instance_is_destroyed_first_within_one_common_deadline() {
        let mut destruction = Destruction::new(Duration::ZERO);
        let calls = run(&mut destruction, |now, step| match step {
            Step::DestroyCompute if now.as_millis() >= 350 => DestructionAnswer::Gone,
            Step::DestroyInstance if now.as_millis() >= 400 => DestructionAnswer::Gone,
            _ => DestructionAnswer::InUse,
        });
        assert_eq!(
            calls,
            [
                (0, Step::DestroyCompute),
                (50, Step::DestroyCompute),
                (150, Step::DestroyCompute),
                (350, Step::DestroyCompute),
                (350, Step::DestroyInstance),
                (400, Step::DestroyInstance),
                (400, Step::Gone),
            ]
        );
        let mut destruction = Destruction::new(Duration::ZERO);
        assert_eq!(run(&mut destruction, |_, _| DestructionAnswer::Failed).len(), 2);
        assert!(destruction.is_quarantined());
    }
}
