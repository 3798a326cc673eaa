//! Deaths, scrubbing, and memory that a liar keeps.

use crate::{
    MIB,
    host::{DriverBooking, Host, Options},
};
use sluice_kit::wait::eventually;
use sluice_messages::control::{ArbiterEvent, Figures, Verify};
use sluice_protocol::limits;
use std::time::{Duration, Instant};

const TAG: u32 = 0x5afe_c0de;

/// Worker A of VM 1 fills all its memory and is killed; VM 2 takes everything. Returns the number of words of A that it finds, and
/// the bytes of both.
fn remnants(scrub: bool) -> (u64, u64, u64) {
    let mut host = Host::with(Options { scrub, ..Options::default() });
    host.vm(1, 0);
    host.vm(2, 0);
    let victim = host.worker(1);
    assert_eq!(victim.ask("begin"), "0 0");
    let filled = victim.take_all();
    victim.ask(&format!("fill {TAG}"));
    assert_eq!(victim.numbers(&format!("scan {TAG}"))[0], filled / 4);
    victim.kill();
    eventually("the refund", || host.describe(1).0[0] == 0);
    let attacker = host.worker(2);
    assert_eq!(attacker.ask("begin"), "0 0");
    let got = if scrub { attacker.take_in_all(filled) } else { attacker.take_all() };
    let found = attacker.numbers(&format!("scan {TAG}"));
    if scrub {
        host.assert_sound();
        let log = host.log();
        let line = |reason: &str| log.iter().filter(|line| line.contains(reason)).count();
        assert!(line("\"reason\":\"fresh\"") > 0 && line("\"vm\":1,\"vm_epoch\":1") > 0, "{log:?}");
        assert!(log.iter().all(|line| line.contains("\"verify\":\"all\",\"verified\":true")), "{log:?}");
    }
    (found[0], got, filled)
}

// Promise: S1, S3
#[test]
fn memory_of_a_killed_worker_is_scrubbed_before_the_next_vm_gets_it() {
    let (found, got, filled) = remnants(true);
    assert_eq!(found, 0);
    // Ballast beyond a grant's charge comes back later: the first worker may not have had it.
    assert!(got >= filled, "and it gets all of it: {got} of {filled}");
}

// Promise: S1
#[test]
fn remnant_search_without_scrubbing_finds_remnants() {
    let (found, got, _) = remnants(false);
    assert!(found > 0, "the search finds nothing in {got} bytes that were not cleared");
}

// Promise: Q51
#[test]
fn take_sent_before_a_worker_of_the_vm_ends_gets_its_memory() {
    let mut host = Host::start();
    // Room for two drivers and 64 MiB.
    host.vm(1, 64 * MIB + 2 * host.driver_share());
    let taker = host.worker(1);
    assert_eq!(taker.ask("begin"), "0 0");
    assert!(taker.take(2 * MIB).is_ok());
    for round in 0..5 {
        let first = host.worker(1);
        assert_eq!(first.ask("begin"), "0 0");
        assert_eq!(first.take_in_all(62 * MIB), 62 * MIB, "round {round}");
        // On a busy machine some takes are slow; if honest refusals waited, all would be slow.
        let mut refusals = (0..5).map(|_| {
            let began = Instant::now();
            assert_eq!(taker.take(2 * MIB), Err(2), "the first one lives");
            began.elapsed()
        });
        let timeout = Duration::from_millis(limits::TAKE_MILLISECONDS);
        assert!(refusals.any(|took| took < timeout / 2), "an honest refusal waits for nothing");
        // The arbiter receives the request first, and the end at the same time.
        host.stop();
        taker.say(&format!("want {}", 2 * MIB));
        first.kill();
        let asked = Instant::now();
        host.go_on();
        let lease = taker.lent(2 * MIB, asked).unwrap_or_else(|code| panic!("round {round}: {code}"));
        assert_eq!(taker.ask(&format!("give {lease}")), "0");
    }
    host.assert_sound();
}

