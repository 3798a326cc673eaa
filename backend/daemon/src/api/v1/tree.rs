//! `/v1/organisations`, `/v1/projects`: who VMs belong to, and what all of theirs together may have.

use std::rc::Rc;

use axum::{Json, extract::State, http::StatusCode};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{status, vms};
use crate::{
    api::{
        Api,
        error::{ChangeErrors, Error, Errors},
        extract::{Body, Id},
        peer::Caller,
    },
    registry::Registry,
    state::objects::Ancestor,
};

/// An organisation as a client wants it.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct OrganisationRequest {
    /// Device memory that its VMs may have together, on all units.
    #[schema(minimum = 2097152, maximum = 4503599627370496_u64)]
    memory_bytes: u64,
    /// How many VMs it may have; as many as there can be if not given.
    #[serde(default)]
    #[schema(minimum = 0, maximum = 2147483647)]
    vms: Option<u32>,
}

/// A project as a client wants it.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct ProjectRequest {
    /// Device memory that its VMs may have together, on all units. Not more than its organisation's.
    #[schema(minimum = 2097152, maximum = 4503599627370496_u64)]
    memory_bytes: u64,
    /// How many VMs it may have; as many as there can be if not given.
    #[serde(default)]
    #[schema(minimum = 0, maximum = 2147483647)]
    vms: Option<u32>,
    /// Its organisation. Cannot be changed.
    #[serde(default)]
    #[schema(pattern = "^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
    organisation: Option<String>,
}

/// An organisation.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct Organisation {
    /// Its name.
    id: String,
    /// What processes and logs know it by.
    number: u32,
    /// Whether the configuration file names it; then it is changed there.
    configured: bool,
    /// Device memory that its VMs may have together.
    memory_bytes: u64,
    /// Device memory lent to its VMs, as of the last second.
    lent_bytes: u64,
    /// How many VMs it may have.
    #[serde(skip_serializing_if = "Option::is_none")]
    vms: Option<u32>,
}

/// A project.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct Project {
    /// Its name.
    id: String,
    /// What processes and logs know it by.
    number: u32,
    /// Whether the configuration file names it; then it is changed there.
    configured: bool,
    /// Its organisation.
    #[serde(skip_serializing_if = "Option::is_none")]
    organisation: Option<String>,
    /// Device memory that its VMs may have together.
    memory_bytes: u64,
    /// Device memory lent to its VMs, as of the last second.
    lent_bytes: u64,
    /// How many VMs it may have.
    #[serde(skip_serializing_if = "Option::is_none")]
    vms: Option<u32>,
}

/// Organisations.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct Organisations {
    /// Those that the caller may look at.
    organisations: Vec<Organisation>,
}

/// Projects.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct Projects {
    /// Those that the caller may look at.
    projects: Vec<Project>,
}

fn limits(memory: u64, vms: Option<u32>) -> Result<Ancestor, Error> {
    let memory = vms::memory(Some(memory))?.unwrap_or(0);
    let vms = vms::within("vms", vms, 0, vms::NUMBER)?;
    Ok(Ancestor { number: 0, organisation: None, memory, vms })
}

impl Registry {
    fn lent(&self, ancestor: u32) -> u64 {
        let all = self.roster.all();
        let of = all.iter().filter(|vm| vm.is_of(ancestor));
        of.flat_map(|vm| self.units.iter().filter_map(|unit| unit.last_of_vm(vm.id())))
            .map(|has| has.lent)
            .sum()
    }

    fn show_organisation(&self, caller: &Caller, id: &str) -> Result<Organisation, Error> {
        caller.may_see(Some(id), None)?;
        let found = self.organisation(id).ok_or_else(|| Error::not_found("organisation", id))?;
        Ok(Organisation {
            id: id.to_owned(),
            number: found.number,
            configured: self.configured.organisations.contains_key(id),
            memory_bytes: found.memory,
            lent_bytes: self.lent(found.number),
            vms: found.vms,
        })
    }

    fn show_project(&self, caller: &Caller, id: &str) -> Result<Project, Error> {
        let found = self.project(id);
        let organisation = found.as_ref().and_then(|found| found.organisation.clone());
        caller.may_see(organisation.as_deref(), Some(id))?;
        let found = found.ok_or_else(|| Error::not_found("project", id))?;
        Ok(Project {
            id: id.to_owned(),
            number: found.number,
            configured: self.configured.projects.contains_key(id),
            organisation,
            memory_bytes: found.memory,
            lent_bytes: self.lent(found.number),
            vms: found.vms,
        })
    }
}

/// Lists organisations.
#[utoipa::path(get, path = "/v1/organisations", tag = "quota tree", operation_id = "list_organisations",
    responses((status = 200, body = Organisations), Errors))]
pub(crate) async fn list_organisations(
    State(api): State<Api>,
    caller: Caller,
) -> Result<Json<Organisations>, Error> {
    let list = move |registry: Rc<Registry>| async move {
        let made: Vec<_> = registry.checkpoint.objects().organisations.keys().cloned().collect();
        let names = registry.configured.organisations.keys().cloned().chain(made);
        let organisations = names.filter_map(|id| registry.show_organisation(&caller, &id).ok()).collect();
        Ok(Organisations { organisations })
    };
    api.bridge.call(list).await.map(Json)
}

