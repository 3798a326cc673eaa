//! The checks of a requested VM: its defaults, its tenant's limits, the memory of its project and organisation, its number.

use std::{collections::BTreeSet, rc::Rc};

use sluice_api::{Code, Error, v1::TimeShare};

use super::Registry;
use crate::{
    caller::Caller,
    records::state::objects::{TenantLimits, VmObject, host_name},
    units::unit::Unit,
    vms::limits,
};

impl Registry {
    /// Fills in the organisation and the project of a VM, if the caller may have VMs there. A project of another tenant is
    /// treated as missing. Returns the name without its organisation.
    pub(super) fn own<'a>(
        &self,
        caller: &Caller,
        name: &'a str,
        wanted: &mut VmObject,
    ) -> Result<&'a str, Error> {
        caller.may_do_something()?;
        let (scope, short) = name.rsplit_once('/').map_or((None, name), |(scope, name)| (Some(scope), name));
        if let Some(scope) = scope
            && wanted.organisation.is_none()
            && wanted.project.is_none()
        {
            match scope.strip_prefix("project:") {
                Some(project) => wanted.project = Some(project.to_owned()),
                None => wanted.organisation = Some(scope.to_owned()),
            }
        }
        let manages = |organisation: Option<&str>, project: Option<&str>| {
            caller.may_manage(organisation, project).is_ok()
        };
        if let Some(id) = &wanted.project {
            let project = self.project(id);
            let project = project.filter(|project| manages(project.organisation.as_deref(), Some(id)));
            let Some(project) = project else {
                caller.may_manage(None, Some(id))?;
                return Err(Error::contradiction(format!("project {id} does not exist")));
            };
            if wanted.organisation.is_some() && wanted.organisation != project.organisation {
                return Err(Error::contradiction(format!("project {id} belongs to another organisation")));
            }
            wanted.organisation = project.organisation;
        } else if let Some(id) = &wanted.organisation {
            caller.may_manage(Some(id), None)?;
            if self.organisation(id).is_none() {
                return Err(Error::contradiction(format!("organisation {id} does not exist")));
            }
        } else {
            caller.may_manage(None, None)?;
        }
        let (organisation, project) = (wanted.organisation.as_deref(), wanted.project.as_deref());
        if scope.is_some() && host_name(organisation, project, short) != name {
            return Err(Error::contradiction(format!("VM {name} cannot belong to another organisation")));
        }
        if caller.may_operate().is_err() && short.bytes().all(|byte| byte.is_ascii_digit()) {
            return Err(Error::forbidden(
                "a name of digits sets the VM's number, which only operators may do",
            ));
        }
        Ok(short)
    }

    /// Completes a request, and refuses it if the caller may not have it.
    pub(super) fn permitted(
        &self,
        caller: &Caller,
        before: Option<&VmObject>,
        wanted: VmObject,
    ) -> Result<VmObject, Error> {
        let mut wanted = self.complete(wanted)?;
        caller.may_manage(wanted.organisation.as_deref(), wanted.project.as_deref())?;
        if caller.may_operate().is_ok() {
            return Ok(wanted);
        }
        let given = before.is_some_and(|before| {
            before.direct == wanted.direct && before.placement.gpus == wanted.placement.gpus
        });
        if !given && (wanted.direct || !wanted.placement.gpus.is_empty()) {
            // Only operators may request direct access or several GPUs: the quota of one unit does not bound either.
            caller.may_operate()?;
        }
        let size = wanted.size.as_deref().and_then(|name| self.size(name));
        for (owner, _, limits) in self.limits_of(&wanted) {
            limits.check(size.as_ref(), before, &mut wanted).map_err(|error| {
                Error::new(
                    Code::QuotaExceeded,
                    format!("the limits for tenants of {owner} refuse this: {error}"),
                )
            })?;
        }
        Ok(wanted)
    }

    /// The limits of a tenant's VM, each with its owner and with the number of VMs. An organisation always has limits, set or
    /// default; a project in an organisation has its own only if an operator set them.
    fn limits_of(&self, vm: &VmObject) -> Vec<(String, u32, TenantLimits)> {
        let mut all = Vec::new();
        if let Some(id) = &vm.organisation
            && let Some(found) = self.organisation(id)
        {
            all.push((
                format!("organisation {id}"),
                found.vms,
                found.limits.or_else(|| Some(TenantLimits::default())),
            ));
        }
        if let Some(id) = &vm.project
            && let Some(found) = self.project(id)
        {
            let limits = found.limits.or_else(|| vm.organisation.is_none().then(TenantLimits::default));
            all.push((format!("project {id}"), found.vms, limits));
        }
        let set = all
            .into_iter()
            .filter_map(|(owner, vms, limits)| Some((owner, vms.unwrap_or(limits::VMS), limits?)));
        set.collect()
    }

    /// Refuses a new VM if its tenant, or the tenants of its project or organisation, have as many as they may.
    pub(super) fn admit_tenant(&self, caller: &Caller, wanted: &VmObject) -> Result<(), Error> {
        if caller.may_operate().is_ok() {
            return Ok(());
        }
        let objects = self.checkpoint.objects();
        let beside = |vm: &&VmObject| match &wanted.organisation {
            Some(_) => vm.organisation == wanted.organisation,
            None => vm.project == wanted.project,
        };
        let count = |is_meant: &dyn Fn(&VmObject) -> bool| {
            let all = objects.vms.values().filter(beside).filter(|vm| is_meant(vm)).count();
            u32::try_from(all).unwrap_or(u32::MAX)
        };
        for (owner, vms, limits) in self.limits_of(wanted) {
            let is_project = wanted.organisation.is_some() && owner.starts_with("project ");
            let all = count(&|vm| !is_project || vm.project == wanted.project);
            if all >= vms {
                let message = format!("{owner} has {all} VMs and its tenants may create no more");
                return Err(Error::new(Code::QuotaExceeded, message));
            }
            let own = count(&|vm| vm.owner == Some(caller.uid));
            if own >= limits.vms_per_owner {
                let message = format!("user {} has {own} VMs in {owner} and may create no more", caller.uid);
                return Err(Error::new(Code::QuotaExceeded, message));
            }
        }
        Ok(())
    }

    /// Fills in the defaults of a request, and checks it without regard to other VMs.
    pub(crate) fn complete(&self, mut wanted: VmObject) -> Result<VmObject, Error> {
        if let Some(id) = &wanted.project {
            let project = self
                .project(id)
                .ok_or_else(|| Error::contradiction(format!("project {id} does not exist")))?;
            if wanted.organisation.is_some() && wanted.organisation != project.organisation {
                return Err(Error::contradiction(format!("project {id} belongs to another organisation")));
            }
            wanted.organisation = project.organisation;
        }
        if let Some(id) = &wanted.organisation
            && self.organisation(id).is_none()
        {
            return Err(Error::contradiction(format!("organisation {id} does not exist")));
        }
        if wanted.memory == 0 {
            wanted.memory = self.configuration.memory.0;
        }
        if wanted.memory != 0 && wanted.share.guaranteed_bytes > wanted.memory {
            return Err(Error::contradiction("the guaranteed memory is larger than the VM's quota"));
        }
        let TimeShare { cap_permille: cap, guarantee_permille: guarantee, .. } = wanted.time;
        if cap != 0 && guarantee > cap {
            return Err(Error::contradiction("the guaranteed share of time is larger than the VM's cap"));
        }
        Ok(wanted)
    }

    /// Refuses a VM if its project or organisation has too little memory or too many VMs.
    pub(super) fn admit(&self, id: &str, wanted: &VmObject) -> Result<(), Error> {
        let (arena, pinned) = (wanted.fixed_arena.unwrap_or(0), wanted.share.pinned_bytes);
        if pinned > 0 && arena > pinned {
            let message =
                format!("an arena of {arena} bytes does not fit into pinned_bytes, which is {pinned}");
            return Err(Error::contradiction(message));
        }
        let objects = self.checkpoint.objects();
        for (kind, name) in [("project", &wanted.project), ("organisation", &wanted.organisation)] {
            let Some(name) = name else { continue };
            let ancestor = if kind == "project" { self.project(name) } else { self.organisation(name) };
            let Some(ancestor) = ancestor else { continue };
            let of: fn(&VmObject) -> Option<&String> = match kind {
                "project" => |vm| vm.project.as_ref(),
                _ => |vm| vm.organisation.as_ref(),
            };
            let others: Vec<_> =
                objects.vms.iter().filter(|(other, vm)| *other != id && of(vm) == Some(name)).collect();
            if ancestor.vms.is_some_and(|most| others.len() >= usize::try_from(most).unwrap_or(usize::MAX)) {
                let message = format!("{kind} {name} has {} VMs and may have no more", others.len());
                return Err(Error::new(Code::QuotaExceeded, message));
            }
            let promised = others.iter().map(|(_, vm)| vm.promised());
            let promised = promised.fold(wanted.promised(), u64::saturating_add);
            let alone = |vm: &VmObject| vm.memory.saturating_add(vm.share.headroom_bytes);
            let most = alone(wanted).max(promised);
            // A change that asks for no more is admitted: the VM may be older than the ancestor's present memory.
            let before = objects.vms.get(id).filter(|vm| of(vm) == Some(name));
            let grows =
                before.is_none_or(|vm| wanted.promised() > vm.promised() || alone(wanted) > alone(vm));
            if grows && most > ancestor.memory {
                let message =
                    format!("{kind} {name} has {} bytes, which is less than {most}", ancestor.memory);
                return Err(Error::new(Code::QuotaExceeded, message));
            }
        }
        Ok(())
    }

    /// A number for a new VM: its name if that is a number, else a free number.
    pub(super) fn number_for(&self, id: &str) -> Result<u32, Error> {
        let range = self.configuration.vm_numbers;
        let objects = self.checkpoint.objects();
        let mut taken: BTreeSet<u32> = objects.vms.values().map(|vm| vm.number).collect();
        taken.extend(self.vm_set.all().iter().map(|vm| vm.id()));
        // The number of a deleted VM is not free until everything of that VM is gone.
        let is_free = |number: u32| {
            range.contains(number) && !taken.contains(&number) && self.checkpoint.admitted(number).is_some()
        };
        if id.bytes().all(|byte| byte.is_ascii_digit()) {
            let number = id.parse().ok().filter(|number| range.contains(*number));
            let number = number.filter(|number| number.to_string() == id).ok_or_else(|| {
                Error::contradiction(format!("{id} is a number, but not one of vm-numbers = \"{range}\""))
            })?;
            let in_use = || Error::new(Code::InUse, format!("the number {number} belongs to another VM"));
            return Some(number).filter(|number| is_free(*number)).ok_or_else(in_use);
        }
        // Numbers are given in a circle, so that a number is used again as late as possible.
        let behind = range.numbers().filter(|number| *number > objects.last_vm);
        let mut numbers = behind.chain(range.numbers());
        numbers.find(|number| is_free(*number)).ok_or_else(|| {
            Error::new(Code::QuotaExceeded, format!("all numbers of vm-numbers = \"{range}\" are taken"))
        })
    }
}

/// Refuses a quota in which no session can start: it is less than one context of the driver and its margin.
pub(super) fn large_enough(vm: &VmObject, units: &[Rc<Unit>]) -> Result<(), Error> {
    let has = vm.memory.saturating_add(vm.share.headroom_bytes);
    let small = units.iter().find(|unit| vm.memory > 0 && has < unit.least_quota());
    small.map_or(Ok(()), |unit| {
        let (least, number) = (unit.least_quota(), unit.number());
        let message = format!(
            "{has} bytes are too few on unit {number}: a context of its driver and its margin take {least} of the quota"
        );
        Err(Error::new(Code::Contradiction, message))
    })
}
