//! The state of a library: the count of its initialisations, and the data of the first one.

use crate::driver::Driver;
use crate::session::LibrarySession;
use crate::status::{Result, Status};
use crate::targets::gpu_handle;
use sluice_cuda_frontend::enter;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A management library: one static per process.
pub struct Library {
    driver: &'static dyn Driver,
    state: Mutex<Option<LibraryState>>,
}

/// The state of an initialised library.
struct LibraryState {
    starts: u32,
    /// Process that initialised it. In a forked child it is invalid: the driver's data is the parent's.
    process: u32,
    session: Arc<LibrarySession>,
}

impl Library {
    /// Creates a library over a driver.
    #[must_use]
    pub const fn new(driver: &'static dyn Driver) -> Library {
        Library { driver, state: Mutex::new(None) }
    }

    fn state(&self) -> MutexGuard<'_, Option<LibraryState>> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.as_ref().is_some_and(|state| state.process != std::process::id()) {
            // The memory and the locks behind it belong to the parent: this process must not even drop them.
            std::mem::forget(state.take());
        }
        state
    }

    pub(crate) fn start(&self) -> Result {
        let mut state = self.state();
        if let Some(state) = &mut *state {
            state.starts = state.starts.checked_add(1).ok_or(Status::UNKNOWN)?;
            return Ok(());
        }
        let opened = self.driver.open()?;
        let session = LibrarySession::new(opened);
        for (index, gpu) in session.opened.gpus.iter().enumerate() {
            // Takes a first sample, so that the first utilisation call has a result. If the driver fails, that call tries again.
            let _ = gpu_handle(index)
                .and_then(|device| gpu.processes().and_then(|processes| session.look(device, processes)));
        }
        *state = Some(LibraryState { starts: 1, process: std::process::id(), session: Arc::new(session) });
        Ok(())
    }

    pub(crate) fn end(&self) -> Result {
        let mut state = self.state();
        let started = state.as_mut().ok_or(Status::UNINITIALIZED)?;
        started.starts -= 1;
        if started.starts == 0 {
            *state = None;
        }
        Ok(())
    }

    pub(crate) fn session(&self) -> Result<Arc<LibrarySession>> {
        let state = self.state();
        Ok(Arc::clone(&state.as_ref().ok_or(Status::UNINITIALIZED)?.session))
    }

    /// Runs a call behind the C boundary: no panic unwinds into the program.
    #[doc(hidden)]
    pub fn enter(&self, name: &'static str, call: impl FnOnce(&Library) -> Result) -> u32 {
        enter(|| self.driver.before(name).and_then(|()| call(self)), || ())
    }
}

impl std::fmt::Debug for Library {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Library")
    }
}
