//! A process that the launcher started.

use std::{
    io,
    os::fd::{AsFd as _, OwnedFd},
};

use sluice_runtime::process::{self, Identity};
use tokio::io::unix::AsyncFd;

use crate::async_fd::{gone, watch};

/// A process that the launcher started, and the means to end it.
#[derive(Debug)]
pub(crate) struct LaunchedProcess {
    identity: Identity,
    pidfd: AsyncFd<OwnedFd>,
    /// Its `cgroup.kill`, if it has a cgroup of its own: to signal its user takes a right that this process may not have.
    cgroup_kill: Option<OwnedFd>,
}

impl LaunchedProcess {
    /// Watches a process.
    ///
    /// # Errors
    /// The kernel's, if the event loop cannot take the descriptor.
    pub(crate) fn new(identity: Identity, pidfd: OwnedFd, cgroup_kill: Option<OwnedFd>) -> io::Result<Self> {
        Ok(Self { identity, pidfd: watch(pidfd)?, cgroup_kill })
    }

    /// Its number.
    pub(crate) const fn number(&self) -> u32 {
        self.identity.process
    }

    /// Its identity.
    pub(crate) const fn identity(&self) -> Identity {
        self.identity
    }

    /// Its descriptor.
    pub(crate) fn pidfd(&self) -> &OwnedFd {
        self.pidfd.get_ref()
    }

    /// Its `cgroup.kill`, if it has a cgroup of its own.
    pub(crate) const fn cgroup_kill(&self) -> Option<&OwnedFd> {
        self.cgroup_kill.as_ref()
    }

    /// Kills it, and all that it has forked if it has a cgroup of its own; no error if it has ended already.
    pub(crate) fn kill(&self) {
        let Some(file) = &self.cgroup_kill else { return process::kill(self.pidfd.get_ref().as_fd()) };
        match rustix::io::pwrite(file, b"1", 0) {
            Ok(_) => {}
            // The group was removed after the end of its process.
            Err(_) if self.is_gone() => {}
            Err(error) => {
                tracing::error!(process = self.number(), %error, "cannot kill a process by its cgroup")
            }
        }
    }

    /// True if it has ended, as seen by the kernel.
    pub(crate) fn is_gone(&self) -> bool {
        process::is_gone(self.pidfd.get_ref())
    }

    /// Returns when it has ended.
    pub(crate) async fn gone(&self) {
        gone(&self.pidfd).await;
    }
}

/// A process that is killed when this is dropped.
#[derive(Debug)]
pub(crate) struct KillOnDrop(pub(crate) std::rc::Rc<LaunchedProcess>);

impl Drop for KillOnDrop {
    fn drop(&mut self) {
        self.0.kill();
    }
}
