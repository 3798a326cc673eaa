//! `/v1/vms`: VMs.

#![expect(unused_qualifications, reason = "what the macro makes of parameters of both kinds")]

use std::{rc::Rc, time::Duration};

use axum::{
    Json,
    extract::State,
    http::{StatusCode, header::CONTENT_TYPE},
    response::IntoResponse,
};
use serde::{Deserialize, Serialize, Serializer as _};
use tokio::time::timeout;
use utoipa::{IntoParams, ToSchema};

use super::status;
use crate::{
    api::Api,
    api::error::{ChangeErrors, Errors},
    api::extract::{Asked, Body, Id, VmName, objects_of, optional_object},
    caller::Caller,
    error::{Code, Error},
    placement::placer::Spotted,
    records::state::objects::{self, SizeObject, VmObject},
    registry::{CHUNK, Known, Registry},
    vms::fence::{self, Step},
    vms::vm::{Phase, Vm as Room},
};

/// Bytes that can be asked for at most: 2^52, which every JSON reader gets right.
const BYTES: u64 = 1 << 52;

/// The largest number of 32 bits that can be asked for: readers of JSON that know signs get it right, too.
pub(super) const NUMBER: u32 = i32::MAX.unsigned_abs();

/// How long units may take to say what they have.
pub(super) const LOOK: Duration = Duration::from_secs(1);

/// A VM as a client wants it.
#[derive(Clone, Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct VmRequest {
    /// Named size that gives what is not said here.
    #[schema(pattern = "^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
    size: Option<String>,
    /// Device memory it may have of each unit; what its size says, or the host's default, if not given. Counted in chunks of 2 MiB.
    #[schema(minimum = 2097152, maximum = 4503599627370496_u64)]
    memory_bytes: Option<u64>,
    /// Of that, what is kept for it; the rest it has while nobody else does.
    #[schema(minimum = 0, maximum = 4503599627370496_u64)]
    guaranteed_bytes: Option<u64>,
    /// Bytes beside the quota, to which what the driver takes for this VM is charged first; 0 if not given.
    #[schema(minimum = 0, maximum = 4503599627370496_u64)]
    headroom_bytes: Option<u64>,
    /// Guest memory it may have pinned; no limit if not given.
    #[schema(minimum = 0, maximum = 4503599627370496_u64)]
    pinned_bytes: Option<u64>,
    /// Its share of GPU time in relation to others; 100 if not given.
    #[schema(minimum = 1, maximum = 10000)]
    weight: Option<u32>,
    /// Whose work goes first; `normal` if not given.
    priority: Option<Priority>,
    /// Thousandths of a unit's time that it never exceeds; no limit if not given.
    #[schema(minimum = 1, maximum = 1000)]
    cap_permille: Option<u32>,
    /// Thousandths of a unit's time that it has whenever it wants them.
    #[schema(minimum = 0, maximum = 1000)]
    guarantee_permille: Option<u32>,
    /// Where it may be. Cannot be changed.
    #[serde(deserialize_with = "optional_object")]
    placement: Option<Placement>,
    /// Its organisation; its project's if not given. Cannot be changed.
    #[schema(pattern = "^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
    organisation: Option<String>,
    /// Its project. Cannot be changed.
    #[schema(pattern = "^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
    project: Option<String>,
    /// Displays of its graphics device: 1 for guest kernels before 6.12. Cannot be changed.
    #[schema(minimum = 0, maximum = 1)]
    scanouts: u8,
    /// Whether there is no VM: programs of this host connect to the device themselves. Cannot be changed.
    direct: bool,
    /// Seconds after which it is admitted again when a policy or its tenant fenced it; when an operator says so if not given. Not
    /// after a fence by an operator.
    #[schema(minimum = 1, maximum = 2147483647)]
    readmit_after_seconds: Option<u32>,
    /// Seconds after which work of which nothing ends makes its worker be ended; never if not given.
    #[schema(minimum = 1, maximum = 4294967_u32)]
    hang_after_seconds: Option<u32>,
    /// Memory of the guest, for the arguments of its VMM.
    #[schema(minimum = 1, maximum = 4503599627370496_u64)]
    guest_memory_bytes: Option<u64>,
}

/// Whose work goes first.
#[derive(Clone, Copy, Debug, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Priority {
    /// Behind all others.
    Low,
    /// As usual.
    Normal,
    /// Before all others.
    High,
}

