//! Devices, device memory, arenas, copies.

use crate::guest::{ARENA, Guest, WINDOW, eventually, memory_file};
use sluice_messages::control::{FromWorker, ToWorker};
use sluice_protocol::{
    calls::wire,
    field::{ArenaAddress, DeviceAddress, Size},
    limits,
    session::{self, Attachment},
};
use sluice_shared_memory::{Run, socket};

const INVALID_VALUE: u32 = 1;
const OUT_OF_MEMORY: u32 = 2;
const MIB: u64 = 1 << 20;

fn pattern(bytes: usize) -> Vec<u8> {
    (0..bytes).map(|i| u8::try_from((i * 7 + i / 251) % 256).unwrap()).collect()
}

#[test]
fn a_device_is_described_as_a_guest_may_see_it() {
    let mut guest = Guest::with_quota(100 * MIB);
    let hello = guest.call(wire::session_hello::CALL, |w| wire::session_hello::put(w, 1, 42));
    assert_eq!(hello.0, 0);
    let reply = wire::session_hello::Reply::get(&hello.1).unwrap();
    assert_eq!((reply.driver_version, reply.devices), (13050, 1));
    let (result, fields) = guest.call(wire::device_info::CALL, |w| wire::device_info::put(w, 0));
    assert_eq!(result, 0);
    let info = wire::device_info::Reply::get(&fields).unwrap();
    assert!(info.name.starts_with(b"Null GPU\0"));
    assert_eq!(info.memory, 100 * MIB, "the quota is all there is");
    assert_eq!(info.attributes.0[75], 8, "compute capability");
    assert_eq!((info.attributes.0[91], info.attributes.0[99]), (0, 0), "masked: registering host memory");
    assert_eq!((info.least_priority, info.greatest_priority), (0, -5));
    let (result, _) = guest.call(wire::device_info::CALL, |w| wire::device_info::put(w, 1));
    assert_ne!(result, 0, "there is no second one");
}

#[test]
fn another_version_is_refused() {
    let mut guest = Guest::start();
    let (result, _) = guest.call(wire::session_hello::CALL, |w| wire::session_hello::put(w, 99, 42));
    assert_eq!(result, 803);
}

#[test]
fn bytes_go_there_and_back() {
    there_and_back(Guest::start());
}

// Promise: V15
#[test]
fn gathered_bytes_go_there_and_back() {
    there_and_back(Guest::with_mapped_runs(0));
}

fn there_and_back(mut guest: Guest) {
    const BYTES: usize = 3 << 20;
    guest.begin();
    let arena = guest.attach(1, ARENA, 8 * MIB);
    let data = pattern(BYTES);
    arena.write(0, &data);
    let (one, two) = (guest.allocate(BYTES as u64).unwrap(), guest.allocate(BYTES as u64).unwrap());
    assert!(one >= WINDOW);
    let bytes = BYTES as u64;
    guest.work(wire::copy_to_device::CALL, 0, |w| {
        wire::copy_to_device::put(w, DeviceAddress(one), ArenaAddress(ARENA), bytes)
    });
    guest.work(wire::copy_on_device::CALL, 0, |w| {
        wire::copy_on_device::put(w, DeviceAddress(two), DeviceAddress(one), bytes)
    });
    let last = guest.work(wire::copy_from_device::CALL, 0, |w| {
        wire::copy_from_device::put(w, ArenaAddress(ARENA + 4 * MIB), DeviceAddress(two), bytes)
    });
    guest.wait(0, last);
    assert_eq!(arena.read(4 << 20, BYTES), data);
}

#[test]
fn rows_and_fills_touch_what_they_should() {
    rows_and_fills(Guest::start());
}

// Promise: V15
#[test]
fn gathered_rows_and_fills_touch_what_they_should() {
    rows_and_fills(Guest::with_mapped_runs(0));
}

fn rows_and_fills(mut guest: Guest) {
    guest.begin();
    let arena = guest.attach(1, ARENA, MIB);
    let device = guest.allocate(1 << 16).unwrap();
    arena.write(0, &pattern(4096));
    guest.work(wire::fill::CALL, 0, |w| wire::fill::put(w, DeviceAddress(device), 0, 1, 0xee, 1 << 16, 1));
    guest.work(wire::copy_rows::CALL, 0, |w| wire::copy_rows::put(w, 0, device + 5, 256, ARENA, 100, 50, 10));
    guest.work(wire::fill::CALL, 0, |w| {
        wire::fill::put(w, DeviceAddress(device + 128), 256, 4, 0x0403_0201, 3, 2)
    });
    let last = guest.work(wire::copy_from_device::CALL, 0, |w| {
        wire::copy_from_device::put(w, ArenaAddress(ARENA + 8192), DeviceAddress(device), 4096)
    });
    guest.wait(0, last);
    let mut expected = vec![0xee; 4096];
    for row in 0..10 {
        expected[5 + row * 256..][..50].copy_from_slice(&pattern(4096)[row * 100..][..50]);
    }
    for row in 0..2 {
        expected[128 + row * 256..][..12].copy_from_slice(&[1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4]);
    }
    assert_eq!(arena.read(8192, 4096), expected);

    // Rows that come back leave alone what lies between them.
    arena.write(16384, &[0x55; 1000]);
    let last = guest.work(wire::copy_rows::CALL, 0, |w| {
        wire::copy_rows::put(w, 1, ARENA + 16384, 100, device + 5, 256, 50, 10)
    });
    guest.wait(0, last);
    let mut expected = vec![0x55; 1000];
    for row in 0..10 {
        expected[row * 100..][..50].copy_from_slice(&pattern(4096)[row * 100..][..50]);
    }
    // The fill above went over the first row and the second.
    let rows = arena.read(16384, 1000);
    assert_eq!(rows[200..], expected[200..]);
    assert_eq!(rows[50..100], expected[50..100]);
}

