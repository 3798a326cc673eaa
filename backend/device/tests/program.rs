//! The conventions of a vhost-user back-end program.

use crate::common::pass_on;
use rustix::{fd::OwnedFd, fs::SealFlags, process::Signal};
use sluice_kit::front_end::{self, FrontEnd};
use sluice_kit::wait::{TIMEOUT, eventually};
use std::{
    io::{BufRead, BufReader},
    os::unix::net::{UnixListener, UnixStream},
    process::{Child, Command, Stdio},
    time::Instant,
};

/// Starts the program with a descriptor passed as number 201.
fn start(arguments: &[&str], fd: Option<&OwnedFd>) -> Child {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sluice-device"));
    command
        .args(arguments)
        .env("SLUICE_LOG", "warn")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    if let Some(fd) = fd {
        pass_on(&mut command, fd, 201);
    }
    command.spawn().unwrap()
}

fn ends(child: &mut Child) -> std::process::ExitStatus {
    let mut status = None;
    eventually("the end of the program", || {
        status = child.try_wait().unwrap();
        status.is_some()
    });
    status.unwrap()
}

#[test]
fn print_capabilities_names_the_gpu_type() {
    let output = start(&["--print-capabilities"], None).wait_with_output().unwrap();
    assert!(output.status.success());
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains("\"type\": \"gpu\""), "{text}");
}

// Promise: F62
#[test]
fn other_message_version_of_sluiced_is_refused() {
    let mut child = start(&["--fd", "201", "--messages", "999"], None);
    assert!(!ends(&mut child).success());
    let said = child.wait_with_output().unwrap().stderr;
    let said = String::from_utf8(said).unwrap();
    assert!(said.contains("speaks version 999"), "{said}");
}

#[test]
fn bad_arguments_are_refused_before_a_socket_exists() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("socket");
    let path = path.to_str().unwrap();
    for arguments in [
        &[][..],
        &["--socket-path", "/nonexistent/socket"],
        &["--fd", "99"],
        &["--fd", "1"],
        &["--socket-path", path, "--fd", "201"],
        &["--socket-path", path, "--control-fd", "99"],
        &["--socket-path", path, "--scanouts", "2"],
        &["--socket-path", path, "--direct", "--trust-memory"],
    ] {
        let output = start(arguments, None).wait_with_output().unwrap();
        assert_eq!(output.status.code().map(|code| code != 0), Some(true), "{arguments:?}");
        assert!(!output.stderr.is_empty(), "{arguments:?}");
    }
    assert!(std::fs::read_dir(directory.path()).unwrap().next().is_none(), "nothing is left behind");
}

#[test]
fn device_mode_is_taken_from_the_environment_and_checked() {
    let run = |mode: &str| {
        Command::new(env!("CARGO_BIN_EXE_sluice-device"))
            .args(["--fd", "99"])
            .env("SLUICE_DEVICE_MODE", mode)
            .stdin(Stdio::null())
            .output()
            .unwrap()
    };
    let output = run("3d");
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success() && said.contains("SLUICE_DEVICE_MODE"), "{said}");
    for mode in ["full", "legacy", "2d"] {
        let said = String::from_utf8(run(mode).stderr).unwrap();
        assert!(said.contains("--fd") && !said.contains("SLUICE_DEVICE_MODE"), "{mode}: {said}");
    }
}

#[test]
fn device_with_a_guest_ends_quickly_on_sigterm() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("socket");
    let mut child = start(&["--direct", "--socket-path", path.to_str().unwrap()], None);
    eventually("listening", || UnixStream::connect(&path).is_ok());
    let _guest = FrontEnd::connect(&path);
    let started = Instant::now();
    let pid = rustix::process::Pid::from_raw(child.id().cast_signed()).unwrap();
    rustix::process::kill_process(pid, Signal::TERM).unwrap();
    ends(&mut child);
    assert!(started.elapsed() < TIMEOUT / 4);
}

