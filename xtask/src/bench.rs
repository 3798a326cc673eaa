//! `cargo xtask bench`: builds everything for release and runs the benchmark program of the tests.

use std::path::PathBuf;

use anyhow::{Context as _, Result};
use clap::Args;
use sluice_tests::paths::Binaries;
use sluice_tests::process;

use crate::cargo::{cargo, run_visibly, target_folder};

/// Run the benchmarks.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// What virtual machines add: the same rows in one, for each way to the device.
    #[arg(long)]
    vm: bool,
    /// Write the rows to this file.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Only rows whose name contains one of these.
    filter: Vec<String>,
}

/// Runs the benchmarks; false when the program says so.
pub(crate) fn run(options: &Options) -> Result<bool> {
    run_visibly(cargo().args(["build", "--release", "--workspace"]))?;
    let program = Binaries::at(target_folder()?.join("release")).get("sluice-bench")?;
    let mut bench = std::process::Command::new(program);
    if options.vm {
        bench.arg("--vm");
    }
    if let Some(file) = &options.json {
        bench.arg("--json").arg(file);
    }
    bench.args(&options.filter);
    let status = bench.status().with_context(|| format!("starting {}", process::display(&bench)))?;
    Ok(status.success())
}
