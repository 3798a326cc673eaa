//! Requests of VMs for places, and decisions about them.

use super::{Placer, anti_affinity, further_name, organisation_id, vm_id};
use std::{collections::BTreeSet, rc::Rc};

use sluice_api::{
    Code, Error,
    v1::{Isolation, Policy},
};
use sluice_messages::control::HostAccess;
use sluice_placement::{AdminState, Class, Decision, Fleet, Partition, Refusal, Request, Strictness, VmId};

use crate::records::state::objects::VmObject;

impl Placer {
    /// The kind of instance with this name or number.
    pub(crate) fn profile(&self, name: &str) -> Result<u32, Error> {
        let plain = |name: &str| name.trim_start_matches("MIG ").to_ascii_lowercase();
        let found = self.found();
        let mut kinds = found.iter().flat_map(|found| &found.kinds);
        let named = kinds.find(|(_, known)| plain(known) == plain(name)).map(|(number, _)| *number);
        named.or_else(|| name.parse().ok()).ok_or_else(|| {
            let kinds = found.iter().flat_map(|found| &found.kinds);
            let known: BTreeSet<String> = kinds.map(|(_, known)| plain(known)).collect();
            let message = format!("no GPU has a profile {name}");
            Error {
                cause: vec![format!("the profiles are {known:?}")],
                ..Error::new(Code::Contradiction, message)
            }
        })
    }

