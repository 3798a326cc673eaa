//! The placement of VMs on units, by the real sluiced with its real launcher; device, worker and arbiters are stand-ins.

use crate::common::{Daemon, DaemonBuilder, Front, Place, Reply, SHARING, SLUICED, code, pid_of};
use rustix::process::Signal;
use serde_json::{Value, json};
use sluice_kit::{
    processes::{is_alive, signal, wait_gone, watch},
    service_manager::ServiceManager,
    wait::until,
};

/// Starts sluiced with two units.
fn serve(place: &Place) -> Daemon {
    configured(place, "")
}

fn configured(place: &Place, file: &str) -> Daemon {
    place.daemon().units(2).vm_numbers("1:100").configuration(file).serve()
}

fn put(place: &Place, id: &str, wanted: &Value) -> Reply {
    let mut wanted = wanted.clone();
    wanted["direct"] = true.into();
    place.api("PUT", &format!("/v1/vms/{id}"), Some(&wanted))
}

fn unit_of(place: &Place, id: &str) -> Value {
    place.api("GET", &format!("/v1/vms/{id}"), None).body["placed"]["unit"].clone()
}

fn front(place: &Place, id: &str) -> Front {
    let vm = place.api("GET", &format!("/v1/vms/{id}"), None);
    Front::connect(vm.body["connect"]["socket"].as_str().expect("a socket").as_ref())
}

// Promise: P20
#[test]
fn each_vm_is_on_one_unit_that_its_request_allows() {
    let place = Place::new();
    let daemon = serve(&place);
    // VMs without a quota are alone on a device while there is an empty one.
    for (id, unit) in [("a", 0), ("b", 1)] {
        let made = put(&place, id, &json!({}));
        assert_eq!((made.status, &made.body["placed"]["unit"]), (201, &unit.into()), "{made:?}");
        assert_eq!(made.body["placed"]["kind"], "time-slice");
        assert_eq!(made.body["units"].as_array().map(Vec::len), Some(1), "{made:?}");
    }
    let wishes = json!({ "vms": [{ "placement": { "isolation": "strict" } }, { "memory_bytes": 64 << 20 }] });
    let would = place.api("POST", "/v1/capacity/would-fit", Some(&wishes));
    assert_eq!((would.status, &would.body["fits"]), (200, &false.into()), "{would:?}");
    assert!(
        would.body["vms"][0]["refusal"].is_string() && would.body["vms"][1]["unit"].is_u64(),
        "{would:?}"
    );

    // A refused request for an exclusive unit gets the reason and a remedy.
    let refused = put(&place, "alone", &json!({ "placement": { "isolation": "strict" } }));
    assert_eq!((refused.status, &refused.body["code"]), (409, &"placement-unavailable".into()));
    assert_eq!(refused.body["cause"].as_array().map(Vec::len), Some(2), "{refused:?}");
    assert_eq!(place.api("GET", "/v1/vms/alone", None).status, 404);
    // A VM that names a GPU is on it; a VM with an anti-affinity to another is not on its unit.
    let pinned = put(&place, "pinned", &json!({ "memory_bytes": 64 << 20, "placement": { "gpu": 1 } }));
    assert_eq!(pinned.body["placed"]["unit"], 1, "{pinned:?}");
    let away = json!({ "memory_bytes": 64 << 20, "placement": { "anti_affinity": [{ "vm": "a" }] } });
    assert_eq!(put(&place, "away", &away).body["placed"]["unit"], 1);

    // The death of an arbiter ends only the sessions on its unit.
    let (mut one, mut two) = (front(&place, "a"), front(&place, "b"));
    let workers = [watch(pid_of(&one.open(1))), watch(pid_of(&two.open(1)))];
    let [one, two] = workers.map(|worker| worker.expect("a process"));
    let arbiter = place.api("GET", "/v1/units/0", None).body["arbiter_process"].as_u64().expect("a process");
    let arbiter = watch(u32::try_from(arbiter).expect("a pid")).expect("a process");
    signal(&arbiter, Signal::KILL);
    wait_gone(&one);
    assert!(is_alive(&two), "a session of another unit was ended");

    // Another VM gets the place of a deleted VM.
    assert_eq!(place.api("DELETE", "/v1/vms/a", None).status, 204);
    assert_eq!(put(&place, "alone", &json!({ "placement": { "isolation": "strict" } })).status, 201);
    assert_eq!(unit_of(&place, "alone"), 0);
    daemon.end();
}

