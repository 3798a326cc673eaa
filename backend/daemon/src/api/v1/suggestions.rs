//! `/v1/placement/suggestions`: expected load of units, and suggested moves of VMs.

use std::rc::Rc;

use axum::{Json, extract::State};
use sluice_api::v1::{Place, Reason, Rebalance, Suggestion, Suggestions, UnitLoad};
use sluice_placement::{
    Decision, Move, Partition, PlanUnit as Planned, ShortResource, Suggestion as Suggested, UnitId,
};

use super::units;
use crate::{
    api::Api,
    api::error::{Errors, RequestRefusal},
    caller::Caller,
    registry::Registry,
    units::balancing::{HORIZON, LOOK, policy},
};

/// Maximum number of suggested moves against fragmentation.
const TIDIED: usize = 8;
/// Minimum gain of such a move, in thousandths of the remaining configurations.
const TIDIED_GAIN: u32 = 50;

impl Registry {
    fn suggestions(&self) -> Suggestions {
        let horizon_seconds = HORIZON * u32::try_from(LOOK.as_secs()).unwrap_or(1);
        let (mut units, mut suggestions) = (Vec::new(), Vec::new());
        if self.configuration.rebalance != Rebalance::Off {
            self.placer.look_around();
            self.look_who_is_idle();
            let fleet = self.placer.fleet();
            let used = fleet.units().filter(|unit| !unit.members().is_empty());
            units.extend(used.filter_map(|unit| self.show_load(unit)));
            for resource in [ShortResource::Time, ShortResource::Memory] {
                let standing = self.balance.standing(resource);
                suggestions.extend(standing.iter().filter_map(|one| self.show_suggested(resource, one)));
            }
            let tidied = fleet.tidy_gains(TIDIED, TIDIED_GAIN);
            suggestions.extend(tidied.iter().filter_map(|(one, gain)| self.show_tidied(one, *gain)));
        }
        Suggestions { policy: self.configuration.rebalance, horizon_seconds, units, suggestions }
    }

    fn show_load(&self, unit: &Planned) -> Option<UnitLoad> {
        let time = self.balance.load(ShortResource::Time, unit);
        let memory = self.balance.load(ShortResource::Memory, unit);
        Some(UnitLoad {
            unit: self.placer.spotted(unit.id)?.unit,
            gpu_time_ratio: time.now,
            gpu_time_ratio_ahead: time.ahead,
            memory_ratio: memory.now,
            memory_ratio_ahead: memory.ahead,
        })
    }

    fn show_suggested(&self, resource: ShortResource, one: &Suggested) -> Option<Suggestion> {
        let (reason, what) = match resource {
            ShortResource::Time => (Reason::GpuTime, "GPU time"),
            ShortResource::Memory => (Reason::Memory, "memory"),
        };
        let (from, to) = (self.placer.spotted(one.from)?.unit, self.show_place(one.to)?);
        let percent = |ratio: f64| format!("{:.0} %", ratio * 100.0);
        let why = format!(
            "unit {from} is expected to need {} of its {what} in {HORIZON} s, and more than {} is too much; \
             with this move the worse of both units needs {}",
            percent(one.before),
            percent(policy(resource).high),
            percent(one.after),
        );
        let gain_ratio = one.before - one.after;
        let idle = self.is_idle(one.vm);
        Some(Suggestion { vm: self.placer.name(one.vm)?, from, to, reason, why, idle, gain_ratio })
    }

    fn show_tidied(&self, one: &Move, gain: f64) -> Option<Suggestion> {
        let Move { vm, from, to } = *one;
        let decision = to.unit.map_or(
            Decision::Open { gpu: to.gpu, partition: to.partition, shared: to.shared },
            Decision::Join,
        );
        let why = format!(
            "with its instance there, {:.0} % more configurations of further instances are possible",
            gain * 100.0
        );
        Some(Suggestion {
            vm: self.placer.name(vm)?,
            from: self.placer.spotted(from)?.unit,
            to: self.show_place(decision)?,
            reason: Reason::Fragmentation,
            why,
            idle: self.is_idle(vm),
            gain_ratio: gain,
        })
    }

    fn show_place(&self, decision: Decision) -> Option<Place> {
        let fleet = self.placer.fleet();
        let (gpu, partition, unit) = match decision {
            Decision::Open { gpu, partition, .. } => (gpu, partition, None),
            Decision::Join(unit) => {
                let planned = fleet.unit(unit)?;
                (planned.gpu, planned.partition, self.number_of(unit))
            }
        };
        let found = self.placer.device(gpu)?;
        let (profile, start) = match partition {
            Partition::Whole => (None, None),
            Partition::Instance { profile, placement } => {
                let name = found.kinds.get(&profile).cloned();
                (Some(name.unwrap_or_else(|| profile.to_string())), Some(placement.start))
            }
        };
        Some(Place {
            gpu: found.ordinal,
            kind: units::kind(partition != Partition::Whole),
            unit,
            profile,
            start,
        })
    }

    fn number_of(&self, unit: UnitId) -> Option<u32> {
        self.placer.spotted(unit).map(|spotted| spotted.unit)
    }
}

/// Shows expected load of units, and suggested moves of VMs.
///
/// They follow from the GPU time and memory of each VM in the last minutes, and from the positions of instances. This request moves
/// nothing; `POST /v1/vms/{id}/move` moves a VM. The setting `rebalance` controls whether load is measured and whether moves for load are
/// made.
#[utoipa::path(get, path = "/v1/placement/suggestions", tag = "units", operation_id = "get_suggestions",
    responses((status = 200, body = Suggestions), Errors))]
pub(crate) async fn suggestions(
    State(api): State<Api>,
    caller: Caller,
) -> Result<Json<Suggestions>, RequestRefusal> {
    caller.may_read()?;
    api.mailbox.call(|registry: Rc<Registry>| async move { Ok(registry.suggestions()) }).await.map(Json)
}
