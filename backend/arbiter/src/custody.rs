//! The arbiter's decisions: the memory that each worker gets, and the next task of the driver.
//!
//! [`Custody`] is pure: its methods report an event ([`Custody::request`], [`Custody::worker_died`], [`Custody::finished`], …).
//! It decides at once, returns [`Effect`]s that name the messages to send, and [`Custody::plan`] gives the driver's next task.
//! It calls no driver, owns no descriptor and reads no clock, so that its promises are tested over any order of messages and
//! deaths.
//!
//! - [`lending`]: takes, gives, shares, and takers that wait;
//! - [`moving`]: the move of memory from one VM to another;
//! - [`growth`]: memory that drivers of workers take for themselves, and the ballast released for it;
//! - [`rise`]: workers that take and never give;
//! - [`tasks`]: the driver's next task, and its consequences when it is done.

mod growth;
mod lending;
mod moving;
mod rise;
mod tasks;

pub use growth::Estimates;
pub use tasks::{Order, Outcome, Reason, Task, mix};

use crate::{
    chunks::{Chunks, State},
    ids::{ChunkId, Class, VmKey, WorkerId},
    ledger::{Account, Broken, Ledger, Terms},
};
use growth::Growth;
use lending::{Share, Waiter};
use sluice_driver::{Code, code};
use sluice_messages::{
    control::{ArbiterEvent, FromArbiter, ToArbiter},
    custody::{Answer, Request, UNIT},
};
use sluice_protocol::limits;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};

/// Milliseconds since the arbiter began.
pub type Millis = u64;

/// Something to be done outside, in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Export a chunk and send it to a worker.
    Lend {
        /// The worker that asked.
        worker: WorkerId,
        /// The request.
        serial: u64,
        /// The lease.
        lease: u64,
        /// The chunk.
        chunk: ChunkId,
        /// Its bytes.
        bytes: u64,
        /// Whether more follow for the same request.
        more: bool,
    },
    /// Send an answer without a descriptor.
    Answer {
        /// The worker.
        worker: WorkerId,
        /// The answer.
        answer: Answer,
    },
    /// End a worker by its pidfd.
    Kill {
        /// The worker.
        worker: WorkerId,
    },
    /// Tell `sluiced`.
    Tell(FromArbiter),
}

/// How far a worker's life is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Life {
    Alive,
    /// It broke the protocol or closed its socket: nothing it says is heard any more; its process still lives.
    Ending,
    /// Its process is gone; the driver may not have noticed.
    Dead {
        since: Millis,
        reported: bool,
    },
}

/// A worker.
#[derive(Debug)]
struct Worker {
    vm: VmKey,
    /// As the inventory lists it.
    process: u32,
    /// The user of the guest process that it serves; `NO_USER` in a VM.
    user: u32,
    /// The guest's own number of its process.
    guest: u32,
    life: Life,
    /// Its leases and their chunks.
    leases: BTreeMap<u64, ChunkId>,
    /// Bytes of its leases.
    lent: u64,
    /// Bytes of the chunks among these, each counted once; and the most that was since the last look at what is booked to it.
    held: u64,
    peak: u64,
    /// Bytes that it calls idle.
    idle: u64,
    pinned: u64,
    /// Every chunk it ever got a descriptor of.
    imported: BTreeSet<ChunkId>,
    shares: BTreeSet<u128>,
    /// Leases in these.
    shared: usize,
    /// Requests that wait for an answer.
    waiting: usize,
    /// When it was last asked for idle chunks.
    recalled: Option<Millis>,
    /// Bytes that its driver was granted, the margin included, as far as no figure has corrected them.
    granted: u64,
    /// Of these, bytes that it says its driver has given back.
    returned: u64,
    /// Grants that it has not ended.
    grants: HashSet<u64>,
    /// When its last grant began or ended.
    grew: Millis,
    /// Bytes its driver has, as the inventory says.
    booked: Booked,
    /// Bytes that its VM is charged for its driver.
    charged: u64,
    /// The part of its VM's [`Account::granted`] that is its own.
    counted: u64,
    rise: rise::Rise,
}

