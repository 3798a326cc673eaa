//! The driver share: device memory that the drivers of workers take for themselves.
//!
//! Custody passes the requests of workers and the inventory's figures to it, and the driver's next task asks it for its next
//! requirement. It owns the free memory of the unit, which it keeps occupied by clean ballast: a worker requests a *grow grant*
//! before its driver takes memory, the grant is charged to the VM, ballast is released for it, and a margin comes with it, so that
//! small growth needs no request. It must never replace memory that a driver took without a charge: that comes out of the reserve,
//! so the reserve cannot be pumped dry and refilled. The size of the ballast follows from the charges alone: chunks + charges +
//! reserve = the unit.
//!
//! Grants of different VMs run side by side. The arbiter corrects a charge when the inventory reports how much a worker's driver
//! has. Memory changes its VM or its chunks' size between grants only, so if that waits for [`SHIFT_WAIT`], no grant begins until
//! it is done, or until [`SHIFT_TURN`] is over: then grants have their turn.
//!
//! After a worker's death, drivers of other VMs wait until all free memory is occupied again, for it may hold data of the dead
//! worker. [`turns`] bounds how long the deaths of one VM's workers may delay other VMs.

mod ballast;
mod grants;
mod turns;

use super::{
    Booked, Custody, Millis, WorkerState,
    lines::{Lines, Waits},
};
use crate::{
    ids::{ChunkId, VmKey, WorkerId},
    ledger::LendRefusal,
};
pub(super) use ballast::Need;
use sluice_messages::{control::ArbiterEvent, custody::UNIT};
use sluice_protocol::limits;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use turns::Turns;

/// Looks in a row that must find a VM over its quota before one of its processes is ended.
const STRIKES: u32 = 3;
/// Milliseconds within which a worker imports a chunk that was lent to it, so that the inventory's figures include it.
const IMPORTED: Millis = 1_500;
/// Milliseconds for which a shift of memory waits for a moment without grants; then no more grants begin.
const SHIFT_WAIT: Millis = 100;
/// Milliseconds for which no grants begin then: the present ones end, and a second is left for shifts.
const SHIFT_TURN: Millis = limits::GROW_MILLISECONDS + 1_000;
/// Requests at the head of each line that are considered in one call: the others wait for these.
const CONSIDERED: usize = 4;

/// The cost of growth, as measured at start-up.
#[derive(Clone, Copy, Debug)]
pub struct Estimates {
    /// Bytes of a context.
    pub context: u64,
    /// Bytes that a grant lets a driver take beyond the requested ones.
    pub margin: u64,
}

/// A worker that waits for a grant.
#[derive(Clone, Copy, Debug)]
struct Wish {
    worker: WorkerId,
    vm: VmKey,
    serial: u64,
    /// The requested bytes.
    bytes: u64,
    /// Bytes of the worker's margins that are used up for certain.
    spent: u64,
    /// The time until which it also waits for memory that may never come.
    memory_deadline: Millis,
    deadline: Millis,
}

impl Wish {
    /// The time until which it waits for memory that ended processes of any VM give back late. Not renewed with each of them: the
    /// processes of one VM could otherwise end one after the other to delay all other VMs.
    const fn late_memory_deadline(&self) -> Millis {
        self.memory_deadline.saturating_add(limits::LATE_MEMORY_MILLISECONDS)
    }
}

impl Waits for Wish {
    fn worker(&self) -> WorkerId {
        self.worker
    }
}

/// The kind of a line of wishes: true for contexts, with which every session starts.
type IsStart = bool;

/// A grant that has not ended.
#[derive(Clone, Copy, Debug)]
struct ActiveGrant {
    vm: VmKey,
    /// The time until which memory does not move because of it.
    until: Millis,
}

/// A dead worker whose memory may not be back in the driver yet.
#[derive(Clone, Copy, Debug)]
struct Unswept {
    vm: VmKey,
    /// Bytes of its driver.
    bytes: u64,
    /// The time until which drivers of other VMs wait for it.
    until: Millis,
}

