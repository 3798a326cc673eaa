//! VMs that share the time of one unit: real `sluiced`, arbiter, workers and drivers, and programs that always want more. The
//! software GPU computes with one processor thread of each process, so that a kernel is as long alone as it can be.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use rustix::process::Signal;
use sluice_tests::direct::PATIENCE;
use sluice_tests::paths::Binaries;
use sluice_tests::process::{Background, signal};
use sluice_tests::programs;
use sluice_tests::tenants::{Options, Tenants};

/// Long enough for hundreds of turns on a machine that does other things as well.
const WHILE: Duration = Duration::from_secs(2);

/// Machines that do other things as well disturb what is measured, so the median of so many rounds is judged, whose parts take
/// turns within each round.
const ROUNDS: usize = 5;

/// A figure of each round, and the range in which the median has to be.
type Figure = (&'static str, f64, std::ops::Range<f64>);

/// Measures in rounds, prints each figure and its median, and judges the medians.
fn measure<const COUNT: usize>(mut round: impl FnMut() -> Result<[Figure; COUNT]>) -> Result<()> {
    let rounds = (0..ROUNDS).map(|_| round()).collect::<Result<Vec<_>>>()?;
    let mut outside = Vec::new();
    for (place, (name, _, range)) in rounds.first().into_iter().flatten().enumerate() {
        let mut values: Vec<f64> = rounds.iter().map(|round| round[place].1).collect();
        values.sort_unstable_by(f64::total_cmp);
        let median = values[ROUNDS / 2];
        println!("{name}: median {median:.3} of {values:.3?}, promised {range:?}");
        if !range.contains(&median) {
            outside.push(format!("{name}: {median:.3} is not in {range:?}; {values:.3?}"));
        }
    }
    ensure!(outside.is_empty(), "{}", outside.join("\n"));
    Ok(())
}

/// One figure by another.
#[expect(clippy::cast_precision_loss, reason = "counts of kernels are small")]
fn by(a: u64, b: u64) -> f64 {
    a as f64 / b.max(1) as f64
}

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
    let vm = tenants.vm(vm)?;
    vm["units"][0]["gpu_seconds"].as_f64().with_context(|| format!("no GPU time in {vm}"))
}

/// What VMs 1 and 2 were charged, in seconds, while programs made progress; and how much of the time that is.
fn charged_while(tenants: &Tenants, programs: &[&Background]) -> Result<(Vec<u64>, [f64; 2], f64)> {
    let before = [charged(tenants, 1)?, charged(tenants, 2)?];
    let begun = Instant::now();
    let done = progress(programs)?;
    let used = [charged(tenants, 1)? - before[0], charged(tenants, 2)? - before[1]];
    Ok((done, used, (used[0] + used[1]) / begun.elapsed().as_secs_f64()))
}

// Promise: T21, T35
#[test]
fn shares_follow_weights_and_nothing_is_lost() -> Result<()> {
    let _turn = turn();
    let tenants = start(&[",weight=100", ",weight=300"])?;
    let one = busy(&tenants, 1, "one")?;
    let mut two = None;
    measure(|| {
        two = None;
        let (done, used, whole) = charged_while(&tenants, &[&one])?;
        println!("{} kernels alone, charged {:.1} % of the time", done[0], whole * 100.0);
        let (alone, lone) = (done[0], whole);
        ensure!(used[1] < 0.05, "a VM that does nothing is charged {used:?}");
        let two = two.insert(busy(&tenants, 2, "two")?);
        let (shared, used, whole) = charged_while(&tenants, &[&one, two])?;
        println!("{shared:?} at weights 1 and 3; charged {used:.2?} s, {:.1} % of the time", whole * 100.0);
        // It always wants more: what it is not charged is what nobody used. Sampling makes it uncertain at either end.
        Ok([
            ("charged alone, of the time", lone, 0.6..1.2),
            ("charged together, of the time", whole, 0.7..1.2),
            ("charge of weight 3 by weight 1", used[1] / used[0], 2.0..4.5),
            ("kernels of weight 3 by weight 1", by(shared[1], shared[0]), 1.0..9.0),
            ("kernels together by alone", by(shared[0] + shared[1], alone), 0.5..2.0),
        ])
    })?;
    // What their workers say has been compared with what the driver saw by now.
    std::thread::sleep(Duration::from_secs(6));
    let shared = progress(&[&one, two.as_ref().context("the other one")?])?;
    ensure!(shared.iter().all(|done| *done > 0), "who is honest goes on: {shared:?}");
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
    measure(|| {
        let (done, used, _) = charged_while(&tenants, &all)?;
        let (one, eight) = (done[0], done[1..].iter().sum::<u64>());
        println!("{one} kernels of one program, {eight} of eight: {:?}; charged {used:.2?} s", &done[1..]);
        // Without shares per VM both are eight. Kernels of several programs overlap in one turn, which the charge does not count twice.
        Ok([
            ("charge of eight programs by one's", used[1] / used[0], 0.5..2.0),
            ("kernels of eight programs by one's", by(eight, one), 0.0..7.0),
        ])
    })
}

