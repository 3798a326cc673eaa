//! Workers that break the protocol, and an arbiter with few descriptors.

use crate::{
    MIB,
    crowd::{MOST_DESCRIPTORS, Played},
    host::{Host, Options, null_driver},
};
use rustix::{fd::AsFd as _, net::sockopt::set_socket_linger};
use sluice_kit::wait::{TIMEOUT, eventually};
use sluice_messages::control::ArbiterEvent;
use sluice_protocol::limits;
use std::{
    io::Write as _,
    net::{TcpListener, TcpStream},
    time::{Duration, Instant},
};

// Promise: F21
#[test]
fn give_of_a_foreign_lease_kills_its_sender_and_no_other_worker() {
    let mut host = Host::start();
    host.vm(1, 64 * MIB);
    host.vm(2, 64 * MIB);
    let (victim, mut forger) = (host.worker(1), host.worker(2));
    let lease = victim.take(32 * MIB).unwrap();
    forger.say(&format!("forge {lease}"));
    eventually("the forger's end", || forger.is_killed());
    assert!(host.saw(ArbiterEvent::Abuse));
    assert_eq!(host.describe(1).0[0], 32 * MIB, "the lease is untouched");
    assert!(victim.take(2 * MIB).is_ok());
    host.assert_sound();
}

// Promise: F21
#[test]
fn unfounded_custody_requests_kill_their_worker() {
    let mut host = Host::start();
    host.vm(1, 64 * MIB);
    let innocent = host.worker(1);
    for lie in ["unpin 4096", "grown 1", "want 4096", "share 0 99"] {
        let mut liar = host.worker(1);
        liar.say(lie);
        eventually(lie, || liar.is_killed());
    }
    assert!(innocent.take(2 * MIB).is_ok());
    host.assert_sound();
}

// Promise: F21
#[test]
fn worker_that_floods_requests_is_killed_and_starves_no_other_vm() {
    let mut host = Host::start();
    host.vm(1, 64 * MIB);
    host.vm(2, 64 * MIB);
    let other = host.worker(2);
    // The flood ends after some seconds, which a busy machine may need for one take. Takes that waited for its end would do so each time.
    let longest = Duration::from_millis(limits::TAKE_MILLISECONDS);
    let starves = (0..5).all(|_| {
        let mut flood = host.worker(1);
        flood.say("flood");
        let (mut leases, mut beside, mut took) = (Vec::new(), 0, Vec::new());
        for _ in 0..200 {
            let asked = Instant::now();
            let taken = other.take(2 * MIB);
            took.push(asked.elapsed());
            match taken {
                Ok(lease) => leases.push(lease),
                refused => assert_eq!(refused, Err(2)),
            }
            beside += u32::from(!flood.is_killed());
        }
        eventually("its end", || flood.is_killed());
        took.sort_unstable();
        let (half, most) = (took[100], took[199]);
        println!(
            "{beside} of 200 takes were answered while the flood went on: half in {half:?}, all in {most:?}"
        );
        assert_eq!(leases.len(), 32, "it gets all of its limit, and then is refused");
        for lease in leases {
            assert_eq!(other.ask(&format!("give-only {lease}")), "0");
        }
        eventually("what it gave is back", || host.describe(2).0[0] == 0);
        beside < 100 || half >= Duration::from_millis(50) || most >= longest
    });
    assert!(!starves, "takes wait beside a flood");
    assert!(host.saw(ArbiterEvent::Abuse));
    host.assert_sound();
}

// Promise: F82
#[test]
fn worker_without_free_descriptors_leaves_no_holder_behind() {
    for more in 2..9 {
        let mut host = Host::start();
        host.vm(1, 64 * MIB);
        host.leave_descriptors(more);
        let failed = host.worker(1);
        // Queried after the worker was sent.
        let served = host.describe(1).1 == 1;
        if served {
            assert!(failed.take(2 * MIB).is_ok(), "with {more} descriptors");
        }
        failed.kill();
        eventually("no holder is left", || host.describe(1).1 == 0);
        host.assert_sound();
    }
}

// Promise: F82
#[test]
fn vm_with_many_workers_leaves_descriptors_for_others() {
    let mut host = Host::with(Options { descriptors: Some(160), ..Options::default() });
    host.vm(1, 64 * MIB);
    host.vm(2, 64 * MIB);
    let greedy: Vec<_> = (0..60).map(|_| host.worker(1)).collect();
    let served = host.describe(1).1;
    assert!((15..60).contains(&served), "{served} of 60 are served");
    let others: Vec<_> = (0..5).map(|_| host.worker(2)).collect();
    assert_eq!(host.describe(2).1, 5, "the other VM's workers are served");
    for other in &others {
        assert!(other.take(2 * MIB).is_ok());
    }
    drop(others);
    drop(greedy);
    eventually("their end", || host.describe(1).1 == 0);
    host.assert_sound();
}

/// A socket whose last close waits until the other end has read, for longer than an answer to a take may need.
fn slow_to_close() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let slow = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (unread, _) = listener.accept().unwrap();
    slow.set_nonblocking(true).unwrap();
    while (&slow).write(&[0; 65536]).is_ok() {}
    slow.set_nonblocking(false).unwrap();
    set_socket_linger(&slow, Some(10 * TIMEOUT)).unwrap();
    (slow, unread)
}

