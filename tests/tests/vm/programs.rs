//! Programs of CUDA print the same in a VM as natively.

use super::stage::{Stage, TIMEOUT, newer, passed};
use anyhow::{Context as _, Result, ensure};
use sluice_tests::debian::{Kernel, Series};
use sluice_tests::vm::{GuestCommand, Machine};
use sluice_tests::way::{Mode, Way};

/// A program that takes half a minute, because it pins gigabytes, and tests nothing that differs between ways and kernels.
const LONG: &str = "lifetimes";

fn programs_print_the_same(way: &Way, series: Series, cpus: u32, all: bool) -> Result<()> {
    let name = format!("programs-{}-{series}", way.mode);
    // One of the programs pins 2.2 GiB in all, and memory that was pinned once stays shared.
    let machine = Machine { cpus, memory_mib: 4096, ..Machine::new(&name) };
    let stage = Stage::boot_way(way, machine, series, (&[], &[]), |_| Ok(()))?;
    ensure!(stage.guest.run("nproc")?.stdout.trim() == cpus.to_string());
    stage.part("the mode, and no other", |stage| check_mode(stage, way.mode))?;
    for program in stage.programs.iter().filter(|program| all || program.name != LONG) {
        stage.part(&program.name, |stage| stage.same_as_natively(&program.name, &[]))?;
    }
    stage.workers(0)?;
    way.ran(&stage.kernel)?;
    stage.power_off()
}

/// The library uses a forced mode if the device supports it, and otherwise reports that the device does not.
fn check_mode(stage: &Stage, mode: Mode) -> Result<()> {
    for wanted in Mode::ALL {
        let command = GuestCommand::program(&["vector_add"]).limit(TIMEOUT);
        let ended = stage.guest.start(&command.env("SLUICE_TRANSPORT", wanted.name()))?.wait()?;
        if mode.serves(wanted) {
            passed(&ended).with_context(|| format!("forced to {wanted}"))?;
        } else {
            let said = format!(
                "SLUICE_TRANSPORT={wanted} is not possible: the virtual machine's device has no more than {mode}"
            );
            // cudaErrorNoDevice.
            ensure!(
                ended.code == Some(1) && ended.stdout.contains(": 100 "),
                "forced to {wanted}: {ended:?}"
            );
            ensure!(ended.stderr.contains(&said), "forced to {wanted}: {ended:?}");
        }
    }
    Ok(())
}

// Promise: C1, C13
#[test]
fn programs_print_the_same_natively_and_on_kernel_6_1() -> Result<()> {
    programs_print_the_same(&Way::stock(Mode::Legacy), Series::V6_1, 1, false)
}

// Promise: C1, G10
#[test]
fn programs_print_the_same_natively_and_on_kernel_6_12_with_two_processors() -> Result<()> {
    programs_print_the_same(&Way::stock(Mode::Legacy), Series::V6_12, 2, true)
}

// Promise: C1, V16, V17
#[test]
fn programs_print_the_same_without_contexts() -> Result<()> {
    programs_print_the_same(&Way::stock(Mode::Flat), Series::V6_12, 2, false)
}

/// Programs with the smallest fixed arena, and the error beyond it.
fn programs_print_the_same_with_a_fixed_arena(mode: Mode) -> Result<()> {
    let machine = Machine { cpus: 2, memory_mib: 1024, ..Machine::new(&format!("fixed-arena-{mode}")) };
    let options = ["--arena", "fixed", "--arena-size", "16MiB"];
    let stage = Stage::boot_way(&Way::stock(mode), machine, Series::V6_12, (&options, &[]), |_| Ok(()))?;
    for name in ["vector_add", "staging", "streams", "threads", "zero_copy", "managed"] {
        stage.part(name, |stage| stage.same_as_natively(name, &[]))?;
    }
    stage.part("beyond the arena", |stage| passed(&stage.run(&["staging", "16"])?))?;
    stage.workers(0)?;
    stage.power_off()
}

// Promise: C53
#[test]
fn programs_print_the_same_natively_and_with_a_fixed_arena() -> Result<()> {
    programs_print_the_same_with_a_fixed_arena(Mode::Legacy)
}

// Promise: C53
#[test]
fn programs_print_the_same_without_contexts_and_with_a_fixed_arena() -> Result<()> {
    programs_print_the_same_with_a_fixed_arena(Mode::Flat)
}

fn programs_print_the_same_on_newer(mode: Mode, series: Series) -> Result<()> {
    match newer(mode, series)? {
        Some(way) => programs_print_the_same(&way, series, 2, true),
        None => Ok(()),
    }
}

// Promise: V17
#[test]
#[ignore = "for the full tier"]
fn programs_print_the_same_with_blobs_and_contexts_on_kernel_6_1() -> Result<()> {
    programs_print_the_same_on_newer(Mode::Full, Series::V6_1)
}

// Promise: V17
#[test]
#[ignore = "for the full tier"]
fn programs_print_the_same_with_blobs_and_contexts_on_kernel_6_12() -> Result<()> {
    programs_print_the_same_on_newer(Mode::Full, Series::V6_12)
}

// Promise: V17
#[test]
#[ignore = "for the full tier"]
fn programs_print_the_same_on_the_newer_qemu_in_legacy_and_flat_mode() -> Result<()> {
    programs_print_the_same_on_newer(Mode::Legacy, Series::V6_12)?;
    programs_print_the_same_on_newer(Mode::Flat, Series::V6_1)
}

/// On a kernel that is not booted in every run of the tests.
fn programs_print_the_same_on(series: Series) -> Result<()> {
    let way = Way::stock(Mode::Legacy);
    if let Err(error) = Kernel::fetch(series) {
        sluice_skip::skip(&format!("{error:#}"));
        return way.not_run(series, "no such kernel could be had");
    }
    programs_print_the_same(&way, series, 2, false)
}

// Promise: G30
#[test]
#[ignore = "for the full tier"]
fn programs_print_the_same_on_the_kernel_of_debian_11() -> Result<()> {
    programs_print_the_same_on(Series::V5_10)
}

// Promise: G30
#[test]
#[ignore = "for the full tier"]
fn programs_print_the_same_on_the_kernel_of_ubuntu_22_04() -> Result<()> {
    programs_print_the_same_on(Series::V5_15)
}

// Promise: G30
#[test]
#[ignore = "for the full tier"]
fn programs_print_the_same_on_the_kernel_of_ubuntu_24_04() -> Result<()> {
    programs_print_the_same_on(Series::V6_8)
}

// Promise: G30
#[test]
#[ignore = "for the full tier"]
fn programs_print_the_same_on_the_newest_kernel() -> Result<()> {
    programs_print_the_same_on(Series::V7)
}

// Promise: V16, V17
#[test]
#[ignore = "for the full tier"]
fn programs_print_the_same_without_contexts_on_kernel_6_1() -> Result<()> {
    programs_print_the_same(&Way::stock(Mode::Flat), Series::V6_1, 1, true)
}
