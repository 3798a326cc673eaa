//! `/v1/capacity`: what there is still room for.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{UnitKind, VmRequest};
use crate::json::objects_of;

/// What there is still room for.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Capacity {
    /// GPUs that are not divided and that nobody is on.
    pub free_gpus: u32,
    /// Instances that could still be made, of each kind alone.
    pub instances: Vec<MoreInstances>,
    /// Units that more VMs can share.
    pub shared: Vec<SharedRoom>,
}

/// How many more instances of a kind could be made, if no other is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct MoreInstances {
    /// The driver's number of the profile.
    pub profile: u32,
    /// Its name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Memory of an instance.
    pub memory_bytes: u64,
    /// Instances.
    pub count: u32,
}

/// What a shared unit has left.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct SharedRoom {
    /// The unit.
    pub unit: u32,
    /// VMs on it.
    pub vms: u32,
    /// Bytes that are promised to none of its VMs.
    pub memory_bytes: u64,
    /// Thousandths of its time that are guaranteed to none of its VMs.
    pub permille: u16,
}

/// VMs that somebody would like to make.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Wishes {
    /// As they would be made, in this order.
    #[schema(max_items = 64)]
    #[serde(deserialize_with = "objects_of")]
    pub vms: Vec<VmRequest>,
}

/// Whether VMs would have a place.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct WouldFit {
    /// Whether all of them would, made in the order given. Nothing is held for them.
    pub fits: bool,
    /// Where each would be, or why it would have no place.
    pub vms: Vec<Fit>,
}

/// Where a VM would be.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Fit {
    /// The GPU.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gpu: Option<u32>,
    /// What its unit would be.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kind: Option<UnitKind>,
    /// The unit, where it is there already.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unit: Option<u32>,
    /// The first memory slice of its instance.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub start: Option<u8>,
    /// Why there is no place.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub refusal: Option<String>,
}
