//! Suggestions from load: VMs that had better be on other units.
//!
//! It owns the recent history of load, a few numbers per VM, and nothing older. The plan derives the suggestions
//! ([`sluice_placement::rebalance`]); VMs are moved by them only if the configuration allows it, and then only VMs without a
//! session.

use std::{
    cell::{Cell, RefCell},
    collections::BTreeMap,
    time::{Duration, Instant},
};

use sluice_placement::{RebalancePolicy, Rebalancer, Resource, Smoothing, Suggestion, Unit, VmId};

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
    pub(crate) before: RefCell<BTreeMap<VmId, (u32, u64)>>,
    pub(crate) looked: Cell<Option<Instant>>,
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
    pub(crate) fn of(&self, resource: Resource) -> &RefCell<Rebalancer> {
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
