//! The worker's end of custody: the source of its device memory.
//!
//! One socket and one page per device. Requests come from the helper threads and the feeder, each of which may wait; the
//! dispatcher only reads the page. One thread reads every socket: it hands answers to the threads that wait for them, notes
//! recalls, and ends the session when a lender (an arbiter) is gone, for then no process answers for the memory any more.

use crate::{
    memory::{Books, Chunk, ChunkSource, Lease},
    session::Session,
    submit::time::Meter,
};
use core::{
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fd::{AsFd, OwnedFd},
    io::Errno,
};
use sluice_driver::{Code, Driver, code};
use sluice_messages::{
    channel::{Channel, ReceiveError, Received},
    custody::{Answer, Growth, Request, UNIT, page, report},
};
use sluice_protocol::shared::Shared as _;
use sluice_shared_memory::{Mapping, Run, mapping::MapError};
use std::{
    collections::{BTreeMap, VecDeque},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    time::Instant,
};

/// How long a request may wait. Growth waits while a dead worker's memory is swept, so this is long; a lender refuses
/// what it cannot give long before.
const PATIENCE: Duration = Duration::from_secs(60);
/// Bytes that any growth takes beside what is known of it: a driver's own tables of an image or a limit.
const GROWTH_BYTES: u64 = 64 << 10;
/// How long the lender's first word may take.
const WELCOME_PATIENCE: Duration = Duration::from_secs(10);

/// Bytes that a driver takes for an image of so many: it has device memory in blocks. What is large has blocks of its own, and
/// of what is small as much as fits shares one.
pub(crate) fn in_blocks(bytes: u64) -> u64 {
    // The odd bytes lie in what is asked for besides.
    let main = bytes.saturating_sub(GROWTH_BYTES);
    let blocks = match UNIT.checked_div(main) {
        None => 0,
        Some(0) => main.checked_next_multiple_of(UNIT).unwrap_or(u64::MAX),
        Some(together) => UNIT / together,
    };
    blocks.max(bytes)
}

