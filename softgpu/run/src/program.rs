//! The user's program: it runs as without its supervisor, apart from the variables that lead it to the driver.

use std::{
    ffi::{OsStr, OsString},
    io,
    os::fd::{AsFd as _, BorrowedFd, OwnedFd},
    os::unix::process::ExitStatusExt as _,
    path::Path,
    process::{Child, Command, ExitCode, ExitStatus},
};

use anyhow::{Context as _, Result};
use rustix::{
    event::{PollFd, PollFlags, poll},
    process::{Pid, PidfdFlags},
};

use crate::signals::{Signals, die_of};

/// The end of a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProgramEnd {
    /// It exited with this status.
    Exited(u8),
    /// This signal ended it.
    Killed(i32),
}

impl ProgramEnd {
    /// Returns the exit status of the program, or ends this process by the signal that ended the program. The caller has dropped all
    /// values that clean up.
    #[must_use]
    pub fn pass_on(self) -> ExitCode {
        match self {
            Self::Exited(code) => ExitCode::from(code),
            Self::Killed(signal) => {
                // Die of the same signal, so that a shell sees how the program ended.
                die_of(signal);
                ExitCode::from(128_u8.wrapping_add(u8::try_from(signal).unwrap_or(0)))
            }
        }
    }
}

impl From<ExitStatus> for ProgramEnd {
    fn from(status: ExitStatus) -> Self {
        match (status.code(), status.signal()) {
            // The kernel keeps only eight bits.
            (Some(code), _) => Self::Exited(u8::try_from(code & 0xff).unwrap_or(u8::MAX)),
            (None, signal) => Self::Killed(signal.unwrap_or(libc::SIGKILL)),
        }
    }
}

/// The program cannot be started.
#[derive(Debug)]
pub struct StartError {
    program: OsString,
    error: io::Error,
}

impl StartError {
    /// The exit status that a shell would use.
    #[must_use]
    pub fn code(&self) -> u8 {
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
///
/// # Errors
/// The directory exists, or it cannot be filled.
pub fn offer_driver(directory: &Path, driver: &Path, management: Option<&Path>) -> Result<()> {
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
#[must_use]
pub fn search_first(directory: &Path) -> OsString {
    let mut path = directory.as_os_str().to_owned();
    if let Some(before) = std::env::var_os("LD_LIBRARY_PATH").filter(|before| !before.is_empty()) {
        path.push(":");
        path.push(before);
    }
    path
}

/// A process beside the program, whose end the user should know of.
#[derive(Clone, Copy, Debug)]
pub struct Companion<'a> {
    /// Its descriptor, which becomes readable when it ends.
    pub process: BorrowedFd<'a>,
    /// The line that is printed then.
    pub ended: &'a str,
}

/// A descriptor of a child that has not been waited for.
///
/// # Errors
/// The kernel gives none.
pub fn descriptor(child: &Child) -> Result<OwnedFd> {
    let process = Pid::from_raw(child.id().cast_signed()).context("a child without a process id")?;
    rustix::process::pidfd_open(process, PidfdFlags::empty()).context("cannot watch a process")
}

/// Runs a program to its end. Passes signals of this process on to it, except those that the terminal has sent to both.
///
/// # Errors
/// A [`StartError`] if the program does not start; or the kernel refuses to watch it.
pub fn run(mut command: Command, signals: &Signals, companion: Option<Companion<'_>>) -> Result<ProgramEnd> {
    signals.spare(&mut command);
    let child = command
        .spawn()
        .map_err(|error| StartError { program: OsStr::to_owned(command.get_program()), error })?;
    let process = descriptor(&child)?;
    supervise(child, &process, signals, companion)
}

fn supervise(
    mut child: Child,
    process: &OwnedFd,
    signals: &Signals,
    mut companion: Option<Companion<'_>>,
) -> Result<ProgramEnd> {
    loop {
        let mut polled = vec![PollFd::new(process, PollFlags::IN), PollFd::new(signals, PollFlags::IN)];
        polled.extend(companion.map(|companion| PollFd::from_borrowed_fd(companion.process, PollFlags::IN)));
        match poll(&mut polled, None) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error).context("cannot wait for the program"),
        }
        let ready = |index: usize| polled.get(index).is_some_and(|polled| !polled.revents().is_empty());
        let (ended, signalled, companion_ended) = (ready(0), ready(1), ready(2));
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
        if companion_ended && let Some(companion) = companion.take() {
            eprintln!("{}", companion.ended);
        }
    }
}

fn forward(process: &OwnedFd, signal: libc::c_int) {
    let Some(signal) = rustix::process::Signal::from_named_raw(signal) else { return };
    match rustix::process::pidfd_send_signal(process.as_fd(), signal) {
        // The program has ended meanwhile; the next iteration finds that.
        Ok(()) | Err(rustix::io::Errno::SRCH) => {}
        Err(error) => eprintln!("cannot pass on a signal: {error}"),
    }
}
