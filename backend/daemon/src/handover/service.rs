//! The connection to a launcher that is a service of its own.

use std::{
    fs::File,
    io,
    path::Path,
    time::{Duration, Instant},
};

use rustix::{
    io::Errno,
    net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType},
};
use sluice_messages::{
    control::{FromLauncher, ToLauncher},
    launch::Fingerprint,
};
use tokio::time::sleep;

use super::running::{LaunchError, LauncherProcess, Running};
use crate::channel::Channel;

/// Time limit for a launcher with another configuration to end, and for the next one to start.
const REPLACED: Duration = Duration::from_secs(10);
/// Time between two connections to a launcher that is replaced.
const AGAIN: Duration = Duration::from_millis(50);

/// A launcher that serves this daemon.
pub(super) struct Attached {
    pub(super) launcher: Running,
    /// The kernel's list of its children.
    pub(super) children: File,
    /// True if it was not told yet which workers continue.
    pub(super) fresh: bool,
}

/// Connects to a launcher of this configuration. One of another configuration ends, and the service manager starts the next one, which
/// reads the configuration again.
pub(super) async fn attach(path: &Path, configuration: Fingerprint) -> Result<Attached, LaunchError> {
    let start = Instant::now();
    loop {
        let channel = connect(path)
            .and_then(Channel::new)
            .map_err(|error| LaunchError::NoService { path: path.to_owned(), error })?;
        let launcher = Running { process: LauncherProcess::Service(0), channel, log: None };
        let attach = ToLauncher::Attach { configuration: configuration.0 };
        match launcher.ask(attach).await {
            Ok((FromLauncher::Attached { process, fresh }, descriptors)) => {
                let children = descriptors.into_iter().next().ok_or(LaunchError::Malformed)?.into();
                tracing::info!(process, "the launcher serves this daemon");
                let launcher = Running { process: LauncherProcess::Service(process), ..launcher };
                return Ok(Attached { launcher, children, fresh });
            }
            Ok(_) => return Err(LaunchError::Malformed),
            // The last launcher has ended while the connection waited for it.
            Err(LaunchError::Gone) if start.elapsed() < REPLACED => {}
            Err(LaunchError::Refused(Errno::STALE)) if start.elapsed() < REPLACED => {}
            Err(LaunchError::Refused(Errno::STALE)) => {
                return Err(LaunchError::OtherService(path.to_owned()));
            }
            Err(error) => return Err(error),
        }
        sleep(AGAIN).await;
    }
}

fn connect(path: &Path) -> io::Result<std::os::fd::OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket)
}