/// Shows an organisation.
#[utoipa::path(get, path = "/v1/organisations/{id}", tag = "quota tree", operation_id = "get_organisation",
    params(("id" = String, Path, description = "Its name", pattern = "^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")),
    responses((status = 200, body = Organisation), Errors))]
pub(crate) async fn get_organisation(
    State(api): State<Api>,
    caller: Caller,
    Id(id): Id,
) -> Result<Json<Organisation>, Error> {
    api.bridge.call(move |registry| async move { registry.show_organisation(&caller, &id) }).await.map(Json)
}

/// Makes an organisation, or changes what it may have.
///
/// What it may have holds at once for what is lent from now on; what is lent beyond it comes back by and by.
#[utoipa::path(put, path = "/v1/organisations/{id}", tag = "quota tree", operation_id = "put_organisation",
    request_body = OrganisationRequest,
    params(("id" = String, Path, description = "Its name", pattern = "^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")),
    responses((status = 200, description = "It is as said", body = Organisation),
        (status = 201, description = "It was made", body = Organisation), ChangeErrors))]
pub(crate) async fn put_organisation(
    State(api): State<Api>,
    caller: Caller,
    Id(id): Id,
    Body(request): Body<OrganisationRequest>,
) -> Result<(StatusCode, Json<Organisation>), Error> {
    let put = move |registry: Rc<Registry>| async move {
        let wanted = limits(request.memory_bytes, request.vms)?;
        let put = registry.put_organisation(&caller, &id, wanted).await?;
        Ok((status(put), Json(registry.show_organisation(&caller, &id)?)))
    };
    api.bridge.call(put).await
}

/// Takes an organisation away, in which there is nothing. One that is not there is gone already.
#[utoipa::path(delete, path = "/v1/organisations/{id}", tag = "quota tree", operation_id = "delete_organisation",
    params(("id" = String, Path, description = "Its name", pattern = "^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")),
    responses((status = 204, description = "It is gone"), ChangeErrors))]
pub(crate) async fn delete_organisation(
    State(api): State<Api>,
    caller: Caller,
    Id(id): Id,
) -> Result<StatusCode, Error> {
    api.bridge.call(move |registry| async move { registry.delete_organisation(&caller, &id).await }).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Lists projects.
#[utoipa::path(get, path = "/v1/projects", tag = "quota tree", operation_id = "list_projects",
    responses((status = 200, body = Projects), Errors))]
pub(crate) async fn list_projects(State(api): State<Api>, caller: Caller) -> Result<Json<Projects>, Error> {
    let list = move |registry: Rc<Registry>| async move {
        let made: Vec<_> = registry.checkpoint.objects().projects.keys().cloned().collect();
        let names = registry.configured.projects.keys().cloned().chain(made);
        let projects = names.filter_map(|id| registry.show_project(&caller, &id).ok()).collect();
        Ok(Projects { projects })
    };
    api.bridge.call(list).await.map(Json)
}

/// Shows a project.
#[utoipa::path(get, path = "/v1/projects/{id}", tag = "quota tree", operation_id = "get_project",
    params(("id" = String, Path, description = "Its name", pattern = "^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")),
    responses((status = 200, body = Project), Errors))]
pub(crate) async fn get_project(
    State(api): State<Api>,
    caller: Caller,
    Id(id): Id,
) -> Result<Json<Project>, Error> {
    api.bridge.call(move |registry| async move { registry.show_project(&caller, &id) }).await.map(Json)
}

/// Makes a project, or changes what it may have.
#[utoipa::path(put, path = "/v1/projects/{id}", tag = "quota tree", operation_id = "put_project",
    request_body = ProjectRequest,
    params(("id" = String, Path, description = "Its name", pattern = "^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")),
    responses((status = 200, description = "It is as said", body = Project),
        (status = 201, description = "It was made", body = Project), ChangeErrors))]
pub(crate) async fn put_project(
    State(api): State<Api>,
    caller: Caller,
    Id(id): Id,
    Body(request): Body<ProjectRequest>,
) -> Result<(StatusCode, Json<Project>), Error> {
    let put = move |registry: Rc<Registry>| async move {
        if let Some(organisation) = &request.organisation {
            Id::check(organisation)?;
        }
        let wanted =
            Ancestor { organisation: request.organisation, ..limits(request.memory_bytes, request.vms)? };
        let put = registry.put_project(&caller, &id, wanted).await?;
        Ok((status(put), Json(registry.show_project(&caller, &id)?)))
    };
    api.bridge.call(put).await
}

/// Takes a project away, in which there is no VM. One that is not there is gone already.
#[utoipa::path(delete, path = "/v1/projects/{id}", tag = "quota tree", operation_id = "delete_project",
    params(("id" = String, Path, description = "Its name", pattern = "^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")),
    responses((status = 204, description = "It is gone"), ChangeErrors))]
pub(crate) async fn delete_project(
    State(api): State<Api>,
    caller: Caller,
    Id(id): Id,
) -> Result<StatusCode, Error> {
    api.bridge.call(move |registry| async move { registry.delete_project(&caller, &id).await }).await?;
    Ok(StatusCode::NO_CONTENT)
}
