//! The command line as a client of the management API of the real daemon; device, worker and arbiter are stand-ins.

use std::{
    io::{BufRead as _, BufReader, Read as _},
    process::{Child, Command, Output, Stdio},
};

use crate::common::{Place, open_session, run, text};
use rustix::process::Signal;
use serde_json::Value;
use sluice_kit::{
    processes::{signal, wait_gone, watch},
    wait::TIMEOUT,
};

/// A sluiced as in the service.
struct Service {
    place: Place,
    process: Child,
}

impl Service {
    fn start() -> Self {
        let place = Place::new();
        let process = Self::daemon(&place);
        let service = Self { place, process };
        service.wait_ready();
        service
    }

    fn daemon(place: &Place) -> Child {
        let run = place.directory.path().join("run");
        let mut command = Command::new(place.libexec().join("sluiced"));
        command.arg("--runtime-dir").arg(run).arg("--libexec").arg(place.libexec());
        command.arg("--driver").arg(place.libexec().join("libsoftgpu_cuda.so"));
        command.env("SLUICE_SOFTGPU_STATE", place.directory.path().join("softgpu"));
        command.args(["--units", "1", "--vm-numbers", "1:2000"]).env("SLUICE_LOG", "off");
        command.stdin(Stdio::null()).spawn().expect("sluiced")
    }

    fn wait_ready(&self) {
        let start = std::time::Instant::now();
        loop {
            let status = self.sluice(&["status", "--json"]);
            if serde_json::from_slice::<Value>(&status.stdout).is_ok_and(|status| status["ready"] == true) {
                return;
            }
            assert!(start.elapsed() < TIMEOUT, "{}", text(&status.stderr));
        }
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = self.place.sluice(arguments);
        command.env("SLUICE_API", self.place.directory.path().join("run/api.sock"));
        command
    }

    fn sluice(&self, arguments: &[&str]) -> Output {
        run(self.command(arguments))
    }

    /// The output of a command that must succeed.
    fn said(&self, arguments: &[&str]) -> String {
        let output = self.sluice(arguments);
        assert!(output.status.success(), "{arguments:?}: {}", text(&output.stderr));
        text(&output.stdout)
    }

    fn json(&self, arguments: &[&str]) -> Value {
        serde_json::from_str(&self.said(arguments)).expect("JSON")
    }

    fn refused(&self, arguments: &[&str]) -> (Option<i32>, String) {
        let output = self.sluice(arguments);
        (output.status.code(), text(&output.stderr))
    }

    fn restart(&mut self) {
        self.process.kill().expect("killed");
        self.process.wait().expect("ended");
        self.process = Self::daemon(&self.place);
        self.wait_ready();
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        // A failed test may have ended it.
        if let Some(process) = watch(self.process.id()) {
            signal(&process, Signal::TERM);
            wait_gone(&process);
        }
        _ = self.process.wait();
    }
}

// Promise: A20
#[test]
fn vm_is_created_updated_fenced_and_deleted_by_commands() {
    let service = Service::start();
    let made =
        service.said(&["create", "web-1", "--memory", "64MiB", "--weight", "300", "--guest-memory", "1GiB"]);
    assert!(
        made.contains("VM web-1 is made") && made.contains("vhost-user-gpu-pci,chardev=sluice"),
        "{made}"
    );
    assert!(made.contains("'socket="), "words that a shell would split are quoted: {made}");
    let again =
        service.said(&["create", "web-1", "--memory", "64MiB", "--weight", "300", "--guest-memory", "1GiB"]);
    assert!(again.contains("there already"), "{again}");
    // Properties that are not named stay.
    let updated = service.json(&["update", "web-1", "--memory", "32MiB", "--json"]);
    assert_eq!(
        (&updated["memory_bytes"], &updated["weight"], &updated["guest_memory_bytes"]),
        (&(32 << 20).into(), &300.into(), &(1 << 30).into())
    );
    let shown = service.said(&["show", "web-1"]);
    assert!(shown.contains("32 MiB") && shown.contains("weight           300"), "{shown}");
    let list = service.said(&["list"]);
    assert!(
        list.starts_with("NAME") && list.lines().any(|line| line.starts_with("web-1  running")),
        "{list}"
    );
    assert_eq!(service.said(&["list", "--organisation", "nobody"]).lines().count(), 1);
    let drained = service.said(&["drain", "web-1"]);
    assert!(drained.contains("begins no new session"), "{drained}");
    assert!(service.said(&["list"]).contains("draining"));
    assert!(service.said(&["readmit", "web-1"]).contains("active"));
    let fenced = service.said(&["fence", "web-1", "--reason", "a test"]);
    assert!(fenced.contains("quarantined") && fenced.contains("is clean"), "{fenced}");
    assert!(service.said(&["show", "web-1"]).contains("fenced for       a test"));
    assert!(service.said(&["readmit", "web-1"]).contains("active in epoch 2"));
    assert_eq!(service.said(&["delete", "web-1"]), "VM web-1 is gone\n");
    assert_eq!(service.said(&["delete", "web-1"]), "VM web-1 is gone\n", "deleting again succeeds");
    assert_eq!(service.json(&["list", "--json"])["vms"], serde_json::json!([]));
}

