//! The placer: the plan of [`sluice_placement`], which maps VMs to units, and the instances made and unmade for it.
//!
//! The registry and the daemon's start call it. It owns the plan. A change of the plan is written to disk before its instances are made, so that a killed daemon leaves
//! nothing that the next one does not know; an instance without a record is foreign and is never touched. The placer must never
//! choose the unit of a VM: the plan chooses.

mod drains;
mod homes;
mod instances;
mod requests;
mod restoring;

use std::{
    cell::{Cell, RefCell},
    collections::{BTreeMap, BTreeSet},
    rc::Rc,
    sync::Arc,
    time::{Duration, Instant},
};

use sha2::{Digest as _, Sha256};
use sluice_api::{Code, Error};
use sluice_messages::inventory::{Instance, WHOLE};
use sluice_placement::{
    AffinityTarget, AntiAffinity, Fleet, ListedInstance, Partition, PlaceError, PlanError, PlanGpu, Refusal,
    Request, Rules, SlicePlacement as Position, UnitId, VmId,
};
use tokio::sync::{Mutex, MutexGuard};

use crate::{
    configuration::Configuration,
    handover::launching::Launching,
    placement::survey::FoundDevice,
    records::journal::Journal,
    records::state::{checkpoint::Checkpoint, objects::VmObject},
    records::unit_event::UnitEventSender,
    units::inventory::{AskError, Inventory},
    units::set::Units,
    units::unit::{Unit, UnitPlace},
};

/// The plan's number of a VM or a group: derived from the name, so that a rule can name one that does not exist yet.
fn number_of(name: &str) -> u64 {
    let digest: [u8; 32] = Sha256::digest(name).into();
    let [a, b, c, d, e, f, g, h, ..] = digest;
    u64::from_be_bytes([a, b, c, d, e, f, g, h])
}

/// The plan's id of a VM.
pub(crate) fn vm_id(name: &str) -> VmId {
    VmId(number_of(name))
}

/// The plan's number of a VM's organisation, or of its project if it has no organisation.
fn organisation_id(vm: &VmObject) -> Option<u64> {
    let scope = vm.host_name("");
    (!scope.is_empty()).then(|| number_of(&scope))
}

/// The anti-affinity rules of a VM. A rule uses names within the VM's own organisation, so that it neither affects nor reveals
/// another organisation's VMs.
fn anti_affinity(vm: &VmObject) -> Vec<AntiAffinity> {
    let anti_affinity = vm.placement.anti_affinity.iter().map(|anti_affinity| AntiAffinity {
        from: match (&anti_affinity.vm, &anti_affinity.group) {
            (Some(name), _) => AffinityTarget::Vm(vm_id(&vm.host_name(name))),
            (None, group) => {
                AffinityTarget::Group(number_of(&vm.host_name(group.as_deref().unwrap_or_default())))
            }
        },
        never: !anti_affinity.preferred,
    });
    anti_affinity.collect()
}

/// The name in the plan of a VM on a further GPU of its own. No name of a VM contains this sign.
fn further_name(id: &str, gpu: usize) -> String {
    format!("{id}#{gpu}")
}

/// The name of a member of the plan in the state file.
fn member_name(id: &str, request: &Request) -> String {
    match (request.part_of, request.pin) {
        (Some(_), Some(pin)) => further_name(id, pin.gpu),
        _ => id.to_owned(),
    }
}

/// The position of a unit, for display.
#[derive(Clone, Debug)]
pub(crate) struct Spotted {
    pub(crate) unit: u32,
    pub(crate) gpu: u32,
    pub(crate) profile: Option<(u32, Option<String>)>,
    pub(crate) placement: Option<Position>,
    pub(crate) shared: bool,
    pub(crate) members: usize,
}

/// The collaborators of a placer.
#[derive(Debug)]
pub(crate) struct Parts {
    pub(crate) configuration: Rc<Configuration>,
    pub(crate) launching: Rc<Launching>,
    pub(crate) inventory: Option<Rc<Inventory>>,
    pub(crate) checkpoint: Rc<Checkpoint>,
    pub(crate) event_sender: UnitEventSender,
    pub(crate) journal: Arc<Journal>,
    pub(crate) units: Rc<Units>,
}

