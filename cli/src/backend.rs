//! The backend of one `sluice run` or `sluice host`: `sluiced`, and through it launcher, device and workers.
//!
//! **Start.** `sluiced` gets one end of a socket as its standard input and writes `ready` to it; no time passes in between but
//! the start-up time of the processes. **End.** Closing our side of the socket ends everything in order. Launcher and `sluiced`
//! hold the other end, the launcher until its last child is reaped, so the end of file on ours means that no process is left.
//! This also holds if `sluiced` or this process is killed, because the kernel then closes its socket.

use std::{
    io::{ErrorKind, Read as _},
    net::Shutdown,
    os::{
        fd::{AsFd as _, BorrowedFd, OwnedFd},
        unix::{net::UnixStream, process::CommandExt as _},
    },
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::Duration,
};

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
    process::{Pid, Signal as Kill},
};
use sluice_api::{
    client::Client,
    supervision,
    v1::{GpuState, Placement, Vm, VmRequest},
};
use softgpu_run::{Signal, Signals, descriptor};

use crate::{
    api::{Api, ApiRefusal},
    files::{self, InstalledDriver},
    look::readiness,
    softgpu::SoftDevice,
};

/// The reason for which there is no VM.
const NO_GPU: &str = "no GPU can be used: each is divided into MIG instances, drained, or in quarantine";
/// The start of the error if `sluiced` hangs.
const NOT_READY: &str = "sluiced is not ready after";
/// Number and name of the VM.
const VM: u32 = 1;
/// Time limit for `sluiced` to become ready. It takes well under a second, and longer on a host that is busy.
const READY: Duration = Duration::from_secs(120);
/// Time limit for an orderly end; after it, all processes are killed, and records that are not on the disk yet are lost. `sluiced` itself
/// waits 20 s for a slow disk.
const END: Timespec = Timespec { tv_sec: 60, tv_nsec: 0 };
/// Time limit for a unit to be cleared and lent.
const LENDING: Duration = Duration::from_secs(60);
const AGAIN: Timespec = Timespec { tv_sec: 0, tv_nsec: 5_000_000 };
/// Time limit for killed processes to exit.
const KILLED: Timespec = Timespec { tv_sec: 5, tv_nsec: 0 };

/// Parameters of a backend.
pub(crate) struct BackendParameters<'a> {
    /// Directory of its sockets.
    pub(crate) directory: &'a Path,
    /// The driver that workers load.
    pub(crate) driver: &'a InstalledDriver,
    /// The software GPU to compute on, if it is not the system's driver.
    pub(crate) device: Option<&'a SoftDevice>,
    /// Its VM, which gets every undivided GPU.
    pub(crate) vm: VmRequest,
    /// True if `sluiced` removes the directory at its end.
    pub(crate) ephemeral: bool,
    /// Variables of this process's environment that the backend must not get.
    pub(crate) without: &'a [&'a str],
    /// Runs of guest pages that workers map one by one; `None` for the default.
    pub(crate) mapped_runs: Option<u32>,
    /// True to accept VM memory that the VMM can shrink.
    pub(crate) trust_vmm_memory: bool,
    /// Log filter of its processes; `None` to inherit that of the environment.
    pub(crate) log: Option<&'a str>,
}

impl BackendParameters<'_> {
    /// Socket of the VM's device.
    pub(crate) fn socket(&self) -> PathBuf {
        self.directory.join(format!("vm-{VM}.sock"))
    }
}

/// Result of a start.
pub(crate) enum Start {
    /// The backend runs.
    Ready(Backend),
    /// A signal requested the end, and every process has ended.
    Interrupted(Signal),
}

/// A running backend. Dropping it ends all its processes.
pub(crate) struct Backend {
    daemon: Child,
    process: OwnedFd,
    lifeline: UnixStream,
}

