//! Fencing, with the real launcher; device, worker, arbiter and inventory are stand-ins.

use std::{
    os::{
        fd::{AsRawFd as _, OwnedFd},
        unix::net::UnixStream,
    },
    process::Command,
};

use crate::common::{Daemon, DaemonBuilder, Place, Traced, code, direct, pid_of};
use rustix::{
    fs::{CWD, Mode, OFlags, mkfifoat, open},
    process::Signal,
};
use serde_json::{Value, json};
use sluice_api::v1::{RulesRequest, VmRequest};
use sluice_kit::{
    processes::{is_alive, signal, wait_gone, watch},
    wait::until,
};
use sluice_messages::control::NO_USER;

fn builder(place: &Place) -> DaemonBuilder<'_> {
    place.daemon().units(1)
}

fn supervised(place: &Place) -> Daemon {
    builder(place).supervised()
}

/// Starts sluiced without a supervisor, and waits until all VMs have devices: a unit with a fence may never be ready.
fn serve(place: &Place) -> Daemon {
    let daemon = builder(place).spawn();
    let has_devices = || {
        let reply = place.try_api("GET", "/v1/vms", None).ok()?;
        Some(reply.body["vms"].as_array()?.iter().all(|vm| vm["device_process"].is_u64()))
    };
    assert_eq!(until(has_devices, |all| *all == Some(true)), Some(true));
    daemon
}

/// The fence of VM 1.
fn stands(place: &Place) -> Value {
    place.vm(1)["fence"].clone()
}

/// Waits until the fence of VM 1 is at a step.
fn reaches(place: &Place, step: &str) {
    let fence = until(|| stands(place), |fence| fence["step"] == step);
    assert_eq!(fence["step"], step, "{fence}");
}

/// Fences or readmits VM 1. Returns its fence.
fn post(place: &Place, verb: &str, body: &Value) -> Value {
    let reply = place.post(1, verb, body);
    assert_eq!(reply.status, 200, "{reply:?}");
    reply.body["fence"].clone()
}

/// Requests a fence of VM 1 without waiting for an answer.
fn begin(place: &Place, body: &Value) -> UnixStream {
    use std::io::Write as _;
    let (mut stream, body) =
        (UnixStream::connect(place.run().join("api.sock")).expect("the API"), body.to_string());
    let head = "POST /v1/vms/1/fence HTTP/1.1\r\nHost: sluice\r\nContent-Type: application/json\r\n";
    write!(stream, "{head}Content-Length: {}\r\n\r\n{body}", body.len()).expect("asked");
    stream
}

fn process(value: &Value) -> OwnedFd {
    watch(u32::try_from(value.as_u64().expect("a pid")).expect("a pid")).expect("a process")
}

// Promise: F40
#[test]
fn fence_takes_everything_and_readmission_starts_another_epoch() {
    let place = Place::new();
    let daemon = supervised(&place);
    place.make_direct([1, 2]);
    let mut front = place.front(1);
    let worker = watch(pid_of(&front.open(1))).expect("a process");
    let neighbour = watch(pid_of(&place.front(2).open(1))).expect("a process");
    let device = place.vm(1)["device_process"].clone();
    place.tell("unit-0", "has 1 4096 0");

    std::thread::scope(|scope| {
        let fencing = scope.spawn(|| post(&place, "fence", &json!({ "reason": "for a test" })));
        wait_gone(&worker);
        reaches(&place, "revoked");
        assert_eq!(front.ask("open 2"), "refused 2 46");
        assert_eq!(code(&place.post(9, "readmit", &json!({}))), (404, "not-found"));
        place.tell("unit-0", "has 1 0 4096");
        reaches(&place, "scrubbed");
        place.tell("unit-0", "has 1 0 0");
        let fence = fencing.join().expect("an answer");
        assert_eq!(fence["step"], "quarantined", "{fence}");
        assert_eq!((&fence["clean"], &fence["reason"]), (&true.into(), &"for a test".into()));
    });
    assert!(place.told().contains(&"Fence { vm: 1, epoch: 1 }".to_owned()));
    assert!(is_alive(&neighbour), "a session of another VM was ended");
    assert_eq!(front.ask("open 3"), "refused 3 46");
    assert_eq!(
        post(&place, "fence", &json!({}))["reason"],
        "for a test",
        "the second fence changes the reason"
    );

    assert_eq!(post(&place, "readmit", &json!({}))["epoch"], 2);
    let again = front.open(4);
    let worker = format!(
        "Worker {{ vm: 1, epoch: 2, process: {}, session: 4, user: {}, grouped: false }}",
        again["pid"], NO_USER
    );
    // A message that sluiced has sent arrives at the arbiter a little later.
    let told = until(|| place.told(), |told| told.last() == Some(&worker));
    assert_eq!(told.last(), Some(&worker), "{told:?}");
    assert!(told.iter().any(|line| line.starts_with("Vm { vm: 1, epoch: 2,")), "{told:?}");
    assert_eq!(place.vm(1)["device_process"], device, "the device was replaced");
    assert_eq!(code(&place.post(1, "readmit", &json!({}))), (409, "not-fenced"));
    daemon.end();
    place.wait_empty();
}