/// Where a VM may be. What is not said is chosen.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Placement {
    /// On what kind of unit.
    policy: Policy,
    /// With whom on it.
    isolation: Isolation,
    /// The GPU it must be on, by ordinal.
    #[schema(minimum = 0, maximum = 63)]
    #[serde(skip_serializing_if = "Option::is_none")]
    gpu: Option<u32>,
    /// The first memory slice its instance must have; with `gpu`.
    #[schema(minimum = 0, maximum = 63)]
    #[serde(skip_serializing_if = "Option::is_none")]
    start: Option<u8>,
    /// The kind of instance it must have: the driver's number of the profile, or its name, for instance `1g.10gb`.
    #[schema(max_length = 64)]
    #[serde(skip_serializing_if = "Option::is_none")]
    profile: Option<String>,
    /// Whether a larger instance is better than none.
    allow_larger: bool,
    /// The least multiprocessors of its unit.
    #[schema(minimum = 0, maximum = 65535)]
    multiprocessors: u32,
    /// The most VMs that share its unit, itself included; its size's if not given, else any number.
    #[schema(minimum = 1, maximum = 65535)]
    #[serde(skip_serializing_if = "Option::is_none")]
    replicas: Option<u32>,
    /// The NUMA node of its processors: a GPU near it is preferred.
    #[schema(minimum = 0, maximum = 65535)]
    #[serde(skip_serializing_if = "Option::is_none")]
    numa_node: Option<u32>,
    /// VMs and groups of its organisation that must not, or should not, be on its GPU.
    #[schema(max_items = 64)]
    #[serde(deserialize_with = "objects_of")]
    anti_affinity: Vec<Apart>,
}

/// A VM, or a group, of the same organisation that a VM keeps away from.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Apart {
    /// A VM, which need not be there yet.
    #[schema(pattern = "^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
    #[serde(skip_serializing_if = "Option::is_none")]
    vm: Option<String>,
    /// All VMs that name the same group.
    #[schema(pattern = "^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
    #[serde(skip_serializing_if = "Option::is_none")]
    group: Option<String>,
    /// Whether it is a preference only.
    preferred: bool,
}

/// On what kind of unit a VM may be.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Policy {
    /// A MIG instance.
    Mig,
    /// A unit shared by time-slice.
    TimeSlice,
    /// Either.
    #[default]
    Any,
}

/// With whom a VM may be on a unit.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Isolation {
    /// With others, by turns.
    #[default]
    Shared,
    /// A unit of its own.
    Strict,
    /// A GPU of its own.
    StrictPlus,
}

/// A VM.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct Vm {
    /// Its name.
    id: String,
    /// What processes and logs know it by.
    number: u32,
    /// Whether it has its device.
    state: VmState,
    /// Why it has none.
    #[serde(skip_serializing_if = "Option::is_none")]
    failure: Option<String>,
    /// Whether the configuration file names it; then it is changed there.
    configured: bool,
    /// Whether it begins no session any more.
    draining: bool,
    /// How far it is on its way out, or in again.
    fence: Fence,
    /// Named size.
    #[serde(skip_serializing_if = "Option::is_none")]
    size: Option<String>,
    /// Device memory it may have of each unit; 0 for all of it.
    memory_bytes: u64,
    /// Of that, what is kept for it.
    guaranteed_bytes: u64,
    /// Bytes beside the quota, to which what the driver takes for this VM is charged first.
    headroom_bytes: u64,
    /// Guest memory it may have pinned; 0 for no limit.
    pinned_bytes: u64,
    /// Its share of GPU time in relation to others.
    weight: u32,
    /// Whose work goes first.
    priority: Priority,
    /// Thousandths of a unit's time that it never exceeds; 0 for no limit.
    cap_permille: u32,
    /// Thousandths of a unit's time that it has whenever it wants them.
    guarantee_permille: u32,
    /// Where it may be.
    placement: Placement,
    /// Its organisation.
    #[serde(skip_serializing_if = "Option::is_none")]
    organisation: Option<String>,
    /// Its project.
    #[serde(skip_serializing_if = "Option::is_none")]
    project: Option<String>,
    /// Displays of its graphics device.
    scanouts: u8,
    /// Whether programs of this host connect to the device themselves.
    direct: bool,
    /// Seconds after which it is admitted again when it was fenced; 0 for when an operator says so.
    readmit_after_seconds: u32,
    /// Seconds after which work of which nothing ends makes its worker be ended; 0 for never.
    hang_after_seconds: u32,
    /// Memory of the guest.
    #[serde(skip_serializing_if = "Option::is_none")]
    guest_memory_bytes: Option<u64>,
    /// When it was made, in seconds since 1970; 0 for one of the configuration file.
    created: u64,
    /// The user that made it.
    #[serde(skip_serializing_if = "Option::is_none")]
    owner_uid: Option<u32>,
    /// What its VMM connects to.
    connect: Connect,
    /// Its device's process.
    #[serde(skip_serializing_if = "Option::is_none")]
    device_process: Option<u32>,
    /// Guest processes that have a worker, or get one.
    sessions: Vec<Session>,
    /// Where it is; nothing for one of the configuration file, which is on every whole device, and for one that has no unit.
    #[serde(skip_serializing_if = "Option::is_none")]
    placed: Option<Placed>,
    /// What it has of each of its units, in lists as of the last second.
    units: Vec<VmUnit>,
}

