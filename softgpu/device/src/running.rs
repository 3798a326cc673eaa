//! The marks by which owners report their running kernels to each other, so that they can share the processor. A mark in an
//! owner's slot expires if it is not refreshed. Nothing here waits, and a killed owner leaves only marks that expire.

use std::sync::atomic::Ordering::Relaxed;

use crate::header::OwnerSlot;
use crate::owners::Owner;

/// Nanoseconds after which an owner that has not refreshed its mark counts as running no kernels.
const SILENCE: u64 = 500_000_000;
/// Nanoseconds for which a report of being short of processor time is valid: an owner without any processor time cannot repeat
/// it.
const NEWS: u64 = SILENCE;
/// Nanoseconds by which an owner may be ahead of one that is short.
const AHEAD: u64 = 5_000_000;

impl Owner {
    fn own(&self) -> &OwnerSlot {
        &self.device.header.owners()[self.slot]
    }

    /// Other owners whose kernels run now. An owner whose mark has expired is stopped or dead.
    fn others(&self, now: u64) -> impl Iterator<Item = &OwnerSlot> {
        let owners = self.device.header.owners().iter().enumerate();
        owners.filter(|(slot, _)| *slot != self.slot).map(|(_, words)| words).filter(move |words| {
            let seen = words.running.load(Relaxed);
            seen != 0 && now.saturating_sub(seen) < SILENCE
        })
    }

    /// Returns the number of other owners that run kernels at time `now` of
    /// [`monotonic_nanoseconds`](crate::monotonic_nanoseconds).
    #[must_use]
    pub fn others_running(&self, now: u64) -> usize {
        self.others(now).count()
    }

    /// Reports that kernels of this process run. Time in which none ran gives no credit.
    pub fn kernels_run(&self, now: u64) {
        if self.own().running.swap(now, Relaxed) == 0
            && let Some(least) = self.others(now).map(|words| words.worked.load(Relaxed)).min()
        {
            self.own().worked.fetch_max(least, Relaxed);
        }
    }

    /// Reports that no kernels of this process run.
    pub fn kernels_rest(&self) {
        self.own().running.store(0, Relaxed);
    }

    /// Counts processor time that kernels got while others ran kernels. `short` reports that they could have used much more.
    pub fn kernels_worked(&self, now: u64, nanoseconds: u64, short: bool) {
        self.own().worked.fetch_add(nanoseconds, Relaxed);
        if short {
            self.own().starved.store(now, Relaxed);
        }
    }

    /// True if an owner that is short of processor time has had less of it.
    #[must_use]
    pub fn is_ahead(&self, now: u64) -> bool {
        let worked = self.own().worked.load(Relaxed);
        self.others(now).any(|words| {
            now.saturating_sub(words.starved.load(Relaxed)) < NEWS
                && words.worked.load(Relaxed) + AHEAD < worked
        })
    }
}
