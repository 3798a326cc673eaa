//! A daemon that follows another while programs compute, with all its real processes: a service manager keeps the sockets, and
//! programs and VMs go on.

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};
use sluice_kit::wait::until;
use sluice_tests::managed::{Host, Options};
use sluice_tests::programs;

const MIB: u64 = 1 << 20;

/// The state that the next daemon must find again: the processes of a VM, and its place.
fn whole(host: &Host, vm: &str) -> Result<Value> {
    let vm = host.done("GET", &format!("/v1/vms/{vm}"), None)?;
    let unit = host.done("GET", &format!("/v1/units/{}", vm["placed"]["unit"]), None)?;
    let daemon = host.done("GET", "/v1/host", None)?;
    Ok(json!({
        "device": vm["device_process"],
        "sessions": vm["sessions"],
        "fence": vm["fence"],
        "placed": vm["placed"],
        "arbiter": unit["arbiter_process"],
        "instance": unit["uuid"],
        "launcher": daemon["launcher_process"],
    }))
}

/// Waits until the VM `a` is as before: the next daemon may learn something of its processes a moment after it is ready.
fn as_before(host: &Host, before: &Value) -> Result<()> {
    let now = until(|| whole(host, "a"), |now| now.as_ref().is_ok_and(|now| now == before))?;
    ensure!(now == *before, "{before} {now}");
    Ok(())
}

/// A program computes with all memory of its VM while the daemon is killed and another follows, and while it hands over to
/// another binary. Then a fence ends the program, and the VM can be used again and deleted.
fn goes_on(mig: bool, placement: &Value) -> Result<()> {
    let program = programs::hostile("instance")?;
    let mut host = Host::start(&Options { mig, kept: true, ..Options::default() })?;
    let wanted = json!({ "memory_bytes": 64 * MIB, "placement": placement });
    let (a, b) = (host.put_with("a", wanted.clone())?, host.put_with("b", wanted)?);
    let mut running = host.holder(&program, &a, 5)?;
    running.look()?;
    let before = whole(&host, "a")?;
    ensure!(before["sessions"].as_array().is_some_and(|all| all.len() == 1), "{before}");
    let first = host.done("GET", "/v1/host", None)?["process"].clone();
    // All of them log lines that a journal shows unchanged.
    let speakers = ["sluice_daemon", "sluice_arbiter", "sluice_worker", "sluice_device"];
    host.wait_for("all of them log a line", |host| {
        let log = host.printed();
        Ok(speakers.iter().all(|who| log.contains(who)))
    })?;
    let log = host.printed();
    ensure!(!log.contains('\x1b'), "colours:\n{log:?}");

    host.restart().context("after a kill")?;
    as_before(&host, &before).context("after a kill")?;
    running.look().context("after a kill")?;
    host.upgrade_to_copy().context("after an upgrade")?;
    as_before(&host, &before).context("after an upgrade")?;
    running.look().context("after an upgrade")?;
    ensure!(host.done("GET", "/v1/host", None)?["process"] != first, "it is the same daemon");

    // New sessions work, too.
    host.holder(&program, &b, 6)?.look()?;
    host.done("POST", "/v1/vms/a/fence", Some(&json!({})))?;
    ensure!(running.look().is_err(), "a program of a fenced VM goes on");
    drop(running);
    host.done("POST", "/v1/vms/a/readmit", None)?;
    let again = whole(&host, "a")?;
    ensure!(again["device"] == before["device"] && again["arbiter"] == before["arbiter"], "{before} {again}");
    host.holder(&program, &a, 7)?.look()?;
    for vm in ["a", "b"] {
        host.done("DELETE", &format!("/v1/vms/{vm}"), None)?;
    }
    host.wait_for("no VM is on a unit", |host| Ok(host.units()?.iter().all(|unit| unit["vms"] == 0)))?;
    host.stop()
}

// Promise: A11
#[test]
fn program_on_a_whole_gpu_continues_after_its_daemon_is_replaced() -> Result<()> {
    goes_on(false, &json!({ "policy": "time-slice" }))
}

// Promise: A11
#[test]
fn program_on_an_instance_continues_after_its_daemon_is_replaced() -> Result<()> {
    goes_on(true, &json!({ "policy": "mig" }))
}