/// Whether a VM has its device.
#[derive(Clone, Copy, Debug, Serialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum VmState {
    /// It is getting it.
    Starting,
    /// Its VMM can connect.
    Running,
    /// It cannot have one; a PUT tries again.
    Failed,
}

/// How far a VM is on its way out, or in again.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct Fence {
    /// The step.
    step: FenceStep,
    /// Grows with each admission.
    epoch: u64,
    /// In quarantine: whether everything was taken from it and is clean.
    clean: bool,
    /// Why it was fenced.
    reason: String,
    /// The authority that fenced it; nothing while it is active. An operator ends what an operator fenced.
    #[serde(skip_serializing_if = "Option::is_none")]
    by: Option<FencedBy>,
}

/// An authority that fences VMs.
#[derive(Clone, Copy, Debug, Serialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum FencedBy {
    /// A tenant, its own VM.
    Tenant,
    /// A rule that the VM broke.
    Policy,
    /// An operator.
    Operator,
}

/// A step on the way out.
#[derive(Clone, Copy, Debug, Serialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum FenceStep {
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
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct Connect {
    /// The vhost-user socket.
    socket: String,
    /// Arguments for QEMU. The guest's memory must be shared: with `guest_memory_bytes` that is among them, else add
    /// `-object memory-backend-memfd,id=sluice-memory,size=SIZE,share=on -machine memory-backend=sluice-memory`.
    qemu: Vec<String>,
    /// Arguments for Cloud Hypervisor, 53 or newer; 52 calls the `device_type` `virtio_id`. Without `guest_memory_bytes` add
    /// `--memory size=SIZE,shared=on`.
    cloud_hypervisor: Vec<String>,
    /// Instead, for guests that share no memory with the host.
    vsock: Vsock,
}

/// For guests whose kernel has no `virtio_gpu` driver, or whose VMM no vhost-user device: a virtual socket device. The guest's
/// library finds the host through it by itself. A VMM that makes a socket beside the device's must be allowed to, or be given a
/// path of its own, beside which a symbolic link of the same ending leads to the device's.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct Vsock {
    /// What a connection of the guest to port 29548 of the host (CID 2) must reach. Programs without a VM connect with
    /// `SLUICE_TRANSPORT=vsock SLUICE_SOCKET=PATH`.
    socket: String,
    /// Arguments for Cloud Hypervisor.
    cloud_hypervisor: Vec<String>,
    /// What Firecracker takes as `PUT /vsock`.
    firecracker: Firecracker,
    /// Arguments for the program `vhost-device-vsock`, which QEMU needs for its own.
    vhost_device_vsock: Vec<String>,
    /// Arguments for QEMU, besides shared memory.
    qemu: Vec<String>,
}

/// A virtual socket device of Firecracker.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct Firecracker {
    /// The guest's address.
    guest_cid: u32,
    /// Where Firecracker makes its socket.
    uds_path: String,
}

/// A guest process.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct Session {
    /// The device's number of it.
    session: u32,
    /// Its worker's process.
    #[serde(skip_serializing_if = "Option::is_none")]
    worker: Option<u32>,
}

/// Where a VM is.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct Placed {
    /// The unit.
    unit: u32,
    /// Its GPU.
    gpu: u32,
    /// What the unit is.
    kind: super::units::UnitKind,
    /// The kind of instance, by the driver's name or number.
    #[serde(skip_serializing_if = "Option::is_none")]
    profile: Option<String>,
    /// The first memory slice of the instance.
    #[serde(skip_serializing_if = "Option::is_none")]
    start: Option<u8>,
    /// Whether other VMs may be on it.
    shared: bool,
}

/// What a VM has of a unit.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct VmUnit {
    /// The unit.
    unit: u32,
    /// Device memory lent to it.
    lent_bytes: u64,
    /// What the driver takes for it; beyond the VM's headroom it is part of the quota.
    headroom_bytes: u64,
    /// What it gave back and is not clean yet.
    dirty_bytes: u64,
    /// Workers that the driver may still know.
    holders: u32,
    /// GPU time it has used in this epoch, since the unit's arbiter was started.
    gpu_seconds: f64,
}

