//! Faults of kernels, of guests, of the device.

use crate::{
    arbiter::FakeArbiter,
    code::{
        ILLEGAL_ADDRESS, INVALID_CONTEXT, INVALID_DEVICE, INVALID_VALUE, OUT_OF_MEMORY,
        SYSTEM_DRIVER_MISMATCH,
    },
    guest::{ARENA, Guest, Peer, Start, memory_file, null_driver},
    streams::{function, launch, put_launch, ready, stream},
};
use rustix::{fd::OwnedFd, fs::ftruncate};
use sluice_kit::wait::eventually;
use sluice_messages::control::{self, FromWorker};
use sluice_protocol::{
    calls::{self, wire},
    field::{ArenaIn, ArenaOut, DeviceAddress, ElementSize, Mint, Ordinal, Writer},
    handle::{Context, Event, Id, Stream},
    limits,
    record::{HEADER_BYTES, Header, NO_REPLY},
    session::{self, Attachment},
    shared::Shared,
};
use sluice_shared_memory::{Run, bus};
use std::{path::PathBuf, process::Stdio, sync::atomic::Ordering};

const ARENA_BYTES: u64 = 1 << 20;

/// Checks that a worker on the null driver ends as a process with a missing page, after `cut` has taken a page of a guest that maps
/// `mapped_runs` runs one by one, and has an arena in `ram` and device memory.
#[track_caller]
fn assert_ends_of_missing_page(mapped_runs: u32, cut: impl FnOnce(&mut Guest, &OwnedFd, u64)) {
    let lenders = vec![FakeArbiter::new(0).admit()];
    let log = Stdio::piped();
    let mut guest = Guest::ready(Start { mapped_runs, lenders, log, ..Start::on(null_driver()) });
    guest.begin();
    let ram = memory_file(ARENA_BYTES);
    let run = Run { offset: 0, bytes: ARENA_BYTES };
    guest.send_attach(1, ARENA, ARENA_BYTES, &[run], &ram, false);
    eventually("an answer", || session::attachment(&guest.words(), 1) != Attachment::Pending);
    let device = guest.allocate(ARENA_BYTES).unwrap();
    cut(&mut guest, &ram, device);
    assert_eq!(guest.ended().code(), Some(bus::STATUS));
    let said = std::io::read_to_string(guest.worker.stderr.take().unwrap()).unwrap();
    let line = "sluice-worker: a page of shared memory is not there any more (SIGBUS); this process ends";
    assert!(said.lines().any(|said| said == line), "{said}");
}

// Promise: V31
#[test]
fn worker_that_copies_from_or_to_cut_memory_exits_with_the_sigbus_status() {
    // In place, and gathered.
    for mapped_runs in [limits::MAPPED_RUNS, 0] {
        assert_ends_of_missing_page(mapped_runs, |guest, ram, device| {
            ftruncate(ram, 0).unwrap();
            guest.work(wire::memcpy_htod::CALL, 0, |w| {
                let from = ArenaIn { address: ARENA, bytes: ARENA_BYTES };
                wire::memcpy_htod::Args { to: DeviceAddress(device), from }.put(w)
            });
        });
        assert_ends_of_missing_page(mapped_runs, |guest, ram, device| {
            ftruncate(ram, 0).unwrap();
            guest.work(wire::memcpy_dtoh::CALL, 0, |w| {
                let to = ArenaOut { address: ARENA, bytes: ARENA_BYTES };
                wire::memcpy_dtoh::Args { to, from: DeviceAddress(device) }.put(w)
            });
        });
    }
}

// Promise: V31
#[test]
fn worker_whose_session_page_is_cut_exits_with_the_sigbus_status() {
    assert_ends_of_missing_page(limits::MAPPED_RUNS, |guest, _ram, _device| guest.cut_page());
}

