//! A running launcher, and the exchange of requests and answers with it.

use std::{
    io,
    os::fd::OwnedFd,
    path::PathBuf,
    rc::Rc,
    time::{Duration, Instant},
};

use rustix::{fd::AsFd as _, io::Errno};
use sluice_messages::control::{FromLauncher, LaunchRefusal, ToLauncher};
use sluice_runtime::{
    child_log::{ChildLog, GuestLimits, NextRead},
    process::{Identity, kill},
};
use tokio::{
    io::unix::AsyncFd,
    process::Child,
    task::JoinHandle,
    time::{sleep, timeout},
};

use super::process::LaunchedProcess;
use crate::{
    async_fd::{gone, watch},
    channel::Channel,
    time_limit::answer_within,
};

/// Time limit for one answer of the launcher. A start takes milliseconds, but took seconds where 16 processes waited for each processor,
/// and a launcher that is dropped under a supervisor ends all that it started. Guests wait 30 s for a session.
pub(super) const ANSWER: Duration = Duration::from_secs(15);
/// Time limit for the launcher's exit once its socket is closed.
pub(super) const END: Duration = Duration::from_secs(2);

/// A process could not be started.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LaunchError {
    /// The launcher cannot be started.
    #[error("cannot start {program}: {error}")]
    NoLauncher { program: String, error: io::Error },
    /// The launcher is a service of its own, and does not run.
    #[error("cannot connect to the launcher at {}: {error}; `systemctl status sluice-launcher.socket` may show why", path.display())]
    NoService { path: PathBuf, error: io::Error },
    /// The launcher is a service of its own, with another configuration.
    #[error("the launcher at {} has another configuration or version than sluiced: both services must have the same options", .0.display())]
    OtherService(PathBuf),
    /// The launcher does not carry out the request.
    #[error("the launcher refuses: {0}")]
    Refused(LaunchRefusal),
    /// The kernel refused the launcher a part of the request.
    #[error("the kernel refuses the launcher a part of the request: {}", kernel_error(*.0))]
    Failed(Errno),
    /// Earlier devices of the VM have sent descriptors whose close takes long.
    #[error("descriptors of the VM's earlier devices are not closed yet")]
    Unclosed,
    /// The launcher ended instead of answering.
    #[error("the launcher has ended")]
    Gone,
    /// The launcher took too long.
    #[error("the launcher did not answer in {ANSWER:?}")]
    Late,
    /// The launcher's answer is malformed.
    #[error("the launcher's answer is malformed")]
    Malformed,
    /// The socket failed.
    #[error("the launcher's socket failed: {0}")]
    Socket(#[from] io::Error),
}

impl LaunchError {
    /// True if the same request may soon succeed. A launcher that is late may have started the process.
    pub(crate) fn may_pass(&self) -> bool {
        match self {
            LaunchError::NoService { .. } | LaunchError::Gone | LaunchError::Unclosed => true,
            LaunchError::Refused(refusal) => {
                matches!(refusal, LaunchRefusal::NotReaped | LaunchRefusal::TooMany | LaunchRefusal::NoUser)
            }
            LaunchError::Failed(errno) => *errno == Errno::AGAIN,
            _ => false,
        }
    }
}

/// An error of the kernel in the launcher, for people.
fn kernel_error(errno: Errno) -> String {
    let error = io::Error::from(errno);
    match errno {
        Errno::AGAIN => format!("{error}: the host or a cgroup has reached its limit of processes"),
        _ => error.to_string(),
    }
}

/// A process that the launcher has started for a request.
#[derive(Debug)]
pub(crate) struct Started {
    /// The process.
    pub(crate) process: Rc<LaunchedProcess>,
    /// The other end of its control socket.
    pub(crate) socket: OwnedFd,
}

/// A process that the launcher has found.
#[derive(Clone, Debug)]
pub(crate) struct Found {
    /// The process.
    pub(crate) process: Rc<LaunchedProcess>,
    /// True for a worker of a VM.
    pub(crate) worker: bool,
}

/// An answer of the launcher.
#[derive(Debug)]
pub(super) enum LauncherAnswer {
    Started(Started),
    Found(Found),
    Settled,
}

impl LauncherAnswer {
    /// Reads the answer to a request, with its descriptors.
    pub(super) fn read(
        request: ToLauncher,
        (answer, descriptors): (FromLauncher, Vec<OwnedFd>),
    ) -> Result<Self, LaunchError> {
        let mut descriptors = descriptors.into_iter();
        let mut next = || descriptors.next().ok_or(LaunchError::Malformed);
        match (request, answer) {
            (ToLauncher::Find { process }, FromLauncher::Found { started, worker, grouped }) => {
                let (pidfd, kill) = (next()?, grouped.then(&mut next).transpose()?);
                let process = Rc::new(LaunchedProcess::new(Identity { process, started }, pidfd, kill)?);
                Ok(Self::Found(Found { process, worker }))
            }
            (_, FromLauncher::Started { process, started, grouped }) => {
                let (socket, pidfd) = (next()?, next()?);
                let kill = grouped.then(&mut next).transpose()?;
                let process = Rc::new(LaunchedProcess::new(Identity { process, started }, pidfd, kill)?);
                Ok(Self::Started(Started { process, socket }))
            }
            (ToLauncher::RemoveSockets { .. } | ToLauncher::EndAll {}, FromLauncher::Settled {}) => {
                Ok(Self::Settled)
            }
            _ => Err(LaunchError::Malformed),
        }
    }
}

