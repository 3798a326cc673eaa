//! Lending: takes, gives, shares, and takers that wait.

use super::{
    Custody, Effect, Millis, RECALL_OVERDUE, Recall, Task, Worker, WorkerState, class_of,
    lines::{Line, Waits},
};
use crate::{
    chunks::ChunkState,
    ids::{ChunkId, Class, VmKey, WorkerId},
    ledger::LendRefusal,
};
use sluice_driver::{Code, code};
use sluice_messages::{
    control::{ArbiterEvent, FromArbiter},
    custody::{CustodyAnswer, CustodyRequest},
};
use sluice_protocol::limits;
/// Milliseconds for which a request above the limit waits for reports of idle bytes: a worker reports them after it has told its
/// guest that memory is free.
const REPORTS: Millis = 50;
/// Milliseconds between two recalls of one worker.
const RECALL_EVERY: Millis = 20;
/// Milliseconds without a recall after which the next one counts as the first.
const RECALL_OVER: Millis = 2 * RECALL_OVERDUE;
/// Milliseconds after which an unchanged request for more escrow is repeated: `sluiced` may have been away.
const ESCROW_EVERY: Millis = 500;
/// Waiting takers that are answered in one call; the others follow in the next one.
const ANSWERS: usize = 64;

/// A taker that waits for a chunk.
#[derive(Clone, Copy, Debug)]
pub(super) struct Waiter {
    pub(super) worker: WorkerId,
    pub(super) serial: u64,
    since: Millis,
    until: Millis,
}

impl Waits for Waiter {
    fn worker(&self) -> WorkerId {
        self.worker
    }
}

/// A request to `sluiced` for more escrow: the bytes, and the time.
#[derive(Clone, Copy, Debug)]
pub(super) struct EscrowRequest {
    bytes: u64,
    sent: Millis,
}

/// Leases of one worker that others of its VM may open.
#[derive(Clone, Debug)]
pub(super) struct LeaseShare {
    vm: VmKey,
    owner: WorkerId,
    /// Leases of the owner, in order; each chunk occurs once.
    leases: Vec<(u64, ChunkId)>,
}

/// The outcome of a take.
enum Attempt {
    Lent,
    Wait,
    No(Code),
}

impl Custody {
    pub(super) fn take(&mut self, id: WorkerId, serial: u64, bytes: u64, now: Millis) {
        let Some(class) = class_of(bytes) else { return self.abuse(id, "takes a chunk of no known size") };
        let Some(worker) = self.workers.get(&id) else { return };
        let vm = worker.vm;
        self.taken_from = true;
        // The taker that waits longest goes first.
        let queued = self.waiters.waits((vm, class));
        let attempt = if queued { Attempt::Wait } else { self.attempt(id, serial, class, now, now) };
        match attempt {
            Attempt::Lent => {}
            Attempt::No(error) => self.refuse(id, serial, error),
            Attempt::Wait => {
                if let Some(worker) = self.workers.get_mut(&id) {
                    worker.waiting += 1;
                }
                let until = now.saturating_add(limits::TAKE_MILLISECONDS);
                self.waiters.push((vm, class), Waiter { worker: id, serial, since: now, until });
            }
        }
    }

    /// True if a worker's request would exceed its VM's limit.
    #[must_use]
    pub fn exceeds(&self, id: WorkerId, request: &CustodyRequest) -> bool {
        match *request {
            CustodyRequest::Take { bytes, .. } => {
                let vm = self.workers.get(&id).map(|worker| worker.vm);
                vm.is_some_and(|vm| matches!(self.ledger.admit(vm, bytes), Err(LendRefusal::Limit(_))))
            }
            CustodyRequest::Grow { reason, bytes, .. } => self.grows_too_far(id, reason, bytes),
            _ => false,
        }
    }

