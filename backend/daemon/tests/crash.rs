//! The daemon killed at every step of every change, with its real launcher; device, worker and arbiter are stand-ins.
//!
//! A client notes each acknowledged change. The change in progress at the kill may have been made or not: the next daemon must
//! have one of the two states. This holds for one client and for many at once.

use std::{collections::BTreeMap, thread, time::Duration};

use crate::common::{Daemon, DaemonBuilder, Place, pid_of};
use rustix::process::Signal;
use serde_json::{Value, json};
use sluice_api::http;
use sluice_kit::{
    processes::{is_alive, signal, wait_gone, watch},
    wait::eventually,
};

/// The state that a client expects: VMs by name, with their limits, and true for a drained VM.
type Model = BTreeMap<String, (u64, bool)>;

/// A change, and its effect on the model.
struct Change {
    method: &'static str,
    path: &'static str,
    body: Option<Value>,
    make: fn(&mut Model),
}

/// The changes of one run, in their order.
fn changes() -> Vec<Change> {
    let limit = |chunks: u64| Some(json!({ "memory_bytes": chunks << 21 }));
    vec![
        Change {
            method: "PUT",
            path: "/v1/vms/a",
            body: limit(4),
            make: |model| _ = model.insert("a".into(), (4, false)),
        },
        Change {
            method: "PUT",
            path: "/v1/vms/b",
            body: limit(5),
            make: |model| _ = model.insert("b".into(), (5, false)),
        },
        Change {
            method: "PUT",
            path: "/v1/vms/a",
            body: limit(6),
            make: |model| _ = model.insert("a".into(), (6, false)),
        },
        Change {
            method: "POST",
            path: "/v1/vms/b/drain",
            body: None,
            make: |model| _ = model.insert("b".into(), (5, true)),
        },
        Change { method: "DELETE", path: "/v1/vms/a", body: None, make: |model| _ = model.remove("a") },
        Change {
            method: "PUT",
            path: "/v1/vms/a",
            body: limit(7),
            make: |model| _ = model.insert("a".into(), (7, false)),
        },
    ]
}

fn builder(place: &Place) -> DaemonBuilder<'_> {
    place.daemon().units(1).vm_numbers("7:100")
}

/// A place with VM 7, made by a daemon that was not killed.
fn place_with_vm() -> Place {
    let place = Place::new();
    let daemon = builder(&place).serve();
    place.make_direct([7]);
    end(&place, daemon);
    place
}

/// Ends a daemon by SIGTERM, and then all processes that it has left running.
fn end(place: &Place, daemon: Daemon) {
    daemon.end();
    // A launcher that has not ended yet may still start a process.
    eventually("all processes are gone", || {
        let left = place.processes();
        for process in left.iter().filter_map(|pid| watch(*pid)) {
            signal(&process, Signal::KILL);
            wait_gone(&process);
        }
        left.is_empty()
    });
}

fn found(place: &Place) -> Model {
    let body = place.api("GET", "/v1/vms", None).body;
    let made = body["vms"].as_array().expect("VMs").iter().filter(|vm| vm["id"] != "7");
    let model = made.map(|vm| {
        assert_eq!(vm["state"], "running", "{vm}");
        let limit = vm["memory_bytes"].as_u64().expect("a limit") >> 21;
        (vm["id"].as_str().expect("a name").to_owned(), (limit, vm["draining"] == true))
    });
    model.collect()
}

