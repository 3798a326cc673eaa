//! Guests that reboot, start another kernel, or sleep.

use std::fs;
use std::path::Path;

use super::stage::{Stage, TIMEOUT, passed};
use anyhow::{Result, ensure};
use sluice_tests::debian::{Kernel, Series};
use sluice_tests::image::Image;
use sluice_tests::packages;
use sluice_tests::paths::{self, Binaries};
use sluice_tests::programs::{self, Program};
use sluice_tests::vm::Machine;

// Promise: V13
#[test]
fn guest_that_reboots_starts_clean() -> Result<()> {
    let stage = Stage::boot("reboot", Series::V6_12, 2)?;
    stage.works()?;
    stage.workers(0)?;
    let before = stage.holdings()?;
    for how in ["reboot", "reset"] {
        stage.part(how, |stage| {
            let device = stage.device()?;
            let lost = [stage.spawn(&["hold", "1000"])?, stage.spawn(&["neighbour", "forever"])?];
            lost[0].wait_for_output("holding", TIMEOUT)?;
            lost[1].wait_for_output("computing", TIMEOUT)?;
            let workers = stage.workers(2)?;
            if how == "reboot" {
                stage.guest.reboot()?
            } else {
                stage.guest.reset()?
            }
            ensure!(stage.guest.hello()?.render_node, "no render node after {how}");
            let alive =
                workers.iter().filter(|worker| Path::new(&format!("/proc/{worker}")).exists()).count();
            println!("  {alive} of the workers of before live when the guest is back");
            stage.holds_no_more_than(&before)?;
            ensure!(stage.device()? == device, "the device is another process");
            stage.works()
        })?;
    }
    stage.power_off()
}

/// Another kernel takes over; the device gets no message except that of its driver.
// Promise: V13
#[test]
#[ignore = "for the full tier"]
fn guest_that_starts_another_kernel_starts_clean() -> Result<()> {
    let binaries = Binaries::locate()?;
    let next = Kernel::fetch(Series::V6_12)?;
    let programs: Vec<Program> =
        programs::compile_all()?.into_iter().filter(|program| program.name == "vector_add").collect();
    let initramfs = tempfile::NamedTempFile::new()?;
    Image::with_sluice(&next, &binaries, &programs)?.write(initramfs.path())?;
    let (vmlinuz, initrd) = (fs::read(&next.image)?, fs::read(initramfs.path())?);
    let machine = Machine { cpus: 2, memory_mib: 2048, ..Machine::new("another-kernel") };
    // The older kernel first: it works on fewer machines.
    let stage = Stage::boot_with(machine, Series::V6_1, (&[], &[]), |image| {
        image.file("boot/vmlinuz", 0o644, vmlinuz);
        image.file("boot/initrd", 0o644, initrd);
        Ok(())
    })?;
    stage.works()?;
    stage.workers(0)?;
    let before = stage.holdings()?;
    let lost = [stage.spawn(&["hold", "1000"])?, stage.spawn(&["neighbour", "forever"])?];
    lost[0].wait_for_output("holding", TIMEOUT)?;
    lost[1].wait_for_output("computing", TIMEOUT)?;
    stage.workers(2)?;
    stage.part("another kernel", |stage| {
        let device = stage.device()?;
        stage.guest.into_another_kernel()?;
        let hello = stage.guest.hello()?;
        ensure!(hello.kernel == next.version && hello.render_node, "{hello:?}");
        stage.holds_no_more_than(&before)?;
        ensure!(stage.device()? == device, "the device is another process");
        stage.works()
    })?;
    stage.power_off()
}

/// The driver of stock kernels does not survive a suspension; the package's hook for systemd handles that.
// Promise: V19
#[test]
#[ignore = "for the full tier"]
fn guest_that_was_suspended_computes_again() -> Result<()> {
    for series in [Series::V6_1, Series::V6_12] {
        let tool = Binaries::locate()?.get("sluice-guest")?;
        let hook = paths::workspace().join(packages::SLEEP_HOOK);
        let machine = Machine { cpus: 1, memory_mib: 2048, ..Machine::new("suspend") };
        let stage = Stage::boot_with(machine, series, (&[], &[]), |image| {
            image.program(&tool, "usr/bin/sluice-guest")?;
            image.file("usr/lib/systemd/system-sleep/sluice-guest", 0o755, fs::read(hook)?);
            Ok(())
        })?;
        stage.works()?;
        let device = stage.device()?;
        let lost = stage.spawn(&["neighbour", "forever"])?;
        lost.wait_for_output("computing", TIMEOUT)?;
        // It sleeps until its kernel ends, which never happens.
        let waiting = stage.spawn(&["bereft", "killed"])?;
        waiting.wait_for_output("waiting", TIMEOUT)?;
        // As systemd-sleep does it. In this test mode the kernel stops all devices and resumes them after five seconds, without a
        // key press.
        let hook = |moment: &str| {
            let script =
                format!("PATH=$PATH:/usr/bin /usr/lib/systemd/system-sleep/sluice-guest {moment} suspend");
            stage.guest.run_as_root(&script)?.expect_success().map(drop)
        };
        hook("pre")?;
        stage.workers(0)?;
        let suspend = "echo devices > /sys/power/pm_test && echo mem > /sys/power/state";
        stage.guest.run_as_root(suspend)?.expect_success()?;
        hook("post")?;
        stage.guest.run_as_root("chmod 666 /dev/dri/renderD*")?.expect_success()?;
        let told = lost.wait()?;
        ensure!(told.code == Some(1) && told.stdout.contains("cudaErrorDevicesUnavailable"), "{told:?}");
        passed(&waiting.wait()?)?;
        stage.works()?;
        stage.workers(0)?;
        ensure!(stage.device()? == device, "the device is another process");
        stage.power_off()?;
    }
    Ok(())
}
