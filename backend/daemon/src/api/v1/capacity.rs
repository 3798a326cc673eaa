//! `/v1/capacity`: free room for more instances and VMs.

use std::rc::Rc;

use axum::{Json, extract::State};
use sluice_api::{
    Error,
    v1::{Capacity, Fit, FitRequest, MoreInstances, SharedRoom, WouldFit},
};
use sluice_placement::{AdminState, Decision, Fleet, Partition, Request};

use super::{units, vms};
use crate::{
    api::Api,
    api::error::{ChangeErrors, Errors, RequestRefusal},
    api::extract::Body,
    caller::Caller,
    registry::Registry,
};

/// Maximum number of VMs in one request.
const REQUESTS: usize = 64;

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
                && gpu.admin_state == AdminState::Open
                && !fleet.units().any(|unit| unit.gpu == *at)
        });
        let shared = fleet.units().filter(|unit| {
            let open = fleet.gpus().get(unit.gpu).is_some_and(|gpu| gpu.admin_state == AdminState::Open);
            unit.shared && open && fleet.shares(unit.gpu) && unit.admin_state == AdminState::Open
        });
        let room = |unit: &sluice_placement::PlanUnit| {
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

    fn would_fit(&self, request: FitRequest) -> Result<WouldFit, Error> {
        if request.vms.len() > REQUESTS {
            return Err(Error::invalid(format!("a request may name at most {REQUESTS} VMs")));
        }
        self.placer.look_around();
        let mut fleet: Fleet = self.placer.fleet().clone();
        let mut answers = Vec::new();
        for (index, wanted) in request.vms.into_iter().enumerate() {
            let wanted = self.complete(vms::wanted(wanted, self)?)?;
            // No VM can have this name.
            let name = format!("?{index}");
            let requests = match self.placer.requests(&name, &wanted) {
                Ok(requests) => requests,
                Err(error) => {
                    answers.push(refused(error.message));
                    continue;
                }
            };
            // The answer for a VM with several GPUs is about the first GPU, or about one that refuses it.
            let mut trial = fleet.clone();
            let fits = requests.iter().map(|request| self.fit(&mut trial, request));
            let one =
                fits.reduce(
                    |first, next| {
                        if first.refusal.is_none() && next.refusal.is_some() { next } else { first }
                    },
                );
            if one.as_ref().is_some_and(|fit| fit.refusal.is_none()) {
                fleet = trial;
            }
            answers.extend(one);
        }
        Ok(WouldFit { fits: answers.iter().all(|fit| fit.refusal.is_none()), vms: answers })
    }

    /// Reserves a place in this copy of the plan, if there is one, and describes it.
    fn fit(&self, fleet: &mut Fleet, request: &Request) -> Fit {
        let decision = match self.placer.decide_on(fleet, request) {
            Ok(decision) => decision,
            Err(refusal) => return refused(refusal.to_string()),
        };
        let (gpu, partition, unit) = match decision {
            Decision::Open { gpu, partition, .. } => (Some(gpu), Some(partition), None),
            Decision::Join(unit) => {
                let planned = fleet.unit(unit);
                let number = self.placer.spotted(unit).map(|spotted| spotted.unit);
                (planned.map(|unit| unit.gpu), planned.map(|unit| unit.partition), number)
            }
        };
        let start = match partition {
            Some(Partition::Instance { placement, .. }) => Some(placement.start),
            Some(Partition::Whole) | None => None,
        };
        Fit {
            refusal: fleet.reserve(request, decision).err().map(|error| error.to_string()),
            gpu: gpu.and_then(|gpu| Some(self.placer.device(gpu)?.ordinal)),
            kind: partition.map(|partition| units::kind(partition != Partition::Whole)),
            unit,
            start,
        }
    }
}

/// The answer for a VM without a place.
fn refused(why: String) -> Fit {
    Fit { gpu: None, kind: None, unit: None, start: None, refusal: Some(why) }
}

/// Shows free room for more instances and VMs.
#[utoipa::path(get, path = "/v1/capacity", tag = "units", operation_id = "get_capacity",
    responses((status = 200, body = Capacity), Errors))]
pub(crate) async fn capacity(
    State(api): State<Api>,
    caller: Caller,
) -> Result<Json<Capacity>, RequestRefusal> {
    caller.may_read()?;
    api.mailbox.call(|registry: Rc<Registry>| async move { Ok(registry.capacity()) }).await.map(Json)
}

/// Checks if VMs would have a place now.
///
/// They are placed one after the other, as PUT would place them, on a copy of the plan: nothing is created or reserved. Quotas of
/// organisations and projects are not checked.
#[utoipa::path(post, path = "/v1/capacity/would-fit", tag = "units", operation_id = "would_fit",
    request_body = FitRequest, responses((status = 200, body = WouldFit), ChangeErrors))]
pub(crate) async fn would_fit(
    State(api): State<Api>,
    caller: Caller,
    Body(request): Body<FitRequest>,
) -> Result<Json<WouldFit>, RequestRefusal> {
    caller.may_read()?;
    api.mailbox.call(|registry: Rc<Registry>| async move { registry.would_fit(request) }).await.map(Json)
}
