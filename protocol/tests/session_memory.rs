//! The control resource: the ring against a queue, hostile words in it, replies, attachments, and the layout.

#![expect(clippy::cast_possible_truncation, reason = "bounds of the protocol, and halves of random words")]

use crate::memory::Memory;
use proptest::prelude::*;
use sluice_protocol::{
    limits,
    park::Parking,
    record::{self, Header},
    reply,
    ring::{Consumer, Full, Producer, RingError},
    session::{self, Attachment},
    shared::Shared,
};
use std::{collections::VecDeque, sync::atomic::Ordering};

const RING: usize = limits::RING_BYTES as usize;

fn record(bytes: usize, sequence: u64) -> Vec<u8> {
    let header = Header { call: 7, reply: 1, ticket: 2, context: 3, stream: 4, thread: 5, sequence };
    let mut record = vec![sequence.to_le_bytes()[0]; bytes];
    let size = u32::try_from(bytes).unwrap();
    header.write(size, record.first_chunk_mut().unwrap());
    record
}

/// A record's length: mostly small, sometimes anything, sometimes the largest.
fn lengths() -> impl Strategy<Value = usize> {
    let largest = limits::RECORD_BYTES / 8;
    prop_oneof![4 => 5..20usize, 4 => 5..=largest, 1 => Just(largest)].prop_map(|words| words * 8)
}

