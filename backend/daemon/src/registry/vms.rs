//! VMs: created, changed and deleted.

use std::time::Duration;

use sluice_api::{
    Code, Error,
    v1::{FenceStep, FencedBy},
};
use tokio::{sync::OwnedMutexGuard, task::JoinSet, time::timeout};

use super::{
    Known, Put, Registry,
    admission::large_enough,
    fence_requests::{FENCED, authority},
};
use crate::{
    caller::Caller,
    fault,
    fence::Fence,
    records::state::{
        checkpoint::Removal,
        objects::{Objects, VmObject, short_name},
    },
    vms::vm::VmPhase,
};

/// Time limit for the device of a new VM to listen.
const START: Duration = Duration::from_secs(15);

impl Registry {
    /// Creates a VM or changes it as requested. Returns its name on this host once its device listens.
    pub(crate) async fn put_vm(
        &self,
        caller: &Caller,
        name: &str,
        mut wanted: VmObject,
    ) -> Result<(Put, String), Error> {
        let short = self.own(caller, name, &mut wanted)?;
        let host_name = wanted.host_name(short);
        let lock = self.lock(&host_name);
        let _guard = lock.lock().await;
        let put = match self.find(&host_name) {
            Some(known) if known.may_be_managed(caller).is_err() => {
                let message = format!("another project of the organisation has a VM {short}");
                return Err(Error::new(Code::InUse, message));
            }
            Some(known) => self.change_vm(caller, known, wanted).await.map(|()| Put::Kept),
            None => self.make_vm(caller, &host_name, wanted).await.map(|()| Put::Made),
        };
        Ok((put?, host_name))
    }

    async fn make_vm(&self, caller: &Caller, host_name: &str, wanted: VmObject) -> Result<(), Error> {
        let id = short_name(host_name);
        let decide = || {
            let mut wanted = self.permitted(caller, None, wanted.clone())?;
            self.admit_tenant(caller, &wanted)?;
            wanted.owner = Some(caller.uid);
            // The VM gets its number and its place now, so that other changes do not wait for its unit.
            wanted.number = self.number_for(id)?;
            wanted.created = crate::records::journal::now() / 1000;
            self.admit(host_name, &wanted)?;
            let held = self.placer.hold(host_name, &wanted)?;
            Ok((wanted, held))
        };
        let (turn, (wanted, held)) = self.decide(caller, decide).await?;
        let entry = self.audit_log.entry(caller, "vm.create", format!("vms/{host_name}"));
        let number = wanted.number;
        let make = |objects: &mut Objects| {
            fault::point("create-noted");
            objects.last_vm = number;
            objects.vms.insert(host_name.to_owned(), wanted.clone());
            objects.plan = self.placer.plan();
        };
        let made = self.record(&entry, None, Some(&wanted), make).await;
        made.inspect_err(|_| self.placer.release(host_name))?;
        drop(turn);
        fault::point("create-written");
        let known = Known::new(host_name.to_owned(), wanted);
        let units = match self.open(held).await {
            Ok(units) => units,
            Err(error) => {
                entry.note_failure(&error.message).await;
                self.take_vm(caller, host_name, number, FencedBy::Operator).await?;
                return Err(error);
            }
        };
        if let Err(error) = large_enough(&known.object, units.as_ref()) {
            entry.note_failure(&error.message).await;
            self.take_vm(caller, host_name, number, FencedBy::Operator).await?;
            return Err(error);
        }
        fault::point("create-placed");
        let vm = self.vm_set.add(self.spec(&known.object), known.subject(), Some(units));
        let phase = timeout(START, vm.started()).await.unwrap_or(VmPhase::Starting);
        fault::point("create-started");
        let why = match phase {
            VmPhase::Running => {
                vm.tell("vm-created", "");
                return Ok(());
            }
            VmPhase::Failed(why) => why,
            VmPhase::Starting => format!("the device did not listen within {START:?}"),
        };
        entry.note_failure(&why).await;
        self.take_vm(caller, host_name, number, FencedBy::Operator).await?;
        let message = format!("the device of VM {id} did not start");
        Err(Error { cause: vec![why], ..Error::new(Code::DeviceFailed, message) })
    }

