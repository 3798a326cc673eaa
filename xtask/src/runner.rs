//! Runs the tests of compiled test binaries in groups, and each test in a process of its own.
//!
//! A test that hangs is killed without others, leftover processes of a test are found, and every test has its own time. A test
//! that reports by `sluice_skip::skip` that it cannot run, and succeeds, counts as skipped.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use sluice_tests::process::{self, Finished};

use crate::cargo::TestBinary;
use crate::leftovers;
use crate::record::{RecordVerdict, TestResult};

/// Start of the reason of an `#[ignore]` on tests of the full tier. A test with another reason is a part of a test, which runs
/// it itself, or prints figures for people.
pub(crate) const FULL_TIER: &str = "for the full tier";

/// Tests of one binary that run together: those of one file, or all.
#[derive(Debug)]
pub(crate) struct Group {
    /// Start of the full names of its tests.
    pub name: String,
    /// The way in which they run.
    pub marks: Marks,
    tests: Vec<Test>,
}

/// Start of the comment above a module in the main file of a test binary that says how the module's tests run.
const MARK: &str = "// Runs: ";
/// A line in the first comment of such a file: its tests wait for most of their time, so more of them run at once.
const WAITS: &str = "//! Runs: many at once";

/// The way in which the tests of a module run, by its comment: `// Runs: alone`, `// Runs: in VMs` or `// Runs: alone, in VMs`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Marks {
    /// One at a time: they boot several machines, or measure figures that other tests would distort.
    pub alone: bool,
    /// They boot machines.
    pub in_vms: bool,
    /// They wait for most of their time.
    pub wait: bool,
}

#[derive(Debug)]
struct Test {
    /// Its name in the binary.
    name: String,
    full_name: String,
    /// The reason of its `#[ignore]`.
    ignored: Option<String>,
}

/// Parameters for running a group.
#[derive(Debug, Clone)]
pub(crate) struct Plan<'plan> {
    /// True to run tests of the full tier as well.
    pub full: bool,
    /// Number of tests at once.
    pub parallel: usize,
    /// Time limit of a test.
    pub limit: Duration,
    /// Time limit of a test of the full tier.
    pub long_limit: Duration,
    /// Time for the processes of a test that has ended by itself to end, too.
    pub grace: Duration,
    /// Added to each test's environment.
    pub environment: &'plan [(&'plan str, &'plan str)],
    /// Print each test, not only failures.
    pub verbose: bool,
}

/// The tests of a binary whose full names contain `filter`, in groups: the tests of each module with marks, and those of each
/// crate or file.
pub(crate) fn groups(binary: &TestBinary, filter: &str) -> Result<Vec<Group>> {
    let (all, marks) = marks(binary)?;
    let apart: Vec<&str> = marks.keys().map(String::as_str).collect();
    let ignored = ignored(binary)?;
    let mut groups = BTreeMap::<String, Vec<Test>>::new();
    for name in list(binary, &[])? {
        let full_name = binary.full_name(&name);
        let ignored = ignored.get(&name).cloned();
        if full_name.contains(filter) && ignored.as_ref().is_none_or(|reason| reason.starts_with(FULL_TIER)) {
            let group = group_of(&full_name, &apart).to_owned();
            groups.entry(group).or_default().push(Test { name, full_name, ignored });
        }
    }
    let group = |(name, tests)| Group { marks: marks.get(&name).copied().unwrap_or(all), name, tests };
    Ok(groups.into_iter().map(group).collect())
}

/// The marks of all tests of a binary, and those of its modules instead, by the starts of their tests' full names. A binary of unit
/// tests has none.
fn marks(binary: &TestBinary) -> Result<(Marks, BTreeMap<String, Marks>)> {
    let tests = binary.folder.join("tests");
    let nested = tests.join(&binary.name).join("main.rs");
    let file = if nested.is_file() { nested } else { tests.join(format!("{}.rs", binary.name)) };
    if !file.is_file() {
        return Ok(Default::default());
    }
    let text = fs::read_to_string(&file).with_context(|| format!("reading {}", file.display()))?;
    let parsed = parse_marks(&text).with_context(|| format!("reading {}", file.display()))?;
    let all = Marks { wait: text.lines().any(|line| line == WAITS), ..Marks::default() };
    Ok((all, parsed.into_iter().map(|(module, marks)| (binary.full_name(&module), marks)).collect()))
}