// Promise: S2
#[test]
fn memory_falsely_given_back_serves_no_other_vm_until_its_worker_ends() {
    let mut host = Host::start();
    assert_eq!(host.measured(DriverBooking::Owner), Figures::Used);
    host.vm(1, 0);
    host.vm(2, 0);
    let (liar, other) = (host.worker(1), host.worker(2));
    assert_eq!(liar.ask("begin"), "0 0");
    assert_eq!(other.ask("begin"), "0 0");
    let lease = liar.take(32 * MIB).unwrap();
    liar.ask(&format!("fill {TAG}"));
    liar.ask(&format!("lie {lease}"));
    let got = other.take_all();
    liar.ask(&format!("poke {TAG}"));
    assert_eq!(other.numbers(&format!("scan {TAG}")), [0, 0], "nothing it has can be written by the liar");
    let total = host.unit()[0];
    assert!(got <= total, "{got} of {total}");
    eventually("the lie is found when its memory is wanted", || host.saw(ArbiterEvent::Leak));
    assert!(host.describe(1).0[0] >= 32 * MIB, "and the liar's VM pays for it");
    liar.kill();
    eventually("what the liar kept", || {
        other.take_all();
        host.describe(1).0[0] == 0 && host.describe(2).0[0] >= got + 32 * MIB
    });
    assert_eq!(other.numbers(&format!("scan {TAG}")), [0, 0]);
    host.assert_sound();
}

// Promise: S7
#[test]
fn memory_a_dead_worker_passed_on_serves_no_other_vm_until_released() {
    let mut host = Host::start();
    assert_eq!(host.measured(DriverBooking::Owner), Figures::Used);
    host.vm(1, 0);
    host.vm(2, 0);
    let (giver, other) = (host.worker(1), host.worker(2));
    // Held by this process, which the driver does not list.
    let handed = giver.hand_on(32 * MIB);
    let honest = giver.hand_on(2 * MIB);
    drop(honest);
    assert_eq!(other.ask("begin"), "0 0");
    giver.kill();
    eventually("the driver has let go of it, and all that came back is clean", || {
        host.describe(1) == ([32 * MIB, 0, 0], 0)
    });
    eventually("the missing memory is reported", || host.saw(ArbiterEvent::Leak));
    let mut got = 0;
    eventually("all memory of the unit, without the chunk that was passed on", || {
        got += other.take_all();
        let [total, lent, ..] = host.unit();
        (got, lent) == (total, total)
    });
    let same = host.worker(1);
    assert_eq!(same.take(2 * MIB), Err(2), "memory of the other VM is not lent to this VM");
    drop(handed);
    eventually("the chunk is released by all", || host.describe(1).0[0] == 0);
    // All of it comes back.
    other.take_in_all(32 * MIB);
    assert_eq!(other.numbers("scan 0")[1], 0, "clean");
    host.assert_sound();
}

// Promise: S7
#[test]
fn memory_of_a_killed_worker_serves_its_own_vm_again_at_once() {
    let mut host = Host::start();
    host.vm(1, 64 * MIB);
    let left = 64 * MIB - host.driver_share();
    for _ in 0..5 {
        let worker = host.worker(1);
        assert_eq!(worker.ask("begin"), "0 0");
        assert_eq!(worker.take_in_all(left), left);
        worker.ask(&format!("fill {TAG}"));
        worker.kill();
        let next = host.worker(1);
        assert_eq!(next.ask("begin"), "0 0");
        assert_eq!(next.take_in_all(left), left);
        assert_eq!(next.numbers(&format!("scan {TAG}")), [0, 0]);
        next.kill();
    }
    assert!(!host.saw(ArbiterEvent::Leak), "no memory is kept");
    host.assert_sound();
}

