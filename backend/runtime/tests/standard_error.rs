//! A program whose standard error is gone, closed, or full continues. Each test runs this binary again as that program.

use std::{
    os::{fd::OwnedFd, unix::net::UnixStream},
    process::{Command, Output, Stdio},
    time::{Duration, Instant},
};

use rustix::{fs::OFlags, net::Shutdown, pipe::PipeFlags};

/// Environment variable that selects the program.
const PROGRAM: &str = "SLUICE_TEST_LOGGING_PROGRAM";

/// The program: logs, panics in a thread, and reports its end on standard output.
#[test]
fn logging_program() {
    if std::env::var_os(PROGRAM).is_none() {
        return;
    }
    sluice_runtime::log::start().expect("a log");
    for line in 0..1000 {
        tracing::error!(line, "something happened");
    }
    let panicked = std::thread::spawn(|| panic!("a thread that fails"));
    assert!(panicked.join().is_err());
    println!("it goes on");
}

fn run(standard_error: OwnedFd) -> Output {
    let mut command = Command::new(std::env::current_exe().expect("this program"));
    command.args(["logging_program", "--exact", "--nocapture"]).env(PROGRAM, "1").env_remove("SLUICE_LOG");
    let mut child =
        command.stdout(Stdio::piped()).stderr(Stdio::from(standard_error)).spawn().expect("the program");
    // The command keeps copies of the program's descriptors.
    drop(command);
    let start = Instant::now();
    while child.try_wait().expect("a status").is_none() {
        if start.elapsed() > Duration::from_secs(60) {
            child.kill().expect("killed");
            panic!("the program waits for its standard error");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    child.wait_with_output().expect("its output")
}

fn goes_on(output: &Output) {
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && said.contains("it goes on"), "{}: {said}", output.status);
}

// Promise: F70
#[test]
fn program_with_standard_error_shut_down_continues() {
    let (ours, theirs) = UnixStream::pair().expect("a pair");
    rustix::net::shutdown(&theirs, Shutdown::Both).expect("shut");
    goes_on(&run(theirs.into()));
    drop(ours);
}

// Promise: F70
#[test]
fn program_with_a_broken_standard_error_pipe_continues() {
    let (reader, writer) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC).expect("a pipe");
    drop(reader);
    goes_on(&run(writer));
}

// Promise: F70
#[test]
fn program_with_a_full_standard_error_continues_without_waiting() {
    for flags in [OFlags::empty(), OFlags::NONBLOCK] {
        let (reader, writer) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC).expect("a pipe");
        rustix::fs::fcntl_setfl(&writer, OFlags::NONBLOCK).expect("set");
        while rustix::io::write(&writer, &[b'x'; 4096]).is_ok() {}
        while rustix::io::write(&writer, b"x").is_ok() {}
        rustix::fs::fcntl_setfl(&writer, flags).expect("set");
        goes_on(&run(writer));
        drop(reader);
    }
}
