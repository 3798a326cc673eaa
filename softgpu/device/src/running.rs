//! The marks by which owners report their running kernels to each other, so that they can share the processor. A mark in an
//! owner's slot goes stale when it is not refreshed. Nothing here waits, and a killed owner leaves nothing behind that matters.

use std::sync::atomic::Ordering::Relaxed;

use crate::header::OwnerSlot;
use crate::owners::Owner;

/// An owner that has not said for so many nanoseconds that its kernels run is taken to run none.
const SILENCE: u64 = 500_000_000;
/// Being short of processor time is news for so long: whoever gets none at all cannot say so again.
const NEWS: u64 = SILENCE;
/// How far an owner may be ahead of one that is short.
const AHEAD: u64 = 5_000_000;

impl Owner {
    fn own(&self) -> &OwnerSlot {
        &self.device.header.owners()[self.slot]
    }

    /// Other owners whose kernels run now. Whoever has not said so for a while is stopped, or dead.
    fn others(&self, now: u64) -> impl Iterator<Item = &OwnerSlot> {
        let owners = self.device.header.owners().iter().enumerate();
        owners.filter(|(slot, _)| *slot != self.slot).map(|(_, words)| words).filter(move |words| {
            let seen = words.running.load(Relaxed);
            seen != 0 && now.saturating_sub(seen) < SILENCE
        })
    }

    /// How many other owners run kernels at this time of [`monotonic_nanoseconds`](crate::monotonic_nanoseconds).
    #[must_use]
    pub fn others_running(&self, now: u64) -> usize {
        self.others(now).count()
    }

    /// Says that kernels of this process run. Time in which none ran is no credit.
    pub fn kernels_run(&self, now: u64) {
        if self.own().running.swap(now, Relaxed) == 0
            && let Some(least) = self.others(now).map(|words| words.worked.load(Relaxed)).min()
        {
            self.own().worked.fetch_max(least, Relaxed);
        }
    }

    /// Says that none do.
    pub fn kernels_rest(&self) {
        self.own().running.store(0, Relaxed);
    }

    /// Accounts for processor time that kernels got beside others, and says whether they could have used much more.
    pub fn kernels_worked(&self, now: u64, nanoseconds: u64, short: bool) {
        self.own().worked.fetch_add(nanoseconds, Relaxed);
        if short {
            self.own().starved.store(now, Relaxed);
        }
    }

    /// Whether somebody who is short of processor time has had less of it.
    #[must_use]
    pub fn is_ahead(&self, now: u64) -> bool {
        let worked = self.own().worked.load(Relaxed);
        self.others(now).any(|words| {
            now.saturating_sub(words.starved.load(Relaxed)) < NEWS
                && words.worked.load(Relaxed) + AHEAD < worked
        })
    }
}