/// Checks that the session is lost with this code, and that the worker exits with this status.
fn assert_lost(guest: &mut Guest, code: u32, status: i32) {
    eventually("LOST", || guest.state() == session::LOST);
    assert_eq!(session::lost(&guest.words()), Some(code));
    assert_eq!(guest.ended().code(), Some(status));
}

// Promise: C7
#[test]
fn fault_is_sticky_and_work_behind_it_never_appears_complete() {
    let (mut guest, _arena) = ready();
    let (fault, kernel) = (function(&mut guest, 0, "fault"), function(&mut guest, 1, "work"));
    stream(&mut guest, 0, 1);
    let before = launch(&mut guest, 1, kernel, &[]);
    guest.wait(1, before);
    launch(&mut guest, 1, fault, &[]);
    launch(&mut guest, 1, kernel, &[]);
    eventually("the sticky error", || guest.sticky() != 0);
    assert_eq!(guest.sticky(), ILLEGAL_ADDRESS);
    assert_eq!(
        guest.call(wire::device_memory::CALL, |w| wire::device_memory::Args { device: Ordinal(0) }.put(w)).0,
        700
    );
    let header = guest.on(wire::launch::CALL, 0);
    assert_eq!(guest.ask(header, |w| put_launch(w, kernel, &[])).0, ILLEGAL_ADDRESS);
    assert_eq!(guest.completed(1), before);
    assert_eq!(guest.completed(0), 0);
    assert_eq!(guest.state(), session::READY, "the worker continues to serve");
}

// Promise: C7
#[test]
fn error_of_a_refused_post_is_kept_for_its_context_only() {
    let (mut guest, _arena) = ready();
    let nothing = Id::<Event>::new(3, 1);
    guest.post(wire::event_destroy::CALL, |w| wire::event_destroy::Args { event: nothing }.put(w));
    eventually("the late error", || guest.late_error(0) == (1, 400));
    let kernel = function(&mut guest, 0, "work");
    for (index, code) in (1..).zip([1, 2, 400, 701, 801, 999]) {
        let refused = function(&mut guest, index, &format!("refuse_{code}"));
        let failed = launch(&mut guest, 0, refused, &[]);
        guest.wait(0, failed);
        assert_eq!(
            guest.late_error(0),
            (index + 1, code),
            "the error is visible when the work appears complete"
        );
        let next = launch(&mut guest, 0, kernel, &[]);
        guest.wait(0, next);
        let header = guest.on(wire::launch::CALL, 0);
        assert_eq!(
            guest.ask(header, |w| put_launch(w, refused, &[])).0,
            code,
            "a call that waits gets the error itself"
        );
        assert_eq!(guest.late_error(0), (index + 1, code), "and no context keeps it");
    }
    // Outside every range, so refused before the driver receives it.
    let fill = |w: &mut Writer<'_>| {
        wire::memset::Args {
            to: DeviceAddress(0x1000),
            pitch: 0,
            element: ElementSize::Byte,
            value: 7,
            width: 16,
            height: 1,
        }
        .put(w)
    };
    let failed = guest.work(wire::memset::CALL, 0, fill);
    guest.wait(0, failed);
    assert_eq!(guest.late_error(0), (8, 1));
    assert_eq!(guest.sticky(), 0);
    assert!(guest.allocate(4096).is_ok());
    assert_eq!(guest.late_error(limits::CONTEXTS), (0, 0), "no other context has an error");

    let other = guest.create_context(1, 1);
    guest.session.context = other.raw();
    guest.post(wire::event_destroy::CALL, |w| wire::event_destroy::Args { event: nothing }.put(w));
    eventually("the late error of the other", || guest.late_error(1) == (1, 400));
    assert_eq!(guest.late_error(0), (8, 1));
}