// Promise: S2
#[test]
fn memory_given_back_by_a_live_worker_moves_to_another_vm() {
    let mut host = Host::start();
    host.vm(1, 0);
    host.vm(2, 0);
    let (one, two) = (host.worker(1), host.worker(2));
    assert_eq!(one.ask("begin"), "0 0");
    assert_eq!(two.ask("begin"), "0 0");
    let lease = one.take(32 * MIB).unwrap();
    one.ask(&format!("fill {TAG}"));
    one.ask(&format!("give {lease}"));
    // The rest of the contexts' grants goes to the unit a little later.
    let mut got = 0;
    eventually("all of the unit", || {
        got += two.take_all();
        let [total, lent, ..] = host.unit();
        (got, lent) == (total, total)
    });
    assert_eq!(two.numbers(&format!("scan {TAG}")), [0, 0]);
    assert!(!host.saw(ArbiterEvent::Leak));
    host.assert_sound();
}

// Promise: S2
#[test]
fn memory_of_a_dead_worker_without_an_inventory_stays_with_its_vm() {
    let mut host = Host::with(Options { inventory: false, ..Options::default() });
    host.vm(1, 0);
    host.vm(2, 64 * MIB);
    let victim = host.worker(1);
    let filled = (0..).take_while(|_| victim.take(32 * MIB).is_ok()).count() as u64 * 32 * MIB;
    victim.kill();
    eventually("the refund", || host.describe(1).0[0] == 0);
    assert_eq!(host.describe(1).1, 1, "it is not known to be gone");
    let other = host.worker(2);
    assert_eq!(other.take(32 * MIB), Err(2), "nothing of {filled} bytes");
    let same = host.worker(1);
    eventually("its own VM has it", || same.take(32 * MIB).is_ok());
    host.attach_inventory();
    eventually("it is clean", || other.take(32 * MIB).is_ok());
    host.assert_sound();
}

// Promise: S2
#[test]
fn memory_of_a_dead_worker_that_the_driver_still_lists_is_not_lent() {
    let mut host = Host::start();
    host.vm(1, 0);
    host.vm(2, 64 * MIB);
    let victim = host.worker(1);
    while victim.take(32 * MIB).is_ok() {}
    let process = victim.process();
    host.listed.lock().unwrap().stuck.insert(process);
    victim.kill();
    eventually("the refund", || host.describe(1).0[0] == 0);
    let other = host.worker(2);
    assert_eq!(other.take(32 * MIB), Err(2));
    eventually("the driver is reported", || host.saw(ArbiterEvent::Stuck));
    host.listed.lock().unwrap().stuck.clear();
    eventually("it is gone", || host.describe(1).1 == 0);
    eventually("it is clean", || other.take(32 * MIB).is_ok());
    host.assert_sound();
}

// Promise: Q26
#[test]
fn charge_of_a_killed_worker_is_refunded_within_a_second() {
    let mut host = Host::start();
    host.vm(1, 0);
    let mut took = [0; 10].map(|_: u8| {
        let worker = host.worker(1);
        while worker.take(32 * MIB).is_ok() {}
        assert!(host.describe(1).0[0] > 0);
        worker.kill();
        let killed = Instant::now();
        eventually("the refund", || host.describe(1).0[0] == 0);
        killed.elapsed()
    });
    took.sort_unstable();
    println!("charged after a kill for: {took:?}");
    // A busy machine may delay some of them.
    assert!(took[5].as_millis() < 1000, "{took:?}");
    host.assert_sound();
}

// Promise: S3
#[test]
fn scrubs_with_sampled_verification_leave_receipts() {
    let host = Host::with(Options { verify: Verify::Sampled, ..Options::default() });
    eventually("everything is scrubbed", || {
        let bytes: u64 = host
            .log()
            .iter()
            .filter_map(|line| line.split("\"bytes\":").nth(1)?.split(',').next()?.parse::<u64>().ok())
            .sum();
        bytes >= host.bytes
    });
    assert!(host.log().iter().all(|line| line.contains("\"verify\":\"sampled\",\"verified\":true")));
}
