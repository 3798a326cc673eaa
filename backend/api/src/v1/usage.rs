//! `/v1/usage`: usage figures, for billing.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Usage of one VM, project or organisation, or of the host. Figures never decrease, also across restarts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ResourceUsage {
    /// Name. A deleted VM or project may have had the same name.
    pub id: String,
    /// Number of the VM or project.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub number: Option<u32>,
    /// Creation time of the VM, in seconds since 1970. Together with the number it identifies the VM among others of its name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub created: Option<u64>,
    /// Organisation of the VM or project.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub organisation: Option<String>,
    /// Project of the VM.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub project: Option<String>,
    /// Bytes of device memory lent, times seconds.
    pub memory_byte_seconds: f64,
    /// GPU time, in seconds.
    pub gpu_seconds: f64,
    /// Kernels launched, as reported by its workers.
    pub launches: u64,
    /// Copies, as reported by its workers.
    pub copies: u64,
    /// Bytes copied, as reported by its workers.
    pub copied_bytes: u64,
    /// Calls of its programs that reached the host, as reported by its workers.
    pub calls: u64,
    /// Lifetime of the VM in seconds; for others, the sum over all their VMs.
    pub seconds: f64,
    /// Number of sessions that got a worker.
    pub sessions: u64,
}

/// Usage of VMs, projects, organisations and the host.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Usage {
    /// Usage by VM. Includes deleted VMs until there are too many.
    pub vms: Vec<ResourceUsage>,
    /// Usage by project, of all VMs it ever had.
    pub projects: Vec<ResourceUsage>,
    /// Usage by organisation, of all VMs it ever had.
    pub organisations: Vec<ResourceUsage>,
    /// Usage of all VMs there ever were. Present only for callers that may see everything.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host: Option<ResourceUsage>,
}
