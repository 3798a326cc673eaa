//! `cargo xtask demo`: two Debian VMs share a GPU that neither of them has, run as an operator would run them.
//!
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

use crate::cargo::{cargo, run_visibly, target_folder};
use crate::setup;

use checks::Checks;
use operator::Operator;
use programs::{Finished, LIMIT, Programs};
use tenant::{Tenant, Wanted};

/// What a demo needs of the workspace. With `SLUICE_BINARIES` set, what lies there is used as it is.
const PACKAGES: &[&str] = &[
    "sluice-cli",
    "sluice-daemon",
    "sluice-device",
    "sluice-worker",
    "sluice-arbiter",
    "sluice-inventory",
    "sluice-guest",
    "sluice-guest-nvml",
    "softgpu-cuda",
    "softgpu-nvml",
    "sluice-tests",
];

/// The VMs: one has twice the memory, and three times the share of GPU time, of the other.
const WANTED: [(Wanted, Series); 2] = [
    (Wanted { name: "analysis", quota: "512", weight: 300 }, Series::V6_12),
    (Wanted { name: "batch", quota: "256", weight: 100 }, Series::V6_1),
];
/// How long a program of a fenced VM may wait for its error: what is promised, and room for a guest that is emulated.
const ERROR: Duration = Duration::from_secs(5);

/// Everything that is needed before the clock runs.
struct Stage {
    binaries: Binaries,
    kernels: [Kernel; 2],
    programs: Vec<Program>,
}

/// Runs the demo; true when everything was as it has to be.
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
    println!("\nWhat was checked\n{}", checks.list());
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
        None => build()?,
    };
    let [(_, one), (_, two)] = WANTED;
    Ok(Stage { binaries, kernels: [Kernel::fetch(one)?, Kernel::fetch(two)?], programs })
}

fn build() -> Result<Binaries> {
    step("building Sluice for release");
    let mut build = cargo();
    build.args(["build", "--release"]);
    for package in PACKAGES {
        build.args(["--package", package]);
    }
    run_visibly(&mut build)?;
    Ok(Binaries::at(target_folder()?.join("release")))
}

fn show(stage: &Stage, checks: &mut Checks) -> Result<()> {
    println!("\n2. CUDA programs on this host, straight on a GPU in software");
    let programs = Programs::run_natively(&stage.binaries, &stage.programs)?;
    println!("\n3. The daemon that shares a GPU out");
    let operator = Operator::start(&stage.binaries)?;
    on_host(stage, &operator, &programs, checks).inspect_err(|_| {
        print!("\nThe last that sluiced and its processes said\n{}", operator::indented(&operator.printed()));
    })?;
    println!("   and sluiced ends");
    checks.expect("sluiced ends in good order, and the VMs before it", operator.stop()?);
    Ok(())
}

