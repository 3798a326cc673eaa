//! The dispatcher without its thread: any record, and orders that break the protocol. In one file: they share one played guest.

use super::*;
use crate::{harness::Harness, submit::time::OPEN};
use proptest::prelude::*;
use sluice_kit::wait::eventually;
use sluice_messages::custody::page::TELL;
use sluice_protocol::{
    calls::{self, wire},
    field::{
        ArenaIn, ArenaText, Bytes, CarriedOptions, DeviceAddress, FieldError, LaunchAttributes, Mint, Name,
        Ordinal, Size, Take, Writer,
    },
    record::{NO_REPLY, NO_STREAM},
    reply,
    ring::Producer,
    session as page,
};
use std::{
    path::PathBuf,
    sync::atomic::{AtomicU64, Ordering},
    time::{Duration, Instant},
};

/// The next free number; each session of this process has its own range of addresses.
static PLACE: AtomicU64 = AtomicU64::new(0);

fn null_driver() -> PathBuf {
    std::env::current_exe().unwrap().with_file_name("libsluice_null_driver.so")
}

/// The guest of a harness.
struct Guest {
    harness: Harness,
    ticket: u32,
    sequence: u64,
    context: u64,
    function: Id<Function>,
}

impl Guest {
    fn new() -> Guest {
        let harness = Harness::new(&null_driver(), PLACE.fetch_add(1, Ordering::Relaxed));
        Guest { harness, ticket: 0, sequence: 0, context: 0, function: Id::new(0, 1) }
    }

    /// Waits until nothing is in flight; then no time of the device passes.
    fn no_time_passes(&self) {
        eventually("nothing is in flight, and no time passes", || {
            let before = self.harness.submit_queue().time().shown();
            std::thread::sleep(Duration::from_millis(20));
            before.0 == 0 && self.harness.submit_queue().time().shown() == before
        });
    }

