//! The lives of units, and the VMs that join and leave them.

use std::time::Duration;

use super::{AdminState, Division, Fleet, Member, PlanError, PlanUnit, UnitPhase};
use crate::destruction::{Destruction, DestructionAnswer, Step};
use crate::record::{InstanceIdentity, Partition, UnitId};
use crate::request::{MAX_ANTI_AFFINITY, Request, Strictness, VmId};

/// The place for a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    /// An existing unit.
    Join(UnitId),
    /// A unit to be opened.
    Open {
        /// Index of the GPU.
        gpu: usize,
        /// The whole GPU, or an instance.
        partition: Partition,
        /// True if other VMs may join later.
        shared: bool,
    },
}

/// The result of a move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Relocation {
    /// The unit it left.
    pub from: UnitId,
    /// The unit it joined.
    pub to: UnitId,
    /// True if the old unit is empty and should be closed.
    pub emptied: bool,
}

impl Fleet {
    /// Carries out a decision: makes the VM a member of the unit; a unit to be opened holds its slices.
    pub fn reserve(&mut self, request: &Request, decision: Decision) -> Result<UnitId, PlanError> {
        if self.homes.contains_key(&request.vm) {
            return Err(PlanError::AlreadyPlaced);
        }
        if request.anti_affinity.len() > MAX_ANTI_AFFINITY {
            return Err(PlanError::TooManyRules);
        }
        let id = match decision {
            Decision::Join(id) => {
                let rules = self.rules;
                let unit = self.unit_mut(id)?;
                let open = unit.shared && !matches!(unit.phase, UnitPhase::Closing(_));
                if !open || request.strictness > Strictness::Shared || unit.room(request, &rules).is_none() {
                    return Err(PlanError::Taken);
                }
                id
            }
            Decision::Open { gpu, partition, shared } => {
                // A unit too small for its first VM would stay too small.
                if self.size(gpu, partition)?.0 < request.memory_bytes() {
                    return Err(PlanError::Taken);
                }
                self.open(gpu, partition, shared)?
            }
        };
        self.unit_mut(id)?.members.push(Member { request: request.clone(), idle: true });
        self.homes.insert(request.vm, id);
        Ok(id)
    }

    /// Records that the instance of a reserved unit exists, or that the whole GPU was taken into service (no identity). Its memory
    /// is not proven clean. Returns its epoch, which was never used before.
    pub fn created(&mut self, unit: UnitId, identity: Option<InstanceIdentity>) -> Result<u64, PlanError> {
        let epoch = self.epoch + 1;
        let unit = self.unit_mut(unit)?;
        let fits = matches!(unit.partition, Partition::Instance { .. }) == identity.is_some();
        if unit.phase != UnitPhase::Reserved || !fits {
            return Err(PlanError::Phase);
        }
        (unit.phase, unit.identity, unit.epoch) = (UnitPhase::Unproven, identity, epoch);
        self.epoch = epoch;
        Ok(epoch)
    }

    /// Records that the memory of a unit was scrubbed and the scrub was verified.
    pub fn proven_clean(&mut self, unit: UnitId) -> Result<(), PlanError> {
        let unit = self.unit_mut(unit)?;
        if unit.phase != UnitPhase::Unproven {
            return Err(PlanError::Phase);
        }
        unit.phase = UnitPhase::Ready;
        Ok(())
    }

    /// Gives up a reserved unit: its slices are free again, its VMs have no unit. Returns the VMs.
    pub fn abandon(&mut self, unit: UnitId) -> Result<Vec<VmId>, PlanError> {
        if self.unit_mut(unit)?.phase != UnitPhase::Reserved {
            return Err(PlanError::Phase);
        }
        let vms: Vec<VmId> = self.unit_mut(unit)?.members.iter().map(|member| member.request.vm).collect();
        self.homes.retain(|_, home| *home != unit);
        self.remove(unit)?;
        Ok(vms)
    }

