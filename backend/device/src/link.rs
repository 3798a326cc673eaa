//! The link to `sluiced`: requests for workers go up, workers come down.
//!
//! One socket per process, one thread for it, however many connections there are. Devices only ever put messages in a queue
//! here, so `sluiced` may be slow, stopped or gone without an effect on the data path. The thread also reaps workers: those
//! whose device is gone, or which came too late, are killed and waited for here, so that `sluiced` learns of the end of every
//! worker it has sent.
//!
//! A session counts until `sluiced` has answered, even if its device has gone meanwhile: otherwise clients that come and go
//! could make this process request more of `sluiced` than a device may, and `sluiced` then ends the link of all sessions.
//!
//! The resources of a process are free when it has exited, so a worker is requested only when the workers of the sessions that
//! were over by then are gone, and with them the memory they had been lent.

use crate::{
    users::{Kind, Share, Taken},
    vring,
};
use rustix::{
    event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll},
    fd::{AsFd, BorrowedFd, OwnedFd},
    fs::OFlags,
    io::Errno,
};
use sluice_messages::{
    channel::{Channel, ReceiveError, Received},
    control::{FromDevice, ToDevice},
};
use sluice_protocol::limits;
use sluice_runtime::{limited, process::kill};
use std::{
    any::Any,
    collections::{HashMap, HashSet, VecDeque},
    fs::File,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

/// How long a session waits at most for the workers of those that were over before it began.
const PREDECESSORS: Duration = Duration::from_secs(5);
/// How often it is looked whether connections whose front-end has gone are cleared up.
const LOOK: Timespec = Timespec { tv_sec: 0, tv_nsec: 1_000_000 };
/// How long the thread rests after a panic, so that one which comes back each time costs no processor.
const REST: Duration = Duration::from_millis(100);

/// What `sluiced` answered about a session.
#[derive(Debug)]
pub enum Arrival {
    /// A worker.
    Worker {
        /// The session.
        session: u32,
        /// Its control socket.
        socket: OwnedFd,
        /// Its pidfd.
        pidfd: OwnedFd,
    },
    /// There will be none.
    None {
        /// The session.
        session: u32,
        /// The CUresult for the guest.
        error: u32,
    },
}

/// What must not be given back before a worker is gone.
pub type Kept = Arc<dyn Any + Send + Sync>;

/// Where one device finds what came for it.
#[derive(Debug)]
pub struct Inbox {
    /// `None` once the device is gone.
    arrivals: Mutex<Option<Vec<Arrival>>>,
    event: OwnedFd,
}

impl Inbox {
    /// An empty inbox.
    ///
    /// # Errors
    /// The kernel's.
    pub fn new() -> Result<Inbox, Errno> {
        Ok(Inbox {
            arrivals: Mutex::new(Some(Vec::new())),
            event: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
        })
    }

    /// Written each time something arrives.
    #[must_use]
    pub fn event(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }

    /// Puts something in.
    ///
    /// # Errors
    /// The thing itself, if it is closed.
    pub fn put(&self, arrival: Arrival) -> Result<(), Arrival> {
        let Some(arrivals) = &mut *lock(&self.arrivals) else { return Err(arrival) };
        arrivals.push(arrival);
        notify(&self.event);
        Ok(())
    }

    /// Takes everything out.
    pub fn take(&self) -> Vec<Arrival> {
        lock(&self.arrivals).as_mut().map(core::mem::take).unwrap_or_default()
    }

    /// Takes everything out for the last time.
    pub fn close(&self) -> Vec<Arrival> {
        lock(&self.arrivals).take().unwrap_or_default()
    }
}

/// What a device wants from the link.
#[derive(Debug)]
enum Request {
    /// A worker for a session of a user; the answer goes to the inbox.
    Wanted(u32, u32, Weak<Inbox>),
    /// A session's worker was asked to exit, or killed.
    Ending(u32),
    /// A session's worker is gone.
    Ended(u32),
    /// A worker that is to be killed and waited for.
    Bury(Grave),
    /// Stands for a fault in the thread.
    #[cfg(test)]
    Panic,
}

/// A worker that is killed and not gone.
#[derive(Debug)]
struct Grave {
    session: u32,
    pidfd: OwnedFd,
    /// Dropped when it is gone.
    _kept: Option<Kept>,
}

/// The devices' end of the link.
#[derive(Debug)]
pub struct Link {
    requests: Mutex<VecDeque<Request>>,
    event: OwnedFd,
    connected: AtomicBool,
    next: AtomicU32,
    sessions: AtomicUsize,
    /// Sessions that count as their users', too.
    taken: Mutex<HashMap<u32, Taken>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // What is under these locks is a list; a panic elsewhere leaves it whole.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn notify(event: &OwnedFd) {
    // EAGAIN would mean that the counter is full, and then the event is pending anyway.
    let _ = rustix::io::write(event, &1u64.to_ne_bytes());
}

impl Link {
    /// A link; `connected` when there is a `sluiced` at its other end.
    ///
    /// # Errors
    /// The kernel's.
    pub fn new(connected: bool) -> Result<Link, Errno> {
        Ok(Link {
            requests: Mutex::default(),
            event: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            connected: AtomicBool::new(connected),
            next: AtomicU32::new(1),
            sessions: AtomicUsize::new(0),
            taken: Mutex::default(),
        })
    }

    /// A number for a new session, unless there are too many or no `sluiced` could give it a worker. `user`, if there is one, has
    /// room for it.
    pub fn open(&self, user: Option<&Arc<Share>>) -> Option<u32> {
        if !self.connected.load(Ordering::Acquire) {
            return None;
        }
        let taken = match user {
            Some(user) => Some(user.take(Kind::Sessions)?),
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

    /// A session is over.
    pub fn close(&self, session: u32) {
        self.sessions.fetch_sub(1, Ordering::Relaxed);
        drop(lock(&self.taken).remove(&session));
    }

    /// Sessions of this process.
    #[must_use]
    pub fn sessions(&self) -> usize {
        self.sessions.load(Ordering::Relaxed)
    }

    /// Asks for a worker for a session of a user.
    pub fn wanted(&self, session: u32, user: u32, inbox: &Arc<Inbox>) {
        self.push(Request::Wanted(session, user, Arc::downgrade(inbox)));
    }

    /// Tells that a worker was asked to exit, or killed.
    pub fn ending(&self, session: u32) {
        self.push(Request::Ending(session));
    }

    /// Tells that a worker is gone.
    pub fn ended(&self, session: u32) {
        self.push(Request::Ended(session));
    }

    /// Kills a worker and tells when it is gone; what is kept until then is dropped.
    pub fn bury(&self, session: u32, pidfd: OwnedFd, kept: Option<Kept>) {
        self.push(Request::Bury(Grave { session, pidfd, _kept: kept }));
    }

    /// What `sluiced` has answered about a session whose device is gone.
    pub fn turn_away(&self, arrival: Arrival) {
        let (Arrival::Worker { session, .. } | Arrival::None { session, .. }) = arrival;
        self.close(session);
        self.bury_arrival(arrival);
    }

    /// Buries a worker that came for a session which is over.
    pub fn bury_arrival(&self, arrival: Arrival) {
        if let Arrival::Worker { session, pidfd, .. } = arrival {
            self.bury(session, pidfd, None);
        }
    }

    /// Does once what the thread does, where there is no `sluiced`; for a fuzz target and for tests.
    #[cfg(any(test, fuzzing))]
    pub fn round(&self) {
        notify(&self.event);
        Broker::new(self, None).round();
    }

    fn next_request(&self) -> Option<Request> {
        lock(&self.requests).pop_front()
    }

    fn push(&self, request: Request) {
        lock(&self.requests).push_back(request);
        notify(&self.event);
    }
}

/// The thread's state.
struct Broker<'l> {
    link: &'l Link,
    socket: Option<Channel<ToDevice, FromDevice>>,
    /// Which session's worker is waited for, whose it is, and where.
    wanted: HashMap<u32, (u32, Weak<Inbox>)>,
    /// Messages the socket had no room for; where they are many no worker is asked for, so bounded by the sessions.
    unsent: VecDeque<FromDevice>,
    /// Workers that are being waited for.
    graves: Vec<Grave>,
    /// Sessions whose workers are to exit and have not, those in `graves` left out.
    ending: HashSet<u32>,
    /// Sessions that wait for their predecessors' ends.
    held: VecDeque<Held>,
}

/// A session whose worker is not asked for yet.
#[derive(Debug)]
struct Held {
    session: u32,
    user: u32,
    inbox: Weak<Inbox>,
    after: After,
    since: Instant,
}

/// What a session waits for. What ends later is not waited for, so that it cannot wait for ever where others come and go.
#[derive(Debug)]
enum After {
    /// Connections whose front-ends have gone: which workers they had is known when they are cleared up.
    Connections(Vec<Weak<File>>),
    /// Workers.
    Workers(HashSet<u32>),
}

/// Serves a link until the process ends; `socket` is the control socket, if there is one. A panic costs the one request or session
/// that was looked at.
pub fn serve(link: &Link, socket: Option<OwnedFd>) {
    if let Some(socket) = &socket
        && let Err(error) = rustix::fs::fcntl_setfl(socket, OFlags::NONBLOCK)
    {
        tracing::error!(%error, "the control socket cannot be made non-blocking");
    }
    let mut broker = Broker::new(link, socket);
    loop {
        // Requests and sessions are taken off their lists one by one, so what is left in them is whole.
        if catch_unwind(AssertUnwindSafe(|| broker.round())).is_err() {
            limited!(error, "the link to sluiced panicked; it goes on");
            std::thread::sleep(REST);
            // Of requests that are left it was told already.
            notify(&link.event);
        }
    }
}

impl<'l> Broker<'l> {
    fn new(link: &'l Link, socket: Option<OwnedFd>) -> Broker<'l> {
        Broker {
            link,
            socket: socket.map(Channel::new),
            wanted: HashMap::new(),
            unsent: VecDeque::new(),
            graves: Vec::new(),
            ending: HashSet::new(),
            held: VecDeque::new(),
        }
    }

    fn round(&mut self) {
        let mut wanted = PollFlags::IN;
        wanted.set(PollFlags::OUT, !self.unsent.is_empty());
        let mut fds = vec![PollFd::new(&self.link.event, PollFlags::IN)];
        fds.extend(self.graves.iter().map(|grave| PollFd::new(&grave.pidfd, PollFlags::IN)));
        fds.extend(self.socket.iter().map(|socket| PollFd::new(socket, wanted)));
        let timeout = (!self.held.is_empty()).then_some(&LOOK);
        if let Err(error) = poll(&mut fds, timeout)
            && error != Errno::INTR
        {
            limited!(error, %error, "poll");
        }
        let gone: Vec<bool> = fds.iter().skip(1).map(|fd| !fd.revents().is_empty()).collect();
        drop(fds);
        let mut gone = gone.into_iter();
        let unsent = &mut self.unsent;
        self.graves.retain(|grave| {
            let gone = gone.next().unwrap_or(false);
            if gone {
                unsent.push_back(FromDevice::SessionEnded { session: grave.session });
            }
            !gone
        });
        let mut counter = [0; 8];
        // EAGAIN when nothing was requested.
        let _ = rustix::io::read(&self.link.event, &mut counter);
        // Those that come meanwhile are for the next round.
        let due = lock(&self.link.requests).len();
        for _ in 0..due {
            let Some(request) = self.link.next_request() else { break };
            self.take(request);
        }
        self.ask();
        self.send();
        self.receive();
    }

    fn take(&mut self, request: Request) {
        match request {
            Request::Wanted(session, user, inbox) if self.socket.is_some() => {
                let after = After::Connections(vring::left());
                self.held.push_back(Held { session, user, inbox, after, since: Instant::now() });
            }
            Request::Wanted(session, _, inbox) => self.refuse(session, &inbox),
            Request::Ending(session) => {
                self.ending.insert(session);
            }
            Request::Ended(session) => {
                self.ending.remove(&session);
                self.unsent.push_back(FromDevice::SessionEnded { session });
            }
            Request::Bury(grave) => self.bury(grave),
            #[cfg(test)]
            Request::Panic => std::panic::resume_unwind(Box::new("a fault in the thread")),
        }
    }

    /// Asks for the workers of sessions whose predecessors are gone.
    fn ask(&mut self) {
        for _ in 0..self.held.len() {
            let Some(mut held) = self.held.pop_front() else { break };
            // Its connection has gone: nobody wants that worker any more.
            if held.inbox.strong_count() == 0 {
                self.link.close(held.session);
                continue;
            }
            let graves = || self.graves.iter().map(|grave| grave.session);
            if let After::Connections(connections) = &mut held.after {
                connections.retain(|connection| connection.strong_count() > 0);
                if connections.is_empty() {
                    held.after = After::Workers(graves().chain(self.ending.iter().copied()).collect());
                }
            }
            if let After::Workers(workers) = &mut held.after {
                workers.retain(|worker| {
                    self.ending.contains(worker) || graves().any(|session| session == *worker)
                });
            }
            let over = matches!(&held.after, After::Workers(workers) if workers.is_empty());
            let late = held.since.elapsed() >= PREDECESSORS;
            if late && !over {
                limited!(
                    warn,
                    session = held.session,
                    "workers of earlier sessions are not gone; a new one begins beside them"
                );
            }
            if (over || late) && self.unsent.len() < limits::SESSIONS {
                let Held { session, user, inbox, .. } = held;
                self.wanted.insert(session, (user, inbox));
                self.unsent.push_back(FromDevice::WorkerWanted { session, user });
            } else {
                self.held.push_back(held);
            }
        }
    }

    fn bury(&mut self, grave: Grave) {
        self.ending.remove(&grave.session);
        kill(grave.pidfd.as_fd());
        self.graves.push(grave);
    }

    fn send(&mut self) {
        while let (Some(socket), Some(message)) = (&self.socket, self.unsent.front()) {
            match socket.send(message, &[]) {
                Ok(()) => {
                    self.unsent.pop_front();
                }
                Err(Errno::AGAIN) => return,
                Err(error) => {
                    tracing::error!(%error, "sending to sluiced");
                    return self.disconnect();
                }
            }
        }
        if self.socket.is_none() {
            self.unsent.clear();
        }
    }

    fn receive(&mut self) {
        while let Some(socket) = &self.socket {
            match socket.receive() {
                Ok(Received::Message(message, descriptors)) => self.arrived(message, descriptors),
                Ok(Received::Empty) => return,
                Ok(Received::Closed) => return self.disconnect(),
                Err(error @ (ReceiveError::Failed(_) | ReceiveError::Cut)) => {
                    tracing::error!(%error, "receiving from sluiced");
                    return self.disconnect();
                }
                Err(error) => tracing::error!(%error, "not a message of sluiced"),
            }
        }
    }

    fn arrived(&mut self, message: ToDevice, descriptors: Vec<OwnedFd>) {
        match message {
            ToDevice::Worker { session } => {
                let mut descriptors = descriptors.into_iter();
                let (Some(socket), Some(pidfd)) = (descriptors.next(), descriptors.next()) else { return };
                match self.wanted.remove(&session) {
                    Some((_, inbox)) => self.deliver(&inbox, Arrival::Worker { session, socket, pidfd }),
                    None => self.bury(Grave { session, pidfd, _kept: None }),
                }
            }
            ToDevice::Resume {} => {
                // The one before may have heard it and been killed before it could answer.
                self.wanted.retain(|session, (_, inbox)| {
                    let stays = inbox.strong_count() > 0;
                    if !stays {
                        self.link.close(*session);
                    }
                    stays
                });
                let wanted = |(session, (user, _)): (&u32, &(u32, _))| FromDevice::WorkerWanted {
                    session: *session,
                    user: *user,
                };
                let again = self.wanted.iter().map(wanted);
                self.unsent.extend(again);
            }
            ToDevice::NoWorker { session, error } => {
                if let Some((_, inbox)) = self.wanted.remove(&session) {
                    self.deliver(&inbox, Arrival::None { session, error });
                }
            }
        }
    }

    /// Gives a device what it waits for, if it is there.
    fn deliver(&self, inbox: &Weak<Inbox>, arrival: Arrival) {
        let refused = match inbox.upgrade() {
            Some(inbox) => inbox.put(arrival).err(),
            None => Some(arrival),
        };
        if let Some(arrival) = refused {
            self.link.turn_away(arrival);
        }
    }

    fn refuse(&self, session: u32, inbox: &Weak<Inbox>) {
        self.deliver(inbox, Arrival::None { session, error: crate::sessions::UNAVAILABLE });
    }

    /// `sluiced` is gone. Sessions go on; new ones are refused.
    fn disconnect(&mut self) {
        tracing::warn!("sluiced is gone; sessions go on, new ones are refused");
        self.link.connected.store(false, Ordering::Release);
        self.socket = None;
        self.unsent.clear();
        let held = core::mem::take(&mut self.held).into_iter().map(|held| (held.session, held.inbox));
        let wanted =
            core::mem::take(&mut self.wanted).into_iter().map(|(session, (_, inbox))| (session, inbox));
        for (session, inbox) in wanted.chain(held) {
            self.refuse(session, &inbox);
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic, reason = "a test")]
    use super::*;
    use sluice_messages::control;
    use sluice_shared_memory::socket;
    use std::collections::BTreeSet;

    // Promise: V23
    #[test]
    fn sessions_that_are_gone_ask_for_nothing_and_others_wait_for_room() {
        let link = Link::new(true).unwrap();
        let (socket, daemon) = socket::pair().unwrap();
        let mut broker = Broker::new(&link, Some(socket));
        rustix::fs::fcntl_setfl(broker.socket.as_ref().unwrap(), OFlags::NONBLOCK).unwrap();
        let stays = Arc::new(Inbox::new().unwrap());
        // Somebody connects, asks and goes, again and again, while nobody reads what is asked.
        for session in 0..4 * u32::try_from(limits::SESSIONS).unwrap() {
            let goes = Arc::new(Inbox::new().unwrap());
            link.wanted(session, 0, &goes);
            broker.round();
        }
        let last = u32::MAX;
        link.wanted(last, 0, &stays);
        broker.round();
        assert!(broker.unsent.len() <= limits::SESSIONS, "{} messages", broker.unsent.len());
        assert!(broker.held.len() <= 1, "{} sessions wait", broker.held.len());
        // Once they are read, whoever is still there gets its turn.
        let mut heard = Vec::new();
        rustix::fs::fcntl_setfl(&daemon, OFlags::NONBLOCK).unwrap();
        for _ in 0..8 * limits::SESSIONS {
            let mut buffer = [0; control::BYTES];
            match socket::receive(&daemon, &mut buffer) {
                Ok(Some((bytes, _))) => heard.push(FromDevice::decode(bytes).unwrap()),
                _ => broker.round(),
            }
            if heard.last() == Some(&FromDevice::WorkerWanted { session: last, user: 0 }) {
                break;
            }
        }
        assert_eq!(
            heard.last(),
            Some(&FromDevice::WorkerWanted { session: last, user: 0 }),
            "it is forgotten"
        );
    }

    // Promise: V23
    #[test]
    fn a_session_counts_until_it_is_answered() {
        let link = Link::new(true).unwrap();
        let (socket, daemon) = socket::pair().unwrap();
        let mut broker = Broker::new(&link, Some(socket));
        rustix::fs::fcntl_setfl(broker.socket.as_ref().unwrap(), OFlags::NONBLOCK).unwrap();
        rustix::fs::fcntl_setfl(&daemon, OFlags::NONBLOCK).unwrap();
        // Asked for by those who are gone before there is an answer.
        let mut opened = Vec::new();
        while let Some(session) = link.open(None) {
            let inbox = Arc::new(Inbox::new().unwrap());
            link.wanted(session, 0, &inbox);
            broker.round();
            opened.push((session, inbox));
        }
        assert_eq!(opened.len(), limits::SESSIONS);
        let kept = opened.pop().unwrap();
        let sessions: Vec<u32> = opened.drain(..).map(|(session, _)| session).collect();
        assert_eq!((link.sessions(), link.open(None)), (limits::SESSIONS, None), "asked, so owed");
        // Refused, and with workers that nobody takes.
        let mut buffer = [0; control::BYTES];
        while let Ok(Some(_)) = socket::receive(&daemon, &mut buffer) {}
        for session in &sessions {
            let left = link.sessions();
            let answer = if session.is_multiple_of(2) {
                ToDevice::NoWorker { session: *session, error: 46 }
            } else {
                ToDevice::Worker { session: *session }
            };
            let (one, _other) = socket::pair().unwrap();
            let both = [one.as_fd(), one.as_fd()];
            socket::send(&daemon, &answer.encode(), both.get(..answer.descriptors()).unwrap()).unwrap();
            broker.receive();
            assert_eq!(link.sessions(), left.saturating_sub(1), "answered");
        }
        // One whose device closes its inbox, which the answer may cross.
        assert!(kept.1.close().is_empty());
        broker.deliver(&Arc::downgrade(&kept.1), Arrival::None { session: kept.0, error: 46 });
        assert_eq!(link.sessions(), 0);
    }

    // Promise: V23
    #[test]
    fn what_is_kept_for_a_worker_is_kept_until_it_is_gone() {
        let link = Link::new(false).unwrap();
        let mut broker = Broker::new(&link, None);
        // Stands for a pidfd: readable when the worker is gone, and nothing that can be killed.
        let (gone, end) = rustix::pipe::pipe().unwrap();
        let kept: Kept = Arc::new(());
        let held = Arc::downgrade(&kept);
        link.bury(1, gone, Some(kept));
        broker.round();
        link.ended(2);
        broker.round();
        assert_eq!(held.strong_count(), 1, "it is not gone");
        drop(end);
        broker.round();
        assert_eq!(held.strong_count(), 0);
    }

    // Promise: Q51
    #[test]
    fn a_worker_is_asked_for_when_those_before_it_are_gone() {
        let link = Link::new(true).unwrap();
        let (socket, daemon) = socket::pair().unwrap();
        let inbox = Arc::new(Inbox::new().unwrap());
        let mut broker = Broker::new(&link, Some(socket));
        rustix::fs::fcntl_setfl(&daemon, OFlags::NONBLOCK).unwrap();
        rustix::fs::fcntl_setfl(broker.socket.as_ref().unwrap(), OFlags::NONBLOCK).unwrap();
        let heard = || {
            let mut buffer = [0; control::BYTES];
            let message = socket::receive(&daemon, &mut buffer).ok().flatten();
            message.map(|(bytes, _)| FromDevice::decode(bytes).unwrap())
        };
        link.ending(1);
        link.wanted(2, 1000, &inbox);
        link.ending(3);
        broker.round();
        // The one that ends later was in the same batch; it has not asked either.
        assert_eq!(heard(), None, "a worker is not gone");
        link.ended(3);
        broker.round();
        assert_eq!(heard(), Some(FromDevice::SessionEnded { session: 3 }));
        assert_eq!(heard(), None);
        link.ending(4);
        link.ended(1);
        broker.round();
        assert_eq!(heard(), Some(FromDevice::SessionEnded { session: 1 }));
        assert_eq!(
            heard(),
            Some(FromDevice::WorkerWanted { session: 2, user: 1000 }),
            "what ends later is not waited for"
        );
        link.wanted(5, 1001, &inbox);
        broker.round();
        assert_eq!(heard(), None);
        broker.held.front_mut().unwrap().since = Instant::now().checked_sub(PREDECESSORS).unwrap();
        broker.round();
        assert_eq!(heard(), Some(FromDevice::WorkerWanted { session: 5, user: 1001 }), "nor for ever");
    }

    // Promise: F9
    #[test]
    fn a_panic_of_the_thread_ends_neither_it_nor_what_it_was_asked_for() {
        let link = Arc::new(Link::new(true).unwrap());
        let (socket, daemon) = socket::pair().unwrap();
        let served = Arc::clone(&link);
        std::thread::spawn(move || serve(&served, Some(socket)));
        let inbox = Arc::new(Inbox::new().unwrap());
        for session in 0..3 {
            link.wanted(2 * session, 0, &inbox);
            link.push(Request::Panic);
            link.wanted(2 * session + 1, 0, &inbox);
        }
        let heard = (0..6).map(|_| {
            let mut buffer = [0; control::BYTES];
            let (bytes, _) = socket::receive(&daemon, &mut buffer).unwrap().unwrap();
            match FromDevice::decode(bytes).unwrap() {
                FromDevice::WorkerWanted { session, .. } => session,
                other => panic!("{other:?}"),
            }
        });
        assert_eq!(heard.collect::<BTreeSet<_>>(), (0..6).collect());
    }
}