/// A VM without a quota may take the whole unit, so it would take memory that was promised to another organisation.
// Promise: P11
#[test]
fn vm_without_a_quota_shares_no_unit_with_a_quota_of_another_organisation() {
    let place = Place::new();
    let daemon = configured(&place, SHARING);
    let acme = json!({ "memory_bytes": 1_u64 << 40 });
    assert_eq!(place.api("PUT", "/v1/organisations/acme", Some(&acme)).status, 201);
    let on = |gpu: u32, organisation: Option<&str>, memory: Option<u64>| json!({ "memory_bytes": memory, "organisation": organisation, "placement": { "gpu": gpu } });
    let (acme, quota) = (Some("acme"), Some(64 << 20));
    let refused = |id: &str, wanted: &Value| {
        let wishes = json!({ "vms": [wanted] });
        let would = place.api("POST", "/v1/capacity/would-fit", Some(&wishes));
        assert_eq!(would.body["fits"], false, "{id}: {would:?}");
        let refused = put(&place, id, wanted);
        let code = &refused.body["code"];
        assert_eq!((refused.status, code), (409, &"placement-unavailable".into()), "{id}: {refused:?}");
    };
    assert_eq!(put(&place, "open", &on(0, None, None)).status, 201);
    refused("late", &on(0, acme, quota));
    assert_eq!(put(&place, "mine", &on(0, None, quota)).status, 201, "the operator's own VMs");
    assert_eq!(
        put(&place, "best-effort", &on(0, acme, None)).status,
        409,
        "beside the quota of the operator's VM"
    );

    assert_eq!(put(&place, "first", &on(1, acme, quota)).status, 201);
    refused("late", &on(1, None, None));
    assert_eq!(put(&place, "beside", &on(1, None, quota)).status, 201);
    let changed = put(&place, "beside", &on(1, None, None));
    assert_eq!(
        changed.body["code"], "placement-unavailable",
        "a VM lost its quota beside another one: {changed:?}"
    );
    assert_eq!(
        put(&place, "second", &on(1, acme, None)).status,
        409,
        "beside the quota of the operator's VM"
    );
    assert_eq!(place.api("DELETE", "/v1/vms/beside", None).status, 204);
    assert_eq!(put(&place, "second", &on(1, acme, None)).status, 201, "the organisation's own VMs");
    daemon.end();
}

// Promise: P20
#[test]
fn request_is_not_refused_for_an_outdated_report_of_a_unit() {
    let place = Place::new();
    let daemon = serve(&place);
    let wanted = |mebibytes: u64| json!({ "memory_bytes": mebibytes << 20, "placement": { "gpu": 0 } });
    assert_eq!(put(&place, "a", &wanted(64)).status, 201);
    let lendable = |suspect: u64| {
        place.tell("unit-0", &format!("suspect {suspect}"));
        let known = until(|| place.unit(0)["memory"]["suspect_bytes"].clone(), |bytes| *bytes == suspect);
        assert_eq!(known, suspect);
    };
    let code = |reply: Reply| (reply.status, reply.body["code"].clone());
    let refused = (409, json!("placement-unavailable"));
    lendable(1900 << 20);
    assert_eq!(code(put(&place, "b", &wanted(800))), refused);
    assert_eq!(code(put(&place, "a", &wanted(800))), refused);
    // A request waits a second for a new report. A busy machine may be late with some of them; if requests did not wait, all would be.
    let after_a_change = |id: &str| {
        lendable(1900 << 20);
        assert_eq!(code(put(&place, id, &wanted(800))), refused);
        // The daemon does not know of this change yet.
        place.tell("unit-0", "suspect 0");
        put(&place, id, &wanted(800)).status
    };
    assert!((0..5).any(|_| after_a_change("a") == 200), "the VM cannot be changed");
    assert_eq!(put(&place, "a", &wanted(64)).status, 200);
    assert!((0..5).any(|_| after_a_change("b") == 201), "the VM cannot be created");
    daemon.end();
}