fn ring_bytes(at: usize) -> usize {
    session::RING_AT + at % RING
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    // Promise: V1
    #[test]
    fn ring_behaves_as_a_queue(steps in prop::collection::vec(prop_oneof![
        3 => lengths().prop_map(Some), 2 => Just(None)], 1..300)) {
        let memory = Memory::new();
        let (mut producer, mut consumer) = (Producer::new(), Consumer::new());
        let mut queue = VecDeque::new();
        let mut buffer = Box::new([0; limits::RECORD_BYTES]);
        for (step, length) in steps.into_iter().enumerate() {
            if let Some(length) = length {
                let record = record(length, step as u64);
                let room = producer.has_room(&memory, length);
                match producer.publish(&memory, &record) {
                    Ok(()) => queue.push_back(record),
                    Err(Full) => {
                        prop_assert!(!room, "has_room must not promise what publish refuses");
                        // At most the record, the padding and less than another record are missing.
                        let used: usize = queue.iter().map(Vec::len).sum();
                        prop_assert!(used + 2 * limits::RECORD_BYTES + length > RING);
                    }
                }
            } else {
                prop_assert_eq!(consumer.is_empty(&memory), queue.is_empty());
                let size = consumer.next(&memory, &mut buffer).unwrap();
                prop_assert_eq!(size.map(|size| buffer[..size].to_vec()), queue.pop_front());
            }
        }
        while let Some(record) = queue.pop_front() {
            let size = consumer.next(&memory, &mut buffer).unwrap();
            prop_assert_eq!(size, Some(record.len()));
            prop_assert_eq!(&buffer[..record.len()], &record);
        }
        prop_assert_eq!(consumer.next(&memory, &mut buffer), Ok(None));
    }

    // Promise: V4
    #[test]
    fn hostile_ring_words_are_refused_or_give_a_bounded_record(
        before in 0..60usize,
        forgeries in prop::collection::vec((0..4u8, any::<u64>(), 0..64usize), 1..40),
    ) {
        let memory = Memory::new();
        let (mut producer, mut consumer) = (Producer::new(), Consumer::new());
        let mut buffer = Box::new([0; limits::RECORD_BYTES]);
        let mut head = 0;
        for _ in 0..before {
            producer.publish(&memory, &record(limits::RECORD_BYTES, 0)).unwrap();
            consumer.next(&memory, &mut buffer).unwrap();
            head = memory.load_u64(session::RING_HEAD, Ordering::Relaxed);
        }
        for (what, value, near) in forgeries {
            match what {
                // The tail: anywhere, or somewhat ahead.
                0 => memory.store_u64(session::RING_TAIL, value, Ordering::Relaxed),
                1 => memory.store_u64(
                    session::RING_TAIL, head + value % (2 * limits::RING_BYTES), Ordering::Relaxed),
                // The head, which the consumer does not read.
                2 => memory.store_u64(session::RING_HEAD, value, Ordering::Relaxed),
                // A size: anything, the padding word, or plausible.
                _ => {
                    let at = ring_bytes(usize::try_from(head).unwrap()) + near / 16 * 8;
                    let size = match value % 4 {
                        0 => u32::MAX,
                        1 => (value >> 32) as u32,
                        _ => (value >> 32) as u32 % (limits::RECORD_BYTES as u32 + 64),
                    };
                    memory.forge(at.min(session::BYTES - 4), &size.to_le_bytes());
                }
            }
            *memory.read.borrow_mut() = 0;
            let tail = memory.load_u64(session::RING_TAIL, Ordering::Relaxed);
            let next = consumer.next(&memory, &mut buffer);
            // The record and its size word, and at most one padding word and another size.
            prop_assert!(*memory.read.borrow() <= limits::RECORD_BYTES + 8);
            match next {
                Ok(Some(size)) => {
                    prop_assert!((record::HEADER_BYTES..=limits::RECORD_BYTES).contains(&size));
                    prop_assert!(size.is_multiple_of(8));
                    head = memory.load_u64(session::RING_HEAD, Ordering::Relaxed);
                    prop_assert!(tail.wrapping_sub(head) <= limits::RING_BYTES, "never past the tail");
                }
                Ok(None) => head = tail,
                // The session ends; nothing more is read.
                Err(RingError::Tail { .. } | RingError::Size { .. }) => return Ok(()),
            }
        }
    }

    #[test]
    fn answers_round_trip(slot: u32, ticket in 1..u32::MAX, result: u32,
        fields in prop::collection::vec(any::<u8>(), 0..=limits::REPLY_BYTES)) {
        let memory = Memory::new();
        prop_assert!(!reply::is_ready(&memory, slot, ticket));
        reply::publish(&memory, slot, ticket, result, &fields);
        prop_assert!(reply::is_ready(&memory, slot, ticket));
        prop_assert!(!reply::is_ready(&memory, slot, ticket + 1));
        let mut buffer = [0; limits::REPLY_BYTES];
        prop_assert_eq!(reply::take(&memory, slot, &mut buffer), (result, &fields[..]));
    }

    // Promise: G1
    #[test]
    fn hostile_answer_longer_than_its_slot_is_read_as_empty(slot: u32, length: u32) {
        let memory = Memory::new();
        memory.store_u32(reply::slot_at(slot) + 8, length, Ordering::Relaxed);
        let mut buffer = [0; limits::REPLY_BYTES];
        let (_, fields) = reply::take(&memory, slot, &mut buffer);
        let expected = if length as usize <= limits::REPLY_BYTES { length as usize } else { 0 };
        prop_assert_eq!(fields.len(), expected);
    }

    #[test]
    fn attachments_round_trip(slot in 0..limits::ATTACHMENTS, bytes: u64, error: u32) {
        let memory = Memory::new();
        prop_assert_eq!(session::attachment(&memory, slot), Attachment::Pending);
        for value in [
            Attachment::Adopted(bytes),
            Attachment::Refused(error),
            Attachment::Gathered(bytes),
            Attachment::Detached,
            Attachment::Pending,
        ] {
            session::set_attachment(&memory, slot, value);
            prop_assert_eq!(session::attachment(&memory, slot), value);
            prop_assert_eq!(session::attachment(&memory, slot + 1), Attachment::Pending, "its neighbour");
        }
    }

    #[test]
    fn sequences_round_trip(slot in 0..limits::STREAMS, sequence: u64) {
        let memory = Memory::new();
        session::set_completed(&memory, slot, sequence);
        prop_assert_eq!(session::completed(&memory, slot), sequence);
        prop_assert_eq!(session::completed(&memory, slot + 1), 0);
    }

    /// The words of any slot number in a hostile record stay in their table.
    #[test]
    fn slot_number_beyond_a_table_stays_in_the_table(slot: u32) {
        prop_assert!((session::ATTACHMENTS_AT..session::SEQUENCES_AT).contains(&session::attachment_at(slot)));
        prop_assert!((session::SEQUENCES_AT..session::REPLIES_AT).contains(&session::sequence_at(slot)));
        prop_assert!((session::REPLIES_AT..=session::RING_AT - limits::REPLY_SLOT_BYTES)
            .contains(&reply::slot_at(slot)));
    }

    #[test]
    fn record_headers_round_trip(call: u16, reply: u32, ticket: u32, context: u64, stream: u32, thread: u32,
        sequence: u64, words in 0..64usize, mut junk in prop::collection::vec(any::<u8>(), 0..100)) {
        let header = Header { call, reply, ticket, context, stream, thread, sequence };
        let mut buffer = [0x55; 1024];
        let built = header.build(&mut buffer, |writer| (0..words).try_for_each(|i| writer.word(i as u64))).unwrap();
        prop_assert_eq!(built.len(), record::HEADER_BYTES + words * 8);
        prop_assert_eq!(u32::from_le_bytes(*built.first_chunk().unwrap()) as usize, built.len());
        let (read, fields) = Header::read(built).unwrap();
        prop_assert_eq!(read, header);
        prop_assert_eq!(fields.len(), words * 8);
        // Any bytes give an answer, never a panic; and a header that is accepted has its meaning.
        if let Ok((read, fields)) = Header::read(&junk) {
            let mut again = [0; record::HEADER_BYTES];
            let size = u32::from_le_bytes(*junk.first_chunk().unwrap());
            read.write(size, &mut again);
            prop_assert_eq!(&again[..], &junk[..record::HEADER_BYTES]);
            prop_assert_eq!(fields.len(), junk.len() - record::HEADER_BYTES);
        }
        junk.truncate(record::HEADER_BYTES - 1);
        prop_assert!(Header::read(&junk).is_err());
    }
}

