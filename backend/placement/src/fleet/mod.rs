//! The plan: GPUs, their units, and the VMs in each unit. One writer, no I/O.
//!
//! The daemon's placer asks for decisions ([`crate::decide`]) and carries them out here. The plan owns the slices of all GPUs: they
//! belong to a unit from its reservation until its instance is known to be gone, so that nothing can be planned on top of an
//! instance that is being made or destroyed. It must never create or destroy an instance itself, and never plan with a **foreign**
//! one, which another party put on a GPU: it occupies slices here.
//!
//! A **unit** is a whole GPU or one MIG instance:
//!
//! ```text
//!         decide, then reserve              created               proven_clean
//!  (free) ──────────────────────▶ Reserved ─────────▶ Unproven ─────────────────▶ Ready ◀─┐ reserve, leave,
//!    ▲                               │                   │                          │ └───┘ relocate: VMs
//!    │  abandon, or close            │                   │ close                    │ close
//!    ├───────────────────────────────┘                   ▼                          │
//!    │  closing_answer: destroyed                     Closing ◀─────────────────────┘
//!    └────────────────────────────────────────────────┘  │ ▲
//!                          its destruction keeps failing ▼ │ audit_closing: tried again
//!                                                 quarantined
//! ```
//! Only an empty unit is closed. A whole GPU is free at once when its unit is closed: there is no instance to destroy.

mod life;
mod restart;
mod settings;

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::adoption::ListedTwice;
use crate::destruction::Destruction;
use crate::geometry::{Geometry, GeometryError, Occupation, SlicePlacement};
pub use crate::record::{GpuUuid, InstanceIdentity, Partition, RecordPhase, UnitId, UnitRecord};
use crate::request::{MAX_ANTI_AFFINITY, Request, VmId};
pub use life::{Decision, Relocation};
pub use restart::Highest;

/// Maximum number of GPUs of a host.
pub const MAX_GPUS: usize = 64;

/// The use of a GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Division {
    /// Undivided, without MIG.
    Whole {
        /// Memory available to VMs.
        memory_bytes: u64,
        /// Its multiprocessors.
        multiprocessors: u32,
    },
    /// Divided into instances. GPUs of one model may share the geometry.
    Mig(Arc<Geometry>),
}

/// Admission of new VMs and units to a GPU or a unit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum AdminState {
    /// New ones are admitted.
    #[default]
    Open,
    /// New ones are refused, and present ones should leave.
    Draining,
    /// New ones are refused: the GPU or unit may not be clean or sound.
    Quarantined,
}

/// An instance that is not ours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Foreign {
    /// Number of the GPU instance.
    pub instance: u32,
    /// Profile, by the driver's number, if known.
    pub profile: Option<u32>,
    /// Position on the axis of slices.
    pub placement: SlicePlacement,
    /// Compute slices, if the profile is not known.
    pub compute_slices: u8,
}

/// A GPU of the plan.
#[derive(Clone, Debug)]
pub struct PlanGpu {
    /// Its UUID.
    pub uuid: GpuUuid,
    /// The NUMA node it is attached to.
    pub numa: Option<u32>,
    /// Its use.
    pub division: Division,
    /// Admission of new VMs and units.
    pub admin_state: AdminState,
    /// True if its driver reports the memory of each process. No driver does for an instance.
    pub measured: bool,
    /// True if its kernels reach no host memory but that which CUDA was given.
    pub confined: bool,
    foreign: Vec<Foreign>,
    /// Occupied slices: ours, foreign, and in quarantine.
    state: Occupation,
}

impl PlanGpu {
    /// An unused GPU.
    pub fn new(uuid: GpuUuid, numa: Option<u32>, division: Division) -> Self {
        Self {
            uuid,
            numa,
            division,
            admin_state: AdminState::Open,
            measured: true,
            confined: true,
            foreign: Vec::new(),
            state: Occupation::default(),
        }
    }

    /// Its geometry, if it is divided.
    pub fn geometry(&self) -> Option<&Geometry> {
        match &self.division {
            Division::Mig(geometry) => Some(geometry),
            Division::Whole { .. } => None,
        }
    }

    /// Its occupied slices.
    pub const fn state(&self) -> &Occupation {
        &self.state
    }

    /// The instances that are not ours.
    pub fn foreign(&self) -> &[Foreign] {
        &self.foreign
    }
}

/// The state of a unit in its life.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum UnitPhase {
    /// Slices are held for an instance that is being created.
    Reserved,
    /// It exists; its memory is not proven clean yet.
    Unproven,
    /// VMs can use it.
    Ready,
    /// It is being destroyed, or its destruction failed.
    Closing(Destruction),
}

