//! The move of memory from one VM to another: never as a chunk.
//!
//! A process that was lent a chunk may have passed it on to a process that is in no list. So a chunk that was lent serves its
//! VM and no other. When it is clean its memory goes back to the driver, which makes new memory only of memory that no process
//! holds any more, and comes again as another chunk. Chunks whose importers are all gone go this way by themselves; those whose
//! importers live, when another VM requests memory.
//!
//! If memory does not come back, some process still holds it. Its VM is charged for it until the unit is whole again.

use super::{
    Custody, KeptMemory, Millis,
    tasks::{Busy, Task},
};
use crate::{
    chunks::ChunkState,
    ids::{ChunkId, Class, VmKey, WorkerId},
};
use sluice_messages::{control::ArbiterEvent, custody::UNIT};
use sluice_protocol::limits;

/// Chunks that go back to the driver at once: a taker that waits may have to wait for them.
const MOVED: usize = 32;
/// Milliseconds after which memory that does not come back is reported.
const REPORTED: Millis = 3_000;

impl Custody {
    /// True if memory can be made lendable to every VM without a worker giving more back.
    pub(super) fn cleans(&self) -> bool {
        let dirty = || self.chunks.dirty_left().next().is_some();
        let clean = || self.chunks.clean_left().next().is_some();
        self.has_free_dirt() || dirty() || clean() || self.all_returned().next().is_some()
    }

    /// Chunks that VMs gave back or left behind, the smallest first.
    pub(super) fn all_returned(&self) -> impl Iterator<Item = ChunkId> {
        Class::ALL.into_iter().rev().flat_map(|class| self.returned(class))
    }

    /// Scrubs suspect chunks again that were left behind: the process that wrote to them may be gone.
    pub(super) fn retry_suspects(&mut self) {
        for id in self.chunks.suspect_left().collect::<Vec<_>>() {
            let bytes = self.chunks.get(id).map_or(0, |chunk| chunk.class.bytes());
            match self.chunks.retry(id).and_then(|()| self.ledger.grow(bytes)) {
                Ok(()) => self.suspect_bytes = self.suspect_bytes.saturating_sub(bytes),
                Err(broken) => self.broken(0, broken),
            }
        }
    }

    /// Gives a clean chunk back to the driver; if it was left behind, with other chunks that its VM left.
    pub(super) fn move_with(&mut self, first: ChunkId, batch: u64) -> Option<Task> {
        let chunk = self.chunks.get(first).filter(|chunk| chunk.state == ChunkState::Clean)?;
        let (vm, importers, mut bytes) = (chunk.vm?, chunk.importers.clone(), chunk.class.bytes());
        let mut chosen = vec![first];
        if chunk.is_left() {
            for id in self.chunks.clean_left_of(vm).filter(|id| *id != first) {
                let more = self.chunks.get(id).map_or(0, |chunk| chunk.class.bytes());
                if bytes.saturating_add(more) > batch || chosen.len() >= MOVED {
                    break;
                }
                bytes += more;
                chosen.push(id);
            }
        }
        self.take_away(vm, &importers, chosen)
    }

    fn take_away(&mut self, vm: VmKey, importers: &[WorkerId], chunks: Vec<ChunkId>) -> Option<Task> {
        let size = |chunk: &ChunkId| self.chunks.get(*chunk).map_or(0, |chunk| chunk.class.bytes());
        let sized: Vec<(ChunkId, u64)> = chunks.into_iter().map(|chunk| (chunk, size(&chunk))).collect();
        let (mut taken, mut bytes) = (Vec::new(), 0_u64);
        for (chunk, size) in sized {
            if self.take_out(chunk) {
                taken.push(chunk);
                bytes = bytes.saturating_add(size);
            }
        }
        for importer in importers {
            if let Some(worker) = self.workers.get_mut(importer) {
                taken.iter().for_each(|chunk| {
                    worker.imported.remove(chunk);
                });
            }
        }
        if taken.is_empty() {
            return None;
        }
        self.busy = Some(Busy::Move { vm, bytes, importers: importers.to_vec() });
        Some(Task::Move { chunks: taken })
    }

    /// Of the bytes taken away from a VM, `back` came back. No driver grew meanwhile, so some process still holds the rest.
    pub(super) fn moved(&mut self, vm: VmKey, bytes: u64, importers: Vec<WorkerId>, back: u64) {
        let missing = to_units(bytes.saturating_sub(back));
        if missing > 0 {
            let importers = importers.into_iter().filter(|id| self.workers.contains_key(id)).collect();
            let done = self.ledger.keep(vm, missing);
            self.report_if_broken(vm, done);
            let since = self.growth.now();
            self.kept.push(KeptMemory { vm, bytes: missing, importers, since, reported: false });
            self.touched.insert(vm);
        }
        self.forget_leaving();
    }

    /// True if memory of this VM, or of any, left custody just now and no known process has it, so that it may come back soon; or has
    /// come back and is about to be taken.
    pub(super) fn comes_back(&self, vm: Option<VmKey>) -> bool {
        let now = self.growth.now();
        let soon = |kept: &KeptMemory| {
            kept.importers.is_empty() && now.saturating_sub(kept.since) < limits::LATE_MEMORY_MILLISECONDS
        };
        self.growth.has_returned_memory()
            || self.kept.iter().any(|kept| soon(kept) && vm.is_none_or(|vm| vm == kept.vm))
    }

    /// Ends charges for kept memory as far as the unit has more than it had without it; reports the others. If several VMs keep
    /// memory, the parts cannot be told apart: the oldest part that no known process can hold counts first.
    pub(super) fn settle_kept(&mut self) {
        if self.kept.is_empty() || self.moves() {
            return;
        }
        let has = self.known().map(|known| known.saturating_add(self.growth.free()));
        let more = has.zip(self.whole).map_or(0, |(has, whole)| to_units(has.saturating_sub(whole)));
        let mut left = more;
        let mut back = Vec::new();
        self.kept.retain_mut(|kept| {
            if kept.importers.is_empty() {
                let bytes = kept.bytes.min(left);
                left -= bytes;
                kept.bytes -= bytes;
                back.push((kept.vm, bytes));
            }
            kept.bytes > 0
        });
        // All free memory is taken and cleared, also if this figure came with another task than a look.
        self.growth.kept_came_back(back.iter().map(|(_, bytes)| bytes).sum());
        for (vm, bytes) in back {
            let done = self.ledger.release(vm, bytes);
            self.report_if_broken(vm, done);
            self.touched.insert(vm);
            self.recheck |= bytes > 0;
        }
        // The growth of a driver within its margin is also missing, until the inventory reports it.
        let now = self.growth.now();
        let mut news: Vec<(VmKey, u64)> = Vec::new();
        for kept in self.kept.iter_mut().filter(|kept| !kept.reported) {
            if now.saturating_sub(kept.since) >= REPORTED {
                kept.reported = true;
                news.push((kept.vm, kept.bytes));
            }
        }
        for (vm, bytes) in news {
            tracing::warn!(vm = vm.vm, bytes, "a process still holds memory that its VM gave back");
            self.event(ArbiterEvent::Leak, vm.vm, 0, bytes);
        }
        self.forget_leaving();
    }
}

/// The nearest multiple of the chunks' unit: a driver takes and returns smaller pieces all the time.
const fn to_units(bytes: u64) -> u64 {
    bytes.saturating_add(UNIT / 2) / UNIT * UNIT
}
