//! `/v1/gpus`, `/v1/units`: devices, and what of them is lent.

use std::rc::Rc;

use axum::{Json, extract::State, http::StatusCode};
use serde::{Deserialize, Serialize};
use sluice_messages::inventory::{WHOLE, uuid_text};
use sluice_placement::Standing;
use tokio::time::timeout;
use utoipa::ToSchema;

use super::vms::LOOK;
use crate::{
    api::Api,
    api::error::{ChangeErrors, Errors},
    api::extract::{Body, Number},
    caller::Caller,
    error::Error,
    placement::placer::Found,
    registry::Registry,
    units::unit::Unit as Room,
};

/// A GPU.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct Gpu {
    /// Its ordinal.
    gpu: u32,
    /// Its UUID, where the driver says it.
    #[serde(skip_serializing_if = "Option::is_none")]
    uuid: Option<String>,
    /// Its name, where the driver says it.
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    /// The NUMA node it is near.
    #[serde(skip_serializing_if = "Option::is_none")]
    numa_node: Option<u32>,
    /// Whether it is divided into instances.
    mig: bool,
    /// Whether it is from its next reset on, where that is another. Until then nobody uses it.
    #[serde(skip_serializing_if = "Option::is_none")]
    mig_pending: Option<bool>,
    /// Whether VMs come to it.
    state: GpuState,
    /// Its units.
    units: Vec<u32>,
    /// Instances that are not of Sluice; they are left alone.
    foreign_instances: u32,
    /// What is lost by how its instances lie: 0 where they could not lie better, towards 1 where they block nearly everything.
    #[serde(skip_serializing_if = "Option::is_none")]
    fragmentation: Option<f64>,
}

/// Whether VMs come to a GPU.
#[derive(Clone, Copy, Debug, Serialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum GpuState {
    /// They do.
    Open,
    /// None comes, and those that are there move away when they have no session.
    Draining,
    /// None comes.
    Quarantined,
}

/// GPUs.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct Gpus {
    /// All of them.
    gpus: Vec<Gpu>,
    /// Whether the driver's management library answers; what it would say is unknown while it does not.
    inventory: bool,
}

/// A placement unit: a GPU or an instance of one.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct Unit {
    /// Its number.
    unit: u32,
    /// The GPU it is of.
    gpu: u32,
    /// What it is.
    kind: UnitKind,
    /// Whether it lends.
    state: UnitState,
    /// Why it is quarantined.
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<String>,
    /// The kind of instance, by the driver's name or number.
    #[serde(skip_serializing_if = "Option::is_none")]
    profile: Option<String>,
    /// The first memory slice of the instance.
    #[serde(skip_serializing_if = "Option::is_none")]
    start: Option<u8>,
    /// The UUID of the instance, for tools of the host.
    #[serde(skip_serializing_if = "Option::is_none")]
    uuid: Option<String>,
    /// Whether the driver says how much memory each process has, so that memory which a driver takes beyond a grant is charged to the
    /// VM whose it is. Where it does not, as on every MIG instance, VMs of one organisation share the unit only with each other,
    /// unless the configuration says otherwise.
    figures_per_process: bool,
    /// VMs that have a place on it.
    vms: u32,
    /// Its arbiter's process.
    #[serde(skip_serializing_if = "Option::is_none")]
    arbiter_process: Option<u32>,
    /// Its memory, in lists as of the last second; nothing while it is not known.
    #[serde(skip_serializing_if = "Option::is_none")]
    memory: Option<UnitMemory>,
    /// Messages of an epoch that was over.
    stale_epoch_messages: u64,
}

/// What a unit is.
#[derive(Clone, Copy, Debug, Deserialize, Serialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum UnitKind {
    /// A whole GPU, shared by time-slice.
    TimeSlice,
    /// A MIG instance.
    Mig,
}

impl UnitKind {
    pub(super) const fn of(is_instance: bool) -> Self {
        if is_instance { Self::Mig } else { Self::TimeSlice }
    }
}

/// Whether a unit lends.
#[derive(Clone, Copy, Debug, Serialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum UnitState {
    /// Its memory is being taken and made clean.
    Starting,
    /// It lends.
    Lending,
    /// It lends to those that are there, none comes, and they move away when they have no session.
    Draining,
    /// It is out of service until an operator says otherwise.
    Quarantined,
}

