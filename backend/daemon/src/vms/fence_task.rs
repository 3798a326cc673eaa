//! Carries out the steps of [`crate::fence`] for one VM.
//!
//! The action of a step is repeated for as long as the step lasts: a killed daemon loses nothing, and every action may be
//! repeated without harm. Two things wait for no disk: the stop of new resources, and the end of workers. The VM's step is
//! written at the same time, and the later steps, up to the answer, follow the write.

use std::{
    collections::BTreeSet,
    rc::Rc,
    time::{Duration, Instant},
};

use sluice_api::v1::{FenceStep, FencedBy};
use tokio::time::{sleep, timeout};

use sluice_runtime::process::Identity;

use crate::{
    fence::{Fence, Has, Seen},
    handover::process::LaunchedProcess,
    records::state::checkpoint::{FenceChange, ReadmitError},
    records::unit_event::UnitEvent,
    spec,
    vms::vm::Vm,
};

/// Period of checks of a step: at first, and when it takes long.
const LOOKS: [Duration; 2] = [Duration::from_millis(2), Duration::from_millis(50)];
/// Limit of a reason, in bytes.
const REASON: usize = 200;

/// The time that a step normally takes at most.
fn limit(step: FenceStep) -> Duration {
    match step {
        // A killed process that is not reaped in this time hangs in the driver.
        FenceStep::Killed => Duration::from_secs(5),
        FenceStep::Scrubbed => Duration::from_secs(60),
        _ => Duration::from_secs(10),
    }
}

impl Vm {
    /// Fences the VM. From the return on it gets nothing new; the other steps follow.
    pub(crate) fn fence(&self, by: FencedBy, reason: &str) -> FenceChange {
        let mut reason = reason.to_owned();
        reason.truncate(reason.floor_char_boundary(REASON));
        let change = self.checkpoint().fence_vm(self.id(), by, &reason, self.workers());
        if change == FenceChange::Raised {
            // A pending readmission must be evaluated again.
            self.fenced().notify_waiters();
        }
        if change != FenceChange::Begun {
            return change;
        }
        // Its workers are ended now, without waiting for the task that keeps the fence.
        self.act(&Fence { step: FenceStep::Killed, ..self.stands() });
        self.fenced().notify_waiters();
        self.say_fenced(&reason);
        change
    }

    fn say_fenced(&self, reason: &str) {
        tracing::warn!(vm = self.id(), reason, "the VM is fenced");
        self.tell("vm-fenced", reason);
        self.count_fence();
    }

