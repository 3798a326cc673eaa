//! `/v1/host`: the daemon itself.

use std::rc::Rc;

use axum::{Json, extract::State};
use serde::Serialize;
use utoipa::ToSchema;

use crate::{api::Api, api::error::Errors, caller::Caller, error::Error, registry::Registry};

/// The daemon.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct Host {
    /// Its version.
    version: String,
    /// Its process.
    process: u32,
    /// The launcher's process, if one runs.
    #[serde(skip_serializing_if = "Option::is_none")]
    launcher_process: Option<u32>,
    /// The inventory's process, if one runs.
    #[serde(skip_serializing_if = "Option::is_none")]
    inventory_process: Option<u32>,
    /// Numbers for VMs that are made at run time, the first and how many.
    #[serde(skip_serializing_if = "Option::is_none")]
    vm_numbers: Option<String>,
    /// The driver library that it has arbiters and workers load.
    driver: String,
    /// Whether memory is made clean between owners; false in tests that show what that is for.
    scrub: bool,
    /// What had to be left behind of the last checkpoint, if it could not be understood.
    #[serde(skip_serializing_if = "Option::is_none")]
    recovered: Option<String>,
    /// Events since the start, by kind and VM.
    events: Vec<Count>,
}

/// How often something has happened.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct Count {
    /// What.
    kind: String,
    /// The number of the VM; 0 for none.
    vm: u32,
    /// How often.
    count: u64,
}

/// Shows the daemon.
#[utoipa::path(get, path = "/v1/host", tag = "host", operation_id = "get_host",
    responses((status = 200, body = Host), Errors))]
pub(crate) async fn host(State(api): State<Api>, caller: Caller) -> Result<Json<Host>, Error> {
    caller.may_read()?;
    let get = move |registry: Rc<Registry>| async move {
        let counts = registry.custodian.counts();
        Ok(Host {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            process: std::process::id(),
            launcher_process: registry.launching.process(),
            inventory_process: registry.inventory.as_ref().and_then(|inventory| inventory.process()),
            vm_numbers: registry.configuration.vm_numbers.map(|numbers| numbers.to_string()),
            driver: registry.configuration.driver.clone(),
            scrub: registry.configuration.scrub,
            recovered: registry.checkpoint.recovered().map(str::to_owned),
            events: counts
                .into_iter()
                .map(|(kind, vm, count)| Count { kind: kind.to_owned(), vm, count })
                .collect(),
        })
    };
    api.bridge.call(get).await.map(Json)
}