/// The inventory's figure of a worker's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Booked {
    /// It does not list the worker yet, or no longer.
    Unlisted,
    /// It lists the worker and cannot say how much: no less than a context, which is why it is listed.
    AtLeast(u64),
    /// So much.
    Bytes(u64),
}

impl Worker {
    /// Whether it has a lease on a chunk.
    fn has_leased(&self, chunk: ChunkId) -> bool {
        self.leases.values().any(|leased| *leased == chunk)
    }

    fn idle(&self) -> u64 {
        self.idle.min(self.lent)
    }

    /// Bytes that its VM is to be charged for its driver: the grants, or more if it is known to have more.
    fn charge(&self) -> u64 {
        self.charge_with(0)
    }

    /// The same with so much granted besides. Charges are whole units, as chunks are.
    fn charge_with(&self, bytes: u64) -> u64 {
        let bytes = self.granted.saturating_add(self.net(bytes)).max(self.taken());
        bytes.checked_next_multiple_of(UNIT).unwrap_or(u64::MAX)
    }

    /// The cost of growth beyond the bytes that the worker has given back and is still charged for.
    const fn net(&self, bytes: u64) -> u64 {
        bytes.saturating_sub(self.returned)
    }

    /// Bytes that its driver is known to have taken at least.
    fn taken(&self) -> u64 {
        match self.booked {
            Booked::Unlisted => 0,
            Booked::AtLeast(bytes) | Booked::Bytes(bytes) => bytes,
        }
    }

    /// Bytes that the inventory books to it, no estimate.
    fn booked_bytes(&self) -> u64 {
        if let Booked::Bytes(bytes) = self.booked { bytes } else { 0 }
    }
}

/// Memory of chunks that left custody and did not come back: some process still holds it.
#[derive(Debug)]
struct Kept {
    vm: VmKey,
    bytes: u64,
    /// The processes that are known to have been able to. When they are gone it may still be another one.
    importers: Vec<WorkerId>,
    /// Since when.
    since: Millis,
    /// Whether it was said.
    reported: bool,
}

/// How a unit is run.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// The placement unit.
    pub unit: u32,
    /// Bytes of the driver's left free beside what it takes.
    pub reserve: u64,
    /// The cost of growth.
    pub estimates: Estimates,
}

/// Everything a unit's arbiter knows.
#[derive(Debug)]
pub struct Custody {
    settings: Settings,
    ledger: Ledger,
    chunks: Chunks,
    workers: HashMap<WorkerId, Worker>,
    /// Workers of each VM in order of their arrival.
    members: BTreeMap<VmKey, Vec<WorkerId>>,
    /// Those that are not alive, of these.
    ending: BTreeSet<(VmKey, WorkerId)>,
    /// Chunks that workers share, by number.
    shares: HashMap<u128, Share>,
    waiters: VecDeque<Waiter>,
    growth: Growth,
    kept: Vec<Kept>,
    /// Bytes of the unit when nobody had any: in custody, and what the driver had left.
    whole: Option<u64>,
    /// Bytes of suspect chunks.
    suspect_bytes: u64,
    /// VMs that are forgotten as soon as nothing of them is left.
    leaving: BTreeSet<VmKey>,
    /// The driver's present task.
    busy: Option<tasks::Busy>,
    /// The largest size that somebody was refused although the unit had the bytes.
    wanted: Option<Class>,
    /// Whether somebody took a chunk since the last look at what is free.
    taken_from: bool,
    next_lease: u64,
    /// The number of the next share: random, and used once.
    next_share: Option<u128>,
    /// Something changed for which somebody may wait.
    stirred: bool,
    /// Something changed since the last audit.
    changed: bool,
    /// VMs whose pages are to be written.
    touched: BTreeSet<VmKey>,
    effects: VecDeque<Effect>,
    /// Messages of old epochs.
    stale: u64,
    /// When memory that only grows is looked for next.
    look_at: Millis,
    /// Whether the inventory's figures of workers include what is lent to them.
    imports_booked: bool,
}

