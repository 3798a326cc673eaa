//! Links to workers: socket, process, custody page, and messages that wait to be sent.
//!
//! If a worker does not read its answers, the arbiter receives nothing more from it, and ends it if that lasts. Messages to it
//! that other workers cause do not pile up.

use crate::{
    custody::Millis,
    ids::{ChunkId, VmKey},
    page::{Page, Report},
};
use rustix::{
    event::epoll::EventFlags,
    fd::{AsFd as _, BorrowedFd, OwnedFd},
    io::Errno,
    net::sockopt::set_socket_send_buffer_size,
};
use sluice_messages::{
    channel::{Channel, ReceiveError, Received},
    custody::{CustodyAnswer, CustodyRequest},
};
use sluice_protocol::limits;
use sluice_runtime::{endable::EndableProcess, peer_time::PeerTime};
use std::{collections::VecDeque, sync::Arc};

/// Bytes of the kernel's buffer towards a worker: a few messages. Descriptors in sockets count towards a limit of the process.
const SEND_BUFFER: usize = 8 << 10;

/// The reason for ending a worker on whose socket calls take too much of the arbiter's time.
pub(super) const CROWDED: &str = "lets a crowd wait on its socket";

/// A message to a worker.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Message {
    Plain(CustodyAnswer),
    /// The chunk is exported when this is sent, so that no descriptor waits here.
    Lend {
        serial: u64,
        lease: u64,
        chunk: ChunkId,
        bytes: u64,
        more: bool,
    },
}

/// The result of reading a worker's socket.
#[derive(Debug)]
pub(crate) enum Incoming {
    Request(CustodyRequest),
    Nothing,
    Left,
    Abuse(&'static str),
}

/// The loop's link to a worker.
#[derive(Debug)]
pub(crate) struct WorkerLink {
    pub(crate) vm: VmKey,
    /// `None` once the arbiter receives nothing more from it.
    socket: Option<Channel<CustodyRequest, CustodyAnswer>>,
    process: EndableProcess,
    pub(crate) page: Arc<Page>,
    pub(crate) report: Arc<Report>,
    outbox: VecDeque<Message>,
    /// The time since which it has not read its answers.
    unread: Option<Millis>,
    pub(crate) send_wait: SendWait,
    time: PeerTime,
    /// A request that waits for a look at the VM's other workers, and the time at which it came.
    pub(crate) held: Option<(CustodyRequest, Millis)>,
    pub(crate) interest: EventFlags,
}

/// The event after which messages are sent again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SendWait {
    /// None: the last message was sent.
    Nothing,
    /// The worker's socket has room.
    Room,
    /// Some time has passed: the kernel does not report when it has resources again.
    Time,
}

/// The result of sending.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sent {
    Yes,
    /// The worker's socket is full.
    Full,
    /// The kernel lacks memory, or its limit of descriptors in flight is reached.
    Exhausted,
    /// Its socket takes too much of the arbiter's time.
    Crowded,
    Gone,
}

impl WorkerLink {
    pub(crate) fn new(
        vm: VmKey,
        socket: OwnedFd,
        process: EndableProcess,
        page: Arc<Page>,
        report: Arc<Report>,
    ) -> WorkerLink {
        if let Err(error) = set_socket_send_buffer_size(&socket, SEND_BUFFER) {
            tracing::warn!(%error, "cannot set the send buffer of a worker's socket");
        }
        let (outbox, interest, send_wait) = (VecDeque::new(), EventFlags::IN, SendWait::Nothing);
        let socket = Some(Channel::new(socket));
        let (unread, held) = (None, None);
        let time = PeerTime::new();
        WorkerLink { vm, socket, process, page, report, outbox, unread, send_wait, time, held, interest }
    }

    pub(crate) fn socket(&self) -> Option<BorrowedFd<'_>> {
        self.socket.as_ref().map(Channel::as_fd)
    }

    pub(crate) fn pidfd(&self) -> BorrowedFd<'_> {
        self.process.as_fd()
    }

    /// Receives nothing more. The socket may be full of descriptors, so the caller does not close it.
    #[must_use]
    pub(crate) fn close(&mut self) -> Option<OwnedFd> {
        self.outbox.clear();
        self.unread = None;
        self.socket.take().map(OwnedFd::from)
    }

    /// Kills the worker's process.
    pub(crate) fn kill(&self) {
        self.process.kill();
    }

    /// Reads a request. Descriptors that came with it go to `strange`.
    pub(crate) fn receive(&self, strange: &mut Vec<OwnedFd>) -> Incoming {
        let Some(socket) = &self.socket else { return Incoming::Nothing };
        let received = self.time.measure(|| socket.receive_from_stranger(strange));
        if self.time.is_over() {
            return Incoming::Abuse(CROWDED);
        }
        match received {
            Ok(Received::Message(request, _)) => Incoming::Request(request),
            Ok(Received::Empty) => Incoming::Nothing,
            Ok(Received::Closed) | Err(ReceiveError::Failed(_)) => Incoming::Left,
            Err(ReceiveError::Descriptors(..)) => Incoming::Abuse("sends descriptors"),
            Err(_) => Incoming::Abuse("sends a malformed request"),
        }
    }

    pub(crate) fn send(&self, answer: &CustodyAnswer, descriptors: &[BorrowedFd<'_>]) -> Sent {
        let Some(socket) = &self.socket else { return Sent::Gone };
        let sent = self.time.measure(|| socket.send(answer, descriptors));
        match sent {
            _ if self.time.is_over() => Sent::Crowded,
            Ok(()) => Sent::Yes,
            Err(Errno::AGAIN) => Sent::Full,
            // TOOMANYREFS: descriptors in flight, to any process; NOBUFS, NOMEM: the kernel's memory.
            Err(Errno::TOOMANYREFS | Errno::NOBUFS | Errno::NOMEM) => Sent::Exhausted,
            Err(_) => Sent::Gone,
        }
    }

    pub(crate) fn push(&mut self, message: Message) {
        // Recalls are repeated while a worker waits, so one queued recall is enough.
        let recall = |message: &Message| matches!(message, Message::Plain(CustodyAnswer::Recall { .. }));
        if self.socket.is_some() && !(recall(&message) && self.outbox.iter().any(recall)) {
            self.outbox.push_back(message);
        }
    }

    pub(crate) fn front(&self) -> Option<Message> {
        self.outbox.front().copied()
    }

    pub(crate) fn pop(&mut self) {
        self.outbox.pop_front();
        self.unread = None;
    }

    /// True if no message waits to be sent.
    pub(crate) fn is_clear(&self) -> bool {
        self.outbox.is_empty()
    }

    /// The worker's socket is full.
    pub(crate) fn wait_for_room(&mut self, now: Millis) {
        self.send_wait = SendWait::Room;
        self.unread.get_or_insert(now);
    }

    /// True if the worker has not read its answers for too long.
    pub(crate) fn stalls(&self, now: Millis) -> bool {
        self.unread.is_some_and(|since| now.saturating_sub(since) >= limits::CUSTODY_UNREAD_MILLISECONDS)
    }
}
