//! Carries out the steps of [`crate::vms::fence`] for one VM.
//!
//! The action of a step is repeated for as long as the step lasts: a daemon that is killed loses nothing, and every action may
//! be done twice without harm. Two things wait for no disk: that nothing more is given, and that workers end. The VM's step is
//! written down meanwhile, and the later steps, up to the answer, are taken when it is written.

use std::{
    rc::Rc,
    time::{Duration, Instant},
};

use rustix::fd::AsFd as _;
use sluice_api::v1::{FenceStep, FencedBy};
use tokio::time::{sleep, timeout};

use sluice_runtime::process::kill;

use crate::{
    records::notice::Notice,
    records::state::checkpoint::{FenceChange, ReadmitError},
    spec,
    vms::fence::{Fence, Has, Seen},
    vms::vm::Vm,
};

/// How often a step is looked at: at first, and when it takes its time.
const LOOKS: [Duration; 2] = [Duration::from_millis(2), Duration::from_millis(50)];
/// Bytes of a reason that are kept.
const REASON: usize = 200;

/// How long a step can take in good order.
fn limit(step: FenceStep) -> Duration {
    match step {
        // A killed process that is not reaped in this time hangs in the driver.
        FenceStep::Killed => Duration::from_secs(5),
        FenceStep::Scrubbed => Duration::from_secs(60),
        _ => Duration::from_secs(10),
    }
}

impl Vm {
    /// Takes everything from the VM. From the return on nothing new is given to it; the rest follows.
    pub(crate) fn fence(&self, by: FencedBy, reason: &str) -> FenceChange {
        let mut reason = reason.to_owned();
        reason.truncate(reason.floor_char_boundary(REASON));
        let change = self.checkpoint().fence_vm(self.id(), by, &reason, self.workers());
        if change == FenceChange::Raised {
            // What would have admitted it again has to look anew.
            self.fenced().notify_waiters();
        }
        if change != FenceChange::Begun {
            return change;
        }
        // Its workers are ended now, not when whoever keeps the fence comes to it.
        self.act(&Fence { step: FenceStep::Killed, ..self.stands() });
        self.fenced().notify_waiters();
        self.say_fenced(&reason);
        change
    }

    fn say_fenced(&self, reason: &str) {
        tracing::warn!("VM {} is fenced: {reason}", self.id());
        self.tell("vm-fenced", reason);
        self.count_fence();
    }

    /// Lets it have again what it may have, in its next epoch, where this authority may end its fence.
    pub(crate) async fn readmit(&self, by: FencedBy) -> Result<(), ReadmitError> {
        let epoch = self.checkpoint().admit_vm(self.id(), by).await?.epoch;
        tracing::info!("VM {} is admitted again: epoch {epoch}", self.id());
        self.tell("vm-readmitted", format!("epoch {epoch}"));
        let stands = self.stands();
        if stands.step != FenceStep::Active {
            // While it was being written that it is admitted.
            self.say_fenced(&stands.reason);
        }
        for unit in self.units().iter() {
            unit.admit(self.id(), self.terms());
        }
        self.fenced().notify_waiters();
        Ok(())
    }

    /// Waits, for a bounded time, until the VM is active or quarantined.
    pub(crate) async fn settled(&self, limit: Duration) -> Fence {
        let settled = async {
            loop {
                let changed = self.fenced().notified();
                let fence = self.stands();
                if matches!(fence.step, FenceStep::Active | FenceStep::Quarantined) {
                    return;
                }
                changed.await;
            }
        };
        // Wherever it stands then is the answer.
        _ = timeout(limit, settled).await;
        self.stands()
    }

    /// Brings the VM through its steps whenever it is fenced, for ever.
    pub(crate) async fn keep_fence(self: Rc<Self>) {
        let (mut step, mut since) = (FenceStep::Active, Instant::now());
        loop {
            let changed = self.fenced().notified();
            let fence = self.stands();
            if fence.step != step {
                (step, since) = (fence.step, Instant::now());
            }
            if fence.step == FenceStep::Active {
                changed.await;
                continue;
            }
            self.act(&fence);
            if fence.step == FenceStep::Quarantined && fence.clean {
                self.hold_off(&fence, since, changed).await;
                continue;
            }
            let late = since.elapsed() > limit(step);
            let seen = self.look(&fence, late).await;
            match fence.advance(&seen) {
                Some(next) => {
                    if fence.step >= FenceStep::Killed {
                        // Where it fails, who keeps the checkpoint says so and tries again; the fence goes on all the same.
                        _ = self.checkpoint().written().await;
                    }
                    if next.step == FenceStep::Quarantined {
                        self.count_fenced();
                        self.say_quarantined(&next, &seen);
                    }
                    self.enter(next);
                }
                None => sleep(LOOKS[usize::from(since.elapsed() > 20 * LOOKS[0])]).await,
            }
        }
    }

    /// Notes a step. A fence holds even where it cannot be written down; only a crash would forget it.
    fn enter(&self, fence: Fence) {
        self.checkpoint().set_vm(self.id(), fence);
        self.fenced().notify_waiters();
    }

    /// What a step is there for.
    fn act(&self, fence: &Fence) {
        for unit in self.units().iter() {
            unit.fence(self.id());
        }
        if fence.step >= FenceStep::Killed {
            self.end_workers();
            for worker in fence.workers.iter().filter_map(|worker| worker.open()) {
                kill(worker.as_fd());
            }
        }
    }

    async fn look(&self, fence: &Fence, overdue: bool) -> Seen {
        let left = fence.workers.iter().filter(|worker| worker.open().is_some()).count();
        let workers = self.sessions_left().max(left);
        let mut has = Some(Has::default());
        // Nothing else is looked at before the workers are gone, which is all that takes time.
        if workers == 0 && fence.step > FenceStep::Killed {
            for unit in self.units().iter() {
                let report = unit.describe_vm(self.id()).await;
                has = has.zip(report).map(|(has, report)| Has {
                    lent: has.lent.saturating_add(report.lent),
                    holders: has.holders.saturating_add(report.holders.into()),
                    dirty: has.dirty.saturating_add(report.dirty),
                });
            }
        }
        Seen { told: true, workers, has, overdue }
    }

    fn say_quarantined(&self, fence: &Fence, seen: &Seen) {
        let vm = self.id();
        if fence.clean {
            tracing::info!("VM {vm} is quarantined: nothing is left of it");
            self.tell("vm-quarantined", "nothing is left of it");
            return;
        }
        tracing::error!("VM {vm} is quarantined, but something of it is left: {seen:?}");
        self.tell("vm-quarantined", "something of it is left");
        if seen.workers > 0 {
            for worker in self.workers().into_iter().chain(fence.workers.iter().copied()) {
                if worker.open().is_some() {
                    self.notify(Notice::Hung { vm, process: worker.process });
                }
            }
        }
    }

    /// Waits until the VM may be admitted again, if it may be without being asked for, or until something else changes.
    async fn hold_off(&self, fence: &Fence, since: Instant, changed: impl Future<Output = ()>) {
        // An operator's fence ends when an operator says so.
        let hold_off = spec::hold_off(&self.spec()).filter(|_| fence.by != FencedBy::Operator);
        let Some(hold_off) = hold_off else { return changed.await };
        tokio::select! {
            () = changed => {}
            () = sleep(hold_off.saturating_sub(since.elapsed())) => {
                if let Err(error) = self.readmit(FencedBy::Policy).await {
                    tracing::error!("VM {} cannot be admitted again: {error}", self.id());
                    // Not at once again.
                    sleep(Duration::from_secs(1)).await;
                }
            }
        }
    }
}
