//! Fairness between VMs: grants go to the VM whose last grant is longest ago, and a VM's deaths delay other VMs for a bounded
//! part of the time.
//!
//! After a death, drivers of other VMs wait until the memory of the dead worker is occupied again. Each VM has a credit of such
//! time: at most [`limits::DEATH_MILLISECONDS`], earned at a tenth of the time. A death without credit delays no other VM;
//! instead the VM's next sessions wait until it has earned some again.

use super::super::Millis;
use crate::ids::VmKey;
use sluice_protocol::limits;
use std::collections::HashMap;

/// A VM earns one millisecond of credit in so many.
const EARNS_IN: u64 = 10;

/// A VM's turns and credit.
#[derive(Clone, Copy, Debug)]
struct Turn {
    /// Number of its last grant, among all grants.
    last: u64,
    /// Milliseconds for which its deaths may delay other VMs, at the last count.
    credit: Millis,
    counted: Millis,
    /// The time until which they do.
    holds: Millis,
    /// The time until which its own new sessions wait to pay for its deaths.
    pays: Millis,
}

impl Turn {
    const NEW: Turn = Turn { last: 0, credit: limits::DEATH_MILLISECONDS, counted: 0, holds: 0, pays: 0 };

    fn count(&mut self, now: Millis) {
        let earned = now.saturating_sub(self.counted) / EARNS_IN;
        if earned > 0 {
            self.credit = self.credit.saturating_add(earned).min(limits::DEATH_MILLISECONDS);
            self.counted = now;
        }
    }
}

/// The turns of all VMs.
#[derive(Debug, Default)]
pub(super) struct Turns {
    of: HashMap<VmKey, Turn>,
    grants: u64,
}

impl Turns {
    fn turn(&mut self, vm: VmKey) -> &mut Turn {
        self.of.entry(vm).or_insert(Turn::NEW)
    }

    /// Records a grant to a VM.
    pub(super) fn granted(&mut self, vm: VmKey) {
        self.grants += 1;
        let grants = self.grants;
        self.turn(vm).last = grants;
    }

    /// The number of a VM's last grant; 0 for none.
    pub(super) fn last(&self, vm: VmKey) -> u64 {
        self.of.get(&vm).map_or(0, |turn| turn.last)
    }

    /// A worker of a VM died. Returns the time until which other VMs wait for its memory.
    pub(super) fn hold_up(&mut self, vm: VmKey, now: Millis) -> Millis {
        let turn = self.turn(vm);
        turn.count(now);
        let from = turn.holds.max(now);
        let wanted = now.saturating_add(limits::DEATH_MILLISECONDS).max(from);
        let until = wanted.min(from.saturating_add(turn.credit));
        turn.credit -= until - from;
        turn.holds = until;
        if until < wanted {
            // In that time it earns half of its credit.
            turn.pays = now.saturating_add(limits::DEATH_MILLISECONDS / 2 * EARNS_IN);
        }
        until
    }

    /// The memory of all of a VM's dead workers is about to be taken: unused time is credited.
    pub(super) fn let_go(&mut self, vm: VmKey, now: Millis) {
        let turn = self.turn(vm);
        let unused = turn.holds.saturating_sub(now);
        turn.holds = turn.holds.min(now);
        turn.credit = turn.credit.saturating_add(unused).min(limits::DEATH_MILLISECONDS);
    }

    /// The time until which a VM's deaths may delay other VMs.
    pub(super) fn holds_until(&self, vm: VmKey) -> Millis {
        self.of.get(&vm).map_or(0, |turn| turn.holds)
    }

    /// The time until which a VM's new sessions wait, if that is later than now.
    pub(super) fn pays_until(&self, vm: VmKey, now: Millis) -> Option<Millis> {
        self.of.get(&vm).map(|turn| turn.pays).filter(|until| *until > now)
    }

    pub(super) fn forget(&mut self, vm: VmKey) {
        self.of.remove(&vm);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const VM: VmKey = VmKey { vm: 1, epoch: 1 };

    // Promise: Q31
    #[test]
    fn deaths_of_one_vm_delay_others_for_at_most_a_tenth_of_the_time() {
        let mut turns = Turns::default();
        let (mut held, mut last) = (0, 0);
        // A worker dies every 100 ms, and the driver never releases its memory in time.
        for now in (0..600_000).step_by(100) {
            let until = turns.hold_up(VM, now);
            held += until - last.max(now);
            last = last.max(until);
            assert!(until <= now + limits::DEATH_MILLISECONDS);
        }
        println!("others were held up for {held} of 600000 ms");
        assert!(held <= 600_000 / EARNS_IN + limits::DEATH_MILLISECONDS, "{held}");
        assert!(turns.pays_until(VM, 600_000).is_some(), "the VM itself waits");
    }

    // Promise: Q31
    #[test]
    fn death_that_the_driver_clears_at_once_costs_its_vm_no_wait() {
        let mut turns = Turns::default();
        for now in (0..60_000).step_by(50) {
            assert_eq!(turns.hold_up(VM, now), now + limits::DEATH_MILLISECONDS, "after {now} ms");
            turns.let_go(VM, now + 5);
        }
        assert_eq!(turns.pays_until(VM, 60_000), None);
    }
}
