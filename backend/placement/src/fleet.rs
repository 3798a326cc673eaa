//! The plan: GPUs, their units, and the VMs in each unit. One writer, no I/O.
//!
//! A **unit** is a whole GPU or one MIG instance. Slices belong to a unit from its reservation until its instance is known to
//! be gone, so that nothing can be planned on top of an instance that is being made or destroyed:
//!
//! ```text
//!           decide, then reserve      created             proven_clean
//!  (free) ───────────────────▶ Reserved ──────▶ Unproven ──────────────▶ Ready ◀── VMs join and leave
//!    ▲                            │ abandon                                │
//!    │◀───────────────────────────┘                                        │ close (empty units only)
//!    │      destroyed                                                      ▼
//!    └──────────────────────────────────────────────────────────────── Closing ──▶ quarantined, tried again by audits
//! ```
//!
//! An instance that another party put on a GPU is **foreign**: it occupies slices here and is never the subject of any
//! decision.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::adoption::{Listed, ListedTwice, Matches, match_instances};
use crate::destruction::{Answer, Destruction, Step};
use crate::geometry::{Geometry, GeometryError, Placement, State};
pub use crate::record::{GpuUuid, Identity, Record, RecordPhase, Spot, UnitId};
use crate::request::{MAX_APART, Request, Strictness, VmId};

/// Most GPUs of a host.
pub const MAX_GPUS: usize = 64;

/// How a GPU is used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Division {
    /// As one, without MIG.
    Whole {
        /// Memory that VMs can have of it.
        memory_bytes: u64,
        /// Its multiprocessors.
        multiprocessors: u32,
    },
    /// In instances. GPUs of one model may share the geometry.
    Mig(Arc<Geometry>),
}

/// Whether anything new may come to a GPU or a unit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Standing {
    /// Yes.
    #[default]
    Open,
    /// No, and what is there should leave.
    Draining,
    /// No: it is not to be trusted.
    Quarantined,
}

/// An instance that is not ours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Foreign {
    /// Number of the GPU instance.
    pub instance: u32,
    /// Profile, by the driver's number, if known.
    pub profile: Option<u32>,
    /// Position.
    pub placement: Placement,
    /// Compute slices, if the profile is not known.
    pub compute_slices: u8,
}

/// A GPU.
#[derive(Clone, Debug)]
pub struct Gpu {
    /// Its UUID.
    pub uuid: GpuUuid,
    /// The NUMA node it is attached to.
    pub numa: Option<u32>,
    /// How it is used.
    pub division: Division,
    /// Whether anything new may come.
    pub standing: Standing,
    /// Whether its driver says how much memory each process has. Of an instance none does.
    pub measured: bool,
    /// Organisations of VMs that are on it while it is not divided and that are not of the plan.
    pub residents: BTreeSet<Option<u64>>,
    foreign: Vec<Foreign>,
    /// Slices of ours, of others and in quarantine, together.
    state: State,
}

impl Gpu {
    /// An unused GPU.
    pub fn new(uuid: GpuUuid, numa: Option<u32>, division: Division) -> Self {
        Self {
            uuid,
            numa,
            division,
            standing: Standing::Open,
            measured: true,
            residents: BTreeSet::new(),
            foreign: Vec::new(),
            state: State::default(),
        }
    }

    /// Its geometry, if it is divided.
    pub fn geometry(&self) -> Option<&Geometry> {
        match &self.division {
            Division::Mig(geometry) => Some(geometry),
            Division::Whole { .. } => None,
        }
    }

    /// How it is divided at the moment.
    pub const fn state(&self) -> &State {
        &self.state
    }

    /// The instances that are not ours.
    pub fn foreign(&self) -> &[Foreign] {
        &self.foreign
    }
}

/// Where a unit stands in its life.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Slices are held for an instance that is being created.
    Reserved,
    /// It exists; nobody has proven yet that its memory is clean.
    Unproven,
    /// VMs can use it.
    Ready,
    /// It is being destroyed, or was found indestructible.
    Closing(Destruction),
}

