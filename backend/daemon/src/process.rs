//! Processes as descriptors: whether they live, and ending them.

use std::os::fd::OwnedFd;

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fd::{AsFd, BorrowedFd},
    io::Errno,
    process::Signal,
};
use tokio::io::unix::AsyncFd;

/// Kills a process; one that has ended already is fine.
pub(crate) fn kill(pidfd: BorrowedFd<'_>) {
    signal(pidfd, Signal::KILL);
}

/// Sends a signal; to a process that has ended already is fine.
pub(crate) fn signal(pidfd: BorrowedFd<'_>, which: Signal) {
    match rustix::process::pidfd_send_signal(pidfd, which) {
        Ok(()) | Err(Errno::SRCH) => {}
        Err(error) => tracing::error!("cannot signal a process: {error}"),
    }
}

/// Whether the process has ended, seen by the kernel and not by the event loop, which may be a turn behind.
pub(crate) fn is_gone(pidfd: impl AsFd) -> bool {
    let mut polled = [PollFd::new(&pidfd, PollFlags::IN)];
    matches!(poll(&mut polled, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })), Ok(1..))
}

/// Returns when the process has ended.
pub(crate) async fn gone(pidfd: &AsyncFd<OwnedFd>) {
    if let Err(error) = pidfd.readable().await {
        tracing::error!("cannot watch a process: {error}");
    }
}
