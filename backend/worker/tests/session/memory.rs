//! Devices, device memory, arenas, copies.

use crate::{
    arbiter::FakeArbiter,
    code::{ALREADY_MAPPED, INVALID_CONTEXT, INVALID_VALUE, OUT_OF_MEMORY, SYSTEM_DRIVER_MISMATCH},
    guest::{ARENA, Arena, Guest, Start, WINDOW, memory_file},
};
use sluice_kit::wait::eventually;
use sluice_messages::control::{FromWorker, ToWorker};
use sluice_protocol::{
    calls::{self, wire},
    field::{ArenaIn, ArenaOut, ArenaRowsIn, ArenaRowsOut, DeviceAddress, ElementSize, Ordinal, Size},
    limits,
    session::{self, Attachment},
};
use sluice_shared_memory::{Run, socket};
use std::path::PathBuf;

const MIB: u64 = 1 << 20;

fn pattern(bytes: usize) -> Vec<u8> {
    (0..bytes).map(|i| u8::try_from((i * 7 + i / 251) % 256).unwrap()).collect()
}

#[test]
fn device_info_shows_the_quota_and_masks_attributes() {
    let mut guest = Guest::with_quota(100 * MIB);
    let hello = guest.call(wire::session_hello::CALL, |w| {
        wire::session_hello::Args { version: calls::VERSION, process: 42 }.put(w)
    });
    assert_eq!(hello.0, 0);
    let reply = wire::session_hello::Reply::get(&hello.1).unwrap();
    assert_eq!((reply.driver_version, reply.devices), (13050, 1));
    assert!(u64::from(reply.room) > limits::STREAM_CREDITS, "no work waits with the queues of hardware");
    let (result, fields) =
        guest.call(wire::device_info::CALL, |w| wire::device_info::Args { device: Ordinal(0) }.put(w));
    assert_eq!(result, 0);
    let info = wire::device_info::Reply::get(&fields).unwrap();
    assert!(info.name.starts_with(b"Null GPU\0"));
    assert_eq!(info.memory, 100 * MIB, "the quota is the total memory");
    assert_eq!(info.attributes.0[75], 8, "compute capability");
    assert_eq!((info.attributes.0[91], info.attributes.0[99]), (0, 0), "masked: registering host memory");
    assert_eq!((info.least_priority, info.greatest_priority), (0, -5));
    assert_eq!(info.host_atomics, [0; 13], "this driver has no such function");
    let (result, _) =
        guest.call(wire::device_info::CALL, |w| wire::device_info::Args { device: Ordinal(1) }.put(w));
    assert_ne!(result, 0, "there is no second device");
}

#[test]
fn hello_of_another_version_is_refused() {
    let mut guest = Guest::start();
    let (result, _) = guest
        .call(wire::session_hello::CALL, |w| wire::session_hello::Args { version: 99, process: 42 }.put(w));
    assert_eq!(result, SYSTEM_DRIVER_MISMATCH);
}

#[test]
fn copy_to_the_device_and_back_keeps_the_bytes() {
    there_and_back(Guest::start());
}

// Promise: F96
#[test]
fn worker_adopts_an_arena_sent_before_the_page_and_keeps_no_descriptor_of_it() {
    let ram = memory_file(8 * MIB);
    let lenders = vec![FakeArbiter::new(0).admit()];
    let mut guest =
        Guest::ready(Start { lenders, fixed_arena: Some(&ram), ..Start::on(crate::guest::null_driver()) });
    let adopted = || session::attachment(&guest.words(), session::FIXED_ARENA_SLOT);
    eventually("adoption", || adopted() == Attachment::Adopted(8 * MIB));
    assert_eq!(guest.told(), FromWorker::Attached { slot: session::FIXED_ARENA_SLOT, error: 0 });
    let descriptors = std::fs::read_dir(format!("/proc/{}/fd", guest.worker.id())).unwrap();
    let open: Vec<_> = descriptors.map(|entry| std::fs::read_link(entry.unwrap().path()).unwrap()).collect();
    assert!(!open.is_empty(), "a worker has sockets");
    let is_ram = |path: &PathBuf| path.to_string_lossy().contains("guest-ram");
    assert!(!open.iter().any(is_ram), "{open:?}");
    let run = Run { offset: 0, bytes: 8 * MIB };
    let arena = guest.seen(&ram, run);
    guest.begin();
    copies_there_and_back(&mut guest, &arena);
}

