//! The backend of one `sluice run` or `sluice host`: `sluiced`, and through it launcher, device and workers.
//!
//! **Start.** `sluiced` gets one end of a socket as its standard input and writes `ready` to it; no time passes in between but
//! the start-up time of the processes. **End.** Closing our side of the socket ends everything in order. Launcher and `sluiced`
//! hold the other end, the launcher until its last child is reaped, so that the end of file on ours means: nothing is left.
//! This also holds if `sluiced` or this process is killed, for a closed socket is all it takes.

use std::{
    io::Read as _,
    net::Shutdown,
    os::{
        fd::{AsFd as _, BorrowedFd, OwnedFd},
        unix::{net::UnixStream, process::CommandExt as _},
    },
    path::Path,
    process::{Child, Command, Stdio},
    time::Duration,
};

use anyhow::{Context as _, Result, bail, ensure};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
    process::{Pid, PidfdFlags, Signal as Kill},
};

use crate::{
    api::Api,
    files::{self, Driver},
    look::readiness,
    signals::{Signal, Signals},
    softgpu::Device,
};

/// How long the backend may take to end in order; beyond it, everything is killed.
const END: Timespec = Timespec { tv_sec: 15, tv_nsec: 0 };
/// How long a unit may take to be cleared and lent.
const LENDING: Duration = Duration::from_secs(60);
const AGAIN: Timespec = Timespec { tv_sec: 0, tv_nsec: 5_000_000 };
/// How long killed processes may take to be gone.
const KILLED: Timespec = Timespec { tv_sec: 5, tv_nsec: 0 };

/// What a backend is for.
pub(crate) struct Wanted<'a> {
    /// Where its sockets go.
    pub(crate) directory: &'a Path,
    /// The driver that workers load.
    pub(crate) driver: &'a Driver,
    /// The device to compute on, if it is one of our own.
    pub(crate) device: Option<&'a Device>,
    /// Its VMs, as `sluiced --vm` takes them.
    pub(crate) vms: &'a [String],
    /// Whether `sluiced` removes the directory at its end.
    pub(crate) ephemeral: bool,
    /// Variables of this process's environment that are not for the backend.
    pub(crate) without: &'a [&'a str],
    /// Runs of guest pages that workers map one by one, if not as many as usual.
    pub(crate) mapped_runs: Option<u32>,
    /// Whether VMs may bring memory that their VMM could shrink.
    pub(crate) trust_vmm_memory: bool,
    /// What its processes say, if not what the environment says.
    pub(crate) log: Option<&'a str>,
}

/// What came of a start.
pub(crate) enum Start {
    /// It runs.
    Ready(Backend),
    /// A signal asked to end, and everything has.
    Interrupted(Signal),
}

/// A running backend. Dropping it ends all of it.
pub(crate) struct Backend {
    daemon: Child,
    process: OwnedFd,
    lifeline: UnixStream,
}

impl Backend {
    /// Starts a backend; returns when its device can be connected to, or a signal asked to end.
    pub(crate) fn start(wanted: &Wanted<'_>, signals: &Signals) -> Result<Start> {
        let program = files::daemon()?;
        let (lifeline, theirs) = UnixStream::pair().context("cannot make a socket")?;
        let mut command = Command::new(&program);
        command.arg("--supervised").arg("--runtime-dir").arg(wanted.directory);
        command.arg("--driver").arg(&wanted.driver.library);
        for vm in wanted.vms {
            command.arg("--vm").arg(vm);
        }
        if let Some(nvml) = &wanted.driver.nvml {
            command.arg("--nvml").arg(nvml);
        }
        if let Some(device) = wanted.device {
            command.envs(device.variables());
            if let Some(scratch) = device.scratch() {
                command.arg("--scratch").arg(scratch);
            }
        }
        command.arg("--libexec").arg(program.parent().context("sluiced has no directory")?);
        if wanted.ephemeral {
            command.arg("--ephemeral");
        }
        if wanted.trust_vmm_memory {
            command.arg("--trust-vmm-memory");
        }
        if let Some(runs) = wanted.mapped_runs {
            command.arg("--mapped-runs").arg(runs.to_string());
        }
        for name in wanted.without {
            command.env_remove(name);
        }
        if let Some(log) = wanted.log {
            command.env("SLUICE_LOG", log);
        }
        // Standard output is the program's alone. A group of its own keeps the terminal's signals away.
        command.stdin(Stdio::from(OwnedFd::from(theirs))).stdout(Stdio::null()).process_group(0);
        signals.spare(&mut command);
        let daemon = command.spawn().with_context(|| format!("cannot run {}", program.display()))?;
        // The command holds their end as well; ours would never see its end.
        drop(command);
        let process = descriptor(&daemon)?;
        let mut backend = Self { daemon, process, lifeline };
        Ok(match backend.wait_ready(signals)? {
            None => Start::Ready(backend),
            Some(signal) => Start::Interrupted(signal),
        })
    }