// Promise: P20
#[test]
fn figures_of_a_unit_that_does_not_answer_are_shown_with_their_age() {
    let place = Place::new();
    let daemon = serve(&place);
    let shows_age = |wanted: fn(u64) -> bool| {
        let is_wanted = |age: &Value| age.as_u64().is_some_and(wanted);
        let age = until(|| place.unit(0)["memory"]["age_seconds"].clone(), is_wanted);
        assert!(is_wanted(&age), "{age}");
    };
    shows_age(|age| age == 0);
    let arbiter = place.api("GET", "/v1/units/0", None).body["arbiter_process"].as_u64().expect("a process");
    let arbiter = watch(u32::try_from(arbiter).expect("a pid")).expect("a process");
    signal(&arbiter, Signal::STOP);
    shows_age(|age| age >= 2);
    signal(&arbiter, Signal::CONT);
    shows_age(|age| age == 0);
    daemon.end();
}

// Promise: P21
#[test]
fn vm_is_on_its_previous_unit_after_a_restart() {
    let place = Place::new();
    let mut daemon = serve(&place);
    for (id, gpu) in [("a", 1), ("b", 0), ("c", 1)] {
        let made = put(&place, id, &json!({ "memory_bytes": 64 << 20, "placement": { "gpu": gpu } }));
        assert_eq!((made.status, &made.body["placed"]["unit"]), (201, &gpu.into()), "{made:?}");
    }
    assert_eq!(place.api("POST", "/v1/gpus/0/drain", None).status, 200);
    daemon.kill();
    let daemon = serve(&place);
    assert_eq!(["a", "b", "c"].map(|id| unit_of(&place, id)), [1, 0, 1].map(Value::from));
    assert_eq!(place.api("GET", "/v1/gpus/0", None).body["state"], "draining");
    daemon.end();
}

// Promise: P22
#[test]
fn vms_without_a_session_leave_a_drained_gpu() {
    let place = Place::new();
    let daemon = serve(&place);
    // The VMs start on different devices; then the first device is drained.
    for (id, unit) in [("idle", 0), ("other", 1), ("busy", 0)] {
        let made = put(&place, id, &json!({ "memory_bytes": 64 << 20, "weight": 100 }));
        assert_eq!(made.status, 201, "{made:?}");
        if unit_of(&place, id) != unit {
            let moved = place.api("POST", &format!("/v1/vms/{id}/move"), None);
            assert_eq!((moved.status, unit_of(&place, id)), (200, unit.into()), "{moved:?}");
        }
    }
    let device = place.api("GET", "/v1/vms/idle", None).body["device_process"].clone();
    let mut busy = front(&place, "busy");
    let worker = watch(pid_of(&busy.open(1))).expect("a process");
    let refused = place.api("POST", "/v1/vms/busy/move", None);
    assert_eq!((refused.status, &refused.body["code"]), (409, &"in-use".into()), "{refused:?}");

    assert_eq!(place.api("POST", "/v1/gpus/0/drain", None).body["state"], "draining");
    assert_eq!(until(|| unit_of(&place, "idle"), |unit| *unit == 1), 1);
    assert_eq!(unit_of(&place, "busy"), 0);
    assert!(is_alive(&worker), "a session was ended");
    assert_eq!(
        place.api("GET", "/v1/vms/idle", None).body["device_process"],
        device,
        "the device was replaced"
    );
    // The next session of the moved VM is on the new unit.
    let mut idle = front(&place, "idle");
    idle.open(1);
    let told = |unit: u32| -> Vec<String> {
        serde_json::from_str(&place.tell(&format!("unit-{unit}"), "told")).expect("a list")
    };
    let number = place.api("GET", "/v1/vms/idle", None).body["number"].clone();
    let introduced = format!("Worker {{ vm: {number},");
    let there = until(|| told(1), |told| told.iter().any(|line| line.starts_with(&introduced)));
    assert!(there.iter().any(|line| line.starts_with(&introduced)), "{there:?}");
    assert!(!told(0).iter().any(|line| line.starts_with(&introduced)));

    busy.send("close 1");
    wait_gone(&worker);
    assert_eq!(until(|| unit_of(&place, "busy"), |unit| *unit == 1), 1, "the VM does not move");
    assert_eq!(place.api("POST", "/v1/gpus/0/readmit", None).body["state"], "open");
    daemon.end();
}

