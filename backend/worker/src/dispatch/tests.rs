use super::*;
use crate::{harness::Harness, submit::time::OPEN};
use proptest::prelude::*;
use sluice_messages::custody::page::TELL;
use sluice_protocol::{
    calls::{self, wire},
    field::{ArenaAddress, Bytes, FieldError, Mint, Name, Size, Writer},
    record::NO_STREAM,
    reply,
    ring::Producer,
    session as page,
};
use std::{
    path::PathBuf,
    sync::atomic::{AtomicU64, Ordering},
    time::{Duration, Instant},
};

/// Each session of this process has address space of its own.
static PLACE: AtomicU64 = AtomicU64::new(0);

fn null_driver() -> PathBuf {
    std::env::current_exe().unwrap().with_file_name("libsluice_null_driver.so")
}

/// A guest of a harness.
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

    /// With a context and a function that has one parameter.
    fn ready() -> Guest {
        let mut guest = Guest::new();
        let context = Id::<Context>::new(0, 1);
        let module = Id::<Module>::new(0, 1);
        assert_eq!(
            guest.ask(wire::session_hello::CALL, |w| wire::session_hello::put(w, calls::VERSION, 1)),
            0
        );
        let create = |w: &mut Writer<'_>| wire::context_create::put(w, Mint(context), 0, 0, true, 0);
        assert_eq!(guest.ask(wire::context_create::CALL, create), 0);
        guest.context = context.raw();
        let arena = ArenaAddress(guest.harness.arena);
        let load = |w: &mut Writer<'_>| {
            wire::module_load::put(w, Mint(module), true, arena, Size(64), ArenaAddress(0), Size(0))
        };
        assert_eq!(guest.ask(wire::module_load::CALL, load), 0);
        let function = guest.function;
        let find =
            |w: &mut Writer<'_>| wire::module_function::put(w, module, Mint(function), Name(b"work_p1"));
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
        eventually(|| self.is_answered(ticket));
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
    wire::launch::put(w, function, [1; 3], [1; 3], 0, false, Bytes(&[]), Bytes(&[0; 8]))
}

fn eventually(mut happened: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(20);
    while !happened() {
        assert!(Instant::now() < end, "did not happen");
        std::thread::yield_now();
    }
}

/// Work that is posted while the ring is never found empty, as by a guest that is faster than the worker.
#[test]
fn what_was_submitted_before_a_permit_closed_is_seen_to_end() {
    let mut guest = Guest::ready();
    for _ in 0..20 {
        // The feeder may not have put the submitter back that it had before.
        eventually(|| guest.harness.nothing_waits());
        let before = guest.sequence;
        guest.launch();
        guest.harness.gate().time().set(0);
        // It takes the submitter along, with a piece that is not marked yet.
        guest.launch();
        eventually(|| guest.completed() == before + 1);
        eventually(|| guest.harness.gate().time().shown().0 == 0);
        guest.harness.gate().time().set(OPEN);
        guest.harness.ring_is_empty();
        eventually(|| guest.completed() == before + 2);
    }
    assert_eq!(page::lost(&guest.harness.words()), None);
}

/// A guest with streams 1 to 3 that wait for no other, the first of which is held by a kernel until the returned word is set.
fn holding() -> (Guest, u64) {
    let mut guest = Guest::ready();
    for slot in 1..=3 {
        let stream = Id::<Stream>::new(slot, 1);
        let create = |w: &mut Writer<'_>| wire::stream_create::put(w, Mint(stream), slot, 1, 0);
        assert_eq!(guest.ask(wire::stream_create::CALL, create), 0);
    }
    let (module, hold) = (Id::<Module>::new(0, 1), Id::<Function>::new(1, 1));
    let find = |w: &mut Writer<'_>| wire::module_function::put(w, module, Mint(hold), Name(b"hold_p1"));
    assert_eq!(guest.ask(wire::module_function::CALL, find), 0);
    let word = guest.harness.arena + 4096;
    let header = guest.on(1, wire::launch::CALL);
    let parameters = word.to_le_bytes();
    guest.send(header, |w| {
        wire::launch::put(w, hold, [1; 3], [1; 3], 0, false, Bytes(&[]), Bytes(&parameters))
    });
    (guest, 4096)
}

