//! The users for workers, and for the devices and arbiters that serve them.

use std::collections::BTreeSet;

use sluice_messages::launch::NumberRange;

/// The part of the users, as a divisor, that workers do not get: a VM with many workers keeps no device or arbiter from starting.
const SERVING: u32 = 8;

/// Users, each for one process at a time. A user that becomes free is taken again only after all others, so that what a process
/// may leave behind under its user is gone before the next process has it.
#[derive(Debug)]
pub(crate) struct WorkerUsers {
    range: NumberRange,
    workers: FreeUsers,
    /// Users of devices and arbiters.
    serving: FreeUsers,
}

/// Free users, and the one that was taken last.
#[derive(Debug, Default)]
struct FreeUsers {
    free: BTreeSet<u32>,
    last: u32,
}

impl FreeUsers {
    fn take(&mut self) -> Option<u32> {
        let next = self.free.range(self.last.saturating_add(1)..).next().or(self.free.first()).copied()?;
        self.free.remove(&next);
        self.last = next;
        Some(next)
    }
}

impl WorkerUsers {
    /// The users of a range.
    pub(crate) fn new(range: NumberRange) -> Self {
        let pool = |free| FreeUsers { free, last: 0 };
        let mut workers: BTreeSet<u32> = range.numbers().collect();
        let serving = workers.split_off(&Self::first_serving(range));
        Self { range, workers: pool(workers), serving: pool(serving) }
    }

    /// The first user of devices and arbiters: a number beyond the range, if it is small.
    const fn first_serving(range: NumberRange) -> u32 {
        range.first.saturating_add(range.count - range.count / SERVING)
    }

    /// True if a user id is one of these.
    pub(crate) const fn has(&self, uid: u32) -> bool {
        self.range.contains(uid)
    }

    /// Takes the next free user for a worker.
    pub(crate) fn take(&mut self) -> Option<u32> {
        self.workers.take()
    }

    /// Takes the next free user for a device or an arbiter.
    pub(crate) fn take_for_serving(&mut self) -> Option<u32> {
        self.serving.take().or_else(|| self.workers.take())
    }

    /// Takes this user.
    pub(crate) fn claim(&mut self, uid: u32) {
        self.pool(uid).free.remove(&uid);
    }

    /// Gives a user back.
    pub(crate) fn give_back(&mut self, uid: u32) {
        self.pool(uid).free.insert(uid);
    }

    fn pool(&mut self, uid: u32) -> &mut FreeUsers {
        if uid < Self::first_serving(self.range) { &mut self.workers } else { &mut self.serving }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn user_is_taken_again_after_all_others() {
        let mut users = WorkerUsers::new(NumberRange { first: 10, count: 3 });
        assert_eq!(users.take(), Some(10));
        users.give_back(10);
        assert_eq!([users.take(), users.take(), users.take()], [Some(11), Some(12), Some(10)]);
        assert_eq!(users.take(), None);
        users.give_back(12);
        assert_eq!(users.take(), Some(12));
    }

    #[test]
    fn claimed_user_is_not_taken() {
        let mut users = WorkerUsers::new(NumberRange { first: 10, count: 2 });
        users.claim(10);
        assert_eq!([users.take(), users.take()], [Some(11), None]);
        assert!(users.has(10) && !users.has(12));
    }

    // Promise: F93
    #[test]
    fn workers_leave_users_to_devices_and_arbiters() {
        let mut users = WorkerUsers::new(NumberRange { first: 100, count: 16 });
        let workers: Vec<_> = std::iter::from_fn(|| users.take()).collect();
        assert_eq!(workers, (100..114).collect::<Vec<_>>());
        assert_eq!([users.take_for_serving(), users.take_for_serving()], [Some(114), Some(115)]);
        assert_eq!(users.take_for_serving(), None);
        users.give_back(103);
        assert_eq!(users.take_for_serving(), Some(103));
        users.give_back(115);
        users.claim(115);
        assert_eq!((users.take(), users.take_for_serving()), (None, None));
    }
}
