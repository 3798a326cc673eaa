//! Lookups: VMs, as far as the caller may see them, and sizes, organisations and projects.

use std::rc::Rc;

use sluice_api::Error;

use super::{Known, Registry};
use crate::{
    caller::Caller,
    records::journal::Subject,
    records::state::objects::{Ancestor, SizeObject, VmObject, short_name},
    spec::VmSpec,
    vms::vm::Vm,
};

impl Known {
    pub(super) fn new(host_name: String, object: VmObject) -> Self {
        Self { id: short_name(&host_name).to_owned(), host_name, object }
    }

    pub(crate) fn subject(&self) -> Subject {
        Subject {
            id: self.id.clone(),
            organisation: self.object.organisation.clone(),
            project: self.object.project.clone(),
        }
    }

    fn may_be_seen(&self, caller: &Caller) -> Result<(), Error> {
        caller.may_see(self.object.organisation.as_deref(), self.object.project.as_deref())
    }

    pub(super) fn may_be_managed(&self, caller: &Caller) -> Result<(), Error> {
        caller.may_manage(self.object.organisation.as_deref(), self.object.project.as_deref())
    }
}

impl Registry {
    /// The memory limits of projects and organisations, by number.
    pub(crate) fn limits(&self) -> Vec<(u32, u64)> {
        let objects = self.checkpoint.objects();
        let all = objects.organisations.values().chain(objects.projects.values());
        all.map(|ancestor| (ancestor.number, ancestor.memory)).collect()
    }

    /// Finds a VM by its name on this host.
    pub(crate) fn find(&self, host_name: &str) -> Option<Known> {
        let objects = self.checkpoint.objects();
        objects.vms.get(host_name).map(|object| Known::new(host_name.to_owned(), object.clone()))
    }

    /// Finds a VM by its name on this host, or by the name that the client chose if the caller may see only one VM of that
    /// name. A VM that the caller may not see is treated as missing.
    pub(super) fn meant(&self, caller: &Caller, name: &str) -> Result<Option<Known>, Error> {
        let exact = self.find(name).filter(|known| known.may_be_seen(caller).is_ok());
        if exact.is_some() || name.contains('/') {
            return Ok(exact);
        }
        let objects = self.checkpoint.objects();
        let called = objects.vms.iter().filter(|(host_name, _)| short_name(host_name) == name);
        let known = called.map(|(host_name, object)| Known::new(host_name.clone(), object.clone()));
        let mut seen: Vec<Known> = known.filter(|known| known.may_be_seen(caller).is_ok()).collect();
        match (seen.pop(), seen.first()) {
            (Some(one), Some(other)) => Err(Error::contradiction(format!(
                "several organisations have a VM {name}: add the organisation, for instance {} or {}",
                other.host_name, one.host_name
            ))),
            (one, _) => Ok(one),
        }
    }

    /// Finds a VM that the caller may see.
    pub(crate) fn see(&self, caller: &Caller, name: &str) -> Result<(Known, Rc<Vm>), Error> {
        let Some(known) = self.meant(caller, name)? else {
            caller.may_do_something().or_else(|_| caller.may_read())?;
            return Err(Error::not_found("VM", name));
        };
        let vm = self.vm_set.get(known.object.number).ok_or_else(|| Error::not_found("VM", name))?;
        Ok((known, vm))
    }

    /// All VMs that the caller may see.
    pub(crate) fn see_all(&self, caller: &Caller) -> Vec<(Known, Rc<Vm>)> {
        let objects = self.checkpoint.objects();
        let known = objects.vms.iter().map(|(name, object)| Known::new(name.clone(), object.clone()));
        let seen = known.filter(|known| known.may_be_seen(caller).is_ok());
        let mut all: Vec<_> =
            seen.filter_map(|known| self.vm_set.get(known.object.number).map(|vm| (known, vm))).collect();
        all.sort_by(|(one, _), (other, _)| (&one.id, &one.host_name).cmp(&(&other.id, &other.host_name)));
        all
    }

    /// Finds a size.
    pub(crate) fn size(&self, id: &str) -> Option<SizeObject> {
        self.checkpoint.objects().sizes.get(id).copied()
    }

    /// Finds an organisation.
    pub(crate) fn organisation(&self, id: &str) -> Option<Ancestor> {
        self.checkpoint.objects().organisations.get(id).cloned()
    }

    /// Finds a project.
    pub(crate) fn project(&self, id: &str) -> Option<Ancestor> {
        self.checkpoint.objects().projects.get(id).cloned()
    }

    /// A VM in the form that units and launcher use, with the numbers of its project and organisation.
    pub(crate) fn spec(&self, vm: &VmObject) -> VmSpec {
        let number = |ancestor: Option<Ancestor>| ancestor.map_or(0, |ancestor| ancestor.number);
        VmSpec {
            project: number(vm.project.as_deref().and_then(|id| self.project(id))),
            organisation: number(vm.organisation.as_deref().and_then(|id| self.organisation(id))),
            ..vm.spec()
        }
    }

    pub(super) fn manage(&self, caller: &Caller, name: &str) -> Result<(Known, Rc<Vm>), Error> {
        let (known, vm) = self.see(caller, name)?;
        known.may_be_managed(caller)?;
        Ok((known, vm))
    }
}
