//! VMs on MIG instances that are created for them, on a software GPU: their view, their moves, and the return of the slices.

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};
use sluice_tests::managed::{Host, InstanceHolder, Options};
use sluice_tests::programs;

const MIB: u64 = 1 << 20;

/// Two VMs on one GPU, each on an instance created for it: each sees the memory and the multiprocessors of its instance, has
/// all of its memory regardless of the other, and is in the same place after a crash of the daemon. The slices of a deleted VM are
/// free again.
// Promise: P21, P23
#[test]
fn vms_get_instances_of_their_own_and_free_them_when_deleted() -> Result<()> {
    let program = programs::hostile("instance")?;
    let mut host = Host::start(&Options::default())?;
    let empty = host.capacity()?;
    ensure!(host.units()?.is_empty(), "{:?}", host.units()?);

    let small = host.put("small", &json!({ "policy": "mig", "profile": "2g.20gb" }))?;
    let large = host.put("large", &json!({ "policy": "mig", "profile": "3g.40gb" }))?;
    ensure!(small["placed"]["profile"] == "2g.20gb" && large["placed"]["kind"] == "mig", "{small} {large}");
    ensure!(host.capacity()? != empty, "nothing was made");
    let (status, refused) = host.api(
        "PUT",
        "/v1/vms/whole",
        Some(&json!({ "direct": true, "placement": { "policy": "mig", "profile": "7g.80gb" } })),
    )?;
    ensure!(status == 409 && refused["code"] == "placement-unavailable", "{refused}");

    let mut two = host.holder(&program, &small, 2)?;
    let mut three = host.holder(&program, &large, 3)?;
    ensure!((two.multiprocessors, three.multiprocessors) == (32, 60), "{}", two.multiprocessors);
    ensure!(two.total < three.total && two.held > 0 && three.held > two.held, "{} {}", two.held, three.held);
    // Each holds all memory except the driver's share, at once.
    ensure!(two.total - two.held <= 32 * MIB && three.total - three.held <= 32 * MIB, "{}", two.held);
    two.look()?;
    three.look()?;
    drop(two);
    three.look()?;
    drop(three);

    let before: Vec<Value> = host.units()?.into_iter().map(|unit| unit["uuid"].clone()).collect();
    host.restart()?;
    let after: Vec<Value> = host.units()?.into_iter().map(|unit| unit["uuid"].clone()).collect();
    ensure!(before == after && after.len() == 2, "{before:?} {after:?}");
    let (_, again) = host.api("GET", "/v1/vms/small", None)?;
    ensure!(again["placed"] == small["placed"], "{again}");
    host.holder(&program, &again, 4)?.look()?;

    for vm in ["small", "large"] {
        ensure!(host.api("DELETE", &format!("/v1/vms/{vm}"), None)?.0 == 204, "{vm} is not deleted");
    }
    host.wait_for("the slices are free", |host| Ok(host.units()?.is_empty() && host.capacity()? == empty))
}

/// A program in a VM on an instance names it as programs on the host do, or by a unique part of that; any other name gives it no device.
// Promise: C100
#[test]
fn program_names_its_instance_by_its_uuid() -> Result<()> {
    let host = Host::start(&Options::default())?;
    let vm = host.put("one", &json!({ "policy": "mig", "profile": "1g.10gb" }))?;
    let units = host.units()?;
    let uuid = units[0]["uuid"].as_str().context("a UUID")?.to_owned();
    ensure!(uuid.starts_with("MIG-"), "{uuid}");
    let program = programs::program("vector_add")?;
    for (visible, is_there) in [
        (uuid.as_str(), true),
        (&uuid[..12], true),
        ("0", true),
        ("MIG-00000000-0000-0000-0000-000000000000", false),
        ("1", false),
        ("", false),
    ] {
        let ran = host.run_on(&program, &vm, visible)?;
        let computed = ran.status.success();
        ensure!(computed == is_there, "{visible:?}: {}\n{}\n{}", ran.status, ran.stdout, ran.stderr);
        let error = "cudaErrorNoDevice";
        ensure!(computed || ran.stdout.contains(error), "{visible:?}: {}\n{}", ran.stdout, ran.stderr);
    }
    Ok(())
}

