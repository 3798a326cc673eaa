//! Fairness between VMs: grants go to the VM whose last grant is longest ago, and a VM's deaths delay other VMs for a bounded
//! part of the time.
//!
//! After a death, drivers of other VMs wait until the memory of the dead worker is occupied again, at most
//! [`limits::DEATH_MILLISECONDS`]. Each VM has a credit of such time. It is spent while others wait, however many of the VM's workers
//! died, and earned at a tenth of the time. Without credit a death delays no other VM. A VM that has spent more than half of its credit
//! starts no session until it has earned that half again.

use super::super::Millis;
use crate::ids::VmKey;
use sluice_protocol::limits;
use std::collections::HashMap;

/// A VM earns one millisecond of credit in so many.
const EARNS_IN: u64 = 10;
/// The largest credit, in the unit in which it is counted: a VM earns one in a millisecond, and spends [`EARNS_IN`].
const FULL: u64 = limits::DEATH_MILLISECONDS * EARNS_IN;

/// A VM's turns and credit.
#[derive(Clone, Copy, Debug)]
struct Turn {
    /// Number of its last grant, among all grants.
    last: u64,
    /// Its credit at the time `counted`.
    credit: u64,
    counted: Millis,
    /// The part of the credit that was spent since other VMs began to wait.
    spent: u64,
    /// The time until which its deaths delay other VMs.
    holds: Millis,
}

impl Turn {
    const NEW: Turn = Turn { last: 0, credit: FULL, counted: 0, spent: 0, holds: 0 };

    /// The state at a later time.
    fn at(mut self, now: Millis) -> Turn {
        let held = self.holds.min(now).saturating_sub(self.counted);
        let spent = held.saturating_mul(EARNS_IN).min(self.credit);
        let earned = now.saturating_sub(self.counted);
        self.credit = (self.credit - spent).saturating_add(earned).min(FULL);
        self.spent = self.spent.saturating_add(spent);
        self.counted = self.counted.max(now);
        self
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
        *turn = turn.at(now);
        if turn.holds <= now {
            turn.spent = 0;
        }
        turn.holds = now.saturating_add(limits::DEATH_MILLISECONDS.min(turn.credit / EARNS_IN));
        turn.holds
    }

    /// Deaths of a VM delay no other VM any more. Without another VM on the unit nothing is spent.
    pub(super) fn let_go(&mut self, vm: VmKey, now: Millis, is_alone: bool) {
        let turn = self.turn(vm);
        *turn = turn.at(now);
        turn.holds = turn.holds.min(now);
        if is_alone {
            turn.credit = turn.credit.saturating_add(turn.spent).min(FULL);
        }
        turn.spent = 0;
    }

    /// The time until which a VM's deaths may delay other VMs.
    pub(super) fn holds_until(&self, vm: VmKey) -> Millis {
        self.of.get(&vm).map_or(0, |turn| turn.holds)
    }

    /// The time until which a VM's new sessions wait, if that is later than now.
    pub(super) fn pays_until(&self, vm: VmKey, now: Millis) -> Option<Millis> {
        let credit = self.of.get(&vm).map_or(FULL, |turn| turn.at(now).credit);
        (FULL / 2)
            .checked_sub(credit)
            .filter(|missing| *missing > 0)
            .map(|missing| now.saturating_add(missing))
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
            turns.let_go(VM, now + 5, false);
        }
        assert_eq!(turns.pays_until(VM, 60_000), None);
    }

    // Promise: Q31
    #[test]
    fn deaths_at_nearly_the_same_time_cost_no_more_than_one() {
        let mut turns = Turns::default();
        for now in 0..64 {
            turns.hold_up(VM, now);
        }
        turns.let_go(VM, 100, false);
        assert_eq!(turns.pays_until(VM, 100), None);
        // Others waited for 100 ms, in which the VM has earned 10.
        assert_eq!(turns.hold_up(VM, 100), 100 + limits::DEATH_MILLISECONDS - 90);
    }

    // Promise: Q31
    #[test]
    fn vm_waits_in_proportion_to_the_time_that_others_waited() {
        let mut turns = Turns::default();
        let mut now = 0;
        for _ in 0..100 {
            // Sessions in a row: each start waits until the VM may, and each end delays others for 90 ms.
            now = turns.pays_until(VM, now).unwrap_or(now);
            turns.hold_up(VM, now);
            now += 90;
            turns.let_go(VM, now, false);
            assert!(turns.pays_until(VM, now).is_none_or(|until| until <= now + 90 * EARNS_IN), "{now}");
        }
        let delayed = 100 * 90;
        assert!(delayed <= now / EARNS_IN + limits::DEATH_MILLISECONDS / 2 + 90, "{delayed} of {now} ms");
    }

    // Promise: Q31
    #[test]
    fn deaths_of_a_vm_that_is_alone_on_the_unit_cost_it_no_wait() {
        let mut turns = Turns::default();
        for now in (0..60_000).step_by(100) {
            assert_eq!(turns.hold_up(VM, now), now + limits::DEATH_MILLISECONDS, "after {now} ms");
            turns.let_go(VM, now + 90, true);
        }
        assert_eq!(turns.pays_until(VM, 60_000), None);
    }
}
