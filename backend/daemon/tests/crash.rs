//! The daemon killed at every step of every change, with its real launcher; device, worker and arbiter are stand-ins.
//!
//! What is acknowledged is noted; the request that was under way may have been carried out or not. The next daemon has to have
//! one of the two, and nothing in between. So for one client, and for many at once.

mod common;

use std::{
    collections::BTreeMap,
    process::{Child, Command, Stdio},
    thread,
    time::Duration,
};

use common::{Place, is_alive, pid_of, signal, until, wait_gone, watch};
use rustix::process::Signal;
use serde_json::{Value, json};
use sluice_api::http;

/// What a client knows: VMs by name, with their limits, and whether they are drained.
type Model = BTreeMap<String, (u64, bool)>;

/// A change, and what it makes of what there is.
struct Change {
    method: &'static str,
    path: &'static str,
    body: Option<Value>,
    make: fn(&mut Model),
}

/// A day in the life of a host.
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

fn start(place: &Place, fault: Option<&str>) -> Child {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sluiced"));
    command.arg("--runtime-dir").arg(place.run()).arg("--libexec").arg(place.libexec());
    command.arg("--driver").arg(place.driver()).args([
        "--units",
        "1",
        "--vm-numbers",
        "100:100",
        "--vm",
        "7,direct",
    ]);
    command.env("SLUICE_LOG", "off").stdin(Stdio::null());
    if let Some(fault) = fault {
        command.env("SLUICE_FAULT", fault);
    }
    command.spawn().expect("sluiced")
}

/// Waits until it is ready; false when it was killed before.
fn ready(place: &Place, daemon: &mut Child) -> bool {
    let ready = until(
        || (daemon.try_wait().expect("a process").is_some(), place.try_api("GET", "/readyz", None)),
        |(ended, reply)| *ended || reply.as_ref().is_ok_and(|reply| reply.status == 200),
    );
    !ready.0
}

/// Ends it in good order, and then all that it has left running.
fn end(place: &Place, mut daemon: Child) {
    signal(&watch(daemon.id()).expect("sluiced"), Signal::TERM);
    assert!(daemon.wait().expect("sluiced").success());
    for pid in place.processes() {
        if let Some(process) = watch(pid) {
            signal(&process, Signal::KILL);
            wait_gone(&process);
        }
    }
}

fn found(place: &Place) -> Model {
    let body = place.api("GET", "/v1/vms", None).body;
    let made = body["vms"].as_array().expect("VMs").iter().filter(|vm| vm["configured"] == false);
    let model = made.map(|vm| {
        assert_eq!(vm["state"], "running", "{vm}");
        let limit = vm["memory_bytes"].as_u64().expect("a limit") >> 21;
        (vm["id"].as_str().expect("a name").to_owned(), (limit, vm["draining"] == true))
    });
    model.collect()
}

/// Goes through the day with a daemon that is killed at a place. Returns false when it was not.
fn live(fault: &str) -> bool {
    let place = Place::new();
    let mut daemon = start(&place, Some(fault));
    let mut before = Model::new();
    let mut after = Model::new();
    // A program runs meanwhile.
    let mut worker = None;
    if ready(&place, &mut daemon) {
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
    let killed = before != after || daemon.try_wait().expect("a process").is_some();
    if !killed {
        daemon.kill().expect("killed");
    }
    daemon.wait().expect("ended");
    if let Some(worker) = &worker {
        assert!(is_alive(worker), "{fault}: a program noticed");
    }
    let mut daemon = start(&place, None);
    assert!(ready(&place, &mut daemon), "{fault}: it does not start again");
    let found = found(&place);
    assert!(found == before || found == after, "{fault}: found {found:?}, not {before:?} nor {after:?}");
    // And it can go on from there.
    assert_eq!(place.api("PUT", "/v1/vms/c", Some(&json!({}))).status, 201, "{fault}");
    end(&place, daemon);
    killed
}

// Promise: A9
#[test]
fn a_daemon_killed_at_any_step_of_a_change_has_made_it_or_not() {
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
        assert!(live(&format!("{place}:1")), "{place} is never passed");
    }
}

