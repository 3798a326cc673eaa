//! The targets of `fuzz/`, compiled by the nightly toolchain: `cargo xtask fuzz` runs one for a given time, the tests run
//! each for a short one.
//!
//! Folders of a target in `fuzz`: `corpus` is in git, and only `--merge` writes it; `found` has the inputs that longer runs added,
//! `seeds` the valid inputs of `seeds.rs`, and `artifacts` each input that failed. `fuzz/README.md` says how to use them.

use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use clap::Args;
use sluice_tests::{paths, process};

use crate::cargo::{cargo, run_visibly, target_folder};
use crate::leftovers::names;
use crate::record::TestResult;
use crate::{nightly, seeds};

/// Compiler options that make libFuzzer see which way an input takes, and AddressSanitizer which memory it touches.
const RUSTFLAGS: &str = "--cfg fuzzing -Zsanitizer=address -Cpasses=sancov-module \
    -Cllvm-args=-sanitizer-coverage-level=4 -Cllvm-args=-sanitizer-coverage-inline-8bit-counters \
    -Cllvm-args=-sanitizer-coverage-pc-table -Cllvm-args=-sanitizer-coverage-trace-compares \
    -Cllvm-args=-simplifycfg-branch-fold-threshold=0";
/// Targets that run a worker's session on the driver that does nothing.
const WITH_WORKER: [&str; 3] = ["graphs", "records", "session_page"];
/// Bytes of a failing input that a report shows.
const SHOWN: usize = 512;
/// Limit of the files in the corpus of one target.
const CORPUS_FILES: usize = 40;
/// Limit of the bytes in the corpus of one target.
const CORPUS_BYTES: u64 = 200 << 10;

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
    /// Run this input once, and do not search for others.
    #[arg(long)]
    input: Option<PathBuf>,
    /// Minimise the known inputs into the target's corpus, which is in git, and do not search for others.
    #[arg(long, conflicts_with = "input")]
    merge: bool,
}

/// Runs a target; false if it found an input that fails.
pub(crate) fn run(options: &Options) -> Result<bool> {
    let targets = targets()?;
    if options.name == "list" {
        println!("{}", targets.join("\n"));
        return Ok(true);
    }
    if !targets.contains(&options.name) {
        bail!("no target {:?}; there are: {}", options.name, targets.join(", "));
    }
    nightly::ensure_installed().context("fuzzing needs the nightly compiler")?;
    let built = Built::new()?;
    if options.merge {
        return merge(&built, &options.name);
    }
    let mut fuzz = built.command(&options.name)?;
    match &options.input {
        Some(input) => fuzz.arg(std::path::absolute(input)?),
        // libFuzzer adds new inputs to the first folder.
        None => fuzz
            .arg(folder("found", &options.name)?)
            .args(inputs(&options.name)?)
            .arg(format!("-max_total_time={}", options.minutes * 60))
            .arg("-print_final_stats=1"),
    };
    if options.jobs > 1 {
        fuzz.arg(format!("-fork={}", options.jobs));
    }
    let started = Instant::now();
    let status = fuzz.status().with_context(|| format!("starting {}", process::display(&fuzz)))?;
    let verdict = if status.success() { "PASS" } else { "FAIL" };
    println!("fuzz {}: {verdict} ({:.0} s)", options.name, started.elapsed().as_secs_f64());
    if !status.success() {
        println!("failing inputs: {}", folder("artifacts", &options.name)?.display());
    }
    Ok(status.success())
}

/// Minimises the known inputs of a target into its corpus: few inputs that reach all code that its seeds do not reach.
fn merge(built: &Built, name: &str) -> Result<bool> {
    let merged = tempfile::tempdir().context("a folder for inputs")?;
    seeds::write(name, merged.path())?;
    let seeds = names(merged.path());
    let mut fuzz = built.command(name)?;
    // Counters would tell apart how often code ran, and the corpus would be many times as large.
    fuzz.args(["-set_cover_merge=1", "-use_counters=0"]);
    fuzz.arg(merged.path()).args([folder("corpus", name)?, folder("found", name)?]);
    let status = fuzz.status().with_context(|| format!("starting {}", process::display(&fuzz)))?;
    ensure!(status.success(), "{}: {status}", process::display(&fuzz));
    let mut units = Vec::new();
    for unit in names(merged.path()).difference(&seeds) {
        let file = merged.path().join(unit);
        let meta = file.metadata().with_context(|| format!("reading {}", file.display()))?;
        units.push((meta.modified()?, meta.len(), unit.clone()));
    }
    let all = units.len();
    // libFuzzer writes those that reach the most code first.
    units.sort();
    units.truncate(CORPUS_FILES);
    let mut bytes = 0;
    units.retain(|(_, size, _)| {
        let fits = bytes + size <= CORPUS_BYTES;
        bytes += if fits { *size } else { 0 };
        fits
    });
    let corpus = folder("corpus", name)?;
    for old in names(&corpus) {
        fs::remove_file(corpus.join(&old)).with_context(|| format!("removing {}", old.display()))?;
    }
    for (_, _, unit) in &units {
        let copied = fs::copy(merged.path().join(unit), corpus.join(unit));
        copied.with_context(|| format!("copying {}", unit.display()))?;
    }
    println!("fuzz {name}: {} of {all} inputs are the corpus now", units.len());
    Ok(true)
}

