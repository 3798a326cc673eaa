//! The registry: every query and every change of the daemon's state, in one place.
//!
//! The routes of the HTTP API, the placement, and the daemon at its start and end call it; the kernel identifies the caller
//! ([`crate::caller`]), and the registry decides whether the caller may do it, since it knows the object of the request. It owns
//! the order of a change: checked, noted in the audit log, written down, made, and only then answered; other changes wait
//! meanwhile, and queries do not. It must never make a change that is neither in the audit log nor in the checkpoint.

mod admission;
mod fence_requests;
mod lookup;
mod organisations;
pub(crate) mod placing;
mod rebalancing;
pub(crate) mod sampling;
mod vms;

use std::{
    cell::{Cell, RefCell},
    collections::BTreeMap,
    rc::Rc,
    sync::Arc,
};

use serde::Serialize;
use sluice_api::{Error, v1::FencedBy};
use tokio::sync::Mutex;

use crate::{
    configuration::Configuration,
    handover::launching::Launching,
    placement::placer::Placer,
    priority::PriorityLock,
    records::audit_log::{AuditEntry, AuditLog},
    records::journal::Journal,
    records::state::{
        checkpoint::{Checkpoint, Removal},
        objects::{Ancestor, Objects, VmObject},
    },
    records::unit_event::{UnitEvent, UnitEventSender},
    records::usage::{ProjectIdentity, UsageRecords, VmIdentity},
    units::balancing::Balance,
    units::inventory::Inventory,
    units::set::Units,
    vms::set::VmSet,
    vms::unit_events::UnitEvents,
    vms::vm::VmPhase,
};

/// The unit of quotas, in bytes.
pub(crate) const CHUNK: u64 = sluice_messages::custody::UNIT;

/// The registry.
#[derive(Debug)]
pub(crate) struct Registry {
    pub(crate) configuration: Rc<Configuration>,
    pub(crate) launching: Rc<Launching>,
    pub(crate) inventory: Option<Rc<Inventory>>,
    pub(crate) units: Rc<Units>,
    pub(crate) placer: Rc<Placer>,
    pub(crate) vm_set: Rc<VmSet>,
    pub(crate) unit_events: Rc<UnitEvents>,
    pub(crate) checkpoint: Rc<Checkpoint>,
    pub(crate) journal: Arc<Journal>,
    pub(crate) usage: Rc<UsageRecords>,
    pub(crate) audit_log: AuditLog,
    pub(crate) event_sender: UnitEventSender,
    /// True once every VM that existed at the start has its device or cannot have one.
    pub(crate) ready: Cell<bool>,
    /// By VM: the number of its sessions that are already in its usage.
    pub(crate) begun: RefCell<BTreeMap<u32, u64>>,
    /// The load of units.
    pub(crate) balance: Balance,
    /// Held from the check of a change until it is written, so that the result of the check stays true.
    pub(crate) changing: PriorityLock<()>,
    /// Serializes the moves of VMs away from units that are being drained.
    pub(crate) emptying: Mutex<()>,
    /// One lock for each VM with an operation in progress.
    pub(crate) locks: RefCell<BTreeMap<String, Rc<Mutex<()>>>>,
}

/// A VM and its names.
#[derive(Clone, Debug)]
pub(crate) struct Known {
    /// The name that the client chose.
    pub(crate) id: String,
    /// The unique name on this host.
    pub(crate) host_name: String,
    pub(crate) object: VmObject,
}

/// The result of a PUT.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Put {
    /// The object was created.
    Made,
    /// The object existed and now has the requested content.
    Kept,
}

impl Registry {
    /// Serves every VM of an earlier daemon.
    pub(crate) async fn restore(&self) {
        let mut all: Vec<Known> = {
            let objects = self.checkpoint.objects();
            objects.vms.iter().map(|(id, object)| Known::new(id.clone(), object.clone())).collect()
        };
        all.sort_by_key(|known| known.object.number);
        for known in all {
            let units = self.placer.units_of(&known.host_name, &known.object);
            let is_placed = units.is_some();
            self.warn_of_missing_owners(&known);
            self.vm_set.add(self.spec(&known.object), known.subject(), units);
            if !is_placed && let Err(error) = self.settle(&known.host_name).await {
                tracing::error!(vm = known.object.number, error = error.message, cause = ?error.cause, "the VM cannot start sessions");
            }
        }
    }

