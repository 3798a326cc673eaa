//! Quota, recall and shares.

use crate::{
    MIB,
    host::{Host, Options},
};
use sluice_kit::wait::eventually;
use sluice_messages::control::{ArbiterEvent, HostAccess, ToArbiter};
use sluice_protocol::limits;
use std::time::{Duration, Instant};

// Promise: Q20
#[test]
fn quota_holds_to_the_byte_and_is_shown_in_the_custody_page() {
    let mut host = Host::start();
    host.vm(1, 101 * MIB);
    let worker = host.worker(1);
    assert_eq!(worker.info(), (100 * MIB, 100 * MIB), "whole units of 2 MiB");
    assert_eq!(worker.ask("begin"), "0 0");
    let left = 100 * MIB - host.driver_share();
    assert_eq!(worker.info(), (left, 100 * MIB), "the driver's share is part of it");
    assert_eq!(worker.take(32 * MIB), Ok(1));
    assert_eq!(worker.info(), (left - 32 * MIB, 100 * MIB));
    assert_eq!(worker.take(512 * MIB), Err(2));
    assert_eq!(worker.take_all(), left - 32 * MIB);
    assert_eq!(worker.info(), (0, 100 * MIB));
    assert_eq!(worker.take(2 * MIB), Err(2));
    assert_eq!(worker.ask("scan 0").split(' ').nth(1), Some("0"), "memory that is lent is zero");
    worker.ask("give 1");
    eventually("the refund", || worker.info() == (32 * MIB, 100 * MIB));
    assert_eq!(worker.take_in_all(32 * MIB), 32 * MIB);
    let [lent, driver, _] = host.describe(1).0;
    assert_eq!((lent, driver), (left, host.driver_share()));
    host.assert_sound();
}

// Promise: Q20
#[test]
fn two_workers_of_a_vm_have_one_quota_and_vms_have_their_own() {
    let mut host = Host::start();
    host.vm(1, 64 * MIB);
    host.vm(2, 64 * MIB);
    let (one, two, other) = (host.worker(1), host.worker(1), host.worker(2));
    assert!(one.take(32 * MIB).is_ok());
    assert!(two.take(32 * MIB).is_ok());
    assert_eq!(one.take(2 * MIB), Err(2));
    assert_eq!(two.take(2 * MIB), Err(2));
    assert_eq!(other.info(), (64 * MIB, 64 * MIB));
    assert!(other.take(32 * MIB).is_ok());
    host.assert_sound();
}

// Promise: Q22
#[test]
fn idle_chunks_of_a_worker_are_recalled_for_another_of_its_vm() {
    let host = Host::start();
    let quota = 64 * MIB + host.driver_share();
    host.vm(1, quota);
    let (one, two) = (host.worker(1), host.worker(1));
    assert_eq!(one.ask("begin"), "0 0");
    let first = one.take(32 * MIB).unwrap();
    assert!(one.take(32 * MIB).is_ok());
    one.ask(&format!("idle {}", 32 * MIB));
    eventually("idle bytes count as free", || two.info() == (32 * MIB, quota));
    let asked = Instant::now();
    two.say(&format!("want {}", 32 * MIB));
    assert_eq!(one.ask("recalled"), (32 * MIB).to_string());
    one.ask(&format!("give {first}"));
    assert!(two.lent(32 * MIB, asked).is_ok(), "what was recalled is lent");
    one.ask("idle 0");
    eventually("nothing is free", || two.info() == (0, quota));
}

// Promise: Q23
#[test]
fn share_is_opened_inside_its_vm_only_and_charged_once() {
    let mut host = Host::start();
    host.vm(1, 64 * MIB);
    host.vm(2, 64 * MIB);
    let (one, two, stranger) = (host.worker(1), host.worker(1), host.worker(2));
    for worker in [&one, &two, &stranger] {
        assert_eq!(worker.ask("begin"), "0 0");
    }
    let lease = one.take(2 * MIB).unwrap();
    let more = one.take(2 * MIB).unwrap();
    one.ask("fill 4711");
    let share = one.share(0, lease).unwrap();
    assert_eq!(one.ask(&format!("share {share} {more}")), format!("0 {share}"));
    assert_eq!(two.ask(&format!("open {share}")), "0 2");
    assert_eq!(two.numbers("scan 4711")[0], 4 * MIB / 4, "the same memory");
    assert_eq!(host.describe(1).0[0], 4 * MIB, "charged once");
    assert_eq!(stranger.ask(&format!("open {share}")), "1 0");
    assert_eq!(stranger.ask("open 4711"), "1 0", "as one that never was");
    // Opened chunks remain after their first holder is gone.
    one.kill();
    eventually("the first holder's end", || host.describe(1).1 == 1);
    assert_eq!(two.numbers("scan 4711")[0], 4 * MIB / 4);
    assert_eq!(host.describe(1).0[0], 4 * MIB);
    two.kill();
    eventually("the last holder's end", || host.describe(1).0[0] == 0);
    host.assert_sound();
}

