//! The clock that processes of one host share.

use rustix::time::{ClockId, clock_gettime};

/// Nanoseconds of the kernel's monotonic clock.
#[must_use]
#[inline]
pub fn nanoseconds() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    // Neither part of a monotonic time is negative.
    now.tv_sec.unsigned_abs().saturating_mul(1_000_000_000).saturating_add(now.tv_nsec.unsigned_abs())
}
