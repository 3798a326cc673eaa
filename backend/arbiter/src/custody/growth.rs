//! The driver share: device memory that the drivers of workers take for themselves.
//!
//! The arbiter keeps the unit's free memory occupied by clean ballast. A worker requests a *grow grant* before its driver takes
//! memory: the grant is charged to the VM, ballast is released for it, and a margin comes with it, so that small growth needs
//! no request. Grants of different VMs run side by side. The arbiter corrects a charge when the inventory reports how much a
//! worker's driver has.
//!
//! The size of the ballast follows from the charges alone: chunks + charges + reserve = the unit. So memory that a driver takes
//! without a charge comes out of the reserve and is never replaced: the reserve cannot be pumped dry and refilled.
//!
//! After a worker's death, drivers of other VMs wait until all free memory is occupied again, for it may hold data of the dead
//! worker. [`turns`] bounds how long the deaths of one VM's workers may delay other VMs.

mod turns;

use super::{Booked, Custody, Life, Millis, Worker};
use crate::{
    ids::{ChunkId, Class, VmKey, WorkerId},
    ledger::Refusal,
};
use sluice_driver::code;
use sluice_messages::{
    control::ArbiterEvent,
    custody::{Answer, Growth as Cause, UNIT},
};
use sluice_protocol::limits;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};
use turns::Turns;

/// Looks after which it is tried again to take what the driver could not give.
const LOOKS: u32 = 20;
/// Looks in a row that must find a VM over its quota before one of its processes is ended.
const STRIKES: u32 = 3;
/// Milliseconds after a worker's last growth from which on the inventory's figures include all of it.
const SETTLED: Millis = 1_500;

/// The cost of growth, as measured at start-up.
#[derive(Clone, Copy, Debug)]
pub struct Estimates {
    /// Bytes of a context.
    pub context: u64,
    /// Bytes that a grant lets a driver take beyond what was asked for.
    pub margin: u64,
}

/// A worker that waits for a grant.
#[derive(Clone, Copy, Debug)]
struct Wish {
    worker: WorkerId,
    vm: VmKey,
    serial: u64,
    /// Whether it is for a context, which every session starts with.
    starts: bool,
    /// Bytes asked for.
    bytes: u64,
    /// The rest of the worker's margin.
    left: u64,
    /// Until when it waits also for memory that may never come.
    patient: Millis,
    /// Whether that is over.
    hurried: bool,
    until: Millis,
}

/// A dead worker whose memory the driver may not have back yet.
#[derive(Clone, Copy, Debug)]
struct Unswept {
    vm: VmKey,
    /// Bytes that its driver had.
    bytes: u64,
    /// Until when drivers of other VMs wait for it.
    until: Millis,
}

/// How much of the driver's free memory is taken back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Depth {
    /// The part for which no charge stands.
    Uncharged,
    /// All of it: after a death nothing tells which free pages were the dead one's.
    All,
}

/// The VMs whose drivers may use their margins without asking.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Closed {
    /// No driver may.
    all: bool,
    /// VMs whose dead others wait for: only their own drivers may, if there is one such VM.
    by: BTreeSet<VmKey>,
}

/// Growth of a unit.
#[derive(Debug)]
pub(super) struct Growth {
    queue: VecDeque<Wish>,
    /// Grants under way, and until when others wait for their end.
    active: HashMap<(WorkerId, u64), Millis>,
    /// Bytes the driver has free and can give, when last looked at.
    free: u64,
    /// Bytes it says are free and cannot give.
    unusable: u64,
    settle: Option<Depth>,
    /// The driver's present sweep. A sweep that is asked for meanwhile comes after it.
    taking: Option<(Depth, u64)>,
    /// Looks at what is free since something could not be taken.
    looks: u32,
    /// The dead whose memory the driver may not have back yet.
    unswept: HashMap<WorkerId, Unswept>,
    turns: Turns,
    /// When it was last looked who may grow.
    now: Millis,
    /// VMs with memory among the free bytes, or among `swept`.
    dirtiers: BTreeMap<VmKey, u64>,
    /// Chunks taken after deaths that are not clean yet.
    swept: HashSet<ChunkId>,
    closed: Closed,
    /// Looks in a row that found a VM over its quota.
    strikes: HashMap<VmKey, u32>,
    /// Whether it was said that memory is missing for which no charge stands.
    drained: bool,
}