/// Why a worker has no memory.
#[derive(Debug, thiserror::Error)]
pub enum CustodyError {
    /// The kernel refuses.
    #[error(transparent)]
    Kernel(#[from] Errno),
    /// A socket fails, or brings nonsense.
    #[error("custody socket: {0}")]
    Receive(#[from] ReceiveError),
    /// The lender said nothing.
    #[error("the lender of device {0} does not answer")]
    Silent(usize),
    /// The lender is gone.
    #[error("the lender of device {0} is gone")]
    Gone(usize),
    /// Not the message that is due.
    #[error("{0:?} is not due")]
    Unexpected(Answer),
    /// The custody page is none.
    #[error("the custody page cannot be used: {0}")]
    Page(&'static str),
    /// The page cannot be mapped.
    #[error(transparent)]
    Map(#[from] MapError),
}

/// The lenders of all devices, in order of ordinals.
#[derive(Debug)]
pub(crate) struct Custody {
    driver: Arc<Driver>,
    links: Vec<Link>,
}

/// One lender.
#[derive(Debug)]
struct Link {
    socket: Channel<Answer, Request>,
    page: Arc<Mapping>,
    /// What a meter of the device needs, until it is asked for.
    meter: Mutex<Option<(Mapping, OwnedFd)>>,
    unit: u32,
    serial: AtomicU64,
    /// Answers to those who wait, by serial.
    desk: Mutex<BTreeMap<u64, VecDeque<Reply>>>,
    answered: Condvar,
    /// Bytes that the driver may take before the lender is asked again, while its page says so.
    margin: AtomicU64,
    /// The same right after the last grant.
    full: AtomicU64,
    /// How often something was said that has no answer, and how much of it the page shows for certain.
    said: AtomicU64,
    seen: AtomicU64,
    /// Bytes the lender wants back.
    recalled: AtomicU64,
}

/// What a request is answered with.
#[derive(Debug)]
enum Reply {
    Lent { lease: u64, bytes: u64, more: bool, descriptor: OwnedFd },
    Granted(u64),
    Shared(u128),
    Refused(Code),
    Process { process: u32, bytes: u64 },
}

/// A process of the VM, for lists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Tenant {
    /// The guest's own number of it.
    pub(crate) process: u32,
    pub(crate) bytes: u64,
}

/// Leave for the driver to take memory for itself; over when dropped.
#[derive(Debug)]
pub(crate) struct Grant<'a> {
    /// Whom to tell of its end, and by what serial; nothing for growth within the margin.
    ends: Option<(&'a Link, u64)>,
}

impl Drop for Grant<'_> {
    fn drop(&mut self) {
        if let Some((link, serial)) = self.ends {
            link.tell(Request::Grown { serial });
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether there is a message before the time is over.
pub(crate) fn readable(socket: impl AsFd, patience: Duration) -> Result<bool, Errno> {
    let deadline = Instant::now() + patience;
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
    fn welcomed(device: usize, socket: OwnedFd) -> Result<Link, CustodyError> {
        if !readable(&socket, WELCOME_PATIENCE)? {
            return Err(CustodyError::Silent(device));
        }
        let socket = Channel::new(socket);
        let (answer, descriptors) = socket.receive()?.message().ok_or(CustodyError::Gone(device))?;
        let (unit, file, report, bell) = match (answer, <[OwnedFd; 3]>::try_from(descriptors)) {
            (Answer::Welcome { unit, .. }, Ok([file, report, bell])) => (unit, file, report, bell),
            (answer, _) => return Err(CustodyError::Unexpected(answer)),
        };
        // A page shorter than it says would be a fault at the first look.
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
            meter: Mutex::new(Some((report, bell))),
            unit,
            serial: AtomicU64::new(1),
            desk: Mutex::default(),
            answered: Condvar::new(),
            margin: AtomicU64::new(0),
            full: AtomicU64::new(0),
            said: AtomicU64::new(0),
            seen: AtomicU64::new(0),
            recalled: AtomicU64::new(0),
        })
    }

    /// Says something that has no answer. A lender that cannot be told is gone, which the reading thread is about to see.
    fn tell(&self, request: Request) {
        if let Err(error) = self.socket.send(&request, &[]) {
            tracing::warn!(%error, ?request, "cannot tell the lender");
        }
        self.said.fetch_add(1, Ordering::AcqRel);
    }

    /// Asks and takes answers until `last` says that one was the last.
    fn ask<R>(
        &self,
        make: impl FnOnce(u64) -> Request,
        mut take: impl FnMut(Reply) -> Option<R>,
    ) -> Result<R, Code> {
        let serial = self.serial.fetch_add(1, Ordering::Relaxed);
        lock(&self.desk).insert(serial, VecDeque::new());
        // What was said before the request is in the page once the answer is here.
        let said = self.said.load(Ordering::Acquire);
        let sent = self.socket.send(&make(serial), &[]);
        let deadline = Instant::now() + PATIENCE;
        let result = match sent {
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
                tracing::warn!(%error, "cannot ask the lender");
                Err(code::DEVICE_UNAVAILABLE)
            }
        };
        self.seen.fetch_max(said, Ordering::AcqRel);
        let left = lock(&self.desk).remove(&serial);
        left.into_iter().flatten().for_each(|reply| self.decline(reply));
        result
    }

    fn reply(&self, serial: u64, deadline: Instant) -> Result<Reply, Code> {
        let mut desk = lock(&self.desk);
        loop {
            let Some(replies) = desk.get_mut(&serial) else { return Err(code::UNKNOWN) };
            if let Some(reply) = replies.pop_front() {
                return Ok(reply);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                tracing::error!("the lender does not answer");
                return Err(code::OUT_OF_MEMORY);
            }
            desk = self.answered.wait_timeout(desk, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Takes an answer that a thread waits for to it.
    fn deliver(&self, serial: u64, reply: Reply) {
        let mut desk = lock(&self.desk);
        match desk.get_mut(&serial) {
            Some(replies) => {
                replies.push_back(reply);
                self.answered.notify_all();
            }
            None => {
                drop(desk);
                self.decline(reply);
            }
        }
    }

    /// What came too late goes back.
    fn decline(&self, reply: Reply) {
        if let Reply::Lent { lease, .. } = reply {
            self.tell(Request::Give { lease });
        }
    }

    fn memory(&self) -> (u64, u64) {
        page::memory(&self.page.words())
    }

    /// Uses so much of the margin, if it may be used and suffices.
    fn spend(&self, bytes: u64) -> bool {
        let open = self.page.words().load_u32(page::OPEN, Ordering::Acquire) == 1;
        let rest = |margin: u64| margin.checked_sub(bytes);
        open && self.margin.fetch_update(Ordering::Relaxed, Ordering::Relaxed, rest).is_ok()
    }

    /// Takes bytes that the driver gave back into the margin, as far as the last grant made it.
    fn regain(&self, bytes: u64) -> bool {
        let full = self.full.load(Ordering::Relaxed);
        let more = |margin: u64| margin.checked_add(bytes).filter(|margin| *margin <= full);
        self.margin.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).is_ok()
    }

    fn is_settled(&self) -> bool {
        self.seen.load(Ordering::Acquire) >= self.said.load(Ordering::Acquire)
    }

    /// Makes sure that the page shows what was said before.
    fn settle(&self) {
        // Nobody is behind the last worker, so this is answered at once, and answers keep their order.
        let behind = |serial| Request::Process { serial, index: u32::MAX };
        if !self.is_settled()
            && let Err(failed) = self.ask(behind, Some)
        {
            tracing::warn!(code = failed, "the lender does not say where it stands");
        }
    }
}

impl Custody {
    /// Waits for the first word of every lender.
    pub(crate) fn new(driver: Arc<Driver>, sockets: Vec<OwnedFd>) -> Result<Custody, CustodyError> {
        let links = sockets.into_iter().enumerate().map(|(device, socket)| Link::welcomed(device, socket));
        Ok(Custody { driver, links: links.collect::<Result<_, _>>()? })
    }

    /// The meters of all devices; once.
    pub(crate) fn meters(&self) -> Vec<Meter> {
        let meter = |link: &Link| {
            let (report, bell) = lock(&link.meter).take()?;
            Some(Meter::new(Arc::clone(&link.page), report, Some(bell)))
        };
        self.links.iter().filter_map(meter).collect()
    }

    fn link(&self, device: i32) -> Result<&Link, Code> {
        usize::try_from(device).ok().and_then(|device| self.links.get(device)).ok_or(code::INVALID_DEVICE)
    }

    /// The reading thread; `recall` is called when a lender wants memory back.
    pub(crate) fn listen(&self, session: &Session, recall: impl Fn()) -> ! {
        loop {
            let mut polled: Vec<PollFd<'_>> =
                self.links.iter().map(|link| PollFd::new(&link.socket, PollFlags::IN)).collect();
            match poll(&mut polled, None::<&Timespec>) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => {
                    tracing::error!(%error, "cannot hear the lenders");
                    session.lose(code::DEVICE_UNAVAILABLE, 1)
                }
            }
            let ready: Vec<bool> = polled.iter().map(|polled| !polled.revents().is_empty()).collect();
            for ((device, link), _) in self.links.iter().enumerate().zip(ready).filter(|(_, ready)| *ready) {
                match link.socket.receive() {
                    Ok(Received::Message(answer, descriptors)) => {
                        if let Err(error) = link.take_in(answer, descriptors, &recall) {
                            tracing::error!(%error, device, "the lender does not keep to the protocol");
                            session.lose(code::DEVICE_UNAVAILABLE, 1)
                        }
                    }
                    Ok(Received::Closed | Received::Empty) => {
                        tracing::warn!(device, "the lender is gone");
                        session.lose(code::DEVICE_UNAVAILABLE, 1)
                    }
                    Err(error) => {
                        tracing::error!(%error, device, "the custody socket is unusable");
                        session.lose(code::DEVICE_UNAVAILABLE, 1)
                    }
                }
            }
        }
    }

    /// Tells the lenders which process of the guest this is.
    pub(crate) fn hello(&self, process: u32) {
        self.links.iter().for_each(|link| link.tell(Request::Hello { process }));
    }

    /// Leave to have the driver take memory for itself: within the margin of earlier grants without a message, else the lender
    /// is asked and waited for.
    pub(crate) fn grow(&self, device: i32, reason: Growth, bytes: u64) -> Result<Grant<'_>, Code> {
        let link = self.link(device)?;
        let bytes = bytes.saturating_add(GROWTH_BYTES);
        if reason != Growth::Context && link.spend(bytes) {
            return Ok(Grant { ends: None });
        }
        self.ask_growth(device, reason, bytes)
    }

    /// The same, but the lender is asked in any case: the driver did not find the memory of the margin.
    pub(crate) fn ask_growth(&self, device: i32, reason: Growth, bytes: u64) -> Result<Grant<'_>, Code> {
        let link = self.link(device)?;
        let left = link.margin.load(Ordering::Relaxed);
        let mut granted = 0;
        let grow = |serial| {
            granted = serial;
            Request::Grow { serial, reason: reason as u32, bytes, left }
        };
        let answer = link.ask(grow, Some)?;
        match answer {
            Reply::Granted(margin) => {
                let before = link.margin.fetch_add(margin, Ordering::Relaxed);
                link.full.store(before.saturating_add(margin), Ordering::Relaxed);
                Ok(Grant { ends: Some((link, granted)) })
            }
            Reply::Refused(failed) => Err(failed),
            unexpected => Err(link.strange(unexpected)),
        }
    }

    /// The driver has given back what it took for this: within the margin it is taken again without a message.
    pub(crate) fn shrunk(&self, device: i32, reason: Growth, bytes: u64) {
        let Ok(link) = self.link(device) else { return };
        let is_context = reason == Growth::Context;
        let bytes = if is_context { bytes } else { bytes.saturating_add(GROWTH_BYTES) };
        if is_context || !link.regain(bytes) {
            link.tell(Request::Shrunk { reason: reason as u32, bytes });
        }
    }

    /// Counts guest memory that is about to be pinned.
    pub(crate) fn pin(&self, device: i32, bytes: u64) -> Result<(), Code> {
        let link = self.link(device)?;
        match link.ask(|serial| Request::Pin { serial, bytes }, Some)? {
            Reply::Granted(_) => Ok(()),
            Reply::Refused(failed) => Err(failed),
            unexpected => Err(link.strange(unexpected)),
        }
    }

    /// Guest memory is no longer pinned.
    pub(crate) fn unpin(&self, device: i32, bytes: u64) {
        if let Ok(link) = self.link(device) {
            link.tell(Request::Unpin { bytes });
        }
    }

    /// Bytes that a lender wants back, since this was last asked.
    pub(crate) fn recalled(&self, device: i32) -> u64 {
        self.link(device).map_or(0, |link| link.recalled.swap(0, Ordering::AcqRel))
    }

    /// Devices that want memory back.
    pub(crate) fn recalls(&self) -> impl Iterator<Item = i32> + '_ {
        (0..).zip(&self.links).filter(|(_, link)| link.recalled.load(Ordering::Acquire) > 0).map(|(d, _)| d)
    }

