//! Carries out placement: gives VMs the units that the plan has for them, and moves VMs on request.
//!
//! A VM is moved while it has no session: sessions that begin during the move wait for its new unit. Its memory on the old unit
//! stays there, is scrubbed, and then belongs to no VM.

use std::{
    rc::Rc,
    time::{Duration, Instant},
};

use serde_json::json;
use sluice_api::{Code, Error};
use sluice_messages::inventory::Switch;
use sluice_placement::{Fleet, Pin, PlanError, Policy, Refusal, UnitId, VmId, fleet::Relocation};
use tokio::time::{MissedTickBehavior, interval, sleep, timeout};

use super::{Known, Registry};
use crate::{
    caller::Caller,
    placement::placer::{undrained, vm_id},
    units::inventory::AskError,
    units::unit::Unit,
    vms::vm::Vm,
};

/// Period of checks for idle VMs on drained units.
const LOOK: Duration = Duration::from_secs(1);
/// Time for which a switch of a GPU waits for its last instances to be destroyed, and the period of checks.
const UNMADE: Duration = Duration::from_secs(12);
const BRIEFLY: Duration = Duration::from_millis(20);
/// Time for which a drain waits for another drain.
const BUSY: Duration = Duration::from_secs(5);
/// Checks between two tries to destroy an instance.
const AUDIT: u32 = 60;

/// Carries out drains and retries, for ever.
pub(crate) async fn serve(registry: Rc<Registry>) {
    let mut turn = interval(LOOK);
    turn.set_missed_tick_behavior(MissedTickBehavior::Delay);
    for look in 1_u32.. {
        turn.tick().await;
        registry.empty_drained().await;
        registry.placer.finish_switches().await;
        registry.balance().await;
        if look.is_multiple_of(AUDIT) {
            registry.placer.audit();
        }
    }
}

fn no_other_place(id: &str, refusal: Refusal) -> Error {
    let message = format!("there is no other place for VM {id}");
    Error::new(Code::PlacementUnavailable, message).because(refusal)
}

impl Registry {
    /// Opens the places that are held for a VM.
    pub(crate) async fn open(&self, held: Vec<UnitId>) -> Result<Rc<[Rc<Unit>]>, Error> {
        let mut units = Vec::new();
        for unit in held {
            units.push(self.placer.open(unit).await?);
        }
        self.write_plan().await?;
        Ok(units.into())
    }

    async fn write_plan(&self) -> Result<(), Error> {
        if self.checkpoint.objects().plan == self.placer.plan() {
            return Ok(());
        }
        self.placer.write().await.map_err(Error::storage)
    }

    /// Finds units for a VM that lacks one, because a unit is gone or because the VM was created before there were any. The
    /// caller holds the VM's lock, so that no other request changes the VM.
    pub(crate) async fn settle(&self, id: &str) -> Result<(), Error> {
        let Some(known) = self.find(id) else { return Ok(()) };
        if self.placer.units_of(id, &known.object).is_some() {
            return Ok(());
        }
        let Some(vm) = self.vm_set.get(known.object.number) else { return Ok(()) };
        let held = match self.placer.hold(id, &known.object) {
            Ok(held) => held,
            Err(_) => {
                // A unit that has just started does not know yet whether VMs may share it.
                for unit in self.units.iter() {
                    unit.host_access_known().await;
                }
                self.placer.hold(id, &known.object)?
            }
        };
        let opened = match self.write_plan().await {
            Ok(()) => self.open(held).await,
            Err(error) => Err(error),
        };
        match opened {
            Ok(units) => {
                vm.put_on(Some(units));
                Ok(())
            }
            Err(error) => {
                self.placer.release(id);
                Err(error)
            }
        }
    }

    /// Drains or readmits a GPU. VMs leave a drained GPU when they have no session.
    pub(crate) async fn drain_gpu(&self, caller: &Caller, gpu: u32, draining: bool) -> Result<(), Error> {
        caller.may_operate()?;
        let at = self.placer.index_of(gpu).ok_or_else(|| Error::not_found("GPU", &gpu.to_string()))?;
        let turn = self.changing.lock().await;
        let may_be_set = || {
            let message = format!("GPU {gpu} waits for a reset; reset it, or switch it back first");
            let waits = !draining && self.placer.will_divide(at).is_some();
            if waits { Err(Error::new(Code::InUse, message)) } else { Ok(()) }
        };
        may_be_set()?;
        if self.placer.is_draining(gpu) != draining {
            let (action, kind) = match draining {
                true => ("gpu.drain", "gpu-draining"),
                false => ("gpu.readmit", "gpu-readmitted"),
            };
            let entry = self.audit_log.entry(caller, action, format!("gpus/{gpu}"));
            entry.note(None::<()>, None).await?;
            // A switch may have begun during the write.
            if let Err(error) = may_be_set() {
                entry.note_failure(&error.message).await;
                return Err(error);
            }
            entry.made(self.placer.set_draining(gpu, draining).await).await?;
            self.journal.note(kind, None, format!("GPU {gpu}"));
        }
        drop(turn);
        self.empty_drained().await;
        Ok(())
    }