fn parse_marks(text: &str) -> Result<Vec<(String, Marks)>> {
    let mut found = Vec::new();
    let mut lines = text.lines();
    while let Some(line) = lines.next() {
        let Some(words) = line.strip_prefix(MARK) else { continue };
        let mut marks = Marks::default();
        for word in words.split(", ") {
            match word {
                "alone" => marks.alone = true,
                "in VMs" => marks.in_vms = true,
                _ => bail!("{line:?} has the unknown word {word:?}"),
            }
        }
        // Only attributes may stand between the comment and its module.
        let next = lines.find(|line| !line.starts_with("#["));
        let module = next.and_then(|line| line.strip_prefix("mod ")?.strip_suffix(';'));
        found.push((module.with_context(|| format!("no module follows {line:?}"))?.to_owned(), marks));
    }
    Ok(found)
}

fn group_of<'name>(full_name: &'name str, apart: &[&'name str]) -> &'name str {
    let starts = |group: &&&str| full_name.strip_prefix(**group).is_some_and(|rest| rest.starts_with("::"));
    match apart.iter().find(starts) {
        Some(group) => group,
        None => full_name.split("::").next().unwrap_or(full_name),
    }
}

/// Runs all tests of a group, each with a folder of its own in `temporary`.
pub(crate) fn run(binary: &TestBinary, group: &Group, plan: &Plan<'_>, temporary: &Path) -> Vec<TestResult> {
    let next = AtomicUsize::new(0);
    let results = Mutex::new(Vec::with_capacity(group.tests.len()));
    thread::scope(|scope| {
        for _ in 0..plan.parallel.clamp(1, group.tests.len()) {
            scope.spawn(|| {
                while let Some(test) = group.tests.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let result = run_one(binary, plan, test, temporary);
                    show(plan, &result);
                    results.lock().unwrap_or_else(std::sync::PoisonError::into_inner).push(result);
                }
            });
        }
    });
    let mut results = results.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
    results.sort_by(|a, b| a.name.cmp(&b.name));
    results
}

fn list(binary: &TestBinary, more: &[&str]) -> Result<BTreeSet<String>> {
    let listed = ask(binary, Command::new(&binary.path).args(["--list", "--format", "terse"]).args(more))?;
    Ok(listed.lines().filter_map(|line| line.strip_suffix(": test")).map(str::to_owned).collect())
}

/// Tests with `#[ignore]`, and the reasons. The harness prints the reason only of tests that it is asked to run.
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
            "{} is ignored, and its reason ({reason:?}) does not tell if it is for the full tier",
            binary.full_name(&name)
        );
    }
    Ok(reasons)
}

fn ask(binary: &TestBinary, command: &mut Command) -> Result<String> {
    process::output_of(command.current_dir(&binary.folder), Duration::from_secs(60))
        .with_context(|| format!("listing the tests of {}", binary.path.display()))
}

fn run_one(binary: &TestBinary, plan: &Plan<'_>, test: &Test, temporary: &Path) -> TestResult {
    static NUMBER: AtomicUsize = AtomicUsize::new(0);
    let Test { name: test, full_name: name, ignored } = test;
    let name = name.clone();
    if let Some(reason) = ignored
        && !plan.full
    {
        return TestResult { name, verdict: RecordVerdict::Skipped, seconds: 0.0, reason: reason.clone() };
    }
    let id = format!("{}-{}", std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed));
    let mut command = Command::new(&binary.path);
    command.args(["--exact", test, "--nocapture", "--include-ignored", "--test-threads=1"]);
    command.current_dir(&binary.folder).env("CARGO_MANIFEST_DIR", &binary.folder).env("SLUICE_TEST_RUN", &id);
    // Only the end of the output is shown, and a backtrace would push the message out of it.
    command.env("RUST_BACKTRACE", "0").envs(plan.environment.iter().copied());
    let temporary = temporary.join(&id);
    if let Err(error) = fs::create_dir(&temporary).and_then(|()| open_to_all(&temporary)) {
        let reason = format!("creating {}: {error}", temporary.display());
        return TestResult { name, verdict: RecordVerdict::Failed, seconds: 0.0, reason };
    }
    command.env("TMPDIR", &temporary);
    let started = Instant::now();
    let finished = process::run(&mut command, if ignored.is_some() { plan.long_limit } else { plan.limit });
    let seconds = started.elapsed().as_secs_f64();
    let mut left_behind = end_leftovers(
        &format!("SLUICE_TEST_RUN={id}"),
        finished.as_ref().map_or(Duration::ZERO, |_| plan.grace),
    );
    left_behind.extend(leftovers::names(&temporary).iter().map(|file| file.display().to_string()));
    if let Err(error) = fs::remove_dir_all(&temporary) {
        left_behind.push(format!("{}: {error}", temporary.display()));
    }
    let (verdict, reason) = judge(finished, &left_behind);
    TestResult { name, verdict, seconds, reason }
}