    /// The `index`-th process of the VM on a device.
    pub(crate) fn tenant(&self, device: i32, index: u32) -> Result<Option<Tenant>, Code> {
        let link = self.link(device)?;
        match link.ask(|serial| Request::Process { serial, index }, Some)? {
            Reply::Process { process, bytes } => Ok(Some(Tenant { process, bytes })),
            Reply::Refused(_) => Ok(None),
            unexpected => Err(link.strange(unexpected)),
        }
    }

    /// The placement unit of a device.
    pub(crate) fn unit(&self, device: i32) -> Result<u32, Code> {
        self.link(device).map(|link| link.unit)
    }

    fn import(&self, device: i32, lease: u64, bytes: u64, descriptor: &OwnedFd) -> Result<Chunk, Code> {
        let handle = self.driver.chunk_import(descriptor.as_fd())?;
        Ok(Chunk { handle, bytes, device, lease: Lease::Lent(lease) })
    }

    /// Gives back a chunk that is mapped nowhere.
    fn give_back(&self, chunk: Chunk) {
        if let Err(failed) = self.driver.chunk_release(chunk.handle) {
            // Not given back: nobody knows that the driver has let go of it.
            tracing::error!(code = failed, "cannot release a chunk");
            return;
        }
        if let (Some(lease), Ok(link)) = (chunk.lease.number(), self.link(chunk.device)) {
            link.tell(Request::Give { lease });
        }
    }
}