/// Growth's next wish of the driver.
pub(super) enum Need {
    Nothing,
    Take {
        leave: u64,
        most: u64,
    },
    Release(Vec<ChunkId>),
    /// Clean ballast: there is none, and some can be made.
    Clean,
}

impl Growth {
    pub(super) fn new(free: u64) -> Growth {
        Growth {
            queue: VecDeque::new(),
            active: HashMap::new(),
            free,
            unusable: 0,
            settle: Some(Depth::Uncharged),
            taking: None,
            looks: 0,
            unswept: HashMap::new(),
            turns: Turns::default(),
            now: 0,
            dirtiers: BTreeMap::new(),
            swept: HashSet::new(),
            closed: Closed::default(),
            strikes: HashMap::new(),
            drained: false,
        }
    }

    /// Whether memory is on its way from or to the driver.
    pub(super) fn pending(&self) -> bool {
        self.settle.is_some() || self.taking.is_some()
    }

    /// Whether the inventory's figure of a worker includes all of its growth that was granted.
    pub(super) fn is_settled(&self, worker: &Worker) -> bool {
        worker.grants.is_empty() && self.now.saturating_sub(worker.grew) >= SETTLED
    }

    /// Whether chunks may leave and enter custody for other reasons now.
    pub(super) fn unlocked(&self) -> bool {
        self.active.is_empty()
    }

    pub(super) fn set_free(&mut self, free: u64) {
        self.free = free.saturating_sub(self.unusable);
    }

    /// Bytes the driver says are free, when last looked at.
    pub(super) const fn free(&self) -> u64 {
        self.free.saturating_add(self.unusable)
    }

    /// When it was last looked who may grow.
    pub(super) const fn now(&self) -> Millis {
        self.now
    }

    /// A VM is forgotten.
    pub(super) fn forget(&mut self, vm: VmKey) {
        self.turns.forget(vm);
        self.strikes.remove(&vm);
    }

    pub(super) fn settle(&mut self, depth: Depth) {
        self.settle = self.settle.max(Some(depth));
    }

    /// A worker died; `bytes` is what its driver had.
    pub(super) fn died(&mut self, id: WorkerId, vm: VmKey, bytes: u64, now: Millis) {
        self.queue.retain(|wish| wish.worker != id);
        self.active.retain(|(worker, _), _| *worker != id);
        let until = self.turns.hold_up(vm, now);
        self.unswept.insert(id, Unswept { vm, bytes, until });
    }

    /// The driver has what a dead worker had.
    pub(super) fn gone(&mut self, id: WorkerId) {
        let Some(dead) = self.unswept.remove(&id) else { return };
        let sum = self.dirtiers.entry(dead.vm).or_default();
        *sum = sum.saturating_add(dead.bytes);
        if !self.unswept.values().any(|other| other.vm == dead.vm) {
            self.turns.let_go(dead.vm, self.now);
        }
        self.settle(Depth::All);
    }

    /// Bytes of a VM's dead workers that are not clean yet.
    pub(super) fn unswept_bytes(&self, vm: VmKey) -> u64 {
        let dead = self.unswept.values().filter(|dead| dead.vm == vm).map(|dead| dead.bytes);
        dead.chain(self.dirtiers.get(&vm).copied()).fold(0, u64::saturating_add)
    }

    /// Whether all that is free is about to be taken, or is being.
    fn sweeps(&self) -> bool {
        self.settle == Some(Depth::All) || matches!(self.taking, Some((Depth::All, _)))
    }

    /// Whether drivers of a VM wait because another's memory may be among what is free.
    fn is_blocked(&self, vm: VmKey) -> bool {
        self.sweeps() || self.unswept.values().any(|dead| dead.vm != vm && dead.until > self.now)
    }

    /// Whether drivers of a VM may use their margins.
    pub(super) fn is_open(&self, vm: VmKey) -> bool {
        !self.closed.all && self.closed.by.iter().all(|by| *by == vm)
    }

