//! The processes that a test has started.

use std::{
    io::{self, BufRead as _, BufReader, Read as _},
    net::Shutdown,
    os::{
        fd::{AsFd, OwnedFd},
        unix::net::UnixStream,
    },
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
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

/// Name of a process that the launcher has made ahead, for the next start of its kind, and that has executed no program yet.
pub const MADE_AHEAD: &str = "sluice-ready";

/// Ends the processes under a supervisor whose socket this is. Waits for the end of file, which means that no process holds the
/// other end.
///
/// # Errors
/// The kernel's, also after `limit`.
pub fn end_supervised(mut lifeline: UnixStream, limit: Duration) -> io::Result<()> {
    lifeline.shutdown(Shutdown::Write)?;
    lifeline.set_read_timeout(Some(limit))?;
    let mut rest = [0; 64];
    loop {
        match lifeline.read(&mut rest) {
            Ok(0) => return Ok(()),
            Ok(_) => {}
            // A process that was stopped and continued: a read with a time limit is not begun anew by the kernel.
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            // A reset comes from a process that ended before it had read everything.
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => return Ok(()),
            Err(error) => return Err(error),
        }
    }
}

/// Copies a program. A separate process writes the copy: a child that another test starts meanwhile would inherit a descriptor
/// open for writing, and a file that is open for writing cannot be executed.
pub fn make_program(from: &Path, to: &Path) {
    let copied = Command::new("cp").arg("--remove-destination").args([from, to]).status().expect("cp");
    assert!(copied.success(), "{copied}");
}

/// Writes a script that can be executed, by a separate process as [`make_program`].
pub fn make_script(path: &Path, text: &str) {
    let write = r#"printf %s "$1" > "$0" && chmod 755 "$0""#;
    let written = Command::new("sh").args(["-c", write]).arg(path).arg(text).status().expect("a shell");
    assert!(written.success(), "{written}");
}

/// A process that ends with its test: drop kills it.
#[derive(Debug)]
pub struct Process(pub Child);

impl Process {
    /// Starts a program that prints a line with `holding` once it holds its memory, and waits for that line.
    pub fn holding(command: &mut Command) -> Process {
        let mut process = Process(command.stdout(Stdio::piped()).spawn().expect("a program"));
        let lines = BufReader::new(process.0.stdout.take().expect("piped")).lines();
        assert!(lines.map_while(Result::ok).any(|line| line.contains("holding")), "it holds no memory");
        process
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
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