/// The part of the driver's free memory that a sweep makes chunks of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum SweepExtent {
    /// The part that no charge covers.
    Uncharged,
    /// All of it: after a death, the dead worker's pages among the free ones are unknown.
    All,
}

/// The VMs whose drivers may use their margins without asking.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Closed {
    /// No driver may use its margin.
    all: bool,
    /// VMs whose dead workers delay other VMs. If there is one such VM, only its own drivers may use their margins.
    by: BTreeSet<VmKey>,
}

/// The turn of shifts of memory, which need a moment without grants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ShiftTurn {
    NotDue,
    /// A shift was put off because of a grant.
    Due {
        since: Millis,
    },
    /// No grants begin.
    Present {
        until: Millis,
    },
}

/// The state of growth of a unit.
#[derive(Debug)]
pub(super) struct Growth {
    wishes: Lines<IsStart, Wish>,
    /// Grants under way for which other VMs wait.
    active: HashMap<(WorkerId, u64), ActiveGrant>,
    shift_turn: ShiftTurn,
    /// True if a shift of memory was put off in the present choice of a task.
    shift_waits: bool,
    /// True if memory that some process kept may be among the free bytes.
    kept_returned: bool,
    /// Bytes that the driver had free and could give, at the last look.
    free: u64,
    /// Bytes that it reports as free but cannot give.
    unusable: u64,
    settle: Option<SweepExtent>,
    /// The driver's present sweep. A sweep requested meanwhile follows it.
    taking: Option<(SweepExtent, u64)>,
    /// Looks at free memory since some could not be taken.
    looks: u32,
    /// Dead workers whose memory may not be back in the driver yet.
    unswept: HashMap<WorkerId, Unswept>,
    turns: Turns,
    /// The current time, as of the last call that passed it.
    now: Millis,
    /// VMs whose dead workers' memory is among the free bytes or in `swept`, with its bytes.
    dirtiers: BTreeMap<VmKey, u64>,
    /// Chunks taken after deaths that are not clean yet.
    swept: HashSet<ChunkId>,
    closed: Closed,
    /// Looks in a row that found a VM over its quota.
    strikes: HashMap<VmKey, u32>,
    /// True once it was reported that uncovered memory is missing.
    drained: bool,
}

