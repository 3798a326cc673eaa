//! `/v1/sizes`: named sizes of VMs, for instance `small`.

use std::rc::Rc;

use axum::{Json, extract::State, http::StatusCode};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{
    status,
    vms::{self, Policy, Priority},
};
use crate::{
    api::Api,
    api::error::{ChangeErrors, Errors},
    api::extract::{Body, Id},
    caller::Caller,
    error::Error,
    records::state::objects::{Shares, SizeObject},
    registry::Registry,
};

/// A size as a client wants it.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct SizeRequest {
    /// Device memory.
    #[schema(minimum = 2097152, maximum = 4503599627370496_u64)]
    memory_bytes: u64,
    /// Of that, what is kept.
    #[serde(default)]
    #[schema(minimum = 0, maximum = 4503599627370496_u64)]
    guaranteed_bytes: Option<u64>,
    /// Bytes beside the quota, to which what the driver takes is charged first; 0 if not given.
    #[serde(default)]
    #[schema(minimum = 0, maximum = 4503599627370496_u64)]
    headroom_bytes: Option<u64>,
    /// Guest memory that may be pinned; no limit if not given.
    #[serde(default)]
    #[schema(minimum = 0, maximum = 4503599627370496_u64)]
    pinned_bytes: Option<u64>,
    /// Share of GPU time in relation to others; 100 if not given.
    #[serde(default)]
    #[schema(minimum = 1, maximum = 10000)]
    weight: Option<u32>,
    /// Whose work goes first; `normal` if not given.
    #[serde(default)]
    priority: Option<Priority>,
    /// Thousandths of a unit's time that are never exceeded; no limit if not given.
    #[serde(default)]
    #[schema(minimum = 1, maximum = 1000)]
    cap_permille: Option<u32>,
    /// Thousandths of a unit's time that are there whenever they are wanted.
    #[serde(default)]
    #[schema(minimum = 0, maximum = 1000)]
    guarantee_permille: Option<u32>,
    /// The kind of unit, where a VM does not say one.
    #[serde(default)]
    policy: Option<Policy>,
    /// The kind of MIG instance, where a VM does not say one: the driver's number of the profile, or its name.
    #[serde(default)]
    #[schema(max_length = 64)]
    profile: Option<String>,
    /// The most VMs that share a unit, where a VM does not say it; any number if not given.
    #[serde(default)]
    #[schema(minimum = 1, maximum = 65535)]
    replicas: Option<u32>,
}

/// A size.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct Size {
    /// Its name.
    id: String,
    /// Device memory.
    memory_bytes: u64,
    /// Of that, what is kept.
    guaranteed_bytes: u64,
    /// Bytes beside the quota, to which what the driver takes is charged first.
    headroom_bytes: u64,
    /// Guest memory that may be pinned; 0 for no limit.
    pinned_bytes: u64,
    /// Share of GPU time in relation to others.
    weight: u32,
    /// Whose work goes first.
    priority: Priority,
    /// Thousandths of a unit's time that are never exceeded; 0 for no limit.
    cap_permille: u32,
    /// Thousandths of a unit's time that are there whenever they are wanted.
    guarantee_permille: u32,
    /// The kind of unit.
    #[serde(skip_serializing_if = "Option::is_none")]
    policy: Option<Policy>,
    /// The kind of MIG instance, by the driver's number.
    #[serde(skip_serializing_if = "Option::is_none")]
    profile: Option<String>,
    /// The most VMs that share a unit.
    #[serde(skip_serializing_if = "Option::is_none")]
    replicas: Option<u32>,
}

/// Sizes.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct Sizes {
    /// All of them.
    sizes: Vec<Size>,
}

