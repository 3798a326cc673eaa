//! Drivers that are worse than expected. One that lacks an ability which each session needs has its unit refused at the start, in
//! words, and no program hangs; one whose contexts take much memory has it charged.

use std::cell::Cell;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use serde_json::json;
use sluice_kit::wait::until;
use sluice_protocol::limits;
use sluice_tests::direct::TIMEOUT;
use sluice_tests::holder::Holder;
use sluice_tests::host::{run_native, run_native_with};
use sluice_tests::managed;
use sluice_tests::management;
use sluice_tests::paths::Binaries;
use sluice_tests::process::{kill, run, tail};
use sluice_tests::programs;
use sluice_tests::tenants::{Options, Tenants};

/// A host with one VM whose driver lacks an ability from its second start on.
fn refusal_names_the_ability(ability: &str, words: &str) -> Result<()> {
    let binaries = Binaries::locate()?;
    let program = programs::program("vector_add")?;
    let sound = Options::with_limits(192, &[32]);
    let lacking = Options {
        environment: vec![("SLUICE_SOFTGPU_LACKS".to_owned(), ability.to_owned())],
        ..sound.clone()
    };
    let mut tenants = Tenants::start(&binaries, &sound)?;
    let ran = tenants.run(1, &program, &[])?;
    ensure!(ran.status.success(), "{}\n{}", ran.stdout, ran.stderr);

    tenants.restart(&lacking)?;
    let start = Instant::now();
    let reason = quarantine(&tenants)?;
    println!("refused {:.1?} after the start: {reason}", start.elapsed());
    ensure!(reason.contains(words), "the reason is {reason}");
    let mut doctor = Command::new(binaries.get("sluice")?);
    doctor.arg("doctor").arg("--dir").arg(tenants.folder().join("run"));
    let doctor = run(&mut doctor, TIMEOUT)?;
    ensure!(
        !doctor.status.success() && doctor.stdout.contains(words),
        "{}\n{}",
        doctor.stdout,
        doctor.stderr
    );
    // The program ends with an error of CUDA; a hang would be killed at the limit.
    let refused = tenants.run(1, &program, &[])?;
    ensure!(refused.status.code() == Some(1), "{}: {}\n{}", refused.status, refused.stdout, refused.stderr);

    // A request that would wait for the probe's results is answered.
    let api = tenants.folder().join("run/api.sock");
    let second = json!({ "direct": true, "memory_bytes": 32 << 20 });
    let (status, answer) = management::ask(&api, "PUT", "/v1/vms/second", Some(&second))?;
    ensure!(status == 409 && answer["code"] == "placement-unavailable", "{status} {answer}");

    // An operator who readmits the unit without another driver changes nothing.
    tenants.operate("readmit", &["--unit", "0"])?;
    ensure!(quarantine(&tenants)? == reason, "the unit is quarantined for another reason");
    tenants.stop()
}

/// Waits until the unit is quarantined; returns the reason.
fn quarantine(tenants: &Tenants) -> Result<String> {
    let start = Instant::now();
    loop {
        let units = tenants.look("/v1/units")?;
        let unit = &units["units"][0];
        if unit["state"] == "quarantined" {
            return Ok(unit["reason"].as_str().context("a quarantined unit has a reason")?.to_owned());
        }
        ensure!(start.elapsed() < TIMEOUT, "{units}\n{}", tail(&tenants.printed(), 40));
        std::thread::sleep(Duration::from_millis(20));
    }
}

// Promise: F85
#[test]
fn driver_that_refuses_to_import_memory_has_its_unit_quarantined() -> Result<()> {
    refusal_names_the_ability("import", "cannot import memory that another process exports (CUresult 801)")
}

// Promise: F85
#[test]
fn driver_that_ignores_wanted_addresses_has_its_unit_quarantined() -> Result<()> {
    refusal_names_the_ability("fixed-addresses", "does not reserve the addresses that it is asked for")
}

