//! Kernels of several processes on one device: the processor is shared between the processes, however many kernels each
//! of them has.
#![allow(unsafe_code, reason = "calls the C interface")]

mod support;

use std::path::Path;
use std::time::Duration;

use support::peer::{Peer, serve};
use support::*;

#[test]
#[ignore = "a process of the tests here"]
fn peer() {
    serve();
}

/// The tests measure the machine, so they take turns. Devices of two threads, whatever the machine has.
fn turn() -> std::sync::MutexGuard<'static, ()> {
    static TURN: std::sync::Mutex<()> = std::sync::Mutex::new(());
    TURN.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

fn start(state: &Path) -> Peer {
    let mut command = command("peer", state, "peer");
    command.env("SLUICE_SOFTGPU_THREADS", "2");
    let peer = Peer::start_as(command);
    peer.ask("context").unwrap();
    peer
}

/// Work that two processes do at the same time.
fn progress(one: &Peer, other: &Peer, time: Duration) -> (u64, u64) {
    let read = |peer: &Peer| peer.ask("worked").unwrap();
    let (a, b) = (read(one), read(other));
    std::thread::sleep(time);
    (read(one) - a, read(other) - b)
}

/// Whether two processes come on so at the same time. On a machine with other things to do one may be held up for a while;
/// where shares are not kept, it is each time.
fn come_on(one: &Peer, other: &Peer, time: Duration, fair: impl Fn(u64, u64) -> bool) {
    let mut seen = Vec::new();
    while seen.len() < 5 {
        let (a, b) = progress(one, other, time);
        println!("{a} and {b}");
        if fair(a, b) {
            return;
        }
        seen.push((a, b));
    }
    panic!("{seen:?}");
}

/// Larger than any test waits for.
const ENDLESS: u64 = 100_000_000;

// Promise: T20
#[test]
fn two_long_kernels_go_on_side_by_side() {
    let _turn = turn();
    let state = new_state();
    let (one, other) = (start(state.path()), start(state.path()));
    for peer in [&one, &other] {
        peer.ask(&format!("work 1 {ENDLESS}")).unwrap();
    }
    std::thread::sleep(Duration::from_millis(100));
    come_on(&one, &other, Duration::from_secs(2), |a, b| a.max(b) * 2 < a.min(b) * 3);
}

// Promise: T20
#[test]
fn many_kernels_of_one_process_do_not_crowd_out_the_one_of_another() {
    let _turn = turn();
    let state = new_state();
    let (crowd, single) = (start(state.path()), start(state.path()));
    crowd.ask(&format!("work 24 {ENDLESS}")).unwrap();
    single.ask(&format!("work 1 {ENDLESS}")).unwrap();
    std::thread::sleep(Duration::from_millis(100));
    // Without shares the crowd has 24 threads for one.
    come_on(&crowd, &single, Duration::from_secs(3), |crowd, single| {
        crowd.max(single) < crowd.min(single) * 3
    });
}

// Promise: T20
#[test]
fn a_short_kernel_is_not_held_up_by_long_ones() {
    let _turn = turn();
    let state = new_state();
    let (crowd, single) = (start(state.path()), start(state.path()));
    single.ask("short 20").unwrap();
    let alone = single.ask("short 100").unwrap();
    crowd.ask(&format!("work 24 {ENDLESS}")).unwrap();
    std::thread::sleep(Duration::from_millis(100));
    let beside = single.ask("short 100").unwrap();
    println!("{alone} us for 100 kernels alone, {beside} us beside long ones");
    assert!(
        beside < 20 * alone + 3_000_000,
        "{alone} us for 100 kernels alone, {beside} us beside long ones"
    );
}

// Promise: T20
#[test]
fn a_process_that_is_stopped_or_done_leaves_its_share_to_others() {
    let _turn = turn();
    let state = new_state();
    let (one, other) = (start(state.path()), start(state.path()));
    other.ask(&format!("work 4 {ENDLESS}")).unwrap();
    one.ask(&format!("work 4 {ENDLESS}")).unwrap();
    std::thread::sleep(Duration::from_millis(100));
    let rate = |peer: &Peer| {
        let before = peer.ask("worked").unwrap();
        std::thread::sleep(Duration::from_secs(1));
        peer.ask("worked").unwrap() - before
    };
    let shared = rate(&one);
    // SAFETY: stops a process that this test started.
    assert_eq!(unsafe { libc::kill(other.pid().cast_signed(), libc::SIGSTOP) }, 0);
    std::thread::sleep(Duration::from_millis(600));
    let alone = rate(&one);
    // Only that it goes on: how fast is a matter of what else the machine does.
    assert!(alone * 10 > shared, "{shared} beside another, {alone} when it was stopped");
    other.kill();
    assert!(rate(&one) > 0);
}

// Promise: T20
#[test]
fn kernels_that_wait_for_each_other_go_on_in_a_small_share() {
    let _turn = turn();
    let state = new_state();
    let (one, other) = (start(state.path()), start(state.path()));
    other.ask(&format!("work 4 {ENDLESS}")).unwrap();
    // 16 kernels in as many streams, each of which waits for the next one to begin, with one seat for all.
    assert_eq!(one.ask("relay 16"), Ok(16));
}
