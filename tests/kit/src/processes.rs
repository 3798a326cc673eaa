//! The processes that a test has started from a directory of programs.

use std::{
    os::fd::{AsFd, OwnedFd},
    path::PathBuf,
    time::Duration,
};

use rustix::process::{Pid, PidfdFlags, Signal};

use crate::wait::{TIMEOUT, readable};

/// All processes with the directory in their command line. Drop ends the ones that a failed test has left.
pub struct Started {
    pub libexec: PathBuf,
}

impl Started {
    /// Ids of the processes that still run.
    pub fn processes(&self) -> Vec<u32> {
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

/// Opens a process, if it exists.
pub fn watch(pid: u32) -> Option<OwnedFd> {
    rustix::process::pidfd_open(Pid::from_raw(pid.cast_signed())?, PidfdFlags::empty()).ok()
}

pub fn signal(process: &impl AsFd, signal: Signal) {
    match rustix::process::pidfd_send_signal(process, signal) {
        Ok(()) | Err(rustix::io::Errno::SRCH) => {}
        Err(error) => panic!("cannot signal: {error}"),
    }
}

/// Waits until a process has ended.
pub fn wait_gone(process: &impl AsFd) {
    assert!(readable(process, TIMEOUT), "the process does not end");
}

pub fn is_alive(process: &impl AsFd) -> bool {
    !readable(process, Duration::ZERO)
}
