//! Figures for work on the fast path: `cargo test --release -p sluice-worker costs_of_calls -- --ignored --nocapture`.

use crate::streams::{function, launch, put_launch, ready};
use sluice_kit::wait::eventually;
use sluice_protocol::{
    calls::wire,
    field::Ordinal,
    limits,
    record::{HEADER_BYTES, Header},
    reply,
};
use std::time::Instant;

#[test]
#[ignore = "prints figures, checks nothing"]
fn costs_of_calls_are_printed() {
    const COUNT: u32 = 200_000;
    let (mut guest, _arena) = ready();
    let kernel = function(&mut guest, 0, "work_p2");
    let words = guest.words();

    // Calls with a round trip: publish, poll for the answer, take it.
    let mut buffer = [0; 4096];
    let mut answer = [0; limits::REPLY_BYTES];
    let mut times = Vec::with_capacity(COUNT as usize);
    for ticket in 1_000_000..1_000_000 + COUNT {
        let start = Instant::now();
        let header = Header { reply: 5, ticket, ..guest.header(wire::device_memory::CALL) };
        let record = header
            .build(&mut buffer, |w| wire::device_memory::Args { device: Ordinal(0) }.put(w))
            .expect("fits");
        assert!(record.len() >= HEADER_BYTES);
        guest.producer().publish(&words, record).expect("room");
        guest.ring();
        while !reply::is_ready(&words, 5, ticket) {
            core::hint::spin_loop();
        }
        let _ = reply::take(&words, 5, &mut answer);
        times.push(start.elapsed().as_nanos());
    }
    times.sort_unstable();
    println!("sync call: median {} ns, p99 {} ns", times[times.len() / 2], times[times.len() * 99 / 100]);

    let start = Instant::now();
    let mut last = 0;
    for _ in 0..COUNT {
        let header = guest.on(wire::launch::CALL, 0);
        last = header.sequence;
        while last - guest.completed(0) > limits::STREAM_CREDITS {
            std::hint::spin_loop();
        }
        let record = header.build(&mut buffer, |w| put_launch(w, kernel, &[0; 16])).expect("fits");
        while guest.producer().publish(&words, record).is_err() {}
        guest.ring();
    }
    guest.wait(0, last);
    let each = start.elapsed().as_nanos() / u128::from(COUNT);
    println!("launches: {each} ns each, {} per second", 1_000_000_000 / each.max(1));

    let mut times = Vec::new();
    for _ in 0..20_000 {
        let start = Instant::now();
        let sequence = launch(&mut guest, 0, kernel, &[0; 16]);
        while guest.completed(0) < sequence {
            core::hint::spin_loop();
        }
        times.push(start.elapsed().as_nanos());
    }
    times.sort_unstable();
    println!(
        "launch and wait: median {} ns, p99 {} ns",
        times[times.len() / 2],
        times[times.len() * 99 / 100]
    );
    eventually("an idle worker", || guest.sticky() == 0);
}
