//! Log lines that a guest can cause: at most one per second and place in the code, with the number of lines dropped before it.

use std::{
    sync::{
        LazyLock,
        atomic::{AtomicU64, Ordering},
    },
    time::Instant,
};

static START: LazyLock<Instant> = LazyLock::new(Instant::now);

/// The limit of one place that logs.
#[derive(Debug, Default)]
pub struct Limiter {
    /// Second of the process's life in which the last line was written, plus one.
    last: AtomicU64,
    suppressed: AtomicU64,
}

impl Limiter {
    /// The limit of a place that has not logged yet.
    #[must_use]
    pub const fn new() -> Limiter {
        Limiter { last: AtomicU64::new(0), suppressed: AtomicU64::new(0) }
    }

    /// Writes a line, or counts it. `write` gets the number of lines dropped before this one, if there were any.
    pub fn run(&self, write: impl FnOnce(Option<u64>)) {
        let second = START.elapsed().as_secs().saturating_add(1);
        if self.last.swap(second, Ordering::Relaxed) == second {
            self.suppressed.fetch_add(1, Ordering::Relaxed);
        } else {
            let suppressed = self.suppressed.swap(0, Ordering::Relaxed);
            write((suppressed > 0).then_some(suppressed));
        }
    }
}

/// `limited!(warn, …)` is `tracing::warn!(…)` at a bounded rate.
#[macro_export]
macro_rules! limited {
    ($level:ident, $($message:tt)*) => {{
        static LIMITER: $crate::limited::Limiter = $crate::limited::Limiter::new();
        LIMITER.run(|suppressed| $crate::tracing::$level!(suppressed, $($message)*));
    }};
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limited_line_is_written_once_a_second_and_repeats_are_counted() {
        let limiter = Limiter::new();
        let (mut lines, mut suppressed) = (0, 0);
        let start = Instant::now();
        while suppressed == 0 {
            limiter.run(|before| {
                lines += 1;
                suppressed += before.unwrap_or(0);
            });
        }
        let seconds = start.elapsed().as_secs() + 2;
        assert!((2..=seconds).contains(&lines), "{lines} lines in {seconds} seconds");
    }
}
