//! Frames of a guest that shares no memory, through a connection with a device of its own: for any bytes, the connection
//! neither panics nor waits, and leaves no session behind.
//!
//! The input is the guest's data after its greeting; its first byte cuts it into the pieces in which it arrives.

#![no_main]

use libfuzzer_sys::fuzz_target;
use sluice_device::{link::Link, stream};
use sluice_protocol::{calls, stream::FromGuest};
use std::{
    io::{Read as _, Write as _},
    net::Shutdown,
    os::unix::net::UnixStream,
    sync::Arc,
};

fuzz_target!(|input: &[u8]| {
    let Some((cut, frames)) = input.split_first() else { return };
    let link = Arc::new(Link::new(true).expect("an eventfd"));
    let (theirs, ours) = UnixStream::pair().expect("a pair");
    let guest = std::thread::scope(|scope| {
        let link = &link;
        let server = scope.spawn(move || stream::serve_one(ours.into(), link));
        let mut guest = &theirs;
        let mut sent = guest.write_all(&FromGuest::Hello { version: calls::VERSION }.encode());
        for piece in frames.chunks(usize::from(*cut) * 16 + 1) {
            sent = sent.and_then(|()| guest.write_all(piece));
        }
        let _ = sent.and_then(|()| theirs.shutdown(Shutdown::Write));
        let _ = guest.read_to_end(&mut Vec::new());
        server.join()
    });
    assert!(guest.is_ok(), "a connection panicked");
    // Refuses the requests.
    link.round();
    assert_eq!(link.sessions(), 0, "a session is left");
});
