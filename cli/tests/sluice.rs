//! The command line tool with the real daemon and launcher; device, worker and libraries are stand-ins.
//!
//! The daemon's programs must have been built with the same profile, by `cargo build --workspace`.

use std::{
    io::{BufRead as _, BufReader, Read as _, Write as _},
    os::{
        fd::{FromRawFd as _, OwnedFd},
        unix::process::{CommandExt as _, ExitStatusExt as _},
    },
    path::Path,
    process::{Command, Output, Stdio},
};

use crate::common::{Place, attentive, open_session, run, start, text};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    process::Signal,
};
use sluice_kit::processes::{signal, wait_gone, watch};

#[test]
fn run_gives_the_program_the_shim_and_the_device_socket() {
    let place = Place::new();
    let script = r#"echo "$SLUICE_TRANSPORT"; test -S "$SLUICE_SOCKET" && echo socket
        readlink "${LD_LIBRARY_PATH%%:*}/libcuda.so.1"; echo "$LD_LIBRARY_PATH"; echo "$CUDA_VISIBLE_DEVICES"
        stat -c %a "$(dirname "$SLUICE_SOCKET")"; readlink "${LD_LIBRARY_PATH%%:*}/libnvidia-ml.so.1""#;
    let mut command = place.script(script);
    command.env("LD_LIBRARY_PATH", "/before").env("CUDA_VISIBLE_DEVICES", "1");
    let output = run(command);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let said = text(&output.stdout);
    let lines: Vec<&str> = said.lines().collect();
    assert_eq!(lines[0], "direct");
    assert_eq!(lines[1], "socket");
    assert_eq!(Path::new(lines[2]), place.libexec().join("libsluice_guest.so"));
    assert!(lines[3].ends_with("/lib:/before"), "{}", lines[3]);
    assert_eq!(lines[4], "1");
    assert_eq!(lines[5], "700", "others can reach the sockets");
    assert_eq!(Path::new(lines[6]), place.libexec().join("libsluice_guest_nvml.so"));
    assert_eq!(text(&output.stderr), "", "sluice itself prints nothing");
    place.assert_nothing_left();
}

#[test]
fn native_run_gives_the_program_the_driver_and_no_socket() {
    let place = Place::new();
    let driver = place.directory.path().join("real.so");
    std::fs::write(&driver, "").expect("a driver");
    let script = r#"readlink "$LD_LIBRARY_PATH/libcuda.so.1"; echo "${SLUICE_SOCKET-none}"
        readlink "$LD_LIBRARY_PATH/libnvidia-ml.so.1"; exit 9"#;
    let output = run(place.sluice(&[
        "run",
        "--native",
        "--driver",
        driver.to_str().expect("UTF-8"),
        "--",
        "/bin/sh",
        "-c",
        script,
    ]));
    let expected = format!("{}\nnone\n", driver.canonicalize().expect("a path").display());
    assert_eq!(text(&output.stdout), expected, "and no management library but the system's");
    assert_eq!(output.status.code(), Some(9));
    let output = run(place.sluice(&["run", "--native", "--", "/bin/sh", "-c", script]));
    let [driver, management] =
        ["libsoftgpu_cuda.so", "libsoftgpu_nvml.so"].map(|file| place.libexec().join(file));
    assert_eq!(text(&output.stdout), format!("{}\nnone\n{}\n", driver.display(), management.display()));
    place.assert_nothing_left();
}

#[test]
fn run_exits_with_the_code_or_signal_of_its_program() {
    let place = Place::new();
    for code in [0, 1, 77, 255] {
        assert_eq!(run(place.script(&format!("exit {code}"))).status.code(), Some(code));
    }
    for signal in [libc::SIGKILL, libc::SIGSEGV, libc::SIGTERM] {
        let status = run(place.script(&format!("kill -{signal} $$"))).status;
        assert_eq!(status.signal(), Some(signal), "{status}");
    }
    place.assert_nothing_left();
}

