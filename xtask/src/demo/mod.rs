//! `cargo xtask demo`: two Debian VMs share a GPU that neither of them has, run as an operator would run them.
//!
//! The command calls it. It owns the programs, directories and VMs of the demo, and never calls a library of the backend.
//! Every request goes to the management API, by the command line that users have, and every claim is checked: the demo fails if
//! the system does.

mod checks;
mod operator;
mod programs;
mod tenant;

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use serde_json::Value;
use sluice_tests::debian::{Kernel, Series};
use sluice_tests::paths::Binaries;
use sluice_tests::programs::Program;
use sluice_tests::progress::step;
use sluice_tests::vm::Guest;

use crate::cargo::build_release;
use crate::setup;

use checks::Checks;
use operator::Operator;
use programs::{Finished, LIMIT, Programs};
use tenant::{DemoTenant, Wanted};

/// The VMs: one has twice the memory, and three times the share of GPU time, of the other.
const WANTED: [(Wanted, Series); 2] = [
    (Wanted { name: "analysis", quota: "512", weight: 300 }, Series::V6_12),
    (Wanted { name: "batch", quota: "256", weight: 100 }, Series::V6_1),
];
/// Time limit for a program of a fenced VM to get its error: the promised limit, and room for an emulated guest.
const ERROR: Duration = Duration::from_secs(5);

/// Prerequisites, made ready before the clock starts.
struct Stage {
    binaries: Binaries,
    kernels: [Kernel; 2],
    programs: Vec<Program>,
}

/// Runs the demo; true if every check passed.
pub(crate) fn run() -> Result<bool> {
    println!("Sluice demo: two Debian VMs compute on a GPU that neither of them has\n\n1. Setting up");
    let mut checks = Checks::default();
    let (result, elapsed) = match prepare() {
        Ok(stage) => {
            let started = Instant::now();
            (show(&stage, &mut checks), started.elapsed())
        }
        Err(error) => (Err(error), Duration::ZERO),
    };
    println!("\nChecks\n{}", checks.list());
    let good = result.is_ok() && checks.all_hold();
    if let Err(error) = &result {
        println!("It ended early: {error:#}\n");
    }
    let word = if good { "PASS" } else { "FAIL" };
    println!("demo: {word} ({} checks, {:.0} s)", checks.count(), elapsed.as_secs_f64());
    Ok(good)
}

fn prepare() -> Result<Stage> {
    let programs = setup::prepare()?;
    let binaries = match std::env::var_os("SLUICE_BINARIES") {
        Some(folder) => Binaries::at(folder.into()),
        None => {
            step("building Sluice for release");
            build_release()?
        }
    };
    let [(_, one), (_, two)] = WANTED;
    Ok(Stage { binaries, kernels: [Kernel::fetch(one)?, Kernel::fetch(two)?], programs })
}

fn show(stage: &Stage, checks: &mut Checks) -> Result<()> {
    println!("\n2. CUDA programs on this host, straight on a GPU in software");
    let programs = Programs::run_natively(&stage.binaries, &stage.programs)?;
    println!("\n3. The daemon that shares a GPU out");
    let operator = Operator::start(&stage.binaries)?;
    on_host(stage, &operator, &programs, checks).inspect_err(|_| {
        print!(
            "\nThe end of the log of sluiced and its processes\n{}",
            operator::indented(&operator.printed())
        );
    })?;
    println!("   sluiced ends");
    checks.expect("sluiced ends in good order, and the VMs before it", operator.stop()?);
    Ok(())
}

fn on_host(stage: &Stage, operator: &Operator, programs: &Programs<'_>, checks: &mut Checks) -> Result<()> {
    operator.wait("sluiced is ready", &["status"], |status| status["ready"] == true)?;
    operator.show(&["units"])?;

    println!("\n4. Two VMs, made through the management API and booted with the arguments it answers");
    operator.show(&["organisation", "set", "acme", "--memory", "1GiB"])?;
    let [one, two] = &WANTED;
    let made = [
        tenant::create(operator, &one.0, &stage.kernels[0])?,
        tenant::create(operator, &two.0, &stage.kernels[1])?,
    ];
    operator.show(&["list"])?;
    // Both at once, on two cores.
    let [analysis, batch] = std::thread::scope(|scope| {
        let boot = |vm: usize| {
            let (made, kernel) = (&made[vm], &stage.kernels[vm]);
            scope.spawn(move || DemoTenant::boot(made, kernel, &stage.binaries, &stage.programs))
        };
        [boot(0), boot(1)].map(|booting| {
            booting.join().unwrap_or_else(|_| Err(anyhow::anyhow!("the thread that boots a VM has panicked")))
        })
    });
    let (analysis, batch) = (analysis?, batch?);
    let identity = analysis.guest.run("id -un; id -Gn; ls -l /dev/dri/renderD128")?.expect_success()?;
    step(format!("programs run there as: {}", identity.stdout.trim().replace('\n', "; ")));

    println!("\n5. The same programs in both VMs at the same time, every CUDA call made by this host");
    programs.run_in([&analysis, &batch], checks)?;
    programs.run_together([&analysis, &batch], checks)?;

    println!("\n6. A quota holds to the byte, the driver's share included; no VM can read memory of another");
    quota(operator, &analysis, &batch, checks)?;
    remnants(operator, &analysis, &batch, checks)?;

    println!("\n7. A fence takes everything from one VM, and nothing from the other");
    fence(operator, &analysis, &batch, checks)?;

    println!("\n8. Usage");
    usage(operator, checks)?;

    println!("\n9. The end");
    for tenant in [analysis, batch] {
        let name = tenant.name;
        Guest::power_off(tenant.guest).with_context(|| format!("powering {name} off"))?;
        operator.show(&["delete", name])?;
    }
    let left = operator.json(&["list"])?;
    checks.expect("no VM is left", left["vms"].as_array().is_some_and(Vec::is_empty));
    Ok(())
}

