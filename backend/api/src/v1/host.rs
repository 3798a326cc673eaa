//! `/v1/host`: the daemon itself.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The daemon.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Host {
    /// Its version.
    pub version: String,
    /// Its process.
    pub process: u32,
    /// The launcher's process, if one runs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub launcher_process: Option<u32>,
    /// The inventory's process, if one runs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub inventory_process: Option<u32>,
    /// Numbers for VMs that are made at run time, the first and how many.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vm_numbers: Option<String>,
    /// The driver library that it has arbiters and workers load.
    pub driver: String,
    /// Whether memory is made clean between owners; false in tests that show what that is for.
    pub scrub: bool,
    /// What had to be left behind of the last checkpoint, if it could not be understood.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub recovered: Option<String>,
    /// Events since the start, by kind and VM.
    pub events: Vec<Count>,
}

/// How often something has happened.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Count {
    /// What.
    pub kind: String,
    /// The number of the VM; 0 for none.
    pub vm: u32,
    /// How often.
    pub count: u64,
}
