//! Connections: one for a VMM; for processes any number, one after the other and at once.

use crate::{
    device::Device,
    endpoint::{Endpoint, Mode},
    frontend::{self, FrontendError},
    link::Link,
    memory::Policy,
    users::{Kind, Share, Taken, Users},
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

/// How long a connection waits for another of the same user to be over: one that has just ended is being cleared up.
const ARRIVAL_PATIENCE: Duration = Duration::from_secs(2);
/// How often it looks.
const ARRIVAL_LOOK: Duration = Duration::from_millis(5);

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
    /// The connection failed.
    #[error(transparent)]
    Frontend(#[from] FrontendError),
    /// A thread cannot be started.
    #[error("a thread cannot be started: {0}")]
    Thread(std::io::Error),
}

/// Serves a listener: until its one connection is over, or for ever.
///
/// # Errors
/// [`ServeError`]; a process' connection that fails is logged, not returned.
pub fn serve(
    listener: &UnixListener,
    options: Options,
    link: &Arc<Link>,
    users: &Users,
) -> Result<(), ServeError> {
    if !options.direct {
        let endpoint = endpoint(options, link, None)?;
        return Ok(frontend::serve(accept(listener), &endpoint)?);
    }
    let open = Arc::new((Mutex::new(0usize), Condvar::new()));
    // A VMM is trusted with its own device; processes share one.
    let calls = std::thread::Builder::new().name("calls".into());
    calls.spawn(|| vring::release()).map_err(ServeError::Thread)?;
    loop {
        let stream = accept(listener);
        let user = user(&stream, users);
        let Some(place) = Place::new(&user) else {
            limited!(warn, "a user's programs have all connections that one user may have");
            continue;
        };
        // Each connection has at most two threads, each with a stack, and those are bounded by what is counted here.
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
            let _finished = finished;
            let served = place.served(&user).map(|_served| {
                let endpoint = endpoint(options, &link, Some(user))?;
                Ok::<_, ServeError>(frontend::serve(stream, &endpoint)?)
            });
            match served {
                Some(Ok(())) => {}
                Some(Err(error)) => limited!(info, %error, "connection"),
                None => limited!(warn, "a user's programs have all connections that one user may have"),
            }
        });
        if let Err(error) = spawned {
            tracing::error!(%error, "a connection cannot be served");
        }
    }
}

/// Whose program is at the other end. All that the kernel does not name are one user.
pub(crate) fn user(stream: &UnixStream, users: &Users) -> Arc<Share> {
    users.share(socket_peercred(stream).map_or(control::NO_USER, |peer| peer.uid.as_raw()))
}

/// A connection's place among those of its user.
enum Place {
    /// It is served.
    Served(Taken),
    /// It waits for another to be over.
    Waits(Taken),
}

impl Place {
    fn new(user: &Arc<Share>) -> Option<Place> {
        let served = user.take(Kind::Connections).map(Place::Served);
        served.or_else(|| user.take(Kind::Arrivals).map(Place::Waits))
    }

    /// Waits until the connection may be served.
    fn served(self, user: &Arc<Share>) -> Option<Taken> {
        let _waits = match self {
            Place::Served(taken) => return Some(taken),
            Place::Waits(waits) => waits,
        };
        let began = Instant::now();
        while began.elapsed() < ARRIVAL_PATIENCE {
            if let Some(taken) = user.take(Kind::Connections) {
                return Some(taken);
            }
            std::thread::sleep(ARRIVAL_LOOK);
        }
        None
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

fn endpoint(
    options: Options,
    link: &Arc<Link>,
    user: Option<Arc<Share>>,
) -> Result<Arc<Endpoint>, ServeError> {
    let mut device = Device::new(options.policy, Arc::clone(link))?;
    if let Some(user) = user {
        device.count_for(user);
    }
    Ok(Arc::new(Endpoint::new(device, options.mode, options.scanouts)))
}

/// Waits for a front-end.
fn accept(listener: &UnixListener) -> UnixStream {
    loop {
        match listener.accept() {
            Ok((stream, _)) => return stream,
            Err(error) => {
                tracing::error!(%error, "accept");
                std::thread::sleep(Duration::from_millis(100));
            }
        }
    }
}
