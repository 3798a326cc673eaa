//! Machines with several devices.

use super::stage::{Stage, TIMEOUT};
use anyhow::{Result, ensure};
use rustix::process::Signal;
use sluice_kit::wait::until;
use sluice_tests::debian::Series;
use sluice_tests::host::Host;
use sluice_tests::paths::Binaries;
use sluice_tests::vm::Machine;

/// Each program uses the first device that it may open.
// Promise: G31
#[test]
#[ignore = "for the full tier"]
fn guest_with_two_devices_uses_the_first_that_it_may_open() -> Result<()> {
    let series = Series::V6_12;
    let binaries = Binaries::locate()?;
    let second = Host::start_with(&binaries, series, &[], &[])?;
    let machine = Machine { cpus: 2, another: Some(second.socket().to_path_buf()), ..Machine::new("two") };
    let stage = Stage::boot_machine(machine, series)?;
    let workers = || sluice_tests::direct::descendants(second.process(), "sluice-worker");
    let nodes = stage.guest.run("ls /dev/dri/renderD*")?.stdout;
    ensure!(nodes == "/dev/dri/renderD128\n/dev/dri/renderD129\n", "{nodes}");
    let mut seen = Vec::new();
    for node in ["renderD128", "renderD129"] {
        let closed = format!("chmod 000 /dev/dri/render*; chmod 660 /dev/dri/{node}");
        stage.guest.run_as_root(&closed)?.expect_success()?;
        let holder = stage.spawn(&["hold", "1000"])?;
        holder.wait_for_output("holding", TIMEOUT)?;
        // Workers of earlier programs may still be on their way out.
        let both = || anyhow::Ok((stage.processes("sluice-worker")?.len(), workers()?.len()));
        seen.push(until(both, |both| !matches!(both, Ok((one, other)) if one + other > 1))?);
        stage.works()?;
        holder.signal(Signal::KILL)?;
        holder.wait()?;
    }
    // The guest's kernel decides which of the two has which number.
    seen.sort_unstable();
    ensure!(seen == [(0, 1), (1, 0)], "each device has had one of them: {seen:?}");
    stage.guest.run_as_root("chmod 660 /dev/dri/render*")?.expect_success()?;
    stage.works()?;
    stage.workers(0)?;
    stage.power_off()?;
    second.stop().map(drop)
}
