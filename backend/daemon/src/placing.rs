//! Carries placement out: gives VMs the units that the plan has for them, and moves them where that is wanted.
//!
//! A VM is moved while it has no session: those that begin meanwhile wait for its new unit. What it had on the old one stays
//! there, is swept, and is nobody's any more.

use std::{rc::Rc, time::Duration};

use sluice_placement::{Fleet, PlanError, Target, VmId, fleet::Relocation};
use tokio::time::{MissedTickBehavior, interval};

use crate::{
    api::{
        error::{Code, Error},
        peer::Caller,
    },
    placer::{Held, vm_id},
    registry::Registry,
    unit::Unit,
    vm::Vm,
};

/// How often it is looked whether what is to be emptied has become idle.
const LOOK: Duration = Duration::from_secs(1);
/// Looks between two tries to unmake what could not be.
const AUDIT: u32 = 60;

/// Keeps units as they are planned, for ever.
pub(crate) async fn serve(registry: Rc<Registry>) {
    let mut turn = interval(LOOK);
    turn.set_missed_tick_behavior(MissedTickBehavior::Delay);
    for look in 1_u32.. {
        turn.tick().await;
        registry.empty_drained().await;
        if look.is_multiple_of(AUDIT) {
            registry.placer.audit();
        }
    }
}

impl Registry {
    /// Has the place that is held for a VM be there.
    pub(crate) async fn open(&self, held: Option<Held>) -> Result<Rc<[Rc<Unit>]>, Error> {
        // Where there is no device there are VMs without.
        let Some(held) = held else { return Ok(Rc::new([])) };
        let unit = self.placer.open(held.unit).await?;
        self.write_plan()?;
        Ok(Rc::new([unit]))
    }

    fn write_plan(&self) -> Result<(), Error> {
        if self.checkpoint.objects().plan == self.placer.plan() {
            return Ok(());
        }
        self.placer.write().map_err(Error::storage)
    }

    /// Finds a unit for a VM that has none: its own is gone, or it was made before there were any.
    pub(crate) async fn settle(&self, id: &str) -> Result<(), Error> {
        let _turn = self.placer.turn().lock().await;
        if self.placer.unit_of(id).is_some() {
            return Ok(());
        }
        let Some(known) = self.find(id).filter(|known| !known.configured) else { return Ok(()) };
        let Some(vm) = self.roster.get(known.object.number) else { return Ok(()) };
        self.placer.leave(id);
        let held = self.placer.hold(id, &known.object)?;
        let opened = match self.write_plan() {
            Ok(()) => self.open(held).await,
            Err(error) => Err(error),
        };
        match opened {
            Ok(units) => {
                vm.put_on(Some(units));
                Ok(())
            }
            Err(error) => {
                self.placer.release(id, held);
                Err(error)
            }
        }
    }

    /// Has a GPU emptied, or has it take VMs again. VMs leave it when they have no session.
    pub(crate) async fn drain_gpu(&self, caller: &Caller, gpu: u32, draining: bool) -> Result<(), Error> {
        caller.may_operate()?;
        let known = self.placer.found().iter().any(|found| found.ordinal == gpu);
        if !known {
            return Err(Error::not_found("GPU", &gpu.to_string()));
        }
        if self.placer.is_draining(gpu) != draining {
            let (object, action) =
                (format!("gpus/{gpu}"), if draining { "gpu.drain" } else { "gpu.readmit" });
            self.trail.note(caller, action, &object, None::<()>, None).map_err(Error::storage)?;
            self.placer.set_draining(gpu, draining).map_err(|error| {
                self.trail.note_failure(caller, action, &object, &error.to_string());
                Error::storage(error)
            })?;
            let kind = if draining { "gpu-draining" } else { "gpu-readmitted" };
            self.journal.note(kind, None, format!("GPU {gpu}"));
        }
        self.empty_drained().await;
        Ok(())
    }

