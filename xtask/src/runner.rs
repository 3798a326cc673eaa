//! Runs the tests of a compiled test binary, each in a process of its own.
//!
//! So a test that hangs is ended without taking others along, one that leaves processes behind is found out, and every test has
//! its own time. A test that reports by `sluice_skip::skip` that it cannot run, and succeeds, counts as skipped.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use sluice_tests::process::{self, Finished};

use crate::cargo::TestBinary;
use crate::record::{TestResult, Verdict};

/// How the reason of an `#[ignore]` begins where the test is one of the full tier. What is marked for another reason is a part
/// of a test, which runs it itself, or prints figures for people.
pub(crate) const FULL_TIER: &str = "for the full tier";

/// What a run of a binary depends on.
#[derive(Debug, Clone)]
pub(crate) struct Plan<'plan> {
    /// Only tests whose name contains this.
    pub filter: &'plan str,
    /// Also those for the full tier.
    pub full: bool,
    /// At once.
    pub parallel: usize,
    /// For each test.
    pub limit: Duration,
    /// For each test of the full tier.
    pub long_limit: Duration,
    /// Added to each test's environment.
    pub environment: &'plan [(&'plan str, &'plan str)],
    /// Show each test, not only those that fail.
    pub verbose: bool,
}

/// Runs all tests of a binary that match the plan.
pub(crate) fn run(binary: &TestBinary, plan: &Plan<'_>) -> Result<Vec<TestResult>> {
    let ignored = ignored(binary)?;
    let names: Vec<String> = list(binary, &[])?
        .into_iter()
        .filter(|name| format!("{}::{name}", binary.name).contains(plan.filter))
        .filter(|name| ignored.get(name).is_none_or(|reason| reason.starts_with(FULL_TIER)))
        .collect();
    let next = AtomicUsize::new(0);
    let results = Mutex::new(Vec::with_capacity(names.len()));
    thread::scope(|scope| {
        for _ in 0..plan.parallel.clamp(1, names.len().max(1)) {
            scope.spawn(|| {
                while let Some(name) = names.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let result = run_one(binary, plan, name, ignored.get(name));
                    show(plan, &result);
                    results.lock().unwrap_or_else(std::sync::PoisonError::into_inner).push(result);
                }
            });
        }
    });
    let mut results = results.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
    results.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(results)
}

fn list(binary: &TestBinary, more: &[&str]) -> Result<BTreeSet<String>> {
    let listed = ask(binary, Command::new(&binary.path).args(["--list", "--format", "terse"]).args(more))?;
    Ok(listed.lines().filter_map(|line| line.strip_suffix(": test")).map(str::to_owned).collect())
}

/// The tests that are marked `#[ignore]`, and why. The harness tells why of those only that it is asked to run.
fn ignored(binary: &TestBinary) -> Result<BTreeMap<String, String>> {
    let names = list(binary, &["--ignored"])?;
    if names.is_empty() {
        return Ok(BTreeMap::new());
    }
    let said = ask(binary, Command::new(&binary.path).arg("--exact").args(&names))?;
    let reason = |line: &str| {
        let (name, reason) = line.strip_prefix("test ")?.split_once(" ... ignored")?;
        Some((name.to_owned(), reason.trim_start_matches([',', ' ']).to_owned()))
    };
    let reasons: BTreeMap<String, String> = said.lines().filter_map(reason).collect();
    for name in names {
        let reason = reasons.get(&name).map_or("", String::as_str);
        let told = !reason.is_empty() && reason.contains(FULL_TIER) == reason.starts_with(FULL_TIER);
        ensure!(
            told,
            "{}::{name} is ignored, and why ({reason:?}) does not say whether for the full tier",
            binary.name
        );
    }
    Ok(reasons)
}

fn ask(binary: &TestBinary, command: &mut Command) -> Result<String> {
    process::output_of(command.current_dir(&binary.folder), Duration::from_secs(60))
        .with_context(|| format!("listing the tests of {}", binary.name))
}

fn run_one(binary: &TestBinary, plan: &Plan<'_>, test: &str, ignored: Option<&String>) -> TestResult {
    static NUMBER: AtomicUsize = AtomicUsize::new(0);
    let name = format!("{}::{test}", binary.name);
    if let Some(reason) = ignored
        && !plan.full
    {
        return TestResult { name, verdict: Verdict::Skipped, seconds: 0.0, reason: reason.clone() };
    }
    let id = format!("{}-{}", std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed));
    let mut command = Command::new(&binary.path);
    command.args(["--exact", test, "--nocapture", "--include-ignored", "--test-threads=1"]);
    command.current_dir(&binary.folder).env("CARGO_MANIFEST_DIR", &binary.folder).env("SLUICE_TEST_RUN", &id);
    // Only the end of the output is shown, and a backtrace would push the message out of it.
    command.env("RUST_BACKTRACE", "0").envs(plan.environment.iter().copied());
    let started = Instant::now();
    let finished = process::run(&mut command, if ignored.is_some() { plan.long_limit } else { plan.limit });
    let seconds = started.elapsed().as_secs_f64();
    let left_behind = end_leftovers(&format!("SLUICE_TEST_RUN={id}"), finished.is_ok());
    let (verdict, reason) = judge(finished, &left_behind);
    TestResult { name, verdict, seconds, reason }
}