impl Custody {
    /// An empty unit. `free` is what the driver has free.
    #[must_use]
    pub fn new(settings: Settings, free: u64) -> Custody {
        Custody {
            settings,
            ledger: Ledger::default(),
            chunks: Chunks::default(),
            workers: HashMap::new(),
            members: BTreeMap::new(),
            ending: BTreeSet::new(),
            shares: HashMap::new(),
            waiters: VecDeque::new(),
            growth: Growth::new(free),
            kept: Vec::new(),
            whole: None,
            suspect_bytes: 0,
            leaving: BTreeSet::new(),
            busy: None,
            wanted: None,
            taken_from: false,
            next_lease: 1,
            next_share: None,
            stirred: false,
            changed: true,
            touched: BTreeSet::new(),
            effects: VecDeque::new(),
            stale: 0,
            look_at: 0,
            imports_booked: false,
        }
    }

    /// How much is to be done outside.
    #[must_use]
    pub fn effects(&self) -> usize {
        self.effects.len()
    }

    /// VMs whose workers are served.
    pub fn vms(&self) -> impl Iterator<Item = VmKey> {
        self.ledger.accounts().filter(|(_, account)| !account.closed).map(|(key, _)| key)
    }

    /// The next thing to be done outside.
    pub fn effect(&mut self) -> Option<Effect> {
        self.effects.pop_front()
    }

    /// VMs whose figures changed since the last call.
    pub fn touched(&mut self) -> BTreeSet<VmKey> {
        core::mem::take(&mut self.touched)
    }

    /// The figures in the custody pages of a VM: its quota, the bytes of it in use, the driver's share included, and whether
    /// its drivers may use their margins.
    #[must_use]
    pub fn figures(&self, key: VmKey) -> (u64, u64, bool) {
        let Some(account) = self.ledger.account(key) else { return (0, 0, false) };
        let used = account.charged().saturating_sub(account.idle);
        (self.ledger.limit(key), used, self.growth.is_open(key))
    }

    /// Fixes the quota of a VM without a limit, and the bytes that the unit has in all.
    pub fn set_nominal(&mut self) {
        let (capacity, _) = self.ledger.totals();
        self.ledger.set_nominal(capacity);
        self.whole = Some(capacity.saturating_add(self.growth.free()));
    }

    /// Bytes that a grant lets a driver take beyond what was asked for.
    #[must_use]
    pub const fn margin(&self) -> u64 {
        self.settings.estimates.margin
    }

    /// The placement unit.
    #[must_use]
    pub const fn unit(&self) -> u32 {
        self.settings.unit
    }

    /// Whether a worker has a lease on a chunk.
    #[must_use]
    pub fn holds(&self, id: WorkerId, lease: u64, chunk: ChunkId) -> bool {
        self.workers.get(&id).is_some_and(|worker| worker.leases.get(&lease) == Some(&chunk))
    }

    /// Bytes that can be lent at once to anybody.
    #[must_use]
    pub fn clean_bytes(&self) -> u64 {
        let of = |class: Class| self.chunks.clean_free(class).count() as u64 * class.bytes();
        Class::ALL.into_iter().map(of).sum()
    }

    /// Bytes of the device that we know of: chunks, and what drivers of workers took. `None` while they are on the move, and
    /// while nobody can say what some driver took.
    #[must_use]
    pub fn known(&self) -> Option<u64> {
        let unknown = |worker: &Worker| match worker.booked {
            Booked::AtLeast(_) => true,
            Booked::Unlisted => worker.granted > 0,
            // A figure may be from before its last growth.
            Booked::Bytes(_) => !self.growth.is_settled(worker),
        };
        // Scrubs and looks move nothing; and looks come as often as the inventory's figures, maybe always with them.
        if self.moves() || self.workers.values().any(unknown) {
            return None;
        }
        let chunks = self.chunks.iter().map(|(_, chunk)| chunk.class.bytes());
        let kept = self.kept.iter().map(|kept| kept.bytes);
        let drivers = self.workers.values().map(Worker::taken);
        Some(chunks.chain(kept).chain(drivers).fold(0, u64::saturating_add))
    }

    /// The ledger.
    #[must_use]
    pub const fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    /// The chunks.
    #[must_use]
    pub const fn chunks(&self) -> &Chunks {
        &self.chunks
    }

    /// Messages of old epochs that were dropped.
    #[must_use]
    pub const fn stale(&self) -> u64 {
        self.stale
    }

