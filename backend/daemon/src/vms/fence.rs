//! The steps that take everything from a VM, and that admit it again.
//!
//! **Active** → **Fencing** (nothing new is given to it) → **Killed** (its workers are ended) → **Revoked** (memory lent to it
//! comes back) → **Scrubbed** (that memory is made clean) → **Quarantined** (it waits) → **Active**, in the next epoch. A VM
//! that does not complete a step in time is quarantined at that step, but not called clean, and a VM that is not clean is not
//! admitted.
//!
//! This is a pure function of the observed state: this daemon or the next can evaluate it again at any step, with the same
//! result. Each condition includes those of the steps before it, so that no daemon depends on an observation of another.

use serde::{Deserialize, Serialize};
use sluice_api::v1::{FenceStep, FencedBy};

use sluice_runtime::process::Identity;

/// Where a VM stands.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Fence {
    pub(crate) step: FenceStep,
    /// Grows with each admission. What carries an older one is of a VM that is gone.
    pub(crate) epoch: u64,
    /// In quarantine: whether everything was taken from it and is clean.
    pub(crate) clean: bool,
    /// Why it was fenced.
    pub(crate) reason: String,
    /// Which authority fenced it; says nothing while it is active. In a state file of a version that did not write this, an operator did.
    #[serde(default = "operator", skip_serializing_if = "is_operator")]
    pub(crate) by: FencedBy,
    /// Its workers when it was fenced: for a daemon that did not start them.
    pub(crate) workers: Vec<Identity>,
}

const fn operator() -> FencedBy {
    FencedBy::Operator
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_operator(by: &FencedBy) -> bool {
    *by == FencedBy::Operator
}

/// What is seen of a VM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Seen {
    /// Whether everybody who gives it something was told not to.
    pub(crate) told: bool,
    /// Its workers that are not reaped, and sessions that may get one.
    pub(crate) workers: usize,
    /// What it has of all units; `None` while one of them does not say.
    pub(crate) has: Option<Has>,
    /// Whether the step has taken longer than it can take in good order.
    pub(crate) overdue: bool,
}

/// What a VM has of all units.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Has {
    /// Bytes lent to it.
    pub(crate) lent: u64,
    /// Its workers that the driver may still know.
    pub(crate) holders: u64,
    /// Bytes it gave back that are not clean.
    pub(crate) dirty: u64,
}

/// A VM cannot be admitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum AdmissionError {
    /// It is not fenced.
    #[error("it is not fenced")]
    Active,
    /// It is on its way out.
    #[error("it is still being fenced")]
    Underway,
    /// Something of it is left.
    #[error("something of it is left: a worker, a chunk, or memory that is not clean")]
    Unclean,
    /// A higher authority fenced it.
    #[error("only an operator ends its fence")]
    Held,
}

impl Default for Fence {
    fn default() -> Self {
        Self {
            step: FenceStep::Active,
            epoch: 1,
            clean: false,
            reason: String::new(),
            by: operator(),
            workers: Vec::new(),
        }
    }
}

impl Fence {
    /// The epoch in which the VM may have something; `None` while it may not.
    pub(crate) fn admitted(&self) -> Option<u64> {
        (self.step == FenceStep::Active).then_some(self.epoch)
    }

    /// The first step out. `None` when the VM is on its way already.
    pub(crate) fn begin(&self, by: FencedBy, reason: &str, workers: Vec<Identity>) -> Option<Self> {
        (self.step == FenceStep::Active).then(|| Self {
            step: FenceStep::Fencing,
            epoch: self.epoch,
            clean: false,
            reason: reason.to_owned(),
            by,
            workers,
        })
    }

    /// The same step under a higher authority. `None` where the VM is active, or the authority is no higher.
    pub(crate) fn raise(&self, by: FencedBy, reason: &str) -> Option<Self> {
        let is_higher = self.step != FenceStep::Active && by > self.by;
        is_higher.then(|| Self { by, reason: reason.to_owned(), ..self.clone() })
    }