/// A unit and its VMs.
#[derive(Clone, Debug)]
pub struct Unit {
    /// Its number.
    pub id: UnitId,
    /// Index of its GPU.
    pub gpu: usize,
    /// What it is made of.
    pub spot: Spot,
    /// Whether several VMs may be in it.
    pub shared: bool,
    /// Its memory.
    pub memory_bytes: u64,
    /// Its multiprocessors.
    pub multiprocessors: u32,
    /// Where it stands.
    pub phase: Phase,
    /// Whether VMs may join.
    pub standing: Standing,
    /// What the driver calls it, once it exists.
    pub identity: Option<Identity>,
    /// Distinguishes it from all that had the same UUID before. 0 before it exists.
    pub epoch: u64,
    members: Vec<Member>,
}

/// A VM in a unit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// What it asked for.
    pub request: Request,
    /// Whether it has no session and can be moved.
    pub idle: bool,
}

impl Unit {
    /// The VMs in it.
    pub fn members(&self) -> &[Member] {
        &self.members
    }

    /// Whether the VM can be added by the sums: memory, time, weight and number of VMs.
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
        (firm <= self.memory_bytes
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

/// What is left of a unit when a VM has joined it.
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
    /// Sum of all quotas in a unit, in thousandths of its memory. 1000: no overcommitment.
    pub overcommit_permille: u32,
    /// Most weight in a unit; 0 for any.
    pub weight_limit: u32,
    /// Whether VMs of several organisations may share a unit whose driver does not say how much memory each process has.
    pub share_unmeasured: bool,
}

impl Default for Rules {
    fn default() -> Self {
        Self { overcommit_permille: 1000, weight_limit: 0, share_unmeasured: false }
    }
}

/// Where a VM goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    /// Into a unit that exists.
    Join(UnitId),
    /// Into a unit to be opened.
    Open {
        /// Index of the GPU.
        gpu: usize,
        /// What it is made of.
        spot: Spot,
        /// Whether others may join later.
        shared: bool,
    },
}

/// A VM has moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Relocation {
    /// The unit it left.
    pub from: UnitId,
    /// The unit it is in.
    pub to: UnitId,
    /// Whether nobody is left in the old one: time to close it.
    pub emptied: bool,
}

/// Why a step was not taken. The plan is as it was.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    /// No such GPU.
    #[error("no such GPU")]
    UnknownGpu,
    /// No such unit.
    #[error("no such unit")]
    UnknownUnit,
    /// No such VM.
    #[error("the VM has no unit")]
    UnknownVm,
    /// The VM has a unit already.
    #[error("the VM has a unit already")]
    AlreadyPlaced,
    /// The request names more neighbours than [`MAX_APART`].
    #[error("more than {MAX_APART} neighbours are named")]
    TooManyApart,
    /// The place was taken meanwhile, or never fitted.
    #[error("the place is taken")]
    Taken,
    /// The unit is in another phase of its life.
    #[error("the unit is in another phase of its life")]
    Phase,
    /// VMs are in it.
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

/// All GPUs of a host, and what is planned on them.
#[derive(Clone, Debug, Default)]
pub struct Fleet {
    rules: Rules,
    gpus: Vec<Gpu>,
    units: BTreeMap<UnitId, Unit>,
    homes: BTreeMap<VmId, UnitId>,
    next_unit: u64,
    epoch: u64,
}

impl Fleet {
    /// An empty plan. Of more GPUs than [`MAX_GPUS`] the first are taken.
    pub fn new(rules: Rules, mut gpus: Vec<Gpu>) -> Self {
        gpus.truncate(MAX_GPUS);
        Self { rules, gpus, ..Self::default() }
    }

    /// The GPUs; their index is their number in the plan.
    pub fn gpus(&self) -> &[Gpu] {
        &self.gpus
    }

    /// The site's rules.
    pub const fn rules(&self) -> &Rules {
        &self.rules
    }

    /// All units, by number.
    pub fn units(&self) -> impl Iterator<Item = &Unit> {
        self.units.values()
    }

    /// A unit.
    pub fn unit(&self, unit: UnitId) -> Option<&Unit> {
        self.units.get(&unit)
    }

    /// The unit of a VM.
    pub fn home(&self, vm: VmId) -> Option<UnitId> {
        self.homes.get(&vm).copied()
    }

