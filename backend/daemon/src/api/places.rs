//! Limits on one user's share of the management API.
//!
//! The number of connections and of followers of events is bounded, in total and for each user, and some of them are kept for
//! operators. A user has a bounded number of requests in flight, including those of clients that have disconnected; further
//! requests wait in order, and only behind that user's own. Changes by a user who is no operator are limited in rate, since
//! each leaves a line in the audit log and an event.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::caller::Caller;
use sluice_runtime::rate::TokenBucket;

/// Limits of concurrent followers of events.
pub(crate) const FOLLOWERS: Bounds = Bounds { all: 64, others: 48, each: 16 };
/// Limit of concurrent requests of a user.
const IN_FLIGHT: usize = 8;
/// Limit of concurrent requests of an operator.
const IN_FLIGHT_OPERATOR: usize = 32;
/// Burst of changes of a user, and changes per second in the long run.
const CHANGES: (u32, f64) = (100, 5.0);
/// At this number of users, idle ones are removed.
const USERS: usize = 64;

tokio::task_local! {
    /// The user whose request the current task serves.
    static USER: Arc<User>;
}

/// A bounded number of places.
#[derive(Debug)]
pub(crate) struct RequestPlaces {
    bounds: Bounds,
    taken: Mutex<Taken>,
}

/// The bounds of [`RequestPlaces`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bounds {
    /// Limit for all users together.
    pub(crate) all: usize,
    /// Limit for all users who are no operators.
    pub(crate) others: usize,
    /// Limit for each user who is no administrator.
    pub(crate) each: usize,
}

#[derive(Debug, Default)]
struct Taken {
    all: usize,
    others: usize,
    users: BTreeMap<u32, usize>,
}

/// A place, until it is dropped.
#[derive(Debug)]
pub(crate) struct RequestPlace {
    places: Arc<RequestPlaces>,
    uid: u32,
    is_other: bool,
}

impl RequestPlaces {
    pub(crate) fn new(bounds: Bounds) -> Arc<Self> {
        Arc::new(Self { bounds, taken: Mutex::default() })
    }

    /// Takes a place for a caller; `None` if there is none left.
    pub(crate) fn enter(self: &Arc<Self>, caller: &Caller) -> Option<RequestPlace> {
        let Bounds { all, others, each } = self.bounds;
        let (uid, is_other) = (caller.uid, caller.may_operate().is_err());
        let mut taken = lock(&self.taken);
        let own = taken.users.get(&uid).copied().unwrap_or(0);
        if taken.all >= all
            || is_other && taken.others >= others
            || own >= each && caller.may_administer().is_err()
        {
            return None;
        }
        taken.all += 1;
        taken.others += usize::from(is_other);
        *taken.users.entry(uid).or_insert(0) += 1;
        Some(RequestPlace { places: Arc::clone(self), uid, is_other })
    }
}

impl Drop for RequestPlace {
    fn drop(&mut self) {
        let mut taken = lock(&self.places.taken);
        taken.all -= 1;
        taken.others -= usize::from(self.is_other);
        if let Some(count) = taken.users.get_mut(&self.uid) {
            *count -= 1;
            if *count == 0 {
                taken.users.remove(&self.uid);
            }
        }
    }
}

/// The users of recent requests.
#[derive(Debug, Default)]
pub(crate) struct Users(Mutex<BTreeMap<u32, Arc<User>>>);

/// The limits of one user.
#[derive(Debug)]
pub(crate) struct User {
    in_flight: Arc<Semaphore>,
    /// `None` for an operator, whose changes are not bounded.
    changes: Option<Mutex<TokenBucket>>,
}

impl Users {
    /// The entry of the caller's user.
    pub(crate) fn of(&self, caller: &Caller) -> Arc<User> {
        let mut users = lock(&self.0);
        if users.len() >= USERS {
            users.retain(|_, user| !user.is_idle());
        }
        let may_operate = caller.may_operate().is_ok();
        let user = users.entry(caller.uid).or_insert_with(|| Arc::new(User::new(may_operate)));
        if user.changes.is_none() != may_operate {
            // A process of the user is in a group that gives another role.
            return Arc::new(User { in_flight: Arc::clone(&user.in_flight), ..User::new(may_operate) });
        }
        Arc::clone(user)
    }
}

impl User {
    fn new(may_operate: bool) -> Self {
        let in_flight = if may_operate { IN_FLIGHT_OPERATOR } else { IN_FLIGHT };
        let changes =
            (!may_operate).then(|| Mutex::new(TokenBucket::new(CHANGES.1, CHANGES.0, Instant::now())));
        Self { in_flight: Arc::new(Semaphore::new(in_flight)), changes }
    }

