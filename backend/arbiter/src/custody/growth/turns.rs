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

/// A VM's part.
#[derive(Clone, Copy, Debug)]
struct Turn {
    /// When its last grant was, in grants.
    last: u64,
    /// Milliseconds for which its deaths may hold up others, when last counted.
    credit: Millis,
    counted: Millis,
    /// Until when they do.
    holds: Millis,
    /// Until when its own sessions wait for what its deaths cost.
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

/// The parts of all VMs.
#[derive(Debug, Default)]
pub(super) struct Turns {
    of: HashMap<VmKey, Turn>,
    grants: u64,
}

impl Turns {
    fn turn(&mut self, vm: VmKey) -> &mut Turn {
        self.of.entry(vm).or_insert(Turn::NEW)
    }

    /// A VM has got a grant.
    pub(super) fn granted(&mut self, vm: VmKey) {
        self.grants += 1;
        let grants = self.grants;
        self.turn(vm).last = grants;
    }

    /// When a VM's last grant was; 0 for never.
    pub(super) fn last(&self, vm: VmKey) -> u64 {
        self.of.get(&vm).map_or(0, |turn| turn.last)
    }

    /// A worker of a VM died: until when other VMs wait for what it leaves.
    pub(super) fn hold_up(&mut self, vm: VmKey, now: Millis) -> Millis {
        let turn = self.turn(vm);
        turn.count(now);
        let from = turn.holds.max(now);
        let wanted = now.saturating_add(limits::DEATH_MILLISECONDS).max(from);
        let until = wanted.min(from.saturating_add(turn.credit));
        turn.credit -= until - from;
        turn.holds = until;
        if until < wanted {
            // By then it has earned half of its credit.
            turn.pays = now.saturating_add(limits::DEATH_MILLISECONDS / 2 * EARNS_IN);
        }
        until
    }

    /// The driver has what all dead workers of a VM had: what was not used of the time is credited.
    pub(super) fn let_go(&mut self, vm: VmKey, now: Millis) {
        let turn = self.turn(vm);
        let unused = turn.holds.saturating_sub(now);
        turn.holds = turn.holds.min(now);
        turn.credit = turn.credit.saturating_add(unused).min(limits::DEATH_MILLISECONDS);
    }

    /// Until when a VM's sessions wait, if that is later than now.
    pub(super) fn pays_until(&self, vm: VmKey, now: Millis) -> Option<Millis> {
        self.of.get(&vm).map(|turn| turn.pays).filter(|until| *until > now)
    }

    /// A VM is forgotten.
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
    fn deaths_hold_up_others_for_a_tenth_of_the_time() {
        let mut turns = Turns::default();
        let (mut held, mut last) = (0, 0);
        // A worker dies every 100 ms, and the driver never lets go in time.
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
    fn a_death_that_the_driver_forgets_at_once_costs_nothing() {
        let mut turns = Turns::default();
        for now in (0..60_000).step_by(50) {
            assert_eq!(turns.hold_up(VM, now), now + limits::DEATH_MILLISECONDS, "after {now} ms");
            turns.let_go(VM, now + 5);
        }
        assert_eq!(turns.pays_until(VM, 60_000), None);
    }
}
