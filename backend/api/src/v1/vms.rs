//! `/v1/vms`: VMs.

use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use super::UnitKind;
use crate::json::{objects_of, optional_object};

/// A VM as a client wants it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct VmRequest {
    /// Named size that gives what is not said here.
    #[schema(pattern = "^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
    pub size: Option<String>,
    /// Device memory it may have of each unit; what its size says, or the host's default, if not given. Counted in chunks of 2 MiB.
    #[schema(minimum = 2097152, maximum = 4503599627370496_u64)]
    pub memory_bytes: Option<u64>,
    /// Of that, what is kept for it; the rest it has while nobody else does.
    #[schema(minimum = 0, maximum = 4503599627370496_u64)]
    pub guaranteed_bytes: Option<u64>,
    /// Bytes beside the quota, to which what the driver takes for this VM is charged first; 0 if not given.
    #[schema(minimum = 0, maximum = 4503599627370496_u64)]
    pub headroom_bytes: Option<u64>,
    /// Guest memory it may have pinned; no limit if not given.
    #[schema(minimum = 0, maximum = 4503599627370496_u64)]
    pub pinned_bytes: Option<u64>,
    /// Its share of GPU time in relation to others; 100 if not given.
    #[schema(minimum = 1, maximum = 10000)]
    pub weight: Option<u32>,
    /// Whose work goes first; `normal` if not given.
    pub priority: Option<Priority>,
    /// Thousandths of a unit's time that it never exceeds; no limit if not given.
    #[schema(minimum = 1, maximum = 1000)]
    pub cap_permille: Option<u32>,
    /// Thousandths of a unit's time that it has whenever it wants them.
    #[schema(minimum = 0, maximum = 1000)]
    pub guarantee_permille: Option<u32>,
    /// Where it may be. Cannot be changed.
    #[serde(deserialize_with = "optional_object")]
    pub placement: Option<Placement>,
    /// Its organisation; its project's if not given. Cannot be changed.
    #[schema(pattern = "^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
    pub organisation: Option<String>,
    /// Its project. Cannot be changed.
    #[schema(pattern = "^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
    pub project: Option<String>,
    /// Displays of its graphics device: 1 for guest kernels before 6.12. Cannot be changed.
    #[schema(minimum = 0, maximum = 1)]
    pub scanouts: u8,
    /// Whether there is no VM: programs of this host connect to the device themselves. Cannot be changed.
    pub direct: bool,
    /// Seconds after which it is admitted again when a policy or its tenant fenced it; when an operator says so if not given. Not
    /// after a fence by an operator.
    #[schema(minimum = 1, maximum = 2147483647)]
    pub readmit_after_seconds: Option<u32>,
    /// Seconds after which work of which nothing ends makes its worker be ended; never if not given.
    #[schema(minimum = 1, maximum = 4294967_u32)]
    pub hang_after_seconds: Option<u32>,
    /// Memory of the guest, for the arguments of its VMM.
    #[schema(minimum = 1, maximum = 4503599627370496_u64)]
    pub guest_memory_bytes: Option<u64>,
}

/// Whose work goes first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Priority {
    /// Behind all others.
    Low,
    /// As usual.
    #[default]
    Normal,
    /// Before all others.
    High,
}

/// Where a VM may be. What is not said is chosen.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Placement {
    /// On what kind of unit.
    pub policy: Policy,
    /// With whom on it.
    pub isolation: Isolation,
    /// The GPU it must be on, by ordinal.
    #[schema(minimum = 0, maximum = 63)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gpu: Option<u32>,
    /// The first memory slice its instance must have; with `gpu`.
    #[schema(minimum = 0, maximum = 63)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub start: Option<u8>,
    /// The kind of instance it must have: the driver's number of the profile, or its name, for instance `1g.10gb`.
    #[schema(max_length = 64)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub profile: Option<String>,
    /// Whether a larger instance is better than none.
    pub allow_larger: bool,
    /// The least multiprocessors of its unit.
    #[schema(minimum = 0, maximum = 65535)]
    pub multiprocessors: u32,
    /// The most VMs that share its unit, itself included; its size's if not given, else any number.
    #[schema(minimum = 1, maximum = 65535)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub replicas: Option<u32>,
    /// The NUMA node of its processors: a GPU near it is preferred.
    #[schema(minimum = 0, maximum = 65535)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub numa_node: Option<u32>,
    /// VMs and groups of its organisation that must not, or should not, be on its GPU.
    #[schema(max_items = 64)]
    #[serde(deserialize_with = "objects_of")]
    pub anti_affinity: Vec<Apart>,
}