// Promise: F85
#[test]
fn driver_that_refuses_to_pin_guest_memory_has_its_unit_quarantined() -> Result<()> {
    refusal_names_the_ability("registration", "cannot pin guest memory of as many pieces as `mapped-runs`")
}

/// On a unit whose kernels reach host memory the first VM computes, and a second is refused, with the reason, unless the
/// configuration lets it join. The programs of guests read 0 in either attribute.
fn second_vm_is_refused_unless_configured(has: &str, shown: &str) -> Result<()> {
    let binaries = Binaries::locate()?;
    let program = programs::program("vector_add")?;
    let query = programs::hostile("host_access")?;
    let mut options = Options::with_limits(192, &[32]);
    options.environment = vec![("SLUICE_SOFTGPU_HAS".to_owned(), has.to_owned())];
    let mut tenants = Tenants::start(&binaries, &options)?;
    let computes = |tenants: &Tenants, vm| -> Result<()> {
        let ran = tenants.run(vm, &program, &[])?;
        ensure!(ran.status.success(), "VM {vm}: {}\n{}", ran.stdout, ran.stderr);
        let ran = tenants.run(vm, &query, &[])?;
        ensure!(
            ran.status.success() && ran.stdout.contains("88 is 0, 100 is 0"),
            "{}\n{}",
            ran.stdout,
            ran.stderr
        );
        Ok(())
    };
    computes(&tenants, 1)?;
    let unit = tenants.look("/v1/units/0")?;
    ensure!(unit["host_memory_access"] == shown, "{unit}");
    let second = json!({ "direct": true, "memory_bytes": 32 << 20 });
    let api = tenants.folder().join("run/api.sock");
    let (status, refused) = management::ask(&api, "PUT", "/v1/vms/second", Some(&second))?;
    let cause = refused["cause"].to_string();
    ensure!(
        status == 409 && refused["code"] == "placement-unavailable" && cause.contains("host memory"),
        "{status} {refused}"
    );
    ensure!(
        tenants.operate("units", &[])?.contains("kernels reach host memory"),
        "`sluice units` does not show it"
    );
    let events = until(|| tenants.counted("host-memory-reachable", 0), |events| !matches!(events, Ok(0)))?;
    ensure!(events == 1, "{events} events report it");
    computes(&tenants, 1)?;

    let file = tenants.folder().join("sluiced.toml");
    std::fs::write(&file, "share-with-host-memory-access = true\n")?;
    options.arguments = vec!["--config".to_owned(), file.display().to_string()];
    tenants.restart(&options)?;
    let (status, made) = management::ask(&api, "PUT", "/v1/vms/2", Some(&second))?;
    ensure!(status == 201, "{status} {made}");
    computes(&tenants, 1)?;
    computes(&tenants, 2)?;
    tenants.stop()
}

// Promise: P48
#[test]
fn second_vm_is_refused_where_the_driver_maps_pageable_memory() -> Result<()> {
    second_vm_is_refused_unless_configured("pageable-memory-access", "pageable")
}

// Promise: P48
#[test]
fn second_vm_is_refused_where_the_driver_uses_the_page_tables_of_the_host() -> Result<()> {
    second_vm_is_refused_unless_configured("pageable-memory-access,host-page-tables", "host-page-tables")
}

