//! The registry: every query and every change of the daemon's state, in one place.
//!
//! A change is checked, noted in the audit log, written down, made, and only then answered; other changes wait meanwhile, and
//! queries do not. The kernel identifies the caller ([`crate::caller`]); the registry decides whether the caller may do it,
//! since it knows the object of the request.

use std::{
    cell::{Cell, RefCell},
    collections::{BTreeMap, BTreeSet},
    rc::Rc,
    sync::Arc,
    time::Duration,
};

use serde::Serialize;
use sluice_api::{
    Code, Error, VmSpec,
    v1::{FenceStep, FencedBy},
};
use tokio::{sync::Mutex, task::JoinSet, time::timeout};

use crate::{
    caller::Caller,
    configuration::Configuration,
    fault,
    handover::launching::Launching,
    placement::placer::Placer,
    priority::PriorityLock,
    records::journal::{Journal, Subject},
    records::notice::{Notice, Notices},
    records::state::{
        checkpoint::{Checkpoint, FenceChange, ReadmitError, Removal},
        objects::{Ancestor, Limits, Objects, Shares, SizeObject, VmObject, host_name, short_name},
    },
    records::trail::{Entry, Trail},
    records::usage::{ProjectIdentity, Usage, VmIdentity},
    units::balancing::Balance,
    units::custodian::Custodian,
    units::inventory::Inventory,
    units::set::Units,
    units::unit::Unit,
    vms::fence::{AdmissionError, Fence},
    vms::limits,
    vms::roster::Roster,
    vms::vm::{Phase, Vm},
};

/// How long a new VM's device may take to listen.
const START: Duration = Duration::from_secs(15);
/// How long who fences a VM waits for the end of it.
const FENCED: Duration = Duration::from_secs(20);
/// How long who may be refused for want of room, and whoever wants a change behind them, waits for what units have to say.
const LOOK: Duration = Duration::from_millis(100);
/// What quotas are counted in.
pub(crate) const CHUNK: u64 = sluice_messages::custody::UNIT;
/// Numbers of organisations and projects that clients make begin behind this one.
const ANCESTORS: u32 = 1 << 20;
/// Organisations, projects and sizes that there can be, each.
const OBJECTS: usize = 10_000;

/// The registry.
#[derive(Debug)]
pub(crate) struct Registry {
    pub(crate) configuration: Rc<Configuration>,
    pub(crate) launching: Rc<Launching>,
    pub(crate) inventory: Option<Rc<Inventory>>,
    pub(crate) units: Rc<Units>,
    pub(crate) placer: Rc<Placer>,
    pub(crate) roster: Rc<Roster>,
    pub(crate) custodian: Rc<Custodian>,
    pub(crate) checkpoint: Rc<Checkpoint>,
    pub(crate) journal: Arc<Journal>,
    pub(crate) usage: Rc<Usage>,
    pub(crate) trail: Trail,
    pub(crate) notices: Notices,
    /// Whether everything that was there at the start is.
    pub(crate) ready: Cell<bool>,
    /// What the configuration file names.
    pub(crate) configured: Objects,
    /// By VM: how many of its sessions are in its usage already.
    pub(crate) begun: RefCell<BTreeMap<u32, u64>>,
    /// The load of units.
    pub(crate) balance: Balance,
    /// Held from when a change is checked until it is written: what was checked still holds then.
    pub(crate) changing: PriorityLock<()>,
    /// One after the other moves VMs away from what is being emptied.
    pub(crate) emptying: Mutex<()>,
    /// VMs something is being done to.
    pub(crate) locks: RefCell<BTreeMap<String, Rc<Mutex<()>>>>,
}

/// A VM and where it comes from.
#[derive(Clone, Debug)]
pub(crate) struct Known {
    /// The name that its client gave it.
    pub(crate) id: String,
    /// Its name on this host.
    pub(crate) host_name: String,
    pub(crate) object: VmObject,
    /// Whether the configuration file names it.
    pub(crate) configured: bool,
}

/// What became of a PUT.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Put {
    /// It was not there.
    Made,
    /// It is there as wanted.
    Kept,
}