// Promise: C7
#[test]
fn only_an_error_that_breaks_a_context_is_sticky() {
    for code in [214, 700, 702, 710, 714, 715, 716, 717, 718, 719] {
        let (mut guest, _arena) = ready();
        let refused = function(&mut guest, 0, &format!("refuse_{code}"));
        launch(&mut guest, 0, refused, &[]);
        eventually("the sticky error", || guest.sticky() == code);
        assert_eq!(guest.allocate(4096), Err(code));
    }
}

// Promise: C7
#[test]
fn work_whose_marker_cannot_be_placed_completes_and_the_failure_is_reported_once() {
    let (mut guest, arena) = ready();
    let (work, unmarked) = (function(&mut guest, 0, "work"), function(&mut guest, 1, "unmarked_p1"));
    stream(&mut guest, 0, 1);
    let word = (ARENA + 4096).to_le_bytes();
    let held = launch(&mut guest, 1, unmarked, &word);
    eventually("the late error", || guest.late_error(0) == (1, 2));
    // Work of another stream waits for the first stream; a call that needs no work does not.
    let behind = launch(&mut guest, 0, work, &[]);
    assert_eq!(guest.call(wire::console_read::CALL, |w| wire::console_read::Args {}.put(w)).0, 0);
    assert_eq!(
        (guest.completed(1), guest.completed(0)),
        (held - 1, behind - 1),
        "the work does not appear complete"
    );
    arena.words().store_u32(4096, 1, Ordering::Release);
    guest.wait(1, held);
    guest.wait(0, behind);
    assert_eq!(guest.late_error(0), (1, 2), "reported once");

    // Destroying a stream with such work affects no other stream.
    let last = launch(&mut guest, 1, unmarked, &word);
    guest.post(wire::stream_destroy::CALL, |w| wire::stream_destroy::Args { stream: Id::new(0, 1) }.put(w));
    guest.wait(1, last);
    let after = launch(&mut guest, 0, work, &[]);
    guest.wait(0, after);
    assert_eq!((guest.sticky(), guest.late_error(0)), (0, (2, 2)));
}

// Promise: C7
#[test]
fn stream_refused_for_lack_of_memory_leaves_its_id_free() {
    let mut guest = Guest::start();
    guest.begin();
    let create = |guest: &mut Guest, priority| {
        let id = Mint(Id::<Stream>::new(0, 1));
        guest
            .call(wire::stream_create::CALL, |w| {
                wire::stream_create::Args { stream: id, slot: 1, flags: 0, priority }.put(w)
            })
            .0
    };
    assert_eq!(create(&mut guest, -4), OUT_OF_MEMORY);
    assert_eq!((guest.sticky(), guest.late_error(0)), (0, (0, 0)));
    assert_eq!(create(&mut guest, 0), 0);
}

#[test]
fn id_in_use_cannot_be_created_again() {
    let mut guest = Guest::start();
    guest.begin();
    let id = stream(&mut guest, 0, 1);
    let create = |guest: &mut Guest, id: Id<Stream>, slot| {
        let header = guest.header(wire::stream_create::CALL);
        guest
            .ask(header, |w| {
                wire::stream_create::Args { stream: Mint(id), slot, flags: 0, priority: 0 }.put(w)
            })
            .0
    };
    assert_eq!(create(&mut guest, id, 2), INVALID_VALUE, "the id is taken");
    assert_eq!(create(&mut guest, Id::new(1, 1), 1), 1, "the slot is taken");
    assert_eq!(create(&mut guest, Id::new(1, 1), limits::STREAMS), 1, "there is no such slot");
    assert_eq!(create(&mut guest, Id::new(1, 1), 2), 0);
}

/// A record with the given call and fields.
fn record(call: u16, fields: &[u8]) -> Vec<u8> {
    let mut buffer = vec![0; HEADER_BYTES + fields.len()];
    let (head, body) = buffer.split_first_chunk_mut::<HEADER_BYTES>().unwrap();
    body.copy_from_slice(fields);
    let header =
        Header { call, reply: NO_REPLY, ticket: 0, context: 0, stream: u32::MAX, thread: 0, sequence: 0 };
    header.write(u32::try_from(HEADER_BYTES + fields.len()).unwrap(), head);
    buffer
}