// Promise: V15
#[test]
fn copy_through_a_gathered_arena_keeps_the_bytes() {
    there_and_back(Guest::with_mapped_runs(0));
}

fn there_and_back(mut guest: Guest) {
    guest.begin();
    let arena = guest.attach(1, ARENA, 8 * MIB);
    copies_there_and_back(&mut guest, &arena);
}

fn copies_there_and_back(guest: &mut Guest, arena: &Arena) {
    const BYTES: usize = 3 << 20;
    let data = pattern(BYTES);
    arena.write(0, &data);
    let (one, two) = (guest.allocate(BYTES as u64).unwrap(), guest.allocate(BYTES as u64).unwrap());
    assert!(one >= WINDOW);
    let bytes = BYTES as u64;
    guest.work(wire::memcpy_htod::CALL, 0, |w| {
        wire::memcpy_htod::Args { to: DeviceAddress(one), from: ArenaIn { address: ARENA, bytes } }.put(w)
    });
    guest.work(wire::memcpy_dtod::CALL, 0, |w| {
        wire::memcpy_dtod::Args { to: DeviceAddress(two), from: DeviceAddress(one), bytes }.put(w)
    });
    let last = guest.work(wire::memcpy_dtoh::CALL, 0, |w| {
        wire::memcpy_dtoh::Args { to: ArenaOut { address: ARENA + 4 * MIB, bytes }, from: DeviceAddress(two) }
            .put(w)
    });
    guest.wait(0, last);
    assert_eq!(arena.read(4 << 20, BYTES), data);
}

#[test]
fn copied_rows_and_fills_change_only_their_range() {
    rows_and_fills(Guest::start());
}

// Promise: V15
#[test]
fn copied_rows_and_fills_in_a_gathered_arena_change_only_their_range() {
    rows_and_fills(Guest::with_mapped_runs(0));
}

