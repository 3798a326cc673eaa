//! `cargo xtask fuzz`: one target of `fuzz/` under cargo-fuzz and the nightly toolchain, for a given time.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use anyhow::{Context as _, Result, bail, ensure};
use clap::Args;
use sluice_tests::{paths, process};

use crate::cargo::{cargo, ensure_tool, nightly_cargo, run_visibly, target_folder, with_tools, works};
use crate::seeds;

/// The version that goes with the pinned libfuzzer-sys.
const CARGO_FUZZ: &str = "0.13.2";

/// Fuzz one target.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Name of a file in fuzz/fuzz_targets, without the ending; `list` prints all names.
    name: String,
    /// Duration in minutes.
    #[arg(long, default_value_t = 10)]
    minutes: u64,
    /// Number of processes.
    #[arg(long, default_value_t = 1)]
    jobs: u32,
}

/// Runs a target; false when it found something.
pub(crate) fn run(options: &Options) -> Result<bool> {
    let folder = paths::workspace().join("fuzz");
    let targets = targets(&folder)?;
    if options.name == "list" {
        println!("{}", targets.join("\n"));
        return Ok(true);
    }
    if !targets.contains(&options.name) {
        bail!("no target {:?}; there are: {}", options.name, targets.join(", "));
    }
    ensure!(
        works("rustup", ["run", "nightly", "rustc", "--version"]),
        "fuzzing needs the nightly toolchain: rustup toolchain install nightly"
    );
    ensure_tool("fuzz", CARGO_FUZZ)?;
    let corpus = folder.join("corpus").join(&options.name);
    std::fs::create_dir_all(&corpus).with_context(|| format!("creating {}", corpus.display()))?;
    let seeds = folder.join("seeds").join(&options.name);
    seeds::write(&options.name, &seeds)?;

    let whole_session = options.name == "records";
    let mut fuzz = if whole_session { elsewhere(&nightly_cargo())? } else { nightly_cargo() };
    with_tools(&mut fuzz)?;
    fuzz.args(["fuzz", "run", &options.name]).arg(&corpus);
    if seeds.is_dir() {
        fuzz.arg(&seeds);
    }
    if whole_session {
        fuzz.env("SLUICE_NULL_DRIVER", null_driver()?);
        // The driver keeps what it was asked for until its process ends, as drivers do.
        fuzz.env("ASAN_OPTIONS", "detect_odr_violation=0:detect_leaks=0");
    }
    let seconds = options.minutes * 60;
    fuzz.arg("--");
    fuzz.args([
        format!("-max_total_time={seconds}"),
        "-timeout=25".to_owned(),
        "-rss_limit_mb=2048".to_owned(),
        "-print_final_stats=1".to_owned(),
    ]);
    if options.jobs > 1 {
        fuzz.arg(format!("-fork={}", options.jobs));
    }
    let started = Instant::now();
    let status = fuzz.status().with_context(|| format!("starting {}", process::display(&fuzz)))?;
    let verdict = if status.success() { "PASS" } else { "FAIL" };
    println!("fuzz {}: {verdict} ({:.0} s)", options.name, started.elapsed().as_secs_f64());
    if !status.success() {
        println!("inputs that did it: {}", folder.join("artifacts").join(&options.name).display());
    }
    Ok(status.success())
}

/// A command in a process whose libraries and large mappings lie low: AddressSanitizer's heap is several TiB that the kernel
/// would put over the addresses where sessions have theirs.
fn elsewhere(command: &Command) -> Result<Command> {
    ensure!(
        works("setarch", ["--addr-compat-layout", "true"]),
        "fuzzing sessions needs setarch of util-linux"
    );
    let mut wrapped = Command::new("setarch");
    wrapped.arg("--addr-compat-layout").arg(command.get_program()).args(command.get_args());
    if let Some(folder) = command.get_current_dir() {
        wrapped.current_dir(folder);
    }
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => wrapped.env(name, value),
            None => wrapped.env_remove(name),
        };
    }
    Ok(wrapped)
}

/// The driver that does nothing, built with the pinned toolchain: what is fuzzed is in front of it.
fn null_driver() -> Result<PathBuf> {
    run_visibly(cargo().args(["build", "--release", "--quiet", "-p", "sluice-null-driver"]))?;
    Ok(target_folder()?.join("release/libsluice_null_driver.so"))
}

fn targets(folder: &Path) -> Result<Vec<String>> {
    let folder = folder.join("fuzz_targets");
    let mut names: Vec<String> = std::fs::read_dir(&folder)
        .with_context(|| format!("reading {}", folder.display()))?
        .flatten()
        .filter_map(|entry| Some(entry.file_name().to_str()?.strip_suffix(".rs")?.to_owned()))
        .collect();
    names.sort();
    Ok(names)
}
