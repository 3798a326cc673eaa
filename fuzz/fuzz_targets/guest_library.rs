//! A host that lies to a guest's library over a stream: for any bytes, the library's receiver neither panics nor writes to other memory
//! than the session page and the arenas, and the end of the stream ends the session. Each answer in the page is decoded or refused.
//!
//! The first byte of the input cuts the host's bytes into pieces; the second chooses the host's first frame. The addresses of bulk
//! frames count from the arena.

#![no_main]

use libfuzzer_sys::fuzz_target;
use sluice_guest::transport::{Transport as _, TransportError, vsock::Vsock};
use sluice_protocol::{
    calls::{self, wire},
    doorbell::Doorbell,
    field::Writer,
    limits, reply,
    session::{self, Attachment},
    shared::Shared as _,
    stream::{HEAD_BYTES, Head, ToGuest},
};
use sluice_shared_memory::{Reservation, mapping::Words};
use std::{
    cell::RefCell,
    collections::VecDeque,
    io::{Read as _, Write as _},
    net::Shutdown,
    os::unix::net::UnixListener,
    path::PathBuf,
    sync::{LazyLock, atomic::Ordering},
    time::{Duration, Instant},
};

/// Bytes of the arena, and of the memory on each side of it that is not the host's.
const ARENA: u64 = 64 << 10;
/// Sessions whose memory stays mapped: a receiver that ends may still read its page.
const KEPT: usize = 64;

/// The host's end. The name of the socket is removed once it is bound to.
static HOST: LazyLock<(UnixListener, PathBuf)> = LazyLock::new(|| {
    let path = std::env::temp_dir().join(format!("sluice-fuzz-{}.sock", std::process::id()));
    let _ = std::fs::remove_file(&path);
    (UnixListener::bind(&path).expect("a socket"), path)
});

thread_local! {
    static BEFORE: RefCell<VecDeque<[Reservation; 2]>> = const { RefCell::new(VecDeque::new()) };
}

/// The host's bytes, with addresses of bulk frames made relative to the arena.
fn relative(frames: &[u8], arena: u64) -> Vec<u8> {
    let mut sent = frames.to_vec();
    let mut at = 0;
    while let Some(head) = sent.get(at..).and_then(|rest| rest.first_chunk::<HEAD_BYTES>()) {
        let Ok(frame) = ToGuest::decode(head) else { break };
        if let ToGuest::Bulk { address, bytes } = frame
            && address < 1 << 32
        {
            let moved: Head = ToGuest::Bulk { address: arena + address, bytes }.encode();
            sent[at..at + HEAD_BYTES].copy_from_slice(&moved);
        }
        at += HEAD_BYTES + frame.payload() as usize;
    }
    sent
}

fn host(frames: &[u8], cut: u8, first: u8) {
    let (mut stream, _) = HOST.0.accept().expect("a guest");
    let hello = match first {
        0..=239 => ToGuest::Hello { version: calls::VERSION }.encode().to_vec(),
        240..=247 => ToGuest::Hello { version: u32::from(first) }.encode().to_vec(),
        _ => Vec::new(),
    };
    let mut sent = stream.write_all(&hello);
    for piece in frames.chunks(usize::from(cut) * 64 + 1) {
        sent = sent.and_then(|()| stream.write_all(piece));
    }
    let _ = sent.and_then(|()| stream.shutdown(Shutdown::Write));
    let _ = stream.read_to_end(&mut Vec::new());
}