/// Device memory of a VM in the API: the two parts that its quota bounds together.
#[derive(Clone, Copy)]
struct HeldMemory {
    lent: u64,
    driver: u64,
}

impl HeldMemory {
    fn of(vm: &Value) -> Self {
        let sum = |figure: &str| {
            let units = vm["units"].as_array().into_iter().flatten();
            units.filter_map(|unit| unit[figure].as_u64()).sum()
        };
        Self { lent: sum("lent_bytes"), driver: sum("headroom_bytes") }
    }

    /// True if both parts exist, as for a program that computes, and are together within the quota.
    const fn is_within(self, quota: u64) -> bool {
        self.lent > 0 && self.driver > 0 && self.lent + self.driver <= quota
    }
}

#[expect(clippy::cast_precision_loss, reason = "shown with one decimal")]
fn in_mebibytes(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

fn quota(operator: &Operator, analysis: &DemoTenant, batch: &DemoTenant, checks: &mut Checks) -> Result<()> {
    let mut refused = |tenant: &DemoTenant, mebibytes: &str| -> Result<()> {
        let words = ["quota", mebibytes, "hold"];
        println!("   {}$ {}", tenant.name, words.join(" "));
        let holding = programs::start(tenant, &words)?;
        holding.wait_for_output("to the byte", LIMIT)?;
        let held = HeldMemory::of(&operator.json(&["show", tenant.name])?);
        holding.signal(rustix::process::Signal::USR1)?;
        let finished = Finished::from(holding.wait()?);
        print!("{}", operator::indented(&finished.stdout));
        let quota = mebibytes.parse::<u64>()? << 20;
        let HeldMemory { lent, driver } = held;
        let what = format!(
            "{} has {:.1} MiB lent and {:.1} MiB of the driver, {:.1} of {mebibytes} MiB; more is refused",
            tenant.name,
            in_mebibytes(lent),
            in_mebibytes(driver),
            in_mebibytes(lent + driver)
        );
        let is_refused = finished.stdout.contains("then cudaErrorMemoryAllocation") && finished.passed();
        checks.expect(what, is_refused && held.is_within(quota));
        settle(operator)
    };
    let [one, two] = &WANTED;
    refused(analysis, one.0.quota)?;
    refused(batch, two.0.quota)?;
    operator.tell(&["update", batch.name, "--memory", "320MiB"])?;
    refused(batch, "320")
}

fn remnants(
    operator: &Operator,
    analysis: &DemoTenant,
    batch: &DemoTenant,
    checks: &mut Checks,
) -> Result<()> {
    let left = programs::show(analysis, &["remnant", "leave"])?;
    checks.expect(
        "a program leaves a tag in all memory it can get, and is killed",
        left.stdout.contains("a tag stands"),
    );
    settle(operator)?;
    // Nearly all memory of the GPU: most of the tagged memory must be part of it.
    operator.tell(&["update", analysis.name, "--memory", "32MiB"])?;
    operator.tell(&["update", batch.name, "--memory", "1GiB"])?;
    let found = programs::show(batch, &["remnant", "find"])?;
    // All of it except the driver's share and the counters of the search itself.
    let read =
        found.stdout.split_once(" MiB read: 0 tags found").and_then(|(read, _)| read.parse::<u64>().ok());
    checks.expect(
        "the other VM gets nearly all of the GPU's memory, and finds no tag",
        read.is_some_and(|read| read >= 960) && found.passed(),
    );
    settle(operator)
}

/// Waits until no VM has memory of the GPU: a program ends a little before its worker.
fn settle(operator: &Operator) -> Result<()> {
    let is_idle = |vm: &Value| {
        let sessions = vm["sessions"].as_array().is_some_and(Vec::is_empty);
        let mut units = vm["units"].as_array().into_iter().flatten();
        sessions
            && units.all(|unit| unit["lent_bytes"] == 0 && unit["holders"] == 0 && unit["dirty_bytes"] == 0)
    };
    // A list shows the state of the last second; a request for one VM shows the present state.
    for (wanted, _) in &WANTED {
        operator.wait("all memory of programs is back", &["show", wanted.name], is_idle)?;
    }
    Ok(())
}

fn fence(operator: &Operator, analysis: &DemoTenant, batch: &DemoTenant, checks: &mut Checks) -> Result<()> {
    let neighbour = programs::start(analysis, &["neighbour", "forever"])?;
    neighbour.wait_for_output("computing", LIMIT)?;
    let waiting = programs::start(batch, &["bereft", "killed"])?;
    waiting.wait_for_output("waiting", LIMIT)?;
    println!("   a program in each VM: one computes without end, one waits for the GPU");
    live_table(operator, checks)?;

    let started = Instant::now();
    let (fenced, ended) = std::thread::scope(|scope| {
        let ended = scope.spawn(|| waiting.wait().map(|ended| (Finished::from(ended), started.elapsed())));
        let fenced = operator.show(&["fence", batch.name, "--reason", "demo"]);
        (fenced, ended.join())
    });
    // The command fails unless the VM is quarantined and its memory is clean.
    fenced?;
    let (ended, elapsed) =
        ended.map_err(|_| anyhow::anyhow!("the thread that waits for a program has panicked"))??;
    println!("   output of {}'s program", batch.name);
    print!("{}", operator::indented(&ended.stdout));
    let what = format!("its program has an error after {} ms, not a hang", elapsed.as_millis());
    checks.expect(what, ended.passed() && elapsed < ERROR);
    let vm = operator.json(&["show", batch.name])?;
    let clean = vm["fence"]["step"] == "quarantined" && vm["fence"]["clean"] == true;
    checks.expect("the fenced VM has no memory, and all memory it had is clean", clean);
    let refused = programs::show(batch, &["vector_add"])?;
    checks.expect("it gets no memory while it is fenced", !refused.succeeded);

    let vm = operator.json(&["show", analysis.name])?;
    let runs = vm["sessions"].as_array().is_some_and(|sessions| sessions.len() == 1);
    neighbour.signal(rustix::process::Signal::USR1)?;
    let finished = Finished::from(neighbour.wait()?);
    let rounds = finished.stderr.trim().to_owned();
    let what = format!("the other VM's program went on computing ({rounds}, all of them right)");
    checks.expect(what, runs && finished.passed());

    operator.show(&["readmit", batch.name])?;
    let works = programs::show(batch, &["vector_add"])?;
    checks.expect("after readmission it computes again", works.passed());
    settle(operator)
}

/// Both VMs with their shares in the live table, while both compute.
fn live_table(operator: &Operator, checks: &mut Checks) -> Result<()> {
    let frame = operator.watch()?;
    let shows = WANTED.iter().all(|(wanted, _)| {
        let line = frame.lines().find(|line| line.split_whitespace().next() == Some(wanted.name));
        let words: Vec<&str> = line.unwrap_or_default().split_whitespace().collect();
        let weight = wanted.weight.to_string();
        words.get(1) == Some(&"running") && words.get(2) == Some(&"1") && words.contains(&weight.as_str())
    });
    checks.expect("the live table has both VMs, with one session each and their weights", shows);
    Ok(())
}

fn usage(operator: &Operator, checks: &mut Checks) -> Result<()> {
    // Each run of a program was at least one session: all programs and two at once, then those of quota, remnants and fence.
    let least = [18, 20];
    let of = |usage: &Value, name: &str| -> Option<(u64, [f64; 2])> {
        let vms = usage["vms"].as_array()?;
        let vm = vms.iter().find(|vm| vm["id"] == name)?;
        Some((vm["sessions"].as_u64()?, [vm["memory_byte_seconds"].as_f64()?, vm["gpu_seconds"].as_f64()?]))
    };
    let is_booked = |usage: &Value| {
        WANTED.iter().zip(least).all(|((wanted, _), least)| {
            of(usage, wanted.name)
                .is_some_and(|(sessions, used)| sessions >= least && used.iter().all(|used| *used > 0.0))
        })
    };
    let usage = operator.wait("the usage is booked", &["usage"], is_booked)?;
    operator.show(&["usage"])?;
    let adds_up = ["memory_byte_seconds", "gpu_seconds"].into_iter().all(|figure| {
        let sum = |list: &str| -> f64 {
            usage[list].as_array().into_iter().flatten().filter_map(|used| used[figure].as_f64()).sum()
        };
        (sum("vms") - sum("organisations")).abs() <= sum("vms") * 1e-9
    });
    let what =
        "sessions, memory and GPU time of both VMs are booked, and add up to those of their organisation";
    checks.expect(what, adds_up);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quota_check_counts_lent_memory_and_the_driver_share() {
        let vm = |lent: u64, driver: u64| {
            HeldMemory::of(
                &serde_json::json!({ "units": [{ "lent_bytes": lent, "headroom_bytes": driver }] }),
            )
        };
        assert!(vm(60, 4).is_within(64));
        assert!(!vm(64, 4).is_within(64), "the driver's share is part of the quota");
        assert!(!vm(0, 4).is_within(64) && !vm(60, 0).is_within(64), "a figure is missing");
        assert!(!HeldMemory::of(&serde_json::json!({})).is_within(64));
    }
}
