//! `/v1/sizes`: named sizes of VMs, for instance `small`.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{Policy, Priority};

/// A size as a client wants it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SizeRequest {
    /// Device memory.
    #[schema(minimum = 2097152, maximum = 4503599627370496_u64)]
    pub memory_bytes: u64,
    /// Of that, what is kept.
    #[serde(default)]
    #[schema(minimum = 0, maximum = 4503599627370496_u64)]
    pub guaranteed_bytes: Option<u64>,
    /// Bytes beside the quota, to which what the driver takes is charged first; 0 if not given.
    #[serde(default)]
    #[schema(minimum = 0, maximum = 4503599627370496_u64)]
    pub headroom_bytes: Option<u64>,
    /// Guest memory that may be pinned; no limit if not given.
    #[serde(default)]
    #[schema(minimum = 0, maximum = 4503599627370496_u64)]
    pub pinned_bytes: Option<u64>,
    /// Share of GPU time in relation to others; 100 if not given.
    #[serde(default)]
    #[schema(minimum = 1, maximum = 10000)]
    pub weight: Option<u32>,
    /// Whose work goes first; `normal` if not given.
    #[serde(default)]
    pub priority: Option<Priority>,
    /// Thousandths of a unit's time that are never exceeded; no limit if not given.
    #[serde(default)]
    #[schema(minimum = 1, maximum = 1000)]
    pub cap_permille: Option<u32>,
    /// Thousandths of a unit's time that are there whenever they are wanted.
    #[serde(default)]
    #[schema(minimum = 0, maximum = 1000)]
    pub guarantee_permille: Option<u32>,
    /// The kind of unit, where a VM does not say one.
    #[serde(default)]
    pub policy: Option<Policy>,
    /// The kind of MIG instance, where a VM does not say one: the driver's number of the profile, or its name.
    #[serde(default)]
    #[schema(max_length = 64)]
    pub profile: Option<String>,
    /// The most VMs that share a unit, where a VM does not say it; any number if not given.
    #[serde(default)]
    #[schema(minimum = 1, maximum = 65535)]
    pub replicas: Option<u32>,
}

/// A size.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Size {
    /// Its name.
    pub id: String,
    /// Device memory.
    pub memory_bytes: u64,
    /// Of that, what is kept.
    pub guaranteed_bytes: u64,
    /// Bytes beside the quota, to which what the driver takes is charged first.
    pub headroom_bytes: u64,
    /// Guest memory that may be pinned; 0 for no limit.
    pub pinned_bytes: u64,
    /// Share of GPU time in relation to others.
    pub weight: u32,
    /// Whose work goes first.
    pub priority: Priority,
    /// Thousandths of a unit's time that are never exceeded; 0 for no limit.
    pub cap_permille: u32,
    /// Thousandths of a unit's time that are there whenever they are wanted.
    pub guarantee_permille: u32,
    /// The kind of unit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub policy: Option<Policy>,
    /// The kind of MIG instance, by the driver's number.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub profile: Option<String>,
    /// The most VMs that share a unit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub replicas: Option<u32>,
}

/// Sizes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Sizes {
    /// All of them.
    pub sizes: Vec<Size>,
}