    /// Lets VMs come to a GPU or keeps them away.
    pub fn set_gpu_standing(&mut self, gpu: usize, standing: Standing) -> Result<(), PlanError> {
        self.gpus.get_mut(gpu).ok_or(PlanError::UnknownGpu)?.standing = standing;
        Ok(())
    }

    /// The driver of a GPU says how much memory each process has, or does not. What is on it stays.
    pub fn set_gpu_measured(&mut self, gpu: usize, measured: bool) -> Result<(), PlanError> {
        self.gpus.get_mut(gpu).ok_or(PlanError::UnknownGpu)?.measured = measured;
        Ok(())
    }

    /// Lets VMs come to a unit or keeps them away.
    pub fn set_unit_standing(&mut self, unit: UnitId, standing: Standing) -> Result<(), PlanError> {
        self.unit_mut(unit)?.standing = standing;
        Ok(())
    }

    /// What a unit really has to lend is known: less than its driver said it has. Never less than what it has promised already.
    pub fn set_unit_memory(&mut self, unit: UnitId, bytes: u64) -> Result<(), PlanError> {
        let of = self.unit(unit).ok_or(PlanError::UnknownUnit)?;
        let (most, _) = self.size(of.gpu, of.spot)?;
        let promised =
            of.members.iter().map(|member| member.request.firm_bytes()).fold(0, u64::saturating_add);
        self.unit_mut(unit)?.memory_bytes = bytes.max(promised).min(most);
        Ok(())
    }

    /// A GPU is used in another way from now on: MIG was switched, or its driver reports another geometry. Only while
    /// nothing of ours is on it; what was foreign is to be listed anew.
    pub fn set_division(&mut self, gpu: usize, division: Division) -> Result<(), PlanError> {
        if self.units.values().any(|unit| unit.gpu == gpu) {
            return Err(PlanError::InUse);
        }
        let of = self.gpus.get_mut(gpu).ok_or(PlanError::UnknownGpu)?;
        (of.division, of.foreign, of.state) = (division, Vec::new(), State::default());
        Ok(())
    }

    /// The driver reports more, or less, about how a GPU can be divided, as some do when instances come and go. Refused if
    /// what is on it has no place in the new geometry.
    pub fn set_geometry(&mut self, gpu: usize, geometry: Arc<Geometry>) -> Result<(), PlanError> {
        let mut changed = self.gpus.get(gpu).ok_or(PlanError::UnknownGpu)?.clone();
        if changed.geometry().is_none() {
            return Err(PlanError::Taken);
        }
        let unknown = |unit: &Unit| match unit.spot {
            Spot::Instance { profile, .. } => geometry.index(profile).is_none(),
            Spot::Whole => true,
        };
        if self.units.values().filter(|unit| unit.gpu == gpu).any(unknown) {
            return Err(PlanError::InUse);
        }
        changed.division = Division::Mig(geometry);
        changed.state = self.state_of(gpu, &changed)?;
        self.gpus[gpu] = changed;
        Ok(())
    }

    /// A VM has sessions, or none any more.
    pub fn set_idle(&mut self, vm: VmId, idle: bool) -> Result<(), PlanError> {
        let unit = self.home(vm).ok_or(PlanError::UnknownVm)?;
        let members = &mut self.unit_mut(unit)?.members;
        members.iter_mut().find(|member| member.request.vm == vm).ok_or(PlanError::UnknownVm)?.idle = idle;
        Ok(())
    }

    /// Replaces what is foreign on a GPU. Refused if it overlaps what is ours: then one of the two is wrong, and nobody
    /// should plan on this GPU before it is known which.
    pub fn set_foreign(&mut self, gpu: usize, foreign: Vec<Foreign>) -> Result<(), PlanError> {
        let mut changed = self.gpus.get(gpu).ok_or(PlanError::UnknownGpu)?.clone();
        changed.foreign = foreign;
        changed.state = self.state_of(gpu, &changed)?;
        self.gpus[gpu] = changed;
        Ok(())
    }

