//! `sluice`, the command line: runs programs of this host through Sluice, serves a VM, shows the state of sluiced.
//!
//! `run` and `host` start the real, separate processes and supervise them ([`backend`]); they must never do the work of those
//! processes. `doctor` also examines the host. Each other command is a client of a running sluiced, by its management API ([`api`]) and nothing else.

mod api;
mod backend;
mod backend_options;
mod doctor;
mod events;
mod files;
mod host;
mod look;
mod manual;
mod place;
mod run;
mod settings;
mod softgpu;
mod table;
mod terminal;
mod tree;
mod vms;
mod watch;

use std::{path::PathBuf, process::ExitCode};

use anyhow::Result;
use clap::{CommandFactory as _, Parser, Subcommand};
use softgpu_run::{ProgramEnd, StartError};

/// Share a GPU among programs and virtual machines.
#[derive(Debug, Parser)]
#[command(name = "sluice", version, arg_required_else_help = true, disable_help_subcommand = true)]
#[command(after_help = "\
Examples:
  sluice run -- ./vectorAdd              run a CUDA program through Sluice, on the software GPU
  sluice run --memory 1GiB -- ./app      run a program with a quota of device memory
  sluice run --native -- ./vectorAdd     run a program directly on the driver, for comparison
  sluice host --dir /tmp/vm1             serve one VM; prints the socket for QEMU
  sluice create web-1 --memory 16GiB     create a VM; prints the arguments for QEMU and Cloud Hypervisor
  sluice watch                           show units and VMs live
  sluice events --json                   follow events, one per line; continues after a restart of sluiced
  sluice fence web-1                     take all GPU memory from a VM; `sluice readmit` ends the fence
  sluice doctor                          check if this host can run Sluice, and suggest what to do if it cannot

Exit status:
  0    success; `run` exits with the status of its program
  1    failure: the management API refused the request, or the result is bad (fence, doctor)
  2    the command line is invalid
  3    the VM, unit or other object does not exist
  4    no sluiced answers
  125  sluice itself failed (run, host); 126: the program cannot be run; 127: the program does not exist

Sluice looks for its programs and libraries beside `sluice` itself, then in /usr/libexec/sluice and /usr/lib/sluice; \
SLUICE_LIBEXEC names another directory. SLUICE_API names another socket of the management API than /run/sluice/api.sock.")]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run a program of this host through Sluice, without a VM
    ///
    /// Starts a daemon, a device and, for each process that uses CUDA, a worker, in a temporary directory. Runs the program with Sluice's
    /// libcuda.so.1 in front of any other, and stops all of them when it exits. Standard input, output, signals and the exit status are
    /// those of the program.
    Run(run::Arguments),
    /// Serve one VM, in the foreground, until SIGTERM or Ctrl-C
    ///
    /// Prints a line `vhost-user socket: PATH` when a VMM can connect, for instance `qemu-system-x86_64 -chardev socket,id=sluice,path=PATH
    /// -device vhost-user-gpu-pci,chardev=sluice …`.
    Host(host::Arguments),
    /// Create a VM, or change it to match the options; print the connection data for its VMM
    Create(vms::Create),
    /// Change the shares and limits of a VM; keep those that are not named
    Update(vms::Update),
    /// Show a VM
    Show(vms::One),
    /// List VMs
    List(vms::List),
    /// Delete a VM: stop its device and sessions, and scrub its memory
    Delete(vms::One),
    /// Fence a VM: take all its GPU memory back, and give it nothing until it is readmitted
    ///
    /// Its programs get an error, its device keeps running. Returns when its memory is clean.
    Fence(vms::FenceOptions),
    /// Readmit a fenced or drained VM, or a quarantined or drained unit or GPU
    Readmit(vms::FenceTarget),
    /// Drain a VM (it begins no new session), or a unit or GPU (its VMs move away); running sessions continue
    Drain(vms::FenceTarget),
    /// Move a VM without a session to another unit; its guest notices nothing
    Move(place::Move),
    /// Switch the MIG mode of a drained, empty GPU on or off
    Mig(place::Mig),
    /// Show expected load of units, and suggested moves of VMs
    Suggestions(place::Suggestions),
    /// List GPUs
    Gpus(look::LookArguments),
    /// List placement units: their kind, state and memory
    Units(look::LookArguments),
    /// Manage organisations, and the quotas that their VMs share
    #[command(subcommand)]
    Organisation(tree::Organisation),
    /// Manage projects, and the quotas that their VMs share
    #[command(subcommand)]
    Project(tree::Project),
    /// Manage named sizes of VMs
    #[command(subcommand)]
    Size(tree::SizeCommand),
    /// Show usage: GPU time and memory, by organisation, project and VM
    Usage(look::LookArguments),
    /// Follow events, from now on
    Events(events::Arguments),
    /// Show units and VMs live, as `top` shows processes
    Watch(watch::Arguments),
    /// Show the state of sluiced, its units and its VMs
    Status(look::LookArguments),
    /// Check if this host can run Sluice, and suggest what to do if it cannot
    Doctor(doctor::Arguments),
    /// Print the shell completion of this command line
    Completion {
        /// Name of the shell
        shell: clap_complete::Shell,
    },
    /// Write the manual pages into a directory; for packages
    #[command(hide = true)]
    Manual {
        /// Path of the directory
        directory: PathBuf,
    },
}

fn main() -> ExitCode {
    let command = Arguments::parse().command;
    let runs = matches!(command, Command::Run(_) | Command::Host(_));
    let result = match command {
        Command::Run(arguments) => run::run(arguments),
        Command::Host(arguments) => host::host(arguments).map(|()| ProgramEnd::Exited(0)),
        command => ask(&command).map(|()| ProgramEnd::Exited(0)),
    };
    match result {
        Ok(end) => end.pass_on(),
        Err(error) => {
            eprintln!("sluice: {error:#}");
            ExitCode::from(code(&error, runs))
        }
    }
}

/// Exit status of a failure.
fn code(error: &anyhow::Error, runs: bool) -> u8 {
    // As with env and timeout: 125 is a failure of the tool itself, 127 a missing program, 126 one that cannot be run.
    match error.downcast_ref::<StartError>() {
        Some(error) => error.code(),
        None if runs => 125,
        None if error.is::<api::NoAnswer>() => 4,
        None if error.downcast_ref::<api::ApiRefusal>().is_some_and(api::ApiRefusal::is_absence) => 3,
        None => 1,
    }
}

/// Runs a command that is a request to a sluiced.
fn ask(command: &Command) -> Result<()> {
    match command {
        Command::Run(_) | Command::Host(_) => unreachable!("these commands start their own sluiced"),
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
        Command::Manual { directory } => manual::write(Arguments::command(), directory),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn option_values_of_the_help_are_accepted() {
        for (command, option, words) in [
            ("create a", "--priority", &["low", "normal", "high"][..]),
            ("create a", "--policy", &["mig", "time-slice", "any"]),
            ("create a", "--isolation", &["shared", "strict", "exclusive-gpu"]),
            ("size set a", "--policy", &["mig", "time-slice", "any"]),
            ("project set a --memory 1GiB", "--max-priority", &["low", "normal", "high"]),
            ("project set a --memory 1GiB", "--max-isolation", &["shared", "strict", "exclusive-gpu"]),
            ("move a", "--kind", &["mig", "time-slice"]),
        ] {
            for word in words {
                let line = format!("sluice {command} {option} {word}");
                assert!(Arguments::try_parse_from(line.split(' ')).is_ok(), "{line}");
            }
        }
    }
}