    /// Readmits the VM in its next epoch, if this authority may end its fence.
    pub(crate) async fn readmit(&self, by: FencedBy) -> Result<(), ReadmitError> {
        let epoch = self.checkpoint().admit_vm(self.id(), by).await?.epoch;
        tracing::info!(vm = self.id(), epoch, "the VM is readmitted");
        self.tell("vm-readmitted", format!("epoch {epoch}"));
        let stands = self.stands();
        if stands.step != FenceStep::Active {
            // The VM was fenced while the readmission was written.
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
        // After the time limit, the present step is the answer.
        _ = timeout(limit, settled).await;
        self.stands()
    }

    /// Carries the VM through the steps of every fence, for ever.
    pub(crate) async fn keep_fence(self: Rc<Self>) {
        loop {
            let changed = self.fenced().notified();
            if self.stands().step == FenceStep::Active {
                changed.await;
                continue;
            }
            // In a box, because each VM would otherwise always have the two kilobytes of this future.
            Box::pin(self.carry_out_fence()).await;
        }
    }

    /// Carries the VM through the steps of a fence, until it is readmitted.
    async fn carry_out_fence(&self) {
        let (mut step, mut since) = (FenceStep::Active, Instant::now());
        let mut named: Option<Vec<Rc<LaunchedProcess>>> = None;
        loop {
            let changed = self.fenced().notified();
            let fence = self.stands();
            if fence.step == FenceStep::Active {
                return;
            }
            if fence.step != step {
                (step, since) = (fence.step, Instant::now());
            }
            self.act(&fence);
            let named = match &mut named {
                Some(named) => named,
                None => named.insert(self.open_all(&fence.workers).await),
            };
            if fence.step >= FenceStep::Killed {
                named.iter().for_each(|worker| worker.kill());
            }
            if fence.step == FenceStep::Quarantined && fence.clean {
                self.hold_off(&fence, since, changed).await;
                continue;
            }
            let late = since.elapsed() > limit(step);
            let seen = self.look(&fence, named, late).await;
            match fence.advance(&seen) {
                Some(next) => {
                    if fence.step >= FenceStep::Killed {
                        // If the write fails, the task that keeps the checkpoint logs it and tries again; the fence continues.
                        _ = self.checkpoint().written().await;
                    }
                    if next.step == FenceStep::Quarantined {
                        self.count_fenced();
                        self.say_quarantined(&next, named, &seen);
                    }
                    self.enter(next);
                }
                None => sleep(LOOKS[usize::from(since.elapsed() > 20 * LOOKS[0])]).await,
            }
        }
    }

    /// Notes a step. A fence applies even if it cannot be written; only a crash would lose it.
    fn enter(&self, fence: Fence) {
        self.checkpoint().set_vm(self.id(), fence);
        self.fenced().notify_waiters();
    }

    /// Executes the action of a step.
    fn act(&self, fence: &Fence) {
        for unit in self.units().iter() {
            unit.fence(self.id());
        }
        if fence.step >= FenceStep::Killed {
            self.end_workers();
        }
    }

    /// Opens the workers that a fence names: after a restart of the daemon they may belong to no session.
    async fn open_all(&self, workers: &[Identity]) -> Vec<Rc<LaunchedProcess>> {
        let mut opened = Vec::new();
        for worker in workers {
            opened.extend(self.launching.open(*worker).await);
        }
        opened
    }

    async fn look(&self, fence: &Fence, named: &[Rc<LaunchedProcess>], overdue: bool) -> Seen {
        let left = named.iter().filter(|worker| !worker.is_gone()).count();
        let workers = (self.sessions_left() + self.warm_left()).max(left);
        let mut has = Some(Has::default());
        // The memory is checked after the workers are gone, because only their end takes long.
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

    fn say_quarantined(&self, fence: &Fence, named: &[Rc<LaunchedProcess>], seen: &Seen) {
        let vm = self.id();
        if fence.clean {
            tracing::info!(vm, "the VM is quarantined and clean");
            self.tell("vm-quarantined", "it is clean");
            return;
        }
        tracing::error!(vm, ?seen, "the VM is quarantined but not clean");
        self.tell("vm-quarantined", "it is not clean");
        if seen.workers > 0 {
            let named = named.iter().filter(|worker| !worker.is_gone()).map(|worker| worker.identity());
            for worker in named.chain(self.workers()).collect::<BTreeSet<_>>() {
                self.notify(UnitEvent::Hung { vm, process: worker.process });
            }
        }
    }

    /// Waits until the VM may be readmitted automatically, if it may, or until another change.
    async fn hold_off(&self, fence: &Fence, since: Instant, changed: impl Future<Output = ()>) {
        // Only an operator ends an operator's fence.
        let hold_off = spec::hold_off(&self.spec()).filter(|_| fence.by != FencedBy::Operator);
        let Some(hold_off) = hold_off else { return changed.await };
        tokio::select! {
            () = changed => {}
            () = sleep(hold_off.saturating_sub(since.elapsed())) => {
                if let Err(error) = self.readmit(FencedBy::Policy).await {
                    tracing::error!(vm = self.id(), %error, "cannot readmit the VM");
                    // The next try is not at once.
                    sleep(Duration::from_secs(1)).await;
                }
            }
        }
    }
}
