//! Connections: one for a VMM; for processes any number, in sequence and in parallel.

use crate::{
    device::Device,
    endpoint::{DeviceMode, Endpoint},
    frontend::{self, FrontendError},
    link::Link,
    memory::MemoryPolicy,
    users::{ResourceKind, TakenShare, UserShare, Users},
    vring,
};
use rustix::net::sockopt::socket_peercred;
use sluice_messages::control;
use sluice_protocol::limits;
use sluice_runtime::limited;
use std::{
    os::unix::net::{UnixListener, UnixStream},
    sync::{Arc, Condvar, Mutex, PoisonError},
    time::{Duration, Instant},
};

/// Longest wait of a connection for another of the same user to end: one that has just ended is being cleaned up.
const ARRIVAL_TIMEOUT: Duration = Duration::from_secs(2);
/// Interval of the checks in this wait.
const ARRIVAL_LOOK: Duration = Duration::from_millis(5);

/// The settings for serving connections.
#[derive(Clone, Copy, Debug)]
pub struct ServeOptions {
    /// True if any number of processes connect; otherwise a VMM does, once.
    pub direct: bool,
    /// The features to offer.
    pub mode: DeviceMode,
    /// Number of scanouts, all disabled.
    pub scanouts: u32,
    /// The kinds of memory to accept.
    pub policy: MemoryPolicy,
    /// Bytes of the only arena of each session; `None` if arenas grow.
    pub fixed_arena: Option<u64>,
}

/// The reason why serving ends.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// There are no descriptors or threads left.
    #[error("cannot create a device: {0}")]
    Device(#[from] rustix::io::Errno),
    /// The connection failed.
    #[error(transparent)]
    Frontend(#[from] FrontendError),
    /// The thread of a connection cannot be started.
    #[error("cannot start a thread: {0}")]
    Thread(std::io::Error),
}

/// Serves a listener until its one connection ends, or for ever.
///
/// # Errors
/// [`ServeError`]; errors of a process's connection are logged, not returned.
pub fn serve(
    listener: &UnixListener,
    options: ServeOptions,
    link: &Arc<Link>,
    users: &Users,
) -> Result<(), ServeError> {
    if !options.direct {
        let endpoint = endpoint(options, link, None)?;
        let stream = accept(listener);
        let _front_end = link.front_end();
        return Ok(frontend::serve(stream, &endpoint)?);
    }
    let open = Arc::new((Mutex::new(0usize), Condvar::new()));
    // A VMM is trusted with its own device; processes share one.
    let calls = std::thread::Builder::new().name("calls".into());
    calls.spawn(|| vring::release()).map_err(ServeError::Thread)?;
    loop {
        let stream = accept(listener);
        let front_end = link.front_end();
        let user = user(&stream, users);
        let Some(place) = UserPlace::new(&user) else {
            limited!(warn, "a connection is refused: its user has too many connections");
            continue;
        };
        // Each connection has at most two threads, each with a stack; the count here bounds them.
        let (count, changed) = &*open;
        let mut count = count.lock().unwrap_or_else(PoisonError::into_inner);
        *count = count.saturating_add(1);
        while *count >= limits::DIRECT_CONNECTIONS {
            count = changed.wait(count).unwrap_or_else(PoisonError::into_inner);
        }
        drop(count);
        let finished = Finished(Arc::clone(&open));
        let link = Arc::clone(link);
        let spawned = std::thread::Builder::new().name("connection".into()).spawn(move || {
            let (_finished, _front_end) = (finished, front_end);
            let served = place.served(&user).map(|_served| {
                let endpoint = endpoint(options, &link, Some(user))?;
                Ok::<_, ServeError>(frontend::serve(stream, &endpoint)?)
            });
            match served {
                Some(Ok(())) => {}
                Some(Err(error)) => limited!(info, %error, "a connection has ended with an error"),
                None => limited!(warn, "a connection is refused: its user has too many connections"),
            }
        });
        if let Err(error) = spawned {
            tracing::error!(%error, "cannot serve a connection");
        }
    }
}

/// The share of the user at the other end. All connections for which the kernel reports no user are one user.
pub(crate) fn user(stream: &UnixStream, users: &Users) -> Arc<UserShare> {
    users.share(socket_peercred(stream).map_or(control::NO_USER, |peer| peer.uid.as_raw()))
}

/// A connection's place in its user's share.
enum UserPlace {
    /// The connection is served.
    Served(TakenShare),
    /// The connection waits for another to end.
    Waits(TakenShare),
}

impl UserPlace {
    fn new(user: &Arc<UserShare>) -> Option<UserPlace> {
        let served = user.take(ResourceKind::Connections).map(UserPlace::Served);
        served.or_else(|| user.take(ResourceKind::Arrivals).map(UserPlace::Waits))
    }

    /// Waits until the connection may be served.
    fn served(self, user: &Arc<UserShare>) -> Option<TakenShare> {
        let _waits = match self {
            UserPlace::Served(taken) => return Some(taken),
            UserPlace::Waits(waits) => waits,
        };
        let began = Instant::now();
        while began.elapsed() < ARRIVAL_TIMEOUT {
            if let Some(taken) = user.take(ResourceKind::Connections) {
                return Some(taken);
            }
            std::thread::park_timeout(ARRIVAL_LOOK);
        }
        None
    }
}

/// Counts a connection as finished when dropped.
struct Finished(Arc<(Mutex<usize>, Condvar)>);

impl Drop for Finished {
    fn drop(&mut self) {
        let (count, changed) = &*self.0;
        let mut count = count.lock().unwrap_or_else(PoisonError::into_inner);
        *count = count.saturating_sub(1);
        changed.notify_one();
    }
}

fn endpoint(
    options: ServeOptions,
    link: &Arc<Link>,
    user: Option<Arc<UserShare>>,
) -> Result<Arc<Endpoint>, ServeError> {
    let mut device = Device::new(options.policy, Arc::clone(link))?;
    if let Some(user) = user {
        device.count_for(user);
    }
    if let Some(bytes) = options.fixed_arena {
        device.fix_arenas(bytes);
    }
    Ok(Arc::new(Endpoint::new(device, options.mode, options.scanouts)))
}

/// Waits for a front-end and returns its connection.
fn accept(listener: &UnixListener) -> UnixStream {
    loop {
        match listener.accept() {
            Ok((stream, _)) => return stream,
            Err(error) => {
                tracing::error!(%error, "cannot accept a connection");
                std::thread::park_timeout(Duration::from_millis(100));
            }
        }
    }
}
