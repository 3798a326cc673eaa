//! Steps that end badly, and runs that end early.

use std::path::Path;
use std::process::Stdio;

use serde_json::Value;
use sluice_kit::wait::eventually;

use crate::{program, results, step};

/// No step of the frame's own phase calls a driver.
const NO_DRIVER: [&str; 4] = ["--driver", "/dev/null", "--nvml", "/dev/null"];

/// The steps of the frame's own phase that end by themselves or by their limits.
const STEPS: [&str; 8] = [
    "self-test-answers",
    "self-test-hangs",
    "self-test-crashes",
    "self-test-ends-early",
    "self-test-lingers",
    "self-test-is-refused",
    "self-test-fails",
    "self-test-goes-on",
];

fn run(out: &Path, arguments: &[&str]) -> std::process::Output {
    program().arg("run").arg(out).args(NO_DRIVER).args(arguments).output().expect("the program")
}

/// The child of a process, if it has one.
fn child_of(parent: u32) -> Option<u32> {
    let processes = std::fs::read_dir("/proc").expect("processes").flatten();
    let number = |process: std::fs::DirEntry| process.file_name().to_str()?.parse().ok();
    processes.filter_map(number).find(|process| {
        // The fourth field, behind the name in brackets.
        let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
        let parents = stat.rsplit(") ").next().and_then(|fields| fields.split(' ').nth(1));
        parents.and_then(|field| field.parse().ok()) == Some(parent)
    })
}

/// True if the process runs, and is no zombie that its new parent has not reaped yet.
pub(crate) fn runs(process: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    stat.rsplit(") ").next().is_some_and(|fields| !fields.is_empty() && !fields.starts_with('Z'))
}

#[test]
fn step_that_ends_badly_costs_only_itself() {
    let out = tempfile::tempdir().expect("a folder");
    let mut arguments = vec!["--phase", "self-test"];
    arguments.extend(STEPS.into_iter().flat_map(|step| ["--step", step]));
    let output = run(out.path(), &arguments);
    assert_eq!(output.status.code(), Some(1), "{}", String::from_utf8_lossy(&output.stdout));
    let results = results(out.path());
    let outcome = |name: &str| step(&results, name)["outcome"].as_str().expect("an outcome").to_owned();
    assert_eq!(outcome("self-test-answers"), "answered");
    assert_eq!(outcome("self-test-hangs"), "timed-out");
    assert_eq!(outcome("self-test-crashes"), "crashed");
    assert_eq!(outcome("self-test-ends-early"), "failed");
    assert_eq!(outcome("self-test-lingers"), "answered");
    assert_eq!(outcome("self-test-is-refused"), "refused");
    assert_eq!(outcome("self-test-fails"), "failed");
    assert_eq!(outcome("self-test-goes-on"), "answered");
    // The notes of a step that is killed are not lost.
    assert_eq!(step(&results, "self-test-hangs")["answer"]["before"], true);
    assert_eq!(step(&results, "self-test-crashes")["answer"]["before"], true);
    assert_eq!(step(&results, "self-test-crashes")["signal"], 11);
    assert_eq!(step(&results, "self-test-lingers")["answer"]["number"], 43);
    // The kill reaches a process that the step started.
    let child = step(&results, "self-test-hangs")["answer"]["child"].as_u64().expect("a process");
    assert!(!Path::new(&format!("/proc/{child}")).exists(), "process {child} is left");
    assert!(results.iter().all(|line| line["stuck"] != true));
    let words = results.last().expect("a verdict")["words"].as_str().expect("words");
    assert_eq!(words, "8 steps: 3 answered, 1 refused, 1 crashed, 1 timed out, 2 failed.");
    assert!(String::from_utf8_lossy(&output.stdout).contains(words));
}

