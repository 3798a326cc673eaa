//! The thread of the link: it sends requests, delivers answers, and waits for killed workers.

use super::{
    DeadSession, Link, LinkRequest,
    inbox::{Arrival, Inbox},
    lock, notify,
};
use crate::vring;
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fd::OwnedFd,
    fs::OFlags,
    io::Errno,
};
use sluice_messages::{
    channel::{Channel, ReceiveError, Received},
    control::{FromDevice, ToDevice},
};
use sluice_protocol::limits;
use sluice_runtime::{endable::EndableProcess, limited};
use std::{
    collections::{HashMap, HashSet, VecDeque},
    fs::File,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Weak, atomic::Ordering},
    time::{Duration, Instant},
};

/// Longest wait of a session for workers of sessions that ended before it began.
const PREDECESSORS: Duration = Duration::from_secs(5);
/// Interval of the checks for the clean-up of connections whose front-end has gone.
const LOOK: Timespec = Timespec { tv_sec: 0, tv_nsec: 1_000_000 };
/// Pause of the thread after a panic, so that a repeated panic does not use up a processor.
const REST: Duration = Duration::from_millis(100);

/// The thread's state.
pub(super) struct Broker<'l> {
    link: &'l Link,
    socket: Option<Channel<ToDevice, FromDevice>>,
    /// True if `sluiced` has closed the socket. A successor would have kept it open.
    disconnected: bool,
    /// Sessions that wait for a worker, with their users and inboxes.
    wanted: HashMap<u32, (u32, Weak<Inbox>)>,
    /// Messages for which the socket had no room. No worker is requested while there are many, so the sessions bound them.
    unsent: VecDeque<FromDevice>,
    /// Killed workers that are not gone yet.
    dead_sessions: Vec<DeadSession>,
    /// Sessions whose workers have to exit and have not, except those in `dead_sessions`.
    ending: HashSet<u32>,
    /// Sessions that wait for the ends of their predecessors.
    held: VecDeque<HeldSession>,
}

/// A session whose worker is not requested yet.
#[derive(Debug)]
struct HeldSession {
    session: u32,
    user: u32,
    inbox: Weak<Inbox>,
    after: After,
    since: Instant,
}

/// The events for which a session waits. Later events do not count, so that it does not wait for ever.
#[derive(Debug)]
enum After {
    /// Connections whose front-ends have gone: their workers are known after the clean-up.
    Connections(Vec<Weak<File>>),
    /// Workers that have to be gone.
    Workers(HashSet<u32>),
}

/// Serves a link until the process ends; `socket` is the control socket, if there is one. A panic costs the one request or session
/// that was being handled. Ends the process once `sluiced` and all front-ends are gone: nothing could use it any more.
pub fn serve(link: &Link, socket: Option<OwnedFd>) {
    if let Some(socket) = &socket
        && let Err(error) = rustix::fs::fcntl_setfl(socket, OFlags::NONBLOCK)
    {
        tracing::error!(%error, "cannot make the control socket non-blocking");
    }
    let mut broker = Broker::new(link, socket);
    loop {
        // Requests and sessions are taken from their lists one by one, so the remaining ones are intact.
        if catch_unwind(AssertUnwindSafe(|| broker.round())).is_err() {
            limited!(error, "the thread of the link to sluiced panicked and continues");
            std::thread::park_timeout(REST);
            // The event for the remaining requests was consumed already.
            notify(&link.event);
        }
        if broker.is_abandoned() {
            tracing::info!("sluiced and all front-ends are gone; the device ends");
            std::process::exit(0);
        }
    }
}