impl Known {
    fn new(host_name: String, object: VmObject, configured: bool) -> Self {
        Self { id: short_name(&host_name).to_owned(), host_name, object, configured }
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

    fn may_be_managed(&self, caller: &Caller) -> Result<(), Error> {
        caller.may_manage(self.object.organisation.as_deref(), self.object.project.as_deref())
    }
}

impl Registry {
    /// Has everything served that was there before this daemon, or is in its configuration.
    pub(crate) async fn restore(&self) {
        let made: Vec<_> = {
            let objects = self.checkpoint.objects();
            let known = objects.vms.iter().map(|(id, object)| (id.clone(), object.clone(), false));
            known.collect()
        };
        let configured = self.configured.vms.iter().map(|(id, object)| (id.clone(), object.clone(), true));
        let mut all: Vec<_> = configured.chain(made).collect();
        all.sort_by_key(|(_, object, _)| object.number);
        for (id, object, configured) in all {
            if self.roster.get(object.number).is_some() {
                tracing::error!("VM {id} is not served: the configuration file names another of its number");
                continue;
            }
            let known = Known::new(id, object, configured);
            let units = if configured {
                Some(self.configured_units())
            } else {
                self.placer.unit_of(&known.host_name).map(|unit| [unit].into())
            };
            let is_placed = units.is_some();
            self.roster.add(self.spec(&known.object), known.subject(), units);
            if !is_placed && let Err(error) = self.settle(&known.host_name).await {
                tracing::error!("VM {} begins no session: {} {:?}", known.id, error.message, error.cause);
            }
        }
    }

    /// The units that VMs of the configuration file are on.
    fn configured_units(&self) -> Rc<[Rc<Unit>]> {
        let is_theirs = |unit: &Rc<Unit>| {
            let place = unit.place();
            place.is_whole() && self.configuration.has_vms_on(place.device)
        };
        self.units.iter().filter(is_theirs).collect()
    }

    /// Waits until every VM that is there has had its device, or cannot have one. Returns how many are served.
    pub(crate) async fn all_there(&self) -> usize {
        let mut served = 0;
        for vm in self.roster.all() {
            served += usize::from(vm.started().await == Phase::Running);
        }
        served
    }

    /// What projects and organisations may have.
    pub(crate) fn limits(&self) -> Vec<(u32, u64)> {
        let objects = self.checkpoint.objects();
        let all = [&self.configured.organisations, &self.configured.projects];
        let all = all.into_iter().chain([&objects.organisations, &objects.projects]);
        all.flat_map(|ancestors| ancestors.values())
            .map(|ancestor| (ancestor.number, ancestor.memory))
            .collect()
    }

    /// A VM, by its name on this host.
    pub(crate) fn find(&self, host_name: &str) -> Option<Known> {
        let known =
            |object: &VmObject, configured| Known::new(host_name.to_owned(), object.clone(), configured);
        let configured = self.configured.vms.get(host_name).map(|object| known(object, true));
        configured.or_else(|| self.checkpoint.objects().vms.get(host_name).map(|object| known(object, false)))
    }

    /// The VM that a caller means: by its name on this host, or by the name that its client gave it, where the caller may
    /// look at one VM of that name. One that the caller may not look at is as if it were not there.
    fn meant(&self, caller: &Caller, name: &str) -> Result<Option<Known>, Error> {
        let exact = self.find(name).filter(|known| known.may_be_seen(caller).is_ok());
        if exact.is_some() || name.contains('/') {
            return Ok(exact);
        }
        let objects = self.checkpoint.objects();
        let called = objects.vms.iter().filter(|(host_name, _)| short_name(host_name) == name);
        let known = called.map(|(host_name, object)| Known::new(host_name.clone(), object.clone(), false));
        let mut seen: Vec<Known> = known.filter(|known| known.may_be_seen(caller).is_ok()).collect();
        match (seen.pop(), seen.first()) {
            (Some(one), Some(other)) => Err(Error::contradiction(format!(
                "several organisations have a VM {name}: name one of them, for instance {} or {}",
                other.host_name, one.host_name
            ))),
            (one, _) => Ok(one),
        }
    }

    /// A VM that the caller may look at.
    pub(crate) fn see(&self, caller: &Caller, name: &str) -> Result<(Known, Rc<Vm>), Error> {
        let Some(known) = self.meant(caller, name)? else {
            caller.may_do_something().or_else(|_| caller.may_read())?;
            return Err(Error::not_found("VM", name));
        };
        let vm = self.roster.get(known.object.number).ok_or_else(|| Error::not_found("VM", name))?;
        Ok((known, vm))
    }

