//! The users for workers.

use std::collections::BTreeSet;

use sluice_messages::launch::NumberRange;

/// Users, each for one process at a time. A user that becomes free is taken again only after all others, so that what a process
/// may leave behind under its user is gone before the next process has it.
#[derive(Debug)]
pub(crate) struct WorkerUsers {
    range: NumberRange,
    free: BTreeSet<u32>,
    /// The user that was taken last.
    last: u32,
}

impl WorkerUsers {
    /// The users of a range.
    pub(crate) fn new(range: NumberRange) -> Self {
        Self { range, free: range.numbers().collect(), last: 0 }
    }

    /// True if a user id is one of these.
    pub(crate) const fn has(&self, uid: u32) -> bool {
        self.range.contains(uid)
    }

    /// Takes the next free user.
    pub(crate) fn take(&mut self) -> Option<u32> {
        let next = self.free.range(self.last.saturating_add(1)..).next().or(self.free.first()).copied()?;
        self.free.remove(&next);
        self.last = next;
        Some(next)
    }

    /// Takes this user.
    pub(crate) fn claim(&mut self, uid: u32) {
        self.free.remove(&uid);
    }

    /// Gives a user back.
    pub(crate) fn give_back(&mut self, uid: u32) {
        self.free.insert(uid);
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
}