#[test]
fn device_serves_one_vmm_and_exits_with_it() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("socket");
    let mut child = start(&["--socket-path", path.to_str().unwrap()], None);
    // The socket has a name before it listens, and the test does not spend the one served connection on a check.
    let mut frontend = None;
    eventually("listening", || {
        frontend = vhost::vhost_user::Frontend::connect(&path, 2).ok();
        frontend.is_some()
    });
    let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    drop(FrontEnd::with_frontend(frontend.unwrap(), front_end::memory(seals)).unwrap());
    assert!(ends(&mut child).success());
}

// Promise: V31
#[test]
fn device_whose_trusted_vmm_cuts_memory_exits_with_the_sigbus_status() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("socket");
    let mut child = start(&["--trust-memory", "--socket-path", path.to_str().unwrap()], None);
    let mut frontend = None;
    eventually("listening", || {
        frontend = vhost::vhost_user::Frontend::connect(&path, 2).ok();
        frontend.is_some()
    });
    let file = front_end::memory(SealFlags::empty());
    let same = rustix::io::fcntl_dupfd_cloexec(&file, 0).unwrap();
    let mut guest = FrontEnd::with_frontend(frontend.unwrap(), file).unwrap();
    rustix::fs::ftruncate(&same, 0).unwrap();
    // The device reads the ring, which is cut off; this process does not.
    assert!(guest.start(1).is_err());
    assert_eq!(ends(&mut child).code(), Some(sluice_shared_memory::bus::STATUS));
    let mut said = String::new();
    std::io::Read::read_to_string(&mut child.stderr.take().unwrap(), &mut said).unwrap();
    assert!(said.contains("sluice-device: a page of shared memory is not there any more (SIGBUS)"), "{said}");
}

#[test]
fn device_serves_a_listening_socket_that_it_inherits() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("socket");
    let listener = UnixListener::bind(&path).unwrap();
    let mut child = start(&["--fd", "201"], Some(&listener.into()));
    drop(FrontEnd::connect(&path));
    assert!(ends(&mut child).success());
}

#[test]
fn device_serves_a_connected_socket_that_it_inherits() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let mut child = start(&["--fd", "201"], Some(&theirs.into()));
    let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    let frontend = vhost::vhost_user::Frontend::from_stream(ours, 2);
    let mut guest = FrontEnd::with_frontend(frontend, front_end::memory(seals)).unwrap();
    assert_eq!(guest.context(1), 0x1100);
    drop(guest);
    assert!(ends(&mut child).success());
}

#[test]
fn seccomp_setting_logs_disables_or_kills_and_others_are_refused() {
    for (setting, starts) in [("log", true), ("off", true), ("kill", true), ("no", false)] {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("socket");
        let mut child = Command::new(env!("CARGO_BIN_EXE_sluice-device"))
            .args(["--direct", "--socket-path"])
            .arg(&path)
            .env("SLUICE_SECCOMP", setting)
            .env("SLUICE_LOG", "warn")
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        if starts {
            // Its socket exists before its filter, and its filter before its first message.
            eventually("listening, in the filter that is set", || {
                let status = std::fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap();
                let filtered = status.lines().any(|line| line.starts_with("Seccomp:") && line.ends_with('2'));
                UnixStream::connect(&path).is_ok() && filtered == (setting != "off")
            });
            let mut said = BufReader::new(child.stderr.take().unwrap()).lines();
            let loud = |line: &str| line.contains("NOT FOR PRODUCTION");
            if setting == "kill" {
                // It serves, so it is past all its start-up messages.
                drop(FrontEnd::connect(&path));
                child.kill().unwrap();
                assert!(!said.any(|line| loud(&line.unwrap())), "{setting}");
            } else {
                assert!(said.any(|line| loud(&line.unwrap())), "{setting}");
                child.kill().unwrap();
            }
            child.wait().unwrap();
        } else {
            assert!(!ends(&mut child).success());
        }
    }
}
