//! A thread that closes descriptors of processes that a guest can take over.
//!
//! The last close of a file may take seconds: a memory file of a hundred gigabytes, a socket that lingers. A worker or a device may send
//! any descriptor, also one that is never received because its socket is closed first, so no loop that serves several VMs closes
//! one itself.

use rustix::fd::OwnedFd;
use std::{
    sync::mpsc::{Sender, channel},
    thread,
};

/// The thread, seen from the loop.
#[derive(Clone, Debug)]
pub struct Closer {
    work: Sender<Vec<OwnedFd>>,
}

impl Closer {
    /// Starts the thread.
    ///
    /// # Errors
    /// The kernel's error if it cannot start a thread.
    pub fn start() -> Result<Closer, std::io::Error> {
        let (work, descriptors) = channel::<Vec<OwnedFd>>();
        thread::Builder::new()
            .name("closer".to_owned())
            .spawn(move || descriptors.into_iter().for_each(drop))?;
        Ok(Closer { work })
    }

    /// Hands descriptors over to be closed.
    pub fn close(&self, descriptors: Vec<OwnedFd>) {
        if !descriptors.is_empty() && self.work.send(descriptors).is_err() {
            tracing::error!("the thread that closes descriptors has ended");
        }
    }
}
