//! `cargo xtask test`: every check of this tree, collected into one record.

use std::collections::BTreeMap;
use std::process::Command;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, Result, ensure};
use clap::{Args, ValueEnum};
use sluice_tests::{clients, debian, paths, process};

use crate::cargo::{
    build_tests, cargo, ensure_tool, nightly_cargo, run_visibly, target_folder, with_tools, works,
};
use crate::record::{Machine, Record, TestResult, Verdict};
use crate::runner::{self, Plan, missing};
use crate::{docs, promises, prose, record_file, setup};

/// The newest that the pinned compiler builds.
const CARGO_DENY: &str = "0.20.2";
/// One check that is no test must end within this.
const CHECK: Duration = Duration::from_secs(1200);
/// One test.
const TEST: Duration = Duration::from_secs(180);
/// One test with a virtual machine under software emulation, or one for the full tier.
const LONG_TEST: Duration = Duration::from_secs(900);

/// Test binaries whose tests run one at a time: machines of their own, or figures that others would spoil.
const ALONE: &[&str] = &["vm", "figures", "newcomer", "vmms"];
/// Test binaries whose tests boot machines.
const WITH_VM: &[&str] = &["vm", "guest", "newcomer", "cloud_hypervisor", "firecracker", "vmms"];

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Tier {
    /// The tests that every change must pass; under 25 minutes on two cores.
    Ci,
    /// The `ci` tests, the long tests and miri.
    Full,
}

impl Tier {
    const fn name(self) -> &'static str {
        match self {
            Self::Ci => "ci",
            Self::Full => "full",
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Stage {
    /// Formatting.
    Fmt,
    /// Lints.
    Clippy,
    /// Plain English in pages for users, and no step back in comments.
    Prose,
    /// Unit and integration tests, virtual machines among them.
    Tests,
    /// Tests in documentation.
    Doctests,
    /// The daemon killed at every step of every change.
    Faults,
    /// All interleavings of the ring, of parking and waking.
    Loom,
    /// The documentation builds, and generated pages are up to date.
    Docs,
    /// Licences, bans, sources, advisories of dependencies.
    Deny,
    /// Undefined behaviour, by interpretation.
    Miri,
    /// Memory errors, by instrumentation.
    Asan,
    /// The specification's promises.
    Promises,
}

/// Run the tests.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Tier of tests.
    #[arg(long, value_enum, default_value = "ci")]
    tier: Tier,
    /// Stages to run; the run then proves no promise.
    #[arg(long, value_enum, value_delimiter = ',')]
    only: Vec<Stage>,
    /// Text that the full name (`binary::path::test`) of a test must contain.
    #[arg(long, default_value = "")]
    filter: String,
    /// Packages to test, instead of the whole workspace.
    #[arg(long, short)]
    package: Vec<String>,
    /// Do not install or download anything first.
    #[arg(long)]
    skip_setup: bool,
    /// Print the name of each test, not only of failures.
    #[arg(long, short)]
    verbose: bool,
}

impl Options {
    /// As cargo's options.
    fn packages(&self) -> Vec<String> {
        if self.package.is_empty() {
            return vec!["--workspace".to_owned()];
        }
        self.package.iter().map(|package| format!("--package={package}")).collect()
    }
}

/// Does what a newcomer does, test by test; true when nothing failed.
pub(crate) fn newcomer() -> Result<bool> {
    setup::prepare().context("setting up")?;
    run(&Options {
        tier: Tier::Full,
        only: vec![Stage::Tests],
        filter: "newcomer::".to_owned(),
        package: vec!["sluice-tests".to_owned()],
        // It wants none of the clients that other tests of this tier do.
        skip_setup: true,
        verbose: true,
    })
}

/// Runs the chosen stages; true when nothing failed.
pub(crate) fn run(options: &Options) -> Result<bool> {
    let started = Instant::now();
    let mut record = Record {
        commit: commit()?,
        tier: options.tier.name().to_owned(),
        partial: !(options.only.is_empty() && options.filter.is_empty() && options.package.is_empty()),
        started: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs()),
        machine: Machine::this(),
        ..Record::default()
    };
    println!("Testing {} (tier {}, {} CPUs)", record.commit, record.tier, record.machine.cpus);
    for stage in Stage::value_variants() {
        if !options.only.is_empty() && !options.only.contains(stage) {
            continue;
        }
        let stage_started = Instant::now();
        let name = stage.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default();
        println!("{name}");
        let results = run_stage(*stage, options, &record).unwrap_or_else(|error| {
            let reason = format!("{error:#}");
            vec![TestResult {
                name: format!("stage::{name}"),
                verdict: Verdict::Failed,
                seconds: 0.0,
                reason,
            }]
        });
        summarise(&results, stage_started.elapsed());
        record.tests.extend(results);
        // After every stage, so that an interrupted run leaves what it knows.
        record.seconds = started.elapsed().as_secs_f64();
        record.write(&record_file()?)?;
    }
    Ok(conclude(&record, started.elapsed()))
}

