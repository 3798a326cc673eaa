//! `/v1/organisations`, `/v1/projects`: who VMs belong to, and what all of theirs together may have.

use std::{collections::BTreeSet, rc::Rc};

use axum::{Json, extract::State, http::StatusCode};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{
    status,
    vms::{self, Isolation, Priority},
};
use crate::{
    api::Api,
    api::error::{ChangeErrors, Errors},
    api::extract::{Body, Id, optional_object},
    caller::Caller,
    error::Error,
    records::state::objects::Ancestor,
    registry::Registry,
    vms::limits,
};

/// Sizes that limits can name.
const SIZES: usize = 64;

/// An organisation as a client wants it.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct OrganisationRequest {
    /// Device memory that its VMs may have together, on all units.
    #[schema(minimum = 2097152, maximum = 4503599627370496_u64)]
    memory_bytes: u64,
    /// How many VMs it may have. If not given, tenants may make 64, and operators as many as there can be.
    #[serde(default)]
    #[schema(minimum = 0, maximum = 2147483647)]
    vms: Option<u32>,
    /// What its tenants may set of their VMs; the defaults if not given.
    #[serde(default, deserialize_with = "optional_object")]
    limits: Option<Limits>,
}

/// A project as a client wants it.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct ProjectRequest {
    /// Device memory that its VMs may have together, on all units. Not more than its organisation's.
    #[schema(minimum = 2097152, maximum = 4503599627370496_u64)]
    memory_bytes: u64,
    /// How many VMs it may have. If not given, tenants may make 64, and operators as many as there can be.
    #[serde(default)]
    #[schema(minimum = 0, maximum = 2147483647)]
    vms: Option<u32>,
    /// What its tenants may set of their VMs; the defaults if not given.
    #[serde(default, deserialize_with = "optional_object")]
    limits: Option<Limits>,
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
    /// What its tenants may set of their VMs, where that was said.
    #[serde(skip_serializing_if = "Option::is_none")]
    limits: Option<Limits>,
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
    /// What its tenants may set of their VMs, where that was said.
    #[serde(skip_serializing_if = "Option::is_none")]
    limits: Option<Limits>,
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

/// The name of a size, as the description of the API has it.
#[derive(ToSchema)]
#[schema(pattern = "^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
#[expect(dead_code, reason = "only its schema is used")]
struct SizeName(String);

/// What tenants may set of their VMs. A field that is not given has a default that takes nothing from others.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Limits {
    /// The sizes that a VM may have; each figure of its size then holds, whatever the other limits say. Any memory if not given.
    #[schema(max_items = 64, value_type = Option<Vec<SizeName>>)]
    #[serde(skip_serializing_if = "Option::is_none")]
    sizes: Option<BTreeSet<String>>,
    /// The largest weight; 100 if not given.
    #[schema(minimum = 1, maximum = 10000)]
    weight: Option<u32>,
    /// The highest priority; `normal` if not given.
    priority: Option<Priority>,
    /// The largest cap, which a VM without one gets; none if not given.
    #[schema(minimum = 1, maximum = 1000)]
    #[serde(skip_serializing_if = "Option::is_none")]
    cap_permille: Option<u32>,
    /// The largest guarantee of a unit's time; 0 if not given.
    #[schema(minimum = 0, maximum = 1000)]
    guarantee_permille: Option<u32>,
    /// The strictest isolation; `shared` if not given.
    isolation: Option<Isolation>,
    /// The largest headroom; 0 if not given.
    #[schema(minimum = 0, maximum = 4503599627370496_u64)]
    headroom_bytes: Option<u64>,
    /// The most guest memory that may be pinned, which a VM that does not say gets; none if not given.
    #[schema(minimum = 1, maximum = 4503599627370496_u64)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pinned_bytes: Option<u64>,
    /// The shortest `readmit_after_seconds`; if not given, tenants may not say one.
    #[schema(minimum = 1, maximum = 2147483647)]
    #[serde(skip_serializing_if = "Option::is_none")]
    readmit_after_seconds: Option<u32>,
    /// Whether tenants choose GPU, slice, profile, multiprocessors and NUMA node.
    unit_choice: bool,
    /// The most VMs that one user makes; 16 if not given.
    #[schema(minimum = 0, maximum = 2147483647)]
    vms_per_owner: Option<u32>,
}

impl Limits {
    fn kept(self) -> Result<limits::Limits, Error> {
        let usual = limits::Limits::default();
        if self.sizes.as_ref().is_some_and(|sizes| sizes.len() > SIZES) {
            return Err(Error::invalid(format!("limits.sizes names more than {SIZES}")));
        }
        self.sizes.iter().flatten().try_for_each(|name| Id::check(name))?;
        let within =
            |field: &str, value, least, most| vms::within(&format!("limits.{field}"), value, least, most);
        Ok(limits::Limits {
            sizes: self.sizes,
            weight: within("weight", self.weight, 1, 10_000)?.unwrap_or(usual.weight),
            priority: self.priority.map_or(usual.priority, Priority::kept),
            cap_permille: within("cap_permille", self.cap_permille, 1, 1000)?.unwrap_or(0),
            guarantee_permille: within("guarantee_permille", self.guarantee_permille, 0, 1000)?.unwrap_or(0),
            isolation: self.isolation.map_or(usual.isolation, Isolation::kept),
            headroom: vms::bytes("limits.headroom_bytes", self.headroom_bytes)?.unwrap_or(0),
            pinned: vms::bytes("limits.pinned_bytes", self.pinned_bytes)?.unwrap_or(0),
            readmit_after: within("readmit_after_seconds", self.readmit_after_seconds, 1, vms::NUMBER)?
                .unwrap_or(0),
            unit_choice: self.unit_choice,
            vms_per_owner: within("vms_per_owner", self.vms_per_owner, 0, vms::NUMBER)?
                .unwrap_or(usual.vms_per_owner),
        })
    }

    fn shown(kept: limits::Limits) -> Self {
        Self {
            sizes: kept.sizes,
            weight: Some(kept.weight),
            priority: Some(Priority::shown(kept.priority)),
            cap_permille: Some(kept.cap_permille).filter(|cap| *cap > 0),
            guarantee_permille: Some(kept.guarantee_permille),
            isolation: Some(Isolation::shown(kept.isolation)),
            headroom_bytes: Some(kept.headroom),
            pinned_bytes: Some(kept.pinned).filter(|bytes| *bytes > 0),
            readmit_after_seconds: Some(kept.readmit_after).filter(|seconds| *seconds > 0),
            unit_choice: kept.unit_choice,
            vms_per_owner: Some(kept.vms_per_owner),
        }
    }
}

fn wanted(memory: u64, vms: Option<u32>, limits: Option<Limits>) -> Result<Ancestor, Error> {
    let memory = vms::memory(Some(memory))?.unwrap_or(0);
    let vms = vms::within("vms", vms, 0, vms::NUMBER)?;
    let limits = limits.map(Limits::kept).transpose()?;
    Ok(Ancestor { number: 0, organisation: None, memory, vms, limits })
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
            limits: found.limits.map(Limits::shown),
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
            limits: found.limits.map(Limits::shown),
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
        let wanted = wanted(request.memory_bytes, request.vms, request.limits)?;
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
        let wanted = Ancestor {
            organisation: request.organisation,
            ..wanted(request.memory_bytes, request.vms, request.limits)?
        };
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