    fn event(&mut self, kind: ArbiterEvent, vm: u32, process: u32, bytes: u64) {
        let kind = kind as u32;
        self.effects.push_back(Effect::Tell(FromArbiter::Event { kind, vm, process, bytes }));
    }

    /// A step that cannot have been wrong was: said once for each, and nothing is changed.
    fn broken(&mut self, vm: u32, broken: Broken) {
        tracing::error!(vm, %broken, "the ledger contradicts itself");
        self.event(ArbiterEvent::LedgerBroken, vm, 0, 0);
    }

    fn must(&mut self, key: VmKey, done: Result<(), Broken>) {
        if let Err(broken) = done {
            self.broken(key.vm, broken);
        }
    }

    fn answer(&mut self, worker: WorkerId, answer: Answer) {
        self.effects.push_back(Effect::Answer { worker, answer });
    }

    fn refuse(&mut self, worker: WorkerId, serial: u64, error: Code) {
        self.answer(worker, Answer::Refused { serial, error });
    }

    /// A message of `sluiced` that needs no descriptor.
    pub fn command(&mut self, message: ToArbiter, now: Millis) {
        match message {
            ToArbiter::Vm { vm, epoch, limit, guaranteed, headroom, pinned, ancestors } => {
                let low = |value: u64| u32::try_from(value & u64::from(u32::MAX)).unwrap_or(0);
                let ancestors = [low(ancestors), low(ancestors >> 32)];
                self.set_vm(
                    VmKey { vm, epoch },
                    Terms { limit, guaranteed, headroom, pinned, ancestors },
                    now,
                );
            }
            ToArbiter::Escrow { ancestor, bytes } => {
                self.ledger.set_escrow(ancestor, bytes);
                self.stirred = true;
            }
            ToArbiter::Fence { vm, epoch } => self.fence(VmKey { vm, epoch }),
            ToArbiter::Forget { vm, epoch } => {
                self.fence(VmKey { vm, epoch });
                self.leaving.insert(VmKey { vm, epoch });
                self.forget_leaving();
            }
            ToArbiter::DescribeVm { vm } => {
                let described = [self.describe_pinned(vm), self.describe_vm(vm)];
                self.effects.extend(described.map(Effect::Tell));
            }
            ToArbiter::DescribeUnit {} => {
                let described = self.describe_unit();
                self.effects.push_back(Effect::Tell(described));
            }
            ToArbiter::Worker { .. }
            | ToArbiter::Inventory {}
            | ToArbiter::Shares { .. }
            | ToArbiter::Probe {}
            | ToArbiter::Prober { .. } => {
                tracing::error!("a message came to where it is not for");
            }
        }
    }

    fn set_vm(&mut self, key: VmKey, terms: Terms, _now: Millis) {
        let others = self.ledger.accounts().map(|(other, _)| other).filter(|other| other.vm == key.vm);
        let others: Vec<VmKey> = others.filter(|other| *other != key).collect();
        if others.iter().any(|other| other.epoch > key.epoch) {
            self.stale += 1;
            return;
        }
        for older in others {
            self.fence(older);
            self.leaving.insert(older);
        }
        if self.ledger.account(key).is_some_and(|account| account.closed) {
            // A fenced epoch does not come back; its successor has another number.
            self.stale += 1;
            return;
        }
        let done = self.ledger.set_terms(key, terms);
        self.must(key, done);
        self.stirred = true;
        self.changed = true;
        self.touched.insert(key);
        self.forget_leaving();
    }

    /// The VM gets nothing any more.
    fn fence(&mut self, key: VmKey) {
        if self.ledger.account(key).is_none() {
            self.stale += 1;
            return;
        }
        self.ledger.close(key);
        self.touched.insert(key);
        let (refused, kept) =
            core::mem::take(&mut self.waiters).into_iter().partition(|waiter| waiter.vm == key);
        self.waiters = kept;
        let refused: VecDeque<Waiter> = refused;
        for waiter in refused {
            self.no_longer_waits(waiter.worker);
            self.refuse(waiter.worker, waiter.serial, code::DEVICE_UNAVAILABLE);
        }
        self.refuse_growth(key);
    }

