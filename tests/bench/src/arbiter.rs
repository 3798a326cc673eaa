//! The arbiter's own rows: the time of its decisions, and its scrub rate. Measured on its own code, without other
//! processes.

use crate::measure::{Rounds, Samples, nanoseconds};
use anyhow::{Context as _, Result, bail, ensure};
use sluice_arbiter::{
    custody::{Custody, Effect, Estimates, Task, TaskOutcome, UnitSettings},
    ids::{Class, VmKey, WorkerId},
    unit::{OpenUnit, Piece},
};
use sluice_messages::{
    control::{ToArbiter, Verify},
    custody::{CustodyRequest, UNIT},
};
use sluice_tests::{paths::Binaries, performance::Measured};
use std::{path::Path, process::Command, time::Instant};

/// Number of chunks of the smallest class on an H200.
const CHUNKS: usize = 72_000;
const VMS: u32 = 64;
/// Number of rounds of scrubbing and clearing.
const ROUNDS: usize = 15;

/// Time from a worker's request for a chunk to the decision, with an H200 all in the smallest chunks and many VMs.
pub(crate) fn decisions() -> Result<Measured> {
    let estimates = Estimates { context: 4 * UNIT, margin: UNIT };
    let mut custody = Custody::new(UnitSettings { unit: 0, reserve: 0, estimates }, 0);
    let smallest = Class::of(UNIT).context("the unit is a class")?;
    ensure!(custody.plan(0, false).is_some(), "a new unit takes memory first");
    custody.finished(TaskOutcome::Taken { made: vec![smallest; CHUNKS], free: 0 });
    custody.set_nominal();
    while let Some(task) = custody.plan(u64::MAX, false) {
        let Task::Scrub(orders) = task else { bail!("{task:?} instead of a scrub") };
        custody.finished(TaskOutcome::Scrubbed(orders.iter().map(|order| (order.chunk, true)).collect()));
    }
    for vm in 1..=VMS {
        let (epoch, nothing) = (1, 0);
        let terms = ToArbiter::Vm {
            vm,
            epoch,
            limit: nothing,
            guaranteed: nothing,
            headroom: nothing,
            pinned: nothing,
            ancestors: nothing,
        };
        custody.command(terms, 0);
        custody.add_worker(WorkerId(u64::from(vm)), VmKey { vm, epoch }, vm, 0);
    }
    let mut own = Samples::default();
    for number in 0..CHUNKS as u64 {
        let worker = WorkerId(number % u64::from(VMS) + 1);
        let start = Instant::now();
        custody.request(worker, CustodyRequest::Take { serial: number, bytes: UNIT }, 0);
        custody.serve_waiters(0);
        let effect = custody.effect();
        own.push(nanoseconds(start.elapsed()));
        ensure!(matches!(effect, Some(Effect::Lend { .. })), "{effect:?}");
    }
    let mut rounds = Rounds::default();
    rounds.push(own, Samples::default());
    rounds.row("custody/ledger-decision")
}

/// Scrubbing with samples read back, against clearing alone, on a software GPU of its own.
pub(crate) fn scrub_rate(binaries: &Binaries, me: &Path) -> Result<Measured> {
    let state = tempfile::Builder::new().prefix("sluice-bench-").tempdir_in("/dev/shm")?;
    let output = Command::new(me)
        .arg("scrub")
        .env("SLUICE_DRIVER", binaries.get("libsoftgpu_cuda.so")?)
        .env("SLUICE_SOFTGPU_STATE", state.path().join("gpu"))
        .env("SLUICE_SOFTGPU_MODEL", "A10-24")
        .env("SLUICE_SOFTGPU_SCALE", "32")
        .stderr(std::process::Stdio::inherit())
        .output()?;
    ensure!(output.status.success(), "the scrubbing process failed: {}", output.status);
    let rates: [Vec<f64>; 2] = serde_json::from_slice(&output.stdout)?;
    let mut rounds = Rounds::default();
    for (scrub, clear) in rates[0].iter().zip(&rates[1]) {
        let [mut own, mut yardstick] = <[Samples; 2]>::default();
        own.push(*scrub);
        yardstick.push(*clear);
        rounds.push(own, yardstick);
    }
    rounds.row("custody/scrub-rate")
}

/// The measured process of [`scrub_rate`].
pub(crate) fn print_scrub_rates() -> Result<()> {
    let driver = std::env::var_os("SLUICE_DRIVER").context("SLUICE_DRIVER")?;
    let mut unit = OpenUnit::open(Path::new(&driver), 0, None)?;
    let failed = |code| anyhow::anyhow!("the driver answers {code}");
    unit.enter().map_err(failed)?;
    let pieces = unit.take_free(8 << 20, u64::MAX).map_err(failed)?.pieces;
    let bytes: u64 = pieces.iter().map(Piece::bytes).sum();
    let mut rates = [Vec::new(), Vec::new()];
    for round in 0..=ROUNDS {
        for (verify, rates) in [true, false].into_iter().zip(&mut rates) {
            let start = Instant::now();
            pieces
                .iter()
                .try_for_each(|piece| unit.clear(piece))
                .and_then(|()| unit.wait())
                .map_err(failed)?;
            if verify {
                let clean = unit.verify(&pieces, Verify::Sampled).map_err(failed)?;
                ensure!(clean.iter().all(|clean| *clean), "cleared memory is not zero");
            }
            // Pages are touched for the first time in the first round.
            if round > 0 {
                #[expect(clippy::cast_precision_loss, reason = "a rate")]
                rates.push(bytes as f64 / start.elapsed().as_secs_f64() / 1e9);
            }
        }
    }
    println!("{}", serde_json::to_string(&rates)?);
    Ok(())
}
