//! `/v1/gpus`, `/v1/units`: devices, and what of them is lent.

use std::rc::Rc;

use axum::{Json, extract::State};
use serde::Serialize;
use utoipa::ToSchema;

use crate::{
    api::{
        Api,
        error::{ChangeErrors, Error, Errors},
        extract::Number,
        peer::Caller,
    },
    registry::Registry,
    unit::Unit as Room,
};

/// A GPU.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct Gpu {
    /// Its ordinal.
    gpu: u32,
    /// Its units.
    units: Vec<u32>,
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
    /// Its arbiter's process.
    #[serde(skip_serializing_if = "Option::is_none")]
    arbiter_process: Option<u32>,
    /// Its memory, as of the last second; nothing while it is not known.
    #[serde(skip_serializing_if = "Option::is_none")]
    memory: Option<UnitMemory>,
    /// Messages of an epoch that was over.
    stale_epoch_messages: u64,
}

/// What a unit is.
#[derive(Clone, Copy, Debug, Serialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum UnitKind {
    /// A whole GPU, shared by time-slice.
    TimeSlice,
}

/// Whether a unit lends.
#[derive(Clone, Copy, Debug, Serialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum UnitState {
    /// Its memory is being taken and made clean.
    Starting,
    /// It lends.
    Lending,
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
    fn show_unit(&self, unit: &Room) -> Unit {
        let reason = self.checkpoint.quarantine(unit.number());
        Unit {
            unit: unit.number(),
            gpu: unit.number(),
            kind: UnitKind::TimeSlice,
            state: match (&reason, unit.lendable()) {
                (Some(_), _) => UnitState::Quarantined,
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
        let found = self.units.iter().find(|known| known.number() == unit);
        found.map(|unit| self.show_unit(unit)).ok_or_else(|| Error::not_found("unit", &unit.to_string()))
    }
}

/// Lists GPUs.
#[utoipa::path(get, path = "/v1/gpus", tag = "units", operation_id = "list_gpus",
    responses((status = 200, body = Gpus), Errors))]
pub(crate) async fn gpus(State(api): State<Api>, caller: Caller) -> Result<Json<Gpus>, Error> {
    caller.may_read()?;
    let list = move |registry: Rc<Registry>| async move {
        let gpus = registry.units.iter().map(|unit| Gpu { gpu: unit.number(), units: vec![unit.number()] });
        let inventory = registry.inventory.as_ref().is_some_and(|inventory| inventory.process().is_some());
        Ok(Gpus { gpus: gpus.collect(), inventory })
    };
    api.bridge.call(list).await.map(Json)
}

/// Lists placement units.
#[utoipa::path(get, path = "/v1/units", tag = "units", operation_id = "list_units",
    responses((status = 200, body = Units), Errors))]
pub(crate) async fn list(State(api): State<Api>, caller: Caller) -> Result<Json<Units>, Error> {
    caller.may_read()?;
    let list = move |registry: Rc<Registry>| async move {
        Ok(Units { units: registry.units.iter().map(|unit| registry.show_unit(unit)).collect() })
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
    api.bridge.call(move |registry| async move { registry.find_unit(&caller, unit) }).await.map(Json)
}

/// Takes a quarantined unit back into service.
#[utoipa::path(post, path = "/v1/units/{unit}/readmit", tag = "units", operation_id = "readmit_unit",
    params(("unit" = u32, Path, description = "Its number")),
    responses((status = 200, body = Unit), ChangeErrors))]
pub(crate) async fn readmit(
    State(api): State<Api>,
    caller: Caller,
    Number(unit): Number,
) -> Result<Json<Unit>, Error> {
    let readmit = move |registry: Rc<Registry>| async move {
        registry.readmit_unit(&caller, unit)?;
        registry.find_unit(&caller, unit)
    };
    api.bridge.call(readmit).await.map(Json)
}
