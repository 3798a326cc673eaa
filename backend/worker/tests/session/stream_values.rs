//! Streams that wait for values in memory, on the software GPU.

use crate::{
    code::{INVALID_HANDLE, INVALID_VALUE},
    guest::{ARENA, Guest},
    softgpu::Device,
    streams::{event, stream},
};
use sluice_kit::wait::eventually;
use sluice_protocol::{
    calls::wire,
    field::{DeviceAddress, Mint, Take},
    handle::{Array, Event, Id},
    limits,
};
use std::time::Duration;

/// `CU_STREAM_WAIT_VALUE_EQ`.
pub(crate) const EQUAL: u32 = 1;

pub(crate) fn wait(guest: &mut Guest, slot: u32, at: u64, value: u64, wide: bool, comparison: u32) -> u64 {
    guest.work(wire::stream_wait_value::CALL, slot, |w| {
        wire::stream_wait_value::Args { at: DeviceAddress(at), value, wide, comparison }.put(w)
    })
}

pub(crate) fn write(guest: &mut Guest, slot: u32, to: u64, value: u64) -> u64 {
    guest.work(wire::stream_write_value::CALL, slot, |w| {
        wire::stream_write_value::Args { to: DeviceAddress(to), value, wide: true }.put(w)
    })
}

/// A guest with streams in slots 1 and 2, and 16 bytes of device memory that are 0.
pub(crate) fn ready(device: &Device) -> (Guest, u64) {
    let mut guest = device.guest(limits::MAPPED_RUNS, false);
    stream(&mut guest, 1, 1);
    stream(&mut guest, 2, 2);
    let words = guest.allocate(16).unwrap();
    for at in [words, words + 8] {
        let last = write(&mut guest, 0, at, 0);
        guest.wait(0, last);
    }
    (guest, words)
}

// Promise: C90
#[test]
fn stream_is_held_until_the_value_is_there_and_others_are_not() {
    let device = Device::new();
    let (mut guest, words) = ready(&device);
    let arena = guest.attach(1, ARENA, 1 << 20);
    arena.write(0, &[0; 16]);
    let held = wait(&mut guest, 1, words, 7, false, EQUAL);
    // Pinned memory ends the second wait.
    wait(&mut guest, 1, ARENA, 1 << 40, true, EQUAL);
    let behind = write(&mut guest, 1, ARENA + 8, 9);
    for _ in 0..100 {
        let beside = write(&mut guest, 2, words + 8, 1);
        guest.wait(2, beside);
        assert!(guest.completed(1) < held, "the stream is held");
    }
    write(&mut guest, 2, words, 7);
    eventually("the first wait is over", || guest.completed(1) == held);
    assert_eq!(arena.read(8, 8), [0; 8]);
    arena.write(0, &(1_u64 << 40).to_ne_bytes());
    guest.wait(1, behind);
    assert_eq!(arena.read(8, 8), 9_u64.to_ne_bytes());
}

// Promise: C91
#[test]
fn operation_with_a_wrong_address_or_comparison_is_refused_and_holds_no_stream() {
    let device = Device::new();
    let (mut guest, words) = ready(&device);
    let arena = guest.attach(1, ARENA, 1 << 20);
    arena.write(0, &[0; 16]);
    let wrong = [
        (words + 2, false, EQUAL),
        (words + 4, true, EQUAL),
        (words, false, 4),
        (words, false, 1 << 30),
        (words, false, u32::MAX),
        (0, false, EQUAL),
        (0x40, true, EQUAL),
        (u64::MAX - 3, false, EQUAL),
        (u64::MAX - 7, true, EQUAL),
        (words + (2 << 20), false, EQUAL),
        (ARENA + (1 << 20), true, EQUAL),
        // The worker's own memory.
        ((&raw const words).expose_provenance() as u64 & !7, true, EQUAL),
    ];
    for (count, (at, wide, comparison)) in (1..).zip(wrong) {
        let sequence = wait(&mut guest, 1, at, 1, wide, comparison);
        guest.wait(1, sequence);
        assert_eq!(guest.late_error(0), (count, INVALID_VALUE), "{at:#x} {comparison:#x}");
    }
    let refused = u32::try_from(wrong.len()).unwrap();
    let sequence =
        guest.work(wire::stream_barrier::CALL, 1, |w| wire::stream_barrier::Args { kind: 2 }.put(w));
    guest.wait(1, sequence);
    assert_eq!(guest.late_error(0), (refused + 1, INVALID_VALUE));
    let sequence =
        guest.work(wire::stream_barrier::CALL, 1, |w| wire::stream_barrier::Args { kind: 1 }.put(w));
    guest.wait(1, sequence);
    assert_eq!((guest.late_error(0).0, guest.sticky()), (refused + 1, 0));
}

