//! A worker as the device sees it: a socket, a pidfd, a pipe and an eventfd. Its messages are hostile.

use crate::{
    memory::Piece,
    poller::{Event, Poller},
};
use rustix::{
    event::{EventfdFlags, eventfd},
    fd::{AsFd, BorrowedFd, OwnedFd},
    fs::{MemfdFlags, OFlags, SealFlags, fcntl_add_seals, memfd_create},
    io::Errno,
    pipe::{PipeFlags, pipe_with},
};
use sluice_messages::{
    channel::{Channel, Received},
    control::{self, FromWorker, ToWorker},
};
use sluice_runtime::{limited, process::kill};
use sluice_shared_memory::run;

/// What a worker's socket brought.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Heard {
    /// A message.
    Message(FromWorker),
    /// Nothing more for now.
    Nothing,
    /// The end, or something no worker says.
    Gone,
}

/// One worker.
#[derive(Debug)]
pub struct Worker {
    socket: Channel<FromWorker, ToWorker>,
    pidfd: OwnedFd,
    /// Written by the device when the guest rings: its end of a pipe, of which the worker reads the other.
    doorbell: OwnedFd,
    /// Written by the worker to wake the guest; watched for changes and never read.
    wake: OwnedFd,
    /// Whether the poller reports that the socket can take more.
    watched: bool,
}

impl Worker {
    /// Adopts a worker: watches it and tells it that the session begins.
    ///
    /// # Errors
    /// The kernel's; out of descriptors for instance. The worker is then to be buried.
    pub fn adopt(
        session: u32,
        socket: OwnedFd,
        pidfd: OwnedFd,
        poller: &Poller,
    ) -> Result<Worker, (Errno, OwnedFd)> {
        let socket = Channel::<FromWorker, ToWorker>::new(socket);
        let set_up = || -> Result<(OwnedFd, OwnedFd), Errno> {
            // The worker holds the other end, not this open file, so it cannot make it blocking again.
            rustix::fs::fcntl_setfl(&socket, OFlags::NONBLOCK)?;
            // Not an eventfd, which the worker could fill and make blocking: the device would wait in its next write, and
            // with it the whole VM. Of a pipe each end has flags of its own.
            let (theirs, doorbell) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)?;
            let wake = eventfd(0, EventfdFlags::CLOEXEC)?;
            let begin = ToWorker::Begin { session, version: control::VERSION };
            socket.send(&begin, &[theirs.as_fd(), wake.as_fd()])?;
            poller.edge(wake.as_fd(), Event::Wake(session))?;
            poller.level(pidfd.as_fd(), Event::Exited(session))?;
            poller.level(socket.as_fd(), Event::Socket(session))?;
            Ok((doorbell, wake))
        };
        match set_up() {
            Ok((doorbell, wake)) => Ok(Worker { socket, pidfd, doorbell, wake, watched: false }),
            Err(error) => {
                poller.forget(pidfd.as_fd());
                Err((error, pidfd))
            }
        }
    }

    /// Writes the doorbell.
    pub fn ring(&self, session: u32) {
        match rustix::io::write(&self.doorbell, &[1]) {
            // Full: it is ringing. Broken: the worker is gone, as its pidfd says.
            Ok(_) | Err(Errno::AGAIN | Errno::PIPE) => {}
            Err(error) => {
                limited!(warn, session, %error, "a doorbell cannot be rung");
            }
        }
    }

    /// Kills the worker. Its pidfd becomes readable when it is gone.
    pub fn kill(&self) {
        kill(self.pidfd.as_fd());
    }

    /// Closes what the worker hears, which asks it to exit, and keeps what tells when it has.
    pub fn hang_up(&self, poller: &Poller) {
        // Shut down, not closed: a message already in the socket is still to be received by the worker.
        let _ = rustix::net::shutdown(&self.socket, rustix::net::Shutdown::Both);
        poller.forget(self.socket.as_fd());
        poller.forget(self.wake.as_fd());
    }

    /// Watches nothing of it any more and gives back its pidfd.
    #[must_use]
    pub fn release(self, poller: &Poller) -> OwnedFd {
        poller.forget(self.socket.as_fd());
        poller.forget(self.wake.as_fd());
        poller.forget(self.pidfd.as_fd());
        self.pidfd
    }

    /// Tells the worker to map one piece of a resource. `AGAIN`: the socket is full.
    ///
    /// # Errors
    /// The kernel's.
    pub fn attach(
        &self,
        slot: u32,
        address: u64,
        bytes: u64,
        piece: &Piece,
        more: bool,
    ) -> Result<(), Errno> {
        let Piece { file, granule, extents, runs } = piece;
        let entries = extents.len().saturating_add(runs.len());
        let mut list = Vec::with_capacity(entries.saturating_mul(run::Run::BYTES));
        for run in extents.iter().chain(runs) {
            run.push(&mut list);
        }
        let count = |list: &[run::Run]| u32::try_from(list.len()).map_err(|_| Errno::OVERFLOW);
        let (extents, runs, granule) = (count(extents)?, count(runs)?, *granule);
        let memfd = sealed(&list)?;
        let message = ToWorker::Attach { slot, address, bytes, runs, extents, granule, more };
        self.socket.send(&message, &[memfd.as_fd(), file.as_fd()])
    }

    /// Tells the worker to unmap a resource. `AGAIN`: the socket is full.
    ///
    /// # Errors
    /// The kernel's.
    pub fn detach(&self, slot: u32) -> Result<(), Errno> {
        self.socket.send(&ToWorker::Detach { slot }, &[])
    }

    /// Has the poller report when the socket can take more.
    pub fn watch_room(&mut self, session: u32, wanted: bool, poller: &Poller) {
        if self.watched != wanted
            && poller.writable(self.socket.as_fd(), Event::Socket(session), wanted).is_ok()
        {
            self.watched = wanted;
        }
    }

    /// Takes the next message.
    #[must_use]
    pub fn hear(&self) -> Heard {
        match self.socket.receive() {
            Ok(Received::Message(message, _)) => Heard::Message(message),
            Ok(Received::Empty) => Heard::Nothing,
            Ok(Received::Closed) | Err(_) => Heard::Gone,
        }
    }
}

/// A memfd with these bytes that nobody can change.
fn sealed(bytes: &[u8]) -> Result<OwnedFd, Errno> {
    let memfd = memfd_create(c"sluice-runs", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    let mut left = bytes;
    while !left.is_empty() {
        let written = rustix::io::write(&memfd, left)?;
        left = left.get(written..).unwrap_or_default();
    }
    fcntl_add_seals(&memfd, SealFlags::SEAL | SealFlags::SHRINK | SealFlags::GROW | SealFlags::WRITE)?;
    Ok(memfd)
}

/// Descriptors of a worker that a test may look at.
impl Worker {
    /// The control socket.
    #[must_use]
    pub fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
