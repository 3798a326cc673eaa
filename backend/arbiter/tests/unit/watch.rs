//! The arbiter's observations beside custody: drivers that grow, processes that are no workers, other parties that leave.

use crate::{
    MIB,
    host::{DriverBooking, Host, Options, lives},
};
use sluice_kit::wait::eventually;
use sluice_messages::{
    control::{ArbiterEvent, Figures},
    figures::Upkeep,
};
use sluice_protocol::limits::{DEATH_MILLISECONDS, GROW_TIMEOUT_MILLISECONDS};
use std::time::{Duration, Instant};

/// Time for which a death delays growth of other VMs.
const DELAY: Duration = Duration::from_millis(DEATH_MILLISECONDS);

// Promise: S4
#[test]
fn driver_growth_waits_for_the_memory_of_another_vms_dead_worker() {
    let mut host = Host::start();
    host.vm(1, 64 * MIB);
    host.vm(2, 64 * MIB);
    let victim = host.worker(1);
    assert_eq!(victim.ask("begin"), "0 0");
    let process = victim.process();
    host.listed.lock().unwrap().stuck.insert(process);
    let (same, other) = (host.worker(1), host.worker(2));
    let killed = Instant::now();
    victim.kill();
    eventually("its end", || host.describe(1).0[2] > 0);
    other.say("begin");
    // A death delays others for a bounded time, which a busy machine may need for this test.
    let waits = |time| !other.speaks_within(time) || killed.elapsed() >= DELAY;
    assert!(waits(Duration::from_millis(500)), "the dead one's memory may be free already");
    assert_eq!(same.ask("begin"), "0 0", "its own VM has nothing to fear");
    assert!(waits(Duration::from_millis(100)), "the grant to its own VM changes nothing");
    let scrubs = host.log().len();
    host.listed.lock().unwrap().stuck.clear();
    assert_eq!(other.receive(), "0 0");
    eventually("what it left is scrubbed", || host.log().len() > scrubs);
    eventually("nothing of it is left", || host.describe(1).0[2] == 0);
    host.assert_sound();
}

// Promise: Q24
#[test]
fn worker_whose_driver_exceeds_the_quota_is_killed() {
    let mut host = Host::start();
    assert_eq!(host.measured(DriverBooking::Owner), Figures::Used);
    host.vm(1, 64 * MIB);
    let (mut greedy, modest) = (host.worker(1), host.worker(1));
    let list = |host: &Host, bytes: u64| {
        host.listed.lock().unwrap().processes =
            Some(vec![(modest.process(), MIB), (greedy.process(), bytes)]);
    };
    list(&host, 8 * MIB);
    eventually("it is booked", || host.describe(1).0[1] == 10 * MIB);
    list(&host, 100 * MIB);
    eventually("its end", || greedy.is_killed());
    assert!(host.saw(ArbiterEvent::Headroom));
    assert!(modest.take(2 * MIB).is_ok());
}

// Promise: Q24
#[test]
fn chunks_booked_to_their_importer_do_not_count_as_driver_growth() {
    for books in [DriverBooking::Importer, DriverBooking::Both] {
        let mut host = Host::start();
        assert_eq!(host.measured(books), Figures::Used);
        host.vm(1, 64 * MIB);
        let mut worker = host.worker(1);
        assert_eq!(worker.ask("begin"), "0 0");
        let lease = worker.take(32 * MIB).expect("there is room");
        host.listed.lock().unwrap().imported.insert(worker.process(), 32 * MIB);
        let bytes = |host: &mut Host| {
            (0..5).for_each(|_| host.looks());
            assert!(!host.saw(ArbiterEvent::Headroom) && lives(worker.process()), "its figure is no growth");
            let ([lent, headroom, _], _) = host.describe(1);
            (lent, headroom)
        };
        assert_eq!(bytes(&mut host), (32 * MIB, host.driver_share()), "{books:?}");
        // Memory given back is not listed any more.
        host.listed.lock().unwrap().imported.clear();
        worker.ask(&format!("give {lease}"));
        assert_eq!(bytes(&mut host), (0, host.driver_share()));
        // Memory that it takes in addition is its driver's.
        eventually("what it gave back is clean", || worker.take(32 * MIB).is_ok());
        host.listed.lock().unwrap().imported.insert(worker.process(), 32 * MIB + 40 * MIB);
        eventually("its end", || worker.is_killed());
        assert!(host.saw(ArbiterEvent::Headroom));
    }
}

