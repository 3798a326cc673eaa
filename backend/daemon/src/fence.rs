//! The steps that take all resources from a VM, and that readmit it.
//!
//! ```text
//!         begin           told           killed           revoked            scrubbed
//!  Active ─────▶ Fencing ──────▶ Killed ────────▶ Revoked ─────────▶ Scrubbed ──────────▶ Quarantined, clean
//!    ▲              │ overdue       │ overdue        │ overdue          │ overdue              ▲         │
//!    │              └───────────────┴────────────────┴──────────────────┴─▶ Quarantined,       │         │
//!    │                                                                       not clean ────────┘         │
//!    │                                                                           scrubbed, though late   │
//!    │   readmit: Active in the next epoch                                                               │
//!    └───────────────────────────────────────────────────────────────────────────────────────────────────┘
//!  every step but Active ── raise ──▶ the same step under a higher authority
//! ```
//! A step is the next thing to be done. **Fencing**: every process that gives it resources is told to give it nothing new.
//! **Killed**: its workers are ended. **Revoked**: the memory lent to it comes back. **Scrubbed**: that memory is cleared.
//! **Quarantined**: it waits. A VM that does not complete a step in time is quarantined at that step, but not marked clean, and a
//! VM that is not clean is not readmitted.
//!
//! This is a pure function of the observed state: this daemon or the next can evaluate it again at any step, with the same
//! result. Each condition includes those of the steps before it, so that no daemon depends on an observation of another.

use serde::{Deserialize, Serialize};
use sluice_api::v1::{FenceStep, FencedBy};

use sluice_runtime::process::Identity;

/// The state of a VM's fence.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Fence {
    pub(crate) step: FenceStep,
    /// Grows with each admission. A message of an older epoch belongs to an earlier life of the VM.
    pub(crate) epoch: u64,
    /// In quarantine: true if everything was taken from it and is clean.
    pub(crate) clean: bool,
    /// The reason of the fence.
    pub(crate) reason: String,
    /// The authority that fenced it; meaningless while it is active. In a state file of a version that did not write this, an
    /// operator did.
    #[serde(default = "operator", skip_serializing_if = "is_operator")]
    pub(crate) by: FencedBy,
    /// Its workers at the start of the fence, for a daemon that did not start them.
    pub(crate) workers: Vec<Identity>,
}

const fn operator() -> FencedBy {
    FencedBy::Operator
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_operator(by: &FencedBy) -> bool {
    *by == FencedBy::Operator
}

/// The observed state of a VM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Seen {
    /// True if every process that gives it resources has received the fence.
    pub(crate) told: bool,
    /// The number of its workers that are not reaped, and of sessions that may get one.
    pub(crate) workers: usize,
    /// Its resources on all units; `None` while a unit does not report.
    pub(crate) has: Option<Has>,
    /// True if the step has taken longer than it normally can.
    pub(crate) overdue: bool,
}

/// The resources of a VM on all units.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Has {
    /// Bytes lent to it.
    pub(crate) lent: u64,
    /// Its workers that the driver may still list.
    pub(crate) holders: u64,
    /// Bytes it gave back that are not clean.
    pub(crate) dirty: u64,
}

/// A VM cannot be readmitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum AdmissionError {
    /// It is not fenced.
    #[error("it is not fenced")]
    Active,
    /// Its fence has not reached quarantine.
    #[error("it is still being fenced")]
    Underway,
    /// It is not clean.
    #[error("it still has a worker, a chunk, or memory that is not clean")]
    Unclean,
    /// A higher authority fenced it.
    #[error("only an operator may end its fence")]
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
    /// The epoch in which the VM may hold resources; `None` while it is fenced.
    pub(crate) fn admitted(&self) -> Option<u64> {
        (self.step == FenceStep::Active).then_some(self.epoch)
    }

    /// The first step of a fence; `None` if the VM is fenced already.
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

    /// The same step under a higher authority; `None` if the VM is active, or the authority is no higher.
    pub(crate) fn raise(&self, by: FencedBy, reason: &str) -> Option<Self> {
        let is_higher = self.step != FenceStep::Active && by > self.by;
        is_higher.then(|| Self { by, reason: reason.to_owned(), ..self.clone() })
    }

    /// The next step, if the observed state allows it, or if the step is overdue.
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
            // Late, but complete in the end.
            FenceStep::Quarantined => (scrubbed && !self.clean, FenceStep::Quarantined, true),
        };
        let to = |step, clean| Some(Self { step, clean, ..self.clone() });
        match done {
            true => to(next, clean),
            false if seen.overdue && self.step != FenceStep::Quarantined => to(FenceStep::Quarantined, false),
            false => None,
        }
    }

    /// The VM in its next epoch, if this authority may end its fence.
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
    fn fence_has_these_steps_and_ends_in_the_next_epoch() {
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
    fn step_waits_for_its_own_condition() {
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
            // A worker that another daemon did not observe.
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
    fn unclean_vm_is_not_readmitted_until_it_is_clean() {
        let stuck = Seen { workers: 1, overdue: true, ..NOTHING_LEFT };
        let fence =
            Fence { step: FenceStep::Killed, ..fenced() }.advance(&stuck).expect("the step is overdue");
        assert_eq!(fence.readmit(FencedBy::Operator), Err(AdmissionError::Unclean));
        assert_eq!(fence.advance(&stuck), None);
        let late = fence.advance(&NOTHING_LEFT).expect("the worker is gone in the end");
        assert_eq!(late.readmit(FencedBy::Operator).map(|fence| fence.epoch), Ok(2));
        assert_eq!(late.advance(&NOTHING_LEFT), None, "no step is repeated");
    }

    #[test]
    fn fenced_vm_is_not_fenced_again() {
        assert_eq!(fenced().begin(FencedBy::Operator, "again", Vec::new()), None);
        assert_eq!(fenced().readmit(FencedBy::Operator), Err(AdmissionError::Underway));
        assert_eq!(Fence::default().readmit(FencedBy::Operator), Err(AdmissionError::Active));
        assert_eq!(Fence::default().advance(&NOTHING_LEFT), None);
    }

    // Promise: A40
    #[test]
    fn fence_is_ended_only_by_its_authority_or_a_higher_one() {
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
        fn vm_is_never_readmitted_unclean_and_no_epoch_is_reused(
            moves in proptest::collection::vec((0..4_u8, seen()), 0..60)
        ) {
            let mut fence = Fence::default();
            let mut epoch = fence.epoch;
            for (what, seen) in moves {
                let next = match what {
                    0 => fence.begin(FencedBy::Operator, "a test", Vec::new()),
                    1 => fence.readmit(FencedBy::Operator).ok(),
                    // The same as a daemon does that was killed and read this from its checkpoint.
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
