//! Fault points: places at which tests kill this process.
//!
//! With the feature `fault-points`, and only then, a process whose environment has `SLUICE_FAULT=NAME:COUNT` kills itself when
//! it passes the place of that name for the COUNT-th time, as the kernel would. No product is built with the feature.

/// A fault point.
#[cfg(feature = "fault-points")]
pub(crate) fn point(name: &str) {
    use std::sync::atomic::{AtomicU64, Ordering};
    static PASSED: AtomicU64 = AtomicU64::new(0);
    let Ok(wanted) = std::env::var("SLUICE_FAULT") else { return };
    let Some((place, count)) = wanted.split_once(':') else { return };
    if place == name && count.parse() == Ok(PASSED.fetch_add(1, Ordering::Relaxed) + 1) {
        let own = rustix::process::getpid();
        // No code runs after it: the signal cannot be blocked.
        _ = rustix::process::kill_process(own, rustix::process::Signal::KILL);
        loop {
            std::thread::park();
        }
    }
}

/// A fault point: nothing without the feature.
#[cfg(not(feature = "fault-points"))]
#[inline]
pub(crate) const fn point(_name: &str) {}