// Promise: S20
#[test]
fn process_that_guesses_share_numbers_opens_no_share() {
    let mut host = Host::start();
    host.vm(1, 64 * MIB);
    let (owner, thief) = (host.worker(1), host.worker(1));
    assert_eq!(owner.ask("begin"), "0 0");
    assert_eq!(thief.ask("begin"), "0 0");
    let shares: Vec<u128> = (0..8)
        .map(|_| {
            let lease = owner.take(2 * MIB).unwrap();
            owner.share(0, lease).unwrap()
        })
        .collect();
    assert_eq!(thief.ask("guess 1000"), "0");
    // The whole number counts: neither half of it alone, nor a neighbour of it.
    for share in &shares {
        let low = share & u128::from(u64::MAX);
        for guess in [low, share ^ low, share ^ 1, share ^ 1 << 127, share.swap_bytes()] {
            assert_eq!(thief.ask(&format!("open {guess}")), "1 0");
        }
    }
    let halves: std::collections::HashSet<u128> =
        shares.iter().flat_map(|share| [share & u128::from(u64::MAX), share >> 64]).collect();
    assert_eq!(halves.len(), 16, "both halves of each are random: {shares:x?}");
    assert_eq!(thief.ask(&format!("open {}", shares[0])), "0 1", "handed the number, it has the memory");
    host.assert_sound();
}

// Promise: S20
#[test]
fn share_of_one_user_is_refused_to_another_user() {
    let mut host = Host::start();
    host.vm(1, 64 * MIB);
    let (owner, same, other) =
        (host.worker_of_user(1, 1, 1000), host.worker_of_user(1, 1, 1000), host.worker_of_user(1, 1, 1001));
    for worker in [&owner, &same, &other] {
        assert_eq!(worker.ask("begin"), "0 0");
    }
    let lease = owner.take(2 * MIB).unwrap();
    let share = owner.share(0, lease).unwrap();
    assert_eq!(other.ask(&format!("open {share}")), "1 0", "as one that never was");
    assert_eq!(same.ask(&format!("open {share}")), "0 1");
    host.assert_sound();
}

// Promise: S21
#[test]
fn lease_shared_twice_in_one_share_is_refused() {
    let mut host = Host::start();
    host.vm(1, 64 * MIB);
    host.vm(2, 64 * MIB);
    let (worker, neighbour) = (host.worker(1), host.worker(2));
    assert_eq!(worker.ask("begin"), "0 0");
    assert_eq!(neighbour.ask("begin"), "0 0");
    let lease = worker.take(2 * MIB).unwrap();
    let share = worker.share(0, lease).unwrap();
    assert_eq!(worker.share(share, lease), Err(1));
    assert_eq!(worker.ask(&format!("open {share}")), "0 1", "it opens one chunk");
    // Through another lease on the same chunk, too.
    assert_eq!(worker.share(share, lease + 1), Err(1));
    let other = worker.take(2 * MIB).unwrap();
    assert_eq!(worker.share(share, other), Ok(share));
    assert_eq!(worker.ask(&format!("open {share}")), "0 2");
    assert!(neighbour.take(2 * MIB).is_ok());
    host.assert_sound();
}

// Promise: S21
#[test]
fn leases_of_a_vm_are_bounded_by_its_chunks() {
    let mut host = Host::start();
    host.vm(1, host.driver_share() + 4 * MIB);
    let worker = host.worker(1);
    assert_eq!(worker.ask("begin"), "0 0");
    let lease = worker.take(2 * MIB).unwrap();
    let share = worker.share(0, lease).unwrap();
    let opened = worker.numbers(&format!("open-many {share}"))[0];
    assert_eq!(opened + 1, u64::from(limits::CHUNK_LEASES), "one lease for each time that it was opened");
    worker.kill();
    eventually("the end of its leases", || host.describe(1).0[0] == 0);
    host.assert_sound();
}

