//! What drivers of workers take for themselves, and the ballast that is released for it.
//!
//! The unit's free memory is kept occupied by clean chunks. A worker whose driver is about to grow asks; one at a time
//! is granted: ballast is released until the driver has what is needed, the worker says when it is done, and what was not
//! used is taken back. So memory that somebody's driver grows into was clean. What a dead worker's driver had is taken
//! and scrubbed before another VM's driver may grow. VMs take [`turns`].

mod turns;

use super::{Custody, Life, Millis, Worker};
use crate::ids::{ChunkId, Class, VmKey, WorkerId};
use sluice_driver::code;
use sluice_protocol::{
    custody::{Answer, Growth as Cause, UNIT},
    limits,
};
use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use turns::Turns;

/// Looks after which it is tried again to take what the driver could not give.
const LOOKS: u32 = 20;

/// What growth takes, as measured at start-up.
#[derive(Clone, Copy, Debug)]
pub struct Estimates {
    /// Bytes of a context.
    pub context: u64,
    /// Bytes that any growth may take beside what it is known to.
    pub margin: u64,
}

impl Estimates {
    fn need(&self, cause: Cause, bytes: u64) -> u64 {
        let least = if cause == Cause::Context { self.context } else { 0 };
        bytes.max(least).saturating_add(self.margin)
    }
}

/// A worker that wants to grow.
#[derive(Clone, Copy, Debug)]
struct Wish {
    worker: WorkerId,
    vm: VmKey,
    serial: u64,
    /// What counts towards the VM's limit.
    least: u64,
    /// What the driver is to have free.
    need: u64,
    /// Until when it waits also for memory of which nothing says that it will come.
    patient: Millis,
    /// Whether that is over.
    hurried: bool,
    until: Millis,
}

/// The worker whose driver grows.
#[derive(Clone, Copy, Debug)]
struct Active {
    worker: WorkerId,
    serial: u64,
    until: Millis,
}

/// A worker whose driver grew, and what was so before.
#[derive(Clone, Copy, Debug)]
struct Grew {
    worker: WorkerId,
    /// Bytes that the driver had free.
    free: u64,
    /// Bytes that it had taken for this worker.
    headroom: u64,
}

/// A dead worker whose memory the driver may not have back yet.
#[derive(Clone, Copy, Debug)]
struct Unswept {
    vm: VmKey,
    /// What its driver had.
    bytes: u64,
    since: Millis,
}

/// How much of the driver's free memory is taken back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Depth {
    /// What is above the reserve.
    AboveReserve,
    /// All of it: after a death, for nobody knows which free pages were the dead one's.
    All,
}

/// Growth of a unit.
#[derive(Debug)]
pub(super) struct Growth {
    queue: VecDeque<Wish>,
    active: Option<Active>,
    /// Bytes the driver has free and can give, when last looked at.
    free: u64,
    /// Bytes it says are free and cannot give.
    unusable: u64,
    settle: Option<Depth>,
    /// What the driver is taking back now. What is asked for meanwhile comes after it.
    taking: Option<Depth>,
    /// Looks at what is free since something could not be taken.
    looks: u32,
    /// Who grew since the last look.
    grew: Option<Grew>,
    /// The dead whose memory the driver may not have back yet.
    unswept: HashMap<WorkerId, Unswept>,
    /// Whose turn it is.
    turns: Turns,
    /// When it was last looked who may grow.
    now: Millis,
    /// Whose memory is among what is free, or among `swept`.
    dirtiers: BTreeMap<VmKey, u64>,
    /// Chunks taken after deaths that are not clean yet.
    swept: HashSet<ChunkId>,
}

/// What growth needs of the driver.
pub(super) enum Need {
    Nothing,
    Take {
        leave: u64,
    },
    Release(Vec<ChunkId>),
    /// Clean ballast: there is none, and some can be made.
    Clean,
}

impl Growth {
    pub(super) fn new(free: u64) -> Growth {
        Growth {
            queue: VecDeque::new(),
            active: None,
            free,
            unusable: 0,
            settle: Some(Depth::AboveReserve),
            taking: None,
            looks: 0,
            grew: None,
            unswept: HashMap::new(),
            turns: Turns::default(),
            now: 0,
            dirtiers: BTreeMap::new(),
            swept: HashSet::new(),
        }
    }