fn conclude(record: &Record, elapsed: Duration) -> bool {
    let failed: Vec<&TestResult> =
        record.tests.iter().filter(|test| test.verdict == Verdict::Failed).collect();
    println!("\nrecord: {}", record_file().map(|path| runner::shown(&path)).unwrap_or_default());
    println!("time: {:.0} s", elapsed.as_secs_f64());
    let mut reasons: BTreeMap<&str, usize> = BTreeMap::new();
    for test in record.tests.iter().filter(|test| test.verdict == Verdict::Skipped) {
        *reasons.entry(test.reason.lines().next().unwrap_or_default()).or_default() += 1;
    }
    for (reason, count) in reasons {
        println!("skipped: {count} because {reason}");
    }
    for test in &failed {
        println!("failed: {}", test.name);
    }
    let passed = record.count(Verdict::Passed);
    let good = failed.is_empty() && passed > 0;
    println!(
        "{passed} passed, {} failed, {} skipped, {} promises kept partly",
        failed.len(),
        record.count(Verdict::Skipped),
        record.count(Verdict::Partly)
    );
    println!("test: {}", if good { "PASS" } else { "FAIL" });
    good
}

fn summarise(results: &[TestResult], elapsed: Duration) {
    let count = |verdict| results.iter().filter(|result| result.verdict == verdict).count();
    let (passed, failed) = (count(Verdict::Passed), count(Verdict::Failed));
    for result in results.iter().filter(|result| result.name.starts_with("stage::")) {
        match result.verdict {
            Verdict::Failed => println!("    {}", result.reason.replace('\n', "\n    ")),
            Verdict::Skipped => println!("    skipped: {}", result.reason),
            Verdict::Passed | Verdict::Partly => {}
        }
    }
    let partly = match count(Verdict::Partly) {
        0 => String::new(),
        partly => format!(", {partly} partly"),
    };
    println!(
        "    {passed} passed{partly}, {failed} failed, {} skipped in {:.1} s",
        count(Verdict::Skipped),
        elapsed.as_secs_f64()
    );
}

fn run_stage(stage: Stage, options: &Options, record: &Record) -> Result<Vec<TestResult>> {
    match stage {
        Stage::Fmt => {
            let mut fmt = cargo();
            // Here alone the whole workspace has another name.
            let packages =
                if options.package.is_empty() { vec!["--all".to_owned()] } else { options.packages() };
            fmt.arg("fmt").args(packages).args(["--check", "--", "--color", "never"]);
            Ok(vec![runner::check("stage::fmt", CHECK, &mut fmt)])
        }
        Stage::Clippy => Ok(vec![runner::check(
            "stage::clippy",
            CHECK,
            cargo().args(["clippy", "--all-targets"]).args(options.packages()).args(["--", "-D", "warnings"]),
        )]),
        Stage::Prose => Ok(vec![prose_of_pages()?]),
        Stage::Tests => tests(options),
        Stage::Doctests => {
            let mut test = cargo();
            test.args(["test", "--release", "--doc", "--no-fail-fast"]).args(options.packages());
            runner::documentation_tests(&mut test, CHECK)
        }
        Stage::Faults => faults(options),
        Stage::Loom => loom(options),
        Stage::Docs => documentation(options),
        Stage::Deny => deny(),
        Stage::Miri => Ok(vec![miri(options.tier)]),
        Stage::Asan => asan(),
        Stage::Promises => {
            if record.partial {
                let reason = "only part of the tests ran".to_owned();
                return Ok(vec![skipped("stage::promises", reason)]);
            }
            let mut results = promises::check(record)?;
            for result in results.iter_mut().filter(|result| result.verdict == Verdict::Failed) {
                println!(
                    "    BROKEN   {}\n        {}",
                    result.name,
                    result.reason.replace('\n', "\n        ")
                );
            }
            for result in &mut results {
                result.name = format!("promise::{}", result.name);
            }
            Ok(results)
        }
    }
}

fn prose_of_pages() -> Result<TestResult> {
    let findings = prose::findings(&paths::workspace())?;
    let verdict = if findings.is_empty() { Verdict::Passed } else { Verdict::Failed };
    Ok(TestResult { name: "stage::prose".to_owned(), verdict, seconds: 0.0, reason: findings.join("\n") })
}

fn skipped(name: &str, reason: String) -> TestResult {
    TestResult { name: name.to_owned(), verdict: Verdict::Skipped, seconds: 0.0, reason }
}