// Promise: Q20
#[test]
fn contexts_that_take_much_memory_are_charged_and_bound_the_least_quota() -> Result<()> {
    const CONTEXT: u64 = 96 << 20;
    const QUOTA: u64 = 256 << 20;
    let mut options = Options::with_limits(768, &[QUOTA >> 20]);
    options.environment = vec![("SLUICE_SOFTGPU_CONTEXT_BYTES".to_owned(), CONTEXT.to_string())];
    let tenants = Tenants::start(&Binaries::locate()?, &options)?;
    let api = tenants.folder().join("run/api.sock");
    let (status, answer) =
        management::ask(&api, "PUT", "/v1/vms/small", Some(&json!({ "memory_bytes": CONTEXT })))?;
    ensure!(status == 409 && answer["code"] == "contradiction", "{status} {answer}");

    let hold = programs::program("hold")?;
    let mut holders = Vec::new();
    // A third context would exceed the quota with the least chunk for data.
    for contexts in 1..=2_u64 {
        let holder = Holder::start(&mut tenants.command(1, &hold, &["1000"]))?;
        holders.push(holder);
        holders.last_mut().context("just started")?.expect("holding, 0 wrong")?;
        tenants.wait_for_charge(1, |charge| {
            charge.headroom >= contexts * CONTEXT && charge.lent + charge.headroom <= QUOTA
        })?;
    }
    let third = tenants.run(1, &hold, &["0"])?;
    ensure!(third.stdout.contains("cudaErrorMemoryAllocation"), "{}\n{}", third.stdout, third.stderr);
    drop(holders);
    tenants.stop()
}

/// Runs programs natively and through Sluice, both on a driver with a setting, and compares them with a native run without it.
fn programs_print_the_same(setting: (&str, &str), arguments: &[&str], names: &[&str]) -> Result<()> {
    let binaries = Binaries::locate()?;
    let mut options = Options::with_limits(192, &[64]);
    options.arguments = arguments.iter().map(|argument| (*argument).to_owned()).collect();
    options.environment = vec![(setting.0.to_owned(), setting.1.to_owned())];
    let tenants = Tenants::start(&binaries, &options)?;
    for name in names {
        let program = programs::program(name)?;
        let usual = run_native(&binaries, &program, &[], TIMEOUT)?;
        ensure!(usual.status.success(), "{name}: {}\n{}", usual.status, usual.stderr);
        let native =
            run_native_with(&binaries, &program, &[], &[(setting.0, Path::new(setting.1))], TIMEOUT)?;
        for (way, ran) in [("natively", native), ("remoted", tenants.run(1, &program, &[])?)] {
            ensure!(
                ran.status.success() && ran.stdout == usual.stdout,
                "{name}, {way}, with {setting:?}: {}\n{}\nwithout the setting\n{}\n{}",
                ran.status,
                ran.stdout,
                usual.stdout,
                ran.stderr
            );
        }
    }
    tenants.stop()
}

// Promise: C1
#[test]
fn programs_print_the_same_on_a_driver_with_short_queues() -> Result<()> {
    const PROGRAMS: [&str; 8] =
        ["driver_api", "histogram", "matmul_tiled", "pools", "reduction", "streams", "threads", "vector_add"];
    // Far below the number of operations that Sluice itself posts to a stream before it waits, unless it knows.
    for arguments in [&[][..], &["--driver-queue", "2"]] {
        programs_print_the_same(("SLUICE_SOFTGPU_QUEUE_DEPTH", "2"), arguments, &PROGRAMS)?;
    }
    Ok(())
}

// Promise: C138
#[test]
fn held_stream_delays_no_other_however_short_the_queues_of_the_driver_are() -> Result<()> {
    for depth in [2, 64, limits::DRIVER_QUEUE] {
        let depth = depth.to_string();
        let setting = ("SLUICE_SOFTGPU_QUEUE_DEPTH", &*depth);
        programs_print_the_same(setting, &["--driver-queue", &depth], &["held"])?;
    }
    Ok(())
}

/// Two operations that do not wait for each other run in any order then, so a wait that a program or Sluice lacks shows.
// Promise: C1, C139
#[test]
fn programs_print_the_same_when_operations_start_late() -> Result<()> {
    const PROGRAMS: [&str; 11] = [
        "batches",
        "context_events",
        "graph_memory",
        "graph_work",
        "graphs",
        "green_contexts",
        "launches",
        "managed_variables",
        "pools",
        "staging",
        "streams",
    ];
    // A seed by which a failure can be repeated.
    let delay = format!("1000,{}", std::process::id());
    programs_print_the_same(("SLUICE_SOFTGPU_START_DELAY", &delay), &[], &PROGRAMS)
}