    /// The next step, if what is seen allows it or leaves no other.
    pub(crate) fn advance(&self, seen: &Seen) -> Option<Self> {
        let killed = seen.told && seen.workers == 0;
        let revoked = killed && seen.has.is_some_and(|has| has.lent == 0 && has.holders == 0);
        let scrubbed = revoked && seen.has.is_some_and(|has| has.dirty == 0);
        let (done, next, clean) = match self.step {
            FenceStep::Active => return None,
            FenceStep::Fencing => (seen.told, FenceStep::Killed, false),
            FenceStep::Killed => (killed, FenceStep::Revoked, false),
            FenceStep::Revoked => (revoked, FenceStep::Scrubbed, false),
            FenceStep::Scrubbed => (scrubbed, FenceStep::Quarantined, true),
            // Late, but in the end.
            FenceStep::Quarantined => (scrubbed && !self.clean, FenceStep::Quarantined, true),
        };
        let to = |step, clean| Some(Self { step, clean, ..self.clone() });
        match done {
            true => to(next, clean),
            false if seen.overdue && self.step != FenceStep::Quarantined => to(FenceStep::Quarantined, false),
            false => None,
        }
    }

    /// The VM in its next epoch, where this authority may end its fence.
    pub(crate) fn readmit(&self, by: FencedBy) -> Result<Self, AdmissionError> {
        match (self.step, self.clean) {
            (FenceStep::Quarantined, _) if self.by > by => Err(AdmissionError::Held),
            (FenceStep::Quarantined, true) => {
                Ok(Self { epoch: self.epoch.saturating_add(1), ..Self::default() })
            }
            (FenceStep::Quarantined, false) => Err(AdmissionError::Unclean),
            (FenceStep::Active, _) => Err(AdmissionError::Active),
            _ => Err(AdmissionError::Underway),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const NOTHING_LEFT: Seen =
        Seen { told: true, workers: 0, has: Some(Has { lent: 0, holders: 0, dirty: 0 }), overdue: false };

    fn fenced() -> Fence {
        Fence::default().begin(FencedBy::Operator, "a test", Vec::new()).expect("it was active")
    }

    // Promise: F40
    #[test]
    fn the_way_out_has_these_steps_and_ends_in_the_next_epoch() {
        let mut fence = fenced();
        let mut steps = vec![fence.step];
        while let Some(next) = fence.advance(&NOTHING_LEFT) {
            steps.push(next.step);
            assert_eq!(next.admitted(), None);
            fence = next;
        }
        assert_eq!(
            steps,
            [
                FenceStep::Fencing,
                FenceStep::Killed,
                FenceStep::Revoked,
                FenceStep::Scrubbed,
                FenceStep::Quarantined
            ]
        );
        let again = fence.readmit(FencedBy::Operator).expect("it is clean");
        assert_eq!((again.admitted(), again.workers.len()), (Some(2), 0));
    }

    #[test]
    fn each_step_waits_for_what_it_is_about() {
        let at = |step| Fence { step, ..fenced() };
        let lacking = |change: fn(&mut Seen)| {
            let mut seen = NOTHING_LEFT;
            change(&mut seen);
            seen
        };
        let has = |change: fn(&mut Has)| {
            let mut has = Has::default();
            change(&mut has);
            Seen { has: Some(has), ..NOTHING_LEFT }
        };
        for (step, seen) in [
            (FenceStep::Fencing, lacking(|seen| seen.told = false)),
            (FenceStep::Killed, lacking(|seen| seen.workers = 1)),
            (FenceStep::Revoked, lacking(|seen| seen.has = None)),
            (FenceStep::Revoked, has(|has| has.lent = 1)),
            (FenceStep::Revoked, has(|has| has.holders = 1)),
            // A worker that another daemon did not see.
            (FenceStep::Revoked, lacking(|seen| seen.workers = 1)),
            (FenceStep::Scrubbed, has(|has| has.dirty = 1)),
            (FenceStep::Scrubbed, lacking(|seen| seen.has = None)),
            (FenceStep::Quarantined, has(|has| has.dirty = 1)),
        ] {
            assert_eq!(at(step).advance(&seen), None, "{step:?} {seen:?}");
            let late = at(step).advance(&Seen { overdue: true, ..seen });
            match step {
                FenceStep::Quarantined => assert_eq!(late, None),
                _ => assert!(late.is_some_and(|late| late.step == FenceStep::Quarantined && !late.clean)),
            }
        }
    }

    #[test]
    fn what_is_not_clean_is_not_admitted_until_it_is() {
        let stuck = Seen { workers: 1, overdue: true, ..NOTHING_LEFT };
        let fence = Fence { step: FenceStep::Killed, ..fenced() }.advance(&stuck).expect("it is given up");
        assert_eq!(fence.readmit(FencedBy::Operator), Err(AdmissionError::Unclean));
        assert_eq!(fence.advance(&stuck), None);
        let late = fence.advance(&NOTHING_LEFT).expect("the worker is gone after all");
        assert_eq!(late.readmit(FencedBy::Operator).map(|fence| fence.epoch), Ok(2));
        assert_eq!(late.advance(&NOTHING_LEFT), None, "nothing is done twice");
    }

    #[test]
    fn a_vm_is_fenced_once() {
        assert_eq!(fenced().begin(FencedBy::Operator, "again", Vec::new()), None);
        assert_eq!(fenced().readmit(FencedBy::Operator), Err(AdmissionError::Underway));
        assert_eq!(Fence::default().readmit(FencedBy::Operator), Err(AdmissionError::Active));
        assert_eq!(Fence::default().advance(&NOTHING_LEFT), None);
    }

    // Promise: A40
    #[test]
    fn a_fence_ends_by_the_authority_that_began_it_or_a_higher_one() {
        use FencedBy::{Operator, Policy, Tenant};
        let all = [Tenant, Policy, Operator];
        for began in all {
            let mut fence = Fence::default().begin(began, "a test", Vec::new()).expect("it was active");
            while let Some(next) = fence.advance(&NOTHING_LEFT) {
                fence = next;
            }
            for ends in all {
                let readmitted = fence.readmit(ends);
                assert_eq!(readmitted.is_ok(), ends >= began, "{ends:?} ends what {began:?} began");
                let raised = fence.raise(ends, "a higher one");
                assert_eq!(raised.is_some(), ends > began, "{ends:?} raises what {began:?} began");
                if let Some(raised) = raised {
                    assert_eq!(
                        (raised.step, raised.clean, &*raised.reason),
                        (fence.step, true, "a higher one")
                    );
                    assert_eq!(raised.readmit(began), Err(AdmissionError::Held));
                }
            }
        }
        assert_eq!(Fence::default().raise(Operator, "a test"), None, "it is active");
        let old = r#"{"step":"quarantined","epoch":3,"clean":true,"reason":"old","workers":[]}"#;
        let old: Fence = serde_json::from_str(old).expect("a state file of before is read");
        assert_eq!(old.readmit(Policy), Err(AdmissionError::Held));
    }

    prop_compose! {
        fn seen()(told: bool, workers in 0..2_usize, known: bool, lent in 0..2_u64, holders in 0..2_u64, dirty in 0..2_u64, overdue: bool)
            -> Seen {
            Seen { told, workers, has: known.then_some(Has { lent, holders, dirty }), overdue }
        }
    }

    proptest! {
        // Promise: F40
        #[test]
        fn whatever_is_seen_nobody_is_admitted_unclean_and_no_epoch_comes_back(
            moves in proptest::collection::vec((0..4_u8, seen()), 0..60)
        ) {
            let mut fence = Fence::default();
            let mut epoch = fence.epoch;
            for (what, seen) in moves {
                let next = match what {
                    0 => fence.begin(FencedBy::Operator, "a test", Vec::new()),
                    1 => fence.readmit(FencedBy::Operator).ok(),
                    // Also what a daemon does that was killed and read this from its checkpoint.
                    _ => fence.advance(&seen),
                };
                let Some(next) = next else { continue };
                let text = serde_json::to_string(&next).expect("written");
                prop_assert_eq!(&serde_json::from_str::<Fence>(&text).expect("read"), &next);
                match next.step {
                    FenceStep::Active => {
                        prop_assert!(fence.step == FenceStep::Quarantined && fence.clean);
                        prop_assert_eq!(next.epoch, epoch + 1);
                        epoch = next.epoch;
                    }
                    FenceStep::Quarantined if next.clean => {
                        prop_assert!(seen.told && seen.workers == 0 && seen.has == Some(Has::default()));
                    }
                    FenceStep::Quarantined => prop_assert!(seen.overdue),
                    step => prop_assert!(step > fence.step),
                }
                prop_assert_eq!(next.epoch, epoch);
                fence = next;
            }
        }
    }
}