// Promise: F41
#[test]
fn fence_takes_everything_while_a_disk_hangs_and_is_answered_when_written() {
    let place = Place::new();
    let daemon = supervised(&place);
    place.make_direct([1, 2]);
    let mut neighbour = place.front(2);
    let worker = watch(pid_of(&place.front(1).open(1))).expect("a process");
    place.tell("unit-0", "has 1 4096 0");
    // The checkpoint becomes a named pipe: its open blocks until the other end is opened.
    let new = place.run().join("checkpoint.new");
    mkfifoat(CWD, &new, Mode::RWXU).expect("a pipe");

    std::thread::scope(|scope| {
        let fencing = scope.spawn(|| place.post(1, "fence", &json!({ "reason": "for a test" })));
        wait_gone(&worker);
        reaches(&place, "killed");
        assert_eq!(place.front(1).ask("open 2"), "refused 2 46");
        place.tell("unit-0", "has 1 0 0");
        // Other requests are answered meanwhile, except those that must be written.
        neighbour.open(1);
        assert_eq!(place.api("GET", "/v1/vms", None).status, 200);
        let making =
            scope.spawn(|| place.api("PUT", "/v1/sizes/small", Some(&json!({ "memory_bytes": 1 << 24 }))));
        assert!(
            !fencing.is_finished() && !making.is_finished(),
            "a change is acknowledged before it is written"
        );

        // The open succeeds, but a pipe cannot be flushed: the daemon tries again with a file. The pipe loses its name before
        // its other end is opened; otherwise the daemon could find it once more.
        let named = open(&new, OFlags::PATH, Mode::empty()).expect("the pipe");
        std::fs::remove_file(&new).expect("there");
        let unnamed = format!("/proc/self/fd/{}", named.as_raw_fd());
        let pipe = open(unnamed, OFlags::RDONLY | OFlags::NONBLOCK, Mode::empty())
            .expect("the other end of the pipe");
        let fenced = fencing.join().expect("an answer");
        assert_eq!(
            (fenced.status, &fenced.body["fence"]["step"]),
            (200, &"quarantined".into()),
            "{fenced:?}"
        );
        assert_eq!(making.join().expect("an answer").status, 201);
        drop(pipe);
    });
    let written = std::fs::read_to_string(place.run().join("checkpoint.json")).expect("there");
    assert!(written.contains("quarantined"), "{written}");
    daemon.end();
}

// Promise: F41
#[test]
fn fence_goes_on_in_the_next_daemon_from_any_step() {
    for (step, has) in
        [("revoked", "has 1 4096 0"), ("scrubbed", "has 1 0 4096"), ("quarantined", "has 1 0 0")]
    {
        let place = Place::new();
        let mut daemon = serve(&place);
        place.make_direct([1]);
        let worker = watch(pid_of(&place.front(1).open(1))).expect("a process");
        place.tell("unit-0", has);
        let _asking = begin(&place, &json!({ "reason": "before the crash" }));
        reaches(&place, step);
        let arbiter = process(&place.unit(0)["arbiter_process"]);
        daemon.kill();
        wait_gone(&worker);

        let daemon = serve(&place);
        wait_gone(&arbiter);
        reaches(&place, "quarantined");
        let fence = until(|| stands(&place), |fence| fence["clean"] == true);
        let expected = (&json!(1), &json!("before the crash"));
        assert_eq!((&fence["epoch"], &fence["reason"]), expected, "{step}: {fence}");
        assert_eq!(place.front(1).ask("open 2"), "refused 2 46");
        daemon.end();

        // The fence also stands in the third daemon.
        let daemon = serve(&place);
        reaches(&place, "quarantined");
        assert_eq!(post(&place, "readmit", &json!({}))["epoch"], 2);
        place.front(1).open(1);
        daemon.end();
    }
}