// Promise: S90
#[test]
fn full_stream_delays_its_own_callers_and_no_other_natively() -> Result<()> {
    let environment: &[(&str, &Path)] = &[("SLUICE_SOFTGPU_QUEUE_DEPTH", Path::new("2"))];
    let program = programs::program("held")?;
    let ran = run_native_with(&Binaries::locate()?, &program, &[], environment, TIMEOUT)?;
    ensure!(ran.status.success(), "{}\n{}\n{}", ran.status, ran.stdout, ran.stderr);
    Ok(())
}

/// A driver that refuses imports in instances alone: an instance is quarantined before a program runs on it, in words, and a whole
/// GPU of the same driver serves.
// Promise: F85
#[test]
fn driver_that_refuses_imports_in_instances_has_the_instance_quarantined_and_no_whole_gpu() -> Result<()> {
    let environment = &[("SLUICE_SOFTGPU_LACKS", "import-in-instances")];
    let program = programs::program("vector_add")?;
    let divided = managed::Host::start(&managed::Options { environment, ..managed::Options::default() })?;
    let on_instance = divided.put("one", &json!({ "policy": "mig", "profile": "1g.10gb" }))?;
    divided.wait_for("the instance is quarantined", |host| {
        let units = host.units()?;
        let unit = units.first().context("a unit")?;
        let reason = unit["reason"].as_str().unwrap_or_default();
        Ok(unit["state"] == "quarantined" && reason.contains("cannot import memory"))
    })?;
    let refused = divided.run(&program, &on_instance)?;
    ensure!(refused.status.code() == Some(1), "{}: {}\n{}", refused.status, refused.stdout, refused.stderr);

    let whole = managed::Options { mig: false, environment, ..managed::Options::default() };
    let whole = managed::Host::start(&whole)?;
    let vm = whole.put_with("whole", json!({ "memory_bytes": 64 << 20 }))?;
    let ran = whole.run(&program, &vm)?;
    ensure!(ran.status.success(), "{}\n{}", ran.stdout, ran.stderr);
    Ok(())
}

/// A driver that gives the memory of ended processes to no process for a while: programs of two VMs that come and go have all of their
/// quotas again once the driver gives it back, and the unit is whole afterwards.
// Promise: F85
#[test]
fn memory_that_a_driver_gives_back_late_is_lost_to_no_vm() -> Result<()> {
    let environment = &[("SLUICE_SOFTGPU_LATE_FREE", "400")];
    let host =
        managed::Host::start(&managed::Options { mig: false, environment, ..managed::Options::default() })?;
    let program = programs::hostile("instance")?;
    let quota = json!({ "memory_bytes": 256 << 20 });
    let vms = [host.put_with("a", quota.clone())?, host.put_with("b", quota)?];
    let mut held = None;
    for round in 0..4 {
        let mut holders = Vec::new();
        for (vm, pattern) in vms.iter().zip(1..) {
            let began = Instant::now();
            // Until the driver gives the memory back, an allocation may be refused.
            let mut holder = loop {
                let holder = host.holder(&program, vm, pattern);
                let got = holder.as_ref().map_or(0, |holder| holder.held);
                if let Ok(holder) = holder
                    && got == *held.get_or_insert(got)
                {
                    break holder;
                }
                ensure!(began.elapsed() < TIMEOUT, "round {round}: {got} bytes of {held:?}");
                // The memory of this attempt is late, too.
                std::thread::sleep(Duration::from_millis(500));
            };
            println!("round {round}: all of it after {:.1?}", began.elapsed());
            holder.look().with_context(|| format!("round {round}"))?;
            holders.push(holder);
        }
    }
    let began = Instant::now();
    host.wait_for("nothing is lent or charged", |host| {
        let memory = &host.units()?[0]["memory"];
        Ok(memory["lent_bytes"] == 0 && memory["dirty_bytes"] == 0 && memory["headroom_bytes"] == 0)
    })?;
    println!("whole after {:.1?}", began.elapsed());
    Ok(())
}

