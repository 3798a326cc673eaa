//! Project automation: `cargo xtask COMMAND`.
//!
//! It owns no product logic; it installs requirements, builds, starts programs and judges their output.
//!
//! Folders from top to bottom: hardware, demo, performance, compat.

mod ahead;
mod api_page;
mod bench;
mod cargo;
mod compat;
mod coverage;
mod demo;
mod dependencies;
mod docs;
mod filter;
mod fuzz;
mod hardware;
mod imports;
mod ioctls;
mod leftovers;
mod logs;
mod matrix;
mod mutants;
mod nightly;
mod oracle;
mod package;
mod performance;
mod promises;
mod prose;
mod record;
mod runner;
mod seeds;
mod setup;
mod softgpu_page;
mod sources;
mod spelling;
mod test;
mod type_names;

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use sluice_tests::progress;

/// Automation of the Sluice project.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask", version)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Install the prerequisites of demo and tests: Debian packages, guest kernels, the CUDA compiler.
    Setup,
    /// Boot two Debian VMs that share a GPU, run CUDA programs in them, and demonstrate the management API.
    Demo,
    /// Run the tests and write target/test-run.json.
    Test(test::TestOptions),
    /// Install the packages in fresh Debian VMs as a newcomer does, and judge the result: minutes, a host and a guest.
    Newcomer,
    /// Check docs/SPECIFICATION.md against the tests it names and their verdicts in the last test run.
    Promises,
    /// Fuzz one target.
    Fuzz(fuzz::Options),
    /// Run the benchmarks.
    Bench(bench::BenchOptions),
    /// Run a program natively and remoted, and name the first call of the driver that differs.
    Oracle(oracle::OracleOptions),
    /// Let the vendor's assembler and that of the software GPU check mutants of PTX.
    Mutants(mutants::MutantOptions),
    /// Run the tests of public clients natively and remoted, and name those that fail remoted only.
    Compat(compat::CompatOptions),
    /// Pack, rehearse and report runs on hardware.
    #[command(subcommand)]
    Hardware(hardware::HardwareCommand),
    /// Write the pages of docs/ that are generated from the code.
    Docs(docs::DocsOptions),
    /// Write docs/support-matrix.md from the notes of the tests in virtual machines.
    Matrix,
    /// Build packages for hosts and guests.
    Package(package::PackageOptions),
    /// Compare the list of ioctls of NVIDIA's driver with a release of its kernel modules.
    Ioctls(ioctls::Options),
}

fn main() -> ExitCode {
    progress::enable();
    let result = match Arguments::parse().command {
        Command::Setup => setup::run(),
        Command::Demo => demo::run(),
        Command::Test(options) => test::run(&options),
        Command::Newcomer => test::newcomer(),
        Command::Promises => promises::run(),
        Command::Fuzz(options) => fuzz::run(&options),
        Command::Bench(options) => bench::run(&options),
        Command::Compat(options) => compat::run(&options),
        Command::Oracle(options) => oracle::run(&options),
        Command::Mutants(options) => mutants::run(&options),
        Command::Hardware(command) => hardware::run(&command),
        Command::Docs(options) => docs::run(&options),
        Command::Matrix => matrix::run().and_then(|()| docs::run(&docs::DocsOptions::default())),
        Command::Package(options) => package::run(&options),
        Command::Ioctls(options) => ioctls::run(&options),
    };
    match result {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
