//! Organisations, projects and sizes: created, changed and deleted.

use sluice_api::{Code, Error};

use super::{Put, Registry};
use crate::{
    caller::Caller,
    records::state::objects::{Ancestor, Objects, SizeObject, VmObject},
    records::unit_event::UnitEvent,
};

/// Maximum number of organisations, of projects and of sizes, each.
const OBJECTS: usize = 10_000;
/// Organisations and projects have numbers greater than this. An adopted arbiter may know smaller ones, of others.
const ANCESTORS: u32 = 1 << 20;

impl Registry {
    /// Creates or changes an organisation.
    pub(crate) async fn put_organisation(
        &self,
        caller: &Caller,
        id: &str,
        wanted: Ancestor,
    ) -> Result<Put, Error> {
        caller.may_administer()?;
        let _turn = self.changing.lock().await;
        self.put_ancestor(caller, "organisation", id, wanted).await
    }

    /// Creates or changes a project.
    pub(crate) async fn put_project(
        &self,
        caller: &Caller,
        id: &str,
        wanted: Ancestor,
    ) -> Result<Put, Error> {
        caller.may_administer()?;
        let _turn = self.changing.lock().await;
        if let Some(organisation) = &wanted.organisation {
            let parent = self
                .organisation(organisation)
                .ok_or_else(|| Error::contradiction(format!("organisation {organisation} does not exist")))?;
            if wanted.memory > parent.memory {
                let message = format!(
                    "organisation {organisation} has {} bytes, project {id} cannot have {}",
                    parent.memory, wanted.memory
                );
                return Err(Error::new(Code::QuotaExceeded, message));
            }
        }
        self.put_ancestor(caller, "project", id, wanted).await
    }

    async fn put_ancestor(
        &self,
        caller: &Caller,
        kind: &'static str,
        id: &str,
        mut wanted: Ancestor,
    ) -> Result<Put, Error> {
        let of = |objects: &Objects| {
            let all = if kind == "project" { &objects.projects } else { &objects.organisations };
            (all.get(id).cloned(), all.len())
        };
        let (before, count) = of(&self.checkpoint.objects());
        match &before {
            Some(before) => {
                wanted.number = before.number;
                if wanted.organisation != before.organisation {
                    let message = format!("the organisation of project {id} cannot be changed");
                    return Err(Error::new(Code::ImmutableField, message));
                }
                if wanted == *before {
                    return Ok(Put::Kept);
                }
                self.keeps_its_own(kind, id, &wanted)?;
            }
            None if count >= OBJECTS => {
                return Err(Error::new(Code::QuotaExceeded, format!("there are {count} {kind}s already")));
            }
            None => wanted.number = self.ancestor_number(),
        }
        let action = format!("{kind}.put");
        let entry = self.audit_log.entry(caller, &action, format!("{kind}s/{id}"));
        let make = |objects: &mut Objects| {
            objects.last_ancestor = objects.last_ancestor.max(wanted.number);
            let all = if kind == "project" { &mut objects.projects } else { &mut objects.organisations };
            all.insert(id.to_owned(), wanted.clone());
        };
        self.record(&entry, before.as_ref(), Some(&wanted), make).await?;
        self.notify(UnitEvent::Ancestor { ancestor: wanted.number, bytes: wanted.memory });
        Ok(if before.is_some() { Put::Kept } else { Put::Made })
    }

    /// Refuses a change of an organisation or project to less memory than its VMs and projects were promised.
    fn keeps_its_own(&self, kind: &str, id: &str, wanted: &Ancestor) -> Result<(), Error> {
        let objects = self.checkpoint.objects();
        let is_in = |vm: &&VmObject| {
            let name = if kind == "project" { &vm.project } else { &vm.organisation };
            name.as_deref() == Some(id)
        };
        let promised: u64 =
            objects.vms.values().filter(is_in).map(VmObject::promised).fold(0, u64::saturating_add);
        let largest = objects
            .projects
            .values()
            .filter(|project| kind == "organisation" && project.organisation.as_deref() == Some(id))
            .map(|project| project.memory)
            .max();
        let needed = promised.max(largest.unwrap_or(0));
        if wanted.memory < needed {
            let message = format!("{kind} {id} has promised {needed} bytes and cannot have less");
            return Err(Error::new(Code::QuotaExceeded, message));
        }
        Ok(())
    }