/// While an instance is created on one GPU, which can take long, unrelated requests go on: VMs are created on another GPU, shown
/// and deleted. A VM for the same GPU waits for it, and gets the place that was held for it.
// Promise: P24
#[test]
fn slow_instance_creation_delays_only_its_own_gpu() -> Result<()> {
    let host = Host::start(&Options { gpus: 2, ..Options::default() })?;
    let on = |gpu: u32, profile: &str| json!({ "policy": "mig", "profile": profile, "gpu": gpu });
    host.put("there", &on(1, "1g.10gb"))?;
    let before = host.slices()?;
    host.fault(0, "hang nvmlDeviceCreateGpuInstanceWithPlacement\n")?;
    std::thread::scope(|scope| {
        let slow = scope.spawn(|| host.put("slow", &on(0, "2g.20gb")));
        let same = scope.spawn(|| host.put("same", &on(0, "1g.10gb")));
        host.wait_for("both have their places", |host| Ok(host.slices()? == before - 3))?;
        let other = host.put("other", &on(1, "3g.40gb"))?;
        ensure!(other["placed"]["gpu"] == 1, "{other}");
        ensure!(host.api("GET", "/v1/vms/other", None)?.0 == 200);
        ensure!(host.api("DELETE", "/v1/vms/there", None)?.0 == 204);
        host.wait_for("its slice is free", |host| Ok(host.units()?.len() == 1))?;
        ensure!(!slow.is_finished() && !same.is_finished(), "nothing hangs");
        host.fault(0, "")?;
        for made in [slow, same] {
            let made = made.join().map_err(|_| anyhow::anyhow!("a client panics"))??;
            ensure!(made["placed"]["gpu"] == 0, "{made}");
        }
        Ok(())
    })
}

/// An instance whose creation hangs in the driver is given up: its place is free, and the next VM has it.
// Promise: P24
#[test]
#[ignore = "for the full tier"]
fn hanging_instance_creation_is_given_up_and_frees_its_place() -> Result<()> {
    let host = Host::start(&Options::default())?;
    let empty = host.capacity()?;
    host.fault(0, "hang nvmlDeviceCreateGpuInstanceWithPlacement\n")?;
    let process = || Ok::<_, anyhow::Error>(host.done("GET", "/v1/host", None)?["inventory_process"].clone());
    let before = process()?;
    let wanted = json!({ "direct": true, "placement": { "policy": "mig", "profile": "7g.80gb" } });
    host.refused("PUT", "/v1/vms/a", Some(&wanted), "device-failed")?;
    ensure!(process()? != before, "the inventory was not started again");
    host.fault(0, "")?;
    ensure!(host.capacity()? == empty, "{}", host.capacity()?);
    host.put("a", &wanted["placement"])?;
    Ok(())
}