fn units_of(place: &Place, id: &str) -> Vec<Value> {
    let vm = place.look(&format!("/v1/vms/{id}"));
    vm["units"].as_array().expect("units").iter().map(|unit| unit["unit"].clone()).collect()
}

// Promise: P20
#[test]
fn vm_is_on_every_gpu_that_it_names_until_it_is_deleted() {
    let place = Place::new();
    let daemon = serve(&place);
    let on = |gpus: Value| json!({ "placement": { "gpus": gpus } });
    let with_gpu = json!({ "placement": { "gpus": [0], "gpu": 0 } });
    for (wanted, refusal) in [
        (on(json!([0, 0])), (409, "contradiction")),
        (on(json!([0, 2])), (409, "contradiction")),
        (with_gpu, (409, "contradiction")),
    ] {
        let refused = put(&place, "both", &wanted);
        assert_eq!((refused.status, refused.body["code"].as_str()), (refusal.0, Some(refusal.1)), "{wanted}");
    }
    let made = put(&place, "both", &on(json!([1, 0])));
    assert_eq!((made.status, &made.body["placed"]["unit"]), (201, &1.into()), "{made:?}");
    assert_eq!(units_of(&place, "both"), [1, 0]);
    let mut session = front(&place, "both");
    assert_eq!(session.open(1)["custody"], 2);

    // The quota holds on each GPU: a request beyond the memory of one is refused and changes nothing.
    let mut wanted = on(json!([1, 0]));
    wanted["guaranteed_bytes"] = (32 << 20).into();
    wanted["memory_bytes"] = (64 << 20).into();
    assert_eq!(put(&place, "both", &wanted).status, 200);
    wanted["guaranteed_bytes"] = (1_u64 << 50).into();
    wanted["memory_bytes"] = (1_u64 << 50).into();
    assert_eq!(put(&place, "both", &wanted).status, 409);
    assert_eq!(place.look("/v1/vms/both")["memory_bytes"], 64 << 20);

    // The VM does not move, and no VM takes its place.
    let alone = json!({ "placement": { "isolation": "strict" } });
    assert_eq!(put(&place, "alone", &alone).body["code"], "placement-unavailable");
    assert_eq!(session.ask("close 1"), "closed 1");
    assert_eq!(place.api("POST", "/v1/vms/both/move", None).body["code"], "contradiction");
    assert!(place.api("POST", "/v1/gpus/1/drain", None).status < 300);
    assert_eq!(units_of(&place, "both"), [1, 0]);
    assert!(place.api("POST", "/v1/gpus/1/readmit", None).status < 300);

    // The next daemon restores it.
    daemon.end();
    let daemon = serve(&place);
    assert_eq!(units_of(&place, "both"), [1, 0]);
    assert_eq!(front(&place, "both").open(1)["custody"], 2);
    assert_eq!(put(&place, "alone", &alone).status, 409);
    assert_eq!(place.api("DELETE", "/v1/vms/both", None).status, 204);
    assert_eq!(put(&place, "alone", &alone).status, 201);
    daemon.end();
}

