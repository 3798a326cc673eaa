//! The state of a library: the count of its starts, and the data that the first start brought.

use super::driver::Driver;
use super::session::Session;
use super::status::{Result, Status};
use super::targets::gpu_handle;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A management library: one static per process.
pub struct Library {
    driver: &'static dyn Driver,
    state: Mutex<Option<State>>,
}

/// A started library.
struct State {
    starts: u32,
    /// Who started it. A forked child has not: what the driver knew is its parent's.
    process: u32,
    session: Arc<Session>,
}

impl Library {
    /// A library over a driver.
    #[must_use]
    pub const fn new(driver: &'static dyn Driver) -> Library {
        Library { driver, state: Mutex::new(None) }
    }

    fn state(&self) -> MutexGuard<'_, Option<State>> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.as_ref().is_some_and(|state| state.process != std::process::id()) {
            // The memory and the locks behind it are not this process's: not even to be given back.
            std::mem::forget(state.take());
        }
        state
    }

    pub(super) fn start(&self) -> Result {
        let mut state = self.state();
        if let Some(state) = &mut *state {
            state.starts = state.starts.checked_add(1).ok_or(Status::UNKNOWN)?;
            return Ok(());
        }
        let opened = self.driver.open()?;
        let session = Session::new(opened);
        for (index, gpu) in session.opened.gpus.iter().enumerate() {
            // So that the first question has an answer; a driver that cannot tell is asked again then.
            let _ = gpu_handle(index)
                .and_then(|device| gpu.processes().and_then(|processes| session.look(device, processes)));
        }
        *state = Some(State { starts: 1, process: std::process::id(), session: Arc::new(session) });
        Ok(())
    }

    pub(super) fn end(&self) -> Result {
        let mut state = self.state();
        let started = state.as_mut().ok_or(Status::UNINITIALIZED)?;
        started.starts -= 1;
        if started.starts == 0 {
            *state = None;
        }
        Ok(())
    }

    pub(super) fn session(&self) -> Result<Arc<Session>> {
        let state = self.state();
        Ok(Arc::clone(&state.as_ref().ok_or(Status::UNINITIALIZED)?.session))
    }

    /// Runs a call behind the C boundary: nothing unwinds into the program.
    #[doc(hidden)]
    pub fn enter(&self, name: &'static str, call: impl FnOnce(&Library) -> Result) -> u32 {
        match catch_unwind(AssertUnwindSafe(|| self.driver.before(name).and_then(|()| call(self)))) {
            Ok(Ok(())) => 0,
            Ok(Err(Status(code))) => code,
            Err(_) => Status::UNKNOWN.0,
        }
    }
}

impl std::fmt::Debug for Library {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Library")
    }
}