/// A GPU's MIG mode is switched once it is drained and empty. If the driver needs a reset for that, the GPU is out of use until then,
/// also under a later daemon, and goes on by itself. One unit alone can be emptied, too.
// Promise: P25
#[test]
fn mig_mode_of_an_empty_gpu_is_switched_and_of_a_used_one_is_not() -> Result<()> {
    let mut host = Host::start(&Options { gpus: 2, ..Options::default() })?;
    let first_gpu = |host: &Host| host.done("GET", "/v1/gpus/0", None);
    let off = json!({ "enabled": false });
    host.put("a", &json!({ "profile": "1g.10gb" }))?;
    host.put("b", &json!({ "profile": "2g.20gb" }))?;
    let place = |host: &Host, vm: &str| {
        Ok::<_, anyhow::Error>(host.done("GET", &format!("/v1/vms/{vm}"), None)?["placed"].clone())
    };
    let unit = |vm: &str| place(&host, vm);

    // One unit: its VM is elsewhere, the instance is gone, its neighbour is unmoved.
    let (first, other) = (unit("a")?, unit("b")?);
    ensure!(first["gpu"] == 0 && other["gpu"] == 0, "{first} {other}");
    host.done("POST", &format!("/v1/units/{}/drain", first["unit"]), None)?;
    host.wait_for("its VM is elsewhere", |_| {
        let now = unit("a")?;
        Ok(now["unit"].is_u64() && now != first)
    })?;
    ensure!(unit("b")? == other, "{}", unit("b")?);
    host.wait_for("its instance is unmade", |host| Ok(host.units()?.len() == 2))?;
    host.refused("POST", &format!("/v1/units/{}/readmit", other["unit"]), None, "not-fenced")?;

    let refused = host.refused("PUT", "/v1/gpus/0/mig", Some(&off), "in-use")?;
    ensure!(refused["message"].as_str().is_some_and(|why| why.contains("drain")), "{refused}");
    host.empty(0)?;
    let switched = host.switch(0, false)?;
    ensure!(switched["mig"] == false && switched["state"] == "draining", "{switched}");
    ensure!(host.switch(0, false)? == switched, "the second answer differs");
    host.done("POST", "/v1/gpus/0/readmit", None)?;
    let whole = host.put("whole", &json!({ "policy": "time-slice", "gpu": 0 }))?;
    ensure!(whole["placed"]["kind"] == "time-slice" && whole["placed"]["unit"] == 0, "{whole}");
    host.wait_for("it lends", |host| Ok(host.units()?[0]["state"] == "lending"))?;

    // A refusal names the VMs on it; a process outside Sluice is in the way, too.
    host.done("POST", "/v1/gpus/0/drain", None)?;
    let on = json!({ "enabled": true });
    let refused = host.refused("PUT", "/v1/gpus/0/mig", Some(&on), "in-use")?;
    ensure!(refused["message"].as_str().is_some_and(|why| why.ends_with("whole")), "{refused}");
    host.done("DELETE", "/v1/vms/whole", None)?;
    host.fault(0, "fail nvmlDeviceSetMigMode 19\n")?;
    host.refused("PUT", "/v1/gpus/0/mig", Some(&on), "in-use")?;
    let still = first_gpu(&host)?;
    ensure!(still["mig"] == false && still["mig_pending"].is_null(), "{still}");

    // A GPU that needs a reset is out of use until the reset.
    host.fault(0, "fail nvmlDeviceSetMigMode 16\n")?;
    let pending = host.switch(0, true)?;
    ensure!(pending["mig"] == false && pending["mig_pending"] == true, "{pending}");
    ensure!(host.units()?.iter().all(|unit| unit["gpu"] != 0), "{:?}", host.units()?);
    host.refused("POST", "/v1/gpus/0/readmit", None, "in-use")?;
    host.restart()?;
    let pending = first_gpu(&host)?;
    ensure!(pending["mig"] == false && pending["mig_pending"] == true, "after a crash: {pending}");
    host.refused("POST", "/v1/gpus/0/readmit", None, "in-use")?;
    host.fault(0, "")?;
    host.wait_for("it is switched", |host| {
        let gpu = first_gpu(host)?;
        Ok(gpu["mig"] == true && gpu["mig_pending"].is_null())
    })?;
    host.done("POST", "/v1/gpus/0/readmit", None)?;
    let made = host.put("c", &json!({ "policy": "mig", "profile": "7g.80gb" }))?;
    ensure!(made["placed"]["gpu"] == 0, "{made}");
    Ok(())
}