// Promise: V4
#[test]
fn malformed_records_end_the_session() {
    let cases: [(&str, Vec<u8>); 5] = [
        ("an unknown call", record(0xfff0, &[])),
        ("missing fields", record(wire::memory_allocate::CALL, &[])),
        ("too many fields", record(wire::device_memory::CALL, &[0; 16])),
        (
            "an id of another kind",
            record(wire::event_destroy::CALL, &Id::<Stream>::new(0, 1).raw().to_le_bytes()),
        ),
        ("a size beyond its limit", record(wire::memory_allocate::CALL, &[[0; 8], [0xff; 8]].concat())),
    ];
    for (what, bytes) in cases {
        let mut guest = Guest::start();
        guest.publish(&bytes);
        eprintln!("{what}");
        assert_lost(&mut guest, 46, 2);
    }
}

// Promise: V4
#[test]
fn impossible_rings_end_the_session() {
    for tail in [7_u64, limits::RING_BYTES + 8, u64::MAX - 7] {
        let mut guest = Guest::start();
        guest.words().store_u64(session::RING_TAIL, tail, Ordering::Release);
        guest.ring();
        assert_lost(&mut guest, 46, 2);
    }
    let mut guest = Guest::start();
    guest.words().write(session::RING_AT, &8_u32.to_le_bytes());
    guest.words().store_u64(session::RING_TAIL, 64, Ordering::Release);
    guest.ring();
    assert_lost(&mut guest, 46, 2);
}

#[test]
fn wrong_sequence_or_missing_credit_ends_the_session() {
    let wrong = |change: &dyn Fn(&mut Header)| {
        let (mut guest, _arena) = ready();
        let kernel = function(&mut guest, 0, "work");
        let mut header = guest.on(wire::launch::CALL, 0);
        change(&mut header);
        guest.put(header, |w| put_launch(w, kernel, &[]));
        guest.ring();
        assert_lost(&mut guest, 46, 2);
    };
    wrong(&|header| header.sequence = 0);
    wrong(&|header| header.sequence = 2);
    wrong(&|header| header.reply = limits::REPLY_SLOTS);

    let (mut guest, _arena) = ready();
    let (hold, kernel) = (function(&mut guest, 0, "hold_p1"), function(&mut guest, 1, "work"));
    launch(&mut guest, 0, hold, &(ARENA + 4096).to_le_bytes());
    for _ in 0..limits::STREAM_CREDITS {
        launch(&mut guest, 0, kernel, &[]);
    }
    assert_lost(&mut guest, 46, 2);
}

#[test]
fn worker_exits_when_its_device_disconnects() {
    let (mut guest, _arena) = ready();
    guest.hang_up();
    assert_eq!(guest.ended().code(), Some(0));
}

#[test]
fn missing_driver_loses_the_session_with_a_clear_error() {
    for driver in ["/nonexistent/libcuda.so.1", "libcuda.so.1"] {
        let mut guest = Guest::launched(Start::on(PathBuf::from(driver)));
        assert_lost(&mut guest, 46, 1);
    }
    assert!(null_driver().is_absolute());
}

// Promise: F110
#[test]
fn driver_of_a_branch_without_a_list_loses_the_session() {
    let folder = tempfile::tempdir().expect("a folder");
    let renamed = |name: &str| {
        let path = folder.path().join(name);
        std::fs::copy(null_driver(), &path).expect("a copy");
        Start { lenders: vec![FakeArbiter::new(0).admit()], ..Start::on(path) }
    };
    drop(Guest::ready(renamed("libother.so.999.10.01")));
    let mut guest = Guest::launched(renamed("libcuda.so.999.10.01"));
    assert_lost(&mut guest, 46, 1);
}