    /// A guest with a context and a function that has one parameter.
    fn ready() -> Guest {
        let mut guest = Guest::new();
        let context = Id::<Context>::new(0, 1);
        let module = Id::<Module>::new(0, 1);
        assert_eq!(
            guest.ask(wire::session_hello::CALL, |w| wire::session_hello::Args {
                version: calls::VERSION,
                process: 1
            }
            .put(w)),
            0
        );
        let create = |w: &mut Writer<'_>| {
            wire::context_create::Args {
                context: Mint(context),
                device: Ordinal(0),
                flags: 0,
                primary: true,
                stream: 0,
            }
            .put(w)
        };
        assert_eq!(guest.ask(wire::context_create::CALL, create), 0);
        guest.context = context.raw();
        let arena = guest.harness.arena;
        let load = |w: &mut Writer<'_>| {
            wire::module_load::Args {
                module: Mint(module),
                library: true,
                image: ArenaIn { address: arena, bytes: 64 },
                options: CarriedOptions::NONE,
                info: Size(0),
                error: Size(0),
                report: ArenaText { address: 0, bytes: 0 },
            }
            .put(w)
        };
        assert_eq!(guest.ask(wire::module_load::CALL, load), 0);
        let function = guest.function;
        let find = |w: &mut Writer<'_>| {
            wire::module_function::Args { module, function: Mint(function), name: Name(b"work_p1") }.put(w)
        };
        assert_eq!(guest.ask(wire::module_function::CALL, find), 0);
        guest
    }

    fn header(&self, call: u16) -> Header {
        Header {
            call,
            reply: NO_REPLY,
            ticket: 0,
            context: self.context,
            stream: NO_STREAM,
            thread: 0,
            sequence: 0,
        }
    }

    fn send(&mut self, header: Header, put: impl FnOnce(&mut Writer<'_>) -> Result<(), FieldError>) {
        let mut buffer = [0; 4096];
        let record = header.build(&mut buffer, put).unwrap();
        self.harness.record(record).unwrap();
    }

    fn ask(&mut self, call: u16, put: impl FnOnce(&mut Writer<'_>) -> Result<(), FieldError>) -> u32 {
        let ticket = self.request(self.header(call), put);
        self.answer(ticket)
    }

    fn request(
        &mut self,
        header: Header,
        put: impl FnOnce(&mut Writer<'_>) -> Result<(), FieldError>,
    ) -> u32 {
        self.ticket += 1;
        let ticket = self.ticket;
        self.send(Header { reply: ticket % 8, ticket, ..header }, put);
        self.harness.ring_is_empty();
        ticket
    }

    fn is_answered(&self, ticket: u32) -> bool {
        reply::is_ready(&self.harness.words(), ticket % 8, ticket)
    }

    fn answer(&self, ticket: u32) -> u32 {
        eventually("an answer", || self.is_answered(ticket));
        reply::take(&self.harness.words(), ticket % 8, &mut [0; limits::REPLY_BYTES]).0
    }

    fn launch_header(&mut self) -> Header {
        self.sequence += 1;
        Header { stream: 0, sequence: self.sequence, ..self.header(wire::launch::CALL) }
    }

    fn launch(&mut self) {
        let (header, function) = (self.launch_header(), self.function);
        self.send(header, |w| put_launch(w, function));
    }

    /// The header of the next call on a stream slot.
    fn on(&mut self, slot: u32, call: u16) -> Header {
        let sequence = self.harness.next_sequence(slot);
        Header { stream: slot, sequence, ..self.header(call) }
    }

    fn launch_on(&mut self, slot: u32) {
        let (header, function) = (self.on(slot, wire::launch::CALL), self.function);
        self.send(header, |w| put_launch(w, function));
    }

    fn completed(&self) -> u64 {
        self.completed_on(0)
    }

    fn completed_on(&self, slot: u32) -> u64 {
        page::completed(&self.harness.words(), slot)
    }
}

fn put_launch(w: &mut Writer<'_>, function: Id<Function>) -> Result<(), FieldError> {
    wire::launch::Args {
        function,
        grid: [1; 3],
        block: [1; 3],
        shared: 0,
        cooperative: false,
        attributes: LaunchAttributes(&[]),
        parameters: Bytes(&[0; 8]),
    }
    .put(w)
}

/// Asks for the end of the work of a stream slot.
fn ask(guest: &mut Guest, slot: u32) {
    let header = guest.header(wire::mark::CALL);
    guest.send(header, |w| wire::mark::Args { slot }.put(w));
}

/// Launches once on a stream slot, so that the duration of the kernel is known from then on.
fn learn(guest: &mut Guest, slot: u32) {
    let last = guest.harness.next_sequence(slot);
    guest.launch_on(slot);
    guest.harness.ring_is_empty();
    eventually("the work is complete", || guest.completed_on(slot) == last);
}

// Promise: P52
#[test]
fn end_of_launches_is_published_when_the_guest_asks_or_pauses() {
    let mut guest = Guest::ready();
    learn(&mut guest, 0);
    for _ in 0..5 {
        guest.launch_on(0);
        guest.harness.ring_pauses();
    }
    assert_eq!(guest.completed_on(0), 1, "there is no marker that could be reached");
    ask(&mut guest, 7);
    guest.harness.ring_pauses();
    assert_eq!(guest.completed_on(0), 1, "the guest has asked for another stream");
    ask(&mut guest, 0);
    guest.harness.ring_pauses();
    eventually("the work is complete", || guest.completed_on(0) == 6);
    guest.launch_on(0);
    guest.harness.ring_is_empty();
    eventually("the work is complete", || guest.completed_on(0) == 7);
    for _ in 0..300 {
        guest.launch_on(0);
    }
    guest.harness.ring_pauses();
    eventually("credits come back without a request", || guest.completed_on(0) >= 7 + 250);
    // Beside another VM the end of a turn must be seen.
    guest.harness.submit_queue().time().set(OPEN | TELL);
    guest.launch_on(0);
    guest.harness.ring_pauses();
    eventually("the work is complete", || guest.completed_on(0) == 308);
}

// Promise: P52
#[test]
fn wait_for_launches_includes_no_work_posted_after_it() {
    let (mut guest, word) = holding();
    let event = Id::<Event>::new(0, 1);
    let create = |w: &mut Writer<'_>| wire::event_create::Args { event: Mint(event), flags: 0 }.put(w);
    assert_eq!(guest.ask(wire::event_create::CALL, create), 0);
    // Now the durations of both kernels are known, so their launches may share a marker.
    guest.harness.store(word, 1);
    eventually("the work is complete", || guest.completed_on(1) == 1);
    learn(&mut guest, 1);
    guest.harness.store(word, 0);
    guest.launch_on(2);
    ask(&mut guest, 2);
    hold(&mut guest, 2, word);
    guest.launch_on(3);
    let header = guest.on(3, wire::event_record::CALL);
    guest.send(header, |w| wire::event_record::Args { event }.put(w));
    hold(&mut guest, 3, word);
    guest.harness.ring_is_empty();
    eventually("the work before the request is complete", || guest.completed_on(2) == 1);
    eventually("the work up to the event is complete", || guest.completed_on(3) == 2);
    guest.harness.store(word, 1);
    eventually("all work is complete", || guest.completed_on(2) == 2 && guest.completed_on(3) == 3);
}

/// Work is posted while the ring is never empty, as by a guest that is faster than the worker.
#[test]
fn work_submitted_before_the_permit_closes_is_published() {
    let mut guest = Guest::ready();
    for _ in 0..20 {
        // The submitter thread may not have returned the submitter of the round before.
        eventually("no work waits", || guest.harness.nothing_waits());
        let before = guest.sequence;
        guest.launch();
        guest.harness.submit_queue().time().set(0);
        // The submitter thread gets the submitter together with a piece of work without a marker.
        guest.launch();
        eventually("the work is complete", || guest.completed() == before + 1);
        eventually("no work is in flight", || guest.harness.submit_queue().time().shown().0 == 0);
        guest.harness.submit_queue().time().set(OPEN);
        guest.harness.ring_is_empty();
        eventually("the work is complete", || guest.completed() == before + 2);
    }
    assert_eq!(page::lost(&guest.harness.words()), None);
}

/// A guest with streams 1 to 3 that wait for no other; a kernel holds the first until the returned word is set.
fn holding() -> (Guest, u64) {
    let mut guest = Guest::ready();
    for slot in 1..=3 {
        let stream = Id::<Stream>::new(slot, 1);
        let create = |w: &mut Writer<'_>| {
            wire::stream_create::Args { stream: Mint(stream), slot, flags: 1, priority: 0 }.put(w)
        };
        assert_eq!(guest.ask(wire::stream_create::CALL, create), 0);
    }
    let (module, function) = (Id::<Module>::new(0, 1), Id::<Function>::new(1, 1));
    let find = |w: &mut Writer<'_>| {
        wire::module_function::Args { module, function: Mint(function), name: Name(b"hold_p1") }.put(w)
    };
    assert_eq!(guest.ask(wire::module_function::CALL, find), 0);
    let word = 4096;
    hold(&mut guest, 1, word);
    (guest, word)
}