// Promise: P47
#[test]
fn driver_without_bytes_per_process_is_reported_and_kills_no_worker() {
    for books in [DriverBooking::Absent, DriverBooking::Nowhere] {
        let mut host = Host::start();
        assert_eq!(host.measured(books), Figures::Unused);
        host.vm(1, 64 * MIB);
        let worker = host.worker(1);
        assert_eq!(worker.ask("begin"), "0 0");
        host.listed.lock().unwrap().processes = Some(vec![(worker.process(), 100 * MIB)]);
        (0..5).for_each(|_| host.looks());
        assert!(!host.saw(ArbiterEvent::Headroom) && lives(worker.process()), "nothing is ended for it");
        assert_eq!(host.describe(1).0[1], host.driver_share());
        assert_eq!(host.figures(), Figures::Unused);
    }
}

// Promise: Q51
#[test]
fn driver_growth_waits_until_a_dead_workers_driver_share_is_free() {
    let mut host = Host::start();
    assert_eq!(host.measured(DriverBooking::Owner), Figures::Used);
    let context = host.context;
    host.vm(1, context + host.margin + context / 2);
    let (first, second) = (host.worker(1), host.worker(1));
    assert_eq!(first.ask("begin"), "0 0");
    let process = first.process();
    {
        let mut listed = host.listed.lock().unwrap();
        listed.processes = Some(vec![(process, context)]);
        listed.stuck.insert(process);
    }
    host.looks();
    assert_eq!(second.ask("begin"), "2 0", "the first one lives");
    first.kill();
    let asked = Instant::now();
    second.say("begin");
    let waits = !second.speaks_within(Duration::from_millis(200));
    // Growth waits for a bounded time, which a busy machine may need for this test.
    let timeout = Duration::from_millis(GROW_TIMEOUT_MILLISECONDS);
    assert!(waits || asked.elapsed() >= timeout, "the driver still has what the first one had");
    host.listed.lock().unwrap().processes = Some(Vec::new());
    host.listed.lock().unwrap().stuck.clear();
    let late = asked.elapsed() >= timeout;
    let begun = second.receive();
    assert!(begun == "0 0" || late, "refused with {begun}");
    if begun != "0 0" {
        eventually("a later request is granted", || second.ask("begin") == "0 0");
    }
}

// Promise: Q53
#[test]
fn unknown_bytes_of_a_listed_process_count_as_one_context() {
    let mut host = Host::start();
    assert_eq!(host.measured(DriverBooking::Owner), Figures::Used);
    let context = host.context;
    host.vm(1, context + context / 2);
    let used = host.unit()[0];
    // The use before any worker came, for comparison.
    host.listed.lock().unwrap().used = Some(used + 10 * MIB);
    host.looks();
    let (first, second) = (host.worker(1), host.worker(1));
    {
        let mut listed = host.listed.lock().unwrap();
        listed.processes = Some(vec![(first.process(), 0)]);
        listed.used = Some(used + 40 * MIB);
    }
    eventually("a context is counted", || host.describe(1).0[1] == context);
    assert_eq!(second.ask("begin"), "2 0", "a second one exceeds the quota");
    host.looks();
    assert!(!host.saw(ArbiterEvent::Drift), "drift is not computed from unknown figures");
    assert!(
        !host.saw(ArbiterEvent::Headroom) && lives(first.process()),
        "no worker is ended for an estimate"
    );
    host.listed.lock().unwrap().processes = Some(vec![(first.process(), MIB)]);
    eventually("the reported bytes are counted", || host.describe(1).0[1] == 2 * MIB);
    eventually("drift", || host.saw(ArbiterEvent::Drift));
    assert_eq!(second.ask("begin"), "0 0");
}