    /// Drains or readmits an instance; an empty drained instance is destroyed. For a unit that is a whole GPU, drains the GPU.
    pub(crate) async fn drain_unit(&self, caller: &Caller, unit: u32, draining: bool) -> Result<(), Error> {
        caller.may_operate()?;
        let room = self.units.get(unit).ok_or_else(|| Error::not_found("unit", &unit.to_string()))?;
        if room.place().is_whole() {
            return self.drain_gpu(caller, room.place().device, draining).await;
        }
        let turn = self.changing.lock().await;
        if self.placer.is_alone_draining(unit) != draining {
            let (action, kind) = match draining {
                true => ("unit.drain", "unit-draining"),
                false => ("unit.readmit", "unit-readmitted"),
            };
            let entry = self.audit_log.entry(caller, action, format!("units/{unit}"));
            entry.note(None::<()>, None).await?;
            entry.made(self.placer.set_unit_draining(unit, draining).await).await?;
            self.journal.note(kind, None, format!("unit {unit}"));
        }
        drop(turn);
        self.empty_drained().await;
        Ok(())
    }

    /// Switches the MIG mode of a GPU. The GPU must be empty, and drained, so that it stays empty.
    pub(crate) async fn switch_mig(&self, caller: &Caller, gpu: u32, on: bool) -> Result<(), Error> {
        caller.may_operate()?;
        let at = self.placer.index_of(gpu).ok_or_else(|| Error::not_found("GPU", &gpu.to_string()))?;
        let divided = || self.placer.device(at).is_some_and(|found| !found.is_whole());
        if self.placer.will_divide(at).unwrap_or_else(divided) == on {
            return Ok(());
        }
        if self.checkpoint.quarantine(gpu).is_some() {
            let message = format!("GPU {gpu} is quarantined; sluice readmit --unit {gpu} ends that");
            return Err(Error::new(Code::InUse, message));
        }
        let health = match &self.inventory {
            Some(inventory) => inventory.health(gpu).await,
            None => Err(AskError::NOT_SUPPORTED),
        };
        match health {
            Ok(health) if health.mig.0 != Switch::Absent => {}
            Err(AskError::Silent) => {
                let message = "the driver's management library does not answer";
                return Err(Error::new(Code::Unavailable, message));
            }
            _ => return Err(Error::contradiction(format!("GPU {gpu} cannot be divided"))),
        }
        if !self.placer.is_draining(gpu) {
            return Err(undrained(gpu));
        }
        // Instances that are being destroyed are in the way for a moment.
        let start = Instant::now();
        while self.placer.is_closing(at) && start.elapsed() < UNMADE {
            sleep(BRIEFLY).await;
        }
        let (users, closing, foreign) = {
            let fleet = self.placer.fleet();
            let here = || fleet.units().filter(|unit| unit.gpu == at);
            let members = here().flat_map(|unit| unit.members());
            let users: Vec<_> = members.filter_map(|member| self.placer.name(member.request.vm)).collect();
            (users, here().count(), fleet.gpus().get(at).map_or(0, |gpu| gpu.foreign().len()))
        };
        let in_use = match (&users[..], closing, foreign) {
            ([], 0, 0) => None,
            ([], 0, _) => Some(format!("it has {foreign} instances of other programs; destroy them first")),
            ([], _, _) => Some("instances of it cannot be destroyed, because processes use them".to_owned()),
            (users, ..) => Some(format!("VMs are on it: {}", users.join(", "))),
        };
        if let Some(why) = in_use {
            return Err(Error::new(Code::InUse, format!("GPU {gpu} is in use: {why}")));
        }
        let entry = self.audit_log.entry(caller, "gpu.mig", format!("gpus/{gpu}"));
        entry.note(Some(!on), Some(on)).await?;
        if let Err(error) = self.placer.switch(at, on).await {
            entry.note_failure(&error.message).await;
            return Err(error);
        }
        let detail = match (on, self.placer.will_divide(at).is_some()) {
            (true, false) => format!("GPU {gpu} is in MIG mode"),
            (false, false) => format!("GPU {gpu} is not in MIG mode"),
            (true, true) => format!("GPU {gpu} is in MIG mode from its next reset on"),
            (false, true) => format!("GPU {gpu} is not in MIG mode from its next reset on"),
        };
        self.journal.note("gpu-mig-switched", None, detail);
        Ok(())
    }

