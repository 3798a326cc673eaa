//! Suggestions from load: VMs that should be on other units.
//!
//! It owns the recent history of load, a few numbers per VM, and nothing older. The plan derives the suggestions
//! ([`sluice_placement::rebalance`]); VMs are moved by them only if the configuration allows it, and then only VMs without a
//! session.

use std::{
    cell::{Cell, RefCell},
    collections::BTreeMap,
    time::{Duration, Instant},
};

use sluice_placement::{PlanUnit, RebalancePolicy, Rebalancer, ShortResource, Smoothing, Suggestion, VmId};

/// Period of the samples.
pub(crate) const LOOK: Duration = Duration::from_secs(1);
/// Number of samples that a forecast looks ahead.
pub(crate) const HORIZON: u32 = 60;

/// The load of units, and the suggestions from it.
#[derive(Debug, Default)]
pub(crate) struct Balance {
    time: RefCell<Rebalancer>,
    memory: RefCell<Rebalancer>,
    /// By VM: its unit, and the nanoseconds of GPU time that it had used there at the last sample.
    pub(crate) before: RefCell<BTreeMap<VmId, (u32, u64)>>,
    pub(crate) looked: Cell<Option<Instant>>,
}

/// Load of a unit: now, and as expected; 1 is all that it has.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Load {
    pub(crate) now: f64,
    pub(crate) ahead: f64,
}

/// The thresholds at which a unit is short of a resource, and at which a move is worth it.
pub(crate) fn policy(resource: ShortResource) -> RebalancePolicy {
    let (high, low) = match resource {
        ShortResource::Time => (0.95, 0.8),
        // The same thresholds as the alert for memory.
        ShortResource::Memory => (0.85, 0.7),
    };
    RebalancePolicy {
        resource,
        enabled: true,
        // With samples a second apart, the last half minute counts.
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
    pub(crate) fn of(&self, resource: ShortResource) -> &RefCell<Rebalancer> {
        match resource {
            ShortResource::Time => &self.time,
            ShortResource::Memory => &self.memory,
        }
    }

    /// The current suggestions for a resource.
    pub(crate) fn standing(&self, resource: ShortResource) -> Vec<Suggestion> {
        self.of(resource).borrow().standing().to_vec()
    }

    /// Load of a unit of the plan.
    pub(crate) fn load(&self, resource: ShortResource, unit: &PlanUnit) -> Load {
        let (rebalancer, policy) = (self.of(resource).borrow(), policy(resource));
        Load { now: rebalancer.load(&policy, unit, 0), ahead: rebalancer.load(&policy, unit, HORIZON) }
    }
}