impl SizeRequest {
    fn wanted(self, registry: &Registry) -> Result<SizeObject, Error> {
        let shares = Shares::default();
        let memory = vms::memory(Some(self.memory_bytes))?.unwrap_or(0);
        let guaranteed = vms::bytes("guaranteed_bytes", self.guaranteed_bytes)?.unwrap_or(0);
        if guaranteed > memory {
            return Err(Error::contradiction("more memory is guaranteed than there is"));
        }
        Ok(SizeObject {
            memory,
            guaranteed,
            headroom: vms::bytes("headroom_bytes", self.headroom_bytes)?.unwrap_or(0),
            pinned: vms::bytes("pinned_bytes", self.pinned_bytes)?.unwrap_or(0),
            shares: Shares {
                weight: vms::within("weight", self.weight, 1, 10_000)?.unwrap_or(shares.weight),
                priority: self.priority.map_or(shares.priority, Priority::kept),
                cap_permille: vms::within("cap_permille", self.cap_permille, 1, 1000)?.unwrap_or(0),
                guarantee_permille: vms::within("guarantee_permille", self.guarantee_permille, 0, 1000)?
                    .unwrap_or(0),
            },
            policy: self.policy.map(Policy::kept),
            profile: self.profile.map(|profile| vms::profile(registry, &profile)).transpose()?,
            replicas: vms::within("replicas", self.replicas, 1, 65_535)?.unwrap_or(0),
        })
    }
}

impl Size {
    fn of(id: &str, kept: SizeObject) -> Self {
        Self {
            id: id.to_owned(),
            memory_bytes: kept.memory,
            guaranteed_bytes: kept.guaranteed,
            headroom_bytes: kept.headroom,
            pinned_bytes: kept.pinned,
            weight: kept.shares.weight,
            priority: Priority::shown(kept.shares.priority),
            cap_permille: kept.shares.cap_permille,
            guarantee_permille: kept.shares.guarantee_permille,
            policy: kept.policy.map(Policy::shown),
            profile: kept.profile.map(|profile| profile.to_string()),
            replicas: Some(kept.replicas).filter(|most| *most > 0),
        }
    }
}

/// Lists sizes.
#[utoipa::path(get, path = "/v1/sizes", tag = "sizes", operation_id = "list_sizes",
    responses((status = 200, body = Sizes), Errors))]
pub(crate) async fn list(State(api): State<Api>, _caller: Caller) -> Result<Json<Sizes>, Error> {
    let list = move |registry: Rc<Registry>| async move {
        let objects = registry.checkpoint.objects();
        Ok(Sizes { sizes: objects.sizes.iter().map(|(id, size)| Size::of(id, *size)).collect() })
    };
    api.bridge.call(list).await.map(Json)
}

/// Shows a size.
#[utoipa::path(get, path = "/v1/sizes/{id}", tag = "sizes", operation_id = "get_size",
    params(("id" = String, Path, description = "Its name", pattern = "^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")),
    responses((status = 200, body = Size), Errors))]
pub(crate) async fn get(State(api): State<Api>, _caller: Caller, Id(id): Id) -> Result<Json<Size>, Error> {
    let get = move |registry: Rc<Registry>| async move {
        registry.size(&id).map(|size| Size::of(&id, size)).ok_or_else(|| Error::not_found("size", &id))
    };
    api.bridge.call(get).await.map(Json)
}

/// Makes a size, or changes what VMs of it get.
///
/// VMs that are there keep what they have until they are put again.
#[utoipa::path(put, path = "/v1/sizes/{id}", tag = "sizes", operation_id = "put_size", request_body = SizeRequest,
    params(("id" = String, Path, description = "Its name", pattern = "^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")),
    responses((status = 200, description = "It is as said", body = Size),
        (status = 201, description = "It was made", body = Size), ChangeErrors))]
pub(crate) async fn put(
    State(api): State<Api>,
    caller: Caller,
    Id(id): Id,
    Body(request): Body<SizeRequest>,
) -> Result<(StatusCode, Json<Size>), Error> {
    let put = move |registry: Rc<Registry>| async move {
        let wanted = request.wanted(&registry)?;
        let put = registry.put_size(&caller, &id, wanted).await?;
        Ok((status(put), Json(Size::of(&id, wanted))))
    };
    api.bridge.call(put).await
}

/// Takes a size away. VMs of it keep what they have. One that is not there is gone already.
#[utoipa::path(delete, path = "/v1/sizes/{id}", tag = "sizes", operation_id = "delete_size",
    params(("id" = String, Path, description = "Its name", pattern = "^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")),
    responses((status = 204, description = "It is gone"), ChangeErrors))]
pub(crate) async fn delete(State(api): State<Api>, caller: Caller, Id(id): Id) -> Result<StatusCode, Error> {
    api.bridge.call(move |registry| async move { registry.delete_size(&caller, &id).await }).await?;
    Ok(StatusCode::NO_CONTENT)
}