    fn no_longer_waits(&mut self, worker: WorkerId) {
        if let Some(worker) = self.workers.get_mut(&worker) {
            worker.waiting = worker.waiting.saturating_sub(1);
        }
    }

    fn forget_leaving(&mut self) {
        for key in self.leaving.clone() {
            let empty = !self.members.contains_key(&key) && self.dirty_of(key) == 0;
            if empty && (self.ledger.forget(key) || self.ledger.account(key).is_none()) {
                self.leaving.remove(&key);
                self.growth.forget(key);
            }
        }
    }

    /// Bytes that a VM gave back and that are not clean for everybody yet.
    fn dirty_of(&self, key: VmKey) -> u64 {
        // Spoiled chunks are charged for instead.
        let of = |chunk: &&crate::chunks::Chunk| {
            chunk.vm == Some(key) && chunk.state != State::Lent && !chunk.spoiled
        };
        let chunks: u64 =
            self.chunks.iter().map(|(_, chunk)| chunk).filter(of).map(|chunk| chunk.class.bytes()).sum();
        let moving = match &self.busy {
            Some(tasks::Busy::Move { vm, bytes, .. }) if *vm == key => *bytes,
            _ => 0,
        };
        chunks + moving + self.growth.unswept_bytes(key)
    }

    /// The newest epoch of a VM that there is an account of.
    #[must_use]
    pub fn current(&self, vm: u32) -> Option<VmKey> {
        self.ledger.accounts().map(|(key, _)| key).filter(|key| key.vm == vm).max_by_key(|key| key.epoch)
    }

    fn describe_vm(&self, vm: u32) -> FromArbiter {
        let newest = self.current(vm).and_then(|key| Some((key, self.ledger.account(key)?)));
        let Some((key, account)) = newest else {
            return FromArbiter::Vm { vm, epoch: 0, lent: 0, headroom: 0, dirty: 0, holders: 0 };
        };
        let holders = self.members.get(&key).map_or(0, Vec::len);
        FromArbiter::Vm {
            vm,
            epoch: key.epoch,
            lent: account.lent.saturating_add(account.kept),
            headroom: account.driver,
            dirty: self.dirty_of(key),
            holders: u32::try_from(holders).unwrap_or(u32::MAX),
        }
    }

    fn describe_pinned(&self, vm: u32) -> FromArbiter {
        let newest = self.current(vm).and_then(|key| Some((key.epoch, self.ledger.account(key)?.pinned)));
        let (epoch, bytes) = newest.unwrap_or_default();
        FromArbiter::Pinned { vm, epoch, bytes }
    }

    fn describe_unit(&self) -> FromArbiter {
        let mut bytes = [0_u64; 3];
        for (_, chunk) in self.chunks.iter() {
            let place = match chunk.state {
                State::Clean if chunk.vm.is_none() => 0,
                State::Clean | State::Dirty | State::Scrubbing { .. } => 1,
                State::Suspect => 2,
                State::Lent => continue,
            };
            if let Some(sum) = bytes.get_mut(place) {
                *sum += chunk.class.bytes();
            }
        }
        let [clean, dirty, suspect] = bytes;
        let (total, lent) = self.ledger.totals();
        let headroom = self.ledger.nominal().saturating_sub(total + suspect);
        FromArbiter::Unit { total: total + suspect, lent, clean, dirty, headroom, suspect }
    }

    /// The driver's share of a VM, as charged.
    #[must_use]
    pub fn driver_share(&self, key: VmKey) -> u64 {
        self.ledger.account(key).map_or(0, |account| account.driver)
    }

    /// Whether a worker of a VM may be served; one of an old epoch is counted, and is not.
    pub fn admits(&mut self, key: VmKey) -> bool {
        let closed = self.ledger.account(key).is_none_or(|account| account.closed);
        self.stale += u64::from(closed);
        !closed
    }

