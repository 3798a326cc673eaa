//! `sluice-guest`, the command of a guest: checks if CUDA programs can work here and suggests what to do if they cannot
//! ([`doctor`]), and switches Sluice's libraries on and off for the loader ([`loader`]).
//!
//! Programs must work without it: they load the libraries and nothing else.
//!
//! Folders from top to bottom: doctor, smi.

mod doctor;
mod loader;
mod node;
mod suspension;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context as _, Result, bail, ensure};
use clap::{CommandFactory as _, Parser, Subcommand};
use sluice_guest_node::DeviceKind;

/// Diagnose the guest's side of Sluice, and choose the driver that programs load.
#[derive(Debug, Parser)]
#[command(name = "sluice-guest", version, arg_required_else_help = true, disable_help_subcommand = true)]
#[command(after_help = "\
Exit status:
  0  success
  1  failure, or a bad finding of doctor; the last line names it
  2  the command line is invalid")]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Check if CUDA programs can work here, and suggest what to do if they cannot; changes nothing
    Doctor(doctor::Arguments),
    /// Let programs load Sluice's libcuda.so.1 and libnvidia-ml.so.1 before any other; needs root
    Enable,
    /// Let programs load the libraries of a system without Sluice, for instance NVIDIA's own driver; needs root
    Disable,
    /// Succeed if a render node is a Sluice device; for the udev rule that opens those to every user
    #[command(hide = true)]
    Recognise {
        /// Path of the node, for instance /dev/dri/renderD128
        node: PathBuf,
    },
    /// Take Sluice's devices from the kernel's driver before a suspension of the system, and give them back after it;
    /// systemd runs it automatically
    Suspension {
        /// Moment of the call
        moment: suspension::Moment,
    },
    /// Load the driver as programs do, and describe it; internal
    #[command(hide = true)]
    Load,
    /// Write the manual pages into a directory; for packages
    #[command(hide = true)]
    Manual {
        /// Path of the directory
        directory: PathBuf,
    },
}

fn main() -> ExitCode {
    match run(&Arguments::parse().command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("sluice-guest: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(command: &Command) -> Result<()> {
    match command {
        Command::Doctor(arguments) => doctor::doctor(arguments),
        Command::Enable => loader::switch(true),
        Command::Disable => loader::switch(false),
        Command::Recognise { node } => match node::look(node)? {
            DeviceKind::Sluice { .. } => Ok(()),
            other => bail!("{} is {}", node.display(), node::whose(other)),
        },
        Command::Suspension { moment } => suspension::at(*moment),
        Command::Load => loader::load(),
        Command::Manual { directory } => {
            ensure!(directory.is_dir(), "there is no directory {}", directory.display());
            clap_mangen::generate_to(Arguments::command(), directory).context("writing manual pages")
        }
    }
}