    /// The driver's free memory was taken, into these chunks.
    pub(super) fn taken(&mut self, free: u64, chunks: &[ChunkId]) {
        let (depth, left) = self.taking.take().unwrap_or((Depth::Uncharged, 0));
        self.unusable = Some(free.saturating_sub(left)).filter(|rest| *rest >= UNIT).unwrap_or(0);
        if depth == Depth::All && !self.dirtiers.is_empty() {
            self.swept.extend(chunks);
        }
        self.set_free(free);
        self.clear_dirtiers();
    }

    /// Nothing of the dead is left, once what was taken after their ends is clean.
    fn clear_dirtiers(&mut self) {
        if self.swept.is_empty() && !self.sweeps() {
            self.dirtiers.clear();
        }
    }

    /// A chunk is clean, or suspect and out of use.
    pub(super) fn cleaned(&mut self, chunk: ChunkId) {
        if self.swept.remove(&chunk) {
            self.clear_dirtiers();
        }
    }

    /// When something is due without any message.
    fn due(&self) -> Option<Millis> {
        let wishes = self.queue.iter().map(|wish| if wish.hurried { wish.until } else { wish.patient });
        let dead = self.unswept.values().map(|dead| dead.until).filter(|until| *until > self.now);
        let paying = self.queue.iter().filter(|wish| wish.starts);
        let paying = paying.filter_map(|wish| self.turns.pays_until(wish.vm, self.now));
        wishes.chain(dead).chain(paying).chain(self.active.values().copied()).min()
    }
}

impl Custody {
    pub(super) fn grow(
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
        let patient = now.saturating_add(limits::GROW_PATIENCE_MILLISECONDS);
        let starts = cause == Cause::Context;
        let wish = Wish { worker: id, vm, serial, starts, bytes, left, patient, hurried: false, until };
        self.growth.queue.push_back(wish);
    }

    /// Bytes that growth takes at least.
    fn least(&self, cause: Cause, bytes: u64) -> u64 {
        if cause == Cause::Context { bytes.max(self.settings.estimates.context) } else { bytes }
    }

    /// Whether a VM may be charged for so much growth of a worker's driver.
    fn admit_growth(&self, id: WorkerId, bytes: u64) -> Result<(), Refusal> {
        let worker = self.workers.get(&id).ok_or(Refusal::Closed)?;
        self.ledger.admit_driver(worker.vm, worker.charge_with(bytes).saturating_sub(worker.charged))
    }

    /// Whether the VM's quota does not allow so much growth. An ancestor's escrow may follow.
    fn grows_over(&self, id: WorkerId, bytes: u64) -> bool {
        matches!(self.admit_growth(id, bytes), Err(Refusal::Limit(_) | Refusal::Closed))
    }

    /// Whether some of what a VM's drivers have is about to be free, because a worker has ended or is being ended.
    pub(super) fn leaves(&self, vm: VmKey) -> bool {
        self.ending_of(vm).any(|worker| worker.charge() > 0)
    }

    /// Whether growth of a worker's driver would exceed what its VM may have.
    pub(super) fn grows_too_far(&self, id: WorkerId, reason: u32, bytes: u64) -> bool {
        Cause::from_number(reason).is_some_and(|cause| self.grows_over(id, self.least(cause, bytes)))
    }

    pub(super) fn grown(&mut self, id: WorkerId, serial: u64, now: Millis) {
        let Some(worker) = self.workers.get_mut(&id) else { return };
        if !worker.grants.remove(&serial) {
            return self.abuse(id, "ends a grant that it has not got");
        }
        worker.grew = now;
        self.growth.active.remove(&(id, serial));
        self.stirred = true;
    }

    pub(super) fn shrunk(&mut self, id: WorkerId, reason: u32, bytes: u64) {
        let Some(cause) = Cause::from_number(reason) else { return self.abuse(id, "shrinks for no reason") };
        let bytes = self.least(cause, bytes);
        if let Some(worker) = self.workers.get_mut(&id) {
            worker.returned = worker.returned.saturating_add(bytes).min(worker.granted);
        }
    }

    pub(super) fn refuse_growth(&mut self, vm: VmKey) {
        let (refused, kept): (VecDeque<Wish>, _) =
            core::mem::take(&mut self.growth.queue).into_iter().partition(|wish| wish.vm == vm);
        self.growth.queue = kept;
        for wish in refused {
            self.no_longer_waits(wish.worker);
            self.refuse(wish.worker, wish.serial, code::DEVICE_UNAVAILABLE);
        }
    }

