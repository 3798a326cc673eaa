//! Periodic samples of every VM's memory, time and work, for usage and for other readers.
//!
//! Sampling never waits: it uses the arbiter's reports since the last sample, and requests new ones for the next. A VM without
//! a session and without memory is skipped.

use std::{collections::BTreeMap, rc::Rc, time::Duration};

use tokio::time::{MissedTickBehavior, interval};

use super::Registry;
use crate::{
    records::usage::{Done, Sample, UsageFigures, VmIdentity},
    units::unit::VmReport,
    vms::vm::Vm,
};

/// Period of the samples.
const EVERY: Duration = Duration::from_secs(1);
/// Samples between two writes of the usage to disk.
const WRITE: u32 = 5;

impl Done {
    fn of(report: &VmReport) -> Self {
        Self { time: report.time.used, work: report.work }
    }
}

/// Takes samples, for ever.
pub(crate) async fn serve(registry: Rc<Registry>) {
    let mut turn = interval(EVERY);
    turn.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut looks = 0_u32;
    loop {
        turn.tick().await;
        registry.take_stock();
        looks = looks.wrapping_add(1);
        if looks.is_multiple_of(WRITE) {
            registry.write_usage().await;
        }
    }
}

impl Registry {
    /// Adds up the usage of all VMs since the last sample, and requests new reports.
    pub(crate) fn take_stock(&self) {
        let elapsed = self.usage.elapsed();
        let mut samples = Vec::new();
        let mut begun = self.begun.borrow_mut();
        let mut still = BTreeMap::new();
        for vm in self.vm_set.all() {
            let (now, before) = (vm.begun(), begun.remove(&vm.id()).unwrap_or_default());
            still.insert(vm.id(), now);
            // A session may have begun and ended between two samples.
            let began = now.saturating_sub(before);
            let (mut lent, mut other, mut done) = (0_u64, 0_u64, Done::default());
            for unit in self.units.iter() {
                let Some(report) = unit.last_of_vm(vm.id()) else { continue };
                // The driver share is part of a VM's memory.
                lent = lent.saturating_add(report.lent).saturating_add(report.headroom);
                other = other.saturating_add(report.dirty).saturating_add(report.headroom);
                if let Some(arbiter) = unit.arbiter() {
                    let now = Done::of(&report);
                    done = done.and(self.usage.count(vm.id(), report.epoch, unit.number(), arbiter, now));
                }
            }
            let subject = vm.subject().clone();
            #[expect(clippy::cast_precision_loss, reason = "a figure that is multiplied by a measured time")]
            let lent_bytes = lent as f64;
            let spec = vm.spec();
            samples.push(Sample {
                vm: VmIdentity {
                    name: subject.id,
                    organisation: subject.organisation,
                    project: subject.project,
                    number: Some(spec.id),
                    created: spec.created,
                },
                project: Some(spec.project).filter(|project| *project > 0),
                figures: UsageFigures {
                    byte_seconds: lent_bytes * elapsed,
                    gpu_seconds: Duration::from_nanos(done.time).as_secs_f64(),
                    launches: done.work.launches,
                    copies: done.work.copies,
                    copied: done.work.copied,
                    calls: done.work.calls,
                    seconds: elapsed,
                    sessions: began,
                },
            });
            if lent > 0 || other > 0 || vm.sessions_left() > 0 || began > 0 {
                self.units.iter().for_each(|unit| unit.ask_vm(vm.id()));
            }
        }
        *begun = still;
        self.usage.add(samples);
    }

    /// Takes the last sample of a VM: with its arbiters' present reports, not those of a second ago.
    pub(crate) async fn sample_vm(&self, vm: &Vm) {
        for unit in vm.units().iter() {
            // For an arbiter that does not answer, its last report counts.
            _ = unit.describe_vm(vm.id()).await;
        }
        self.take_stock();
    }

    /// Takes the last sample of this daemon.
    pub(crate) async fn sample(&self) {
        self.take_stock();
        self.write_usage().await;
    }

    async fn write_usage(&self) {
        if let Err(error) = self.usage.write().await {
            tracing::error!(%error, "cannot write the usage");
        }
    }
}
