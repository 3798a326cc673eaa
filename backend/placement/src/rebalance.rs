//! Suggestions from measured load: the VM that should move away from a shared unit that is, or will soon be, overloaded.
//!
//! The caller gives each VM's demand for the scarce resource, GPU time or memory, at equal distances: 1 is all of its unit.
//! Units are not alike, so a VM's demand is kept in multiprocessors or bytes, and is a smaller part of a larger unit. A
//! suggestion is a move after which the worse of the two units is clearly better off. So that nothing moves to and fro: a unit
//! must stay above the upper mark for a while before it counts as hot, stays hot until it is below the lower mark, and neither
//! unit nor VM is suggested again before some samples have passed.

use std::collections::BTreeMap;

use crate::decide::Candidate;
use crate::fleet::{AdminState, Decision, Fleet, Partition, PlanUnit, UnitId, UnitPhase};
use crate::forecast::{Forecast, Smoothing};
use crate::request::VmId;

/// The resource that VMs of a unit can be short of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ShortResource {
    /// GPU time, of all multiprocessors of the unit.
    #[default]
    Time,
    /// Device memory of the unit.
    Memory,
}

impl ShortResource {
    /// The amount of it in a place with so many bytes and multiprocessors. Never 0.
    fn of(self, memory_bytes: u64, multiprocessors: u32) -> f64 {
        #[expect(clippy::cast_precision_loss, reason = "a part of it is a ratio")]
        match self {
            // If the number is unknown, all places count alike.
            Self::Time if multiprocessors == u32::MAX => 1.0,
            Self::Time => f64::from(multiprocessors.max(1)),
            Self::Memory => memory_bytes.max(1) as f64,
        }
    }
}

/// The policy for suggestions.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RebalancePolicy {
    /// The observed resource.
    pub resource: ShortResource,
    /// True if suggestions are made.
    pub enabled: bool,
    /// Smoothing and forecast of load.
    pub smoothing: Smoothing,
    /// Number of samples that the forecast looks ahead.
    pub horizon: u32,
    /// A unit gets hot above this forecast.
    pub high: f64,
    /// A unit is no longer hot below this forecast.
    pub low: f64,
    /// Samples above the upper mark before a unit is hot.
    pub hold: u32,
    /// Minimum improvement of the worse of both units.
    pub gain: f64,
    /// Samples between two suggestions for the same unit or VM.
    pub cooldown: u64,
}

impl Default for RebalancePolicy {
    /// Off. Once switched on: for samples of 500 ms, ten seconds of overload, and five minutes between moves.
    fn default() -> Self {
        Self {
            resource: ShortResource::Time,
            enabled: false,
            smoothing: Smoothing::default(),
            horizon: 20,
            high: 0.95,
            low: 0.8,
            hold: 20,
            gain: 0.15,
            cooldown: 600,
        }
    }
}

/// A move that load suggests.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Suggestion {
    /// The VM.
    pub vm: VmId,
    /// The hot unit.
    pub from: UnitId,
    /// The better place.
    pub to: Decision,
    /// True if the VM is idle and can move now; otherwise it moves when it is idle.
    pub now: bool,
    /// Forecast load of the hot unit.
    pub before: f64,
    /// Forecast load of the worse of both units after the move.
    pub after: f64,
}

#[derive(Clone, Copy, Debug, Default)]
struct Heat {
    above: u32,
    hot: bool,
    quiet_until: u64,
}

/// The load's recent history, and past suggestions. It holds entries only of the plan's VMs and units.
#[derive(Clone, Debug, Default)]
pub struct Rebalancer {
    loads: BTreeMap<VmId, Forecast>,
    heat: BTreeMap<UnitId, Heat>,
    quiet: BTreeMap<VmId, u64>,
    admin_state: Vec<Suggestion>,
    samples: u64,
}

impl Rebalancer {
    /// Adds one sample of every VM's demand and returns new suggestions. A VM that is not named has no demand.
    pub fn observe(
        &mut self,
        policy: &RebalancePolicy,
        fleet: &Fleet,
        demands: &BTreeMap<VmId, f64>,
    ) -> Vec<Suggestion> {
        self.samples += 1;
        self.loads.retain(|vm, _| fleet.home(*vm).is_some());
        self.quiet.retain(|vm, until| *until > self.samples && fleet.home(*vm).is_some());
        self.heat.retain(|unit, _| fleet.unit(*unit).is_some());
        for unit in fleet.units() {
            let whole = policy.resource.of(unit.memory_bytes, unit.multiprocessors);
            for vm in unit.members().iter().map(|member| member.request.vm) {
                let demand = demands.get(&vm).copied().unwrap_or(0.0) * whole;
                self.loads.entry(vm).or_default().observe(&policy.smoothing, demand);
            }
        }
        let mut suggestions = Vec::new();
        for unit in fleet.units() {
            let load = self.load(policy, unit, policy.horizon);
            let heat = self.heat.entry(unit.id).or_default();
            heat.above = if load > policy.high { heat.above.saturating_add(1) } else { 0 };
            heat.hot = (heat.hot && load >= policy.low) || (heat.above > 0 && heat.above >= policy.hold);
            // A VM alone already has the whole unit.
            let due = heat.hot && heat.quiet_until <= self.samples && unit.members().len() > 1;
            if !policy.enabled || !due {
                continue;
            }
            if let Some(suggestion) = self.suggest(policy, fleet, unit, load) {
                let until = self.samples.saturating_add(policy.cooldown);
                self.quiet.insert(suggestion.vm, until);
                self.heat.entry(unit.id).or_default().quiet_until = until;
                suggestions.push(suggestion);
            }
        }
        // A newer suggestion about a unit replaces the older one.
        self.admin_state.retain(|old| suggestions.iter().all(|new| new.from != old.from));
        self.admin_state.extend(&suggestions);
        let heat = &self.heat;
        self.admin_state.retain(|one| {
            let still_hot = heat.get(&one.from).is_some_and(|heat| heat.hot);
            policy.enabled && still_hot && fleet.home(one.vm) == Some(one.from)
        });
        suggestions
    }

