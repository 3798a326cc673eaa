//! The sum of the usage that the workers of VMs report.
//!
//! A report is not verified, so the sum is only shown and decides nothing. It is bounded by the work that a device could do in
//! the worker's life, it never becomes less, and it stays when the worker is gone.

use crate::{
    custody::Millis,
    ids::{VmKey, WorkerId},
};
use sluice_protocol::limits;
use std::collections::{BTreeMap, HashMap};

/// What was done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Work {
    /// Kernels launched.
    pub launches: u64,
    /// Copies.
    pub copies: u64,
    /// Bytes of these.
    pub copied: u64,
    /// Calls of the guest.
    pub calls: u64,
}

impl Work {
    fn combine(self, other: Work, with: impl Fn(u64, u64) -> u64) -> Work {
        Work {
            launches: with(self.launches, other.launches),
            copies: with(self.copies, other.copies),
            copied: with(self.copied, other.copied),
            calls: with(self.calls, other.calls),
        }
    }

    /// What can be believed of a worker that has lived for so long, and had said `self` before.
    fn believe(self, said: Work, lived: Millis) -> Work {
        let count = lived.saturating_add(1).saturating_mul(limits::REPORTED_PER_MILLISECOND);
        let copied = lived.saturating_add(1).saturating_mul(limits::REPORTED_BYTES_PER_MILLISECOND);
        let most = Work { launches: count, copies: count, copied, calls: count };
        self.combine(said.combine(most, u64::min), u64::max)
    }
}

#[derive(Debug)]
struct Member {
    vm: VmKey,
    since: Millis,
    said: Work,
}

/// The sums.
#[derive(Debug, Default)]
pub struct Tally {
    vms: BTreeMap<VmKey, Work>,
    members: HashMap<WorkerId, Member>,
}

impl Tally {
    /// A worker begins.
    pub fn join(&mut self, id: WorkerId, vm: VmKey, now: Millis) {
        self.members.insert(id, Member { vm, since: now, said: Work::default() });
    }

    /// What a worker says by now.
    pub fn see(&mut self, id: WorkerId, said: Work, now: Millis) {
        let Some(member) = self.members.get_mut(&id) else { return };
        let believed = member.said.believe(said, now.saturating_sub(member.since));
        let more = believed.combine(member.said, u64::saturating_sub);
        member.said = believed;
        let sum = self.vms.entry(member.vm).or_default();
        *sum = sum.combine(more, u64::saturating_add);
    }

    /// A worker is gone; what it has said was seen.
    pub fn leave(&mut self, id: WorkerId) {
        self.members.remove(&id);
    }

    /// The sums of a VM.
    #[must_use]
    pub fn of(&self, vm: VmKey) -> Work {
        self.vms.get(&vm).copied().unwrap_or_default()
    }

    /// Epochs of a VM before this one are over.
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

    fn work(count: u64) -> Work {
        Work { launches: count, copies: count, copied: count, calls: count }
    }

    // Promise: T30
    #[test]
    fn sums_stay_when_workers_go_and_never_become_less() {
        let mut tally = Tally::default();
        tally.join(WorkerId(1), VM, 0);
        tally.join(WorkerId(2), VM, 0);
        tally.see(WorkerId(1), work(10), 5);
        tally.see(WorkerId(2), work(20), 5);
        assert_eq!(tally.of(VM), work(30));
        tally.see(WorkerId(1), work(3), 6);
        assert_eq!(tally.of(VM), work(30), "what was said cannot be taken back");
        tally.see(WorkerId(1), work(12), 7);
        tally.leave(WorkerId(1));
        tally.see(WorkerId(1), work(900), 8);
        assert_eq!(tally.of(VM), work(32), "nobody says anything any more");
        tally.join(WorkerId(3), VM, 9);
        tally.see(WorkerId(3), work(1), 9);
        assert_eq!(tally.of(VM), work(33));
        tally.forget_before(VM);
        assert_eq!(tally.of(VM), work(33));
        tally.forget_before(VmKey { epoch: 2, ..VM });
        assert_eq!(tally.of(VM), work(0));
    }

    // Promise: T30
    #[test]
    fn nobody_can_say_more_than_could_be_done() {
        let mut tally = Tally::default();
        tally.join(WorkerId(1), VM, 100);
        tally.see(WorkerId(1), work(u64::MAX), 109);
        let most = Work {
            copied: 10 * limits::REPORTED_BYTES_PER_MILLISECOND,
            ..work(10 * limits::REPORTED_PER_MILLISECOND)
        };
        assert_eq!(tally.of(VM), most);
        tally.see(WorkerId(1), work(u64::MAX), Millis::MAX);
        assert_eq!(tally.of(VM), work(u64::MAX), "no sum is beyond its type");
    }
}