    /// Grants what can be granted now and refuses what waited too long. Returns when to look again.
    pub fn serve_growth(&mut self, now: Millis) -> Option<Millis> {
        self.growth.now = now;
        // A grant that has not ended by now is charged in full and excludes no other VM any more.
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

    /// Wishes that only wait for ballast, the VM whose last grant is longest ago first.
    fn next_wish(&self) -> Option<(usize, Wish)> {
        let growth = &self.growth;
        let ready = |wish: &Wish| {
            let pays = wish.starts && growth.turns.pays_until(wish.vm, growth.now).is_some();
            !growth.is_blocked(wish.vm) && !pays && self.admit_growth(wish.worker, wish.bytes).is_ok()
        };
        let wishes = growth.queue.iter().zip(0..).filter(|(wish, _)| ready(wish));
        wishes.min_by_key(|(wish, at)| (growth.turns.last(wish.vm), *at)).map(|(wish, at)| (at, *wish))
    }

    /// Bytes that a grant lets a driver take: those asked for, and the margin as far as the VM's quota has room for it.
    fn price(&self, wish: &Wish) -> u64 {
        let Some(worker) = self.workers.get(&wish.worker) else { return 0 };
        // A charge is whole units, and its part beyond the grants is room, too.
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
            let Some(worker) = self.workers.get_mut(&wish.worker).filter(|worker| worker.life == Life::Alive)
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
            self.answer(wish.worker, Answer::Granted { serial: wish.serial, value });
        }
    }

    /// Asks for the escrow that wishes wait for.
    fn want_escrows(&mut self) {
        let refused = self.growth.queue.iter().map(|wish| self.admit_growth(wish.worker, wish.bytes));
        let wanted: Vec<(u32, u64)> = refused
            .filter_map(|refused| match refused {
                Err(Refusal::Ancestor(ancestor, bytes)) => Some((ancestor, bytes)),
                _ => None,
            })
            .collect();
        for (ancestor, bytes) in wanted {
            self.want_escrow(ancestor, bytes);
        }
    }

    /// Tells the pages which margins may be used, if that has changed.
    fn publish_closed(&mut self) {
        let growth = &self.growth;
        let dead = growth.unswept.values().filter(|dead| dead.until > growth.now).map(|dead| dead.vm);
        let closed = Closed { all: growth.sweeps(), by: dead.collect() };
        if closed != self.growth.closed {
            self.growth.closed = closed;
            self.touched.extend(self.members.keys());
        }
    }

    /// A worker's charge follows from what it was granted and what the inventory says.
    pub(super) fn recharge(&mut self, id: WorkerId) {
        let Some(worker) = self.workers.get_mut(&id) else { return };
        let (vm, before, after) = (worker.vm, worker.charged, worker.charge());
        worker.charged = after;
        let granted = worker.granted;
        let counted = core::mem::replace(&mut worker.counted, granted);
        if counted != granted {
            let done = self.ledger.set_granted(vm, counted, granted);
            self.must(vm, done);
        }
        if before != after {
            let done = self.ledger.set_driver(vm, before, after);
            self.must(vm, done);
            self.stirred = true;
            self.touched.insert(vm);
        }
    }

    /// Bytes in chunks, and of such that did not come back.
    fn in_custody(&self) -> u64 {
        let (capacity, _) = self.ledger.totals();
        let kept = self.kept.iter().map(|kept| kept.bytes).fold(0, u64::saturating_add);
        capacity.saturating_add(self.suspect_bytes).saturating_add(kept)
    }

    /// Bytes that custody has to give up before `price` more can be charged.
    fn missing(&self, price: u64) -> u64 {
        let Some(whole) = self.whole else { return 0 };
        let outside = self.ledger.attributed().saturating_add(price).saturating_add(self.settings.reserve);
        self.in_custody().saturating_add(outside).saturating_sub(whole)
    }

