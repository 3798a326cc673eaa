//! Chunks: taken, given back and shared.

use super::{Custody, link::Reply};
use crate::memory::{Chunk, ChunkSource, Lease};
use rustix::fd::{AsFd, OwnedFd};
use sluice_driver::{Code, code};
use sluice_messages::custody::CustodyRequest;
use std::sync::Arc;

impl Custody {
    fn import(&self, device: i32, lease: u64, bytes: u64, descriptor: &OwnedFd) -> Result<Chunk, Code> {
        let handle = self.driver.chunk_import(descriptor.as_fd())?;
        Ok(Chunk { handle, bytes, device, lease: Lease::Lent(lease) })
    }

    /// Gives back a chunk that is mapped nowhere.
    fn give_back(&self, chunk: Chunk) {
        if let Err(failed) = self.driver.chunk_release(chunk.handle) {
            // Not given back: the driver may not have released it.
            tracing::error!(code = failed, "cannot release a chunk");
            return;
        }
        if let (Some(lease), Ok(link)) = (chunk.lease.number(), self.link(chunk.device)) {
            link.tell(CustodyRequest::Give { lease });
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
                    link.tell(CustodyRequest::Give { lease });
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
            link.tell(CustodyRequest::Idle { bytes });
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
        match link.ask(|serial| CustodyRequest::Share { serial, share, lease }, Some)? {
            Reply::Shared(share) => Ok(share),
            Reply::Refused(failed) => Err(failed),
            unexpected => Err(link.strange(unexpected)),
        }
    }

    fn unshare(&mut self, device: i32, share: u128) {
        if let Ok(link) = self.link(device) {
            link.tell(CustodyRequest::Unshare { share });
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
        let open = |serial| CustodyRequest::Open { serial, share };
        let asked = link.ask(open, |reply| match reply {
            Reply::Lent { lease, bytes, more, descriptor } => {
                match self.import(device, lease, bytes, &descriptor) {
                    Ok(chunk) => chunks.push(chunk),
                    Err(error) => {
                        failed = Some(error);
                        link.tell(CustodyRequest::Give { lease });
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
