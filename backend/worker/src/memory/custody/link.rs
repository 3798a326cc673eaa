//! The link to one arbiter: its messages, its answers to waiting threads, and the margin of its grants.

use super::{Custody, CustodyError, Extent, Grant};
use crate::session::Session;
use core::{
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fd::{AsFd, OwnedFd},
    io::Errno,
};
use sluice_driver::{Code, code};
use sluice_messages::{
    channel::{Channel, Received},
    custody::{CustodyAnswer, CustodyRequest, Growth, page, report},
};
use sluice_protocol::shared::Shared as _;
use sluice_shared_memory::{Mapping, Run};
use std::{
    collections::{BTreeMap, VecDeque},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    time::Instant,
};

/// Time limit of a request. Growth waits while a dead worker's memory is swept, so the limit is long; an arbiter refuses what
/// it cannot lend long before.
const TIMEOUT: Duration = Duration::from_secs(60);
/// Time limit for the arbiter's first message.
const WELCOME_TIMEOUT: Duration = Duration::from_secs(10);

impl Custody {
    /// The reading thread; it calls `recall` when an arbiter recalls memory.
    pub(crate) fn listen(&self, session: &Session, recall: impl Fn()) -> ! {
        loop {
            let mut polled: Vec<PollFd<'_>> =
                self.links.iter().map(|link| PollFd::new(&link.socket, PollFlags::IN)).collect();
            match poll(&mut polled, None::<&Timespec>) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => {
                    tracing::error!(%error, "cannot poll the sockets of the arbiters");
                    session.lose(code::DEVICE_UNAVAILABLE, 1)
                }
            }
            let ready: Vec<bool> = polled.iter().map(|polled| !polled.revents().is_empty()).collect();
            for ((device, link), _) in self.links.iter().enumerate().zip(ready).filter(|(_, ready)| *ready) {
                match link.socket.receive() {
                    Ok(Received::Message(answer, descriptors)) => {
                        if let Err(error) = link.take_in(answer, descriptors, &recall) {
                            tracing::error!(%error, device, "the arbiter sent an invalid message");
                            session.lose(code::DEVICE_UNAVAILABLE, 1)
                        }
                    }
                    Ok(Received::Closed | Received::Empty) => {
                        tracing::warn!(device, "the arbiter is gone");
                        session.lose(code::DEVICE_UNAVAILABLE, 1)
                    }
                    Err(error) => {
                        tracing::error!(%error, device, "cannot receive on the custody socket");
                        session.lose(code::DEVICE_UNAVAILABLE, 1)
                    }
                }
            }
        }
    }
}

/// The link to one arbiter.
#[derive(Debug)]
pub(super) struct Link {
    pub(super) socket: Channel<CustodyAnswer, CustodyRequest>,
    pub(super) page: Arc<Mapping>,
    /// The pages and the eventfd for the device's time accounting, until they are taken.
    pub(super) account: Mutex<Option<(Mapping, OwnedFd)>>,
    pub(super) unit: u32,
    pub(super) serial: AtomicU64,
    /// Answers to waiting threads, by serial.
    pub(super) pending_replies: Mutex<BTreeMap<u64, VecDeque<Reply>>>,
    pub(super) answered: Condvar,
    /// Bytes that the driver may take before the next request to the arbiter, while the page allows it.
    pub(super) margin: AtomicU64,
    /// Bytes of finished growth within margins.
    pub(super) spent: AtomicU64,
    /// The margin right after the last grant.
    pub(super) full: AtomicU64,
    /// Bytes that were granted for a context and that the driver gives back with it, by the serial of the context.
    pub(super) contexts: Mutex<BTreeMap<u64, u64>>,
    /// Bytes that the driver gave back and that are not reported to the arbiter yet.
    pub(super) unreported: AtomicU64,
    /// The number of messages without an answer that were sent, and the number of those that the page certainly includes.
    pub(super) sent: AtomicU64,
    pub(super) confirmed: AtomicU64,
    /// Bytes that the arbiter recalls.
    pub(super) recalled: AtomicU64,
}

/// The answer to a request.
#[derive(Debug)]
pub(super) enum Reply {
    Lent { lease: u64, bytes: u64, more: bool, descriptor: OwnedFd },
    Granted(u64),
    Shared(u128),
    Refused(Code),
    Process { process: u32, bytes: u64 },
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// True if a message arrives in time.
pub(crate) fn readable(socket: impl AsFd, timeout: Duration) -> Result<bool, Errno> {
    let deadline = Instant::now() + timeout;
    loop {
        let left = Timespec::try_from(deadline.saturating_duration_since(Instant::now()))
            .map_err(|_| Errno::INVAL)?;
        match poll(&mut [PollFd::new(&socket, PollFlags::IN)], Some(&left)) {
            Ok(ready) => return Ok(ready > 0),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error),
        }
    }
}