/// An arbiter that starts while its predecessor's memory is not yet free takes the rest of it once it is, and programs have their
/// quotas again.
// Promise: F85
#[test]
fn arbiter_that_starts_before_the_memory_of_a_dead_one_is_back_lends_all_of_it_later() -> Result<()> {
    // More than the arbiter waits for at its start.
    let environment = &[("SLUICE_SOFTGPU_LATE_FREE", "6000")];
    let host =
        managed::Host::start(&managed::Options { mig: false, environment, ..managed::Options::default() })?;
    let program = programs::hostile("instance")?;
    let vm = host.put_with("a", json!({ "memory_bytes": 256 << 20 }))?;
    let all = |host: &managed::Host| -> Result<u64> {
        host.units()?[0]["memory"]["total_bytes"].as_u64().context("the unit's memory")
    };
    let held = host.holder(&program, &vm, 1)?.held;
    // The probe and the program have left memory that comes back late.
    let seen = Cell::new(0);
    host.wait_for("all memory is in custody", |host| {
        let memory = &host.units()?[0]["memory"];
        let is_idle =
            memory["headroom_bytes"] == 0 && memory["lent_bytes"] == 0 && memory["dirty_bytes"] == 0;
        Ok(is_idle && seen.replace(all(host)?) == seen.get())
    })?;
    let before = seen.get();

    let arbiter = host.arbiter(0)?;
    kill(arbiter);
    let began = Instant::now();
    host.wait_for("another arbiter", |host| Ok(host.arbiter(0).is_ok_and(|other| other != arbiter)))?;
    host.wait_for("all memory is in custody again", |host| Ok(all(host)? >= before))?;
    println!("whole {:.1?} after the kill", began.elapsed());
    host.wait_for("the program has its quota", |host| {
        Ok(host.holder(&program, &vm, 2).is_ok_and(|holder| holder.held == held))
    })?;
    Ok(())
}

/// A daemon that follows another probes the driver for new sessions while programs compute. If the driver lacks an ability, these
/// continue, and the unit is quarantined once they have ended.
// Promise: F85
#[test]
fn driver_that_lost_an_ability_is_found_by_the_next_daemon_and_ends_no_program() -> Result<()> {
    let mut host = managed::Host::start(&managed::Options {
        mig: false,
        kept: true,
        file: "reserve = \"32MiB\"\n",
        ..managed::Options::default()
    })?;
    let program = programs::hostile("instance")?;
    let vm = host.put_with("a", json!({ "memory_bytes": 64 << 20 }))?;
    let mut running = host.holder(&program, &vm, 5)?;
    let arbiter = host.arbiter(0)?;
    let says = |host: &managed::Host, words: &str| Ok(host.printed().contains(words));
    host.restart()?;
    host.wait_for("a probe", |host| says(host, "a probe of the adopted unit found no fault of the driver"))?;
    running.look()?;

    host.configure_driver("[device]\nlacks = [\"import\"]\n")?;
    host.restart()?;
    host.wait_for("the probes fail", |host| says(host, "new sessions will fail"))?;
    running.look()?;
    ensure!(host.units()?[0]["state"] != "quarantined" && host.arbiter(0)? == arbiter, "{:?}", host.units()?);
    drop(running);
    host.wait_for("the unit is quarantined", |host| {
        let unit = &host.units()?[0];
        let reason = unit["reason"].as_str().unwrap_or_default();
        Ok(unit["state"] == "quarantined" && reason.contains("cannot import memory"))
    })?;
    host.stop()
}
