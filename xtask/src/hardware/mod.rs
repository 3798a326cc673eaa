//! `cargo xtask hardware`: the bundle for a machine with a GPU, its rehearsal on the software GPU, and the report of its results.
//!
//! It owns `target/hardware` and the marked parts of `docs/hardware-results.md`. The questions and comparisons themselves are those
//! of `sluice-hardware`; nothing here may judge them in another way.

mod pack;
mod rehearse;
mod report;
mod runs;

use std::path::PathBuf;

use anyhow::Result;
use clap::Subcommand;

/// Pack, rehearse and report runs on hardware.
#[derive(Debug, Subcommand)]
pub(crate) enum HardwareCommand {
    /// Build everything for release and pack what a machine with a GPU needs into target/hardware.
    Pack(pack::PackOptions),
    /// Pack, and run the bundle on the software GPU in a bare environment.
    Rehearse(rehearse::RehearseOptions),
    /// Write the results of runs on hardware into docs/hardware-results.md.
    Report {
        /// The files results.jsonl of the runs, in the order of the page.
        #[arg(required = true, value_name = "FILE")]
        files: Vec<PathBuf>,
        /// Accept runs on the software GPU, and print the report instead of writing it to the page.
        #[arg(long)]
        rehearsal: bool,
    },
}

/// Runs a command; false if a rehearsal fails.
pub(crate) fn run(command: &HardwareCommand) -> Result<bool> {
    match command {
        HardwareCommand::Pack(options) => pack::run(options),
        HardwareCommand::Rehearse(options) => rehearse::run(options),
        HardwareCommand::Report { files, rehearsal } => report::run(files, *rehearsal),
    }
}
