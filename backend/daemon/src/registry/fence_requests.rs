//! Fences and drains of VMs, and the readmission of VMs and units.

use std::time::Duration;

use sluice_api::{
    Code, Error,
    v1::{FenceStep, FencedBy},
};

use super::Registry;
use crate::{
    caller::Caller,
    fence::AdmissionError,
    records::state::{
        checkpoint::{FenceChange, ReadmitError},
        objects::Objects,
    },
};

/// Time limit for a fence to complete before its caller is answered.
pub(super) const FENCED: Duration = Duration::from_secs(20);

impl Registry {
    /// Fences a VM. Returns when it is quarantined, or after [`FENCED`], and the fence is written. The fence takes effect at
    /// once, even if it cannot be written.
    pub(crate) async fn fence(&self, caller: &Caller, name: &str, reason: &str) -> Result<(), Error> {
        let (known, vm) = self.manage(caller, name)?;
        let (id, host_name) = (&known.id, &known.host_name);
        if vm.fence(authority(caller), reason) == FenceChange::None {
            // There is no change, so the log is not written.
            vm.settled(FENCED).await;
            return self.checkpoint.written().await.map_err(Error::storage);
        }
        let entry = self.audit_log.entry(caller, "vm.fence", format!("vms/{host_name}"));
        let noted = entry.note(None, Some(reason)).await;
        vm.settled(FENCED).await;
        let written = self.checkpoint.written().await.map_err(Error::storage);
        noted.and(written).map_err(|error| Error {
            message: format!("VM {id} is fenced, but the fence cannot be written"),
            ..error
        })
    }

    /// Allows sessions of a fenced or drained VM again.
    pub(crate) async fn readmit(&self, caller: &Caller, name: &str) -> Result<(), Error> {
        // A tenant must not readmit its own VM.
        caller.may_operate()?;
        let (known, vm) = self.manage(caller, name)?;
        let (id, host_name) = (&known.id, &known.host_name);
        let lock = self.lock(host_name);
        let _guard = lock.lock().await;
        // A fence in progress does not refuse the request: the request waits for its end.
        vm.settled(FENCED).await;
        let entry = self.audit_log.entry(caller, "vm.readmit", format!("vms/{host_name}"));
        let number = known.object.number;
        let _turn = self.changing.lock().await;
        let draining = vm.draining();
        if vm.stands().step == FenceStep::Active && !draining {
            return Err(Error::new(Code::NotFenced, format!("VM {id} is neither fenced nor drained")));
        }
        entry.note(None::<()>, None).await?;
        if draining {
            let undrain = |objects: &mut Objects| {
                objects.draining.remove(&number);
                objects.tenant_drains.remove(&number);
            };
            entry.made(self.checkpoint.change_objects(undrain).await).await?;
            vm.drain(false);
            vm.tell("vm-undrained", "");
        }
        if vm.stands().step != FenceStep::Active
            && let Err(error) = vm.readmit(authority(caller)).await
        {
            entry.note_failure(&error.to_string()).await;
            return Err(readmission_error(id, error));
        }
        Ok(())
    }

    /// Refuses new sessions of a VM; running sessions go on.
    pub(crate) async fn drain(&self, caller: &Caller, name: &str) -> Result<(), Error> {
        let _turn = self.changing.lock_for(caller).await;
        let (known, vm) = self.manage(caller, name)?;
        let number = known.object.number;
        let by = authority(caller);
        if vm.draining() && self.checkpoint.objects().drained_by(number) >= by {
            return Ok(());
        }
        let entry = self.audit_log.entry(caller, "vm.drain", format!("vms/{}", known.host_name));
        let drain = |objects: &mut Objects| {
            objects.draining.insert(number);
            match by {
                FencedBy::Tenant => objects.tenant_drains.insert(number),
                FencedBy::Policy | FencedBy::Operator => objects.tenant_drains.remove(&number),
            };
        };
        self.record(&entry, None::<()>, None, drain).await?;
        vm.drain(true);
        vm.tell("vm-draining", "");
        Ok(())
    }

    /// Takes a quarantined or drained unit back into service.
    pub(crate) async fn readmit_unit(&self, caller: &Caller, unit: u32) -> Result<(), Error> {
        caller.may_operate()?;
        let room = self.units.get(unit).ok_or_else(|| Error::not_found("unit", &unit.to_string()))?;
        let turn = self.changing.lock().await;
        let Some(reason) = self.checkpoint.quarantine(unit) else {
            drop(turn);
            let place = room.place();
            let whole = place.is_whole() && self.placer.is_draining(place.device);
            if whole || self.placer.is_alone_draining(unit) {
                return self.drain_unit(caller, unit, false).await;
            }
            return Err(Error::new(
                Code::NotFenced,
                format!("unit {unit} is neither quarantined nor drained"),
            ));
        };
        let entry = self.audit_log.entry(caller, "unit.readmit", format!("units/{unit}"));
        entry.note(Some(reason), None).await?;
        entry.made(self.checkpoint.lift_quarantine(unit).await).await?;
        self.journal.note("unit-readmitted", None, format!("unit {unit}"));
        match self.checkpoint.quarantine(unit) {
            None => Ok(()),
            Some(again) => {
                self.journal.note("unit-quarantined", None, format!("unit {unit}: {again}"));
                Err(Error::new(Code::InUse, format!("unit {unit} is quarantined again: {again}")))
            }
        }
    }
}

/// The authority with which a caller fences, drains and readmits.
pub(super) fn authority(caller: &Caller) -> FencedBy {
    if caller.may_operate().is_ok() { FencedBy::Operator } else { FencedBy::Tenant }
}

fn readmission_error(id: &str, error: ReadmitError) -> Error {
    let code = match &error {
        ReadmitError::Checkpoint(_) => Code::StorageFailed,
        ReadmitError::Admission(AdmissionError::Active) => Code::NotFenced,
        ReadmitError::Admission(AdmissionError::Underway) => Code::FenceUnderway,
        ReadmitError::Admission(AdmissionError::Unclean) => Code::Unclean,
        ReadmitError::Admission(AdmissionError::Held) => Code::Forbidden,
    };
    Error::new(code, format!("VM {id} cannot be readmitted")).because(error)
}