impl Link {
    /// One message of the lender.
    fn take_in(
        &self,
        answer: Answer,
        descriptors: Vec<OwnedFd>,
        recall: impl FnOnce(),
    ) -> Result<(), CustodyError> {
        match (answer, descriptors.into_iter().next()) {
            (Answer::Lent { serial, lease, bytes, more }, Some(descriptor)) => {
                self.deliver(serial, Reply::Lent { lease, bytes, more, descriptor });
            }
            (Answer::Granted { serial, value }, _) => self.deliver(serial, Reply::Granted(value)),
            (Answer::Shared { serial, share }, _) => self.deliver(serial, Reply::Shared(share)),
            (Answer::Refused { serial, error }, _) => self.deliver(serial, Reply::Refused(error)),
            (Answer::Process { serial, process, bytes }, _) => {
                self.deliver(serial, Reply::Process { process, bytes });
            }
            (Answer::Recall { bytes }, _) => {
                self.recalled.fetch_max(bytes, Ordering::AcqRel);
                recall();
            }
            (answer @ (Answer::Welcome { .. } | Answer::Lent { .. }), _) => {
                return Err(CustodyError::Unexpected(answer));
            }
        }
        Ok(())
    }

    /// An answer of the wrong kind.
    fn strange(&self, reply: Reply) -> Code {
        tracing::error!(?reply, "the lender answers something else");
        self.decline(reply);
        code::UNKNOWN
    }
}

