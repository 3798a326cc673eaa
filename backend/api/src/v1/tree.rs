//! `/v1/organisations`, `/v1/projects`: who VMs belong to, and what all of theirs together may have.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{Isolation, Priority};
use crate::json::optional_object;

/// An organisation as a client wants it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct OrganisationRequest {
    /// Device memory that its VMs may have together, on all units.
    #[schema(minimum = 2097152, maximum = 4503599627370496_u64)]
    pub memory_bytes: u64,
    /// How many VMs it may have. If not given, tenants may make 64, and operators as many as there can be.
    #[serde(default)]
    #[schema(minimum = 0, maximum = 2147483647)]
    pub vms: Option<u32>,
    /// What its tenants may set of their VMs; the defaults if not given.
    #[serde(default, deserialize_with = "optional_object")]
    pub limits: Option<Limits>,
}

/// A project as a client wants it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ProjectRequest {
    /// Device memory that its VMs may have together, on all units. Not more than its organisation's.
    #[schema(minimum = 2097152, maximum = 4503599627370496_u64)]
    pub memory_bytes: u64,
    /// How many VMs it may have. If not given, tenants may make 64, and operators as many as there can be.
    #[serde(default)]
    #[schema(minimum = 0, maximum = 2147483647)]
    pub vms: Option<u32>,
    /// What its tenants may set of their VMs; the defaults if not given.
    #[serde(default, deserialize_with = "optional_object")]
    pub limits: Option<Limits>,
    /// Its organisation. Cannot be changed.
    #[serde(default)]
    #[schema(pattern = "^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
    pub organisation: Option<String>,
}

/// An organisation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Organisation {
    /// Its name.
    pub id: String,
    /// What processes and logs know it by.
    pub number: u32,
    /// Whether the configuration file names it; then it is changed there.
    pub configured: bool,
    /// Device memory that its VMs may have together.
    pub memory_bytes: u64,
    /// Device memory lent to its VMs, as of the last second.
    pub lent_bytes: u64,
    /// How many VMs it may have.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vms: Option<u32>,
    /// What its tenants may set of their VMs, where that was said.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limits: Option<Limits>,
}

/// A project.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Project {
    /// Its name.
    pub id: String,
    /// What processes and logs know it by.
    pub number: u32,
    /// Whether the configuration file names it; then it is changed there.
    pub configured: bool,
    /// Its organisation.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub organisation: Option<String>,
    /// Device memory that its VMs may have together.
    pub memory_bytes: u64,
    /// Device memory lent to its VMs, as of the last second.
    pub lent_bytes: u64,
    /// How many VMs it may have.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vms: Option<u32>,
    /// What its tenants may set of their VMs, where that was said.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limits: Option<Limits>,
}

/// Organisations.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Organisations {
    /// Those that the caller may look at.
    pub organisations: Vec<Organisation>,
}

/// Projects.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Projects {
    /// Those that the caller may look at.
    pub projects: Vec<Project>,
}

/// The name of a size, as the description of the API has it.
#[derive(ToSchema)]
#[schema(pattern = "^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
#[expect(dead_code, reason = "only its schema is used")]
struct SizeName(String);

/// What tenants may set of their VMs. A field that is not given has a default that takes nothing from others.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Limits {
    /// The sizes that a VM may have; each figure of its size then holds, whatever the other limits say. Any memory if not given.
    #[schema(max_items = 64, value_type = Option<Vec<SizeName>>)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sizes: Option<BTreeSet<String>>,
    /// The largest weight; 100 if not given.
    #[schema(minimum = 1, maximum = 10000)]
    pub weight: Option<u32>,
    /// The highest priority; `normal` if not given.
    pub priority: Option<Priority>,
    /// The largest cap, which a VM without one gets; none if not given.
    #[schema(minimum = 1, maximum = 1000)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cap_permille: Option<u32>,
    /// The largest guarantee of a unit's time; 0 if not given.
    #[schema(minimum = 0, maximum = 1000)]
    pub guarantee_permille: Option<u32>,
    /// The strictest isolation; `shared` if not given.
    pub isolation: Option<Isolation>,
    /// The largest headroom; 0 if not given.
    #[schema(minimum = 0, maximum = 4503599627370496_u64)]
    pub headroom_bytes: Option<u64>,
    /// The most guest memory that may be pinned, which a VM that does not say gets; none if not given.
    #[schema(minimum = 1, maximum = 4503599627370496_u64)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pinned_bytes: Option<u64>,
    /// The shortest `readmit_after_seconds`; if not given, tenants may not say one.
    #[schema(minimum = 1, maximum = 2147483647)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub readmit_after_seconds: Option<u32>,
    /// Whether tenants choose GPU, slice, profile, multiprocessors and NUMA node.
    pub unit_choice: bool,
    /// The most VMs that one user makes; 16 if not given.
    #[schema(minimum = 0, maximum = 2147483647)]
    pub vms_per_owner: Option<u32>,
}
