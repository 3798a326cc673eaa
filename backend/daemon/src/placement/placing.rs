//! Carries placement out: gives VMs the units that the plan has for them, and moves VMs on request.
//!
//! A VM is moved while it has no session: sessions that begin meanwhile wait for its new unit. Its memory on the old unit stays
//! there, is swept, and then belongs to no VM.

use std::{
    rc::Rc,
    time::{Duration, Instant},
};

use serde_json::json;
use sluice_api::{Code, Error};
use sluice_messages::inventory::Switch;
use sluice_placement::{Fleet, Pin, PlanError, Policy, Refusal, VmId, fleet::Relocation};
use tokio::time::{MissedTickBehavior, interval, sleep, timeout};

use crate::{
    caller::Caller,
    placement::placer::{Held, undrained, vm_id},
    registry::{Known, Registry},
    units::inventory::AskError,
    units::unit::Unit,
    vms::vm::Vm,
};

/// How often it is looked whether what is to be emptied has become idle.
const LOOK: Duration = Duration::from_secs(1);
/// How long who switches a GPU waits for its last instances to be unmade, and how often it is looked.
const UNMADE: Duration = Duration::from_secs(12);
const BRIEFLY: Duration = Duration::from_millis(20);
/// How long who has something emptied waits for others who do.
const BUSY: Duration = Duration::from_secs(5);
/// Looks between two tries to unmake what could not be.
const AUDIT: u32 = 60;

