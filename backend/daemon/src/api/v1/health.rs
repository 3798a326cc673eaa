//! `/healthz`, `/readyz`, `/metrics`: for those who watch over the daemon.

use std::{fmt::Write as _, rc::Rc};

use axum::{
    Json,
    extract::State,
    http::{HeaderName, header},
};
use serde::Serialize;
use utoipa::ToSchema;

use crate::{
    api::{
        Api,
        error::{Code, Error, Errors},
        peer::Caller,
    },
    registry::Registry,
    vm::Phase,
};

/// That it is well.
#[derive(Clone, Copy, Debug, Serialize, ToSchema)]
pub(crate) struct Well {
    /// Always true.
    ok: bool,
}

/// Says that the daemon answers.
#[utoipa::path(get, path = "/healthz", tag = "health", operation_id = "healthz",
    responses((status = 200, body = Well), Errors))]
pub(crate) async fn healthz(State(api): State<Api>, _caller: Caller) -> Result<Json<Well>, Error> {
    // Asked of the thread that everything depends on, not of the one that happens to hear it.
    api.bridge.call(|_| async { Ok(Well { ok: true }) }).await.map(Json)
}

/// Says whether the daemon does what it is there for: every unit lends, and VMs have their devices.
#[utoipa::path(get, path = "/readyz", tag = "health", operation_id = "readyz",
    responses((status = 200, body = Well), Errors))]
pub(crate) async fn readyz(State(api): State<Api>, _caller: Caller) -> Result<Json<Well>, Error> {
    let ready = |registry: Rc<Registry>| async move {
        let mut cause = Vec::new();
        if !registry.ready.get() {
            cause.push("not every VM that was there has its device again".to_owned());
        }
        for unit in registry.units.iter().filter(|unit| unit.lendable().is_none()) {
            cause.push(format!("unit {} does not lend yet", unit.number()));
        }
        let failed = registry.roster.all().iter().filter(|vm| matches!(vm.phase(), Phase::Failed(_))).count();
        if failed > 0 {
            cause.push(format!("{failed} VMs have no device"));
        }
        if cause.is_empty() {
            return Ok(Well { ok: true });
        }
        Err(Error { cause, ..Error::new(Code::Unavailable, "sluiced is not ready") })
    };
    api.bridge.call(ready).await.map(Json)
}

/// Metrics, in the text form of Prometheus.
#[utoipa::path(get, path = "/metrics", tag = "health", operation_id = "metrics",
    responses((status = 200, body = String, content_type = "text/plain"), Errors))]
pub(crate) async fn metrics(
    State(api): State<Api>,
    caller: Caller,
) -> Result<([(HeaderName, &'static str); 1], String), Error> {
    caller.may_read()?;
    let write = |registry: Rc<Registry>| async move { Ok(registry.metrics()) };
    let text = api.bridge.call(write).await?;
    Ok(([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text))
}

impl Registry {
    fn metrics(&self) -> String {
        let mut text = String::new();
        let mut family = |name: &str, kind: &str, help: &str, samples: Vec<(String, u64)>| {
            // Writing to a String cannot fail.
            _ = writeln!(text, "# HELP sluice_{name} {help}\n# TYPE sluice_{name} {kind}");
            for (labels, value) in samples {
                _ = writeln!(text, "sluice_{name}{labels} {value}");
            }
        };
        let units = |figure: fn(crate::unit::UnitReport) -> u64| {
            let known = self.units.iter().filter_map(|unit| Some((unit.number(), unit.last()?)));
            known.map(|(unit, report)| (format!("{{unit=\"{unit}\"}}"), figure(report))).collect()
        };
        family("unit_memory_total_bytes", "gauge", "Device memory in custody.", units(|unit| unit.total));
        family("unit_memory_lent_bytes", "gauge", "Device memory lent to VMs.", units(|unit| unit.lent));
        family("unit_memory_clean_bytes", "gauge", "Device memory to be lent.", units(|unit| unit.clean));
        family("unit_memory_dirty_bytes", "gauge", "Device memory to be scrubbed.", units(|unit| unit.dirty));
        let vms = self.roster.all();
        family("vms", "gauge", "VMs.", vec![(String::new(), u64::try_from(vms.len()).unwrap_or(u64::MAX))]);
        let sessions: usize = vms.iter().map(|vm| vm.sessions().len()).sum();
        family(
            "sessions",
            "gauge",
            "Guest processes with a worker.",
            vec![(String::new(), u64::try_from(sessions).unwrap_or(u64::MAX))],
        );
        text
    }
}