/// A VM, or a group, of the same organisation that a VM keeps away from.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Apart {
    /// A VM, which need not be there yet.
    #[schema(pattern = "^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vm: Option<String>,
    /// All VMs that name the same group.
    #[schema(pattern = "^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
    /// Whether it is a preference only.
    pub preferred: bool,
}

/// On what kind of unit a VM may be.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Policy {
    /// A MIG instance.
    Mig,
    /// A unit shared by time-slice.
    TimeSlice,
    /// Either.
    #[default]
    Any,
}

/// With whom a VM may be on a unit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Isolation {
    /// With others, by turns.
    #[default]
    Shared,
    /// A unit of its own.
    Strict,
    /// A GPU of its own.
    StrictPlus,
}

/// A VM.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Vm {
    /// Its name.
    pub id: String,
    /// What processes and logs know it by.
    pub number: u32,
    /// Whether it has its device.
    pub state: VmState,
    /// Why it has none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub failure: Option<String>,
    /// Whether the configuration file names it; then it is changed there.
    pub configured: bool,
    /// Whether it begins no session any more.
    pub draining: bool,
    /// How far it is on its way out, or in again.
    pub fence: Fence,
    /// Named size.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub size: Option<String>,
    /// Device memory it may have of each unit; 0 for all of it.
    pub memory_bytes: u64,
    /// Of that, what is kept for it.
    pub guaranteed_bytes: u64,
    /// Bytes beside the quota, to which what the driver takes for this VM is charged first.
    pub headroom_bytes: u64,
    /// Guest memory it may have pinned; 0 for no limit.
    pub pinned_bytes: u64,
    /// Its share of GPU time in relation to others.
    pub weight: u32,
    /// Whose work goes first.
    pub priority: Priority,
    /// Thousandths of a unit's time that it never exceeds; 0 for no limit.
    pub cap_permille: u32,
    /// Thousandths of a unit's time that it has whenever it wants them.
    pub guarantee_permille: u32,
    /// Where it may be.
    pub placement: Placement,
    /// Its organisation.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub organisation: Option<String>,
    /// Its project.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub project: Option<String>,
    /// Displays of its graphics device.
    pub scanouts: u8,
    /// Whether programs of this host connect to the device themselves.
    pub direct: bool,
    /// Seconds after which it is admitted again when it was fenced; 0 for when an operator says so.
    pub readmit_after_seconds: u32,
    /// Seconds after which work of which nothing ends makes its worker be ended; 0 for never.
    pub hang_after_seconds: u32,
    /// Memory of the guest.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub guest_memory_bytes: Option<u64>,
    /// When it was made, in seconds since 1970; 0 for one of the configuration file.
    pub created: u64,
    /// The user that made it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub owner_uid: Option<u32>,
    /// What its VMM connects to.
    pub connect: Connect,
    /// Its device's process.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device_process: Option<u32>,
    /// Guest processes that have a worker, or get one.
    pub sessions: Vec<Session>,
    /// Where it is; nothing for one of the configuration file, which is on every whole device, and for one that has no unit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub placed: Option<Placed>,
    /// What it has of each of its units, in lists as of the last second.
    pub units: Vec<VmUnit>,
}

/// Whether a VM has its device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum VmState {
    /// It is getting it.
    Starting,
    /// Its VMM can connect.
    Running,
    /// It cannot have one; a PUT tries again.
    Failed,
}

/// How far a VM is on its way out, or in again.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Fence {
    /// The step.
    pub step: FenceStep,
    /// Grows with each admission.
    pub epoch: u64,
    /// In quarantine: whether everything was taken from it and is clean.
    pub clean: bool,
    /// Why it was fenced.
    pub reason: String,
    /// The authority that fenced it; nothing while it is active. An operator ends what an operator fenced.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub by: Option<FencedBy>,
}