    /// Bytes that custody could have besides.
    fn uncharged(&self) -> u64 {
        let Some(whole) = self.whole else { return u64::MAX };
        whole.saturating_sub(
            self.in_custody().saturating_add(self.ledger.attributed()).saturating_add(self.settings.reserve),
        )
    }

    /// Growth's next wish of the driver.
    pub(super) fn growth_needs(&mut self) -> Need {
        let uncharged = self.uncharged();
        match self.growth.settle {
            // A sweep would take away the memory of a grant that is about to be used.
            Some(Depth::All) if self.growth.unlocked() => {
                self.growth.settle = None;
                self.growth.taking = Some((Depth::All, 0));
                return Need::Take { leave: 0, most: u64::MAX };
            }
            Some(Depth::Uncharged) => {
                self.growth.settle = None;
                let leave = self.settings.reserve;
                if uncharged >= UNIT {
                    self.growth.taking =
                        Some((Depth::Uncharged, self.growth.free().saturating_sub(uncharged).max(leave)));
                    return Need::Take { leave, most: uncharged };
                }
            }
            Some(Depth::All) | None => {}
        }
        let wish = self.next_wish();
        let price = wish.map_or(0, |(_, wish)| self.price(&wish));
        let missing = self.missing(price);
        // Measured growth is replaced by whole units only, for it comes and goes.
        if missing == 0 || wish.is_none() && missing < UNIT {
            return Need::Nothing;
        }
        let vm = wish.map(|(_, wish)| wish.vm);
        match self.ballast(missing, vm) {
            Some(chunks) => Need::Release(chunks),
            None if self.cleans() => Need::Clean,
            None => {
                let comes = !self.growth.unswept.is_empty() || self.shifts();
                if let Some((index, wish)) = wish.filter(|(_, wish)| wish.hurried)
                    && !comes
                {
                    self.growth.queue.remove(index);
                    self.no_longer_waits(wish.worker);
                    self.refuse(wish.worker, wish.serial, code::OUT_OF_MEMORY);
                }
                Need::Nothing
            }
        }
    }

    /// Clean chunks of at least `bytes` in all that can leave custody for a VM.
    fn ballast(&self, bytes: u64, vm: Option<VmKey>) -> Option<Vec<ChunkId>> {
        let spare = vm.map_or_else(|| self.ledger.spare(), |vm| self.ledger.spare_for(vm));
        if bytes > spare {
            return None;
        }
        let mut chosen = Vec::new();
        let mut sum = 0_u64;
        for class in Class::ALL {
            for chunk in self.chunks.clean_free(class) {
                if sum.saturating_add(class.bytes()) > bytes.next_multiple_of(UNIT) {
                    break;
                }
                sum += class.bytes();
                chosen.push(chunk);
            }
        }
        // The rest by one chunk more, the smallest that suffices.
        for class in Class::ALL.into_iter().rev().filter(|_| sum < bytes) {
            let next = self.chunks.clean_free(class).find(|chunk| !chosen.contains(chunk));
            if let Some(chunk) = next.filter(|_| sum.saturating_add(class.bytes()) >= bytes) {
                sum += class.bytes();
                chosen.push(chunk);
                break;
            }
        }
        (sum >= bytes && sum <= spare).then_some(chosen)
    }

    /// The driver's free memory was measured. Bytes for which no charge stands are taken.
    pub(super) fn measured(&mut self, free: u64) {
        // Memory that could not be taken may only have been on its way.
        self.growth.looks = if self.growth.unusable == 0 { 0 } else { self.growth.looks + 1 };
        if self.growth.looks >= LOOKS {
            self.growth.looks = 0;
            self.growth.unusable = 0;
        }
        self.growth.set_free(free);
        let reserve = self.settings.reserve;
        let workers = || self.workers.values();
        let unused: u64 = workers().map(|worker| worker.charged - worker.taken().min(worker.charged)).sum();
        let expected = reserve.saturating_add(unused);
        if !self.kept.is_empty()
            && self.growth.free >= expected.saturating_add(UNIT)
            && self.growth.unlocked()
        {
            // Some process may have let go of what it kept. Nothing tells which free pages those are.
            self.growth.settle(Depth::All);
        }
        let above = self.growth.free > reserve.saturating_add(UNIT.saturating_mul(2));
        if above && self.uncharged() > UNIT && self.growth.queue.is_empty() {
            self.growth.settle(Depth::Uncharged);
        }
        self.see_drain(free);
    }

