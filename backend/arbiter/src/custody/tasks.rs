//! The driver's next task, and its consequences. The driver has one task at a time: besides exports, the scrubber is its only
//! user.

use super::{Custody, WorkerState, growth::Need, lines::Line};
use crate::{
    chunks::ChunkState,
    ids::{ChunkId, Class, VmKey, WorkerId},
};
use sluice_messages::control::ArbiterEvent;
use std::collections::VecDeque;

/// The reason for a scrub, for the audit log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// The chunk is fresh from the driver.
    Fresh,
    /// A VM had it, and all workers that imported it are gone.
    Returned,
    /// A VM gave it back, and its processes may still reach it.
    Reuse,
}

impl Reason {
    /// The reason's word in the audit log.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Reason::Fresh => "fresh",
            Reason::Returned => "returned",
            Reason::Reuse => "reuse",
        }
    }
}

/// A chunk to be scrubbed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScrubOrder {
    /// The chunk to scrub.
    pub chunk: ChunkId,
    /// Its number of scrubs after this one.
    pub epoch: u64,
    /// Its last VM.
    pub vm: Option<VmKey>,
    /// The reason for the scrub.
    pub reason: Reason,
}

/// A task for the driver. Chunks that it removes have left the table already.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Task {
    /// Scrub and verify these chunks.
    Scrub(Vec<ScrubOrder>),
    /// Give these chunks back to the driver.
    Release(Vec<ChunkId>),
    /// Take the driver's free memory, within these bounds.
    Take {
        /// Bytes to leave free.
        leave: u64,
        /// Largest number of bytes to take.
        most: u64,
    },
    /// Make chunks of another size from these.
    Remake {
        /// The chunks to replace.
        chunks: Vec<ChunkId>,
        /// The new size class.
        into: Class,
    },
    /// Take chunks away from a VM whose processes gave them back or are gone, and make new ones of their memory.
    Move {
        /// The chunks to take away.
        chunks: Vec<ChunkId>,
    },
    /// Measure the free memory.
    Measure,
}

/// The outcome of a task.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TaskOutcome {
    /// Each chunk, and whether it is clean.
    Scrubbed(Vec<(ChunkId, bool)>),
    /// The chunks were given back.
    Released {
        /// Bytes free now.
        free: u64,
    },
    /// Chunks were made of free memory.
    Taken {
        /// The classes of the new chunks.
        made: Vec<Class>,
        /// Bytes free now.
        free: u64,
    },
    /// Chunks of another size were made.
    Remade {
        /// The classes of the new chunks.
        made: Vec<Class>,
        /// Bytes free now.
        free: u64,
    },
    /// Chunks were taken away, and new ones made of the memory that came back.
    Moved {
        /// Bytes that came back.
        back: u64,
        /// The classes of the new chunks.
        made: Vec<Class>,
        /// Bytes free now.
        free: u64,
    },
    /// The free memory was measured.
    Measured {
        /// Bytes free now.
        free: u64,
    },
}

/// The driver's present task.
#[derive(Debug)]
pub(super) enum Busy {
    Scrub,
    Shift,
    Move { vm: VmKey, bytes: u64, importers: Vec<WorkerId> },
    Measure,
}

impl Custody {
    /// True if chunks are on their way from or to the driver.
    pub(super) fn shifts(&self) -> bool {
        matches!(self.busy, Some(Busy::Shift | Busy::Move { .. }))
    }

    /// True if memory moves, so that an impossible take may soon be possible.
    pub(super) fn moves(&self) -> bool {
        self.growth.pending() || self.shifts()
    }

    pub(super) fn scrubs(&self) -> bool {
        matches!(self.busy, Some(Busy::Scrub))
    }

    /// The driver's next task; `None` while it has one, or if there is none. `batch` bounds the bytes of one scrub. With
    /// `measure`, the free memory is measured if no other task is due.
    pub fn plan(&mut self, batch: u64, measure: bool) -> Option<Task> {
        if self.busy.is_some() {
            return None;
        }
        let task = self.choose(batch, measure)?;
        match &task {
            Task::Scrub(_) => self.busy = Some(Busy::Scrub),
            Task::Measure => self.busy = Some(Busy::Measure),
            Task::Move { .. } => {}
            Task::Release(_) | Task::Take { .. } | Task::Remake { .. } => self.busy = Some(Busy::Shift),
        }
        Some(task)
    }

