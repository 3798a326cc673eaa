//! `sluice`, the command line: runs programs of this host through Sluice, serves a VM, says what is running.
//!
//! `run` and `host` start the real, separate processes and are their supervisor ([`backend`]); they must never do any of their
//! work themselves. Everything else is a question to a running sluiced, by its management API ([`api`]), and nothing but that API.

mod api;
mod backend;
mod doctor;
mod events;
mod files;
mod host;
mod look;
mod manual;
mod place;
mod program;
mod run;
mod signals;
mod softgpu;
mod table;
mod tree;
mod vms;
mod watch;

use std::{
    path::PathBuf,
    process::{ExitCode, ExitStatus},
};

use anyhow::Result;
use clap::{CommandFactory as _, Parser, Subcommand};
use sluice_api::ByteSize;

/// Give programs and virtual machines a share of a GPU.
#[derive(Debug, Parser)]
#[command(name = "sluice", version, arg_required_else_help = true, disable_help_subcommand = true)]
#[command(after_help = "\
Examples:
  sluice run -- ./vectorAdd              run a CUDA program through Sluice, on the software GPU
  sluice run --memory 1GiB -- ./app      the same with a quota of device memory
  sluice run --native -- ./vectorAdd     the same straight on the driver, for comparison
  sluice host --dir /tmp/vm1             serve one VM; prints the socket for QEMU
  sluice create web-1 --memory 16GiB     make a VM; prints the arguments for QEMU and Cloud Hypervisor
  sluice watch                           units and VMs, live
  sluice events --json                   what happens, a line each; goes on after a restart of sluiced
  sluice fence web-1                     take everything from a VM; `sluice readmit` lets it in again
  sluice doctor                          whether this host can do it, and what to do where it cannot

Exit status:
  0    done; `run`: the program's own, as of all that follow
  1    refused by the management API, or not as it has to be (fence, doctor)
  2    the command line is not understood
  3    there is no such VM, unit or other thing
  4    no sluiced answers
  125  a failure of sluice itself; 126 a program that cannot be run, 127 one that is not there

Sluice finds its programs and libraries beside `sluice` itself, or in /usr/libexec/sluice and /usr/lib/sluice; \
SLUICE_LIBEXEC names another directory. SLUICE_API names another socket of the management API than /run/sluice/api.sock.")]
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
    /// Make a VM, or change it to be as said; print what its VMM connects to
    Create(vms::Create),
    /// Change what a VM may have; what is not named stays as it is
    Update(vms::Update),
    /// Show a VM
    Show(vms::One),
    /// List VMs
    List(vms::List),
    /// End a VM, with everything it has
    Delete(vms::One),
    /// Take everything a VM has of a GPU, and give it nothing more until it is admitted again
    ///
    /// Its programs get an error, its device lives on. Returns when its memory is clean.
    Fence(vms::Fence),
    /// Admit a VM that was fenced or drained, or a quarantined or drained unit or GPU, again
    Readmit(vms::Target),
    /// Let a VM begin no session any more, or have a unit or GPU emptied; sessions that run go on
    Drain(vms::Target),
    /// Move a VM that has no session to another unit; its guest notices nothing
    Move(place::Move),
    /// Switch a GPU that is drained and empty to MIG mode, or out of it
    Mig(place::Mig),
    /// Show what load is expected, and which VMs had better be on other units
    Suggestions(place::Suggestions),
    /// List GPUs
    Gpus(look::Asked),
    /// List placement units: what they are, and what of them is lent
    Units(look::Asked),
    /// Organisations: what all their VMs may have together
    #[command(subcommand)]
    Organisation(tree::Organisation),
    /// Projects: what all their VMs may have together
    #[command(subcommand)]
    Project(tree::Project),
    /// Named sizes of VMs
    #[command(subcommand)]
    Size(tree::SizeCommand),
    /// Show what was used: GPU time and memory, by organisation, project and VM
    Usage(look::Asked),
    /// Follow what happens, from now on
    Events(events::Arguments),
    /// Show units and VMs live, as `top` shows processes
    Watch(watch::Arguments),
    /// Show what a running sluiced is and has
    Status(look::Asked),
    /// Say whether this host can do what Sluice is for, and what to do where it cannot
    Doctor(doctor::Arguments),
    /// Print the completion of this command line for a shell
    Completion {
        /// The shell
        shell: clap_complete::Shell,
    },
    /// Write the manual pages into a directory; for packages
    #[command(hide = true)]
    Manual {
        /// The directory
        directory: PathBuf,
    },
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
    #[arg(long, value_name = "SIZE", default_value_t = ByteSize(0), hide_default_value = true)]
    memory: ByteSize,
    /// What Sluice's own processes say on standard error: error, warn, info, debug or trace
    #[arg(long, value_name = "LEVEL")]
    log: Option<String>,
    /// Runs of guest pages that each worker maps one by one; what goes beyond is copied. 0 to copy all
    #[arg(long, value_name = "N")]
    mapped_runs: Option<u32>,
}