/// A unit and its VMs.
#[derive(Clone, Debug)]
pub struct PlanUnit {
    /// Its number.
    pub id: UnitId,
    /// Index of its GPU.
    pub gpu: usize,
    /// The whole GPU, or the instance.
    pub partition: Partition,
    /// True if several VMs may share it.
    pub shared: bool,
    /// Its memory.
    pub memory_bytes: u64,
    /// Its multiprocessors.
    pub multiprocessors: u32,
    /// The state in its life.
    pub phase: UnitPhase,
    /// Admission of VMs.
    pub admin_state: AdminState,
    /// The driver's identifiers, once it exists.
    pub identity: Option<InstanceIdentity>,
    /// Distinguishes it from all earlier ones with the same UUID. 0 before it exists.
    pub epoch: u64,
    members: Vec<Member>,
}

/// A VM in a unit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// Its request.
    pub request: Request,
    /// True if it has no session and can be moved.
    pub idle: bool,
}

impl PlanUnit {
    /// The VMs in it.
    pub fn members(&self) -> &[Member] {
        &self.members
    }

    /// The remainder if the VM is added; `None` if a sum forbids it (memory, time, weight or number of VMs), or if a quota would
    /// not hold.
    pub(crate) fn room(&self, request: &Request, rules: &Rules) -> Option<Room> {
        let with = |of: fn(&Request) -> u64| {
            self.members.iter().map(|member| of(&member.request)).fold(of(request), u64::saturating_add)
        };
        let (firm, full) = (with(Request::firm_bytes), with(Request::memory_bytes));
        let permille = with(|request| u64::from(request.firm_permille()));
        let weight = with(|request| u64::from(request.weight));
        let bearable = u128::from(self.memory_bytes) * u128::from(rules.overcommit_permille) / 1000;
        let weight_limit = u64::from(rules.weight_limit);
        let requests = self.members.iter().map(|member| &member.request).chain([request]);
        let replicas = requests.map(|request| request.replicas).filter(|most| *most > 0).min();
        let count = self.members.len() + 1;
        (self.members.iter().all(|member| member.request.promises_beside(request))
            && firm <= self.memory_bytes
            && request.memory_bytes() <= self.memory_bytes
            && u128::from(full) <= bearable
            && permille <= 1000
            && (weight_limit == 0 || weight <= weight_limit)
            && replicas.is_none_or(|most| count <= usize::try_from(most).unwrap_or(usize::MAX))
            && self.multiprocessors >= request.multiprocessors)
            .then(|| Room {
                memory_left: self.memory_bytes - firm,
                permille_left: 1000 - permille,
                weight,
                memory_bytes: self.memory_bytes,
            })
    }
}

/// The remainder of a unit after a VM has joined it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Room {
    pub(crate) memory_left: u64,
    pub(crate) permille_left: u64,
    pub(crate) weight: u64,
    pub(crate) memory_bytes: u64,
}

/// Rules of the site for shared units.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rules {
    /// Limit of the sum of all quotas in a unit, in thousandths of its memory. 1000: no overcommitment.
    pub overcommit_permille: u32,
    /// Maximum total weight in a unit; 0 for any.
    pub weight_limit: u32,
    /// True if VMs of several organisations may share a unit whose driver does not report the memory of each process.
    pub share_unmeasured: bool,
    /// True if several VMs may share a unit whose kernels can reach host memory.
    pub share_unconfined: bool,
}

impl Default for Rules {
    fn default() -> Self {
        Self { overcommit_permille: 1000, weight_limit: 0, share_unmeasured: false, share_unconfined: false }
    }
}

