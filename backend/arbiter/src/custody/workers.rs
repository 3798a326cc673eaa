//! Workers: their arrival, their requests, and their end.

use super::{Booked, Custody, Effect, Millis, Worker, WorkerState, leak_detector};
use crate::ids::{VmKey, WorkerId};
use sluice_driver::code;
use sluice_messages::{
    control::ArbiterEvent,
    custody::{CustodyAnswer, CustodyRequest, UNIT},
};
use sluice_protocol::limits;
use std::collections::{BTreeMap, BTreeSet, HashSet};

impl Custody {
    /// Adds a worker of a VM that serves a process of `user`. `false` if the VM's epoch is old; then it is not served.
    pub fn add_worker(&mut self, id: WorkerId, key: VmKey, process: u32, user: u32) -> bool {
        if !self.admits(key) {
            return false;
        }
        let worker = Worker {
            vm: key,
            process,
            user,
            guest: 0,
            life: WorkerState::Alive,
            leases: BTreeMap::new(),
            lent: 0,
            held: 0,
            peak: 0,
            borrowed: 0,
            idle: 0,
            pinned: 0,
            imported: BTreeMap::new(),
            shares: BTreeSet::new(),
            shared: 0,
            waiting: 0,
            wishes: 0,
            recalled: None,
            granted: 0,
            margins: 0,
            returned: 0,
            shrank: 0,
            reused: 0,
            grants: HashSet::new(),
            grew: 0,
            booked: Booked::Unlisted,
            seen: 0,
            charged: 0,
            counted: (0, 0),
            leak_detector: leak_detector::LeakDetector::default(),
        };
        self.workers.insert(id, worker);
        self.members.entry(key).or_default().push(id);
        self.touched.insert(key);
        true
    }

    /// True if requests of a worker may be received: it lives, and has fewer pending requests than the limit.
    #[must_use]
    pub fn listens(&self, id: WorkerId) -> bool {
        self.workers.get(&id).is_some_and(|worker| {
            worker.life == WorkerState::Alive && worker.waiting < limits::CUSTODY_REQUESTS
        })
    }

    /// Sets the number of the next new share. The caller draws it, because this module has no randomness.
    pub const fn set_next_share(&mut self, number: u128) {
        self.next_share = Some(number);
    }

    /// Handles a request of a worker.
    pub fn request(&mut self, id: WorkerId, request: CustodyRequest, now: Millis) {
        let Some(worker) = self.workers.get_mut(&id).filter(|worker| worker.life == WorkerState::Alive)
        else {
            return;
        };
        let key = worker.vm;
        match request {
            CustodyRequest::Hello { process } => worker.guest = process,
            CustodyRequest::Take { serial, bytes } => self.take(id, serial, bytes, now),
            CustodyRequest::Give { lease } => self.give(id, lease),
            CustodyRequest::Idle { bytes } => self.set_idle(id, bytes),
            CustodyRequest::Grow { serial, reason, bytes, spent } => {
                self.grow(id, serial, (reason, bytes, spent), now)
            }
            CustodyRequest::Shrunk { reason, bytes } => self.shrunk(id, reason, bytes, now),
            CustodyRequest::Grown { serial } => self.grown(id, serial, now),
            CustodyRequest::Share { serial, share, lease } => self.share(id, serial, share, lease),
            CustodyRequest::Unshare { share } => self.unshare(id, share),
            CustodyRequest::Open { serial, share } => self.open(id, serial, share),
            CustodyRequest::Pin { serial, bytes } => {
                if self.ledger.pin(key, bytes) {
                    // No overflow: it is part of the VM's sum, which did not overflow.
                    worker.pinned = worker.pinned.saturating_add(bytes);
                    self.answer(id, CustodyAnswer::Granted { serial, value: 0 });
                } else {
                    self.refuse(id, serial, code::OUT_OF_MEMORY);
                }
            }
            CustodyRequest::Unpin { bytes } => match worker.pinned.checked_sub(bytes) {
                Some(rest) => {
                    worker.pinned = rest;
                    let done = self.ledger.unpin(key, bytes);
                    self.report_if_broken(key, done);
                }
                None => self.abuse(id, "unpins more than it pinned"),
            },
            CustodyRequest::Process { serial, index } => self.list(id, serial, index),
        }
    }

