//! Guests whose memory is not shared: a session over a byte stream.
//!
//! The program begins it beside the front-ends. It owns the listeners and connections of such guests. It must never wait for a guest,
//! a worker or `sluiced`.
//!
//! A virtual socket of a VM ends in a Unix socket of the host; so does a program that is configured to use one. The protocol is
//! [`sluice_protocol::stream`]. Each connection is one guest process with one session. Memory of this process stands for the
//! guest's ([`memory`]): the worker maps it, so the worker does not know the difference. A [`bridge`] sends the commands of a
//! guest's kernel to a [`crate::device::Device`] of the connection's own, so every rule for resources, workers and their ends
//! holds here, too. The [`mirror`] finds the worker's publications.
//!
//! Each [`connection`] has a thread, which waits in one place and never for its guest, its worker or `sluiced`. The use of a
//! connection is bounded: its buffers by constants, the memory behind all connections by a budget, and a guest that does not
//! read is sent nothing more. Input of a guest ends its own connection at worst.

mod bridge;
mod connection;
mod memory;
mod mirror;

use crate::{
    link::Link,
    users::{ResourceKind, Users},
};
use connection::Connection;
use memory::Budget;
use rustix::{
    event::{EventfdFlags, eventfd},
    fd::OwnedFd,
    io::Errno,
};
use sluice_protocol::limits;
use sluice_runtime::limited;
use std::{
    io,
    os::unix::net::UnixListener,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, Condvar, Mutex, PoisonError, Weak},
    time::Duration,
};

/// Serves a listener for ever, in a thread that this starts. If programs of several `users` connect, each user has its share.
///
/// # Errors
/// The kernel's error if it cannot create a thread.
pub fn start(listener: UnixListener, link: Arc<Link>, users: Option<Arc<Users>>) -> io::Result<()> {
    let serve = move || serve(&listener, &link, users.as_deref());
    std::thread::Builder::new().name("streams".into()).spawn(serve).map(drop)
}

fn serve(listener: &UnixListener, link: &Arc<Link>, users: Option<&Users>) {
    let budget = Budget::new(limits::STREAM_BYTES);
    let neighbours = Arc::new(Neighbours::default());
    let places = Arc::new(ConnectionPlaces { taken: Mutex::new(0), freed: Condvar::new() });
    loop {
        // Surplus clients wait in the listener's queue, which the kernel bounds.
        let place = ConnectionPlace::take(&places);
        let socket = match listener.accept() {
            Ok((socket, _)) => socket,
            Err(error) => {
                limited!(error, %error, "cannot accept a stream");
                std::thread::park_timeout(Duration::from_millis(100));
                continue;
            }
        };
        let front_end = link.front_end();
        let user = users.map(|users| crate::serve::user(&socket, users));
        let taken = user.as_ref().map(|user| user.take(ResourceKind::Connections));
        if matches!(taken, Some(None)) {
            limited!(warn, "a stream is refused: its user has too many connections");
            continue;
        }
        let (link, budget, neighbours) = (Arc::clone(link), Arc::clone(&budget), Arc::clone(&neighbours));
        let spawned = std::thread::Builder::new().name("stream".into()).spawn(move || {
            let (_place, _taken, _front_end) = (place, taken, front_end);
            let served = catch_unwind(AssertUnwindSafe(|| {
                Connection::new(socket.into(), &link, &budget, &neighbours, user).and_then(Connection::serve)
            }));
            match served {
                Ok(Ok(())) => {}
                Ok(Err(end)) => limited!(info, %end, "a stream has ended with an error"),
                Err(_) => limited!(error, "the thread of a stream panicked"),
            }
        });
        if let Err(error) = spawned {
            limited!(error, %error, "cannot serve a stream");
        }
    }
}

/// The connections of one device, as far as they concern each other. A restarted guest has forgotten its earlier streams, and
/// rejects data on one, which ends it. So when a new guest process connects, all other streams get a frame: an ended one may
/// hold resources that the new one needs. No frames are sent at other times, because a virtual socket device whose guest was
/// just starting has been seen to fail when it got data.
#[derive(Debug, Default)]
struct Neighbours(Mutex<Vec<Weak<OwnedFd>>>);

impl Neighbours {
    /// Creates a connection's own eventfd, written when another one comes.
    fn join(&self) -> Result<Arc<OwnedFd>, Errno> {
        let own = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|other| other.strong_count() > 0);
        all.push(Arc::downgrade(&own));
        Ok(own)
    }

    /// Notifies the other connections that this one has come.
    fn tell(&self, own: &Arc<OwnedFd>) {
        let all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        for other in all.iter().filter_map(Weak::upgrade).filter(|other| !Arc::ptr_eq(other, own)) {
            // AGAIN means that it is notified already.
            let _ = rustix::io::write(&*other, &1u64.to_ne_bytes());
        }
    }
}

/// The free places for connections.
struct ConnectionPlaces {
    taken: Mutex<usize>,
    freed: Condvar,
}

/// A connection's place, until it is dropped.
struct ConnectionPlace(Arc<ConnectionPlaces>);

impl ConnectionPlace {
    fn take(places: &Arc<ConnectionPlaces>) -> ConnectionPlace {
        let taken = places.taken.lock().unwrap_or_else(PoisonError::into_inner);
        let full = |taken: &mut usize| *taken >= limits::STREAMS_PER_DEVICE;
        let mut taken = places.freed.wait_while(taken, full).unwrap_or_else(PoisonError::into_inner);
        *taken = taken.saturating_add(1);
        ConnectionPlace(Arc::clone(places))
    }
}