/// An authority that fences VMs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum FencedBy {
    /// A tenant, its own VM.
    Tenant,
    /// A rule that the VM broke.
    Policy,
    /// An operator.
    Operator,
}

/// A step on the way out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum FenceStep {
    /// It has what it may have.
    Active,
    /// Nothing new is given to it.
    Fencing,
    /// Its workers are being ended.
    Killed,
    /// What was lent to it is coming back.
    Revoked,
    /// What came back is being scrubbed.
    Scrubbed,
    /// Nothing is left of it, or nothing more can be done.
    Quarantined,
}

/// What a VMM connects to.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Connect {
    /// The vhost-user socket.
    pub socket: String,
    /// Arguments for QEMU. The guest's memory must be shared: with `guest_memory_bytes` that is among them, else add
    /// `-object memory-backend-memfd,id=sluice-memory,size=SIZE,share=on -machine memory-backend=sluice-memory`.
    pub qemu: Vec<String>,
    /// Arguments for Cloud Hypervisor, 53 or newer; 52 calls the `device_type` `virtio_id`. Without `guest_memory_bytes` add
    /// `--memory size=SIZE,shared=on`.
    pub cloud_hypervisor: Vec<String>,
    /// Instead, for guests that share no memory with the host.
    pub vsock: Vsock,
}

/// For guests whose kernel has no `virtio_gpu` driver, or whose VMM no vhost-user device: a virtual socket device. The guest's
/// library finds the host through it by itself. A VMM that makes a socket beside the device's must be allowed to, or be given a
/// path of its own, beside which a symbolic link of the same ending leads to the device's.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Vsock {
    /// What a connection of the guest to port 29548 of the host (CID 2) must reach. Programs without a VM connect with
    /// `SLUICE_TRANSPORT=vsock SLUICE_SOCKET=PATH`.
    pub socket: String,
    /// Arguments for Cloud Hypervisor.
    pub cloud_hypervisor: Vec<String>,
    /// What Firecracker takes as `PUT /vsock`.
    pub firecracker: Firecracker,
    /// Arguments for the program `vhost-device-vsock`, which QEMU needs for its own.
    pub vhost_device_vsock: Vec<String>,
    /// Arguments for QEMU, besides shared memory.
    pub qemu: Vec<String>,
}

/// A virtual socket device of Firecracker.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Firecracker {
    /// The guest's address.
    pub guest_cid: u32,
    /// Where Firecracker makes its socket.
    pub uds_path: String,
}

/// A guest process.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Session {
    /// The device's number of it.
    pub session: u32,
    /// Its worker's process.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub worker: Option<u32>,
}

/// Where a VM is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Placed {
    /// The unit.
    pub unit: u32,
    /// Its GPU.
    pub gpu: u32,
    /// What the unit is.
    pub kind: UnitKind,
    /// The kind of instance, by the driver's name or number.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub profile: Option<String>,
    /// The first memory slice of the instance.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub start: Option<u8>,
    /// Whether other VMs may be on it.
    pub shared: bool,
}

/// What a VM has of a unit.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct VmUnit {
    /// The unit.
    pub unit: u32,
    /// Device memory lent to it.
    pub lent_bytes: u64,
    /// What the driver takes for it; beyond the VM's headroom it is part of the quota.
    pub headroom_bytes: u64,
    /// What it gave back and is not clean yet.
    pub dirty_bytes: u64,
    /// Workers that the driver may still know.
    pub holders: u32,
    /// GPU time it has used in this epoch, since the unit's arbiter was started.
    pub gpu_seconds: f64,
}

/// VMs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Vms {
    /// Those that the caller may look at.
    pub vms: Vec<Vm>,
}

/// Why a VM is fenced.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct FenceRequest {
    /// For the log.
    #[schema(max_length = 200)]
    pub reason: Option<String>,
}

/// Where a VM is to go.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct MoveQuery {
    /// What its unit is to be: `mig` for an instance of its own, `time-slice` for a GPU or an instance that is shared. Its policy must
    /// allow it.
    pub kind: Option<UnitKind>,
    /// The GPU. It is not kept to it later.
    pub gpu: Option<u32>,
}
