//! Guests whose memory is not shared: a session over a byte stream.
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
    users::{Kind, Users},
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

/// Serves a listener for ever, in a thread that this starts. Where programs of several `users` connect, each has its share.
///
/// # Errors
/// The kernel's, if there can be no thread.
pub fn start(listener: UnixListener, link: Arc<Link>, users: Option<Arc<Users>>) -> io::Result<()> {
    let serve = move || serve(&listener, &link, users.as_deref());
    std::thread::Builder::new().name("streams".into()).spawn(serve).map(drop)
}

fn serve(listener: &UnixListener, link: &Arc<Link>, users: Option<&Users>) {
    let budget = Budget::new(limits::STREAM_BYTES);
    let neighbours = Arc::new(Neighbours::default());
    let places = Arc::new(Places { taken: Mutex::new(0), freed: Condvar::new() });
    loop {
        // Those who come too many wait in the listener's queue, which the kernel bounds.
        let place = Place::take(&places);
        let socket = match listener.accept() {
            Ok((socket, _)) => socket,
            Err(error) => {
                limited!(error, %error, "accept");
                std::thread::sleep(Duration::from_millis(100));
                continue;
            }
        };
        let user = users.map(|users| crate::serve::user(&socket, users));
        let taken = user.as_ref().map(|user| user.take(Kind::Connections));
        if matches!(taken, Some(None)) {
            limited!(warn, "a user's programs have all connections that one user may have");
            continue;
        }
        let (link, budget, neighbours) = (Arc::clone(link), Arc::clone(&budget), Arc::clone(&neighbours));
        let spawned = std::thread::Builder::new().name("stream".into()).spawn(move || {
            let (_place, _taken) = (place, taken);
            let served = catch_unwind(AssertUnwindSafe(|| {
                Connection::new(socket.into(), &link, &budget, &neighbours, user).and_then(Connection::serve)
            }));
            match served {
                Ok(Ok(())) => {}
                Ok(Err(end)) => limited!(info, %end, "stream"),
                Err(_) => limited!(error, "a stream's thread panicked"),
            }
        });
        if let Err(error) = spawned {
            limited!(error, %error, "a stream cannot be served");
        }
    }
}

/// The connections of one device, as far as they concern each other. A guest that was started anew knows nothing of the streams
/// it had, and says so when it is told something on one, which ends that. So when a new guest process comes, the others are told
/// something: what one of before still holds, it may be about to want. Not at any other time, for a virtual socket device
/// whose guest is just starting has been seen to fail when it is given something.
#[derive(Debug, Default)]
struct Neighbours(Mutex<Vec<Weak<OwnedFd>>>);

impl Neighbours {
    /// A connection's own eventfd, to be written when another comes.
    fn join(&self) -> Result<Arc<OwnedFd>, Errno> {
        let own = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|other| other.strong_count() > 0);
        all.push(Arc::downgrade(&own));
        Ok(own)
    }

    /// Tells the others that this one has come.
    fn tell(&self, own: &Arc<OwnedFd>) {
        let all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        for other in all.iter().filter_map(Weak::upgrade).filter(|other| !Arc::ptr_eq(other, own)) {
            // AGAIN would mean that it is told already.
            let _ = rustix::io::write(&*other, &1u64.to_ne_bytes());
        }
    }
}

/// Places for connections.
struct Places {
    taken: Mutex<usize>,
    freed: Condvar,
}

/// A connection's place, until it is dropped.
struct Place(Arc<Places>);

impl Place {
    fn take(places: &Arc<Places>) -> Place {
        let taken = places.taken.lock().unwrap_or_else(PoisonError::into_inner);
        let full = |taken: &mut usize| *taken >= limits::STREAMS_PER_DEVICE;
        let mut taken = places.freed.wait_while(taken, full).unwrap_or_else(PoisonError::into_inner);
        *taken = taken.saturating_add(1);
        Place(Arc::clone(places))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut taken = self.0.taken.lock().unwrap_or_else(PoisonError::into_inner);
        *taken = taken.saturating_sub(1);
        self.0.freed.notify_one();
    }
}

/// Serves one connection in the calling thread, for a fuzz target and for tests.
///
/// # Errors
/// In words, why it ended other than by its guest's going.
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

    /// What a hostile guest may say: frames that are, in any order and with any numbers, and bytes that are none.
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
        fn whatever_a_guest_says_its_connection_ends_with_it(said in said(), greets in any::<bool>()) {
            let link = Arc::new(Link::new(true).unwrap());
            let (theirs, ours) = UnixStream::pair().unwrap();
            let server = std::thread::spawn(move || {
                let served = serve_one(ours.into(), &link);
                // What was asked for is refused.
                link.round();
                (served, link.sessions())
            });
            let mut guest = &theirs;
            if greets {
                guest.write_all(&FromGuest::Hello { version: calls::VERSION }.encode()).unwrap();
            }
            // The connection may have ended by now, and is read to its end.
            let _ = guest.write_all(&said);
            let _ = theirs.shutdown(std::net::Shutdown::Write);
            let mut answer = Vec::new();
            let _ = guest.read_to_end(&mut answer);
            let (served, sessions) = server.join().expect("no panic");
            prop_assert_eq!(sessions, 0, "nothing of it is left: {:?}", served);
            // What breaks the rules in the same breath is not greeted.
            if let Some(head) = answer.first_chunk::<HEAD_BYTES>() {
                prop_assert_eq!(ToGuest::decode(head), Ok(ToGuest::Hello { version: calls::VERSION }));
                prop_assert!(greets);
            }
        }
    }

    // Promise: V24
    #[test]
    fn others_are_told_of_one_that_comes() {
        let neighbours = Neighbours::default();
        let (one, two) = (neighbours.join().unwrap(), neighbours.join().unwrap());
        drop(neighbours.join().unwrap());
        neighbours.tell(&two);
        let read = |event: &OwnedFd| rustix::io::read(event, &mut [0; 8]);
        assert_eq!(read(&one), Ok(8));
        assert_eq!(read(&two), Err(Errno::AGAIN), "not itself");
    }

    #[test]
    fn a_guest_of_another_version_is_told_ours() {
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
