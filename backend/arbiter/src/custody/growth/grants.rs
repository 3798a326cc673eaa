//! Grants: requested, admitted, given, ended and refused.

use super::super::{Custody, Millis, Recall, Worker, WorkerState, lines::Line};
use super::{ActiveGrant, CONSIDERED, IsStart, Wish};
use crate::{
    ids::{VmKey, WorkerId},
    ledger::LendRefusal,
};
use sluice_driver::code;
use sluice_messages::custody::{CustodyAnswer, Growth as Cause, UNIT};
use sluice_protocol::limits;

/// Grants, and refusals, of one call; the others follow in the next one.
const GRANTS: usize = 32;
const REFUSALS: usize = 32;

/// The parts of a grant, in bytes.
#[derive(Clone, Copy, Debug)]
struct GrantParts {
    /// Charged in addition, with memory that becomes free for it.
    fresh: u64,
    /// Covered by memory that the worker reports as given back.
    returned: u64,
    /// The part of both that goes beyond the request.
    margin: u64,
}

impl Custody {
    pub(in crate::custody) fn grow(
        &mut self,
        id: WorkerId,
        serial: u64,
        (reason, bytes, spent): (u32, u64, u64),
        now: Millis,
    ) {
        let Some(cause) = Cause::from_number(reason) else { return self.abuse(id, "grows for no reason") };
        let Some(worker) = self.workers.get(&id) else { return };
        let vm = worker.vm;
        if worker.grants.len() + worker.wishes >= limits::GROWTHS {
            return self.abuse(id, "requests or keeps too many grants to grow");
        }
        if self.ledger.account(vm).is_none_or(|account| account.closed) {
            return self.refuse(id, serial, code::DEVICE_UNAVAILABLE);
        }
        let bytes = self.least(cause, bytes);
        if self.is_without_room(id, vm, bytes, now) {
            return self.refuse(id, serial, code::OUT_OF_MEMORY);
        }
        if let Some(worker) = self.workers.get_mut(&id) {
            worker.waiting += 1;
            worker.wishes += 1;
        }
        let deadline = now.saturating_add(limits::GROW_WAIT_MILLISECONDS);
        let memory_deadline = now.saturating_add(limits::GROW_TIMEOUT_MILLISECONDS);
        let wish = Wish { worker: id, vm, serial, bytes, spent, memory_deadline, deadline };
        self.growth.wishes.push((vm, cause == Cause::Context), wish);
    }

    /// The least number of bytes that growth takes.
    fn least(&self, cause: Cause, bytes: u64) -> u64 {
        if cause == Cause::Context { bytes.max(self.settings.estimates.context) } else { bytes }
    }

    /// Checks that a VM may be charged for this growth of a worker's driver.
    pub(super) fn admit_growth(&self, id: WorkerId, bytes: u64) -> Result<(), LendRefusal> {
        let worker = self.workers.get(&id).ok_or(LendRefusal::Closed)?;
        let more = worker.charge_with(self.due_for(worker, bytes)) - worker.charge_with(0);
        self.ledger.admit_driver(worker.vm, more)
    }

    /// The part of growth for which a VM must have room. Bytes that the worker reports as given back make room only if no figure
    /// can show that the driver kept them.
    const fn due_for(&self, worker: &Worker, bytes: u64) -> u64 {
        if self.figures_judge { bytes } else { bytes.saturating_sub(worker.returned) }
    }

    /// True if the VM's quota does not allow this growth. An ancestor's escrow may still rise.
    fn grows_over(&self, id: WorkerId, bytes: u64) -> bool {
        matches!(self.admit_growth(id, bytes), Err(LendRefusal::Limit(_) | LendRefusal::Closed))
    }

    /// True if the VM's quota does not allow this growth, and no memory of the VM is about to be free. Recalls idle chunks.
    fn is_without_room(&mut self, id: WorkerId, vm: VmKey, bytes: u64, now: Millis) -> bool {
        match self.admit_growth(id, bytes) {
            // A worker that waits for growth in one thread gives back idle chunks in another.
            Err(LendRefusal::Limit(over)) => !self.recall_idle(vm, None, over, now) && !self.leaves(vm),
            Err(LendRefusal::Closed) => !self.leaves(vm),
            _ => false,
        }
    }

