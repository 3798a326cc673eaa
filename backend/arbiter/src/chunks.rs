//! Chunk states.
//!
//! ```text
//!          insert           begin_scrub                end_scrub: clean           lend
//!  (none) ───────▶ DIRTY ──────────────▶ SCRUBBING ──────────────────────▶ CLEAN ──────▶ LENT ◀─┐ lend, end_lease:
//!                 ▲ ▲ ▲                   │     │ end_scrub: TRIES           │             │ └───┘ other leases
//!                 │ │ │ end_scrub: failed,│     ▼ failures in a row          │             │
//!                 │ │ └─── or again ──────┘  SUSPECT                         │             │
//!                 │ │         retry             │                            │             │
//!                 │ └───────────────────────────┘                            │             │
//!                 │    forget_importer: the last importer is gone            │             │
//!                 ├──────────────────────────────────────────────────────────┘             │
//!                 │    end_lease: the last lease is over                                   │
//!                 └────────────────────────────────────────────────────────────────────────┘
//!  DIRTY, CLEAN ── remove: its memory goes back to the driver ──▶ (none)
//! ```
//! A chunk that was lent belongs to the VM that got it (`vm`) for as long as it exists: any process that has a descriptor of
//! it, or was passed one, can reach it, and no list of these processes is complete. CLEAN then means clean for that VM. To
//! serve another VM, its memory goes back to the driver, which gives out no memory that a process still holds, and comes again
//! as another chunk.
//!
//! Beside its state a chunk has *importers*: every process that got a descriptor of it and is not known to be gone from the
//! driver. When the last one is gone the chunk is *left behind*: it is scrubbed once more, and may go back to the driver. Only
//! CLEAN chunks are lent. A chunk fresh from the driver is DIRTY.
//!
//! Pure: no driver, no time. A step that the chunk's state does not allow is [`Broken`] and changes nothing.

use crate::{
    ids::{ChunkId, Class, VmKey, WorkerId},
    ledger::Broken,
};
use std::collections::{BTreeMap, BTreeSet};

/// The state of a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChunkState {
    /// It is not known to be zero.
    Dirty,
    /// The scrubber has it. `again` if a process other than its next holder could have written to it meanwhile.
    Scrubbing {
        /// True if it is dirty afterwards in any case.
        again: bool,
    },
    /// Zero, except for writes of importers that are not allowed to write.
    Clean,
    /// Leased to at least one worker.
    Lent,
    /// Not proven clean after [`TRIES`] scrubs.
    Suspect,
}

/// A chunk's entry in the table.
#[derive(Clone, Debug)]
pub struct Chunk {
    /// The chunk's size class.
    pub class: Class,
    /// The present state.
    pub state: ChunkState,
    /// The VM whose processes may reach it; `None` if it was never lent.
    pub vm: Option<VmKey>,
    /// Processes that are known to have a descriptor of it.
    pub importers: Vec<WorkerId>,
    /// The number of leases on it.
    pub leases: u32,
    /// The number of scrubs so far.
    pub epoch: u64,
    /// Scrubs that failed in a row.
    pub failures: u8,
    /// It belongs to a VM and is not clean after all tries, as if a process goes on writing. It is unusable until it is clean.
    pub spoiled: bool,
}

impl Chunk {
    /// True if it was lent and all importers are gone.
    #[must_use]
    pub const fn is_left(&self) -> bool {
        self.vm.is_some() && self.importers.is_empty()
    }
}

/// Scrubs that may fail before a chunk is suspect.
pub const TRIES: u8 = 3;

type FreeList = [BTreeSet<ChunkId>; Class::ALL.len()];

