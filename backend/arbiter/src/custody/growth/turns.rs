//! Whose turn it is to grow.
//!
//! There is one grant at a time, and whoever has it can keep it for [`limits::GROW_MILLISECONDS`]. So that a VM with many
//! workers gets no more of that time than one with a single worker, the VM whose last grant is longest ago goes first; and one
//! that kept a grant until it was taken away gets none for as long again, then for twice as long, and so on.

use super::super::Millis;
use crate::ids::VmKey;
use sluice_protocol::limits;
use std::collections::HashMap;

/// A VM's part of the grants.
#[derive(Clone, Copy, Debug, Default)]
struct Turn {
    /// When its last grant was, in grants.
    last: u64,
    /// Grants that were taken away, and are not forgotten.
    overruns: u32,
    /// Until when it gets none.
    barred: Millis,
}

/// Everybody's part.
#[derive(Debug, Default)]
pub(super) struct Turns {
    of: HashMap<VmKey, Turn>,
    grants: u64,
}

impl Turns {
    /// A VM has got a grant.
    pub(super) fn granted(&mut self, vm: VmKey) {
        self.grants += 1;
        self.of.entry(vm).or_default().last = self.grants;
    }

    /// When a VM's last grant was; 0 for never.
    pub(super) fn last(&self, vm: VmKey) -> u64 {
        self.of.get(&vm).map_or(0, |turn| turn.last)
    }

    /// A VM's grant was taken away.
    pub(super) fn overran(&mut self, vm: VmKey, now: Millis) {
        let turn = self.of.entry(vm).or_default();
        if now.saturating_sub(turn.barred) >= limits::GROW_BARRED_MILLISECONDS {
            turn.overruns = 0;
        }
        let time = limits::GROW_MILLISECONDS.saturating_mul(1 << turn.overruns.min(16));
        turn.overruns = turn.overruns.saturating_add(1);
        turn.barred = now.saturating_add(time.min(limits::GROW_BARRED_MILLISECONDS));
    }

    /// Until when a VM gets no grant, if that is later than now.
    pub(super) fn barred_until(&self, vm: VmKey, now: Millis) -> Option<Millis> {
        self.of.get(&vm).map(|turn| turn.barred).filter(|until| *until > now)
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
    fn who_keeps_grants_gets_none_for_longer_and_longer_until_that_is_forgotten() {
        let mut turns = Turns::default();
        let mut now = 0;
        let mut times = Vec::new();
        for _ in 0..8 {
            turns.overran(VM, now);
            let until = turns.barred_until(VM, now).unwrap();
            times.push((until - now) / limits::GROW_MILLISECONDS);
            assert_eq!(turns.barred_until(VM, until), None);
            now = until;
        }
        assert_eq!(times, [1, 2, 4, 8, 16, 20, 20, 20]);
        now += limits::GROW_BARRED_MILLISECONDS;
        turns.overran(VM, now);
        assert_eq!(turns.barred_until(VM, now), Some(now + limits::GROW_MILLISECONDS));
    }
}
