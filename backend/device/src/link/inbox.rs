//! The answers of `sluiced` for one device.

use super::{lock, notify};
use rustix::{
    event::{EventfdFlags, eventfd},
    fd::{AsFd, BorrowedFd, OwnedFd},
    io::Errno,
};
use sluice_runtime::endable::EndableProcess;
use std::sync::Mutex;

/// The answer of `sluiced` for a session.
#[derive(Debug)]
pub enum Arrival {
    /// A worker has started.
    Worker {
        /// The session's number.
        session: u32,
        /// The worker's control socket.
        socket: OwnedFd,
        /// The worker's process.
        process: EndableProcess,
    },
    /// The session gets no worker.
    None {
        /// The session's number.
        session: u32,
        /// The CUresult for the guest.
        error: u32,
    },
}

/// The arrivals for one device.
#[derive(Debug)]
pub struct Inbox {
    /// The arrivals; `None` once the device is gone.
    arrivals: Mutex<Option<Vec<Arrival>>>,
    event: OwnedFd,
}

impl Inbox {
    /// Creates an empty inbox.
    ///
    /// # Errors
    /// The kernel's error if it has no descriptor.
    pub fn new() -> Result<Inbox, Errno> {
        Ok(Inbox {
            arrivals: Mutex::new(Some(Vec::new())),
            event: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
        })
    }

    /// An eventfd that is written with each arrival.
    #[must_use]
    pub fn event(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }

    /// Adds an arrival.
    ///
    /// # Errors
    /// The arrival, if the inbox is closed.
    pub fn put(&self, arrival: Arrival) -> Result<(), Arrival> {
        let Some(arrivals) = &mut *lock(&self.arrivals) else { return Err(arrival) };
        arrivals.push(arrival);
        notify(&self.event);
        Ok(())
    }

    /// Takes all arrivals.
    pub fn take(&self) -> Vec<Arrival> {
        lock(&self.arrivals).as_mut().map(core::mem::take).unwrap_or_default()
    }

    /// Takes all arrivals and closes the inbox.
    pub fn close(&self) -> Vec<Arrival> {
        lock(&self.arrivals).take().unwrap_or_default()
    }
}