    fn choose(&mut self, batch: u64, measure: bool) -> Option<Task> {
        self.growth.begin_choice();
        match self.growth_needs() {
            Need::Take { leave, most } => return Some(Task::Take { leave, most }),
            Need::Release(chunks) => {
                let released: Vec<ChunkId> =
                    chunks.into_iter().filter(|chunk| self.take_out(*chunk)).collect();
                return Some(Task::Release(released));
            }
            Need::Clean => {
                if let Some(task) = self.clean(batch).or_else(|| self.clean_returned(batch)) {
                    return Some(task);
                }
            }
            Need::Nothing => {}
        }
        if let Some(task) = self.for_waiters(batch) {
            return Some(task);
        }
        if measure {
            self.retry_suspects();
            // Not while chunks are taken: a worker that was refused a large chunk asks for small ones next.
            let quiet = !core::mem::take(&mut self.taken_from);
            let merged = if quiet { self.merge() } else { None };
            return merged.or(Some(Task::Measure));
        }
        if let Some(task) = self.clean(batch) {
            return Some(task);
        }
        self.growth.end_choice_of_shifts();
        let dirty = self.reachable_dirt(batch);
        self.scrub(dirty)
    }

    /// Makes unused memory lendable.
    fn clean(&mut self, batch: u64) -> Option<Task> {
        let mut dirty = self.free_dirt(batch);
        if dirty.is_empty() {
            dirty = self.bounded(self.chunks.dirty_left(), batch);
        }
        if !dirty.is_empty() {
            return self.scrub(dirty);
        }
        let (_, first) = self.chunks.clean_left().next()?;
        if self.growth.may_shift() { self.move_with(first, batch) } else { None }
    }

    fn is_in(&self, chunk: ChunkId, state: ChunkState) -> bool {
        self.chunks.get(chunk).is_some_and(|chunk| chunk.state == state)
    }

    /// Makes memory lendable that a VM gave back while its processes live.
    fn clean_returned(&mut self, batch: u64) -> Option<Task> {
        let clean = self.all_returned().find(|id| self.is_in(*id, ChunkState::Clean));
        if let Some(chunk) = clean {
            return if self.growth.may_shift() { self.move_with(chunk, batch) } else { None };
        }
        let dirty = self.bounded(self.all_returned().filter(|id| self.is_in(*id, ChunkState::Dirty)), batch);
        self.scrub(dirty)
    }

    /// Makes a larger chunk that was refused before, of smaller ones that no VM needs.
    fn merge(&mut self) -> Option<Task> {
        if !self.growth.unlocked() {
            return None;
        }
        let into = self.wanted.take()?;
        let smaller = into.smaller()?;
        let count = usize::try_from(into.bytes() / smaller.bytes()).ok()?;
        // Some small chunks stay, so that small takers do not wait for a split.
        let stay = into.bytes().min(64 << 20);
        let below = Class::ALL.into_iter().filter(|class| *class > into);
        let clean: u64 =
            below.map(|class| self.chunks.clean_free(class).count() as u64 * class.bytes()).sum();
        let enough = clean.saturating_sub(into.bytes()) >= stay && self.ledger.spare() >= into.bytes();
        if !enough || self.chunks.clean_free(smaller).count() < count {
            return None;
        }
        let chunks = self.chunks.clean_free(smaller).take(count).collect();
        self.remake(chunks, into)
    }

    fn remake(&mut self, chunks: Vec<ChunkId>, into: Class) -> Option<Task> {
        let chunks = self.take_all_out(chunks);
        (!chunks.is_empty()).then_some(Task::Remake { chunks, into })
    }

    fn take_all_out(&mut self, chunks: Vec<ChunkId>) -> Vec<ChunkId> {
        chunks.into_iter().filter(|chunk| self.take_out(*chunk)).collect()
    }

    /// Removes an unused chunk from the table and the ledger.
    pub(super) fn take_out(&mut self, chunk: ChunkId) -> bool {
        let bytes = self.chunks.get(chunk).map_or(0, |chunk| chunk.class.bytes());
        let done = self.ledger.shrink(bytes).and_then(|()| self.chunks.remove(chunk).map(drop));
        if let Err(broken) = done {
            self.broken(0, broken);
        }
        done.is_ok()
    }

    /// A task after which waiting takers can continue.
    fn for_waiters(&mut self, batch: u64) -> Option<Task> {
        let mut dirty: Vec<ChunkId> = Vec::new();
        let mut bytes = 0;
        let mut shift = None;
        let mut turns: VecDeque<(Line<Class>, usize)> =
            self.waiters.turns().into_iter().map(|line| (line, 0)).collect();
        while let Some((line, index)) = turns.pop_front().filter(|_| bytes < batch) {
            let (vm, class) = line;
            match self.help(vm, class, &dirty) {
                Some(Task::Scrub(orders)) => {
                    for order in orders {
                        bytes += self.chunks.get(order.chunk).map_or(0, |chunk| chunk.class.bytes());
                        dirty.push(order.chunk);
                    }
                    // The next taker of the line needs another chunk.
                    if self.waiters.get(line, index + 1).is_some() {
                        turns.push_back((line, index + 1));
                    }
                }
                other => shift = shift.or(other),
            }
        }
        if !dirty.is_empty() {
            return self.scrub(dirty);
        }
        match shift? {
            // A driver that grows meanwhile would take the memory for the new chunks.
            Task::Remake { chunks, into } if self.growth.may_shift() => self.remake(chunks, into),
            Task::Move { chunks } if self.growth.may_shift() => self.move_with(*chunks.first()?, batch),
            _ => None,
        }
    }

