//! `/healthz`, `/readyz`, `/metrics`: health, readiness and metrics.

use std::rc::Rc;

use axum::{
    Json,
    extract::State,
    http::{HeaderName, header},
};
use sluice_api::{Code, Error, v1::Healthy};

use crate::{
    api::Api,
    api::error::{Errors, RequestRefusal},
    api::long_body::LongBody,
    caller::Caller,
    registry::Registry,
    vms::vm::VmPhase,
};

/// Checks that the daemon answers.
#[utoipa::path(get, path = "/healthz", tag = "health", operation_id = "healthz",
    responses((status = 200, body = Healthy), Errors))]
pub(crate) async fn healthz(
    State(api): State<Api>,
    _caller: Caller,
) -> Result<Json<Healthy>, RequestRefusal> {
    // The question goes to the main thread, on which everything depends, and not to the thread that received the request.
    api.mailbox.call(|_| async { Ok(Healthy { ok: true }) }).await.map(Json)
}

/// Checks that the daemon is ready: every unit lends, and every VM has its device.
#[utoipa::path(get, path = "/readyz", tag = "health", operation_id = "readyz",
    responses((status = 200, body = Healthy), Errors))]
pub(crate) async fn readyz(State(api): State<Api>, caller: Caller) -> Result<Json<Healthy>, RequestRefusal> {
    let ready = |registry: Rc<Registry>| async move {
        let mut of_host = Vec::new();
        if !registry.ready.get() {
            of_host.push("VMs of the last daemon still wait for their devices".to_owned());
        }
        for unit in registry.units.iter().filter(|unit| unit.lendable().is_none()) {
            of_host.push(format!("unit {} does not lend yet", unit.number()));
        }
        let mine = registry.see_all(&caller);
        let failed = mine.iter().filter(|(_, vm)| matches!(vm.phase(), VmPhase::Failed(_))).count();
        if of_host.is_empty() && failed == 0 {
            return Ok(Healthy { ok: true });
        }
        // The answer to a tenant counts its own VMs and names no unit.
        let mut cause = if caller.may_read().is_ok() { of_host } else { Vec::new() };
        if failed > 0 {
            cause.push(format!("{failed} VMs have no device"));
        }
        Err(Error { cause, ..Error::new(Code::Unavailable, "sluiced is not ready") })
    };
    api.mailbox.call(ready).await.map(Json)
}

/// Reads metrics, in the text form of OpenMetrics, which Prometheus reads.
#[utoipa::path(get, path = "/metrics", tag = "health", operation_id = "metrics",
    responses((status = 200, body = String, content_type = "application/openmetrics-text"), Errors))]
pub(crate) async fn metrics(
    State(api): State<Api>,
    caller: Caller,
) -> Result<([(HeaderName, &'static str); 1], LongBody), RequestRefusal> {
    caller.may_read()?;
    let write = |registry: Rc<Registry>| async move {
        registry
            .metrics()
            .map_err(|error| Error::new(Code::Internal, "the metrics cannot be written").because(error))
    };
    let text = api.mailbox.call(write).await?;
    Ok(([(header::CONTENT_TYPE, "application/openmetrics-text; version=1.0.0; charset=utf-8")], text))
}
