//! Permits, with workers that say what they like.

use crate::host::{Host, eventually};
use sluice_messages::control::{ArbiterEvent, Priority, Shares, ToArbiter};
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;

fn shares(vm: u32, shares: Shares) -> ToArbiter {
    let Shares { weight, priority, cap, guarantee, hang } = shares;
    ToArbiter::Shares { vm, epoch: 1, weight, priority: priority as u32, cap, guarantee, hang }
}

fn is_open(worker: &crate::worker::Worker) -> bool {
    worker.ask("permit").parse::<u32>().unwrap() & (u32::MAX >> 1) > 0
}

// Promise: T28
#[test]
fn a_permit_stays_with_who_used_it_until_somebody_else_waits() {
    let mut host = Host::start();
    host.vm(1, 64 * MIB);
    host.vm(2, 64 * MIB);
    let (one, other) = (host.worker(1), host.worker(2));
    assert!(!is_open(&one) && !is_open(&other), "nobody has something to do");
    one.ask("waits 1");
    eventually("a permit for who waits", || is_open(&one));
    one.ask("flies 5 5");
    one.ask("waits 0");
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(one.ask("permit"), "20000", "alone and quiet");
    assert!(!is_open(&other));
    let asked = Instant::now();
    other.ask("waits 1");
    eventually("the permit moves", || is_open(&other) && !is_open(&one));
    println!("after {:?}", asked.elapsed());
    host.assert_sound();
}

// Promise: T27
#[test]
fn who_waits_and_does_nothing_holds_up_nobody() {
    let mut host = Host::start();
    host.vm(1, 64 * MIB);
    host.vm(2, 64 * MIB);
    let (idler, other) = (host.worker(1), host.worker(2));
    idler.ask("waits 1");
    eventually("a permit for the first", || is_open(&idler));
    other.ask("waits 1");
    eventually("and for the second beside it", || is_open(&other));
    // The second works all the time and pays for it; the first, which no longer says anything, has no turn any more.
    other.ask("flies 1 0");
    eventually("the first is taken for absent", || !is_open(&idler));
    std::thread::sleep(Duration::from_millis(100));
    assert!(is_open(&other) && !is_open(&idler));
    idler.ask("waits 1");
    eventually("until it gives a sign of life", || is_open(&idler));
    let used = [host.used(1), host.used(2)];
    assert!(used[1] > 50_000_000, "{used:?}");
    assert!(used[0] < used[1], "{used:?}");
    host.assert_sound();
}

// Promise: T29
#[test]
fn work_that_does_not_end_ends_its_worker_only_where_the_vm_says_so() {
    let mut host = Host::start();
    host.vm(1, 64 * MIB);
    host.vm(2, 64 * MIB);
    host.send(shares(2, Shares { hang: 300, ..Shares::default() }), &[]);
    let (patient, strict) = (host.worker(1), host.worker(2));
    for worker in [&patient, &strict] {
        worker.ask("waits 1");
        worker.ask("flies 2 1");
    }
    std::thread::sleep(Duration::from_millis(100));
    assert!(!host.saw(ArbiterEvent::Hung));
    let begun = Instant::now();
    while !host.saw(ArbiterEvent::Hung) {
        assert!(begun.elapsed() < Duration::from_secs(10), "the worker is not ended");
        std::thread::sleep(Duration::from_millis(10));
    }
    eventually("its process is gone", || !crate::host::lives(strict.process()));
    assert_eq!(patient.ask("serial"), patient.ask("serial"), "the other one lives");
    host.assert_sound();
}

// Promise: T25
#[test]
fn a_cap_closes_the_permit_of_who_is_alone() {
    let mut host = Host::start();
    host.vm(1, 64 * MIB);
    host.send(shares(1, Shares { cap: 200, priority: Priority::High, ..Shares::default() }), &[]);
    let worker = host.worker(1);
    worker.ask("waits 1");
    let (mut open, mut looks) = (0, 0);
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_secs(1) {
        open += u32::from(is_open(&worker));
        looks += 1;
        // What waits is no longer there at the end of each turn, and comes back, as with a worker that works.
        std::thread::sleep(Duration::from_micros(200));
    }
    println!("open in {open} of {looks} looks, {} ms charged", host.used(1) / 1_000_000);
    assert!(host.used(1) <= 300_000_000, "{} ns", host.used(1));
    assert!(open * 2 < looks, "{open} of {looks}");
    host.assert_sound();
}