/// Makes all changes with a daemon that is killed at a fault point. Returns false if it was not killed.
fn live(fault: &str) -> bool {
    let place = place_with_vm();
    let mut daemon = builder(&place).envs([("SLUICE_FAULT", fault)]).spawn();
    let mut before = Model::new();
    let mut after = Model::new();
    // A session runs meanwhile.
    let mut worker = None;
    if daemon.becomes_ready(&place) {
        worker = Some(watch(pid_of(&place.front(7).open(1))).expect("a process"));
        for change in changes() {
            (change.make)(&mut after);
            match place.try_api(change.method, change.path, change.body.as_ref()) {
                Ok(reply) if reply.status < 300 => before.clone_from(&after),
                Ok(reply) => panic!("{fault}: {} {}: {reply:?}", change.method, change.path),
                Err(_) => break,
            }
        }
    }
    let killed = before != after || daemon.has_ended();
    daemon.kill();
    if let Some(worker) = &worker {
        assert!(is_alive(worker), "{fault}: the worker of a session ended");
    }
    let mut daemon = builder(&place).spawn();
    assert!(daemon.becomes_ready(&place), "{fault}: the next daemon does not start");
    let found = found(&place);
    assert!(found == before || found == after, "{fault}: found {found:?}, not {before:?} nor {after:?}");
    // The next daemon accepts changes.
    assert_eq!(place.api("PUT", "/v1/vms/c", Some(&json!({}))).status, 201, "{fault}");
    end(&place, daemon);
    killed
}

// Promise: A9
#[test]
fn daemon_killed_at_any_step_of_a_change_has_made_it_or_not() {
    for place in [
        "create-noted",
        "create-written",
        "create-started",
        "update-noted",
        "update-written",
        "update-told",
        "delete-noted",
        "delete-written",
        "delete-ended",
    ] {
        assert!(live(&format!("{place}:1")), "{place} is never reached");
    }
}

// Promise: A9
#[test]
fn daemon_killed_at_any_step_of_writing_its_state_has_the_old_or_the_new_one() {
    for place in [
        "state-begin",
        "state-header",
        "state-written",
        "state-flushed",
        "state-between",
        "state-renamed",
        "state-done",
    ] {
        // One run for each time that the point is reached, until a run ends without a kill.
        let times = (1..40).find(|count| !live(&format!("{place}:{count}"))).expect("an end");
        assert!(times > 6, "{place} is reached only {times} times");
    }
}

/// Clients at once.
const CLIENTS: u64 = 6;
/// Changes of each, if nothing kills the daemon before.
const CHANGES: u64 = 60;

/// The state of its VM that a client expects.
#[derive(Debug, Default)]
struct Client {
    vm: String,
    /// The last acknowledged limit in chunks; `None` if the VM does not exist.
    is: Option<u64>,
    /// The limit after the change in progress.
    wanted: Option<u64>,
    /// Number of acknowledged creations.
    made: u64,
    /// True if the last request had no answer.
    broke_off: bool,
}

impl Client {
    /// Creates its VM, changes it, deletes it, and begins again, until a request has no answer.
    fn live(number: u64, place: &Place) -> Self {
        let mut client = Self { vm: format!("load-{number}"), ..Self::default() };
        let path = format!("/v1/vms/{}", client.vm);
        for change in 0..CHANGES {
            // Out of step with the others.
            client.wanted = (!(change + number).is_multiple_of(4)).then_some(2 + (change + number) % 9);
            let reply = match client.wanted {
                Some(chunks) => place.try_api("PUT", &path, Some(&json!({ "memory_bytes": chunks << 21 }))),
                None => place.try_api("DELETE", &path, None),
            };
            match reply {
                Ok(reply) if reply.status < 300 => {
                    client.made += u64::from(reply.status == 201);
                    client.is = client.wanted;
                }
                Ok(reply) => panic!("{client:?}: {reply:?}"),
                Err(_) => {
                    client.broke_off = true;
                    break;
                }
            }
        }
        client
    }

    /// Checks that the next daemon has the acknowledged state, with or without the last change.
    fn check(&self, found: &Model, made: u64, what: &str) {
        let found = found.get(&self.vm).map(|(limit, _)| *limit);
        assert!(found == self.is || found == self.wanted, "{what}: found {found:?}: {self:?}");
        let possible = self.made..=self.made + 1;
        assert!(possible.contains(&made), "{what}: {made} events of a creation: {self:?}");
    }
}