/// All chunks of a unit.
#[derive(Debug, Default)]
pub struct Chunks {
    slots: Vec<Option<Chunk>>,
    vacant: Vec<ChunkId>,
    /// Clean chunks of no VM.
    clean: FreeList,
    /// Dirty chunks of no VM.
    dirty: FreeList,
    /// Chunks that are clean for one VM.
    clean_of: BTreeMap<VmKey, FreeList>,
    /// Dirty chunks of one VM.
    dirty_of: BTreeMap<VmKey, FreeList>,
    /// Those of the VMs' clean chunks that were left behind.
    clean_left: BTreeSet<(VmKey, ChunkId)>,
    /// Those of the VMs' dirty chunks that were left behind.
    dirty_left: BTreeSet<(VmKey, ChunkId)>,
    /// Suspect chunks that were left behind.
    suspect_left: BTreeSet<(VmKey, ChunkId)>,
}

impl Chunks {
    /// Inserts a chunk fresh from the driver.
    ///
    /// # Errors
    /// [`Broken`] if the table is full.
    pub fn insert(&mut self, class: Class) -> Result<ChunkId, Broken> {
        let chunk = Chunk {
            class,
            state: ChunkState::Dirty,
            vm: None,
            importers: Vec::new(),
            leases: 0,
            epoch: 0,
            failures: 0,
            spoiled: false,
        };
        let id = match self.vacant.pop() {
            Some(id) => id,
            None => {
                let id = u32::try_from(self.slots.len()).map_err(|_| Broken("the chunk table is full"))?;
                self.slots.push(None);
                ChunkId(id)
            }
        };
        if let Some(slot) = self.slots.get_mut(id.0 as usize) {
            *slot = Some(chunk);
        }
        self.list_free(id);
        Ok(id)
    }

    /// The entry of a chunk.
    #[must_use]
    pub fn get(&self, id: ChunkId) -> Option<&Chunk> {
        self.slots.get(id.0 as usize)?.as_ref()
    }

    /// All chunks with their numbers.
    pub fn iter(&self) -> impl Iterator<Item = (ChunkId, &Chunk)> {
        self.slots.iter().zip(0..).filter_map(|(slot, id)| Some((ChunkId(id), slot.as_ref()?)))
    }

    /// The set that lists chunks of this chunk's state, VM and class.
    fn free_list(&mut self, id: ChunkId) -> Option<&mut BTreeSet<ChunkId>> {
        let chunk = self.slots.get(id.0 as usize)?.as_ref()?;
        let class = chunk.class.index();
        let list = match (chunk.state, chunk.vm) {
            (ChunkState::Clean, None) => &mut self.clean,
            (ChunkState::Dirty, None) => &mut self.dirty,
            (ChunkState::Clean, Some(vm)) => self.clean_of.entry(vm).or_default(),
            (ChunkState::Dirty, Some(vm)) => self.dirty_of.entry(vm).or_default(),
            _ => return None,
        };
        list.get_mut(class)
    }

    /// The set that lists a chunk if it is left behind, and the VM under which it is listed.
    fn left(&mut self, id: ChunkId) -> Option<(&mut BTreeSet<(VmKey, ChunkId)>, VmKey)> {
        let chunk = self.slots.get(id.0 as usize)?.as_ref()?;
        let (vm, state) = (chunk.vm?, chunk.state);
        let left = match state {
            ChunkState::Clean => &mut self.clean_left,
            ChunkState::Dirty => &mut self.dirty_left,
            ChunkState::Suspect => &mut self.suspect_left,
            ChunkState::Lent | ChunkState::Scrubbing { .. } => return None,
        };
        chunk.is_left().then_some((left, vm))
    }

    fn list_free(&mut self, id: ChunkId) {
        if let Some(list) = self.free_list(id) {
            list.insert(id);
        }
        if let Some((left, vm)) = self.left(id) {
            left.insert((vm, id));
        }
    }

    fn unlist(&mut self, id: ChunkId) {
        if let Some(list) = self.free_list(id) {
            list.remove(&id);
        }
        if let Some((left, vm)) = self.left(id) {
            left.remove(&(vm, id));
        }
    }