    /// Lends a chunk to a worker that has requested it at `since`, if that is possible now.
    fn attempt(&mut self, id: WorkerId, serial: u64, class: Class, since: Millis, now: Millis) -> Attempt {
        let Some(worker) = self.workers.get(&id) else { return Attempt::No(code::DEVICE_UNAVAILABLE) };
        let vm = worker.vm;
        if worker.leases.len() >= limits::LEASES {
            return Attempt::No(code::OUT_OF_MEMORY);
        }
        match self.ledger.admit(vm, class.bytes()) {
            Ok(()) => {}
            Err(LendRefusal::Closed) => return Attempt::No(code::DEVICE_UNAVAILABLE),
            Err(LendRefusal::Limit(over)) if self.recall(id, vm, over, now) => return Attempt::Wait,
            Err(LendRefusal::Limit(_)) if self.awaits_reports(id, vm, since, now) => return Attempt::Wait,
            Err(LendRefusal::Limit(_)) => return Attempt::No(code::OUT_OF_MEMORY),
            Err(LendRefusal::Ancestor(ancestor, bytes)) => {
                self.want_escrow(ancestor, bytes, now);
                return Attempt::Wait;
            }
            Err(LendRefusal::Capacity) if self.moves() || self.comes_back(None) => return Attempt::Wait,
            Err(LendRefusal::Capacity) => return Attempt::No(code::OUT_OF_MEMORY),
        }
        match self.chunks.clean_for(vm, class) {
            Some(chunk) => self.lend(id, vm, serial, chunk),
            None if self.may_come(vm, class) => Attempt::Wait,
            None => {
                self.wanted = Some(self.wanted.map_or(class, |wanted| wanted.min(class)));
                Attempt::No(code::OUT_OF_MEMORY)
            }
        }
    }

    fn lend(&mut self, id: WorkerId, vm: VmKey, serial: u64, chunk: ChunkId) -> Attempt {
        let Some(bytes) = self.chunks.get(chunk).map(|chunk| chunk.class.bytes()) else {
            return Attempt::No(code::UNKNOWN);
        };
        if self.ledger.charge(vm, bytes).is_err() {
            return Attempt::No(code::OUT_OF_MEMORY);
        }
        if let Err(broken) = self.chunks.lend(chunk, vm, id) {
            self.broken(vm.vm, broken);
            let done = self.ledger.refund(vm, bytes);
            self.report_if_broken(vm, done);
            return Attempt::No(code::UNKNOWN);
        }
        self.lease(id, serial, chunk, bytes, false);
        Attempt::Lent
    }

    /// Records a lease and sends the chunk.
    fn lease(&mut self, id: WorkerId, serial: u64, chunk: ChunkId, bytes: u64, more: bool) {
        let lease = self.next_lease;
        self.next_lease += 1;
        let now = self.growth.now();
        self.change_worker(id, |worker| {
            worker.borrowed = now;
            worker.add_lease(lease, chunk, bytes);
            worker.leak_detector.note_growth();
        });
        self.effects.push_back(Effect::Lend { worker: id, serial, lease, chunk, bytes, more });
        self.changed = true;
    }

    /// Changes a worker and updates its VM's idle bytes.
    fn change_worker(&mut self, id: WorkerId, change: impl FnOnce(&mut Worker)) {
        let Some(worker) = self.workers.get_mut(&id) else { return };
        let (vm, before) = (worker.vm, worker.idle());
        change(worker);
        worker.peak = worker.peak.max(worker.held);
        let after = worker.idle();
        let done = self.ledger.set_idle(vm, before, after);
        self.report_if_broken(vm, done);
        self.touched.insert(vm);
    }

    /// The VM exceeds its limit by `over`: recalls idle chunks of its other workers. True if memory comes back.
    fn recall(&mut self, id: WorkerId, vm: VmKey, over: u64, now: Millis) -> bool {
        // Their memory comes back when their processes have ended.
        let ending = self
            .ending_of(vm)
            .any(|worker| worker.life == WorkerState::Ending && worker.lent > 0 || worker.charged > 0);
        self.recall_idle(vm, Some(id), over, now) || ending || self.leaves(vm)
    }

    /// True if another worker of the VM may report idle bytes that it had when the request of `since` came.
    fn awaits_reports(&mut self, id: WorkerId, vm: VmKey, since: Millis, now: Millis) -> bool {
        let end = since.saturating_add(REPORTS);
        let own = self.workers.get(&id).map_or(0, |worker| worker.lent);
        let awaits = now < end && self.ledger.account(vm).is_some_and(|account| account.lent > own);
        if awaits {
            self.reports_end = Some(self.reports_end.map_or(end, |other| other.min(end)));
        }
        awaits
    }

