//! `/v1/vms`: VMs.

use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use super::{
    MemoryShare, MemoryShareRequest, Rules, RulesRequest, TimeShare, TimeShareRequest, UnitKind, settings,
};
use crate::json::{objects_of, optional_object};

/// Request to create or change a VM.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct VmRequest {
    /// Named size, which supplies the fields that are not given.
    #[schema(pattern = "^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
    pub size: Option<String>,
    /// Quota of device memory on each unit in bytes, counted in chunks of 2 MiB. Default: that of the size, else that of the host.
    #[schema(minimum = 2097152, maximum = 4503599627370496_u64)]
    pub memory_bytes: Option<u64>,
    /// Limits of memory beside the quota, and within it.
    #[serde(flatten)]
    #[schema(schema_with = settings::asked_of_vm::<MemoryShareRequest>)]
    pub share: MemoryShareRequest,
    /// Share of a unit's time.
    #[serde(flatten)]
    #[schema(schema_with = settings::asked_of_vm::<TimeShareRequest>)]
    pub time: TimeShareRequest,
    /// Rules for the fences that Sluice sets by itself.
    #[serde(flatten)]
    #[schema(schema_with = settings::asked_alone::<RulesRequest>)]
    pub rules: RulesRequest,
    /// Constraints on the placement. Cannot be changed.
    #[serde(deserialize_with = "optional_object")]
    pub placement: Option<Placement>,
    /// Name of its organisation. Default: that of its project. Cannot be changed.
    #[schema(pattern = "^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
    pub organisation: Option<String>,
    /// Name of its project. Cannot be changed.
    #[schema(pattern = "^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
    pub project: Option<String>,
    /// Displays of its graphics device: 1 for guest kernels before 6.12. Cannot be changed.
    #[schema(minimum = 0, maximum = 1)]
    pub scanouts: u8,
    /// True for programs of this host, which connect to the device themselves; there is no VM. Cannot be changed.
    pub direct: bool,
    /// Growth of the memory that each guest process shares with its worker. Cannot be changed. No effect over a virtual socket.
    pub arena: ArenaPolicy,
    /// Size of a fixed arena in bytes, a multiple of 2 MiB, at most `pinned_bytes`; each guest process that uses a device has one.
    /// Default: 64 MiB. Only with `arena` fixed.
    #[schema(minimum = 16777216, maximum = 1073741824, multiple_of = 2097152)]
    pub arena_bytes: Option<u64>,
    /// Memory of the guest in bytes, for the arguments of its VMM.
    #[schema(minimum = 1, maximum = 4503599627370496_u64)]
    pub guest_memory_bytes: Option<u64>,
}

/// Growth of the host memory that a guest process shares with its worker: pinned memory, and staging for copies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ArenaPolicy {
    /// It grows with its use. A compromised worker reaches all memory of its VM.
    #[default]
    Growing,
    /// It has one size from the start of the session. A compromised worker reaches only that.
    Fixed,
}

/// Scheduling priority.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Priority {
    /// Work runs after that of all other priorities.
    Low,
    /// The usual priority.
    #[default]
    Normal,
    /// Work runs before that of all other priorities.
    High,
}

/// Ordinal of a GPU of the host.
#[derive(ToSchema)]
#[schema(minimum = 0, maximum = 63)]
#[expect(dead_code, reason = "only its schema is used")]
struct GpuOrdinal(u32);

/// Maximum number of GPUs of one VM.
pub const MAX_GPUS: usize = 16;

/// Constraints on the placement of a VM. Sluice chooses the rest.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Placement {
    /// Kind of unit.
    pub policy: Policy,
    /// Isolation from other VMs.
    pub isolation: Isolation,
    /// Ordinal of the required GPU.
    #[schema(minimum = 0, maximum = 63)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gpu: Option<u32>,
    /// Ordinals of the GPUs that it gets together, each whole, in place of `gpu`; its guest sees a device for each. Its quota holds on
    /// each. Needs an operator.
    #[schema(max_items = 16, value_type = Vec<GpuOrdinal>)]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub gpus: Vec<u32>,
    /// Required first memory slice of its instance. Needs `gpu`.
    #[schema(minimum = 0, maximum = 63)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub start: Option<u8>,
    /// Required MIG profile: its number in the driver, or its name, for instance `1g.10gb`.
    #[schema(max_length = 64)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub profile: Option<String>,
    /// True to accept a larger instance if there is no place for one of the profile.
    pub allow_larger: bool,
    /// Minimum number of multiprocessors of its unit.
    #[schema(minimum = 0, maximum = 65535)]
    pub multiprocessors: u32,
    /// Maximum number of VMs on its unit, itself included. Default: that of the size, else no limit.
    #[schema(minimum = 1, maximum = 65535)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub replicas: Option<u32>,
    /// NUMA node of its processors. A GPU near it is preferred.
    #[schema(minimum = 0, maximum = 65535)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub numa_node: Option<u32>,
    /// Anti-affinity rules: VMs and groups of its organisation to keep off its GPU.
    #[schema(max_items = 64)]
    #[serde(deserialize_with = "objects_of")]
    pub anti_affinity: Vec<AntiAffinity>,
}

