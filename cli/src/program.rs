//! The user's program: it runs as without Sluice, apart from the variables that lead it to the driver. Our exit status is its.

use std::{
    ffi::{OsStr, OsString},
    io,
    os::fd::{AsFd as _, OwnedFd},
    path::Path,
    process::{Child, Command},
};

use anyhow::{Context as _, Result};
use rustix::event::{PollFd, PollFlags, poll};

use crate::{
    ProgramEnd,
    backend::{Backend, descriptor},
    signals::Signals,
};

/// The program cannot be started.
#[derive(Debug)]
pub(crate) struct StartError {
    program: OsString,
    error: io::Error,
}

impl StartError {
    /// The exit status that a shell would use.
    pub(crate) fn code(&self) -> u8 {
        if self.error.kind() == io::ErrorKind::NotFound { 127 } else { 126 }
    }
}

impl std::fmt::Display for StartError {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "cannot run {}: {}", self.program.to_string_lossy(), self.error)
    }
}

impl std::error::Error for StartError {}

/// Fills a new directory with `libcuda.so.1`, a link to `driver`, and `libnvidia-ml.so.1`, a link to `management`.
pub(crate) fn offer_driver(directory: &Path, driver: &Path, management: Option<&Path>) -> Result<()> {
    std::fs::create_dir(directory).with_context(|| format!("cannot make {}", directory.display()))?;
    let names = |library: &str| [format!("{library}.so.1"), format!("{library}.so")];
    let drivers = names("libcuda").map(|name| (name, driver));
    let managements = management.map(|library| names("libnvidia-ml").map(|name| (name, library)));
    for (name, library) in drivers.into_iter().chain(managements.into_iter().flatten()) {
        std::os::unix::fs::symlink(library, directory.join(&name))
            .with_context(|| format!("cannot link {name} in {}", directory.display()))?;
    }
    Ok(())
}

/// A library search path with `directory` in front of the present one.
pub(crate) fn search_first(directory: &Path) -> OsString {
    let mut path = directory.as_os_str().to_owned();
    if let Some(before) = std::env::var_os("LD_LIBRARY_PATH").filter(|before| !before.is_empty()) {
        path.push(":");
        path.push(before);
    }
    path
}

/// Runs a program to its end. Passes signals of this process on to it, except those that the terminal has sent to both.
pub(crate) fn run(mut command: Command, signals: &Signals, backend: Option<&Backend>) -> Result<ProgramEnd> {
    signals.spare(&mut command);
    let child = command
        .spawn()
        .map_err(|error| StartError { program: OsStr::to_owned(command.get_program()), error })?;
    let process = descriptor(&child)?;
    let mut backend = backend;
    supervise(child, &process, signals, &mut backend)
}

fn supervise(
    mut child: Child,
    process: &OwnedFd,
    signals: &Signals,
    backend: &mut Option<&Backend>,
) -> Result<ProgramEnd> {
    loop {
        let mut polled = vec![PollFd::new(process, PollFlags::IN), PollFd::new(signals, PollFlags::IN)];
        if let Some(backend) = backend {
            polled.push(PollFd::from_borrowed_fd(backend.process(), PollFlags::IN));
        }
        match poll(&mut polled, None) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error).context("cannot wait for the program"),
        }
        let ready = |index: usize| polled.get(index).is_some_and(|polled| !polled.revents().is_empty());
        let (ended, signalled, backend_ended) = (ready(0), ready(1), ready(2));
        if ended {
            return Ok(child.wait().context("cannot wait for the program")?.into());
        }
        if signalled {
            while let Some(signal) = signals.next().context("cannot read signals")? {
                if !signal.is_from_terminal() {
                    forward(process, signal.number());
                }
            }
        }
        if backend_ended {
            // Running sessions go on without sluiced, and only the program can tell if it needs more.
            eprintln!("sluice: sluiced has ended; running sessions go on, new ones cannot start");
            *backend = None;
        }
    }
}

fn forward(process: &OwnedFd, signal: libc::c_int) {
    let Some(signal) = rustix::process::Signal::from_named_raw(signal) else { return };
    match rustix::process::pidfd_send_signal(process.as_fd(), signal) {
        // The program has ended meanwhile; the next iteration finds that.
        Ok(()) | Err(rustix::io::Errno::SRCH) => {}
        Err(error) => eprintln!("sluice: cannot pass on a signal: {error}"),
    }
}