    /// Moves idle VMs off drained units, and closes empty units.
    async fn empty_drained(&self) {
        // Another drain takes too long: the next check follows.
        let Ok(_one) = timeout(BUSY, self.emptying.lock()).await else { return };
        for target in self.placer.drained() {
            self.look_who_is_idle();
            let plan = self.placer.fleet().drain(target);
            for one in plan.moves {
                let Some(name) = self.placer.name(one.vm) else { continue };
                let lock = self.lock(&name);
                // Another request changes the VM: the next check follows.
                let Ok(_guard) = lock.try_lock() else { continue };
                // The moves before may have taken their time.
                self.placer.look_around();
                if let Err(error) = self.relocate(one.vm, |fleet| fleet.follow(&one)).await {
                    tracing::warn!(name, error = error.message, cause = ?error.cause, "cannot move the VM off a drained unit");
                }
            }
        }
        self.placer.tidy();
    }

    pub(crate) fn look_who_is_idle(&self) {
        let members: Vec<VmId> = {
            let fleet = self.placer.fleet();
            fleet.units().flat_map(|unit| unit.members()).map(|member| member.request.vm).collect()
        };
        for vm in members {
            // The VM is a member of the plan.
            _ = self.placer.fleet_mut().set_idle(vm, self.is_idle(vm));
        }
    }

    /// A VM of the plan, with its name.
    pub(crate) fn room(&self, vm: VmId) -> Option<(String, Rc<Vm>)> {
        let name = self.placer.name(vm)?;
        let known = self.find(&name)?;
        Some((name, self.vm_set.get(known.object.number)?))
    }

    /// True if a VM of the plan has no session, and can be moved.
    pub(crate) fn is_idle(&self, vm: VmId) -> bool {
        self.room(vm).is_some_and(|(_, room)| room.is_idle())
    }

    /// Moves a VM to the best other place, or the best of a kind or on a GPU.
    pub(crate) async fn move_vm(
        &self,
        caller: &Caller,
        id: &str,
        kind: Option<Policy>,
        gpu: Option<u32>,
    ) -> Result<(), Error> {
        caller.may_operate()?;
        let (Known { host_name, .. }, _) = self.see(caller, id)?;
        let lock = self.lock(&host_name);
        let _guard = lock.lock().await;
        let (known, _) = self.see(caller, &host_name)?;
        let id = &host_name[..];
        if !known.object.placement.gpus.is_empty() {
            return Err(Error::contradiction(format!("VM {id} was made to be on the GPUs that it names")));
        }
        let mut request = self.placer.request(id, &known.object);
        if let Some(kind) = kind {
            if request.policy != Policy::Any && request.policy != kind {
                let message = format!("the policy of VM {id} allows no unit of that kind");
                return Err(Error::contradiction(message));
            }
            request.policy = kind;
        }
        if let Some(gpu) = gpu {
            let at = self.placer.index_of(gpu);
            let at = at.ok_or_else(|| Error::contradiction(format!("there is no GPU {gpu}")))?;
            if request.pin.is_some_and(|pin| pin.gpu != at) {
                let message = format!("VM {id} is pinned to another GPU than {gpu}");
                return Err(Error::contradiction(message));
            }
            request.pin = request.pin.or(Some(Pin { gpu: at, start: None }));
        }
        let decided = self.placer.decide_move(&request);
        let decision = decided.map_err(|refusal| no_other_place(id, refusal))?;
        let entry = self.audit_log.entry(caller, "vm.move", format!("vms/{id}"));
        let from = self.placer.unit_of(vm_id(id)).map(|unit| json!({ "unit": unit.number() }));
        entry.note(from, Some(json!({ "kind": kind, "gpu": gpu }))).await?;
        let moved = self.relocate(vm_id(id), |fleet| fleet.relocate(vm_id(id), decision)).await;
        if let Err(error) = &moved {
            entry.note_failure(&error.message).await;
        }
        moved
    }

    /// Moves a VM that has no session. The caller holds the VM's lock, so that no other request changes the VM.
    pub(crate) async fn relocate(
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
        self.placer.tidy();
        moved
    }

    async fn relocate_held(
        &self,
        vm: VmId,
        name: &str,
        room: &Vm,
        how: impl FnOnce(&mut Fleet) -> Result<Relocation, PlanError>,
    ) -> Result<(), Error> {
        let _kept = self.placer.fleet().home(vm).map(|from| self.placer.keep(from));
        let relocation = {
            let mut fleet = self.placer.fleet_mut();
            fleet.set_idle(vm, true).and_then(|()| how(&mut fleet))
        };
        let relocation = relocation.map_err(|error| {
            Error::new(Code::PlacementUnavailable, format!("VM {name} cannot be moved now")).because(error)
        })?;
        self.placer.give_number(relocation.to);
        let opened = match self.write_plan().await {
            Ok(()) => self.open(vec![relocation.to]).await,
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
                Err(error)
            }
        }
    }
}
