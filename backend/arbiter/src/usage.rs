//! The sum of the usage that the workers of VMs report.
//!
//! A report is not verified, so the sum is only shown and decides nothing. It is bounded by the work that a device could do in
//! the worker's life, it never becomes less, and it stays when the worker is gone.

use crate::{
    custody::Millis,
    ids::{VmKey, WorkerId},
};
use sluice_messages::figures::WorkCounts;
use sluice_protocol::limits;
use std::collections::{BTreeMap, HashMap};

/// Bounds the report `reported` of a worker that has lived for `lived` and had reported `before`.
fn bounded(before: WorkCounts, reported: WorkCounts, lived: Millis) -> WorkCounts {
    let count = lived.saturating_add(1).saturating_mul(limits::REPORTED_PER_MILLISECOND);
    let copied = lived.saturating_add(1).saturating_mul(limits::REPORTED_BYTES_PER_MILLISECOND);
    let most = WorkCounts { launches: count, copies: count, copied, calls: count };
    before.combine(reported.combine(most, u64::min), u64::max)
}

#[derive(Debug)]
struct UsageMember {
    vm: VmKey,
    since: Millis,
    reported: WorkCounts,
}

/// The sums of all VMs.
#[derive(Debug, Default)]
pub struct UsageCounters {
    vms: BTreeMap<VmKey, WorkCounts>,
    members: HashMap<WorkerId, UsageMember>,
}

impl UsageCounters {
    /// Begins to count a worker.
    pub fn join(&mut self, id: WorkerId, vm: VmKey, now: Millis) {
        self.members.insert(id, UsageMember { vm, since: now, reported: WorkCounts::default() });
    }

    /// Adds a worker's current report.
    pub fn see(&mut self, id: WorkerId, reported: WorkCounts, now: Millis) {
        let Some(member) = self.members.get_mut(&id) else { return };
        let counted = bounded(member.reported, reported, now.saturating_sub(member.since));
        let more = counted.combine(member.reported, u64::saturating_sub);
        member.reported = counted;
        let sum = self.vms.entry(member.vm).or_default();
        *sum = sum.combine(more, u64::saturating_add);
    }

    /// Removes a worker whose last report was added.
    pub fn leave(&mut self, id: WorkerId) {
        self.members.remove(&id);
    }

    /// The sum of a VM.
    #[must_use]
    pub fn of(&self, vm: VmKey) -> WorkCounts {
        self.vms.get(&vm).copied().unwrap_or_default()
    }

    /// Forgets the epochs of a VM before this one.
    pub fn forget_before(&mut self, vm: VmKey) {
        let stays = |key: VmKey| key.vm != vm.vm || key.epoch >= vm.epoch;
        self.vms.retain(|key, _| stays(*key));
        self.members.retain(|_, member| stays(member.vm));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const VM: VmKey = VmKey { vm: 1, epoch: 1 };

    fn work(count: u64) -> WorkCounts {
        WorkCounts { launches: count, copies: count, copied: count, calls: count }
    }

    // Promise: T30
    #[test]
    fn work_sums_keep_ended_workers_and_never_decrease() {
        let mut usage = UsageCounters::default();
        usage.join(WorkerId(1), VM, 0);
        usage.join(WorkerId(2), VM, 0);
        usage.see(WorkerId(1), work(10), 5);
        usage.see(WorkerId(2), work(20), 5);
        assert_eq!(usage.of(VM), work(30));
        usage.see(WorkerId(1), work(3), 6);
        assert_eq!(usage.of(VM), work(30), "a reported sum cannot decrease");
        usage.see(WorkerId(1), work(12), 7);
        usage.leave(WorkerId(1));
        usage.see(WorkerId(1), work(900), 8);
        assert_eq!(usage.of(VM), work(32), "reports of an ended worker are ignored");
        usage.join(WorkerId(3), VM, 9);
        usage.see(WorkerId(3), work(1), 9);
        assert_eq!(usage.of(VM), work(33));
        usage.forget_before(VM);
        assert_eq!(usage.of(VM), work(33));
        usage.forget_before(VmKey { epoch: 2, ..VM });
        assert_eq!(usage.of(VM), work(0));
    }

    // Promise: T30
    #[test]
    fn reported_work_is_capped_by_elapsed_time() {
        let mut usage = UsageCounters::default();
        usage.join(WorkerId(1), VM, 100);
        usage.see(WorkerId(1), work(u64::MAX), 109);
        let most = WorkCounts {
            copied: 10 * limits::REPORTED_BYTES_PER_MILLISECOND,
            ..work(10 * limits::REPORTED_PER_MILLISECOND)
        };
        assert_eq!(usage.of(VM), most);
        usage.see(WorkerId(1), work(u64::MAX), Millis::MAX);
        assert_eq!(usage.of(VM), work(u64::MAX), "no sum is beyond its type");
    }
}