    /// All VMs that the caller may look at.
    pub(crate) fn see_all(&self, caller: &Caller) -> Vec<(Known, Rc<Vm>)> {
        let objects = self.checkpoint.objects();
        let configured = self.configured.vms.iter().map(|vm| (vm, true));
        let all = configured.chain(objects.vms.iter().map(|vm| (vm, false)));
        let known =
            all.map(|((name, object), configured)| Known::new(name.clone(), object.clone(), configured));
        let seen = known.filter(|known| known.may_be_seen(caller).is_ok());
        let mut all: Vec<_> =
            seen.filter_map(|known| self.roster.get(known.object.number).map(|vm| (known, vm))).collect();
        all.sort_by(|(one, _), (other, _)| (&one.id, &one.host_name).cmp(&(&other.id, &other.host_name)));
        all
    }

    /// Makes a VM, or changes it to be as wanted; returns when its device listens, with the VM's name on this host.
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
        if self.configured.vms.contains_key(short) {
            return Err(configured_error("VM", short));
        }
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

    /// Fills in the organisation and the project that a VM will be of, if the caller may have VMs there. What a tenant does
    /// not own is to it as if it were not there. Returns the name without its organisation.
    fn own<'a>(&self, caller: &Caller, name: &'a str, wanted: &mut VmObject) -> Result<&'a str, Error> {
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
                return Err(Error::contradiction(format!("there is no project {id}")));
            };
            if wanted.organisation.is_some() && wanted.organisation != project.organisation {
                return Err(Error::contradiction(format!("project {id} is of another organisation")));
            }
            wanted.organisation = project.organisation;
        } else if let Some(id) = &wanted.organisation {
            caller.may_manage(Some(id), None)?;
            if self.organisation(id).is_none() {
                return Err(Error::contradiction(format!("there is no organisation {id}")));
            }
        } else {
            caller.may_manage(None, None)?;
        }
        let (organisation, project) = (wanted.organisation.as_deref(), wanted.project.as_deref());
        if scope.is_some() && host_name(organisation, project, short) != name {
            return Err(Error::contradiction(format!("the VM {name} cannot be of another organisation")));
        }
        if caller.may_operate().is_err() && short.bytes().all(|byte| byte.is_ascii_digit()) {
            return Err(Error::forbidden("a name of digits is a VM's number, and operators choose numbers"));
        }
        Ok(short)
    }

    /// What a caller wants, complete, if they may have it.
    fn permitted(
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
        if wanted.direct {
            // Programs of the host, not of a VM: nothing for a tenant.
            caller.may_operate()?;
        }
        let size = wanted.size.as_deref().and_then(|name| self.size(name));
        for (owner, _, limits) in self.limits_of(&wanted) {
            limits.check(size.as_ref(), before, &mut wanted).map_err(|error| {
                Error::new(Code::QuotaExceeded, format!("tenants of {owner} cannot have that: {error}"))
            })?;
        }
        Ok(wanted)
    }

    /// The limits that hold for a tenant's VM, each with its owner and with the number of VMs. Those of an organisation
    /// hold by default; a project in one has its own only where an operator set them.
    fn limits_of(&self, vm: &VmObject) -> Vec<(String, u32, Limits)> {
        let mut all = Vec::new();
        if let Some(id) = &vm.organisation
            && let Some(found) = self.organisation(id)
        {
            all.push((
                format!("organisation {id}"),
                found.vms,
                found.limits.or_else(|| Some(Limits::default())),
            ));
        }
        if let Some(id) = &vm.project
            && let Some(found) = self.project(id)
        {
            let limits = found.limits.or_else(|| vm.organisation.is_none().then(Limits::default));
            all.push((format!("project {id}"), found.vms, limits));
        }
        let set = all
            .into_iter()
            .filter_map(|(owner, vms, limits)| Some((owner, vms.unwrap_or(limits::VMS), limits?)));
        set.collect()
    }

    /// Whether a tenant may have one more VM, by how many there are where it will be.
    fn admit_tenant(&self, caller: &Caller, wanted: &VmObject) -> Result<(), Error> {
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
                let message = format!("{owner} has {all} VMs and its tenants may make no more");
                return Err(Error::new(Code::QuotaExceeded, message));
            }
            let own = count(&|vm| vm.owner == Some(caller.uid));
            if own >= limits.vms_per_owner {
                let message = format!("user {} has {own} VMs in {owner} and may make no more", caller.uid);
                return Err(Error::new(Code::QuotaExceeded, message));
            }
        }
        Ok(())
    }

    async fn make_vm(&self, caller: &Caller, host_name: &str, wanted: VmObject) -> Result<(), Error> {
        let turn = self.changing.lock_for(caller).await;
        let mut wanted = self.permitted(caller, None, wanted)?;
        self.admit_tenant(caller, &wanted)?;
        wanted.owner = Some(caller.uid);
        let id = short_name(host_name);
        // From here on it has its number and its place: the unit may take its time, and others do not wait for it.
        wanted.number = self.number_for(id)?;
        wanted.created = crate::records::journal::now() / 1000;
        self.admit(host_name, &wanted)?;
        let held = self.if_there_is_room(|| self.placer.hold(host_name, &wanted)).await?;
        let entry = self.trail.entry(caller, "vm.create", format!("vms/{host_name}"));
        let number = wanted.number;
        let make = |objects: &mut Objects| {
            fault::point("create-noted");
            objects.last_vm = number;
            objects.vms.insert(host_name.to_owned(), wanted.clone());
            objects.plan = self.placer.plan();
        };
        let made = self.record(&entry, None, Some(&wanted), make).await;
        made.inspect_err(|_| self.placer.release(host_name, held))?;
        drop(turn);
        fault::point("create-written");
        let known = Known::new(host_name.to_owned(), wanted, false);
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
        let vm = self.roster.add(self.spec(&known.object), known.subject(), Some(units));
        let phase = timeout(START, vm.started()).await.unwrap_or(Phase::Starting);
        fault::point("create-started");
        let why = match phase {
            Phase::Running => {
                vm.tell("vm-created", "");
                return Ok(());
            }
            Phase::Failed(why) => why,
            Phase::Starting => format!("it has not listened for {START:?}"),
        };
        entry.note_failure(&why).await;
        self.take_vm(caller, host_name, number, FencedBy::Operator).await?;
        Err(Error { cause: vec![why], ..Error::new(Code::DeviceFailed, format!("VM {id} gets no device")) })
    }

    async fn change_vm(&self, caller: &Caller, known: Known, wanted: VmObject) -> Result<(), Error> {
        let Known { id, host_name, object: before, .. } = &known;
        // Not of what others may be changing.
        self.settle(host_name).await?;
        let turn = self.changing.lock_for(caller).await;
        let mut wanted = self.permitted(caller, Some(before), wanted)?;
        (wanted.number, wanted.created, wanted.owner) = (before.number, before.created, before.owner);
        for (field, same) in [
            ("organisation", wanted.organisation == before.organisation),
            ("project", wanted.project == before.project),
            ("scanouts", wanted.scanouts == before.scanouts),
            ("direct", wanted.direct == before.direct),
            ("placement", wanted.placement == before.placement),
        ] {
            if !same {
                let message = format!("{field} of VM {id} cannot be changed; delete the VM and make it anew");
                return Err(Error::new(Code::ImmutableField, message));
            }
        }
        self.roster.revive(before.number);
        let vm = self.roster.get(before.number).ok_or_else(|| Error::not_found("VM", id))?;
        if wanted != *before {
            self.admit(host_name, &wanted)?;
            large_enough(&wanted, &vm.units())?;
            self.if_there_is_room(|| self.placer.change(host_name, &wanted)).await?;
            // What it had before was possible.
            let undo = || self.placer.change_back(host_name, before);
            let entry = self.trail.entry(caller, "vm.update", format!("vms/{host_name}"));
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
        // One that had failed is tried again.
        match timeout(START, vm.started()).await.unwrap_or(Phase::Starting) {
            Phase::Running => Ok(()),
            Phase::Failed(why) => Err(Error {
                cause: vec![why],
                ..Error::new(Code::DeviceFailed, format!("VM {id} gets no device"))
            }),
            Phase::Starting => {
                Err(Error::new(Code::Unavailable, format!("the device of VM {id} is still starting")))
            }
        }
    }

    /// Has the placer do what it may have no room for. What units can lend is known by what they last said: before anything is
    /// refused for want of room they are asked anew, and their first probes are waited for.
    async fn if_there_is_room<T>(&self, place: impl Fn() -> Result<T, Error>) -> Result<T, Error> {
        match place() {
            Err(error) if error.code == Code::PlacementUnavailable => {}
            placed => return placed,
        }
        let mut asked: JoinSet<_> = JoinSet::new();
        for unit in self.units.iter() {
            asked.spawn_local(async move { _ = unit.describe().await });
        }
        // Of those that do not answer in time, what they last said counts.
        _ = timeout(LOOK, async { while asked.join_next().await.is_some() {} }).await;
        // A unit that has just started does not know yet whether organisations may share it.
        for unit in self.units.iter() {
            unit.probed().await;
        }
        self.placer.look_around();
        place()
    }

    /// Ends a VM, with everything it has. One that is not there is gone already.
    pub(crate) async fn delete_vm(&self, caller: &Caller, name: &str) -> Result<(), Error> {
        caller.may_do_something()?;
        let Some(Known { host_name, .. }) = self.meant(caller, name)? else { return Ok(()) };
        let lock = self.lock(&host_name);
        let _guard = lock.lock().await;
        let Some(known) = self.find(&host_name) else { return Ok(()) };
        known.may_be_managed(caller)?;
        let id = &known.id;
        if known.configured {
            return Err(configured_error("VM", id));
        }
        let number = known.object.number;
        let by = authority(caller);
        // A tenant that could delete what an operator or a policy fenced, or what an operator drained, could make it anew.
        let held = |fence: &Fence| fence.step != FenceStep::Active && fence.by > by;
        if let Some(vm) = self.roster.get(number) {
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
        let entry = self.trail.entry(caller, "vm.delete", format!("vms/{host_name}"));
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
        // What it used until now is not lost with it.
        if let Some(vm) = self.roster.get(number) {
            self.sample_vm(&vm).await;
        }
        self.roster.remove(number).await;
        self.begun.borrow_mut().remove(&number);
        self.usage.retire(number);
        self.placer.leave(host_name);
        self.placer.tidy();
        Ok(())
    }

    /// Fences a VM; returns when it is quarantined, or after a bounded time, and that is written down. The fence is there at
    /// once, whatever becomes of what is written.
    pub(crate) async fn fence(&self, caller: &Caller, name: &str, reason: &str) -> Result<(), Error> {
        let (known, vm) = self.manage(caller, name)?;
        let (id, host_name) = (&known.id, &known.host_name);
        if vm.fence(authority(caller), reason) == FenceChange::None {
            // There is no change, so the log is not written.
            vm.settled(FENCED).await;
            return self.checkpoint.written().await.map_err(Error::storage);
        }
        let entry = self.trail.entry(caller, "vm.fence", format!("vms/{host_name}"));
        let noted = entry.note(None, Some(reason)).await;
        vm.settled(FENCED).await;
        let written = self.checkpoint.written().await.map_err(Error::storage);
        noted.and(written).map_err(|error| Error {
            message: format!("VM {id} is fenced, but that cannot be written down"),
            ..error
        })
    }

    /// Lets a VM that was fenced or drained have sessions again.
    pub(crate) async fn readmit(&self, caller: &Caller, name: &str) -> Result<(), Error> {
        // A tenant must not undo what was done to it.
        caller.may_operate()?;
        let (known, vm) = self.manage(caller, name)?;
        let (id, host_name) = (&known.id, &known.host_name);
        let lock = self.lock(host_name);
        let _guard = lock.lock().await;
        // On its way out it is not refused but waited for.
        vm.settled(FENCED).await;
        let entry = self.trail.entry(caller, "vm.readmit", format!("vms/{host_name}"));
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

    /// Lets a VM begin no session any more; those that run go on.
    pub(crate) async fn drain(&self, caller: &Caller, name: &str) -> Result<(), Error> {
        let _turn = self.changing.lock_for(caller).await;
        let (known, vm) = self.manage(caller, name)?;
        let number = known.object.number;
        let by = authority(caller);
        if vm.draining() && self.checkpoint.objects().drained_by(number) >= by {
            return Ok(());
        }
        let entry = self.trail.entry(caller, "vm.drain", format!("vms/{}", known.host_name));
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

    /// Takes a unit back into service that is quarantined, or being emptied.
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
        let entry = self.trail.entry(caller, "unit.readmit", format!("units/{unit}"));
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

    /// Makes or changes an organisation.
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

    /// Makes or changes a project.
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
                .ok_or_else(|| Error::contradiction(format!("there is no organisation {organisation}")))?;
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
        if of(&self.configured).0.is_some() {
            return Err(configured_error(kind, id));
        }
        if id.bytes().all(|byte| byte.is_ascii_digit()) {
            let message = format!("{kind} {id}: names of digits only are those of the configuration file");
            return Err(Error::contradiction(message));
        }
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
        let entry = self.trail.entry(caller, &action, format!("{kind}s/{id}"));
        let make = |objects: &mut Objects| {
            objects.last_ancestor = objects.last_ancestor.max(wanted.number);
            let all = if kind == "project" { &mut objects.projects } else { &mut objects.organisations };
            all.insert(id.to_owned(), wanted.clone());
        };
        self.record(&entry, before.as_ref(), Some(&wanted), make).await?;
        self.notify(Notice::Ancestor { ancestor: wanted.number, bytes: wanted.memory });
        Ok(if before.is_some() { Put::Kept } else { Put::Made })
    }

    /// What an organisation or project is changed to leaves room for what was promised to those in it.
    fn keeps_its_own(&self, kind: &str, id: &str, wanted: &Ancestor) -> Result<(), Error> {
        let objects = self.checkpoint.objects();
        let is_in = |vm: &&VmObject| {
            let name = if kind == "project" { &vm.project } else { &vm.organisation };
            name.as_deref() == Some(id)
        };
        let promised: u64 = objects.vms.values().filter(is_in).map(|vm| vm.guaranteed).sum();
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

    /// Takes an organisation away, in which nothing is.
    pub(crate) async fn delete_organisation(&self, caller: &Caller, id: &str) -> Result<(), Error> {
        caller.may_administer()?;
        let _turn = self.changing.lock().await;
        self.delete_ancestor(caller, "organisation", id).await
    }

    /// Takes a project away, in which nothing is.
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
        if all(&self.configured).is_some() {
            return Err(configured_error(kind, id));
        }
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
        let entry = self.trail.entry(caller, &action, format!("{kind}s/{id}"));
        let take = |objects: &mut Objects| {
            let all = if is_project { &mut objects.projects } else { &mut objects.organisations };
            all.remove(id);
        };
        self.record(&entry, Some(&before), None, take).await?;
        self.notify(Notice::Ancestor { ancestor: before.number, bytes: 0 });
        Ok(())
    }

    /// Makes or changes a size.
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
        let entry = self.trail.entry(caller, "size.put", format!("sizes/{id}"));
        let make = |objects: &mut Objects| _ = objects.sizes.insert(id.to_owned(), wanted);
        self.record(&entry, before.as_ref(), Some(&wanted), make).await?;
        Ok(if before.is_some() { Put::Kept } else { Put::Made })
    }

    /// Takes a size away. VMs of it keep what they have.
    pub(crate) async fn delete_size(&self, caller: &Caller, id: &str) -> Result<(), Error> {
        caller.may_administer()?;
        let _turn = self.changing.lock().await;
        let Some(before) = self.checkpoint.objects().sizes.get(id).copied() else { return Ok(()) };
        let entry = self.trail.entry(caller, "size.delete", format!("sizes/{id}"));
        let take = |objects: &mut Objects| _ = objects.sizes.remove(id);
        self.record(&entry, Some(&before), None, take).await
    }

    /// A size.
    pub(crate) fn size(&self, id: &str) -> Option<SizeObject> {
        self.checkpoint.objects().sizes.get(id).copied()
    }

    /// An organisation.
    pub(crate) fn organisation(&self, id: &str) -> Option<Ancestor> {
        let configured = self.configured.organisations.get(id).cloned();
        configured.or_else(|| self.checkpoint.objects().organisations.get(id).cloned())
    }

    /// A project.
    pub(crate) fn project(&self, id: &str) -> Option<Ancestor> {
        let configured = self.configured.projects.get(id).cloned();
        configured.or_else(|| self.checkpoint.objects().projects.get(id).cloned())
    }

    /// A VM as units and launcher know it, whoever named its project.
    pub(crate) fn spec(&self, vm: &VmObject) -> VmSpec {
        let number = |ancestor: Option<Ancestor>| ancestor.map_or(0, |ancestor| ancestor.number);
        VmSpec {
            project: number(vm.project.as_deref().and_then(|id| self.project(id))),
            organisation: number(vm.organisation.as_deref().and_then(|id| self.organisation(id))),
            ..vm.spec()
        }
    }

    /// Fills in what a request leaves open, and checks what does not depend on others.
    pub(crate) fn complete(&self, mut wanted: VmObject) -> Result<VmObject, Error> {
        if let Some(id) = &wanted.project {
            let project =
                self.project(id).ok_or_else(|| Error::contradiction(format!("there is no project {id}")))?;
            if wanted.organisation.is_some() && wanted.organisation != project.organisation {
                return Err(Error::contradiction(format!("project {id} is of another organisation")));
            }
            wanted.organisation = project.organisation;
        }
        if let Some(id) = &wanted.organisation
            && self.organisation(id).is_none()
        {
            return Err(Error::contradiction(format!("there is no organisation {id}")));
        }
        if wanted.memory == 0 {
            wanted.memory = self.configuration.memory.0;
        }
        if wanted.memory != 0 && wanted.guaranteed > wanted.memory {
            return Err(Error::contradiction("more memory is guaranteed than the VM may have"));
        }
        let Shares { cap_permille: cap, guarantee_permille: guarantee, .. } = wanted.shares;
        if cap != 0 && guarantee > cap {
            return Err(Error::contradiction("more of a unit's time is guaranteed than the VM may have"));
        }
        Ok(wanted)
    }

    /// Whether those whose VM it is have as much.
    fn admit(&self, id: &str, wanted: &VmObject) -> Result<(), Error> {
        let objects = self.checkpoint.objects();
        for (kind, name) in [("project", &wanted.project), ("organisation", &wanted.organisation)] {
            let Some(name) = name else { continue };
            let ancestor = if kind == "project" { self.project(name) } else { self.organisation(name) };
            let Some(ancestor) = ancestor else { continue };
            let others: Vec<_> = objects
                .vms
                .iter()
                .filter(|(other, vm)| {
                    let of = if kind == "project" { &vm.project } else { &vm.organisation };
                    *other != id && of.as_ref() == Some(name)
                })
                .collect();
            if ancestor.vms.is_some_and(|most| others.len() >= usize::try_from(most).unwrap_or(usize::MAX)) {
                let message = format!("{kind} {name} has {} VMs and may have no more", others.len());
                return Err(Error::new(Code::QuotaExceeded, message));
            }
            let promised =
                others.iter().map(|(_, vm)| vm.guaranteed).fold(wanted.guaranteed, u64::saturating_add);
            let most = wanted.memory.max(promised);
            if most > ancestor.memory {
                let message =
                    format!("{kind} {name} has {} bytes, which is less than {most}", ancestor.memory);
                return Err(Error::new(Code::QuotaExceeded, message));
            }
        }
        Ok(())
    }

    /// A number for a new VM: the one that is its name, or one that nobody has.
    fn number_for(&self, id: &str) -> Result<u32, Error> {
        let Some(range) = self.configuration.vm_numbers else {
            let message = "no VM can be made at run time: the configuration has no vm-numbers";
            return Err(Error::new(Code::QuotaExceeded, message));
        };
        let objects = self.checkpoint.objects();
        let mut taken: BTreeSet<u32> = objects.vms.values().map(|vm| vm.number).collect();
        taken.extend(self.roster.all().iter().map(|vm| vm.id()));
        // Something is left of a VM that is gone.
        let is_free = |number: u32| {
            range.contains(number) && !taken.contains(&number) && self.checkpoint.admitted(number).is_some()
        };
        if id.bytes().all(|byte| byte.is_ascii_digit()) {
            let number = id.parse().ok().filter(|number| range.contains(*number));
            let number = number.filter(|number| number.to_string() == id).ok_or_else(|| {
                Error::contradiction(format!("{id} is a number, but not one of vm-numbers = \"{range}\""))
            })?;
            let in_use = || Error::new(Code::InUse, format!("the number {number} is another VM's"));
            return Some(number).filter(|number| is_free(*number)).ok_or_else(in_use);
        }
        // Round and round, so that a number is not another's for as long as can be.
        let behind = range.numbers().filter(|number| *number > objects.last_vm);
        let mut numbers = behind.chain(range.numbers());
        numbers.find(|number| is_free(*number)).ok_or_else(|| {
            Error::new(Code::QuotaExceeded, format!("all numbers of vm-numbers = \"{range}\" are taken"))
        })
    }

    fn ancestor_number(&self) -> u32 {
        let objects = self.checkpoint.objects();
        let configured = self.configuration.ancestors.iter().map(|ancestor| ancestor.id).max().unwrap_or(0);
        objects.last_ancestor.max(ANCESTORS).max(configured).saturating_add(1)
    }

    fn manage(&self, caller: &Caller, name: &str) -> Result<(Known, Rc<Vm>), Error> {
        let (known, vm) = self.see(caller, name)?;
        known.may_be_managed(caller)?;
        Ok((known, vm))
    }

    pub(crate) fn lock(&self, id: &str) -> Rc<Mutex<()>> {
        let mut locks = self.locks.borrow_mut();
        // Of those nobody holds there is none but here.
        locks.retain(|_, lock| Rc::strong_count(lock) > 1);
        Rc::clone(locks.entry(id.to_owned()).or_default())
    }

    fn notify(&self, notice: Notice) {
        // Heard by nobody while everything ends.
        _ = self.notices.send(notice);
    }

    /// Notes a change of what clients have made, and has it written.
    async fn record<T: Serialize>(
        &self,
        entry: &Entry<'_>,
        before: Option<T>,
        after: Option<T>,
        change: impl FnOnce(&mut Objects),
    ) -> Result<(), Error> {
        entry.note(before, after).await?;
        entry.made(self.checkpoint.change_objects(change).await).await
    }
}

/// The authority with which a caller fences, drains and readmits.
fn authority(caller: &Caller) -> FencedBy {
    if caller.may_operate().is_ok() { FencedBy::Operator } else { FencedBy::Tenant }
}

fn held_error(id: &str) -> Error {
    Error::forbidden(format!(
        "VM {id} was fenced or drained by an operator or a policy: an operator ends that"
    ))
}

fn unclean(id: &str) -> Error {
    let message =
        format!("VM {id} is fenced and not everything of it is clean yet; its memory stays its own");
    Error::new(Code::Unclean, message)
}

fn configured_error(kind: &str, id: &str) -> Error {
    Error::new(Code::Configured, format!("{kind} {id} is of the configuration file; change it there"))
}

/// Refuses a quota in which no session can start: one context of the driver, and what it may take beside it, need more.
fn large_enough(vm: &VmObject, units: &[Rc<Unit>]) -> Result<(), Error> {
    let has = vm.memory.saturating_add(vm.headroom);
    let small = units.iter().find(|unit| vm.memory > 0 && has < unit.least_quota());
    small.map_or(Ok(()), |unit| {
        let (least, number) = (unit.least_quota(), unit.number());
        let message = format!(
            "{has} bytes are too few on unit {number}: a context of its driver and its margin take {least} of the quota"
        );
        Err(Error::new(Code::Contradiction, message))
    })
}

fn readmission_error(id: &str, error: ReadmitError) -> Error {
    let code = match &error {
        ReadmitError::Checkpoint(_) => Code::StorageFailed,
        ReadmitError::Admission(AdmissionError::Active) => Code::NotFenced,
        ReadmitError::Admission(AdmissionError::Underway) => Code::FenceUnderway,
        ReadmitError::Admission(AdmissionError::Unclean) => Code::Unclean,
        ReadmitError::Admission(AdmissionError::Held) => Code::Forbidden,
    };
    Error::new(code, format!("VM {id} is not admitted")).because(error)
}

/// The VMs and projects that there are, as their figures are kept.
pub(crate) fn identities(all: &[&Objects]) -> (Vec<VmIdentity>, Vec<ProjectIdentity>) {
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
    let vms = all.iter().flat_map(|objects| objects.vms.iter().map(vm)).collect();
    (vms, all.iter().flat_map(|objects| objects.projects.iter().map(project)).collect())
}