/// VMs of several organisations share a GPU only while its arbiter reports figures per process. The next daemon waits for a new
/// report.
// Promise: P47
#[test]
fn gpu_without_figures_is_shared_within_one_organisation() {
    let place = Place::new();
    let nvml = format!("nvml = {:?}\n", place.driver());
    let mut daemon = configured(&place, &nvml);
    for organisation in ["acme", "other"] {
        let wanted = json!({ "memory_bytes": 1_u64 << 40 });
        place.api("PUT", &format!("/v1/organisations/{organisation}"), Some(&wanted));
    }
    let of = |organisation: &str| {
        let placement = json!({ "gpu": 0, "policy": "time-slice" });
        json!({ "organisation": organisation, "memory_bytes": 32 << 20, "placement": placement })
    };
    let figures = || place.unit(0)["figures_per_process"].clone();
    let events = || place.api("GET", "/v1/host", None).body["events"].to_string();
    assert_eq!(put(&place, "a", &of("acme")).status, 201);
    assert_eq!(figures(), false, "figures are assumed before the arbiter reports them");
    assert_eq!(put(&place, "b", &of("other")).status, 409);
    assert_eq!(place.tell("unit-0", "figures 1"), "said");
    assert_eq!(until(figures, |figures| *figures == true), true);
    assert_eq!(put(&place, "b", &of("other")).status, 201);

    for _ in 0..3 {
        assert_eq!(place.tell("unit-0", "figures 0"), "said");
    }
    assert_eq!(until(figures, |figures| *figures == false), false);
    let events = until(events, |events| events.contains("figures-missing"));
    assert_eq!(events.matches("figures-missing").count(), 1, "{events}");
    for restarted in [false, true] {
        if restarted {
            daemon.kill();
            daemon = configured(&place, &nvml);
            assert_eq!(figures(), false, "figures are assumed after a restart");
        }
        let refused = put(&place, "c", &of("other"));
        assert_eq!((refused.status, &refused.body["code"]), (409, &"placement-unavailable".into()));
        let cause = refused.body["cause"].to_string();
        assert!(cause.contains("another organisation") && cause.contains("share-unmeasured"), "{cause}");
        assert_eq!((unit_of(&place, "a"), unit_of(&place, "b")), (0.into(), 0.into()), "a placed VM moved");
        // A placed VM may be changed, because its organisation is on the unit already.
        let more = json!({ "organisation": "other", "memory_bytes": 34 << 20, "placement": of("other")["placement"] });
        assert_eq!(put(&place, "b", &more).status, 200);
    }
    assert_eq!(place.tell("unit-0", "figures 1"), "said");
    assert_eq!(until(figures, |figures| *figures == true), true);
    assert_eq!(put(&place, "c", &of("other")).status, 201);
    daemon.end();
}

/// A placement that would be refused only because the first probe has not answered yet waits for the answer.
// Promise: P47
#[test]
fn placement_waits_for_the_first_probe_of_a_unit() {
    let place = Place::new();
    let start = std::time::Instant::now();
    let daemon = configured(&place, &format!("nvml = {:?}\n", place.driver()));
    let of = |organisation| json!({ "memory_bytes": 32 << 20, "organisation": organisation });
    for organisation in ["acme", "other"] {
        let path = format!("/v1/organisations/{organisation}");
        assert_eq!(place.api("PUT", &path, Some(&json!({ "memory_bytes": 64 << 20 }))).status, 201);
    }
    assert_eq!(put(&place, "a", &of("acme")).status, 201);
    std::thread::scope(|scope| {
        let second = scope.spawn(|| put(&place, "b", &of("other")));
        std::thread::sleep(std::time::Duration::from_millis(500));
        assert_eq!(place.tell("unit-0", "figures 1"), "said");
        // A placement waits for five seconds from the start of the unit, which a busy machine may need for this test.
        let late = start.elapsed() >= std::time::Duration::from_secs(5);
        let made = second.join().expect("an answer");
        assert!(made.status == 201 || late, "{made:?}");
    });
    daemon.end();
}

