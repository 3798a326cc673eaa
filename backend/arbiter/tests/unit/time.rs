//! Permits, with workers that report anything.

use crate::host::Host;
use sluice_kit::wait::eventually;
use sluice_messages::control::{ArbiterEvent, Priority, TimeShare, ToArbiter};
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;

fn shares(vm: u32, share: TimeShare) -> ToArbiter {
    ToArbiter::TimeShare { vm, epoch: 1, share }
}

fn is_open(worker: &crate::worker::Worker) -> bool {
    worker.ask("permit").parse::<u32>().unwrap() & (u32::MAX >> 1) > 0
}

// Promise: T28
#[test]
fn permit_stays_with_its_last_user_until_another_worker_waits() {
    let mut host = Host::start();
    host.vm(1, 64 * MIB);
    host.vm(2, 64 * MIB);
    let (one, other) = (host.worker(1), host.worker(2));
    assert!(!is_open(&one) && !is_open(&other), "no worker has work");
    one.ask("waits 1");
    eventually("a permit for the waiting worker", || is_open(&one));
    one.ask("flies 5 5");
    one.ask("waits 0");
    eventually("it is alone and quiet", || one.ask("permit") == "20000");
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(one.ask("permit"), "20000", "it keeps the permit");
    assert!(!is_open(&other));
    let asked = Instant::now();
    other.ask("waits 1");
    eventually("the permit moves", || is_open(&other) && !is_open(&one));
    println!("after {:?}", asked.elapsed());
    host.assert_sound();
}

// Promise: T27
#[test]
fn worker_that_waits_without_submitting_delays_no_other_worker() {
    let mut host = Host::start();
    host.vm(1, 64 * MIB);
    host.vm(2, 64 * MIB);
    let (idler, other) = (host.worker(1), host.worker(2));
    idler.ask("waits 1");
    eventually("a permit for the first", || is_open(&idler));
    other.ask("waits 1");
    eventually("and for the second beside it", || is_open(&other));
    // The second works all the time and pays for it; the first, which reports nothing more, has no more turns.
    other.ask("flies 1 0");
    eventually("the first is taken for absent", || !is_open(&idler));
    std::thread::sleep(Duration::from_millis(100));
    assert!(is_open(&other) && !is_open(&idler));
    // A turn that it does not use ends before a busy machine looks, perhaps.
    eventually("until it gives a sign of life", || {
        idler.ask("waits 1");
        is_open(&idler)
    });
    eventually("the second pays more than the first", || {
        let used = [host.used(1), host.used(2)];
        used[1] > 50_000_000 && used[0] < used[1]
    });
    host.assert_sound();
}

// Promise: T29
#[test]
fn endless_work_kills_its_worker_only_if_the_vm_has_a_hang_timeout() {
    let mut host = Host::start();
    host.vm(1, 64 * MIB);
    host.vm(2, 64 * MIB);
    host.send(shares(2, TimeShare { hang: 3_000, ..TimeShare::default() }), &[]);
    let (patient, strict) = (host.worker(1), host.worker(2));
    let began = Instant::now();
    for worker in [&patient, &strict] {
        worker.ask("waits 1");
        worker.ask("flies 2 1");
    }
    std::thread::sleep(Duration::from_millis(100));
    assert!(!host.saw(ArbiterEvent::Hung) || began.elapsed() >= Duration::from_secs(3), "too early");
    eventually("the worker is ended", || host.saw(ArbiterEvent::Hung));
    eventually("its process is gone", || !crate::host::lives(strict.process()));
    assert_eq!(patient.ask("serial"), patient.ask("serial"), "the other one lives");
    host.assert_sound();
}

