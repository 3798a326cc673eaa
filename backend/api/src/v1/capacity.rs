//! `/v1/capacity`: free room for more instances and VMs.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{UnitKind, VmRequest};
use crate::json::objects_of;

/// Free room for more instances and VMs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Capacity {
    /// Number of GPUs that are not divided and have no VM.
    pub free_gpus: u32,
    /// Instances that can still be created, for each profile alone.
    pub instances: Vec<MoreInstances>,
    /// Units that more VMs can share.
    pub shared: Vec<SharedRoom>,
}

/// Number of instances of one profile that can still be created, if no other is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct MoreInstances {
    /// Number of the profile in the driver.
    pub profile: u32,
    /// Name of the profile.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Memory of one instance, in bytes.
    pub memory_bytes: u64,
    /// Number of instances.
    pub count: u32,
}

/// Free room on a shared unit.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct SharedRoom {
    /// Number of the unit.
    pub unit: u32,
    /// Number of VMs on it.
    pub vms: u32,
    /// Memory that is not promised to any VM, in bytes.
    pub memory_bytes: u64,
    /// Thousandths of its time that are not guaranteed to any VM.
    pub permille: u16,
}

/// VMs to check for a place.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct FitRequest {
    /// The requests that would create them, in this order.
    #[schema(max_items = 64)]
    #[serde(deserialize_with = "objects_of")]
    pub vms: Vec<VmRequest>,
}

/// Result of a check for places.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct WouldFit {
    /// True if all VMs have a place when created in the given order. Nothing is reserved.
    pub fits: bool,
    /// For each VM its place, or the reason why it has none.
    pub vms: Vec<Fit>,
}

/// Place of a VM, or the reason why it has none.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Fit {
    /// Ordinal of the GPU.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gpu: Option<u32>,
    /// Kind of the unit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kind: Option<UnitKind>,
    /// Number of the unit, if it exists already.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unit: Option<u32>,
    /// First memory slice of the instance.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub start: Option<u8>,
    /// Reason why there is no place.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub refusal: Option<String>,
}