/// A unit whose kernels reach host memory serves one VM at a time, also under a daemon that adopts its arbiter. VMs that share it
/// when the configuration ceases to allow that stay, and no other joins them.
// Promise: P48
#[test]
fn unit_whose_kernels_reach_host_memory_serves_one_vm_unless_configured() {
    for (has, shown) in [("pageable-memory-access", "pageable"), ("host-page-tables", "host-page-tables")] {
        let place = Place::new();
        let manager = ServiceManager::new(&place.directory.path().join("notify.sock"));
        let start = |file| {
            let builder = DaemonBuilder::new(&place, manager.command(SLUICED)).units(1).vm_numbers("1:100");
            builder.configuration(file).envs([("SLUICE_SOFTGPU_HAS", has)]).serve()
        };
        let follow = |mut daemon: Daemon, file| {
            daemon.end_by(Signal::USR1);
            start(file)
        };
        let small = json!({ "memory_bytes": 16 << 20 });
        let arbiter = || place.unit(0)["arbiter_process"].clone();
        let is_refused = |id: &str| {
            let refused = put(&place, id, &small);
            assert_eq!(
                (refused.status, &refused.body["code"]),
                (409, &"placement-unavailable".into()),
                "{refused:?}"
            );
            let cause = refused.body["cause"].to_string();
            assert!(
                cause.contains("host memory") && cause.contains("share-with-host-memory-access"),
                "{cause}"
            );
        };
        let fits = || {
            let wanted = json!({ "vms": [small.clone()] });
            place.api("POST", "/v1/capacity/would-fit", Some(&wanted)).body["fits"].clone()
        };
        let rooms = || place.api("GET", "/v1/capacity", None).body["shared"].clone();
        let events = || place.api("GET", "/v1/host", None).body["events"].to_string();

        let daemon = start("");
        assert_eq!(put(&place, "a", &small).status, 201);
        // The first VM does not wait for the report of its unit.
        let access = || place.unit(0)["host_memory_access"].clone();
        assert_eq!(until(access, |access| access == shown), shown);
        is_refused("b");
        assert_eq!((fits(), rooms()), (false.into(), json!([])));
        let events = until(events, |events| events.contains("host-memory-reachable"));
        assert_eq!(events.matches("host-memory-reachable").count(), 1, "{events}");
        let before = arbiter();

        // The next daemon knows it from the record of the arbiter that it adopts.
        let daemon = follow(daemon, "");
        assert_eq!((arbiter(), place.unit(0)["host_memory_access"].clone()), (before.clone(), shown.into()));
        is_refused("b");

        let daemon = follow(daemon, "share-with-host-memory-access = true\n");
        assert_eq!(put(&place, "b", &small).status, 201);
        assert_eq!((fits(), rooms()[0]["vms"].clone()), (true.into(), 2.into()));

        let daemon = follow(daemon, "");
        assert_eq!(arbiter(), before);
        assert_eq!((unit_of(&place, "a"), unit_of(&place, "b")), (0.into(), 0.into()), "a placed VM moved");
        assert_eq!(place.unit(0)["vms"], 2);
        is_refused("c");
        // A VM that shares the unit may be changed.
        assert_eq!(put(&place, "b", &json!({ "memory_bytes": 18 << 20 })).status, 200);
        daemon.end();
        place.wait_empty();
    }
}