#[test]
fn record_larger_than_its_buffer_is_refused() {
    let header = Header { call: 1, reply: 0, ticket: 0, context: 0, stream: 0, thread: 0, sequence: 0 };
    for bytes in 0..record::HEADER_BYTES {
        assert!(header.build(&mut vec![0; bytes], |_| Ok(())).is_err());
    }
    assert!(header.build(&mut [0; record::HEADER_BYTES], |writer| writer.word(1)).is_err());
    assert!(header.build(&mut [0; record::HEADER_BYTES], |_| Ok(())).is_ok());
}

#[test]
fn reserved_bits_of_a_header_are_refused() {
    for bit in 48..64 {
        let mut bytes = [0; record::HEADER_BYTES];
        bytes[..8].copy_from_slice(&(1u64 << bit).to_le_bytes());
        assert!(Header::read(&bytes).is_err(), "bit {bit}");
    }
}

/// Every impossible tail, at head 0 and behind a record.
// Promise: V4
#[test]
fn impossible_tails_are_refused() {
    let mut buffer = Box::new([0; limits::RECORD_BYTES]);
    for tail in [1, 7, 12, limits::RING_BYTES + 8, limits::RING_BYTES * 2, u64::MAX, u64::MAX - 7, 1 << 63] {
        let memory = Memory::new();
        memory.store_u64(session::RING_TAIL, tail, Ordering::Relaxed);
        let error = Consumer::new().next(&memory, &mut buffer);
        assert_eq!(error, Err(RingError::Tail { head: 0, tail }), "{tail:#x}");
        assert_eq!(*memory.read.borrow(), 0, "nothing is read before the tail is checked");
    }
    let memory = Memory::new();
    Producer::new().publish(&memory, &record(48, 0)).unwrap();
    let mut consumer = Consumer::new();
    consumer.next(&memory, &mut buffer).unwrap();
    memory.store_u64(session::RING_TAIL, 40, Ordering::Relaxed);
    assert!(matches!(consumer.next(&memory, &mut buffer), Err(RingError::Tail { head: 48, tail: 40 })));
}

// Promise: V4
#[test]
fn impossible_sizes_are_refused() {
    let mut buffer = Box::new([0; limits::RECORD_BYTES]);
    let published = 4096;
    let too_large = limits::RECORD_BYTES as u32 + 8;
    for (tail, size) in [
        (published, 0),
        (published, 8),
        (published, 32),
        (published, 41),
        (published, 4104),
        (published, u32::MAX),
        (published, u32::MAX - 7),
        (limits::RING_BYTES, too_large),
        (limits::RING_BYTES, limits::RING_BYTES as u32),
    ] {
        let memory = Memory::new();
        memory.forge(session::RING_AT, &size.to_le_bytes());
        memory.store_u64(session::RING_TAIL, tail, Ordering::Relaxed);
        let error = Consumer::new().next(&memory, &mut buffer);
        assert_eq!(error, Err(RingError::Size { head: 0, size, available: tail }), "{size:#x}");
        assert_eq!(memory.load_u64(session::RING_HEAD, Ordering::Relaxed), 0, "nothing is consumed");
    }
}

