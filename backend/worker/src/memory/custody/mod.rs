//! The worker's end of custody: the source of its device memory.
//!
//! The helper threads and the submitter thread request memory here, and each may wait; the dispatcher only reads the page. It owns
//! one socket and one page per device, and one thread that reads every socket: the thread passes answers to the threads that wait
//! for them, records recalls, and ends the session when an arbiter is gone, because then no process accounts for the memory any
//! more. It must never use memory that an arbiter did not lend or grant.

mod link;

use crate::{
    memory::{Chunk, ChunkSource, Lease, MemoryStats},
    session::objects::ContextRef,
};
use core::sync::atomic::Ordering;
pub(crate) use link::readable;
use link::{Link, Reply, lock};
use rustix::{
    fd::{AsFd as _, OwnedFd},
    io::Errno,
};
use sluice_driver::{Code, Driver, code};
use sluice_messages::{
    channel::ReceiveError,
    custody::{CustodyAnswer, CustodyRequest, Growth, UNIT},
};
use sluice_shared_memory::{Mapping, mapping::MapError};
use std::sync::Arc;

/// Bytes that any growth takes beside its known size: the driver's own tables of an image or a limit.
pub(crate) const GROWTH_BYTES: u64 = 64 << 10;

/// Bytes of device memory that a driver takes for an image of `bytes`. The driver allocates in blocks: a large image has blocks
/// of its own, and as many small images as fit share one.
pub(crate) fn in_blocks(bytes: u64) -> u64 {
    // The odd bytes are covered by [`GROWTH_BYTES`].
    let main = bytes.saturating_sub(GROWTH_BYTES);
    let blocks = match UNIT.checked_div(main) {
        None => 0,
        Some(0) => main.checked_next_multiple_of(UNIT).unwrap_or(u64::MAX),
        Some(together) => UNIT / together,
    };
    blocks.max(bytes)
}

/// The reason why a worker has no memory.
#[derive(Debug, thiserror::Error)]
pub enum CustodyError {
    /// A system call failed.
    #[error(transparent)]
    Kernel(#[from] Errno),
    /// A socket failed, or carried a malformed message.
    #[error("custody socket: {0}")]
    Receive(#[from] ReceiveError),
    /// The arbiter sent nothing in time.
    #[error("the arbiter of device {0} sent no first message in time")]
    Silent(usize),
    /// The arbiter is gone.
    #[error("the arbiter of device {0} is gone")]
    Gone(usize),
    /// A message out of order.
    #[error("unexpected message {0:?}")]
    Unexpected(CustodyAnswer),
    /// The custody page is invalid.
    #[error("the custody page cannot be used: {0}")]
    Page(&'static str),
    /// The page cannot be mapped.
    #[error(transparent)]
    Map(#[from] MapError),
}

/// The links to the arbiters of all devices, in order of ordinals.
#[derive(Debug)]
pub(crate) struct Custody {
    driver: Arc<Driver>,
    links: Vec<Link>,
}

/// A process of the VM, for lists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TenantProcess {
    /// The guest's own number of it.
    pub(crate) process: u32,
    pub(crate) bytes: u64,
}

/// The arbiter's permission for the driver to take memory for itself; it ends when dropped. Unless the driver took the memory
/// ([`Grant::taken`]), the bytes are then reported as given back.
#[derive(Debug)]
pub(crate) struct Grant<'a> {
    link: &'a Link,
    reason: Growth,
    bytes: u64,
    extent: Extent,
    taken: bool,
}

/// The extent of a grant.
#[derive(Debug)]
enum Extent {
    /// Within the margin of earlier grants.
    Margin,
    /// The grant with this serial, which a message ends.
    Granted(u64),
}

impl Grant<'_> {
    /// Records that the driver has taken the memory, and returns the bytes. With a context, the driver gives them back at its end:
    /// see [`Custody::context_gone`].
    pub(crate) fn taken(mut self, context: Option<ContextRef>) -> u64 {
        self.taken = true;
        if let Some(context) = context {
            *lock(&self.link.contexts).entry(context.serial).or_default() += self.bytes;
        }
        self.bytes
    }

    /// As [`Grant::taken`], for several contexts of the device, with the bytes of each. The first one has the bytes that any growth
    /// takes beside.
    pub(crate) fn taken_in(mut self, parts: impl Iterator<Item = (ContextRef, u64)>) {
        self.taken = true;
        let mut contexts = lock(&self.link.contexts);
        let mut beside = GROWTH_BYTES;
        for (context, bytes) in parts {
            *contexts.entry(context.serial).or_default() +=
                bytes.saturating_add(core::mem::take(&mut beside));
        }
    }
}

impl Drop for Grant<'_> {
    fn drop(&mut self) {
        match self.extent {
            // Only now: until the driver has taken these bytes, they belong to the margin that the arbiter allows beyond a figure.
            Extent::Margin => _ = self.link.spent.fetch_add(self.bytes, Ordering::Relaxed),
            Extent::Granted(serial) => self.link.send(CustodyRequest::Grown { serial }),
        }
        if !self.taken {
            self.link.shrunk(self.reason, self.bytes);
        }
    }
}