// Promise: F41
#[test]
fn daemon_ends_the_workers_of_a_fence_that_it_did_not_begin() {
    for step in ["fencing", "killed"] {
        let place = Place::new();
        let mut worker = Command::new("sleep").arg("1000").spawn().expect("a process");
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", worker.id())).expect("a process");
        let started: u64 = stat
            .rsplit_once(')')
            .expect("a name")
            .1
            .split_whitespace()
            .nth(19)
            .expect("a start")
            .parse()
            .expect("ticks");
        // An earlier daemon leaves a VM.
        let daemon = serve(&place);
        place.make_direct([1]);
        daemon.end();
        let before = std::fs::read_to_string(place.run().join("checkpoint.json")).expect("there");
        let (_, before) = before.split_once('\n').expect("a header");
        let before: Value = serde_json::from_str(before).expect("a checkpoint");
        let checkpoint = serde_json::json!({
            "vms": { "1": {
                "step": step, "epoch": 6, "clean": false, "reason": "a test",
                "workers": [{ "process": worker.id(), "started": started }],
            } },
            "units": {},
            "arbiters": {},
            "objects": before["objects"],
        });
        place.checkpoint(&checkpoint);
        let daemon = supervised(&place);
        assert!(!worker.wait().expect("ended").success());
        reaches(&place, "quarantined");
        assert_eq!(post(&place, "readmit", &json!({}))["epoch"], 7);
        daemon.end();
    }
}

// Promise: F41
#[test]
fn daemon_killed_at_any_moment_after_its_answer_has_kept_the_fence() {
    for delay in [0, 1, 3, 7, 15] {
        let place = Place::new();
        let mut daemon = serve(&place);
        place.make_direct([1]);
        let worker = watch(pid_of(&place.front(1).open(1))).expect("a process");
        let reason = format!("answered {delay} ms before the kill");
        let fence = post(&place, "fence", &json!({ "reason": reason }));
        assert_eq!(fence["step"], "quarantined", "{fence}");
        std::thread::sleep(std::time::Duration::from_millis(delay));
        daemon.kill();
        wait_gone(&worker);

        // The next daemon shows the fence as soon as it serves, not only at the end.
        let daemon = serve(&place);
        let fence = stands(&place);
        assert_eq!((&fence["reason"], &fence["epoch"]), (&json!(reason), &json!(1)), "{fence}");
        assert_ne!(fence["step"], "active", "{fence}");
        assert_eq!(place.front(1).ask("open 2"), "refused 2 46");
        reaches(&place, "quarantined");
        daemon.end();
    }
}

#[test]
fn unreadable_checkpoint_keeps_sluiced_from_starting() {
    let place = Place::new();
    std::fs::write(place.run().join("checkpoint.json"), "{").expect("written");
    let output = builder(&place).output();
    assert!(!output.status.success());
    assert!(String::from_utf8_lossy(&output.stderr).contains("checkpoint.json"));
}

// Promise: F43
#[test]
fn vm_whose_workers_break_rules_repeatedly_is_fenced() {
    let place = Place::new();
    let daemon = supervised(&place);
    place.make_direct([1, 2]);
    let worker = watch(pid_of(&place.front(1).open(1))).expect("a process");
    place.tell("unit-0", "event 1 1 100 0");
    place.tell("unit-0", "event 7 1 100 0");
    place.tell("unit-0", "event 1 2 100 0");
    // These events are not offences of a VM.
    for kind in [3, 4, 5, 6, 99] {
        place.tell("unit-0", &format!("event {kind} 1 100 0"));
    }
    let count = |host: &Value| host["events"].as_array().expect("events").len();
    let host = until(|| place.look("/v1/host"), |host| count(host) >= 7);
    assert_eq!(count(&host), 7, "{host}");
    assert_eq!(stands(&place)["step"], "active");
    place.tell("unit-0", "event 1 1 100 0");
    wait_gone(&worker);
    reaches(&place, "quarantined");
    assert_eq!(place.vm(2)["fence"]["step"], "active");
    place.tell("unit-0", "event 2 2 0 0");
    let second = until(|| place.vm(2)["fence"].clone(), |fence| fence["step"] == "quarantined");
    assert!(second["reason"].as_str().is_some_and(|reason| reason.contains("ledger")), "{second}");
    daemon.end();
    place.wait_empty();
}

