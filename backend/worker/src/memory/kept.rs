//! Idle memory: freed memory that stays mapped, because a program often allocates as much again.
//!
//! A guest's memory pool keeps freed memory up to its threshold. Group 0 keeps large allocations and idle pool chunks for
//! [`limits::KEPT_MILLISECONDS`] at most, and one idle pool chunk of each kind for longer. Idle memory counts as free: the
//! arbiter recalls it for other processes of the VM, and the session gives it back before it is refused an allocation. The
//! dispatcher changes the idle bytes without a message; the memory helper reports them.

use super::{AllocationPlace, Chunk, ChunkPool, ChunkSource, Mapper, Memory};
use sluice_protocol::limits;
use std::collections::BTreeMap;

/// A large allocation that was freed.
#[derive(Debug)]
struct KeptAllocation {
    at: u64,
    bytes: u64,
    chunks: Vec<Chunk>,
    /// True if it was here at the last [`Memory::age`].
    is_old: bool,
}

/// The age of an idle pool chunk that has been seen by two calls of [`Memory::age`].
const OLD: u8 = 2;

/// Memory that stays mapped.
#[derive(Debug)]
pub(super) struct Kept {
    /// Large allocations that were freed, by group and device.
    large: BTreeMap<(u32, i32), Vec<KeptAllocation>>,
    /// Idle pool chunks of group 0 by address, each with the calls of [`Memory::age`] since, up to [`OLD`].
    pools: BTreeMap<u64, u8>,
}

impl Kept {
    pub(super) const fn new() -> Kept {
        Kept { large: BTreeMap::new(), pools: BTreeMap::new() }
    }

    /// Records that an idle pool's chunk stays, or that it is in use or gone.
    pub(super) fn set_pool(&mut self, base: u64, stays: bool) {
        if stays {
            self.pools.insert(base, 0);
        } else {
            self.pools.remove(&base);
        }
    }

    /// The addresses and bytes of what a group keeps of a device.
    pub(super) fn ranges(&self, group: u32, device: i32) -> impl Iterator<Item = (u64, u64)> {
        self.large.get(&(group, device)).into_iter().flatten().map(|kept| (kept.at, kept.bytes))
    }

    /// Removes the last allocation of the first list that is chosen.
    fn pop(&mut self, choose: impl Fn(u32, i32) -> bool) -> Option<((u32, i32), KeptAllocation)> {
        let chosen = |key: &(u32, i32)| choose(key.0, key.1);
        let (key, list) = self.large.iter_mut().find(|(key, list)| chosen(key) && !list.is_empty())?;
        Some((*key, list.pop()?))
    }
}

impl<S: ChunkSource, M: Mapper> Memory<S, M> {
    /// Frees a large allocation: its group keeps it, or its chunks go back.
    pub(super) fn free_large(&mut self, group: u32, at: u64, bytes: u64, chunks: Vec<Chunk>) {
        let device = chunks.first().map_or(0, |chunk| chunk.device);
        let keeps = self.keeps_large(group, device, at) && self.mapper.clear(at, bytes, device).is_ok();
        if keeps {
            self.keep(group, device, KeptAllocation { at, bytes, chunks, is_old: false });
        } else {
            self.unshare(at, &chunks);
            self.count_reserved(group, bytes, false);
            self.give_up(at, bytes, chunks);
        }
    }

    fn keep(&mut self, group: u32, device: i32, kept: KeptAllocation) {
        self.count_idle(device, kept.bytes, true);
        self.kept.large.entry((group, device)).or_default().push(kept);
    }

    /// True if a group keeps a large allocation that is freed.
    fn keeps_large(&self, group: u32, device: i32, at: u64) -> bool {
        let has_room = || self.kept.large.get(&(group, device)).is_none_or(|list| list.len() < limits::KEPT);
        // Another process may have open what was shared.
        !self.shares.contains_key(&at) && if group == 0 { has_room() } else { self.keeps(group) }
    }

    /// True if an idle pool keeps its chunk.
    pub(super) fn keeps_pool(&self, base: u64) -> bool {
        let Some(pool) = self.pools.get(&base) else { return false };
        let has_room = || pool.group() == 0 && self.kept.pools.len() < limits::KEPT;
        // Another process may have open what was shared.
        !self.shares.contains_key(&base)
            && (self.keeps(pool.group()) || has_room() || !self.has_idle_twin(base, pool))
    }

    /// True if another pool of the same kind is idle. One stays, so that a program that allocates and frees a little in turn does
    /// not make and release a chunk each time.
    fn has_idle_twin(&self, base: u64, pool: &ChunkPool) -> bool {
        let (device, group, size) = (pool.device(), pool.group(), pool.size());
        let twins = self.open.range((device, group, size, 0)..=(device, group, size, u64::MAX));
        twins
            .filter(|(.., other)| *other != base)
            .any(|(.., other)| self.pools.get(other).is_some_and(ChunkPool::is_idle))
    }

    /// Takes kept memory of exactly this size.
    pub(super) fn take_kept(
        &mut self,
        group: u32,
        device: i32,
        bytes: u64,
    ) -> Option<(u64, AllocationPlace)> {
        let list = self.kept.large.get_mut(&(group, device))?;
        let index = list.iter().rposition(|kept| kept.bytes == bytes)?;
        let KeptAllocation { at, chunks, .. } = list.swap_remove(index);
        self.count_idle(device, bytes, false);
        Some((at, AllocationPlace::Large { chunks, bytes }))
    }

