//! Processes as descriptors: a check of whether they live, and a way to end them.

use std::os::fd::OwnedFd;

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fd::{AsFd, BorrowedFd},
    io::Errno,
    process::{Pid, PidfdFlags, Signal},
};
use serde::{Deserialize, Serialize};

/// A process as it is known to whoever did not start it: numbers are used again, but not with the same start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Identity {
    /// Its number.
    pub process: u32,
    /// When it was started, in ticks since the machine was.
    pub started: u64,
}

impl Identity {
    /// The process that has this number now.
    #[must_use]
    pub fn of(process: u32) -> Option<Self> {
        let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
        // The name, in parentheses, may contain anything; the start is the 22nd field, the state behind the name the third.
        let started = stat.rsplit_once(')')?.1.split_whitespace().nth(19)?.parse().ok()?;
        Some(Self { process, started })
    }

    /// The living process of a descriptor, which has this number: that of one that has ended may be another's by now.
    #[must_use]
    pub fn behind(process: u32, pidfd: impl AsFd) -> Option<Self> {
        // What was read is of the process if that lives afterwards.
        Self::of(process).filter(|_| !is_gone(pidfd))
    }

    /// The process, if it is still there.
    #[must_use]
    pub fn open(self) -> Option<OwnedFd> {
        let pid = Pid::from_raw(i32::try_from(self.process).ok()?)?;
        let pidfd = rustix::process::pidfd_open(pid, PidfdFlags::empty()).ok()?;
        // Looked at with the descriptor in hand, which keeps the number from being another's.
        (Self::of(self.process) == Some(self) && !is_gone(&pidfd)).then_some(pidfd)
    }
}

/// Kills a process; one that has ended already is fine.
pub fn kill(pidfd: BorrowedFd<'_>) {
    signal(pidfd, Signal::KILL);
}

/// Sends a signal; to a process that has ended already is fine.
pub fn signal(pidfd: BorrowedFd<'_>, which: Signal) {
    match rustix::process::pidfd_send_signal(pidfd, which) {
        Ok(()) | Err(Errno::SRCH) => {}
        Err(error) => tracing::error!("cannot signal a process: {error}"),
    }
}

/// Whether the process has ended, seen by the kernel and not by the event loop, which may be a turn behind.
#[must_use]
pub fn is_gone(pidfd: impl AsFd) -> bool {
    let mut polled = [PollFd::new(&pidfd, PollFlags::IN)];
    matches!(poll(&mut polled, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })), Ok(1..))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_alone_is_nobody() {
        let own = Identity::of(std::process::id()).expect("this process");
        assert!(own.open().is_some());
        assert!(Identity { started: own.started + 1, ..own }.open().is_none());
        assert!(Identity { process: u32::MAX, started: 0 }.open().is_none());
    }

    // Promise: F41
    #[test]
    fn process_whose_number_is_used_again_has_no_identity() {
        let mut child = std::process::Command::new("sleep").arg("1000").spawn().expect("a child");
        let pid = Pid::from_child(&child);
        let pidfd = rustix::process::pidfd_open(pid, PidfdFlags::empty()).expect("a descriptor");
        let identity = Identity::behind(child.id(), &pidfd).expect("it lives");
        assert_eq!(Some(identity), Identity::of(child.id()));
        child.kill().expect("killed");
        child.wait().expect("ended");
        // Its number is this process's by now: whoever asks must not take this one for it.
        assert_eq!(Identity::behind(std::process::id(), &pidfd), None);
    }
}