    /// Carries out a decision: the VM is a member of the unit, and a unit to be opened holds its slices.
    pub fn reserve(&mut self, request: &Request, decision: Decision) -> Result<UnitId, PlanError> {
        if self.homes.contains_key(&request.vm) {
            return Err(PlanError::AlreadyPlaced);
        }
        if request.apart.len() > MAX_APART {
            return Err(PlanError::TooManyApart);
        }
        let id = match decision {
            Decision::Join(id) => {
                let rules = self.rules;
                let unit = self.unit_mut(id)?;
                let open = unit.shared && !matches!(unit.phase, Phase::Closing(_));
                if !open || request.strictness > Strictness::Shared || unit.room(request, &rules).is_none() {
                    return Err(PlanError::Taken);
                }
                id
            }
            Decision::Open { gpu, spot, shared } => {
                // A unit too small for its first VM would be a unit too small for ever.
                if self.size(gpu, spot)?.0 < request.memory_bytes() {
                    return Err(PlanError::Taken);
                }
                self.open(gpu, spot, shared)?
            }
        };
        self.unit_mut(id)?.members.push(Member { request: request.clone(), idle: true });
        self.homes.insert(request.vm, id);
        Ok(id)
    }

    /// The instance of a reserved unit exists, or the whole GPU was taken into service (no identity). Its memory is not proven
    /// clean. Returns its epoch, never given before.
    pub fn created(&mut self, unit: UnitId, identity: Option<Identity>) -> Result<u64, PlanError> {
        let epoch = self.epoch + 1;
        let unit = self.unit_mut(unit)?;
        let fits = matches!(unit.spot, Spot::Instance { .. }) == identity.is_some();
        if unit.phase != Phase::Reserved || !fits {
            return Err(PlanError::Phase);
        }
        (unit.phase, unit.identity, unit.epoch) = (Phase::Unproven, identity, epoch);
        self.epoch = epoch;
        Ok(epoch)
    }

    /// The memory of a unit was scrubbed and the scrub was verified.
    pub fn proven_clean(&mut self, unit: UnitId) -> Result<(), PlanError> {
        let unit = self.unit_mut(unit)?;
        if unit.phase != Phase::Unproven {
            return Err(PlanError::Phase);
        }
        unit.phase = Phase::Ready;
        Ok(())
    }

    /// A reserved unit will not exist: its slices are free again, its VMs have no unit. Returns the VMs.
    pub fn abandon(&mut self, unit: UnitId) -> Result<Vec<VmId>, PlanError> {
        if self.unit_mut(unit)?.phase != Phase::Reserved {
            return Err(PlanError::Phase);
        }
        let vms: Vec<VmId> = self.unit_mut(unit)?.members.iter().map(|member| member.request.vm).collect();
        self.homes.retain(|_, home| *home != unit);
        self.remove(unit)?;
        Ok(vms)
    }

    /// A VM leaves its unit. Returns the unit if nobody is left in it: time to [`Self::close`] it.
    pub fn leave(&mut self, vm: VmId) -> Result<Option<UnitId>, PlanError> {
        let id = self.homes.remove(&vm).ok_or(PlanError::UnknownVm)?;
        let unit = self.unit_mut(id)?;
        unit.members.retain(|member| member.request.vm != vm);
        Ok(unit.members.is_empty().then_some(id))
    }

    /// Moves an idle VM to another place. Its new unit is held before the old one is left, so a refusal changes nothing.
    pub fn relocate(&mut self, vm: VmId, decision: Decision) -> Result<Relocation, PlanError> {
        let from = self.home(vm).ok_or(PlanError::UnknownVm)?;
        if decision == Decision::Join(from) {
            return Err(PlanError::Taken);
        }
        let unit = self.unit(from).ok_or(PlanError::UnknownUnit)?;
        let at =
            unit.members.iter().position(|member| member.request.vm == vm).ok_or(PlanError::UnknownVm)?;
        if !unit.members[at].idle {
            return Err(PlanError::Busy);
        }
        // Others may have come, or the place been closed, since the decision was made.
        let (spot, beside, open) = match decision {
            Decision::Open { gpu, spot, .. } => ((gpu, spot), [].as_slice(), true),
            Decision::Join(id) => {
                let to = self.unit(id).ok_or(PlanError::UnknownUnit)?;
                ((to.gpu, to.spot), to.members(), to.standing == Standing::Open)
            }
        };
        let request = &unit.members[at].request;
        if !open
            || spot.0 >= self.gpus.len()
            || self.wishes(request, spot.0).is_none()
            || !self.admits(spot, beside, request, &self.rules)
        {
            return Err(PlanError::Taken);
        }
        let unit = self.unit_mut(from)?;
        let member = unit.members.remove(at);
        self.homes.remove(&vm);
        match self.reserve(&member.request, decision) {
            Ok(to) => {
                let emptied = self.unit(from).is_some_and(|unit| unit.members.is_empty());
                Ok(Relocation { from, to, emptied })
            }
            Err(error) => {
                self.unit_mut(from)?.members.insert(at, member);
                self.homes.insert(vm, from);
                Err(error)
            }
        }
    }

