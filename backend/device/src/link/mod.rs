//! The link to `sluiced`: requests for workers go up, workers come down.
//!
//! Devices put messages in its queue and take answers from an [`Inbox`]; they never wait, so `sluiced` may be slow, stopped or gone
//! without an effect on the data path. It owns the socket to `sluiced`, one for the process, and one thread for it ([`broker`]),
//! whatever the number of connections. It must never lose a worker: those whose device is gone, or which came too late, are
//! killed and waited for here, so that `sluiced` gets a report of the end of every worker that it sent.
//!
//! A session counts until `sluiced` has answered, even if its device has gone meanwhile: otherwise clients that come and go
//! could make this process request more of `sluiced` than a device may, and `sluiced` then ends the link of all sessions.
//!
//! The resources of a process are free when it has exited, so a worker is requested only when the workers of the sessions that
//! were over by then are gone, and with them the memory they had been lent.

mod broker;
mod inbox;

use crate::users::{ResourceKind, TakenShare, UserShare};
pub use broker::serve;
pub use inbox::{Arrival, Inbox};
use rustix::{
    event::{EventfdFlags, eventfd},
    fd::OwnedFd,
    io::Errno,
};
use sluice_protocol::limits;
use sluice_runtime::endable::EndableProcess;
use std::{
    any::Any,
    collections::{HashMap, VecDeque},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering},
    },
};

/// A value that must be kept until a worker is gone.
pub type KeepAlive = Arc<dyn Any + Send + Sync>;

/// A device's request to the link.
#[derive(Debug)]
enum LinkRequest {
    /// A worker is wanted for a session of a user; the answer goes to the inbox.
    Wanted(u32, u32, Weak<Inbox>),
    /// A session's worker was asked to exit, or was killed.
    Ending(u32),
    /// A session's worker is gone.
    Ended(u32),
    /// A worker to kill and wait for.
    Reap(DeadSession),
    /// Causes a panic in the thread, for a test.
    #[cfg(test)]
    Panic,
}

/// A killed worker that is not gone yet.
#[derive(Debug)]
struct DeadSession {
    session: u32,
    process: EndableProcess,
    /// Dropped when the worker is gone.
    _kept: Option<KeepAlive>,
}

/// The devices' end of the link.
#[derive(Debug)]
pub struct Link {
    requests: Mutex<VecDeque<LinkRequest>>,
    event: OwnedFd,
    connected: AtomicBool,
    next: AtomicU32,
    front_ends: AtomicUsize,
    sessions: AtomicUsize,
    /// Sessions that count in their users' shares.
    taken: Mutex<HashMap<u32, TakenShare>>,
}

/// A front-end's connection, which keeps the process alive when `sluiced` is gone.
#[derive(Debug)]
pub struct ConnectedFrontEnd(Arc<Link>);

impl Drop for ConnectedFrontEnd {
    fn drop(&mut self) {
        self.0.front_ends.fetch_sub(1, Ordering::Relaxed);
        // The thread of the link ends the process if this was the last one.
        notify(&self.0.event);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // The locks protect lists only, which a panic elsewhere leaves intact.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn notify(event: &OwnedFd) {
    // EAGAIN means that the counter is full, so the event is pending already.
    let _ = rustix::io::write(event, &1u64.to_ne_bytes());
}

impl Link {
    /// Creates a link; `connected` if a `sluiced` is at its other end.
    ///
    /// # Errors
    /// The kernel's error if it has no descriptor.
    pub fn new(connected: bool) -> Result<Link, Errno> {
        Ok(Link {
            requests: Mutex::default(),
            event: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            connected: AtomicBool::new(connected),
            next: AtomicU32::new(1),
            front_ends: AtomicUsize::new(0),
            sessions: AtomicUsize::new(0),
            taken: Mutex::default(),
        })
    }

    /// Counts a front-end until the result is dropped.
    #[must_use]
    pub fn front_end(self: &Arc<Self>) -> ConnectedFrontEnd {
        self.front_ends.fetch_add(1, Ordering::Relaxed);
        ConnectedFrontEnd(Arc::clone(self))
    }

    /// Returns a number for a new session, unless there are too many, `user`'s share is full, or no `sluiced` could give it a worker.
    pub fn open(&self, user: Option<&Arc<UserShare>>) -> Option<u32> {
        if !self.connected.load(Ordering::Acquire) {
            return None;
        }
        let taken = match user {
            Some(user) => Some(user.take(ResourceKind::Sessions)?),
            None => None,
        };
        if self.sessions.fetch_add(1, Ordering::Relaxed) >= limits::SESSIONS {
            self.sessions.fetch_sub(1, Ordering::Relaxed);
            return None;
        }
        let session = self.next.fetch_add(1, Ordering::Relaxed);
        if let Some(taken) = taken {
            lock(&self.taken).insert(session, taken);
        }
        Some(session)
    }

    /// Ends a session.
    pub fn close(&self, session: u32) {
        self.sessions.fetch_sub(1, Ordering::Relaxed);
        drop(lock(&self.taken).remove(&session));
    }

    /// Number of sessions of this process.
    #[must_use]
    pub fn sessions(&self) -> usize {
        self.sessions.load(Ordering::Relaxed)
    }

    /// Requests a worker for a session of a user.
    pub fn wanted(&self, session: u32, user: u32, inbox: &Arc<Inbox>) {
        self.push(LinkRequest::Wanted(session, user, Arc::downgrade(inbox)));
    }

    /// Reports that a worker was asked to exit, or killed.
    pub fn ending(&self, session: u32) {
        self.push(LinkRequest::Ending(session));
    }

    /// Reports that a worker is gone.
    pub fn ended(&self, session: u32) {
        self.push(LinkRequest::Ended(session));
    }

    /// Kills a worker and reports when it is gone; `kept` is dropped then.
    pub fn reap(&self, session: u32, process: EndableProcess, kept: Option<KeepAlive>) {
        self.push(LinkRequest::Reap(DeadSession { session, process, _kept: kept }));
    }

    /// Handles an answer of `sluiced` for a session whose device is gone.
    pub fn turn_away(&self, arrival: Arrival) {
        let (Arrival::Worker { session, .. } | Arrival::None { session, .. }) = arrival;
        self.close(session);
        self.bury_arrival(arrival);
    }

    /// Kills and waits for a worker that came for an ended session.
    pub fn bury_arrival(&self, arrival: Arrival) {
        if let Arrival::Worker { session, process, .. } = arrival {
            self.reap(session, process, None);
        }
    }

    /// Does one round of the thread without `sluiced`, for a fuzz target and for tests.
    #[cfg(any(test, fuzzing))]
    pub fn round(&self) {
        notify(&self.event);
        broker::Broker::new(self, None).round();
    }

    fn next_request(&self) -> Option<LinkRequest> {
        lock(&self.requests).pop_front()
    }

    fn push(&self, request: LinkRequest) {
        lock(&self.requests).push_back(request);
        notify(&self.event);
    }
}
