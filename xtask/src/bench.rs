//! `cargo xtask bench`: builds all packages for release and runs the benchmark program of the tests.

use std::path::PathBuf;

use anyhow::{Context as _, Result};
use clap::Args;
use sluice_tests::performance::table::wants_engine;
use sluice_tests::process;

use crate::cargo::{build_release, cargo, run_visibly};
use crate::performance;

/// Run the benchmarks.
#[derive(Debug, Args)]
pub(crate) struct BenchOptions {
    /// Measure the overhead of virtual machines: the same rows in one, for each way to the device.
    #[arg(long)]
    vm: bool,
    /// File to write the rows to.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Write docs/performance.md, with its plots, from this run of all rows: of those in virtual machines with --vm.
    #[arg(long, conflicts_with_all = ["json", "filter"])]
    report: bool,
    /// Texts, one of which the name of a row must contain.
    filter: Vec<String>,
}

/// Runs the benchmarks; false if one fails.
pub(crate) fn run(options: &BenchOptions) -> Result<bool> {
    let program = build_release()?.get("sluice-bench")?;
    if !options.vm && wants_engine(&options.filter) {
        // With all packages, so that it shares their builds.
        run_visibly(cargo().args(["build", "--release", "--workspace", "--example", "bench"]))?;
    }
    let record = tempfile::NamedTempFile::new()?;
    let mut bench = std::process::Command::new(program);
    if options.vm {
        bench.arg("--vm");
    }
    if options.report {
        bench.arg("--json").arg(record.path());
    }
    if let Some(file) = &options.json {
        bench.arg("--json").arg(file);
    }
    bench.args(&options.filter);
    let status = bench.status().with_context(|| format!("starting {}", process::display(&bench)))?;
    if status.success() && options.report {
        performance::report(record.path(), options.vm)?;
    }
    Ok(status.success())
}
