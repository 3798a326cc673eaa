//! The device's view of a worker: a socket, its process, a pipe and an eventfd. Its messages are hostile.
//!
//! A guest that is a program may bring two eventfds, by which it and its worker wake each other without the device.

use crate::{
    memory::Piece,
    poller::{PollEvent, Poller},
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
use sluice_runtime::{endable::EndableProcess, limited};
use sluice_shared_memory::run;

/// The result of reading a worker's socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WorkerNews {
    /// A message of the worker.
    Message(FromWorker),
    /// There is no message now.
    Nothing,
    /// The socket is closed, or its message is malformed.
    Gone,
}

/// The eventfds by which a program and its worker wake each other. From here on only these two read and write them, so neither can make
/// the device wait.
#[derive(Debug)]
pub struct ProgramSignals {
    /// Written by the program.
    pub doorbell: OwnedFd,
    /// Written by the worker.
    pub wake: OwnedFd,
}

/// The descriptors by which the device rings a worker, and learns that it wakes its guest.
#[derive(Debug)]
struct DeviceSignals {
    /// The device's end of a pipe, written when the guest rings; the worker reads the other end.
    doorbell: OwnedFd,
    /// Written by the worker to wake the guest; watched for changes and never read.
    wake: OwnedFd,
}

/// The device's side of one worker.
#[derive(Debug)]
pub struct Worker {
    socket: Channel<FromWorker, ToWorker>,
    process: EndableProcess,
    /// `None` if the guest and the worker wake each other.
    signals: Option<DeviceSignals>,
    /// True if the poller reports that the socket can take more.
    watched: bool,
}

impl Worker {
    /// Adopts a worker: watches it and sends it the begin of the session, with the program's signals if it brought some.
    ///
    /// # Errors
    /// The kernel's, for instance if there are no descriptors left. The caller then kills the worker and waits for it.
    pub fn adopt(
        session: u32,
        socket: OwnedFd,
        process: EndableProcess,
        program: Option<ProgramSignals>,
        poller: &Poller,
    ) -> Result<Worker, (Errno, EndableProcess)> {
        let socket = Channel::<FromWorker, ToWorker>::new(socket);
        let begin = ToWorker::Begin { session, version: control::VERSION };
        let set_up = || -> Result<Option<DeviceSignals>, Errno> {
            // The worker holds the other end, not this open file, so it cannot make it blocking again.
            rustix::fs::fcntl_setfl(&socket, OFlags::NONBLOCK)?;
            let signals = if let Some(ProgramSignals { doorbell, wake }) = program {
                socket.send(&begin, &[doorbell.as_fd(), wake.as_fd()])?;
                None
            } else {
                // An eventfd could be filled by the worker and made blocking: the device, and with it the whole VM, would wait in its
                // next write. Each end of a pipe has its own flags.
                let (theirs, doorbell) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)?;
                let wake = eventfd(0, EventfdFlags::CLOEXEC)?;
                socket.send(&begin, &[theirs.as_fd(), wake.as_fd()])?;
                poller.edge(wake.as_fd(), PollEvent::Wake(session))?;
                Some(DeviceSignals { doorbell, wake })
            };
            poller.level(process.as_fd(), PollEvent::Exited(session))?;
            poller.level(socket.as_fd(), PollEvent::Socket(session))?;
            Ok(signals)
        };
        match set_up() {
            Ok(signals) => Ok(Worker { socket, process, signals, watched: false }),
            Err(error) => {
                poller.forget(process.as_fd());
                Err((error, process))
            }
        }
    }

    /// Writes the doorbell, unless the guest does.
    pub fn ring(&self, session: u32) {
        let Some(DeviceSignals { doorbell, .. }) = &self.signals else { return };
        match rustix::io::write(doorbell, &[1]) {
            // Full: it is ringing already. Broken: the worker is gone, as its pidfd shows.
            Ok(_) | Err(Errno::AGAIN | Errno::PIPE) => {}
            Err(error) => {
                limited!(warn, session, %error, "cannot ring a worker's doorbell");
            }
        }
    }

    /// Kills the worker. Its pidfd becomes readable once it is gone.
    pub fn kill(&self) {
        self.process.kill();
    }

    /// Shuts down the worker's socket, which asks it to exit, and keeps its process.
    pub fn hang_up(&self, poller: &Poller) {
        // Shut down, not closed: the worker still receives a message that is in the socket already.
        let _ = rustix::net::shutdown(&self.socket, rustix::net::Shutdown::Both);
        self.forget_messages(poller);
    }

    fn forget_messages(&self, poller: &Poller) {
        poller.forget(self.socket.as_fd());
        if let Some(DeviceSignals { wake, .. }) = &self.signals {
            poller.forget(wake.as_fd());
        }
    }

    /// Stops watching the worker and returns its process.
    #[must_use]
    pub fn release(self, poller: &Poller) -> EndableProcess {
        self.forget_messages(poller);
        poller.forget(self.process.as_fd());
        self.process
    }

    /// Sends the worker one piece of a resource to map. `AGAIN`: the socket is full.
    ///
    /// # Errors
    /// The kernel's error of the send.
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

    /// Requests the worker to unmap a resource. `AGAIN`: the socket is full.
    ///
    /// # Errors
    /// The kernel's error of the send.
    pub fn detach(&self, slot: u32) -> Result<(), Errno> {
        self.socket.send(&ToWorker::Detach { slot }, &[])
    }

    /// Sets whether the poller reports that the socket can take more.
    pub fn watch_room(&mut self, session: u32, wanted: bool, poller: &Poller) {
        if self.watched != wanted
            && poller.writable(self.socket.as_fd(), PollEvent::Socket(session), wanted).is_ok()
        {
            self.watched = wanted;
        }
    }

    /// Receives the next message.
    #[must_use]
    pub fn receive(&self) -> WorkerNews {
        match self.socket.receive() {
            Ok(Received::Message(message, _)) => WorkerNews::Message(message),
            Ok(Received::Empty) => WorkerNews::Nothing,
            Ok(Received::Closed) | Err(_) => WorkerNews::Gone,
        }
    }
}

/// Creates a memfd with these bytes that no process can change.
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

/// Descriptors of a worker for tests.
impl Worker {
    /// The control socket.
    #[must_use]
    pub fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
