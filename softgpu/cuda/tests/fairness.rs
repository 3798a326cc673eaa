//! Kernels of several processes on one device: the processes share the processor, however many kernels each of them has.

use std::path::Path;
use std::time::{Duration, Instant};

use crate::support::peer::{Peer, serve};
use crate::support::*;

#[test]
#[ignore = "a process of the tests here"]
fn peer_process() {
    serve();
}

/// Serialises the tests, which measure the machine. Devices have two threads on any machine.
fn turn() -> std::sync::MutexGuard<'static, ()> {
    static TURN: std::sync::Mutex<()> = std::sync::Mutex::new(());
    TURN.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

fn start(state: &Path) -> Peer {
    let mut command = command("fairness::peer_process", state, "peer");
    command.env("SLUICE_SOFTGPU_THREADS", "2");
    let peer = Peer::start_as(command);
    peer.ask("context").unwrap();
    peer
}

/// Work that two processes complete in the same time.
fn progress(one: &Peer, other: &Peer, time: Duration) -> (u64, u64) {
    let read = |peer: &Peer| peer.ask("worked").unwrap();
    let (a, b) = (read(one), read(other));
    std::thread::sleep(time);
    (read(one) - a, read(other) - b)
}

/// Checks that two processes make progress fairly, in at least one of several measurements. Other load can delay one of them for
/// a while; without shares every measurement fails.
fn come_on(one: &Peer, other: &Peer, time: Duration, fair: impl Fn(u64, u64) -> bool) {
    let mut seen = Vec::new();
    while seen.len() < 20 {
        let (a, b) = progress(one, other, time);
        println!("{a} and {b}");
        if fair(a, b) {
            return;
        }
        seen.push((a, b));
    }
    panic!("{seen:?}");
}

/// Waits until a process has done that much more work.
fn wait_for_work(peer: &Peer, blocks: u64) {
    let before = peer.ask("worked").unwrap();
    let end = Instant::now() + Duration::from_secs(60);
    while peer.ask("worked").unwrap() < before + blocks {
        assert!(Instant::now() < end, "{} blocks of {blocks}", peer.ask("worked").unwrap() - before);
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Larger than the work that any test waits for.
const ENDLESS: u64 = 100_000_000;

// Promise: T20
#[test]
fn two_long_kernels_progress_equally() {
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
fn kernel_of_one_process_keeps_its_share_beside_many_of_another() {
    let _turn = turn();
    let state = new_state();
    let (crowd, single) = (start(state.path()), start(state.path()));
    crowd.ask(&format!("work 24 {ENDLESS}")).unwrap();
    single.ask(&format!("work 1 {ENDLESS}")).unwrap();
    std::thread::sleep(Duration::from_millis(100));
    // Without shares the crowd would have 24 threads against one.
    come_on(&crowd, &single, Duration::from_secs(3), |crowd, single| {
        crowd.max(single) < crowd.min(single) * 3
    });
}

// Promise: T20
#[test]
fn short_kernel_is_not_delayed_by_long_ones() {
    let _turn = turn();
    let state = new_state();
    let (crowd, single) = (start(state.path()), start(state.path()));
    let alone = single.ask("short 20").unwrap();
    crowd.ask(&format!("work 24 {ENDLESS}")).unwrap();
    wait_for_work(&crowd, 24);
    // Other load of the machine delays some of them. A wait for a share would delay each, by a millisecond or more.
    let shortest = || single.ask("short 100").unwrap();
    let shortest = (0..20).map(|_| shortest()).find(|shortest| *shortest < alone + 1_000);
    assert!(shortest.is_some(), "each of 2000 kernels took a millisecond more than {alone} us");
}

// Promise: T20
#[test]
fn stopped_or_finished_process_leaves_its_share_to_others() {
    let _turn = turn();
    let state = new_state();
    let (one, other) = (start(state.path()), start(state.path()));
    other.ask(&format!("work 4 {ENDLESS}")).unwrap();
    one.ask(&format!("work 4 {ENDLESS}")).unwrap();
    std::thread::sleep(Duration::from_millis(100));
    let (shared, _) = progress(&one, &other, Duration::from_secs(1));
    // SAFETY: stops a process that this test started.
    assert_eq!(unsafe { libc::kill(other.pid().cast_signed(), libc::SIGSTOP) }, 0);
    // Only tests that the process continues; its speed depends on other load.
    wait_for_work(&one, shared.max(1));
    other.kill();
    wait_for_work(&one, shared.max(1));
}

// Promise: T20
#[test]
fn kernels_that_wait_for_each_other_progress_in_a_small_share() {
    let _turn = turn();
    let state = new_state();
    let (one, other) = (start(state.path()), start(state.path()));
    other.ask(&format!("work 4 {ENDLESS}")).unwrap();
    // 16 kernels in as many streams, with one seat for all. Each waits for the next one to start.
    assert_eq!(one.ask("relay 16"), Ok(16));
}
