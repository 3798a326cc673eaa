//! Groups of allocations: the worker's form of a guest's memory pool.
//!
//! A group has pool chunks of its own, so that its reserved memory is its own, and it keeps freed memory as long as it has no
//! more reserved than its threshold.

use super::{ChunkSource, Mapper, Memory};
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

    /// Sets the bytes that a group keeps.
    pub(crate) fn set_threshold(&mut self, group: u32, device: i32, bytes: u64) -> Result<(), Code> {
        self.group(group, device)?.threshold = bytes;
        self.trim(group, bytes);
        Ok(())
    }

    /// Gives back idle memory of a group until it has at most `keep` bytes reserved.
    pub(crate) fn trim(&mut self, group: u32, keep: u64) {
        while self.groups.get(&group).is_some_and(|of| of.usage.reserved > keep) {
            if self.give_kept_of(group) {
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