    fn give_kept(&mut self, (group, device): (u32, i32), kept: KeptAllocation) {
        self.count_idle(device, kept.bytes, false);
        self.count_reserved(group, kept.bytes, false);
        // Before the chunks are given: idle bytes are always a part of the lent bytes.
        self.report_idle();
        self.give_up(kept.at, kept.bytes, kept.chunks);
    }

    /// Gives back a kept allocation of a group; `false` if it has none.
    pub(super) fn give_kept_of(&mut self, group: u32) -> bool {
        let Some((key, kept)) = self.kept.pop(|of, _| of == group) else { return false };
        self.give_kept(key, kept);
        true
    }

    /// Gives idle memory of a device back, up to `wanted` bytes; returns the bytes given.
    pub(super) fn drop_idle(&mut self, device: i32, wanted: u64) -> u64 {
        let mut given = 0;
        while given < wanted
            && let Some((key, kept)) = self.kept.pop(|_, of| of == device)
        {
            given += kept.bytes;
            self.give_kept(key, kept);
        }
        let idle = self.pools.iter().filter(|(_, pool)| pool.device() == device && pool.is_idle());
        let idle: Vec<(u64, u64)> = idle.map(|(base, pool)| (*base, pool.bytes())).collect();
        for (base, bytes) in idle {
            if given >= wanted {
                break;
            }
            self.drop_pool(base);
            given += bytes;
        }
        given
    }

    /// Gives idle memory back that the arbiter recalls, or that the driver needs.
    pub(crate) fn recall(&mut self, device: i32, bytes: u64) {
        self.drop_idle(device, bytes);
        self.report_idle();
    }

    /// Gives back what group 0 has kept since the last call but one, except for one pool chunk of each kind.
    pub(crate) fn age(&mut self) {
        let mut old = Vec::new();
        for (key, list) in self.kept.large.iter_mut().filter(|((group, _), _)| *group == 0) {
            old.extend(list.extract_if(.., |kept| kept.is_old).map(|kept| (*key, kept)));
            list.iter_mut().for_each(|kept| kept.is_old = true);
        }
        old.into_iter().for_each(|(key, kept)| self.give_kept(key, kept));
        let mut pools = Vec::new();
        for (base, age) in self.kept.pools.iter_mut().filter(|(_, age)| **age < OLD) {
            *age += 1;
            pools.extend((*age == OLD).then_some(*base));
        }
        for base in pools {
            if self.pools.get(&base).is_some_and(|pool| self.has_idle_twin(base, pool)) {
                self.drop_pool(base);
            }
        }
    }

    /// True if the watching thread must call [`Memory::age`] later.
    pub(crate) fn ages(&mut self) -> bool {
        self.is_ageing = self.keeps_any();
        self.is_ageing
    }

    /// True if group 0 keeps memory that may be too old later.
    pub(super) fn keeps_any(&self) -> bool {
        self.kept.pools.values().any(|age| *age < OLD)
            || self.kept.large.iter().any(|((group, _), list)| *group == 0 && !list.is_empty())
    }

    /// Counts bytes of chunks as idle, or as used again.
    pub(super) fn count_idle(&mut self, device: i32, bytes: u64, idle: bool) {
        let (count, _) = self.idle.entry(device).or_default();
        *count = if idle { *count + bytes } else { count.saturating_sub(bytes) };
    }

    pub(super) fn idle_bytes(&self, device: i32) -> u64 {
        self.idle.get(&device).map_or(0, |(bytes, _)| *bytes)
    }

    /// True if the source knows the idle bytes.
    pub(crate) fn is_reported(&self) -> bool {
        self.idle.values().all(|(bytes, reported)| bytes == reported)
    }

    /// Reports the idle bytes to the source; `false` if they have not changed.
    pub(crate) fn report_idle(&mut self) -> bool {
        let mut changed = false;
        for (device, (bytes, reported)) in self.idle.iter_mut().filter(|(_, (now, before))| now != before) {
            self.source.idle(*device, *bytes);
            *reported = *bytes;
            changed = true;
        }
        changed
    }

    /// As [`Memory::report_idle`], for the thread that watches the idle bytes: if they have not changed it stops.
    pub(crate) fn watch(&mut self) -> bool {
        self.is_watched = self.report_idle();
        self.is_watched
    }

    /// True if the idle bytes have changed, or memory is kept, and no thread watches it; the caller then wakes one, which calls
    /// [`Memory::watch`].
    pub(crate) fn begin_watch(&mut self) -> bool {
        let reports = !self.is_reported() && !core::mem::replace(&mut self.is_watched, true);
        let ages = !self.is_ageing && self.keeps_any();
        self.is_ageing |= ages;
        reports || ages
    }

    /// Frees without the source and the mapper, if the memory stays mapped. `false`: [`Memory::free`] frees or returns the
    /// reason for a refusal.
    pub(crate) fn free_at_hand(&mut self, address: u64) -> bool {
        let Some(allocation) = self.live.get(&address).filter(|_| !self.mapper.clears()) else {
            return false;
        };
        let stays = match &allocation.place {
            AllocationPlace::Small { pool: base, .. } => {
                let is_used = self.pools.get(base).is_some_and(|pool| !pool.is_last());
                is_used || self.keeps_pool(*base)
            }
            AllocationPlace::Large { chunks, .. } => {
                let device = chunks.first().map_or(0, |chunk| chunk.device);
                self.keeps_large(allocation.group, device, address)
            }
            AllocationPlace::Opened { .. } => false,
        };
        stays && self.release(address).is_ok()
    }
}
