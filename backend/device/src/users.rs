//! Shares of one user's programs in a device that serves programs.
//!
//! Programs that connect to a device share its sessions, its connections and its host memory. Each user has a share of them, so
//! that the programs of one user never take the part of another user. The kernel reports the user of a connection's other end;
//! programs of different containers that are the same user of the host have one share together.

use core::sync::atomic::{AtomicU64, Ordering};
use sluice_protocol::limits;
use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError, Weak},
};

/// The kinds of resources that are shared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ResourceKind {
    /// Connections that are served.
    Connections,
    /// Connections that wait for another one of the same user to end.
    Arrivals,
    /// Sessions, including those whose workers are not gone yet.
    Sessions,
    /// virtio-gpu contexts.
    Contexts,
    /// virtio-gpu resources.
    Resources,
    /// Page runs of all resources.
    Runs,
    /// Pages of all resources.
    Pages,
    /// Commands whose answers are withheld.
    Withheld,
}

const KINDS: usize = ResourceKind::Withheld as usize + 1;

/// One user's limit of each kind.
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

impl ResourceKind {
    /// One user's limit of this kind.
    #[must_use]
    pub const fn limit(self) -> u64 {
        #[expect(clippy::indexing_slicing, reason = "a number below the length")]
        LIMITS[self as usize]
    }
}

/// The use of one user.
#[derive(Debug)]
pub struct UserShare {
    user: u32,
    have: [AtomicU64; KINDS],
}

impl UserShare {
    /// The share of a user without any use.
    #[must_use]
    pub const fn new(user: u32) -> UserShare {
        UserShare { user, have: [const { AtomicU64::new(0) }; KINDS] }
    }

    /// The user's number.
    #[must_use]
    pub const fn user(&self) -> u32 {
        self.user
    }

    fn counter(&self, kind: ResourceKind) -> &AtomicU64 {
        #[expect(clippy::indexing_slicing, reason = "a number below the length")]
        &self.have[kind as usize]
    }

    /// Takes one of a kind until the returned value is dropped, if the user may have one more.
    #[must_use]
    pub fn take(self: &Arc<UserShare>, kind: ResourceKind) -> Option<TakenShare> {
        let more = |have: u64| have.checked_add(1).filter(|have| *have <= kind.limit());
        let taken = self.counter(kind).fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).is_ok();
        taken.then(|| TakenShare { share: Arc::clone(self), kind })
    }

    /// The user's number of a kind.
    #[must_use]
    pub fn have(&self, kind: ResourceKind) -> u64 {
        self.counter(kind).load(Ordering::Relaxed)
    }

    /// True if the user may have no more of a kind.
    #[must_use]
    pub fn is_full(&self, kind: ResourceKind) -> bool {
        self.have(kind) >= kind.limit()
    }
}

/// One of a kind, given back when this is dropped.
#[derive(Debug)]
pub struct TakenShare {
    share: Arc<UserShare>,
    kind: ResourceKind,
}

impl Drop for TakenShare {
    fn drop(&mut self) {
        self.share.counter(self.kind).fetch_sub(1, Ordering::Relaxed);
    }
}

/// One connection's part of its user's share, for the kinds that are counted after each of its commands.
#[derive(Debug)]
pub struct ConnectionAccount {
    share: Arc<UserShare>,
    have: [u64; KINDS],
}

impl ConnectionAccount {
    /// Creates an empty account.
    #[must_use]
    pub const fn new(share: Arc<UserShare>) -> ConnectionAccount {
        ConnectionAccount { share, have: [0; KINDS] }
    }

    /// The user's share.
    #[must_use]
    pub const fn share(&self) -> &Arc<UserShare> {
        &self.share
    }

    /// Sets the connection's present number of a kind.
    pub fn settle(&mut self, kind: ResourceKind, now: u64) {
        #[expect(clippy::indexing_slicing, reason = "a number below the length")]
        let before = core::mem::replace(&mut self.have[kind as usize], now);
        // The difference may be negative: the sum over all connections wraps back to the right value.
        self.share.counter(kind).fetch_add(now.wrapping_sub(before), Ordering::Relaxed);
    }
}

impl Drop for ConnectionAccount {
    fn drop(&mut self) {
        for (counter, have) in self.share.have.iter().zip(&self.have) {
            counter.fetch_sub(*have, Ordering::Relaxed);
        }
    }
}

/// The connected users.
#[derive(Debug, Default)]
pub struct Users(Mutex<HashMap<u32, Weak<UserShare>>>);

impl Users {
    /// A user's share.
    #[must_use]
    pub fn share(&self, user: u32) -> Arc<UserShare> {
        let mut users = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(share) = users.get(&user).and_then(Weak::upgrade) {
            return share;
        }
        // Users that have left are removed when the next one comes.
        users.retain(|_, share| share.strong_count() > 0);
        let share = Arc::new(UserShare::new(user));
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
    fn user_share_at_its_limit_takes_nothing_from_another_user() {
        let users = Users::default();
        let (one, two) = (users.share(1000), users.share(1001));
        assert!(Arc::ptr_eq(&one, &users.share(1000)), "all programs of a user have one share");
        let taken: Vec<TakenShare> = core::iter::from_fn(|| one.take(ResourceKind::Sessions)).collect();
        assert_eq!(taken.len() as u64, ResourceKind::Sessions.limit());
        assert!(two.take(ResourceKind::Sessions).is_some());
        drop(taken);
        assert!(one.take(ResourceKind::Sessions).is_some(), "what is over counts no more");
        drop(one);
        drop(two);
        drop(users.share(1002));
        drop(users.share(1003));
        assert_eq!(users.0.lock().unwrap().len(), 1, "users that left are forgotten");
    }

    // Promise: V32
    #[test]
    fn connections_of_a_user_are_counted_together() {
        let share = Arc::new(UserShare::new(1000));
        let (mut one, mut two) =
            (ConnectionAccount::new(Arc::clone(&share)), ConnectionAccount::new(Arc::clone(&share)));
        one.settle(ResourceKind::Resources, ResourceKind::Resources.limit() - 1);
        assert!(!share.is_full(ResourceKind::Resources));
        two.settle(ResourceKind::Resources, 1);
        assert!(share.is_full(ResourceKind::Resources));
        one.settle(ResourceKind::Resources, 5);
        assert!(!share.is_full(ResourceKind::Resources));
        two.settle(ResourceKind::Resources, 0);
        drop(one);
        assert_eq!(share.have(ResourceKind::Resources), 0);
    }

    #[test]
    fn user_limits_are_at_most_a_third_of_the_device_limits() {
        assert!(
            3 * (ResourceKind::Connections.limit() + ResourceKind::Arrivals.limit())
                <= limits::DIRECT_CONNECTIONS as u64
        );
        assert!(3 * ResourceKind::Sessions.limit() <= limits::SESSIONS as u64);
    }
}