/// Runs every target; all together take about `time` on `parallel` processors. Inputs that they find are dropped, unless they fail.
/// The driver that does nothing is built first, unless it is `built` already.
pub(crate) fn smoke(time: Duration, parallel: usize, built: bool) -> Result<Vec<TestResult>> {
    let started = Instant::now();
    let built = if built { Built::with_driver()? } else { Built::new()? };
    println!("    built in {:.1} s", started.elapsed().as_secs_f64());
    let targets = targets()?;
    let seconds = (time.as_secs() / targets.len().div_ceil(parallel) as u64).max(1);
    let next = AtomicUsize::new(0);
    let results = Mutex::new(Vec::new());
    thread::scope(|scope| {
        for _ in 0..parallel {
            scope.spawn(|| {
                while let Some(name) = targets.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let started = Instant::now();
                    let judged =
                        short(&built, name, seconds).unwrap_or_else(|error| Err(format!("{error:#}")));
                    let result = TestResult::of(format!("fuzz::{name}"), started.elapsed(), judged);
                    results.lock().unwrap_or_else(PoisonError::into_inner).push(result);
                }
            });
        }
    });
    Ok(results.into_inner().unwrap_or_else(PoisonError::into_inner))
}

/// Runs a target for some seconds; the reason if it fails.
fn short(built: &Built, name: &str, seconds: u64) -> Result<std::result::Result<(), String>> {
    let found = tempfile::tempdir().context("a folder for inputs")?;
    let mut fuzz = built.command(name)?;
    fuzz.arg(found.path()).args(inputs(name)?).arg(format!("-max_total_time={seconds}"));
    // Each input has a time limit of its own, and reading the inputs before the search takes some time as well.
    let finished = process::run(&mut fuzz, Duration::from_secs(seconds * 2 + 120))?;
    Ok(judge(finished.status.success(), &finished.stderr))
}

/// The reason why a run failed, with the input that it wrote down.
fn judge(success: bool, output: &str) -> std::result::Result<(), String> {
    if success {
        return Ok(());
    }
    let mut reason = process::tail(output, 60);
    let input =
        output.lines().find_map(|line| line.split_once("Test unit written to ").map(|(_, path)| path.trim()));
    if let Some((path, bytes)) = input.and_then(|path| Some((path, fs::read(path).ok()?))) {
        let digits: String = bytes.iter().take(SHOWN).map(|byte| format!("{byte:02x}")).collect();
        let more = if bytes.len() > SHOWN { "…" } else { "" };
        reason.push_str(&format!("\nfailing input {path}, {} bytes: {digits}{more}", bytes.len()));
    }
    Err(reason)
}

/// The compiled targets.
struct Built {
    programs: PathBuf,
    null_driver: PathBuf,
}

impl Built {
    /// Compiles all targets.
    fn new() -> Result<Self> {
        // The driver that does nothing is built with the pinned toolchain: fuzzing targets the code in front of it.
        run_visibly(cargo().args(["build", "--release", "--quiet", "-p", "sluice-null-driver"]))?;
        Self::with_driver()
    }

    /// Compiles all targets for the driver that is there.
    fn with_driver() -> Result<Self> {
        run_visibly(&mut targets_build()?)?;
        let target = target_folder()?;
        Ok(Self {
            programs: target.join("fuzz").join(nightly::TARGET).join("release"),
            null_driver: target.join("release/libsluice_null_driver.so"),
        })
    }