impl Drop for ConnectionPlace {
    fn drop(&mut self) {
        let mut taken = self.0.taken.lock().unwrap_or_else(PoisonError::into_inner);
        *taken = taken.saturating_sub(1);
        self.0.freed.notify_one();
    }
}

/// Serves one connection in the calling thread, for a fuzz target and for tests.
///
/// # Errors
/// The reason, in words, if it ended other than by its guest leaving.
#[cfg(any(test, fuzzing))]
pub fn serve_one(socket: OwnedFd, link: &Arc<Link>) -> Result<(), String> {
    let (budget, neighbours) = (Budget::new(limits::STREAM_BYTES), Arc::new(Neighbours::default()));
    let connection = Connection::new(socket, link, &budget, &neighbours, None);
    connection.and_then(Connection::serve).map_err(|end| end.to_string())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::arithmetic_side_effects, reason = "a test")]
    use super::*;
    use proptest::prelude::*;
    use sluice_protocol::{
        calls, session,
        stream::{FromGuest, HEAD_BYTES, ToGuest},
    };
    use std::{
        io::{Read as _, Write as _},
        os::unix::net::UnixStream,
    };

    /// Input of a hostile guest: valid frames in any order and with any numbers, and invalid bytes.
    fn said() -> impl Strategy<Value = Vec<u8>> {
        let id = 0u32..4;
        let sizes =
            prop_oneof![Just(session::BYTES as u64), Just(4096), Just(limits::RESOURCE_BYTES), any::<u64>()];
        let addresses = prop_oneof![Just(limits::WINDOW_BOUNDS.start), any::<u64>()];
        let frame = prop_oneof![
            (id.clone(), sizes).prop_map(|(resource, bytes)| FromGuest::Create { resource, bytes }),
            id.clone().prop_map(|resource| FromGuest::Destroy { resource }),
            id.clone().prop_map(|resource| FromGuest::Open { resource }),
            (id.clone(), 0u32..300, addresses.clone())
                .prop_map(|(resource, slot, address)| FromGuest::Attach { resource, slot, address }),
            (0u32..300).prop_map(|slot| FromGuest::Detach { slot }),
            Just(FromGuest::Close),
            any::<u64>().prop_map(|word| FromGuest::HostReturn { call: session::HostCall::from_word(word) }),
            (5u32..600).prop_map(|words| FromGuest::Record { bytes: words * 8 }),
            (addresses, 1u32..9000).prop_map(|(address, bytes)| FromGuest::Bulk { address, bytes }),
        ];
        let frame = frame.prop_map(|frame| {
            let payload = vec![7; frame.payload() as usize];
            [frame.encode().as_slice(), &payload].concat()
        });
        let part = prop_oneof![9 => frame, 1 => prop::collection::vec(any::<u8>(), 0..64)];
        prop::collection::vec(part, 0..24).prop_map(|parts| parts.concat())
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        // Promise: V23
        #[test]
        fn any_guest_bytes_leave_no_session_when_the_connection_ends(said in said(), greets in any::<bool>()) {
            let link = Arc::new(Link::new(true).unwrap());
            let (theirs, ours) = UnixStream::pair().unwrap();
            let server = std::thread::spawn(move || {
                let served = serve_one(ours.into(), &link);
                // All requests are refused.
                link.round();
                (served, link.sessions())
            });
            let mut guest = &theirs;
            if greets {
                guest.write_all(&FromGuest::Hello { version: calls::VERSION }.encode()).unwrap();
            }
            // The connection may have ended by now; it is read to its end.
            let _ = guest.write_all(&said);
            let _ = theirs.shutdown(std::net::Shutdown::Write);
            let mut answer = Vec::new();
            let _ = guest.read_to_end(&mut answer);
            let (served, sessions) = server.join().expect("no panic");
            prop_assert_eq!(sessions, 0, "nothing of it is left: {:?}", served);
            // Input that breaks the rules in the same packet gets no greeting.
            if let Some(head) = answer.first_chunk::<HEAD_BYTES>() {
                prop_assert_eq!(ToGuest::decode(head), Ok(ToGuest::Hello { version: calls::VERSION }));
                prop_assert!(greets);
            }
        }
    }

    // Promise: V24
    #[test]
    fn other_connections_are_signalled_when_one_joins() {
        let neighbours = Neighbours::default();
        let (one, two) = (neighbours.join().unwrap(), neighbours.join().unwrap());
        drop(neighbours.join().unwrap());
        neighbours.tell(&two);
        let read = |event: &OwnedFd| rustix::io::read(event, &mut [0; 8]);
        assert_eq!(read(&one), Ok(8));
        assert_eq!(read(&two), Err(Errno::AGAIN), "not itself");
    }

    #[test]
    fn hello_of_another_version_is_answered_with_ours_and_refused() {
        let link = Arc::new(Link::new(true).unwrap());
        let (mut theirs, ours) = UnixStream::pair().unwrap();
        let server = std::thread::spawn(move || serve_one(ours.into(), &link));
        theirs.write_all(&FromGuest::Hello { version: calls::VERSION.wrapping_add(1) }.encode()).unwrap();
        let mut answer = Vec::new();
        theirs.read_to_end(&mut answer).unwrap();
        assert_eq!(answer, ToGuest::Hello { version: calls::VERSION }.encode());
        assert!(server.join().unwrap().unwrap_err().contains("version"));
    }
}