/// A VM without sessions moves from an instance to a whole GPU, back, and into an instance that is shared by time-slice. Its
/// device goes on; its next program is on the new unit.
// Promise: P22
#[test]
fn idle_vm_moves_between_mig_and_time_slice() -> Result<()> {
    let program = programs::hostile("instance")?;
    let host = Host::start(&Options { gpus: 2, ..Options::default() })?;
    host.empty(0)?;
    host.switch(0, false)?;
    host.done("POST", "/v1/gpus/0/readmit", None)?;
    let quota = 32 * MIB;
    let vm = host.put_with("a", json!({ "memory_bytes": quota, "placement": { "policy": "any" } }))?;
    ensure!(vm["placed"]["kind"] == "mig" && vm["placed"]["gpu"] == 1, "{vm}");
    // A program sees the unit of its VM.
    let look = |multiprocessors: u64| -> Result<InstanceHolder> {
        let mut holder = host.holder(&program, &vm, 7)?;
        holder.look()?;
        ensure!(holder.multiprocessors == multiprocessors, "{} multiprocessors", holder.multiprocessors);
        ensure!(holder.total == quota, "{} bytes", holder.total);
        Ok(holder)
    };
    let idle = || {
        let no_session = |host: &Host| {
            let vm = host.done("GET", "/v1/vms/a", None)?;
            Ok(vm["sessions"].as_array().is_some_and(Vec::is_empty))
        };
        host.wait_for("it has no session", no_session)
    };
    let busy = look(16)?;
    host.refused("POST", "/v1/vms/a/move?kind=time-slice", None, "in-use")?;
    drop(busy);
    idle()?;
    let mut from = vm["placed"]["unit"].clone();
    for (query, kind, gpu, shared, multiprocessors) in [
        ("kind=time-slice", "time-slice", 0, true, 132),
        ("kind=mig", "mig", 1, false, 16),
        ("kind=time-slice&gpu=1", "mig", 1, true, 16),
        ("kind=time-slice&gpu=0", "time-slice", 0, true, 132),
    ] {
        let moved = host.done("POST", &format!("/v1/vms/a/move?{query}"), None)?;
        let placed = &moved["placed"];
        ensure!(
            placed["kind"] == kind && placed["gpu"] == gpu && placed["shared"] == shared,
            "{query}: {placed}"
        );
        ensure!(moved["device_process"] == vm["device_process"], "{query}: its guest notices: {moved}");
        let audit = host.audit()?;
        let noted = audit.last().context("a line")?;
        ensure!(noted["action"] == "vm.move" && noted["object"] == "vms/a", "{noted}");
        ensure!(
            noted["before"]["unit"] == from && query.contains(noted["after"]["kind"].as_str().unwrap_or("?")),
            "{noted}"
        );
        from = placed["unit"].clone();
        drop(look(multiprocessors).with_context(|| query.to_owned())?);
        idle()?;
    }
    host.refused("POST", "/v1/vms/a/move?kind=mig&gpu=0", None, "placement-unavailable")?;
    host.refused("POST", "/v1/vms/a/move?gpu=9", None, "contradiction")?;
    host.wait_for("its instances are unmade", |host| Ok(host.units()?.len() == 1))
}

/// If the configuration enables it, moves that leave more room for others are suggested; after a move its suggestion is gone.
// Promise: P26
#[test]
fn moves_that_leave_more_room_are_suggested_until_they_are_made() -> Result<()> {
    let host = Host::start(&Options { gpus: 2, file: "rebalance = \"suggest\"\n", ..Options::default() })?;
    host.put("a", &json!({ "policy": "mig", "profile": "1g.10gb" }))?;
    host.put("b", &json!({ "policy": "mig", "profile": "1g.10gb", "gpu": 1 }))?;
    let suggested = || host.done("GET", "/v1/placement/suggestions", None);
    let answer = suggested()?;
    let [one] = answer["suggestions"].as_array().map_or(&[][..], Vec::as_slice) else {
        anyhow::bail!("{answer}");
    };
    ensure!(
        answer["policy"] == "suggest" && answer["units"].as_array().is_some_and(|all| all.len() == 2),
        "{answer}"
    );
    ensure!(one["vm"] == "a" && one["reason"] == "fragmentation" && one["idle"] == true, "{one}");
    ensure!(one["to"]["gpu"] == 1 && one["gain_ratio"].as_f64() > Some(0.05), "{one}");
    // No VM moves by itself.
    ensure!(host.done("GET", "/v1/vms/a", None)?["placed"]["gpu"] == 0);
    let moved = host.done("POST", "/v1/vms/a/move?gpu=1", None)?;
    ensure!(moved["placed"]["gpu"] == 1, "{moved}");
    host.wait_for("it is not suggested any more", |_| {
        Ok(suggested()?["suggestions"].as_array().is_some_and(Vec::is_empty))
    })
}

