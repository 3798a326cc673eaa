//! Starts of `sluiced` as a process.

use std::{
    ffi::OsStr,
    os::{fd::OwnedFd, unix::net::UnixStream},
    process::{Command, ExitStatus, Output, Stdio},
};

use rustix::process::Signal;
use sluice_api::supervision::wait_ready;
use sluice_kit::{
    processes::{Process, signal, watch},
    wait::{TIMEOUT, until},
};

use super::{Place, children};

pub(crate) const SLUICED: &str = env!("CARGO_BIN_EXE_sluiced");

/// A configuration that lets organisations share units whose driver does not report the memory of each process.
pub(crate) const SHARING: &str = "share-unmeasured-between-organisations = true\n";

/// The settings of a start of `sluiced`, with the programs, the sockets and the driver of a place.
pub(crate) struct DaemonBuilder<'a> {
    place: &'a Place,
    command: Command,
}

impl<'a> DaemonBuilder<'a> {
    /// `command` starts [`SLUICED`], and has no arguments of it yet.
    pub(crate) fn new(place: &'a Place, command: Command) -> Self {
        let log = std::env::var("SLUICE_LOG").unwrap_or_else(|_| "off".to_owned());
        let mut this = Self { place, command };
        this.command.envs([place.softgpu()]);
        this.args(["--runtime-dir".as_ref(), place.run().as_os_str()])
            .args(["--libexec".as_ref(), place.libexec().as_os_str()])
            .args(["--driver".as_ref(), place.driver().as_os_str()])
            .envs([("SLUICE_LOG", log.as_str())])
    }

    pub(crate) fn args(mut self, arguments: impl IntoIterator<Item = impl AsRef<OsStr>>) -> Self {
        self.command.args(arguments);
        self
    }

    pub(crate) fn units(self, count: u32) -> Self {
        self.args(["--units", &count.to_string()])
    }

    /// Lets sluiced start the stand-in inventory.
    pub(crate) fn nvml(self) -> Self {
        let nvml = self.place.driver();
        self.args(["--nvml".as_ref(), nvml.as_os_str()])
    }

    pub(crate) fn vm_numbers(self, range: &str) -> Self {
        self.args(["--vm-numbers", range])
    }

    /// Writes a configuration file.
    pub(crate) fn configuration(self, text: &str) -> Self {
        let file = self.place.directory.path().join("sluiced.toml");
        std::fs::write(&file, text).expect("written");
        self.args(["--config".as_ref(), file.as_os_str()])
    }

    pub(crate) fn envs<'b>(mut self, variables: impl IntoIterator<Item = (&'b str, &'b str)>) -> Self {
        self.command.envs(variables);
        self
    }

    pub(crate) fn stderr(mut self, stderr: impl Into<Stdio>) -> Self {
        self.command.stderr(stderr);
        self
    }

    /// Starts sluiced as a service does, without a supervisor: its processes outlive it.
    pub(crate) fn spawn(mut self) -> Daemon {
        let process = self.command.stdin(Stdio::null()).spawn().expect("sluiced");
        Daemon { process: Process(process), lifeline: None }
    }

    /// As [`Self::spawn`], and waits until sluiced is ready.
    pub(crate) fn serve(self) -> Daemon {
        let place = self.place;
        let mut daemon = self.spawn();
        assert!(daemon.becomes_ready(place), "sluiced has ended");
        daemon
    }

    /// Starts sluiced with this process as its supervisor, and waits until it is ready.
    pub(crate) fn supervised(mut self) -> Daemon {
        let (ours, theirs) = UnixStream::pair().expect("a pair");
        ours.set_read_timeout(Some(TIMEOUT)).expect("a time limit");
        self.command.arg("--supervised").stdin(OwnedFd::from(theirs));
        let process = self.command.spawn().expect("sluiced");
        let mut daemon = Daemon { process: Process(process), lifeline: None };
        // The command still holds the other end of the lifeline.
        drop(self);
        wait_ready(&ours).expect("sluiced becomes ready");
        daemon.lifeline = Some(ours);
        daemon
    }

    /// Runs a sluiced that ends by itself.
    pub(crate) fn output(mut self) -> Output {
        self.command.output().expect("sluiced")
    }
}

/// A process of `sluiced`. Drop ends it.
pub(crate) struct Daemon {
    process: Process,
    /// The connection of its supervisor.
    pub(crate) lifeline: Option<UnixStream>,
}

impl Daemon {
    pub(crate) fn pid(&self) -> u32 {
        self.process.0.id()
    }

    pub(crate) fn launcher(&self) -> u32 {
        let children = children(self.pid());
        assert_eq!(children.len(), 1, "sluiced has other children than the launcher: {children:?}");
        children[0]
    }

    /// True if the process has ended.
    pub(crate) fn has_ended(&mut self) -> bool {
        self.process.0.try_wait().expect("sluiced").is_some()
    }

    /// Waits until sluiced is ready. Returns false if it has ended before.
    pub(crate) fn becomes_ready(&mut self, place: &Place) -> bool {
        let is_ready = || place.try_api("GET", "/readyz", None).is_ok_and(|reply| reply.status == 200);
        let (ended, ready) = until(|| (self.has_ended(), is_ready()), |(ended, ready)| *ended || *ready);
        assert!(ended || ready, "sluiced is not ready");
        !ended
    }

    pub(crate) fn wait(&mut self) -> ExitStatus {
        self.process.0.wait().expect("sluiced")
    }

    pub(crate) fn kill(&mut self) {
        self.process.0.kill().expect("killed");
        self.wait();
    }

    /// Ends the process by a signal, and waits for its end.
    pub(crate) fn end_by(&mut self, by: Signal) -> ExitStatus {
        signal(&watch(self.pid()).expect("sluiced"), by);
        self.wait()
    }

    /// Ends the process in order: by the end of its supervisor, or else by SIGTERM.
    pub(crate) fn end(mut self) {
        let status = match self.lifeline.take() {
            Some(lifeline) => {
                drop(lifeline);
                self.wait()
            }
            None => self.end_by(Signal::TERM),
        };
        assert!(status.success(), "{status}");
    }
}
