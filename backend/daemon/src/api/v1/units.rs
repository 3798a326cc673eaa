//! `/v1/gpus`, `/v1/units`: GPUs, units, and their lent memory.

use std::rc::Rc;

use axum::{Json, extract::State, http::StatusCode};
use sluice_api::{
    Error,
    v1::{
        Gpu, GpuState, Gpus, HostMemoryAccess, MigModeRequest, Unit, UnitKind, UnitMemory, UnitState, Units,
    },
};
use sluice_messages::{
    control::HostAccess,
    inventory::{WHOLE, uuid_text},
};
use sluice_placement::AdminState;
use tokio::time::timeout;

use super::LOOK;
use crate::{
    api::Api,
    api::error::{ChangeErrors, Errors, RequestRefusal},
    api::extract::{Body, Number},
    caller::Caller,
    placement::survey::FoundDevice,
    registry::Registry,
    units::unit,
};

/// Kind of a unit.
pub(super) const fn kind(is_instance: bool) -> UnitKind {
    if is_instance { UnitKind::Mig } else { UnitKind::TimeSlice }
}

impl Registry {
    fn show_gpus(&self) -> Vec<Gpu> {
        let fleet = self.placer.fleet();
        let show = |(at, found): (usize, &Rc<FoundDevice>)| {
            let planned = fleet.gpus().get(at);
            let units = self.units.iter().filter(|unit| unit.place().device == found.ordinal);
            Gpu {
                gpu: found.ordinal,
                uuid: found.name.is_some().then(|| format!("GPU-{}", uuid_text(&found.uuid))),
                name: found.name.clone(),
                numa_node: found.node,
                mig: !found.is_whole(),
                mig_pending: self.placer.will_divide(at),
                state: match planned.map(|gpu| gpu.admin_state) {
                    _ if found.is_whole() && self.checkpoint.quarantine(found.ordinal).is_some() => {
                        GpuState::Quarantined
                    }
                    _ if self.placer.is_draining(found.ordinal) => GpuState::Draining,
                    Some(AdminState::Quarantined) => GpuState::Quarantined,
                    _ => GpuState::Open,
                },
                units: units.map(|unit| unit.number()).collect(),
                foreign_instances: planned
                    .map_or(0, |gpu| u32::try_from(gpu.foreign().len()).unwrap_or(u32::MAX)),
                fragmentation: fleet.fragmentation(at),
            }
        };
        self.placer.found().iter().enumerate().map(show).collect()
    }

    fn show_gpu(&self, gpu: u32) -> Result<Gpu, Error> {
        let all = self.show_gpus();
        all.into_iter()
            .find(|known| known.gpu == gpu)
            .ok_or_else(|| Error::not_found("GPU", &gpu.to_string()))
    }

    fn show_unit(&self, unit: &unit::Unit) -> Unit {
        let reason = self.checkpoint.quarantine(unit.number());
        let planned = self.placer.planned(unit.number());
        let spotted = planned.and_then(|planned| self.placer.spotted(planned));
        Unit {
            unit: unit.number(),
            gpu: unit.place().device,
            kind: kind(unit.place().instance != WHOLE),
            start: spotted.as_ref().and_then(|spotted| spotted.placement).map(|placement| placement.start),
            profile: spotted
                .as_ref()
                .and_then(|spotted| spotted.profile.clone())
                .map(|(number, name)| name.unwrap_or_else(|| number.to_string())),
            uuid: unit.place().visible.variable().filter(|_| unit.place().instance != WHOLE),
            figures_per_process: unit.has_figures(),
            host_memory_access: unit.host_access().map(|access| match access {
                HostAccess::None => HostMemoryAccess::None,
                HostAccess::Pageable => HostMemoryAccess::Pageable,
                HostAccess::HostPageTables => HostMemoryAccess::HostPageTables,
            }),
            vms: spotted.map_or(0, |spotted| u32::try_from(spotted.members).unwrap_or(u32::MAX)),
            state: match (&reason, unit.lendable()) {
                (Some(_), _) => UnitState::Quarantined,
                (None, _) if self.placer.is_unit_draining(unit) => UnitState::Draining,
                (None, Some(_)) => UnitState::Lending,
                (None, None) => UnitState::Starting,
            },
            reason,
            arbiter_process: unit.process(),
            memory: unit.last().map(|report| UnitMemory {
                total_bytes: report.total,
                lent_bytes: report.lent,
                clean_bytes: report.clean,
                dirty_bytes: report.dirty,
                headroom_bytes: report.headroom,
                suspect_bytes: report.suspect,
                age_seconds: unit.age().as_secs(),
            }),
            stale_epoch_messages: unit.stale(),
        }
    }

