//! The state that lasts from the first start of a library to its last end.

use super::driver::{Opened, Process};
use super::layout::DeviceHandle;
use super::sets::Sets;
use super::status::{Result, Status};
use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

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

impl Session {
    pub(super) fn new(opened: Opened) -> Session {
        Session { opened, sets: Sets::default(), looks: Mutex::default() }
    }

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
