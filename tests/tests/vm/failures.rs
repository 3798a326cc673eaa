//! Programs and workers that fail or are killed.

use std::time::Instant;

use super::stage::{Stage, TIMEOUT, newer, passed};
use anyhow::{Context as _, Result, ensure};
use rustix::process::Signal;
use sluice_tests::debian::Series;
use sluice_tests::process::signal;
use sluice_tests::vm::{GuestCommand, Machine};
use sluice_tests::way::{Mode, Way};

// Promise: C4, F1, F2, F3, G3
#[test]
fn failures_in_a_vm_harm_no_other_process_and_leave_nothing_behind() -> Result<()> {
    failures_harm_no_other_process(&Way::stock(Mode::Legacy))
}

// Promise: V16, V17
#[test]
#[ignore = "for the full tier"]
fn failures_without_contexts_harm_no_other_process() -> Result<()> {
    failures_harm_no_other_process(&Way::stock(Mode::Flat))
}

// Promise: V17
#[test]
#[ignore = "for the full tier"]
fn failures_with_blobs_and_contexts_harm_no_other_process() -> Result<()> {
    newer(Mode::Full, Series::V6_12)?.map_or(Ok(()), |way| failures_harm_no_other_process(&way))
}

fn failures_harm_no_other_process(way: &Way) -> Result<()> {
    let name = format!("failures-{}", way.mode);
    let machine = Machine { cpus: 2, memory_mib: 4096, ..Machine::new(&name) };
    let stage = Stage::boot_way(way, machine, Series::V6_12, (&[], &[]), |_| Ok(()))?;
    stage.part("a user outside of group render has no device", stranger_has_no_device)?;
    stage.part("a fault stays in its process", fault_stays_in_its_process)?;
    stage.part("a killed program takes its worker with it", |stage| {
        killed_program_leaves_nothing(stage, &[])
    })?;
    stage
        .part("so does one with a sleeping child", |stage| killed_program_leaves_nothing(stage, &["fork"]))?;
    stage.part("a killed worker is an error at once", killed_worker_ends_its_program)?;
    stage.part("two processes at once", |stage| at_once(stage, 2))?;
    stage.part("eight processes at once", |stage| at_once(stage, 8))?;
    stage.part("twenty starts leave nothing behind", twenty_starts)?;
    stage.power_off()
}

fn stranger_has_no_device(stage: &Stage) -> Result<()> {
    let command = GuestCommand::program(&["vector_add"]).user("other").limit(TIMEOUT);
    let refused = stage.guest.start(&command)?.wait()?;
    // cudaErrorNoDevice, with the reason on standard error.
    ensure!(
        refused.code == Some(1)
            && refused.stdout.contains(": 100 cudaErrorNoDevice")
            && refused.stderr.contains("renderD128"),
        "{refused:?}"
    );
    stage.workers(0).map(drop)
}

fn fault_stays_in_its_process(stage: &Stage) -> Result<()> {
    let neighbour = stage.spawn(&["neighbour", "forever"])?;
    neighbour.wait_for_output("computing", TIMEOUT)?;
    // Refused calls, then a child with a wild write.
    stage.same_as_natively("errors", &[])?;
    let faulty = stage.run(&["errors", "fault"])?;
    ensure!(
        faulty.success() && faulty.stdout.contains("synchronise again                  700"),
        "{faulty:?}"
    );
    stage.works()?;
    neighbour.signal(Signal::USR1)?;
    passed(&neighbour.wait()?)
}

fn killed_program_leaves_nothing(stage: &Stage, arguments: &[&str]) -> Result<()> {
    let before = stage.holdings()?;
    let words: Vec<&str> = ["hold", "1000"].into_iter().chain(arguments.iter().copied()).collect();
    let doomed = stage.spawn(&words)?;
    doomed.wait_for_output("holding", TIMEOUT)?;
    stage.workers(1)?;
    let killed = Instant::now();
    doomed.signal(Signal::KILL)?;
    stage.holds_no_more_than(&before)?;
    println!("  worker gone {:?} after the program was killed (target 1 s)", killed.elapsed());
    if arguments.is_empty() {
        ensure!(doomed.wait()?.signal == Some(9));
    } else {
        // The child holds the pipes, so the agent sees their end only after the child's.
        let left = stage.guest.run("pidof hold")?.expect_success().context("the child sleeps on")?;
        stage.works()?;
        stage.guest.run(&format!("kill -9 {}", left.stdout.trim()))?.expect_success()?;
        doomed.wait()?;
    }
    stage.works()
}

fn killed_worker_ends_its_program(stage: &Stage) -> Result<()> {
    let bereft = stage.spawn(&["bereft", "killed"])?;
    bereft.wait_for_output("waiting", TIMEOUT)?;
    let killed = Instant::now();
    signal(stage.workers(1)?[0], Signal::KILL)?;
    let told = bereft.wait()?;
    println!("  told {:?} after the worker was killed", killed.elapsed());
    passed(&told)?;
    stage.works()
}

fn at_once(stage: &Stage, count: u32) -> Result<()> {
    let seeds: Vec<String> = (1..=count).map(|seed| seed.to_string()).collect();
    let running: Vec<_> =
        seeds.iter().map(|seed| stage.spawn(&["vector_add", "20000", seed])).collect::<Result<_>>()?;
    for (process, seed) in running.into_iter().zip(&seeds) {
        let remoted = process.wait()?;
        passed(&remoted).with_context(|| format!("process {seed}"))?;
        let native = stage.native("vector_add", &["20000", seed])?;
        ensure!(remoted.stdout == native.stdout, "{}\n{}", remoted.stdout, native.stdout);
    }
    Ok(())
}

fn twenty_starts(stage: &Stage) -> Result<()> {
    stage.workers(0)?;
    let before = stage.holdings()?;
    let script = "i=0; while [ $i -lt 20 ]; do vector_add 1000 $i > /tmp/out || exit 1; i=$((i + 1)); done";
    stage.guest.run(script)?.expect_success()?;
    stage.holds_no_more_than(&before)
}