    /// The placement request of a VM.
    pub(crate) fn request(&self, id: &str, vm: &VmObject) -> Request {
        let placement = &vm.placement;
        let class = match u16::try_from(vm.time.guarantee_permille) {
            Ok(permille @ 1..) => Class::Guaranteed { permille },
            _ => Class::Burstable { floor_bytes: vm.share.guaranteed_bytes },
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
                Isolation::ExclusiveGpu => Strictness::Gpu,
            },
            organisation: organisation_id(vm),
            overhead_bytes: vm.share.headroom_bytes,
            multiprocessors: placement.multiprocessors,
            replicas: placement.replicas,
            profile: placement.profile,
            allow_larger: placement.allow_larger,
            class,
            weight: vm.time.weight,
            anti_affinity: anti_affinity(vm),
            numa: placement.numa_node,
            pin: placement.gpu.map(|gpu| sluice_placement::Pin {
                gpu: usize::try_from(gpu).unwrap_or(usize::MAX),
                start: placement.start,
            }),
            unlimited: vm.memory == 0,
            ..Request::new(vm_id(id), if vm.memory == 0 { vm.share.guaranteed_bytes } else { vm.memory })
        }
    }

    /// A VM's request for each of its places: one place, or each GPU that it names. The first request has the VM's name.
    pub(crate) fn requests(&self, id: &str, vm: &VmObject) -> Result<Vec<Request>, Error> {
        let request = self.request(id, vm);
        if vm.placement.gpus.is_empty() {
            return Ok(vec![request]);
        }
        let of_gpu = |(at, gpu): (usize, &u32)| {
            let index = self.index_of(*gpu);
            let index = index.ok_or_else(|| Error::contradiction(format!("there is no GPU {gpu}")))?;
            if !self.device(index).is_some_and(|found| found.is_whole()) {
                let message = format!("GPU {gpu} is divided; gpus in placement are whole ones");
                return Err(Error::contradiction(message));
            }
            let (vm, part_of) = match at {
                0 => (request.vm, None),
                _ => (vm_id(&further_name(id, index)), Some(request.vm)),
            };
            Ok(Request {
                vm,
                part_of,
                policy: sluice_placement::Policy::TimeSlice,
                pin: Some(sluice_placement::Pin { gpu: index, start: None }),
                ..request.clone()
            })
        };
        vm.placement.gpus.iter().enumerate().map(of_gpu).collect()
    }

    /// The members of the plan that are a VM's: their names depend on the GPUs that the host had when they were placed.
    pub(super) fn members(&self, id: &str) -> Vec<VmId> {
        self.names.borrow().iter().filter(|(_, name)| *name == id).map(|(vm, _)| *vm).collect()
    }

    /// Chooses the place of a VM. A VM without a quota is alone on a device if one is empty.
    pub(crate) fn decide(&self, request: &Request) -> Result<Decision, Refusal> {
        self.look_around();
        self.decide_on(&self.fleet.borrow(), request)
    }

    /// As [`Self::decide`], on a plan that may be a copy.
    pub(crate) fn decide_on(&self, fleet: &Fleet, request: &Request) -> Result<Decision, Refusal> {
        if request.unlimited
            && request.policy != sluice_placement::Policy::Mig
            && request.strictness == Strictness::Shared
        {
            let alone = Request {
                strictness: Strictness::Unit,
                policy: sluice_placement::Policy::TimeSlice,
                ..request.clone()
            };
            if let Ok(Decision::Open { gpu, partition: Partition::Whole, .. }) = fleet.decide(&alone) {
                return Ok(Decision::Open { gpu, partition: Partition::Whole, shared: true });
            }
        }
        fleet.decide(request)
    }

    /// Chooses another place for a placed VM.
    pub(crate) fn decide_move(&self, request: &Request) -> Result<Decision, Refusal> {
        self.look_around();
        self.fleet.borrow().decide_move(request)
    }

    /// Updates the plan with the present quarantines, drains, clean units and lendable memory.
    pub(crate) fn look_around(&self) {
        let mut fleet = self.fleet.borrow_mut();
        let draining = self.draining.borrow();
        for (at, found) in self.found.borrow().iter().enumerate() {
            let quarantined = found.is_whole() && self.parts.checkpoint.quarantine(found.ordinal).is_some();
            let waits = self.switching.borrow().contains(&at);
            let admin_state = match (quarantined, waits || draining.contains(&found.ordinal)) {
                (true, _) => AdminState::Quarantined,
                (false, true) => AdminState::Draining,
                (false, false) => AdminState::Open,
            };
            if let Some(unit) = self.parts.units.get(found.ordinal) {
                _ = fleet.set_gpu_measured(at, unit.has_figures());
            }
            // The attributes are those of the GPU: one report is enough for all its instances.
            let units = self.parts.units.iter().filter(|unit| unit.place().device == found.ordinal);
            let known: Vec<HostAccess> = units.filter_map(|unit| unit.host_access()).collect();
            let confined = !known.is_empty() && known.iter().all(|access| *access == HostAccess::None);
            _ = fleet.set_gpu_confined(at, confined);
            // A GPU whose instances contradict the plan keeps its state.
            let contradicts = !quarantined
                && fleet.gpus().get(at).is_some_and(|gpu| gpu.admin_state == AdminState::Quarantined);
            if !contradicts || found.is_whole() {
                _ = fleet.set_gpu_admin_state(at, admin_state);
            }
        }
        for (unit, number) in self.numbers.borrow().iter() {
            let quarantined = self.parts.checkpoint.quarantine(*number).is_some();
            let admin_state = match (quarantined, self.draining_units.borrow().contains(number)) {
                (true, _) => AdminState::Quarantined,
                (false, true) => AdminState::Draining,
                (false, false) => AdminState::Open,
            };
            _ = fleet.set_unit_admin_state(*unit, admin_state);
            let room = self.parts.units.get(*number);
            let Some((room, lendable)) = room.and_then(|room| Some((Rc::clone(&room), room.lendable()?)))
            else {
                continue;
            };
            // An arbiter lends only scrubbed memory.
            _ = fleet.proven_clean(*unit);
            if fleet.unit(*unit).is_some_and(|unit| unit.shared) {
                // Suspect memory is not lent. The driver share is part of quotas.
                let kept = room.last().map_or(0, |report| report.suspect);
                _ = fleet.set_unit_memory(*unit, lendable.saturating_sub(kept));
            }
        }
    }
}
