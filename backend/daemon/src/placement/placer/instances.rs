//! Units and MIG instances: opened, closed and destroyed, and the division of GPUs.

use super::{Placer, caused, internal, list, undrained};
use crate::placement::survey::{FoundDevice, look};
use std::rc::Rc;

use sluice_api::{Code, Error};
use sluice_messages::inventory::{Instance, InstancePlace, Switch, Visible, VisibleInstance};
use sluice_placement::{
    AdminState, DestructionAnswer, Foreign, InstanceIdentity, ListedInstance, Partition, PlanError,
    SlicePlacement as Position, Step, UnitId, UnitPhase,
};
use sluice_protocol::limits;
use tokio::{task::spawn_local, time::sleep};

use crate::{
    records::unit_event::UnitEvent,
    units::inventory::AskError,
    units::unit::{Unit, UnitPlace},
};

impl Placer {
    /// Opens a planned unit: makes its instance and starts its arbiter. The plan must be written before and after. If several
    /// callers request the same unit, the first one makes it, and the others wait.
    pub(crate) async fn open(&self, unit: UnitId) -> Result<Rc<Unit>, Error> {
        let gpu = self.fleet.borrow().unit(unit).ok_or_else(|| internal(&PlanError::UnknownUnit))?.gpu;
        self.take_whole(unit);
        if let Some(there) = self.unit(unit) {
            return Ok(there);
        }
        let _turn = self.turn(gpu).await;
        let (partition, reserved) = {
            let fleet = self.fleet.borrow();
            let planned = fleet.unit(unit).ok_or_else(|| internal(&PlanError::UnknownUnit))?;
            (planned.partition, planned.phase == UnitPhase::Reserved)
        };
        let (Partition::Instance { profile, placement }, true) = (partition, reserved) else {
            return self.unit(unit).ok_or_else(|| internal(&PlanError::UnknownUnit));
        };
        let found = self.device(gpu).ok_or_else(|| internal(&PlanError::UnknownGpu))?;
        let number = self.numbers.borrow().get(&unit).copied();
        let number = number.ok_or_else(|| {
            Error::new(Code::PlacementUnavailable, format!("the limit of {} units is reached", limits::UNITS))
        })?;
        let inventory = self.parts.inventory.as_ref().ok_or_else(|| internal(&PlanError::UnknownGpu))?;
        let place = InstancePlace { start: placement.start, size: placement.size };
        let generation = *inventory.generation().borrow();
        let made = match inventory.create(found.ordinal, profile, place).await {
            Ok(made) => made,
            Err(error) => {
                if error == AskError::Silent {
                    self.undo_instance(gpu, &found, profile, placement, generation).await;
                }
                let kind = found.kinds.get(&profile).map_or("instance", String::as_str);
                let message = format!(
                    "the driver cannot create {kind} on GPU {} at slice {}",
                    found.ordinal, placement.start
                );
                return Err(Error::new(Code::DeviceFailed, message).because(error));
            }
        };
        let identity =
            InstanceIdentity { instance: made.gpu, compute_instance: made.compute, uuid: made.uuid };
        let taken = self.fleet.borrow_mut().created(unit, Some(identity));
        if let Err(error) = taken {
            // No caller needs it any more, and none was told of it.
            if let Err(stays) = inventory.destroy(found.ordinal, &made).await {
                tracing::error!(gpu = found.ordinal, error = %stays, "cannot destroy an unused instance");
            }
            return Err(internal(&error));
        }
        Ok(self.add_unit(number, &found, &made))
    }

    /// An instance may have been made: there was no answer, and the inventory of `generation` is gone. If it exists it is
    /// destroyed (its place was given to no other); if that fails, its GPU is quarantined until its instances are read again.
    pub(super) async fn undo_instance(
        &self,
        gpu: usize,
        found: &FoundDevice,
        profile: u32,
        placement: Position,
        generation: u64,
    ) {
        let Some(inventory) = &self.parts.inventory else { return };
        let here = (profile, placement.start.into(), placement.size.into());
        let undone = async {
            if !inventory.is_back(generation).await {
                return Err(AskError::Silent);
            }
            let listed = inventory.instances(found.ordinal).await?;
            let made = listed.iter().find(|known| (known.profile, known.start, known.size) == here);
            match made {
                Some(made) => inventory.destroy(found.ordinal, made).await,
                None => Ok(()),
            }
        };
        if let Err(error) = undone.await {
            tracing::error!(gpu = found.ordinal, %error, "the GPU may have an unused instance and is quarantined");
            _ = self.fleet.borrow_mut().set_gpu_admin_state(gpu, AdminState::Quarantined);
        }
    }