    /// Counts a requested change; if there are too many, returns the time to wait.
    pub(crate) fn change(&self) -> Result<(), Duration> {
        self.changes.as_ref().map_or(Ok(()), |changes| lock(changes).take(Instant::now()))
    }

    /// Serves a request of this user.
    pub(crate) async fn serve<T>(self: Arc<Self>, request: impl Future<Output = T>) -> T {
        USER.scope(self, request).await
    }

    /// True if the entry can be removed: no request of the user is in flight, and its rate limit is that of a new user.
    fn is_idle(self: &Arc<Self>) -> bool {
        let is_full = |changes: &Mutex<TokenBucket>| lock(changes).is_full(Instant::now());
        Arc::strong_count(self) == 1
            && Arc::strong_count(&self.in_flight) == 1
            && self.changes.as_ref().is_none_or(is_full)
    }
}

/// Waits for a turn of the user whose request this task serves. Requests get turns in order.
pub(crate) async fn turn() -> Option<OwnedSemaphorePermit> {
    let in_flight = USER.try_with(|user| Arc::clone(&user.in_flight)).ok()?;
    // The semaphore is never closed.
    in_flight.acquire_owned().await.ok()
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use tokio::time::timeout;

    use super::*;
    use crate::caller::tests::{administrator, operator, tenant};

    /// A tenant with another user.
    fn user(uid: u32) -> Caller {
        let mut caller = tenant();
        caller.uid = uid;
        caller
    }

    // Promise: A52
    #[test]
    fn place_kept_for_operators_is_refused_to_others() {
        let places = RequestPlaces::new(Bounds { all: 8, others: 6, each: 4 });
        let enter = |caller: &Caller| places.enter(caller);
        let mut taken: Vec<_> = (0..4).map(|_| enter(&tenant()).expect("a place")).collect();
        assert!(enter(&tenant()).is_none(), "one user takes more than its places");
        let second = user(301);
        taken.extend((0..2).map(|_| enter(&second).expect("a place")));
        assert!(enter(&second).is_none(), "another user takes a place of operators");
        taken.push(enter(&operator()).expect("a place"));
        taken.push(enter(&administrator()).expect("a place"));
        assert!(enter(&administrator()).is_none(), "more places are taken than exist");
        taken.truncate(1);
        assert!(enter(&second).is_some() && enter(&operator()).is_some());
    }

    // Promise: A52
    #[tokio::test]
    async fn request_waits_for_requests_of_the_same_user_only() {
        let users = Users::default();
        let of = |caller: &Caller| users.of(caller).serve(turn());
        let mut turns = Vec::new();
        for _ in 0..IN_FLIGHT {
            turns.push(of(&tenant()).await.expect("a turn"));
        }
        let mut more = std::pin::pin!(of(&tenant()));
        assert!(
            timeout(Duration::ZERO, &mut more).await.is_err(),
            "a user has more in flight than its bound"
        );
        assert!(of(&operator()).await.is_some() && of(&user(301)).await.is_some());
        // Work that continues without its client holds its turn.
        drop(turns.pop());
        assert!(timeout(Duration::ZERO, &mut more).await.is_ok());
        assert!(turn().await.is_none(), "a task without a user gets a turn");
    }

    // Promise: A53
    #[test]
    fn changes_of_a_tenant_are_limited_in_rate_and_those_of_an_operator_are_not() {
        let users = Users::default();
        let start = Instant::now();
        let made = |caller: &Caller| (0..1000).filter(|_| users.of(caller).change().is_ok()).count();
        let (burst, rate) = CHANGES;
        let number = |made: usize| f64::from(u32::try_from(made).expect("small"));
        // With those that a slow machine lets come meanwhile.
        let since = |start: Instant| start.elapsed().as_secs_f64() * rate + 1.0;
        let first = number(made(&tenant())) - f64::from(burst);
        assert!((0.0..=since(start)).contains(&first), "{first} changes beyond {burst}");
        assert_eq!(made(&operator()), 1000);
        // A user that has used up its changes gets no new ones by being removed.
        for uid in 1000..2000 {
            users.of(&user(uid));
        }
        let more = number(made(&tenant()));
        assert!(more <= since(start), "{more} further changes");
        assert!(lock(&users.0).len() <= USERS + 1);
    }
}