impl<'l> Broker<'l> {
    pub(super) fn new(link: &'l Link, socket: Option<OwnedFd>) -> Broker<'l> {
        Broker {
            link,
            socket: socket.map(Channel::new),
            disconnected: false,
            wanted: HashMap::new(),
            unsent: VecDeque::new(),
            dead_sessions: Vec::new(),
            ending: HashSet::new(),
            held: VecDeque::new(),
        }
    }

    pub(super) fn round(&mut self) {
        let mut wanted = PollFlags::IN;
        wanted.set(PollFlags::OUT, !self.unsent.is_empty());
        let mut fds = vec![PollFd::new(&self.link.event, PollFlags::IN)];
        fds.extend(self.dead_sessions.iter().map(|dead| PollFd::new(&dead.process, PollFlags::IN)));
        fds.extend(self.socket.iter().map(|socket| PollFd::new(socket, wanted)));
        let timeout = (!self.held.is_empty()).then_some(&LOOK);
        if let Err(error) = poll(&mut fds, timeout)
            && error != Errno::INTR
        {
            limited!(error, %error, "cannot wait for events");
        }
        let gone: Vec<bool> = fds.iter().skip(1).map(|fd| !fd.revents().is_empty()).collect();
        drop(fds);
        let mut gone = gone.into_iter();
        let unsent = &mut self.unsent;
        self.dead_sessions.retain(|dead| {
            let gone = gone.next().unwrap_or(false);
            if gone {
                unsent.push_back(FromDevice::SessionEnded { session: dead.session });
            }
            !gone
        });
        let mut counter = [0; 8];
        // EAGAIN if there are no new requests.
        let _ = rustix::io::read(&self.link.event, &mut counter);
        // Requests that come meanwhile wait for the next round.
        let due = lock(&self.link.requests).len();
        for _ in 0..due {
            let Some(request) = self.link.next_request() else { break };
            self.take(request);
        }
        self.ask();
        self.send();
        self.receive();
    }

    /// True if no `sluiced` can adopt the process, and no front-end uses it.
    pub(super) fn is_abandoned(&self) -> bool {
        self.disconnected && self.link.front_ends.load(Ordering::Relaxed) == 0
    }

    pub(super) fn take(&mut self, request: LinkRequest) {
        match request {
            LinkRequest::Wanted(session, user, inbox) if self.socket.is_some() => {
                let after = After::Connections(vring::left());
                self.held.push_back(HeldSession { session, user, inbox, after, since: Instant::now() });
            }
            LinkRequest::Wanted(session, _, inbox) => self.refuse(session, &inbox),
            LinkRequest::Ending(session) => {
                self.ending.insert(session);
            }
            LinkRequest::Ended(session) => {
                self.ending.remove(&session);
                self.unsent.push_back(FromDevice::SessionEnded { session });
            }
            LinkRequest::Reap(dead) => self.reap(dead),
            #[cfg(test)]
            LinkRequest::Panic => std::panic::resume_unwind(Box::new("a fault in the thread")),
        }
    }

    /// Requests the workers of sessions whose predecessors are gone.
    fn ask(&mut self) {
        for _ in 0..self.held.len() {
            let Some(mut held) = self.held.pop_front() else { break };
            // Its connection has gone, so it needs no worker.
            if held.inbox.strong_count() == 0 {
                self.link.close(held.session);
                continue;
            }
            let dead_sessions = || self.dead_sessions.iter().map(|dead| dead.session);
            if let After::Connections(connections) = &mut held.after {
                connections.retain(|connection| connection.strong_count() > 0);
                if connections.is_empty() {
                    held.after = After::Workers(dead_sessions().chain(self.ending.iter().copied()).collect());
                }
            }
            if let After::Workers(workers) = &mut held.after {
                workers.retain(|worker| {
                    self.ending.contains(worker) || dead_sessions().any(|session| session == *worker)
                });
            }
            let over = matches!(&held.after, After::Workers(workers) if workers.is_empty());
            let late = held.since.elapsed() >= PREDECESSORS;
            if late && !over {
                limited!(
                    warn,
                    session = held.session,
                    "workers of earlier sessions are not gone; a new session starts beside them"
                );
            }
            if (over || late) && self.unsent.len() < limits::SESSIONS {
                let HeldSession { session, user, inbox, .. } = held;
                self.wanted.insert(session, (user, inbox));
                self.unsent.push_back(FromDevice::WorkerWanted { session, user });
            } else {
                self.held.push_back(held);
            }
        }
    }

    pub(super) fn reap(&mut self, dead: DeadSession) {
        self.ending.remove(&dead.session);
        dead.process.kill();
        self.dead_sessions.push(dead);
    }

    pub(super) fn send(&mut self) {
        while let (Some(socket), Some(message)) = (&self.socket, self.unsent.front()) {
            match socket.send(message, &[]) {
                Ok(()) => {
                    self.unsent.pop_front();
                }
                Err(Errno::AGAIN) => return,
                Err(error) => {
                    tracing::error!(%error, "cannot send to sluiced");
                    return self.disconnect();
                }
            }
        }
        if self.socket.is_none() {
            self.unsent.clear();
        }
    }

    pub(super) fn receive(&mut self) {
        while let Some(socket) = &self.socket {
            match socket.receive() {
                Ok(Received::Message(message, descriptors)) => self.arrived(message, descriptors),
                Ok(Received::Empty) => return,
                Ok(Received::Closed) => return self.disconnect(),
                Err(error @ (ReceiveError::Failed(_) | ReceiveError::Cut)) => {
                    tracing::error!(%error, "cannot receive from sluiced");
                    return self.disconnect();
                }
                Err(error) => tracing::error!(%error, "cannot decode a message of sluiced"),
            }
        }
    }

    fn arrived(&mut self, message: ToDevice, descriptors: Vec<OwnedFd>) {
        match message {
            ToDevice::Worker { session, grouped: _ } => {
                let mut descriptors = descriptors.into_iter();
                let Some(socket) = descriptors.next() else { return };
                let Some(process) = EndableProcess::from_message(descriptors) else { return };
                match self.wanted.remove(&session) {
                    Some((_, inbox)) => self.deliver(&inbox, Arrival::Worker { session, socket, process }),
                    None => self.reap(DeadSession { session, process, _kept: None }),
                }
            }
            ToDevice::Resume {} => {
                // The sluiced before may have received the request and been killed before it answered.
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

    /// Passes an arrival to its device, if the device exists.
    pub(super) fn deliver(&self, inbox: &Weak<Inbox>, arrival: Arrival) {
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

    /// `sluiced` has closed the socket. Sessions continue; new ones are refused.
    fn disconnect(&mut self) {
        tracing::warn!("sluiced has closed the control socket; sessions continue, new ones are refused");
        self.link.connected.store(false, Ordering::Release);
        self.disconnected = true;
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
mod tests;
