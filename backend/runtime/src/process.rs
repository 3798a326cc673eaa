//! Processes by descriptor: a check that they live, and a way to end them.

use std::os::fd::OwnedFd;

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fd::{AsFd, BorrowedFd},
    io::Errno,
    process::{Pid, PidfdFlags, Signal},
};
use serde::{Deserialize, Serialize};

/// The identity of a process for other processes: numbers are reused, but not with the same start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Identity {
    /// The process's number.
    pub process: u32,
    /// Its start, in ticks since boot.
    pub started: u64,
}

impl Identity {
    /// The identity of the process that has this number now.
    #[must_use]
    pub fn of(process: u32) -> Option<Self> {
        let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
        // The name, in parentheses, may contain any character; the start is the 22nd field, the state after the name the third.
        let started = stat.rsplit_once(')')?.1.split_whitespace().nth(19)?.parse().ok()?;
        Some(Self { process, started })
    }

    /// The identity of the living process of a descriptor; after its end, its number may belong to another process.
    #[must_use]
    pub fn behind(process: u32, pidfd: impl AsFd) -> Option<Self> {
        // The values belong to the process if it still lives afterwards.
        Self::of(process).filter(|_| !is_gone(pidfd))
    }

    /// True if the process may still live: the start of another user's process may be hidden from this one.
    #[must_use]
    pub fn may_live(self) -> bool {
        let pid = i32::try_from(self.process).ok().and_then(Pid::from_raw);
        let pidfd = pid.and_then(|pid| rustix::process::pidfd_open(pid, PidfdFlags::empty()).ok());
        pidfd
            .is_some_and(|pidfd| Self::of(self.process).is_none_or(|found| found == self) && !is_gone(&pidfd))
    }

    /// The pidfd of the process, if it still lives.
    #[must_use]
    pub fn open(self) -> Option<OwnedFd> {
        let pid = Pid::from_raw(i32::try_from(self.process).ok()?)?;
        let pidfd = rustix::process::pidfd_open(pid, PidfdFlags::empty()).ok()?;
        // Checked while the descriptor is open, which keeps the number from being reused.
        (Self::of(self.process) == Some(self) && !is_gone(&pidfd)).then_some(pidfd)
    }
}

/// Kills a process; no error if it has ended already.
pub fn kill(pidfd: BorrowedFd<'_>) {
    match rustix::process::pidfd_send_signal(pidfd, Signal::KILL) {
        Ok(()) | Err(Errno::SRCH) => {}
        Err(error) => tracing::error!(%error, "cannot kill a process"),
    }
}

/// True if the process has ended, as seen by the kernel and not by the event loop, which may be a turn behind.
#[must_use]
pub fn is_gone(pidfd: impl AsFd) -> bool {
    let mut polled = [PollFd::new(&pidfd, PollFlags::IN)];
    matches!(poll(&mut polled, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })), Ok(1..))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identity_with_another_start_time_opens_no_process() {
        let own = Identity::of(std::process::id()).expect("this process");
        assert!(own.open().is_some() && own.may_live());
        let another = Identity { started: own.started + 1, ..own };
        assert!(another.open().is_none() && !another.may_live());
        let none = Identity { process: u32::MAX, started: 0 };
        assert!(none.open().is_none() && !none.may_live());
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
        // This process has the child's number in this check: the result must not be its identity.
        assert_eq!(Identity::behind(std::process::id(), &pidfd), None);
    }
}