// Promise: C91
#[test]
fn waits_that_never_end_cost_neither_a_neighbour_nor_the_end_of_their_session() {
    let device = Device::new();
    let (mut guest, words) = ready(&device);
    let (mut neighbour, others) = ready(&device);
    // As many as the streams have credits for.
    for _ in 0..limits::STREAM_CREDITS {
        wait(&mut guest, 1, words, 1, false, EQUAL);
        wait(&mut guest, 2, words, 1, false, EQUAL);
    }
    let beside = write(&mut guest, 0, words + 8, 2);
    guest.wait(0, beside);
    for value in 0..200 {
        let last = write(&mut neighbour, 1, others, value);
        neighbour.wait(1, last);
    }
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!((guest.completed(1), guest.completed(2), guest.sticky()), (0, 0, 0));
    guest.hang_up();
    assert_eq!(guest.ended().code(), Some(0));
    let last = write(&mut neighbour, 2, others, 1);
    neighbour.wait(2, last);
}

// Promise: C91
#[test]
fn array_whose_copies_never_begin_costs_neither_a_neighbour_nor_the_end_of_its_session() {
    let device = Device::new();
    let (mut guest, words) = ready(&device);
    let (mut neighbour, others) = ready(&device);
    let array = Id::<Array>::new(0, 1);
    let make = wire::array_create::Args {
        extent: [2, 1, 0],
        format: 0x20,
        channels: 1,
        flags: 0,
        array: Mint(array),
    };
    assert_eq!(guest.call(wire::array_create::CALL, |w| make.put(w)).0, 0);
    wait(&mut guest, 1, words, 1, false, EQUAL);
    guest.work(wire::memcpy_dtoa::CALL, 1, |w| {
        let from = DeviceAddress(words);
        wire::memcpy_dtoa::Args {
            to: array,
            at: [0; 3],
            from,
            from_pitch: 8,
            from_rows: 1,
            extent: [8, 1, 1],
        }
        .put(w)
    });
    // A driver may wait for the copy before it destroys the array.
    guest.post(wire::array_destroy::CALL, |w| wire::array_destroy::Args { array: Take(array) }.put(w));
    for value in 0..200 {
        let last = write(&mut neighbour, 1, others, value);
        neighbour.wait(1, last);
    }
    let beside = write(&mut guest, 2, words + 8, 2);
    guest.wait(2, beside);
    assert_eq!((guest.completed(1), guest.sticky()), (0, 0));
    guest.hang_up();
    assert_eq!(guest.ended().code(), Some(0));
    let last = write(&mut neighbour, 2, others, 1);
    neighbour.wait(2, last);
}

pub(crate) fn record_context(guest: &mut Guest, slot: u32, event: Id<Event>) -> u64 {
    guest.work(wire::context_record::CALL, slot, |w| wire::context_record::Args { event }.put(w))
}

// Promise: C92
#[test]
fn record_of_a_context_holds_its_stream_until_all_work_is_done() {
    let device = Device::new();
    let (mut guest, words) = ready(&device);
    let event = event(&mut guest, 0);
    wait(&mut guest, 1, words, 1, false, EQUAL);
    let recorded = record_context(&mut guest, 2, event);
    for value in 2..50 {
        let beside = write(&mut guest, 0, words + 8, value);
        guest.wait(0, beside);
        assert!(guest.completed(2) < recorded, "work of the context is not done");
    }
    write(&mut guest, 0, words, 1);
    guest.wait(2, recorded);
    // An id that is not of this session, and one of a destroyed event.
    guest.post(wire::event_destroy::CALL, |w| wire::event_destroy::Args { event }.put(w));
    for (count, wrong) in [(1, event), (2, Id::new(77, 1))] {
        let refused = record_context(&mut guest, 2, wrong);
        guest.wait(2, refused);
        assert_eq!(guest.late_error(0), (count, INVALID_HANDLE));
    }
    assert_eq!(guest.sticky(), 0);
}