/// The placer.
#[derive(Debug)]
pub(crate) struct Placer {
    parts: Parts,
    /// The devices: the division of one can change, the list cannot.
    found: RefCell<Vec<Rc<FoundDevice>>>,
    fleet: RefCell<Fleet>,
    names: RefCell<BTreeMap<VmId, String>>,
    /// The numbers of the plan's units in the rest of the daemon.
    numbers: RefCell<BTreeMap<UnitId, u32>>,
    /// GPUs that are drained, by ordinal.
    draining: RefCell<BTreeSet<u32>>,
    /// Instances that are drained, by the numbers of their units.
    draining_units: RefCell<BTreeSet<u32>>,
    /// GPUs whose MIG mode changes at their next reset; no VM is on them.
    switching: RefCell<BTreeSet<usize>>,
    /// One lock per GPU: its instances are made and destroyed one after the other. GPUs do not wait for each other.
    turns: Vec<Mutex<()>>,
    /// True while the tidied plan is being written.
    tidying: Cell<bool>,
    /// Units that VMs have left for units that do not exist yet; the VMs may come back.
    left: RefCell<Vec<UnitId>>,
    start: Instant,
}

/// A unit that is kept although it may be empty, while this lives.
#[derive(Debug)]
pub(crate) struct KeptUnit<'a> {
    placer: &'a Placer,
    unit: UnitId,
}

impl Drop for KeptUnit<'_> {
    fn drop(&mut self) {
        let mut left = self.placer.left.borrow_mut();
        if let Some(at) = left.iter().position(|left| *left == self.unit) {
            left.swap_remove(at);
        }
    }
}

impl Placer {
    pub(crate) fn new(parts: Parts, found: Vec<FoundDevice>) -> Rc<Self> {
        let gpu = |found: &FoundDevice| PlanGpu::new(found.uuid, found.node, found.division.clone());
        // Only a drained GPU waits for its reset; others are used until they are reset.
        let drained = parts.checkpoint.objects().plan.draining.clone();
        let waits = |(at, found): (usize, &FoundDevice)| {
            (found.switching && drained.contains(&found.ordinal)).then_some(at)
        };
        let switching = found.iter().enumerate().filter_map(waits).collect();
        let rules = Rules {
            overcommit_permille: parts.configuration.overcommit_permille,
            share_unmeasured: parts.configuration.share_unmeasured_between_organisations,
            share_unconfined: parts.configuration.share_with_host_memory_access,
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

    /// The devices as found.
    pub(crate) fn found(&self) -> Vec<Rc<FoundDevice>> {
        self.found.borrow().clone()
    }

    /// A device, by its index in the plan.
    pub(crate) fn device(&self, gpu: usize) -> Option<Rc<FoundDevice>> {
        self.found.borrow().get(gpu).cloned()
    }

    /// The index in the plan of a device.
    pub(crate) fn index_of(&self, ordinal: u32) -> Option<usize> {
        self.found.borrow().iter().position(|found| found.ordinal == ordinal)
    }

    /// A unit for every undivided device.
    pub(crate) fn whole_units(&self) -> Vec<Rc<Unit>> {
        let switching = self.switching.borrow();
        let found = self.found();
        let whole =
            found.iter().enumerate().filter(|(at, device)| device.is_whole() && !switching.contains(at));
        whole.map(|(_, device)| self.whole_unit(device)).collect()
    }

    fn whole_unit(&self, device: &FoundDevice) -> Rc<Unit> {
        let alone = self.found.borrow().len() == 1;
        self.new_unit(device.ordinal, device.place(alone))
    }

    fn new_unit(&self, number: u32, place: UnitPlace) -> Rc<Unit> {
        let Parts { configuration, launching, inventory, checkpoint, event_sender, .. } = &self.parts;
        Unit::new(
            number,
            place,
            Rc::clone(configuration),
            Rc::clone(launching),
            inventory.clone(),
            Rc::clone(checkpoint),
            event_sender.clone(),
        )
    }

    /// Keeps a unit that a VM is about to leave, until it is certain that the VM does not come back.
    pub(crate) fn keep(&self, unit: UnitId) -> KeptUnit<'_> {
        self.left.borrow_mut().push(unit);
        KeptUnit { placer: self, unit }
    }

    /// Locks the instances of a GPU: waits for other changes, and delays later ones.
    async fn turn(&self, gpu: usize) -> Option<MutexGuard<'_, ()>> {
        Some(self.turns.get(gpu)?.lock().await)
    }

