//! The placer: the plan of [`sluice_placement`], which maps VMs to units, and the instances made and unmade for it.
//!
//! It owns the plan. A change of the plan is written down before anything is made for it, so that a daemon that is killed
//! leaves nothing behind that the next one does not know; an instance without a record is foreign and is never touched. The
//! placer must never decide where a VM goes: the plan decides that.

use std::{
    cell::{Cell, RefCell},
    collections::{BTreeMap, BTreeSet},
    io,
    rc::Rc,
    sync::Arc,
    time::{Duration, Instant},
};

use sha2::{Digest as _, Sha256};
use sluice_api::{
    Code, Error,
    v1::{Isolation, Policy},
};
use sluice_messages::inventory::{Instance, Place as InstancePlace, Switch, Visible, WHOLE};
use sluice_placement::{
    Answer, Apart, Attributes, Class, Decision, Division, Fleet, Foreign, Geometry, Gpu, Identity, Listed,
    Phase, PlaceError, Placement as Position, PlanError, Profile, Refusal, Request, Rules, Spot, Standing,
    Step, Strictness, Target, UnitId, VmId, Whom,
};
use sluice_protocol::limits;
use tokio::{
    sync::{Mutex, MutexGuard},
    task::spawn_local,
    time::sleep,
};

use crate::{
    configuration::Configuration,
    handover::launching::Launching,
    records::journal::Journal,
    records::notice::{Notice, Notices},
    records::state::{
        checkpoint::Checkpoint,
        objects::{Home, Objects, Plan, VmObject},
    },
    units::inventory::{AskError, Inventory, Kind},
    units::set::Units,
    units::unit::{Place, Unit},
};

/// Units where neither NVML nor the configuration says how many there are.
const UNITS: u32 = 1;
/// Bytes of a device of which nobody says how many it has.
const UNKNOWN: u64 = 1 << 60;

/// A device, as it was found at the start.
#[derive(Clone, Debug)]
pub(crate) struct Found {
    pub(crate) ordinal: u32,
    pub(crate) uuid: [u8; 16],
    /// Nothing where NVML does not say.
    pub(crate) name: Option<String>,
    pub(crate) node: Option<u32>,
    pub(crate) division: Division,
    /// Whether that changes with its next reset.
    pub(crate) switching: bool,
    /// Names of the kinds of instances it can be divided into.
    pub(crate) kinds: BTreeMap<u32, String>,
}

impl Found {
    /// Whether all of it is one unit.
    pub(crate) fn is_whole(&self) -> bool {
        matches!(self.division, Division::Whole { .. })
    }

    /// What of it a unit is that is all of it.
    pub(crate) fn place(&self, alone: bool) -> Place {
        let visible = match self.name {
            // As it has always been: a process on a host with one device needs no choice.
            _ if alone => Visible::Host,
            Some(_) => Visible::Gpu(self.uuid),
            None => Visible::Ordinal(self.ordinal),
        };
        Place { visible, ..Place::device(self.ordinal) }
    }
}

/// Looks for the devices there are, and how each can be used.
pub(crate) async fn survey(configuration: &Configuration, inventory: Option<&Inventory>) -> Vec<Found> {
    let counted = match inventory {
        Some(inventory) if configuration.units.is_none() => {
            let counted = inventory.units().await;
            if counted.is_none() {
                tracing::error!("NVML does not say how many devices there are");
            }
            counted
        }
        _ => None,
    };
    let count = configuration.units.or(counted).unwrap_or(UNITS).min(limits::DEVICES);
    if count == 0 {
        tracing::warn!("no unit is configured: VMs have no devices");
    }
    // One that does not answer once is not waited for again and again.
    let mut inventory = inventory.filter(|_| configuration.units.is_some() || counted.is_some());
    let mut all = Vec::new();
    for ordinal in 0..count {
        let found = match inventory {
            Some(asked) => look(asked, ordinal, configuration.reserve).await,
            None => Ok(None),
        };
        if found.is_err() {
            inventory = None;
        }
        all.push(found.ok().flatten().unwrap_or_else(|| Found {
            ordinal,
            // Of no real device; the same after a restart.
            uuid: u128::from(ordinal).to_be_bytes(),
            name: None,
            node: None,
            division: Division::Whole { memory_bytes: UNKNOWN, multiprocessors: u32::MAX },
            switching: false,
            kinds: BTreeMap::new(),
        }));
    }
    all
}

/// What NVML says of a device; nothing where it refuses to.
async fn look(inventory: &Inventory, ordinal: u32, reserve: u64) -> Result<Option<Found>, AskError> {
    let silent = |error| if error == AskError::Silent { Err(error) } else { Ok(None) };
    let device = match inventory.device(ordinal).await {
        Ok(device) => device,
        Err(error) => return silent(error),
    };
    let (divided, pending) = match inventory.health(ordinal).await {
        Ok(health) => (health.mig.0 == Switch::On, health.mig.1 == Switch::On),
        Err(error) => return silent(error),
    };
    let mut found = Found {
        ordinal,
        uuid: device.uuid,
        name: Some(device.name),
        node: device.node,
        division: Division::Whole {
            memory_bytes: device.memory.saturating_sub(reserve),
            multiprocessors: if device.multiprocessors == 0 { u32::MAX } else { device.multiprocessors },
        },
        switching: divided != pending,
        kinds: BTreeMap::new(),
    };
    if divided {
        let kinds = match inventory.kinds(ordinal).await {
            Ok(kinds) => kinds,
            Err(error) => return silent(error),
        };
        found.kinds = kinds.iter().map(|kind| (kind.profile.id, kind.name.clone())).collect();
        match Geometry::from_profiles(kinds.iter().map(profile).collect()) {
            Ok(geometry) => found.division = Division::Mig(Arc::new(geometry)),
            Err(error) => {
                tracing::error!("GPU {ordinal} is in MIG mode and cannot be divided: {error}");
                return Ok(None);
            }
        }
    }
    Ok(Some(found))
}

/// A kind of instance, as the plan takes it.
fn profile(kind: &Kind) -> Profile {
    let reported = &kind.profile;
    let engines = reported.engines;
    Profile {
        id: reported.id,
        memory_slices: kind.places.first().map_or(0, |place| place.size),
        compute_slices: u8::try_from(reported.slices).unwrap_or(u8::MAX),
        instances: u16::try_from(reported.instances).unwrap_or(u16::MAX),
        placements: kind
            .places
            .iter()
            .map(|place| Position { start: place.start, size: place.size })
            .collect(),
        memory_bytes: reported.memory,
        multiprocessors: reported.multiprocessors,
        attributes: Attributes {
            copy_engines: engines.copy.into(),
            decoders: engines.decoder.into(),
            encoders: engines.encoder.into(),
            jpeg: engines.jpeg.into(),
            optical_flow: engines.ofa.into(),
        },
    }
}