    /// Starts an arbiter on an instance.
    pub(super) fn add_unit(&self, number: u32, found: &FoundDevice, made: &Instance) -> Rc<Unit> {
        let Instance { uuid, gpu, compute, .. } = *made;
        let visible = Visible::Instance(VisibleInstance { uuid, pci: found.pci, gpu, compute });
        let unit = self.new_unit(number, UnitPlace { device: found.ordinal, instance: gpu, visible });
        self.parts.units.open(Rc::clone(&unit));
        unit
    }

    /// Closes empty units. An instance in quarantine stays until it is readmitted.
    pub(crate) fn tidy(self: &Rc<Self>) {
        let empty: Vec<(UnitId, bool)> = {
            let fleet = self.fleet.borrow();
            let left = self.left.borrow();
            let empty = fleet.units().filter(|unit| unit.members().is_empty() && !left.contains(&unit.id));
            let ends = empty.filter(|unit| !matches!(unit.phase, UnitPhase::Closing(_)));
            ends.map(|unit| {
                (unit.id, unit.partition == Partition::Whole || unit.phase == UnitPhase::Reserved)
            })
            .collect()
        };
        for (unit, simple) in empty {
            let number = self.numbers.borrow().get(&unit).copied();
            if !simple && number.is_some_and(|number| self.parts.checkpoint.quarantine(number).is_some()) {
                continue;
            }
            let now = self.now();
            match self.fleet.borrow_mut().close(unit, now) {
                Ok(true) => self.take_number(unit),
                Ok(false) => _ = spawn_local(Rc::clone(self).close(unit)),
                Err(error) => tracing::error!(%error, "cannot close an empty unit"),
            }
        }
        let plan = self.plan();
        // Nothing else depends on it: one write at a time, and later changes are in the next.
        if self.parts.checkpoint.objects().plan != plan && !self.tidying.replace(true) {
            spawn_local(Rc::clone(self).write_or_log());
        }
    }

    /// Destroys the instance of a unit that is being closed, with retries.
    pub(super) async fn close(self: Rc<Self>, unit: UnitId) {
        let number = self.numbers.borrow().get(&unit).copied();
        if let Some(number) = number {
            // No process of Sluice may use it.
            self.parts.units.close(number).await;
            _ = self.parts.event_sender.send(UnitEvent::UnitGone { unit: number });
        }
        loop {
            let step = self.fleet.borrow().closing_step(unit, self.now());
            let step = match step {
                Ok(Step::DestroyCompute | Step::DestroyInstance) => {
                    let answer = self.destroy(unit).await;
                    let now = self.now();
                    self.fleet.borrow_mut().closing_answer(unit, now, answer)
                }
                other => other,
            };
            match step {
                Ok(Step::WaitUntil(then)) => sleep(then.saturating_sub(self.now())).await,
                Ok(Step::DestroyCompute | Step::DestroyInstance) => {}
                Ok(Step::Gone) => {
                    self.take_number(unit);
                    break;
                }
                Ok(Step::Quarantined) => {
                    let detail =
                        format!("unit {number:?}: its instance cannot be destroyed; the daemon tries again");
                    tracing::error!(
                        unit = number,
                        "the instance of a closed unit cannot be destroyed; trying again"
                    );
                    self.parts.journal.note("instance-stuck", None, detail);
                    break;
                }
                Err(error) => {
                    tracing::error!(unit = number, %error, "cannot close the unit");
                    break;
                }
            }
        }
        if let Err(error) = self.write().await {
            tracing::error!(%error, "cannot write the plan");
        }
    }