// Promise: Q1
#[test]
fn the_quota_holds_to_the_byte() {
    let mut guest = Guest::with_quota(96 * MIB);
    guest.begin();
    assert_eq!(guest.info(), (96 * MIB, 96 * MIB));
    let large = guest.allocate(33 * MIB).unwrap();
    assert_eq!(guest.info(), (62 * MIB, 96 * MIB), "in units of 2 MiB");
    let small = guest.allocate(1).unwrap();
    assert_eq!(guest.info(), (60 * MIB, 96 * MIB), "a pool chunk");
    assert!(guest.allocate(1000).is_ok());
    assert_eq!(guest.info(), (60 * MIB, 96 * MIB), "shares it");
    assert_eq!(guest.allocate(61 * MIB), Err(OUT_OF_MEMORY));
    assert_eq!(guest.allocate(limits::ALLOCATION_BYTES), Err(OUT_OF_MEMORY));
    assert_eq!(guest.allocate(0), Err(INVALID_VALUE));
    assert_eq!(guest.info(), (60 * MIB, 96 * MIB), "a refusal changes nothing");
    assert!(guest.allocate(60 * MIB).is_ok());
    assert_eq!(guest.info().0, 0);
    guest.post(wire::memory_free::CALL, |w| wire::memory_free::put(w, DeviceAddress(large)));
    assert_eq!(guest.info().0, 34 * MIB, "a post is seen by the next call");
    let again = guest.allocate(34 * MIB).unwrap();
    assert_eq!(again, large, "addresses are used again");
    guest.post(wire::memory_free::CALL, |w| wire::memory_free::put(w, DeviceAddress(small)));
    assert_eq!(guest.info().0, 0, "the pool still has a user");
}

// Promise: F6
#[test]
fn forged_addresses_reach_nothing() {
    let mut guest = Guest::start();
    guest.begin();
    let arena = guest.attach(1, ARENA, MIB);
    let device = guest.allocate(4096).unwrap();
    let header = |guest: &mut Guest, call| guest.on(call, 0);
    for (to, from, bytes) in [
        (0x40_0000, ARENA, 64),
        (device, ARENA + MIB - 63, 64),
        (device + 4000, ARENA, 97),
        (device, ARENA, u64::MAX),
        (device - 512, ARENA, 8),
        (u64::MAX - 7, ARENA, 64),
        (device, 0x7fff_ffff_0000, 64),
    ] {
        let header = header(&mut guest, wire::copy_to_device::CALL);
        let (result, _) =
            guest.ask(header, |w| wire::copy_to_device::put(w, DeviceAddress(to), ArenaAddress(from), bytes));
        assert_eq!(result, INVALID_VALUE, "{to:#x} {from:#x} {bytes:#x}");
    }
    // A refused call still takes its place: its sequence completes, and the stream goes on.
    arena.write(0, b"still here");
    let last = guest.work(wire::copy_to_device::CALL, 0, |w| {
        wire::copy_to_device::put(w, DeviceAddress(device), ArenaAddress(ARENA), 10)
    });
    guest.wait(0, last);
    let (result, _) = guest.ask(guest.header(wire::memory_free::CALL), |w| {
        wire::memory_free::put(w, DeviceAddress(device + 512))
    });
    assert_eq!(result, INVALID_VALUE);
}