/// If the configuration enables it, a VM of an overloaded unit is moved, but only once it has no session.
// Promise: P26
#[test]
#[ignore = "for the full tier"]
fn vm_is_moved_for_load_once_it_has_no_session() -> Result<()> {
    let program = programs::hostile("instance")?;
    let host = Host::start(&Options { gpus: 2, file: "rebalance = \"apply\"\n", ..Options::default() })?;
    for gpu in [0, 1] {
        host.empty(gpu)?;
        host.switch(gpu, false)?;
        host.done("POST", &format!("/v1/gpus/{gpu}/readmit"), None)?;
    }
    let total = |host: &Host| {
        let totals =
            host.units()?.into_iter().map(|unit| unit["memory"]["total_bytes"].as_u64().unwrap_or(0));
        Ok::<_, anyhow::Error>(totals.min().unwrap_or(0))
    };
    host.wait_for("both lend", |host| Ok(host.units()?.len() == 2 && total(host)? > 0))?;
    // Most of a GPU each: together more than one GPU can give, and either fits on the other.
    let quota = total(&host)? * 46 / 100 / (2 * MIB) * (2 * MIB);
    let wanted = json!({ "memory_bytes": quota, "placement": { "policy": "time-slice" } });
    let vms = ["a", "b"].map(|vm| host.put_with(vm, wanted.clone()));
    let [one, other] = vms;
    let (one, other) = (one?, other?);
    ensure!(one["placed"]["gpu"] == other["placed"]["gpu"], "they are packed: {one} {other}");
    let (busy, stays) = (host.holder(&program, &one, 1)?, host.holder(&program, &other, 2)?);
    let suggested = |host: &Host| {
        let answer = host.done("GET", "/v1/placement/suggestions", None)?;
        Ok::<_, anyhow::Error>(answer["suggestions"].as_array().and_then(|all| all.first()).cloned())
    };
    host.wait_for("a move is suggested", |host| Ok(suggested(host)?.is_some()))?;
    let suggestion = suggested(&host)?.context("a suggestion")?;
    ensure!(suggestion["reason"] == "memory", "{suggestion}");
    let gpu_of = |host: &Host, vm: &str| {
        Ok::<_, anyhow::Error>(host.done("GET", &format!("/v1/vms/{vm}"), None)?["placed"]["gpu"].clone())
    };
    let mover = suggestion["vm"].as_str().context("a VM")?.to_owned();
    ensure!(gpu_of(&host, &mover)? == one["placed"]["gpu"], "no VM with a session moves");
    let (ends, mut goes_on) = if mover == "a" { (busy, stays) } else { (stays, busy) };
    drop(ends);
    host.wait_for("it is moved", |host| Ok(gpu_of(host, &mover)? != one["placed"]["gpu"]))?;
    goes_on.look()
}

/// A VM joins an instance that is shared by time-slice with VMs of its own organisation, also after a restart; one of another
/// organisation is refused with a reason. If the configuration permits it, that one joins, too.
// Promise: P47
#[test]
fn organisations_share_an_instance_only_if_configured() -> Result<()> {
    let of = |organisation: &str| {
        let placement = json!({ "policy": "time-slice", "profile": "7g.80gb" });
        json!({ "direct": true, "organisation": organisation, "memory_bytes": 32 * MIB, "placement": placement })
    };
    for file in ["", "share-unmeasured-between-organisations = true\n"] {
        let mut host = Host::start(&Options { file, ..Options::default() })?;
        for organisation in ["acme", "other"] {
            let wanted = json!({ "memory_bytes": 1_u64 << 40 });
            host.done("PUT", &format!("/v1/organisations/{organisation}"), Some(&wanted))?;
        }
        let first = host.done("PUT", "/v1/vms/a", Some(&of("acme")))?;
        ensure!(first["placed"]["kind"] == "mig" && first["placed"]["shared"] == true, "{first}");
        host.restart()?;
        let second = host.done("PUT", "/v1/vms/b", Some(&of("acme")))?;
        ensure!(second["placed"] == first["placed"], "{second}");
        if file.is_empty() {
            let refused = host.refused("PUT", "/v1/vms/c", Some(&of("other")), "placement-unavailable")?;
            let cause = refused["cause"].to_string();
            ensure!(
                cause.contains("another organisation") && cause.contains("share-unmeasured"),
                "{refused}"
            );
        } else {
            let third = host.done("PUT", "/v1/vms/c", Some(&of("other")))?;
            ensure!(third["placed"] == first["placed"], "{third}");
        }
    }
    Ok(())
}

