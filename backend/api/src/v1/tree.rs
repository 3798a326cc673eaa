//! `/v1/organisations`, `/v1/projects`: owners of VMs, and the quotas that their VMs share.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{Isolation, Priority};
use crate::json::optional_object;

/// The part of a request that organisations and projects share.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct OwnerRequest {
    /// Quota of all its VMs together on all units, headroom included, in bytes. That of a project is at most that of its organisation.
    #[schema(minimum = 2097152, maximum = 4503599627370496_u64)]
    pub memory_bytes: u64,
    /// Maximum number of VMs. Default: 64 for VMs created by tenants, no limit for operators.
    #[serde(default)]
    #[schema(minimum = 0, maximum = 2147483647)]
    pub vms: Option<u32>,
    /// Limits for the VMs that its tenants create. Default: the default of each field.
    #[serde(default, deserialize_with = "optional_object")]
    pub limits: Option<Limits>,
}

/// Request to create or change an organisation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct OrganisationRequest {
    /// Its quota and limits.
    #[serde(flatten)]
    #[schema(inline)]
    pub owner: OwnerRequest,
}

/// Request to create or change a project.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ProjectRequest {
    /// Its quota and limits.
    #[serde(flatten)]
    #[schema(inline)]
    pub owner: OwnerRequest,
    /// Name of its organisation. Cannot be changed.
    #[serde(default)]
    #[schema(pattern = "^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
    pub organisation: Option<String>,
}

/// An organisation or a project, as far as they are alike.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Owner {
    /// Name of the organisation or project.
    pub id: String,
    /// Number of the organisation or project in processes and logs.
    pub number: u32,
    /// Quota of device memory for all its VMs together, in bytes.
    pub memory_bytes: u64,
    /// Device memory lent to its VMs in bytes, at most a second old.
    pub lent_bytes: u64,
    /// Maximum number of VMs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vms: Option<u32>,
    /// Limits for the VMs that its tenants create, if any are set.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limits: Option<Limits>,
}

/// An organisation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Organisation {
    /// Its name, quota and limits.
    #[serde(flatten)]
    #[schema(inline)]
    pub owner: Owner,
}

/// A project.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Project {
    /// Its name, quota and limits.
    #[serde(flatten)]
    #[schema(inline)]
    pub owner: Owner,
    /// Name of its organisation.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub organisation: Option<String>,
}

/// A list of organisations.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Organisations {
    /// Organisations that the caller may see.
    pub organisations: Vec<Organisation>,
}

/// A list of projects.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Projects {
    /// Projects that the caller may see.
    pub projects: Vec<Project>,
}

/// Name of a size, for the OpenAPI schema.
#[derive(ToSchema)]
#[schema(pattern = "^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
#[expect(dead_code, reason = "only its schema is used")]
struct SizeName(String);

/// Limits for the VMs that tenants create. The default of each field takes nothing from other VMs.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Limits {
    /// Sizes that a VM may have. Each figure of the size applies, even beyond the other limits. Default: any memory.
    #[schema(max_items = 64, value_type = Option<Vec<SizeName>>)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sizes: Option<BTreeSet<String>>,
    /// Maximum weight. Default: 100.
    #[schema(minimum = 1, maximum = 10000)]
    pub weight: Option<u32>,
    /// Highest priority. Default: `normal`.
    pub priority: Option<Priority>,
    /// Maximum cap, in thousandths. A VM without a cap gets this one. Default: no limit.
    #[schema(minimum = 1, maximum = 1000)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cap_permille: Option<u32>,
    /// Maximum guarantee of a unit's time, in thousandths. Default: 0.
    #[schema(minimum = 0, maximum = 1000)]
    pub guarantee_permille: Option<u32>,
    /// Strictest isolation. Default: `shared`.
    pub isolation: Option<Isolation>,
    /// Maximum headroom, in bytes. Default: 0.
    #[schema(minimum = 0, maximum = 4503599627370496_u64)]
    pub headroom_bytes: Option<u64>,
    /// Maximum of pinned guest memory, in bytes. A VM that specifies no limit gets this one. Default: no limit.
    #[schema(minimum = 1, maximum = 4503599627370496_u64)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pinned_bytes: Option<u64>,
    /// Minimum of `readmit_after_seconds`. Default: tenants may not set it.
    #[schema(minimum = 1, maximum = 2147483647)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub readmit_after_seconds: Option<u32>,
    /// True if tenants may choose GPU, slice, profile, multiprocessors and NUMA node.
    pub unit_choice: bool,
    /// Maximum number of VMs that one user may create. Default: 16.
    #[schema(minimum = 0, maximum = 2147483647)]
    pub vms_per_owner: Option<u32>,
}