    /// Ends an empty unit. A whole GPU, and a unit that never existed, are free at once, and true is returned; an instance
    /// keeps its slices until [`Self::closing_answer`] has seen it go.
    pub fn close(&mut self, unit: UnitId, now: Duration) -> Result<bool, PlanError> {
        let of = self.unit_mut(unit)?;
        if !of.members.is_empty() {
            return Err(PlanError::InUse);
        }
        if matches!(of.phase, Phase::Closing(_)) {
            return Err(PlanError::Phase);
        }
        if of.spot == Spot::Whole || of.phase == Phase::Reserved {
            self.remove(unit)?;
            return Ok(true);
        }
        of.phase = Phase::Closing(Destruction::new(now));
        Ok(false)
    }

    /// What to do about a unit that is being closed.
    pub fn closing_step(&self, unit: UnitId, now: Duration) -> Result<Step, PlanError> {
        match &self.unit(unit).ok_or(PlanError::UnknownUnit)?.phase {
            Phase::Closing(destruction) => Ok(destruction.next(now)),
            _ => Err(PlanError::Phase),
        }
    }

    /// How a call of [`Self::closing_step`] ended. Returns what is next; at [`Step::Gone`] the unit is no more, and its slices
    /// are free.
    pub fn closing_answer(&mut self, unit: UnitId, now: Duration, answer: Answer) -> Result<Step, PlanError> {
        let Phase::Closing(destruction) = &mut self.unit_mut(unit)?.phase else {
            return Err(PlanError::Phase);
        };
        destruction.answer(now, answer);
        let step = destruction.next(now);
        if step == Step::Gone {
            self.remove(unit)?;
        }
        Ok(step)
    }

    /// Lets all quarantined destructions try once more. Returns their units.
    pub fn audit_closing(&mut self, now: Duration) -> Vec<UnitId> {
        let mut tried = Vec::new();
        for unit in self.units.values_mut() {
            if let Phase::Closing(destruction) = &mut unit.phase
                && destruction.is_quarantined()
            {
                destruction.audit(now);
                tried.push(unit.id);
            }
        }
        tried
    }

    /// Everything that must survive a restart, beside the requests of the VMs.
    pub fn records(&self) -> Vec<Record> {
        let record = |unit: &Unit| Record {
            unit: unit.id,
            gpu: self.gpus[unit.gpu].uuid,
            spot: unit.spot,
            shared: unit.shared,
            phase: match &unit.phase {
                Phase::Reserved => RecordPhase::Reserved,
                Phase::Unproven => RecordPhase::Unproven,
                Phase::Ready => RecordPhase::Ready,
                Phase::Closing(destruction) if destruction.is_quarantined() => RecordPhase::Quarantined,
                Phase::Closing(_) => RecordPhase::Closing,
            },
            identity: unit.identity.clone(),
            epoch: unit.epoch,
        };
        self.units.values().map(record).collect()
    }

