//! One end of a SEQPACKET socket to another backend process, for the daemon's event loop.

use std::{io, os::fd::OwnedFd};

use rustix::fd::BorrowedFd;
use sluice_messages::control;
use sluice_shared_memory::socket;
use tokio::io::{Interest, unix::AsyncFd};

use crate::handover::watched::watch;

/// A socket that carries fixed-size messages with descriptors.
#[derive(Debug)]
pub struct Channel {
    socket: AsyncFd<OwnedFd>,
}

/// A message's bytes and the descriptors that came with it.
pub type Received = ([u8; control::BYTES], Vec<OwnedFd>);

impl Channel {
    /// Takes over a connected socket.
    ///
    /// # Errors
    /// The kernel's.
    pub fn new(socket: OwnedFd) -> io::Result<Self> {
        rustix::io::ioctl_fionbio(&socket, true)?;
        Ok(Self { socket: watch(socket)? })
    }

    /// Closes it for both sides, also where somebody else has it open.
    pub fn shut(&self) {
        // One that is closed already is.
        _ = rustix::net::shutdown(self.socket.get_ref(), rustix::net::Shutdown::Both);
    }

    /// The next message; `None` when the peer is gone.
    ///
    /// # Errors
    /// The kernel's; `InvalidData` for a message that is not [`control::BYTES`] long.
    pub async fn receive(&self) -> io::Result<Option<Received>> {
        let result = self
            .socket
            .async_io(Interest::READABLE, |socket| {
                let mut bytes = [0; control::BYTES];
                let Some((message, descriptors)) = socket::receive(socket, &mut bytes)? else {
                    return Ok(None);
                };
                if message.len() != control::BYTES {
                    return Err(io::Error::new(io::ErrorKind::InvalidData, "a message cut short"));
                }
                Ok(Some((bytes, descriptors)))
            })
            .await;
        match result {
            // What was in flight when the peer died is of no use to anybody.
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => Ok(None),
            Err(error) if error.raw_os_error() == Some(rustix::io::Errno::MSGSIZE.raw_os_error()) => {
                Err(io::Error::new(io::ErrorKind::InvalidData, "a message too long"))
            }
            result => result,
        }
    }

    /// Sends a message with its descriptors.
    ///
    /// # Errors
    /// The kernel's; `BrokenPipe` when the peer is gone.
    pub async fn send(&self, message: &[u8], descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
        self.socket
            .async_io(Interest::WRITABLE, |socket| Ok(socket::send(socket, message, descriptors)?))
            .await
    }
}
