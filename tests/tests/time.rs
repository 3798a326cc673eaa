//! VMs that share the time of one unit: real `sluiced`, arbiter, workers and drivers, and programs that always have more work. The
//! software GPU computes with one processor thread of each process, so that a kernel takes as long as possible.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use rustix::process::Signal;
use sluice_api::v1::TimeShareRequest;
use sluice_kit::figures::median;
use sluice_kit::wait::eventually;
use sluice_tests::paths::Binaries;
use sluice_tests::process::{Background, signal};
use sluice_tests::programs;
use sluice_tests::tenants::{Options, Tenants};

/// Duration of a measurement: hundreds of turns, on a machine with other work.
const WHILE: Duration = Duration::from_secs(2);

/// Number of rounds. Other work on the machine disturbs the measurements, so the median of the rounds is judged; the parts of a
/// figure take turns within each round.
const ROUNDS: usize = 5;

/// A figure of each round, and the range for its median.
type Figure = (&'static str, f64, std::ops::Range<f64>);

/// Measures in rounds, prints each figure and its median, and judges the medians.
fn measure<const COUNT: usize>(mut round: impl FnMut() -> Result<[Figure; COUNT]>) -> Result<()> {
    let rounds = (0..ROUNDS).map(|_| round()).collect::<Result<Vec<_>>>()?;
    let mut outside = Vec::new();
    for (place, (name, _, range)) in rounds.first().into_iter().flatten().enumerate() {
        let values: Vec<f64> = rounds.iter().map(|round| round[place].1).collect();
        let median = median(&values);
        println!("{name}: median {median:.3} of {values:.3?}, promised {range:?}");
        if !range.contains(&median) {
            outside.push(format!("{name}: {median:.3} is not in {range:?}; {values:.3?}"));
        }
    }
    ensure!(outside.is_empty(), "{}", outside.join("\n"));
    Ok(())
}

/// The ratio of two figures.
#[expect(clippy::cast_precision_loss, reason = "counts of kernels are small")]
fn by(a: u64, b: u64) -> f64 {
    a as f64 / b.max(1) as f64
}

/// The tests measure the machine, so they take turns.
fn turn() -> std::sync::MutexGuard<'static, ()> {
    static TURN: std::sync::Mutex<()> = std::sync::Mutex::new(());
    TURN.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// Two VMs with these shares of the time.
fn start(shares: [TimeShareRequest; 2]) -> Result<Tenants> {
    let binaries = Binaries::locate()?;
    let mut options = Options::with_limits(256, &[0; 2]);
    for ((_, vm), time) in options.vms.iter_mut().zip(shares) {
        vm.time = time;
    }
    options.environment.push(("SLUICE_SOFTGPU_THREADS".to_owned(), "1".to_owned()));
    Tenants::start(&binaries, &options)
}

/// Starts a program that always has more work.
fn busy(tenants: &Tenants, vm: u32, name: &str) -> Result<Background> {
    always_works(tenants, vm, name, &["200000", "32"])
}

/// Starts a program that always has more work; its kernels take 1.5 ms, however much of a processor the software GPU gets. Like
/// kernels of a real GPU, they compete with nothing else for the processors of the machine.
fn busy_by_the_clock(tenants: &Tenants, vm: u32, name: &str) -> Result<Background> {
    always_works(tenants, vm, name, &["1000", "32", "1500000"])
}

fn always_works(tenants: &Tenants, vm: u32, name: &str, arguments: &[&str]) -> Result<Background> {
    let program = programs::hostile("busy")?;
    let mut running = tenants.spawn(vm, name, &program, arguments)?;
    running.wait_for_line("done", Duration::from_secs(60))?;
    Ok(running)
}

/// Number of kernels that it has completed.
fn done(program: &Background) -> Result<u64> {
    let text = program.printed();
    let last = text.lines().rev().find_map(|line| line.strip_prefix("done ")?.parse::<i64>().ok());
    // It counts from a negative number, because it does not wait for the first ones.
    Ok(last.with_context(|| format!("nothing done:\n{text}"))?.max(0).unsigned_abs())
}

/// Numbers of kernels that programs complete in [`WHILE`].
fn progress(programs: &[&Background]) -> Result<Vec<u64>> {
    let read = || programs.iter().map(|program| done(program)).collect::<Result<Vec<u64>>>();
    let before = read()?;
    std::thread::sleep(WHILE);
    Ok(read()?.into_iter().zip(before).map(|(after, before)| after - before).collect())
}

/// Progress of programs, the charge of VMs 1 and 2 meanwhile, in seconds, and the charged part of the time.
fn charged_while(tenants: &Tenants, programs: &[&Background]) -> Result<(Vec<u64>, [f64; 2], f64)> {
    let before = [tenants.gpu_seconds(1)?, tenants.gpu_seconds(2)?];
    let begun = Instant::now();
    let done = progress(programs)?;
    let used = [tenants.gpu_seconds(1)? - before[0], tenants.gpu_seconds(2)? - before[1]];
    Ok((done, used, (used[0] + used[1]) / begun.elapsed().as_secs_f64()))
}

// Promise: T21, T35
#[test]
fn shares_of_busy_vms_follow_weights_and_keep_the_throughput() -> Result<()> {
    let _turn = turn();
    let tenants = start(
        [100, 300].map(|weight| TimeShareRequest { weight: Some(weight), ..TimeShareRequest::default() }),
    )?;
    let one = busy_by_the_clock(&tenants, 1, "one")?;
    let mut two = None;
    measure(|| {
        two = None;
        // Its last kernels are charged until its worker is gone.
        eventually("the worker is gone", || tenants.workers(2).is_ok_and(|workers| workers.is_empty()));
        let (done, used, whole) = charged_while(&tenants, &[&one])?;
        println!("{} kernels alone, charged {:.1} % of the time", done[0], whole * 100.0);
        let (alone, lone) = (done[0], whole);
        let idle = used[1];
        let two = two.insert(busy_by_the_clock(&tenants, 2, "two")?);
        let (shared, used, whole) = charged_while(&tenants, &[&one, two])?;
        println!("{shared:?} at weights 1 and 3; charged {used:.2?} s, {:.1} % of the time", whole * 100.0);
        // It always has more work, so uncharged time is idle time. Sampling makes both ends uncertain.
        Ok([
            ("charge of a VM that does nothing", idle, 0.0..0.05),
            ("charged alone, of the time", lone, 0.6..1.2),
            ("charged together, of the time", whole, 0.7..1.2),
            ("charge of weight 3 by weight 1", used[1] / used[0], 2.0..4.5),
            ("kernels of weight 3 by weight 1", by(shared[1], shared[0]), 1.0..9.0),
            ("kernels together by alone", by(shared[0] + shared[1], alone), 0.5..1.25),
        ])
    })?;
    // By now the reports of their workers have been compared with the driver's figures.
    std::thread::sleep(Duration::from_secs(6));
    for honest in [&one, two.as_ref().context("the other one")?] {
        let before = done(honest)?;
        eventually("an honest worker goes on", || done(honest).is_ok_and(|done| done > before));
    }
    Ok(())
}

// Promise: T23
#[test]
fn vm_with_eight_programs_gets_the_share_of_a_vm_with_one() -> Result<()> {
    let _turn = turn();
    let tenants = start([TimeShareRequest::default(); 2])?;
    let one = busy(&tenants, 1, "one")?;
    let eight: Vec<Background> =
        (0..8).map(|place| busy(&tenants, 2, &format!("many-{place}"))).collect::<Result<_>>()?;
    let mut all = vec![&one];
    all.extend(&eight);
    measure(|| {
        let (done, used, _) = charged_while(&tenants, &all)?;
        let (one, eight) = (done[0], done[1..].iter().sum::<u64>());
        println!("{one} kernels of one program, {eight} of eight: {:?}; charged {used:.2?} s", &done[1..]);
        // Without shares per VM both are eight. Kernels of several programs overlap in one turn, which is charged only once.
        Ok([
            ("charge of eight programs by one's", used[1] / used[0], 0.5..2.0),
            ("kernels of eight programs by one's", by(eight, one), 0.0..7.0),
        ])
    })
}

// Promise: T24, T27
#[test]
fn stopped_worker_blocks_no_neighbour() -> Result<()> {
    let _turn = turn();
    let tenants = start([TimeShareRequest::default(); 2])?;
    let (one, two) = (busy(&tenants, 1, "one")?, busy(&tenants, 2, "two")?);
    let worker = *tenants.workers(1)?.first().context("a worker")?;
    measure(|| {
        // In each round but the first, the first worker has just been stopped: it has no claim to the other's time meanwhile.
        let (shared, used, _) = charged_while(&tenants, &[&one, &two])?;
        signal(worker, Signal::STOP)?;
        let stopped = progress(&[&one, &two])?;
        signal(worker, Signal::CONT)?;
        let before = done(&one)?;
        println!("{shared:?} together, charged {used:.2?} s; {stopped:?} while the first is stopped");
        eventually("the first goes on", || done(&one).expect("its kernels") > before + 20);
        Ok([
            (
                "kernels beside one that is stopped, by those beside one that works",
                by(stopped[1], shared[1]),
                0.8..9.0,
            ),
            ("charge of the stopped one by the other's", used[0] / used[1], 0.4..2.5),
        ])
    })
}

// Promise: T25
#[test]
fn cap_holds_for_the_only_busy_vm() -> Result<()> {
    let _turn = turn();
    let capped = TimeShareRequest { cap_permille: Some(250), ..TimeShareRequest::default() };
    let tenants = start([capped, TimeShareRequest::default()])?;
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
fn vm_that_was_idle_gets_no_more_than_its_share() -> Result<()> {
    let _turn = turn();
    let tenants = start([TimeShareRequest::default(); 2])?;
    let one = busy(&tenants, 1, "one")?;
    measure(|| {
        // Its unused share of this time gives it no claim later.
        std::thread::sleep(WHILE);
        let two = busy(&tenants, 2, "two")?;
        let (done, used, _) = charged_while(&tenants, &[&one, &two])?;
        println!("{done:?} kernels, charged {used:.2?} s");
        Ok([
            ("charge of the idle one by the other's", used[1] / used[0], 0.4..2.5),
            (
                "kernels of the first, which used more before, by all",
                by(done[0], done[0] + done[1]),
                0.01..1.0,
            ),
        ])
    })
}

// Promise: T31, T33
#[test]
fn held_stream_finishes_beside_a_busy_neighbour() -> Result<()> {
    let _turn = turn();
    let tenants = start([TimeShareRequest::default(); 2])?;
    let _busy = busy(&tenants, 1, "one")?;
    let programs = programs::compile_all()?;
    let held = programs.iter().find(|program| program.name == "held").context("the program")?;
    let finished = tenants.run(2, &held.path, &[])?;
    println!("held beside a busy neighbour: {:?}", finished.elapsed);
    ensure!(finished.status.success(), "{}\n{}", finished.stdout, finished.stderr);
    Ok(())
}
