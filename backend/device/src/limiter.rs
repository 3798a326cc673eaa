//! Log lines that a guest can provoke, rate-limited per call site.

use std::{
    sync::{
        LazyLock,
        atomic::{AtomicU64, Ordering},
    },
    time::Instant,
};

/// One call site: a line per second, the others counted.
#[derive(Debug)]
pub struct Limiter {
    /// Second of the process' life in which the last line was written, plus one.
    last: AtomicU64,
    suppressed: AtomicU64,
}

static START: LazyLock<Instant> = LazyLock::new(Instant::now);

impl Limiter {
    /// A call site that has written nothing.
    #[must_use]
    pub const fn new() -> Limiter {
        Limiter { last: AtomicU64::new(0), suppressed: AtomicU64::new(0) }
    }

    /// Writes a line, handing it the number of lines that were suppressed before it, or counts it.
    pub fn run(&self, write: impl FnOnce(u64)) {
        let second = START.elapsed().as_secs().saturating_add(1);
        if self.last.swap(second, Ordering::Relaxed) == second {
            self.suppressed.fetch_add(1, Ordering::Relaxed);
        } else {
            write(self.suppressed.swap(0, Ordering::Relaxed));
        }
    }
}

impl Default for Limiter {
    fn default() -> Limiter {
        Limiter::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writes_once_a_second() {
        let limiter = Limiter::new();
        let mut lines = 0;
        for _ in 0..10_000 {
            limiter.run(|_| lines += 1);
        }
        assert!((1..=3).contains(&lines), "{lines} lines");
    }
}