/// Ends every process that inherited the marker. After a test that ended by itself they first get a moment, because the
/// end of a process and the end of those it has just killed are not one instant.
fn end_leftovers(marker: &str, grace: bool) -> Vec<String> {
    let deadline = Instant::now() + if grace { Duration::from_secs(3) } else { Duration::ZERO };
    let mut left = process::with_environment(marker);
    while !left.is_empty() && Instant::now() < deadline {
        thread::sleep(Duration::from_millis(20));
        left = process::with_environment(marker);
    }
    for (id, _) in &left {
        process::kill(*id);
    }
    left.into_iter().map(|(id, name)| format!("{name} ({id})")).collect()
}

fn judge(finished: Result<Finished>, left_behind: &[String]) -> (Verdict, String) {
    let finished = match finished {
        Ok(finished) => finished,
        Err(error) => return (Verdict::Failed, format!("{error:#}")),
    };
    let output = || process::tail(&format!("{}\n{}", finished.stdout, finished.stderr), 60);
    if !finished.status.success() {
        return (Verdict::Failed, format!("{}\n{}", finished.status, output()));
    }
    if !left_behind.is_empty() {
        return (Verdict::Failed, format!("left behind: {}\n{}", left_behind.join(", "), output()));
    }
    if finished.stdout.contains("running 0 tests") {
        return (Verdict::Failed, "the binary no longer knows this test".to_owned());
    }
    match sluice_skip::reason(&finished.stdout) {
        Some(reason) => (Verdict::Skipped, reason.to_owned()),
        None => (Verdict::Passed, String::new()),
    }
}

fn show(plan: &Plan<'_>, result: &TestResult) {
    let TestResult { name, verdict, seconds, reason } = result;
    match verdict {
        Verdict::Failed => println!("    FAILED   {name} ({seconds:.2} s)\n{}", indent(reason)),
        Verdict::Skipped if plan.verbose => println!("    skipped  {name}: {reason}"),
        Verdict::Passed if plan.verbose => println!("    passed   {name} ({seconds:.2} s)"),
        Verdict::Skipped | Verdict::Partly | Verdict::Passed => {}
    }
}

fn indent(text: &str) -> String {
    text.lines().map(|line| format!("        {line}")).collect::<Vec<_>>().join("\n")
}

/// Runs a check that is no test binary as if it were one test.
pub(crate) fn check(name: &str, limit: Duration, command: &mut Command) -> TestResult {
    let started = Instant::now();
    let (verdict, reason) = judge_check(process::run(command, limit));
    TestResult { name: name.to_owned(), verdict, seconds: started.elapsed().as_secs_f64(), reason }
}

fn judge_check(finished: Result<Finished>) -> (Verdict, String) {
    match finished {
        Ok(finished) if finished.status.success() => (Verdict::Passed, String::new()),
        other => judge(other, &[]),
    }
}

/// Tests in the documentation, as `cargo test --doc` reports them.
pub(crate) fn documentation_tests(command: &mut Command, limit: Duration) -> Result<Vec<TestResult>> {
    let finished = process::run(command, limit)?;
    let results = parse_documentation_tests(&finished.stdout);
    if !finished.status.success() && results.iter().all(|result| result.verdict != Verdict::Failed) {
        bail!("{}: {}\n{}", process::display(command), finished.status, process::tail(&finished.stderr, 60));
    }
    Ok(results)
}

fn parse_documentation_tests(output: &str) -> Vec<TestResult> {
    output
        .lines()
        .filter_map(|line| {
            let (name, verdict) = line.strip_prefix("test ")?.rsplit_once(" ... ")?;
            let verdict = match verdict.trim() {
                "ok" => Verdict::Passed,
                "ignored" => Verdict::Skipped,
                _ => Verdict::Failed,
            };
            let reason = if verdict == Verdict::Failed { process::tail(output, 60) } else { String::new() };
            Some(TestResult { name: format!("doc::{name}"), verdict, seconds: 0.0, reason })
        })
        .collect()
}

/// Whether a program of the toolchain is there, as a reason to skip if not.
pub(crate) fn missing(what: &str, there: bool) -> Option<String> {
    (!there).then(|| format!("{what} is not installed"))
}

