//! `/v1/usage`: what was used, for billing.

use std::rc::Rc;

use axum::{Json, extract::State};
use serde::Serialize;
use utoipa::ToSchema;

use crate::{
    api::Api,
    api::error::Errors,
    caller::Caller,
    error::Error,
    records::usage::{Figures, ProjectIdentity},
    registry::Registry,
};

/// What one used. Figures only grow, also across restarts.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct Used {
    /// Its name, which a VM or project that is gone may have had before.
    id: String,
    /// A VM's or project's number.
    #[serde(skip_serializing_if = "Option::is_none")]
    number: Option<u32>,
    /// When a VM was made, in seconds since 1970; with its number it tells the VM apart from others of its name.
    #[serde(skip_serializing_if = "Option::is_none")]
    created: Option<u64>,
    /// A VM's or project's organisation.
    #[serde(skip_serializing_if = "Option::is_none")]
    organisation: Option<String>,
    /// A VM's project.
    #[serde(skip_serializing_if = "Option::is_none")]
    project: Option<String>,
    /// Bytes of device memory lent, times seconds.
    memory_byte_seconds: f64,
    /// Seconds of GPU time.
    gpu_seconds: f64,
    /// Kernels launched, by its workers' word.
    launches: u64,
    /// Copies, by its workers' word.
    copies: u64,
    /// Bytes that were copied, by its workers' word.
    copied_bytes: u64,
    /// Calls of its programs that reached the host, by its workers' word.
    calls: u64,
    /// Seconds in which it existed; of all its VMs together for others than a VM.
    seconds: f64,
    /// Sessions that got a worker.
    sessions: u64,
}

/// What was used.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct Usage {
    /// By VM, those that are gone included until there are too many.
    vms: Vec<Used>,
    /// By project, with all VMs it ever had.
    projects: Vec<Used>,
    /// By organisation, with all VMs it ever had.
    organisations: Vec<Used>,
    /// By all VMs there ever were; for those who may look at everything.
    #[serde(skip_serializing_if = "Option::is_none")]
    host: Option<Used>,
}

impl Used {
    fn of(id: &str, figures: &Figures) -> Self {
        Self {
            id: id.to_owned(),
            number: None,
            created: None,
            organisation: None,
            project: None,
            memory_byte_seconds: figures.byte_seconds,
            gpu_seconds: figures.gpu_seconds,
            launches: figures.launches,
            copies: figures.copies,
            copied_bytes: figures.copied,
            calls: figures.calls,
            seconds: figures.seconds,
            sessions: figures.sessions,
        }
    }
}

impl Registry {
    fn show_usage(&self, caller: &Caller) -> Usage {
        let book = self.usage.book();
        let may_see = |organisation: Option<&String>, project: Option<&String>| {
            caller.may_see(organisation.map(String::as_str), project.map(String::as_str)).is_ok()
        };
        let vms = book.vms.iter().filter(|(vm, _)| may_see(vm.organisation.as_ref(), vm.project.as_ref()));
        let vms = vms.map(|(vm, figures)| Used {
            number: vm.number,
            created: Some(vm.created).filter(|created| *created > 0),
            organisation: vm.organisation.clone(),
            project: vm.project.clone(),
            ..Used::of(&vm.name, figures)
        });
        let is_seen = |project: &ProjectIdentity| may_see(project.organisation.as_ref(), Some(&project.name));
        let projects = book.projects.iter().filter(|(project, _)| is_seen(project));
        let projects = projects.map(|(project, figures)| Used {
            number: project.number,
            organisation: project.organisation.clone(),
            ..Used::of(&project.name, figures)
        });
        let organisations = book.organisations.iter().filter(|(id, _)| may_see(Some(id), None));
        Usage {
            vms: vms.collect(),
            projects: projects.collect(),
            organisations: organisations.map(|(id, figures)| Used::of(id, figures)).collect(),
            host: caller.may_read().is_ok().then(|| Used::of("host", &book.host)),
        }
    }
}

/// Shows what was used.
///
/// As of the last few seconds: what is shown has been written down before, so that no restart takes it back.
#[utoipa::path(get, path = "/v1/usage", tag = "usage", operation_id = "get_usage",
    responses((status = 200, body = Usage), Errors))]
pub(crate) async fn usage(State(api): State<Api>, caller: Caller) -> Result<Json<Usage>, Error> {
    api.bridge
        .call(move |registry: Rc<Registry>| async move { Ok(registry.show_usage(&caller)) })
        .await
        .map(Json)
}