/// What the plan calls a VM or a group: a number of its name, so that one can be named that is not there yet.
fn number_of(name: &str) -> u64 {
    let digest: [u8; 32] = Sha256::digest(name).into();
    let [a, b, c, d, e, f, g, h, ..] = digest;
    u64::from_be_bytes([a, b, c, d, e, f, g, h])
}

/// What the plan calls a VM.
pub(crate) fn vm_id(name: &str) -> VmId {
    VmId(number_of(name))
}

/// What the plan calls the organisation of a VM, or its project where that has no organisation.
fn organisation_id(vm: &VmObject) -> Option<u64> {
    let scope = vm.host_name("");
    (!scope.is_empty()).then(|| number_of(&scope))
}

/// The VMs and groups that a VM keeps away from. It names them as its own organisation calls them, so that it neither
/// reaches nor finds out another organisation's.
fn anti_affinity(vm: &VmObject) -> Vec<Apart> {
    let apart = vm.placement.apart.iter().map(|apart| Apart {
        from: match (&apart.vm, &apart.group) {
            (Some(name), _) => Whom::Vm(vm_id(&vm.host_name(name))),
            (None, group) => Whom::Group(number_of(&vm.host_name(group.as_deref().unwrap_or_default()))),
        },
        never: !apart.preferred,
    });
    apart.collect()
}

/// A place that is held for a VM.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Held {
    vm: VmId,
    pub(crate) unit: UnitId,
}

impl Held {
    /// A place that is held for a VM already.
    pub(crate) const fn of(vm: VmId, unit: UnitId) -> Self {
        Self { vm, unit }
    }
}

/// Where a unit is, for people.
#[derive(Clone, Debug)]
pub(crate) struct Spotted {
    pub(crate) unit: u32,
    pub(crate) gpu: u32,
    pub(crate) profile: Option<(u32, Option<String>)>,
    pub(crate) placement: Option<Position>,
    pub(crate) shared: bool,
    pub(crate) members: usize,
}

/// What a placer is made of.
#[derive(Debug)]
pub(crate) struct Parts {
    pub(crate) configuration: Rc<Configuration>,
    pub(crate) launching: Rc<Launching>,
    pub(crate) inventory: Option<Rc<Inventory>>,
    pub(crate) checkpoint: Rc<Checkpoint>,
    pub(crate) notices: Notices,
    pub(crate) journal: Arc<Journal>,
    pub(crate) units: Rc<Units>,
}

/// The placer.
#[derive(Debug)]
pub(crate) struct Placer {
    parts: Parts,
    /// The devices: how one is divided can change, which there are cannot.
    found: RefCell<Vec<Rc<Found>>>,
    fleet: RefCell<Fleet>,
    names: RefCell<BTreeMap<VmId, String>>,
    /// What units of the plan are called everywhere else.
    numbers: RefCell<BTreeMap<UnitId, u32>>,
    /// GPUs that are being emptied, by ordinal.
    draining: RefCell<BTreeSet<u32>>,
    /// Instances that are being emptied, by the numbers of their units.
    draining_units: RefCell<BTreeSet<u32>>,
    /// GPUs that are divided, or not any more, from their next reset on; nobody is on them.
    switching: RefCell<BTreeSet<usize>>,
    /// Per GPU: what is made and unmade on it is so one after the other. GPUs do not wait for each other.
    turns: Vec<Mutex<()>>,
    /// Whether the plan is being written after it was tidied.
    tidying: Cell<bool>,
    /// Units that VMs have left for others that are not there yet: perhaps they come back.
    left: RefCell<Vec<UnitId>>,
    start: Instant,
}

/// A unit that is kept though nobody may be on it, for as long as this lives.
#[derive(Debug)]
pub(crate) struct Kept<'a> {
    placer: &'a Placer,
    unit: UnitId,
}

impl Drop for Kept<'_> {
    fn drop(&mut self) {
        let mut left = self.placer.left.borrow_mut();
        if let Some(at) = left.iter().position(|left| *left == self.unit) {
            left.swap_remove(at);
        }
    }
}

impl Placer {
    pub(crate) fn new(parts: Parts, found: Vec<Found>) -> Rc<Self> {
        let residents: BTreeSet<_> =
            Objects::configured(&parts.configuration).vms.values().map(organisation_id).collect();
        let gpu = |found: &Found| {
            let division = match &found.division {
                Division::Whole { memory_bytes, multiprocessors } => Division::Whole {
                    memory_bytes: memory_bytes.saturating_sub(parts.configuration.promised_on(found.ordinal)),
                    multiprocessors: *multiprocessors,
                },
                divided => divided.clone(),
            };
            let mut gpu = Gpu::new(found.uuid, found.node, division);
            if parts.configuration.has_vms_on(found.ordinal) {
                gpu.residents = residents.clone();
            }
            gpu
        };
        // Of one that is emptied for that; others are used until they are reset.
        let drained = parts.checkpoint.objects().plan.draining.clone();
        let waits = |(at, found): (usize, &Found)| {
            (found.switching && drained.contains(&found.ordinal)).then_some(at)
        };
        let switching = found.iter().enumerate().filter_map(waits).collect();
        let rules = Rules {
            overcommit_permille: parts.configuration.overcommit_permille,
            share_unmeasured: parts.configuration.share_unmeasured_between_organisations,
            ..Rules::default()
        };
        let fleet = Fleet::new(rules, found.iter().map(gpu).collect());
        Rc::new(Self {
            parts,
            turns: found.iter().map(|_| Mutex::default()).collect(),
            tidying: Cell::default(),
            left: RefCell::default(),
            found: RefCell::new(found.into_iter().map(Rc::new).collect()),
            fleet: RefCell::new(fleet),
            names: RefCell::default(),
            numbers: RefCell::default(),
            draining: RefCell::default(),
            draining_units: RefCell::default(),
            switching: RefCell::new(switching),
            start: Instant::now(),
        })
    }

    fn now(&self) -> Duration {
        self.start.elapsed()
    }

    /// The devices, as they were found.
    pub(crate) fn found(&self) -> Vec<Rc<Found>> {
        self.found.borrow().clone()
    }

    /// A device, by its index in the plan.
    pub(crate) fn device(&self, gpu: usize) -> Option<Rc<Found>> {
        self.found.borrow().get(gpu).cloned()
    }

    /// The index in the plan of a device.
    pub(crate) fn index_of(&self, ordinal: u32) -> Option<usize> {
        self.found.borrow().iter().position(|found| found.ordinal == ordinal)
    }

