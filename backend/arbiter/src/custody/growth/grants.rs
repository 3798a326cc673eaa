//! Grants: requested, admitted, given, ended and refused.

use super::super::{Custody, Millis, WorkerState};
use super::Wish;
use crate::{
    ids::{VmKey, WorkerId},
    ledger::LendRefusal,
};
use sluice_driver::code;
use sluice_messages::custody::{CustodyAnswer, Growth as Cause, UNIT};
use sluice_protocol::limits;
use std::collections::VecDeque;

impl Custody {
    pub(in crate::custody) fn grow(
        &mut self,
        id: WorkerId,
        serial: u64,
        (reason, bytes, left): (u32, u64, u64),
        now: Millis,
    ) {
        let Some(cause) = Cause::from_number(reason) else { return self.abuse(id, "grows for no reason") };
        let Some(worker) = self.workers.get(&id) else { return };
        let vm = worker.vm;
        if worker.grants.len() + worker.waiting >= limits::CUSTODY_REQUESTS {
            return self.abuse(id, "keeps too many grants to grow");
        }
        if self.ledger.account(vm).is_none_or(|account| account.closed) {
            return self.refuse(id, serial, code::DEVICE_UNAVAILABLE);
        }
        let bytes = self.least(cause, bytes);
        if self.grows_over(id, bytes) && !self.leaves(vm) {
            return self.refuse(id, serial, code::OUT_OF_MEMORY);
        }
        if let Some(worker) = self.workers.get_mut(&id) {
            worker.waiting += 1;
        }
        let until = now.saturating_add(limits::GROW_WAIT_MILLISECONDS);
        let patient = now.saturating_add(limits::GROW_TIMEOUT_MILLISECONDS);
        let starts = cause == Cause::Context;
        let wish = Wish { worker: id, vm, serial, starts, bytes, left, patient, hurried: false, until };
        self.growth.queue.push_back(wish);
    }

    /// The least number of bytes that growth takes.
    fn least(&self, cause: Cause, bytes: u64) -> u64 {
        if cause == Cause::Context { bytes.max(self.settings.estimates.context) } else { bytes }
    }

    /// Checks that a VM may be charged for this growth of a worker's driver.
    pub(super) fn admit_growth(&self, id: WorkerId, bytes: u64) -> Result<(), LendRefusal> {
        let worker = self.workers.get(&id).ok_or(LendRefusal::Closed)?;
        self.ledger.admit_driver(worker.vm, worker.charge_with(bytes).saturating_sub(worker.charged))
    }

    /// True if the VM's quota does not allow this growth. An ancestor's escrow may still rise.
    fn grows_over(&self, id: WorkerId, bytes: u64) -> bool {
        matches!(self.admit_growth(id, bytes), Err(LendRefusal::Limit(_) | LendRefusal::Closed))
    }

    /// True if memory of a VM's drivers is about to be free, because a worker has ended or is being ended.
    pub(in crate::custody) fn leaves(&self, vm: VmKey) -> bool {
        self.ending_of(vm).any(|worker| worker.charge() > 0)
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

    pub(in crate::custody) fn shrunk(&mut self, id: WorkerId, reason: u32, bytes: u64) {
        let Some(cause) = Cause::from_number(reason) else { return self.abuse(id, "shrinks for no reason") };
        let bytes = self.least(cause, bytes);
        if let Some(worker) = self.workers.get_mut(&id) {
            worker.returned = worker.returned.saturating_add(bytes).min(worker.granted);
        }
    }

    pub(in crate::custody) fn refuse_growth(&mut self, vm: VmKey) {
        let (refused, kept): (VecDeque<Wish>, _) =
            core::mem::take(&mut self.growth.queue).into_iter().partition(|wish| wish.vm == vm);
        self.growth.queue = kept;
        for wish in refused {
            self.no_longer_waits(wish.worker);
            self.refuse(wish.worker, wish.serial, code::DEVICE_UNAVAILABLE);
        }
    }

    /// Grants what is possible now and refuses requests that waited too long. Returns the time of the next call.
    pub fn serve_growth(&mut self, now: Millis) -> Option<Millis> {
        self.growth.now = now;
        // A grant that has not ended by now is charged in full and no longer delays other VMs.
        self.growth.active.retain(|_, until| *until > now);
        let (late, rest): (VecDeque<Wish>, _) =
            core::mem::take(&mut self.growth.queue).into_iter().partition(|wish| {
                wish.until <= now || self.grows_over(wish.worker, wish.bytes) && !self.leaves(wish.vm)
            });
        self.growth.queue = rest;
        for wish in late {
            self.no_longer_waits(wish.worker);
            self.refuse(wish.worker, wish.serial, code::OUT_OF_MEMORY);
        }
        for wish in &mut self.growth.queue {
            wish.hurried |= wish.patient <= now;
        }
        self.grant(now);
        self.publish_closed();
        self.growth.due()
    }

    /// The first request that only waits for ballast; the VM whose last grant is longest ago goes first.
    pub(super) fn next_wish(&self) -> Option<(usize, Wish)> {
        let growth = &self.growth;
        let ready = |wish: &Wish| {
            let pays = wish.starts && growth.turns.pays_until(wish.vm, growth.now).is_some();
            !growth.is_blocked(wish.vm) && !pays && self.admit_growth(wish.worker, wish.bytes).is_ok()
        };
        let wishes = growth.queue.iter().zip(0..).filter(|(wish, _)| ready(wish));
        wishes.min_by_key(|(wish, at)| (growth.turns.last(wish.vm), *at)).map(|(wish, at)| (at, *wish))
    }

    /// Bytes that a grant lets a driver take: the requested ones, and the margin as far as the VM's quota has room for it.
    pub(super) fn price(&self, wish: &Wish) -> u64 {
        let Some(worker) = self.workers.get(&wish.worker) else { return 0 };
        // A charge is whole units, so its part beyond the grants is room, too.
        let room = self.ledger.driver_room(wish.vm) / UNIT * UNIT;
        let room = worker.charged.saturating_add(room).saturating_sub(worker.granted);
        let net = worker.net(wish.bytes);
        net.saturating_add(self.settings.estimates.margin.saturating_sub(wish.left)).min(room.max(net))
    }

    fn grant(&mut self, now: Millis) {
        self.want_escrows();
        while !self.growth.pending() && !self.shifts() {
            let Some((index, wish)) = self.next_wish() else { return };
            let price = self.price(&wish);
            if self.missing(price) > 0 {
                return;
            }
            self.growth.queue.remove(index);
            self.no_longer_waits(wish.worker);
            let Some(worker) =
                self.workers.get_mut(&wish.worker).filter(|worker| worker.life == WorkerState::Alive)
            else {
                continue;
            };
            let net = worker.net(wish.bytes);
            worker.returned = worker.returned.saturating_sub(wish.bytes);
            worker.granted = worker.granted.saturating_add(price);
            worker.grants.insert(wish.serial);
            worker.grew = now;
            self.recharge(wish.worker);
            self.growth.turns.granted(wish.vm);
            let until = now.saturating_add(limits::GROW_MILLISECONDS);
            self.growth.active.insert((wish.worker, wish.serial), until);
            let value = price - net;
            self.answer(wish.worker, CustodyAnswer::Granted { serial: wish.serial, value });
        }
    }
}
