//! Monitors in a VM.

use std::fs;

use super::stage::{Stage, TIMEOUT, passed};
use anyhow::{Result, ensure};
use rustix::process::Signal;
use sluice_tests::clients;
use sluice_tests::debian::Series;
use sluice_tests::paths;
use sluice_tests::programs;
use sluice_tests::vm::Machine;

/// Unmodified monitors on a stock kernel, as programs of an ordinary user, beside another process that uses the GPU. The machine
/// has two GPUs.
// Promise: G10, G11, Q62
#[test]
fn monitors_show_the_quota_and_the_processes_of_the_vm() -> Result<()> {
    const QUOTA_MIB: u64 = 192;
    const GPUS: usize = 2;
    let python = clients::guest_monitors()?;
    let units = programs::hostile("units")?;
    let script = fs::read(paths::workspace().join("tests/clients/monitors.py"))?;
    let machine = Machine { cpus: 2, ..Machine::new("monitors") };
    let (quota, gpus) = (format!("{QUOTA_MIB}MiB"), GPUS.to_string());
    let host: (&[&str], &[(&str, &str)]) = (&["--memory", &quota], &[("SLUICE_SOFTGPU_DEVICES", &gpus)]);
    let stage = Stage::boot_with(machine, Series::V6_12, host, |image| {
        image.python(&python)?;
        image.file("usr/local/lib/monitors.py", 0o644, script);
        image.program(&units, "usr/local/bin/units")
    })?;
    let bytes = (QUOTA_MIB << 20).to_string();
    stage.part("two thirds of the quota of each", |stage| {
        // The driver's share takes some of the rest.
        let taken = [(QUOTA_MIB << 21) / 3; GPUS].map(|bytes| bytes.to_string()).join(" ");
        let held = stage.guest.run(&format!("echo | units {bytes} {taken}"))?;
        ensure!(held.stdout == "holding\nas it should be\nPASS\n", "{held:?}");
        Ok(())
    })?;
    let neighbour = stage.spawn(&["hold", "1000"])?;
    neighbour.wait_for_output("holding", TIMEOUT)?;
    stage.part("monitors beside another process", |stage| {
        let neighbour = neighbour.id().to_string();
        let monitored = stage.run(&["python3", "/usr/local/lib/monitors.py", &bytes, &neighbour])?;
        println!("{}", monitored.stdout);
        ensure!(monitored.stdout.starts_with(&format!("{GPUS} device(s)")), "{monitored:?}");
        passed(&monitored)
    })?;
    neighbour.signal(Signal::KILL)?;
    neighbour.wait()?;
    stage.workers(0)?;
    stage.power_off()
}