    /// Suggestions that still hold: the VM exists, and its unit is hot.
    pub fn standing(&self) -> &[Suggestion] {
        &self.admin_state
    }

    /// The forecast load of a unit, `ahead` samples ahead: the sum of its VMs' demands, relative to its capacity.
    pub fn load(&self, policy: &RebalancePolicy, unit: &PlanUnit, ahead: u32) -> f64 {
        let whole = policy.resource.of(unit.memory_bytes, unit.multiprocessors);
        let sum: f64 =
            unit.members().iter().map(|member| self.vm_load(policy, member.request.vm, ahead)).sum();
        sum / whole
    }

    /// The forecast demand of a VM, `ahead` samples ahead, in multiprocessors or bytes.
    fn vm_load(&self, policy: &RebalancePolicy, vm: VmId, ahead: u32) -> f64 {
        self.loads.get(&vm).map_or(0.0, |load| load.ahead(&policy.smoothing, ahead))
    }

    /// The move after which the worse of both units is best off; among equals one that can be made now.
    fn suggest(
        &self,
        policy: &RebalancePolicy,
        fleet: &Fleet,
        hot: &PlanUnit,
        before: f64,
    ) -> Option<Suggestion> {
        let mut best: Option<Suggestion> = None;
        let candidates = hot
            .members()
            .iter()
            .filter(|member| member.request.pin.is_none() && !self.quiet.contains_key(&member.request.vm));
        let here = policy.resource.of(hot.memory_bytes, hot.multiprocessors);
        for member in candidates {
            let load = self.vm_load(policy, member.request.vm, policy.horizon);
            for (to, there) in self.places(policy, fleet, hot, member.request.vm) {
                let (memory_bytes, multiprocessors) = match to {
                    Decision::Join(unit) => match fleet.unit(unit) {
                        Some(unit) => (unit.memory_bytes, unit.multiprocessors),
                        None => continue,
                    },
                    Decision::Open { gpu, partition, .. } => match fleet.size(gpu, partition) {
                        Ok(size) => size,
                        Err(_) => continue,
                    },
                };
                let whole = policy.resource.of(memory_bytes, multiprocessors);
                let after = (before - load / here).max(there + load / whole);
                let suggestion =
                    Suggestion { vm: member.request.vm, from: hot.id, to, now: member.idle, before, after };
                let better = best.is_none_or(|best| {
                    suggestion.after < best.after
                        || (suggestion.after.total_cmp(&best.after).is_eq() && suggestion.now && !best.now)
                });
                if before - after >= policy.gain && better {
                    best = Some(suggestion);
                }
            }
        }
        best
    }

    /// Places for a VM of the hot unit, each with its load.
    fn places(
        &self,
        policy: &RebalancePolicy,
        fleet: &Fleet,
        hot: &PlanUnit,
        vm: VmId,
    ) -> Vec<(Decision, f64)> {
        let Some(member) = hot.members().iter().find(|member| member.request.vm == vm) else {
            return Vec::new();
        };
        let request = &member.request;
        let ways = crate::decide::ways(request);
        let mut places = Vec::new();
        if ways.contains(&Candidate::Join) {
            for unit in fleet.units().filter(|unit| unit.id != hot.id && unit.shared) {
                let open =
                    unit.admin_state == AdminState::Open && !matches!(unit.phase, UnitPhase::Closing(_));
                let kind = request.profile.is_none_or(
                    |id| matches!(unit.partition, Partition::Instance { profile, .. } if profile == id),
                );
                if open
                    && kind
                    && fleet.wishes(request, unit.gpu).is_some()
                    && fleet.admits((unit.gpu, unit.partition), unit.members(), request, fleet.rules())
                    && unit.room(request, fleet.rules()).is_some()
                {
                    places.push((Decision::Join(unit.id), self.load(policy, unit, policy.horizon)));
                }
            }
        }
        // A unit of its own, if one is free: it has no other load.
        if let Ok(open @ Decision::Open { gpu, .. }) = fleet.decide_move(request)
            && gpu != hot.gpu
        {
            places.push((open, 0.0));
        }
        places
    }
}
