//! The places that VMs hold: taken, given back and changed.

use super::{Placer, internal};
use std::{collections::BTreeSet, rc::Rc};

use sluice_api::{Code, Error};
use sluice_placement::{Decision, Partition, PlaceError, UnitId, UnitPhase, VmId};
use sluice_protocol::limits;

use crate::records::state::objects::VmObject;

impl Placer {
    /// Holds the places that a VM lacks, without making an instance, and returns all of them; none on a host without devices.
    pub(crate) fn hold(self: &Rc<Self>, id: &str, vm: &VmObject) -> Result<Vec<UnitId>, Error> {
        if self.found.borrow().is_empty() {
            return Ok(Vec::new());
        }
        let (mut units, mut added) = (Vec::new(), Vec::new());
        for request in self.requests(id, vm)? {
            let home = self.fleet.borrow().home(request.vm).filter(|home| self.unit(*home).is_some());
            if let Some(home) = home {
                units.push(home);
                continue;
            }
            _ = self.fleet.borrow_mut().leave(request.vm);
            let held = self
                .decide(&request)
                .map_err(PlaceError::from)
                .and_then(|decision| Ok(self.fleet.borrow_mut().reserve(&request, decision)?));
            let unit = match held {
                Ok(unit) => unit,
                Err(error) => {
                    for vm in added {
                        self.names.borrow_mut().remove(&vm);
                        _ = self.fleet.borrow_mut().leave(vm);
                    }
                    self.tidy();
                    return Err(self.refused(id, error));
                }
            };
            self.give_number(unit);
            self.take_whole(unit);
            self.names.borrow_mut().insert(request.vm, id.to_owned());
            added.push(request.vm);
            units.push(unit);
        }
        Ok(units)
    }

    /// Gives a number to a unit that is new in the plan.
    pub(crate) fn give_number(&self, unit: UnitId) {
        let fleet = self.fleet.borrow();
        let Some(planned) = fleet.unit(unit) else { return };
        let mut numbers = self.numbers.borrow_mut();
        if numbers.contains_key(&unit) {
            return;
        }
        let number = match planned.partition {
            Partition::Whole => self.device(planned.gpu).map(|found| found.ordinal),
            Partition::Instance { .. } => {
                let taken: BTreeSet<u32> = numbers.values().copied().collect();
                (limits::DEVICES..limits::UNITS).find(|number| !taken.contains(number))
            }
        };
        if let Some(number) = number {
            numbers.insert(unit, number);
        }
    }

    /// Frees the number of a unit that is gone.
    pub(super) fn take_number(&self, unit: UnitId) {
        if let Some(number) = self.numbers.borrow_mut().remove(&unit) {
            self.draining_units.borrow_mut().remove(&number);
        }
    }

    /// Marks a whole device as created: nothing has to be made for it.
    pub(super) fn take_whole(&self, unit: UnitId) {
        let mut fleet = self.fleet.borrow_mut();
        let whole = fleet
            .unit(unit)
            .is_some_and(|unit| unit.partition == Partition::Whole && unit.phase == UnitPhase::Reserved);
        if whole && let Err(error) = fleet.created(unit, None) {
            tracing::error!(%error, "BUG: the plan refuses a whole device");
        }
    }

    /// Puts a VM back on the unit it was to leave; false if that unit is gone.
    pub(crate) fn take_back(&self, vm: VmId, from: UnitId) -> bool {
        let mut fleet = self.fleet.borrow_mut();
        let Some(home) = fleet.home(vm) else { return false };
        let member =
            fleet.unit(home).and_then(|unit| unit.members().iter().find(|member| member.request.vm == vm));
        let Some(request) = member.map(|member| member.request.clone()) else { return false };
        _ = fleet.leave(vm);
        let there = fleet.unit(from).is_some_and(|unit| !matches!(unit.phase, UnitPhase::Closing(_)));
        there && fleet.rejoin(from, request, true).is_ok()
    }

    /// Removes a VM from its unit. [`Self::tidy`] closes units that are empty then.
    pub(crate) fn leave(&self, id: &str) {
        for vm in self.members(id) {
            self.names.borrow_mut().remove(&vm);
            // A VM without a place has left already.
            _ = self.fleet.borrow_mut().leave(vm);
        }
    }

    /// Gives the places of a VM back.
    pub(crate) fn release(self: &Rc<Self>, id: &str) {
        self.leave(id);
        self.tidy();
    }

    /// Changes the request of a placed VM, if its unit has room for that.
    pub(crate) fn change(&self, id: &str, wanted: &VmObject) -> Result<(), Error> {
        let requests = self.requests(id, wanted)?;
        let mut fleet = self.fleet.borrow_mut();
        // The change holds on all units of the VM, or on none.
        let mut next = fleet.clone();
        for request in requests {
            let Some(home) = next.home(request.vm) else { continue };
            let Some(unit) = next.unit(home) else { continue };
            let (shared, memory_bytes) = (unit.shared, unit.memory_bytes);
            let before = unit.members().iter().find(|member| member.request.vm == request.vm).cloned();
            let Some(before) = before.filter(|before| before.request != request) else { continue };
            _ = next.leave(request.vm);
            let fits = if shared {
                next.clone().reserve(&request, Decision::Join(home)).is_ok()
            } else {
                request.memory_bytes() <= memory_bytes
            };
            if !fits {
                let message = format!(
                    "the unit of VM {id} has too little room; delete and create the VM, and it gets another place"
                );
                return Err(Error::new(Code::PlacementUnavailable, message));
            }
            next.rejoin(home, request, before.idle).map_err(|error| internal(&error))?;
        }
        *fleet = next;
        Ok(())
    }

    /// Restores the request of a VM before a change: its place was promised, whatever VMs have come to the unit since.
    pub(crate) fn change_back(&self, id: &str, before: &VmObject) {
        let mut fleet = self.fleet.borrow_mut();
        for request in self.requests(id, before).unwrap_or_default() {
            let Some(home) = fleet.home(request.vm) else { continue };
            _ = fleet.leave(request.vm);
            if let Err(error) = fleet.rejoin(home, request, false) {
                tracing::error!(name = id, %error, "cannot restore the place of the VM");
            }
        }
    }
}
