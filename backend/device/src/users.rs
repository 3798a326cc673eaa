//! Shares of one user's programs in a device that serves programs.
//!
//! Programs that connect to a device share its sessions, its connections and its host memory. Each user has a share of them, so
//! that the programs of one user never take the part of another user. The user is the one that the kernel reports for a
//! connection's other end; programs of different containers that are the same user of the host have one share together.

use core::sync::atomic::{AtomicU64, Ordering};
use sluice_protocol::limits;
use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError, Weak},
};

/// What is shared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Connections that are served.
    Connections,
    /// Connections that wait for one of the user's own to be over.
    Arrivals,
    /// Sessions, those included whose workers are being waited for.
    Sessions,
    /// virtio-gpu contexts.
    Contexts,
    /// virtio-gpu resources.
    Resources,
    /// Runs of pages of all resources.
    Runs,
    /// Pages of all resources.
    Pages,
    /// Commands that are answered late.
    Withheld,
}

const KINDS: usize = Kind::Withheld as usize + 1;

/// What one user may have of each.
const LIMITS: [u64; KINDS] = [
    limits::USER_CONNECTIONS,
    limits::USER_ARRIVALS,
    limits::USER_SESSIONS,
    limits::USER_GPU_CONTEXTS,
    limits::USER_RESOURCES,
    limits::USER_RUNS,
    limits::USER_PAGES,
    limits::USER_WITHHELD,
];

impl Kind {
    /// What one user may have of it.
    #[must_use]
    pub const fn limit(self) -> u64 {
        #[expect(clippy::indexing_slicing, reason = "a number below the length")]
        LIMITS[self as usize]
    }
}

/// What one user has.
#[derive(Debug)]
pub struct Share {
    user: u32,
    have: [AtomicU64; KINDS],
}

impl Share {
    /// That of a user that has nothing yet.
    #[must_use]
    pub const fn new(user: u32) -> Share {
        Share { user, have: [const { AtomicU64::new(0) }; KINDS] }
    }

    /// Whose it is.
    #[must_use]
    pub const fn user(&self) -> u32 {
        self.user
    }

    fn counter(&self, kind: Kind) -> &AtomicU64 {
        #[expect(clippy::indexing_slicing, reason = "a number below the length")]
        &self.have[kind as usize]
    }

    /// Takes one of a kind until what is answered is dropped, if the user may have another.
    #[must_use]
    pub fn take(self: &Arc<Share>, kind: Kind) -> Option<Taken> {
        let more = |have: u64| have.checked_add(1).filter(|have| *have <= kind.limit());
        let taken = self.counter(kind).fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).is_ok();
        taken.then(|| Taken { share: Arc::clone(self), kind })
    }

    /// How many of a kind the user has.
    #[must_use]
    pub fn have(&self, kind: Kind) -> u64 {
        self.counter(kind).load(Ordering::Relaxed)
    }

    /// Whether the user may have no more of a kind.
    #[must_use]
    pub fn is_full(&self, kind: Kind) -> bool {
        self.have(kind) >= kind.limit()
    }
}

/// One of something, which is given back when this is dropped.
#[derive(Debug)]
pub struct Taken {
    share: Arc<Share>,
    kind: Kind,
}

impl Drop for Taken {
    fn drop(&mut self) {
        self.share.counter(self.kind).fetch_sub(1, Ordering::Relaxed);
    }
}

/// What one connection has of its user's share, of that which is counted after each of its commands.
#[derive(Debug)]
pub struct Account {
    share: Arc<Share>,
    have: [u64; KINDS],
}

impl Account {
    /// An empty account.
    #[must_use]
    pub const fn new(share: Arc<Share>) -> Account {
        Account { share, have: [0; KINDS] }
    }

    /// The user's share.
    #[must_use]
    pub const fn share(&self) -> &Arc<Share> {
        &self.share
    }

    /// Says how many of a kind the connection has now.
    pub fn settle(&mut self, kind: Kind, now: u64) {
        #[expect(clippy::indexing_slicing, reason = "a number below the length")]
        let before = core::mem::replace(&mut self.have[kind as usize], now);
        // The difference, which may be negative: the sum over all connections wraps back to what it is.
        self.share.counter(kind).fetch_add(now.wrapping_sub(before), Ordering::Relaxed);
    }
}

impl Drop for Account {
    fn drop(&mut self) {
        for (counter, have) in self.share.have.iter().zip(&self.have) {
            counter.fetch_sub(*have, Ordering::Relaxed);
        }
    }
}

/// The users that are connected.
#[derive(Debug, Default)]
pub struct Users(Mutex<HashMap<u32, Weak<Share>>>);

impl Users {
    /// A user's share.
    #[must_use]
    pub fn share(&self, user: u32) -> Arc<Share> {
        let mut users = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(share) = users.get(&user).and_then(Weak::upgrade) {
            return share;
        }
        // Those that left are forgotten by the next one that comes.
        users.retain(|_, share| share.strong_count() > 0);
        let share = Arc::new(Share::new(user));
        users.insert(user, Arc::downgrade(&share));
        share
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test")]
    use super::*;

    // Promise: V32
    #[test]
    fn a_user_at_its_limit_takes_nothing_from_another() {
        let users = Users::default();
        let (one, two) = (users.share(1000), users.share(1001));
        assert!(Arc::ptr_eq(&one, &users.share(1000)), "all programs of a user have one share");
        let taken: Vec<Taken> = core::iter::from_fn(|| one.take(Kind::Sessions)).collect();
        assert_eq!(taken.len() as u64, Kind::Sessions.limit());
        assert!(two.take(Kind::Sessions).is_some());
        drop(taken);
        assert!(one.take(Kind::Sessions).is_some(), "what is over counts no more");
        drop(one);
        drop(two);
        drop(users.share(1002));
        drop(users.share(1003));
        assert_eq!(users.0.lock().unwrap().len(), 1, "users that left are forgotten");
    }

    // Promise: V32
    #[test]
    fn connections_of_a_user_are_counted_together() {
        let share = Arc::new(Share::new(1000));
        let (mut one, mut two) = (Account::new(Arc::clone(&share)), Account::new(Arc::clone(&share)));
        one.settle(Kind::Resources, Kind::Resources.limit() - 1);
        assert!(!share.is_full(Kind::Resources));
        two.settle(Kind::Resources, 1);
        assert!(share.is_full(Kind::Resources));
        one.settle(Kind::Resources, 5);
        assert!(!share.is_full(Kind::Resources));
        two.settle(Kind::Resources, 0);
        drop(one);
        assert_eq!(share.have(Kind::Resources), 0);
    }

    #[test]
    fn no_user_may_have_more_than_a_third_of_a_device() {
        assert!(
            3 * (Kind::Connections.limit() + Kind::Arrivals.limit()) <= limits::DIRECT_CONNECTIONS as u64
        );
        assert!(3 * Kind::Sessions.limit() <= limits::SESSIONS as u64);
    }
}