// Promise: F118
#[test]
fn vm_with_many_descriptors_that_are_not_closed_gets_no_other_worker() {
    let mut host = Host::start();
    host.vm(1, 64 * MIB);
    host.vm(2, 64 * MIB);
    let start = || std::process::Command::new("sleep").arg("1000").spawn().unwrap();
    let mut processes: Vec<_> = (0..4).map(|_| start()).collect();
    let workers: Vec<Played> = processes.iter().map(|process| Played::join(&host, 1, process)).collect();
    let (slow, unread) = slow_to_close();
    let (pipe, _other_end) = rustix::pipe::pipe().unwrap();
    // The arbiter gets the socket when no other process has it any more.
    host.stop();
    let mut strange = vec![pipe.as_fd(); MOST_DESCRIPTORS];
    strange[0] = slow.as_fd();
    workers[0].send_with(&strange);
    drop(slow);
    host.go_on();
    let ended = |process: &mut std::process::Child| process.try_wait().unwrap().is_some();
    eventually("the end of the first", || ended(&mut processes[0]));
    for of in 1..3 {
        workers[of].send_with(&[pipe.as_fd(); MOST_DESCRIPTORS]);
        eventually("the end of another", || ended(&mut processes[of]));
    }
    // The last has sent no descriptor.
    workers[3].send_with(&[]);
    eventually("the end of the last", || ended(&mut processes[3]));
    let mut late = start();
    let refused = Played::sent(&host, 1, &late);
    // The arbiter takes messages in their order.
    let neighbour = host.worker(2);
    let lease = neighbour.take(2 * MIB).unwrap();
    assert_eq!(neighbour.ask(&format!("give-only {lease}")), "0");
    assert!(refused.has_no_answer(), "a worker is served");
    drop(unread);
    assert!(!refused.is_welcomed());
    eventually("the VM is served again", || Played::sent(&host, 1, &late).is_welcomed());
    late.kill().unwrap();
    late.wait().unwrap();
    host.assert_sound();
}

// Promise: F83
#[test]
fn descriptor_that_takes_long_to_close_delays_no_neighbour() {
    let mut host = Host::start();
    host.vm(1, 64 * MIB);
    host.vm(2, 64 * MIB);
    let (mut stranger, neighbour) = (host.worker(1), host.worker(2));
    let (slow, _unread) = slow_to_close();
    assert_eq!(stranger.ask("serial"), "0", "it has been welcomed");
    // The arbiter gets it when no other process has it any more.
    host.stop();
    stranger.say_with("strange", slow.as_fd());
    assert_eq!(stranger.receive(), "0");
    drop(slow);
    host.go_on();
    eventually("its end", || stranger.is_killed());
    for _ in 0..20 {
        let lease = neighbour.take(2 * MIB).unwrap();
        assert_eq!(neighbour.ask(&format!("give-only {lease}")), "0");
    }
    host.assert_sound();
}

// Promise: Q27
#[test]
fn arbiter_with_256_descriptors_serves_40_workers() {
    let mut host = Host::with(Options { descriptors: Some(256), ..Options::default() });
    host.vm(1, 0);
    let alone = host.descriptors();
    let workers: Vec<_> = (0..40).map(|_| host.worker(1)).collect();
    for worker in workers.iter().cycle().take(120) {
        assert!(worker.take(2 * MIB).is_ok());
    }
    assert_eq!(host.describe(1).0[0], 240 * MIB);
    println!("{alone} descriptors without a worker, {} with 40", host.descriptors());
    // A thread of its own closes those of chunks that were lent.
    eventually("three descriptors for each worker", || {
        let with = host.descriptors();
        with <= alone + 3 * 40 && with < 160
    });
    drop(workers);
    eventually("their end", || host.describe(1) == ([0, 0, 0], 0));
    host.assert_sound();
}

// Promise: Q27
#[test]
fn full_h200_is_lent_in_the_smallest_chunks_with_256_descriptors() {
    const MEMORY: u64 = 141 << 10;
    let environment = vec![("SLUICE_NULL_MEMORY_MIB", MEMORY.to_string())];
    // The test cannot clear this much memory.
    let (driver, scrub) = (null_driver(), false);
    let mut host =
        Host::with(Options { descriptors: Some(256), environment, driver, scrub, ..Options::default() });
    assert!(host.bytes >= (MEMORY - 16) * MIB);
    host.vm(1, 0);
    let worker = host.worker(1);
    let started = Instant::now();
    worker.say(&format!("take-only {}", 2 * MIB));
    // A busy machine needs minutes for all of it.
    let mut lent = 0;
    while !worker.speaks_within(TIMEOUT) {
        let before = std::mem::replace(&mut lent, host.describe(1).0[0]);
        assert!(lent > before, "it takes no more than {lent} bytes, and does not end");
    }
    let count: u64 = worker.receive().parse().unwrap();
    println!("{count} chunks taken in {:?}", started.elapsed());
    assert_eq!(count * 2 * MIB, host.bytes);
    assert_eq!(host.describe(1).0[0], host.bytes);
    eventually("fewer than 30 descriptors", || host.descriptors() < 30);
    worker.kill();
    eventually("the end of its leases", || host.describe(1).0[0] == 0);
    host.assert_sound();
}