    /// Moves what can be moved from GPUs that are being emptied, and closes units that nobody is on.
    async fn empty_drained(&self) {
        let _turn = self.placer.turn().lock().await;
        for gpu in self.placer.drained() {
            self.look_who_is_idle();
            let plan = self.placer.fleet().drain(Target::Gpu(gpu));
            for one in plan.moves {
                let moved = self.relocate(one.vm, |fleet| fleet.follow(&one)).await;
                if let Err(error) = moved {
                    tracing::warn!(
                        "a VM of a GPU that is being emptied stays: {} {:?}",
                        error.message,
                        error.cause
                    );
                }
            }
        }
        self.placer.tidy();
    }

    fn look_who_is_idle(&self) {
        let members: Vec<VmId> = {
            let fleet = self.placer.fleet();
            fleet.units().flat_map(|unit| unit.members()).map(|member| member.request.vm).collect()
        };
        for vm in members {
            let idle = self.room(vm).is_some_and(|(_, room)| room.is_idle());
            // It is a member: it was found there.
            _ = self.placer.fleet_mut().set_idle(vm, idle);
        }
    }

    /// A VM of the plan.
    fn room(&self, vm: VmId) -> Option<(String, Rc<Vm>)> {
        let name = self.placer.name(vm)?;
        let known = self.find(&name)?;
        Some((name, self.roster.get(known.object.number)?))
    }

    /// Moves a VM to the best other place there is for it.
    pub(crate) async fn move_vm(&self, caller: &Caller, id: &str) -> Result<(), Error> {
        caller.may_operate()?;
        let (known, _) = self.see(caller, id)?;
        if known.configured {
            let message = format!("VM {id} is of the configuration file, and on every whole device");
            return Err(Error::new(Code::Configured, message));
        }
        let _turn = self.placer.turn().lock().await;
        let request = self.placer.request(id, &known.object);
        let decided = self.placer.fleet().decide_move(&request);
        let decision = decided.map_err(|refusal| {
            let message = format!("there is no other place for VM {id}");
            Error::new(Code::PlacementUnavailable, message).because(refusal)
        })?;
        self.trail.note(caller, "vm.move", &format!("vms/{id}"), None::<()>, None).map_err(Error::storage)?;
        let moved = self.relocate(vm_id(id), |fleet| fleet.relocate(vm_id(id), decision)).await;
        self.placer.tidy();
        moved.inspect_err(|error| {
            self.trail.note_failure(caller, "vm.move", &format!("vms/{id}"), &error.message);
        })
    }

    /// Moves a VM that has no session.
    async fn relocate(
        &self,
        vm: VmId,
        how: impl FnOnce(&mut Fleet) -> Result<Relocation, PlanError>,
    ) -> Result<(), Error> {
        let Some((name, room)) = self.room(vm) else { return Ok(()) };
        if !room.hold() {
            let message = format!("VM {name} has sessions; it can be moved when it has none");
            return Err(Error::new(Code::InUse, message));
        }
        let moved = self.relocate_held(vm, &name, &room, how).await;
        room.let_go();
        moved
    }

    async fn relocate_held(
        &self,
        vm: VmId,
        name: &str,
        room: &Vm,
        how: impl FnOnce(&mut Fleet) -> Result<Relocation, PlanError>,
    ) -> Result<(), Error> {
        let relocation = {
            let mut fleet = self.placer.fleet_mut();
            fleet.set_idle(vm, true).and_then(|()| how(&mut fleet))
        };
        let relocation = relocation.map_err(|error| {
            Error::new(Code::PlacementUnavailable, format!("VM {name} cannot be moved now")).because(error)
        })?;
        self.placer.give_number(relocation.to);
        let opened = match self.write_plan() {
            Ok(()) => self.open(Some(Held::of(vm, relocation.to))).await,
            Err(error) => Err(error),
        };
        match opened {
            Ok(units) => {
                let number = units.first().map_or(0, |unit| unit.number());
                room.put_on(Some(units));
                room.tell("vm-moved", format!("it is on unit {number}"));
                Ok(())
            }
            Err(error) => {
                if !self.placer.take_back(vm, relocation.from) {
                    room.put_on(None);
                }
                self.placer.tidy();
                Err(error)
            }
        }
    }
}
