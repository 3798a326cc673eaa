//! Custody's rows: allocations on the software GPU, remoted and native in turns; fences on a daemon of their own.

use crate::{
    arbiter,
    measure::{Rounds, Samples, is_wanted, nanoseconds},
    session,
    turns::Client,
};
use anyhow::{Context as _, Result, anyhow, ensure};
use sluice_tests::{
    direct::TIMEOUT,
    paths::Binaries,
    performance::Measured,
    process::kill,
    programs,
    tenants::{Options, Tenants},
};
use std::{
    path::Path,
    process::Command,
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, Instant},
};

/// Number of rounds of row and yardstick.
const ROUNDS: usize = 9;
/// Number of fences; p99 is the slowest.
const FENCES: usize = 40;
/// Time for which a neighbour's calls are measured in each round.
const ROUND_MILLISECONDS: u64 = 400;
const MIB: usize = 1 << 20;

/// Every row whose name contains one of `filter`, or all.
pub(crate) fn measure_all(binaries: &Binaries, me: &Path, filter: &[String]) -> Result<Vec<Measured>> {
    let wanted = |name: &str| is_wanted(filter, name);
    let mut rows = Vec::new();
    if wanted("memory/alloc") || wanted("memory/free") {
        rows.extend(memory(binaries, me)?.into_iter().filter(|row| wanted(&row.name)));
    }
    if wanted("fence/idle") {
        rows.push(fence(binaries, "fence/idle", "hold", &["1000"])?);
    }
    if wanted("fence/hung-kernel") {
        rows.push(fence(binaries, "fence/hung-kernel", "hang", &[])?);
    }
    if wanted("neighbour/call-during-kills") {
        rows.push(neighbour(binaries, me)?);
    }
    if wanted("session/warm") {
        rows.push(warm_start(binaries, me)?);
    }
    if wanted("custody/ledger-decision") {
        rows.push(arbiter::decisions()?);
    }
    if wanted("custody/scrub-rate") {
        rows.push(arbiter::scrub_rate(binaries, me)?);
    }
    Ok(rows)
}

/// A call of a VM while another VM's programs are killed, one after the other, against the same call in peace.
fn neighbour(binaries: &Binaries, me: &Path) -> Result<Measured> {
    let tenants = Tenants::start(binaries, &Options::with_limits(512, &[128, 128]))?;
    let victim = programs::compile_all()?.into_iter().find(|program| program.name == "hold");
    let victim = victim.context("the program that holds memory")?.path;
    let mut client = Client::start(&mut tenants.command(2, me, &["turns"]))?;
    let request = format!("calls {ROUND_MILLISECONDS} 100");
    let mut rounds = Rounds::default();
    for _ in 0..ROUNDS {
        let over = AtomicBool::new(false);
        let during = std::thread::scope(|scope| {
            let killing = scope.spawn(|| -> Result<()> {
                while !over.load(Ordering::Relaxed) {
                    let mut program = tenants.spawn(1, "victim", &victim, &["1000"])?;
                    program.wait_for_line("holding", TIMEOUT)?;
                    kill(program.id());
                    program.wait(TIMEOUT)?.context("the victim ends")?;
                }
                Ok(())
            });
            let during = client.ask(&request);
            over.store(true, Ordering::Relaxed);
            killing.join().map_err(|_| anyhow!("the killing thread panicked"))??;
            during
        })?;
        // The victims' memory is scrubbed before the peaceful rounds begin.
        tenants.wait_for_charge(1, |charge| charge.lent + charge.dirty + charge.holders == 0)?;
        let [mut kills, mut peace] = <[Samples; 2]>::default();
        during.into_iter().for_each(|list| kills.extend(list));
        client.ask(&request)?.into_iter().for_each(|list| peace.extend(list));
        rounds.push(kills, peace);
    }
    rounds.row("neighbour/call-during-kills")
}

/// The time of `cuInit` in a new process of a VM that has a warm worker, against the start of a process that does nothing.
fn warm_start(binaries: &Binaries, me: &Path) -> Result<Measured> {
    let mut options = Options::with_limits(512, &[128]);
    options.arguments = vec!["--warm-workers".to_owned()];
    let tenants = Tenants::start(binaries, &options)?;
    let own = |samples: &mut Samples| {
        let begun = Instant::now();
        // The worker of the round before has ended by then, and the next one waits.
        while tenants.processes("sluice-worker")?.len() != 1 || !tenants.workers(1)?.is_empty() {
            ensure!(begun.elapsed() < TIMEOUT, "no worker waits");
            std::thread::sleep(Duration::from_millis(5));
        }
        // It starts its driver.
        std::thread::sleep(Duration::from_millis(50));
        let started = tenants.run(1, me, &["start"])?;
        ensure!(started.status.success(), "a new process could not start a session: {}", started.status);
        samples.push(started.stdout.trim().parse().context("nanoseconds")?);
        Ok(())
    };
    Rounds::take(ROUNDS, own, session::process_start)?.row("session/warm")
}

/// `cuMemAlloc` and `cuMemFree` by size.
fn memory(binaries: &Binaries, me: &Path) -> Result<Vec<Measured>> {
    let client = |native: bool| -> Result<Client> {
        let mut command = Command::new(binaries.get("sluice")?);
        command.arg("run").args(native.then_some("--native")).arg("--").arg(me).arg("turns");
        Client::start(&mut command)
    };
    let (mut remoted, mut native) = (client(false)?, client(true)?);
    let mut rows = Vec::new();
    let sizes =
        [("1KiB", 1 << 10), ("1MiB", MIB), ("2MiB", 2 * MIB), ("32MiB", 32 * MIB), ("512MiB", 512 * MIB)];
    for (name, size) in sizes {
        let times = ((64 << 20) / size).clamp(4, 400);
        let [mut allocate, mut free] = <[Rounds; 2]>::default();
        for round in 0..=ROUNDS {
            let request = format!("memory {size} {times}");
            let [own, yardstick] = [remoted.ask(&request)?, native.ask(&request)?];
            // Pages are touched for the first time in the first round.
            if round > 0 {
                for (rounds, (own, yardstick)) in
                    [&mut allocate, &mut free].into_iter().zip(own.into_iter().zip(yardstick))
                {
                    let mut sides = <[Samples; 2]>::default();
                    sides[0].extend(own);
                    sides[1].extend(yardstick);
                    let [own, yardstick] = sides;
                    rounds.push(own, yardstick);
                }
            }
        }
        rows.push(allocate.row(&format!("memory/alloc/{name}"))?);
        rows.push(free.row(&format!("memory/free/{name}"))?);
    }
    Ok(rows)
}

/// The time from the operator's request until the VM has no memory.
fn fence(binaries: &Binaries, name: &str, program: &str, arguments: &[&str]) -> Result<Measured> {
    let tenants = Tenants::start(binaries, &Options::with_limits(512, &[128, 128]))?;
    let program = match programs::compile_all()?.into_iter().find(|known| known.name == program) {
        Some(program) => program.path,
        None => programs::hostile(program)?,
    };
    let mut rounds = Rounds::default();
    for _ in 0..FENCES {
        let mut client = tenants.spawn(1, "client", &program, arguments)?;
        client.wait_for_line("holding", TIMEOUT)?;
        let start = Instant::now();
        tenants.fence(1)?;
        let mut own = Samples::default();
        own.push(nanoseconds(start.elapsed()));
        rounds.push(own, Samples::default());
        kill(client.id());
        client.wait(TIMEOUT)?.context("the client ends")?;
        tenants.readmit(1)?;
    }
    rounds.row(name)
}