impl ChunkSource for Arc<Custody> {
    fn take(&mut self, device: i32, bytes: u64) -> Result<Chunk, Code> {
        let link = self.link(device)?;
        match link.ask(|serial| Request::Take { serial, bytes }, Some)? {
            Reply::Lent { lease, bytes: lent, more: false, descriptor } if lent == bytes => {
                self.import(device, lease, bytes, &descriptor).inspect_err(|failed| {
                    tracing::error!(code = failed, "cannot import a chunk");
                    link.tell(Request::Give { lease });
                })
            }
            Reply::Refused(failed) => Err(failed),
            unexpected => Err(link.strange(unexpected)),
        }
    }

    fn give(&mut self, chunk: Chunk) {
        self.give_back(chunk);
    }

    fn idle(&mut self, device: i32, bytes: u64) {
        if let Ok(link) = self.link(device) {
            link.tell(Request::Idle { bytes });
        }
    }

    fn affords(&mut self, device: i32, bytes: u64) -> bool {
        self.link(device).is_ok_and(|link| {
            link.settle();
            link.memory().0 >= bytes
        })
    }

    fn share(&mut self, share: u128, chunk: &Chunk) -> Result<u128, Code> {
        let lease = chunk.lease.number().ok_or(code::NOT_SUPPORTED)?;
        let link = self.link(chunk.device)?;
        match link.ask(|serial| Request::Share { serial, share, lease }, Some)? {
            Reply::Shared(share) => Ok(share),
            Reply::Refused(failed) => Err(failed),
            unexpected => Err(link.strange(unexpected)),
        }
    }

    fn unshare(&mut self, device: i32, share: u128) {
        if let Ok(link) = self.link(device) {
            link.tell(Request::Unshare { share });
        }
    }

    fn open(&mut self, device: i32, share: u128) -> Result<Vec<Chunk>, Code> {
        self.open_share(device, share)
    }
}

impl Custody {
    fn open_share(&self, device: i32, share: u128) -> Result<Vec<Chunk>, Code> {
        let link = self.link(device)?;
        let mut chunks = Vec::new();
        let mut failed = None;
        let open = |serial| Request::Open { serial, share };
        let asked = link.ask(open, |reply| match reply {
            Reply::Lent { lease, bytes, more, descriptor } => {
                match self.import(device, lease, bytes, &descriptor) {
                    Ok(chunk) => chunks.push(chunk),
                    Err(error) => {
                        failed = Some(error);
                        link.tell(Request::Give { lease });
                    }
                }
                (!more).then_some(Ok(()))
            }
            Reply::Refused(refused) => Some(Err(refused)),
            unexpected => Some(Err(link.strange(unexpected))),
        });
        match asked.and_then(|answer| answer).and(failed.map_or(Ok(()), Err)) {
            Ok(()) => Ok(chunks),
            Err(failed) => {
                chunks.into_iter().for_each(|chunk| self.give_back(chunk));
                Err(failed)
            }
        }
    }
}

impl Books for Custody {
    fn info(&self, device: i32) -> (u64, u64) {
        self.link(device).map_or((0, 0), Link::memory)
    }

    fn is_settled(&self, device: i32) -> bool {
        self.link(device).is_ok_and(Link::is_settled)
    }

    fn settle(&self, device: i32) {
        if let Ok(link) = self.link(device) {
            link.settle();
        }
    }

    fn devices(&self) -> Option<usize> {
        Some(self.links.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Promise: Q6
    #[test]
    fn image_takes_whole_blocks_or_an_even_part_of_one() {
        const MIB: u64 = 1 << 20;
        let cases = [
            (0, 0),
            (100, 100),
            (GROWTH_BYTES + MIB / 2, MIB / 2 + GROWTH_BYTES),
            (GROWTH_BYTES + 700 * MIB / 1000, MIB),
            (GROWTH_BYTES + MIB + 1, 2 * MIB),
            (3 * MIB, 4 * MIB),
            (4 * MIB + 100, 4 * MIB + 100),
            (4 * MIB + GROWTH_BYTES + 1, 6 * MIB),
            (u64::MAX, u64::MAX),
        ];
        for (bytes, expected) in cases {
            assert_eq!(in_blocks(bytes), expected, "{bytes} bytes");
        }
    }
}