/// A launcher that serves this daemon.
#[derive(Debug)]
pub(super) struct Running {
    pub(super) process: LauncherProcess,
    pub(super) channel: Channel<FromLauncher, ToLauncher>,
    /// Forwards its log, until its end. A service writes its log itself.
    pub(super) log: Option<JoinHandle<()>>,
}

/// The launcher's process.
#[derive(Debug)]
pub(super) enum LauncherProcess {
    /// Started by this daemon.
    Own(Child),
    /// Started by an earlier daemon.
    Adopted(u32, AsyncFd<OwnedFd>),
    /// A service of its own, which this daemon cannot end.
    Service(u32),
}

impl LauncherProcess {
    pub(super) fn id(&self) -> Option<u32> {
        match self {
            Self::Own(child) => child.id(),
            Self::Adopted(process, _) | Self::Service(process) => Some(*process),
        }
    }

    pub(super) async fn end(&mut self) -> io::Result<()> {
        match self {
            Self::Own(child) => match timeout(END, child.wait()).await {
                Ok(ended) => ended.map(drop),
                Err(_) => {
                    tracing::error!("the launcher does not end; killing it");
                    child.kill().await
                }
            },
            Self::Adopted(_, pidfd) => {
                if timeout(END, gone(pidfd)).await.is_err() {
                    tracing::error!("the launcher does not end; killing it");
                    kill(pidfd.as_fd());
                }
                Ok(())
            }
            Self::Service(_) => Ok(()),
        }
    }
}

impl Drop for LauncherProcess {
    /// A launcher that is given up must not answer later.
    fn drop(&mut self) {
        if let Self::Adopted(_, pidfd) = self {
            kill(pidfd.as_fd());
        }
    }
}

/// Forwards the log of a launcher, until its end. Lines that this daemon does not read wait for the next.
pub(super) async fn follow(pipe: OwnedFd, launcher: u32) {
    let follow = async {
        let ready = watch(pipe.try_clone()?)?;
        let mut log = ChildLog::of_launcher(pipe, launcher);
        // The launcher limits its children's lines.
        let mut guests = GuestLimits::new(Instant::now());
        loop {
            let mut guard = ready.readable().await?;
            let now = Instant::now();
            match log.read(&mut guests, now) {
                NextRead::Wait => guard.clear_ready(),
                NextRead::More => tokio::task::yield_now().await,
                NextRead::At(when) => sleep(when.saturating_duration_since(now)).await,
                NextRead::End => return Ok::<(), io::Error>(()),
            }
        }
    };
    if let Err(error) = follow.await {
        tracing::error!(%error, "cannot read the launcher's log");
    }
}

impl Running {
    /// Sends a request and returns the answer. A refusal is an error.
    pub(super) async fn ask(&self, request: ToLauncher) -> Result<(FromLauncher, Vec<OwnedFd>), LaunchError> {
        ask(&self.channel, request).await
    }
}

/// Sends a request to a launcher and returns the answer. A refusal is an error.
pub(super) async fn ask(
    channel: &Channel<FromLauncher, ToLauncher>,
    request: ToLauncher,
) -> Result<(FromLauncher, Vec<OwnedFd>), LaunchError> {
    let exchange = async {
        match channel.send(&request, &[]).await {
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => return Err(LaunchError::Gone),
            result => result?,
        }
        channel.receive().await?.ok_or(LaunchError::Gone)
    };
    match answer_within(ANSWER, exchange).await.unwrap_or(Err(LaunchError::Late))? {
        (FromLauncher::Refused { refusal }, _) => Err(LaunchError::Refused(refusal)),
        (FromLauncher::Failed { error }, _) => {
            Err(LaunchError::Failed(Errno::from_raw_os_error(error.cast_signed())))
        }
        answer => Ok(answer),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    // Promise: F119
    #[test]
    fn device_is_requested_again_only_after_failures_that_may_pass() {
        assert!(LaunchError::Unclosed.may_pass() && LaunchError::Gone.may_pass());
        for refusal in [LaunchRefusal::NotReaped, LaunchRefusal::TooMany, LaunchRefusal::NoUser] {
            assert!(LaunchError::Refused(refusal).may_pass());
        }
        assert!(LaunchError::Failed(Errno::AGAIN).may_pass());
        assert!(!LaunchError::Refused(LaunchRefusal::OutOfRange).may_pass());
        assert!(!LaunchError::Failed(Errno::NOENT).may_pass() && !LaunchError::Malformed.may_pass());
    }

    // Promise: F121
    #[test]
    fn refusals_and_errors_of_a_launcher_differ_in_their_words() {
        let words = |error: LaunchError| error.to_string();
        let refused = |refusal| words(LaunchError::Refused(refusal));
        let errors = [Errno::AGAIN, Errno::NOENT].map(|errno| words(LaunchError::Failed(errno)));
        for (text, part) in [
            (refused(LaunchRefusal::NotReaped), "a debugger holds it"),
            (refused(LaunchRefusal::TooMany), "too many processes of this kind"),
            (refused(LaunchRefusal::NoUser), "worker-uids"),
            (errors[0].clone(), "limit of processes"),
        ] {
            assert!(text.contains(part), "{text}");
        }
        let all: Vec<_> = (1..).map_while(LaunchRefusal::from_number).map(refused).chain(errors).collect();
        let different: BTreeSet<_> = all.iter().collect();
        assert_eq!(different.len(), all.len(), "{all:?}");
    }
}