/// VMs.
// What `list` writes by hand.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct Vms {
    /// Those that the caller may look at.
    vms: Vec<Vm>,
}

/// Why a VM is fenced.
#[derive(Clone, Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct FenceRequest {
    /// For the log.
    #[schema(max_length = 200)]
    reason: Option<String>,
}

impl VmRequest {
    pub(super) fn wanted(self, registry: &Registry) -> Result<VmObject, Error> {
        for name in [&self.size, &self.organisation, &self.project].into_iter().flatten() {
            Id::check(name)?;
        }
        let size = match &self.size {
            Some(name) => {
                registry.size(name).ok_or_else(|| Error::contradiction(format!("there is no size {name}")))?
            }
            None => SizeObject::default(),
        };
        if self.scanouts > 1 {
            return Err(Error::invalid("scanouts can be 0 or 1"));
        }
        if self.guest_memory_bytes == Some(0) {
            return Err(Error::invalid("guest_memory_bytes is 0; leave it out if it is not known"));
        }
        let shares = size.shares;
        let mut placement = self.placement.unwrap_or_default().kept(registry)?;
        if placement.policy == objects::Policy::Any {
            placement.policy = size.policy.unwrap_or_default();
        }
        placement.profile = placement.profile.or(size.profile);
        if placement.replicas == 0 {
            placement.replicas = size.replicas;
        }
        Ok(VmObject {
            number: 0,
            created: 0,
            organisation: self.organisation,
            project: self.project,
            scanouts: self.scanouts,
            direct: self.direct,
            size: self.size,
            memory: memory(self.memory_bytes)?.unwrap_or(size.memory),
            guaranteed: bytes("guaranteed_bytes", self.guaranteed_bytes)?.unwrap_or(size.guaranteed),
            headroom: bytes("headroom_bytes", self.headroom_bytes)?.unwrap_or(size.headroom),
            pinned: bytes("pinned_bytes", self.pinned_bytes)?.unwrap_or(size.pinned),
            shares: objects::Shares {
                weight: within("weight", self.weight, 1, 10_000)?.unwrap_or(shares.weight),
                priority: self.priority.map_or(shares.priority, Priority::kept),
                cap_permille: within("cap_permille", self.cap_permille, 1, 1000)?
                    .unwrap_or(shares.cap_permille),
                guarantee_permille: within("guarantee_permille", self.guarantee_permille, 0, 1000)?
                    .unwrap_or(shares.guarantee_permille),
            },
            placement,
            readmit_after: within("readmit_after_seconds", self.readmit_after_seconds, 1, NUMBER)?
                .unwrap_or(0),
            hang_after: within("hang_after_seconds", self.hang_after_seconds, 1, 4_294_967)?.unwrap_or(0),
            guest_memory: bytes("guest_memory_bytes", self.guest_memory_bytes)?,
            owner: None,
        })
    }
}

/// A quota: at least one chunk, for less is nothing.
pub(super) fn memory(value: Option<u64>) -> Result<Option<u64>, Error> {
    match value {
        Some(bytes) if bytes < CHUNK => Err(Error::invalid(format!("memory_bytes is less than {CHUNK}"))),
        value => bytes("memory_bytes", value),
    }
}

/// A kind of MIG instance, by the driver's number or name.
pub(super) fn profile(registry: &Registry, name: &str) -> Result<u32, Error> {
    if name.chars().count() > 64 {
        return Err(Error::invalid("profile is longer than 64 characters"));
    }
    registry.placer.profile(name)
}

/// A number of bytes.
pub(super) fn bytes(field: &str, value: Option<u64>) -> Result<Option<u64>, Error> {
    match value {
        Some(bytes) if bytes > BYTES => Err(Error::invalid(format!("{field} is more than {BYTES}"))),
        value => Ok(value),
    }
}

/// A number that has bounds.
pub(super) fn within(field: &str, value: Option<u32>, least: u32, most: u32) -> Result<Option<u32>, Error> {
    match value {
        Some(number) if !(least..=most).contains(&number) => {
            Err(Error::invalid(format!("{field} is {number}; it can be {least} to {most}")))
        }
        value => Ok(value),
    }
}

impl Priority {
    pub(super) const fn kept(self) -> objects::Priority {
        match self {
            Self::Low => objects::Priority::Low,
            Self::Normal => objects::Priority::Normal,
            Self::High => objects::Priority::High,
        }
    }