    /// Changes a chunk and moves it to the set of its new state.
    fn change<T>(
        &mut self,
        id: ChunkId,
        step: impl FnOnce(&mut Chunk) -> Result<T, Broken>,
    ) -> Result<T, Broken> {
        self.unlist(id);
        let chunk = self.slots.get_mut(id.0 as usize).and_then(Option::as_mut);
        let done = chunk.ok_or(Broken("no such chunk")).and_then(step);
        self.list_free(id);
        done
    }

    /// A clean chunk for a VM: one of its own first, so that chunks that can serve every VM stay.
    #[must_use]
    pub fn clean_for(&self, vm: VmKey, class: Class) -> Option<ChunkId> {
        let own = self.clean_of.get(&vm).and_then(|list| list.get(class.index())?.first());
        own.or_else(|| self.clean.get(class.index())?.first()).copied()
    }

    /// A dirty chunk that can serve a VM once it is clean.
    #[must_use]
    pub fn dirty_for(&self, vm: VmKey, class: Class) -> Option<ChunkId> {
        let own = self.dirty_of.get(&vm).and_then(|list| list.get(class.index())?.first());
        own.or_else(|| self.dirty.get(class.index())?.first()).copied()
    }

    /// Clean chunks of no VM.
    pub fn clean_free(&self, class: Class) -> impl Iterator<Item = ChunkId> {
        self.clean.get(class.index()).into_iter().flatten().copied()
    }

    /// Dirty chunks of no VM.
    pub fn dirty_free(&self, class: Class) -> impl Iterator<Item = ChunkId> {
        self.dirty.get(class.index()).into_iter().flatten().copied()
    }

    /// Dirty chunks that processes of some VM may still reach.
    pub fn dirty_reachable(&self) -> impl Iterator<Item = ChunkId> {
        self.dirty_of.values().flatten().flatten().copied()
    }

    /// Suspect chunks that were left behind. The process that wrote to them may have ended by now.
    pub fn suspect_left(&self) -> impl Iterator<Item = ChunkId> {
        self.suspect_left.iter().map(|(_, id)| *id)
    }

    /// Makes a suspect chunk dirty, to be scrubbed once more.
    ///
    /// # Errors
    /// [`Broken`] if it is not suspect.
    pub fn retry(&mut self, id: ChunkId) -> Result<(), Broken> {
        self.change(id, |chunk| {
            if chunk.state != ChunkState::Suspect {
                return Err(Broken("only suspect chunks are tried again"));
            }
            chunk.state = ChunkState::Dirty;
            Ok(())
        })
    }

    /// Dirty chunks that were left behind.
    pub fn dirty_left(&self) -> impl Iterator<Item = ChunkId> {
        self.dirty_left.iter().map(|(_, id)| *id)
    }

    /// Clean chunks that were left behind, with their VMs; those of one VM follow each other.
    pub fn clean_left(&self) -> impl Iterator<Item = (VmKey, ChunkId)> {
        self.clean_left.iter().copied()
    }

    /// Clean chunks that one VM left behind.
    pub fn clean_left_of(&self, vm: VmKey) -> impl Iterator<Item = ChunkId> {
        self.clean_left.range((vm, ChunkId(0))..=(vm, ChunkId(u32::MAX))).map(|(_, id)| *id)
    }

    /// VMs with chunks that are not leased.
    pub fn returners(&self) -> impl Iterator<Item = VmKey> {
        let dirty = self.dirty_of.keys().filter(|vm| !self.clean_of.contains_key(vm));
        self.clean_of.keys().chain(dirty).copied()
    }

    /// Chunks of a class that a VM gave back or left behind; none of them is leased.
    pub fn returned_of(&self, vm: VmKey, class: Class) -> impl Iterator<Item = ChunkId> {
        let lists = [self.clean_of.get(&vm), self.dirty_of.get(&vm)];
        lists.into_iter().flatten().filter_map(move |list| list.get(class.index())).flatten().copied()
    }