    /// A task after which a taker can continue, unless it is the scrub of a chunk in `dirty`.
    pub(super) fn help(&self, vm: VmKey, class: Class, dirty: &[ChunkId]) -> Option<Task> {
        if self.ledger.admit(vm, class.bytes()).is_err() || self.chunks.clean_for(vm, class).is_some() {
            return None;
        }
        let scrub = |chunk: ChunkId| Some(Task::Scrub(vec![self.order(chunk)?]));
        let new = |chunk: &ChunkId| !dirty.contains(chunk);
        if let Some(chunk) = self.chunks.dirty_for(vm, class).filter(new) {
            return scrub(chunk);
        }
        if let Some(chunk) = self.chunks.dirty_free(class).find(new) {
            return scrub(chunk);
        }
        // Only clean memory leaves custody, even if it returns at once: so a larger chunk is scrubbed before it is split.
        let larger = || Class::ALL.into_iter().filter(move |other| *other < class).rev();
        for larger in larger() {
            if let Some((chunk, into)) = self.chunks.clean_free(larger).next().zip(larger.smaller()) {
                return Some(Task::Remake { chunks: vec![chunk], into });
            }
        }
        if let Some(chunk) = larger().flat_map(|larger| self.chunks.dirty_free(larger)).find(new) {
            return scrub(chunk);
        }
        // First memory that VMs left behind, then memory that they gave back while their processes live.
        let suffices = |id: &ChunkId| self.chunks.get(*id).is_some_and(|chunk| chunk.class <= class);
        if let Some(chunk) = self.chunks.clean_left().map(|(_, id)| id).find(suffices) {
            return Some(Task::Move { chunks: vec![chunk] });
        }
        if let Some(chunk) = self.chunks.dirty_left().find(|id| suffices(id) && new(id)) {
            return scrub(chunk);
        }
        let returned = || self.all_returned().filter(suffices);
        if let Some(chunk) = returned().find(|id| self.is_in(*id, ChunkState::Clean)) {
            return Some(Task::Move { chunks: vec![chunk] });
        }
        returned().find(|id| self.is_in(*id, ChunkState::Dirty) && new(id)).and_then(scrub)
    }

    pub(super) fn has_free_dirt(&self) -> bool {
        Class::ALL.into_iter().any(|class| self.chunks.dirty_free(class).next().is_some())
    }

    /// Dirty chunks that no process can reach, middle-sized ones first: most takers want them.
    fn free_dirt(&self, batch: u64) -> Vec<ChunkId> {
        let order = [1, 2, 0].into_iter().filter_map(|index| Class::ALL.get(index).copied());
        self.bounded(order.flat_map(|class| self.chunks.dirty_free(class)), batch)
    }

    /// The first of these chunks, up to `batch` bytes, but at least one.
    fn bounded(&self, chunks: impl Iterator<Item = ChunkId>, batch: u64) -> Vec<ChunkId> {
        let mut bytes = 0_u64;
        let fits = |chunk: &ChunkId| {
            let first = bytes == 0;
            bytes = bytes.saturating_add(self.chunks.get(*chunk).map_or(0, |chunk| chunk.class.bytes()));
            first || bytes <= batch
        };
        chunks.take_while(fits).collect()
    }

    /// Dirty chunks that living processes may reach. Once clean, they serve their VM again.
    fn reachable_dirt(&self, batch: u64) -> Vec<ChunkId> {
        let mut bytes = 0;
        let alive =
            |id: &WorkerId| self.workers.get(id).is_some_and(|worker| worker.life == WorkerState::Alive);
        let fits = |chunk: &ChunkId| {
            let Some(chunk) = self.chunks.get(*chunk) else { return false };
            // A chunk that only dead workers could reach is scrubbed once, after the driver no longer lists them.
            let fits =
                chunk.importers.iter().any(alive) && (bytes == 0 || bytes + chunk.class.bytes() <= batch);
            bytes += if fits { chunk.class.bytes() } else { 0 };
            fits
        };
        self.chunks.dirty_reachable().filter(fits).collect()
    }