    pub(super) const fn shown(kept: objects::Priority) -> Self {
        match kept {
            objects::Priority::Low => Self::Low,
            objects::Priority::Normal => Self::Normal,
            objects::Priority::High => Self::High,
        }
    }
}

impl Policy {
    pub(super) const fn kept(self) -> objects::Policy {
        match self {
            Self::Mig => objects::Policy::Mig,
            Self::TimeSlice => objects::Policy::TimeSlice,
            Self::Any => objects::Policy::Any,
        }
    }

    pub(super) const fn shown(kept: objects::Policy) -> Self {
        match kept {
            objects::Policy::Mig => Self::Mig,
            objects::Policy::TimeSlice => Self::TimeSlice,
            objects::Policy::Any => Self::Any,
        }
    }
}

impl Isolation {
    pub(super) const fn kept(self) -> objects::Isolation {
        match self {
            Self::Shared => objects::Isolation::Shared,
            Self::Strict => objects::Isolation::Strict,
            Self::StrictPlus => objects::Isolation::StrictPlus,
        }
    }

    pub(super) const fn shown(kept: objects::Isolation) -> Self {
        match kept {
            objects::Isolation::Shared => Self::Shared,
            objects::Isolation::Strict => Self::Strict,
            objects::Isolation::StrictPlus => Self::StrictPlus,
        }
    }
}

impl Placement {
    pub(super) fn kept(self, registry: &Registry) -> Result<objects::Placement, Error> {
        if self.anti_affinity.len() > sluice_placement::request::MAX_APART {
            return Err(Error::invalid("placement.anti_affinity names more than 64"));
        }
        let largest = self.gpu.unwrap_or(0).max(self.start.unwrap_or(0).into());
        if self.multiprocessors > 65_535 || self.numa_node.unwrap_or(0) > 65_535 || largest > 63 {
            return Err(Error::invalid("a number in placement is too large"));
        }
        if self.start.is_some() && self.gpu.is_none() {
            return Err(Error::contradiction("placement.start is of a GPU; say placement.gpu, too"));
        }
        let apart = self.anti_affinity.into_iter().map(|apart| {
            match (&apart.vm, &apart.group) {
                (Some(name), None) | (None, Some(name)) => Id::check(name)?,
                _ => {
                    return Err(Error::contradiction(
                        "each of placement.anti_affinity names a VM or a group",
                    ));
                }
            }
            Ok(objects::Apart { vm: apart.vm, group: apart.group, preferred: apart.preferred })
        });
        Ok(objects::Placement {
            gpu: self.gpu,
            start: self.start,
            profile: self.profile.map(|name| profile(registry, &name)).transpose()?,
            allow_larger: self.allow_larger,
            multiprocessors: self.multiprocessors,
            replicas: within("placement.replicas", self.replicas, 1, 65_535)?.unwrap_or(0),
            numa_node: self.numa_node,
            apart: apart.collect::<Result<_, _>>()?,
            policy: self.policy.kept(),
            isolation: self.isolation.kept(),
        })
    }

    fn shown(kept: objects::Placement) -> Self {
        let apart =
            |apart: objects::Apart| Apart { vm: apart.vm, group: apart.group, preferred: apart.preferred };
        Self {
            gpu: kept.gpu,
            start: kept.start,
            profile: kept.profile.map(|profile| profile.to_string()),
            allow_larger: kept.allow_larger,
            multiprocessors: kept.multiprocessors,
            replicas: Some(kept.replicas).filter(|most| *most > 0),
            numa_node: kept.numa_node,
            anti_affinity: kept.apart.into_iter().map(apart).collect(),
            policy: Policy::shown(kept.policy),
            isolation: Isolation::shown(kept.isolation),
        }
    }
}

impl Placed {
    fn of(spotted: Spotted) -> Self {
        let Spotted { unit, gpu, profile, placement, shared, .. } = spotted;
        Self {
            unit,
            gpu,
            kind: super::units::UnitKind::of(placement.is_some()),
            profile: profile.map(|(number, name)| name.unwrap_or_else(|| number.to_string())),
            start: placement.map(|placement| placement.start),
            shared,
        }
    }
}

