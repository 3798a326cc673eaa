//! VMs that share the time of one unit: real `sluiced`, arbiter, workers and drivers, and programs that always want more. The
//! software GPU computes with one processor thread of each process, so that a kernel is as long alone as it can be.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use rustix::process::Signal;
use sluice_tests::paths::Binaries;
use sluice_tests::process::{Background, signal};
use sluice_tests::programs;
use sluice_tests::tenants::{Options, Tenants};

/// Long enough for hundreds of turns on a machine that does other things as well.
const WHILE: Duration = Duration::from_secs(6);

/// The tests measure the machine, so they take turns.
fn turn() -> std::sync::MutexGuard<'static, ()> {
    static TURN: std::sync::Mutex<()> = std::sync::Mutex::new(());
    TURN.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

fn start(terms: &[&str]) -> Result<Tenants> {
    let binaries = Binaries::locate()?;
    let mut options = Options::with_limits(256, &vec![0; terms.len()]);
    for (vm, terms) in options.vms.iter_mut().zip(terms) {
        vm.push_str(terms);
    }
    options.environment.push(("SLUICE_SOFTGPU_THREADS".to_owned(), "1".to_owned()));
    Tenants::start(&binaries, &options)
}

/// A program that always wants more.
fn busy(tenants: &Tenants, vm: u32, name: &str) -> Result<Background> {
    let program = programs::hostile("busy")?;
    let mut running = tenants.spawn(vm, name, &program, &["200000", "32"])?;
    running.wait_for_line("done", Duration::from_secs(60))?;
    Ok(running)
}

/// Kernels it has done.
fn done(program: &Background) -> Result<u64> {
    let text = program.printed();
    let last = text.lines().rev().find_map(|line| line.strip_prefix("done ")?.parse::<i64>().ok());
    // It counts from below, for it does not wait for the first ones.
    Ok(last.with_context(|| format!("nothing done:\n{text}"))?.max(0).unsigned_abs())
}

/// Kernels that programs do in some time.
fn progress(programs: &[&Background]) -> Result<Vec<u64>> {
    let read = || programs.iter().map(|program| done(program)).collect::<Result<Vec<u64>>>();
    let before = read()?;
    std::thread::sleep(WHILE);
    Ok(read()?.into_iter().zip(before).map(|(after, before)| after - before).collect())
}

/// Seconds of the unit's time that a VM is charged.
fn charged(tenants: &Tenants, vm: u32) -> Result<f64> {
    let status = tenants.status()?;
    let vms = status["vms"].as_array().context("VMs")?;
    let vm = vms.iter().find(|entry| entry["id"] == vm).context("the VM")?;
    let used = vm["memory"][0]["has"]["time"]["used"].as_u64().with_context(|| format!("no time in {vm}"))?;
    Ok(Duration::from_nanos(used).as_secs_f64())
}

// Promise: T21
#[test]
fn shares_follow_weights_and_nothing_is_lost() -> Result<()> {
    let _turn = turn();
    let tenants = start(&[",weight=100", ",weight=200"])?;
    let one = busy(&tenants, 1, "one")?;
    let alone = progress(&[&one])?[0];
    let two = busy(&tenants, 2, "two")?;
    let before = [charged(&tenants, 1)?, charged(&tenants, 2)?];
    let shared = progress(&[&one, &two])?;
    let used = [charged(&tenants, 1)? - before[0], charged(&tenants, 2)? - before[1]];
    println!("{alone} kernels alone, {shared:?} at weights 1 and 2; charged {used:.2?} s");
    let ratio = shared[1] as f64 / shared[0] as f64;
    ensure!((1.3..3.0).contains(&ratio), "{ratio} for 2");
    let ratio = used[1] / used[0];
    ensure!((1.5..2.6).contains(&ratio), "charged {ratio} for 2");
    ensure!((shared[0] + shared[1]) * 10 > alone * 7, "{shared:?} together, {alone} alone");
    Ok(())
}

// Promise: T23
#[test]
fn eight_programs_of_a_vm_have_the_share_of_one() -> Result<()> {
    let _turn = turn();
    let tenants = start(&["", ""])?;
    let one = busy(&tenants, 1, "one")?;
    let eight: Vec<Background> =
        (0..8).map(|place| busy(&tenants, 2, &format!("many-{place}"))).collect::<Result<_>>()?;
    let mut all = vec![&one];
    all.extend(&eight);
    let before = [charged(&tenants, 1)?, charged(&tenants, 2)?];
    let done = progress(&all)?;
    let used = [charged(&tenants, 1)? - before[0], charged(&tenants, 2)? - before[1]];
    let (one, eight) = (done[0], done[1..].iter().sum::<u64>());
    println!("{one} kernels of one program, {eight} of eight: {:?}; charged {used:.2?} s", &done[1..]);
    let ratio = used[1] / used[0];
    ensure!((0.6..1.7).contains(&ratio), "charged {ratio}");
    // Without shares per VM it is eight; eight processes of the software GPU also use more than one processor at a time.
    ensure!(eight < 7 * one, "{eight} for {one}");
    Ok(())
}

// Promise: T27
#[test]
fn a_worker_that_is_stopped_blocks_nobody() -> Result<()> {
    let _turn = turn();
    let tenants = start(&["", ""])?;
    let (one, two) = (busy(&tenants, 1, "one")?, busy(&tenants, 2, "two")?);
    let shared = progress(&[&one, &two])?;
    let worker = *tenants.workers(1)?.first().context("a worker")?;
    signal(worker, Signal::STOP)?;
    let stopped = progress(&[&one, &two])?;
    signal(worker, Signal::CONT)?;
    std::thread::sleep(Duration::from_secs(1));
    let resumed = progress(&[&one, &two])?;
    println!("{shared:?} together, {stopped:?} while the first is stopped, {resumed:?} afterwards");
    ensure!(stopped[1] * 10 > shared[1] * 12, "{stopped:?} after {shared:?}");
    ensure!(resumed[0] * 4 > shared[0], "{resumed:?} after {shared:?}");
    Ok(())
}

// Promise: T25
#[test]
fn a_cap_holds_for_who_is_alone() -> Result<()> {
    let _turn = turn();
    let tenants = start(&[",cap=250", ""])?;
    let free = busy(&tenants, 2, "free")?;
    let whole = progress(&[&free])?[0];
    drop(free);
    let capped = busy(&tenants, 1, "capped")?;
    let before = charged(&tenants, 1)?;
    let part = progress(&[&capped])?[0];
    let used = (charged(&tenants, 1)? - before) / WHILE.as_secs_f64();
    println!("{part} kernels under a cap of a quarter, {whole} without; charged {used:.3}");
    ensure!(used < 0.27, "charged {used}");
    ensure!(part * 10 < whole * 4 && part * 10 > whole, "{part} of {whole}");
    Ok(())
}
