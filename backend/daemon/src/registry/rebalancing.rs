//! Takes samples of the load of all VMs, and moves idle VMs if the configuration allows it.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use sluice_api::v1::Rebalance;
use sluice_placement::ShortResource;

use super::Registry;
use crate::units::balancing::policy;

impl Registry {
    /// Measures the load of all VMs, and carries out the moves that the policy allows.
    pub(crate) async fn balance(&self) {
        let rebalance = self.configuration.rebalance;
        if rebalance == Rebalance::Off {
            return;
        }
        self.look_who_is_idle();
        self.measure();
        if rebalance != Rebalance::Apply {
            return;
        }
        // Also earlier suggestions: a VM with load has a session, so it was not moved at the time.
        let standing =
            [ShortResource::Time, ShortResource::Memory].map(|resource| self.balance.standing(resource));
        for one in standing.into_iter().flatten() {
            let Some(name) = self.placer.name(one.vm) else { continue };
            if !self.is_idle(one.vm) || self.placer.fleet().home(one.vm) != Some(one.from) {
                continue;
            }
            let lock = self.lock(&name);
            // Another request changes the VM: the suggestion stays, and is tried again.
            let Ok(_guard) = lock.try_lock() else { continue };
            self.placer.look_around();
            let moved = self.relocate(one.vm, |fleet| fleet.relocate(one.vm, one.to)).await;
            if let Err(error) = moved {
                // The suggestion stays, and is tried again.
                tracing::debug!(name, error = error.message, cause = ?error.cause, "cannot move the VM as suggested");
            }
        }
    }

    /// Takes one sample of the load, from which suggestions follow.
    fn measure(&self) {
        let now = Instant::now();
        let elapsed =
            self.balance.looked.replace(Some(now)).map(|before| now.saturating_duration_since(before));
        let fleet = self.placer.fleet();
        let (mut time, mut memory, mut had) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        let before = self.balance.before.take();
        for planned in fleet.units() {
            for vm in planned.members().iter().map(|member| member.request.vm) {
                let Some((_, room)) = self.room(vm) else { continue };
                let Some(unit) = self.placer.unit_of(vm) else { continue };
                let Some(report) = unit.last_of_vm(room.id()) else { continue };
                had.insert(vm, (unit.number(), report.time.used));
                memory.insert(vm, ratio(report.lent, planned.memory_bytes));
                let known = before.get(&vm).filter(|(number, _)| *number == unit.number());
                if let (Some((_, before)), Some(elapsed)) = (known, elapsed) {
                    let used = report.time.used.saturating_sub(*before);
                    let used = Duration::from_nanos(used).as_secs_f64();
                    // Reports do not arrive at regular times; no VM can use more than all of the time.
                    time.insert(vm, (used / elapsed.as_secs_f64().max(f64::EPSILON)).min(1.0));
                }
            }
        }
        self.balance.before.replace(had);
        for (resource, demands) in [(ShortResource::Time, &time), (ShortResource::Memory, &memory)] {
            self.balance.of(resource).borrow_mut().observe(&policy(resource), &fleet, demands);
        }
    }
}

#[expect(clippy::cast_precision_loss, reason = "a ratio")]
fn ratio(part: u64, whole: u64) -> f64 {
    part as f64 / whole.max(1) as f64
}