/// Events from the first on, up to the end of the answer.
fn events(place: &Place, query: &str) -> Vec<Value> {
    let path = format!("/v1/events?{query}");
    let Ok(mut answer) = http::request(&place.run().join("api.sock"), "GET", &path, None) else {
        return Vec::new();
    };
    // An incomplete last line is ignored.
    let lines = std::iter::from_fn(|| answer.line(64 << 10).ok().flatten());
    lines.filter_map(|line| serde_json::from_str(&line).ok()).collect()
}

/// Runs many clients at once with a daemon that is killed at a fault point or after a time. Returns false if the daemon never
/// reached the point.
fn live_under_load(fault: Option<&str>, after: Option<Duration>) -> bool {
    let what = format!("{fault:?} {after:?}");
    let place = place_with_vm();
    let faults = fault.map(|fault| ("SLUICE_FAULT", fault));
    let mut daemon = builder(&place).envs(faults).spawn();
    if !daemon.becomes_ready(&place) {
        // The daemon was killed before the first client.
        return true;
    }
    let worker = watch(pid_of(&place.front(7).open(1))).expect("a process");
    let process = watch(daemon.pid()).expect("sluiced");
    let (clients, seen) = thread::scope(|scope| {
        let place = &place;
        let follower = scope.spawn(move || events(place, "after=0.0"));
        let clients: Vec<_> =
            (0..CLIENTS).map(|number| scope.spawn(move || Client::live(number, place))).collect();
        if let Some(after) = after {
            thread::sleep(after);
            signal(&process, Signal::KILL);
        }
        let clients: Vec<Client> =
            clients.into_iter().map(|client| client.join().expect("a client")).collect();
        // A daemon that was not killed is killed now, so that the follower's answer ends.
        signal(&process, Signal::KILL);
        (clients, follower.join().expect("a follower"))
    });
    daemon.wait();
    let killed = clients.iter().any(|client| client.broke_off);
    assert!(is_alive(&worker), "{what}: the worker of a session ended");
    let mut daemon = builder(&place).spawn();
    assert!(daemon.becomes_ready(&place), "{what}: the next daemon does not start");
    let found = found(&place);
    // The follower resumes without a gap and gets an event of every acknowledged creation. The first line is skipped: it reports
    // that the token 0.0 is invalid.
    let token = seen.last().map_or("0.0", |last| last["token"].as_str().expect("a token"));
    let rest = events(&place, &format!("follow=false&after={token}"));
    let all = seen.iter().chain(&rest).skip(1).filter(|event| event["kind"] != "alive");
    let all: Vec<&Value> = all.collect();
    assert!(all.iter().all(|event| event["kind"] != "gap"), "{what}: {all:?}");
    let numbers: Vec<_> = all.iter().filter_map(|event| event["sequence"].as_u64()).collect();
    assert!(numbers.is_sorted_by(|one, next| one + 1 == *next), "{what}: {numbers:?}");
    for client in clients {
        let made = |event: &&&Value| event["kind"] == "vm-created" && event["vm"] == client.vm.as_str();
        let made = u64::try_from(all.iter().filter(made).count()).expect("small");
        client.check(&found, made, &what);
    }
    end(&place, daemon);
    killed
}

// Promise: A9
#[test]
fn daemon_killed_at_any_step_under_load_has_every_acknowledged_change() {
    for place in [
        "create-noted",
        "create-written",
        "create-placed",
        "create-started",
        "update-noted",
        "update-written",
        "update-told",
        "delete-noted",
        "delete-written",
        "delete-ended",
        "state-begin",
        "state-header",
        "state-written",
        "state-flushed",
        "state-between",
        "state-renamed",
        "state-done",
    ] {
        for count in [5, 23] {
            let fault = format!("{place}:{count}");
            assert!(live_under_load(Some(&fault), None), "{fault} is never reached");
        }
    }
}

// Promise: A9
#[test]
fn daemon_killed_at_any_time_under_load_has_every_acknowledged_change() {
    for turn in 1..=16 {
        live_under_load(None, Some(Duration::from_millis(37 * turn)));
    }
}
