//! `/v1/usage`: what was used, for billing.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// What one used. Figures only grow, also across restarts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Used {
    /// Its name, which a VM or project that is gone may have had before.
    pub id: String,
    /// A VM's or project's number.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub number: Option<u32>,
    /// When a VM was made, in seconds since 1970; with its number it tells the VM apart from others of its name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub created: Option<u64>,
    /// A VM's or project's organisation.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub organisation: Option<String>,
    /// A VM's project.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub project: Option<String>,
    /// Bytes of device memory lent, times seconds.
    pub memory_byte_seconds: f64,
    /// Seconds of GPU time.
    pub gpu_seconds: f64,
    /// Kernels launched, by its workers' word.
    pub launches: u64,
    /// Copies, by its workers' word.
    pub copies: u64,
    /// Bytes that were copied, by its workers' word.
    pub copied_bytes: u64,
    /// Calls of its programs that reached the host, by its workers' word.
    pub calls: u64,
    /// Seconds in which it existed; of all its VMs together for others than a VM.
    pub seconds: f64,
    /// Sessions that got a worker.
    pub sessions: u64,
}

/// What was used.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Usage {
    /// By VM, those that are gone included until there are too many.
    pub vms: Vec<Used>,
    /// By project, with all VMs it ever had.
    pub projects: Vec<Used>,
    /// By organisation, with all VMs it ever had.
    pub organisations: Vec<Used>,
    /// By all VMs there ever were; for those who may look at everything.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host: Option<Used>,
}
