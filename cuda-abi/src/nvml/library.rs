//! The state of a library: how often it was started, and what the first start brought.

use super::driver::{Driver, Opened, Process};
use super::events::Sets;
use super::layout::DeviceHandle;
use super::status::{Result, Status};
use super::targets::gpu_handle;
use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

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

/// What lasts from the first start to the last end.
pub(super) struct Session {
    pub(super) opened: Opened,
    pub(super) sets: Sets,
    /// What utilisation is measured against: for each GPU or instance, when and how busy its processes were.
    looks: Mutex<HashMap<DeviceHandle, Look>>,
}

/// One look at the processes of a GPU.
#[derive(Clone)]
pub(super) struct Look {
    pub(super) at: Instant,
    pub(super) busy: HashMap<u32, u64>,
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
        let session = Session { opened, sets: Sets::default(), looks: Mutex::default() };
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

impl Session {
    /// Looks at the processes of a device; returns the look before and this one.
    pub(super) fn look(&self, device: DeviceHandle, processes: Vec<Process>) -> Result<(Option<Look>, Look)> {
        let mut busy = HashMap::new();
        for process in processes {
            *busy.entry(process.pid).or_insert(0) += process.busy_nanoseconds.ok_or(Status::NOT_SUPPORTED)?;
        }
        let now = Look { at: Instant::now(), busy };
        let mut looks = self.looks.lock().unwrap_or_else(PoisonError::into_inner);
        let before = looks.insert(device, now.clone());
        Ok((before, now))
    }
}

impl Look {
    /// Percent of the time since an earlier look for which each process's kernels ran, those at 0 left out.
    pub(super) fn shares(&self, before: &Look) -> Vec<(u32, u32)> {
        let elapsed = self.at.duration_since(before.at).as_nanos().max(1);
        let share = |(pid, busy): (&u32, &u64)| {
            // A process that was not there before has run since; one with the number of another began anew.
            let ran = busy.saturating_sub(before.busy.get(pid).copied().unwrap_or(0));
            let percent = (u128::from(ran) * 100).div_ceil(elapsed).min(100);
            (*pid, u32::try_from(percent).unwrap_or(100))
        };
        let mut shares: Vec<_> = self.busy.iter().map(share).filter(|(_, percent)| *percent > 0).collect();
        shares.sort_unstable();
        shares
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn shares_are_of_the_time_between_two_looks() {
        let start = Instant::now();
        let look = |after: u64, busy: &[(u32, u64)]| Look {
            at: start + Duration::from_millis(after),
            busy: busy.iter().map(|(pid, milliseconds)| (*pid, milliseconds * 1_000_000)).collect(),
        };
        let before = look(0, &[(1, 500), (2, 10), (3, 10), (4, 900)]);
        // Half the time, no time, more than all of it (on two streams), another process of that number, a new one.
        let now = look(100, &[(1, 550), (2, 10), (3, 999), (4, 20), (5, 1)]);
        assert_eq!(now.shares(&before), [(1, 50), (3, 100), (5, 1)]);
        assert_eq!(now.shares(&now), []);
    }
}