    /// The process of `sluiced`, for polling.
    pub(crate) fn process(&self) -> BorrowedFd<'_> {
        self.process.as_fd()
    }

    /// Returns the signal that asked to end, if one did.
    fn wait_ready(&mut self, signals: &Signals) -> Result<Option<Signal>> {
        loop {
            let mut polled = [
                PollFd::new(&self.lifeline, PollFlags::IN),
                PollFd::new(&self.process, PollFlags::IN),
                PollFd::new(signals, PollFlags::IN),
            ];
            match poll(&mut polled, None) {
                Ok(_) => {}
                Err(Errno::INTR) => continue,
                Err(error) => return Err(error).context("cannot wait for sluiced"),
            }
            let [said, ended, signalled] = polled.map(|polled| !polled.revents().is_empty());
            if said {
                let mut line = [0; 64];
                let length = self.lifeline.read(&mut line).context("cannot hear sluiced")?;
                ensure!(length > 0, "sluiced has ended before it was ready; it said why above");
                ensure!(&line[..length] == b"ready\n", "sluiced is of another version than sluice");
                return Ok(None);
            }
            if ended {
                let status = self.daemon.wait().context("cannot wait for sluiced")?;
                bail!("sluiced has ended before it was ready ({status}); it said why above");
            }
            if signalled && let Some(signal) = signals.ending().context("cannot read signals")? {
                return Ok(Some(signal));
            }
        }
    }

    /// Waits until its unit lends memory, so that a program on a slow machine is not refused before; or for a signal that asks to end,
    /// which is returned. A unit that takes too long is the program's to hear of.
    pub(crate) fn wait_lending(&self, directory: &Path, signals: &Signals) -> Result<Option<Signal>> {
        let api = Api::at(directory.join("api.sock"));
        let deadline = std::time::Instant::now() + LENDING;
        while !readiness(&api)?.0 && std::time::Instant::now() < deadline {
            let mut polled = [PollFd::new(&self.process, PollFlags::IN), PollFd::new(signals, PollFlags::IN)];
            match poll(&mut polled, Some(&AGAIN)) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return Err(error).context("cannot wait for sluiced"),
            }
            if let Some(signal) = signals.ending().context("cannot read signals")? {
                return Ok(Some(signal));
            }
        }
        Ok(None)
    }

    /// Waits until the last holder of the other end is gone.
    fn wait_gone(&mut self, limit: Timespec) -> Result<bool> {
        let deadline = std::time::Instant::now() + Duration::try_from(limit).unwrap_or(Duration::ZERO);
        loop {
            let left = deadline.saturating_duration_since(std::time::Instant::now());
            let left = Timespec::try_from(left).unwrap_or(limit);
            match poll(&mut [PollFd::new(&self.lifeline, PollFlags::IN)], Some(&left)) {
                Ok(0) => return Ok(false),
                Ok(_) => {}
                Err(Errno::INTR) => continue,
                Err(error) => return Err(error).context("cannot wait for the backend"),
            }
            let mut line = [0; 64];
            match self.lifeline.read(&mut line) {
                // A reset is the end of one that had not read everything.
                Ok(0) => return Ok(true),
                Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => return Ok(true),
                Ok(_) => {}
                Err(error) => return Err(error).context("cannot wait for the backend"),
            }
        }
    }

    fn end(&mut self) -> Result<()> {
        self.lifeline.shutdown(Shutdown::Write).context("cannot close the lifeline")?;
        if !self.wait_gone(END)? {
            eprintln!("sluice: the backend does not end: it is killed");
            let group = Pid::from_raw(self.daemon.id().cast_signed()).context("sluiced has no number")?;
            // sluiced and launcher; what the launcher started dies with it.
            match rustix::process::kill_process_group(group, Kill::KILL) {
                Ok(()) | Err(Errno::SRCH) => {}
                Err(error) => return Err(error).context("cannot kill the backend"),
            }
            ensure!(self.wait_gone(KILLED)?, "processes of the backend were killed and are still there");
        }
        self.daemon.wait().context("cannot wait for sluiced")?;
        Ok(())
    }
}

impl Drop for Backend {
    fn drop(&mut self) {
        if let Err(error) = self.end() {
            eprintln!("sluice: {error:#}");
        }
    }
}

/// A descriptor of a child that has not been waited for.
pub(crate) fn descriptor(child: &Child) -> Result<OwnedFd> {
    let process = Pid::from_raw(child.id().cast_signed()).context("a process without a number")?;
    rustix::process::pidfd_open(process, PidfdFlags::empty()).context("cannot watch a process")
}