impl Link {
    pub(super) fn welcomed(device: usize, socket: OwnedFd) -> Result<Link, CustodyError> {
        if !readable(&socket, WELCOME_TIMEOUT)? {
            return Err(CustodyError::Silent(device));
        }
        let socket = Channel::new(socket);
        let (answer, descriptors) = socket.receive()?.message().ok_or(CustodyError::Gone(device))?;
        let (unit, file, report, wake_fd) = match (answer, <[OwnedFd; 3]>::try_from(descriptors)) {
            (CustodyAnswer::Welcome { unit, .. }, Ok([file, report, wake_fd])) => {
                (unit, file, report, wake_fd)
            }
            (answer, _) => return Err(CustodyError::Unexpected(answer)),
        };
        // A page shorter than it declares would fault at the first access.
        let is_short = |file: &OwnedFd, bytes: usize| {
            let found = rustix::fs::fstat(file)?.st_size;
            Ok::<bool, Errno>(u64::try_from(found).is_ok_and(|found| found < bytes as u64))
        };
        if is_short(&file, page::BYTES)? || is_short(&report, report::BYTES)? {
            return Err(CustodyError::Page("too short"));
        }
        let page = Arc::new(Mapping::read_only(file.as_fd(), page::BYTES as u64)?);
        let run = Run { offset: 0, bytes: report::BYTES as u64 };
        let report = Mapping::scattered(0, run.bytes, [(report.as_fd(), run)])?;
        let magic =
            sluice_protocol::shared::Shared::load_u64(&page.words(), page::MAGIC_AT, Ordering::Acquire);
        if magic != page::MAGIC {
            return Err(CustodyError::Page("not a custody page"));
        }
        Ok(Link {
            socket,
            page,
            account: Mutex::new(Some((report, wake_fd))),
            unit,
            serial: AtomicU64::new(1),
            pending_replies: Mutex::default(),
            answered: Condvar::new(),
            margin: AtomicU64::new(0),
            spent: AtomicU64::new(0),
            full: AtomicU64::new(0),
            contexts: Mutex::default(),
            unreported: AtomicU64::new(0),
            sent: AtomicU64::new(0),
            confirmed: AtomicU64::new(0),
            recalled: AtomicU64::new(0),
        })
    }

    /// Sends a message without an answer. If that fails the arbiter is gone, which the reading thread is about to find.
    pub(super) fn send(&self, request: CustodyRequest) {
        if let Err(error) = self.socket.send(&request, &[]) {
            tracing::warn!(%error, ?request, "cannot send to the arbiter");
        }
        self.sent.fetch_add(1, Ordering::AcqRel);
    }

    /// Sends a request and takes answers until `take` returns a result.
    pub(super) fn ask<R>(
        &self,
        make: impl FnOnce(u64) -> CustodyRequest,
        mut take: impl FnMut(Reply) -> Option<R>,
    ) -> Result<R, Code> {
        let serial = self.serial.fetch_add(1, Ordering::Relaxed);
        lock(&self.pending_replies).insert(serial, VecDeque::new());
        // The page includes earlier messages once the answer is here.
        let earlier = self.sent.load(Ordering::Acquire);
        let sending = self.socket.send(&make(serial), &[]);
        let deadline = Instant::now() + TIMEOUT;
        let result = match sending {
            Ok(()) => loop {
                match self.reply(serial, deadline) {
                    Ok(reply) => {
                        if let Some(result) = take(reply) {
                            break Ok(result);
                        }
                    }
                    Err(failed) => break Err(failed),
                }
            },
            Err(error) => {
                tracing::warn!(%error, "cannot send a request to the arbiter");
                Err(code::DEVICE_UNAVAILABLE)
            }
        };
        self.confirmed.fetch_max(earlier, Ordering::AcqRel);
        let left = lock(&self.pending_replies).remove(&serial);
        left.into_iter().flatten().for_each(|reply| self.decline(reply));
        result
    }