// Promise: A20
#[test]
fn organisations_sizes_units_and_usage_are_managed_by_commands() {
    let service = Service::start();
    assert!(service.said(&["organisation", "set", "acme", "--memory", "1GiB"]).contains("is made"));
    assert!(service.said(&["organisation", "set", "acme", "--memory", "2GiB"]).contains("is as requested"));
    service.said(&["project", "set", "shop", "--organisation", "acme", "--memory", "1GiB", "--vms", "3"]);
    service.said(&["size", "set", "small", "--memory", "128MiB", "--weight", "50", "--priority", "low"]);
    service.said(&["create", "a", "--size", "small", "--project", "shop"]);
    let vm = service.json(&["show", "a", "--json"]);
    assert_eq!(
        (&vm["memory_bytes"], &vm["weight"], &vm["organisation"]),
        (&(128 << 20).into(), &50.into(), &"acme".into())
    );
    assert!(service.said(&["organisation", "list"]).contains("acme  -                0 B  2 GiB"));
    assert!(service.said(&["project", "show", "shop"]).contains("1 GiB    3"));
    assert!(service.said(&["size", "list"]).contains("128 MiB"));
    assert!(service.said(&["usage"]).contains("host"));
    assert!(service.said(&["units"]).contains("lending"));
    assert!(service.said(&["gpus"]).starts_with("GPU"));
    assert!(service.said(&["suggestions"]).contains("`rebalance` is off"));
    assert!(service.said(&["drain", "--gpu", "0"]).contains("GPU 0 is draining"));
    assert!(service.said(&["gpus"]).contains("draining"));
    assert!(service.said(&["readmit", "--unit", "0"]).contains("unit 0 is lending"));
    service.said(&["drain", "--unit", "0"]);
    assert!(service.said(&["readmit", "--gpu", "0"]).contains("GPU 0 is open"));
    let (code, said) = service.refused(&["move", "a", "--kind", "time-slice"]);
    assert!(code == Some(1) && said.contains("[placement-unavailable]"), "{said}");
    let (code, said) = service.refused(&["mig", "0", "on"]);
    assert!(code == Some(1) && said.contains("cannot be divided"), "{said}");
    let (code, said) = service.refused(&["organisation", "delete", "acme"]);
    assert_eq!(code, Some(1));
    assert!(said.contains("[in-use]"), "{said}");
    for command in [
        ["delete", "a"].as_slice(),
        &["project", "delete", "shop"],
        &["organisation", "delete", "acme"],
        &["size", "delete", "small"],
    ] {
        service.said(command);
    }
}

// Promise: A20
#[test]
fn error_is_reported_by_code_message_and_exit_status() {
    let service = Service::start();
    let (code, said) = service.refused(&["show", "nobody"]);
    assert_eq!((code, said.as_str()), (Some(3), "sluice: there is no VM nobody [not-found]\n"));
    let (code, said) = service.refused(&["create", "a", "--memory", "1KiB"]);
    assert_eq!(code, Some(1));
    assert!(said.contains("[invalid-request]"), "{said}");
    let (code, said) = service.refused(&["show", "../host"]);
    assert!(code == Some(1) && said.contains("is no name"), "{code:?} {said}");
    let (code, _) = service.refused(&["create", "a", "--memory", "much"]);
    assert_eq!(code, Some(2));
    let (code, said) = service.refused(&["list", "--socket", "/nowhere/api.sock"]);
    assert_eq!(code, Some(4));
    assert!(said.contains("/nowhere/api.sock"), "{said}");
    let (code, said) = service.refused(&["readmit", "--unit", "0"]);
    assert!(code == Some(1) && said.contains("[not-fenced]"), "{code:?} {said}");
}

// Promise: A20
#[test]
fn event_stream_continues_without_a_hole_after_a_daemon_restart() {
    let mut service = Service::start();
    service.said(&["create", "early"]);
    let all = service.said(&["events", "--no-follow", "--after", "0.0"]);
    assert!(all.contains("gap") && all.contains("vm-created  VM early"), "{all}");
    let mut following = service
        .command(&["events", "--json"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("sluice");
    let mut lines = BufReader::new(following.stdout.take().expect("piped")).lines();
    let mut last = None;
    let mut until = |kind: &str| -> Value {
        loop {
            let line = lines.next().expect("a line").expect("text");
            let event: Value = serde_json::from_str(&line).expect("JSON");
            assert!(event["kind"] != "alive" && event["kind"] != "gap", "{event}");
            let sequence = event["sequence"].as_u64().expect("a number");
            assert!(last.is_none_or(|last| sequence == last + 1), "a hole before {event}");
            last = Some(sequence);
            if event["kind"] == kind {
                return event;
            }
        }
    };
    // The stream is silent until an event: a change is repeated until its event arrives.
    let done = std::sync::atomic::AtomicBool::new(false);
    let made = std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut weight = 1;
            while !done.load(std::sync::atomic::Ordering::Relaxed) {
                weight = weight % 9000 + 1;
                service.said(&["update", "early", "--weight", &weight.to_string()]);
            }
        });
        let event = until("vm-updated");
        done.store(true, std::sync::atomic::Ordering::Relaxed);
        event
    });
    assert_eq!(made["vm"], "early");
    service.restart();
    service.said(&["create", "late"]);
    assert_eq!(until("vm-created")["vm"], "late");
    following.kill().expect("killed");
    following.wait().expect("ended");
    let mut said = String::new();
    following.stderr.take().expect("piped").read_to_string(&mut said).expect("text");
    assert!(said.contains("trying again"), "{said}");
}