    fn find_unit(&self, caller: &Caller, unit: u32) -> Result<Unit, Error> {
        caller.may_read()?;
        self.units
            .get(unit)
            .map(|unit| self.show_unit(&unit))
            .ok_or_else(|| Error::not_found("unit", &unit.to_string()))
    }
}

/// Lists GPUs.
#[utoipa::path(get, path = "/v1/gpus", tag = "units", operation_id = "list_gpus",
    responses((status = 200, body = Gpus), Errors))]
pub(crate) async fn gpus(State(api): State<Api>, caller: Caller) -> Result<Json<Gpus>, RequestRefusal> {
    caller.may_read()?;
    let list = move |registry: Rc<Registry>| async move {
        let inventory = registry.inventory.as_ref().is_some_and(|inventory| inventory.process().is_some());
        Ok(Gpus { gpus: registry.show_gpus(), inventory })
    };
    api.mailbox.call(list).await.map(Json)
}

/// Shows a GPU.
#[utoipa::path(get, path = "/v1/gpus/{gpu}", tag = "units", operation_id = "get_gpu",
    params(("gpu" = u32, Path, description = "Ordinal of the GPU")),
    responses((status = 200, body = Gpu), Errors))]
pub(crate) async fn gpu(
    State(api): State<Api>,
    caller: Caller,
    Number(gpu): Number,
) -> Result<Json<Gpu>, RequestRefusal> {
    caller.may_read()?;
    api.mailbox.call(move |registry| async move { registry.show_gpu(gpu) }).await.map(Json)
}

/// Drains a GPU.
///
/// No new VM is placed on it. Each VM on it moves to another GPU as soon as it has no session, if there is a place for it; its guest
/// notices nothing. VMs that name it in their placement stay.
#[utoipa::path(post, path = "/v1/gpus/{gpu}/drain", tag = "units", operation_id = "drain_gpu",
    params(("gpu" = u32, Path, description = "Ordinal of the GPU")),
    responses((status = 200, body = Gpu), ChangeErrors))]
pub(crate) async fn drain_gpu(
    State(api): State<Api>,
    caller: Caller,
    Number(gpu): Number,
) -> Result<Json<Gpu>, RequestRefusal> {
    let drain = move |registry: Rc<Registry>| async move {
        registry.drain_gpu(&caller, gpu, true).await?;
        registry.show_gpu(gpu)
    };
    api.mailbox.call(drain).await.map(Json)
}

/// Readmits a drained GPU, so that VMs may be placed on it again.
#[utoipa::path(post, path = "/v1/gpus/{gpu}/readmit", tag = "units", operation_id = "readmit_gpu",
    params(("gpu" = u32, Path, description = "Ordinal of the GPU")),
    responses((status = 200, body = Gpu), ChangeErrors))]
pub(crate) async fn readmit_gpu(
    State(api): State<Api>,
    caller: Caller,
    Number(gpu): Number,
) -> Result<Json<Gpu>, RequestRefusal> {
    let readmit = move |registry: Rc<Registry>| async move {
        registry.drain_gpu(&caller, gpu, false).await?;
        registry.show_gpu(gpu)
    };
    api.mailbox.call(readmit).await.map(Json)
}

