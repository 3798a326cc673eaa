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

type Work = Box<dyn FnOnce() + Send>;

/// The thread, seen from the loop.
#[derive(Clone, Debug)]
pub struct Closer {
    work: Sender<Work>,
}

impl Closer {
    /// Starts the thread.
    ///
    /// # Errors
    /// The kernel's error if it cannot start a thread.
    pub fn start() -> Result<Closer, std::io::Error> {
        let (work, all) = channel::<Work>();
        thread::Builder::new()
            .name("closer".to_owned())
            .spawn(move || all.into_iter().for_each(|work| work()))?;
        Ok(Closer { work })
    }

    /// Hands descriptors over to be closed.
    pub fn close(&self, descriptors: Vec<OwnedFd>) {
        if !descriptors.is_empty() {
            self.run(move || drop(descriptors));
        }
    }

    /// Has the thread do the last work on a descriptor, which closes it.
    pub fn run(&self, work: impl FnOnce() + Send + 'static) {
        if self.work.send(Box::new(work)).is_err() {
            tracing::error!("the thread that closes descriptors has ended");
        }
    }
}