// Promise: A20
#[test]
fn watch_table_shows_units_vms_and_sessions() {
    let service = Service::start();
    service.said(&["create", "a", "--direct", "--memory", "64MiB"]);
    let socket =
        service.json(&["show", "a", "--json"])["connect"]["socket"].as_str().expect("a socket").to_owned();
    let (_front, _worker) = open_session(&socket);
    let shown = service.said(&["watch", "--once"]);
    assert!(shown.contains("1 VMs, 1 sessions on 1 units"), "{shown}");
    assert!(shown.contains("lending") && shown.contains("a   running"), "{shown}");
    assert!(!shown.contains('\x1b'), "a pipe gets no commands for a terminal");
    let json = service.json(&["watch", "--once", "--json"]);
    assert_eq!(json["vms"][0]["id"], "a");
    // It repeats until its reader closes the pipe, which is no error.
    let mut watching = service
        .command(&["watch", "--interval", "0.1"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("sluice");
    let mut lines = BufReader::new(watching.stdout.take().expect("piped")).lines();
    let mut seen = 0;
    while seen < 3 {
        let line = lines.next().expect("a line").expect("text");
        seen += usize::from(line.contains("1 VMs"));
    }
    drop(lines);
    assert!(watching.wait().expect("sluice").success());
}

// Promise: A21
#[test]
fn doctor_reports_verdicts_with_advice_and_exits_1_on_a_bad_one() {
    let service = Service::start();
    let output = service.sluice(&["doctor", "--json", "--driver", "/nowhere/libcuda.so.1"]);
    let said: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let findings = said["findings"].as_array().expect("findings");
    let find = |name: &str| {
        findings.iter().find(|finding| finding["name"] == name).unwrap_or_else(|| panic!("no {name}: {said}"))
    };
    assert_eq!(find("programs")["verdict"], "good");
    assert_eq!(find("sluiced")["verdict"], "good");
    assert_eq!(find("scrub policy")["verdict"], "good");
    assert_eq!(find("unit")["verdict"], "good");
    assert_eq!(find("driver")["verdict"], "poor");
    for name in ["kernel", "KVM", "vm.max_map_count", "seccomp", "open files", "locked memory"] {
        let finding = find(name);
        assert!(
            finding["verdict"] == "good"
                || finding["advice"].as_str().is_some_and(|advice| !advice.is_empty()),
            "{finding}"
        );
    }
    let bad = findings.iter().any(|finding| finding["verdict"] == "bad");
    assert_eq!(output.status.code(), Some(i32::from(bad)), "{said}");
    // Without --driver, the daemon's driver is checked.
    let said: Value = serde_json::from_slice(&service.sluice(&["doctor", "--json"]).stdout).expect("JSON");
    let driver = service.place.libexec().join("libsoftgpu_cuda.so").display().to_string();
    let found = said["findings"].as_array().expect("findings").iter().find(|one| one["name"] == "driver");
    let found = found.expect("a finding about the driver");
    assert!(found["found"].as_str().is_some_and(|text| text.contains(&driver)), "{found}");
    assert_eq!(found["verdict"], "bad", "it is none");
    // A missing program of Sluice is bad, and a missing daemon is reported.
    let worker = service.place.libexec().join("sluice-worker");
    std::fs::remove_file(&worker).expect("removed");
    let (code, _) = service.refused(&["doctor", "--driver", "/nowhere/libcuda.so.1"]);
    assert_eq!(code, Some(1));
    let output = service.sluice(&["doctor", "--socket", "/nowhere/api.sock"]);
    assert!(text(&output.stdout).contains("no sluiced answers"), "{}", text(&output.stdout));
}

#[test]
fn completion_prints_a_script_for_each_shell() {
    let place = Place::new();
    for (shell, mark) in
        [("bash", "complete -F _sluice"), ("zsh", "#compdef sluice"), ("fish", "complete -c sluice")]
    {
        let output = run(place.sluice(&["completion", shell]));
        let said = text(&output.stdout);
        assert!(said.contains(mark) && said.contains("readmit"), "{shell}");
    }
}