/// A path for a message, relative to the checkout where it can be.
pub(crate) fn shown(path: &Path) -> String {
    path.strip_prefix(sluice_tests::paths::workspace()).unwrap_or(path).display().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A stand-in for a test binary: a shell script that understands the options used here.
    fn binary(folder: &Path, tests: &str) -> TestBinary {
        let script = format!(
            "#!/bin/sh\ncase \"$*\" in\n*--ignored) printf 'part: test\\nslow: test\\n';;\n--list*) printf '{}';;\n\
             '--exact part slow') printf '{}'; exit;;\nesac\n[ \"$1\" = --exact ] || exit 0\ncase $2 in\n{tests}\nesac\n",
            "good: test\\nbad: test\\nhangs: test\\nleaks: test\\npart: test\\nskips: test\\nslow: test\\nspeed: bench\\n",
            "running 2 tests\\ntest part ... ignored, a part of good\\ntest slow ... ignored, for the full tier\\n"
        );
        stand_in(folder, "fake", &script)
    }

    /// Written by another process: were the file open for writing here, a test that forks at that moment would inherit it, and a
    /// file that is open for writing cannot be executed.
    fn stand_in(folder: &Path, name: &str, script: &str) -> TestBinary {
        let path = folder.join(name);
        let mut write = Command::new("sh");
        write.args(["-c", "printf %s \"$1\" > \"$0\" && chmod +x \"$0\""]).arg(&path).arg(script);
        assert!(write.status().unwrap().success());
        TestBinary { name: name.to_owned(), path, folder: folder.to_path_buf() }
    }

    const TESTS: &str = "good) exit 0;;\nbad) echo why; exit 101;;\nhangs) exec sleep 1000;;\n\
                         leaks) sleep 1000 > /dev/null 2>&1 & exit 0;;\nskips) echo 'SKIP: no such hardware';;\n\
                         slow) exit 0;;";

    fn plan(filter: &str) -> Plan<'_> {
        Plan {
            filter,
            full: false,
            parallel: 2,
            // One waits for its end; the others end by themselves, also on a busy machine.
            limit: Duration::from_secs(8),
            long_limit: Duration::from_secs(8),
            environment: &[],
            verbose: false,
        }
    }

    #[test]
    fn every_kind_of_end_is_told_apart() {
        let folder = tempfile::tempdir().unwrap();
        let results = run(&binary(folder.path(), TESTS), &plan("")).unwrap();
        let verdicts: Vec<(&str, Verdict)> =
            results.iter().map(|result| (result.name.as_str(), result.verdict)).collect();
        assert_eq!(
            verdicts,
            [
                ("fake::bad", Verdict::Failed),
                ("fake::good", Verdict::Passed),
                ("fake::hangs", Verdict::Failed),
                ("fake::leaks", Verdict::Failed),
                ("fake::skips", Verdict::Skipped),
                ("fake::slow", Verdict::Skipped),
            ]
        );
        assert!(results[0].reason.contains("why"));
        assert!(results[2].reason.contains("did not end"));
        assert!(results[3].reason.contains("left behind: sleep"));
        assert_eq!(results[4].reason, "no such hardware");
    }

    #[test]
    fn the_full_tier_runs_what_is_marked_for_it_and_no_part_of_another_test() {
        let folder = tempfile::tempdir().unwrap();
        let full = |filter| {
            let plan = Plan { full: true, ..plan(filter) };
            let results = run(&binary(folder.path(), TESTS), &plan).unwrap();
            results.into_iter().map(|result| (result.name, result.verdict)).collect::<Vec<_>>()
        };
        assert_eq!(full("fake::slow"), [("fake::slow".to_owned(), Verdict::Passed)]);
        assert_eq!(full("fake::part"), []);
    }

    #[test]
    fn what_is_ignored_without_a_clear_reason_is_not_left_out_in_silence() {
        let folder = tempfile::tempdir().unwrap();
        for reason in ["", ", a minute: for the full tier"] {
            let script = format!(
                "#!/bin/sh\ncase \"$*\" in\n--list*) echo 'odd: test';;\n*) echo 'test odd ... ignored{reason}';;\nesac\n"
            );
            let odd = stand_in(folder.path(), "odd", &script);
            assert!(run(&odd, &plan("")).unwrap_err().to_string().contains("odd::odd is ignored"));
        }
    }

    /// Text to standard error, or of another form, does not reach the runner, and the test counts as passed.
    #[test]
    fn a_test_that_cannot_run_says_so_by_the_one_helper() {
        fn scan(folder: &Path, found: &mut Vec<String>) {
            for entry in std::fs::read_dir(folder).unwrap().map(Result::unwrap) {
                let (path, name) = (entry.path(), entry.file_name());
                let name = name.to_string_lossy();
                if path.is_dir() {
                    if !name.starts_with('.') && !name.starts_with("target") && name != "xtask" {
                        scan(&path, found);
                    }
                } else if name.ends_with(".rs") {
                    let text = std::fs::read_to_string(&path).unwrap().to_lowercase();
                    let by_hand = |line: &&str| line.contains("print") && line.contains("ln!(\"skip");
                    found
                        .extend(text.lines().filter(by_hand).map(|line| format!("{}: {line}", shown(&path))));
                }
            }
        }
        let mut found = Vec::new();
        scan(&sluice_tests::paths::workspace(), &mut found);
        assert!(found.is_empty(), "{found:#?}");
    }

    #[test]
    fn documentation_tests_are_read() {
        let output =
            "running 2 tests\ntest src/a.rs - a::b (line 3) ... ok\ntest src/c.rs - c (line 9) ... FAILED\n";
        let results = parse_documentation_tests(output);
        assert_eq!(results[0].name, "doc::src/a.rs - a::b (line 3)");
        assert_eq!((results[0].verdict, results[1].verdict), (Verdict::Passed, Verdict::Failed));
    }
}