/// The same on a whole GPU: VMs of other organisations join once a probe has shown that growth can be charged, which NVML's figures
/// may cease to allow. VMs that are there go on, and the operator is warned once.
// Promise: P47
#[test]
fn organisations_share_a_gpu_without_bytes_per_process_only_if_configured() -> Result<()> {
    let of = |organisation: &str| json!({ "organisation": organisation, "memory_bytes": 64 * MIB });
    for file in ["", "share-unmeasured-between-organisations = true\n"] {
        let mut host = Host::start(&Options { mig: false, file, ..Options::default() })?;
        for organisation in ["acme", "other"] {
            let wanted = json!({ "memory_bytes": 1_u64 << 40 });
            host.done("PUT", &format!("/v1/organisations/{organisation}"), Some(&wanted))?;
        }
        let has_figures = |wanted: bool| {
            move |host: &Host| Ok(host.units()?[0]["figures_per_process"].as_bool() == Some(wanted))
        };
        host.wait_for("a probe has shown it", has_figures(true))?;
        let first = host.put_with("a", of("acme"))?;
        let program = programs::hostile("instance")?;
        let mut holds = host.holder(&program, &first, 1)?;
        host.put_with("b", of("other"))?;
        host.fault(0, "hide bytes\n")?;
        let warnings =
            |host: &Host| host.printed().matches("does not report how much memory each process has").count();
        host.wait_for("it is seen", |host| Ok(warnings(host) > 0 && has_figures(false)(host)?))?;
        let wanted = json!({ "direct": true, "organisation": "other", "memory_bytes": 64 * MIB });
        if file.is_empty() {
            let refused = host.refused("PUT", "/v1/vms/c", Some(&wanted), "placement-unavailable")?;
            let cause = refused["cause"].to_string();
            ensure!(
                cause.contains("another organisation") && cause.contains("share-unmeasured"),
                "{refused}"
            );
        } else {
            host.done("PUT", "/v1/vms/c", Some(&wanted))?;
        }
        holds.look()?;
        ensure!(warnings(&host) == 1, "{} warnings\n{}", warnings(&host), host.printed());
        drop(holds);
        host.fault(0, "")?;
        // A restarted arbiter probes anew.
        host.restart()?;
        host.wait_for("it is over", has_figures(true))?;
        host.done("PUT", "/v1/vms/c", Some(&wanted))?;
    }
    Ok(())
}

/// For each kind of driver, a probe shows before the first session whether growth can be charged. Then a program has all memory of
/// its VM for longer than the judgement takes, and the unit is as if there had been no probe.
// Promise: Q66
#[test]
fn booking_probe_finds_how_the_driver_books_memory_before_any_session() -> Result<()> {
    for (booking, used) in [("owner", true), ("importer", true), ("both", true), ("nowhere", false)] {
        let host = Host::start(&Options {
            mig: false,
            environment: &[("SLUICE_SOFTGPU_BOOKING", booking)],
            ..Options::default()
        })?;
        host.wait_for("the probe has shown it", |host| {
            let line = format!("booking={}{}", booking[..1].to_uppercase(), &booking[1..]);
            Ok(host.printed().contains(&line) && host.units()?[0]["figures_per_process"] == used)
        })?;
        host.wait_for("nothing of it is left", |host| {
            let memory = &host.units()?[0]["memory"];
            Ok(memory["lent_bytes"] == 0 && memory["dirty_bytes"] == 0 && memory["headroom_bytes"] == 0)
        })?;
        let vm = host.put_with("a", json!({ "memory_bytes": 64 * MIB }))?;
        let mut holds = host.holder(&programs::hostile("instance")?, &vm, 1)?;
        std::thread::sleep(std::time::Duration::from_secs(3));
        holds.look().with_context(|| format!("{booking}\n{}", host.printed()))?;
    }
    Ok(())
}
