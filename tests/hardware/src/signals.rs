//! Signals that end a run: it kills the step that runs, writes the step's result, removes its folder, and exits.
//!
//! A handler only stores the number of the signal; the frame looks at it. Handlers end with `exec`, so a child of the run has none.

#![expect(unsafe_code, reason = "sets handlers of signals")]

use std::sync::atomic::{AtomicI32, Ordering};

use libc::c_int;

/// The signals, with their names: the interrupt of a terminal, the usual request to end, and the loss of a terminal.
const SIGNALS: [(c_int, &str); 3] =
    [(libc::SIGINT, "SIGINT"), (libc::SIGTERM, "SIGTERM"), (libc::SIGHUP, "SIGHUP")];

/// The signal that arrived last; 0 if none did.
static ARRIVED: AtomicI32 = AtomicI32::new(0);

/// Stores these signals from now on, instead of ending the process without cleanup.
pub(crate) fn store() {
    let handler: extern "C" fn(c_int) = arrived;
    for (signal, _) in SIGNALS {
        // SAFETY: the handler has the type of a handler, and does nothing but store a number in an atomic.
        let before = unsafe { libc::signal(signal, handler as *const () as libc::sighandler_t) };
        if before == libc::SIG_IGN {
            // `nohup` ignores SIGHUP so that the run survives its terminal.
            // SAFETY: no handler is set.
            unsafe { libc::signal(signal, libc::SIG_IGN) };
        }
    }
}

/// The name of the signal that ends this run, if one arrived.
pub(crate) fn stored() -> Option<&'static str> {
    let arrived = ARRIVED.load(Ordering::Relaxed);
    SIGNALS.iter().find(|(signal, _)| *signal == arrived).map(|(_, name)| *name)
}

extern "C" fn arrived(signal: c_int) {
    ARRIVED.store(signal, Ordering::Relaxed);
}
