//! The common part of the command line's tests: a directory in which the daemon and the launcher are real, and device, worker,
//! arbiter, inventory and libraries are stand-ins; and ways to wait for processes without sleeping.

use std::{
    ffi::OsString,
    io::{BufRead as _, BufReader, Write as _},
    os::{
        fd::OwnedFd,
        unix::{net::UnixStream, process::CommandExt as _},
    },
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
};

use sluice_kit::{
    processes::{Started, watch},
    wait::TIMEOUT,
};
use tempfile::TempDir;

/// A directory for one test: Sluice's files in `libexec`, temporary directories in `tmp`.
pub(crate) struct Place {
    started: Started,
    pub(crate) directory: TempDir,
}

impl Place {
    pub(crate) fn new() -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        let started = Started { libexec: directory.path().join("libexec") };
        let place = Self { started, directory };
        std::fs::create_dir(place.libexec()).expect("a directory");
        std::fs::create_dir(place.temporary()).expect("a directory");
        let built = Path::new(env!("CARGO_BIN_EXE_sluice")).parent().expect("a directory");
        for (name, file) in [
            ("sluiced", "sluiced"),
            ("sluice-launcher", "sluice-launcher"),
            ("sluice-device", "sluice-stand-in"),
            ("sluice-worker", "sluice-stand-in"),
            ("sluice-arbiter", "sluice-stand-in"),
            ("sluice-inventory", "sluice-stand-in"),
        ] {
            let file = built.join(file);
            assert!(file.exists(), "{} is missing: run `cargo build --release`", file.display());
            std::os::unix::fs::symlink(file, place.libexec().join(name)).expect("a link");
        }
        for library in
            ["libsluice_guest.so", "libsluice_guest_nvml.so", "libsoftgpu_cuda.so", "libsoftgpu_nvml.so"]
        {
            std::fs::write(place.libexec().join(library), "").expect("a library");
        }
        place
    }

    pub(crate) fn libexec(&self) -> PathBuf {
        self.started.libexec.clone()
    }

    pub(crate) fn temporary(&self) -> PathBuf {
        self.directory.path().join("tmp")
    }

    pub(crate) fn sluice(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_sluice"));
        command.args(arguments).env("SLUICE_LIBEXEC", self.libexec()).env("TMPDIR", self.temporary());
        command.env("SLUICE_LOG", "off").env_remove("LD_LIBRARY_PATH");
        command
    }

    /// `sluice run` of a shell script.
    pub(crate) fn script(&self, script: &str) -> Command {
        self.sluice(&["run", "--", "/bin/sh", "-c", script])
    }

    pub(crate) fn processes(&self) -> Vec<u32> {
        self.started.processes()
    }

    /// Asserts that no process and no file is left now, without waiting.
    pub(crate) fn assert_nothing_left(&self) {
        assert_eq!(self.processes(), [] as [u32; 0], "processes were left");
        let left: Vec<OsString> = std::fs::read_dir(self.temporary())
            .expect("a directory")
            .flatten()
            .map(|entry| entry.file_name())
            .collect();
        assert!(left.is_empty(), "{left:?} was left");
    }
}

pub(crate) fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

pub(crate) fn run(mut command: Command) -> Output {
    command.output().expect("sluice")
}

/// Starts a script that prints a line and then waits for standard input; returns the line.
pub(crate) fn start(mut command: Command) -> (Child, BufReader<std::process::ChildStdout>, String) {
    let mut child =
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("sluice");
    let mut output = BufReader::new(child.stdout.take().expect("piped"));
    let mut line = String::new();
    output.read_line(&mut line).expect("text");
    assert!(!line.is_empty(), "the program printed nothing");
    (child, output, line.trim_end().to_owned())
}

/// The command with default handling of these tests' signals: a caller of the tests may ignore some, as nohup and background
/// jobs of shells do, and children inherit that.
pub(crate) fn attentive(mut command: Command) -> Command {
    #[expect(unsafe_code, reason = "between fork and exec")]
    let default = || {
        for signal in [libc::SIGHUP, libc::SIGINT, libc::SIGTERM, libc::SIGUSR1] {
            // SAFETY: no handler, and a call that is safe between fork and exec.
            unsafe { libc::signal(signal, libc::SIG_DFL) };
        }
        Ok(())
    };
    #[expect(unsafe_code, reason = "between fork and exec")]
    // SAFETY: `default` makes system calls only.
    unsafe {
        command.pre_exec(default)
    };
    command
}

/// Opens a session with the stand-in device at `socket`; returns the worker's process.
pub(crate) fn open_session(socket: &str) -> (UnixStream, OwnedFd) {
    let stream = UnixStream::connect(socket).expect("the device's socket");
    stream.set_read_timeout(Some(TIMEOUT)).expect("a time limit");
    writeln!(&stream, "open 1").expect("a device that listens");
    let mut line = String::new();
    BufReader::new(&stream).read_line(&mut line).expect("an answer");
    let found: serde_json::Value =
        serde_json::from_str(line.trim().strip_prefix("worker 1 ").expect("a worker"))
            .expect("the worker's process id");
    let pid = found["pid"].as_u64().and_then(|pid| u32::try_from(pid).ok()).expect("a pid");
    (stream, watch(pid).expect("a process"))
}
