//! The launcher as `sluiced` sees it: started when needed, asked one thing at a time.
//!
//! An answer belongs to a request by its order alone. A launcher that does not answer in time, or not sensibly, is
//! therefore killed, and a new one started with the next request.

use std::{io, os::fd::OwnedFd, process::Stdio, rc::Rc, time::Duration};

use rustix::{fd::AsFd as _, io::Errno};
use sluice_protocol::{
    control::{self, FromLauncher, ToLauncher},
    limits,
};
use sluice_shared_memory::socket;
use tokio::{
    io::unix::AsyncFd,
    process::{Child, Command},
    sync::Mutex,
    time::timeout,
};

use crate::{
    channel::Channel,
    configuration::{Configuration, SocketMode},
    keeper::{Keeper, VARIABLES},
    process::{Identity, gone, kill},
    state::adoption::{Adoption, LauncherRecord},
    watched::watch,
};

/// What its socket is kept as.
const NAME: &str = "launcher";
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
    keeper: Rc<Keeper>,
    adoption: Rc<Adoption>,
    running: Mutex<Option<Running>>,
}

#[derive(Debug)]
struct Running {
    process: Process,
    channel: Channel,
}

/// The launcher's process.
#[derive(Debug)]
enum Process {
    /// Started by this daemon.
    Own(Child),
    /// Started by one before.
    Adopted(u32, AsyncFd<OwnedFd>),
}

impl Process {
    fn id(&self) -> Option<u32> {
        match self {
            Self::Own(child) => child.id(),
            Self::Adopted(process, _) => Some(*process),
        }
    }

    async fn end(&mut self) -> io::Result<()> {
        match self {
            Self::Own(child) => match timeout(END, child.wait()).await {
                Ok(ended) => ended.map(drop),
                Err(_) => {
                    tracing::error!("the launcher does not end: it is killed");
                    child.kill().await
                }
            },
            Self::Adopted(_, pidfd) => {
                if timeout(END, gone(pidfd)).await.is_err() {
                    tracing::error!("the launcher does not end: it is killed");
                    kill(pidfd.as_fd());
                }
                Ok(())
            }
        }
    }
}

impl Drop for Process {
    /// A launcher that is given up must not answer later.
    fn drop(&mut self) {
        if let Self::Adopted(_, pidfd) = self {
            kill(pidfd.as_fd());
        }
    }
}

impl Launching {
    pub(crate) fn new(
        configuration: Rc<Configuration>,
        lifeline: Option<OwnedFd>,
        keeper: Rc<Keeper>,
        adoption: Rc<Adoption>,
    ) -> Self {
        Self { configuration, lifeline, keeper, adoption, running: Mutex::new(None) }
    }