    /// The plan, for reading.
    pub(crate) fn fleet(&self) -> std::cell::Ref<'_, Fleet> {
        self.fleet.borrow()
    }

    /// The plan, for the code that carries out a change.
    pub(crate) fn fleet_mut(&self) -> std::cell::RefMut<'_, Fleet> {
        self.fleet.borrow_mut()
    }

    /// The name of a VM in the plan.
    pub(crate) fn name(&self, vm: VmId) -> Option<String> {
        self.names.borrow().get(&vm).cloned()
    }

    /// The unit of a member of the plan, if it exists.
    pub(crate) fn unit_of(&self, vm: VmId) -> Option<Rc<Unit>> {
        let home = self.fleet.borrow().home(vm)?;
        self.unit(home)
    }

    /// The units of a VM, if all of them exist.
    pub(crate) fn units_of(&self, id: &str, vm: &VmObject) -> Option<Rc<[Rc<Unit>]>> {
        let requests = self.requests(id, vm).ok()?;
        requests.iter().map(|request| self.unit_of(request.vm)).collect()
    }

    /// A unit of the plan, if it exists.
    fn unit(&self, unit: UnitId) -> Option<Rc<Unit>> {
        let number = *self.numbers.borrow().get(&unit)?;
        self.parts.units.get(number)
    }

    /// The position of a unit of the plan.
    pub(crate) fn spotted(&self, unit: UnitId) -> Option<Spotted> {
        let fleet = self.fleet.borrow();
        let planned = fleet.unit(unit)?;
        let found = self.device(planned.gpu)?;
        let (profile, placement) = match planned.partition {
            Partition::Whole => (None, None),
            Partition::Instance { profile, placement } => {
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

    /// The position of a VM: of several GPUs the first.
    pub(crate) fn whereabouts(&self, id: &str) -> Option<Spotted> {
        let home = self.fleet.borrow().home(vm_id(id))?;
        self.spotted(home)
    }

    /// The unit of the plan with this number.
    pub(crate) fn planned(&self, number: u32) -> Option<UnitId> {
        self.numbers.borrow().iter().find(|(_, known)| **known == number).map(|(unit, _)| *unit)
    }

    /// The error for a VM without a place, with advice.
    fn refused(&self, id: &str, error: PlaceError) -> Error {
        let advice = match &error {
            PlaceError::Refused(Refusal::Unavailable) => {
                "end the drain or the quarantine of a GPU, or name no GPU".to_owned()
            }
            PlaceError::Refused(Refusal::Mode) => {
                "switch a GPU to MIG mode, or out of it, or request another policy".to_owned()
            }
            PlaceError::Refused(Refusal::TooLarge { largest_bytes }) => {
                format!("request at most {largest_bytes} bytes, or less isolation")
            }
            PlaceError::Refused(Refusal::AntiAffinity) => "relax its anti-affinity, or move the other VMs away".to_owned(),
            PlaceError::Refused(Refusal::Organisation) => {
                "request another policy or profile, or see share-unmeasured-between-organisations in the configuration".to_owned()
            }
            PlaceError::Refused(Refusal::HostAccess) => {
                "switch HMM off (uvm_disable_hmm=1 of the kernel module nvidia_uvm), or see share-with-host-memory-access in the configuration".to_owned()
            }
            PlaceError::Refused(Refusal::NoRoom) => {
                "delete or move VMs, request less, or see /v1/capacity for the free room".to_owned()
            }
            _ => "see /v1/units".to_owned(),
        };
        Error {
            cause: vec![error.to_string(), advice],
            ..Error::new(Code::PlacementUnavailable, format!("there is no place for VM {id}"))
        }
    }
}

/// The error for a switch of a GPU on which VMs may be placed.
pub(crate) fn undrained(gpu: u32) -> Error {
    Error::new(Code::InUse, format!("GPU {gpu} is in use: drain it first, so that no VM is placed on it"))
}

fn internal(error: &PlanError) -> Error {
    Error::new(Code::Internal, format!("the plan refused the change: {error}"))
}

/// Adds the driver's reason to an error, if there is one.
fn caused(error: Error, why: Option<AskError>) -> Error {
    match why {
        Some(why) => error.because(why),
        None => error,
    }
}

/// Converts an instance for the plan.
fn list(found: &FoundDevice, instance: &Instance) -> ListedInstance {
    let whole = instance.compute != WHOLE;
    let byte = |number: u32| u8::try_from(number).unwrap_or(u8::MAX);
    ListedInstance {
        gpu: found.uuid,
        instance: instance.gpu,
        compute_instance: whole.then_some(instance.compute),
        uuid: whole.then_some(instance.uuid),
        profile: instance.profile,
        placement: Position { start: byte(instance.start), size: byte(instance.size) },
        compute_slices: byte(instance.size),
    }
}