/// Launches the kernel of [`holding`] on a stream slot, until the word at this offset of the arena is set.
fn hold(guest: &mut Guest, slot: u32, word: u64) {
    let function = Id::<Function>::new(1, 1);
    let header = guest.on(slot, wire::launch::CALL);
    let parameters = (guest.harness.arena + word).to_le_bytes();
    guest.send(header, |w| {
        wire::launch::Args {
            function,
            grid: [1; 3],
            block: [1; 3],
            shared: 0,
            cooperative: false,
            attributes: LaunchAttributes(&[]),
            parameters: Bytes(&parameters),
        }
        .put(w)
    });
}

// Promise: T31
#[test]
fn work_behind_a_wait_does_not_count_as_in_flight() {
    let (mut guest, word) = holding();
    let event = Id::<Event>::new(0, 1);
    assert_eq!(
        guest.ask(wire::event_create::CALL, |w| wire::event_create::Args { event: Mint(event), flags: 0 }
            .put(w)),
        0
    );
    let header = guest.on(1, wire::event_record::CALL);
    guest.send(header, |w| wire::event_record::Args { event }.put(w));
    let header = guest.on(2, wire::stream_wait::CALL);
    guest.send(header, |w| wire::stream_wait::Args { event }.put(w));
    // The wait is a piece of work, too.
    for _ in 1..limits::STREAM_CREDITS {
        guest.launch_on(2);
    }
    guest.harness.ring_is_empty();
    // Two pieces at most may be in flight, and other VMs request the device.
    guest.harness.submit_queue().time().set(2_000 | TELL);
    for round in 1..=100 {
        guest.launch_on(3);
        guest.harness.ring_is_empty();
        eventually("the work is complete", || guest.completed_on(3) == round);
    }
    let time = || guest.harness.submit_queue().time().shown();
    // The kernel that holds all streams.
    eventually("one kernel is in flight", || time().0 == 1);
    assert_eq!(guest.completed_on(2), 0);
    guest.harness.store(word, 1);
    eventually("the work is complete", || guest.completed_on(2) == limits::STREAM_CREDITS);
    eventually("no work is in flight", || time().0 == 0);
    assert_eq!(guest.harness.submit_queue().time().in_window(), 0, "all work that began has ended");
}

