//! The launcher as `sluiced` sees it: started when needed, asked one thing at a time.
//!
//! An answer belongs to a request by its order alone. A launcher that does not answer in time, or not sensibly, is
//! therefore killed, and a new one started with the next request.

use std::{io, os::fd::OwnedFd, process::Stdio, rc::Rc, time::Duration};

use rustix::io::Errno;
use sluice_protocol::{
    control::{FromLauncher, ToLauncher},
    limits,
};
use sluice_shared_memory::socket;
use tokio::{
    process::{Child, Command},
    sync::Mutex,
    time::timeout,
};

use crate::{channel::Channel, configuration::Configuration};

/// How long a launcher may take for one start.
const ANSWER: Duration = Duration::from_secs(5);
/// How long it may take to end once its socket is closed.
const END: Duration = Duration::from_secs(2);

/// A process could not be started.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LaunchError {
    /// There is no launcher.
    #[error("cannot start {program}: {error}")]
    NoLauncher { program: String, error: io::Error },
    /// The launcher tried.
    #[error("the launcher says: {}", io::Error::from(*.0))]
    Refused(Errno),
    /// It ended instead of answering.
    #[error("the launcher has ended")]
    Gone,
    /// It took too long.
    #[error("the launcher did not answer in {ANSWER:?}")]
    Late,
    /// Its answer is none.
    #[error("the launcher's answer makes no sense")]
    Malformed,
    /// The socket failed.
    #[error("cannot talk to the launcher: {0}")]
    Socket(#[from] io::Error),
}

/// A process the launcher started.
#[derive(Debug)]
pub(crate) struct Started {
    /// Its process id, for people.
    pub(crate) process: u32,
    /// The other end of its control socket.
    pub(crate) socket: OwnedFd,
    /// The process.
    pub(crate) pidfd: OwnedFd,
}

/// The launcher.
#[derive(Debug)]
pub(crate) struct Launching {
    configuration: Rc<Configuration>,
    /// The supervisor's socket, for the launcher to watch.
    lifeline: Option<OwnedFd>,
    running: Mutex<Option<Running>>,
}

#[derive(Debug)]
struct Running {
    process: Child,
    channel: Channel,
}

impl Launching {
    pub(crate) fn new(configuration: Rc<Configuration>, lifeline: Option<OwnedFd>) -> Self {
        Self { configuration, lifeline, running: Mutex::new(None) }
    }

    /// Has a process started.
    pub(crate) async fn start(&self, request: ToLauncher) -> Result<Started, LaunchError> {
        let mut running = self.running.lock().await;
        // Taken out while it is asked: should this future be dropped in between, the launcher goes with it.
        let (launcher, known) = match running.take() {
            Some(launcher) => (launcher, true),
            None => (self.launch()?, false),
        };
        let (launcher, answer) = match launcher.ask(request).await {
            // It has died since the last request, which says nothing about this one.
            Err(LaunchError::Gone) if known => {
                tracing::error!("the launcher has died and is started again");
                let launcher = self.launch()?;
                let answer = launcher.ask(request).await;
                (launcher, answer)
            }
            answer => (launcher, answer),
        };
        match &answer {
            Ok(_) | Err(LaunchError::Refused(_)) => *running = Some(launcher),
            Err(error) => tracing::error!("the launcher is given up: {error}"),
        }
        answer
    }

    /// Process id of the launcher, if one runs and is not busy.
    pub(crate) fn process(&self) -> Option<u32> {
        self.running.try_lock().ok()?.as_ref()?.process.id()
    }

    /// Ends the launcher.
    pub(crate) async fn end(&self) {
        if let Some(Running { mut process, channel }) = self.running.lock().await.take() {
            drop(channel);
            if timeout(END, process.wait()).await.is_err() {
                tracing::error!("the launcher does not end: it is killed");
                if let Err(error) = process.kill().await {
                    tracing::error!("cannot kill the launcher: {error}");
                }
            }
        }
    }

    fn launch(&self) -> Result<Running, LaunchError> {
        let configuration = &self.configuration;
        let (ours, theirs) = socket::pair().map_err(io::Error::from)?;
        let program = configuration.libexec.join("sluice-launcher");
        let mut command = Command::new(&program);
        command.arg("--device").arg(configuration.libexec.join("sluice-device"));
        command.arg("--worker").arg(configuration.libexec.join("sluice-worker"));
        command.arg("--arbiter").arg(configuration.libexec.join("sluice-arbiter"));
        command.arg("--units").arg(limits::DEVICES.to_string());
        command.arg("--inventory").arg(configuration.libexec.join("sluice-inventory"));
        if let Some(nvml) = &configuration.nvml {
            command.arg("--nvml").arg(nvml);
        }
        command.arg("--socket-dir").arg(&configuration.runtime_dir);
        for vm in &configuration.vms {
            command.arg("--vm").arg(vm.to_string());
        }
        if let Some(numbers) = configuration.vm_numbers {
            command.arg("--vm-numbers").arg(numbers.to_string());
        }
        if let Some(uids) = configuration.worker_uids {
            command.arg("--worker-uids").arg(uids.to_string());
        }
        if let Some(cgroup) = &configuration.cgroup {
            command.arg("--cgroup").arg(cgroup);
        }
        command.stdin(Stdio::from(theirs)).stdout(Stdio::null());
        if let Some(lifeline) = &self.lifeline {
            command.arg("--supervised").stdout(Stdio::from(lifeline.try_clone()?));
        }
        // A launcher that is given up must not answer later. Its children live on, unless a supervisor wants otherwise.
        command.kill_on_drop(true);
        let process = command
            .spawn()
            .map_err(|error| LaunchError::NoLauncher { program: program.display().to_string(), error })?;
        Ok(Running { process, channel: Channel::new(ours)? })
    }
}

impl Running {
    async fn ask(&self, request: ToLauncher) -> Result<Started, LaunchError> {
        timeout(ANSWER, self.exchange(request)).await.unwrap_or(Err(LaunchError::Late))
    }

    async fn exchange(&self, request: ToLauncher) -> Result<Started, LaunchError> {
        match self.channel.send(&request.encode(), &[]).await {
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => return Err(LaunchError::Gone),
            result => result?,
        }
        let Some((bytes, descriptors)) = self.channel.receive().await? else {
            return Err(LaunchError::Gone);
        };
        let answer = FromLauncher::decode(&bytes).map_err(|_| LaunchError::Malformed)?;
        match (answer, <[OwnedFd; 2]>::try_from(descriptors)) {
            (FromLauncher::Started { process }, Ok([socket, pidfd])) => {
                Ok(Started { process, socket, pidfd })
            }
            (FromLauncher::Failed { error }, Err(descriptors)) if descriptors.is_empty() => {
                Err(LaunchError::Refused(Errno::from_raw_os_error(error.cast_signed())))
            }
            _ => Err(LaunchError::Malformed),
        }
    }
}