    /// Whether memory is on its way from or to the driver.
    pub(super) fn pending(&self) -> bool {
        self.active.is_some() || self.settle.is_some() || self.taking.is_some()
    }

    /// Whether a worker's driver may grow now.
    pub(super) fn grows(&self, id: WorkerId) -> bool {
        self.active.is_some_and(|active| active.worker == id)
    }

    /// Whether it is not known yet how much a worker's driver has taken.
    pub(super) fn settles(&self, id: WorkerId) -> bool {
        self.grew.is_some_and(|grew| grew.worker == id)
    }

    /// Whether chunks may leave and enter custody for other reasons now.
    pub(super) fn unlocked(&self) -> bool {
        self.active.is_none()
    }

    pub(super) fn set_free(&mut self, free: u64) {
        self.free = free.saturating_sub(self.unusable);
    }

    /// Bytes the driver says are free, when last looked at.
    pub(super) const fn free(&self) -> u64 {
        self.free.saturating_add(self.unusable)
    }

    /// A VM is forgotten.
    pub(super) fn forget(&mut self, vm: VmKey) {
        self.turns.forget(vm);
    }

    pub(super) fn settle(&mut self, depth: Depth) {
        self.settle = self.settle.max(Some(depth));
    }

    /// A worker is ended, for whatever it did. A grant that it has until then was kept.
    pub(super) fn ended(&mut self, id: WorkerId, vm: VmKey) {
        if self.grows(id) {
            self.turns.overran(vm, self.now);
        }
    }

    /// A worker died; `bytes` is what its driver had.
    pub(super) fn died(&mut self, id: WorkerId, vm: VmKey, bytes: u64, since: Millis) {
        self.queue.retain(|wish| wish.worker != id);
        if self.grows(id) {
            self.active = None;
        }
        if self.grew.is_some_and(|grew| grew.worker == id) {
            self.grew = None;
        }
        self.unswept.insert(id, Unswept { vm, bytes, since });
    }

    /// The driver has what a dead worker had.
    pub(super) fn gone(&mut self, id: WorkerId) {
        if let Some(dead) = self.unswept.remove(&id) {
            let sum = self.dirtiers.entry(dead.vm).or_default();
            *sum = sum.saturating_add(dead.bytes);
            self.settle(Depth::All);
        }
    }

    /// Bytes of a VM's dead workers that are not clean yet.
    pub(super) fn unswept_bytes(&self, vm: VmKey) -> u64 {
        let dead = self.unswept.values().filter(|dead| dead.vm == vm).map(|dead| dead.bytes);
        dead.chain(self.dirtiers.get(&vm).copied()).fold(0, u64::saturating_add)
    }

    /// Whether a VM's driver may not grow because another's memory may be among what is free.
    fn is_blocked(&self, vm: VmKey) -> bool {
        self.unswept.values().any(|dead| dead.vm != vm)
    }

    /// Until when a VM lets others go first that wait for its dead: drivers let go of those in a moment. One that does not
    /// is no reason for the VM to wait.
    fn yields_until(&self, vm: VmKey) -> Option<Millis> {
        let until = |dead: &Unswept| dead.since.saturating_add(limits::GROW_PATIENCE_MILLISECONDS);
        self.unswept.values().filter(|dead| dead.vm == vm).map(until).max().filter(|until| *until > self.now)
    }

    /// What the driver had free was taken, into these chunks. Returns who had grown, and what its driver
    /// has now.
    pub(super) fn taken(
        &mut self,
        found: u64,
        free: u64,
        chunks: &[ChunkId],
        reserve: u64,
    ) -> Option<(WorkerId, u64)> {
        let depth = self.taking.take();
        let leave = if depth == Some(Depth::All) { 0 } else { reserve };
        self.unusable = Some(free.saturating_sub(leave)).filter(|rest| *rest >= UNIT).unwrap_or(0);
        if depth == Some(Depth::All) && !self.dirtiers.is_empty() {
            self.swept.extend(chunks);
        }
        self.set_free(free);
        self.clear_dirtiers();
        let grew = self.grew.take()?;
        Some((grew.worker, grew.headroom.saturating_add(grew.free.saturating_sub(found))))
    }

    /// Nothing of the dead is left, once what was taken after their ends is clean.
    fn clear_dirtiers(&mut self) {
        if self.swept.is_empty() && self.settle != Some(Depth::All) && self.taking != Some(Depth::All) {
            self.dirtiers.clear();
        }
    }