// Promise: C55, T31
#[test]
fn stream_that_a_host_function_holds_takes_no_time_of_the_device() {
    let mut guest = Guest::ready();
    let words = guest.harness.words();
    let header = guest.on(0, wire::host_call::CALL);
    guest.send(header, |w| wire::host_call::Args { token: 4 }.put(w));
    for _ in 0..100 {
        guest.launch_on(0);
    }
    guest.harness.ring_is_empty();
    eventually("the call", || page::host_call(&words).token == 4);
    guest.no_time_passes();
    assert_eq!(guest.harness.submit_queue().time().in_window(), 0);
    page::set_host_return(&words, page::host_call(&words));
    eventually("the work is complete", || guest.completed_on(0) == 101);
    eventually("no work is in flight", || guest.harness.submit_queue().time().shown().0 == 0);
}

// Promise: C91, T31
#[test]
fn stream_that_waits_for_a_value_takes_no_time_of_the_device() {
    let mut guest = Guest::ready();
    let word = 4096;
    let at = DeviceAddress(guest.harness.arena + word);
    let header = guest.on(0, wire::stream_wait_value::CALL);
    guest.send(header, |w| wire::stream_wait_value::Args { at, value: 1, wide: false, comparison: 0 }.put(w));
    for _ in 0..100 {
        guest.launch_on(0);
    }
    guest.harness.ring_is_empty();
    // One piece may be in flight, and other VMs request the device.
    guest.harness.submit_queue().time().set(1_000 | TELL);
    guest.no_time_passes();
    assert_eq!(guest.completed_on(0), 0);
    assert_eq!(guest.harness.submit_queue().time().in_window(), 0);
    guest.harness.store(word, 1);
    eventually("the work is complete", || guest.completed_on(0) == 101);
    eventually("no work is in flight", || guest.harness.submit_queue().time().shown().0 == 0);
}

