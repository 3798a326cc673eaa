//! The daemon killed at every step of every change, with its real launcher; device, worker and arbiter are stand-ins.
//!
//! What is acknowledged is noted; the request that was under way may have been carried out or not. The next daemon has to have
//! one of the two, and nothing in between.

mod common;

use std::{
    collections::BTreeMap,
    process::{Child, Command, Stdio},
};

use common::{Place, is_alive, pid_of, signal, until, wait_gone, watch};
use rustix::process::Signal;
use serde_json::{Value, json};

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
    signal(&watch(daemon.id()).expect("sluiced"), Signal::TERM);
    assert!(daemon.wait().expect("sluiced").success());
    for pid in place.processes() {
        if let Some(process) = watch(pid) {
            signal(&process, Signal::KILL);
            wait_gone(&process);
        }
    }
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