    async fn change_vm(&self, caller: &Caller, known: Known, wanted: VmObject) -> Result<(), Error> {
        let Known { id, host_name, object: before, .. } = &known;
        // Before the lock on changes: settling may wait for a unit.
        self.settle(host_name).await?;
        let decide = || {
            let mut wanted = self.permitted(caller, Some(before), wanted.clone())?;
            (wanted.number, wanted.created, wanted.owner) = (before.number, before.created, before.owner);
            for (field, same) in [
                ("organisation", wanted.organisation == before.organisation),
                ("project", wanted.project == before.project),
                ("scanouts", wanted.scanouts == before.scanouts),
                ("direct", wanted.direct == before.direct),
                ("arena", wanted.fixed_arena == before.fixed_arena),
                ("placement", wanted.placement == before.placement),
            ] {
                if !same {
                    let message =
                        format!("{field} of VM {id} cannot be changed; delete the VM and create it again");
                    return Err(Error::new(Code::ImmutableField, message));
                }
            }
            self.vm_set.revive(before.number);
            let vm = self.vm_set.get(before.number).ok_or_else(|| Error::not_found("VM", id))?;
            if wanted != *before {
                self.admit(host_name, &wanted)?;
                large_enough(&wanted, &vm.units())?;
                self.placer.change(host_name, &wanted)?;
            }
            Ok((wanted, vm))
        };
        let (turn, (wanted, vm)) = self.decide(caller, decide).await?;
        if wanted != *before {
            // The placer cannot refuse this: the VM had these settings before.
            let undo = || self.placer.change_back(host_name, before);
            let entry = self.audit_log.entry(caller, "vm.update", format!("vms/{host_name}"));
            let make = |objects: &mut Objects| {
                fault::point("update-noted");
                objects.vms.insert(host_name.clone(), wanted.clone());
                objects.plan = self.placer.plan();
            };
            let made = self.record(&entry, Some(before), Some(&wanted), make).await;
            made.inspect_err(|_| undo())?;
            fault::point("update-written");
            vm.change(self.spec(&wanted));
            fault::point("update-told");
            vm.tell("vm-updated", "");
        }
        drop(turn);
        // A device that had failed is started again.
        match timeout(START, vm.started()).await.unwrap_or(VmPhase::Starting) {
            VmPhase::Running => Ok(()),
            VmPhase::Failed(why) => Err(Error {
                cause: vec![why],
                ..Error::new(Code::DeviceFailed, format!("the device of VM {id} did not start"))
            }),
            VmPhase::Starting => {
                Err(Error::new(Code::Unavailable, format!("the device of VM {id} is still starting")))
            }
        }
    }

    /// Decides on a change with the lock on changes, and returns the lock with the result. The placer knows the last reports of
    /// units. Before it refuses for lack of room, units report again, and the first probe of each unit completes. Other changes do
    /// not wait meanwhile, so all is decided anew.
    async fn decide<T>(
        &self,
        caller: &Caller,
        decide: impl Fn() -> Result<T, Error>,
    ) -> Result<(OwnedMutexGuard<()>, T), Error> {
        let turn = self.changing.lock_for(caller).await;
        match decide() {
            Err(error) if error.code == Code::PlacementUnavailable => {}
            decided => return Ok((turn, decided?)),
        }
        drop(turn);
        let mut asked: JoinSet<_> = JoinSet::new();
        for unit in self.units.iter() {
            // If a unit does not answer in time, its last report counts.
            asked.spawn_local(async move { _ = unit.describe().await });
        }
        while asked.join_next().await.is_some() {}
        // A unit that has just started does not know yet whether VMs, or organisations, may share it.
        for unit in self.units.iter() {
            unit.probed().await;
        }
        let turn = self.changing.lock_for(caller).await;
        self.placer.look_around();
        Ok((turn, decide()?))
    }

    /// Deletes a VM with all its sessions. Succeeds if the VM does not exist.
    pub(crate) async fn delete_vm(&self, caller: &Caller, name: &str) -> Result<(), Error> {
        caller.may_do_something()?;
        let Some(Known { host_name, .. }) = self.meant(caller, name)? else { return Ok(()) };
        let lock = self.lock(&host_name);
        let _guard = lock.lock().await;
        let Some(known) = self.find(&host_name) else { return Ok(()) };
        known.may_be_managed(caller)?;
        let id = &known.id;
        let number = known.object.number;
        let by = authority(caller);
        // A tenant must not delete a VM that an operator or a policy fenced, or an operator drained: it could create it again.
        let held = |fence: &Fence| fence.step != FenceStep::Active && fence.by > by;
        if let Some(vm) = self.vm_set.get(number) {
            if held(&vm.stands()) || self.checkpoint.objects().drained_by(number) > by {
                return Err(held_error(id));
            }
            let fence = vm.settled(FENCED).await;
            if held(&fence) {
                return Err(held_error(id));
            }
            if fence.step != FenceStep::Active && !fence.clean {
                return Err(unclean(id));
            }
        }
        let entry = self.audit_log.entry(caller, "vm.delete", format!("vms/{host_name}"));
        entry.note(Some(&known.object), None).await?;
        fault::point("delete-noted");
        if let Err(error) = self.take_vm(caller, &host_name, number, by).await {
            entry.note_failure(&error.message).await;
            return Err(error);
        }
        fault::point("delete-ended");
        self.journal.note("vm-deleted", Some(known.subject()), "");
        Ok(())
    }

    async fn take_vm(
        &self,
        caller: &Caller,
        host_name: &str,
        number: u32,
        by: FencedBy,
    ) -> Result<(), Error> {
        let id = short_name(host_name);
        let turn = self.changing.lock_for(caller).await;
        match self.checkpoint.remove_vm(host_name, number, by).await.map_err(Error::storage)? {
            Removal::Removed => {}
            Removal::Unclean => return Err(unclean(id)),
            Removal::Held => return Err(held_error(id)),
        }
        drop(turn);
        fault::point("delete-written");
        self.end_removed(host_name, number).await;
        Ok(())
    }
}

fn held_error(id: &str) -> Error {
    Error::forbidden(format!(
        "VM {id} was fenced or drained by an operator or a policy: an operator must readmit it"
    ))
}

fn unclean(id: &str) -> Error {
    let message = format!("VM {id} is fenced and not clean yet; it keeps its memory");
    Error::new(Code::Unclean, message)
}
