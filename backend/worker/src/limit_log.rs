//! Messages that a guest can cause, at a bounded rate per place.

use core::sync::atomic::{AtomicU64, Ordering};
use std::{sync::LazyLock, time::Instant};

/// Messages of one place in a row.
const BURST: u64 = 10;
/// After a burst, one message in so many seconds.
const SECONDS: u64 = 10;

static START: LazyLock<Instant> = LazyLock::new(Instant::now);

/// The memory of one place.
#[derive(Debug, Default)]
pub(crate) struct Place {
    said: AtomicU64,
    /// Second from which the next one may be said.
    next: AtomicU64,
}

impl Place {
    pub(crate) const fn new() -> Place {
        Place { said: AtomicU64::new(0), next: AtomicU64::new(0) }
    }

    /// Whether a message may be said now.
    pub(crate) fn admits(&self) -> bool {
        self.admits_at(START.elapsed().as_secs())
    }

    fn admits_at(&self, second: u64) -> bool {
        if self.said.load(Ordering::Relaxed) < BURST {
            self.said.fetch_add(1, Ordering::Relaxed);
            self.next.store(second + SECONDS, Ordering::Relaxed);
            return true;
        }
        let next = self.next.load(Ordering::Relaxed);
        let swap =
            || self.next.compare_exchange(next, second + SECONDS, Ordering::Relaxed, Ordering::Relaxed);
        second >= next && swap().is_ok()
    }
}

/// `limited!(warn, …)` is `tracing::warn!(…)` at a bounded rate.
macro_rules! limited {
    ($level:ident, $($message:tt)*) => {{
        static PLACE: $crate::limit_log::Place = $crate::limit_log::Place::new();
        if PLACE.admits() {
            tracing::$level!($($message)*);
        }
    }};
}

pub(crate) use limited;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_and_then_one_now_and_then() {
        let place = Place::new();
        let said = |second| (0..100).filter(|_| place.admits_at(second)).count();
        assert_eq!(said(5), 10);
        assert_eq!(said(6), 0);
        assert_eq!(said(15), 1);
        assert_eq!(said(16), 0);
        assert_eq!(said(60), 1);
    }
}