/// Decodes the fields of an answer as the answer of each call.
macro_rules! decode {
    ($($thread:ident { $($(#[doc = $doc:literal])* $id:literal $class:ident $name:ident $(<$life:lifetime>)?
        ($($p:ident: $ty:ty),*) -> ($($r:ident: $rty:ty),*);)+ })+) => {
        fn decode(fields: &[u8]) {
            let (mut buffer, mut other) = ([0; limits::REPLY_BYTES], [0; limits::REPLY_BYTES]);
            $($(if let Ok(reply) = wire::$name::Reply::get(fields) {
                let mut writer = Writer::new(&mut buffer);
                reply.put(&mut writer).expect("as short as it was");
                let length = writer.length();
                let again = wire::$name::Reply::get(&buffer[..length]).expect(stringify!($name));
                let mut writer = Writer::new(&mut other);
                again.put(&mut writer).expect("as short as it was");
                let as_long = writer.length();
                // By their bytes, because a time that is no number equals none.
                assert_eq!(other[..as_long], buffer[..length], stringify!($name));
            })+)+
        }
    };
}
sluice_protocol::for_each_wire_call!(decode);

/// Reads everything that the host may have written into the page, as the session does.
fn read_page(words: &Words) {
    let mut buffer = [0; limits::REPLY_BYTES];
    for slot in 0..limits::REPLY_SLOTS {
        if words.load_u32(reply::slot_at(slot), Ordering::Acquire) != 0 {
            let (_, fields) = reply::take(words, slot, &mut buffer);
            decode(fields);
        }
    }
    for slot in 0..limits::ATTACHMENTS {
        if let Attachment::Adopted(bytes) | Attachment::Gathered(bytes) = session::attachment(words, slot) {
            std::hint::black_box(bytes);
        }
    }
    std::hint::black_box(session::host_call(words));
    for index in 0..session::LATE_ERRORS {
        std::hint::black_box(session::late_error(words, index));
    }
    for slot in 0..limits::STREAMS {
        std::hint::black_box(session::completed(words, slot));
    }
}

/// The words and the ring that only the guest writes.
fn own_words(words: &Words) -> Vec<u8> {
    let mut ring = vec![0; session::BYTES - session::RING_AT];
    words.read(session::RING_AT, &mut ring);
    let words_of_guest = [
        session::MAGIC_AT,
        session::WORKER_PARKED,
        session::RING_TAIL,
        session::NONCE_AT,
        session::HOST_RETURN,
    ];
    for at in words_of_guest {
        ring.extend(words.load_u64(at, Ordering::Acquire).to_le_bytes());
    }
    ring
}

fn guest(control: &Reservation, memory: &Reservation, started: &dyn Fn(u64)) {
    let around = |at: u64| {
        // SAFETY: the memory is mapped until this input's memory is dropped, some inputs later.
        unsafe { Words::new(usize::try_from(at).expect("an address"), ARENA as usize) }
    };
    let arena = memory.base() + ARENA;
    memory.fill(memory.base(), 3 * ARENA).expect("memory");
    started(arena);
    let transport = match Vsock::connect(&HOST.1) {
        Ok(transport) => transport,
        Err(TransportError::NoDevice | TransportError::Version(_)) => return,
        Err(error) => panic!("{error}"),
    };
    let page = transport.create(control, control.base(), session::BYTES as u64);
    let Ok(page) = page else { return };
    // SAFETY: as above.
    let words = unsafe { Words::new(usize::try_from(control.base()).expect("an address"), session::BYTES) };
    words.store_u64(session::MAGIC_AT, session::MAGIC, Ordering::Release);
    let lent = transport.create(memory, arena, ARENA);
    let own = own_words(&words);
    if transport.submit(Doorbell::Open { resource: page.id }).is_ok() {
        // The host ends the stream, so the receiver ends the session.
        let timeout = Instant::now() + Duration::from_secs(20);
        while transport.wait(Duration::from_millis(20)).is_ok() {
            assert!(Instant::now() < timeout, "the end of the stream does not end the session");
        }
        while session::lost(&words).is_none() {
            assert!(Instant::now() < timeout, "the session is not lost");
            std::thread::yield_now();
        }
        read_page(&words);
        assert!(own_words(&words) == own, "the host wrote to the guest's own words");
    }
    drop(lent);
    for side in [memory.base(), arena + ARENA] {
        let mut bytes = vec![0; ARENA as usize];
        around(side).read(0, &mut bytes);
        assert!(bytes.iter().all(|byte| *byte == 0), "the host wrote to memory that it was not lent");
    }
}

fuzz_target!(|input: &[u8]| {
    let [cut, first, frames @ ..] = input else { return };
    // The answers of each call, without a host.
    decode(frames.get(..limits::REPLY_BYTES).unwrap_or(frames));
    let control = Reservation::new(0, session::BYTES as u64).expect("addresses");
    let memory = Reservation::new(0, 3 * ARENA).expect("addresses");
    std::thread::scope(|scope| {
        LazyLock::force(&HOST);
        let started = |arena: u64| {
            let frames = relative(frames, arena);
            scope.spawn(move || host(&frames, *cut, *first));
        };
        guest(&control, &memory, &started);
    });
    BEFORE.with_borrow_mut(|before| {
        before.push_back([control, memory]);
        if before.len() > KEPT {
            before.pop_front();
        }
    });
});
