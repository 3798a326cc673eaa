//! Links to workers: socket, pidfd, custody page, and messages that are still to be sent.
//!
//! The arbiter receives nothing from a worker that does not read its answers, and ends it if that lasts; messages to it that
//! others cause do not pile up.

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
    custody::{Answer, Request},
};
use sluice_protocol::limits;
use std::{collections::VecDeque, sync::Arc};

/// Bytes of the kernel's buffer towards a worker: a few messages. Descriptors in sockets count for the whole process.
const SEND_BUFFER: usize = 8 << 10;

/// Something to be said to a worker.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Message {
    Plain(Answer),
    /// Exported when it is sent, so that no descriptor waits here.
    Lend {
        serial: u64,
        lease: u64,
        chunk: ChunkId,
        bytes: u64,
        more: bool,
    },
}

/// What reading gave.
#[derive(Debug)]
pub(crate) enum Heard {
    Request(Request),
    Nothing,
    Left,
    Abuse(&'static str),
}

/// A worker, seen from the loop.
#[derive(Debug)]
pub(crate) struct Link {
    pub(crate) vm: VmKey,
    /// `None` once nothing is received from it any more.
    socket: Option<Channel<Request, Answer>>,
    pidfd: OwnedFd,
    pub(crate) page: Arc<Page>,
    pub(crate) report: Arc<Report>,
    outbox: VecDeque<Message>,
    /// Since when it has not read.
    unread: Option<Millis>,
    /// A request that waits for a look at the VM's other workers, and when it was heard.
    pub(crate) held: Option<(Request, Millis)>,
    pub(crate) interest: EventFlags,
}

/// What became of sending.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sent {
    Yes,
    /// The worker, or the kernel's limit of descriptors in flight, has no room now.
    Full,
    Gone,
}

impl Link {
    pub(crate) fn new(
        vm: VmKey,
        socket: OwnedFd,
        pidfd: OwnedFd,
        page: Arc<Page>,
        report: Arc<Report>,
    ) -> Link {
        if let Err(error) = set_socket_send_buffer_size(&socket, SEND_BUFFER) {
            tracing::warn!(%error, "a worker's socket keeps its buffer");
        }
        let (outbox, interest) = (VecDeque::new(), EventFlags::IN);
        let socket = Some(Channel::new(socket));
        Link { vm, socket, pidfd, page, report, outbox, unread: None, held: None, interest }
    }

    pub(crate) fn socket(&self) -> Option<BorrowedFd<'_>> {
        self.socket.as_ref().map(Channel::as_fd)
    }

    pub(crate) fn pidfd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }

    /// Hears nothing any more. The socket may be full of descriptors, so the caller does not close it.
    #[must_use]
    pub(crate) fn close(&mut self) -> Option<OwnedFd> {
        self.outbox.clear();
        self.unread = None;
        self.socket.take().map(OwnedFd::from)
    }

    /// Ends the worker's process, whatever it does.
    pub(crate) fn kill(&self) {
        sluice_runtime::process::kill(self.pidfd.as_fd());
    }

    /// Reads a request. Descriptors that came are in `strange`.
    pub(crate) fn hear(&self, strange: &mut Vec<OwnedFd>) -> Heard {
        let Some(socket) = &self.socket else { return Heard::Nothing };
        match socket.receive_from_stranger(strange) {
            Ok(Received::Message(request, _)) => Heard::Request(request),
            Ok(Received::Empty) => Heard::Nothing,
            Ok(Received::Closed) | Err(ReceiveError::Failed(_)) => Heard::Left,
            Err(ReceiveError::Descriptors(..)) => Heard::Abuse("sends descriptors"),
            Err(_) => Heard::Abuse("sends what is no request"),
        }
    }

    pub(crate) fn send(&self, answer: &Answer, descriptors: &[BorrowedFd<'_>]) -> Sent {
        let Some(socket) = &self.socket else { return Sent::Gone };
        match socket.send(answer, descriptors) {
            Ok(()) => Sent::Yes,
            // TOOMANYREFS: descriptors in flight, to whomever; NOBUFS, NOMEM: the kernel's memory.
            Err(Errno::AGAIN | Errno::TOOMANYREFS | Errno::NOBUFS | Errno::NOMEM) => Sent::Full,
            Err(_) => Sent::Gone,
        }
    }

    pub(crate) fn push(&mut self, message: Message) {
        // Recalls are repeated while somebody waits, so one in the box is enough.
        let recall = |message: &Message| matches!(message, Message::Plain(Answer::Recall { .. }));
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

    /// Whether everything was said.
    pub(crate) fn is_clear(&self) -> bool {
        self.outbox.is_empty()
    }

    /// The worker does not read. `true` when that lasts for too long.
    pub(crate) fn stalls(&mut self, now: Millis) -> bool {
        let since = *self.unread.get_or_insert(now);
        now.saturating_sub(since) >= limits::CUSTODY_UNREAD_MILLISECONDS
    }
}
