//! The properties of GPUs, units and VMs that the host reports and operators set.

use std::sync::Arc;

use super::{AdminState, Division, Fleet, Foreign, PlanError, PlanUnit};
use crate::geometry::{Geometry, Occupation};
use crate::record::{Partition, UnitId};
use crate::request::VmId;

impl Fleet {
    /// Opens or closes a GPU for VMs.
    pub fn set_gpu_admin_state(&mut self, gpu: usize, admin_state: AdminState) -> Result<(), PlanError> {
        self.gpus.get_mut(gpu).ok_or(PlanError::UnknownGpu)?.admin_state = admin_state;
        Ok(())
    }

    /// Records whether the driver of a GPU reports the memory of each process. VMs on it stay.
    pub fn set_gpu_measured(&mut self, gpu: usize, measured: bool) -> Result<(), PlanError> {
        self.gpus.get_mut(gpu).ok_or(PlanError::UnknownGpu)?.measured = measured;
        Ok(())
    }

    /// Records whether kernels of a GPU reach no host memory but that which CUDA was given. VMs on it stay.
    pub fn set_gpu_confined(&mut self, gpu: usize, confined: bool) -> Result<(), PlanError> {
        self.gpus.get_mut(gpu).ok_or(PlanError::UnknownGpu)?.confined = confined;
        Ok(())
    }

    /// Opens or closes a unit for VMs.
    pub fn set_unit_admin_state(&mut self, unit: UnitId, admin_state: AdminState) -> Result<(), PlanError> {
        self.unit_mut(unit)?.admin_state = admin_state;
        Ok(())
    }

    /// Sets the memory that a unit can really lend, which is less than the driver reported, but never less than already promised.
    pub fn set_unit_memory(&mut self, unit: UnitId, bytes: u64) -> Result<(), PlanError> {
        let of = self.unit(unit).ok_or(PlanError::UnknownUnit)?;
        let (most, _) = self.size(of.gpu, of.partition)?;
        let promised =
            of.members.iter().map(|member| member.request.firm_bytes()).fold(0, u64::saturating_add);
        self.unit_mut(unit)?.memory_bytes = bytes.max(promised).min(most);
        Ok(())
    }

    /// Changes the use of a GPU: MIG was switched, or its driver reports another geometry. Only while no unit of ours is on it;
    /// foreign instances must be listed anew.
    pub fn set_division(&mut self, gpu: usize, division: Division) -> Result<(), PlanError> {
        if self.units.values().any(|unit| unit.gpu == gpu) {
            return Err(PlanError::InUse);
        }
        let of = self.gpus.get_mut(gpu).ok_or(PlanError::UnknownGpu)?;
        (of.division, of.foreign, of.state) = (division, Vec::new(), Occupation::default());
        Ok(())
    }

    /// Updates the geometry that the driver reports for a GPU: with some drivers it changes when instances come and go. Refused if
    /// a present instance has no place in the new geometry.
    pub fn set_geometry(&mut self, gpu: usize, geometry: Arc<Geometry>) -> Result<(), PlanError> {
        let mut changed = self.gpus.get(gpu).ok_or(PlanError::UnknownGpu)?.clone();
        if changed.geometry().is_none() {
            return Err(PlanError::Taken);
        }
        let unknown = |unit: &PlanUnit| match unit.partition {
            Partition::Instance { profile, .. } => geometry.index(profile).is_none(),
            Partition::Whole => true,
        };
        if self.units.values().filter(|unit| unit.gpu == gpu).any(unknown) {
            return Err(PlanError::InUse);
        }
        changed.division = Division::Mig(geometry);
        changed.state = self.state_of(gpu, &changed)?;
        self.gpus[gpu] = changed;
        Ok(())
    }

    /// Records whether a VM has no session.
    pub fn set_idle(&mut self, vm: VmId, idle: bool) -> Result<(), PlanError> {
        let unit = self.home(vm).ok_or(PlanError::UnknownVm)?;
        let members = &mut self.unit_mut(unit)?.members;
        members.iter_mut().find(|member| member.request.vm == vm).ok_or(PlanError::UnknownVm)?.idle = idle;
        Ok(())
    }

    /// Replaces the foreign instances of a GPU. Refused if one overlaps ours: then one of the two is wrong, and the caller should
    /// close this GPU until it is known which.
    pub fn set_foreign(&mut self, gpu: usize, foreign: Vec<Foreign>) -> Result<(), PlanError> {
        let mut changed = self.gpus.get(gpu).ok_or(PlanError::UnknownGpu)?.clone();
        changed.foreign = foreign;
        changed.state = self.state_of(gpu, &changed)?;
        self.gpus[gpu] = changed;
        Ok(())
    }
}