    /// Says once when memory is missing for which no charge stands: some driver took it without a grant.
    fn see_drain(&mut self, free: u64) {
        if self.moves() || !self.growth.unlocked() {
            return;
        }
        let Some(whole) = self.whole else { return };
        let charged: u64 = self.workers.values().map(|worker| worker.charged).sum();
        let known = self.in_custody().saturating_add(free).saturating_add(charged);
        let missing = whole.saturating_sub(known);
        let much = missing > self.settings.reserve / 2 && missing >= UNIT;
        if much && !self.growth.drained {
            tracing::warn!(
                missing,
                "drivers took memory without a grant; the reserve is not refilled for them"
            );
            self.event(ArbiterEvent::Drift, 0, 0, missing);
        }
        self.growth.drained = much;
    }

    /// Whether the inventory's figures of workers include the chunks that are lent to them.
    pub const fn set_imports_booked(&mut self, booked: bool) {
        self.imports_booked = booked;
    }

    /// The bytes that the inventory books to a worker, `None` when it cannot say.
    pub fn set_booked(&mut self, id: WorkerId, bytes: Option<u64>, now: Millis) {
        let Estimates { context, margin } = self.settings.estimates;
        self.growth.now = now;
        let Some(worker) = self.workers.get_mut(&id) else { return };
        // The figure may be from before what was given back since the last look. A dead worker gives nothing back any more.
        let lent = worker.peak;
        if worker.life == Life::Alive {
            worker.peak = worker.held;
        }
        let exact = !self.imports_booked || lent == worker.held;
        let lent = if self.imports_booked { lent } else { 0 };
        let bytes = bytes.map(|bytes| match bytes.saturating_sub(lent) {
            least if exact => least,
            // Somewhere between the two: as it was, as far as it can be.
            least => worker.booked_bytes().clamp(least, bytes),
        });
        worker.booked = bytes.map_or(Booked::AtLeast(context), Booked::Bytes);
        // A figure from before the end of its last growth says nothing of that.
        let settled = exact && self.growth.is_settled(worker);
        if let Some(bytes) = bytes.filter(|_| settled) {
            let most = bytes.saturating_add(margin);
            worker.returned = worker.returned.saturating_sub(worker.granted.saturating_sub(most));
            worker.granted = worker.granted.min(most);
        }
        self.recharge(id);
    }

    /// After a look at every process: ends a worker of a VM that was over its quota in several looks in a row.
    pub fn judge(&mut self) {
        let margin = self.settings.estimates.margin;
        let mut over = Vec::new();
        for (vm, members) in &self.members {
            let Some(account) = self.ledger.account(*vm) else { continue };
            let workers = || members.iter().filter_map(|id| Some((*id, self.workers.get(id)?)));
            // No process is ended for an estimate.
            let booked = workers().map(|(_, worker)| worker.booked_bytes()).fold(0, u64::saturating_add);
            let beside = booked.saturating_sub(account.terms.headroom);
            let has = beside.saturating_add(account.lent).saturating_add(account.kept);
            let limit = self.ledger.limit(*vm);
            if booked > 0 && has > limit.saturating_add(margin) {
                let alive = workers().filter(|(_, worker)| worker.life == Life::Alive);
                let worst =
                    alive.max_by_key(|(_, worker)| worker.booked_bytes().saturating_sub(worker.granted));
                over.push((*vm, worst.map(|(id, _)| id), booked, limit));
            }
        }
        self.growth.strikes.retain(|vm, _| over.iter().any(|(other, ..)| other == vm));
        for (vm, worst, booked, limit) in over {
            let strikes = self.growth.strikes.entry(vm).or_default();
            *strikes += 1;
            if *strikes < STRIKES {
                continue;
            }
            *strikes = 0;
            if let Some((_, process)) = worst.and_then(|id| self.end(id)) {
                tracing::warn!(
                    vm = vm.vm,
                    process,
                    booked,
                    limit,
                    "drivers of a VM take more than its quota; a worker is ended"
                );
                self.event(ArbiterEvent::Headroom, vm.vm, process, booked);
            }
        }
    }
}