    /// A chunk is clean, or suspect and out of use.
    pub(super) fn cleaned(&mut self, chunk: ChunkId) {
        if self.swept.remove(&chunk) {
            self.clear_dirtiers();
        }
    }
}

impl Custody {
    pub(super) fn grow(&mut self, id: WorkerId, serial: u64, reason: u32, bytes: u64, now: Millis) {
        let Some(cause) = Cause::from_number(reason) else { return self.abuse(id, "grows for no reason") };
        let Some(vm) = self.workers.get(&id).map(|worker| worker.vm) else { return };
        let Some(account) = self.ledger.account(vm) else { return };
        if account.closed {
            return self.refuse(id, serial, code::DEVICE_UNAVAILABLE);
        }
        let least = self.least(cause, bytes);
        if !self.fits(vm, least) && !self.leaves(vm) {
            return self.refuse(id, serial, code::OUT_OF_MEMORY);
        }
        let need = self.settings.estimates.need(cause, bytes);
        if let Some(worker) = self.workers.get_mut(&id) {
            worker.waiting += 1;
        }
        let until = now.saturating_add(limits::GROW_WAIT_MILLISECONDS);
        let patient = now.saturating_add(limits::GROW_PATIENCE_MILLISECONDS);
        let wish = Wish { worker: id, vm, serial, least, need, patient, hurried: false, until };
        self.growth.queue.push_back(wish);
    }

    /// What growth counts towards a VM's limit at least.
    const fn least(&self, cause: Cause, bytes: u64) -> u64 {
        match cause {
            Cause::Context => self.settings.estimates.context,
            _ => bytes,
        }
    }

    /// Whether a VM's drivers may take so much more.
    fn fits(&self, vm: VmKey, least: u64) -> bool {
        let limit = self.ledger.account(vm).map_or(0, |account| account.terms.headroom);
        limit == 0 || self.headroom(vm).checked_add(least).is_some_and(|sum| sum <= limit)
    }

    /// Whether some of what a VM's drivers have is about to be free, because a worker has ended or is being ended.
    fn leaves(&self, vm: VmKey) -> bool {
        let members = self.members.get(&vm).into_iter().flatten().filter_map(|id| self.workers.get(id));
        members.into_iter().any(|worker| worker.life != Life::Alive && worker.headroom() > 0)
    }

    /// Whether growth of a worker's driver would exceed what its VM may have.
    pub(super) fn grows_too_far(&self, id: WorkerId, reason: u32, bytes: u64) -> bool {
        let vm = self.workers.get(&id).map(|worker| worker.vm);
        let least = Cause::from_number(reason).map(|cause| self.least(cause, bytes));
        vm.zip(least).is_some_and(|(vm, least)| !self.fits(vm, least))
    }

