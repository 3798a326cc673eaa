//! Token buckets: limits on the rate of events.

use std::time::{Duration, Instant};

/// Lets `burst` events through at once and `per_second` in the long run.
#[derive(Debug)]
pub struct TokenBucket {
    per_second: f64,
    burst: f64,
    tokens: f64,
    refilled: Instant,
}

impl TokenBucket {
    /// Creates a full bucket.
    #[must_use]
    pub fn new(per_second: f64, burst: u32, now: Instant) -> Self {
        Self { per_second, burst: f64::from(burst), tokens: f64::from(burst), refilled: now }
    }

    /// True if the whole burst is available.
    #[must_use]
    pub fn is_full(&self, now: Instant) -> bool {
        let passed = now.saturating_duration_since(self.refilled).as_secs_f64();
        self.per_second.mul_add(passed, self.tokens) >= self.burst
    }

    /// Takes a token; if there is none, returns the time until the next.
    ///
    /// # Errors
    /// The time to wait for a token.
    pub fn take(&mut self, now: Instant) -> Result<(), Duration> {
        self.refill(now);
        if self.tokens >= 1.0 {
            self.tokens -= 1.0;
            return Ok(());
        }
        // Never zero, or a sleeping caller would spin; never so long that the addition to an Instant overflows.
        let seconds = ((1.0 - self.tokens) / self.per_second).clamp(0.001, 3600.0);
        Err(Duration::from_secs_f64(seconds))
    }

    fn refill(&mut self, now: Instant) {
        let passed = now.saturating_duration_since(self.refilled).as_secs_f64();
        self.tokens = self.per_second.mul_add(passed, self.tokens).min(self.burst);
        self.refilled = self.refilled.max(now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bucket_passes_a_burst_and_then_its_rate() {
        let start = Instant::now();
        let mut bucket = TokenBucket::new(10.0, 3, start);
        for _ in 0..3 {
            assert_eq!(bucket.take(start), Ok(()));
        }
        let wait = bucket.take(start).expect_err("the bucket is empty");
        assert!((wait.as_secs_f64() - 0.1).abs() < 1e-6, "{wait:?}");
        assert_eq!(bucket.take(start + Duration::from_millis(101)), Ok(()));
        assert!(bucket.take(start + Duration::from_millis(102)).is_err());
    }

    #[test]
    fn idle_bucket_holds_no_more_than_its_burst() {
        let start = Instant::now();
        let mut bucket = TokenBucket::new(10.0, 2, start);
        let later = start + Duration::from_secs(3600);
        assert_eq!(bucket.take(later), Ok(()));
        assert_eq!(bucket.take(later), Ok(()));
        assert!(bucket.take(later).is_err());
    }

    #[test]
    fn bucket_is_full_again_after_the_time_for_its_burst() {
        let start = Instant::now();
        let mut bucket = TokenBucket::new(10.0, 2, start);
        assert!(bucket.is_full(start));
        assert_eq!(bucket.take(start), Ok(()));
        assert!(!bucket.is_full(start + Duration::from_millis(50)));
        assert!(bucket.is_full(start + Duration::from_millis(101)));
    }

    #[test]
    fn bucket_with_a_clock_that_goes_back_gives_no_token() {
        let start = Instant::now() + Duration::from_secs(10);
        let mut bucket = TokenBucket::new(1.0, 1, start);
        assert_eq!(bucket.take(start), Ok(()));
        assert!(bucket.take(start - Duration::from_secs(5)).is_err());
        assert!(bucket.take(start).is_err());
    }
}