    /// Lends a chunk to a worker of a VM: a clean one, or one that is lent to the VM already.
    ///
    /// # Errors
    /// [`Broken`] if it is not clean, or belongs to another VM.
    pub fn lend(&mut self, id: ChunkId, vm: VmKey, worker: WorkerId) -> Result<(), Broken> {
        self.change(id, |chunk| {
            if chunk.vm.is_some_and(|other| other != vm) {
                return Err(Broken("a chunk of another VM cannot be lent"));
            }
            if !matches!(chunk.state, ChunkState::Clean | ChunkState::Lent) {
                return Err(Broken("only clean chunks are lent"));
            }
            chunk.leases = chunk.leases.checked_add(1).ok_or(Broken("too many leases"))?;
            chunk.state = ChunkState::Lent;
            chunk.vm = Some(vm);
            if !chunk.importers.contains(&worker) {
                chunk.importers.push(worker);
            }
            Ok(())
        })
    }

    /// Ends a lease; `true` if it was the last one.
    ///
    /// # Errors
    /// [`Broken`] if there was none.
    pub fn end_lease(&mut self, id: ChunkId) -> Result<bool, Broken> {
        self.change(id, |chunk| {
            if chunk.state != ChunkState::Lent {
                return Err(Broken("a chunk that is not lent has no lease"));
            }
            chunk.leases = chunk.leases.checked_sub(1).ok_or(Broken("fewer leases than none"))?;
            if chunk.leases == 0 {
                chunk.state = ChunkState::Dirty;
            }
            Ok(chunk.leases == 0)
        })
    }

    /// A process that imported the chunk is gone.
    ///
    /// # Errors
    /// [`Broken`] if it is still leased and no other importer is left.
    pub fn forget_importer(&mut self, id: ChunkId, worker: WorkerId) -> Result<(), Broken> {
        self.change(id, |chunk| {
            let alone = chunk.importers.iter().all(|importer| *importer == worker);
            if alone && chunk.state == ChunkState::Lent {
                return Err(Broken("a lease outlives its holders"));
            }
            chunk.importers.retain(|importer| *importer != worker);
            if chunk.importers.is_empty() {
                match &mut chunk.state {
                    state @ ChunkState::Clean => *state = ChunkState::Dirty,
                    ChunkState::Scrubbing { again } => *again = true,
                    ChunkState::Dirty | ChunkState::Lent | ChunkState::Suspect => {}
                }
            }
            Ok(())
        })
    }

    /// The scrubber takes a dirty chunk.
    ///
    /// # Errors
    /// [`Broken`] if it is not dirty.
    pub fn begin_scrub(&mut self, id: ChunkId) -> Result<(), Broken> {
        self.change(id, |chunk| {
            if chunk.state != ChunkState::Dirty {
                return Err(Broken("only dirty chunks are scrubbed"));
            }
            chunk.state = ChunkState::Scrubbing { again: false };
            Ok(())
        })
    }

    /// The scrubber is done with a chunk. Returns `true` if the chunk is suspect now.
    ///
    /// # Errors
    /// [`Broken`] if the scrubber did not have it.
    pub fn end_scrub(&mut self, id: ChunkId, clean: bool) -> Result<bool, Broken> {
        self.change(id, |chunk| {
            let ChunkState::Scrubbing { again } = chunk.state else {
                return Err(Broken("the scrubber did not have this chunk"));
            };
            chunk.epoch = chunk.epoch.saturating_add(1);
            chunk.failures = if clean { 0 } else { chunk.failures.saturating_add(1) };
            chunk.state = match (clean, again) {
                (true, false) => ChunkState::Clean,
                (false, _) if chunk.failures >= TRIES => ChunkState::Suspect,
                _ => ChunkState::Dirty,
            };
            chunk.spoiled = match chunk.state {
                ChunkState::Suspect => chunk.vm.is_some(),
                ChunkState::Clean => false,
                _ => chunk.spoiled,
            };
            Ok(chunk.state == ChunkState::Suspect)
        })
    }