#[test]
fn run_passes_input_output_and_arguments_through() {
    let place = Place::new();
    let mut child = place
        .sluice(&["run", "--", "/bin/sh", "-c", "cat; echo \"$0|$1|$2\" >&2", "--driver", "a b", ""])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("sluice");
    child.stdin.take().expect("piped").write_all(b"through\0and through").expect("written");
    let output = child.wait_with_output().expect("sluice");
    assert_eq!(output.stdout, b"through\0and through");
    assert_eq!(text(&output.stderr), "--driver|a b|\n");
    place.assert_nothing_left();
}

#[test]
fn signals_sent_to_sluice_reach_the_program() {
    let place = Place::new();
    for (which, name) in
        [(Signal::TERM, "TERM"), (Signal::HUP, "HUP"), (Signal::INT, "INT"), (Signal::USR1, "USR1")]
    {
        // Not a read: a shell that has just checked for signals would not check again before it has read a line.
        let script = format!(
            "trap 'echo got; exit 5' {name}; echo ready
            n=0; while test $n -lt 5000; do sleep 0.02; n=$((n+1)); done; exit 6"
        );
        let (mut child, mut output, _) = start(attentive(place.script(&script)));
        signal(&watch(child.id()).expect("sluice"), which);
        let mut line = String::new();
        output.read_line(&mut line).expect("text");
        assert_eq!(line, "got\n", "{name}");
        assert_eq!(child.wait().expect("sluice").code(), Some(5), "{name}");
    }
    // A program without handlers is ended by them, and sluice ends by the same signal.
    let (mut child, _, _) = start(attentive(place.script("echo ready; exec sleep 1000")));
    signal(&watch(child.id()).expect("sluice"), Signal::TERM);
    assert_eq!(child.wait().expect("sluice").signal(), Some(libc::SIGTERM));
    place.assert_nothing_left();
}

/// A new terminal: our side and the program's.
fn terminal() -> (std::fs::File, OwnedFd) {
    let (mut ours, mut theirs) = (-1, -1);
    let null = std::ptr::null_mut();
    #[expect(unsafe_code, reason = "a terminal can be had from libc only")]
    // SAFETY: two numbers to fill; the name, settings and size are not requested.
    let result = unsafe { libc::openpty(&raw mut ours, &raw mut theirs, null, null.cast(), null.cast()) };
    assert_eq!(result, 0, "no terminal");
    #[expect(unsafe_code, reason = "the call above has made them")]
    // SAFETY: just made, and owned by nothing else.
    let own = |number| unsafe { OwnedFd::from_raw_fd(number) };
    (own(ours).into(), own(theirs))
}

#[test]
fn terminals_interrupt_reaches_the_program_once() {
    let place = Place::new();
    let (ours, theirs) = terminal();
    let script = "n=0; trap 'n=$((n+1)); echo got $n' INT; echo ready
        while :; do read -r line; test \"$line\" = end && exit $n; done";
    let mut command = attentive(place.script(script));
    command.stdin(theirs.try_clone().expect("a terminal")).stdout(theirs);
    #[expect(unsafe_code, reason = "a session of its own, with this terminal")]
    // SAFETY: two system calls without pointers.
    unsafe {
        command.pre_exec(|| {
            rustix::process::setsid()?;
            Ok(rustix::process::ioctl_tiocsctty(std::io::stdin())?)
        })
    };
    let mut child = command.spawn().expect("sluice");
    // The copies of the terminal in the command would keep it open.
    drop(command);
    let mut screen = BufReader::new(ours.try_clone().expect("a terminal"));
    let mut wait_for = |wanted: &str| {
        let mut line = String::new();
        while !line.contains(wanted) {
            line.clear();
            assert!(screen.read_line(&mut line).expect("text") > 0, "no {wanted:?}");
        }
    };
    wait_for("ready");
    // And a line, in case the shell has checked for signals just before: it checks again after a read.
    (&ours).write_all(b"\x03\n").expect("typed");
    wait_for("got 1");
    (&ours).write_all(b"end\n").expect("typed");
    // Once: sluice gets it too, but does not pass on a signal that the program has.
    assert_eq!(child.wait().expect("sluice").code(), Some(1));
    place.assert_nothing_left();
}