// Promise: T31
#[test]
fn work_behind_a_wait_is_not_under_way() {
    let (mut guest, word) = holding();
    let event = Id::<Event>::new(0, 1);
    assert_eq!(guest.ask(wire::event_create::CALL, |w| wire::event_create::put(w, Mint(event), 0)), 0);
    let header = guest.on(1, wire::event_record::CALL);
    guest.send(header, |w| wire::event_record::put(w, event, 0));
    let header = guest.on(2, wire::stream_wait::CALL);
    guest.send(header, |w| wire::stream_wait::put(w, event, 0));
    for _ in 0..500 {
        guest.launch_on(2);
    }
    guest.harness.ring_is_empty();
    // Two pieces are all that may be under way, and others want the device.
    guest.harness.gate().time().set(2_000 | TELL);
    for round in 1..=100 {
        guest.launch_on(3);
        guest.harness.ring_is_empty();
        eventually(|| guest.completed_on(3) == round);
    }
    let time = || guest.harness.gate().time().shown();
    // The kernel that holds them all.
    eventually(|| time().0 == 1);
    assert_eq!(guest.completed_on(2), 0);
    guest.harness.store(word, 1);
    eventually(|| guest.completed_on(2) == 501);
    eventually(|| time().0 == 0);
    assert_eq!(guest.harness.gate().time().in_window(), 0, "all that was begun has ended");
}

// Promise: T34
#[test]
fn work_of_a_session_that_has_failed_is_under_way_until_it_ends() {
    let (mut guest, word) = holding();
    let time = |guest: &Guest| guest.harness.gate().time().shown();
    eventually(|| time(&guest).0 == 1);
    // Nobody is told but the session.
    let (module, function) = (Id::<Module>::new(0, 1), Id::<Function>::new(9, 1));
    let find =
        |w: &mut Writer<'_>| wire::module_function::put(w, module, Mint(function), Name(b"refuse_719"));
    assert_eq!(guest.ask(wire::module_function::CALL, find), 0);
    let header = guest.on(2, wire::launch::CALL);
    let put =
        |w: &mut Writer<'_>| wire::launch::put(w, function, [1; 3], [1; 3], 0, false, Bytes(&[]), Bytes(&[]));
    guest.send(header, put);
    guest.harness.ring_is_empty();
    assert!(!guest.harness.is_healthy());
    let before = time(&guest).1;
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!(time(&guest).0, 1, "the kernel runs, whatever the session has come to");
    guest.harness.store(word, 1);
    eventually(|| time(&guest).0 == 0);
    assert!(time(&guest).1 > before, "it is counted up to its end");
    assert_eq!(guest.completed_on(1), 0, "and the guest sees nothing of it");
}

// Promise: T31
#[test]
fn a_stream_with_much_work_holds_up_no_other() {
    for others in [0, TELL] {
        let (mut guest, word) = holding();
        guest.harness.gate().time().set(3_000 | others);
        for _ in 0..100 {
            guest.launch_on(1);
        }
        for round in 1..=5 {
            guest.launch_on(3);
            guest.harness.ring_is_empty();
            eventually(|| guest.completed_on(3) == round);
        }
        guest.harness.store(word, 1);
        eventually(|| guest.completed_on(1) == 101);
        eventually(|| guest.harness.gate().time().in_window() == 0);
    }
}