/// Everything is built for release: what ships is what is tested, and it is built once.
fn tests(options: &Options) -> Result<Vec<TestResult>> {
    if !options.skip_setup {
        setup::prepare().context("setting up")?;
        match options.tier {
            Tier::Ci => clients::prepare(),
            Tier::Full => clients::prepare_all(),
        }
        .context("setting up the clients")?;
    }
    // Whole-system tests of any package run programs of all others.
    run_visibly(cargo().args(["build", "--release", "--workspace"]))?;
    let mut build = cargo();
    build.args(["test", "--release"]).args(options.packages());
    let binaries = build_tests(&mut build)?;
    // Where setup could not get it, the test that needs it says so.
    let promtool = debian::promtool_if_there()?.unwrap_or_default().display().to_string();
    let mut results = Vec::new();
    for binary in &binaries {
        let name = binary.name.as_str();
        let with_vm = WITH_VM.contains(&name);
        let plan = Plan {
            filter: &options.filter,
            full: options.tier == Tier::Full,
            parallel: if ALONE.contains(&name) { 1 } else { Machine::this().cpus },
            limit: if with_vm { LONG_TEST } else { TEST },
            long_limit: LONG_TEST,
            environment: &[("SLUICE_TIER", options.tier.name()), ("SLUICE_PROMTOOL", &promtool)],
            verbose: options.verbose || with_vm,
        };
        results.extend(run_binary(binary, &plan)?);
    }
    Ok(results)
}

/// What is tested with them.
const CRASHES: [&str; 4] = [
    "crash::a_daemon_killed_at_any_step_of_a_change_has_made_it_or_not",
    "crash::a_daemon_killed_at_any_step_of_writing_its_state_has_the_old_one_or_the_new_one",
    "crash::a_daemon_killed_at_any_step_under_load_has_what_it_told_each_client",
    "crash::a_daemon_killed_at_any_time_under_load_has_what_it_told_each_client",
];

/// The daemon with places at which it can be killed: another program, hence a folder of its own.
fn faults(options: &Options) -> Result<Vec<TestResult>> {
    if options.tier == Tier::Ci {
        return Ok(CRASHES.map(|test| skipped(test, runner::FULL_TIER.to_owned())).to_vec());
    }
    let mut build = cargo();
    build.args([
        "test",
        "--release",
        "--package",
        "sluice-daemon",
        "--features",
        "fault-points",
        "--test",
        "crash",
    ]);
    let folder = target_folder()?.join("faults");
    run_visibly(
        cargo().args(["build", "--release", "--package", "sluice-launcher"]).env("CARGO_TARGET_DIR", &folder),
    )?;
    build.env("CARGO_TARGET_DIR", folder);
    let mut results = Vec::new();
    for binary in build_tests(&mut build)? {
        let plan = Plan {
            filter: &options.filter,
            full: true,
            parallel: Machine::this().cpus,
            limit: CHECK,
            long_limit: CHECK,
            environment: &[],
            verbose: options.verbose,
        };
        results.extend(run_binary(&binary, &plan)?);
    }
    Ok(results)
}

fn run_binary(binary: &crate::cargo::TestBinary, plan: &Plan<'_>) -> Result<Vec<TestResult>> {
    let started = Instant::now();
    let results = runner::run(binary, plan)?;
    if !results.is_empty() {
        let failed = results.iter().filter(|result| result.verdict == Verdict::Failed).count();
        let sign = if failed == 0 { "ok" } else { "FAILED" };
        println!(
            "    {:<28} {:>5} tests  {:>7.1} s  {sign}",
            binary.name,
            results.len(),
            started.elapsed().as_secs_f64()
        );
    }
    Ok(results)
}

/// Loom replaces atomics and threads at compile time, hence a build and a folder of its own.
fn loom(options: &Options) -> Result<Vec<TestResult>> {
    let mut build = cargo();
    build.args(["test", "--release", "--package", "sluice-protocol", "--lib", "--tests"]);
    build.env("RUSTFLAGS", "--cfg loom").env("CARGO_TARGET_DIR", target_folder()?.join("loom"));
    let mut results = Vec::new();
    for binary in build_tests(&mut build)? {
        let plan = Plan {
            filter: "loom_",
            full: options.tier == Tier::Full,
            parallel: Machine::this().cpus,
            limit: CHECK,
            long_limit: CHECK,
            environment: &[],
            verbose: options.verbose,
        };
        results.extend(run_binary(&binary, &plan)?);
    }
    // A run without one would prove nothing, silently.
    ensure!(!results.is_empty(), "no test of sluice-protocol has loom_ in its name");
    Ok(results)
}