    /// After a restart, on an empty plan: takes over what was recorded and is still there, under new epochs, and
    /// counts everything else that the driver lists as foreign. Instances with an unconfirmed record are foreign here; the
    /// caller may look at [`Matches::unconfirmed`]. `highest` is the highest epoch and unit that were ever recorded.
    pub fn adopt(
        &mut self,
        records: &[Record],
        listed: &[Listed],
        highest: Highest,
        now: Duration,
    ) -> Result<Matches, PlanError> {
        let mut matches = match_instances(records, listed)?;
        // A record that no longer fits its GPU (MIG switched on or off, a profile gone) is no proof of anything.
        let fits = |record: &Record| {
            let gpu = self.gpus.iter().position(|gpu| gpu.uuid == record.gpu);
            gpu.is_some_and(|gpu| self.size(gpu, record.spot).is_ok())
        };
        let unfit = matches.adopted.extract_if(.., |pair| !fits(&records[pair.0]));
        let (lost, foreign): (Vec<usize>, Vec<usize>) = unfit.unzip();
        matches.lost.extend(lost);
        matches.foreign.extend(foreign);
        let whole = (0..records.len()).filter(|&at| records[at].spot == Spot::Whole);
        let (whole, lost): (Vec<usize>, Vec<usize>) = whole.partition(|&at| fits(&records[at]));
        matches.lost.extend(lost);
        let mut next = Self::new(self.rules, self.gpus.clone());
        next.epoch = records.iter().map(|record| record.epoch).fold(highest.epoch, u64::max);
        next.next_unit = records.iter().map(|record| record.unit.0).fold(highest.unit, u64::max);
        for gpu in &mut next.gpus {
            let ours = |index: &usize| matches.adopted.iter().any(|pair| pair.1 == *index);
            gpu.foreign = (0..listed.len())
                .filter(|index| !ours(index) && listed[*index].gpu == gpu.uuid)
                .map(|index| Foreign {
                    instance: listed[index].instance,
                    profile: Some(listed[index].profile),
                    placement: listed[index].placement,
                    compute_slices: listed[index].compute_slices,
                })
                .collect();
        }
        for at in matches.adopted.iter().map(|pair| pair.0).chain(whole) {
            next.take_over(&records[at], now)?;
        }
        for gpu in 0..next.gpus.len() {
            match next.state_of(gpu, &next.gpus[gpu]) {
                Ok(state) => next.gpus[gpu].state = state,
                // What is there contradicts itself: the others go on, this one gets nothing new.
                Err(_) => next.gpus[gpu].standing = Standing::Quarantined,
            }
        }
        *self = next;
        Ok(matches)
    }

    /// A VM that was in a unit before the restart is in it again, whatever the rules say by now.
    pub fn rejoin(&mut self, unit: UnitId, request: Request, idle: bool) -> Result<(), PlanError> {
        if self.homes.contains_key(&request.vm) {
            return Err(PlanError::AlreadyPlaced);
        }
        let vm = request.vm;
        self.unit_mut(unit)?.members.push(Member { request, idle });
        self.homes.insert(vm, unit);
        Ok(())
    }

    /// The highest epoch and unit given so far, for [`Self::adopt`].
    pub const fn highest(&self) -> Highest {
        Highest { epoch: self.epoch, unit: self.next_unit }
    }

    /// Whether the VM may be in a spot beside `members`, and beside what is not of the plan. Where no figure tells what the driver
    /// takes for which VM, one organisation's VMs could take what is another's.
    pub(crate) fn admits(
        &self,
        (gpu, spot): (usize, Spot),
        members: &[Member],
        request: &Request,
        rules: &Rules,
    ) -> bool {
        let of = &self.gpus[gpu];
        let whole = spot == Spot::Whole;
        let residents = of.residents.iter().filter(|_| whole);
        let mut beside = members.iter().map(|member| &member.request.organisation).chain(residents);
        rules.share_unmeasured
            || whole && of.measured
            || beside.all(|organisation| *organisation == request.organisation)
    }

    /// Memory and multiprocessors of a spot.
    pub(crate) fn size(&self, gpu: usize, spot: Spot) -> Result<(u64, u32), PlanError> {
        let gpu = self.gpus.get(gpu).ok_or(PlanError::UnknownGpu)?;
        match (&gpu.division, spot) {
            (Division::Whole { memory_bytes, multiprocessors }, Spot::Whole) => {
                Ok((*memory_bytes, *multiprocessors))
            }
            (Division::Mig(geometry), Spot::Instance { profile, .. }) => {
                let index = geometry.index(profile).ok_or(PlanError::Taken)?;
                let profile = &geometry.profiles()[index];
                Ok((profile.memory_bytes, profile.multiprocessors))
            }
            _ => Err(PlanError::Taken),
        }
    }

    fn unit_mut(&mut self, unit: UnitId) -> Result<&mut Unit, PlanError> {
        self.units.get_mut(&unit).ok_or(PlanError::UnknownUnit)
    }