    /// Adopts the launcher that the daemon before has left, if it may start what this one would have it start. What it answered
    /// to a daemon that is gone is for nobody: processes that nobody knows are ended.
    pub(crate) async fn adopt(&self) -> bool {
        let record = self.adoption.before().launcher.clone();
        let (Some(record), Some(socket)) = (record, self.keeper.take(NAME)) else { return false };
        if record.arguments != self.arguments() {
            tracing::warn!(
                "the launcher of an earlier sluiced is of another version, or may start other things: nothing is adopted"
            );
            return false;
        }
        let adopt = async {
            let pidfd = record.process.open().ok_or_else(|| io::Error::other("it has ended"))?;
            let running = Running {
                process: Process::Adopted(record.process.process, watch(pidfd)?),
                channel: Channel::new(socket)?,
            };
            running.channel.send(&ToLauncher::Settle {}.encode(), &[]).await?;
            loop {
                let Some((bytes, descriptors)) = running.channel.receive().await? else {
                    return Err(io::Error::other("it has ended"));
                };
                match FromLauncher::decode(&bytes) {
                    Ok(FromLauncher::Settled {}) => return Ok(running),
                    // Its socket first, its pidfd second.
                    Ok(FromLauncher::Started { .. }) => {
                        descriptors.get(1).into_iter().for_each(|pidfd| kill(pidfd.as_fd()))
                    }
                    Ok(FromLauncher::Failed { .. }) => {}
                    Err(error) => return Err(io::Error::other(error)),
                }
            }
        };
        match timeout(ANSWER, adopt).await.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into())) {
            Ok(launcher) => {
                tracing::info!("launcher adopted: process {}", record.process.process);
                self.adoption.note(|all| all.launcher = Some(record));
                *self.running.lock().await = Some(launcher);
                true
            }
            Err(error) => {
                tracing::error!("the launcher of an earlier sluiced cannot be adopted: {error}");
                false
            }
        }
    }

    /// Who keeps sockets for the next daemon.
    pub(crate) fn keeper(&self) -> &Keeper {
        &self.keeper
    }

    /// Whom they lead to.
    pub(crate) fn adoption(&self) -> &Adoption {
        &self.adoption
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
            self.keeper.forget(NAME);
            // Whoever keeps it, too, has nothing left of it.
            channel.shut();
            drop(channel);
            if let Err(error) = process.end().await {
                tracing::error!("cannot end the launcher: {error}");
            }
        }
    }

    /// What the launcher may start.
    fn arguments(&self) -> Vec<String> {
        let configuration = &self.configuration;
        let path = |path: &std::path::Path| path.display().to_string();
        let program = |name: &str| path(&configuration.libexec.join(name));
        let mut arguments = vec!["--device".to_owned(), program("sluice-device")];
        arguments.extend(["--worker".to_owned(), program("sluice-worker")]);
        arguments.extend(["--arbiter".to_owned(), program("sluice-arbiter")]);
        arguments.extend(["--units".to_owned(), limits::UNITS.to_string()]);
        // What it and all that it starts speaks, so that one that speaks otherwise is neither used nor adopted.
        arguments.extend(["--messages".to_owned(), control::VERSION.to_string()]);
        arguments.extend(["--inventory".to_owned(), program("sluice-inventory")]);
        if let Some(nvml) = &configuration.nvml {
            arguments.extend(["--nvml".to_owned(), path(nvml)]);
        }
        arguments.extend(["--socket-dir".to_owned(), path(&configuration.runtime_dir)]);
        if let Some(gid) = configuration.vm_socket_gid {
            arguments.extend(["--socket-gid".to_owned(), gid.to_string()]);
        }
        if configuration.vm_socket_mode != SocketMode::default() {
            arguments.extend(["--socket-mode".to_owned(), configuration.vm_socket_mode.to_string()]);
        }
        if configuration.trust_vmm_memory {
            arguments.push("--trust-vmm-memory".to_owned());
        }
        for vm in &configuration.vms {
            arguments.extend(["--vm".to_owned(), vm.to_string()]);
        }
        if let Some(numbers) = configuration.vm_numbers {
            arguments.extend(["--vm-numbers".to_owned(), numbers.to_string()]);
        }
        if let Some(uids) = configuration.worker_uids {
            arguments.extend(["--worker-uids".to_owned(), uids.to_string()]);
        }
        if let Some(cgroup) = &configuration.cgroup {
            arguments.extend(["--cgroup".to_owned(), path(cgroup)]);
        }
        arguments
    }

    fn launch(&self) -> Result<Running, LaunchError> {
        let (ours, theirs) = socket::pair().map_err(io::Error::from)?;
        let program = self.configuration.libexec.join("sluice-launcher");
        let arguments = self.arguments();
        let mut command = Command::new(&program);
        command.args(&arguments);
        VARIABLES.iter().for_each(|name| _ = command.env_remove(name));
        command.stdin(Stdio::from(theirs)).stdout(Stdio::null());
        if let Some(lifeline) = &self.lifeline {
            command.arg("--supervised").stdout(Stdio::from(lifeline.try_clone()?));
        }
        // A launcher that is given up must not answer later. Its children live on, unless a supervisor wants otherwise.
        command.kill_on_drop(true);
        let process = command
            .spawn()
            .map_err(|error| LaunchError::NoLauncher { program: program.display().to_string(), error })?;
        self.keeper.keep(NAME, ours.as_fd());
        if let Some(process) = process.id().and_then(Identity::of) {
            self.adoption.note(|all| all.launcher = Some(LauncherRecord { process, arguments }));
        }
        Ok(Running { process: Process::Own(process), channel: Channel::new(ours)? })
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
