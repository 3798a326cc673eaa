//! `/v1/gpus`, `/v1/units`: devices, and what of them is lent.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// A GPU.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Gpu {
    /// Its ordinal.
    pub gpu: u32,
    /// Its UUID, where the driver says it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub uuid: Option<String>,
    /// Its name, where the driver says it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// The NUMA node it is near.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub numa_node: Option<u32>,
    /// Whether it is divided into instances.
    pub mig: bool,
    /// Whether it is from its next reset on, where that is another. Until then nobody uses it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mig_pending: Option<bool>,
    /// Whether VMs come to it.
    pub state: GpuState,
    /// Its units.
    pub units: Vec<u32>,
    /// Instances that are not of Sluice; they are left alone.
    pub foreign_instances: u32,
    /// What is lost by how its instances lie: 0 where they could not lie better, towards 1 where they block nearly everything.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fragmentation: Option<f64>,
}

/// Whether VMs come to a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum GpuState {
    /// They do.
    Open,
    /// None comes, and those that are there move away when they have no session.
    Draining,
    /// None comes.
    Quarantined,
}

/// GPUs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Gpus {
    /// All of them.
    pub gpus: Vec<Gpu>,
    /// Whether the driver's management library answers; what it would say is unknown while it does not.
    pub inventory: bool,
}

/// A placement unit: a GPU or an instance of one.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Unit {
    /// Its number.
    pub unit: u32,
    /// The GPU it is of.
    pub gpu: u32,
    /// What it is.
    pub kind: UnitKind,
    /// Whether it lends.
    pub state: UnitState,
    /// Why it is quarantined.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// The kind of instance, by the driver's name or number.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub profile: Option<String>,
    /// The first memory slice of the instance.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub start: Option<u8>,
    /// The UUID of the instance, for tools of the host.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub uuid: Option<String>,
    /// Whether the driver says how much memory each process has, so that memory which a driver takes beyond a grant is charged to the
    /// VM whose it is. A probe finds that out soon after the unit begins to lend. Until then, and where it does not, as on every MIG
    /// instance, VMs of one organisation share the unit only with each other, unless the configuration says otherwise.
    pub figures_per_process: bool,
    /// VMs that have a place on it.
    pub vms: u32,
    /// Its arbiter's process.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub arbiter_process: Option<u32>,
    /// Its memory, in lists as of the last second; nothing while it is not known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory: Option<UnitMemory>,
    /// Messages of an epoch that was over.
    pub stale_epoch_messages: u64,
}

/// What a unit is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum UnitKind {
    /// A whole GPU, shared by time-slice.
    TimeSlice,
    /// A MIG instance.
    Mig,
}

/// Whether a unit lends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum UnitState {
    /// Its memory is being taken and made clean.
    Starting,
    /// It lends.
    Lending,
    /// It lends to those that are there, none comes, and they move away when they have no session.
    Draining,
    /// It is out of service until an operator says otherwise.
    Quarantined,
}

/// A unit's memory in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct UnitMemory {
    /// In custody.
    pub total_bytes: u64,
    /// Lent.
    pub lent_bytes: u64,
    /// Clean, to be lent.
    pub clean_bytes: u64,
    /// Waiting to be scrubbed.
    pub dirty_bytes: u64,
    /// Released for the driver to grow into.
    pub headroom_bytes: u64,
    /// Not proven clean after all tries, and never lent again.
    pub suspect_bytes: u64,
}

/// Units.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Units {
    /// All of them.
    pub units: Vec<Unit>,
}

/// Whether a GPU is to be divided.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Division {
    /// Whether it is to be divided into instances.
    pub enabled: bool,
}