/// A unit's memory in bytes.
#[derive(Clone, Copy, Debug, Serialize, ToSchema)]
pub(crate) struct UnitMemory {
    /// In custody.
    total_bytes: u64,
    /// Lent.
    lent_bytes: u64,
    /// Clean, to be lent.
    clean_bytes: u64,
    /// Waiting to be scrubbed.
    dirty_bytes: u64,
    /// Released for the driver to grow into.
    headroom_bytes: u64,
    /// Not proven clean after all tries, and never lent again.
    suspect_bytes: u64,
}

/// Units.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct Units {
    /// All of them.
    units: Vec<Unit>,
}

impl Registry {
    fn show_gpus(&self) -> Vec<Gpu> {
        let fleet = self.placer.fleet();
        let show = |(at, found): (usize, &Rc<Found>)| {
            let planned = fleet.gpus().get(at);
            let units = self.units.iter().filter(|unit| unit.place().device == found.ordinal);
            Gpu {
                gpu: found.ordinal,
                uuid: found.name.is_some().then(|| format!("GPU-{}", uuid_text(&found.uuid))),
                name: found.name.clone(),
                numa_node: found.node,
                mig: !found.is_whole(),
                mig_pending: self.placer.will_divide(at),
                state: match planned.map(|gpu| gpu.standing) {
                    _ if found.is_whole() && self.checkpoint.quarantine(found.ordinal).is_some() => {
                        GpuState::Quarantined
                    }
                    _ if self.placer.is_draining(found.ordinal) => GpuState::Draining,
                    Some(Standing::Quarantined) => GpuState::Quarantined,
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

    fn show_unit(&self, unit: &Room) -> Unit {
        let reason = self.checkpoint.quarantine(unit.number());
        let planned = self.placer.planned(unit.number());
        let spotted = planned.and_then(|planned| self.placer.spotted(planned));
        Unit {
            unit: unit.number(),
            gpu: unit.place().device,
            kind: UnitKind::of(unit.place().instance != WHOLE),
            start: spotted.as_ref().and_then(|spotted| spotted.placement).map(|placement| placement.start),
            profile: spotted
                .as_ref()
                .and_then(|spotted| spotted.profile.clone())
                .map(|(number, name)| name.unwrap_or_else(|| number.to_string())),
            uuid: unit.place().visible.variable().filter(|_| unit.place().instance != WHOLE),
            figures_per_process: unit.has_figures(),
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
pub(crate) async fn gpus(State(api): State<Api>, caller: Caller) -> Result<Json<Gpus>, Error> {
    caller.may_read()?;
    let list = move |registry: Rc<Registry>| async move {
        let inventory = registry.inventory.as_ref().is_some_and(|inventory| inventory.process().is_some());
        Ok(Gpus { gpus: registry.show_gpus(), inventory })
    };
    api.bridge.call(list).await.map(Json)
}

/// Shows a GPU.
#[utoipa::path(get, path = "/v1/gpus/{gpu}", tag = "units", operation_id = "get_gpu",
    params(("gpu" = u32, Path, description = "Its ordinal")),
    responses((status = 200, body = Gpu), Errors))]
pub(crate) async fn gpu(
    State(api): State<Api>,
    caller: Caller,
    Number(gpu): Number,
) -> Result<Json<Gpu>, Error> {
    caller.may_read()?;
    api.bridge.call(move |registry| async move { registry.show_gpu(gpu) }).await.map(Json)
}

/// Has a GPU emptied.
///
/// No VM comes to it any more, and each that is there moves to another GPU as soon as it has no session, if there is a place for it. Its guest
/// notices nothing. VMs of the configuration file stay.
#[utoipa::path(post, path = "/v1/gpus/{gpu}/drain", tag = "units", operation_id = "drain_gpu",
    params(("gpu" = u32, Path, description = "Its ordinal")),
    responses((status = 200, body = Gpu), ChangeErrors))]
pub(crate) async fn drain_gpu(
    State(api): State<Api>,
    caller: Caller,
    Number(gpu): Number,
) -> Result<Json<Gpu>, Error> {
    let drain = move |registry: Rc<Registry>| async move {
        registry.drain_gpu(&caller, gpu, true).await?;
        registry.show_gpu(gpu)
    };
    api.bridge.call(drain).await.map(Json)
}

/// Has VMs come to a GPU again that was emptied.
#[utoipa::path(post, path = "/v1/gpus/{gpu}/readmit", tag = "units", operation_id = "readmit_gpu",
    params(("gpu" = u32, Path, description = "Its ordinal")),
    responses((status = 200, body = Gpu), ChangeErrors))]
pub(crate) async fn readmit_gpu(
    State(api): State<Api>,
    caller: Caller,
    Number(gpu): Number,
) -> Result<Json<Gpu>, Error> {
    let readmit = move |registry: Rc<Registry>| async move {
        registry.drain_gpu(&caller, gpu, false).await?;
        registry.show_gpu(gpu)
    };
    api.bridge.call(readmit).await.map(Json)
}

/// Whether a GPU is to be divided.
#[derive(Clone, Copy, Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct Division {
    /// Whether it is to be divided into instances.
    enabled: bool,
}