    /// A run of a target that lacks only its inputs.
    fn command(&self, name: &str) -> Result<Command> {
        let program = self.programs.join(name);
        let mut fuzz = Command::new(&program);
        fuzz.env("ASAN_OPTIONS", "detect_odr_violation=0");
        if name == "guest_library" {
            // The library does not wait for its threads, and one that is still ending counts as a leak.
            fuzz.env("ASAN_OPTIONS", "detect_odr_violation=0:detect_leaks=0");
        }
        if WITH_WORKER.contains(&name) {
            // AddressSanitizer's heap is several TiB that the kernel would put over the addresses where sessions have
            // theirs; in this layout libraries and large mappings lie low.
            fuzz = Command::new("setarch");
            fuzz.arg("--addr-compat-layout").arg(&program).env("SLUICE_NULL_DRIVER", &self.null_driver);
            // The driver keeps requested memory until its process ends, as drivers do.
            fuzz.env("ASAN_OPTIONS", "detect_odr_violation=0:detect_leaks=0");
        }
        // libFuzzer puts the name of the input behind this text as it is.
        fuzz.arg(format!("-artifact_prefix={}/", folder("artifacts", name)?.display()));
        fuzz.args(["-timeout=25", "-rss_limit_mb=2048"]).current_dir(paths::workspace());
        Ok(fuzz)
    }
}

/// The build of all targets.
pub(crate) fn targets_build() -> Result<Command> {
    let mut build = nightly::cargo();
    build.args(["build", "--release", "--quiet", "--bins", "--target", nightly::TARGET]);
    build.args(["--manifest-path", "fuzz/Cargo.toml"]);
    build.env("RUSTFLAGS", RUSTFLAGS).env("CARGO_TARGET_DIR", target_folder()?.join("fuzz"));
    // A crash is reported with its lines, also where other builds have none.
    build.env_remove("CARGO_PROFILE_RELEASE_DEBUG");
    Ok(build)
}

/// The folders of a target's known inputs: its corpus, and valid ones.
fn inputs(name: &str) -> Result<[PathBuf; 2]> {
    let seeds = folder("seeds", name)?;
    seeds::write(name, &seeds)?;
    Ok([folder("corpus", name)?, seeds])
}

/// A folder of a target in `fuzz`.
fn folder(kind: &str, target: &str) -> Result<PathBuf> {
    let folder = paths::workspace().join("fuzz").join(kind).join(target);
    fs::create_dir_all(&folder).with_context(|| format!("creating {}", folder.display()))?;
    Ok(folder)
}

fn targets() -> Result<Vec<String>> {
    let folder = paths::workspace().join("fuzz/fuzz_targets");
    let mut names: Vec<String> = fs::read_dir(&folder)
        .with_context(|| format!("reading {}", folder.display()))?
        .flatten()
        .filter_map(|entry| Some(entry.file_name().to_str()?.strip_suffix(".rs")?.to_owned()))
        .collect();
    names.sort();
    Ok(names)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failing_input_is_shown() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("crash-1");
        fs::write(&path, b"\x00\xffa").unwrap();
        let output = format!(
            "==1== ERROR: deadly signal\nartifact_prefix='x'; Test unit written to {}\n",
            path.display()
        );
        assert_eq!(judge(true, &output), Ok(()));
        let reason = judge(false, &output).unwrap_err();
        assert!(reason.starts_with("==1== ERROR"), "{reason}");
        assert!(reason.ends_with("crash-1, 3 bytes: 00ff61"), "{reason}");
        fs::write(&path, vec![0; SHOWN + 1]).unwrap();
        assert!(judge(false, &output).unwrap_err().ends_with("00…"));
        assert_eq!(judge(false, "no such file"), Err("no such file".to_owned()));
    }

    #[test]
    fn every_target_has_a_program() {
        let manifest = fs::read_to_string(paths::workspace().join("fuzz/Cargo.toml")).unwrap();
        for target in targets().unwrap() {
            assert!(manifest.contains(&format!("path = \"fuzz_targets/{target}.rs\"")), "{target}");
        }
    }

    #[test]
    fn every_target_has_a_corpus_within_the_limits() {
        let corpora = paths::workspace().join("fuzz/corpus");
        for target in targets().unwrap() {
            let folder = corpora.join(&target);
            let sizes: Vec<u64> =
                names(&folder).iter().map(|name| folder.join(name).metadata().unwrap().len()).collect();
            assert!((1..=CORPUS_FILES).contains(&sizes.len()), "{target}: {} files", sizes.len());
            assert!(sizes.iter().sum::<u64>() <= CORPUS_BYTES, "{target}: {sizes:?}");
        }
    }
}