/// Until the arbiter has reported which host memory kernels reach, no VM joins another: a placement waits for the report, for a
/// bounded time.
// Promise: P48
#[test]
fn placement_beside_another_vm_waits_for_the_report_of_host_access() {
    let place = Place::new();
    place.mark("slow", "");
    let daemon = place.daemon().units(1).vm_numbers("1:100").supervised();
    let small = json!({ "memory_bytes": 16 << 20 });
    assert_eq!(put(&place, "a", &small).status, 201);
    assert_eq!(place.unit(0)["host_memory_access"], Value::Null, "unknown before the report");
    let refused = std::thread::scope(|scope| {
        let waits = scope.spawn(|| put(&place, "b", &small));
        std::thread::sleep(std::time::Duration::from_millis(500));
        let other = place.api("PUT", "/v1/organisations/acme", Some(&json!({ "memory_bytes": 64 << 20 })));
        assert_eq!(other.status, 201);
        assert!(!waits.is_finished(), "other changes wait for the report");
        waits.join().expect("an answer")
    });
    assert_eq!(
        (refused.status, &refused.body["code"]),
        (409, &"placement-unavailable".into()),
        "{refused:?}"
    );
    assert!(refused.body["cause"].to_string().contains("has not reported yet"), "{refused:?}");
    place.unmark("slow");
    // The report is late by more than a request waits.
    until(|| place.unit(0)["state"].clone(), |state| state == "lending");
    assert_eq!(put(&place, "b", &small).status, 201);
    assert_eq!(place.unit(0)["host_memory_access"], "none");
    daemon.end();
}

/// An arbiter gets probes only until it knows if the driver's figures can be used: a few soon, then seldom.
// Promise: Q66
#[test]
fn arbiter_without_figures_gets_a_bounded_number_of_probes() {
    let start = std::time::Instant::now();
    let place = Place::new();
    let daemon = configured(&place, &format!("nvml = {:?}\n", place.driver()));
    assert_eq!(put(&place, "a", &json!({ "memory_bytes": 32 << 20 })).status, 201);
    let probes = || -> Vec<u32> {
        let told = place.tell("unit-0", "told");
        let number = |line: &str| line.split(',').next().and_then(|number| number.parse().ok());
        told.split("Prober { process: ").skip(1).filter_map(number).collect()
    };
    assert_eq!(place.tell("unit-0", "figures 1"), "said");
    assert!(probes().is_empty(), "an arbiter with figures gets a probe");
    assert_eq!(place.tell("unit-0", "figures 2"), "said");
    for count in 1..=3 {
        let seen = until(probes, |probes| probes.len() >= count);
        assert_eq!(seen.len(), count, "several probes run at once");
        let last = seen.last().and_then(|probe| rustix::process::Pid::from_raw(probe.cast_signed()));
        rustix::process::kill_process(last.expect("a process"), Signal::KILL).expect("killed");
    }
    std::thread::sleep(std::time::Duration::from_secs(4));
    let (seen, due) = (probes().len(), 3 + start.elapsed().as_secs() / 30);
    assert!(seen as u64 <= due, "{seen} probes, of which {due} are due");
    daemon.end();
}

/// Without NVML it is unknown when the memory of a probe is free again, so no arbiter gets one.
// Promise: F85
#[test]
fn arbiter_without_nvml_gets_no_probe() {
    let place = Place::new();
    let daemon = serve(&place);
    assert_eq!(put(&place, "a", &json!({ "memory_bytes": 32 << 20 })).status, 201);
    assert_eq!(place.tell("unit-0", "figures 2"), "said");
    std::thread::sleep(std::time::Duration::from_secs(4));
    assert!(!place.tell("unit-0", "told").contains("Prober"), "an arbiter without NVML gets a probe");
    daemon.end();
}