/// Switches a GPU to MIG mode, or out of it.
///
/// It must be drained and empty. Where the driver can switch only with a reset, `mig_pending` says what comes, and nobody uses the GPU
/// until the operator has reset it; then it goes on by itself. It stays drained until it is readmitted.
#[utoipa::path(put, path = "/v1/gpus/{gpu}/mig", tag = "units", operation_id = "put_gpu_mig", request_body = Division,
    params(("gpu" = u32, Path, description = "Its ordinal")),
    responses((status = 200, body = Gpu), ChangeErrors))]
pub(crate) async fn switch_mig(
    State(api): State<Api>,
    caller: Caller,
    Number(gpu): Number,
    Body(division): Body<Division>,
) -> Result<Json<Gpu>, Error> {
    let switch = move |registry: Rc<Registry>| async move {
        registry.switch_mig(&caller, gpu, division.enabled).await?;
        registry.show_gpu(gpu)
    };
    api.bridge.call(switch).await.map(Json)
}

/// Lists placement units.
#[utoipa::path(get, path = "/v1/units", tag = "units", operation_id = "list_units",
    responses((status = 200, body = Units), Errors))]
pub(crate) async fn list(State(api): State<Api>, caller: Caller) -> Result<Json<Units>, Error> {
    caller.may_read()?;
    let list = move |registry: Rc<Registry>| async move {
        Ok(Units { units: registry.units.iter().map(|unit| registry.show_unit(&unit)).collect() })
    };
    api.bridge.call(list).await.map(Json)
}

/// Shows a placement unit.
#[utoipa::path(get, path = "/v1/units/{unit}", tag = "units", operation_id = "get_unit",
    params(("unit" = u32, Path, description = "Its number")),
    responses((status = 200, body = Unit), Errors))]
pub(crate) async fn get(
    State(api): State<Api>,
    caller: Caller,
    Number(unit): Number,
) -> Result<Json<Unit>, Error> {
    let get = move |registry: Rc<Registry>| async move {
        registry.find_unit(&caller, unit)?;
        if let Some(room) = registry.units.get(unit) {
            // Where it does not answer at once, what it said last is shown.
            _ = timeout(LOOK, room.describe()).await;
        }
        registry.find_unit(&caller, unit)
    };
    api.bridge.call(get).await.map(Json)
}

/// Has a unit emptied.
///
/// No VM comes to it any more, and each that is there moves to another as soon as it has no session, if there is a place for it. Its guest
/// notices nothing. An instance that is empty is unmade. A unit that is all of a GPU is drained with it.
#[utoipa::path(post, path = "/v1/units/{unit}/drain", tag = "units", operation_id = "drain_unit",
    params(("unit" = u32, Path, description = "Its number")),
    responses((status = 204, description = "Nothing comes to it any more"), ChangeErrors))]
pub(crate) async fn drain(
    State(api): State<Api>,
    caller: Caller,
    Number(unit): Number,
) -> Result<StatusCode, Error> {
    // When it is answered the unit may be gone.
    let drain = move |registry: Rc<Registry>| async move { registry.drain_unit(&caller, unit, true).await };
    api.bridge.call(drain).await.map(|()| StatusCode::NO_CONTENT)
}

/// Takes a unit back into service that is quarantined, or else one that is drained.
#[utoipa::path(post, path = "/v1/units/{unit}/readmit", tag = "units", operation_id = "readmit_unit",
    params(("unit" = u32, Path, description = "Its number")),
    responses((status = 200, body = Unit), ChangeErrors))]
pub(crate) async fn readmit(
    State(api): State<Api>,
    caller: Caller,
    Number(unit): Number,
) -> Result<Json<Unit>, Error> {
    let readmit = move |registry: Rc<Registry>| async move {
        registry.readmit_unit(&caller, unit).await?;
        registry.find_unit(&caller, unit)
    };
    api.bridge.call(readmit).await.map(Json)
}
