//! Warm workers: each VM has one that waits for its next session. Device, worker and arbiter are stand-ins.

use std::{
    path::Path,
    thread::sleep,
    time::{Duration, Instant},
};

use crate::common::{Daemon, DaemonBuilder, Place, children, pid_of};
use rustix::process::Signal;
use serde_json::json;
use sluice_kit::{
    processes::{is_alive, signal, wait_gone, watch},
    wait::until,
};
use sluice_runtime::process::Identity;

/// Time after which a launcher that does not answer is replaced.
const ANSWER: Duration = Duration::from_secs(15);
/// Longer than a worker may be without a session that it belongs to.
const UNKNOWN: Duration = Duration::from_secs(13);

fn builder(place: &Place) -> DaemonBuilder<'_> {
    place.daemon().units(1).configuration("warm-workers = true\n")
}

/// The processes of workers.
fn workers(daemon: &Daemon) -> Vec<u32> {
    let is_worker = |process: &u32| {
        let program = std::fs::read_to_string(format!("/proc/{process}/cmdline")).unwrap_or_default();
        program.split('\0').next().is_some_and(|path| Path::new(path).ends_with("sluice-worker"))
    };
    children(daemon.launcher()).into_iter().filter(is_worker).collect()
}

/// Waits until so many workers run.
fn wait_for(daemon: &Daemon, count: usize) -> Vec<u32> {
    let found = until(|| workers(daemon), |found| found.len() == count);
    assert_eq!(found.len(), count, "{found:?}");
    found
}

// Promise: P61
#[test]
fn session_gets_the_worker_that_waits_for_it() {
    let place = Place::new();
    let daemon = builder(&place).supervised();
    place.make_direct([1]);
    let first = wait_for(&daemon, 1);
    let since = Instant::now();
    let mut front = place.front(1);
    let opened = front.open(1);
    assert_eq!(pid_of(&opened), first[0]);
    assert_eq!(opened["custody"], 1, "it meets the arbiter with its session");
    let both = wait_for(&daemon, 2);
    let next: Vec<u32> = both.into_iter().filter(|process| !first.contains(process)).collect();
    assert_eq!(front.ask("close 1"), "closed 1");
    assert_eq!(wait_for(&daemon, 1), next, "a worker serves one session");

    // It belongs to a VM, though to no session.
    sleep(UNKNOWN.saturating_sub(since.elapsed()));
    assert_eq!(pid_of(&front.open(2)), next[0]);
}

// Promise: P61
#[test]
fn session_waits_for_the_worker_that_is_being_started() {
    let place = Place::new();
    let daemon = builder(&place).supervised();
    place.make_direct([1]);
    let first = wait_for(&daemon, 1)[0];
    let name = || std::fs::read_to_string(format!("/proc/{first}/comm")).unwrap_or_default();
    assert_eq!(until(name, |name| name == "is-set-up\n"), "is-set-up\n");
    let mut front = place.front(1);
    let launcher = watch(daemon.launcher()).expect("a process");
    let stopped = Instant::now();
    signal(&launcher, Signal::STOP);
    // This session takes the worker that waits; the start of the next one cannot end.
    assert_eq!(pid_of(&front.open(1)), first);
    // Time for that start to begin. If it comes later, the next session is first, and gets the worker that is started first, too.
    sleep(Duration::from_millis(100));
    front.send("open 2");
    let sessions = || place.vm(1)["sessions"].as_array().map_or(0, Vec::len);
    assert_eq!(until(sessions, |sessions| *sessions == 2), 2, "the daemon has the request");
    signal(&launcher, Signal::CONT);
    let late = stopped.elapsed() >= ANSWER;
    let answer = front.receive();
    if late && !answer.starts_with("worker 2 ") {
        println!("on this busy machine the launcher was stopped for so long that it was replaced");
        return;
    }
    let text = answer.strip_prefix("worker 2 ").unwrap_or_else(|| panic!("no worker: {answer}"));
    let second = pid_of(&serde_json::from_str(text).expect("JSON"));
    let next = wait_for(&daemon, 3).into_iter().find(|process| ![first, second].contains(process));
    let next = next.expect("another worker waits");
    let started = |process| Identity::of(process).expect("a living process").started;
    assert!(started(second) < started(next), "the session got a worker that was started later");
}

// Promise: P61
#[test]
fn warm_worker_ends_with_a_fence_and_with_its_vm() {
    let place = Place::new();
    let daemon = builder(&place).supervised();
    place.make_direct([1]);
    let warm = watch(wait_for(&daemon, 1)[0]).expect("a process");
    assert_eq!(place.post(1, "fence", &json!({ "reason": "test" })).status, 200);
    wait_gone(&warm);
    assert_eq!(place.post(1, "readmit", &json!({})).status, 200);
    let next = wait_for(&daemon, 1)[0];
    let mut front = place.front(1);
    let worker = pid_of(&front.open(1));
    assert_eq!(worker, next, "a VM that is readmitted has a warm worker again");
    let worker = watch(worker).expect("a process");
    wait_for(&daemon, 2);
    assert!(is_alive(&worker));
    assert_eq!(place.api("DELETE", "/v1/vms/1", None).status, 204);
    wait_for(&daemon, 0);
}

// Promise: P61
#[test]
fn warm_worker_that_has_ended_is_replaced_by_a_new_one() {
    let place = Place::new();
    let daemon = builder(&place).supervised();
    place.make_direct([1]);
    let warm = wait_for(&daemon, 1)[0];
    let process = watch(warm).expect("a process");
    signal(&process, Signal::KILL);
    wait_gone(&process);
    let next = until(|| workers(&daemon), |found| found.len() == 1 && found[0] != warm);
    assert_eq!(pid_of(&place.front(1).open(1)), next[0]);
}

#[test]
fn by_default_no_worker_waits() {
    let place = Place::new();
    let daemon = place.daemon().units(1).supervised();
    place.make_direct([1]);
    let mut front = place.front(1);
    for session in 1..4 {
        // By the next session any other worker would have been started.
        let worker = pid_of(&front.open(session));
        assert_eq!(workers(&daemon), [worker]);
        assert_eq!(front.ask(&format!("close {session}")), format!("closed {session}"));
        wait_for(&daemon, 0);
    }
}