impl Backend {
    /// Starts a backend; returns when its device accepts connections, or when a signal requests the end.
    pub(crate) fn start(wanted: &BackendParameters<'_>, signals: &Signals) -> Result<Start> {
        let program = files::daemon()?;
        let (lifeline, theirs) = UnixStream::pair().context("cannot make a socket")?;
        let mut command = Command::new(&program);
        command.arg("--supervised").arg("--runtime-dir").arg(wanted.directory);
        command.arg("--driver").arg(&wanted.driver.library);
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
        // Standard output belongs to the program. A process group of its own keeps the terminal's signals away.
        command.stdin(Stdio::from(OwnedFd::from(theirs))).stdout(Stdio::null()).process_group(0);
        signals.spare(&mut command);
        let daemon = command.spawn().with_context(|| format!("cannot run {}", program.display()))?;
        // The command holds the other end as well: without this drop, ours would never reach the end of file.
        drop(command);
        let process = descriptor(&daemon)?;
        let mut backend = Self { daemon, process, lifeline };
        let interrupted = match backend.wait_ready(signals, READY)? {
            None => Self::make_vm(wanted, signals)?,
            signal => signal,
        };
        Ok(match interrupted {
            None => Start::Ready(backend),
            Some(signal) => Start::Interrupted(signal),
        })
    }