// Promise: T34
#[test]
fn work_of_a_failed_session_counts_as_in_flight_until_it_ends() {
    let (mut guest, word) = holding();
    let time = |guest: &Guest| guest.harness.submit_queue().time().shown();
    eventually("one kernel is in flight", || time(&guest).0 == 1);
    // The failure is reported to the session only.
    let (module, function) = (Id::<Module>::new(0, 1), Id::<Function>::new(9, 1));
    let find = |w: &mut Writer<'_>| {
        wire::module_function::Args { module, function: Mint(function), name: Name(b"refuse_719") }.put(w)
    };
    assert_eq!(guest.ask(wire::module_function::CALL, find), 0);
    let header = guest.on(2, wire::launch::CALL);
    let put = |w: &mut Writer<'_>| {
        wire::launch::Args {
            function,
            grid: [1; 3],
            block: [1; 3],
            shared: 0,
            cooperative: false,
            attributes: LaunchAttributes(&[]),
            parameters: Bytes(&[]),
        }
        .put(w)
    };
    guest.send(header, put);
    guest.harness.ring_is_empty();
    assert!(!guest.harness.is_healthy());
    let before = time(&guest).1;
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!(time(&guest).0, 1, "the kernel still runs after the session has failed");
    guest.harness.store(word, 1);
    eventually("no work is in flight", || time(&guest).0 == 0);
    assert!(time(&guest).1 > before, "its time is counted up to its end");
    assert_eq!(guest.completed_on(1), 0, "its completion is not published");
}

// Promise: T31
#[test]
fn stream_with_much_work_delays_no_other_stream() {
    for others in [0, TELL] {
        let (mut guest, word) = holding();
        guest.harness.submit_queue().time().set(3_000 | others);
        for _ in 0..100 {
            guest.launch_on(1);
        }
        for round in 1..=5 {
            guest.launch_on(3);
            guest.harness.ring_is_empty();
            eventually("the work is complete", || guest.completed_on(3) == round);
        }
        guest.harness.store(word, 1);
        eventually("the work is complete", || guest.completed_on(1) == 101);
        eventually("the window is empty", || guest.harness.submit_queue().time().in_window() == 0);
    }
}

/// Makes an array of one channel of 4 bytes.
fn put_array(w: &mut Writer<'_>, extent: [u64; 3]) -> Result<(), FieldError> {
    let array = Mint(Id::new(0, 1));
    wire::array_create::Args { extent, format: 0x20, channels: 1, flags: 0, array }.put(w)
}

// Promise: C85
#[test]
fn clearing_of_an_array_waits_for_the_permit_and_is_charged() {
    let mut guest = Guest::ready();
    let time = |guest: &Guest| guest.harness.submit_queue().time().shown();
    let idle = time(&guest);
    let extent = [256, 256, 0];
    for round in 0..5 {
        guest.harness.permit(false);
        let making = guest.request(guest.header(wire::array_create::CALL), |w| put_array(w, extent));
        std::thread::sleep(Duration::from_millis(20));
        assert!(!guest.is_answered(making), "a driver's call wrote to the array");
        assert_eq!(time(&guest).0, 0);
        // The dispatcher waits for nothing.
        let info = |w: &mut Writer<'_>| wire::device_memory::Args { device: Ordinal(0) }.put(w);
        assert_eq!(guest.ask(wire::device_memory::CALL, info), 0);
        guest.harness.permit(true);
        assert_eq!(guest.answer(making), 0);
        let made = time(&guest);
        assert!(made.1 > idle.1, "round {round}: a VM that only makes arrays is charged");
        guest.harness.permit(false);
        let end = |w: &mut Writer<'_>| wire::array_destroy::Args { array: Take(Id::new(0, 1)) }.put(w);
        let ending = guest.request(guest.header(wire::array_destroy::CALL), end);
        std::thread::sleep(Duration::from_millis(20));
        assert!(!guest.is_answered(ending));
        guest.harness.permit(true);
        assert_eq!(guest.answer(ending), 0);
        eventually("everything that began has ended", || time(&guest).0 == 0);
        assert!(time(&guest).1 > made.1, "one that only ends arrays is charged");
    }
}

