//! The work of calls, counted. The counts are the same on a busy machine, and their budgets stand in `sluice_kit::budgets`.

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::process::Stdio;

use anyhow::{Context as _, Result, ensure};
use sluice_kit::budgets::{self, GUEST_LAUNCH, WORKER_START_FAULTS};
use sluice_kit::counts::{self, Counts};
use sluice_protocol::limits;
use sluice_tests::direct::Backend;
use sluice_tests::paths::Binaries;

/// Launches that are counted: fewer than a stream has credits, so that none waits.
const LAUNCHES: u64 = limits::STREAM_CREDITS - 1;
/// Measurements, of which the one counts that rang for a sleeping worker the least often.
const ATTEMPTS: usize = 3;

// Promise: P49
#[test]
fn launch_costs_few_instructions_no_allocation_and_no_system_call_but_the_doorbells() -> Result<()> {
    if let Some(reason) = counts::missing() {
        sluice_skip::skip(&reason);
        return Ok(());
    }
    let binaries = Binaries::locate()?;
    let backend = Backend::start(&binaries, Some(&binaries.get("libsluice_null_driver.so")?))?;
    let (program, number) = (binaries.get("sluice-bench")?, LAUNCHES.to_string());
    let mut all = Vec::new();
    for _ in 0..ATTEMPTS {
        let to = tempfile::NamedTempFile::new()?;
        let mut counted = counts::callgrind(to.path(), Some("cuLaunchKernel"));
        counted.arg(&program).args(["launches", &number]).envs(backend.environment());
        let finished = sluice_tests::process::run(&mut counted, sluice_tests::direct::TIMEOUT)?;
        ensure!(finished.status.success(), "{}", finished.stderr);
        all.push(Counts::read(to.path())?);
    }
    let counts = all.iter().min_by_key(|counts| counts.instructions).context("an attempt")?;
    let each = counts.instructions / LAUNCHES;
    println!("{each} instructions for a launch");
    ensure!(
        budgets::is_within(each, GUEST_LAUNCH),
        "{each} instructions for a launch, budget {GUEST_LAUNCH}"
    );
    for counts in &all {
        let callers: Vec<&str> = counts.system_callers().filter(|name| !name.ends_with("::ring")).collect();
        ensure!(callers.is_empty(), "a launch makes system calls: {callers:?}");
        let allocator = counts.allocator_instructions();
        ensure!(allocator == 0, "launches spend {allocator} instructions on allocations");
    }
    Ok(())
}

// Promise: P51
#[test]
fn worker_touches_few_pages_until_its_first_launch_is_complete() -> Result<()> {
    let binaries = Binaries::locate()?;
    let backend = Backend::start(&binaries, Some(&binaries.get("libsluice_null_driver.so")?))?;
    let mut program = backend.command(&binaries.get("sluice-bench")?, &["launches", "1"]);
    let mut program = program.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
    let mut line = String::new();
    let output = program.stdout.take().context("standard output is piped")?;
    BufReader::new(output).read_line(&mut line)?;
    ensure!(line == "launched\n", "{line:?}");
    let (workers, _) = backend.wait_for_workers(1)?;
    let faults = faults(workers[0])?;
    drop(program.stdin.take());
    ensure!(program.wait()?.success(), "the program failed");
    println!("{faults} page faults");
    ensure!(
        (1..=WORKER_START_FAULTS).contains(&faults),
        "{faults} page faults, budget {WORKER_START_FAULTS}"
    );
    Ok(())
}

/// Page faults of a process that needed no input.
fn faults(process: u32) -> Result<u64> {
    /// Fields between the name and the number of these faults.
    const BEFORE: usize = 7;
    let stat = fs::read_to_string(format!("/proc/{process}/stat"))?;
    let (_, fields) = stat.rsplit_once(") ").context("a name in brackets")?;
    Ok(fields.split(' ').nth(BEFORE).context("the field")?.parse()?)
}
