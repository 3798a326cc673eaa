//! The way to `sluiced`: requests for workers go up, workers come down.
//!
//! One socket per process, one thread for it, however many connections there are. Devices only ever put something in a
//! queue here, so `sluiced` may be slow, stopped or gone without anybody noticing on the data path. The thread also
//! buries: workers whose device is gone, or which came too late, are killed and waited for here, so that `sluiced`
//! learns of the end of every worker it has sent.

use crate::{limiter::Limiter, workers};
use rustix::{
    event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll},
    fd::{AsFd, BorrowedFd, OwnedFd},
    fs::OFlags,
    io::Errno,
};
use sluice_protocol::{
    control::{self, FromDevice, ToDevice},
    limits,
};
use sluice_shared_memory::socket;
use std::{
    collections::{HashMap, VecDeque},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering},
    },
};

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

/// Where one device finds what came for it.
#[derive(Debug)]
pub struct Inbox {
    arrivals: Mutex<Vec<Arrival>>,
    event: OwnedFd,
}

impl Inbox {
    /// An empty inbox.
    ///
    /// # Errors
    /// The kernel's.
    pub fn new() -> Result<Inbox, Errno> {
        Ok(Inbox {
            arrivals: Mutex::default(),
            event: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
        })
    }

    /// Written each time something arrives.
    #[must_use]
    pub fn event(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }

    /// Puts something in.
    pub fn put(&self, arrival: Arrival) {
        lock(&self.arrivals).push(arrival);
        notify(&self.event);
    }

    /// Takes everything out.
    pub fn take(&self) -> Vec<Arrival> {
        core::mem::take(&mut *lock(&self.arrivals))
    }
}

/// What a device wants from the link.
#[derive(Debug)]
enum Request {
    /// A worker for a session; the answer goes to the inbox.
    Wanted(u32, Weak<Inbox>),
    /// A session's worker is gone.
    Ended(u32),
    /// A worker that is to be killed and waited for: the session, its pidfd.
    Bury(u32, OwnedFd),
}

/// The devices' end of the link.
#[derive(Debug)]
pub struct Link {
    requests: Mutex<VecDeque<Request>>,
    event: OwnedFd,
    connected: AtomicBool,
    next: AtomicU32,
    sessions: AtomicUsize,
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
        })
    }

    /// A number for a new session, unless there are too many or nobody who could give it a worker.
    pub fn open(&self) -> Option<u32> {
        if !self.connected.load(Ordering::Acquire) {
            return None;
        }
        if self.sessions.fetch_add(1, Ordering::Relaxed) >= limits::SESSIONS {
            self.close();
            return None;
        }
        Some(self.next.fetch_add(1, Ordering::Relaxed))
    }

    /// A session is over.
    pub fn close(&self) {
        self.sessions.fetch_sub(1, Ordering::Relaxed);
    }

    /// Sessions of this process.
    #[must_use]
    pub fn sessions(&self) -> usize {
        self.sessions.load(Ordering::Relaxed)
    }

    /// Asks for a worker.
    pub fn wanted(&self, session: u32, inbox: &Arc<Inbox>) {
        self.push(Request::Wanted(session, Arc::downgrade(inbox)));
    }

    /// Tells that a worker is gone.
    pub fn ended(&self, session: u32) {
        self.push(Request::Ended(session));
    }

    /// Kills a worker and tells when it is gone.
    pub fn bury(&self, session: u32, pidfd: OwnedFd) {
        self.push(Request::Bury(session, pidfd));
    }

    fn push(&self, request: Request) {
        lock(&self.requests).push_back(request);
        notify(&self.event);
    }
}

/// The thread's state.
struct Broker<'l> {
    link: &'l Link,
    socket: Option<OwnedFd>,
    /// Who waits for which session's worker.
    wanted: HashMap<u32, Weak<Inbox>>,
    /// Messages the socket had no room for; one per session at most of each kind, so bounded by the sessions.
    unsent: VecDeque<FromDevice>,
    /// Workers that are being waited for.
    graves: Vec<(u32, OwnedFd)>,
}

/// Serves a link until the process ends; `socket` is the control socket, if there is one.
pub fn serve(link: &Link, socket: Option<OwnedFd>) {
    if let Some(socket) = &socket
        && let Err(error) = rustix::fs::fcntl_setfl(socket, OFlags::NONBLOCK)
    {
        tracing::error!(%error, "the control socket cannot be made non-blocking");
    }
    let mut broker =
        Broker { link, socket, wanted: HashMap::new(), unsent: VecDeque::new(), graves: Vec::new() };
    loop {
        broker.round();
    }
}