fn rows_and_fills(mut guest: Guest) {
    guest.begin();
    let arena = guest.attach(1, ARENA, MIB);
    let device = guest.allocate(1 << 16).unwrap();
    arena.write(0, &pattern(4096));
    guest.work(wire::memset::CALL, 0, |w| {
        wire::memset::Args {
            to: DeviceAddress(device),
            pitch: 0,
            element: ElementSize::Byte,
            value: 0xee,
            width: 1 << 16,
            height: 1,
        }
        .put(w)
    });
    guest.work(wire::memcpy_2d_htod::CALL, 0, |w| {
        let from = ArenaRowsIn { address: ARENA, pitch: 100, width: 50, height: 10 };
        wire::memcpy_2d_htod::Args { to: DeviceAddress(device + 5), to_pitch: 256, from }.put(w)
    });
    guest.work(wire::memset::CALL, 0, |w| {
        wire::memset::Args {
            to: DeviceAddress(device + 128),
            pitch: 256,
            element: ElementSize::Word,
            value: 0x0403_0201,
            width: 3,
            height: 2,
        }
        .put(w)
    });
    let last = guest.work(wire::memcpy_dtoh::CALL, 0, |w| {
        wire::memcpy_dtoh::Args {
            to: ArenaOut { address: ARENA + 8192, bytes: 4096 },
            from: DeviceAddress(device),
        }
        .put(w)
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

    // Copying rows back leaves the bytes between them alone.
    arena.write(16384, &[0x55; 1000]);
    let last = guest.work(wire::memcpy_2d_dtoh::CALL, 0, |w| {
        let to = ArenaRowsOut { address: ARENA + 16384, pitch: 100, width: 50, height: 10 };
        wire::memcpy_2d_dtoh::Args { to, from: DeviceAddress(device + 5), from_pitch: 256 }.put(w)
    });
    guest.wait(0, last);
    let mut expected = vec![0x55; 1000];
    for row in 0..10 {
        expected[row * 100..][..50].copy_from_slice(&pattern(4096)[row * 100..][..50]);
    }
    // The fill above covered the first row and the second.
    let rows = arena.read(16384, 1000);
    assert_eq!(rows[200..], expected[200..]);
    assert_eq!(rows[50..100], expected[50..100]);
}

// Promise: Q1
#[test]
fn quota_holds_to_the_byte() {
    let mut guest = Guest::with_quota(96 * MIB);
    guest.begin();
    assert_eq!(guest.info(), (96 * MIB, 96 * MIB));
    let large = guest.allocate(33 * MIB).unwrap();
    assert_eq!(guest.info(), (62 * MIB, 96 * MIB), "counted in units of 2 MiB");
    let small = guest.allocate(1).unwrap();
    assert_eq!(guest.info(), (60 * MIB, 96 * MIB), "the allocation takes a pool chunk");
    assert!(guest.allocate(1000).is_ok());
    assert_eq!(guest.info(), (60 * MIB, 96 * MIB), "the allocation shares the pool chunk");
    assert_eq!(guest.allocate(61 * MIB), Err(OUT_OF_MEMORY));
    assert_eq!(guest.allocate(limits::ALLOCATION_BYTES), Err(OUT_OF_MEMORY));
    assert_eq!(guest.allocate(0), Err(INVALID_VALUE));
    assert_eq!(guest.info(), (60 * MIB, 96 * MIB), "a refusal changes nothing");
    assert!(guest.allocate(60 * MIB).is_ok());
    assert_eq!(guest.info().0, 0);
    guest.post(wire::memory_free::CALL, |w| wire::memory_free::Args { address: DeviceAddress(large) }.put(w));
    assert_eq!(guest.info().0, 34 * MIB, "the next call observes a post");
    let again = guest.allocate(34 * MIB).unwrap();
    assert_eq!(again, large, "addresses are used again");
    guest.post(wire::memory_free::CALL, |w| wire::memory_free::Args { address: DeviceAddress(small) }.put(w));
    assert_eq!(guest.info().0, 0, "the pool still has a user");
}

// Promise: F6
#[test]
fn forged_address_is_refused() {
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
        let header = header(&mut guest, wire::memcpy_htod::CALL);
        let (result, _) = guest.ask(header, |w| {
            wire::memcpy_htod::Args { to: DeviceAddress(to), from: ArenaIn { address: from, bytes } }.put(w)
        });
        assert_eq!(result, INVALID_VALUE, "{to:#x} {from:#x} {bytes:#x}");
    }
    // A refused call keeps its place: its sequence completes, and the stream continues.
    arena.write(0, b"still here");
    let last = guest.work(wire::memcpy_htod::CALL, 0, |w| {
        wire::memcpy_htod::Args { to: DeviceAddress(device), from: ArenaIn { address: ARENA, bytes: 10 } }
            .put(w)
    });
    guest.wait(0, last);
    let (result, _) = guest.ask(guest.header(wire::memory_free::CALL), |w| {
        wire::memory_free::Args { address: DeviceAddress(device + 512) }.put(w)
    });
    assert_eq!(result, INVALID_VALUE);
}

#[test]
fn arena_out_of_bounds_is_refused_and_detached_arena_is_gone() {
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
        let FromWorker::Attached { slot: told, error } = guest.told() else {
            panic!("the message is no answer")
        };
        assert_eq!(told, slot);
        assert_ne!(error, 0);
        // The worker reports before it writes the table.
        eventually("the table", || session::attachment(&guest.words(), slot) == Attachment::Refused(error));
    }

    // Two regions make one arena; the second message completes it.
    let other = memory_file(MIB);
    guest.send_attach(20, ARENA, 8192, &[run(4096, 4096)], &ram, true);
    guest.send_attach(20, ARENA, 8192, &[run(0, 4096)], &other, false);
    assert_eq!(guest.told(), FromWorker::Attached { slot: 20, error: 0 });
    let device = guest.allocate(8192).unwrap();
    let work = |guest: &mut Guest| {
        let header = guest.on(wire::memcpy_htod::CALL, 0);
        guest
            .ask(header, |w| {
                wire::memcpy_htod::Args {
                    to: DeviceAddress(device),
                    from: ArenaIn { address: ARENA, bytes: 8192 },
                }
                .put(w)
            })
            .0
    };
    assert_eq!(work(&mut guest), 0);
    socket::send(&guest.control, &ToWorker::Detach { slot: 20 }.encode(), &[]).unwrap();
    assert_eq!(guest.told(), FromWorker::Detached { slot: 20 });
    eventually("the entry's end", || session::attachment(&guest.words(), 20) == Attachment::Detached);
    assert_eq!(work(&mut guest), INVALID_VALUE, "the range is gone");

    // Slot and addresses are free again.
    let arena = guest.attach(20, ARENA, 8192);
    arena.write(0, &[9; 8192]);
    assert_eq!(work(&mut guest), 0);
}

