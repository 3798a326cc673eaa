//! `/v1/capacity`: free room for more instances and VMs.

use std::rc::Rc;

use axum::{Json, extract::State};
use sluice_api::{
    Error,
    v1::{Capacity, Fit, MoreInstances, SharedRoom, Wishes, WouldFit},
};
use sluice_placement::{Decision, Fleet, Spot, Standing};

use super::{units, vms};
use crate::{
    api::Api,
    api::error::{ChangeErrors, Errors, Refusal},
    api::extract::Body,
    caller::Caller,
    placement::placer::vm_id,
    registry::Registry,
};

/// Maximum number of VMs in one request.
const WISHES: usize = 64;

impl Registry {
    fn capacity(&self) -> Capacity {
        self.placer.look_around();
        let fleet = self.placer.fleet();
        let found = self.placer.found();
        let name = |profile: u32| {
            let mut names = found.iter().filter_map(|found| found.kinds.get(&profile));
            names.next().cloned()
        };
        let free = fleet.gpus().iter().enumerate().filter(|(at, gpu)| {
            gpu.geometry().is_none()
                && gpu.standing == Standing::Open
                && !fleet.units().any(|unit| unit.gpu == *at)
        });
        let shared = fleet.units().filter(|unit| {
            let open = fleet.gpus().get(unit.gpu).is_some_and(|gpu| gpu.standing == Standing::Open);
            unit.shared && open && unit.standing == Standing::Open
        });
        let room = |unit: &sluice_placement::Unit| {
            let sum = unit.members().iter().map(|member| member.request.firm_bytes());
            let time = unit.members().iter().map(|member| member.request.firm_permille());
            Some(SharedRoom {
                unit: self.placer.spotted(unit.id)?.unit,
                vms: u32::try_from(unit.members().len()).unwrap_or(u32::MAX),
                memory_bytes: unit.memory_bytes.saturating_sub(sum.fold(0, u64::saturating_add)),
                permille: 1000_u16.saturating_sub(time.fold(0, u16::saturating_add)),
            })
        };
        Capacity {
            free_gpus: u32::try_from(free.count()).unwrap_or(u32::MAX),
            instances: fleet
                .capacity()
                .into_iter()
                .map(|more| MoreInstances {
                    profile: more.profile,
                    name: name(more.profile),
                    memory_bytes: more.memory_bytes,
                    count: more.count,
                })
                .collect(),
            shared: shared.filter_map(room).collect(),
        }
    }

    fn would_fit(&self, wishes: Wishes) -> Result<WouldFit, Error> {
        if wishes.vms.len() > WISHES {
            return Err(Error::invalid(format!("{WISHES} VMs can be asked about at once")));
        }
        self.placer.look_around();
        let mut fleet: Fleet = self.placer.fleet().clone();
        let mut answers = Vec::new();
        for (index, wish) in wishes.vms.into_iter().enumerate() {
            let wanted = self.complete(vms::wanted(wish, self)?)?;
            // No VM can be called so.
            let name = format!("?{index}");
            let request = self.placer.request(&name, &wanted);
            debug_assert_eq!(request.vm, vm_id(&name), "the one that is asked about");
            let decided = self.placer.decide_on(&fleet, &request, wanted.memory == 0);
            answers.push(match decided {
                Ok(decision) => {
                    let (gpu, spot, unit) = match decision {
                        Decision::Open { gpu, spot, .. } => (Some(gpu), Some(spot), None),
                        Decision::Join(unit) => {
                            let planned = fleet.unit(unit);
                            let number = self.placer.spotted(unit).map(|spotted| spotted.unit);
                            (planned.map(|unit| unit.gpu), planned.map(|unit| unit.spot), number)
                        }
                    };
                    let start = match spot {
                        Some(Spot::Instance { placement, .. }) => Some(placement.start),
                        Some(Spot::Whole) | None => None,
                    };
                    let refusal = fleet.reserve(&request, decision).err().map(|error| error.to_string());
                    Fit {
                        gpu: gpu.and_then(|gpu| Some(self.placer.device(gpu)?.ordinal)),
                        kind: spot.map(|spot| units::kind(spot != Spot::Whole)),
                        unit,
                        start,
                        refusal,
                    }
                }
                Err(refusal) => {
                    Fit { gpu: None, kind: None, unit: None, start: None, refusal: Some(refusal.to_string()) }
                }
            });
        }
        Ok(WouldFit { fits: answers.iter().all(|fit| fit.refusal.is_none()), vms: answers })
    }
}

/// Shows free room for more instances and VMs.
#[utoipa::path(get, path = "/v1/capacity", tag = "units", operation_id = "get_capacity",
    responses((status = 200, body = Capacity), Errors))]
pub(crate) async fn capacity(State(api): State<Api>, caller: Caller) -> Result<Json<Capacity>, Refusal> {
    caller.may_read()?;
    api.bridge.call(|registry: Rc<Registry>| async move { Ok(registry.capacity()) }).await.map(Json)
}

/// Checks if VMs would have a place now.
///
/// They are placed one after the other, as PUT would place them, on a copy of the plan: nothing is created or reserved. Quotas of
/// organisations and projects are not checked.
#[utoipa::path(post, path = "/v1/capacity/would-fit", tag = "units", operation_id = "would_fit",
    request_body = Wishes, responses((status = 200, body = WouldFit), ChangeErrors))]
pub(crate) async fn would_fit(
    State(api): State<Api>,
    caller: Caller,
    Body(wishes): Body<Wishes>,
) -> Result<Json<WouldFit>, Refusal> {
    caller.may_read()?;
    api.bridge.call(|registry: Rc<Registry>| async move { registry.would_fit(wishes) }).await.map(Json)
}