    /// A unit for every device that is not divided.
    pub(crate) fn whole_units(&self) -> Vec<Rc<Unit>> {
        let switching = self.switching.borrow();
        let found = self.found();
        let whole =
            found.iter().enumerate().filter(|(at, device)| device.is_whole() && !switching.contains(at));
        whole.map(|(_, device)| self.whole_unit(device)).collect()
    }

    fn whole_unit(&self, device: &Found) -> Rc<Unit> {
        let alone = self.found.borrow().len() == 1;
        self.new_unit(device.ordinal, device.place(alone))
    }

    fn new_unit(&self, number: u32, place: Place) -> Rc<Unit> {
        let Parts { configuration, launching, inventory, checkpoint, notices, .. } = &self.parts;
        Unit::new(
            number,
            place,
            Rc::clone(configuration),
            Rc::clone(launching),
            inventory.clone(),
            Rc::clone(checkpoint),
            notices.clone(),
        )
    }

    /// Keeps a unit that a VM is about to leave, until it is known that it does not come back.
    pub(crate) fn keep(&self, unit: UnitId) -> Kept<'_> {
        self.left.borrow_mut().push(unit);
        Kept { placer: self, unit }
    }

    /// Waits until nothing is made or unmade on a GPU, and has others wait.
    async fn turn(&self, gpu: usize) -> Option<MutexGuard<'_, ()>> {
        Some(self.turns.get(gpu)?.lock().await)
    }

    /// The plan, to look at.
    pub(crate) fn fleet(&self) -> std::cell::Ref<'_, Fleet> {
        self.fleet.borrow()
    }

    /// The plan, to be changed by who carries the change out.
    pub(crate) fn fleet_mut(&self) -> std::cell::RefMut<'_, Fleet> {
        self.fleet.borrow_mut()
    }

    /// What a VM of the plan is called.
    pub(crate) fn name(&self, vm: VmId) -> Option<String> {
        self.names.borrow().get(&vm).cloned()
    }

    /// The kind of instance that a client names, by number or by name.
    pub(crate) fn profile(&self, name: &str) -> Result<u32, Error> {
        let plain = |name: &str| name.trim_start_matches("MIG ").to_ascii_lowercase();
        let found = self.found();
        let mut kinds = found.iter().flat_map(|found| &found.kinds);
        let named = kinds.find(|(_, known)| plain(known) == plain(name)).map(|(number, _)| *number);
        named.or_else(|| name.parse().ok()).ok_or_else(|| {
            let kinds = found.iter().flat_map(|found| &found.kinds);
            let known: BTreeSet<String> = kinds.map(|(_, known)| plain(known)).collect();
            let message = format!("no GPU has a profile {name}");
            Error { cause: vec![format!("there are {known:?}")], ..Error::new(Code::Contradiction, message) }
        })
    }

    /// What a VM asks of its place.
    pub(crate) fn request(&self, id: &str, vm: &VmObject) -> Request {
        let placement = &vm.placement;
        let class = match u16::try_from(vm.shares.guarantee_permille) {
            Ok(permille @ 1..) => Class::Guaranteed { permille },
            _ => Class::Burstable { floor_bytes: vm.guaranteed },
        };
        Request {
            policy: match placement.policy {
                Policy::Mig => sluice_placement::Policy::Mig,
                Policy::TimeSlice => sluice_placement::Policy::TimeSlice,
                Policy::Any => sluice_placement::Policy::Any,
            },
            strictness: match placement.isolation {
                Isolation::Shared => Strictness::Shared,
                Isolation::Strict => Strictness::Unit,
                Isolation::StrictPlus => Strictness::Gpu,
            },
            organisation: organisation_id(vm),
            overhead_bytes: vm.headroom,
            multiprocessors: placement.multiprocessors,
            replicas: placement.replicas,
            profile: placement.profile,
            allow_larger: placement.allow_larger,
            class,
            weight: vm.shares.weight,
            apart: anti_affinity(vm),
            numa: placement.numa_node,
            pin: placement.gpu.map(|gpu| sluice_placement::Pin {
                gpu: usize::try_from(gpu).unwrap_or(usize::MAX),
                start: placement.start,
            }),
            // One without a quota takes what there is: only what is kept for it counts.
            ..Request::new(vm_id(id), if vm.memory == 0 { vm.guaranteed } else { vm.memory })
        }
    }

    /// Where a VM would go. One without a quota is alone on a device while there is an empty one.
    pub(crate) fn decide(&self, request: &Request, unlimited: bool) -> Result<Decision, Refusal> {
        self.look_around();
        self.decide_on(&self.fleet.borrow(), request, unlimited)
    }

    /// The same on a plan that may be a copy.
    pub(crate) fn decide_on(
        &self,
        fleet: &Fleet,
        request: &Request,
        unlimited: bool,
    ) -> Result<Decision, Refusal> {
        if unlimited
            && request.policy != sluice_placement::Policy::Mig
            && request.strictness == Strictness::Shared
        {
            let alone = Request {
                strictness: Strictness::Unit,
                policy: sluice_placement::Policy::TimeSlice,
                ..request.clone()
            };
            if let Ok(Decision::Open { gpu, spot: Spot::Whole, .. }) = fleet.decide(&alone) {
                return Ok(Decision::Open { gpu, spot: Spot::Whole, shared: true });
            }
        }
        self.beside_configured(fleet, request, |fleet| fleet.decide(request))
    }

    /// Where a VM that has a place would go otherwise.
    pub(crate) fn decide_move(&self, request: &Request) -> Result<Decision, Refusal> {
        self.look_around();
        let fleet = self.fleet.borrow();
        self.beside_configured(&fleet, request, |fleet| fleet.decide_move(request))
    }

    /// Where a VM would go that is to leave its place by a plan, if it must not be beside VMs of the configuration file, which
    /// plans do not know.
    pub(crate) fn decide_again(&self, vm: VmId) -> Option<Result<Decision, Refusal>> {
        let request = {
            let fleet = self.fleet.borrow();
            let members = fleet.unit(fleet.home(vm)?)?.members();
            members.iter().find(|member| member.request.vm == vm)?.request.clone()
        };
        (request.strictness != Strictness::Shared).then(|| self.decide_move(&request))
    }

    /// Decides where devices that VMs of the configuration file are on do not count, if they must not be shared: the plan does not
    /// know those VMs.
    fn beside_configured(
        &self,
        fleet: &Fleet,
        request: &Request,
        decide: impl Fn(&Fleet) -> Result<Decision, Refusal>,
    ) -> Result<Decision, Refusal> {
        if request.strictness == Strictness::Shared {
            return decide(fleet);
        }
        let found = self.found.borrow();
        let shared = found
            .iter()
            .enumerate()
            .filter(|(_, found)| found.is_whole() && self.parts.configuration.has_vms_on(found.ordinal));
        let mut rest = fleet.clone();
        for (at, _) in shared {
            _ = rest.set_gpu_standing(at, Standing::Draining);
        }
        decide(&rest).map_err(|refusal| match decide(fleet) {
            // There would be room, but for them.
            Ok(_) => Refusal::Apart,
            Err(_) => refusal,
        })
    }

    /// Has the plan know what is quarantined by now, what is clean, and what can be lent.
    pub(crate) fn look_around(&self) {
        let mut fleet = self.fleet.borrow_mut();
        let draining = self.draining.borrow();
        for (at, found) in self.found.borrow().iter().enumerate() {
            let quarantined = found.is_whole() && self.parts.checkpoint.quarantine(found.ordinal).is_some();
            let waits = self.switching.borrow().contains(&at);
            let standing = match (quarantined, waits || draining.contains(&found.ordinal)) {
                (true, _) => Standing::Quarantined,
                (false, true) => Standing::Draining,
                (false, false) => Standing::Open,
            };
            if let Some(unit) = self.parts.units.get(found.ordinal) {
                _ = fleet.set_gpu_measured(at, unit.has_figures());
            }
            // A GPU whose instances contradict themselves stays as it is.
            let contradicts =
                !quarantined && fleet.gpus().get(at).is_some_and(|gpu| gpu.standing == Standing::Quarantined);
            if !contradicts || found.is_whole() {
                _ = fleet.set_gpu_standing(at, standing);
            }
        }
        for (unit, number) in self.numbers.borrow().iter() {
            let quarantined = self.parts.checkpoint.quarantine(*number).is_some();
            let standing = match (quarantined, self.draining_units.borrow().contains(number)) {
                (true, _) => Standing::Quarantined,
                (false, true) => Standing::Draining,
                (false, false) => Standing::Open,
            };
            _ = fleet.set_unit_standing(*unit, standing);
            let room = self.parts.units.get(*number);
            let Some((room, lendable)) = room.and_then(|room| Some((Rc::clone(&room), room.lendable()?)))
            else {
                continue;
            };
            // Arbiters lend only what they have swept.
            _ = fleet.proven_clean(*unit);
            if fleet.unit(*unit).is_some_and(|unit| unit.shared) {
                // Nor what could not be proven clean. What drivers take is part of quotas.
                let kept = room.last().map_or(0, |report| report.suspect);
                let of_file = |device| self.parts.configuration.promised_on(device);
                let promised = if room.place().is_whole() { of_file(room.place().device) } else { 0 };
                let left = lendable.saturating_sub(kept).saturating_sub(promised);
                _ = fleet.set_unit_memory(*unit, left);
            }
        }
    }

    /// Holds a place for a VM. Nothing is made yet.
    pub(crate) fn hold(&self, id: &str, vm: &VmObject) -> Result<Option<Held>, Error> {
        if self.found.borrow().is_empty() {
            return Ok(None);
        }
        let request = self.request(id, vm);
        let held = self
            .decide(&request, vm.memory == 0)
            .map_err(PlaceError::from)
            .and_then(|decision| Ok(self.fleet.borrow_mut().reserve(&request, decision)?));
        let unit = held.map_err(|error| self.refused(id, error))?;
        self.give_number(unit);
        self.take_whole(unit);
        self.names.borrow_mut().insert(request.vm, id.to_owned());
        Ok(Some(Held { vm: request.vm, unit }))
    }

    /// A unit that is new to the plan has a number from here on.
    pub(crate) fn give_number(&self, unit: UnitId) {
        let fleet = self.fleet.borrow();
        let Some(planned) = fleet.unit(unit) else { return };
        let mut numbers = self.numbers.borrow_mut();
        if numbers.contains_key(&unit) {
            return;
        }
        let number = match planned.spot {
            Spot::Whole => self.device(planned.gpu).map(|found| found.ordinal),
            Spot::Instance { .. } => {
                let taken: BTreeSet<u32> = numbers.values().copied().collect();
                (limits::DEVICES..limits::UNITS).find(|number| !taken.contains(number))
            }
        };
        if let Some(number) = number {
            numbers.insert(unit, number);
        }
    }

    /// A unit is gone: its number is another's.
    fn take_number(&self, unit: UnitId) {
        if let Some(number) = self.numbers.borrow_mut().remove(&unit) {
            self.draining_units.borrow_mut().remove(&number);
        }
    }

    /// A whole device needs nothing to be made.
    fn take_whole(&self, unit: UnitId) {
        let mut fleet = self.fleet.borrow_mut();
        let whole =
            fleet.unit(unit).is_some_and(|unit| unit.spot == Spot::Whole && unit.phase == Phase::Reserved);
        if whole && let Err(error) = fleet.created(unit, None) {
            tracing::error!("a whole device is not taken: {error}");
        }
    }

    /// A VM that was to be moved is where it was; false where that is gone.
    pub(crate) fn take_back(&self, vm: VmId, from: UnitId) -> bool {
        let mut fleet = self.fleet.borrow_mut();
        let Some(home) = fleet.home(vm) else { return false };
        let member =
            fleet.unit(home).and_then(|unit| unit.members().iter().find(|member| member.request.vm == vm));
        let Some(request) = member.map(|member| member.request.clone()) else { return false };
        _ = fleet.leave(vm);
        let there = fleet.unit(from).is_some_and(|unit| !matches!(unit.phase, Phase::Closing(_)));
        there && fleet.rejoin(from, request, true).is_ok()
    }

    /// A VM is on no unit any more. Units that are empty then are closed by [`Self::tidy`].
    pub(crate) fn leave(&self, id: &str) {
        let vm = vm_id(id);
        self.names.borrow_mut().remove(&vm);
        // One that has no place has left already.
        _ = self.fleet.borrow_mut().leave(vm);
    }

    /// Gives a place back.
    pub(crate) fn release(self: &Rc<Self>, id: &str, held: Option<Held>) {
        if let Some(held) = held {
            debug_assert_eq!(held.vm, vm_id(id), "a place of another");
            self.leave(id);
            self.tidy();
        }
    }

    /// A VM that is on a unit has other wishes: they hold from now on, if the unit has room for them.
    pub(crate) fn change(&self, id: &str, wanted: &VmObject) -> Result<(), Error> {
        let request = self.request(id, wanted);
        let mut fleet = self.fleet.borrow_mut();
        let Some(home) = fleet.home(request.vm) else { return Ok(()) };
        let Some(unit) = fleet.unit(home) else { return Ok(()) };
        let (shared, memory_bytes) = (unit.shared, unit.memory_bytes);
        let before = unit.members().iter().find(|member| member.request.vm == request.vm).cloned();
        let Some(before) = before.filter(|before| before.request != request) else { return Ok(()) };
        let fits = if shared {
            let mut trial = fleet.clone();
            trial.leave(request.vm).and_then(|_| trial.reserve(&request, Decision::Join(home))).is_ok()
        } else {
            request.memory_bytes() <= memory_bytes
        };
        if !fits {
            let message =
                format!("the unit of VM {id} has not as much; make it anew, and it gets another place");
            return Err(Error::new(Code::PlacementUnavailable, message));
        }
        _ = fleet.leave(request.vm);
        fleet.rejoin(home, request, before.idle).map_err(|error| internal(&error))
    }

    /// A VM has the wishes again that it had before a change: they were promised, whoever has come to its unit meanwhile.
    pub(crate) fn change_back(&self, id: &str, before: &VmObject) {
        let request = self.request(id, before);
        let mut fleet = self.fleet.borrow_mut();
        let Some(home) = fleet.home(request.vm) else { return };
        _ = fleet.leave(request.vm);
        if let Err(error) = fleet.rejoin(home, request, false) {
            tracing::error!("VM {id} has lost its place: {error}");
        }
    }

    /// What is to be written down.
    pub(crate) fn plan(&self) -> Plan {
        let fleet = self.fleet.borrow();
        let names = self.names.borrow();
        let members = fleet
            .units()
            .flat_map(|unit| unit.members().iter().map(move |member| (unit.id, &member.request)))
            .filter_map(|(unit, request)| {
                Some((names.get(&request.vm)?.clone(), Home { unit, request: request.clone() }))
            });
        Plan {
            records: fleet.records(),
            highest: fleet.highest(),
            numbers: self.numbers.borrow().iter().map(|(unit, number)| (unit.0, *number)).collect(),
            homes: members.collect(),
            draining: self.draining.borrow().clone(),
            draining_units: self.draining_units.borrow().clone(),
        }
    }

    /// Writes it down, as it is when its turn comes.
    pub(crate) async fn write(&self) -> io::Result<()> {
        self.parts.checkpoint.change_objects(|objects| objects.plan = self.plan()).await
    }

    async fn write_or_log(self: Rc<Self>) {
        if let Err(error) = self.write().await {
            tracing::error!("the plan cannot be written: {error}");
        }
        self.tidying.set(false);
    }

    /// The unit that a VM is on, if it is there.
    pub(crate) fn unit_of(&self, id: &str) -> Option<Rc<Unit>> {
        let home = self.fleet.borrow().home(vm_id(id))?;
        self.unit(home)
    }

    /// A unit of the plan, if it is there.
    fn unit(&self, unit: UnitId) -> Option<Rc<Unit>> {
        let number = *self.numbers.borrow().get(&unit)?;
        self.parts.units.get(number)
    }

    /// Where a unit of the plan is.
    pub(crate) fn spotted(&self, unit: UnitId) -> Option<Spotted> {
        let fleet = self.fleet.borrow();
        let planned = fleet.unit(unit)?;
        let found = self.device(planned.gpu)?;
        let (profile, placement) = match planned.spot {
            Spot::Whole => (None, None),
            Spot::Instance { profile, placement } => {
                (Some((profile, found.kinds.get(&profile).cloned())), Some(placement))
            }
        };
        Some(Spotted {
            unit: *self.numbers.borrow().get(&unit)?,
            gpu: found.ordinal,
            profile,
            placement,
            shared: planned.shared,
            members: planned.members().len(),
        })
    }

    /// Where a VM is.
    pub(crate) fn whereabouts(&self, id: &str) -> Option<Spotted> {
        let home = self.fleet.borrow().home(vm_id(id))?;
        self.spotted(home)
    }

    /// The unit of the plan that has a number.
    pub(crate) fn planned(&self, number: u32) -> Option<UnitId> {
        self.numbers.borrow().iter().find(|(_, known)| **known == number).map(|(unit, _)| *unit)
    }

    /// Has a planned unit be there: its instance made, its arbiter started. The plan is written before, and has to be after.
    /// Of several that want the same unit the first has it made, and the others wait for that.
    pub(crate) async fn open(&self, unit: UnitId) -> Result<Rc<Unit>, Error> {
        let gpu = self.fleet.borrow().unit(unit).ok_or_else(|| internal(&PlanError::UnknownUnit))?.gpu;
        self.take_whole(unit);
        if let Some(there) = self.unit(unit) {
            return Ok(there);
        }
        let _turn = self.turn(gpu).await;
        let (spot, reserved) = {
            let fleet = self.fleet.borrow();
            let planned = fleet.unit(unit).ok_or_else(|| internal(&PlanError::UnknownUnit))?;
            (planned.spot, planned.phase == Phase::Reserved)
        };
        let (Spot::Instance { profile, placement }, true) = (spot, reserved) else {
            return self.unit(unit).ok_or_else(|| internal(&PlanError::UnknownUnit));
        };
        let found = self.device(gpu).ok_or_else(|| internal(&PlanError::UnknownGpu))?;
        let number = self.numbers.borrow().get(&unit).copied();
        let number = number.ok_or_else(|| {
            Error::new(Code::PlacementUnavailable, format!("there are {} units already", limits::UNITS))
        })?;
        let inventory = self.parts.inventory.as_ref().ok_or_else(|| internal(&PlanError::UnknownGpu))?;
        let place = InstancePlace { start: placement.start, size: placement.size };
        let generation = *inventory.generation().borrow();
        let made = match inventory.create(found.ordinal, profile, place).await {
            Ok(made) => made,
            Err(error) => {
                if error == AskError::Silent {
                    self.undo(gpu, &found, profile, placement, generation).await;
                }
                let kind = found.kinds.get(&profile).map_or("instance", String::as_str);
                let message = format!(
                    "the driver makes no {kind} on GPU {} at slice {}",
                    found.ordinal, placement.start
                );
                return Err(Error::new(Code::DeviceFailed, message).because(error));
            }
        };
        let identity = Identity { instance: made.gpu, compute_instance: made.compute, uuid: made.uuid };
        let taken = self.fleet.borrow_mut().created(unit, Some(identity));
        if let Err(error) = taken {
            // Nobody wants it any more, and nobody was told of it.
            if let Err(stays) = inventory.destroy(found.ordinal, &made).await {
                tracing::error!("an instance of GPU {} that nobody wants stays: {stays}", found.ordinal);
            }
            return Err(internal(&error));
        }
        Ok(self.begin(number, found.ordinal, &made))
    }

    /// Nobody said whether an instance was made, and the inventory of `generation` is no more. If it was it is unmade, for
    /// nobody else was given its place; where that cannot be, nobody plans on its GPU any more before it has been looked at
    /// anew.
    async fn undo(&self, gpu: usize, found: &Found, profile: u32, placement: Position, generation: u64) {
        let Some(inventory) = &self.parts.inventory else { return };
        let here = (profile, placement.start.into(), placement.size.into());
        let undone = async {
            if !inventory.is_back(generation).await {
                return Err(AskError::Silent);
            }
            let listed = inventory.instances(found.ordinal).await?;
            let made = listed.iter().find(|known| (known.profile, known.start, known.size) == here);
            match made {
                Some(made) => inventory.destroy(found.ordinal, made).await,
                None => Ok(()),
            }
        };
        if let Err(error) = undone.await {
            tracing::error!("an instance of GPU {} that nobody wants may be there: {error}", found.ordinal);
            _ = self.fleet.borrow_mut().set_gpu_standing(gpu, Standing::Quarantined);
        }
    }

    /// Has an arbiter run on an instance.
    fn begin(&self, number: u32, device: u32, made: &Instance) -> Rc<Unit> {
        let visible = Visible::Instance(made.uuid);
        let unit = self.new_unit(number, Place { device, instance: made.gpu, visible });
        self.parts.units.open(Rc::clone(&unit));
        unit
    }

    /// Closes what nobody is on. An instance in quarantine stays until it is readmitted.
    pub(crate) fn tidy(self: &Rc<Self>) {
        let empty: Vec<(UnitId, bool)> = {
            let fleet = self.fleet.borrow();
            let left = self.left.borrow();
            let empty = fleet.units().filter(|unit| unit.members().is_empty() && !left.contains(&unit.id));
            let ends = empty.filter(|unit| !matches!(unit.phase, Phase::Closing(_)));
            ends.map(|unit| (unit.id, unit.spot == Spot::Whole || unit.phase == Phase::Reserved)).collect()
        };
        for (unit, simple) in empty {
            let number = self.numbers.borrow().get(&unit).copied();
            if !simple && number.is_some_and(|number| self.parts.checkpoint.quarantine(number).is_some()) {
                continue;
            }
            let now = self.now();
            match self.fleet.borrow_mut().close(unit, now) {
                Ok(true) => self.take_number(unit),
                Ok(false) => _ = spawn_local(Rc::clone(self).unmake(unit)),
                Err(error) => tracing::error!("an empty unit is not closed: {error}"),
            }
        }
        let plan = self.plan();
        // Nothing is made for it: one write at a time, and what is new then with the next.
        if self.parts.checkpoint.objects().plan != plan && !self.tidying.replace(true) {
            spawn_local(Rc::clone(self).write_or_log());
        }
    }

    /// Unmakes the instance of a unit that is being closed, patiently.
    async fn unmake(self: Rc<Self>, unit: UnitId) {
        let number = self.numbers.borrow().get(&unit).copied();
        if let Some(number) = number {
            // Nobody of ours may hold it.
            self.parts.units.close(number).await;
            _ = self.parts.notices.send(Notice::UnitGone { unit: number });
        }
        loop {
            let step = self.fleet.borrow().closing_step(unit, self.now());
            let step = match step {
                Ok(Step::DestroyCompute | Step::DestroyInstance) => {
                    let answer = self.destroy(unit).await;
                    let now = self.now();
                    self.fleet.borrow_mut().closing_answer(unit, now, answer)
                }
                other => other,
            };
            match step {
                Ok(Step::WaitUntil(then)) => sleep(then.saturating_sub(self.now())).await,
                Ok(Step::DestroyCompute | Step::DestroyInstance) => {}
                Ok(Step::Gone) => {
                    self.take_number(unit);
                    break;
                }
                Ok(Step::Quarantined) => {
                    let detail = format!(
                        "unit {number:?}: its instance cannot be destroyed; it is tried again by and by"
                    );
                    tracing::error!("{detail}");
                    self.parts.journal.note("instance-stuck", None, detail);
                    break;
                }
                Err(error) => {
                    tracing::error!("unit {number:?} is not closed: {error}");
                    break;
                }
            }
        }
        if let Err(error) = self.write().await {
            tracing::error!("the plan cannot be written: {error}");
        }
    }

    async fn destroy(&self, unit: UnitId) -> Answer {
        let gpu = self.fleet.borrow().unit(unit).map(|unit| unit.gpu);
        let _turn = self.turn(gpu.unwrap_or(usize::MAX)).await;
        let what = {
            let fleet = self.fleet.borrow();
            fleet.unit(unit).and_then(|unit| match unit.spot {
                Spot::Instance { profile, placement } => {
                    let identity = unit.identity.clone()?;
                    let device = self.device(unit.gpu)?.ordinal;
                    Some((
                        device,
                        Instance {
                            gpu: identity.instance,
                            compute: identity.compute_instance,
                            profile,
                            start: placement.start.into(),
                            size: placement.size.into(),
                            uuid: identity.uuid,
                        },
                    ))
                }
                Spot::Whole => None,
            })
        };
        let (Some((device, instance)), Some(inventory)) = (what, &self.parts.inventory) else {
            return Answer::Failed;
        };
        // It destroys the compute instance, too, and leaves alone what is not exactly this.
        match inventory.destroy(device, &instance).await {
            Ok(()) | Err(AskError::NOT_FOUND) => Answer::Gone,
            Err(AskError::IN_USE | AskError::Silent) => Answer::InUse,
            Err(error) => {
                tracing::error!("an instance of GPU {device} is not destroyed: {error}");
                Answer::Failed
            }
        }
    }

    /// Tries again to unmake what could not be.
    pub(crate) fn audit(self: &Rc<Self>) {
        let now = self.now();
        for unit in self.fleet.borrow_mut().audit_closing(now) {
            spawn_local(Rc::clone(self).unmake(unit));
        }
    }

    /// Whether a GPU is being emptied.
    pub(crate) fn is_draining(&self, gpu: u32) -> bool {
        self.draining.borrow().contains(&gpu)
    }

    /// Whether an instance is being emptied, by itself or with its GPU.
    pub(crate) fn is_unit_draining(&self, unit: &Unit) -> bool {
        self.is_draining(unit.place().device) || self.is_alone_draining(unit.number())
    }

    /// Whether an instance is being emptied, and not its GPU.
    pub(crate) fn is_alone_draining(&self, unit: u32) -> bool {
        self.draining_units.borrow().contains(&unit)
    }

    /// Has a GPU be emptied, or take VMs again.
    pub(crate) async fn set_draining(&self, gpu: u32, draining: bool) -> io::Result<()> {
        self.change_drained(&self.draining, gpu, draining).await
    }

    /// Has an instance be emptied, or take VMs again.
    pub(crate) async fn set_unit_draining(&self, unit: u32, draining: bool) -> io::Result<()> {
        self.change_drained(&self.draining_units, unit, draining).await
    }

    async fn change_drained(&self, all: &RefCell<BTreeSet<u32>>, one: u32, draining: bool) -> io::Result<()> {
        let change = |draining: bool| {
            let mut all = all.borrow_mut();
            if draining { all.insert(one) } else { all.remove(&one) }
        };
        if change(draining)
            && let Err(error) = self.write().await
        {
            change(!draining);
            return Err(error);
        }
        self.look_around();
        Ok(())
    }

    /// What is being emptied, as the plan calls it.
    pub(crate) fn drained(&self) -> Vec<Target> {
        self.look_around();
        let draining = self.draining.borrow();
        let found = self.found.borrow();
        let gpus = found.iter().enumerate().filter(|(_, found)| draining.contains(&found.ordinal));
        let (numbers, units) = (self.numbers.borrow(), self.draining_units.borrow());
        let units = numbers.iter().filter(|(_, number)| units.contains(number));
        gpus.map(|(at, _)| Target::Gpu(at)).chain(units.map(|(unit, _)| Target::Unit(*unit))).collect()
    }

    /// Switches division of a GPU on or off, on which nobody is. What keeps it from being so now, if it is only a reset, is no
    /// error: [`Self::will_divide`] says so, and [`Self::finish_switches`] goes on from there.
    pub(crate) async fn switch(&self, gpu: usize, on: bool) -> Result<(), Error> {
        let (Some(found), Some(inventory)) = (self.device(gpu), &self.parts.inventory) else {
            return Err(internal(&PlanError::UnknownGpu));
        };
        let ordinal = found.ordinal;
        let _turn = self.turn(gpu).await;
        // Since it was last looked at, somebody may have had it take VMs again.
        if !self.is_draining(ordinal) {
            return Err(undrained(ordinal));
        }
        if self.fleet.borrow().units().any(|unit| unit.gpu == gpu) {
            return Err(internal(&PlanError::InUse));
        }
        // An arbiter has all of its memory, and would be in the way.
        self.switching.borrow_mut().insert(gpu);
        self.parts.units.close(ordinal).await;
        _ = self.parts.notices.send(Notice::UnitGone { unit: ordinal });
        let switched = inventory.set_mig(ordinal, on).await;
        let now = inventory.health(ordinal).await;
        let wanted = if on { Switch::On } else { Switch::Off };
        match (switched, now) {
            (_, Ok(health)) if health.mig.0 == wanted => self.divide(gpu).await,
            (Ok(()) | Err(AskError::RESET_REQUIRED), Ok(health)) if health.mig.1 == wanted => Ok(()),
            (switched, now) => {
                if now.is_ok_and(|now| now.mig.1 != now.mig.0) {
                    // Nobody is to be surprised by it at some reset.
                    if let Err(error) = inventory.set_mig(ordinal, !on).await {
                        tracing::error!("GPU {ordinal} may be switched by its next reset: {error}");
                    }
                }
                // As it was.
                let as_it_was = self.divide(gpu).await;
                let (code, message) = match &switched {
                    Err(AskError::IN_USE) => (
                        Code::InUse,
                        format!(
                            "processes that are not of Sluice use GPU {ordinal}; end them, and try again"
                        ),
                    ),
                    Err(AskError::NOT_SUPPORTED) => {
                        (Code::Contradiction, format!("GPU {ordinal} cannot be divided"))
                    }
                    _ => (Code::DeviceFailed, format!("the driver does not switch GPU {ordinal}")),
                };
                let why = switched.err().or(now.err());
                let error = caused(Error::new(code, message), why);
                as_it_was.map_err(|worse| tracing::error!("{}", worse.message)).ok();
                Err(error)
            }
        }
    }

    /// Takes a GPU on which nobody is as the driver says that it is divided now.
    async fn divide(&self, gpu: usize) -> Result<(), Error> {
        let (Some(found), Some(inventory)) = (self.device(gpu), &self.parts.inventory) else {
            return Err(internal(&PlanError::UnknownGpu));
        };
        let ordinal = found.ordinal;
        let looked = look(inventory, ordinal, self.parts.configuration.reserve).await;
        let (divided, listed) = match (looked, inventory.instances(ordinal).await) {
            (Ok(Some(divided)), Ok(listed)) => (Rc::new(divided), listed),
            (looked, listed) => {
                _ = self.fleet.borrow_mut().set_gpu_standing(gpu, Standing::Quarantined);
                let error =
                    Error::new(Code::DeviceFailed, format!("how GPU {ordinal} is divided is not known"));
                return Err(caused(error, looked.err().or(listed.err())));
            }
        };
        {
            let mut fleet = self.fleet.borrow_mut();
            fleet.set_division(gpu, divided.division.clone()).map_err(|error| internal(&error))?;
            let foreign = listed.iter().map(|instance| {
                let Listed { instance, profile, placement, compute_slices, .. } = list(&divided, instance);
                Foreign { instance, profile: Some(profile), placement, compute_slices }
            });
            fleet.set_foreign(gpu, foreign.collect()).map_err(|error| internal(&error))?;
        }
        let whole = divided.is_whole();
        self.found.borrow_mut()[gpu] = divided.clone();
        self.switching.borrow_mut().remove(&gpu);
        if whole && self.parts.units.get(ordinal).is_none() {
            self.parts.units.open(self.whole_unit(&divided));
        }
        self.look_around();
        Ok(())
    }

    /// Whether nothing is on a GPU but instances that are being unmade, and will be soon.
    pub(crate) fn is_closing(&self, gpu: usize) -> bool {
        let fleet = self.fleet.borrow();
        let mut here = fleet.units().filter(|unit| unit.gpu == gpu).peekable();
        let soon = |unit: &sluice_placement::Unit| matches!(&unit.phase, Phase::Closing(destruction) if !destruction.is_quarantined());
        here.peek().is_some() && here.all(soon)
    }

    /// Whether a GPU will be divided after its next reset, where that is not as it is now.
    pub(crate) fn will_divide(&self, gpu: usize) -> Option<bool> {
        let is_whole = self.device(gpu)?.is_whole();
        self.switching.borrow().contains(&gpu).then_some(is_whole)
    }

    /// Looks whether GPUs that wait for a reset have had it.
    pub(crate) async fn finish_switches(&self) {
        let waiting: Vec<usize> = self.switching.borrow().iter().copied().collect();
        for gpu in waiting {
            let (Some(found), Some(inventory)) = (self.device(gpu), &self.parts.inventory) else { continue };
            // Where somebody is at it, it is looked at again.
            let Some(Ok(_turn)) = self.turns.get(gpu).map(|turn| turn.try_lock()) else { continue };
            let health = inventory.health(found.ordinal).await;
            let over = health.is_ok_and(|health| {
                health.mig.0 == health.mig.1 || (health.mig.0 == Switch::On) == found.is_whole()
            });
            if !over || !self.switching.borrow().contains(&gpu) {
                continue;
            }
            match self.divide(gpu).await {
                Ok(()) => {
                    let divided = self.device(gpu).is_some_and(|found| !found.is_whole());
                    let detail =
                        format!("GPU {} is {}divided", found.ordinal, if divided { "" } else { "not " });
                    self.parts.journal.note("gpu-mig-switched", None, detail);
                }
                Err(error) => tracing::error!("{} {:?}", error.message, error.cause),
            }
        }
    }

    /// Takes over what an earlier daemon wrote down and is still there.
    pub(crate) async fn adopt(self: &Rc<Self>) {
        let plan = self.parts.checkpoint.objects().plan.clone();
        let mut listed = Vec::new();
        let mut unknown = Vec::new();
        let all = self.found();
        for (at, found) in all.iter().enumerate().filter(|(_, found)| !found.is_whole()) {
            let Some(inventory) = &self.parts.inventory else { continue };
            match inventory.instances(found.ordinal).await {
                Ok(instances) => listed.extend(instances.iter().map(|instance| (found, *instance))),
                Err(error) => {
                    tracing::error!("the instances of GPU {} are not known: {error}", found.ordinal);
                    unknown.push(at);
                }
            }
        }
        let entries: Vec<Listed> = listed.iter().map(|(found, instance)| list(found, instance)).collect();
        let now = self.now();
        let matches = self.fleet.borrow_mut().adopt(&plan.records, &entries, plan.highest, now);
        let matches = match matches {
            Ok(matches) => matches,
            Err(error) => {
                tracing::error!("what was placed before is not taken over: {error}");
                unknown.extend((0..all.len()).filter(|at| !all[*at].is_whole()));
                sluice_placement::Matches::default()
            }
        };
        for at in unknown {
            _ = self.fleet.borrow_mut().set_gpu_standing(at, Standing::Quarantined);
        }
        for (_, index) in matches.unconfirmed {
            self.forget_unconfirmed(listed[index].0, &listed[index].1).await;
        }
        {
            let fleet = self.fleet.borrow();
            let known = plan.numbers.iter().map(|(unit, number)| (UnitId(*unit), *number));
            *self.numbers.borrow_mut() = known.filter(|(unit, _)| fleet.unit(*unit).is_some()).collect();
        }
        *self.draining.borrow_mut() = plan.draining;
        // What was drained and is gone may have left its number to another.
        let numbers: BTreeSet<u32> = self.numbers.borrow().values().copied().collect();
        *self.draining_units.borrow_mut() =
            plan.draining_units.into_iter().filter(|number| numbers.contains(number)).collect();
        for (name, Home { unit, request }) in plan.homes {
            let Some(vm) = self.parts.checkpoint.objects().vms.get(&name).cloned() else { continue };
            let (apart, organisation) = (anti_affinity(&vm), organisation_id(&vm));
            // An older version numbered VMs and groups by names that were not of an organisation.
            let request = Request { vm: vm_id(&name), organisation, apart, ..request };
            let vm = request.vm;
            if self.fleet.borrow_mut().rejoin(unit, request, true).is_ok() {
                self.names.borrow_mut().insert(vm, name);
            }
        }
        for (record, index) in matches.adopted {
            let (unit, (found, instance)) = (plan.records[record].unit, &listed[index]);
            let closing = {
                let fleet = self.fleet.borrow();
                fleet.unit(unit).is_none_or(|unit| matches!(unit.phase, Phase::Closing(_)))
            };
            if closing {
                spawn_local(Rc::clone(self).unmake(unit));
            } else if let Some(number) = self.numbers.borrow().get(&unit) {
                self.begin(*number, found.ordinal, instance);
            }
        }
        self.look_around();
        self.tidy();
    }

    /// An earlier daemon was killed while it had an instance made: it is there, in the very place that was held for it, and
    /// nobody was told of it.
    async fn forget_unconfirmed(&self, found: &Found, instance: &Instance) {
        let Some(inventory) = &self.parts.inventory else { return };
        if let Err(error) = inventory.destroy(found.ordinal, instance).await {
            tracing::warn!("an instance of GPU {} that was begun stays: {error}", found.ordinal);
            return;
        }
        let mut fleet = self.fleet.borrow_mut();
        let Some(at) = fleet.gpus().iter().position(|gpu| gpu.uuid == found.uuid) else { return };
        let left: Vec<Foreign> = fleet.gpus()[at]
            .foreign()
            .iter()
            .filter(|foreign| foreign.instance != instance.gpu)
            .copied()
            .collect();
        if let Err(error) = fleet.set_foreign(at, left) {
            tracing::error!("GPU {}: {error}", found.ordinal);
        }
    }

    /// Why a VM has no place, for a person.
    fn refused(&self, id: &str, error: PlaceError) -> Error {
        let advice = match &error {
            PlaceError::Refused(Refusal::Unavailable) => {
                "end the drain or the quarantine of a GPU, or name no GPU".to_owned()
            }
            PlaceError::Refused(Refusal::Mode) => {
                "switch a GPU to MIG mode, or out of it, or ask for another policy".to_owned()
            }
            PlaceError::Refused(Refusal::TooLarge { largest_bytes }) => {
                format!("ask for {largest_bytes} bytes at most, or for less isolation")
            }
            PlaceError::Refused(Refusal::Apart) => "let it be nearer to others, or move them away".to_owned(),
            PlaceError::Refused(Refusal::Organisation) => {
                "ask for another policy or profile, or see share-unmeasured-between-organisations in the configuration".to_owned()
            }
            PlaceError::Refused(Refusal::NoRoom) => {
                "delete or move VMs, ask for less, or see /v1/capacity for what would fit".to_owned()
            }
            _ => "look at /v1/units".to_owned(),
        };
        Error {
            cause: vec![error.to_string(), advice],
            ..Error::new(Code::PlacementUnavailable, format!("there is no place for VM {id}"))
        }
    }
}

/// A GPU is not to be switched while VMs can come to it.
pub(crate) fn undrained(gpu: u32) -> Error {
    Error::new(Code::InUse, format!("GPU {gpu} is in use: drain it first, so that nobody comes to it"))
}

fn internal(error: &PlanError) -> Error {
    Error::new(Code::Internal, format!("the plan of units: {error}"))
}

/// An error, with what the driver said, if it did.
fn caused(error: Error, why: Option<AskError>) -> Error {
    match why {
        Some(why) => error.because(why),
        None => error,
    }
}

/// An instance, as the plan takes it.
fn list(found: &Found, instance: &Instance) -> Listed {
    let whole = instance.compute != WHOLE;
    let byte = |number: u32| u8::try_from(number).unwrap_or(u8::MAX);
    Listed {
        gpu: found.uuid,
        instance: instance.gpu,
        compute_instance: whole.then_some(instance.compute),
        uuid: whole.then_some(instance.uuid),
        profile: instance.profile,
        placement: Position { start: byte(instance.start), size: byte(instance.size) },
        compute_slices: byte(instance.size),
    }
}
