//! `/v1/usage`: usage figures, for billing.

use std::rc::Rc;

use axum::{Json, extract::State};
use sluice_api::v1::{ResourceUsage, Usage};

use crate::{
    api::Api,
    api::error::{Errors, RequestRefusal},
    caller::Caller,
    records::usage::{ProjectIdentity, UsageFigures},
    registry::Registry,
};

fn used(id: &str, figures: &UsageFigures) -> ResourceUsage {
    ResourceUsage {
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

impl Registry {
    fn show_usage(&self, caller: &Caller) -> Usage {
        let book = self.usage.book();
        let may_see = |organisation: Option<&String>, project: Option<&String>| {
            caller.may_see(organisation.map(String::as_str), project.map(String::as_str)).is_ok()
        };
        let vms = book.vms.iter().filter(|(vm, _)| may_see(vm.organisation.as_ref(), vm.project.as_ref()));
        let vms = vms.map(|(vm, figures)| ResourceUsage {
            number: vm.number,
            created: Some(vm.created).filter(|created| *created > 0),
            organisation: vm.organisation.clone(),
            project: vm.project.clone(),
            ..used(&vm.name, figures)
        });
        let is_seen = |project: &ProjectIdentity| may_see(project.organisation.as_ref(), Some(&project.name));
        let projects = book.projects.iter().filter(|(project, _)| is_seen(project));
        let projects = projects.map(|(project, figures)| ResourceUsage {
            number: project.number,
            organisation: project.organisation.clone(),
            ..used(&project.name, figures)
        });
        let organisations = book.organisations.iter().filter(|(id, _)| may_see(Some(id), None));
        Usage {
            vms: vms.collect(),
            projects: projects.collect(),
            organisations: organisations.map(|(id, figures)| used(id, figures)).collect(),
            host: caller.may_read().is_ok().then(|| used("host", &book.host)),
        }
    }
}

/// Shows usage.
///
/// Figures are a few seconds old: they are written to disk before they are shown, so no restart takes them back.
#[utoipa::path(get, path = "/v1/usage", tag = "usage", operation_id = "get_usage",
    responses((status = 200, body = Usage), Errors))]
pub(crate) async fn usage(State(api): State<Api>, caller: Caller) -> Result<Json<Usage>, RequestRefusal> {
    api.mailbox
        .call(move |registry: Rc<Registry>| async move { Ok(registry.show_usage(&caller)) })
        .await
        .map(Json)
}
