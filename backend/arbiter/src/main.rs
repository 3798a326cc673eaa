//! `sluice-arbiter`: custody of one placement unit, over an inherited control socket.

#![expect(unsafe_code, reason = "adopts the control socket by its number")]

use clap::Parser;
use rustix::fd::{FromRawFd, OwnedFd};
use std::{os::fd::RawFd, process::ExitCode};

/// Serves one placement unit; started by the launcher.
#[derive(Debug, Parser)]
#[command(version)]
struct Arguments {
    /// The inherited SEQPACKET socket on which setup and commands come.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(RawFd).range(0..))]
    control_fd: RawFd,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    if let Err(error) = sluice_runtime::log::start() {
        sluice_runtime::log::say(format_args!("sluice-arbiter: {error}"));
        return ExitCode::FAILURE;
    }
    // SAFETY: the launcher passed this descriptor for us to own, and nothing else in the process uses it.
    let control = unsafe { OwnedFd::from_raw_fd(arguments.control_fd) };
    match sluice_arbiter::run(control) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!(%error, "the arbiter ends with an error");
            ExitCode::FAILURE
        }
    }
}