fn main() -> ExitCode {
    let command = Arguments::parse().command;
    let runs = matches!(command, Command::Run(_) | Command::Host(_));
    let result = match command {
        Command::Run(arguments) => run::run(arguments),
        Command::Host(arguments) => host::host(arguments).map(|()| Ended::Exited(0)),
        command => ask(&command).map(|()| Ended::Exited(0)),
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
            ExitCode::from(code(&error, runs))
        }
    }
}

/// The exit status of a failure.
fn code(error: &anyhow::Error, runs: bool) -> u8 {
    // As env and timeout have it: 125 is the tool's own failure, 127 a program that is not there, 126 one that cannot be run.
    match error.downcast_ref::<program::StartError>() {
        Some(error) => error.code(),
        None if runs => 125,
        None if error.is::<api::NoAnswer>() => 4,
        None if error.downcast_ref::<api::Refusal>().is_some_and(api::Refusal::is_absence) => 3,
        None => 1,
    }
}

/// Everything that is a question to a sluiced.
fn ask(command: &Command) -> Result<()> {
    match command {
        Command::Run(_) | Command::Host(_) => unreachable!("they start a sluiced of their own"),
        Command::Create(arguments) => vms::create(arguments),
        Command::Update(arguments) => vms::update(arguments),
        Command::Show(arguments) => vms::show(arguments),
        Command::List(arguments) => vms::list(arguments),
        Command::Delete(arguments) => vms::delete(arguments),
        Command::Fence(arguments) => vms::fence(arguments),
        Command::Readmit(arguments) => vms::readmit(arguments),
        Command::Drain(arguments) => vms::drain(arguments),
        Command::Move(arguments) => place::relocate(arguments),
        Command::Mig(arguments) => place::mig(arguments),
        Command::Suggestions(arguments) => place::suggestions(arguments),
        Command::Gpus(arguments) => look::gpus(arguments),
        Command::Units(arguments) => look::units(arguments),
        Command::Organisation(command) => tree::organisation(command),
        Command::Project(command) => tree::project(command),
        Command::Size(command) => tree::size(command),
        Command::Usage(arguments) => look::usage(arguments),
        Command::Events(arguments) => events::events(arguments),
        Command::Watch(arguments) => watch::watch(arguments),
        Command::Status(arguments) => look::status(arguments),
        Command::Doctor(arguments) => doctor::doctor(arguments),
        Command::Completion { shell } => {
            let mut text = Vec::new();
            clap_complete::generate(*shell, &mut Arguments::command(), "sluice", &mut text);
            api::print(&String::from_utf8_lossy(&text))
        }
        Command::Manual { directory } => manual::write(directory),
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn word_of_the_help_is_a_word_of_the_api() {
        for (command, option, words) in [
            ("create a", "--priority", &["low", "normal", "high"][..]),
            ("create a", "--policy", &["mig", "time-slice", "any"]),
            ("create a", "--isolation", &["shared", "strict", "strict-plus"]),
            ("size set a", "--policy", &["mig", "time-slice", "any"]),
            ("project set a --memory 1GiB", "--max-priority", &["low", "normal", "high"]),
            ("project set a --memory 1GiB", "--max-isolation", &["shared", "strict", "strict-plus"]),
            ("move a", "--kind", &["mig", "time-slice"]),
        ] {
            for word in words {
                let line = format!("sluice {command} {option} {word}");
                assert!(Arguments::try_parse_from(line.split(' ')).is_ok(), "{line}");
            }
        }
    }
}
