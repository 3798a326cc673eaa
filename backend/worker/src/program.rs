#![expect(unsafe_code, reason = "adopts the control socket by its number")]

//! The program `sluice-worker`: one session on the driver, over an inherited control socket.

use crate::control::RunError;
use clap::Parser;
use rustix::fd::{FromRawFd, OwnedFd};
use sluice_messages::channel::SetupError;
use sluice_shared_memory::bus;
use std::{os::fd::RawFd, process::ExitCode};

/// Serves one guest process; started by the launcher.
#[derive(Debug, Parser)]
#[command(name = "sluice-worker", version)]
struct Arguments {
    /// The inherited SEQPACKET socket on which setup and guest pages come.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(RawFd).range(0..))]
    control_fd: RawFd,
    /// Serve no session: take one chunk, so that the arbiter finds the process to which the driver books lent memory.
    #[arg(long)]
    probe: bool,
}

/// Runs the program.
///
/// # Safety
/// The number of the control socket on the command line names a descriptor that no other code of the process uses.
#[must_use]
pub unsafe fn main() -> ExitCode {
    let arguments = Arguments::parse();
    if let Err(error) = sluice_runtime::log::start() {
        sluice_runtime::log::say(format_args!("sluice-worker: {error}"));
        return ExitCode::FAILURE;
    }
    // The driver gets standard error: its reports about a guest's kernels are for the guest.
    let caught = sluice_runtime::log::move_log().and_then(|log| {
        sluice_sandbox::log_refusals_to(log);
        bus::catch("sluice-worker", log)
    });
    if let Err(error) = caught {
        tracing::error!(%error, "cannot set up the log or the handler of SIGBUS");
        return ExitCode::FAILURE;
    }
    // SAFETY: the caller's promise.
    let control = unsafe { OwnedFd::from_raw_fd(arguments.control_fd) };
    if arguments.probe {
        return match crate::probe(control) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                tracing::error!(%error, "the probe failed");
                ExitCode::FAILURE
            }
        };
    }
    match crate::run(control) {
        Ok(()) => ExitCode::SUCCESS,
        // No process wants it any more.
        Err(RunError::Closed | RunError::Setup(SetupError::Closed)) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!(%error, "the session could not begin");
            ExitCode::FAILURE
        }
    }
}