// Promise: F80
#[test]
fn stuck_worker_fences_its_vm_and_only_a_failed_probe_quarantines_the_unit() {
    let place = Place::new();
    let daemon = supervised(&place);
    place.make_direct([1, 2]);
    let slow = watch(pid_of(&place.front(1).open(1))).expect("a process");
    let mut front = place.front(2);
    let other = watch(pid_of(&front.open(1))).expect("a process");
    place.tell("unit-0", "event 8 1 100 0");
    wait_gone(&slow);
    reaches(&place, "quarantined");
    let told =
        until(|| place.tell("unit-0", "told").into(), |told: &Value| told.to_string().contains("Probe"));
    assert!(told.to_string().contains("Probe"), "the device is not probed: {told}");
    assert!(is_alive(&other), "the neighbour's worker was ended");
    assert_eq!(place.vm(2)["fence"]["step"], "active");
    assert_ne!(place.unit(0)["state"], "quarantined");
    front.open(2);
    place.tell("unit-0", "event 12 0 0 0");
    wait_gone(&other);
    let unit = until(|| place.unit(0), |unit| unit["state"] == "quarantined");
    assert!(unit["reason"].as_str().is_some_and(|why| why.contains("probe")), "{unit}");
    daemon.end();
    place.wait_empty();
}

// Promise: F80
#[test]
fn killed_worker_that_does_not_end_quarantines_its_vm_and_not_the_unit() {
    let place = Place::new();
    let daemon = supervised(&place);
    place.make_direct([1, 2]);
    let (mut front, mut neighbour) = (place.front(1), place.front(2));
    let number = pid_of(&front.open(1));
    let worker = watch(number).expect("a process");
    let other = watch(pid_of(&neighbour.open(1))).expect("a process");
    let stuck = Traced::before_its_end(number);
    assert_eq!(front.ask("leave 1"), "left 1");
    reaches(&place, "quarantined");
    assert!(is_alive(&worker), "the stuck worker ended");
    assert_eq!(stands(&place)["clean"], false);
    let is_hung = |host: &Value| host["events"].to_string().contains("\"hung\"");
    assert!(is_hung(&until(|| place.look("/v1/host"), is_hung)));
    let told = until(|| place.tell("unit-0", "told"), |told| told.contains("Probe"));
    assert!(told.contains("Probe"), "the device is not probed: {told}");
    // Neither the neighbour nor the unit is affected.
    assert!(is_alive(&other), "the neighbour's worker was ended");
    assert_eq!(place.vm(2)["fence"]["step"], "active");
    assert_ne!(place.unit(0)["state"], "quarantined");
    neighbour.open(2);
    stuck.release();
    wait_gone(&worker);
    daemon.end();
    place.wait_empty();
}

// Promise: T35
#[test]
fn vm_that_reports_less_time_than_the_driver_is_fenced_if_configured() {
    for asked in [false, true] {
        let place = Place::new();
        let configuration = format!("[fence]\nundercharged = {asked}\n");
        let daemon = builder(&place).configuration(&configuration).supervised();
        place.make(1, &VmRequest::default());
        place.tell("unit-0", "event 11 1 0 0");
        let host = until(
            || place.look("/v1/host"),
            |host| host["events"].as_array().is_some_and(|events| !events.is_empty()),
        );
        assert!(host["events"].to_string().contains("undercharged"), "{host}");
        assert_eq!(stands(&place)["step"] != "active", asked, "{}", stands(&place));
        daemon.end();
    }
}