    /// Removes a VM from its unit. Returns the unit if it is empty now: time to [`Self::close`] it.
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
        // Since the decision, other VMs may have come, or the place may have been closed.
        let (partition, beside, open) = match decision {
            Decision::Open { gpu, partition, .. } => ((gpu, partition), [].as_slice(), true),
            Decision::Join(id) => {
                let to = self.unit(id).ok_or(PlanError::UnknownUnit)?;
                ((to.gpu, to.partition), to.members(), to.admin_state == AdminState::Open)
            }
        };
        let request = &unit.members[at].request;
        if !open
            || partition.0 >= self.gpus.len()
            || self.wishes(request, partition.0).is_none()
            || !self.admits(partition, beside, request, &self.rules)
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

    /// Ends an empty unit. A whole GPU, and a unit that never existed, are free at once, and true is returned; an instance keeps
    /// its slices until [`Self::closing_answer`] has confirmed its end.
    pub fn close(&mut self, unit: UnitId, now: Duration) -> Result<bool, PlanError> {
        let of = self.unit_mut(unit)?;
        if !of.members.is_empty() {
            return Err(PlanError::InUse);
        }
        if matches!(of.phase, UnitPhase::Closing(_)) {
            return Err(PlanError::Phase);
        }
        if of.partition == Partition::Whole || of.phase == UnitPhase::Reserved {
            self.remove(unit)?;
            return Ok(true);
        }
        of.phase = UnitPhase::Closing(Destruction::new(now));
        Ok(false)
    }

    /// The next action for a unit that is being closed.
    pub fn closing_step(&self, unit: UnitId, now: Duration) -> Result<Step, PlanError> {
        match &self.unit(unit).ok_or(PlanError::UnknownUnit)?.phase {
            UnitPhase::Closing(destruction) => Ok(destruction.next(now)),
            _ => Err(PlanError::Phase),
        }
    }

    /// Passes the result of a call of [`Self::closing_step`]. Returns the next action; at [`Step::Gone`] the unit no longer
    /// exists, and its slices are free.
    pub fn closing_answer(
        &mut self,
        unit: UnitId,
        now: Duration,
        answer: DestructionAnswer,
    ) -> Result<Step, PlanError> {
        let UnitPhase::Closing(destruction) = &mut self.unit_mut(unit)?.phase else {
            return Err(PlanError::Phase);
        };
        destruction.answer(now, answer);
        let step = destruction.next(now);
        if step == Step::Gone {
            self.remove(unit)?;
        }
        Ok(step)
    }

    /// Makes all quarantined destructions try once more. Returns their units.
    pub fn audit_closing(&mut self, now: Duration) -> Vec<UnitId> {
        let mut tried = Vec::new();
        for unit in self.units.values_mut() {
            if let UnitPhase::Closing(destruction) = &mut unit.phase
                && destruction.is_quarantined()
            {
                destruction.audit(now);
                tried.push(unit.id);
            }
        }
        tried
    }

    /// Opens a unit: holds its spot.
    fn open(&mut self, gpu: usize, partition: Partition, shared: bool) -> Result<UnitId, PlanError> {
        let (memory_bytes, multiprocessors) = self.size(gpu, partition)?;
        match (&self.gpus[gpu].division, partition) {
            (Division::Mig(geometry), Partition::Instance { profile, placement }) => {
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
        let unit = PlanUnit {
            id,
            gpu,
            partition,
            shared,
            memory_bytes,
            multiprocessors,
            phase: UnitPhase::Reserved,
            admin_state: AdminState::Open,
            identity: None,
            epoch: 0,
            members: Vec::new(),
        };
        self.units.insert(id, unit);
        Ok(id)
    }

    /// Removes a unit and frees its slices.
    fn remove(&mut self, unit: UnitId) -> Result<(), PlanError> {
        let gpu = self.units.remove(&unit).ok_or(PlanError::UnknownUnit)?.gpu;
        // A GPU whose list contradicts itself is closed for planning, so its state is not needed.
        if let Ok(state) = self.state_of(gpu, &self.gpus[gpu]) {
            self.gpus[gpu].state = state;
        }
        Ok(())
    }
}
