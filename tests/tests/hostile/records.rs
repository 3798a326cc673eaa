//! Records that break the format, or that change while the worker reads them.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::guest::{ARENA, PAGES, record};
use super::scene::Scene;
use anyhow::{Context as _, Result};
use sluice_protocol::calls::{WIRE, wire};
use sluice_protocol::field::{DeviceAddress, ElementSize, Writer};
use sluice_protocol::handle::{self, Id};
use sluice_protocol::limits;
use sluice_protocol::record::{Header, NO_STREAM};
use sluice_protocol::session;
use sluice_protocol::shared::Shared;

// Promise: V4
#[test]
fn malformed_records_end_their_session() -> Result<()> {
    let scene = Scene::start()?;
    let header =
        |call| Header { call, reply: 0, ticket: 1, context: 0, stream: NO_STREAM, thread: 0, sequence: 0 };
    let hello = header(wire::session_hello::CALL);
    let sized = |size: u32| {
        let mut bytes = record(hello, &[1, 1]);
        bytes[..4].copy_from_slice(&size.to_le_bytes());
        bytes
    };
    let mut reserved = record(hello, &[1, 1]);
    reserved[7] = 1;
    let (event, stream) = (Id::<handle::Event>::new(1, 1).raw(), Id::<handle::Stream>::new(1, 1).raw());
    let mut cases: Vec<(String, Vec<u8>)> = [0, 8, 4, 57, 64, 1 << 20, u32::MAX - 7]
        .into_iter()
        .map(|size| (format!("a record with a stated size of {size} bytes"), sized(size)))
        .collect();
    cases.extend([
        ("a reserved bit".into(), reserved),
        ("an unknown call".into(), record(header(0xffff), &[])),
        ("call 0".into(), record(header(0), &[])),
        ("a reply slot that does not exist".into(), record(Header { reply: 128, ..hello }, &[1, 1])),
        ("an event's id for a stream".into(), record(header(wire::stream_destroy::CALL), &[event])),
        ("a stream's id for an event".into(), record(header(wire::event_destroy::CALL), &[stream])),
        (
            "an index beyond the kind's limit".into(),
            record(header(wire::stream_destroy::CALL), &[stream | 0xffff]),
        ),
        ("generation 0".into(), record(header(wire::stream_destroy::CALL), &[0x52 << 56])),
        (
            "a truth value of 2".into(),
            record(header(wire::context_create::CALL), &[0x51 << 56 | 1 << 32, 0, 0, 2, 0]),
        ),
        (
            "a name longer than its record".into(),
            record(header(wire::module_global::CALL), &[0x54 << 56 | 1 << 32, 1 << 20, 0]),
        ),
        (
            "a name with its end inside".into(),
            record(header(wire::module_global::CALL), &[0x54 << 56 | 1 << 32, 2, 0]),
        ),
        (
            "a log beyond its limit".into(),
            record(
                header(wire::module_load::CALL),
                &[0x54 << 56 | 1 << 32, 1, ARENA, 64, 0, limits::JIT_LOG_BYTES + 1, 0, ARENA, 64],
            ),
        ),
        (
            "a part of a JIT option".into(),
            record(
                header(wire::module_load::CALL),
                &[0x54 << 56 | 1 << 32, 1, ARENA, 64, 7, 0, 64, 64, ARENA, 256],
            ),
        ),
        (
            "an input of a link beyond its limit".into(),
            record(
                header(wire::link_add::CALL),
                &[0x59 << 56 | 1 << 32, 1, ARENA, limits::LINK_INPUT_BYTES + 1, 0, 0, 0, 0],
            ),
        ),
        (
            "an allocation beyond its limit".into(),
            record(header(wire::memory_allocate::CALL), &[limits::ALLOCATION_BYTES + 1]),
        ),
    ]);
    for row in WIRE {
        // Every call is either longer than this, or shorter.
        let fields: &[u64] = if row.parameters.is_empty() { &[0] } else { &[] };
        cases.push((format!("{} cut short, or too long", row.name), record(header(row.id), fields)));
    }
    let count = cases.len();
    for (what, bytes) in cases {
        let mut guest = scene.guest()?;
        guest.publish(&bytes).or_else(|error| if guest.lost().is_some() { Ok(()) } else { Err(error) })?;
        guest.ends(&what)?;
    }
    for tail in [1, 4, limits::RING_BYTES + 8, u64::MAX - 7, 1 << 63] {
        let mut guest = scene.guest()?;
        guest.session.page.store_u64(session::RING_TAIL, tail, Ordering::Release);
        guest.ring();
        guest.ends(&format!("tail {tail:#x}"))?;
    }
    // Sequences that skip a number or go back.
    for sequence in [0, 2, 1000, u64::MAX] {
        let mut guest = scene.guest()?;
        guest.settle()?;
        let header = Header { stream: 0, sequence, ..guest.header(wire::event_record::CALL) };
        guest.publish(&record(header, &[event]))?;
        guest.ends(&format!("sequence {sequence}"))?;
    }
    println!("{} sessions", count + 9);
    scene.unharmed()
}

// Promise: V4
#[test]
fn records_that_change_while_they_are_read_harm_only_their_session() -> Result<()> {
    let scene = Scene::start()?;
    let (mut sessions, mut calls_answered) = (0, 0);
    let until = Instant::now() + Duration::from_secs(5);
    while Instant::now() < until || sessions < 5 {
        let mut guest = scene.guest()?;
        let device = guest.settle()?;
        sessions += 1;
        let (page, words) = (guest.session.page, guest.front_end.words);
        let stop = AtomicBool::new(false);
        std::thread::scope(|threads| -> Result<()> {
            // Flips words of the ring and of the arena, near the records.
            let mutator = threads.spawn(|| {
                let mut state = 0x9e37_79b9_7f4a_7c15_u64 ^ sessions;
                while !stop.load(Ordering::Relaxed) {
                    state ^= state << 13;
                    state ^= state >> 7;
                    state ^= state << 17;
                    let tail = page.load_u64(session::RING_TAIL, Ordering::Relaxed);
                    let at = tail.wrapping_add(state >> 8 & 0x78) & (limits::RING_BYTES - 1);
                    let place = session::RING_AT + usize::try_from(at).unwrap_or(0);
                    page.store_u64(place, state.rotate_left(9) >> (state & 63), Ordering::Relaxed);
                    words.store_u64(
                        PAGES as usize + (state as usize >> 20 & 0xff8),
                        state,
                        Ordering::Relaxed,
                    );
                    std::hint::spin_loop();
                }
            });
            let mut buffer = [0; 256];
            for round in 0..2000_u32 {
                let header = Header { reply: 0, ticket: round + 1000, ..guest.header(wire::memset::CALL) };
                let put = |w: &mut Writer<'_>| {
                    wire::memset::Args {
                        to: DeviceAddress(device),
                        pitch: 64,
                        element: ElementSize::Word,
                        value: round,
                        width: 8,
                        height: 8,
                    }
                    .put(w)
                };
                let record = header.build(&mut buffer, put).context("fits")?.to_vec();
                if guest.lost().is_some() || guest.publish(&record).is_err() {
                    break;
                }
                calls_answered += 1;
            }
            stop.store(true, Ordering::Relaxed);
            mutator.join().ok().context("the mutator")
        })?;
    }
    println!("{sessions} sessions, {calls_answered} records published under a mutator");
    scene.unharmed()
}