    /// The process of `sluiced`, for polling.
    pub(crate) fn process(&self) -> BorrowedFd<'_> {
        self.process.as_fd()
    }

    /// Waits until `sluiced` is ready, at most for `limit`. Returns the signal that requested the end, if one arrived.
    fn wait_ready(&mut self, signals: &Signals, limit: Duration) -> Result<Option<Signal>> {
        let deadline = std::time::Instant::now() + limit;
        loop {
            let left = deadline.saturating_duration_since(std::time::Instant::now());
            let mut polled = [
                PollFd::new(&self.lifeline, PollFlags::IN),
                PollFd::new(&self.process, PollFlags::IN),
                PollFd::new(signals, PollFlags::IN),
            ];
            match poll(&mut polled, Some(&Timespec::try_from(left).context("a time limit")?)) {
                Ok(0) => bail!("{NOT_READY} {limit:?}; its log is above"),
                Ok(_) => {}
                Err(Errno::INTR) => continue,
                Err(error) => return Err(error).context("cannot wait for sluiced"),
            }
            let [said, ended, signalled] = polled.map(|polled| !polled.revents().is_empty());
            if said {
                // It writes the line at once.
                self.lifeline.set_read_timeout(Some(limit)).context("cannot set a time limit")?;
                let ready = supervision::wait_ready(&self.lifeline);
                return ready.map(|()| None).map_err(|error| match error.kind() {
                    ErrorKind::UnexpectedEof => {
                        anyhow!("sluiced has ended before it was ready; its log is above")
                    }
                    ErrorKind::InvalidData => anyhow!("sluiced has another version than sluice"),
                    ErrorKind::WouldBlock => anyhow!("{NOT_READY} {limit:?}; its log is above"),
                    _ => anyhow::Error::new(error).context("cannot read from sluiced"),
                });
            }
            if ended {
                let status = self.daemon.wait().context("cannot wait for sluiced")?;
                bail!("sluiced has ended before it was ready ({status}); its log is above");
            }
            if signalled && let Some(signal) = signals.ending().context("cannot read signals")? {
                return Ok(Some(signal));
            }
        }
    }

    /// Creates the VM. Waits for the answer, which the API gives within bounded time, and returns the signal that requested the end
    /// meanwhile.
    fn make_vm(wanted: &BackendParameters<'_>, signals: &Signals) -> Result<Option<Signal>> {
        let api = Api::at(wanted.directory.join("api.sock"));
        let request = match api.ask(|api| api.vm(&VM.to_string())) {
            // An earlier backend left the VM fenced or drained: it keeps the facts that cannot change.
            Ok(Vm { placement, direct, scanouts, arena, arena_bytes, .. }) => {
                let placement = Some(placement);
                Some(VmRequest { placement, direct, scanouts, arena, arena_bytes, ..wanted.vm.clone() })
            }
            Err(error) if error.downcast_ref::<ApiRefusal>().is_some_and(ApiRefusal::is_absence) => {
                let gpus = api.ask(Client::gpus)?.gpus;
                let whole = gpus.iter().filter(|gpu| !gpu.mig && gpu.state == GpuState::Open);
                let whole: Vec<u32> = whole.map(|gpu| gpu.gpu).collect();
                let placement = Placement { gpus: whole, ..Placement::default() };
                let is_placed = gpus.is_empty() || !placement.gpus.is_empty();
                is_placed.then(|| VmRequest { placement: Some(placement), ..wanted.vm.clone() })
            }
            Err(error) => return Err(error),
        };
        match request {
            Some(request) => _ = api.ask(|api| api.put_vm(&VM.to_string(), &request))?,
            // The API stays, so that an operator can readmit a GPU.
            None => {
                ensure!(!wanted.ephemeral, "{NO_GPU}");
                eprintln!("sluice: {NO_GPU}: there is no VM");
            }
        }
        signals.ending().context("cannot read signals")
    }

    /// Waits until the unit lends memory, so that a slow machine does not refuse the program's first allocations; or for a signal
    /// that requests the end, which is returned. After the time limit the program starts anyway and gets the error itself.
    pub(crate) fn wait_lending(&self, directory: &Path, signals: &Signals) -> Result<Option<Signal>> {
        let api = Api::at(directory.join("api.sock"));
        let deadline = std::time::Instant::now() + LENDING;
        loop {
            let (ready, causes) = readiness(&api)?;
            if ready {
                return Ok(None);
            }
            if std::time::Instant::now() > deadline {
                let causes = causes.join("; ");
                eprintln!(
                    "sluice: no GPU lends memory after {LENDING:?} ({causes}); the program starts without"
                );
                return Ok(None);
            }
            let mut polled = [PollFd::new(&self.process, PollFlags::IN), PollFd::new(signals, PollFlags::IN)];
            match poll(&mut polled, Some(&AGAIN)) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return Err(error).context("cannot wait for sluiced"),
            }
            if let Some(signal) = signals.ending().context("cannot read signals")? {
                return Ok(Some(signal));
            }
        }
    }

    /// Waits until every process that holds the other end has ended.
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
                // A reset comes from a process that ended before it had read everything.
                Ok(0) => return Ok(true),
                Err(error) if error.kind() == ErrorKind::ConnectionReset => return Ok(true),
                Ok(_) => {}
                Err(error) => return Err(error).context("cannot wait for the backend"),
            }
        }
    }

    fn end(&mut self) -> Result<()> {
        self.lifeline.shutdown(Shutdown::Write).context("cannot close the lifeline")?;
        if !self.wait_gone(END)? {
            eprintln!("sluice: the backend does not end; killing it");
            let group = Pid::from_raw(self.daemon.id().cast_signed()).context("sluiced has no process id")?;
            // The group is sluiced and the launcher; the launcher's children die with it.
            match rustix::process::kill_process_group(group, Kill::KILL) {
                Ok(()) | Err(Errno::SRCH) => {}
                Err(error) => return Err(error).context("cannot kill the backend"),
            }
            ensure!(self.wait_gone(KILLED)?, "processes of the backend were killed but still exist");
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

#[cfg(test)]
mod tests {
    use super::*;

    // Promise: P66
    #[test]
    fn sluiced_that_hangs_is_not_waited_for_without_limit() {
        for line in [&b""[..], &supervision::READY[..3]] {
            let (lifeline, theirs) = UnixStream::pair().expect("a socket");
            let daemon = Command::new("sleep").arg("600").process_group(0).spawn().expect("a process");
            let process = descriptor(&daemon).expect("a process");
            let mut backend = Backend { daemon, process, lifeline };
            let signals = Signals::take().expect("signals");
            std::io::Write::write_all(&mut &theirs, line).expect("written");
            let result = backend.wait_ready(&signals, Duration::from_millis(20));
            let error = result.map(drop).expect_err("it is not ready");
            assert!(error.to_string().contains("is not ready after 20ms"), "{error:#}");
            backend.daemon.kill().expect("killed");
            drop(theirs);
        }
    }
}