// Promise: Q21
#[test]
fn foreign_process_and_drift_are_reported() {
    let mut host = Host::start();
    host.vm(1, 64 * MIB);
    let used = host.unit()[0];
    {
        let mut listed = host.listed.lock().unwrap();
        listed.used = Some(used + 10 * MIB);
        listed.processes = Some(vec![(host.arbiter.id(), used), (1, 5 * MIB)]);
    }
    host.looks();
    eventually("the report of a foreign process", || host.saw(ArbiterEvent::ForeignProcess));
    assert_eq!(host.events.iter().filter(|(kind, ..)| *kind == ArbiterEvent::ForeignProcess).count(), 1);
    assert!(host.events.contains(&(ArbiterEvent::ForeignProcess, 0, 1, 5 * MIB)), "not the arbiter itself");
    assert!(!host.saw(ArbiterEvent::Drift), "a difference from the start is no drift");
    host.listed.lock().unwrap().used = Some(used + 40 * MIB);
    eventually("drift", || host.saw(ArbiterEvent::Drift));
    assert!(host.events.contains(&(ArbiterEvent::Drift, 0, 0, 30 * MIB)));
    assert_eq!(host.upkeep().drift, 30 * MIB);
    host.listed.lock().unwrap().used = Some(used + 10 * MIB);
    eventually("it is gone", || host.upkeep().drift == 0);
}

// Promise: A22
#[test]
fn scrubs_and_scrubbed_bytes_are_counted() {
    let mut host = Host::start();
    host.vm(1, 64 * MIB);
    eventually("everything is clean", || host.unit()[3] == 0);
    let Upkeep { scrubs, scrubbed, took, .. } = host.upkeep();
    assert!(scrubs > 0 && scrubbed == host.bytes && took > 0, "the first sweep: {scrubs} {scrubbed} {took}");
    let worker = host.worker(1);
    worker.take(2 * MIB).expect("there is room");
    worker.kill();
    eventually("it is swept", || host.upkeep().scrubbed >= scrubbed + 2 * MIB);
    let more = host.upkeep();
    assert!(more.scrubs > scrubs && more.took > took, "{more:?}");
}

// Promise: Q29
#[test]
fn guaranteed_memory_of_a_vm_is_lent_to_no_other() {
    let mut host = Host::start();
    host.terms(1, 1, 200 * MIB, [200 * MIB, 0, 0, 0]);
    host.vm(2, 0);
    let (kept, burst) = (host.worker(1), host.worker(2));
    let lent = |host: &mut Host, vm: u32| host.describe(vm).0[0];
    for bytes in [32 * MIB, 2 * MIB] {
        burst.numbers(&format!("take-only {bytes}"));
    }
    assert_eq!(lent(&mut host, 2), host.bytes - 200 * MIB);
    for bytes in [32 * MIB, 2 * MIB] {
        kept.numbers(&format!("take-only {bytes}"));
    }
    assert_eq!(lent(&mut host, 1), 200 * MIB);
    host.assert_sound();
}

// Promise: F22
#[test]
fn arbiter_without_its_daemon_serves_its_workers_to_their_end() {
    let mut host = Host::with(Options { inventory: false, ..Options::default() });
    host.vm(1, 64 * MIB);
    let worker = host.worker(1);
    assert!(worker.take(2 * MIB).is_ok());
    host.hang_up();
    assert!(worker.take(2 * MIB).is_ok());
    std::thread::sleep(Duration::from_millis(100));
    assert!(lives(host.arbiter.id()));
    worker.kill();
    eventually("its end", || host.arbiter.try_wait().unwrap().is_some_and(|status| status.success()));
}

// Promise: F22
#[test]
fn scrubs_continue_after_the_inventory_is_replaced() {
    let mut host = Host::start();
    host.vm(1, 64 * MIB);
    for _ in 0..5 {
        // A new one replaces the old one.
        host.attach_inventory();
        let worker = host.worker(1);
        assert!(worker.take(32 * MIB).is_ok());
        worker.kill();
        eventually("its end", || host.describe(1) == ([0, 0, 0], 0));
    }
    host.assert_sound();
}