impl Broker<'_> {
    fn round(&mut self) {
        let mut wanted = PollFlags::IN;
        wanted.set(PollFlags::OUT, !self.unsent.is_empty());
        let mut fds = vec![PollFd::new(&self.link.event, PollFlags::IN)];
        fds.extend(self.graves.iter().map(|(_, pidfd)| PollFd::new(pidfd, PollFlags::IN)));
        fds.extend(self.socket.iter().map(|socket| PollFd::new(socket, wanted)));
        if let Err(error) = poll(&mut fds, None::<&Timespec>)
            && error != Errno::INTR
        {
            static LINES: Limiter = Limiter::new();
            LINES.run(|suppressed| tracing::error!(%error, suppressed, "poll"));
        }
        let gone: Vec<bool> = fds.iter().skip(1).map(|fd| !fd.revents().is_empty()).collect();
        drop(fds);
        let mut gone = gone.into_iter();
        let unsent = &mut self.unsent;
        self.graves.retain(|(session, _)| {
            let gone = gone.next().unwrap_or(false);
            if gone {
                unsent.push_back(FromDevice::SessionEnded { session: *session });
            }
            !gone
        });
        let mut counter = [0; 8];
        // EAGAIN when nothing was requested.
        let _ = rustix::io::read(&self.link.event, &mut counter);
        let requests = core::mem::take(&mut *lock(&self.link.requests));
        for request in requests {
            self.take(request);
        }
        self.send();
        self.receive();
    }

    fn take(&mut self, request: Request) {
        match request {
            Request::Wanted(session, inbox) if self.socket.is_some() => {
                self.wanted.insert(session, inbox);
                self.unsent.push_back(FromDevice::WorkerWanted { session });
            }
            Request::Wanted(session, inbox) => refuse(session, &inbox),
            Request::Ended(session) => self.unsent.push_back(FromDevice::SessionEnded { session }),
            Request::Bury(session, pidfd) => self.bury(session, pidfd),
        }
    }

    fn bury(&mut self, session: u32, pidfd: OwnedFd) {
        workers::kill(&pidfd, session);
        self.graves.push((session, pidfd));
    }

    fn send(&mut self) {
        while let (Some(socket), Some(message)) = (&self.socket, self.unsent.front()) {
            match socket::send(socket, &message.encode(), &[]) {
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
            let mut buffer = [0; control::BYTES];
            match socket::receive(socket, &mut buffer) {
                Ok(Some((bytes, descriptors))) => match ToDevice::decode(bytes) {
                    Ok(message) if message.descriptors() == descriptors.len() => {
                        self.arrived(message, descriptors)
                    }
                    other => tracing::error!(?other, "not a message of sluiced"),
                },
                Ok(None) => return self.disconnect(),
                Err(Errno::AGAIN | Errno::INTR) => return,
                Err(error) => {
                    tracing::error!(%error, "receiving from sluiced");
                    return self.disconnect();
                }
            }
        }
    }

    fn arrived(&mut self, message: ToDevice, descriptors: Vec<OwnedFd>) {
        match message {
            ToDevice::Worker { session } => {
                let mut descriptors = descriptors.into_iter();
                let (Some(socket), Some(pidfd)) = (descriptors.next(), descriptors.next()) else { return };
                match self.wanted.remove(&session).and_then(|inbox| inbox.upgrade()) {
                    Some(inbox) => inbox.put(Arrival::Worker { session, socket, pidfd }),
                    None => self.bury(session, pidfd),
                }
            }
            ToDevice::NoWorker { session, error } => {
                if let Some(inbox) = self.wanted.remove(&session).and_then(|inbox| inbox.upgrade()) {
                    inbox.put(Arrival::None { session, error });
                }
            }
        }
    }

    /// `sluiced` is gone. Sessions go on; new ones are refused.
    fn disconnect(&mut self) {
        tracing::warn!("sluiced is gone; sessions go on, new ones are refused");
        self.link.connected.store(false, Ordering::Release);
        self.socket = None;
        self.unsent.clear();
        for (session, inbox) in self.wanted.drain() {
            refuse(session, &inbox);
        }
    }
}

fn refuse(session: u32, inbox: &Weak<Inbox>) {
    if let Some(inbox) = inbox.upgrade() {
        inbox.put(Arrival::None { session, error: crate::sessions::UNAVAILABLE });
    }
}