#[test]
fn range_may_cross_adjacent_arenas() {
    let mut guest = Guest::start();
    guest.begin();
    let (one, two) = (guest.attach(1, ARENA, MIB), guest.attach(2, ARENA + MIB, MIB));
    one.write((1 << 20) - 8, &[1; 8]);
    two.write(0, &[2; 8]);
    let device = guest.allocate(4096).unwrap();
    guest.work(wire::memcpy_htod::CALL, 0, |w| {
        wire::memcpy_htod::Args {
            to: DeviceAddress(device),
            from: ArenaIn { address: ARENA + MIB - 8, bytes: 16 },
        }
        .put(w)
    });
    let last = guest.work(wire::memcpy_dtoh::CALL, 0, |w| {
        wire::memcpy_dtoh::Args { to: ArenaOut { address: ARENA, bytes: 16 }, from: DeviceAddress(device) }
            .put(w)
    });
    guest.wait(0, last);
    assert_eq!(one.read(0, 16), [1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2]);
}

// Promise: C3
#[test]
fn window_is_reserved_at_its_exact_address_or_refused() {
    let mut guest = Guest::start();
    guest.begin();
    let reserve = |guest: &mut Guest, base, bytes| {
        guest
            .call(wire::window_reserve::CALL, |w| {
                wire::window_reserve::Args { base, bytes: Size(bytes) }.put(w)
            })
            .0
    };
    assert_eq!(reserve(&mut guest, WINDOW, 2 * MIB), ALREADY_MAPPED, "the range is taken");
    assert_eq!(reserve(&mut guest, 0x10_0000, 2 * MIB), INVALID_VALUE, "the range is outside the bounds");
    assert_eq!(reserve(&mut guest, WINDOW + (64 << 30), 2 * MIB), 0);
    assert_eq!(reserve(&mut guest, limits::WIDE_WINDOW_BOUNDS.start, 1 << 40), 0, "a later, wide window");
}

#[test]
fn destroyed_context_frees_its_memory() {
    let mut guest = Guest::with_quota(64 * MIB);
    guest.begin();
    let primary = guest.session.context;
    let second = guest.create_context(1, 1);
    guest.session.context = second.raw();
    let address = guest.allocate(4 * MIB).unwrap();
    guest.session.context = primary;
    let kept = guest.allocate(4 * MIB).unwrap();
    assert_eq!(guest.info().0, 56 * MIB);
    let (result, _) =
        guest.call(wire::context_destroy::CALL, |w| wire::context_destroy::Args { context: second }.put(w));
    assert_eq!(result, 0);
    assert_eq!(guest.info().0, 60 * MIB);
    let free = |guest: &mut Guest, address| {
        guest
            .ask(guest.header(wire::memory_free::CALL), |w| {
                wire::memory_free::Args { address: DeviceAddress(address) }.put(w)
            })
            .0
    };
    assert_eq!(free(&mut guest, address), INVALID_VALUE);
    assert_eq!(free(&mut guest, kept), 0);
    guest.session.context = second.raw();
    assert_eq!(guest.allocate(4096), Err(INVALID_CONTEXT), "the context is gone");
    let again = guest.create_context(1, 1);
    assert_eq!(again, second, "id and slot are free again");
}

#[test]
fn arena_attached_before_any_context_is_usable() {
    let mut guest = Guest::start();
    let arena = guest.attach(1, ARENA, MIB);
    guest.begin();
    arena.write(0, b"early");
    let device = guest.allocate(64).unwrap();
    guest.work(wire::memcpy_htod::CALL, 0, |w| {
        wire::memcpy_htod::Args { to: DeviceAddress(device), from: ArenaIn { address: ARENA, bytes: 5 } }
            .put(w)
    });
    let last = guest.work(wire::memcpy_dtoh::CALL, 0, |w| {
        wire::memcpy_dtoh::Args {
            to: ArenaOut { address: ARENA + 64, bytes: 5 },
            from: DeviceAddress(device),
        }
        .put(w)
    });
    guest.wait(0, last);
    assert_eq!(arena.read(64, 5), b"early");
    eventually("an idle worker", || guest.sticky() == 0);
}