/// Ends every process that inherited the marker. After a test that ended by itself these processes first get a moment, because
/// a process and the children that it has just killed do not end at the same instant.
fn end_leftovers(marker: &str, grace: Duration) -> Vec<String> {
    let deadline = Instant::now() + grace;
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

/// A test runs programs of other users, which have files there too.
fn open_to_all(folder: &Path) -> std::io::Result<()> {
    fs::set_permissions(folder, Permissions::from_mode(0o1777))
}

fn judge(finished: Result<Finished>, left_behind: &[String]) -> (RecordVerdict, String) {
    let finished = match finished {
        Ok(finished) => finished,
        Err(error) => return (RecordVerdict::Failed, format!("{error:#}")),
    };
    let output = || process::tail(&format!("{}\n{}", finished.stdout, finished.stderr), 60);
    if !finished.status.success() {
        return (RecordVerdict::Failed, format!("{}\n{}", finished.status, output()));
    }
    if !left_behind.is_empty() {
        return (RecordVerdict::Failed, format!("left behind: {}\n{}", left_behind.join(", "), output()));
    }
    if finished.stdout.contains("running 0 tests") {
        return (RecordVerdict::Failed, "the binary no longer has this test".to_owned());
    }
    match sluice_skip::reason(&finished.stdout) {
        Some(reason) => (RecordVerdict::Skipped, reason.to_owned()),
        None => (RecordVerdict::Passed, String::new()),
    }
}

fn show(plan: &Plan<'_>, result: &TestResult) {
    let TestResult { name, verdict, seconds, reason } = result;
    match verdict {
        RecordVerdict::Failed => println!("    FAILED   {name} ({seconds:.2} s)\n{}", indent(reason)),
        RecordVerdict::Skipped if plan.verbose => println!("    skipped  {name}: {reason}"),
        RecordVerdict::Passed if plan.verbose => println!("    passed   {name} ({seconds:.2} s)"),
        RecordVerdict::Skipped | RecordVerdict::Partly | RecordVerdict::Passed => {}
    }
}

fn indent(text: &str) -> String {
    text.lines().map(|line| format!("        {line}")).collect::<Vec<_>>().join("\n")
}

/// Runs a check that is no test binary as one test.
pub(crate) fn check(name: &str, limit: Duration, command: &mut Command) -> TestResult {
    let started = Instant::now();
    let (verdict, reason) = judge_check(process::run(command, limit));
    TestResult { name: name.to_owned(), verdict, seconds: started.elapsed().as_secs_f64(), reason }
}

fn judge_check(finished: Result<Finished>) -> (RecordVerdict, String) {
    match finished {
        Ok(finished) if finished.status.success() => (RecordVerdict::Passed, String::new()),
        other => judge(other, &[]),
    }
}

/// Tests that cargo runs itself, as it reports them; `kind` begins their names.
pub(crate) fn reported_tests(kind: &str, command: &mut Command, limit: Duration) -> Result<Vec<TestResult>> {
    let finished = process::run(command, limit)?;
    let end = process::tail(&format!("{}\n{}", finished.stdout, finished.stderr), 60);
    let results = parse_reported_tests(kind, &finished.stdout, &end);
    if !finished.status.success() && results.iter().all(|result| result.verdict != RecordVerdict::Failed) {
        bail!("{}: {}\n{}", process::display(command), finished.status, process::tail(&finished.stderr, 60));
    }
    Ok(results)
}

fn parse_reported_tests(kind: &str, output: &str, end: &str) -> Vec<TestResult> {
    output
        .lines()
        .filter_map(|line| {
            let (name, verdict) = line.strip_prefix("test ")?.rsplit_once(" ... ")?;
            let verdict = match verdict.trim() {
                "ok" => RecordVerdict::Passed,
                "ignored" => RecordVerdict::Skipped,
                _ => RecordVerdict::Failed,
            };
            let reason = if verdict == RecordVerdict::Failed { end.to_owned() } else { String::new() };
            Some(TestResult { name: format!("{kind}::{name}"), verdict, seconds: 0.0, reason })
        })
        .collect()
}

/// A path for a message, relative to the checkout if possible.
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
            "good: test\\nbad: test\\nhangs: test\\nleaks: test\\nlitters: test\\npart: test\\nskips: test\\nslow: test\\nspeed: bench\\n",
            "running 2 tests\\ntest part ... ignored, a part of good\\ntest slow ... ignored, for the full tier\\n"
        );
        stand_in(folder, "fake", &script)
    }

    /// Another process writes the file: if it were open for writing here, a test that forks at that moment would inherit the
    /// descriptor, and a file that is open for writing cannot be executed.
    fn stand_in(folder: &Path, name: &str, script: &str) -> TestBinary {
        let path = folder.join(name);
        let mut write = Command::new("sh");
        write.args(["-c", "printf %s \"$1\" > \"$0\" && chmod +x \"$0\""]).arg(&path).arg(script);
        assert!(write.status().unwrap().success());
        TestBinary { name: name.to_owned(), path, folder: folder.to_path_buf() }
    }

    const TESTS: &str = "good) exit 0;;\nbad) echo why; exit 101;;\nhangs) exec sleep 1000;;\n\
                         leaks) sleep 1000 > /dev/null 2>&1 & exit 0;;\nlitters) touch \"$TMPDIR/litter\";;\nskips) echo 'SKIP: no such hardware';;\n\
                         slow) exit 0;;";

    /// Runs the tests of a stand-in that match the filter.
    fn run_all(binary: &TestBinary, filter: &str, plan: &Plan<'_>) -> Vec<TestResult> {
        let temporary = tempfile::tempdir().unwrap();
        let groups = groups(binary, filter).unwrap();
        groups.iter().flat_map(|group| run(binary, group, plan, temporary.path())).collect()
    }

    fn plan() -> Plan<'static> {
        Plan {
            full: false,
            parallel: 2,
            // One test runs until this limit; the others end by themselves, also on a busy machine.
            limit: Duration::from_secs(20),
            long_limit: leftovers::GRACE,
            // Files that a test leaves behind stay, however long the wait.
            grace: Duration::from_secs(1),
            environment: &[],
            verbose: false,
        }
    }

    #[test]
    fn runner_distinguishes_pass_fail_hang_leak_and_skip() {
        let folder = tempfile::tempdir().unwrap();
        let results = run_all(&binary(folder.path(), TESTS), "", &plan());
        let verdicts: Vec<(&str, RecordVerdict)> =
            results.iter().map(|result| (result.name.as_str(), result.verdict)).collect();
        assert_eq!(
            verdicts,
            [
                ("fake::bad", RecordVerdict::Failed),
                ("fake::good", RecordVerdict::Passed),
                ("fake::hangs", RecordVerdict::Failed),
                ("fake::leaks", RecordVerdict::Failed),
                ("fake::litters", RecordVerdict::Failed),
                ("fake::skips", RecordVerdict::Skipped),
                ("fake::slow", RecordVerdict::Skipped),
            ]
        );
        assert!(results[0].reason.contains("why"));
        assert!(results[2].reason.contains("did not end"));
        assert!(results[3].reason.contains("left behind: sleep"));
        assert!(results[4].reason.contains("left behind: litter"));
        assert_eq!(results[5].reason, "no such hardware");
    }

    #[test]
    fn full_tier_runs_marked_tests_and_no_part_of_another_test() {
        let folder = tempfile::tempdir().unwrap();
        let full = |filter| {
            let plan = Plan { full: true, ..plan() };
            let results = run_all(&binary(folder.path(), TESTS), filter, &plan);
            results.into_iter().map(|result| (result.name, result.verdict)).collect::<Vec<_>>()
        };
        assert_eq!(full("fake::slow"), [("fake::slow".to_owned(), RecordVerdict::Passed)]);
        assert_eq!(full("fake::part"), []);
    }

    #[test]
    fn test_ignored_without_a_known_reason_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        for reason in ["", ", a minute: for the full tier"] {
            let script = format!(
                "#!/bin/sh\ncase \"$*\" in\n--list*) echo 'odd: test';;\n*) echo 'test odd ... ignored{reason}';;\nesac\n"
            );
            let odd = stand_in(folder.path(), "odd", &script);
            assert!(groups(&odd, "").unwrap_err().to_string().contains("odd::odd is ignored"));
        }
    }

    #[test]
    fn module_with_marks_is_a_group_that_runs_as_they_say() {
        let folder = tempfile::tempdir().unwrap();
        let fake = stand_in(
            folder.path(),
            "fake",
            "#!/bin/sh\ncase \"$*\" in *--ignored) ;; *) printf 'a::x: test\\nb::y: test\\nc::z: test\\n';; esac\n",
        );
        let tests = folder.path().join("tests/fake");
        fs::create_dir_all(&tests).unwrap();
        let marked = Marks { alone: true, in_vms: true, wait: false };
        let waiting = Marks { wait: true, ..Marks::default() };
        for (start, others) in [("", Marks::default()), ("//! Tests.\n//! Runs: many at once\n", waiting)] {
            let main = format!("{start}mod a;\n// Runs: alone, in VMs\n#[cfg(unix)]\nmod b;\nmod c;\n");
            fs::write(tests.join("main.rs"), main).unwrap();
            let found: Vec<(String, Marks)> =
                groups(&fake, "").unwrap().into_iter().map(|group| (group.name, group.marks)).collect();
            assert_eq!(found, [("fake".to_owned(), others), ("fake::b".to_owned(), marked)]);
        }
        for wrong in ["// Runs: fast\nmod b;\n", "// Runs: alone\nfn b() {}\n", "// Runs: alone\n"] {
            assert!(parse_marks(wrong).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn group_of_a_test_is_its_file_or_one_of_the_groups_apart() {
        assert_eq!(group_of("vm::boot::found", &["vm"]), "vm");
        assert_eq!(group_of("vmms::found", &["vm"]), "vmms");
        assert_eq!(group_of("unit::figures::fast", &["vm", "unit::figures"]), "unit::figures");
        assert_eq!(group_of("unit::death::late", &["vm", "unit::figures"]), "unit");
    }

    /// A file that no binary names would never run.
    #[test]
    fn every_file_of_integration_tests_belongs_to_a_binary() {
        let root = sluice_tests::paths::workspace();
        for package in crate::cargo::Package::all().unwrap() {
            let folder = root.join(&package.folder);
            let Ok(main) = fs::read_to_string(folder.join("tests/main.rs")) else { continue };
            let manifest = fs::read_to_string(folder.join("Cargo.toml")).unwrap();
            for name in leftovers::names(&folder.join("tests")) {
                let Some(file) = name.to_str().and_then(|name| name.strip_suffix(".rs")) else { continue };
                let named = main.contains(&format!("mod {file};"))
                    || manifest.contains(&format!("\"tests/{file}.rs\""));
                assert!(named, "{}/tests/{file}.rs", folder.display());
            }
        }
    }

    /// Text to standard error, or of another form, does not reach the runner, and the test counts as passed.
    #[test]
    fn no_test_prints_its_skip_without_the_skip_helper() {
        fn scan(folder: &Path, found: &mut Vec<String>) {
            for entry in fs::read_dir(folder).unwrap().map(Result::unwrap) {
                let (path, name) = (entry.path(), entry.file_name());
                let name = name.to_string_lossy();
                if path.is_dir() {
                    if !name.starts_with('.') && !name.starts_with("target") && name != "xtask" {
                        scan(&path, found);
                    }
                } else if name.ends_with(".rs") {
                    let text = fs::read_to_string(&path).unwrap().to_lowercase();
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
    fn output_of_tests_that_cargo_runs_is_parsed() {
        let output =
            "running 2 tests\ntest src/a.rs - a::b (line 3) ... ok\ntest src/c.rs - c (line 9) ... FAILED\n";
        let results = parse_reported_tests("doc", output, "the end");
        assert_eq!(results[0].name, "doc::src/a.rs - a::b (line 3)");
        assert_eq!((results[0].verdict, results[1].verdict), (RecordVerdict::Passed, RecordVerdict::Failed));
        assert_eq!(results[1].reason, "the end");
    }
}