/// Only memory that an arbiter can lend is promised, even if the driver reports that the device has more.
// Promise: P11
#[test]
fn capacity_equals_the_memory_that_can_be_lent() {
    let place = Place::new();
    let daemon = serve(&place);
    assert_eq!(put(&place, "a", &json!({ "memory_bytes": 64 << 20 })).status, 201);
    let lends = until(
        || place.api("GET", "/v1/units/0", None).body["memory"].clone(),
        |memory| memory["total_bytes"].is_u64(),
    );
    let capacity = place.api("GET", "/v1/capacity", None).body;
    let room = capacity["shared"][0]["memory_bytes"].as_u64().expect("room");
    let total = lends["total_bytes"].as_u64().expect("a total");
    assert!(room <= total, "{room} bytes are promised of {total}");
    let more = json!({ "memory_bytes": room.next_multiple_of(2 << 20) + (64 << 20), "guaranteed_bytes": 2 << 20, "placement": { "gpu": 0 } });
    let refused = put(&place, "more", &more);
    assert_eq!(
        (refused.status, &refused.body["code"]),
        (409, &"placement-unavailable".into()),
        "{refused:?}"
    );
    daemon.end();
}

// Promise: Q68
#[test]
fn headroom_counts_in_the_organisation_and_on_the_unit() {
    const MIB: u64 = 1 << 20;
    let place = Place::new();
    let daemon = configured(&place, SHARING);
    let organisation = |bytes: u64| {
        place.api("PUT", "/v1/organisations/acme", Some(&json!({ "memory_bytes": bytes }))).status
    };
    assert_eq!(organisation(64 * MIB), 201);
    let vm = |id: &str, quota: u64, headroom: u64| {
        let wanted =
            json!({ "organisation": "acme", "memory_bytes": quota * MIB, "headroom_bytes": headroom * MIB });
        put(&place, id, &wanted)
    };
    let refused = |reply: Reply| assert_eq!(code(&reply), (409, "quota-exceeded"), "{reply:?}");
    refused(vm("a", 32, 48));
    assert_eq!(vm("a", 32, 32).status, 201);
    // Headroom is no other VM's, as guaranteed memory is.
    refused(vm("b", 16, 36));
    assert_eq!(vm("b", 16, 32).status, 201);
    refused(vm("a", 32, 34));
    assert_eq!(organisation(62 * MIB), 409, "the organisation has less than it has promised");
    assert_eq!(organisation(65 * MIB), 200);

    let room = place.api("GET", "/v1/capacity", None).body["shared"][0]["memory_bytes"].clone();
    let room = room.as_u64().expect("room");
    let wanted = |headroom: u64| json!({ "memory_bytes": 4 * MIB, "headroom_bytes": headroom, "placement": { "gpu": 0 } });
    let beyond = put(&place, "c", &wanted(room + 4 * MIB));
    assert_eq!(code(&beyond), (409, "placement-unavailable"), "{beyond:?}");
    let within = put(&place, "c", &wanted(8 * MIB));
    assert_eq!(within.status, 201, "{within:?}");
    daemon.end();
}

// Promise: Q64
#[test]
fn quota_too_small_for_a_context_is_refused_with_the_reason() {
    let place = Place::new();
    let daemon = serve(&place);
    // The stand-in's contexts take 3 MiB.
    let refused = put(&place, "small", &json!({ "memory_bytes": 2 << 20 }));
    assert_eq!(refused.status, 409, "{refused:?}");
    let message = refused.body["message"].as_str().unwrap_or_default().to_owned();
    assert!(message.contains("2097152") && message.contains("3145728"), "{refused:?}");
    assert_eq!(place.api("GET", "/v1/vms/small", None).status, 404, "the refused VM exists");
    let made = put(&place, "small", &json!({ "memory_bytes": 2 << 20, "headroom_bytes": 1 << 20 }));
    assert_eq!(made.status, 201, "the headroom is not counted: {made:?}");
    let changed = put(&place, "small", &json!({ "memory_bytes": 2 << 20, "headroom_bytes": 1 << 19 }));
    assert_eq!(changed.status, 409, "{changed:?}");
    daemon.end();
}
