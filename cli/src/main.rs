//! `sluice`, the command line: runs programs of this host through Sluice, serves a VM, says what is running.
//!
//! It starts the real, separate processes and is their supervisor ([`backend`]); it must never do any of their work itself.

mod backend;
mod control;
mod files;
mod host;
mod program;
mod run;
mod signals;
mod softgpu;

use std::{
    path::PathBuf,
    process::{ExitCode, ExitStatus},
};

use clap::{Parser, Subcommand};
use sluice_daemon::configuration::Size;

/// Give programs and virtual machines a share of a GPU.
#[derive(Debug, Parser)]
#[command(name = "sluice", version, arg_required_else_help = true, disable_help_subcommand = true)]
#[command(after_help = "\
Examples:
  sluice run -- ./vectorAdd              run a CUDA program through Sluice, on the software GPU
  sluice run --memory 1GiB -- ./app      the same with a quota of device memory
  sluice run --native -- ./vectorAdd     the same straight on the driver, for comparison
  sluice host --dir /tmp/vm1             serve one VM; prints the socket for QEMU
  sluice status --dir /tmp/vm1           what is running there
  sluice fence --dir /tmp/vm1 1          take everything from VM 1; `sluice readmit` lets it in again

Sluice finds its programs and libraries beside `sluice` itself, or in /usr/libexec/sluice and /usr/lib/sluice; \
SLUICE_LIBEXEC names another directory.")]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run a program of this machine through Sluice, without a VM
    ///
    /// Starts a daemon, a device and, for each process that uses CUDA, a worker, in a temporary directory; runs the
    /// program with Sluice's libcuda.so.1 in front of any other; and ends all of them with it. Standard input, output,
    /// signals and the exit status are the program's.
    Run(run::Arguments),
    /// Serve one VM, in the foreground, until SIGTERM or Ctrl-C
    ///
    /// Prints a line `vhost-user socket: PATH` when a VMM can connect, for instance
    /// `qemu-system-x86_64 -chardev socket,id=sluice,path=PATH -device vhost-user-gpu-pci,chardev=sluice …`.
    Host(host::Arguments),
    /// Print what a running sluiced has, as JSON
    Status(control::Status),
    /// Take everything a VM has of a GPU, and give it nothing more until it is admitted again
    ///
    /// Its programs get an error, its device lives on. Returns when its memory is clean.
    Fence(control::Fence),
    /// Admit a fenced VM, or a quarantined unit, again
    Readmit(control::Readmit),
}

/// Options of everything that starts a backend.
#[derive(Debug, clap::Args)]
struct BackendOptions {
    /// The CUDA driver library to compute on [default: the software GPU, libsoftgpu_cuda.so]
    #[arg(long, value_name = "PATH")]
    driver: Option<PathBuf>,
    /// The driver's management library (NVML) [default: that of the software GPU, with it]
    #[arg(long, value_name = "PATH")]
    nvml: Option<PathBuf>,
    /// Device memory the programs may have, for instance 1GiB [default: all of the device]
    #[arg(long, value_name = "SIZE", default_value_t = Size(0), hide_default_value = true)]
    memory: Size,
    /// What Sluice's own processes say on standard error: error, warn, info, debug or trace
    #[arg(long, value_name = "LEVEL")]
    log: Option<String>,
    /// Runs of guest pages that each worker maps one by one; what goes beyond is copied. 0 to copy all
    #[arg(long, value_name = "N")]
    mapped_runs: Option<u32>,
}

fn main() -> ExitCode {
    let result = match Arguments::parse().command {
        Command::Run(arguments) => run::run(arguments),
        Command::Host(arguments) => host::host(arguments).map(|()| Ended::Exited(0)),
        Command::Status(arguments) => control::status(&arguments).map(|()| Ended::Exited(0)),
        Command::Fence(arguments) => control::fence(&arguments).map(|()| Ended::Exited(0)),
        Command::Readmit(arguments) => control::readmit(&arguments).map(|()| Ended::Exited(0)),
    };
    match result {
        Ok(Ended::Exited(code)) => ExitCode::from(code),
        Ok(Ended::Killed(signal)) => {
            // So that a shell sees what became of the program. Everything of ours has been dropped by now.
            signals::die_of(signal);
            ExitCode::from(128_u8.wrapping_add(u8::try_from(signal).unwrap_or(0)))
        }
        Err(error) => {
            eprintln!("sluice: {error:#}");
            // As env and timeout have it: 125 is the tool's own failure, 127 a program that is not there, 126 one that
            // cannot be run.
            match error.downcast_ref::<program::StartError>() {
                Some(error) => ExitCode::from(error.code()),
                None => ExitCode::from(125),
            }
        }
    }
}

/// How a program ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ended {
    Exited(u8),
    Killed(i32),
}

impl From<ExitStatus> for Ended {
    fn from(status: ExitStatus) -> Self {
        use std::os::unix::process::ExitStatusExt as _;
        match (status.code(), status.signal()) {
            // The kernel keeps eight bits.
            (Some(code), _) => Self::Exited(u8::try_from(code & 0xff).unwrap_or(u8::MAX)),
            (None, signal) => Self::Killed(signal.unwrap_or(libc::SIGKILL)),
        }
    }
}