/// Keeps units as they are planned, for ever.
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
    /// Has the place that is held for a VM be there.
    pub(crate) async fn open(&self, held: Option<Held>) -> Result<Rc<[Rc<Unit>]>, Error> {
        // Where there is no device there are VMs without.
        let Some(held) = held else { return Ok(Rc::new([])) };
        let unit = self.placer.open(held.unit).await?;
        self.write_plan().await?;
        Ok(Rc::new([unit]))
    }

    async fn write_plan(&self) -> Result<(), Error> {
        if self.checkpoint.objects().plan == self.placer.plan() {
            return Ok(());
        }
        self.placer.write().await.map_err(Error::storage)
    }

    /// Finds a unit for a VM that has none: its own is gone, or it was made before there were any. Whoever asks for it keeps
    /// others from changing the VM.
    pub(crate) async fn settle(&self, id: &str) -> Result<(), Error> {
        if self.placer.unit_of(id).is_some() {
            return Ok(());
        }
        let Some(known) = self.find(id).filter(|known| !known.configured) else { return Ok(()) };
        let Some(vm) = self.roster.get(known.object.number) else { return Ok(()) };
        self.placer.leave(id);
        let held = self.placer.hold(id, &known.object)?;
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
                self.placer.release(id, held);
                Err(error)
            }
        }
    }

    /// Has a GPU emptied, or has it take VMs again. VMs leave it when they have no session.
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
            let entry = self.trail.entry(caller, action, format!("gpus/{gpu}"));
            entry.note(None::<()>, None).await?;
            // It may have begun while that was written.
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

    /// Has an instance emptied, or has it take VMs again; one that is empty is unmade. Of a unit that is all of a GPU it is the
    /// GPU that is emptied.
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
            let entry = self.trail.entry(caller, action, format!("units/{unit}"));
            entry.note(None::<()>, None).await?;
            entry.made(self.placer.set_unit_draining(unit, draining).await).await?;
            self.journal.note(kind, None, format!("unit {unit}"));
        }
        drop(turn);
        self.empty_drained().await;
        Ok(())
    }

    /// Switches the division of a GPU into instances on or off. It has to be empty, and drained, so that it stays so.
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
        if self.configuration.has_vms_on(gpu) {
            let message = format!(
                "VMs of the configuration file are on GPU {gpu} while it is not divided; see vm-gpus"
            );
            return Err(Error::new(Code::Configured, message));
        }
        let health = match &self.inventory {
            Some(inventory) => inventory.health(gpu).await,
            None => Err(AskError::NOT_SUPPORTED),
        };
        match health {
            Ok(health) if health.mig.0 != Switch::Absent => {}
            Err(AskError::Silent) => {
                let message = "the driver's management library does not answer now";
                return Err(Error::new(Code::Unavailable, message));
            }
            _ => return Err(Error::contradiction(format!("GPU {gpu} cannot be divided"))),
        }
        if !self.placer.is_draining(gpu) {
            return Err(undrained(gpu));
        }
        // Instances that are being unmade are in the way for a moment.
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
            ([], 0, _) => {
                Some(format!("it has {foreign} instances that are not of Sluice; unmake them first"))
            }
            ([], _, _) => Some("instances of it cannot be unmade, for somebody uses them".to_owned()),
            (users, ..) => Some(format!("VMs are on it: {}", users.join(", "))),
        };
        if let Some(why) = in_use {
            return Err(Error::new(Code::InUse, format!("GPU {gpu} is in use: {why}")));
        }
        let entry = self.trail.entry(caller, "gpu.mig", format!("gpus/{gpu}"));
        entry.note(Some(!on), Some(on)).await?;
        if let Err(error) = self.placer.switch(at, on).await {
            entry.note_failure(&error.message).await;
            return Err(error);
        }
        let detail = match (on, self.placer.will_divide(at).is_some()) {
            (true, false) => format!("GPU {gpu} is divided"),
            (false, false) => format!("GPU {gpu} is not divided"),
            (true, true) => format!("GPU {gpu} is divided from its next reset on"),
            (false, true) => format!("GPU {gpu} is not divided from its next reset on"),
        };
        self.journal.note("gpu-mig-switched", None, detail);
        Ok(())
    }

    /// Moves what can be moved from what is being emptied, and closes units that nobody is on.
    async fn empty_drained(&self) {
        // Somebody else is at it, and does not get on: it is looked at again.
        let Ok(_one) = timeout(BUSY, self.emptying.lock()).await else { return };
        for target in self.placer.drained() {
            self.look_who_is_idle();
            let plan = self.placer.fleet().drain(target);
            for one in plan.moves {
                let Some(name) = self.placer.name(one.vm) else { continue };
                let lock = self.lock(&name);
                // Something is being done to it: it is looked at again.
                let Ok(_guard) = lock.try_lock() else { continue };
                // The moves before may have taken their time.
                self.placer.look_around();
                let moved = match self.placer.decide_again(one.vm) {
                    None => self.relocate(one.vm, |fleet| fleet.follow(&one)).await,
                    Some(Ok(decision)) => {
                        self.relocate(one.vm, |fleet| fleet.relocate(one.vm, decision)).await
                    }
                    Some(Err(refusal)) => Err(no_other_place(&name, refusal)),
                };
                if let Err(error) = moved {
                    tracing::warn!(
                        "a VM of a unit that is being emptied stays: {} {:?}",
                        error.message,
                        error.cause
                    );
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
            // It is a member: it was found there.
            _ = self.placer.fleet_mut().set_idle(vm, self.is_idle(vm));
        }
    }

    /// A VM of the plan.
    pub(crate) fn room(&self, vm: VmId) -> Option<(String, Rc<Vm>)> {
        let name = self.placer.name(vm)?;
        let known = self.find(&name)?;
        Some((name, self.roster.get(known.object.number)?))
    }

    /// Whether a VM of the plan has no session, and can be moved.
    pub(crate) fn is_idle(&self, vm: VmId) -> bool {
        self.room(vm).is_some_and(|(_, room)| room.is_idle())
    }

    /// Moves a VM to the best other place there is for it, or the best of a kind or on a GPU.
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
        if known.configured {
            let message = format!("VM {id} is of the configuration file, and on every device of vm-gpus");
            return Err(Error::new(Code::Configured, message));
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
                let message = format!("VM {id} was made to be on another GPU than {gpu}");
                return Err(Error::contradiction(message));
            }
            request.pin = request.pin.or(Some(Pin { gpu: at, start: None }));
        }
        let decided = self.placer.decide_move(&request);
        let decision = decided.map_err(|refusal| no_other_place(id, refusal))?;
        let entry = self.trail.entry(caller, "vm.move", format!("vms/{id}"));
        let from = self.placer.unit_of(id).map(|unit| json!({ "unit": unit.number() }));
        entry.note(from, Some(json!({ "kind": kind, "gpu": gpu }))).await?;
        let moved = self.relocate(vm_id(id), |fleet| fleet.relocate(vm_id(id), decision)).await;
        if let Err(error) = &moved {
            entry.note_failure(&error.message).await;
        }
        moved
    }

    /// Moves a VM that has no session. Whoever asks for it keeps others from changing the VM.
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
                Err(error)
            }
        }
    }
}
