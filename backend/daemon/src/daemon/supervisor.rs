//! The other end of standard input: `sluice run` or `sluice host`.

use std::{
    io,
    os::{fd::OwnedFd, unix},
};

use anyhow::{Context as _, Result};
use sluice_api::supervision::READY;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::UnixStream,
};

/// The supervisor's socket.
pub(super) struct Supervisor {
    stream: UnixStream,
}

impl Supervisor {
    pub(super) fn new(socket: OwnedFd) -> Result<Self> {
        let stream = unix::net::UnixStream::from(socket);
        stream.set_nonblocking(true)?;
        let stream = UnixStream::from_std(stream).context("standard input is not a stream socket")?;
        Ok(Self { stream })
    }

    pub(super) async fn say_ready(&mut self) -> Result<()> {
        // The socket is empty, so it has room for a few bytes.
        match self.stream.write_all(READY).await {
            Ok(()) => Ok(()),
            // The next turn of the loop finds its end.
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
            Err(error) => Err(error).context("cannot send to the supervisor"),
        }
    }
}

/// Returns when the supervisor is gone; never if there is none.
pub(super) async fn closed(supervisor: &mut Option<Supervisor>) {
    let Some(supervisor) = supervisor else { return std::future::pending().await };
    let mut bytes = [0; 16];
    // The supervisor sends nothing: a read returns its end, or bytes to be ignored.
    while matches!(supervisor.stream.read(&mut bytes).await, Ok(1..)) {}
}