impl Custody {
    /// Waits for the first message of every arbiter.
    pub(crate) fn new(driver: Arc<Driver>, sockets: Vec<OwnedFd>) -> Result<Custody, CustodyError> {
        let links = sockets.into_iter().enumerate().map(|(device, socket)| Link::welcomed(device, socket));
        Ok(Custody { driver, links: links.collect::<Result<_, _>>()? })
    }

    /// For the time accounting of each device: the page of its arbiter, the page for reports, and the eventfd that wakes the
    /// arbiter. Can be taken once.
    pub(crate) fn time_accounts(&self) -> Vec<(Arc<Mapping>, Mapping, OwnedFd)> {
        let account = |link: &Link| {
            let (report, wake_fd) = lock(&link.account).take()?;
            Some((Arc::clone(&link.page), report, wake_fd))
        };
        self.links.iter().filter_map(account).collect()
    }

    fn link(&self, device: i32) -> Result<&Link, Code> {
        usize::try_from(device).ok().and_then(|device| self.links.get(device)).ok_or(code::INVALID_DEVICE)
    }

    /// Sends the guest's number of its process to the arbiters.
    pub(crate) fn hello(&self, process: u32) {
        self.links.iter().for_each(|link| link.send(CustodyRequest::Hello { process }));
    }

    /// Gets permission for the driver to take memory for itself: within the margin of earlier grants without a message,
    /// otherwise from the arbiter, which may wait.
    pub(crate) fn grow(&self, device: i32, reason: Growth, bytes: u64) -> Result<Grant<'_>, Code> {
        let link = self.link(device)?;
        let bytes = bytes.saturating_add(GROWTH_BYTES);
        if reason != Growth::Context && link.spend(bytes) {
            return Ok(Grant { link, reason, bytes, extent: Extent::Margin, taken: false });
        }
        link.ask_growth(reason, bytes)
    }

    /// As [`Custody::grow`], but always asks the arbiter: the driver did not find the memory of the margin.
    pub(crate) fn ask_growth(&self, device: i32, reason: Growth, bytes: u64) -> Result<Grant<'_>, Code> {
        self.link(device)?.ask_growth(reason, bytes.saturating_add(GROWTH_BYTES))
    }

    /// Records that the driver has given back the memory of an image or a graph, of a context if it was granted for one.
    pub(crate) fn driver_shrank(&self, device: i32, context: Option<ContextRef>, bytes: u64) {
        let Ok(link) = self.link(device) else { return };
        if let Some(context) = context
            && let Some(held) = lock(&link.contexts).get_mut(&context.serial)
        {
            *held = held.saturating_sub(bytes);
        }
        link.shrunk(Growth::Module, bytes);
    }

    /// Records that the driver has given back a context with everything that it had taken for it.
    pub(crate) fn context_gone(&self, device: i32, context: ContextRef) {
        let Ok(link) = self.link(device) else { return };
        if let Some(bytes) = lock(&link.contexts).remove(&context.serial)
            && bytes > 0
        {
            link.shrunk(Growth::Module, bytes);
        }
        link.shrunk(Growth::Context, GROWTH_BYTES);
    }

    /// Counts guest memory that is about to be pinned.
    pub(crate) fn pin(&self, device: i32, bytes: u64) -> Result<(), Code> {
        let link = self.link(device)?;
        match link.ask(|serial| CustodyRequest::Pin { serial, bytes }, Some)? {
            Reply::Granted(_) => Ok(()),
            Reply::Refused(failed) => Err(failed),
            unexpected => Err(link.unexpected_reply(unexpected)),
        }
    }

    /// Counts guest memory that is no longer pinned.
    pub(crate) fn unpin(&self, device: i32, bytes: u64) {
        if let Ok(link) = self.link(device) {
            link.send(CustodyRequest::Unpin { bytes });
        }
    }

    /// Bytes that an arbiter has recalled since the last call.
    pub(crate) fn recalled(&self, device: i32) -> u64 {
        self.link(device).map_or(0, |link| link.recalled.swap(0, Ordering::AcqRel))
    }

    /// Devices with a recall.
    pub(crate) fn recalls(&self) -> impl Iterator<Item = i32> + '_ {
        (0..).zip(&self.links).filter(|(_, link)| link.recalled.load(Ordering::Acquire) > 0).map(|(d, _)| d)
    }

    /// The `index`-th process of the VM on a device.
    pub(crate) fn tenant(&self, device: i32, index: u32) -> Result<Option<TenantProcess>, Code> {
        let link = self.link(device)?;
        match link.ask(|serial| CustodyRequest::Process { serial, index }, Some)? {
            Reply::Process { process, bytes } => Ok(Some(TenantProcess { process, bytes })),
            Reply::Refused(_) => Ok(None),
            unexpected => Err(link.unexpected_reply(unexpected)),
        }
    }

    /// The placement unit of a device.
    pub(crate) fn unit(&self, device: i32) -> Result<u32, Code> {
        self.link(device).map(|link| link.unit)
    }
}