// Promise: T25
#[test]
fn cap_closes_the_permit_of_the_only_worker() {
    let mut host = Host::start();
    host.vm(1, 64 * MIB);
    host.send(shares(1, TimeShare { cap: 200, priority: Priority::High, ..TimeShare::default() }), &[]);
    let worker = host.worker(1);
    worker.ask("waits 1");
    let (mut open, mut looks) = (0, 0);
    let begun = Instant::now();
    // In the long run: an arbiter that a busy machine delays closes the permit late, and makes up for it.
    eventually("the cap holds", || {
        open += u32::from(is_open(&worker));
        looks += 1;
        // The waiting work is gone at the end of each turn, and comes back, as with a worker that works.
        std::thread::sleep(Duration::from_micros(200));
        let elapsed = begun.elapsed();
        // A fifth of the time, and a tenth of a second ahead.
        let most = elapsed / 5 + Duration::from_millis(100);
        elapsed >= Duration::from_secs(1) && Duration::from_nanos(host.used(1)) <= most && open * 2 < looks
    });
    let used = Duration::from_nanos(host.used(1));
    println!("open in {open} of {looks} looks, {used:?} charged in {:?}", begun.elapsed());
    host.assert_sound();
}

// Promise: T32
#[test]
fn worker_that_submits_without_a_permit_is_killed() {
    let mut host = Host::start();
    host.vm(1, 64 * MIB);
    host.vm(2, 64 * MIB);
    let (honest, liar) = (host.worker(1), host.worker(2));
    honest.ask("waits 1");
    eventually("a permit", || is_open(&honest));
    honest.ask("flies 500 499");
    // Threads that read the permit just before it closed submit their work.
    liar.ask("flies 30 29");
    std::thread::sleep(Duration::from_millis(50));
    assert!(!host.saw(ArbiterEvent::Abuse));
    assert!(!is_open(&liar), "the worker did not request a permit");
    // It may be ended before it could answer.
    liar.say("flies 5000 29");
    eventually("it is found out", || host.saw(ArbiterEvent::Abuse));
    eventually("its process is gone", || !crate::host::lives(liar.process()));
    assert!(is_open(&honest));
    host.assert_sound();
}

// Promise: T31
#[test]
fn held_work_is_not_charged_until_it_runs() {
    let mut host = Host::start();
    host.vm(1, 64 * MIB);
    host.vm(2, 64 * MIB);
    let (held, other) = (host.worker(1), host.worker(2));
    held.ask("waits 1");
    eventually("a permit", || is_open(&held));
    // It has submitted the waiting work, and none of it runs.
    held.ask("waits 0");
    other.ask("waits 1");
    eventually("the permit moves", || is_open(&other) && !is_open(&held));
    other.ask("flies 1 0");
    let before = [host.used(1), host.used(2)];
    eventually("the other one is charged", || host.used(2) >= before[1] + 90_000_000);
    assert_eq!(host.used(1), before[0], "nothing of it runs");
    // The wait is over: without a permit, but observed.
    held.ask("frees 1");
    let other = host.used(2);
    eventually("both are charged", || {
        host.used(1) > before[0] + 30_000_000 && host.used(2) > other + 30_000_000
    });
    host.assert_sound();
}

// Promise: T34
#[test]
fn time_of_a_worker_killed_between_samples_is_charged() {
    let mut host = Host::start();
    host.vm(1, 64 * MIB);
    let worker = host.worker(1);
    worker.ask("waits 1");
    eventually("a permit", || is_open(&worker));
    worker.ask("waits 0");
    worker.ask("flies 1 0");
    // A VM that is alone and does not ring is not observed.
    std::thread::sleep(Duration::from_millis(200));
    worker.kill();
    eventually("and its time is charged", || host.used(1) >= 150_000_000);
    host.assert_sound();
}

// Promise: T35
#[test]
fn vm_that_uses_more_time_than_its_workers_report_is_reported_and_charged() {
    let started = Instant::now();
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
    // Half of five seconds at least, although it reports nothing at all.
    let hidden = Duration::from_nanos(host.used(1));
    assert!(hidden >= Duration::from_secs(2) && hidden <= started.elapsed(), "charged for {hidden:?}");
    host.assert_sound();
}