// Promise: C85, T31
#[test]
fn clearing_beside_a_kernel_counts_its_time_once() {
    let began = Instant::now();
    let (mut guest, word) = holding();
    let time = |guest: &Guest| guest.harness.submit_queue().time().shown();
    eventually("one kernel is in flight", || time(&guest).0 == 1);
    for _ in 0..20 {
        assert_eq!(guest.ask(wire::array_create::CALL, |w| put_array(w, [1024, 1024, 0])), 0);
        let end = |w: &mut Writer<'_>| wire::array_destroy::Args { array: Take(Id::new(0, 1)) }.put(w);
        assert_eq!(guest.ask(wire::array_destroy::CALL, end), 0);
    }
    eventually("only the kernel is in flight", || time(&guest).0 == 1);
    guest.harness.store(word, 1);
    eventually("no work is in flight", || time(&guest).0 == 0);
    assert!(u128::from(time(&guest).1) <= began.elapsed().as_nanos());
}

#[test]
fn closed_permit_delays_work_and_no_other_call() {
    let mut guest = Guest::ready();
    guest.launch();
    guest.harness.ring_is_empty();
    eventually("the work is complete", || guest.completed() == 1);
    for round in 0..20 {
        let before = guest.sequence;
        guest.harness.submit_queue().time().set(0);
        for _ in 0..50 {
            guest.launch();
        }
        let (header, function) = (guest.launch_header(), guest.function);
        let held = guest.request(header, |w| put_launch(w, function));
        // Calls that are no work are answered.
        assert_eq!(
            guest.ask(wire::device_memory::CALL, |w| wire::device_memory::Args { device: Ordinal(0) }.put(w)),
            0
        );
        let event = Id::<Event>::new(round, 1);
        assert_eq!(
            guest.ask(wire::event_create::CALL, |w| wire::event_create::Args {
                event: Mint(event),
                flags: 0
            }
            .put(w)),
            0
        );
        // The destruction waits behind the work, but the guest waits for neither.
        assert_eq!(guest.ask(wire::event_destroy::CALL, |w| wire::event_destroy::Args { event }.put(w)), 0);
        std::thread::sleep(Duration::from_millis(2));
        assert_eq!(guest.completed(), before, "nothing was submitted");
        assert!(!guest.is_answered(held));
        guest.harness.submit_queue().time().set(OPEN);
        // More work comes while the submitter thread submits: if the order changed, the sequence would be wrong.
        for _ in 0..50 {
            guest.launch();
        }
        assert_eq!(guest.answer(held), 0);
        guest.harness.ring_is_empty();
        eventually("the work is complete", || {
            guest.harness.ring_is_empty();
            guest.completed() == guest.sequence
        });
    }
    assert_eq!(page::lost(&guest.harness.words()), None);
    let context = Id::from_raw(guest.context).unwrap();
    guest.harness.submit_queue().time().set(0);
    let destroy = |w: &mut Writer<'_>| wire::context_destroy::Args { context }.put(w);
    assert_eq!(guest.ask(wire::context_destroy::CALL, destroy), 0, "idle contexts need no permit");
}

