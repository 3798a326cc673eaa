//! Groups of allocations: the worker's form of a guest's memory pool.
//!
//! A group has pool chunks of its own, so that its reserved memory is its own, and it keeps freed memory as long as it has no
//! more reserved than its threshold.

use super::{ChunkSource, KeptAllocation, Mapper, Memory};
use sluice_driver::{Code, code};
use sluice_protocol::limits;

/// One group.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Group {
    device: i32,
    /// Bytes that may stay reserved without allocations in them.
    threshold: u64,
    usage: GroupUsage,
}

/// The memory of a group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct GroupUsage {
    /// Bytes of its chunks, now and at most.
    pub(crate) reserved: u64,
    pub(crate) reserved_high: u64,
    /// Bytes of its allocations, now and at most.
    pub(crate) used: u64,
    pub(crate) used_high: u64,
}

impl<S: ChunkSource, M: Mapper> Memory<S, M> {
    /// The group of this number, which belongs to one device.
    pub(super) fn group(&mut self, group: u32, device: i32) -> Result<&mut Group, Code> {
        if group >= limits::POOLS {
            return Err(code::INVALID_VALUE);
        }
        let found = self.groups.entry(group).or_insert_with(|| Group { device, ..Group::default() });
        // All devices share group 0.
        if group == 0 || found.device == device { Ok(found) } else { Err(code::INVALID_VALUE) }
    }

    /// True if a group keeps memory that is idle now.
    pub(super) fn keeps(&self, group: u32) -> bool {
        self.groups.get(&group).is_some_and(|group| group.usage.reserved <= group.threshold)
    }

    pub(super) fn count_used(&mut self, group: u32, bytes: u64) {
        if let Some(Group { usage, .. }) = self.groups.get_mut(&group) {
            usage.used += bytes;
            usage.used_high = usage.used_high.max(usage.used);
        }
    }

    pub(super) fn count_freed(&mut self, group: u32, bytes: u64) {
        if let Some(Group { usage, .. }) = self.groups.get_mut(&group) {
            usage.used = usage.used.saturating_sub(bytes);
        }
    }

    pub(super) fn count_reserved(&mut self, group: u32, bytes: u64, more: bool) {
        if let Some(Group { usage, .. }) = self.groups.get_mut(&group) {
            usage.reserved = if more { usage.reserved + bytes } else { usage.reserved.saturating_sub(bytes) };
            usage.reserved_high = usage.reserved_high.max(usage.reserved);
        }
    }

    /// A large allocation was freed: its group keeps it, or its chunks go back.
    pub(super) fn keep_or_give(&mut self, group: u32, kept: KeptAllocation) {
        let device = kept.chunks.first().map_or(0, |chunk| chunk.device);
        let keeps = group > 0 && self.keeps(group) && self.mapper.clear(kept.at, kept.bytes, device).is_ok();
        if keeps {
            self.count_idle(device, kept.bytes, true);
            self.kept.entry((group, device)).or_default().push(kept);
        } else {
            self.count_reserved(group, kept.bytes, false);
            self.give_up(kept.at, kept.bytes, kept.chunks);
        }
    }

    /// Takes kept memory of exactly this size.
    pub(super) fn take_kept(&mut self, group: u32, device: i32, bytes: u64) -> Option<KeptAllocation> {
        let list = self.kept.get_mut(&(group, device))?;
        let index = list.iter().position(|kept| kept.bytes == bytes)?;
        let kept = list.swap_remove(index);
        self.count_idle(device, bytes, false);
        Some(kept)
    }

    /// Takes any kept memory of a device; the caller gives it back.
    pub(super) fn pop_kept(&mut self, device: i32) -> Option<KeptAllocation> {
        let (key, list) = self.kept.iter_mut().find(|((_, of), list)| *of == device && !list.is_empty())?;
        let (group, kept) = (key.0, list.pop()?);
        self.count_idle(device, kept.bytes, false);
        self.count_reserved(group, kept.bytes, false);
        Some(kept)
    }

    /// Sets the bytes that a group keeps.
    pub(crate) fn set_threshold(&mut self, group: u32, device: i32, bytes: u64) -> Result<(), Code> {
        self.group(group, device)?.threshold = bytes;
        self.trim(group, bytes);
        Ok(())
    }

    /// Gives back idle memory of a group until it has at most `keep` bytes reserved.
    pub(crate) fn trim(&mut self, group: u32, keep: u64) {
        while self.groups.get(&group).is_some_and(|of| of.usage.reserved > keep) {
            let list = self.kept.iter_mut().find(|((of, _), list)| *of == group && !list.is_empty());
            if let Some(((_, device), list)) = list
                && let Some(kept) = list.pop()
            {
                let device = *device;
                self.count_idle(device, kept.bytes, false);
                self.count_reserved(group, kept.bytes, false);
                self.report_idle();
                self.give_up(kept.at, kept.bytes, kept.chunks);
                continue;
            }
            let idle = self.pools.iter().find(|(_, pool)| pool.group() == group && pool.is_idle());
            let Some(base) = idle.map(|(base, _)| *base) else { break };
            self.drop_pool(base);
        }
        self.report_idle();
    }

    /// The usage of a group. `reset_reserved` and `reset_used` first set a high-water mark to the current value.
    pub(crate) fn usage(
        &mut self,
        group: u32,
        device: i32,
        reset_reserved: bool,
        reset_used: bool,
    ) -> Result<GroupUsage, Code> {
        let usage = &mut self.group(group, device)?.usage;
        if reset_reserved {
            usage.reserved_high = usage.reserved;
        }
        if reset_used {
            usage.used_high = usage.used;
        }
        Ok(*usage)
    }

    /// Ends a group: its idle memory goes back now, the rest when it is freed.
    pub(crate) fn end_group(&mut self, group: u32) {
        if let Some(group) = self.groups.get_mut(&group) {
            group.threshold = 0;
        }
        self.trim(group, 0);
        // A later group may have the same number, for another device.
        let is_empty = |of: &Group| of.usage.reserved == 0 && of.usage.used == 0;
        if self.groups.get(&group).is_some_and(is_empty) {
            self.groups.remove(&group);
        }
        self.peers.retain(|(of, _), _| *of != group);
    }
}
