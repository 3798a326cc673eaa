//! A worker, for a process that may end it: with or without the right to signal a process of its user.

use rustix::{
    fd::{AsFd, BorrowedFd, OwnedFd},
    io::Errno,
};

use crate::process::kill;

/// A process that can be ended: by the open `cgroup.kill` of its own cgroup, which needs no capability and ends its
/// children, too, or else by its pidfd.
#[derive(Debug)]
pub struct EndableProcess {
    pidfd: OwnedFd,
    cgroup_kill: Option<OwnedFd>,
}

impl EndableProcess {
    /// Takes over the descriptors of a process.
    #[must_use]
    pub const fn new(pidfd: OwnedFd, cgroup_kill: Option<OwnedFd>) -> Self {
        Self { pidfd, cgroup_kill }
    }

    /// Takes over the last descriptors of a message: the pidfd, then `cgroup.kill` if the process has a cgroup.
    pub fn from_message(descriptors: impl IntoIterator<Item = OwnedFd>) -> Option<Self> {
        let mut descriptors = descriptors.into_iter();
        let pidfd = descriptors.next()?;
        Some(Self::new(pidfd, descriptors.next()))
    }

    /// True if the process has a cgroup of its own.
    #[must_use]
    pub const fn is_grouped(&self) -> bool {
        self.cgroup_kill.is_some()
    }

    /// Kills the process, without waiting for its end; no error if it has ended already.
    pub fn kill(&self) {
        let Some(cgroup_kill) = &self.cgroup_kill else { return kill(self.pidfd.as_fd()) };
        match rustix::io::write(cgroup_kill, b"1") {
            // NODEV: the group was removed, which happens only after the end of its last process.
            Ok(_) | Err(Errno::NODEV) => {}
            Err(error) => {
                tracing::error!(%error, "cannot kill the processes of a cgroup");
                kill(self.pidfd.as_fd());
            }
        }
    }
}

impl AsFd for EndableProcess {
    /// The pidfd, which is readable after the process has ended.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }
}

impl From<OwnedFd> for EndableProcess {
    /// A process without a cgroup, by its pidfd.
    fn from(pidfd: OwnedFd) -> Self {
        Self::new(pidfd, None)
    }
}

#[cfg(test)]
mod tests {
    use std::{
        io::Read as _,
        os::unix::process::ExitStatusExt as _,
        process::{Child, Command},
    };

    use super::*;
    use crate::process::Identity;

    fn sleeper() -> (Child, OwnedFd) {
        let child = Command::new("sleep").arg("1000").spawn().expect("a child");
        let pidfd = Identity::of(child.id()).and_then(Identity::open).expect("a process");
        (child, pidfd)
    }

    // Promise: F86
    #[test]
    fn process_in_a_cgroup_is_ended_by_it_and_another_by_its_pidfd() {
        let (mut child, pidfd) = sleeper();
        let (mut written, cgroup_kill) = std::io::pipe().expect("a pipe");
        let process = EndableProcess::from_message([pidfd, cgroup_kill.into()]).expect("two descriptors");
        assert!(process.is_grouped());
        process.kill();
        drop(process);
        let mut bytes = Vec::new();
        written.read_to_end(&mut bytes).expect("read");
        assert_eq!(bytes, b"1");
        // The pipe is no cgroup: a signal would have been sent by the pidfd.
        assert!(child.try_wait().expect("a status").is_none(), "the process got a signal");
        let pidfd = Identity::of(child.id()).and_then(Identity::open).expect("a process");
        EndableProcess::from(pidfd).kill();
        assert_eq!(child.wait().expect("a status").signal(), Some(9));
        assert!(EndableProcess::from_message([]).is_none());
    }

    #[test]
    fn cgroup_that_refuses_is_no_reason_to_let_a_process_live() {
        let (mut child, pidfd) = sleeper();
        let not_writable = std::fs::File::open("/dev/null").expect("/dev/null");
        EndableProcess::new(pidfd, Some(not_writable.into())).kill();
        assert_eq!(child.wait().expect("a status").signal(), Some(9));
    }
}
