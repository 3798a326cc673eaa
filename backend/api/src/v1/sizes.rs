//! `/v1/sizes`: named sizes of VMs, for instance `small`.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{MemoryShare, MemoryShareRequest, Policy, TimeShare, TimeShareRequest, settings};

/// Request to create or change a size.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SizeRequest {
    /// Quota of device memory, in bytes.
    #[schema(minimum = 2097152, maximum = 4503599627370496_u64)]
    pub memory_bytes: u64,
    /// Memory beside the quota, and within it.
    #[serde(flatten)]
    #[schema(schema_with = settings::asked_alone::<MemoryShareRequest>)]
    pub share: MemoryShareRequest,
    /// Share of a unit's time.
    #[serde(flatten)]
    #[schema(schema_with = settings::asked_alone::<TimeShareRequest>)]
    pub time: TimeShareRequest,
    /// Kind of unit, for VMs that do not specify one.
    #[serde(default)]
    pub policy: Option<Policy>,
    /// MIG profile, by its number in the driver or its name, for VMs that do not specify one.
    #[serde(default)]
    #[schema(max_length = 64)]
    pub profile: Option<String>,
    /// Maximum number of VMs on a unit, for VMs that do not specify one. Default: no limit.
    #[serde(default)]
    #[schema(minimum = 1, maximum = 65535)]
    pub replicas: Option<u32>,
}

/// A named size of VMs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Size {
    /// Name of the size.
    pub id: String,
    /// Quota of device memory, in bytes.
    pub memory_bytes: u64,
    /// Memory beside the quota, and within it.
    #[serde(flatten)]
    #[schema(schema_with = settings::answered::<MemoryShareRequest>)]
    pub share: MemoryShare,
    /// Share of a unit's time.
    #[serde(flatten)]
    #[schema(schema_with = settings::answered::<TimeShareRequest>)]
    pub time: TimeShare,
    /// Kind of unit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub policy: Option<Policy>,
    /// MIG profile, by its number in the driver.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub profile: Option<String>,
    /// Maximum number of VMs on a unit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub replicas: Option<u32>,
}

/// A list of sizes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Sizes {
    /// All sizes.
    pub sizes: Vec<Size>,
}