impl Growth {
    pub(super) fn new(free: u64) -> Growth {
        Growth {
            wishes: Lines::default(),
            active: HashMap::new(),
            shift_turn: ShiftTurn::NotDue,
            shift_waits: false,
            kept_returned: false,
            free,
            unusable: 0,
            settle: Some(SweepExtent::Uncharged),
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

    /// True if memory is on its way from or to the driver.
    pub(super) fn pending(&self) -> bool {
        self.settle.is_some() || self.taking.is_some()
    }

    /// True if chunks may now leave and enter custody for other reasons.
    pub(super) fn unlocked(&self) -> bool {
        self.active.is_empty()
    }

    /// The same for a shift of memory that is due: if it has waited for long enough, grants wait for it.
    pub(super) fn may_shift(&mut self) -> bool {
        let (unlocked, now) = (self.unlocked(), self.now);
        self.shift_waits |= !unlocked;
        self.shift_turn = match self.shift_turn {
            ShiftTurn::Due { .. } if unlocked => ShiftTurn::NotDue,
            ShiftTurn::NotDue if !unlocked => ShiftTurn::Due { since: now },
            ShiftTurn::Due { since } if now >= since.saturating_add(SHIFT_WAIT) => {
                ShiftTurn::Present { until: now.saturating_add(SHIFT_TURN) }
            }
            other => other,
        };
        unlocked
    }

    /// The choice of the driver's next task begins.
    pub(super) const fn begin_choice(&mut self) {
        self.shift_waits = false;
    }

    /// The choice has come to work that is less urgent than every shift of memory.
    pub(super) const fn end_choice_of_shifts(&mut self) {
        if !self.shift_waits {
            self.shift_turn = ShiftTurn::NotDue;
        }
    }

    /// True if no grants begin, so that memory can move.
    const fn is_shifts_turn(&self) -> bool {
        matches!(self.shift_turn, ShiftTurn::Present { .. })
    }

    /// Ends turns that are over: of shifts, and of grants.
    fn end_turns(&mut self) {
        let now = self.now;
        if matches!(self.shift_turn, ShiftTurn::Present { until } if until <= now) {
            self.shift_turn = ShiftTurn::NotDue;
        }
        // A grant that has not ended by now is charged in full and no longer delays other VMs. A sweep waits for grants of the dead
        // worker's own VM only as long as deaths of that VM may delay others.
        let (sweeps, dirtiers, turns) = (self.sweeps(), &self.dirtiers, &self.turns);
        let ignored = |vm| sweeps && dirtiers.contains_key(&vm) && turns.holds_until(vm) <= now;
        self.active.retain(|_, grant| grant.until > now && !ignored(grant.vm));
    }

    pub(super) fn set_free(&mut self, free: u64) {
        self.free = free.saturating_sub(self.unusable);
    }

    /// Bytes that the driver reported as free at the last look.
    pub(super) const fn free(&self) -> u64 {
        self.free.saturating_add(self.unusable)
    }

    /// The current time, as of the last call that passed it.
    pub(super) const fn now(&self) -> Millis {
        self.now
    }

    pub(super) fn forget(&mut self, vm: VmKey) {
        self.turns.forget(vm);
        self.strikes.remove(&vm);
    }

    pub(super) fn settle(&mut self, extent: SweepExtent) {
        self.settle = self.settle.max(Some(extent));
    }

    /// A worker died; `bytes` is the memory of its driver.
    pub(super) fn died(&mut self, id: WorkerId, vm: VmKey, bytes: u64, now: Millis) {
        self.wishes.remove_worker(vm, id);
        self.active.retain(|(worker, _), _| *worker != id);
        let until = self.turns.hold_up(vm, now);
        self.unswept.insert(id, Unswept { vm, bytes, until });
    }

    /// The memory of a dead worker is back in the driver.
    pub(super) fn gone(&mut self, id: WorkerId) {
        let Some(dead) = self.unswept.remove(&id) else { return };
        let sum = self.dirtiers.entry(dead.vm).or_default();
        *sum = sum.saturating_add(dead.bytes);
        self.settle(SweepExtent::All);
    }

    /// Memory that some process kept is among the free bytes.
    pub(super) const fn kept_came_back(&mut self, bytes: u64) {
        self.kept_returned |= bytes > 0;
    }

    /// True if such memory has not been taken yet.
    pub(super) const fn has_returned_memory(&self) -> bool {
        self.kept_returned
    }

    /// All free memory is being taken now.
    fn begin_sweep(&mut self) {
        self.settle = None;
        self.taking = Some((SweepExtent::All, 0));
    }

    /// Ends the delays by VMs whose dead workers' memory is back in the driver, and which have no grant for which the sweep waits: it
    /// then waits for grants of other VMs only.
    fn let_go(&mut self, is_alone: impl Fn(VmKey) -> bool) {
        for vm in self.dirtiers.keys() {
            let delays = self.unswept.values().any(|dead| dead.vm == *vm)
                || self.settle == Some(SweepExtent::All) && self.active.values().any(|grant| grant.vm == *vm);
            if !delays {
                self.turns.let_go(*vm, self.now, is_alone(*vm));
            }
        }
    }

    /// Bytes of a VM's dead workers that are not clean yet.
    pub(super) fn unswept_bytes(&self, vm: VmKey) -> u64 {
        let dead = self.unswept.values().filter(|dead| dead.vm == vm).map(|dead| dead.bytes);
        dead.chain(self.dirtiers.get(&vm).copied()).fold(0, u64::saturating_add)
    }

    /// True if all free memory is being taken, or is about to be.
    fn sweeps(&self) -> bool {
        self.settle == Some(SweepExtent::All) || matches!(self.taking, Some((SweepExtent::All, _)))
    }

    /// True if drivers of a VM wait because another VM's memory may be among the free bytes.
    fn is_blocked(&self, vm: VmKey) -> bool {
        self.sweeps() || self.unswept.values().any(|dead| dead.vm != vm && dead.until > self.now)
    }

    /// True if drivers of a VM may use their margins.
    pub(super) fn is_open(&self, vm: VmKey) -> bool {
        !self.closed.all && self.closed.by.iter().all(|by| *by == vm)
    }

    /// The driver's free memory was taken into these chunks.
    pub(super) fn taken(&mut self, free: u64, chunks: &[ChunkId]) {
        let (extent, left) = self.taking.take().unwrap_or((SweepExtent::Uncharged, 0));
        self.unusable = Some(free.saturating_sub(left)).filter(|rest| *rest >= UNIT).unwrap_or(0);
        if extent == SweepExtent::All && !self.dirtiers.is_empty() {
            self.swept.extend(chunks);
        }
        self.set_free(free);
        self.clear_dirtiers();
    }

    /// Forgets dead workers' memory, once all chunks taken after their ends are clean.
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

    /// The next time at which something is due without a message.
    fn due(&self) -> Option<Millis> {
        let deadlines = |wish: &Wish| [wish.memory_deadline, wish.late_memory_deadline(), wish.deadline];
        let wishes = self.wishes.fronts().flat_map(|(_, wish)| deadlines(wish));
        let dead = self.unswept.values().map(|dead| dead.until);
        let dirtiers = self.dirtiers.keys().map(|vm| self.turns.holds_until(*vm));
        let starting = self.wishes.fronts().filter(|((_, is_start), _)| *is_start);
        let paying = starting.filter_map(|((vm, _), _)| self.turns.pays_until(vm, self.now));
        let active = self.active.values().map(|grant| grant.until);
        let shifts = match self.shift_turn {
            ShiftTurn::NotDue => None,
            ShiftTurn::Due { since } => Some(since.saturating_add(SHIFT_WAIT)),
            ShiftTurn::Present { until } => Some(until),
        };
        let times = wishes.chain(dead).chain(dirtiers).chain(paying).chain(active).chain(shifts);
        times.filter(|time| *time > self.now).min()
    }
}

impl Custody {
    /// Requests the escrow for which growth waits.
    fn want_escrows(&mut self) {
        let mut wanted: BTreeMap<u32, u64> = BTreeMap::new();
        for (_, _, wish) in self.growth.wishes.heads(CONSIDERED) {
            if let Err(LendRefusal::Ancestor(ancestor, bytes)) = self.admit_growth(wish.worker, wish.bytes) {
                let most = wanted.entry(ancestor).or_default();
                *most = bytes.max(*most);
            }
        }
        for (ancestor, bytes) in wanted {
            self.want_escrow(ancestor, bytes, self.growth.now);
        }
    }

    /// Writes to the custody pages which margins may be used, if that has changed.
    fn publish_closed(&mut self) {
        let growth = &self.growth;
        let dead = growth.unswept.values().filter(|dead| dead.until > growth.now).map(|dead| dead.vm);
        let closed = Closed { all: growth.sweeps(), by: dead.collect() };
        if closed != self.growth.closed {
            self.growth.closed = closed;
            self.touched.extend(self.members.keys());
        }
    }

    /// Computes a worker's charge from its grants and the inventory's figure.
    pub(super) fn recharge(&mut self, id: WorkerId) {
        let Some(worker) = self.workers.get_mut(&id) else { return };
        let (vm, before, after) = (worker.vm, worker.charged, worker.charge());
        worker.charged = after;
        let counts = (worker.granted, worker.doubtful());
        let counted = core::mem::replace(&mut worker.counted, counts);
        if counted != counts {
            let done = self.ledger.set_granted(vm, counted.0, counts.0);
            self.report_if_broken(vm, done);
            let done = self.ledger.set_doubtful(vm, counted.1, counts.1);
            self.report_if_broken(vm, done);
        }
        if before != after {
            let done = self.ledger.set_driver(vm, before, after);
            self.report_if_broken(vm, done);
            self.recheck = true;
            self.touched.insert(vm);
        }
    }

    /// Sets whether the inventory's figures of workers are used, or will be soon, and whether they include the chunks that are
    /// lent to them.
    pub fn set_figures(&mut self, judge: bool, imports_booked: bool) {
        self.figures_judge = judge;
        self.imports_booked = imports_booked;
        // Without figures nothing would end these doubts.
        let doubtful = self.workers.iter_mut().filter(|(_, worker)| !judge && worker.reused > 0);
        let doubtful: Vec<WorkerId> = doubtful
            .map(|(id, worker)| {
                worker.reused = 0;
                *id
            })
            .collect();
        doubtful.into_iter().for_each(|id| self.recharge(id));
    }

    /// Sets the bytes that the inventory books to a worker, for which it was asked at `asked`; `None` if it reports none.
    pub fn set_booked(&mut self, id: WorkerId, bytes: Option<u64>, asked: Millis, now: Millis) {
        let Estimates { context, margin } = self.settings.estimates;
        self.growth.now = now;
        let Some(worker) = self.workers.get_mut(&id) else { return };
        // The figure may be older than chunks given back since the last look. A dead worker gives no more back.
        let lent = worker.peak;
        if worker.life == WorkerState::Alive {
            worker.peak = worker.held;
        }
        let exact =
            !self.imports_booked || lent == worker.held && now.saturating_sub(worker.borrowed) >= IMPORTED;
        let lent = if self.imports_booked { lent } else { 0 };
        let bytes = bytes.map(|bytes| match bytes.saturating_sub(lent) {
            least if exact => least,
            // The true figure is between the two bounds: the old one is kept if it is, too.
            least => worker.booked_bytes().clamp(least, bytes),
        });
        worker.booked = bytes.map_or(Booked::AtLeast(context), Booked::Bytes);
        worker.seen = asked;
        if let Some(bytes) = bytes.filter(|_| exact && worker.is_settled()) {
            // The figure decides how much of the doubtful bytes the driver has.
            worker.granted = worker.granted.saturating_add(worker.reused).min(bytes.saturating_add(margin));
            worker.reused = 0;
            worker.returned = if asked > worker.shrank { 0 } else { worker.returned.min(worker.granted) };
            // A request that waited for this figure is decided now.
            self.recheck = true;
        }
        self.recharge(id);
    }

    /// After a look at every process: ends a worker of a VM that exceeded its quota in several looks in a row.
    pub fn judge(&mut self) {
        let margin = self.settings.estimates.margin;
        let mut over = Vec::new();
        for (vm, members) in &self.members {
            let Some(account) = self.ledger.account(*vm) else { continue };
            let workers = || members.iter().filter_map(|id| Some((*id, self.workers.get(id)?)));
            // No process is ended because of an estimate.
            let booked = workers().map(|(_, worker)| worker.booked_bytes()).fold(0, u64::saturating_add);
            let beside = booked.saturating_sub(account.terms.headroom);
            let has = beside.saturating_add(account.lent).saturating_add(account.kept);
            let limit = self.ledger.limit(*vm);
            if booked > 0 && has > limit.saturating_add(margin) {
                let alive = workers().filter(|(_, worker)| worker.life == WorkerState::Alive);
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
                    "drivers of a VM exceed its quota; a worker is killed"
                );
                self.event(ArbiterEvent::Headroom, vm.vm, process, booked);
            }
        }
    }
}
