//! Progress lines on stderr, for people who wait. Silent unless switched on, so that tests stay quiet.

use std::sync::atomic::{AtomicBool, Ordering};

static ENABLED: AtomicBool = AtomicBool::new(false);

/// Switches progress lines on.
pub fn enable() {
    ENABLED.store(true, Ordering::Relaxed);
}

/// Prints one line about the next step.
pub fn step(text: impl AsRef<str>) {
    if ENABLED.load(Ordering::Relaxed) {
        eprintln!("  · {}", text.as_ref());
    }
}