    /// A worker of a VM that serves a process of `user`. `false` when it is of an old epoch and is not heard.
    pub fn add_worker(&mut self, id: WorkerId, key: VmKey, process: u32, user: u32) -> bool {
        if !self.admits(key) {
            return false;
        }
        let worker = Worker {
            vm: key,
            process,
            user,
            guest: 0,
            life: Life::Alive,
            leases: BTreeMap::new(),
            lent: 0,
            held: 0,
            peak: 0,
            idle: 0,
            pinned: 0,
            imported: BTreeSet::new(),
            shares: BTreeSet::new(),
            shared: 0,
            waiting: 0,
            recalled: None,
            granted: 0,
            returned: 0,
            grants: HashSet::new(),
            grew: 0,
            booked: Booked::Unlisted,
            charged: 0,
            counted: 0,
            rise: rise::Rise::default(),
        };
        self.workers.insert(id, worker);
        self.members.entry(key).or_default().push(id);
        self.touched.insert(key);
        true
    }

    /// Whether a worker may be heard: it lives, and waits for fewer answers than it may.
    #[must_use]
    pub fn listens(&self, id: WorkerId) -> bool {
        self.workers
            .get(&id)
            .is_some_and(|worker| worker.life == Life::Alive && worker.waiting < limits::CUSTODY_REQUESTS)
    }

    /// The number that the next new share gets: drawn outside, for nothing here is random.
    pub const fn set_next_share(&mut self, number: u128) {
        self.next_share = Some(number);
    }

    /// A request of a worker.
    pub fn request(&mut self, id: WorkerId, request: Request, now: Millis) {
        let Some(worker) = self.workers.get_mut(&id).filter(|worker| worker.life == Life::Alive) else {
            return;
        };
        let key = worker.vm;
        match request {
            Request::Hello { process } => worker.guest = process,
            Request::Take { serial, bytes } => self.take(id, serial, bytes, now),
            Request::Give { lease } => self.give(id, lease),
            Request::Idle { bytes } => self.set_idle(id, bytes),
            Request::Grow { serial, reason, bytes, left } => {
                self.grow(id, serial, (reason, bytes, left), now)
            }
            Request::Shrunk { reason, bytes } => self.shrunk(id, reason, bytes),
            Request::Grown { serial } => self.grown(id, serial, now),
            Request::Share { serial, share, lease } => self.share(id, serial, share, lease),
            Request::Unshare { share } => self.unshare(id, share),
            Request::Open { serial, share } => self.open(id, serial, share),
            Request::Pin { serial, bytes } => {
                if self.ledger.pin(key, bytes) {
                    // Within the VM's sum, which did not overflow.
                    worker.pinned = worker.pinned.saturating_add(bytes);
                    self.answer(id, Answer::Granted { serial, value: 0 });
                } else {
                    self.refuse(id, serial, code::OUT_OF_MEMORY);
                }
            }
            Request::Unpin { bytes } => match worker.pinned.checked_sub(bytes) {
                Some(rest) => {
                    worker.pinned = rest;
                    let done = self.ledger.unpin(key, bytes);
                    self.must(key, done);
                }
                None => self.abuse(id, "unpins more than it pinned"),
            },
            Request::Process { serial, index } => self.list(id, serial, index),
        }
    }

    fn list(&mut self, id: WorkerId, serial: u64, index: u32) {
        let Some(worker) = self.workers.get(&id) else { return };
        let members = self.members.get(&worker.vm).into_iter().flatten();
        let living = members.filter_map(|id| self.workers.get(id)).filter(|other| other.life == Life::Alive);
        let index = usize::try_from(index).unwrap_or(usize::MAX);
        // Of the driver's share, the part that counts towards the quota.
        let (driver, headroom) =
            self.ledger.account(worker.vm).map_or((0, 0), |account| (account.driver, account.terms.headroom));
        let counts = |charged: u64| match u128::from(driver.saturating_sub(headroom)) {
            0 => 0,
            part => u64::try_from(u128::from(charged) * part / u128::from(driver)).unwrap_or(charged),
        };
        // A margin without a context is nothing that a monitor would list.
        let margin = self.settings.estimates.margin;
        let driver = |other: &Worker| match other.granted.saturating_sub(other.returned) > margin {
            true => counts(other.charged),
            false => 0,
        };
        let bytes = |other: &Worker| other.lent - other.idle() + driver(other);
        let found = living.skip(index).map(|other| (other.guest, bytes(other))).next();
        match found {
            Some((process, bytes)) => self.answer(id, Answer::Process { serial, process, bytes }),
            None => self.refuse(id, serial, code::INVALID_VALUE),
        }
    }