// Promise: F42
#[test]
fn error_of_the_gpu_has_the_consequence_of_its_class() {
    let place = Place::new();
    let daemon = builder(&place).nvml().supervised();
    place.make_direct([1]);
    let mut front = place.front(1);
    let (faulty, other) = (front.open(1), front.open(2));
    let (watched, other) =
        (watch(pid_of(&faulty)).expect("a process"), watch(pid_of(&other)).expect("a process"));
    // Xid 43 is only counted.
    place.tell("inventory", "xid 0 43 0");
    place.tell("inventory", &format!("xid 0 31 {}", faulty["pid"]));
    wait_gone(&watched);
    assert!(is_alive(&other), "another session was ended");
    assert_eq!(front.ask("close 1"), "closed 1");
    front.open(3);
    let readmit = || place.api("POST", "/v1/units/0/readmit", None);
    assert_eq!(code(&readmit()), (409, "not-fenced"));
    // The report names no process, and the process at fault may have ended: not even a single worker is ended.
    let (second, third) = (front.ask("close 3"), front.ask("close 2"));
    assert_eq!((second.as_str(), third.as_str()), ("closed 3", "closed 2"));
    let only = watch(pid_of(&front.open(4))).expect("a process");
    place.tell("inventory", "xid 0 13 0");
    // An Xid that is not in the catalogue is only counted.
    place.tell("inventory", "xid 0 999 0");
    let metrics = || place.api("GET", "/metrics", None).body.to_string();
    let counted = |text: &String| text.contains(r#"class=\"unknown\"} 1"#);
    assert!(counted(&until(metrics, counted)));
    let events = place.look("/v1/host")["events"].clone();
    let faults: Vec<_> =
        events.as_array().expect("events").iter().filter(|event| event["kind"] == "session-fault").collect();
    assert!(
        faults.len() == 1 && faults[0]["count"] == 1,
        "a worker was ended for the error of another one: {events}"
    );
    assert!(is_alive(&only));
    assert_eq!(place.unit(0)["state"], "lending");
    for xid in [79, 48] {
        let worker = watch(pid_of(&front.open(xid))).expect("a process");
        place.tell("inventory", &format!("xid 0 {xid} 0"));
        wait_gone(&worker);
        let unit = place.unit(0);
        assert_eq!(unit["state"], "quarantined");
        assert!(unit["reason"].as_str().is_some_and(|why| why.contains(&xid.to_string())), "{unit}");
        assert_eq!(front.ask("open 8"), "refused 8 46");
        assert_eq!(readmit().status, 200);
    }
    front.open(9);
    daemon.end();
    place.wait_empty();
}

// Promise: F42
#[test]
fn session_whose_worker_is_being_started_is_refused_when_its_unit_is_quarantined() {
    let place = Place::new();
    // Without a supervisor: a launcher that a busy machine leaves stopped for too long is replaced, and must not end the device.
    let daemon = builder(&place).nvml().serve();
    place.make_direct([1]);
    let mut front = place.front(1);
    front.open(1);
    let launcher = watch(daemon.launcher()).expect("a process");
    signal(&launcher, Signal::STOP);
    front.send("open 2");
    let waits = |vm: &Value| vm["sessions"].as_array().is_some_and(|all| all.len() == 2);
    assert!(waits(&until(|| place.vm(1), waits)), "the daemon has the request");
    place.tell("inventory", "xid 0 79 0");
    let state = || place.unit(0)["state"].clone();
    assert_eq!(until(state, |state| state == "quarantined"), "quarantined");
    signal(&launcher, Signal::CONT);
    assert_eq!(front.receive(), "refused 2 46");
    let idle = |vm: &Value| vm["sessions"] == json!([]);
    assert!(idle(&until(|| place.vm(1), idle)), "a worker is on a unit that is quarantined");
    daemon.end();
    place.wait_empty();
}

// Promise: A40
#[test]
fn vm_with_a_hold_off_is_readmitted_by_itself() {
    let place = Place::new();
    let daemon = supervised(&place);
    let rules = RulesRequest { readmit_after_seconds: Some(1), ..RulesRequest::default() };
    place.make(1, &VmRequest { rules, ..direct() });
    let mut front = place.front(1);
    front.open(1);
    // A policy fences the VM, because the ledger of its memory contradicts itself.
    place.tell("unit-0", "event 2 1 0 0");
    let fence = until(|| stands(&place), |fence| fence["step"] == "active" && fence["epoch"] == 2);
    assert_eq!((&fence["step"], &fence["epoch"]), (&"active".into(), &2.into()));
    front.open(2);
    // After a fence by an operator, the VM waits for an operator.
    let fence = post(&place, "fence", &json!({}));
    assert_eq!((&fence["step"], &fence["by"]), (&"quarantined".into(), &"operator".into()));
    std::thread::sleep(std::time::Duration::from_millis(2_500));
    assert_eq!((&stands(&place)["step"], &stands(&place)["epoch"]), (&"quarantined".into(), &2.into()));
    assert_eq!(post(&place, "readmit", &json!({}))["epoch"], 3);
    daemon.end();
}

// Promise: F40
#[test]
fn message_of_an_ended_epoch_is_dropped_and_counted() {
    let place = Place::new();
    let daemon = supervised(&place);
    place.make_direct([1]);
    place.front(1).open(1);
    place.tell("unit-0", "stale 1");
    place.tell("unit-0", "stale 7");
    let unit = until(|| place.unit(0), |unit| unit["stale_epoch_messages"] == 2);
    assert_eq!(unit["stale_epoch_messages"], 2);
    assert_eq!(place.vm(1)["units"][0]["lent_bytes"], 0);
    daemon.end();
}