    /// Holds a spot for a new unit.
    fn open(&mut self, gpu: usize, spot: Spot, shared: bool) -> Result<UnitId, PlanError> {
        let (memory_bytes, multiprocessors) = self.size(gpu, spot)?;
        match (&self.gpus[gpu].division, spot) {
            (Division::Mig(geometry), Spot::Instance { profile, placement }) => {
                let index = geometry.index(profile).ok_or(PlanError::Taken)?;
                let state = self.gpus[gpu].state;
                if !geometry.free(&state, index).any(|free| free == placement) {
                    return Err(PlanError::Taken);
                }
                self.gpus[gpu].state = geometry.with(&state, index, placement);
            }
            _ if self.units.values().any(|unit| unit.gpu == gpu) => return Err(PlanError::Taken),
            _ => {}
        }
        self.next_unit += 1;
        let id = UnitId(self.next_unit);
        let unit = Unit {
            id,
            gpu,
            spot,
            shared,
            memory_bytes,
            multiprocessors,
            phase: Phase::Reserved,
            standing: Standing::Open,
            identity: None,
            epoch: 0,
            members: Vec::new(),
        };
        self.units.insert(id, unit);
        Ok(id)
    }

    /// Forgets a unit and frees its slices.
    fn remove(&mut self, unit: UnitId) -> Result<(), PlanError> {
        let gpu = self.units.remove(&unit).ok_or(PlanError::UnknownUnit)?.gpu;
        // On a GPU that contradicts itself nothing is planned, so nothing needs its state.
        if let Ok(state) = self.state_of(gpu, &self.gpus[gpu]) {
            self.gpus[gpu].state = state;
        }
        Ok(())
    }

    fn take_over(&mut self, record: &Record, now: Duration) -> Result<(), PlanError> {
        let Some(gpu) = self.gpus.iter().position(|gpu| gpu.uuid == record.gpu) else { return Ok(()) };
        let (memory_bytes, multiprocessors) = self.size(gpu, record.spot)?;
        self.epoch += 1;
        let phase = match record.phase {
            RecordPhase::Reserved => Phase::Reserved,
            RecordPhase::Unproven => Phase::Unproven,
            RecordPhase::Ready => Phase::Ready,
            RecordPhase::Closing => Phase::Closing(Destruction::new(now)),
            RecordPhase::Quarantined => Phase::Closing(Destruction::quarantined()),
        };
        let unit = Unit {
            id: record.unit,
            gpu,
            spot: record.spot,
            shared: record.shared,
            memory_bytes,
            multiprocessors,
            phase,
            standing: Standing::Open,
            identity: record.identity.clone(),
            epoch: self.epoch,
            members: Vec::new(),
        };
        self.units.insert(record.unit, unit);
        Ok(())
    }

    /// A GPU's state, summed up from what is foreign and what is ours.
    fn state_of(&self, index: usize, gpu: &Gpu) -> Result<State, GeometryError> {
        let Some(geometry) = gpu.geometry() else { return Ok(State::default()) };
        let mut state = State::default();
        for foreign in &gpu.foreign {
            let profile = foreign.profile.and_then(|id| geometry.index(id));
            let compute =
                profile.map_or(foreign.compute_slices, |index| geometry.profiles()[index].compute_slices);
            state = geometry.with_existing(&state, profile, foreign.placement, compute)?;
        }
        for unit in self.units.values().filter(|unit| unit.gpu == index) {
            if let Spot::Instance { profile, placement } = unit.spot {
                let index = geometry.index(profile);
                let compute = index.map_or(0, |index| geometry.profiles()[index].compute_slices);
                state = geometry.with_existing(&state, index, placement, compute)?;
            }
        }
        Ok(state)
    }

    /// Whether all sums agree with what they are sums of. For tests and for an occasional audit.
    pub fn consistent(&self) -> bool {
        let states = (0..self.gpus.len()).all(|gpu| match self.state_of(gpu, &self.gpus[gpu]) {
            Ok(state) => state == self.gpus[gpu].state,
            Err(_) => self.gpus[gpu].standing == Standing::Quarantined,
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

/// The highest numbers given so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Highest {
    /// Epoch.
    pub epoch: u64,
    /// Unit.
    pub unit: u64,
}
