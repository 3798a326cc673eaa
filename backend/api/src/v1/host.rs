//! `/v1/host`: the daemon itself.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The daemon.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Host {
    /// Version of the daemon.
    pub version: String,
    /// Process id of the daemon.
    pub process: u32,
    /// Process id of the launcher, if it runs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub launcher_process: Option<u32>,
    /// Process id of the inventory, if it runs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub inventory_process: Option<u32>,
    /// Numbers for VMs, as `FIRST:COUNT`.
    pub vm_numbers: String,
    /// Path of the driver library that arbiters and workers load.
    pub driver: String,
    /// True if memory is scrubbed between owners. False only in tests that show the effect of scrubbing.
    pub scrub: bool,
    /// Reason why the last checkpoint could not be read, if the one before it is used instead.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub recovered: Option<String>,
    /// Number of events since the start, by kind and VM.
    pub events: Vec<EventCount>,
}

/// Number of events of one kind.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct EventCount {
    /// Kind of the event.
    pub kind: String,
    /// Number of the VM. 0: no VM.
    pub vm: u32,
    /// Number of events.
    pub count: u64,
}
