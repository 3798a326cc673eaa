//! `/v1/organisations`, `/v1/projects`: owners of VMs, and the quotas that their VMs share.

use std::rc::Rc;

use axum::{Json, extract::State, http::StatusCode};
use sluice_api::{
    Error,
    v1::{
        Limits, NUMBER, Organisation, OrganisationRequest, Organisations, Owner, OwnerRequest, Project,
        ProjectRequest, Projects,
    },
};

use super::{status, vms};
use crate::{
    api::Api,
    api::error::{ChangeErrors, Errors, RequestRefusal},
    api::extract::{Body, Id},
    caller::Caller,
    records::state::objects::{self, Ancestor},
    registry::Registry,
};

/// Maximum number of sizes in limits.
const SIZES: usize = 64;

/// Builds the stored limits from a request.
fn kept(request: Limits) -> Result<objects::TenantLimits, Error> {
    let usual = objects::TenantLimits::default();
    if request.sizes.as_ref().is_some_and(|sizes| sizes.len() > SIZES) {
        return Err(Error::invalid(format!("limits.sizes names more than {SIZES}")));
    }
    request.sizes.iter().flatten().try_for_each(|name| Id::check(name))?;
    let within =
        |field: &str, value, least, most| vms::within(&format!("limits.{field}"), value, least, most);
    let pinned = vms::bytes("limits.pinned_bytes", request.pinned_bytes)?;
    if pinned == Some(0) {
        return Err(Error::invalid("limits.pinned_bytes is 0; without it there is no limit"));
    }
    Ok(objects::TenantLimits {
        sizes: request.sizes,
        weight: within("weight", request.weight, 1, 10_000)?.unwrap_or(usual.weight),
        priority: request.priority.unwrap_or(usual.priority),
        cap_permille: within("cap_permille", request.cap_permille, 1, 1000)?.unwrap_or(0),
        guarantee_permille: within("guarantee_permille", request.guarantee_permille, 0, 1000)?.unwrap_or(0),
        isolation: request.isolation.unwrap_or(usual.isolation),
        headroom: vms::bytes("limits.headroom_bytes", request.headroom_bytes)?.unwrap_or(0),
        pinned: pinned.unwrap_or(0),
        readmit_after: within("readmit_after_seconds", request.readmit_after_seconds, 1, NUMBER)?
            .unwrap_or(0),
        unit_choice: request.unit_choice,
        vms_per_owner: within("vms_per_owner", request.vms_per_owner, 0, NUMBER)?
            .unwrap_or(usual.vms_per_owner),
    })
}

/// Builds the answer from stored limits.
fn shown(kept: objects::TenantLimits) -> Limits {
    Limits {
        sizes: kept.sizes,
        weight: Some(kept.weight),
        priority: Some(kept.priority),
        cap_permille: Some(kept.cap_permille).filter(|cap| *cap > 0),
        guarantee_permille: Some(kept.guarantee_permille),
        isolation: Some(kept.isolation),
        headroom_bytes: Some(kept.headroom),
        pinned_bytes: Some(kept.pinned).filter(|bytes| *bytes > 0),
        readmit_after_seconds: Some(kept.readmit_after).filter(|seconds| *seconds > 0),
        unit_choice: kept.unit_choice,
        vms_per_owner: Some(kept.vms_per_owner),
    }
}

fn wanted(request: OwnerRequest, organisation: Option<String>) -> Result<Ancestor, Error> {
    let memory = vms::memory(Some(request.memory_bytes))?.unwrap_or(0);
    let vms = vms::within("vms", request.vms, 0, NUMBER)?;
    let limits = request.limits.map(kept).transpose()?;
    Ok(Ancestor { number: 0, organisation, memory, vms, limits })
}

impl Registry {
    fn lent(&self, ancestor: u32) -> u64 {
        let all = self.vm_set.all();
        let of = all.iter().filter(|vm| vm.is_of(ancestor));
        of.flat_map(|vm| self.units.iter().filter_map(|unit| unit.last_of_vm(vm.id())))
            .map(|has| has.lent)
            .sum()
    }

    fn show_owner(&self, id: &str, found: Ancestor) -> Owner {
        Owner {
            id: id.to_owned(),
            number: found.number,
            memory_bytes: found.memory,
            lent_bytes: self.lent(found.number),
            vms: found.vms,
            limits: found.limits.map(shown),
        }
    }

    fn show_organisation(&self, caller: &Caller, id: &str) -> Result<Organisation, Error> {
        caller.may_see(Some(id), None)?;
        let found = self.organisation(id).ok_or_else(|| Error::not_found("organisation", id))?;
        Ok(Organisation { owner: self.show_owner(id, found) })
    }

    fn show_project(&self, caller: &Caller, id: &str) -> Result<Project, Error> {
        let found = self.project(id);
        let organisation = found.as_ref().and_then(|found| found.organisation.clone());
        caller.may_see(organisation.as_deref(), Some(id))?;
        let found = found.ok_or_else(|| Error::not_found("project", id))?;
        Ok(Project { owner: self.show_owner(id, found), organisation })
    }
}

/// Lists organisations.
#[utoipa::path(get, path = "/v1/organisations", tag = "quota tree", operation_id = "list_organisations",
    responses((status = 200, body = Organisations), Errors))]