    /// A worker broke the protocol: it is ended.
    pub fn abuse(&mut self, id: WorkerId, how: &'static str) {
        if let Some((vm, process)) = self.end(id) {
            tracing::warn!(vm, process, how, "a worker breaks the protocol and is ended");
            self.event(ArbiterEvent::Abuse, vm, process, 0);
        }
    }

    /// Nothing of a worker's work ends: it is ended.
    pub fn hung(&mut self, id: WorkerId) {
        if let Some((vm, process)) = self.end(id) {
            tracing::warn!(vm, process, "nothing of a worker's work ends: it is ended");
            self.event(ArbiterEvent::Hung, vm, process, 0);
        }
    }

    /// Ends a worker for what it did; its VM and its process, if it was alive.
    fn end(&mut self, id: WorkerId) -> Option<(u32, u32)> {
        let worker = self.workers.get_mut(&id).filter(|worker| worker.life == Life::Alive)?;
        worker.life = Life::Ending;
        let (key, process) = (worker.vm, worker.process);
        self.ending.insert((key, id));
        self.effects.push_back(Effect::Kill { worker: id });
        self.stirred = true;
        Some((key.vm, process))
    }

    /// A worker closed its socket. Without it there is nothing that it may do any more.
    pub fn worker_left(&mut self, id: WorkerId) {
        self.end(id);
    }

    /// A worker's process has ended: it is charged for nothing any more. Its chunks serve others when
    /// [`Custody::worker_gone`] says so.
    pub fn worker_died(&mut self, id: WorkerId, now: Millis) {
        let Some(worker) = self.workers.get_mut(&id) else { return };
        if matches!(worker.life, Life::Dead { .. }) {
            return;
        }
        worker.life = Life::Dead { since: now, reported: false };
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
        let done = self.ledger.set_idle(key, idle, 0);
        self.must(key, done);
        let done = self.ledger.unpin(key, pinned);
        self.must(key, done);
        for chunk in leases.into_values() {
            self.end_lease(key, chunk);
        }
        for share in shares {
            self.shares.remove(&share);
        }
        self.waiters.retain(|waiter| waiter.worker != id);
        let driver = self.workers.get(&id).map_or(0, |worker| worker.charged);
        self.growth.died(id, key, driver.max(UNIT), now);
        self.stirred = true;
        self.changed = true;
        self.touched.insert(key);
    }

    /// Workers of a VM that end or have ended, and that the driver may still know.
    fn ending_of(&self, vm: VmKey) -> impl Iterator<Item = &Worker> {
        let of_vm = self.ending.range((vm, WorkerId(0))..=(vm, WorkerId(u64::MAX)));
        of_vm.filter_map(|(_, id)| self.workers.get(id))
    }

    /// The driver does not know the worker any more: once what it imported is clean, its memory may serve others.
    pub fn worker_gone(&mut self, id: WorkerId) {
        if !self.workers.get(&id).is_some_and(|worker| matches!(worker.life, Life::Dead { .. })) {
            return;
        }
        let Some(worker) = self.workers.remove(&id) else { return };
        let key = worker.vm;
        self.ending.remove(&(key, id));
        let done = self.ledger.set_driver(key, worker.charged, 0);
        self.must(key, done);
        let done = self.ledger.set_granted(key, worker.counted, 0);
        self.must(key, done);
        for chunk in worker.imported {
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
        self.stirred = true;
        self.changed = true;
        self.touched.insert(key);
        self.forget_leaving();
    }

    /// Workers whose process has ended and that the driver may still know, with their process numbers.
    pub fn unconfirmed(&self) -> impl Iterator<Item = (WorkerId, u32)> {
        let dead = |worker: &Worker| matches!(worker.life, Life::Dead { .. });
        self.workers.iter().filter(move |(_, worker)| dead(worker)).map(|(id, worker)| (*id, worker.process))
    }

    /// The inventory says that the driver still knows a dead worker.
    pub fn still_listed(&mut self, id: WorkerId, now: Millis) {
        // Its number may be a living worker's by now, whom the driver lists rightly: the dead one's memory waits for both.
        let number = self.workers.get(&id).map(|worker| worker.process);
        let lives =
            |worker: &Worker| !matches!(worker.life, Life::Dead { .. }) && Some(worker.process) == number;
        if self.workers.values().any(lives) {
            return;
        }
        let Some(worker) = self.workers.get_mut(&id) else { return };
        let Life::Dead { since, reported } = &mut worker.life else { return };
        if !*reported && now.saturating_sub(*since) >= limits::STUCK_MILLISECONDS {
            *reported = true;
            let (vm, process) = (worker.vm.vm, worker.process);
            self.event(ArbiterEvent::Stuck, vm, process, 0);
        }
    }

    /// Whether something changed since the last call; the audit asks.
    pub fn changed(&mut self) -> bool {
        core::mem::take(&mut self.changed)
    }

    /// Process numbers of all workers, dead ones that the driver may still know included.
    pub fn processes(&self) -> impl Iterator<Item = (WorkerId, u32)> {
        self.workers.iter().map(|(id, worker)| (*id, worker.process))
    }

    /// Whether there are workers.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.workers.is_empty()
    }