/// The reason why a step was refused. The plan is unchanged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    /// The GPU does not exist.
    #[error("no such GPU")]
    UnknownGpu,
    /// The unit does not exist.
    #[error("no such unit")]
    UnknownUnit,
    /// The VM has no unit.
    #[error("the VM has no unit")]
    UnknownVm,
    /// The VM has a unit already.
    #[error("the VM has a unit already")]
    AlreadyPlaced,
    /// The request names more neighbours than [`MAX_ANTI_AFFINITY`].
    #[error("more than {MAX_ANTI_AFFINITY} neighbours are named")]
    TooManyRules,
    /// The place was taken meanwhile, or is not possible.
    #[error("the place is taken")]
    Taken,
    /// The unit is in another phase of its life.
    #[error("the unit is in another phase of its life")]
    Phase,
    /// The unit has VMs.
    #[error("VMs are in the unit")]
    InUse,
    /// The VM has sessions.
    #[error("the VM has sessions")]
    Busy,
    /// The GPU's instances contradict its geometry.
    #[error(transparent)]
    Geometry(#[from] GeometryError),
    /// The list of instances contradicts itself.
    #[error(transparent)]
    Listed(#[from] ListedTwice),
}

/// The plan: all GPUs of a host, their units and VMs.
#[derive(Clone, Debug, Default)]
pub struct Fleet {
    rules: Rules,
    gpus: Vec<PlanGpu>,
    units: BTreeMap<UnitId, PlanUnit>,
    homes: BTreeMap<VmId, UnitId>,
    next_unit: u64,
    epoch: u64,
}

impl Fleet {
    /// An empty plan. If there are more GPUs than [`MAX_GPUS`], the first are taken.
    pub fn new(rules: Rules, mut gpus: Vec<PlanGpu>) -> Self {
        gpus.truncate(MAX_GPUS);
        Self { rules, gpus, ..Self::default() }
    }

    /// The GPUs; their index is their number in the plan.
    pub fn gpus(&self) -> &[PlanGpu] {
        &self.gpus
    }

    /// The site's rules.
    pub const fn rules(&self) -> &Rules {
        &self.rules
    }

    /// All units, by number.
    pub fn units(&self) -> impl Iterator<Item = &PlanUnit> {
        self.units.values()
    }

    /// A unit by number.
    pub fn unit(&self, unit: UnitId) -> Option<&PlanUnit> {
        self.units.get(&unit)
    }

    /// The unit of a VM.
    pub fn home(&self, vm: VmId) -> Option<UnitId> {
        self.homes.get(&vm).copied()
    }

    /// True if VMs may share units of a GPU. If kernels reach host memory, each can take its worker over without any flaw, and on a
    /// shared unit a worker is next to another VM's.
    pub fn shares(&self, gpu: usize) -> bool {
        self.rules.share_unconfined || self.gpus.get(gpu).is_some_and(|gpu| gpu.confined)
    }

    /// True if the VM may share a partition with `members`, by the rules of confinement and of figures. If no figure shows how much
    /// the driver takes for each VM, VMs of one organisation could take memory of another.
    pub(crate) fn admits(
        &self,
        (gpu, partition): (usize, Partition),
        members: &[Member],
        request: &Request,
        rules: &Rules,
    ) -> bool {
        let of = &self.gpus[gpu];
        let whole = partition == Partition::Whole;
        let confined = rules.share_unconfined || of.confined || members.is_empty();
        let measured = rules.share_unmeasured
            || whole && of.measured
            || members.iter().all(|member| member.request.organisation == request.organisation);
        confined && measured
    }

    /// Memory and multiprocessors of a spot.
    pub(crate) fn size(&self, gpu: usize, partition: Partition) -> Result<(u64, u32), PlanError> {
        let gpu = self.gpus.get(gpu).ok_or(PlanError::UnknownGpu)?;
        match (&gpu.division, partition) {
            (Division::Whole { memory_bytes, multiprocessors }, Partition::Whole) => {
                Ok((*memory_bytes, *multiprocessors))
            }
            (Division::Mig(geometry), Partition::Instance { profile, .. }) => {
                let index = geometry.index(profile).ok_or(PlanError::Taken)?;
                let profile = &geometry.profiles()[index];
                Ok((profile.memory_bytes, profile.multiprocessors))
            }
            _ => Err(PlanError::Taken),
        }
    }

    fn unit_mut(&mut self, unit: UnitId) -> Result<&mut PlanUnit, PlanError> {
        self.units.get_mut(&unit).ok_or(PlanError::UnknownUnit)
    }

    /// A GPU's state, summed up from foreign instances and ours.
    fn state_of(&self, index: usize, gpu: &PlanGpu) -> Result<Occupation, GeometryError> {
        let Some(geometry) = gpu.geometry() else { return Ok(Occupation::default()) };
        let mut state = Occupation::default();
        for foreign in &gpu.foreign {
            let profile = foreign.profile.and_then(|id| geometry.index(id));
            let compute =
                profile.map_or(foreign.compute_slices, |index| geometry.profiles()[index].compute_slices);
            state = geometry.with_existing(&state, profile, foreign.placement, compute)?;
        }
        for unit in self.units.values().filter(|unit| unit.gpu == index) {
            if let Partition::Instance { profile, placement } = unit.partition {
                let index = geometry.index(profile);
                let compute = index.map_or(0, |index| geometry.profiles()[index].compute_slices);
                state = geometry.with_existing(&state, index, placement, compute)?;
            }
        }
        Ok(state)
    }

    /// True if all sums agree with their parts. For tests and for an occasional audit.
    pub fn consistent(&self) -> bool {
        let states = (0..self.gpus.len()).all(|gpu| match self.state_of(gpu, &self.gpus[gpu]) {
            Ok(state) => state == self.gpus[gpu].state,
            Err(_) => self.gpus[gpu].admin_state == AdminState::Quarantined,
        });
        let members = self
            .units
            .values()
            .flat_map(|unit| unit.members.iter().map(move |member| (member.request.vm, unit.id)));
        let homes: BTreeMap<VmId, UnitId> = members.collect();
        let count: usize = self.units.values().map(|unit| unit.members.len()).sum();
        let sums = self.units.values().all(|unit| {
            let firm = unit.members.iter().map(|member| member.request.firm_bytes());
            unit.members.len() < 2 || firm.fold(0, u64::saturating_add) <= unit.memory_bytes
        });
        states && homes == self.homes && count == homes.len() && sums
    }
}