    pub(super) async fn destroy(&self, unit: UnitId) -> DestructionAnswer {
        let gpu = self.fleet.borrow().unit(unit).map(|unit| unit.gpu);
        let _turn = self.turn(gpu.unwrap_or(usize::MAX)).await;
        let what = {
            let fleet = self.fleet.borrow();
            fleet.unit(unit).and_then(|unit| match unit.partition {
                Partition::Instance { profile, placement } => {
                    let identity = unit.identity.clone()?;
                    let device = self.device(unit.gpu)?.ordinal;
                    Some((
                        device,
                        Instance {
                            gpu: identity.instance,
                            compute: identity.compute_instance,
                            profile,
                            start: placement.start.into(),
                            size: placement.size.into(),
                            uuid: identity.uuid,
                        },
                    ))
                }
                Partition::Whole => None,
            })
        };
        let (Some((device, instance)), Some(inventory)) = (what, &self.parts.inventory) else {
            return DestructionAnswer::Failed;
        };
        // It destroys the compute instance, too, and only if everything matches.
        match inventory.destroy(device, &instance).await {
            Ok(()) | Err(AskError::NOT_FOUND) => DestructionAnswer::Gone,
            Err(AskError::IN_USE | AskError::Silent) => DestructionAnswer::InUse,
            Err(error) => {
                tracing::error!(gpu = device, %error, "cannot destroy an instance");
                DestructionAnswer::Failed
            }
        }
    }

    /// Retries the destruction of instances that failed.
    pub(crate) fn audit(self: &Rc<Self>) {
        let now = self.now();
        for unit in self.fleet.borrow_mut().audit_closing(now) {
            spawn_local(Rc::clone(self).close(unit));
        }
    }

    /// Switches the MIG mode of an empty GPU. A GPU that needs a reset for it is no error: [`Self::will_divide`] shows it, and
    /// [`Self::finish_switches`] continues.
    pub(crate) async fn switch(&self, gpu: usize, on: bool) -> Result<(), Error> {
        let (Some(found), Some(inventory)) = (self.device(gpu), &self.parts.inventory) else {
            return Err(internal(&PlanError::UnknownGpu));
        };
        let ordinal = found.ordinal;
        let _turn = self.turn(gpu).await;
        // An operator may have readmitted it since the last check.
        if !self.is_draining(ordinal) {
            return Err(undrained(ordinal));
        }
        if self.fleet.borrow().units().any(|unit| unit.gpu == gpu) {
            return Err(internal(&PlanError::InUse));
        }
        // An arbiter holds all of its memory, and would prevent the switch.
        self.switching.borrow_mut().insert(gpu);
        self.parts.units.close(ordinal).await;
        _ = self.parts.event_sender.send(UnitEvent::UnitGone { unit: ordinal });
        let switched = inventory.set_mig(ordinal, on).await;
        let now = inventory.health(ordinal).await;
        let wanted = if on { Switch::On } else { Switch::Off };
        match (switched, now) {
            (_, Ok(health)) if health.mig.0 == wanted => self.divide(gpu).await,
            (Ok(()) | Err(AskError::RESET_REQUIRED), Ok(health)) if health.mig.1 == wanted => Ok(()),
            (switched, now) => {
                if now.is_ok_and(|now| now.mig.1 != now.mig.0) {
                    // The switch must not happen unexpectedly at a later reset.
                    if let Err(error) = inventory.set_mig(ordinal, !on).await {
                        tracing::error!(gpu = ordinal, %error, "cannot cancel the switch of the GPU, which may happen at its next reset");
                    }
                }
                // Restores the former state.
                let as_it_was = self.divide(gpu).await;
                let (code, message) = match &switched {
                    Err(AskError::IN_USE) => (
                        Code::InUse,
                        format!("processes outside Sluice use GPU {ordinal}; end them, and try again"),
                    ),
                    Err(AskError::NOT_SUPPORTED) => {
                        (Code::Contradiction, format!("GPU {ordinal} cannot be divided"))
                    }
                    _ => (
                        Code::DeviceFailed,
                        format!("the driver cannot switch the MIG mode of GPU {ordinal}"),
                    ),
                };
                let why = switched.err().or(now.err());
                let error = caused(Error::new(code, message), why);
                as_it_was
                    .map_err(|worse| {
                        tracing::error!(
                            gpu = ordinal,
                            error = worse.message,
                            "cannot take the GPU back into service"
                        )
                    })
                    .ok();
                Err(error)
            }
        }
    }