    fn list(&mut self, id: WorkerId, serial: u64, index: u32) {
        let Some(worker) = self.workers.get(&id) else { return };
        let members = self.members.get(&worker.vm).into_iter().flatten();
        let living =
            members.filter_map(|id| self.workers.get(id)).filter(|other| other.life == WorkerState::Alive);
        let index = usize::try_from(index).unwrap_or(usize::MAX);
        // The part of the driver share that counts towards the quota.
        let (driver, headroom) =
            self.ledger.account(worker.vm).map_or((0, 0), |account| (account.driver, account.terms.headroom));
        let counts = |charged: u64| match u128::from(driver.saturating_sub(headroom)) {
            0 => 0,
            part => u64::try_from(u128::from(charged) * part / u128::from(driver)).unwrap_or(charged),
        };
        // A margin without a context is not listed, as a monitor would not list it.
        let margin = self.settings.estimates.margin;
        let driver = |other: &Worker| match other.granted.saturating_sub(other.returned) > margin {
            true => counts(other.charged),
            false => 0,
        };
        let bytes = |other: &Worker| other.lent - other.idle() + driver(other);
        let found = living.skip(index).map(|other| (other.guest, bytes(other))).next();
        match found {
            Some((process, bytes)) => self.answer(id, CustodyAnswer::Process { serial, process, bytes }),
            None => self.refuse(id, serial, code::INVALID_VALUE),
        }
    }

    /// Ends a worker that broke the protocol.
    pub fn abuse(&mut self, id: WorkerId, how: &'static str) {
        if let Some((vm, process)) = self.end(id) {
            tracing::warn!(vm, process, how, "a worker broke the protocol and is killed");
            self.event(ArbiterEvent::Abuse, vm, process, 0);
        }
    }

    /// Ends a worker because none of its submitted work completes.
    pub fn hung(&mut self, id: WorkerId) {
        if let Some((vm, process)) = self.end(id) {
            tracing::warn!(vm, process, "a worker is killed: none of its submitted work completes");
            self.event(ArbiterEvent::Hung, vm, process, 0);
        }
    }

    /// Kills a worker; returns its VM and its process number if it was alive.
    pub(super) fn end(&mut self, id: WorkerId) -> Option<(u32, u32)> {
        let worker = self.workers.get_mut(&id).filter(|worker| worker.life == WorkerState::Alive)?;
        worker.life = WorkerState::Ending;
        let (key, process) = (worker.vm, worker.process);
        self.ending.insert((key, id));
        self.effects.push_back(Effect::Kill { worker: id });
        self.recheck = true;
        Some((key.vm, process))
    }

    /// A worker closed its socket. Without the socket it may do nothing more.
    pub fn worker_left(&mut self, id: WorkerId) {
        self.end(id);
    }

    /// A worker's process has ended: its VM is no longer charged for its leases. Its chunks serve other VMs after
    /// [`Custody::worker_gone`].
    pub fn worker_died(&mut self, id: WorkerId, now: Millis) {
        let Some(worker) = self.workers.get_mut(&id) else { return };
        if matches!(worker.life, WorkerState::Dead { .. }) {
            return;
        }
        worker.life = WorkerState::Dead { since: now, reported: false };
        let key = worker.vm;
        self.ending.insert((key, id));
        let leases = core::mem::take(&mut worker.leases);
        let shares = core::mem::take(&mut worker.shares);
        worker.shared = 0;
        let pinned = core::mem::take(&mut worker.pinned);
        let idle = worker.idle();
        worker.lent = 0;
        worker.held = 0;
        worker.idle = 0;
        worker.waiting = 0;
        worker.wishes = 0;
        worker.imported.values_mut().for_each(|leases| *leases = 0);
        let done = self.ledger.set_idle(key, idle, 0);
        self.report_if_broken(key, done);
        let done = self.ledger.unpin(key, pinned);
        self.report_if_broken(key, done);
        for chunk in leases.into_values() {
            self.end_lease(key, chunk);
        }
        for share in shares {
            self.shares.remove(&share);
        }
        self.waiters.remove_worker(key, id);
        let driver = self.workers.get(&id).map_or(0, |worker| worker.charged);
        self.growth.died(id, key, driver.max(UNIT), now);
        self.recheck = true;
        self.changed = true;
        self.touched.insert(key);
    }