    /// Reports a VM whose project or organisation does not exist.
    fn warn_of_missing_owners(&self, known: &Known) {
        let object = &known.object;
        let project = object.project.as_deref().filter(|id| self.project(id).is_none());
        let organisation = object.organisation.as_deref().filter(|id| self.organisation(id).is_none());
        for (kind, name) in [("project", project), ("organisation", organisation)] {
            if let Some(name) = name {
                let vm = object.number;
                tracing::error!(vm, kind, name, "an owner of a VM does not exist, so no limit of it holds");
            }
        }
    }

    /// Removes the VMs of a supervisor, which end with it. A fenced or drained VM stays, so that it starts no session before its
    /// readmission.
    pub(crate) async fn end_supervised(&self) {
        let all: Vec<_> = {
            let objects = self.checkpoint.objects();
            objects.vms.iter().map(|(name, vm)| (name.clone(), vm.number)).collect()
        };
        for (name, number) in all {
            match self.checkpoint.remove_vm(&name, number, FencedBy::Tenant).await {
                Ok(Removal::Removed) => {
                    tracing::info!(vm = number, "the VM ends with its supervisor");
                    self.end_removed(&name, number).await;
                }
                Ok(Removal::Unclean | Removal::Held) => {}
                Err(error) => {
                    tracing::warn!(vm = number, %error, "the VM stays for the next supervisor, because it cannot be removed")
                }
            }
        }
    }

    /// Ends the processes of a VM that the checkpoint no longer has, and gives its places back.
    async fn end_removed(&self, host_name: &str, number: u32) {
        // The usage since the last sample must be counted before the VM is removed.
        if let Some(vm) = self.vm_set.get(number) {
            self.sample_vm(&vm).await;
        }
        self.vm_set.remove(number).await;
        self.begun.borrow_mut().remove(&number);
        self.usage.retire(number);
        self.placer.release(host_name);
    }

    /// Waits until every VM has its device, or cannot have one. Returns the number of VMs with a device.
    pub(crate) async fn all_there(&self) -> usize {
        let mut served = 0;
        for vm in self.vm_set.all() {
            served += usize::from(vm.started().await == VmPhase::Running);
        }
        served
    }

    pub(crate) fn lock(&self, id: &str) -> Rc<Mutex<()>> {
        let mut locks = self.locks.borrow_mut();
        // A lock with no other reference is not in use.
        locks.retain(|_, lock| Rc::strong_count(lock) > 1);
        Rc::clone(locks.entry(id.to_owned()).or_default())
    }

    fn notify(&self, event: UnitEvent) {
        // Fails only while the daemon ends and no receiver is left.
        _ = self.event_sender.send(event);
    }

    /// Notes a change of the clients' objects in the audit log, and writes it to the checkpoint.
    async fn record<T: Serialize>(
        &self,
        entry: &AuditEntry<'_>,
        before: Option<T>,
        after: Option<T>,
        change: impl FnOnce(&mut Objects),
    ) -> Result<(), Error> {
        entry.note(before, after).await?;
        entry.made(self.checkpoint.change_objects(change).await).await
    }
}

/// All VMs and projects, in the form under which their usage is kept.
pub(crate) fn identities(objects: &Objects) -> (Vec<VmIdentity>, Vec<ProjectIdentity>) {
    let vm = |(name, vm): (&String, &VmObject)| VmIdentity {
        name: name.clone(),
        organisation: vm.organisation.clone(),
        project: vm.project.clone(),
        number: Some(vm.number),
        created: vm.created,
    };
    let project = |(name, project): (&String, &Ancestor)| ProjectIdentity {
        name: name.clone(),
        organisation: project.organisation.clone(),
        number: Some(project.number),
    };
    (objects.vms.iter().map(vm).collect(), objects.projects.iter().map(project).collect())
}