fn documentation(options: &Options) -> Result<Vec<TestResult>> {
    let mut doc = cargo();
    doc.args(["doc", "--no-deps", "--document-private-items"])
        .args(options.packages())
        .env("RUSTDOCFLAGS", "-D warnings");
    let built = runner::check("stage::docs", CHECK, &mut doc);
    let stale = docs::stale()?;
    let reason = stale.iter().map(|page| format!("{page} is out of date; `cargo xtask docs` writes it"));
    let generated = TestResult {
        name: "stage::docs-generated".to_owned(),
        verdict: if stale.is_empty() { Verdict::Passed } else { Verdict::Failed },
        seconds: 0.0,
        reason: reason.collect::<Vec<_>>().join("\n"),
    };
    Ok(vec![built, generated])
}

fn deny() -> Result<Vec<TestResult>> {
    if let Err(error) = ensure_tool("deny", CARGO_DENY) {
        return Ok(vec![skipped("stage::deny", format!("cargo-deny is not installed: {error:#}"))]);
    }
    let check = |what: &[&str]| -> Result<Command> {
        let mut deny = cargo();
        deny.args(["deny", "--all-features", "--color", "never", "check"]).args(what);
        with_tools(&mut deny)?;
        Ok(deny)
    };
    let rules = runner::check("stage::deny", CHECK, &mut check(&["bans", "licenses", "sources"])?);
    // Their database is on the network, which is not everywhere; without it nothing was checked, and that is said.
    let finished = process::run(&mut check(&["advisories"])?, CHECK)?;
    let unreachable = ["failed to fetch advisory database", "failed to load advisory database"];
    let advisories = if finished.status.success() {
        TestResult {
            name: "stage::deny-advisories".to_owned(),
            verdict: Verdict::Passed,
            seconds: finished.elapsed.as_secs_f64(),
            reason: String::new(),
        }
    } else if unreachable.iter().any(|text| finished.stderr.contains(text)) {
        skipped("stage::deny-advisories", "the advisory database cannot be reached".to_owned())
    } else {
        TestResult {
            name: "stage::deny-advisories".to_owned(),
            verdict: Verdict::Failed,
            seconds: finished.elapsed.as_secs_f64(),
            reason: process::tail(&finished.stderr, 60),
        }
    };
    Ok(vec![rules, advisories])
}

/// Packages in which guest bytes and shared memory are handled.
const CAREFUL: &[&str] =
    &["--package", "sluice-protocol", "--package", "sluice-shared-memory", "--package", "sluice-cuda-abi"];

fn miri(tier: Tier) -> TestResult {
    let reason = missing("miri", works("rustup", ["run", "nightly", "cargo", "miri", "--version"]))
        .or_else(|| (tier == Tier::Ci).then(|| runner::FULL_TIER.to_owned()));
    match reason {
        Some(reason) => skipped("stage::miri", reason),
        None => runner::check(
            "stage::miri",
            Duration::from_secs(3600),
            nightly_cargo()
                .args(["miri", "test", "--lib"])
                .args(CAREFUL)
                .env("MIRIFLAGS", "-Zmiri-disable-isolation")
                // Interpretation is a thousand times slower; a few random cases still reach every line.
                .env("PROPTEST_CASES", "4"),
        ),
    }
}

/// The decoders' property tests. Tests that fork or map at fixed addresses are left out: the sanitizer's heap lies there.
fn asan() -> Result<Vec<TestResult>> {
    if let Some(reason) =
        missing("the nightly toolchain", works("rustup", ["run", "nightly", "rustc", "--version"]))
    {
        return Ok(vec![skipped("stage::asan", reason)]);
    }
    let mut test = nightly_cargo();
    test.args(["test", "--target", "x86_64-unknown-linux-gnu", "--lib"]);
    test.args(["--package", "sluice-protocol", "--package", "sluice-cuda-abi"]);
    test.args([
        "--test",
        "device_wire",
        "--test",
        "wire_calls",
        "--test",
        "session_memory",
        "--test",
        "image",
    ]);
    test.env("RUSTFLAGS", "-Zsanitizer=address").env("CARGO_TARGET_DIR", target_folder()?.join("asan"));
    Ok(vec![runner::check("stage::asan", Duration::from_secs(600), &mut test)])
}

fn commit() -> Result<String> {
    let mut git = Command::new("git");
    git.args(["describe", "--always", "--dirty", "--abbrev=12"]).current_dir(paths::workspace());
    let finished = process::run(&mut git, Duration::from_secs(30)).context("asking git for the commit")?;
    let name = finished.stdout.trim();
    Ok(if name.is_empty() { "unknown".to_owned() } else { name.to_owned() })
}