impl Vm {
    fn of(known: Known, room: &Room, placed: Option<Spotted>) -> Self {
        let Known { id, object, configured, .. } = known;
        let fence = room.stands();
        let (state, failure) = match room.phase() {
            Phase::Starting => (VmState::Starting, None),
            Phase::Running => (VmState::Running, None),
            Phase::Failed(why) => (VmState::Failed, Some(why)),
        };
        let rooms = room.units();
        let units = rooms.iter().map(|unit| {
            let report = unit.last_of_vm(room.id()).unwrap_or_default();
            VmUnit {
                unit: unit.number(),
                lent_bytes: report.lent,
                headroom_bytes: report.headroom,
                dirty_bytes: report.dirty,
                holders: report.holders,
                gpu_seconds: Duration::from_nanos(report.time.used).as_secs_f64(),
            }
        });
        Self {
            id,
            number: room.id(),
            state,
            failure,
            configured,
            draining: room.draining(),
            fence: Fence {
                step: match fence.step {
                    Step::Active => FenceStep::Active,
                    Step::Fencing => FenceStep::Fencing,
                    Step::Killed => FenceStep::Killed,
                    Step::Revoked => FenceStep::Revoked,
                    Step::Scrubbed => FenceStep::Scrubbed,
                    Step::Quarantined => FenceStep::Quarantined,
                },
                epoch: fence.epoch,
                clean: fence.clean,
                by: (fence.step != Step::Active).then_some(match fence.by {
                    fence::FencedBy::Tenant => FencedBy::Tenant,
                    fence::FencedBy::Policy => FencedBy::Policy,
                    fence::FencedBy::Operator => FencedBy::Operator,
                }),
                reason: fence.reason,
            },
            connect: Connect::of(&object, room),
            size: object.size,
            memory_bytes: object.memory,
            guaranteed_bytes: object.guaranteed,
            headroom_bytes: object.headroom,
            pinned_bytes: object.pinned,
            weight: object.shares.weight,
            priority: Priority::shown(object.shares.priority),
            cap_permille: object.shares.cap_permille,
            guarantee_permille: object.shares.guarantee_permille,
            placement: Placement::shown(object.placement),
            organisation: object.organisation,
            project: object.project,
            scanouts: object.scanouts,
            direct: object.direct,
            readmit_after_seconds: object.readmit_after,
            hang_after_seconds: object.hang_after,
            guest_memory_bytes: object.guest_memory,
            created: object.created,
            owner_uid: object.owner,
            device_process: room.device(),
            sessions: room
                .sessions()
                .into_iter()
                .map(|(session, worker)| Session { session, worker })
                .collect(),
            placed: placed.map(Placed::of),
            units: units.collect(),
        }
    }
}

impl Connect {
    fn of(object: &VmObject, room: &Room) -> Self {
        let socket = room.socket().display().to_string();
        let mut qemu = Vec::new();
        let mut cloud_hypervisor = Vec::new();
        if let Some(bytes) = object.guest_memory {
            // QEMU takes a comma within a value twice; here there is none.
            qemu.extend([
                "-object".to_owned(),
                format!("memory-backend-memfd,id=sluice-memory,size={bytes},share=on"),
            ]);
            qemu.extend(["-machine".to_owned(), "memory-backend=sluice-memory".to_owned()]);
            qemu.extend(["-m".to_owned(), format!("{bytes}B")]);
            cloud_hypervisor.extend(["--memory".to_owned(), format!("size={bytes},shared=on")]);
        }
        let path = socket.replace(',', ",,");
        qemu.extend(["-chardev".to_owned(), format!("socket,id=sluice,path={path}")]);
        let outputs = object.scanouts;
        qemu.extend([
            "-device".to_owned(),
            format!("vhost-user-gpu-pci,chardev=sluice,max_outputs={outputs}"),
        ]);
        // As a virtio-gpu device, with its two queues.
        let device = format!("socket={socket},device_type=16,queue_sizes=[1024,16]");
        cloud_hypervisor.extend(["--generic-vhost-user".to_owned(), device]);
        Self { socket, qemu, cloud_hypervisor, vsock: Vsock::of(room) }
    }
}

/// The address of a guest: the first that may be one. Each VM has a virtual socket device of its own, so all may have the same.
const GUEST_CID: u32 = 3;

impl Vsock {
    fn of(room: &Room) -> Self {
        let (socket, vmm) = room.vsock();
        let (socket, vmm) = (socket.display().to_string(), vmm.display().to_string());
        let device = format!("{vmm}.vhost");
        Self {
            cloud_hypervisor: vec!["--vsock".to_owned(), format!("cid={GUEST_CID},socket={vmm}")],
            firecracker: Firecracker { guest_cid: GUEST_CID, uds_path: vmm.clone() },
            vhost_device_vsock: vec![
                "--vm".to_owned(),
                format!("guest-cid={GUEST_CID},uds-path={vmm},socket={device}"),
            ],
            qemu: vec![
                "-chardev".to_owned(),
                format!("socket,id=sluice-vsock,path={}", device.replace(',', ",,")),
                "-device".to_owned(),
                "vhost-user-vsock-pci,chardev=sluice-vsock".to_owned(),
            ],
            socket,
        }
    }
}

