//! `sluice-inventory`: the program of the library [`sluice_inventory`].

#![expect(unsafe_code, reason = "adopts the control socket by its number")]

use clap::Parser;
use rustix::fd::{FromRawFd, OwnedFd, RawFd};
use sluice_inventory::{LoadError, Nvml, ServeError, serve};
use sluice_sandbox::{DriverList, DriverListError, Role, SandboxError};
use std::{path::PathBuf, process::ExitCode};

/// Answers questions about devices and processes; started by the launcher.
#[derive(Debug, Parser)]
#[command(version)]
struct Arguments {
    /// The inherited SEQPACKET socket to sluiced.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(RawFd).range(0..))]
    control_fd: RawFd,
    /// Version of the messages that sluiced speaks; any version but this program's own is refused.
    #[arg(long, value_parser = sluice_messages::control::version_of_option)]
    messages: Option<u32>,
    /// Absolute path of the driver's management library.
    #[arg(long, value_name = "PATH")]
    nvml: PathBuf,
}

/// The reason why the inventory ends before `sluiced` does.
#[derive(Debug, thiserror::Error)]
enum Error {
    #[error("cannot enter the seccomp filter: {0}")]
    Sandbox(#[from] SandboxError),
    #[error(transparent)]
    List(#[from] DriverListError),
    #[error(transparent)]
    Load(#[from] LoadError),
    #[error(transparent)]
    Serve(#[from] ServeError),
}

fn run(arguments: &Arguments) -> Result<(), Error> {
    // SAFETY: the launcher passed this descriptor for us to own, and nothing else in the process uses it.
    let control = unsafe { OwnedFd::from_raw_fd(arguments.control_fd) };
    // Before any code of the driver runs.
    sluice_sandbox::enter(Role::Inventory(DriverList::of_library(&arguments.nvml)?))?;
    Ok(serve(Nvml::load(&arguments.nvml)?, control)?)
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    if let Err(error) = sluice_runtime::log::start() {
        sluice_runtime::log::say(format_args!("sluice-inventory: {error}"));
        return ExitCode::FAILURE;
    }
    match run(&arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!(%error, "the inventory ends with an error");
            ExitCode::FAILURE
        }
    }
}
