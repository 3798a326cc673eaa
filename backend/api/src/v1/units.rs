//! `/v1/gpus`, `/v1/units`: GPUs, units, and their lent memory.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// A GPU.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Gpu {
    /// Ordinal of the GPU.
    pub gpu: u32,
    /// UUID, if the driver reports it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub uuid: Option<String>,
    /// Name of the model, if the driver reports it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// NUMA node near the GPU.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub numa_node: Option<u32>,
    /// True if the GPU is divided into MIG instances.
    pub mig: bool,
    /// MIG mode after the next GPU reset, if different from `mig`. The GPU is out of service until then.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mig_pending: Option<bool>,
    /// Availability for VMs.
    pub state: GpuState,
    /// Numbers of its units.
    pub units: Vec<u32>,
    /// Number of instances that Sluice did not create. Sluice does not touch them.
    pub foreign_instances: u32,
    /// Loss by the positions of its instances: 0 if they could not lie better, near 1 if they block nearly everything.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fragmentation: Option<f64>,
}

/// Availability of a GPU for VMs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum GpuState {
    /// VMs may be placed on the GPU.
    Open,
    /// No new VM is placed on the GPU. Each VM on it moves away when it has no session.
    Draining,
    /// No new VM is placed on the GPU.
    Quarantined,
}

/// A list of GPUs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Gpus {
    /// All GPUs.
    pub gpus: Vec<Gpu>,
    /// True if the driver's management library answers. While it does not, the fields it supplies are unknown.
    pub inventory: bool,
}

/// A placement unit: a GPU or one of its MIG instances.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Unit {
    /// Number of the unit.
    pub unit: u32,
    /// Ordinal of its GPU.
    pub gpu: u32,
    /// Kind of the unit.
    pub kind: UnitKind,
    /// State of the unit.
    pub state: UnitState,
    /// Reason of the quarantine.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// MIG profile, by its name or its number in the driver.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub profile: Option<String>,
    /// First memory slice of the instance.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub start: Option<u8>,
    /// UUID of the instance, for tools of the host.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub uuid: Option<String>,
    /// True if the driver reports the memory of each process, so that memory a driver takes beyond a grant is charged to the right VM. A
    /// probe finds out soon after the unit begins to lend. While false, as always on a MIG instance, only VMs of one organisation share the
    /// unit, unless the configuration allows more.
    pub figures_per_process: bool,
    /// The memory of their worker's process that kernels reach although CUDA was never given it. If any, the unit serves one VM at a
    /// time, unless the configuration allows more. Absent while unknown; until then no VM joins another.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host_memory_access: Option<HostMemoryAccess>,
    /// Number of VMs placed on it.
    pub vms: u32,
    /// Process id of its arbiter.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub arbiter_process: Option<u32>,
    /// Memory of the unit, as its arbiter last reported it. In lists usually at most a second old. Absent while unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory: Option<UnitMemory>,
    /// Number of messages dropped because their epoch was over.
    pub stale_epoch_messages: u64,
}

/// The memory of its process that a kernel reaches although CUDA was never given it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum HostMemoryAccess {
    /// None.
    None,
    /// All pageable memory (HMM): the driver's attribute 88 is set.
    Pageable,
    /// All memory, through the host's page tables (ATS): the driver's attribute 100 is set.
    HostPageTables,
}

/// Kind of a unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum UnitKind {
    /// A whole GPU, shared by time-slice.
    TimeSlice,
    /// A MIG instance.
    Mig,
}

/// State of a unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum UnitState {
    /// Its memory is being taken and scrubbed.
    Starting,
    /// It lends memory.
    Lending,
    /// It lends only to the VMs on it. No new VM is placed on it, and each VM moves away when it has no session.
    Draining,
    /// It is out of service until an operator readmits it.
    Quarantined,
}

/// Memory of a unit, in bytes, and the age of these figures.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct UnitMemory {
    /// Memory in custody.
    pub total_bytes: u64,
    /// Memory lent to VMs.
    pub lent_bytes: u64,
    /// Clean memory, ready to be lent.
    pub clean_bytes: u64,
    /// Memory waiting to be scrubbed.
    pub dirty_bytes: u64,
    /// Memory released for the driver to grow into.
    pub headroom_bytes: u64,
    /// Memory not proven clean after all tries. It is never lent again.
    pub suspect_bytes: u64,
    /// Seconds since the unit's arbiter reported these figures: 0 unless it is late with its answers.
    pub age_seconds: u64,
}

/// A list of units.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Units {
    /// All units.
    pub units: Vec<Unit>,
}

/// Request to switch the MIG mode of a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct MigModeRequest {
    /// True to divide the GPU into MIG instances.
    pub enabled: bool,
}