impl Registry {
    fn show_vm(&self, caller: &Caller, id: &str) -> Result<Vm, Error> {
        let (known, vm) = self.see(caller, id)?;
        let placed = self.placer.whereabouts(&known.host_name);
        Ok(Vm::of(known, &vm, placed))
    }
}

/// Lists VMs.
///
/// Those that the caller may look at, by name.
#[utoipa::path(get, path = "/v1/vms", tag = "VMs", operation_id = "list_vms",
    responses((status = 200, body = Vms), Errors))]
pub(crate) async fn list(State(api): State<Api>, caller: Caller) -> Result<impl IntoResponse, Error> {
    let list = move |registry: Rc<Registry>| async move {
        let shown = registry.see_all(&caller).into_iter().map(|(known, vm)| {
            let placed = registry.placer.whereabouts(&known.host_name);
            Vm::of(known, &vm, placed)
        });
        // There may be hundreds: each is written before the next is put together, which is a third faster.
        let mut body = br#"{"vms":"#.to_vec();
        let written = serde_json::Serializer::new(&mut body).collect_seq(shown);
        written.map_err(|error| Error::new(Code::Internal, "the list cannot be written").because(error))?;
        body.push(b'}');
        Ok(body)
    };
    let body = api.bridge.call(list).await?;
    Ok(([(CONTENT_TYPE, "application/json")], body))
}

/// Shows a VM.
#[utoipa::path(get, path = "/v1/vms/{id}", tag = "VMs", operation_id = "get_vm",
    params(("id" = String, Path, description = "Its name, or `organisation/name` with the slash as %2F", pattern = "^((project:)?[A-Za-z0-9][A-Za-z0-9._-]{0,63}/)?[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")),
    responses((status = 200, body = Vm), Errors))]
pub(crate) async fn get(
    State(api): State<Api>,
    caller: Caller,
    VmName(id): VmName,
) -> Result<Json<Vm>, Error> {
    let get = move |registry: Rc<Registry>| async move {
        let (_, vm) = registry.see(&caller, &id)?;
        // Where units do not answer at once, what they said last is shown.
        _ = timeout(LOOK, vm.ask()).await;
        registry.show_vm(&caller, &id)
    };
    api.bridge.call(get).await.map(Json)
}

/// Makes a VM, or changes it to be as said.
///
/// Answered when its VMM can connect. The name is the client's choice, and no other VM of its organisation has it; one of digits
/// only is also the VM's number, has to be among `vm-numbers` of the configuration, and takes an operator. A tenant sets what the
/// limits of its organisation allow. What is changed holds at once, for sessions that run too.
#[utoipa::path(put, path = "/v1/vms/{id}", tag = "VMs", operation_id = "put_vm", request_body = VmRequest,
    params(("id" = String, Path, description = "Its name, or `organisation/name` with the slash as %2F", pattern = "^((project:)?[A-Za-z0-9][A-Za-z0-9._-]{0,63}/)?[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")),
    responses((status = 200, description = "It is as said", body = Vm),
        (status = 201, description = "It was made", body = Vm), ChangeErrors))]
pub(crate) async fn put(
    State(api): State<Api>,
    caller: Caller,
    VmName(id): VmName,
    Body(request): Body<VmRequest>,
) -> Result<(StatusCode, Json<Vm>), Error> {
    let put = move |registry: Rc<Registry>| async move {
        let wanted = request.wanted(&registry)?;
        let (put, host_name) = registry.put_vm(&caller, &id, wanted).await?;
        Ok((status(put), Json(registry.show_vm(&caller, &host_name)?)))
    };
    api.bridge.call(put).await
}

/// Ends a VM.
///
/// Its device and its sessions end, and what it had is scrubbed. Answered when its processes are gone. One that is not there is
/// gone already.
#[utoipa::path(delete, path = "/v1/vms/{id}", tag = "VMs", operation_id = "delete_vm",
    params(("id" = String, Path, description = "Its name, or `organisation/name` with the slash as %2F", pattern = "^((project:)?[A-Za-z0-9][A-Za-z0-9._-]{0,63}/)?[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")),
    responses((status = 204, description = "It is gone"), ChangeErrors))]
