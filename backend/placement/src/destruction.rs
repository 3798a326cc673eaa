//! The end of a MIG instance: first its compute instance, then the GPU instance, with retries up to a limit.
//!
//! The driver refuses while any process holds a handle, monitors included, and counts its own scrubber as a holder: `IN_USE` is
//! common and passes. So each call is tried again after 50 ms, then after twice as long each time up to 1.6 s, and after 10 s
//! the instance is quarantined: it stays in place, keeps its slices, and is tried again once per audit.
//!
//! A state machine without a clock. Its caller gets the next action of a given time from [`Destruction::next`], does it, and
//! passes the result to [`Destruction::answer`]. Times are those of any clock that only goes forward.

use std::time::Duration;

/// Wait after the first refusal.
pub const FIRST_RETRY: Duration = Duration::from_millis(50);
/// Longest wait between two tries.
pub const LONGEST_RETRY: Duration = Duration::from_millis(1600);
/// From the first try until the instance is quarantined.
pub const PATIENCE: Duration = Duration::from_secs(10);

/// What to do now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Destroy the compute instance, and answer.
    DestroyCompute,
    /// Destroy the GPU instance, and answer.
    DestroyInstance,
    /// Nothing before this time.
    WaitUntil(Duration),
    /// It is gone. Its slices are free; its memory is not clean before somebody has proven it.
    Gone,
    /// It could not be destroyed. Nothing before [`Destruction::audit`].
    Quarantined,
}

/// How a call ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// It is destroyed, or was gone already.
    Gone,
    /// Somebody holds it, or the call gave no answer in time: nobody knows, and a further try will tell.
    InUse,
    /// It failed for good.
    Failed,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Compute,
    Instance,
    Gone,
}

/// The end of one instance.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Destruction {
    phase: Phase,
    /// When patience ends.
    deadline: Duration,
    next: Duration,
    retry: Duration,
    quarantined: bool,
}

impl Destruction {
    /// Begins at a time. All clients must have been ended before.
    pub fn new(now: Duration) -> Self {
        Self {
            phase: Phase::Compute,
            deadline: now.saturating_add(PATIENCE),
            next: now,
            retry: FIRST_RETRY,
            quarantined: false,
        }
    }

    /// Of an instance that was found in quarantine: nothing happens before the next audit.
    pub fn quarantined() -> Self {
        Self { quarantined: true, ..Self::new(Duration::ZERO) }
    }

    /// What to do at this time.
    pub fn next(&self, now: Duration) -> Step {
        match self.phase {
            Phase::Gone => Step::Gone,
            _ if self.quarantined => Step::Quarantined,
            _ if now < self.next => Step::WaitUntil(self.next),
            Phase::Compute => Step::DestroyCompute,
            Phase::Instance => Step::DestroyInstance,
        }
    }

    /// How the call ended that [`Self::next`] asked for. An answer that nobody asked for changes nothing.
    pub fn answer(&mut self, now: Duration, answer: Answer) {
        if self.quarantined || self.phase == Phase::Gone {
            return;
        }
        match answer {
            Answer::Gone => {
                self.phase = if self.phase == Phase::Compute { Phase::Instance } else { Phase::Gone };
                self.next = now;
                self.retry = FIRST_RETRY;
            }
            // The last try is made at the deadline itself, however the waits add up.
            Answer::InUse if now < self.deadline => {
                self.next = now.saturating_add(self.retry).min(self.deadline);
                self.retry = (self.retry * 2).min(LONGEST_RETRY);
            }
            Answer::InUse | Answer::Failed => self.quarantined = true,
        }
    }

    /// Tries a quarantined instance once more; another refusal quarantines it again.
    pub fn audit(&mut self, now: Duration) {
        if self.quarantined {
            (self.quarantined, self.next, self.deadline) = (false, now, now);
        }
    }

    /// Whether it waits for an audit.
    pub const fn is_quarantined(&self) -> bool {
        self.quarantined
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs until gone or quarantined; `answer` is asked at each call.
    fn run(
        destruction: &mut Destruction,
        mut answer: impl FnMut(Duration, Step) -> Answer,
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
    fn a_held_instance_is_tried_for_ten_seconds_and_then_quarantined() {
        let mut destruction = Destruction::new(Duration::ZERO);
        let calls = run(&mut destruction, |_, _| Answer::InUse);
        let times: Vec<u128> = calls.iter().map(|call| call.0).collect();
        assert_eq!(times, [0, 50, 150, 350, 750, 1550, 3150, 4750, 6350, 7950, 9550, 10_000, 10_000]);
        assert_eq!(calls.last().map(|call| call.1), Some(Step::Quarantined));
        assert_eq!(destruction.next(Duration::from_secs(3600)), Step::Quarantined);

        // One try per audit.
        let audit = Duration::from_secs(60);
        destruction.audit(audit);
        assert_eq!(destruction.next(audit), Step::DestroyCompute);
        destruction.answer(audit, Answer::InUse);
        assert_eq!(destruction.next(audit), Step::Quarantined);
        destruction.audit(audit * 2);
        destruction.answer(audit * 2, Answer::Gone);
        assert_eq!(destruction.next(audit * 2), Step::DestroyInstance);
        destruction.answer(audit * 2, Answer::Gone);
        assert_eq!(destruction.next(audit * 2), Step::Gone);
    }

    // Promise: P7
    #[test]
    fn compute_goes_first_and_patience_is_for_both() {
        let mut destruction = Destruction::new(Duration::ZERO);
        let calls = run(&mut destruction, |now, step| match step {
            Step::DestroyCompute if now.as_millis() >= 350 => Answer::Gone,
            Step::DestroyInstance if now.as_millis() >= 400 => Answer::Gone,
            _ => Answer::InUse,
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
        assert_eq!(run(&mut destruction, |_, _| Answer::Failed).len(), 2);
        assert!(destruction.is_quarantined());
    }
}