#[test]
fn killed_run_leaves_readable_results_and_no_process() {
    let out = tempfile::tempdir().expect("a folder");
    let mut command = program();
    command.arg("run").arg(out.path()).args(NO_DRIVER).args(["--phase", "self-test"]);
    for name in ["self-test-answers", "self-test-crashes", "self-test-waits"] {
        command.args(["--step", name]);
    }
    let mut child = command.stdout(Stdio::null()).spawn().expect("the program");
    let file = out.path().join("results.jsonl");
    eventually("the crash is written down", || {
        std::fs::read_to_string(&file)
            .is_ok_and(|text| text.contains("self-test-crashes") && text.ends_with('\n'))
    });
    let mut waiting = None;
    eventually("the step that waits runs", || {
        waiting = child_of(child.id());
        waiting.is_some()
    });
    child.kill().expect("a kill");
    child.wait().expect("its end");
    let lines = results(out.path());
    assert_eq!(lines[0]["kind"], "header");
    assert_eq!(step(&lines, "self-test-answers")["outcome"], "answered");
    assert_eq!(step(&lines, "self-test-crashes")["outcome"], "crashed");
    assert!(lines.iter().all(|line| line["kind"] != "verdict"));
    eventually("the step ends with its run", || waiting.is_some_and(|process| !runs(process)));

    // A later run goes on in the same file, also after half a line.
    let mut text = std::fs::read_to_string(&file).expect("results");
    text.push_str("{\"kind\":\"st");
    std::fs::write(&file, text).expect("half a line");
    let output = run(out.path(), &["--phase", "self-test", "--step", "self-test-goes-on"]);
    assert!(output.status.success());
    let text = std::fs::read_to_string(&file).expect("results");
    let whole: Vec<Value> = text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    assert_eq!(whole.len(), lines.len() + 3, "header, step and verdict of the second run");
    assert_eq!(step(&whole, "self-test-goes-on")["answer"]["number"], 44);
}

#[test]
fn run_without_time_reports_every_step_and_fails() {
    let out = tempfile::tempdir().expect("a folder");
    let output = run(out.path(), &["--minutes", "0"]);
    assert_eq!(output.status.code(), Some(1));
    let results = results(out.path());
    let steps: Vec<_> = results.iter().filter(|line| line["kind"] == "step").collect();
    assert!(steps.len() > 20);
    assert!(steps.iter().all(|step| step["outcome"] == "no-time"));
}

#[test]
fn run_without_driver_is_refused_step_by_step() {
    let out = tempfile::tempdir().expect("a folder");
    let output = run(out.path(), &["--step", "export-between-processes", "--step", "booking-of-chunks"]);
    assert!(output.status.success());
    let results = results(out.path());
    for name in ["export-between-processes", "booking-of-chunks"] {
        let step = step(&results, name);
        assert_eq!(step["outcome"], "refused");
        assert!(step["reason"].as_str().expect("a reason").contains("does not load"), "{step}");
    }
}

#[test]
fn unknown_phase_or_step_is_an_error() {
    let out = tempfile::tempdir().expect("a folder");
    for arguments in [["--phase", "no-such"], ["--step", "no-such"]] {
        let output = run(out.path(), &arguments);
        assert_eq!(output.status.code(), Some(1));
        assert!(String::from_utf8_lossy(&output.stderr).contains("is named no-such"));
    }
}

#[test]
fn step_that_fills_its_disk_costs_only_itself() {
    // The folder of results and the folders of steps are on a disk of 4 MiB, which only the run sees.
    let script = "mount -t tmpfs -o size=4m tmpfs \"$TMPDIR\" && shift && \"$@\"; status=$?; cat \"$TMPDIR/out/results.jsonl\" >&2; \
                  cat \"$TMPDIR/out/log.txt\"; ls \"$TMPDIR\"; exit $status";
    let folder = tempfile::tempdir().expect("a folder");
    let mounts = std::process::Command::new("unshare").args(["--mount", "true"]).status();
    if !mounts.is_ok_and(|status| status.success()) {
        return sluice_skip::skip("no file system can be mounted");
    }
    let mut command = std::process::Command::new("unshare");
    command.args(["--mount", "sh", "-c", script, "sh"]).env("TMPDIR", folder.path());
    let own = program();
    command.arg("run").arg(own.get_program()).arg("run").arg(folder.path().join("out")).args(NO_DRIVER);
    command.args(["--phase", "self-test-disk", "--phase", "self-test"]);
    command.args(["--step", "self-test-fills-its-disk", "--step", "self-test-goes-on"]);
    let output = command.output().expect("the program");
    let (printed, lines) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    let results: Vec<Value> = lines.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    let full = step(&results, "self-test-fills-its-disk");
    assert_eq!(full["outcome"], "failed", "{full}\n{printed}");
    assert!(full["reason"].as_str().is_some_and(|reason| reason.contains("No space left")), "{full}");
    assert_eq!(step(&results, "self-test-goes-on")["outcome"], "answered");
    assert_eq!(results.last().expect("a verdict")["kind"], "verdict");
    // Its messages are in the log, and its folder is gone.
    assert!(printed.contains("large gets 67108864 bytes") && printed.ends_with("\nout\n"), "{printed}");
}
