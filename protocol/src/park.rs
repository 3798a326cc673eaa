//! Sleep without a lost wake-up.
//!
//! One party waits for a value that the other publishes in shared memory. It sleeps only after it has announced that it will,
//! passed a full fence, and looked once more; the other party publishes, passes a full fence, and looks for the announcement.
//! In every interleaving, at least one of them sees the other's store (store buffering with two fences), so either the
//! sleeper does not sleep or the waker wakes it. The model checker runs both sides in `tests/loom.rs`.

use crate::shared::Shared;
use core::sync::atomic::Ordering;

/// Waits in a row that may outlast polling, or naps, before a side does without them.
pub const VAIN: u32 = 4;
/// Waits in a row before the first trial. The distance to the next trial doubles up to [`LAST_TRIAL`].
pub const FIRST_TRIAL: u32 = 8;
const LAST_TRIAL: u32 = 64;

/// True if a wait should begin with polling, or with naps, after so many in a row that outlasted them. They cost processor time, and save a
/// wake-up where they do not last long enough only if the other side becomes faster, which a trial finds out.
pub const fn is_worthwhile(in_vain: u32) -> bool {
    in_vain < VAIN
        || (in_vain.is_multiple_of(FIRST_TRIAL)
            && (in_vain.is_power_of_two() || in_vain.is_multiple_of(LAST_TRIAL)))
}

/// One direction of sleeping: the word at this offset is set while the party sleeps.
#[derive(Clone, Copy, Debug)]
pub struct Parking {
    word: usize,
}

impl Parking {
    /// The worker's dispatcher sleeps here.
    pub const WORKER: Parking = Parking { word: crate::session::WORKER_PARKED };
    /// The shim's waker thread sleeps here.
    pub const GUEST: Parking = Parking { word: crate::session::GUEST_PARKED };

    /// Announces sleep, then looks again. `true`: nothing is ready, sleep until woken, then call [`Parking::leave`].
    /// `false`: something is ready and the announcement is withdrawn.
    pub fn enter(self, memory: &impl Shared, ready: impl FnOnce() -> bool) -> bool {
        // A swap, so that this announcement is ordered after every earlier waker's swap of the word: several threads wake.
        memory.swap_u32(self.word, 1);
        memory.fence();
        if ready() {
            self.leave(memory);
            return false;
        }
        true
    }

    /// Withdraws the announcement after waking.
    pub fn leave(self, memory: &impl Shared) {
        memory.store_u32(self.word, 0, Ordering::Relaxed);
    }

    /// Called after publishing. Returns true, at most once per announcement, if the other party sleeps; the caller then wakes it.
    pub fn must_wake(self, memory: &impl Shared) -> bool {
        memory.fence();
        memory.load_u32(self.word, Ordering::Relaxed) != 0 && memory.swap_u32(self.word, 0) != 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trials_of_polling_become_rarer_but_never_end() {
        let trials: Vec<u32> = (0..300).filter(|in_vain| is_worthwhile(*in_vain)).collect();
        assert_eq!(trials, [0, 1, 2, 3, 8, 16, 32, 64, 128, 192, 256]);
        assert!((1_000_000..1_000_000 + LAST_TRIAL).any(is_worthwhile));
    }
}