    pub(super) fn grown(&mut self, id: WorkerId, serial: u64) {
        match self.growth.active {
            Some(active) if active.worker == id && active.serial == serial => {
                self.growth.active = None;
                self.growth.settle(Depth::AboveReserve);
                self.stirred = true;
            }
            _ => self.abuse(id, "ends a grant that it has not got"),
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

    /// Grants what can be granted now, refuses what waited too long, ends who keeps a grant too long. Returns when to look
    /// again.
    pub fn serve_growth(&mut self, now: Millis) -> Option<Millis> {
        self.growth.now = now;
        if let Some(active) = self.growth.active.filter(|active| active.until <= now) {
            self.abuse(active.worker, "keeps a grant to grow for too long");
            self.growth.active = None;
            self.growth.settle(Depth::AboveReserve);
        }
        let (late, rest): (VecDeque<Wish>, _) = core::mem::take(&mut self.growth.queue)
            .into_iter()
            .partition(|wish| wish.until <= now || !self.fits(wish.vm, wish.least) && !self.leaves(wish.vm));
        self.growth.queue = rest;
        for wish in late {
            self.no_longer_waits(wish.worker);
            self.refuse(wish.worker, wish.serial, code::OUT_OF_MEMORY);
        }
        for wish in &mut self.growth.queue {
            wish.hurried |= wish.patient <= now;
        }
        self.grant(now);
        let next = |wish: &Wish| if wish.hurried { wish.until } else { wish.patient };
        let wishes = self.growth.queue.iter().map(next);
        let barred = self.growth.queue.iter().filter_map(|wish| self.growth.turns.barred_until(wish.vm, now));
        let yielding = self.growth.queue.iter().filter_map(|wish| self.growth.yields_until(wish.vm));
        wishes.chain(barred).chain(yielding).chain(self.growth.active.map(|active| active.until)).min()
    }

    /// The wish whose turn it is: VMs take turns, and whoever is held back by others' dead loses none to them.
    fn next_wish(&self) -> Option<(usize, Wish)> {
        let growth = &self.growth;
        let mut order: Vec<(u64, usize)> =
            growth.queue.iter().zip(0..).map(|(wish, index)| (growth.turns.last(wish.vm), index)).collect();
        order.sort_unstable();
        let mut waiting: Option<VmKey> = None;
        for (_, index) in order {
            let Some(wish) = growth.queue.get(index) else { continue };
            if growth.turns.barred_until(wish.vm, growth.now).is_some() || !self.fits(wish.vm, wish.least) {
                continue;
            }
            if growth.is_blocked(wish.vm) {
                waiting = Some(wish.vm);
            } else if waiting.is_none_or(|other| other == wish.vm) || growth.yields_until(wish.vm).is_none() {
                return Some((index, *wish));
            }
        }
        None
    }

    fn grant(&mut self, now: Millis) {
        if self.growth.pending() || self.shifts() {
            return;
        }
        let Some((index, wish)) = self.next_wish() else { return };
        if self.growth.free < wish.need.saturating_add(self.settings.reserve) {
            return;
        }
        self.growth.queue.remove(index);
        self.no_longer_waits(wish.worker);
        let worker = self.workers.get(&wish.worker).filter(|worker| worker.life == Life::Alive);
        let Some(headroom) = worker.map(Worker::headroom) else { return };
        self.growth.turns.granted(wish.vm);
        let until = now.saturating_add(limits::GROW_MILLISECONDS);
        self.growth.active = Some(Active { worker: wish.worker, serial: wish.serial, until });
        let free = self.growth.free.saturating_add(self.growth.unusable);
        self.growth.grew = Some(Grew { worker: wish.worker, free, headroom });
        self.answer(wish.worker, Answer::Granted { serial: wish.serial, value: 0 });
    }

    /// What growth needs of the driver next.
    pub(super) fn growth_needs(&mut self) -> Need {
        if self.growth.active.is_some() {
            return Need::Nothing;
        }
        let reserve = self.settings.reserve;
        if let Some(depth) = self.growth.settle.take() {
            self.growth.taking = Some(depth);
            return Need::Take { leave: if depth == Depth::All { 0 } else { reserve } };
        }
        // What is missing to the reserve is given back whoever wants to grow, but only if it is worth a chunk.
        let wish = self.next_wish();
        let need = wish.map_or(0, |(_, wish)| wish.need);
        let missing = need.saturating_add(reserve).saturating_sub(self.growth.free);
        if missing == 0 {
            return Need::Nothing;
        }
        match self.ballast(missing) {
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

    /// Clean chunks of at least `bytes` in all that can leave custody.
    fn ballast(&self, bytes: u64) -> Option<Vec<ChunkId>> {
        if bytes > self.ledger.spare() {
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
        (sum >= bytes && sum <= self.ledger.spare()).then_some(chosen)
    }

    /// What a driver has free was measured. What is there beyond the reserve is taken.
    pub(super) fn measured(&mut self, free: u64) {
        // What could not be taken may only have been on its way.
        self.growth.looks = if self.growth.unusable == 0 { 0 } else { self.growth.looks + 1 };
        if self.growth.looks >= LOOKS {
            self.growth.looks = 0;
            self.growth.unusable = 0;
        }
        self.growth.set_free(free);
        let reserve = self.settings.reserve;
        if !self.kept.is_empty() && self.growth.free >= reserve.saturating_add(UNIT) && self.growth.unlocked()
        {
            // Somebody may have let go of what he kept. Nobody knows which free pages are those.
            self.growth.settle(Depth::All);
        }
        let above = self.growth.free > reserve.saturating_add(UNIT.saturating_mul(2));
        if above && self.growth.unlocked() && self.growth.queue.is_empty() {
            self.growth.settle(Depth::AboveReserve);
        }
    }
}
