//! The errors that end the launcher, and those that end a request.

use std::{io, path::PathBuf};

use rustix::io::Errno;
use sluice_messages::control::LaunchRefusal;

/// The launcher cannot continue.
#[derive(Debug, thiserror::Error)]
pub enum LauncherError {
    /// The setup failed.
    #[error("cannot set up the launcher: {0}")]
    SetUp(#[source] io::Error),
    /// Processes of other users could not be ended.
    #[error("{need} a delegated cgroup directory, by which processes are ended: {reason}")]
    NoCgroup {
        /// The beginning of the sentence.
        need: &'static str,
        /// The reason why there is none.
        reason: String,
    },
    /// The kernel refuses to deliver events.
    #[error("cannot wait for events: {0}")]
    Wait(#[source] Errno),
    /// A file of another user may be at the path of a socket.
    #[error("the directory {} for sockets of VMs must be root's, and closed to other users or sticky", .0.display())]
    SocketDirectory(PathBuf),
    /// The socket to `sluiced` failed.
    #[error("cannot read requests: {0}")]
    Receive(#[source] Errno),
}

/// A request that is not carried out.
#[derive(Debug, thiserror::Error)]
pub(super) enum RequestError {
    /// The launcher refuses it.
    #[error(transparent)]
    Refused(#[from] LaunchRefusal),
    /// The kernel refuses a part of it.
    #[error(transparent)]
    Failed(#[from] io::Error),
}

impl From<Errno> for RequestError {
    fn from(error: Errno) -> Self {
        Self::Failed(error.into())
    }
}