    fn reply(&self, serial: u64, deadline: Instant) -> Result<Reply, Code> {
        let mut pending_replies = lock(&self.pending_replies);
        loop {
            let Some(replies) = pending_replies.get_mut(&serial) else { return Err(code::UNKNOWN) };
            if let Some(reply) = replies.pop_front() {
                return Ok(reply);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                tracing::error!("the arbiter did not answer in time");
                return Err(code::OUT_OF_MEMORY);
            }
            pending_replies =
                self.answered.wait_timeout(pending_replies, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Passes an answer to the thread that waits for it.
    fn deliver(&self, serial: u64, reply: Reply) {
        let mut pending_replies = lock(&self.pending_replies);
        match pending_replies.get_mut(&serial) {
            Some(replies) => {
                replies.push_back(reply);
                self.answered.notify_all();
            }
            None => {
                drop(pending_replies);
                self.decline(reply);
            }
        }
    }

    /// Gives back a lease that came too late.
    fn decline(&self, reply: Reply) {
        if let Reply::Lent { lease, .. } = reply {
            self.send(CustodyRequest::Give { lease });
        }
    }

    pub(super) fn memory(&self) -> (u64, u64) {
        page::memory(&self.page.words())
    }

    /// Takes bytes from the margin, if the margin is open and large enough.
    pub(super) fn spend(&self, bytes: u64) -> bool {
        let open = self.page.words().load_u32(page::OPEN, Ordering::Acquire) == 1;
        let rest = |margin: u64| margin.checked_sub(bytes);
        open && self.margin.fetch_update(Ordering::Relaxed, Ordering::Relaxed, rest).is_ok()
    }

    /// Asks the arbiter for permission for the driver to take memory for itself.
    pub(super) fn ask_growth(&self, reason: Growth, bytes: u64) -> Result<Grant<'_>, Code> {
        self.report_shrinkage();
        let spent = self.spent.load(Ordering::Relaxed);
        let mut granted = 0;
        let grow = |serial| {
            granted = serial;
            CustodyRequest::Grow { serial, reason: reason as u32, bytes, spent }
        };
        match self.ask(grow, Some)? {
            Reply::Granted(margin) => {
                let before = self.margin.fetch_add(margin, Ordering::Relaxed);
                self.full.store(before.saturating_add(margin), Ordering::Relaxed);
                Ok(Grant { link: self, reason, bytes, extent: Extent::Granted(granted), taken: false })
            }
            Reply::Refused(failed) => Err(failed),
            unexpected => Err(self.unexpected_reply(unexpected)),
        }
    }

    /// Records that the driver has given back memory of a grant. The driver may have kept it, because it allocates in blocks, so it
    /// does not enlarge the margin: the arbiter decides about its use. A little is reported with the next request only.
    pub(super) fn shrunk(&self, reason: Growth, bytes: u64) {
        if reason == Growth::Context || !self.put_off(bytes) {
            self.send(CustodyRequest::Shrunk { reason: reason as u32, bytes });
        }
    }

    /// Puts off the report of bytes that the driver gave back, if neither they nor the ones put off before are more than a margin:
    /// between two requests a driver gives back a margin and the bytes of one request.
    fn put_off(&self, bytes: u64) -> bool {
        let full = self.full.load(Ordering::Relaxed);
        let more = |unreported: u64| {
            let short = bytes.max(unreported) <= full;
            unreported.checked_add(bytes).filter(|_| short)
        };
        self.unreported.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).is_ok()
    }

    /// Reports the bytes that the driver gave back.
    fn report_shrinkage(&self) {
        let bytes = self.unreported.swap(0, Ordering::Relaxed);
        if bytes > 0 {
            self.send(CustodyRequest::Shrunk { reason: Growth::Module as u32, bytes });
        }
    }

    pub(super) fn is_settled(&self) -> bool {
        self.confirmed.load(Ordering::Acquire) >= self.sent.load(Ordering::Acquire)
    }

    /// Waits until the page includes every earlier message.
    pub(super) fn settle(&self) {
        // No process has this index, so the arbiter answers at once, and answers keep their order.
        let behind = |serial| CustodyRequest::Process { serial, index: u32::MAX };
        if !self.is_settled()
            && let Err(failed) = self.ask(behind, Some)
        {
            tracing::warn!(code = failed, "the arbiter did not answer; reported free memory may be stale");
        }
    }
}

impl Link {
    /// Handles one message of the arbiter.
    pub(super) fn take_in(
        &self,
        answer: CustodyAnswer,
        descriptors: Vec<OwnedFd>,
        recall: impl FnOnce(),
    ) -> Result<(), CustodyError> {
        match (answer, descriptors.into_iter().next()) {
            (CustodyAnswer::Lent { serial, lease, bytes, more }, Some(descriptor)) => {
                self.deliver(serial, Reply::Lent { lease, bytes, more, descriptor });
            }
            (CustodyAnswer::Granted { serial, value }, _) => self.deliver(serial, Reply::Granted(value)),
            (CustodyAnswer::Shared { serial, share }, _) => self.deliver(serial, Reply::Shared(share)),
            (CustodyAnswer::Refused { serial, error }, _) => self.deliver(serial, Reply::Refused(error)),
            (CustodyAnswer::Process { serial, process, bytes }, _) => {
                self.deliver(serial, Reply::Process { process, bytes });
            }
            (CustodyAnswer::Recall { bytes }, _) => {
                self.recalled.fetch_max(bytes, Ordering::AcqRel);
                recall();
            }
            (answer @ (CustodyAnswer::Welcome { .. } | CustodyAnswer::Lent { .. }), _) => {
                return Err(CustodyError::Unexpected(answer));
            }
        }
        Ok(())
    }

    /// Logs an answer of the wrong kind.
    pub(super) fn unexpected_reply(&self, reply: Reply) -> Code {
        tracing::error!(?reply, "the arbiter sent an answer of the wrong kind");
        self.decline(reply);
        code::UNKNOWN
    }
}