/// Padding never takes the place of a record that would fit, so a guest cannot keep the dispatcher in a loop.
// Promise: V4
#[test]
fn padding_where_any_record_fits_is_refused() {
    let memory = Memory::new();
    let mut buffer = Box::new([0; limits::RECORD_BYTES]);
    memory.forge(session::RING_AT, &u32::MAX.to_le_bytes());
    memory.store_u64(session::RING_TAIL, limits::RING_BYTES, Ordering::Relaxed);
    let error = Consumer::new().next(&memory, &mut buffer);
    assert!(matches!(error, Err(RingError::Size { size: u32::MAX, .. })), "{error:?}");
}

/// A record whose size reaches beyond the end of the ring.
#[test]
fn record_beyond_the_end_of_the_ring_is_refused() {
    let memory = Memory::new();
    let (mut producer, mut consumer) = (Producer::new(), Consumer::new());
    let mut buffer = Box::new([0; limits::RECORD_BYTES]);
    let mut left = RING;
    while left > 64 {
        let bytes = limits::RECORD_BYTES.min(left - 64);
        producer.publish(&memory, &record(bytes, 0)).unwrap();
        consumer.next(&memory, &mut buffer).unwrap();
        left -= bytes;
    }
    memory.forge(session::RING_AT + RING - 64, &72u32.to_le_bytes());
    memory.store_u64(session::RING_TAIL, limits::RING_BYTES + 64, Ordering::Relaxed);
    assert!(matches!(consumer.next(&memory, &mut buffer), Err(RingError::Size { size: 72, .. })));
}

/// The host may be hostile to the guest: an impossible head makes the ring appear full, nothing worse.
// Promise: G1
#[test]
fn impossible_head_makes_the_ring_appear_full() {
    for head in [1, 40, u64::MAX, 1 << 63, limits::RING_BYTES * 3] {
        let memory = Memory::new();
        let mut producer = Producer::new();
        memory.store_u64(session::RING_HEAD, head, Ordering::Relaxed);
        let mut published = 0;
        while published <= RING && producer.publish(&memory, &record(limits::RECORD_BYTES, 0)).is_ok() {
            published += limits::RECORD_BYTES;
        }
        assert!(published <= RING + limits::RECORD_BYTES, "head {head:#x}");
    }
}

#[test]
fn parking_words_are_set_and_taken_once() {
    let memory = Memory::new();
    for parking in [Parking::WORKER, Parking::GUEST] {
        assert!(!parking.must_wake(&memory), "no party sleeps");
        assert!(!parking.enter(&memory, || true));
        assert!(!parking.must_wake(&memory), "the announcement was withdrawn");
        assert!(parking.enter(&memory, || false));
        assert!(parking.must_wake(&memory));
        assert!(!parking.must_wake(&memory), "once per announcement");
        assert!(parking.enter(&memory, || false));
        parking.leave(&memory);
        assert!(!parking.must_wake(&memory));
    }
}

#[test]
fn only_a_lost_session_has_an_error() {
    let memory = Memory::new();
    memory.store_u32(session::LOST_ERROR, 46, Ordering::Relaxed);
    for state in [session::NEW, session::READY, 3, u32::MAX] {
        memory.store_u32(session::STATE, state, Ordering::Relaxed);
        assert_eq!(session::lost(&memory), None);
    }
    memory.store_u32(session::STATE, session::LOST, Ordering::Relaxed);
    assert_eq!(session::lost(&memory), Some(46));
}

/// Words of different writers lie in different cache lines, and no part overlaps another.
#[test]
fn parts_of_the_control_resource_do_not_overlap() {
    let words = [
        session::MAGIC_AT,
        session::STATE,
        session::STICKY,
        session::WORKER_PARKED,
        session::GUEST_PARKED,
        session::RING_TAIL,
        session::RING_HEAD,
    ];
    assert!(words.windows(2).all(|pair| pair[0] / 64 < pair[1] / 64));
    let parts = [
        (0, session::RING_HEAD + 8),
        (session::ATTACHMENTS_AT, limits::ATTACHMENTS as usize * 16),
        (session::SEQUENCES_AT, limits::STREAMS as usize * 8),
        (session::LATE_ERRORS_AT, session::LATE_ERRORS as usize * 8),
        (session::REPLIES_AT, limits::REPLY_SLOTS as usize * limits::REPLY_SLOT_BYTES),
        (session::RING_AT, RING),
    ];
    assert!(parts.windows(2).all(|pair| pair[0].0 + pair[0].1 <= pair[1].0));
    assert_eq!(session::RING_AT + RING, session::BYTES);
    assert_eq!(session::MAGIC.to_le_bytes(), *b"sluice\x01\x00");
}