#[test]
fn arenas_are_bounded_and_go_when_asked() {
    let mut guest = Guest::start();
    guest.begin();
    let ram = memory_file(MIB);
    let run = |offset, bytes| Run { offset, bytes };
    let bounds = limits::WINDOW_BOUNDS;
    let cases: [(u64, u64, &[Run]); 6] = [
        (bounds.start - 4096, 4096, &[run(0, 4096)]),
        (bounds.end, 4096, &[run(0, 4096)]),
        (bounds.start + 8, 4096, &[run(0, 4096)]),
        (bounds.start, 2 * MIB, &[run(0, 2 * MIB)]),
        (bounds.start, 4096, &[run(u64::MAX - 4095, 4096)]),
        (bounds.start, 8192, &[run(0, 4096)]),
    ];
    for (slot, (address, bytes, runs)) in (1..).zip(cases) {
        guest.send_attach(slot, address, bytes, runs, &ram, false);
        let FromWorker::Attached { slot: told, error } = guest.told() else { panic!("not an answer") };
        assert_eq!(told, slot);
        assert_ne!(error, 0);
        assert_eq!(session::attachment(&guest.words(), slot), Attachment::Refused(error));
    }

    // Two regions make one arena; the second message completes it.
    let other = memory_file(MIB);
    guest.send_attach(20, ARENA, 8192, &[run(4096, 4096)], &ram, true);
    guest.send_attach(20, ARENA, 8192, &[run(0, 4096)], &other, false);
    assert_eq!(guest.told(), FromWorker::Attached { slot: 20, error: 0 });
    let device = guest.allocate(8192).unwrap();
    let work = |guest: &mut Guest| {
        let header = guest.on(wire::copy_to_device::CALL, 0);
        guest
            .ask(header, |w| wire::copy_to_device::put(w, DeviceAddress(device), ArenaAddress(ARENA), 8192))
            .0
    };
    assert_eq!(work(&mut guest), 0);
    socket::send(&guest.control, &ToWorker::Detach { slot: 20 }.encode(), &[]).unwrap();
    assert_eq!(guest.told(), FromWorker::Detached { slot: 20 });
    assert_eq!(session::attachment(&guest.words(), 20), Attachment::Detached);
    assert_eq!(work(&mut guest), INVALID_VALUE, "the range is gone");

    // Slot and addresses are free again.
    let arena = guest.attach(20, ARENA, 8192);
    arena.write(0, &[9; 8192]);
    assert_eq!(work(&mut guest), 0);
}

#[test]
fn a_range_may_cross_stitched_arenas() {
    let mut guest = Guest::start();
    guest.begin();
    let (one, two) = (guest.attach(1, ARENA, MIB), guest.attach(2, ARENA + MIB, MIB));
    one.write((1 << 20) - 8, &[1; 8]);
    two.write(0, &[2; 8]);
    let device = guest.allocate(4096).unwrap();
    guest.work(wire::copy_to_device::CALL, 0, |w| {
        wire::copy_to_device::put(w, DeviceAddress(device), ArenaAddress(ARENA + MIB - 8), 16)
    });
    let last = guest.work(wire::copy_from_device::CALL, 0, |w| {
        wire::copy_from_device::put(w, ArenaAddress(ARENA), DeviceAddress(device), 16)
    });
    guest.wait(0, last);
    assert_eq!(one.read(0, 16), [1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2]);
}

// Promise: C3
#[test]
fn windows_are_reserved_exactly_or_not_at_all() {
    let mut guest = Guest::start();
    guest.begin();
    let reserve = |guest: &mut Guest, base, bytes| {
        guest.call(wire::window_reserve::CALL, |w| wire::window_reserve::put(w, base, Size(bytes))).0
    };
    assert_eq!(reserve(&mut guest, WINDOW, 2 * MIB), 208, "taken");
    assert_eq!(reserve(&mut guest, 0x10_0000, 2 * MIB), INVALID_VALUE, "outside the bounds");
    assert_eq!(reserve(&mut guest, WINDOW + (64 << 30), 2 * MIB), 0);
}

#[test]
fn a_context_takes_its_memory_with_it() {
    let mut guest = Guest::with_quota(64 * MIB);
    guest.begin();
    let primary = guest.context;
    let second = guest.create_context(1, 1);
    guest.context = second.raw();
    let address = guest.allocate(4 * MIB).unwrap();
    guest.context = primary;
    let kept = guest.allocate(4 * MIB).unwrap();
    assert_eq!(guest.info().0, 56 * MIB);
    let (result, _) = guest.call(wire::context_destroy::CALL, |w| wire::context_destroy::put(w, second));
    assert_eq!(result, 0);
    assert_eq!(guest.info().0, 60 * MIB);
    let free = |guest: &mut Guest, address| {
        guest
            .ask(guest.header(wire::memory_free::CALL), |w| wire::memory_free::put(w, DeviceAddress(address)))
            .0
    };
    assert_eq!(free(&mut guest, address), INVALID_VALUE);
    assert_eq!(free(&mut guest, kept), 0);
    guest.context = second.raw();
    assert_eq!(guest.allocate(4096), Err(201), "the context is gone");
    let again = guest.create_context(1, 1);
    assert_eq!(again, second, "id and slot are free again");
}

#[test]
fn arenas_attached_before_any_context_work() {
    let mut guest = Guest::start();
    let arena = guest.attach(1, ARENA, MIB);
    guest.begin();
    arena.write(0, b"early");
    let device = guest.allocate(64).unwrap();
    guest.work(wire::copy_to_device::CALL, 0, |w| {
        wire::copy_to_device::put(w, DeviceAddress(device), ArenaAddress(ARENA), 5)
    });
    let last = guest.work(wire::copy_from_device::CALL, 0, |w| {
        wire::copy_from_device::put(w, ArenaAddress(ARENA + 64), DeviceAddress(device), 5)
    });
    guest.wait(0, last);
    assert_eq!(arena.read(64, 5), b"early");
    eventually("an idle worker", || guest.sticky() == 0);
}