fn on_host(stage: &Stage, operator: &Operator, programs: &Programs<'_>, checks: &mut Checks) -> Result<()> {
    operator.show(&["units"])?;

    println!("\n4. Two VMs, made through the management API and booted with the arguments it answers");
    operator.show(&["organisation", "set", "acme", "--memory", "1GiB"])?;
    let [one, two] = &WANTED;
    let made = [
        tenant::create(operator, &one.0, &stage.kernels[0])?,
        tenant::create(operator, &two.0, &stage.kernels[1])?,
    ];
    operator.show(&["list"])?;
    // Both at once: two cores are there for it.
    let [analysis, batch] = std::thread::scope(|scope| {
        let boot = |vm: usize| {
            let (made, kernel) = (&made[vm], &stage.kernels[vm]);
            scope.spawn(move || Tenant::boot(made, kernel, &stage.binaries, &stage.programs))
        };
        [boot(0), boot(1)].map(|booting| {
            booting.join().unwrap_or_else(|_| Err(anyhow::anyhow!("who boots a VM has panicked")))
        })
    });
    let (analysis, batch) = (analysis?, batch?);
    let identity = analysis.guest.run("id -un; id -Gn; ls -l /dev/dri/renderD128")?.expect_success()?;
    step(format!("programs run there as: {}", identity.stdout.trim().replace('\n', "; ")));

    println!("\n5. The same programs in both VMs at the same time, every CUDA call made by this host");
    programs.run_in([&analysis, &batch], checks)?;
    programs.run_together([&analysis, &batch], checks)?;

    println!(
        "\n6. A quota holds to the byte, the driver's share included; what one VM leaves behind reaches no other"
    );
    quota(operator, &analysis, &batch, checks)?;
    remnants(operator, &analysis, &batch, checks)?;

    println!("\n7. A fence takes everything from one VM, and nothing from the other");
    fence(operator, &analysis, &batch, checks)?;

    println!("\n8. What was used");
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

/// Both VMs take memory until they are refused; then one may have more, while it runs.
/// What a VM has of its GPU, as the API says it: the two parts that its quota bounds together.
#[derive(Clone, Copy)]
struct Held {
    lent: u64,
    driver: u64,
}

impl Held {
    fn of(vm: &Value) -> Self {
        let sum = |figure: &str| {
            let units = vm["units"].as_array().into_iter().flatten();
            units.filter_map(|unit| unit[figure].as_u64()).sum()
        };
        Self { lent: sum("lent_bytes"), driver: sum("headroom_bytes") }
    }

    /// A program that computes has both parts, and both together are within the quota.
    const fn is_within(self, quota: u64) -> bool {
        self.lent > 0 && self.driver > 0 && self.lent + self.driver <= quota
    }
}

#[expect(clippy::cast_precision_loss, reason = "shown with one decimal")]
fn in_mebibytes(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

fn quota(operator: &Operator, analysis: &Tenant, batch: &Tenant, checks: &mut Checks) -> Result<()> {
    let mut refused = |tenant: &Tenant, mebibytes: &str| -> Result<()> {
        let words = ["quota", mebibytes, "hold"];
        println!("   {}$ {}", tenant.name, words.join(" "));
        let holding = programs::start(tenant, &words)?;
        holding.wait_for_output("to the byte", LIMIT)?;
        let held = Held::of(&operator.json(&["show", tenant.name])?);
        holding.signal(rustix::process::Signal::USR1)?;
        let finished = Finished::from(holding.wait()?);
        print!("{}", operator::indented(&finished.stdout));
        let quota = mebibytes.parse::<u64>()? << 20;
        let Held { lent, driver } = held;
        let what = format!(
            "{} has {:.1} MiB lent and {:.1} MiB of the driver's, {:.1} of {mebibytes} MiB; more is refused",
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

fn remnants(operator: &Operator, analysis: &Tenant, batch: &Tenant, checks: &mut Checks) -> Result<()> {
    let left = programs::show(analysis, &["remnant", "leave"])?;
    checks.expect(
        "a program leaves a tag in all it can get, and is killed",
        left.stdout.contains("a tag stands"),
    );
    settle(operator)?;
    // Nearly all there is: most of what held the tags must be among it.
    operator.tell(&["update", analysis.name, "--memory", "32MiB"])?;
    operator.tell(&["update", batch.name, "--memory", "1GiB"])?;
    let found = programs::show(batch, &["remnant", "find"])?;
    // But for the driver's share and the figures of the search itself.
    let read =
        found.stdout.split_once(" MiB read: 0 tags found").and_then(|(read, _)| read.parse::<u64>().ok());
    checks.expect(
        "the other VM gets nearly all of the GPU's memory, and finds none of it",
        read.is_some_and(|read| read >= 960) && found.passed(),
    );
    settle(operator)
}

/// Waits until no VM has memory of the GPU: a program that has ended is a little ahead of its worker.
fn settle(operator: &Operator) -> Result<()> {
    let is_idle = |vm: &Value| {
        let sessions = vm["sessions"].as_array().is_some_and(Vec::is_empty);
        let mut units = vm["units"].as_array().into_iter().flatten();
        sessions
            && units.all(|unit| unit["lent_bytes"] == 0 && unit["holders"] == 0 && unit["dirty_bytes"] == 0)
    };
    // A list is as of the last second; a VM that is asked for by name, as of now.
    for (wanted, _) in &WANTED {
        operator.wait("what programs had comes back", &["show", wanted.name], is_idle)?;
    }
    Ok(())
}

fn fence(operator: &Operator, analysis: &Tenant, batch: &Tenant, checks: &mut Checks) -> Result<()> {
    let neighbour = programs::start(analysis, &["neighbour", "forever"])?;
    neighbour.wait_for_output("computing", LIMIT)?;
    let waiting = programs::start(batch, &["bereft", "killed"])?;
    waiting.wait_for_output("waiting", LIMIT)?;
    println!("   a program in each VM: one computes on and on, one waits for the GPU");
    live_table(operator, checks)?;

    let started = Instant::now();
    let (fenced, ended) = std::thread::scope(|scope| {
        let ended = scope.spawn(|| waiting.wait().map(|ended| (Finished::from(ended), started.elapsed())));
        let fenced = operator.show(&["fence", batch.name, "--reason", "demo"]);
        (fenced, ended.join())
    });
    // The command fails unless the VM is quarantined and everything of it is clean.
    fenced?;
    let (ended, elapsed) = ended.map_err(|_| anyhow::anyhow!("who waits for a program has panicked"))??;
    println!("   what {}'s program says", batch.name);
    print!("{}", operator::indented(&ended.stdout));
    let what = format!("its program has an error after {} ms, not a hang", elapsed.as_millis());
    checks.expect(what, ended.passed() && elapsed < ERROR);
    let vm = operator.json(&["show", batch.name])?;
    let clean = vm["fence"]["step"] == "quarantined" && vm["fence"]["clean"] == true;
    checks.expect("the fenced VM has nothing, and everything it had is clean", clean);
    let refused = programs::show(batch, &["vector_add"])?;
    checks.expect("it gets nothing while it is fenced", !refused.succeeded);

    let vm = operator.json(&["show", analysis.name])?;
    let runs = vm["sessions"].as_array().is_some_and(|sessions| sessions.len() == 1);
    neighbour.signal(rustix::process::Signal::USR1)?;
    let finished = Finished::from(neighbour.wait()?);
    let rounds = finished.stderr.trim().to_owned();
    let what = format!("the other VM's program has computed on all the while ({rounds}, none of them wrong)");
    checks.expect(what, runs && finished.passed());

    operator.show(&["readmit", batch.name])?;
    let works = programs::show(batch, &["vector_add"])?;
    checks.expect("admitted again, it computes again", works.passed());
    settle(operator)
}

/// Both VMs with their shares, while both compute.
fn live_table(operator: &Operator, checks: &mut Checks) -> Result<()> {
    let frame = operator.watch()?;
    let shows = WANTED.iter().all(|(wanted, _)| {
        let line = frame.lines().find(|line| line.split_whitespace().next() == Some(wanted.name));
        let words: Vec<&str> = line.unwrap_or_default().split_whitespace().collect();
        let weight = wanted.weight.to_string();
        words.get(1) == Some(&"running") && words.get(2) == Some(&"1") && words.contains(&weight.as_str())
    });
    checks.expect("the live table has both VMs, a session each, with their weights", shows);
    Ok(())
}

fn usage(operator: &Operator, checks: &mut Checks) -> Result<()> {
    // Every program was a session at least: all of them and two at once, then those of quota, remnants and fence.
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
    let usage = operator.wait("what was used is booked", &["usage"], is_booked)?;
    operator.show(&["usage"])?;
    let adds_up = ["memory_byte_seconds", "gpu_seconds"].into_iter().all(|figure| {
        let sum = |list: &str| -> f64 {
            usage[list].as_array().into_iter().flatten().filter_map(|used| used[figure].as_f64()).sum()
        };
        (sum("vms") - sum("organisations")).abs() <= sum("vms") * 1e-9
    });
    let what = "sessions, memory and GPU time of both VMs are booked, and add up to their organisation's";
    checks.expect(what, adds_up);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quota_bounds_what_is_lent_and_what_the_driver_takes_together() {
        let vm = |lent: u64, driver: u64| {
            Held::of(&serde_json::json!({ "units": [{ "lent_bytes": lent, "headroom_bytes": driver }] }))
        };
        assert!(vm(60, 4).is_within(64));
        assert!(!vm(64, 4).is_within(64), "the driver's share is part of the quota");
        assert!(!vm(0, 4).is_within(64) && !vm(60, 0).is_within(64), "a figure is missing");
        assert!(!Held::of(&serde_json::json!({})).is_within(64));
    }
}
