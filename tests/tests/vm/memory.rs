//! Memory of the guest: huge pages, a balloon, memory that is plugged in.

use std::time::{Duration, Instant};

use super::stage::{Stage, TIMEOUT, passed};
use anyhow::{Context as _, Result, ensure};
use rustix::process::Signal;
use serde_json::json;
use sluice_tests::debian::{Kernel, Series};
use sluice_tests::huge_pages::HugePages;
use sluice_tests::vm::{Completed, Machine};
use sluice_tests::way::{Mode, Way};

// Promise: V15
#[test]
fn guest_on_huge_pages_computes() -> Result<()> {
    let memory_mib = 512;
    let _pages = match HugePages::take(memory_mib.into())? {
        Ok(pages) => pages,
        Err(reason) => {
            sluice_skip::skip(&reason);
            return Ok(());
        }
    };
    let machine = Machine { memory_mib, huge_pages: true, ..Machine::new("huge-pages") };
    let stage = Stage::boot_machine(machine, Series::V6_12)?;
    for name in ["vector_add", "matmul_tiled", "reduction", "histogram", "errors"] {
        stage.part(name, |stage| stage.same_as_natively(name, &[]))?;
    }
    stage.part("pinned memory is copied, not reached", |stage| {
        stage.same_as_natively("streams", &[])?;
        let Completed { stdout, stderr, .. } = stage.run(&["zero_copy"])?;
        ensure!(
            stdout.contains("zero-copy is masked: yes") && stdout.ends_with("PASS\n"),
            "{stdout}\n{stderr}"
        );
        Ok(())
    })?;
    stage.workers(0)?;
    stage.power_off()
}

/// Memory that a guest gives back is never shared memory, and returned memory works like new.
// Promise: V18
#[test]
#[ignore = "for the full tier"]
fn guest_computes_while_its_balloon_inflates_and_deflates() -> Result<()> {
    const MEMORY: u64 = 1024;
    let kernel = Kernel::fetch_with(Series::V6_12, &["virtio_balloon"])?;
    let machine = Machine { cpus: 2, balloon: true, ..Machine::new("balloon") };
    let way = Way::stock(Mode::Legacy);
    let stage = Stage::boot_kernel(&way, machine, kernel, (&[], &[]), |_| Ok(()))?;
    let mut monitor = stage.guest.monitor()?;
    let mut resize = |mib: u64| -> Result<()> {
        monitor.ask("balloon", &json!({ "value": mib << 20 }))?;
        let deadline = Instant::now() + TIMEOUT;
        loop {
            let actual = monitor.ask("query-balloon", &json!({}))?["actual"].as_u64();
            if actual == Some(mib << 20) {
                return Ok(());
            }
            ensure!(
                Instant::now() < deadline,
                "the guest has {actual:?} bytes, and {mib} MiB were requested"
            );
            std::thread::sleep(Duration::from_millis(50));
        }
    };
    let neighbour = stage.spawn(&["neighbour", "forever"])?;
    neighbour.wait_for_output("computing", TIMEOUT)?;
    for (round, mib) in [MEMORY / 2, MEMORY, MEMORY / 2, MEMORY].into_iter().enumerate() {
        stage.part(&format!("{mib} MiB, round {round}"), |stage| {
            resize(mib)?;
            stage.same_as_natively("vector_add", &["20000", "7"])?;
            stage.same_as_natively("reduction", &[])
        })?;
    }
    neighbour.signal(Signal::USR1)?;
    passed(&neighbour.wait()?).context("the neighbour, which has kept its pages")?;
    stage.workers(0)?;
    stage.power_off()
}

/// Memory that a guest gets while programs run works like all other memory, and their shared memory does not move.
// Promise: V18
#[test]
#[ignore = "for the full tier"]
fn guest_computes_in_hot_plugged_memory() -> Result<()> {
    const MEMORY: u32 = 1024;
    let machine = Machine { cpus: 2, memory_mib: MEMORY, growing: true, ..Machine::new("growing") };
    let stage = Stage::boot_machine(machine, Series::V6_12)?;
    let neighbour = stage.spawn(&["neighbour", "forever"])?;
    neighbour.wait_for_output("computing", TIMEOUT)?;
    let total = |stage: &Stage| -> Result<u64> {
        let text = stage.guest.run("grep MemTotal /proc/meminfo")?.expect_success()?.stdout;
        let kibibytes = text.split_whitespace().nth(1).context("a number")?.parse::<u64>()?;
        Ok(kibibytes >> 10)
    };
    let before = total(&stage)?;
    let mut monitor = stage.guest.monitor()?;
    let more = json!({
        "qom-type": "memory-backend-memfd", "id": "more", "size": u64::from(MEMORY) << 20, "share": true,
    });
    monitor.ask("object-add", &more)?;
    monitor.ask("device_add", &json!({ "driver": "pc-dimm", "id": "dimm", "memdev": "more" }))?;
    // A guest that does not online memory by itself does so on command.
    let online = "for block in /sys/devices/system/memory/memory*/state; do
        grep -q online $block || echo online > $block; done; grep -l online /sys/devices/system/memory/memory*/state | wc -l";
    let deadline = Instant::now() + TIMEOUT;
    while total(&stage)? < before + u64::from(MEMORY) / 2 {
        ensure!(Instant::now() < deadline, "the guest has {} MiB after {before}", total(&stage)?);
        stage.guest.run_as_root(online)?;
        std::thread::sleep(Duration::from_millis(100));
    }
    println!("{before} MiB, then {} MiB", total(&stage)?);
    // Files are in memory here: the file uses up the memory of before, so the next allocations are in the new memory.
    let fill = format!(
        "mkdir /root/full; mount -t tmpfs -o size=90% none /root/full; dd if=/dev/zero of=/root/full/file bs=1048576 count={}",
        before * 3 / 4
    );
    stage.guest.run_as_root(&fill)?.expect_success()?;
    stage.same_as_natively("memory", &[])?;
    stage.same_as_natively("vector_add", &["20000", "7"])?;
    neighbour.signal(Signal::USR1)?;
    passed(&neighbour.wait()?).context("the neighbour, which has kept its pages")?;
    stage.workers(0)?;
    stage.power_off()
}