    /// True if memory of a VM is about to be free, because a worker has ended or is being ended, or may be seen to be free by the
    /// next look.
    pub(in crate::custody) fn leaves(&mut self, vm: VmKey) -> bool {
        let in_doubt = self.figures_judge
            && self.workers_of(vm).any(|worker| {
                worker.life == WorkerState::Alive && worker.returned.saturating_add(worker.reused) > 0
            });
        self.look_wanted |= in_doubt;
        in_doubt || self.comes_back(Some(vm)) || self.ending_of(vm).any(|worker| worker.charge() > 0)
    }

    /// True if a request waits for a look at the drivers' memory; said once.
    pub fn takes_look_wish(&mut self) -> bool {
        core::mem::take(&mut self.look_wanted)
    }

    /// True if growth of a worker's driver would exceed its VM's limits.
    pub(in crate::custody) fn grows_too_far(&self, id: WorkerId, reason: u32, bytes: u64) -> bool {
        Cause::from_number(reason).is_some_and(|cause| self.grows_over(id, self.least(cause, bytes)))
    }

    pub(in crate::custody) fn grown(&mut self, id: WorkerId, serial: u64, now: Millis) {
        let Some(worker) = self.workers.get_mut(&id) else { return };
        if !worker.grants.remove(&serial) {
            return self.abuse(id, "ends a grant that it does not have");
        }
        worker.grew = now;
        self.growth.active.remove(&(id, serial));
        self.recheck = true;
    }

    pub(in crate::custody) fn shrunk(&mut self, id: WorkerId, reason: u32, bytes: u64, now: Millis) {
        let Some(cause) = Cause::from_number(reason) else { return self.abuse(id, "shrinks for no reason") };
        let bytes = self.least(cause, bytes);
        if let Some(worker) = self.workers.get_mut(&id) {
            worker.returned = worker.returned.saturating_add(bytes).min(worker.granted);
            worker.shrank = now;
        }
    }

    pub(in crate::custody) fn refuse_growth(&mut self, vm: VmKey) {
        for wish in self.growth.wishes.remove_vm(vm) {
            self.no_longer_grows(wish.worker);
            self.refuse(wish.worker, wish.serial, code::DEVICE_UNAVAILABLE);
        }
    }

    fn no_longer_grows(&mut self, id: WorkerId) {
        self.no_longer_waits(id);
        if let Some(worker) = self.workers.get_mut(&id) {
            worker.wishes = worker.wishes.saturating_sub(1);
        }
    }

    /// Refuses a request because memory is short.
    pub(super) fn refuse_wish(&mut self, line: Line<IsStart>, index: usize) {
        if let Some(wish) = self.growth.wishes.remove(line, index) {
            self.no_longer_grows(wish.worker);
            self.refuse(wish.worker, wish.serial, code::OUT_OF_MEMORY);
        }
    }

    /// Grants what is possible now and refuses requests that waited too long. Returns the time of the next call.
    pub fn serve_growth(&mut self, now: Millis) -> Option<Millis> {
        self.growth.now = now;
        self.growth.end_turns();
        let members = &self.members;
        self.growth.let_go(|vm| members.iter().all(|(other, of)| *other == vm || of.is_empty()));
        let refused = self.refuse_late(now);
        let granted = self.grant(now);
        self.publish_closed();
        if !(refused && granted) {
            return Some(now);
        }
        let growing = self.growth.wishes.fronts().flat_map(|((vm, _), _)| self.workers_of(vm));
        let recalls = growing.filter_map(|worker| worker.recalled).map(Recall::overdue);
        recalls.filter(|time| *time > now).chain(self.growth.due()).min()
    }