    /// Reads the present division of an empty GPU from the driver, and applies it to the plan.
    pub(super) async fn divide(&self, gpu: usize) -> Result<(), Error> {
        let (Some(found), Some(inventory)) = (self.device(gpu), &self.parts.inventory) else {
            return Err(internal(&PlanError::UnknownGpu));
        };
        let ordinal = found.ordinal;
        let looked = look(inventory, ordinal, self.parts.configuration.reserve).await;
        let (divided, listed) = match (looked, inventory.instances(ordinal).await) {
            (Ok(Some(divided)), Ok(listed)) => (Rc::new(divided), listed),
            (looked, listed) => {
                _ = self.fleet.borrow_mut().set_gpu_admin_state(gpu, AdminState::Quarantined);
                let error =
                    Error::new(Code::DeviceFailed, format!("the division of GPU {ordinal} is unknown"));
                return Err(caused(error, looked.err().or(listed.err())));
            }
        };
        {
            let mut fleet = self.fleet.borrow_mut();
            fleet.set_division(gpu, divided.division.clone()).map_err(|error| internal(&error))?;
            let foreign = listed.iter().map(|instance| {
                let ListedInstance { instance, profile, placement, compute_slices, .. } =
                    list(&divided, instance);
                Foreign { instance, profile: Some(profile), placement, compute_slices }
            });
            fleet.set_foreign(gpu, foreign.collect()).map_err(|error| internal(&error))?;
        }
        let whole = divided.is_whole();
        self.found.borrow_mut()[gpu] = divided.clone();
        self.switching.borrow_mut().remove(&gpu);
        if whole && self.parts.units.get(ordinal).is_none() {
            self.parts.units.open(self.whole_unit(&divided));
        }
        self.look_around();
        Ok(())
    }

    /// True if a GPU has no units except instances that are being destroyed, and will be soon.
    pub(crate) fn is_closing(&self, gpu: usize) -> bool {
        let fleet = self.fleet.borrow();
        let mut here = fleet.units().filter(|unit| unit.gpu == gpu).peekable();
        let soon = |unit: &sluice_placement::PlanUnit| matches!(&unit.phase, UnitPhase::Closing(destruction) if !destruction.is_quarantined());
        here.peek().is_some() && here.all(soon)
    }

    /// The MIG mode of a GPU after its next reset, if that differs from now.
    pub(crate) fn will_divide(&self, gpu: usize) -> Option<bool> {
        let is_whole = self.device(gpu)?.is_whole();
        self.switching.borrow().contains(&gpu).then_some(is_whole)
    }

    /// Checks if GPUs that wait for a reset have had it.
    pub(crate) async fn finish_switches(&self) {
        let waiting: Vec<usize> = self.switching.borrow().iter().copied().collect();
        for gpu in waiting {
            let (Some(found), Some(inventory)) = (self.device(gpu), &self.parts.inventory) else { continue };
            // If another task holds the GPU, the next check follows.
            let Some(Ok(_turn)) = self.turns.get(gpu).map(|turn| turn.try_lock()) else { continue };
            let health = inventory.health(found.ordinal).await;
            let over = health.is_ok_and(|health| {
                health.mig.0 == health.mig.1 || (health.mig.0 == Switch::On) == found.is_whole()
            });
            if !over || !self.switching.borrow().contains(&gpu) {
                continue;
            }
            match self.divide(gpu).await {
                Ok(()) => {
                    let divided = self.device(gpu).is_some_and(|found| !found.is_whole());
                    let detail =
                        format!("GPU {} is {}in MIG mode", found.ordinal, if divided { "" } else { "not " });
                    self.parts.journal.note("gpu-mig-switched", None, detail);
                }
                Err(error) => {
                    tracing::error!(gpu = found.ordinal, error = error.message, cause = ?error.cause, "cannot complete the switch of the GPU")
                }
            }
        }
    }
}