#[test]
fn small_allocation_is_answered_without_the_helper() {
    let mut guest = Guest::ready();
    let base = guest.harness.arena + (512 << 20);
    let reserve = |w: &mut Writer<'_>| wire::window_reserve::Args { base, bytes: Size(64 << 20) }.put(w);
    assert_eq!(guest.ask(wire::window_reserve::CALL, reserve), 0);
    let allocate = |w: &mut Writer<'_>| wire::memory_allocate::Args { pool: 0, bytes: Size(1) }.put(w);
    let first = guest.request(guest.header(wire::memory_allocate::CALL), allocate);
    assert_eq!(guest.answer(first), 0);
    for _ in 0..100 {
        // While the helper has not ended its last job it serves the next one, too.
        eventually("answered without the helper", || {
            let next = guest.request(guest.header(wire::memory_allocate::CALL), allocate);
            let at_once = guest.is_answered(next);
            assert_eq!(guest.answer(next), 0);
            at_once
        });
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    /// For hostile records of any bytes the worker answers, refuses or ends the session, and never panics.
    #[test]
    fn dispatcher_survives_any_record(records in prop::collection::vec(record(), 1..40)) {
        let mut guest = Guest::ready();
        for (call, stream, sequence, fields) in records {
            let sequence = if sequence == 0 { guest.sequence + 1 } else { sequence };
            let header = Header { stream, sequence, reply: 1, ..guest.header(call) };
            let mut record = vec![0; sluice_protocol::record::HEADER_BYTES];
            let (head, _) = record.split_first_chunk_mut().unwrap();
            header.write(0, head);
            fields.iter().for_each(|word| record.extend(word.to_le_bytes()));
            match guest.harness.record(&record) {
                Ok(()) if stream == 0 && sequence == guest.sequence + 1 => guest.sequence += 1,
                Ok(()) => {}
                Err(_) => break,
            }
            guest.harness.ring_is_empty();
        }
    }
}

/// A call of the table, or a similar one, with words that are ids, addresses, sizes or arbitrary.
fn record() -> impl Strategy<Value = (u16, u32, u64, Vec<u64>)> {
    let calls: Vec<u16> = calls::WIRE.iter().map(|row| row.id).collect();
    let kinds = prop::sample::select(vec![0x51_u64, 0x52, 0x53, 0x54, 0x55]);
    let word = prop_oneof![
        4 => (kinds, 1_u64..3, 0_u64..3).prop_map(|(kind, generation, index)| kind << 56 | generation << 32 | index),
        3 => 0_u64..9,
        2 => (0_u64..64).prop_map(|place| limits::WINDOW_BOUNDS.start + (place << 30)),
        1 => Just(u64::MAX),
        1 => any::<u64>(),
    ];
    (
        prop::sample::select(calls),
        prop_oneof![3 => Just(0), 1 => 0_u32..4, 1 => Just(NO_STREAM)],
        prop_oneof![9 => Just(0_u64), 1 => any::<u64>()],
        prop::collection::vec(word, 0..10),
    )
}

#[test]
#[ignore = "prints figures, checks nothing"]
fn costs_of_calls_are_printed() {
    const COUNT: u32 = 2_000_000;
    let mut guest = Guest::ready();
    let words = guest.harness.words();
    let (mut producer, mut consumer) = (Producer::new(), Consumer::new());
    let mut taken = Box::new(CallRecord([0; limits::RECORD_BYTES]));
    let mut buffer = [0; 4096];
    let header = Header { reply: 1, ..guest.header(wire::device_memory::CALL) };
    let each = |start: Instant| start.elapsed().as_nanos() / u128::from(COUNT);

    let start = Instant::now();
    for ticket in 0..COUNT {
        let built = Header { ticket, ..header }
            .build(&mut buffer, |w| wire::device_memory::Args { device: Ordinal(0) }.put(w))
            .unwrap();
        producer.publish(&words, built).unwrap();
        let size = consumer.next(&words, &mut taken.0).unwrap().unwrap();
        guest.harness.record(&taken.0[..size]).unwrap();
        guest.harness.ring_is_empty();
    }
    println!("sync call, one thread: {} ns", each(start));
    let start = Instant::now();
    for ticket in 0..COUNT {
        let built = Header { ticket, ..header }
            .build(&mut buffer, |w| wire::device_memory::Args { device: Ordinal(0) }.put(w))
            .unwrap();
        guest.harness.record(built).unwrap();
    }
    println!("decoding of the record: {} ns", each(start));
    let start = Instant::now();
    for _ in 0..COUNT {
        guest.launch();
        if guest.sequence.is_multiple_of(8) {
            guest.harness.ring_is_empty();
        }
        while guest.sequence - guest.completed() > limits::STREAM_CREDITS - 1 {
            guest.harness.ring_is_empty();
        }
    }
    println!("launch: {} ns", each(start));
}