    /// Recalls idle chunks of a VM's workers but one. `false` if there are fewer than `bytes`, those of overdue recalls not counted.
    pub(super) fn recall_idle(
        &mut self,
        vm: VmKey,
        except: Option<WorkerId>,
        bytes: u64,
        now: Millis,
    ) -> bool {
        let mut missing = bytes;
        let own = except.and_then(|id| self.workers.get(&id)).map_or(0, Worker::idle);
        let others = self.ledger.account(vm).is_some_and(|account| account.idle > own);
        let members = self.members.get(&vm).filter(|_| others).cloned();
        for member in members.unwrap_or_default() {
            let Some(worker) = self.workers.get_mut(&member) else { continue };
            let idle = worker.idle();
            if Some(member) == except || worker.life != WorkerState::Alive || idle == 0 || missing == 0 {
                continue;
            }
            let past = worker.recalled.filter(|recall| now.saturating_sub(recall.last) < RECALL_OVER);
            let mut recall = past.unwrap_or(Recall { since: now, last: now });
            if past.is_none_or(|recall| now.saturating_sub(recall.last) >= RECALL_EVERY) {
                recall.last = now;
                self.effects.push_back(Effect::Answer {
                    worker: member,
                    answer: CustodyAnswer::Recall { bytes: missing.min(idle) },
                });
            }
            worker.recalled = Some(recall);
            if recall.overdue() > now {
                missing = missing.saturating_sub(idle);
            }
        }
        missing == 0
    }

    /// Requests more escrow for an ancestor, unless as much was requested just before.
    pub(super) fn want_escrow(&mut self, ancestor: u32, bytes: u64, now: Millis) {
        let last = self.escrow_requests.get(&ancestor);
        if last.is_none_or(|last| bytes > last.bytes || now.saturating_sub(last.sent) >= ESCROW_EVERY) {
            self.escrow_requests.insert(ancestor, EscrowRequest { bytes, sent: now });
            self.effects.push_back(Effect::Tell(FromArbiter::WantEscrow { ancestor, bytes }));
        }
    }

    /// True if a VM can get a chunk of this class without any other chunk being given back.
    fn may_come(&self, vm: VmKey, class: Class) -> bool {
        let larger = Class::ALL.into_iter().filter(|other| *other <= class);
        self.chunks.dirty_for(vm, class).is_some()
            || self.moves()
            || self.comes_back(None)
            || self.scrubs()
            || self.ending.iter().any(|(_, id)| self.workers.get(id).is_some_and(|w| !w.imported.is_empty()))
            || larger.clone().any(|larger| {
                self.chunks.clean_free(larger).next().is_some()
                    || self.chunks.dirty_free(larger).next().is_some()
            })
            || larger.flat_map(|larger| self.returned(larger)).next().is_some()
    }

    /// Chunks that VMs gave back or left behind. Chunks that dead workers may hold wait for the inventory.
    pub(super) fn returned(&self, class: Class) -> impl Iterator<Item = ChunkId> {
        let living =
            |id: &WorkerId| self.workers.get(id).is_some_and(|worker| worker.life == WorkerState::Alive);
        let alive =
            move |id: &ChunkId| self.chunks.get(*id).is_some_and(|chunk| chunk.importers.iter().all(living));
        self.chunks.returners().flat_map(move |vm| self.chunks.returned_of(vm, class)).filter(alive)
    }

    /// Answers waiting takers, as far as possible now and VM by VM. Returns the time of the next call.
    pub fn serve_waiters(&mut self, now: Millis) -> Option<Millis> {
        let overdue = self.waiters.fronts().any(|(_, waiter)| waiter.until <= now);
        let reported = self.reports_end.take_if(|end| *end <= now).is_some();
        if core::mem::take(&mut self.recheck) || overdue || reported {
            let mut turns = self.waiters.turns();
            let mut answers = 0;
            while let Some(line) = turns.pop_front() {
                if answers == ANSWERS {
                    self.recheck = true;
                    return Some(now);
                }
                // If the first taker of a line cannot be served, none behind it can.
                if self.serve_waiter(line, now) {
                    answers += 1;
                    self.waiters.had_turn(line);
                    turns.push_back(line);
                }
            }
        }
        self.waiters.fronts().map(|(_, waiter)| waiter.until).chain(self.reports_end).min()
    }