// Promise: P45
#[test]
fn driver_with_another_device_than_assigned_is_refused() {
    let arbiter = FakeArbiter::new(0);
    let start = |identity| Start {
        lenders: vec![arbiter.admit()],
        identity: Some(identity),
        ..Start::on(null_driver())
    };
    drop(Guest::ready(start(*b"null-driver-gpu0")));
    let mut guest = Guest::launched(start(*b"null-driver-gpu1"));
    assert_lost(&mut guest, 46, 1);
}

// Promise: F62
#[test]
fn peer_of_another_version_is_refused_before_its_messages_are_read() {
    for foreign in [Peer::Daemon, Peer::Device, Peer::Shim] {
        let lenders = vec![FakeArbiter::new(0).admit()];
        let mut guest =
            Guest::launched(Start { foreign: Some(foreign), lenders, ..Start::on(null_driver()) });
        assert_eq!(guest.told(), FromWorker::Attached { slot: 0, error: 803 }, "{foreign:?}");
        assert_eq!(
            guest.state(),
            session::NEW,
            "the worker leaves the page alone: the device tells the guest"
        );
        guest.hang_up();
        assert_eq!(guest.ended().code(), Some(1));
    }
    let lenders = vec![FakeArbiter::new(0).admit_as(control::VERSION + 1)];
    let mut guest = Guest::launched(Start { lenders, ..Start::on(null_driver()) });
    assert_lost(&mut guest, SYSTEM_DRIVER_MISMATCH, 1);
}

// Promise: Q7
#[test]
fn worker_without_an_arbiter_has_no_devices() {
    let mut guest = Guest::ready(Start::on(null_driver()));
    let (result, fields) = guest.call(wire::session_hello::CALL, |w| {
        wire::session_hello::Args { version: calls::VERSION, process: 42 }.put(w)
    });
    assert_eq!((result, wire::session_hello::Reply::get(&fields).unwrap().devices), (0, 0));
    assert_eq!(
        guest.call(wire::device_info::CALL, |w| wire::device_info::Args { device: Ordinal(0) }.put(w)).0,
        101
    );
    assert_eq!(
        guest.call(wire::device_memory::CALL, |w| wire::device_memory::Args { device: Ordinal(0) }.put(w)).0,
        101
    );
    let context = Id::<Context>::new(0, 1);
    let (result, _) = guest.call(wire::context_create::CALL, |w| {
        wire::context_create::Args {
            context: Mint(context),
            device: Ordinal(0),
            flags: 0,
            primary: true,
            stream: 0,
        }
        .put(w)
    });
    assert_eq!(result, INVALID_DEVICE);
    guest.session.context = context.raw();
    assert_eq!(guest.allocate(4096), Err(INVALID_CONTEXT));
    assert_eq!(guest.state(), session::READY, "the worker continues to serve");
}

#[test]
fn call_without_a_context_is_refused() {
    let mut guest = Guest::start();
    assert_eq!(
        guest.call(wire::context_limit::CALL, |w| wire::context_limit::Args { limit: 0 }.put(w)).0,
        201
    );
    assert_eq!(guest.allocate(4096), Err(INVALID_CONTEXT));
    guest.session.context = 0x5100_0001_0000_0005;
    assert_eq!(guest.allocate(4096), Err(INVALID_CONTEXT), "the context is forged");
}

#[test]
fn worker_serves_its_guest_under_a_seccomp_filter() {
    let mut guest = Guest::start();
    let status = std::fs::read_to_string(format!("/proc/{}/status", guest.worker.id())).unwrap();
    let field = |name: &str| {
        status.lines().find_map(|line| line.strip_prefix(name)).map(|value| value.trim().to_owned())
    };
    assert_eq!(field("Seccomp:").as_deref(), Some("2"));
    assert_eq!(field("NoNewPrivs:").as_deref(), Some("1"));
    guest.begin();
}
