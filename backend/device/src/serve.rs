//! Connections: one for a VMM, any number one after the other and at once for processes.

#![expect(unsafe_code, reason = "closing a descriptor that a crate has given up as a number")]

use crate::{
    device::Device,
    endpoint::{Endpoint, Mode, POLLER},
    limiter::Limiter,
    link::Link,
    memory::{Memory, Policy},
    vring,
};
use rustix::fd::{FromRawFd, OwnedFd};
use std::{
    os::unix::net::UnixListener,
    sync::{Arc, Condvar, Mutex, PoisonError},
    time::Duration,
};
use vhost::vhost_user::Listener;
use vhost_user_backend::VhostUserDaemon;
use vm_memory::GuestMemoryMmap;
use vmm_sys_util::epoll::EventSet;

/// Connections at once. Each costs three threads that sleep.
const CONNECTIONS: usize = 256;

/// How connections are served.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Processes connect, any number of them; otherwise a VMM does, once.
    pub direct: bool,
    /// What is offered.
    pub mode: Mode,
    /// Scanouts, all disabled.
    pub scanouts: u32,
    /// Which memory is accepted.
    pub policy: Policy,
}

/// Why serving ends.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// Out of descriptors or threads.
    #[error("a device cannot be made: {0}")]
    Device(#[from] rustix::io::Errno),
    /// The vhost-user library failed.
    #[error("vhost-user: {0}")]
    VhostUser(String),
    /// A thread cannot be started.
    #[error("a thread cannot be started: {0}")]
    Thread(std::io::Error),
    /// The poller cannot be watched.
    #[error("the loop cannot watch the poller: {0}")]
    Watch(std::io::Error),
}

type Daemon = VhostUserDaemon<Arc<Endpoint>>;

/// Serves a listener: until its one connection is over, or for ever.
///
/// # Errors
/// [`ServeError`]; a process' connection that fails is logged, not returned.
pub fn serve(listener: UnixListener, options: Options, link: &Arc<Link>) -> Result<(), ServeError> {
    let mut listener = Listener::from(listener);
    let open = Arc::new((Mutex::new(0usize), Condvar::new()));
    if options.direct {
        // A VMM is trusted with its own device; processes share one.
        let calls = std::thread::Builder::new().name("calls".into());
        calls.spawn(|| vring::release()).map_err(ServeError::Thread)?;
    }
    loop {
        let (mut daemon, endpoint) = match daemon(options, link) {
            Ok(made) => made,
            Err(error) if options.direct => {
                tracing::error!(%error, "waiting");
                std::thread::sleep(Duration::from_millis(100));
                continue;
            }
            Err(error) => return Err(error),
        };
        while let Err(error) = daemon.start(&mut listener) {
            tracing::error!(%error, "accept");
            std::thread::sleep(Duration::from_millis(100));
        }
        if !options.direct {
            return wait(daemon, &endpoint);
        }
        let (count, changed) = &*open;
        let mut count = count.lock().unwrap_or_else(PoisonError::into_inner);
        *count = count.saturating_add(1);
        while *count >= CONNECTIONS {
            count = changed.wait(count).unwrap_or_else(PoisonError::into_inner);
        }
        drop(count);
        let finished = Finished(Arc::clone(&open));
        let spawned = std::thread::Builder::new().name("connection".into()).spawn(move || {
            let _finished = finished;
            if let Err(error) = wait(daemon, &endpoint) {
                static LINES: Limiter = Limiter::new();
                LINES.run(|suppressed| tracing::info!(%error, suppressed, "connection"));
            }
        });
        if let Err(error) = spawned {
            tracing::error!(%error, "a connection cannot be served");
        }
    }
}

/// Counts a connection as finished.
struct Finished(Arc<(Mutex<usize>, Condvar)>);

impl Drop for Finished {
    fn drop(&mut self) {
        let (count, changed) = &*self.0;
        let mut count = count.lock().unwrap_or_else(PoisonError::into_inner);
        *count = count.saturating_sub(1);
        changed.notify_one();
    }
}

fn daemon(options: Options, link: &Arc<Link>) -> Result<(Daemon, Arc<Endpoint>), ServeError> {
    let device = Device::new(options.policy, Arc::clone(link))?;
    let endpoint = Arc::new(Endpoint::new(device, options.mode, options.scanouts));
    let memory = Memory::new(GuestMemoryMmap::new());
    let daemon = VhostUserDaemon::new("vhost-user".into(), Arc::clone(&endpoint), memory)
        .map_err(|error| ServeError::VhostUser(error.to_string()))?;
    for handler in daemon.get_epoll_handlers() {
        handler
            .register_listener(endpoint.poller(), EventSet::IN, u64::from(POLLER))
            .map_err(ServeError::Watch)?;
    }
    Ok((daemon, endpoint))
}

/// Waits for the end of a connection and clears up after it.
fn wait(mut daemon: Daemon, endpoint: &Endpoint) -> Result<(), ServeError> {
    use vhost::vhost_user::Error;
    let result = match daemon.wait() {
        // How front-ends leave.
        Ok(())
        | Err(vhost_user_backend::Error::HandleRequest(Error::Disconnected | Error::PartialMessage)) => {
            Ok(())
        }
        Err(error) => Err(ServeError::VhostUser(error.to_string())),
    };
    let exit = endpoint.disconnect();
    // Waits for the loop's thread.
    drop(daemon);
    if let Some(exit) = exit {
        // SAFETY: the loop took the descriptor as a number, which nothing owns; its thread has ended and its epoll is
        // closed, so nothing uses it either.
        drop(unsafe { OwnedFd::from_raw_fd(exit) });
    }
    result
}