pub(crate) async fn list_organisations(
    State(api): State<Api>,
    caller: Caller,
) -> Result<Json<Organisations>, RequestRefusal> {
    let list = move |registry: Rc<Registry>| async move {
        let names: Vec<_> = registry.checkpoint.objects().organisations.keys().cloned().collect();
        let organisations =
            names.iter().filter_map(|id| registry.show_organisation(&caller, id).ok()).collect();
        Ok(Organisations { organisations })
    };
    api.mailbox.call(list).await.map(Json)
}

/// Shows an organisation.
#[utoipa::path(get, path = "/v1/organisations/{id}", tag = "quota tree", operation_id = "get_organisation",
    params(("id" = String, Path, description = "Name of the organisation", pattern = "^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")),
    responses((status = 200, body = Organisation), Errors))]
pub(crate) async fn get_organisation(
    State(api): State<Api>,
    caller: Caller,
    Id(id): Id,
) -> Result<Json<Organisation>, RequestRefusal> {
    api.mailbox.call(move |registry| async move { registry.show_organisation(&caller, &id) }).await.map(Json)
}

/// Creates an organisation, or changes its quota and limits.
///
/// A new quota applies at once to new leases. Memory lent beyond it is reclaimed gradually.
#[utoipa::path(put, path = "/v1/organisations/{id}", tag = "quota tree", operation_id = "put_organisation",
    request_body = OrganisationRequest,
    params(("id" = String, Path, description = "Name of the organisation", pattern = "^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")),
    responses((status = 200, description = "The existing object matches the request", body = Organisation),
        (status = 201, description = "The object was created", body = Organisation), ChangeErrors))]
pub(crate) async fn put_organisation(
    State(api): State<Api>,
    caller: Caller,
    Id(id): Id,
    Body(request): Body<OrganisationRequest>,
) -> Result<(StatusCode, Json<Organisation>), RequestRefusal> {
    let put = move |registry: Rc<Registry>| async move {
        let wanted = wanted(request.owner, None)?;
        let put = registry.put_organisation(&caller, &id, wanted).await?;
        Ok((status(put), Json(registry.show_organisation(&caller, &id)?)))
    };
    api.mailbox.call(put).await
}

/// Deletes an empty organisation. Succeeds if the organisation does not exist.
#[utoipa::path(delete, path = "/v1/organisations/{id}", tag = "quota tree", operation_id = "delete_organisation",
    params(("id" = String, Path, description = "Name of the organisation", pattern = "^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")),
    responses((status = 204, description = "The object does not exist any more"), ChangeErrors))]
pub(crate) async fn delete_organisation(
    State(api): State<Api>,
    caller: Caller,
    Id(id): Id,
) -> Result<StatusCode, RequestRefusal> {
    api.mailbox.call(move |registry| async move { registry.delete_organisation(&caller, &id).await }).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Lists projects.
#[utoipa::path(get, path = "/v1/projects", tag = "quota tree", operation_id = "list_projects",
    responses((status = 200, body = Projects), Errors))]
pub(crate) async fn list_projects(
    State(api): State<Api>,
    caller: Caller,
) -> Result<Json<Projects>, RequestRefusal> {
    let list = move |registry: Rc<Registry>| async move {
        let names: Vec<_> = registry.checkpoint.objects().projects.keys().cloned().collect();
        let projects = names.iter().filter_map(|id| registry.show_project(&caller, id).ok()).collect();
        Ok(Projects { projects })
    };
    api.mailbox.call(list).await.map(Json)
}

/// Shows a project.
#[utoipa::path(get, path = "/v1/projects/{id}", tag = "quota tree", operation_id = "get_project",
    params(("id" = String, Path, description = "Name of the project", pattern = "^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")),
    responses((status = 200, body = Project), Errors))]
pub(crate) async fn get_project(
    State(api): State<Api>,
    caller: Caller,
    Id(id): Id,
) -> Result<Json<Project>, RequestRefusal> {
    api.mailbox.call(move |registry| async move { registry.show_project(&caller, &id) }).await.map(Json)
}

/// Creates a project, or changes its quota and limits.
#[utoipa::path(put, path = "/v1/projects/{id}", tag = "quota tree", operation_id = "put_project",
    request_body = ProjectRequest,
    params(("id" = String, Path, description = "Name of the project", pattern = "^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")),
    responses((status = 200, description = "The existing object matches the request", body = Project),
        (status = 201, description = "The object was created", body = Project), ChangeErrors))]
pub(crate) async fn put_project(
    State(api): State<Api>,
    caller: Caller,
    Id(id): Id,
    Body(request): Body<ProjectRequest>,
) -> Result<(StatusCode, Json<Project>), RequestRefusal> {
    let put = move |registry: Rc<Registry>| async move {
        if let Some(organisation) = &request.organisation {
            Id::check(organisation)?;
        }
        let wanted = wanted(request.owner, request.organisation)?;
        let put = registry.put_project(&caller, &id, wanted).await?;
        Ok((status(put), Json(registry.show_project(&caller, &id)?)))
    };
    api.mailbox.call(put).await
}

/// Deletes a project without VMs. Succeeds if the project does not exist.
#[utoipa::path(delete, path = "/v1/projects/{id}", tag = "quota tree", operation_id = "delete_project",
    params(("id" = String, Path, description = "Name of the project", pattern = "^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")),
    responses((status = 204, description = "The object does not exist any more"), ChangeErrors))]
pub(crate) async fn delete_project(
    State(api): State<Api>,
    caller: Caller,
    Id(id): Id,
) -> Result<StatusCode, RequestRefusal> {
    api.mailbox.call(move |registry| async move { registry.delete_project(&caller, &id).await }).await?;
    Ok(StatusCode::NO_CONTENT)
}
