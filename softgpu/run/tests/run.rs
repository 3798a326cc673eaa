//! The command line, its effects on the program, and its end.

use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::Path;
use std::process::{Command, Output, Stdio};

use sluice_kit::processes::{signal, watch};
use sluice_kit::wait::eventually;
use tempfile::TempDir;

use crate::program::PROGRAM;

/// A directory on a tmpfs in which the devices of runs are; no other run uses it.
fn place() -> TempDir {
    tempfile::Builder::new().prefix("softgpu-test-").tempdir_in("/dev/shm").expect("a directory")
}

/// `softgpu-run` with these arguments. A file in the place takes the role of the default configuration.
fn softgpu_run(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_softgpu-run"));
    command.args(arguments).env_remove("LD_LIBRARY_PATH");
    for setting in softgpu_device::SETTINGS {
        command.env_remove(setting.variable);
    }
    command
}

fn shell(options: &[&str], script: &str) -> Command {
    softgpu_run(&[options, &["/bin/sh", "-c", script]].concat())
}

fn done(mut command: Command) -> Output {
    command.output().expect("softgpu-run")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// The lines that the program of `program.rs` printed about the devices.
fn devices(options: &[&str]) -> Vec<String> {
    let own = std::env::current_exe().expect("a path");
    let own = own.to_str().expect("UTF-8");
    let output = done(softgpu_run(&[options, &[own], &PROGRAM].concat()));
    assert!(output.status.success(), "{}{}", text(&output.stdout), text(&output.stderr));
    let said = text(&output.stdout);
    said.lines().filter(|line| line.starts_with("device ")).map(str::to_owned).collect()
}

// Promise: S82
#[test]
fn program_finds_the_devices_that_the_options_describe() {
    let whole = 143_771_u64 / 2 / 64 * (2 << 20);
    assert_eq!(devices(&[]), [format!("device 0: Sluice Software GPU, {whole} bytes")]);
    let found = devices(&["--model", "t4-16", "--memory", "1GiB", "--devices", "2"]);
    assert_eq!(found.len(), 2, "{found:?}");
    for (ordinal, line) in found.iter().enumerate() {
        let bytes = line.strip_prefix(&format!("device {ordinal}: Tesla T4, ")).expect("the model");
        let bytes: u64 = bytes.trim_end_matches(" bytes").parse().expect("a number");
        assert!((1 << 30..(1 << 30) + (100 << 20)).contains(&bytes), "{line}");
    }
}

// Promise: S82
#[test]
fn exit_status_and_signal_are_those_of_the_program() {
    for code in [0, 1, 77, 255] {
        assert_eq!(done(shell(&[], &format!("exit {code}"))).status.code(), Some(code));
    }
    for signal in [libc::SIGKILL, libc::SIGSEGV, libc::SIGTERM] {
        let status = done(shell(&[], &format!("kill -{signal} $$"))).status;
        assert_eq!(status.signal(), Some(signal), "{status}");
    }
    assert_eq!(done(softgpu_run(&["/nowhere/program"])).status.code(), Some(127));
    assert_eq!(done(softgpu_run(&["/etc/passwd"])).status.code(), Some(126));
}

// Promise: S82
#[test]
fn invalid_options_are_refused_before_the_program_starts() {
    for (options, named) in [
        (&["--model", "GTX"][..], "SLUICE-141"),
        (&["--memory", "4 apples"], "GiB"),
        (&["--memory", "900GiB"], "SLUICE-141"),
        (&["--devices", "17"], "17"),
    ] {
        let output = done(shell(options, "echo started"));
        assert!(matches!(output.status.code(), Some(2 | 125)), "{options:?}: {}", output.status);
        assert!(text(&output.stderr).contains(named), "{options:?}: {}", text(&output.stderr));
        assert_eq!(text(&output.stdout), "", "{options:?}");
    }
    let help = done(softgpu_run(&["--help"]));
    assert!(help.status.success() && text(&help.stdout).contains("SLUICE_SOFTGPU_TIME_LIMIT_SECONDS"));
}

// Promise: S82
#[test]
fn input_output_and_arguments_pass_through() {
    let mut child = shell(&[], "cat; echo \"$0|$1|$2\" >&2");
    child.args(["--model", "a b", ""]).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = child.spawn().expect("softgpu-run");
    child.stdin.take().expect("piped").write_all(b"through\0and through").expect("written");
    let output = child.wait_with_output().expect("softgpu-run");
    assert_eq!(output.stdout, b"through\0and through");
    assert_eq!(text(&output.stderr), "--model|a b|\n");
}

// Promise: S82
#[test]
fn nothing_stays_when_the_program_has_ended_or_the_run_was_killed() {
    let script = r#"state="$SLUICE_SOFTGPU_STATE"; libraries="${LD_LIBRARY_PATH%%:*}"
        test -e "$libraries/libcuda.so.1" && test -e "$libraries/libnvidia-ml.so.1" && test -d "${state%/*}"
        echo "$? ${state%/*} $LD_LIBRARY_PATH"; read -r line"#;
    let start = || {
        let mut command = shell(&[], script);
        command.env("LD_LIBRARY_PATH", "/before").stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.process_group(0).spawn().expect("softgpu-run");
        let mut line = String::new();
        let mut output = BufReader::new(child.stdout.take().expect("piped"));
        output.read_line(&mut line).expect("a line");
        let words: Vec<&str> = line.split_whitespace().collect();
        let [code, folder, path] = words[..] else { panic!("{line}") };
        assert_eq!((code, path), ("0", format!("{folder}/lib:/before").as_str()));
        (child, folder.to_owned())
    };
    let (mut ended, folder) = start();
    drop(ended.stdin.take());
    assert!(ended.wait().is_ok());
    assert!(!Path::new(&folder).exists(), "{folder}");

    let (mut killed, left) = start();
    killed.kill().expect("a kill");
    killed.wait().expect("an end");
    let (mut next, folder) = start();
    // Another test's run may be removing it.
    eventually("the next run has removed the folder", || !Path::new(&left).exists());
    drop(next.stdin.take());
    assert!(next.wait().is_ok());
    assert!(!Path::new(&folder).exists());
}

// Promise: S82
#[test]
fn named_state_outlives_the_program() {
    let place = place();
    let state = place.path().join("state");
    let options = ["--state", state.to_str().expect("UTF-8"), "--model", "A30-24"];
    assert_eq!(devices(&options).len(), 1);
    assert!(state.join("gpu0/header").exists());
    let other = devices(&["--state", state.to_str().expect("UTF-8")]);
    assert!(other[0].contains("NVIDIA A30"), "{other:?}");
}

// Promise: S82
#[test]
fn signals_reach_the_program() {
    let mut child = shell(&[], "trap 'echo got; exit 5' TERM; echo ready; while :; do sleep 0.02; done");
    let mut child = child.stdout(Stdio::piped()).spawn().expect("softgpu-run");
    let mut lines = BufReader::new(child.stdout.take().expect("piped")).lines();
    assert_eq!(lines.next().expect("a line").expect("text"), "ready");
    signal(&watch(child.id()).expect("a process"), rustix::process::Signal::TERM);
    assert_eq!(lines.next().expect("a line").expect("text"), "got");
    assert_eq!(child.wait().expect("softgpu-run").code(), Some(5));
}