pub(crate) async fn delete(
    State(api): State<Api>,
    caller: Caller,
    VmName(id): VmName,
) -> Result<StatusCode, Error> {
    api.bridge.call(move |registry| async move { registry.delete_vm(&caller, &id).await }).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Fences a VM.
///
/// Its sessions end, everything is taken from it and made clean, and it gets nothing until it is readmitted. Its device lives on. Answered when it
/// is quarantined, or after 20 seconds; `fence` says how far it is.
#[utoipa::path(post, path = "/v1/vms/{id}/fence", tag = "VMs", operation_id = "fence_vm", request_body = FenceRequest,
    params(("id" = String, Path, description = "Its name, or `organisation/name` with the slash as %2F", pattern = "^((project:)?[A-Za-z0-9][A-Za-z0-9._-]{0,63}/)?[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")),
    responses((status = 200, body = Vm), ChangeErrors))]
pub(crate) async fn fence(
    State(api): State<Api>,
    caller: Caller,
    VmName(id): VmName,
    Body(request): Body<FenceRequest>,
) -> Result<Json<Vm>, Error> {
    let authority = if caller.may_operate().is_ok() { "operator" } else { "tenant" };
    let reason = request.reason.unwrap_or_else(|| authority.to_owned());
    if reason.chars().count() > 200 {
        return Err(Error::invalid("reason is longer than 200 characters"));
    }
    // One line of a log.
    let reason: String = reason.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    let fence = move |registry: Rc<Registry>| async move {
        registry.fence(&caller, &id, &reason).await?;
        registry.show_vm(&caller, &id)
    };
    api.bridge.call(fence).await.map(Json)
}

/// Lets a VM that was fenced or drained have sessions again.
#[utoipa::path(post, path = "/v1/vms/{id}/readmit", tag = "VMs", operation_id = "readmit_vm",
    params(("id" = String, Path, description = "Its name, or `organisation/name` with the slash as %2F", pattern = "^((project:)?[A-Za-z0-9][A-Za-z0-9._-]{0,63}/)?[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")),
    responses((status = 200, body = Vm), ChangeErrors))]
pub(crate) async fn readmit(
    State(api): State<Api>,
    caller: Caller,
    VmName(id): VmName,
) -> Result<Json<Vm>, Error> {
    let readmit = move |registry: Rc<Registry>| async move {
        registry.readmit(&caller, &id).await?;
        registry.show_vm(&caller, &id)
    };
    api.bridge.call(readmit).await.map(Json)
}

/// Lets a VM begin no session any more.
///
/// Sessions that run go on; when `sessions` is empty, it is idle. Readmission ends it.
#[utoipa::path(post, path = "/v1/vms/{id}/drain", tag = "VMs", operation_id = "drain_vm",
    params(("id" = String, Path, description = "Its name, or `organisation/name` with the slash as %2F", pattern = "^((project:)?[A-Za-z0-9][A-Za-z0-9._-]{0,63}/)?[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")),
    responses((status = 200, body = Vm), ChangeErrors))]
pub(crate) async fn drain(
    State(api): State<Api>,
    caller: Caller,
    VmName(id): VmName,
) -> Result<Json<Vm>, Error> {
    let drain = move |registry: Rc<Registry>| async move {
        registry.drain(&caller, &id).await?;
        registry.show_vm(&caller, &id)
    };
    api.bridge.call(drain).await.map(Json)
}

/// Where a VM is to go.
#[derive(Clone, Copy, Debug, Default, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct Where {
    /// What its unit is to be: `mig` for an instance of its own, `time-slice` for a GPU or an instance that is shared. Its policy must
    /// allow it.
    kind: Option<super::units::UnitKind>,
    /// The GPU. It is not kept to it later.
    gpu: Option<u32>,
}

/// Moves a VM to another unit.
///
/// It must have no session; its next one begins on the other unit, and its guest notices nothing. The place is the best that there
/// is beside its own, of those that are asked for.
#[utoipa::path(post, path = "/v1/vms/{id}/move", tag = "VMs", operation_id = "move_vm",
    params(("id" = String, Path, description = "Its name, or `organisation/name` with the slash as %2F", pattern = "^((project:)?[A-Za-z0-9][A-Za-z0-9._-]{0,63}/)?[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"),
        Where),
    responses((status = 200, body = Vm), ChangeErrors))]
pub(crate) async fn relocate(
    State(api): State<Api>,
    caller: Caller,
    VmName(id): VmName,
    Asked(there): Asked<Where>,
) -> Result<Json<Vm>, Error> {
    let kind = there.kind.map(|kind| match kind {
        super::units::UnitKind::Mig => sluice_placement::Policy::Mig,
        super::units::UnitKind::TimeSlice => sluice_placement::Policy::TimeSlice,
    });
    let relocate = move |registry: Rc<Registry>| async move {
        registry.move_vm(&caller, &id, kind, there.gpu).await?;
        registry.show_vm(&caller, &id)
    };
    api.bridge.call(relocate).await.map(Json)
}
