//! `/v1/host`: the daemon itself.

use std::rc::Rc;

use axum::{Json, extract::State};
use sluice_api::v1::{EventCount, Host};

use crate::{
    api::Api,
    api::error::{Errors, RequestRefusal},
    caller::Caller,
    registry::Registry,
};

/// Shows the daemon.
#[utoipa::path(get, path = "/v1/host", tag = "host", operation_id = "get_host",
    responses((status = 200, body = Host), Errors))]
pub(crate) async fn host(State(api): State<Api>, caller: Caller) -> Result<Json<Host>, RequestRefusal> {
    caller.may_read()?;
    let get = move |registry: Rc<Registry>| async move {
        let counts = registry.unit_events.counts();
        Ok(Host {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            process: std::process::id(),
            launcher_process: registry.launching.process(),
            inventory_process: registry.inventory.as_ref().and_then(|inventory| inventory.process()),
            vm_numbers: registry.configuration.vm_numbers.to_string(),
            driver: registry.configuration.driver.clone(),
            scrub: registry.configuration.scrub,
            recovered: registry.checkpoint.recovered().map(str::to_owned),
            events: counts
                .into_iter()
                .map(|(kind, vm, count)| EventCount { kind: kind.to_owned(), vm, count })
                .collect(),
        })
    };
    api.mailbox.call(get).await.map(Json)
}
