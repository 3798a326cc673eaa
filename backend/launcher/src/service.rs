//! The launcher as a service of its own, to which `sluiced` connects.
//!
//! `sluiced` may be hostile then: no message and no unread answer of it stops the one thread of the launcher.

use std::{
    fs,
    os::{
        fd::OwnedFd,
        unix::fs::{MetadataExt as _, PermissionsExt as _},
    },
    path::Path,
    time::{Duration, Instant},
};

use rustix::{
    event::{
        Timespec,
        epoll::{self, EventData, EventFlags},
    },
    fd::AsFd as _,
    io::Errno,
    net::{SocketFlags, accept_with},
};
use sd_notify::NotifyState;
use sluice_messages::{
    channel::Channel,
    control::{FromLauncher, LaunchRefusal, ToLauncher},
    launch::Fingerprint,
};

use super::{
    Launcher,
    children::CONTROL,
    error::{LauncherError, RequestError},
};

/// The socket of the service, and the state of its present client.
#[derive(Debug)]
pub(super) struct Service {
    listener: OwnedFd,
    /// The fingerprint of this launcher's configuration.
    configuration: Fingerprint,
    /// True if the present client has the same configuration.
    attached: bool,
    /// True once a client had another one: the next launcher reads it again.
    over: bool,
    watchdog: Option<Watchdog>,
}

/// The reports to the service manager, which ends a launcher that no longer reports to it.
#[derive(Debug)]
struct Watchdog {
    period: Duration,
    due: Instant,
}

impl Service {
    /// Serves on a listening socket.
    pub(super) fn new(
        listener: OwnedFd,
        configuration: Fingerprint,
        socket_dir: &Path,
    ) -> Result<Self, LauncherError> {
        let set_up = LauncherError::SetUp;
        // The launcher sets owner and mode of its sockets by their paths, which no other user may replace.
        let found = fs::metadata(socket_dir).map_err(set_up)?;
        let mode = found.permissions().mode();
        let is_own = found.uid() == rustix::process::geteuid().as_raw();
        if !is_own || (mode & 0o022 != 0 && mode & 0o1000 == 0) {
            return Err(LauncherError::SocketDirectory(socket_dir.to_owned()));
        }
        // A client can go again between the event and the call.
        rustix::io::ioctl_fionbio(&listener, true).map_err(|error| set_up(error.into()))?;
        let limit = sd_notify::watchdog_enabled().filter(|limit| *limit > Duration::ZERO);
        let watchdog = limit.map(|limit| Watchdog { period: limit / 3, due: Instant::now() });
        Ok(Self { listener, configuration, attached: false, over: false, watchdog })
    }

    /// The listening socket.
    pub(super) const fn listener(&self) -> &OwnedFd {
        &self.listener
    }

    /// Reports to the service manager that this process lives, if it is time. Returns the time until the next report, or `other` if
    /// that is shorter.
    pub(super) fn live(&mut self, other: Option<Timespec>) -> Option<Timespec> {
        let Some(Watchdog { period, due }) = &mut self.watchdog else { return other };
        let now = Instant::now();
        if *due <= now {
            *due = now + *period;
            if let Err(error) = sd_notify::notify(&[NotifyState::Watchdog]) {
                tracing::warn!(%error, "cannot notify the service manager");
            }
        }
        let wait = Timespec::try_from(due.saturating_duration_since(now)).ok();
        match (wait, other) {
            (Some(wait), Some(other)) => Some(wait.min(other)),
            (wait, other) => wait.or(other),
        }
    }
}

impl Launcher {
    /// True if further clients may connect.
    pub(super) fn serves(&self) -> bool {
        self.service.as_ref().is_some_and(|service| !service.over)
    }

    /// Takes the connection of the next `sluiced`, in place of the last one's.
    pub(super) fn accept(&mut self) -> Result<(), LauncherError> {
        let Some(service) = &mut self.service else { return Ok(()) };
        // A client that does not read its answers must not block this thread.
        let control = match accept_with(&service.listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
            Ok(control) => control,
            Err(Errno::INTR | Errno::AGAIN | Errno::CONNABORTED) => return Ok(()),
            Err(error) => return Err(LauncherError::Receive(error)),
        };
        service.attached = false;
        self.hang_up();
        epoll::add(&self.events, &control, EventData::new_u64(CONTROL), EventFlags::IN)
            .map_err(LauncherError::Receive)?;
        self.control = Some(Channel::new(control));
        Ok(())
    }

    /// Closes the connection to `sluiced`. Without it no process is needed ahead.
    pub(super) fn hang_up(&mut self) {
        if let Some(control) = self.control.take() {
            self.leave(control.as_fd());
            self.end_ready();
        }
    }

    /// Closes the connection to a client that breaks the rules of a service. One that has started the launcher stays.
    pub(super) fn hang_up_on_client(&mut self) {
        if self.service.is_some() {
            self.hang_up();
        }
    }

    /// True if a client of a service may make a request now: its first message names its configuration, and it starts no process before it
    /// has named the workers of an earlier launcher that continue, whose users and cgroups are in use.
    pub(super) fn admits(&self, request: &ToLauncher) -> bool {
        let Some(service) = &self.service else { return true };
        match request {
            ToLauncher::Attach { .. } => true,
            ToLauncher::KeepWorker { .. } | ToLauncher::Sweep {} => service.attached && !self.swept,
            ToLauncher::Find { .. } | ToLauncher::EndAll {} => service.attached,
            _ => service.attached && self.swept,
        }
    }

    /// Answers the first message of a client, with the kernel's list of the launcher's children. The service is over if the client has
    /// another configuration.
    pub(super) fn attach(
        &mut self,
        configuration: Fingerprint,
    ) -> Result<(FromLauncher, Vec<OwnedFd>), RequestError> {
        let service = self.service.as_mut().ok_or(LaunchRefusal::BadRequest)?;
        if service.configuration != configuration {
            tracing::info!(
                "sluiced has another configuration than this launcher, which ends: the next one reads it again"
            );
            service.over = true;
            return Err(LaunchRefusal::OtherConfiguration.into());
        }
        service.attached = true;
        let process = std::process::id();
        let children = fs::File::open(format!("/proc/self/task/{process}/children")).or_else(|error| {
            tracing::warn!(%error, "the kernel lists no children; a worker that sluiced does not know is not found");
            fs::File::open("/dev/null")
        })?;
        Ok((FromLauncher::Attached { process, fresh: !self.swept }, vec![children.into()]))
    }

    /// True if the service is over, and its last answer sent.
    pub(super) fn is_over(&self) -> bool {
        self.service.as_ref().is_some_and(|service| service.over)
    }
}