// Promise: T32
#[test]
fn who_submits_without_a_permit_is_ended() {
    let mut host = Host::start();
    host.vm(1, 64 * MIB);
    host.vm(2, 64 * MIB);
    let (honest, liar) = (host.worker(1), host.worker(2));
    honest.ask("waits 1");
    eventually("a permit", || is_open(&honest));
    honest.ask("flies 500 499");
    // Threads that looked at the permit just before it closed submit what they have.
    liar.ask("flies 30 29");
    std::thread::sleep(Duration::from_millis(50));
    assert!(!host.saw(ArbiterEvent::Abuse));
    assert!(!is_open(&liar), "it did not say that it wants one");
    // Perhaps it is ended before it could answer.
    liar.say("flies 5000 29");
    eventually("it is found out", || host.saw(ArbiterEvent::Abuse));
    eventually("its process is gone", || !crate::host::lives(liar.process()));
    assert!(is_open(&honest));
    host.assert_sound();
}

// Promise: T31
#[test]
fn work_that_is_held_is_nobodys_turn_until_it_runs() {
    let mut host = Host::start();
    host.vm(1, 64 * MIB);
    host.vm(2, 64 * MIB);
    let (held, other) = (host.worker(1), host.worker(2));
    held.ask("waits 1");
    eventually("a permit", || is_open(&held));
    // It has submitted what waits, and none of it runs.
    held.ask("waits 0");
    other.ask("waits 1");
    eventually("the permit moves", || is_open(&other) && !is_open(&held));
    other.ask("flies 1 0");
    let before = [host.used(1), host.used(2)];
    std::thread::sleep(Duration::from_millis(100));
    let used = [host.used(1) - before[0], host.used(2) - before[1]];
    assert!(used[0] == 0 && used[1] >= 90_000_000, "{used:?}");
    // The wait is over: without a permit, but not unseen.
    held.ask("frees 1");
    std::thread::sleep(Duration::from_millis(100));
    let more = [host.used(1) - before[0] - used[0], host.used(2) - before[1] - used[1]];
    assert!(more[0] > 30_000_000 && more[1] > 30_000_000, "{more:?}");
    host.assert_sound();
}

// Promise: T34
#[test]
fn what_a_worker_used_is_charged_although_it_dies_before_anybody_looks() {
    let mut host = Host::start();
    host.vm(1, 64 * MIB);
    let worker = host.worker(1);
    worker.ask("waits 1");
    eventually("a permit", || is_open(&worker));
    worker.ask("waits 0");
    worker.ask("flies 1 0");
    // Nobody looks at a VM that is alone and does not ring.
    std::thread::sleep(Duration::from_millis(200));
    worker.kill();
    eventually("and its time is charged", || host.used(1) >= 150_000_000);
    host.assert_sound();
}

// Promise: T35
#[test]
fn a_vm_that_uses_more_time_than_its_workers_say_is_told_of() {
    let mut host = Host::start();
    host.vm(1, 64 * MIB);
    host.vm(2, 64 * MIB);
    let (secretive, honest) = (host.worker(1), host.worker(2));
    honest.ask("waits 1");
    eventually("the honest one has a permit", || is_open(&honest));
    honest.ask("flies 1 0");
    {
        let mut listed = host.listed.lock().unwrap();
        listed.processes = Some(vec![(secretive.process(), MIB), (honest.process(), MIB)]);
        listed.busy = [(secretive.process(), 50), (honest.process(), 50)].into();
    }
    eventually("who says nothing of it is told of", || host.saw_of(ArbiterEvent::Undercharged, 1));
    assert!(!host.saw_of(ArbiterEvent::Undercharged, 2), "the other one is charged what it uses");
    host.assert_sound();
}