/// Switches the MIG mode of a GPU on or off.
///
/// The GPU must be drained and empty. If the driver needs a GPU reset for the switch, `mig_pending` shows the new mode, and the GPU is out
/// of service until the operator resets it; then it continues automatically. It stays drained until it is readmitted.
#[utoipa::path(put, path = "/v1/gpus/{gpu}/mig", tag = "units", operation_id = "put_gpu_mig", request_body = MigModeRequest,
    params(("gpu" = u32, Path, description = "Ordinal of the GPU")),
    responses((status = 200, body = Gpu), ChangeErrors))]
pub(crate) async fn switch_mig(
    State(api): State<Api>,
    caller: Caller,
    Number(gpu): Number,
    Body(request): Body<MigModeRequest>,
) -> Result<Json<Gpu>, RequestRefusal> {
    let switch = move |registry: Rc<Registry>| async move {
        registry.switch_mig(&caller, gpu, request.enabled).await?;
        registry.show_gpu(gpu)
    };
    api.mailbox.call(switch).await.map(Json)
}

/// Lists placement units.
#[utoipa::path(get, path = "/v1/units", tag = "units", operation_id = "list_units",
    responses((status = 200, body = Units), Errors))]
pub(crate) async fn list(State(api): State<Api>, caller: Caller) -> Result<Json<Units>, RequestRefusal> {
    caller.may_read()?;
    let list = move |registry: Rc<Registry>| async move {
        Ok(Units { units: registry.units.iter().map(|unit| registry.show_unit(&unit)).collect() })
    };
    api.mailbox.call(list).await.map(Json)
}

/// Shows a placement unit.
#[utoipa::path(get, path = "/v1/units/{unit}", tag = "units", operation_id = "get_unit",
    params(("unit" = u32, Path, description = "Number of the unit")),
    responses((status = 200, body = Unit), Errors))]
pub(crate) async fn get(
    State(api): State<Api>,
    caller: Caller,
    Number(unit): Number,
) -> Result<Json<Unit>, RequestRefusal> {
    let get = move |registry: Rc<Registry>| async move {
        registry.find_unit(&caller, unit)?;
        if let Some(unit) = registry.units.get(unit) {
            // A unit that does not answer in time is shown with its last report.
            _ = timeout(LOOK, unit.describe()).await;
        }
        registry.find_unit(&caller, unit)
    };
    api.mailbox.call(get).await.map(Json)
}

/// Drains a unit.
///
/// No new VM is placed on it. Each VM on it moves to another unit as soon as it has no session, if there is a place for it; its guest
/// notices nothing. An empty instance is destroyed. A unit that is a whole GPU is drained together with its GPU.
#[utoipa::path(post, path = "/v1/units/{unit}/drain", tag = "units", operation_id = "drain_unit",
    params(("unit" = u32, Path, description = "Number of the unit")),
    responses((status = 204, description = "No new VM is placed on the unit"), ChangeErrors))]
pub(crate) async fn drain(
    State(api): State<Api>,
    caller: Caller,
    Number(unit): Number,
) -> Result<StatusCode, RequestRefusal> {
    // The unit may be gone at the time of the answer.
    let drain = move |registry: Rc<Registry>| async move { registry.drain_unit(&caller, unit, true).await };
    api.mailbox.call(drain).await.map(|()| StatusCode::NO_CONTENT)
}

/// Takes a quarantined unit, or else a drained unit, back into service.
#[utoipa::path(post, path = "/v1/units/{unit}/readmit", tag = "units", operation_id = "readmit_unit",
    params(("unit" = u32, Path, description = "Number of the unit")),
    responses((status = 200, body = Unit), ChangeErrors))]
pub(crate) async fn readmit(
    State(api): State<Api>,
    caller: Caller,
    Number(unit): Number,
) -> Result<Json<Unit>, RequestRefusal> {
    let readmit = move |registry: Rc<Registry>| async move {
        registry.readmit_unit(&caller, unit).await?;
        registry.find_unit(&caller, unit)
    };
    api.mailbox.call(readmit).await.map(Json)
}