    /// Answers the first taker of a line, if that is possible now.
    fn serve_waiter(&mut self, (vm, class): Line<Class>, now: Millis) -> bool {
        let Some(waiter) = self.waiters.get((vm, class), 0).copied() else { return false };
        match self.attempt(waiter.worker, waiter.serial, class, waiter.since, now) {
            Attempt::Lent => {}
            Attempt::No(error) => self.refuse(waiter.worker, waiter.serial, error),
            Attempt::Wait if waiter.until > now => return false,
            Attempt::Wait if self.is_held_up(vm, class) => {
                if let Some(waiter) = self.waiters.front_mut((vm, class)) {
                    waiter.until = now.saturating_add(limits::TAKE_MILLISECONDS);
                }
                return false;
            }
            Attempt::Wait => self.refuse(waiter.worker, waiter.serial, code::OUT_OF_MEMORY),
        }
        self.waiters.remove((vm, class), 0);
        self.no_longer_waits(waiter.worker);
        true
    }

    /// True if memory for a taker only has to be split or moved, but a grant that has not ended prevents it. No taker is refused
    /// for that: the grant ends soon, and then memory moves before other grants begin.
    fn is_held_up(&self, vm: VmKey, class: Class) -> bool {
        !self.growth.unlocked()
            && matches!(self.help(vm, class, &[]), Some(Task::Remake { .. } | Task::Move { .. }))
    }

    pub(super) fn give(&mut self, id: WorkerId, lease: u64) {
        let Some(worker) = self.workers.get_mut(&id) else { return };
        let vm = worker.vm;
        let Some(chunk) = worker.leases.get(&lease).copied() else {
            return self.abuse(id, "gives back a lease that is not its own");
        };
        let bytes = self.chunks.get(chunk).map_or(0, |chunk| chunk.class.bytes());
        let now = self.growth.now();
        self.change_worker(id, |worker| {
            if let Some(recall) = &mut worker.recalled {
                recall.since = now;
            }
            worker.end_lease(lease, chunk, bytes);
            worker.leak_detector.note_return();
        });
        self.end_lease(vm, chunk);
    }

    /// Ends a lease that could not be sent.
    pub fn not_sent(&mut self, id: WorkerId, serial: u64, lease: u64) {
        if self.workers.get(&id).is_some_and(|worker| worker.leases.contains_key(&lease)) {
            self.give(id, lease);
            self.refuse(id, serial, code::OUT_OF_MEMORY);
        }
    }

    pub(super) fn end_lease(&mut self, vm: VmKey, chunk: ChunkId) {
        let bytes = self.chunks.get(chunk).map_or(0, |chunk| chunk.class.bytes());
        match self.chunks.end_lease(chunk) {
            Ok(true) => {
                let done = self.ledger.refund(vm, bytes);
                self.report_if_broken(vm, done);
            }
            Ok(false) => {}
            Err(broken) => self.broken(vm.vm, broken),
        }
        self.recheck = true;
        self.changed = true;
        self.touched.insert(vm);
    }

    pub(super) fn set_idle(&mut self, id: WorkerId, bytes: u64) {
        self.change_worker(id, |worker| worker.idle = bytes);
        self.recheck = true;
    }

    /// The workers of a VM.
    pub(super) fn workers_of(&self, vm: VmKey) -> impl Iterator<Item = &Worker> {
        self.members.get(&vm).into_iter().flatten().filter_map(|member| self.workers.get(member))
    }