#[test]
fn program_under_run_has_the_same_signal_masks_as_without() {
    let place = Place::new();
    let script = "exec grep Sig /proc/self/status";
    let plain = Command::new("/bin/sh").args(["-c", script]).output().expect("sh");
    let output = run(place.script(script));
    // Pending signals and the queue's limit differ between processes.
    let masks = |output: &Output| {
        text(&output.stdout)
            .lines()
            .filter(|line| !line.starts_with("SigQ"))
            .map(ToOwned::to_owned)
            .collect::<Vec<_>>()
    };
    assert_eq!(masks(&output), masks(&plain));
}

#[test]
fn killed_program_leaves_no_process_or_file() {
    let place = Place::new();
    let (mut child, _, said) = start(place.script(r#"echo "$$ $SLUICE_SOCKET"; read -r line"#));
    let (program, socket) = said.split_once(' ').expect("two words");
    let (_front, worker) = open_session(socket);
    signal(&watch(program.parse().expect("a pid")).expect("the program"), Signal::KILL);
    assert_eq!(child.wait().expect("sluice").signal(), Some(libc::SIGKILL));
    place.assert_nothing_left();
    wait_gone(&worker);
}

#[test]
fn killed_sluice_leaves_no_process_or_file() {
    let place = Place::new();
    let (mut child, _, said) = start(place.script(r#"echo "$SLUICE_SOCKET"; read -r line"#));
    let (_front, worker) = open_session(&said);
    let backend: Vec<OwnedFd> = place.processes().into_iter().filter_map(watch).collect();
    assert!(backend.len() >= 4, "sluiced, launcher, device, worker");
    child.kill().expect("killed");
    child.wait().expect("sluice");
    wait_gone(&worker);
    backend.iter().for_each(wait_gone);
    // The daemon removes the directory before it ends.
    place.assert_nothing_left();
}

#[test]
fn killed_sluiced_ends_no_session_and_leaves_no_process_or_file() {
    let place = Place::new();
    let (mut child, mut output, said) =
        start(place.script(r#"echo "$SLUICE_SOCKET"; read -r line; echo still here"#));
    let (front, worker) = open_session(&said);
    let daemon = place
        .processes()
        .into_iter()
        .find(|pid| {
            let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            line.split(|&byte| byte == 0).next().is_some_and(|name| name.ends_with(b"/sluiced"))
        })
        .expect("sluiced");
    let daemon = watch(daemon).expect("sluiced");
    signal(&daemon, Signal::KILL);
    // Sluice reports the end of the daemon; the session goes on.
    let mut complaint = String::new();
    BufReader::new(child.stderr.take().expect("piped")).read_line(&mut complaint).expect("text");
    assert!(complaint.contains("sluiced has ended"), "{complaint}");
    writeln!(&front, "describe").expect("a device that listens");
    let mut answer = String::new();
    BufReader::new(&front).read_line(&mut answer).expect("an answer");
    assert!(answer.contains("fds"), "the device still works: {answer}");
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    let ended = poll(&mut [PollFd::new(&worker, PollFlags::IN)], Some(&now)).expect("poll");
    assert_eq!(ended, 0, "the worker has ended");
    writeln!(child.stdin.take().expect("piped")).expect("a program that reads");
    let mut line = String::new();
    output.read_line(&mut line).expect("text");
    assert_eq!(line, "still here\n");
    assert!(child.wait().expect("sluice").success());
    place.assert_nothing_left();
}

#[test]
fn missing_file_is_named_with_its_build_command() {
    let place = Place::new();
    for file in [
        "libsluice_guest.so",
        "libsluice_guest_nvml.so",
        "libsoftgpu_cuda.so",
        "sluiced",
        "sluice-launcher",
        "sluice-device",
        "sluice-worker",
        "sluice-arbiter",
        "sluice-inventory",
    ] {
        let (path, hidden) = (place.libexec().join(file), place.libexec().join("hidden"));
        std::fs::rename(&path, &hidden).expect("renamed");
        let output = run(place.script("exit 0"));
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(125), "{said}");
        assert!(said.contains(path.to_str().expect("UTF-8")), "{said}");
        assert!(said.contains("cargo build --workspace"), "{said}");
        std::fs::rename(&hidden, &path).expect("renamed");
    }
    let output = run(place.sluice(&["run", "--driver", "/nowhere.so", "--", "true"]));
    assert!(text(&output.stderr).contains("/nowhere.so"));
    let output = run(place.sluice(&["run", "--", "/nowhere/program"]));
    assert_eq!(output.status.code(), Some(127));
    assert!(text(&output.stderr).contains("/nowhere/program"));
    let output = run(place.sluice(&["run", "--", "/etc/passwd"]));
    assert_eq!(output.status.code(), Some(126));
    place.assert_nothing_left();
}

#[test]
fn host_serves_until_sigterm_or_sigint() {
    for which in [Signal::TERM, Signal::INT] {
        let place = Place::new();
        let directory = place.directory.path().join("vm");
        let path = directory.to_str().expect("UTF-8");
        let (mut child, _, line) = start(place.sluice(&["host", "--dir", path, "--scanouts", "1"]));
        let socket = line.strip_prefix("vhost-user socket: ").expect("the line");
        assert_eq!(Path::new(socket), directory.join("vm-1.sock"));
        let (_front, worker) = open_session(socket);
        let output = run(place.sluice(&["status", "--json", "--dir", path]));
        let status: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
        assert_eq!(status["vms"][0]["sessions"][0]["session"], 1);
        signal(&watch(child.id()).expect("sluice"), which);
        assert!(child.wait().expect("sluice").success());
        wait_gone(&worker);
        place.assert_nothing_left();
        // The receipts of scrubs and the creator of the VM can still be read.
        let left = std::fs::read_dir(&directory).expect("the directory").flatten();
        let mut left: Vec<_> = left.map(|entry| entry.file_name()).collect();
        left.sort();
        let files = [
            "audit.log",
            "scrub-unit-0.1.log",
            "scrub-unit-0.2.log",
            "scrub-unit-0.3.log",
            "scrub-unit-0.log",
        ];
        assert_eq!(left, files);
    }
    let place = Place::new();
    let output = run(place.sluice(&["status", "--dir", "/nowhere"]));
    assert_eq!(output.status.code(), Some(4));
    assert!(text(&output.stderr).contains("/nowhere/api.sock"));
}

#[test]
fn host_whose_daemon_dies_exits_with_an_error() {
    let place = Place::new();
    let directory = place.directory.path().to_str().expect("UTF-8").to_owned();
    let (mut child, _, _) = start(place.sluice(&["host", "--dir", &directory]));
    let output = run(place.sluice(&["status", "--json", "--dir", &directory]));
    let status: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let daemon = status["process"].as_u64().and_then(|pid| u32::try_from(pid).ok()).expect("a pid");
    signal(&watch(daemon).expect("sluiced"), Signal::KILL);
    assert_eq!(child.wait().expect("sluice").code(), Some(125));
    let mut said = String::new();
    child.stderr.take().expect("piped").read_to_string(&mut said).expect("text");
    assert!(said.contains("sluiced has ended"), "{said}");
    place.assert_nothing_left();
    assert!(place.directory.path().exists(), "a directory it did not make is gone");
}

#[test]
fn help_names_every_command() {
    let place = Place::new();
    let output = run(place.sluice(&["--help"]));
    for word in ["run", "host", "status", "SLUICE_LIBEXEC"] {
        assert!(text(&output.stdout).contains(word), "{word}");
    }
    assert!(text(&run(place.sluice(&["--version"])).stdout).starts_with("sluice "));
}