    /// Takes a chunk out of the table, if it is not leased and not with the scrubber.
    ///
    /// # Errors
    /// [`Broken`] if it is.
    pub fn remove(&mut self, id: ChunkId) -> Result<Chunk, Broken> {
        let state = self.get(id).ok_or(Broken("no such chunk"))?.state;
        if !matches!(state, ChunkState::Clean | ChunkState::Dirty) {
            return Err(Broken("a chunk in use cannot leave custody"));
        }
        self.unlist(id);
        let chunk = self.slots.get_mut(id.0 as usize).and_then(Option::take);
        self.vacant.push(id);
        let chunk = chunk.ok_or(Broken("no such chunk"))?;
        if let Some(vm) = chunk.vm {
            for lists in [&mut self.clean_of, &mut self.dirty_of] {
                if lists.get(&vm).is_some_and(|list| list.iter().all(BTreeSet::is_empty)) {
                    lists.remove(&vm);
                }
            }
        }
        Ok(chunk)
    }

    /// Checks that every chunk is in the set of its state and that its parts agree.
    ///
    /// # Errors
    /// [`Broken`] with the first contradiction.
    pub fn check(&self) -> Result<(), Broken> {
        let empty = BTreeSet::new();
        let (mut listed, mut left) = (0, 0);
        for (id, chunk) in self.iter() {
            let class = chunk.class.index();
            let of = |map: &BTreeMap<VmKey, FreeList>, vm| {
                map.get(&vm).and_then(|list| list.get(class)).unwrap_or(&empty).contains(&id)
            };
            let here = match (chunk.state, chunk.vm) {
                (ChunkState::Clean, None) => self.clean.get(class).unwrap_or(&empty).contains(&id),
                (ChunkState::Dirty, None) => self.dirty.get(class).unwrap_or(&empty).contains(&id),
                (ChunkState::Clean, Some(vm)) => of(&self.clean_of, vm),
                (ChunkState::Dirty, Some(vm)) => of(&self.dirty_of, vm),
                _ => true,
            };
            listed += usize::from(matches!(chunk.state, ChunkState::Clean | ChunkState::Dirty));
            if !here {
                return Err(Broken("a chunk is not in the set of its state"));
            }
            let place = match chunk.state {
                ChunkState::Clean => Some(&self.clean_left),
                ChunkState::Dirty => Some(&self.dirty_left),
                ChunkState::Suspect => Some(&self.suspect_left),
                ChunkState::Lent | ChunkState::Scrubbing { .. } => None,
            };
            if let (Some(place), Some(vm), true) = (place, chunk.vm, chunk.is_left()) {
                left += 1;
                if !place.contains(&(vm, id)) {
                    return Err(Broken("a chunk that was left behind is not known as such"));
                }
            }
            if chunk.vm.is_none() && !chunk.importers.is_empty() {
                return Err(Broken("a chunk has importers of no VM"));
            }
            if (chunk.state == ChunkState::Lent) != (chunk.leases > 0) {
                return Err(Broken("a chunk is lent without a lease, or leased and not lent"));
            }
        }
        if left != self.clean_left.len() + self.dirty_left.len() + self.suspect_left.len() {
            return Err(Broken("a chunk is taken for left behind"));
        }
        let of = |map: &BTreeMap<VmKey, FreeList>| map.values().flatten().map(BTreeSet::len).sum::<usize>();
        let free: usize = self.clean.iter().chain(&self.dirty).map(BTreeSet::len).sum();
        if free + of(&self.clean_of) + of(&self.dirty_of) != listed {
            return Err(Broken("a set lists a chunk that does not exist"));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const VM: VmKey = VmKey { vm: 1, epoch: 1 };
    const OTHER: VmKey = VmKey { vm: 2, epoch: 1 };
    const WORKER: WorkerId = WorkerId(1);

    /// One chunk in each state: clean and dirty of no VM; clean, dirty and suspect, left behind by a VM; lent; and scrubbed.
    fn table() -> (Chunks, [ChunkId; 7]) {
        let mut chunks = Chunks::default();
        let ids = [(); 7].map(|()| chunks.insert(Class::ALL[2]).unwrap());
        let [clean, _dirty, clean_left, dirty_left, suspect, lent, scrubbed] = ids;
        let scrub = |chunks: &mut Chunks, id, clean| {
            chunks.begin_scrub(id).unwrap();
            chunks.end_scrub(id, clean).unwrap();
        };
        for id in [clean, clean_left, dirty_left, suspect, lent] {
            scrub(&mut chunks, id, true);
        }
        for id in [clean_left, dirty_left, suspect, lent] {
            chunks.lend(id, VM, WORKER).unwrap();
        }
        for id in [clean_left, dirty_left, suspect] {
            chunks.end_lease(id).unwrap();
            chunks.forget_importer(id, WORKER).unwrap();
        }
        scrub(&mut chunks, clean_left, true);
        (0..TRIES).for_each(|_| scrub(&mut chunks, suspect, false));
        chunks.begin_scrub(scrubbed).unwrap();
        (chunks, ids)
    }

    fn at(chunks: &mut Chunks, id: ChunkId) -> &mut Chunk {
        chunks.slots[id.0 as usize].as_mut().unwrap()
    }

    // Promise: Q21
    #[test]
    fn chunk_check_finds_each_planted_contradiction() {
        type Plant = fn(&mut Chunks, [ChunkId; 7]);
        let planted: [(&str, Plant); 14] = [
            ("a chunk is not in the set of its state", |chunks, [clean, ..]| {
                at(chunks, clean).state = ChunkState::Dirty
            }),
            ("a chunk is not in the set of its state", |chunks, [_, dirty, ..]| {
                at(chunks, dirty).state = ChunkState::Clean
            }),
            ("a chunk is not in the set of its state", |chunks, [_, _, left, ..]| {
                at(chunks, left).vm = Some(OTHER)
            }),
            ("a chunk is not in the set of its state", |chunks, [clean, ..]| {
                chunks.clean.iter_mut().for_each(|list| _ = list.remove(&clean))
            }),
            ("a chunk is not in the set of its state", |chunks, _| chunks.dirty_of.clear()),
            ("a chunk that was left behind is not known as such", |chunks, _| chunks.clean_left.clear()),
            ("a chunk that was left behind is not known as such", |chunks, _| chunks.dirty_left.clear()),
            ("a chunk that was left behind is not known as such", |chunks, _| chunks.suspect_left.clear()),
            ("a chunk has importers of no VM", |chunks, [clean, ..]| {
                at(chunks, clean).importers.push(WORKER)
            }),
            (
                "a chunk is lent without a lease, or leased and not lent",
                |chunks, [_, _, _, _, _, lent, _]| {
                    at(chunks, lent).leases = 0;
                },
            ),
            (
                "a chunk is lent without a lease, or leased and not lent",
                |chunks, [_, _, _, _, _, _, scrubbed]| {
                    at(chunks, scrubbed).leases = 1;
                },
            ),
            ("a chunk is taken for left behind", |chunks, [_, _, _, _, _, lent, _]| {
                chunks.dirty_left.insert((VM, lent));
            }),
            ("a set lists a chunk that does not exist", |chunks, [_, _, _, _, _, lent, _]| {
                chunks.clean[2].insert(lent);
            }),
            ("a set lists a chunk that does not exist", |chunks, _| {
                chunks.clean_of.entry(OTHER).or_default()[0].insert(ChunkId(4711));
            }),
        ];
        for (expected, plant) in planted {
            let (mut chunks, ids) = table();
            assert_eq!(chunks.check(), Ok(()), "before it is planted");
            plant(&mut chunks, ids);
            assert_eq!(chunks.check(), Err(Broken(expected)));
        }
    }
}
