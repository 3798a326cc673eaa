//! The socket between a step and its other processes: JSON messages that can carry one descriptor.

use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};

use serde::{Serialize, de::DeserializeOwned};
use sluice_shared_memory::socket;

use crate::stop::{Answer, Stop};

/// Largest message in bytes.
const MOST: usize = 128 << 10;

/// One end of the socket.
#[derive(Debug)]
pub(crate) struct Link(OwnedFd);

impl Link {
    /// Takes an end.
    pub(crate) fn new(socket: OwnedFd) -> Link {
        Link(socket)
    }

    /// Sends a message.
    pub(crate) fn send(&self, message: &impl Serialize, descriptor: Option<BorrowedFd<'_>>) -> Answer {
        let text = serde_json::to_vec(message)?;
        let descriptors: Vec<_> = descriptor.into_iter().collect();
        Ok(socket::send(self.0.as_fd(), &text, &descriptors)?)
    }

    /// Waits for a message; `None` if the other process ended. The step's limit bounds the wait.
    pub(crate) fn receive<T: DeserializeOwned>(&self) -> Answer<Option<(T, Option<OwnedFd>)>> {
        let mut buffer = vec![0; MOST];
        let received = socket::receive(self.0.as_fd(), &mut buffer)?;
        let Some((message, mut descriptors)) = received else { return Ok(None) };
        let message =
            serde_json::from_slice(message).map_err(|error| Stop::failed(format!("message: {error}")))?;
        Ok(Some((message, descriptors.pop())))
    }

    /// Closes the connection in both directions.
    pub(crate) fn close(&self) -> Answer {
        Ok(rustix::net::shutdown(&self.0, rustix::net::Shutdown::Both)?)
    }
}
