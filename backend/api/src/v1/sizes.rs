//! `/v1/sizes`: named sizes of VMs, for instance `small`.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{Policy, Priority};

/// Request to create or change a size.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SizeRequest {
    /// Quota of device memory, in bytes.
    #[schema(minimum = 2097152, maximum = 4503599627370496_u64)]
    pub memory_bytes: u64,
    /// Part of `memory_bytes` that is guaranteed.
    #[serde(default)]
    #[schema(minimum = 0, maximum = 4503599627370496_u64)]
    pub guaranteed_bytes: Option<u64>,
    /// Allowance beside the quota, in bytes. Memory taken by the driver is charged to it first. Default: 0.
    #[serde(default)]
    #[schema(minimum = 0, maximum = 4503599627370496_u64)]
    pub headroom_bytes: Option<u64>,
    /// Limit of pinned guest memory, in bytes. Default: no limit.
    #[serde(default)]
    #[schema(minimum = 0, maximum = 4503599627370496_u64)]
    pub pinned_bytes: Option<u64>,
    /// Share of GPU time relative to other VMs. Default: 100.
    #[serde(default)]
    #[schema(minimum = 1, maximum = 10000)]
    pub weight: Option<u32>,
    /// Scheduling priority. Default: `normal`.
    #[serde(default)]
    pub priority: Option<Priority>,
    /// Upper limit of a unit's time, in thousandths. Default: no limit.
    #[serde(default)]
    #[schema(minimum = 1, maximum = 1000)]
    pub cap_permille: Option<u32>,
    /// Guaranteed part of a unit's time, in thousandths. It is available on demand.
    #[serde(default)]
    #[schema(minimum = 0, maximum = 1000)]
    pub guarantee_permille: Option<u32>,
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
    /// Part of `memory_bytes` that is guaranteed.
    pub guaranteed_bytes: u64,
    /// Allowance beside the quota, in bytes. Memory taken by the driver is charged to it first.
    pub headroom_bytes: u64,
    /// Limit of pinned guest memory, in bytes. 0: no limit.
    pub pinned_bytes: u64,
    /// Share of GPU time relative to other VMs.
    pub weight: u32,
    /// Scheduling priority.
    pub priority: Priority,
    /// Upper limit of a unit's time, in thousandths. 0: no limit.
    pub cap_permille: u32,
    /// Guaranteed part of a unit's time, in thousandths. It is available on demand.
    pub guarantee_permille: u32,
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
