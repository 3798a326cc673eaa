//! What a test has started from a directory of programs. The tests of the daemon and of the command line share it.

use std::{
    os::fd::{AsFd, OwnedFd},
    path::PathBuf,
    time::Duration,
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    process::{Pid, PidfdFlags, Signal},
};

/// Beyond this a test has failed.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// Everything that runs with the directory in its command line. Dropping it ends what a failed test has left.
pub(crate) struct Started {
    pub(crate) libexec: PathBuf,
}

impl Started {
    /// Process ids of what still runs.
    pub(crate) fn processes(&self) -> Vec<u32> {
        let libexec = self.libexec.as_os_str().as_encoded_bytes();
        let mut found = Vec::new();
        for entry in std::fs::read_dir("/proc").expect("/proc").flatten() {
            let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
            let line = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
            if line.windows(libexec.len()).any(|window| window == libexec) {
                found.push(pid);
            }
        }
        found
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        for process in self.processes().into_iter().filter_map(watch) {
            signal(&process, Signal::KILL);
        }
    }
}

/// A process, if it is there.
pub(crate) fn watch(pid: u32) -> Option<OwnedFd> {
    rustix::process::pidfd_open(Pid::from_raw(pid.cast_signed())?, PidfdFlags::empty()).ok()
}

pub(crate) fn signal(process: &impl AsFd, signal: Signal) {
    match rustix::process::pidfd_send_signal(process, signal) {
        Ok(()) | Err(rustix::io::Errno::SRCH) => {}
        Err(error) => panic!("cannot signal: {error}"),
    }
}

/// Waits until a process has ended.
pub(crate) fn wait_gone(process: &impl AsFd) {
    assert!(becomes_readable(process, PATIENCE), "a process does not end");
}

pub(crate) fn is_alive(process: &impl AsFd) -> bool {
    !becomes_readable(process, Duration::ZERO)
}

fn becomes_readable(descriptor: &impl AsFd, limit: Duration) -> bool {
    let limit = Timespec::try_from(limit).expect("a time");
    let mut polled = [PollFd::new(descriptor, PollFlags::IN)];
    rustix::io::retry_on_intr(|| poll(&mut polled, Some(&limit))).expect("poll") > 0
}