// Promise: A9
#[test]
fn a_daemon_killed_at_any_step_of_writing_its_state_has_the_old_one_or_the_new_one() {
    for place in [
        "state-begin",
        "state-header",
        "state-written",
        "state-flushed",
        "state-between",
        "state-renamed",
        "state-done",
    ] {
        // As often as it is passed on that day, and in the end not at all any more.
        let times = (1..40).find(|count| !live(&format!("{place}:{count}"))).expect("an end");
        assert!(times > 6, "{place} is passed {times} times only");
    }
}

/// Clients at once.
const CLIENTS: u64 = 6;
/// Changes of each, if nothing kills the daemon before.
const CHANGES: u64 = 60;

/// What a client knows of its VM.
#[derive(Debug, Default)]
struct Client {
    vm: String,
    /// Its limit in chunks, as last acknowledged; nothing where it is not there.
    is: Option<u64>,
    /// The same after the change that was under way.
    wanted: Option<u64>,
    /// How often it was made, as acknowledged.
    made: u64,
    /// Whether nobody answered in the end.
    broke_off: bool,
}

impl Client {
    /// Makes its VM, changes it, ends it, and begins again, until nobody answers.
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

    /// Whether what the next daemon has is what this client was told, with or without its last change.
    fn check(&self, found: &Model, made: u64, what: &str) {
        let found = found.get(&self.vm).map(|(limit, _)| *limit);
        assert!(found == self.is || found == self.wanted, "{what}: found {found:?}: {self:?}");
        let possible = self.made..=self.made + 1;
        assert!(possible.contains(&made), "{what}: {made} events of its making: {self:?}");
    }
}

/// Events from the first on, up to the end of the answer.
fn events(place: &Place, query: &str) -> Vec<Value> {
    let path = format!("/v1/events?{query}");
    let Ok(mut answer) = http::request(&place.run().join("api.sock"), "GET", &path, None) else {
        return Vec::new();
    };
    // A line that is cut short is not read.
    let lines = std::iter::from_fn(|| answer.line(64 << 10).ok().flatten());
    lines.filter_map(|line| serde_json::from_str(&line).ok()).collect()
}

/// Has many clients at once at a daemon that is killed: at a place, or after a time. Returns false where it never came to the
/// place.
fn live_under_load(fault: Option<&str>, after: Option<Duration>) -> bool {
    let what = format!("{fault:?} {after:?}");
    let place = Place::new();
    let mut daemon = start(&place, fault);
    if !ready(&place, &mut daemon) {
        // It was killed before there was anybody.
        daemon.wait().expect("ended");
        return true;
    }
    let worker = watch(pid_of(&place.front(7).open(1))).expect("a process");
    let process = watch(daemon.id()).expect("sluiced");
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
        // A daemon that was not killed is now, and who follows it sees the end.
        signal(&process, Signal::KILL);
        (clients, follower.join().expect("a follower"))
    });
    daemon.wait().expect("ended");
    let killed = clients.iter().any(|client| client.broke_off);
    assert!(is_alive(&worker), "{what}: a program noticed");
    let mut daemon = start(&place, None);
    assert!(ready(&place, &mut daemon), "{what}: it does not start again");
    let found = found(&place);
    // Who followed goes on without a gap, and everything that was acknowledged is among it.
    // That its token is none is what the first line says.
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
fn a_daemon_killed_at_any_step_under_load_has_what_it_told_each_client() {
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
            assert!(live_under_load(Some(&fault), None), "{fault} is never passed");
        }
    }
}

// Promise: A9
#[test]
fn a_daemon_killed_at_any_time_under_load_has_what_it_told_each_client() {
    for turn in 1..=16 {
        live_under_load(None, Some(Duration::from_millis(37 * turn)));
    }
}
