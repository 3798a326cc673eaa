//! Streams, events, order, completion, sleeping.

use crate::{
    code::{INVALID_HANDLE, INVALID_VALUE, NOT_READY},
    guest::{ARENA, Guest},
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use sluice_kit::wait::{TIMEOUT, eventually};
use sluice_protocol::{
    calls::wire,
    field::{ArenaIn, ArenaText, Bytes, CarriedOptions, LaunchAttributes, Mint, Name, Ordinal, Size},
    handle::{Event, Function, Id, Module, Stream},
    limits,
    park::Parking,
    session,
    shared::Shared,
};
use std::{sync::atomic::Ordering, time::Duration};

/// A function of the null driver, by name.
pub(crate) fn function(guest: &mut Guest, index: u32, name: &str) -> Id<Function> {
    let module = Id::<Module>::new(index, 1);
    let (result, _) = guest.call(wire::module_load::CALL, |w| {
        let none = 0;
        wire::module_load::Args {
            module: Mint(module),
            library: true,
            image: ArenaIn { address: ARENA, bytes: 64 },
            options: CarriedOptions::NONE,
            info: Size(0),
            error: Size(0),
            report: ArenaText { address: none, bytes: 0 },
        }
        .put(w)
    });
    assert_eq!(result, 0, "library");
    let id = Id::<Function>::new(index, 1);
    let (result, _) = guest.call(wire::module_function::CALL, |w| {
        wire::module_function::Args { module, function: Mint(id), name: Name(name.as_bytes()) }.put(w)
    });
    assert_eq!(result, 0, "kernel");
    id
}

pub(crate) fn put_launch(
    writer: &mut sluice_protocol::field::Writer<'_>,
    function: Id<Function>,
    parameters: &[u8],
) -> Result<(), sluice_protocol::field::FieldError> {
    wire::launch::Args {
        function,
        grid: [1; 3],
        block: [32, 1, 1],
        shared: 0,
        cooperative: false,
        attributes: LaunchAttributes(&[]),
        parameters: Bytes(parameters),
    }
    .put(writer)
}

pub(crate) fn launch(guest: &mut Guest, slot: u32, function: Id<Function>, parameters: &[u8]) -> u64 {
    guest.work(wire::launch::CALL, slot, |w| put_launch(w, function, parameters))
}

pub(crate) fn stream(guest: &mut Guest, index: u32, slot: u32) -> Id<Stream> {
    let id = Id::<Stream>::new(index, 1);
    guest.post(wire::stream_create::CALL, |w| {
        wire::stream_create::Args { stream: Mint(id), slot, flags: 1, priority: 0 }.put(w)
    });
    id
}

pub(crate) fn event(guest: &mut Guest, index: u32) -> Id<Event> {
    let id = Id::<Event>::new(index, 1);
    guest.post(wire::event_create::CALL, |w| wire::event_create::Args { event: Mint(id), flags: 0 }.put(w));
    id
}

/// An arena that holds a PTX text at its start.
pub(crate) fn image(guest: &Guest) -> crate::guest::Arena {
    let arena = guest.attach(1, ARENA, 1 << 20);
    arena.write(0, b".version 8.0\n.target sm_80\n.address_size 64\n\0");
    arena
}

/// A guest with a context, and an arena with a PTX text at its start.
pub(crate) fn ready() -> (Guest, crate::guest::Arena) {
    let mut guest = Guest::start();
    guest.begin();
    let arena = image(&guest);
    (guest, arena)
}

#[test]
fn work_completes_in_the_order_of_its_stream() {
    let (mut guest, _arena) = ready();
    let kernel = function(&mut guest, 0, "work_p2");
    stream(&mut guest, 0, 1);
    stream(&mut guest, 1, 2);
    for round in 1..=2000_u64 {
        let slot = u32::try_from(round % 3).unwrap();
        let sequence = launch(&mut guest, slot, kernel, &[0; 16]);
        if round % 100 == 0 {
            guest.wait(slot, sequence);
        }
        // The shim's part: no more work in flight than a stream has credits.
        eventually("credits", || sequence - guest.completed(slot) < limits::STREAM_CREDITS);
    }
    for slot in 0..3 {
        let posted = guest.on(0, slot).sequence - 1;
        guest.wait(slot, posted);
        assert_eq!(guest.completed(slot), posted);
    }
}

// Promise: C6
#[test]
fn held_stream_delays_no_other_stream_and_no_call() {
    let (mut guest, arena) = ready();
    let (hold, kernel) = (function(&mut guest, 0, "hold_p1"), function(&mut guest, 1, "work"));
    stream(&mut guest, 0, 1);
    stream(&mut guest, 1, 2);
    stream(&mut guest, 2, 3);
    let word = ARENA + 4096;
    let before = launch(&mut guest, 1, kernel, &[]);
    let held = launch(&mut guest, 1, hold, &word.to_le_bytes());
    let event = event(&mut guest, 0);
    let recorded = guest.work(wire::event_record::CALL, 1, |w| wire::event_record::Args { event }.put(w));
    // A second stream waits for the first; a third is free.
    guest.work(wire::stream_wait::CALL, 2, |w| wire::stream_wait::Args { event }.put(w));
    let dependent = launch(&mut guest, 2, kernel, &[]);
    let free = launch(&mut guest, 3, kernel, &[]);
    guest.wait(1, before);
    guest.wait(3, free);
    assert_eq!(
        guest.call(wire::device_memory::CALL, |w| wire::device_memory::Args { device: Ordinal(0) }.put(w)).0,
        0,
        "calls are answered"
    );
    assert_eq!(guest.completed(1), held - 1);
    assert!(guest.completed(2) < dependent);
    arena.words().store_u32(4096, 1, Ordering::Release);
    guest.wait(1, recorded);
    guest.wait(2, dependent);
}

// Promise: C6
#[test]
fn wait_never_covers_work_posted_after_it() {
    let (mut guest, arena) = ready();
    let (hold, kernel) = (function(&mut guest, 0, "hold_p1"), function(&mut guest, 1, "work"));
    let event = event(&mut guest, 0);
    let word = (ARENA + 4096).to_le_bytes();
    // All records are in the ring before the worker reads: a kernel, a recording, then a kernel that the guest releases only
    // after it saw the recording complete.
    for round in 0..200 {
        let first = guest.on(wire::launch::CALL, 0);
        guest.put(first, |w| put_launch(w, kernel, &[]));
        let record = guest.on(wire::event_record::CALL, 0);
        guest.put(record, |w| wire::event_record::Args { event }.put(w));
        let held = guest.on(wire::launch::CALL, 0);
        guest.put(held, |w| put_launch(w, hold, &word));
        guest.ring();
        guest.wait(0, record.sequence);
        assert!(guest.completed(0) < held.sequence, "round {round}");
        arena.words().store_u32(4096, 1, Ordering::Release);
        guest.wait(0, held.sequence);
        arena.words().store_u32(4096, 0, Ordering::Release);
        // The word still holds the null driver's stream; an empty launch does not change that.
        arena.words().store_u32(4096, 1, Ordering::Release);
        let freed = launch(&mut guest, 0, hold, &(ARENA + 8192).to_le_bytes());
        arena.words().store_u32(8192, 1, Ordering::Release);
        guest.wait(0, freed);
        arena.words().store_u32(4096, 0, Ordering::Release);
    }
}

// Promise: C6
#[test]
fn full_stream_is_released_by_another_thread_of_the_same_session() {
    let (mut guest, arena) = ready();
    let (hold, kernel) = (function(&mut guest, 0, "hold_p1"), function(&mut guest, 1, "work"));
    stream(&mut guest, 0, 1);
    launch(&mut guest, 1, hold, &(ARENA + 4096).to_le_bytes());
    let mut last = 0;
    for _ in 1..limits::STREAM_CREDITS {
        last = launch(&mut guest, 1, kernel, &[]);
    }
    // The stream is out of credits; the ring, other streams and calls are not.
    let other = launch(&mut guest, 0, kernel, &[]);
    guest.wait(0, other);
    assert_eq!(guest.completed(1), 0);
    arena.words().store_u32(4096, 1, Ordering::Release);
    guest.wait(1, last);
}

#[test]
fn ids_of_destroyed_streams_and_events_are_reusable() {
    let (mut guest, _arena) = ready();
    let kernel = function(&mut guest, 0, "work");
    for generation in 1..=50 {
        let (one, two) = (Id::<Event>::new(0, generation), Id::<Event>::new(1, generation));
        let id = Id::<Stream>::new(0, generation);
        guest.post(wire::stream_create::CALL, |w| {
            wire::stream_create::Args { stream: Mint(id), slot: 1, flags: 0, priority: -1 }.put(w)
        });
        guest.post(wire::event_create::CALL, |w| {
            wire::event_create::Args { event: Mint(one), flags: 0 }.put(w)
        });
        guest.post(wire::event_create::CALL, |w| {
            wire::event_create::Args { event: Mint(two), flags: 0 }.put(w)
        });
        guest.work(wire::event_record::CALL, 1, |w| wire::event_record::Args { event: one }.put(w));
        launch(&mut guest, 1, kernel, &[]);
        let last =
            guest.work(wire::event_record::CALL, 1, |w| wire::event_record::Args { event: two }.put(w));
        assert_eq!(last, u64::from(generation) * 3, "the slot keeps counting");
        guest.wait(1, last);
        let (result, fields) = guest
            .call(wire::event_elapsed::CALL, |w| wire::event_elapsed::Args { start: one, end: two }.put(w));
        assert_eq!(result, 0);
        assert!(wire::event_elapsed::Reply::get(&fields).unwrap().milliseconds > 0.0);
        guest.post(wire::event_destroy::CALL, |w| wire::event_destroy::Args { event: one }.put(w));
        guest.post(wire::event_destroy::CALL, |w| wire::event_destroy::Args { event: two }.put(w));
        guest.post(wire::stream_destroy::CALL, |w| wire::stream_destroy::Args { stream: id }.put(w));
    }
    assert_eq!(guest.info().0, guest.info().1);
    assert_eq!(guest.sticky(), 0);
}

#[test]
fn work_of_a_destroyed_stream_still_completes() {
    let (mut guest, arena) = ready();
    let hold = function(&mut guest, 0, "hold_p1");
    let id = stream(&mut guest, 0, 1);
    let held = launch(&mut guest, 1, hold, &(ARENA + 4096).to_le_bytes());
    guest.post(wire::stream_destroy::CALL, |w| wire::stream_destroy::Args { stream: id }.put(w));
    let context = Id::from_raw(guest.session.context).unwrap();
    let destroy = |guest: &mut Guest| {
        guest.call(wire::context_destroy::CALL, |w| wire::context_destroy::Args { context }.put(w)).0
    };
    assert_eq!(destroy(&mut guest), NOT_READY, "its context has work in flight");
    arena.words().store_u32(4096, 1, Ordering::Release);
    guest.wait(1, held);
    assert_eq!(destroy(&mut guest), 0);
}

// Promise: V2
#[test]
fn idle_worker_sleeps_and_no_wake_up_is_lost() {
    let mut guest = Guest::start();
    guest.begin();
    let asleep = |guest: &Guest| guest.words().load_u32(session::WORKER_PARKED, Ordering::Acquire) == 1;
    for _ in 0..20 {
        eventually("sleep", || asleep(&guest));
        assert_eq!(guest.info().0, guest.info().1);
    }
    // The guest announces its sleep; the answer wakes it through the eventfd.
    let mut rung = 0;
    for round in 0..20 {
        eventually("sleep", || asleep(&guest));
        let words = guest.words();
        let ticket = 10_000 + round;
        let header =
            sluice_protocol::record::Header { reply: 3, ticket, ..guest.header(wire::device_memory::CALL) };
        assert!(Parking::GUEST.enter(&words, || false));
        guest.put(header, |w| wire::device_memory::Args { device: Ordinal(0) }.put(w));
        // Not in every round: a worker that has announced its sleep checks once more, and an old doorbell may wake it.
        rung += u32::from(guest.ring());
        let mut ready = [PollFd::new(&guest.wake, PollFlags::IN)];
        let timeout = Timespec::try_from(TIMEOUT).unwrap();
        assert_eq!(poll(&mut ready, Some(&timeout)).unwrap(), 1, "no wake-up in round {round}");
        rustix::io::read(&guest.wake, &mut [0; 8]).unwrap();
        Parking::GUEST.leave(&words);
        assert_eq!(guest.answer(ticket).0, 0);
    }
    assert!(rung > 0, "the dispatcher never slept");
}

// Promise: V2
#[test]
fn guest_that_sleeps_for_room_in_the_ring_is_woken() {
    let (mut guest, _arena) = ready();
    eventually("sleep", || guest.words().load_u32(session::WORKER_PARKED, Ordering::Acquire) == 1);
    let words = guest.words();
    // A post without an answer: the only change is that the ring becomes empty.
    assert!(Parking::GUEST.enter(&words, || false));
    event(&mut guest, 7);
    let mut ready = [PollFd::new(&guest.wake, PollFlags::IN)];
    let timeout = Timespec::try_from(TIMEOUT).unwrap();
    assert_eq!(poll(&mut ready, Some(&timeout)).unwrap(), 1, "no wake-up although the ring was read");
}

#[test]
fn sleeping_worker_uses_no_cpu_time() {
    let mut guest = Guest::start();
    guest.begin();
    let ticks = |guest: &Guest| {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", guest.worker.id())).unwrap();
        let fields: Vec<&str> = stat.rsplit(')').next().unwrap().split_whitespace().collect();
        fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
    };
    eventually("sleep", || guest.words().load_u32(session::WORKER_PARKED, Ordering::Acquire) == 1);
    // Other threads than the one that sleeps may still be starting.
    eventually("a second without CPU time", || {
        let before = ticks(&guest);
        std::thread::sleep(Duration::from_secs(1));
        ticks(&guest) - before <= 1
    });
}

#[test]
fn post_with_a_reply_slot_returns_the_status_of_its_submission() {
    let (mut guest, _arena) = ready();
    let kernel = function(&mut guest, 0, "work_p1");
    let header = guest.on(wire::launch::CALL, 0);
    assert_eq!(guest.ask(header, |w| put_launch(w, kernel, &[0; 8])).0, 0);
    let header = guest.on(wire::launch::CALL, 0);
    assert_eq!(
        guest.ask(header, |w| put_launch(w, kernel, &[0; 16])).0,
        1,
        "parameters do not fit the layout"
    );
    let header = guest.on(wire::launch::CALL, 0);
    assert_eq!(
        guest.ask(header, |w| put_launch(w, Id::new(7, 1), &[])).0,
        INVALID_HANDLE,
        "there is no such function"
    );
    // The null driver refuses an empty grid only with attributes; the code is the driver's, and no error is sticky.
    let header = guest.on(wire::launch::CALL, 0);
    let (result, _) = guest.ask(header, |w| {
        wire::launch::Args {
            function: kernel,
            grid: [0, 1, 1],
            block: [1; 3],
            shared: 0,
            cooperative: true,
            attributes: LaunchAttributes(&[]),
            parameters: Bytes(&[0; 8]),
        }
        .put(w)
    });
    assert_eq!(result, INVALID_VALUE);
    guest.wait(0, header.sequence);
    assert_eq!(guest.sticky(), 0);
}

#[test]
fn launch_with_a_wrong_attribute_is_refused() {
    let (mut guest, _arena) = ready();
    let kernel = function(&mut guest, 0, "work");
    let event = event(&mut guest, 0);
    let attribute = |id: u64, values: [u64; 2]| {
        [id, values[0], values[1], 0, 0, 0, 0, 0, 0].map(u64::to_le_bytes).concat()
    };
    for (bytes, expected) in [
        (attribute(4, [1 | 1 << 32, 1]), 0),
        (attribute(7, [event.raw(), 0]), 0),
        (attribute(7, [Id::<Event>::new(9, 1).raw(), 0]), 400),
        (attribute(7, [0x40_0000, 0]), 400),
        (attribute(1, [0x40_0000, 4096]), 1),
        (attribute(13, [1, 0]), 801),
        (attribute(u64::MAX, [1, 0]), 1),
        (attribute(2, [1, 0])[..64].to_vec(), 1),
    ] {
        let header = guest.on(wire::launch::CALL, 0);
        let (result, _) = guest.ask(header, |w| {
            wire::launch::Args {
                function: kernel,
                grid: [1; 3],
                block: [1; 3],
                shared: 0,
                cooperative: false,
                attributes: LaunchAttributes(&bytes),
                parameters: Bytes(&[]),
            }
            .put(w)
        });
        assert_eq!(result, expected, "{bytes:?}");
    }
}
