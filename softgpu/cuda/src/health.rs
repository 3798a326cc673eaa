//! The health of a context: it is usable until its first fault, which it keeps.
//!
//! The scheduler checks it before it runs queued work and records the faults of that work; every call that needs a context checks
//! it too. It never waits and takes no lock.

use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicU32};

use crate::error::{Error, Result};

#[derive(Debug, Default)]
pub(crate) struct Health {
    code: AtomicU32,
    /// Ends running launches: the context had a fault, or ends.
    pub(crate) stop: AtomicBool,
}

impl Health {
    /// Returns the fault, as every later call does.
    pub(crate) fn check(&self) -> Result {
        match self.code.load(Acquire) {
            0 => Ok(()),
            code => Err(Error(code)),
        }
    }

    /// True if queued work may still run.
    pub(crate) fn is_sound(&self) -> bool {
        self.code.load(Acquire) == 0 && !self.stop.load(Relaxed)
    }

    /// Records a fault, which ends everything that runs in the context. An earlier fault stays.
    pub(crate) fn poison(&self, error: Error) {
        // On failure the context has a fault already.
        let _ = self.code.compare_exchange(0, error.0, AcqRel, Acquire);
        self.stop.store(true, Release);
    }
}