    /// Whether a worker lives.
    #[must_use]
    pub fn serves(&self) -> bool {
        self.workers.values().any(|worker| !matches!(worker.life, Life::Dead { .. }))
    }

    /// Whether sums and states hold together.
    ///
    /// # Errors
    /// [`Broken`] names the first that does not.
    pub fn check(&self) -> Result<(), Broken> {
        let mut lent: HashMap<VmKey, u64> = HashMap::new();
        let (mut capacity, mut suspect) = (0_u64, 0_u64);
        for (_, chunk) in self.chunks.iter() {
            match chunk.state {
                State::Suspect => suspect += chunk.class.bytes(),
                _ => capacity += chunk.class.bytes(),
            }
            if chunk.state == State::Lent
                && let Some(vm) = chunk.vm
            {
                *lent.entry(vm).or_default() += chunk.class.bytes();
            }
            for importer in &chunk.importers {
                if self.workers.get(importer).is_none_or(|worker| Some(worker.vm) != chunk.vm) {
                    return Err(Broken("a chunk can be reached from two VMs"));
                }
            }
        }
        self.chunks.check()?;
        let (mut drivers, mut granted) = (HashMap::<VmKey, u64>::new(), HashMap::<VmKey, u64>::new());
        for (id, worker) in &self.workers {
            *drivers.entry(worker.vm).or_default() += worker.charged;
            *granted.entry(worker.vm).or_default() += worker.granted;
            if self.ending.contains(&(worker.vm, *id)) == (worker.life == Life::Alive) {
                return Err(Broken("a worker that ends is not listed, or one that does not is"));
            }
        }
        self.ledger.check(&lent, &drivers, capacity)?;
        let grants =
            |(key, account): (VmKey, &Account)| account.granted == granted.get(&key).copied().unwrap_or(0);
        if !self.ledger.accounts().all(grants) {
            return Err(Broken("a VM's grants are not those of its workers"));
        }
        if suspect != self.suspect_bytes {
            return Err(Broken("the sum of suspect chunks is wrong"));
        }
        let mut leases: HashMap<ChunkId, u32> = HashMap::new();
        for worker in self.workers.values() {
            let (mut bytes, mut held) = (0, 0);
            let mut chunks: HashSet<ChunkId> = HashSet::new();
            for id in worker.leases.values() {
                let chunk = self.chunks.get(*id).ok_or(Broken("a lease on no chunk"))?;
                bytes += chunk.class.bytes();
                held += if chunks.insert(*id) { chunk.class.bytes() } else { 0 };
                *leases.entry(*id).or_default() += 1;
            }
            if (bytes, held) != (worker.lent, worker.held) {
                return Err(Broken("a worker's sum is not that of its leases"));
            }
        }
        for (id, chunk) in self.chunks.iter() {
            if chunk.leases != leases.get(&id).copied().unwrap_or(0) {
                return Err(Broken("a chunk is leased to nobody"));
            }
        }
        Ok(())
    }
}

fn class_of(bytes: u64) -> Option<Class> {
    Class::of(bytes)
}

#[cfg(test)]
mod tests;
