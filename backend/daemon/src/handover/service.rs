//! The connection to a launcher that is a service of its own.

use std::{
    fs::File,
    io,
    path::Path,
    time::{Duration, Instant},
};

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use sluice_messages::{
    control::{FromLauncher, LaunchRefusal, ToLauncher},
    launch::Fingerprint,
};
use tokio::time::sleep;

use super::running::{LaunchError, LauncherProcess, Running, ask};
use crate::channel::Channel;

/// Time limit for a launcher with another configuration to end, and for the next one to start.
const REPLACED: Duration = Duration::from_secs(20);
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
        // The last launcher may end while the connection waits for it, and its service may start again.
        let error = match attach_once(path, configuration).await {
            Err(
                error @ (LaunchError::Gone
                | LaunchError::NoService { .. }
                | LaunchError::Refused(LaunchRefusal::OtherConfiguration)),
            ) => error,
            result => return result,
        };
        if start.elapsed() >= REPLACED {
            return Err(match error {
                LaunchError::Refused(_) => LaunchError::OtherService(path.to_owned()),
                error => error,
            });
        }
        sleep(AGAIN).await;
    }
}

async fn attach_once(path: &Path, configuration: Fingerprint) -> Result<Attached, LaunchError> {
    let no_service = |error| LaunchError::NoService { path: path.to_owned(), error };
    let channel = connect(path).and_then(Channel::new).map_err(no_service)?;
    let (answer, descriptors) =
        match ask(&channel, ToLauncher::Attach { configuration: configuration.0 }).await {
            // The service manager has the socket, and no launcher runs.
            Err(LaunchError::Late) => return Err(no_service(io::ErrorKind::TimedOut.into())),
            answer => answer?,
        };
    let (FromLauncher::Attached { process, fresh }, Some(children)) =
        (answer, descriptors.into_iter().next())
    else {
        return Err(LaunchError::Malformed);
    };
    tracing::info!(process, "the launcher serves this daemon");
    let launcher = Running { process: LauncherProcess::Service(process), channel, log: None };
    Ok(Attached { launcher, children: children.into(), fresh })
}

fn connect(path: &Path) -> io::Result<std::os::fd::OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket)
}
