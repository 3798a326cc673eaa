//! `/v1/sizes`: named sizes of VMs, for instance `small`.

use std::rc::Rc;

use axum::{Json, extract::State, http::StatusCode};
use sluice_api::{
    Error,
    v1::{MemoryShare, Size, SizeRequest, Sizes, TimeShare},
};

use super::{status, vms};
use crate::{
    api::Api,
    api::error::{ChangeErrors, Errors, RequestRefusal},
    api::extract::{Body, Id},
    caller::Caller,
    records::state::objects::SizeObject,
    registry::Registry,
};

/// Builds the stored size from a request.
fn wanted(request: SizeRequest, registry: &Registry) -> Result<SizeObject, Error> {
    let memory = vms::memory(Some(request.memory_bytes))?.unwrap_or(0);
    let share = vms::settings(request.share, MemoryShare::default())?;
    if share.guaranteed_bytes > memory {
        return Err(Error::contradiction("guaranteed_bytes is more than memory_bytes"));
    }
    Ok(SizeObject {
        memory,
        share,
        time: vms::settings(request.time, TimeShare::default())?,
        policy: request.policy,
        profile: request.profile.map(|profile| vms::profile(registry, &profile)).transpose()?,
        replicas: vms::within("replicas", request.replicas, 1, 65_535)?.unwrap_or(0),
    })
}

/// Builds the answer from a stored size.
fn show(id: &str, kept: SizeObject) -> Size {
    Size {
        id: id.to_owned(),
        memory_bytes: kept.memory,
        share: kept.share,
        time: kept.time,
        policy: kept.policy,
        profile: kept.profile.map(|profile| profile.to_string()),
        replicas: Some(kept.replicas).filter(|most| *most > 0),
    }
}

/// Lists sizes.
#[utoipa::path(get, path = "/v1/sizes", tag = "sizes", operation_id = "list_sizes",
    responses((status = 200, body = Sizes), Errors))]
pub(crate) async fn list(State(api): State<Api>, _caller: Caller) -> Result<Json<Sizes>, RequestRefusal> {
    let list = move |registry: Rc<Registry>| async move {
        let objects = registry.checkpoint.objects();
        Ok(Sizes { sizes: objects.sizes.iter().map(|(id, size)| show(id, *size)).collect() })
    };
    api.mailbox.call(list).await.map(Json)
}

/// Shows a size.
#[utoipa::path(get, path = "/v1/sizes/{id}", tag = "sizes", operation_id = "get_size",
    params(("id" = String, Path, description = "Name of the size", pattern = "^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")),
    responses((status = 200, body = Size), Errors))]
pub(crate) async fn get(
    State(api): State<Api>,
    _caller: Caller,
    Id(id): Id,
) -> Result<Json<Size>, RequestRefusal> {
    let get = move |registry: Rc<Registry>| async move {
        registry.size(&id).map(|size| show(&id, size)).ok_or_else(|| Error::not_found("size", &id))
    };
    api.mailbox.call(get).await.map(Json)
}

/// Creates a size, or changes it.
///
/// Existing VMs of the size keep their figures until their next PUT.
#[utoipa::path(put, path = "/v1/sizes/{id}", tag = "sizes", operation_id = "put_size", request_body = SizeRequest,
    params(("id" = String, Path, description = "Name of the size", pattern = "^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")),
    responses((status = 200, description = "The existing object matches the request", body = Size),
        (status = 201, description = "The object was created", body = Size), ChangeErrors))]
pub(crate) async fn put(
    State(api): State<Api>,
    caller: Caller,
    Id(id): Id,
    Body(request): Body<SizeRequest>,
) -> Result<(StatusCode, Json<Size>), RequestRefusal> {
    let put = move |registry: Rc<Registry>| async move {
        let wanted = wanted(request, &registry)?;
        let put = registry.put_size(&caller, &id, wanted).await?;
        Ok((status(put), Json(show(&id, wanted))))
    };
    api.mailbox.call(put).await
}

/// Deletes a size. VMs of the size keep their figures. Succeeds if the size does not exist.
#[utoipa::path(delete, path = "/v1/sizes/{id}", tag = "sizes", operation_id = "delete_size",
    params(("id" = String, Path, description = "Name of the size", pattern = "^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")),
    responses((status = 204, description = "The object does not exist any more"), ChangeErrors))]
pub(crate) async fn delete(
    State(api): State<Api>,
    caller: Caller,
    Id(id): Id,
) -> Result<StatusCode, RequestRefusal> {
    api.mailbox.call(move |registry| async move { registry.delete_size(&caller, &id).await }).await?;
    Ok(StatusCode::NO_CONTENT)
}