// Promise: T24, T27
#[test]
fn a_worker_that_is_stopped_blocks_nobody() -> Result<()> {
    let _turn = turn();
    let tenants = start(&["", ""])?;
    let (one, two) = (busy(&tenants, 1, "one")?, busy(&tenants, 2, "two")?);
    let worker = *tenants.workers(1)?.first().context("a worker")?;
    measure(|| {
        // In each round but the first, the first worker has just been stopped: it has no claim to what the other one had meanwhile.
        let (shared, used, _) = charged_while(&tenants, &[&one, &two])?;
        signal(worker, Signal::STOP)?;
        let stopped = progress(&[&one, &two])?;
        signal(worker, Signal::CONT)?;
        let before = done(&one)?;
        println!("{shared:?} together, charged {used:.2?} s; {stopped:?} while the first is stopped");
        wait_until("the first goes on", || Ok(done(&one)? > before + 20))?;
        ensure!(stopped[1] * 10 > shared[1], "the other one is blocked");
        Ok([
            (
                "kernels beside one that is stopped, by those beside one that works",
                by(stopped[1], shared[1]),
                0.8..9.0,
            ),
            ("charge of who was stopped by the other's", used[0] / used[1], 0.4..2.5),
        ])
    })
}

// Promise: T25
#[test]
fn a_cap_holds_for_who_is_alone() -> Result<()> {
    let _turn = turn();
    let tenants = start(&[",cap=250", ""])?;
    measure(|| {
        let free = busy(&tenants, 2, "free")?;
        let whole = progress(&[&free])?[0];
        drop(free);
        let capped = busy(&tenants, 1, "capped")?;
        let (part, _, used) = charged_while(&tenants, &[&capped])?;
        println!("{} kernels under a cap of a quarter, {whole} without; charged {used:.3}", part[0]);
        Ok([
            ("charged under a cap of a quarter, of the time", used, 0.0..0.35),
            ("kernels under it, by those without", by(part[0], whole), 0.0..0.5),
        ])
    })
}

// Promise: T24
#[test]
fn who_was_idle_has_no_more_than_its_share() -> Result<()> {
    let _turn = turn();
    let tenants = start(&["", ""])?;
    let one = busy(&tenants, 1, "one")?;
    measure(|| {
        // What it would have had of this is not the other one's to claim later.
        std::thread::sleep(WHILE);
        let two = busy(&tenants, 2, "two")?;
        let (done, used, _) = charged_while(&tenants, &[&one, &two])?;
        println!("{done:?} kernels, charged {used:.2?} s");
        ensure!(done[0] > 0, "the first one has nothing for having used more");
        Ok([("charge of who was idle by the other's", used[1] / used[0], 0.4..2.5)])
    })
}

// Promise: T31, T33
#[test]
fn a_stream_that_is_held_goes_on_beside_a_busy_neighbour() -> Result<()> {
    let _turn = turn();
    let tenants = start(&["", ""])?;
    let _busy = busy(&tenants, 1, "one")?;
    let programs = programs::compile_all()?;
    let held = programs.iter().find(|program| program.name == "held").context("the program")?;
    let finished = tenants.run(2, &held.path, &[])?;
    println!("held beside a busy neighbour: {:?}", finished.elapsed);
    ensure!(finished.status.success(), "{}\n{}", finished.stdout, finished.stderr);
    Ok(())
}

/// Waits for a state, for as long as a busy machine may take.
fn wait_until(what: &str, is: impl Fn() -> Result<bool>) -> Result<()> {
    let begun = Instant::now();
    while !is()? {
        ensure!(begun.elapsed() < PATIENCE, "{what}: not within {PATIENCE:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}