// Promise: Q24
#[test]
fn pinned_memory_has_a_limit_and_the_drivers_share_is_part_of_the_quota() {
    let mut host = Host::start();
    // A quota with room for a context, its margin and 8 MiB.
    host.terms(1, 1, host.context + host.margin + 8 * MIB, [0, 0, 8 * MIB, 0]);
    let worker = host.worker(1);
    assert_eq!(worker.ask(&format!("pin {}", 6 * MIB)), "0 0");
    assert_eq!(worker.ask(&format!("pin {}", 3 * MIB)), "2 0");
    assert_eq!(worker.ask(&format!("pin {}", u64::MAX)), "2 0");
    assert_eq!(host.pinned(1), 6 * MIB);
    worker.ask(&format!("unpin {}", 6 * MIB));
    eventually("it is unpinned", || host.pinned(1) == 0);
    assert_eq!(worker.ask(&format!("pin {}", 8 * MIB)), "0 0");
    assert_eq!(worker.ask("begin"), "0 0", "there is room for a context");
    assert_eq!(host.describe(1).0[1], (host.context + host.margin).next_multiple_of(2 * MIB));
    assert_eq!(worker.ask(&format!("grow 1 {}", 9 * MIB)), "2 0", "not for 9 MiB more");
    assert_eq!(worker.ask(&format!("grow 1 {}", u64::MAX)), "2 0");
    assert_eq!(worker.ask(&format!("grow 2 {}", 8 * MIB)), "0 0");
    let serial = worker.ask("serial");
    assert_eq!(worker.take(2 * MIB), Err(2), "the driver has the whole quota");
    worker.ask(&format!("grown {serial}"));
    host.assert_sound();
}

// Promise: Q25
#[test]
fn take_beyond_an_escrow_asks_for_more_and_is_refused_without_an_answer() {
    let mut host = Host::start();
    let ancestors = 7 | 9 << 32;
    host.terms(1, 1, 64 * MIB, [0, 0, 0, ancestors]);
    host.terms(2, 1, 64 * MIB, [0, 0, 0, ancestors]);
    host.send(ToArbiter::Escrow { ancestor: 7, bytes: 1 << 40 }, &[]);
    host.send(ToArbiter::Escrow { ancestor: 9, bytes: 32 * MIB }, &[]);
    let (one, two) = (host.worker(1), host.worker(2));
    assert!(one.take(32 * MIB).is_ok());
    let asked = Instant::now();
    two.say(&format!("want {}", 2 * MIB));
    eventually("more escrow is asked for", || {
        host.unit();
        host.wanted.contains(&(9, 34 * MIB))
    });
    host.send(ToArbiter::Escrow { ancestor: 9, bytes: 34 * MIB }, &[]);
    assert!(two.lent(2 * MIB, asked).is_ok(), "and then it is lent");
    let asked = Instant::now();
    assert_eq!(two.take(2 * MIB), Err(2), "without an answer the taker is refused");
    let waited = asked.elapsed();
    println!("refused after {waited:?}");
    assert!(waited >= Duration::from_millis(limits::TAKE_MILLISECONDS / 2), "{waited:?}");
    host.assert_sound();
}

// Promise: F20
#[test]
fn fenced_vm_is_refused_memory_and_its_permits_close() {
    let mut host = Host::start();
    host.vm(1, 64 * MIB);
    host.vm(2, 64 * MIB);
    let (worker, neighbour) = (host.worker(1), host.worker(2));
    assert!(worker.take(32 * MIB).is_ok());
    assert_eq!(worker.ask("permit"), "0", "it has nothing to do");
    worker.ask("waits 1");
    eventually("the permit opens", || worker.ask("permit") != "0");
    host.send(ToArbiter::Fence { vm: 1, epoch: 1 }, &[]);
    eventually("the permit closes", || worker.ask("permit") == "0");
    assert_eq!(worker.take(2 * MIB), Err(46));
    assert_eq!(worker.ask("grow 0 0"), "46 0");
    neighbour.ask("waits 1");
    eventually("the neighbour's permit opens", || neighbour.ask("permit") != "0");
    worker.ask("waits 0");
    worker.ask("waits 1");
    assert_eq!(worker.ask("permit"), "0");
    assert!(neighbour.take(2 * MIB).is_ok());
    worker.kill();
    eventually("nothing is left of it", || host.describe(1) == ([0, 0, 0], 0));
    // The old epoch is not served again, its successor is.
    let late = host.worker_of(1, 1);
    host.terms(1, 2, 64 * MIB, [0; 4]);
    let again = host.worker_of(1, 2);
    assert!(again.take(2 * MIB).is_ok());
    assert_eq!(host.describe(1), ([2 * MIB, 0, 0], 1));
    drop(late);
    assert!(!host.saw(ArbiterEvent::LedgerBroken));
}

// Promise: P48
#[test]
fn arbiter_reports_the_host_memory_that_kernels_reach() {
    for (has, wanted) in [
        ("", HostAccess::None),
        ("pageable-memory-access", HostAccess::Pageable),
        ("host-page-tables", HostAccess::HostPageTables),
        ("pageable-memory-access,host-page-tables", HostAccess::HostPageTables),
    ] {
        let environment = vec![("SLUICE_SOFTGPU_HAS", has.to_owned())];
        let host = Host::with(Options { environment, ..Options::default() });
        assert_eq!(host.host_access, wanted, "{has:?}");
    }
}
