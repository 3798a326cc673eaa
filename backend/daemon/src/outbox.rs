//! Messages on their way to another backend process, in the order in which they were said.
//!
//! Whoever has something to say never waits for the one who hears it: a peer that does not read is found out by whoever
//! waits for its answers, and ended.

use std::{io, os::fd::OwnedFd};

use rustix::fd::AsFd as _;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use crate::channel::Channel;

/// A message and the descriptors that go with it.
type Letter = (Vec<u8>, Vec<OwnedFd>);

/// Where messages are put.
#[derive(Clone, Debug)]
pub(crate) struct Outbox(UnboundedSender<Letter>);

/// From where they are sent.
#[derive(Debug)]
pub(crate) struct Letters(UnboundedReceiver<Letter>);

/// Both sides.
pub(crate) fn outbox() -> (Outbox, Letters) {
    let (sender, receiver) = unbounded_channel();
    (Outbox(sender), Letters(receiver))
}

impl Outbox {
    /// Says something; false when the peer is known to be gone.
    pub(crate) fn post(&self, message: impl Into<Vec<u8>>, descriptors: Vec<OwnedFd>) -> bool {
        self.0.send((message.into(), descriptors)).is_ok()
    }
}

impl Letters {
    /// Sends what is put into the outbox until the peer is gone, which is not an error.
    pub(crate) async fn send(&mut self, channel: &Channel) -> io::Result<()> {
        while let Some((message, descriptors)) = self.0.recv().await {
            let descriptors: Vec<_> = descriptors.iter().map(|descriptor| descriptor.as_fd()).collect();
            match channel.send(&message, &descriptors).await {
                Err(error) if error.kind() == io::ErrorKind::BrokenPipe => return Ok(()),
                result => result?,
            }
        }
        Ok(())
    }
}