    /// Workers of a VM that are ending or have ended, and that the driver may still list.
    pub(super) fn ending_of(&self, vm: VmKey) -> impl Iterator<Item = &Worker> {
        let of_vm = self.ending.range((vm, WorkerId(0))..=(vm, WorkerId(u64::MAX)));
        of_vm.filter_map(|(_, id)| self.workers.get(id))
    }

    /// The driver no longer lists the worker: once the chunks that it imported are clean, their memory may serve other VMs.
    pub fn worker_gone(&mut self, id: WorkerId) {
        if !self.workers.get(&id).is_some_and(|worker| matches!(worker.life, WorkerState::Dead { .. })) {
            return;
        }
        let Some(worker) = self.workers.remove(&id) else { return };
        let key = worker.vm;
        self.ending.remove(&(key, id));
        let done = self.ledger.set_driver(key, worker.charged, 0);
        self.report_if_broken(key, done);
        let (granted, doubtful) = worker.counted;
        let done = self.ledger.set_doubtful(key, doubtful, 0);
        self.report_if_broken(key, done);
        let done = self.ledger.set_granted(key, granted, 0);
        self.report_if_broken(key, done);
        for chunk in worker.imported.into_keys() {
            if let Err(broken) = self.chunks.forget_importer(chunk, id) {
                self.broken(key.vm, broken);
            }
        }
        for kept in &mut self.kept {
            kept.importers.retain(|importer| *importer != id);
        }
        if let Some(members) = self.members.get_mut(&key) {
            members.retain(|member| *member != id);
            if members.is_empty() {
                self.members.remove(&key);
            }
        }
        self.growth.gone(id);
        self.recheck = true;
        self.changed = true;
        self.touched.insert(key);
        self.forget_leaving();
    }

    /// Dead workers that the driver may still list, with their process numbers.
    pub fn unconfirmed(&self) -> impl Iterator<Item = (WorkerId, u32)> {
        let dead = |worker: &Worker| matches!(worker.life, WorkerState::Dead { .. });
        self.workers.iter().filter(move |(_, worker)| dead(worker)).map(|(id, worker)| (*id, worker.process))
    }

    /// The inventory still lists a dead worker.
    pub fn still_listed(&mut self, id: WorkerId, now: Millis) {
        // A living worker may have the same process number by now and be listed rightly: the dead worker's memory waits for both.
        let number = self.workers.get(&id).map(|worker| worker.process);
        let lives = |worker: &Worker| {
            !matches!(worker.life, WorkerState::Dead { .. }) && Some(worker.process) == number
        };
        if self.workers.values().any(lives) {
            return;
        }
        let Some(worker) = self.workers.get_mut(&id) else { return };
        let WorkerState::Dead { since, reported } = &mut worker.life else { return };
        if !*reported && now.saturating_sub(*since) >= limits::STUCK_MILLISECONDS {
            *reported = true;
            let (vm, process) = (worker.vm.vm, worker.process);
            self.event(ArbiterEvent::Stuck, vm, process, 0);
        }
    }

    /// Process numbers of all workers, including dead ones that the driver may still list.
    pub fn processes(&self) -> impl Iterator<Item = (WorkerId, u32)> {
        self.workers.iter().map(|(id, worker)| (*id, worker.process))
    }

    /// True if there are no workers.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.workers.is_empty()
    }

    /// True if a worker lives.
    #[must_use]
    pub fn serves(&self) -> bool {
        self.workers.values().any(|worker| !matches!(worker.life, WorkerState::Dead { .. }))
    }
}