impl MemoryStats for Custody {
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

impl Custody {
    fn import(&self, device: i32, lease: u64, bytes: u64, descriptor: &OwnedFd) -> Result<Chunk, Code> {
        let handle = self.driver.chunk_import(descriptor.as_fd())?;
        Ok(Chunk { handle, bytes, device, lease: Lease::Lent(lease) })
    }

    /// Gives back a chunk that is mapped nowhere.
    fn give_back(&self, chunk: Chunk) {
        if let Err(failed) = self.driver.cuMemRelease(chunk.handle) {
            // Not given back: the driver may not have released it.
            tracing::error!(code = failed, "cannot release a chunk");
            return;
        }
        if let (Some(lease), Ok(link)) = (chunk.lease.number(), self.link(chunk.device)) {
            link.send(CustodyRequest::Give { lease });
        }
    }
}

impl ChunkSource for Arc<Custody> {
    fn take(&mut self, device: i32, bytes: u64) -> Result<Chunk, Code> {
        let link = self.link(device)?;
        match link.ask(|serial| CustodyRequest::Take { serial, bytes }, Some)? {
            Reply::Lent { lease, bytes: lent, more: false, descriptor } if lent == bytes => {
                self.import(device, lease, bytes, &descriptor).inspect_err(|failed| {
                    tracing::error!(code = failed, "cannot import a chunk");
                    link.send(CustodyRequest::Give { lease });
                })
            }
            Reply::Refused(failed) => Err(failed),
            unexpected => Err(link.unexpected_reply(unexpected)),
        }
    }

    fn give(&mut self, chunk: Chunk) {
        self.give_back(chunk);
    }

    fn idle(&mut self, device: i32, bytes: u64) {
        if let Ok(link) = self.link(device) {
            link.send(CustodyRequest::Idle { bytes });
        }
    }

    fn free(&mut self, device: i32) -> u64 {
        self.link(device).map_or(0, |link| {
            link.settle();
            link.memory().0
        })
    }

    fn share(&mut self, share: u128, chunk: &Chunk) -> Result<u128, Code> {
        let lease = chunk.lease.number().ok_or(code::NOT_SUPPORTED)?;
        let link = self.link(chunk.device)?;
        match link.ask(|serial| CustodyRequest::Share { serial, share, lease }, Some)? {
            Reply::Shared(share) => Ok(share),
            Reply::Refused(failed) => Err(failed),
            unexpected => Err(link.unexpected_reply(unexpected)),
        }
    }

    fn unshare(&mut self, device: i32, share: u128) {
        if let Ok(link) = self.link(device) {
            link.send(CustodyRequest::Unshare { share });
        }
    }

    fn open(&mut self, device: i32, share: u128) -> Result<Vec<Chunk>, Code> {
        let link = self.link(device)?;
        let mut chunks = Vec::new();
        let mut failed = None;
        let open = |serial| CustodyRequest::Open { serial, share };
        let asked = link.ask(open, |reply| match reply {
            Reply::Lent { lease, bytes, more, descriptor } => {
                match self.import(device, lease, bytes, &descriptor) {
                    Ok(chunk) => chunks.push(chunk),
                    Err(error) => {
                        failed = Some(error);
                        link.send(CustodyRequest::Give { lease });
                    }
                }
                (!more).then_some(Ok(()))
            }
            Reply::Refused(refused) => Some(Err(refused)),
            unexpected => Some(Err(link.unexpected_reply(unexpected))),
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

#[cfg(test)]
mod tests;