    /// Refuses requests whose time is over or that no longer fit into the quota. `false` if more of them are left.
    fn refuse_late(&mut self, now: Millis) -> bool {
        let mut refusals = 0;
        for line in self.growth.wishes.turns() {
            let mut index = 0;
            while let Some(wish) = self.growth.wishes.get(line, index).filter(|_| index < CONSIDERED).copied()
            {
                if wish.deadline > now && !self.is_without_room(wish.worker, wish.vm, wish.bytes, now) {
                    index += 1;
                    continue;
                }
                if refusals == REFUSALS {
                    return false;
                }
                self.refuse_wish(line, index);
                self.growth.wishes.had_turn(line);
                refusals += 1;
            }
        }
        true
    }

    /// The request that is granted next, if it only waits for ballast, with its place: the VM whose last grant is longest ago goes
    /// first.
    pub(super) fn next_wish(&self) -> Option<(Line<IsStart>, usize, Wish)> {
        let growth = &self.growth;
        if growth.is_shifts_turn() {
            return None;
        }
        let waits = |(vm, is_start): Line<IsStart>| {
            growth.is_blocked(vm) || is_start && growth.turns.pays_until(vm, growth.now).is_some()
        };
        let ready = growth
            .wishes
            .heads(CONSIDERED)
            .filter(|(line, _, wish)| !waits(*line) && self.admit_growth(wish.worker, wish.bytes).is_ok());
        let first =
            ready.min_by_key(|(line, index, wish)| (growth.turns.last(line.0), wish.deadline, *index));
        first.map(|(line, index, wish)| (line, index, *wish))
    }

    /// The parts of a grant: the requested bytes, and the margin as far as the VM's quota has room for it.
    fn grant_for(&self, worker: &Worker, wish: &Wish) -> GrantParts {
        // A charge is whole units, so its part beyond the grants is room, too.
        let room = self.ledger.driver_room(wish.vm) / UNIT * UNIT;
        let granted = worker.granted.saturating_add(worker.reused);
        let room = worker.charge_with(0).saturating_add(room).saturating_sub(granted);
        let room = room.saturating_sub(self.due_for(worker, wish.bytes));
        let left = worker.margins.saturating_sub(wish.spent);
        let margin = self.settings.estimates.margin.saturating_sub(left).min(room);
        let all = wish.bytes.saturating_add(margin);
        let returned = all.min(worker.returned);
        GrantParts { fresh: all - returned, returned, margin }
    }

    /// Bytes that a grant lets a driver take beyond those that it has given back.
    pub(super) fn price(&self, wish: &Wish) -> u64 {
        self.workers.get(&wish.worker).map_or(0, |worker| self.grant_for(worker, wish).fresh)
    }

    /// Grants requests. `false` if more can be granted at once.
    fn grant(&mut self, now: Millis) -> bool {
        self.want_escrows();
        for _ in 0..GRANTS {
            if self.growth.pending() || self.shifts() {
                return true;
            }
            let Some((line, index, wish)) = self.next_wish() else { return true };
            if self.missing(self.price(&wish)) > 0 {
                return true;
            }
            self.growth.wishes.remove(line, index);
            self.no_longer_grows(wish.worker);
            let alive = |worker: &&Worker| worker.life == WorkerState::Alive;
            let Some(parts) =
                self.workers.get(&wish.worker).filter(alive).map(|worker| self.grant_for(worker, &wish))
            else {
                continue;
            };
            let judge = self.figures_judge;
            let Some(worker) = self.workers.get_mut(&wish.worker) else { continue };
            worker.returned -= parts.returned;
            if judge {
                worker.reused = worker.reused.saturating_add(parts.returned);
            }
            worker.granted = worker.granted.saturating_add(parts.fresh);
            worker.margins = worker.margins.saturating_add(parts.margin);
            worker.grants.insert(wish.serial);
            worker.grew = now;
            self.recharge(wish.worker);
            self.growth.turns.granted(wish.vm);
            let until = now.saturating_add(limits::GROW_MILLISECONDS);
            self.growth.active.insert((wish.worker, wish.serial), ActiveGrant { vm: wish.vm, until });
            self.answer(wish.worker, CustodyAnswer::Granted { serial: wish.serial, value: parts.margin });
        }
        self.next_wish().is_none()
    }
}