#[test]
fn a_closed_permit_holds_work_and_nothing_else() {
    let mut guest = Guest::ready();
    guest.launch();
    guest.harness.ring_is_empty();
    eventually(|| guest.completed() == 1);
    for round in 0..20 {
        let before = guest.sequence;
        guest.harness.gate().time().set(0);
        for _ in 0..50 {
            guest.launch();
        }
        let (header, function) = (guest.launch_header(), guest.function);
        let held = guest.request(header, |w| put_launch(w, function));
        // Calls that are no work are answered.
        assert_eq!(guest.ask(wire::memory_info::CALL, wire::memory_info::put), 0);
        let event = Id::<Event>::new(round, 1);
        assert_eq!(guest.ask(wire::event_create::CALL, |w| wire::event_create::put(w, Mint(event), 0)), 0);
        // Destroying waits for its turn behind the work, but the guest waits for neither.
        assert_eq!(guest.ask(wire::event_destroy::CALL, |w| wire::event_destroy::put(w, event)), 0);
        std::thread::sleep(Duration::from_millis(2));
        assert_eq!(guest.completed(), before, "nothing was submitted");
        assert!(!guest.is_answered(held));
        guest.harness.gate().time().set(OPEN);
        // More work comes while the feeder feeds: order is kept, or the sequence could not come out right.
        for _ in 0..50 {
            guest.launch();
        }
        assert_eq!(guest.answer(held), 0);
        guest.harness.ring_is_empty();
        eventually(|| {
            guest.harness.ring_is_empty();
            guest.completed() == guest.sequence
        });
    }
    assert_eq!(page::lost(&guest.harness.words()), None);
    let context = Id::from_raw(guest.context).unwrap();
    guest.harness.gate().time().set(0);
    let destroy = |w: &mut Writer<'_>| wire::context_destroy::put(w, context);
    assert_eq!(guest.ask(wire::context_destroy::CALL, destroy), 0, "idle contexts need no permit");
}

#[test]
fn a_small_allocation_is_answered_at_once() {
    let mut guest = Guest::ready();
    let base = guest.harness.arena + (512 << 20);
    let reserve = |w: &mut Writer<'_>| wire::window_reserve::put(w, base, Size(64 << 20));
    assert_eq!(guest.ask(wire::window_reserve::CALL, reserve), 0);
    let allocate = |w: &mut Writer<'_>| wire::memory_allocate::put(w, Size(1));
    let first = guest.request(guest.header(wire::memory_allocate::CALL), allocate);
    assert_eq!(guest.answer(first), 0);
    for _ in 0..100 {
        let next = guest.request(guest.header(wire::memory_allocate::CALL), allocate);
        assert!(guest.is_answered(next), "without the helper");
        assert_eq!(guest.answer(next), 0);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    /// Hostile records: whatever the bytes, the worker answers, refuses or ends the session, and never panics.
    #[test]
    fn any_record_is_survived(records in prop::collection::vec(record(), 1..40)) {
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

/// A call of the table, or nearly, with words that are ids, addresses, sizes or anything.
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
fn figures() {
    const COUNT: u32 = 2_000_000;
    let mut guest = Guest::ready();
    let words = guest.harness.words();
    let (mut producer, mut consumer) = (Producer::new(), Consumer::new());
    let mut taken = Box::new(Record([0; limits::RECORD_BYTES]));
    let mut buffer = [0; 4096];
    let header = Header { reply: 1, ..guest.header(wire::memory_info::CALL) };
    let each = |start: Instant| start.elapsed().as_nanos() / u128::from(COUNT);

    let start = Instant::now();
    for ticket in 0..COUNT {
        let built = Header { ticket, ..header }.build(&mut buffer, wire::memory_info::put).unwrap();
        producer.publish(&words, built).unwrap();
        let size = consumer.next(&words, &mut taken.0).unwrap().unwrap();
        guest.harness.record(&taken.0[..size]).unwrap();
        guest.harness.ring_is_empty();
    }
    println!("sync call, one thread: {} ns", each(start));
    let start = Instant::now();
    for ticket in 0..COUNT {
        let built = Header { ticket, ..header }.build(&mut buffer, wire::memory_info::put).unwrap();
        guest.harness.record(built).unwrap();
    }
    println!("of it record: {} ns", each(start));
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