    pub(super) fn share(&mut self, id: WorkerId, serial: u64, share: u128, lease: u64) {
        let Some(worker) = self.workers.get(&id) else { return };
        let vm = worker.vm;
        let Some(chunk) = worker.leases.get(&lease).copied() else {
            return self.abuse(id, "shares a lease that is not its own");
        };
        if self.workers_of(vm).map(|worker| worker.shared).sum::<usize>() >= limits::SHARED_LEASES {
            return self.refuse(id, serial, code::OUT_OF_MEMORY);
        }
        if share == 0 {
            if self.workers_of(vm).map(|worker| worker.shares.len()).sum::<usize>() >= limits::SHARES {
                return self.refuse(id, serial, code::OUT_OF_MEMORY);
            }
            let fresh = self.next_share.take().filter(|number| !self.shares.contains_key(number));
            let Some(number) = fresh.filter(|number| *number != 0) else {
                return self.refuse(id, serial, code::UNKNOWN);
            };
            self.shares.insert(number, LeaseShare { vm, owner: id, leases: vec![(lease, chunk)] });
            if let Some(worker) = self.workers.get_mut(&id) {
                worker.shares.insert(number);
                worker.shared += 1;
            }
            return self.answer(id, CustodyAnswer::Shared { serial, share: number });
        }
        match self.shares.get_mut(&share).filter(|share| share.owner == id) {
            None => self.abuse(id, "adds to a share that is not its own"),
            Some(entry) if entry.leases.len() >= limits::SHARE_CHUNKS => {
                self.refuse(id, serial, code::OUT_OF_MEMORY);
            }
            Some(entry) if entry.leases.iter().any(|(_, other)| *other == chunk) => {
                self.refuse(id, serial, code::INVALID_VALUE);
            }
            Some(entry) => {
                entry.leases.push((lease, chunk));
                if let Some(worker) = self.workers.get_mut(&id) {
                    worker.shared += 1;
                }
                self.answer(id, CustodyAnswer::Shared { serial, share });
            }
        }
    }

    pub(super) fn unshare(&mut self, id: WorkerId, share: u128) {
        let Some(leases) =
            self.shares.get(&share).filter(|share| share.owner == id).map(|share| share.leases.len())
        else {
            return self.abuse(id, "ends a share that is not its own");
        };
        self.shares.remove(&share);
        if let Some(worker) = self.workers.get_mut(&id) {
            worker.shares.remove(&share);
            worker.shared = worker.shared.saturating_sub(leases);
        }
    }

    pub(super) fn open(&mut self, id: WorkerId, serial: u64, share: u128) {
        let Some(worker) = self.workers.get(&id) else { return };
        let vm = worker.vm;
        let of_user = |owner| self.workers.get(owner).is_some_and(|owner| owner.user == worker.user);
        let known = self.shares.get(&share).filter(|share| share.vm == vm && of_user(&share.owner));
        // Numbers of other VMs or users, and numbers that never existed, get the same answer.
        let Some(known) = known.cloned() else { return self.refuse(id, serial, code::INVALID_VALUE) };
        if self.ledger.account(vm).is_none_or(|account| account.closed) {
            return self.refuse(id, serial, code::DEVICE_UNAVAILABLE);
        }
        let owner = self.workers.get(&known.owner);
        let chunks: Option<Vec<ChunkId>> = owner.and_then(|owner| {
            known.leases.iter().map(|(lease, _)| owner.leases.get(lease).copied()).collect()
        });
        // The owner has given back one of its chunks, so the share is incomplete.
        let Some(chunks) = chunks else { return self.refuse(id, serial, code::INVALID_VALUE) };
        let of_vm: usize = self.workers_of(vm).map(|worker| worker.leases.len()).sum();
        let too_many = worker.leases.len().saturating_add(chunks.len()) > limits::LEASES
            || of_vm.saturating_add(chunks.len()) > limits::VM_LEASES;
        let lent = |chunk: &ChunkId| {
            let chunk = self.chunks.get(*chunk)?;
            (chunk.state == ChunkState::Lent && chunk.vm == Some(vm)).then_some(chunk.leases)
        };
        let leases: Option<Vec<u32>> = chunks.iter().map(lent).collect();
        let Some(leases) = leases else {
            self.event(ArbiterEvent::LedgerBroken, vm.vm, 0, 0);
            return self.refuse(id, serial, code::UNKNOWN);
        };
        if too_many || leases.iter().any(|leases| *leases >= limits::CHUNK_LEASES) {
            return self.refuse(id, serial, code::OUT_OF_MEMORY);
        }
        let count = chunks.len();
        for (chunk, number) in chunks.into_iter().zip(1..) {
            if let Err(broken) = self.chunks.lend(chunk, vm, id) {
                self.broken(vm.vm, broken);
                return self.refuse(id, serial, code::UNKNOWN);
            }
            let bytes = self.chunks.get(chunk).map_or(0, |chunk| chunk.class.bytes());
            self.lease(id, serial, chunk, bytes, number < count);
        }
    }
}