    fn scrub(&mut self, chunks: Vec<ChunkId>) -> Option<Task> {
        let mut orders = Vec::with_capacity(chunks.len());
        for id in chunks {
            match self.chunks.begin_scrub(id) {
                Ok(()) => orders.extend(self.order(id)),
                Err(broken) => self.broken(0, broken),
            }
        }
        (!orders.is_empty()).then_some(Task::Scrub(orders))
    }

    fn order(&self, id: ChunkId) -> Option<ScrubOrder> {
        let chunk = self.chunks.get(id)?;
        let reason = match chunk.vm {
            None => Reason::Fresh,
            Some(_) if chunk.is_left() => Reason::Returned,
            Some(_) => Reason::Reuse,
        };
        Some(ScrubOrder { chunk: id, epoch: chunk.epoch.saturating_add(1), vm: chunk.vm, reason })
    }

    fn insert(&mut self, made: &[Class]) -> Vec<ChunkId> {
        let mut ids = Vec::with_capacity(made.len());
        for class in made {
            let inserted = self.ledger.grow(class.bytes()).and_then(|()| self.chunks.insert(*class));
            match inserted {
                Ok(id) => ids.push(id),
                Err(broken) => self.broken(0, broken),
            }
        }
        ids
    }

    /// The driver has completed its task. Returns the new chunks, in the order in which they were made.
    pub fn finished(&mut self, outcome: TaskOutcome) -> Vec<ChunkId> {
        let busy = self.busy.take();
        self.recheck = true;
        self.changed = true;
        let ids = self.follow(busy, outcome);
        self.settle_kept();
        ids
    }

    fn follow(&mut self, busy: Option<Busy>, outcome: TaskOutcome) -> Vec<ChunkId> {
        match outcome {
            TaskOutcome::Scrubbed(chunks) => {
                for (id, clean) in chunks {
                    self.scrubbed(id, clean);
                }
                self.forget_leaving();
                Vec::new()
            }
            TaskOutcome::Released { free } => {
                self.growth.set_free(free);
                Vec::new()
            }
            TaskOutcome::Taken { made, free } => {
                let ids = self.insert(&made);
                self.growth.taken(free, &ids);
                ids
            }
            TaskOutcome::Remade { made, free } => {
                self.growth.set_free(free);
                self.insert(&made)
            }
            TaskOutcome::Moved { back, made, free } => {
                self.growth.set_free(free);
                if let Some(Busy::Move { vm, bytes, importers }) = busy {
                    self.moved(vm, bytes, importers, back);
                }
                self.insert(&made)
            }
            TaskOutcome::Measured { free } => {
                self.measured(free);
                Vec::new()
            }
        }
    }

    fn scrubbed(&mut self, id: ChunkId, clean: bool) {
        let Some(before) = self.chunks.get(id).cloned() else { return };
        let (bytes, vm) = (before.class.bytes(), before.vm);
        let number = vm.map_or(0, |vm| vm.vm);
        match self.chunks.end_scrub(id, clean) {
            Ok(suspect) => {
                if suspect {
                    self.suspect_bytes = self.suspect_bytes.saturating_add(bytes);
                    let done = self.ledger.shrink(bytes);
                    if let Err(broken) = done {
                        self.broken(number, broken);
                    }
                }
            }
            Err(broken) => self.broken(number, broken),
        }
        let spoiled = self.chunks.get(id).is_some_and(|chunk| chunk.spoiled);
        if let Some(vm) = vm.filter(|_| spoiled != before.spoiled) {
            // The VM is charged for it as long as no VM can use it.
            let done = if spoiled { self.ledger.keep(vm, bytes) } else { self.ledger.release(vm, bytes) };
            self.report_if_broken(vm, done);
            self.touched.insert(vm);
        }
        if !clean && !before.spoiled {
            self.event(ArbiterEvent::ScrubFailed, number, 0, bytes);
        }
        if self
            .chunks
            .get(id)
            .is_some_and(|chunk| matches!(chunk.state, ChunkState::Clean | ChunkState::Suspect))
        {
            self.growth.cleaned(id);
        }
    }
}

/// The classes of chunks to make of `bytes`: large ones for most of it, some of each smaller class so that small takers need
/// no split.
#[must_use]
pub fn mix(bytes: u64) -> Vec<Class> {
    let mut rest = bytes;
    let mut made = Vec::new();
    for (class, keep) in Class::ALL.into_iter().zip([bytes / 4, bytes / 16, 0]) {
        while rest >= class.bytes() && rest - class.bytes() >= keep {
            rest -= class.bytes();
            made.push(class);
        }
    }
    made
}
