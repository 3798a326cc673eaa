//! `sluice-guest`, the command of a guest: says whether CUDA programs can work here and what to do where they cannot
//! ([`doctor`]), and takes Sluice's libraries out of the loader's way and back ([`loader`]).
//!
//! It must never be needed for programs to work: they load the libraries and nothing else.

mod doctor;
mod loader;
mod node;
mod suspension;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context as _, Result, bail, ensure};
use clap::{CommandFactory as _, Parser, Subcommand};
use sluice_guest_node::Kind;

/// The guest's side of Sluice: what is wrong, and which driver programs find.
#[derive(Debug, Parser)]
#[command(name = "sluice-guest", version, arg_required_else_help = true, disable_help_subcommand = true)]
#[command(after_help = "\
Exit status:
  0  as it has to be
  1  not as it has to be; the last line says what
  2  the command line is not understood")]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Say whether CUDA programs can work here, and what to do where they cannot; changes nothing
    Doctor(doctor::Arguments),
    /// Let programs find Sluice's libcuda.so.1 and libnvidia-ml.so.1 before any other; needs root
    Enable,
    /// Leave programs what they find without Sluice, for instance NVIDIA's own driver; needs root
    Disable,
    /// Succeed if a render node is a Sluice device; for the rule that opens those to every user
    #[command(hide = true)]
    Recognise {
        /// The node, for instance /dev/dri/renderD128
        node: PathBuf,
    },
    /// Take Sluice's devices from the kernel's driver before the system is suspended, and give them back after it; systemd does so by
    /// itself
    Suspension {
        /// Before or after it
        moment: suspension::Moment,
    },
    /// Load the driver as programs do, and say which it is; for the process that does so
    #[command(hide = true)]
    Load,
    /// Write the manual pages into a directory; for packages
    #[command(hide = true)]
    Manual {
        /// The directory
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
            Kind::Sluice { .. } => Ok(()),
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
