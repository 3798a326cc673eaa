//! The state of a library from its first initialisation to its last shutdown.

use crate::driver::{Opened, Process};
use crate::layout::DeviceHandle;
use crate::sets::Sets;
use crate::status::{Result, Status};
use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

/// The state from the first initialisation to the last shutdown.
pub(crate) struct LibrarySession {
    pub(crate) opened: Opened,
    pub(crate) sets: Sets,
    /// The last sample of each GPU or instance, the base of the next utilisation.
    looks: Mutex<HashMap<DeviceHandle, Look>>,
}

/// A sample of the busy times of a device's processes.
#[derive(Clone)]
pub(crate) struct Look {
    pub(crate) at: Instant,
    pub(crate) busy: HashMap<u32, u64>,
}

impl LibrarySession {
    pub(crate) fn new(opened: Opened) -> LibrarySession {
        LibrarySession { opened, sets: Sets::default(), looks: Mutex::default() }
    }

    /// Samples the processes of a device. Returns the previous sample and this one.
    pub(crate) fn look(&self, device: DeviceHandle, processes: Vec<Process>) -> Result<(Option<Look>, Look)> {
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
    /// Percentage of the time since an earlier sample for which each process's kernels ran, without those at 0.
    pub(crate) fn shares(&self, before: &Look) -> Vec<(u32, u32)> {
        let elapsed = self.at.duration_since(before.at).as_nanos().max(1);
        let share = |(pid, busy): (&u32, &u64)| {
            // A process that is new has run since the earlier sample; a process that reuses a pid has started again from 0.
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
    fn process_shares_are_of_the_time_between_two_samples() {
        let start = Instant::now();
        let look = |after: u64, busy: &[(u32, u64)]| Look {
            at: start + Duration::from_millis(after),
            busy: busy.iter().map(|(pid, milliseconds)| (*pid, milliseconds * 1_000_000)).collect(),
        };
        let before = look(0, &[(1, 500), (2, 10), (3, 10), (4, 900)]);
        // Half the time, no time, more than all of it (on two streams), another process with a reused pid, a new one.
        let now = look(100, &[(1, 550), (2, 10), (3, 999), (4, 20), (5, 1)]);
        assert_eq!(now.shares(&before), [(1, 50), (3, 100), (5, 1)]);
        assert_eq!(now.shares(&now), []);
    }
}