/// Anti-affinity rule: a VM or a group of the same organisation.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct AntiAffinity {
    /// Name of a VM. The VM need not exist yet.
    #[schema(pattern = "^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vm: Option<String>,
    /// Name of a group: all VMs with a rule of the same name.
    #[schema(pattern = "^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
    /// True if the rule is only a preference.
    pub preferred: bool,
}

/// Kind of unit for a VM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Policy {
    /// A MIG instance.
    Mig,
    /// A unit shared by time-slice.
    TimeSlice,
    /// Either of them.
    #[default]
    Any,
}

/// Isolation of a VM from other VMs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Isolation {
    /// Shares its unit with other VMs, by turns.
    #[default]
    Shared,
    /// Has a unit of its own.
    Strict,
    /// Has a GPU of its own.
    ExclusiveGpu,
}

/// A VM.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Vm {
    /// Name of the VM.
    pub id: String,
    /// Number of the VM in processes and logs.
    pub number: u32,
    /// State of its device.
    pub state: VmState,
    /// Reason why it has no device.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub failure: Option<String>,
    /// True if it can begin no new session.
    pub draining: bool,
    /// State of its fence.
    pub fence: Fence,
    /// Named size.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub size: Option<String>,
    /// Quota of device memory on each unit, in bytes. 0: all memory of the unit.
    pub memory_bytes: u64,
    /// Limits of memory beside the quota, and within it.
    #[serde(flatten)]
    #[schema(schema_with = settings::answered::<MemoryShareRequest>)]
    pub share: MemoryShare,
    /// Share of a unit's time.
    #[serde(flatten)]
    #[schema(schema_with = settings::answered::<TimeShareRequest>)]
    pub time: TimeShare,
    /// Rules for the fences that Sluice sets by itself.
    #[serde(flatten)]
    #[schema(schema_with = settings::answered::<RulesRequest>)]
    pub rules: Rules,
    /// Constraints on the placement.
    pub placement: Placement,
    /// Name of its organisation.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub organisation: Option<String>,
    /// Name of its project.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub project: Option<String>,
    /// Displays of its graphics device.
    pub scanouts: u8,
    /// True if programs of this host connect to the device themselves.
    pub direct: bool,
    /// Growth of the memory that each guest process shares with its worker.
    pub arena: ArenaPolicy,
    /// Size of a fixed arena in bytes; absent if arenas grow.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub arena_bytes: Option<u64>,
    /// Memory of the guest, in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub guest_memory_bytes: Option<u64>,
    /// Creation time, in seconds since 1970.
    pub created: u64,
    /// User id of its creator.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub owner_uid: Option<u32>,
    /// Connection data for its VMM.
    pub connect: Connect,
    /// Process id of its device.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device_process: Option<u32>,
    /// Guest processes that have a worker or are getting one.
    pub sessions: Vec<Session>,
    /// Current place; of a VM with several GPUs, its first. Absent for a VM without a unit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub placed: Option<Placed>,
    /// State on each of its units. In lists at most a second old.
    pub units: Vec<VmUnit>,
}

/// State of a VM's device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum VmState {
    /// The device is starting.
    Starting,
    /// The VMM can connect.
    Running,
    /// The device cannot be started. A PUT tries again.
    Failed,
}

/// State of a VM's fence.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Fence {
    /// Current step.
    pub step: FenceStep,
    /// Epoch of the VM. It grows with each admission.
    pub epoch: u64,
    /// In quarantine: true if everything was taken from the VM and is clean.
    pub clean: bool,
    /// Reason of the fence.
    pub reason: String,
    /// Authority that fenced the VM; absent while the VM is active. Only an operator ends a fence by an operator.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub by: Option<FencedBy>,
}