    /// Deletes an organisation without VMs and projects.
    pub(crate) async fn delete_organisation(&self, caller: &Caller, id: &str) -> Result<(), Error> {
        caller.may_administer()?;
        let _turn = self.changing.lock().await;
        self.delete_ancestor(caller, "organisation", id).await
    }

    /// Deletes a project without VMs.
    pub(crate) async fn delete_project(&self, caller: &Caller, id: &str) -> Result<(), Error> {
        caller.may_administer()?;
        let _turn = self.changing.lock().await;
        self.delete_ancestor(caller, "project", id).await
    }

    async fn delete_ancestor(&self, caller: &Caller, kind: &'static str, id: &str) -> Result<(), Error> {
        let is_project = kind == "project";
        let all = |objects: &Objects| {
            if is_project {
                objects.projects.get(id).cloned()
            } else {
                objects.organisations.get(id).cloned()
            }
        };
        let before = all(&self.checkpoint.objects());
        let Some(before) = before else { return Ok(()) };
        {
            let objects = self.checkpoint.objects();
            let holds = |name: &Option<String>| name.as_deref() == Some(id);
            let vm = objects
                .vms
                .iter()
                .find(|(_, vm)| holds(if is_project { &vm.project } else { &vm.organisation }));
            let project =
                objects.projects.iter().find(|(_, project)| !is_project && holds(&project.organisation));
            let inside = vm.map(|(id, _)| format!("VM {id}"));
            if let Some(inside) = inside.or_else(|| project.map(|(id, _)| format!("project {id}"))) {
                let message = format!("{kind} {id} cannot be deleted: {inside} is in it");
                return Err(Error::new(Code::InUse, message));
            }
        }
        let action = format!("{kind}.delete");
        let entry = self.audit_log.entry(caller, &action, format!("{kind}s/{id}"));
        let take = |objects: &mut Objects| {
            let all = if is_project { &mut objects.projects } else { &mut objects.organisations };
            all.remove(id);
        };
        self.record(&entry, Some(&before), None, take).await?;
        self.notify(UnitEvent::Ancestor { ancestor: before.number, bytes: 0 });
        Ok(())
    }

    /// Creates or changes a size.
    pub(crate) async fn put_size(&self, caller: &Caller, id: &str, wanted: SizeObject) -> Result<Put, Error> {
        caller.may_administer()?;
        let _turn = self.changing.lock().await;
        let (before, count) = {
            let objects = self.checkpoint.objects();
            (objects.sizes.get(id).copied(), objects.sizes.len())
        };
        if before == Some(wanted) {
            return Ok(Put::Kept);
        }
        if before.is_none() && count >= OBJECTS {
            return Err(Error::new(Code::QuotaExceeded, format!("there are {count} sizes already")));
        }
        let entry = self.audit_log.entry(caller, "size.put", format!("sizes/{id}"));
        let make = |objects: &mut Objects| _ = objects.sizes.insert(id.to_owned(), wanted);
        self.record(&entry, before.as_ref(), Some(&wanted), make).await?;
        Ok(if before.is_some() { Put::Kept } else { Put::Made })
    }

    /// Deletes a size. VMs of this size keep their settings.
    pub(crate) async fn delete_size(&self, caller: &Caller, id: &str) -> Result<(), Error> {
        caller.may_administer()?;
        let _turn = self.changing.lock().await;
        let Some(before) = self.checkpoint.objects().sizes.get(id).copied() else { return Ok(()) };
        let entry = self.audit_log.entry(caller, "size.delete", format!("sizes/{id}"));
        let take = |objects: &mut Objects| _ = objects.sizes.remove(id);
        self.record(&entry, Some(&before), None, take).await
    }

    fn ancestor_number(&self) -> u32 {
        self.checkpoint.objects().last_ancestor.max(ANCESTORS).saturating_add(1)
    }
}
