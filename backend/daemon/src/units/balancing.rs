//! What load suggests: which VMs had better be on other units.
//!
//! Owns the recent history of load, a few numbers per VM, and nothing older. What follows from it is the plan's to say
//! ([`sluice_placement::rebalance`]); VMs are moved by it only where the configuration says so, and then only those without a
//! session.

use std::{
    cell::{Cell, RefCell},
    collections::BTreeMap,
    time::{Duration, Instant},
};

use sluice_api::v1::Rebalance;
use sluice_placement::{RebalancePolicy, Rebalancer, Resource, Smoothing, Suggestion, Unit, VmId};

use crate::registry::Registry;

/// How often load is looked at.
pub(crate) const LOOK: Duration = Duration::from_secs(1);
/// How many looks ahead.
pub(crate) const HORIZON: u32 = 60;

/// The load of units, and what it suggests.
#[derive(Debug, Default)]
pub(crate) struct Balance {
    time: RefCell<Rebalancer>,
    memory: RefCell<Rebalancer>,
    /// By VM, the unit it was on and the nanoseconds of that unit's time that it had had.
    before: RefCell<BTreeMap<VmId, (u32, u64)>>,
    looked: Cell<Option<Instant>>,
}

/// Load of a unit: now, and as it is expected; 1 is all that it has.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Load {
    pub(crate) now: f64,
    pub(crate) ahead: f64,
}

/// When a unit is short of something, and when a move is worth it.
pub(crate) fn policy(resource: Resource) -> RebalancePolicy {
    let (high, low) = match resource {
        Resource::Time => (0.95, 0.8),
        // As the alert for memory has it.
        Resource::Memory => (0.85, 0.7),
    };
    RebalancePolicy {
        resource,
        enabled: true,
        // Of looks that are a second apart: what counts is the last half minute.
        smoothing: Smoothing { level: 0.2, trend: 0.05, damping: 0.97 },
        horizon: HORIZON,
        high,
        low,
        hold: 10,
        gain: 0.15,
        cooldown: 300,
    }
}

impl Balance {
    fn of(&self, resource: Resource) -> &RefCell<Rebalancer> {
        match resource {
            Resource::Time => &self.time,
            Resource::Memory => &self.memory,
        }
    }

    /// What is suggested and still holds.
    pub(crate) fn standing(&self, resource: Resource) -> Vec<Suggestion> {
        self.of(resource).borrow().standing().to_vec()
    }

    /// Load of a unit of the plan.
    pub(crate) fn load(&self, resource: Resource, unit: &Unit) -> Load {
        let (rebalancer, policy) = (self.of(resource).borrow(), policy(resource));
        Load { now: rebalancer.load(&policy, unit, 0), ahead: rebalancer.load(&policy, unit, HORIZON) }
    }
}

impl Registry {
    /// Looks at the load of all VMs, and does what the policy says about it.
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
        // Also what was suggested before: whoever makes a load has a session while it does.
        let standing = [Resource::Time, Resource::Memory].map(|resource| self.balance.standing(resource));
        for one in standing.into_iter().flatten() {
            let Some(name) = self.placer.name(one.vm) else { continue };
            if !self.is_idle(one.vm) || self.placer.fleet().home(one.vm) != Some(one.from) {
                continue;
            }
            let lock = self.lock(&name);
            // Something is being done to it: it stands, and is looked at again.
            let Ok(_guard) = lock.try_lock() else { continue };
            self.placer.look_around();
            let moved = self.relocate(one.vm, |fleet| fleet.relocate(one.vm, one.to)).await;
            if let Err(error) = moved {
                // It stands, and is tried again.
                tracing::debug!("VM {name} is not moved as suggested: {} {:?}", error.message, error.cause);
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
                let Some((name, room)) = self.room(vm) else { continue };
                let Some(unit) = self.placer.unit_of(&name) else { continue };
                let Some(report) = unit.last_of_vm(room.id()) else { continue };
                had.insert(vm, (unit.number(), report.time.used));
                memory.insert(vm, ratio(report.lent, planned.memory_bytes));
                let known = before.get(&vm).filter(|(number, _)| *number == unit.number());
                if let (Some((_, before)), Some(elapsed)) = (known, elapsed) {
                    let used = report.time.used.saturating_sub(*before);
                    let used = Duration::from_nanos(used).as_secs_f64();
                    // Reports come when they come; nobody can have more than all.
                    time.insert(vm, (used / elapsed.as_secs_f64().max(f64::EPSILON)).min(1.0));
                }
            }
        }
        self.balance.before.replace(had);
        for (resource, demands) in [(Resource::Time, &time), (Resource::Memory, &memory)] {
            self.balance.of(resource).borrow_mut().observe(&policy(resource), &fleet, demands);
        }
    }
}

#[expect(clippy::cast_precision_loss, reason = "a ratio")]
fn ratio(part: u64, whole: u64) -> f64 {
    part as f64 / whole.max(1) as f64
}