/// An authority that fences VMs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum FencedBy {
    /// A tenant, for a VM of its own.
    Tenant,
    /// A policy that the VM violated.
    Policy,
    /// An operator.
    Operator,
}

/// A step of a fence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum FenceStep {
    /// The VM is not fenced.
    Active,
    /// The VM gets nothing new.
    Fencing,
    /// Its workers are being killed.
    Killed,
    /// Its memory is being taken back.
    Revoked,
    /// Its memory is being scrubbed.
    Scrubbed,
    /// The fence is complete: everything is taken from the VM, or no more can be done.
    Quarantined,
}

/// Connection data for a VMM.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Connect {
    /// Path of the vhost-user socket.
    pub socket: String,
    /// Arguments for QEMU. The guest's memory must be shared. `guest_memory_bytes` adds that; without it, add `-object
    /// memory-backend-memfd,id=sluice-memory,size=SIZE,share=on -machine memory-backend=sluice-memory`.
    pub qemu: Vec<String>,
    /// Arguments for Cloud Hypervisor 53 or newer; version 52 calls the `device_type` `virtio_id`. Without `guest_memory_bytes` add
    /// `--memory size=SIZE,shared=on`.
    pub cloud_hypervisor: Vec<String>,
    /// Alternative for guests that share no memory with the host.
    pub vsock: Vsock,
}

/// A virtual socket device, for a guest kernel without the `virtio_gpu` driver or a VMM without vhost-user devices. The guest's library
/// finds the host through it automatically. If the VMM creates a socket beside the device's, it must have permission to; otherwise give it
/// a path of its own, with a symbolic link beside it that has the same ending and leads to the device's socket.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Vsock {
    /// Path of the socket for connections from the guest to port 29548 of the host (CID 2). Programs without a VM connect with
    /// `SLUICE_TRANSPORT=vsock SLUICE_SOCKET=PATH`.
    pub socket: String,
    /// Arguments for Cloud Hypervisor.
    pub cloud_hypervisor: Vec<String>,
    /// Body of `PUT /vsock` for Firecracker.
    pub firecracker: Firecracker,
    /// Arguments for the program `vhost-device-vsock`, which QEMU needs for its vsock device.
    pub vhost_device_vsock: Vec<String>,
    /// Arguments for QEMU, in addition to those for shared memory.
    pub qemu: Vec<String>,
}

/// A virtual socket device of Firecracker.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Firecracker {
    /// CID of the guest.
    pub guest_cid: u32,
    /// Path at which Firecracker creates its socket.
    pub uds_path: String,
}

/// A guest process and its worker.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Session {
    /// Number of the session in its device.
    pub session: u32,
    /// Process id of its worker.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub worker: Option<u32>,
}

/// Current place of a VM.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Placed {
    /// Number of the unit.
    pub unit: u32,
    /// Ordinal of its GPU.
    pub gpu: u32,
    /// Kind of the unit.
    pub kind: UnitKind,
    /// MIG profile, by its name or its number in the driver.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub profile: Option<String>,
    /// First memory slice of the instance.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub start: Option<u8>,
    /// True if other VMs may be placed on the unit.
    pub shared: bool,
}

/// State of a VM on a unit.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct VmUnit {
    /// Number of the unit.
    pub unit: u32,
    /// Device memory lent to the VM, in bytes.
    pub lent_bytes: u64,
    /// Memory that the driver takes for the VM, in bytes. The part beyond its headroom counts towards the quota.
    pub headroom_bytes: u64,
    /// Memory given back and not clean yet, in bytes.
    pub dirty_bytes: u64,
    /// Number of workers that the driver may still know.
    pub holders: u32,
    /// GPU time used in this epoch since the start of the unit's arbiter, in seconds.
    pub gpu_seconds: f64,
}

/// A list of VMs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Vms {
    /// VMs that the caller may see.
    pub vms: Vec<Vm>,
}

/// Request to fence a VM.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct FenceRequest {
    /// Reason, for the log.
    #[schema(max_length = 200)]
    pub reason: Option<String>,
}

/// Target of a move.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct MoveQuery {
    /// Kind of the new unit: `mig` for an instance of its own, `time-slice` for a shared GPU or instance. The VM's policy must allow it.
    pub kind: Option<UnitKind>,
    /// Ordinal of the GPU. Later moves are not bound to it.
    pub gpu: Option<u32>,
}
