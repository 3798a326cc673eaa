//! Streams that are full in the driver, on a software GPU with short queues: the worker knows their length, and never waits for room.

use crate::{
    code::ILLEGAL_ADDRESS,
    guest::Guest,
    softgpu::{Device, store},
    stream_values::{EQUAL, ready, record_context, wait, write},
    streams::{event, launch, stream},
};
use sluice_kit::wait::eventually;
use sluice_protocol::{
    calls::wire,
    field::Mint,
    handle::{Event, Id, Stream},
    limits,
};

/// Lengths of a driver's queues: the shortest ones, a short one, and that of hardware.
const QUEUES: [u64; 4] = [2, 3, 64, limits::DRIVER_QUEUE];

fn record(guest: &mut Guest, slot: u32, event: Id<Event>) -> u64 {
    guest.work(wire::event_record::CALL, slot, |w| wire::event_record::Args { event }.put(w))
}

fn wait_event(guest: &mut Guest, slot: u32, event: Id<Event>) -> u64 {
    guest.work(wire::stream_wait::CALL, slot, |w| wire::stream_wait::Args { event }.put(w))
}

/// Work beside a held stream ends.
fn goes_on(guest: &mut Guest, slot: u32, at: u64) {
    for value in 100..150 {
        let beside = write(guest, slot, at, value);
        guest.wait(slot, beside);
    }
}

/// Posts as much work behind a wait as a stream has credits. Returns the last sequence.
fn fill(guest: &mut Guest, slot: u32, words: u64) -> u64 {
    wait(guest, slot, words, 7, false, EQUAL);
    (2..limits::STREAM_CREDITS).map(|value| write(guest, slot, words + 8, value)).last().unwrap()
}

// Promise: C138
#[test]
fn hundreds_of_records_behind_a_held_stream_delay_no_other() {
    for queue in QUEUES {
        let device = Device::with_queue(queue);
        let (mut guest, words) = ready(&device);
        let event = event(&mut guest, 0);
        wait(&mut guest, 1, words, 7, false, EQUAL);
        let last = (1..limits::STREAM_CREDITS).map(|_| record(&mut guest, 1, event)).last().unwrap();
        goes_on(&mut guest, 2, words + 8);
        assert_eq!(guest.completed(1), 0, "the stream is held");
        write(&mut guest, 2, words, 7);
        guest.wait(1, last);
        assert_eq!((guest.late_error(0).0, guest.sticky()), (0, 0));
    }
}

// Promise: C138
#[test]
fn hundreds_of_records_of_a_whole_context_delay_no_stream_where_queues_are_those_of_hardware() {
    let device = Device::with_queue(limits::DRIVER_QUEUE);
    let (mut guest, words) = ready(&device);
    stream(&mut guest, 3, 3);
    let event = event(&mut guest, 0);
    wait(&mut guest, 1, words, 7, false, EQUAL);
    let last = (0..limits::STREAM_CREDITS).map(|_| record_context(&mut guest, 3, event)).last().unwrap();
    goes_on(&mut guest, 2, words + 8);
    assert_eq!((guest.completed(1), guest.completed(3)), (0, 0));
    write(&mut guest, 2, words, 7);
    guest.wait(3, last);
    assert_eq!((guest.late_error(0).0, guest.sticky()), (0, 0));
}

// Promise: C138
#[test]
fn work_that_waits_for_a_full_stream_stays_behind_it_and_other_work_does_not() {
    const BLOCKING: u32 = 3;
    for queue in QUEUES {
        let device = Device::with_queue(queue);
        let (mut guest, words) = ready(&device);
        let blocking = Id::<Stream>::new(3, 1);
        guest.post(wire::stream_create::CALL, |w| {
            wire::stream_create::Args { stream: Mint(blocking), slot: BLOCKING, flags: 0, priority: 0 }.put(w)
        });
        stream(&mut guest, 4, 4);
        let event = event(&mut guest, 0);
        let (default, apart) = (guest.completed(0), guest.completed(4));
        fill(&mut guest, BLOCKING, words);
        let recorded = record(&mut guest, BLOCKING, event);
        // One stream waits by an event, and the default stream implicitly.
        wait_event(&mut guest, 4, event);
        let behind = [(4, write(&mut guest, 4, words + 8, 1)), (0, write(&mut guest, 0, words + 8, 2))];
        goes_on(&mut guest, 2, words + 8);
        assert_eq!((guest.completed(0), guest.completed(4)), (default, apart));
        assert_eq!(guest.completed(BLOCKING), 0, "the stream is held");
        write(&mut guest, 2, words, 7);
        for (slot, last) in behind {
            guest.wait(slot, last);
            assert!(guest.completed(BLOCKING) >= recorded, "work passed what it waits for");
        }
        assert_eq!((guest.late_error(0).0, guest.sticky()), (0, 0));
    }
}

#[test]
fn stream_and_event_with_waiting_work_are_destroyed_behind_it() {
    for queue in QUEUES {
        let device = Device::with_queue(queue);
        let (mut guest, words) = ready(&device);
        let event = event(&mut guest, 0);
        let held = stream(&mut guest, 3, 3);
        fill(&mut guest, 3, words);
        let last = record(&mut guest, 3, event);
        guest.post(wire::event_destroy::CALL, |w| wire::event_destroy::Args { event }.put(w));
        guest.post(wire::stream_destroy::CALL, |w| wire::stream_destroy::Args { stream: held }.put(w));
        goes_on(&mut guest, 2, words + 8);
        assert_eq!(guest.completed(3), 0, "the stream is held");
        write(&mut guest, 2, words, 7);
        guest.wait(3, last);
        goes_on(&mut guest, 2, words + 8);
        assert_eq!((guest.late_error(0).0, guest.sticky()), (0, 0));
    }
}

#[test]
fn failure_beside_a_full_stream_ends_the_wait_for_room() {
    for queue in QUEUES {
        let device = Device::with_queue(queue);
        let (mut guest, words) = ready(&device);
        let store = store(&mut guest);
        fill(&mut guest, 1, words);
        goes_on(&mut guest, 2, words + 8);
        launch(&mut guest, 2, store, &0x1234_0000_u64.to_le_bytes());
        eventually("the failure is known", || guest.sticky() == ILLEGAL_ADDRESS);
        guest.hang_up();
        assert_eq!(guest.ended().code(), Some(0));
    }
}
