//! Rows on the software GPU. Starts of sessions, each in a new process: on the null driver they would soon wait for memory, because its
//! host has no NVML, and does not learn that the driver has forgotten the last processes. Functions of the program in a stream: the null
//! driver has a thread for each.

use crate::{
    cuda::{Cuda, IMAGE, KERNEL},
    measure::{Rounds, Samples, is_wanted, nanoseconds},
    peer::Eventfds,
    waits::monotonic,
};
use anyhow::{Context as _, Result, ensure};
use sluice_tests::performance::Measured;
use std::{
    process::{Command, Stdio},
    time::Instant,
};

const ROUNDS: usize = 15;
/// The steps of a program's start, as in names of rows, in their order.
const STEPS: [&str; 5] = ["program", "init", "context", "module", "kernel"];

/// Every row whose name contains one of `filter`, or all.
pub(crate) fn measure_all(filter: &[String]) -> Result<Vec<Measured>> {
    let mut rows = Vec::new();
    if is_wanted(filter, "session/start") {
        rows.push(Rounds::take(ROUNDS, start, process_start)?.row("session/start")?);
    }
    let names = STEPS.map(|step| format!("session/step/{step}"));
    if is_wanted(filter, "session/to-sync") || names.iter().any(|name| is_wanted(filter, name)) {
        rows.extend(to_first_kernel(&names)?);
    }
    for (word, together) in [("single", 1), ("queued", 400)] {
        let name = format!("host-function/{word}");
        if is_wanted(filter, &name) {
            rows.push(host_functions(&name, together)?);
        }
    }
    Ok(rows)
}

/// Adds the time of `cuInit` in a new process until it has a session.
fn start(samples: &mut Samples) -> Result<()> {
    samples.push(program("start")?.trim().parse().context("nanoseconds")?);
    Ok(())
}

/// Adds the time of a process that does nothing, from its start to its end.
pub(crate) fn process_start(samples: &mut Samples) -> Result<()> {
    samples.time(1, || {
        ensure!(Command::new("true").status()?.success(), "cannot start true");
        Ok(())
    })
}

/// The output of this program with an argument, in this program's VM.
fn program(argument: &str) -> Result<String> {
    let output = Command::new(std::env::current_exe()?).arg(argument).stderr(Stdio::inherit()).output()?;
    ensure!(output.status.success(), "a new process could not start a session: {}", output.status);
    Ok(String::from_utf8(output.stdout)?)
}

/// The time from the start of a program until its first kernel is complete, and its steps.
fn to_first_kernel(names: &[String; 5]) -> Result<Vec<Measured>> {
    let mut steps: [Rounds; 5] = Default::default();
    let own = |samples: &mut Samples| {
        let begun = monotonic()?;
        let stamps: Vec<u64> = serde_json::from_str(&program("steps")?)?;
        ensure!(stamps.len() == STEPS.len(), "{stamps:?}");
        let mut last = begun;
        for (stamp, rounds) in stamps.into_iter().zip(&mut steps) {
            let mut step = Samples::default();
            #[expect(clippy::cast_precision_loss, reason = "a time")]
            step.push((stamp - last) as f64);
            rounds.push(step, Samples::default());
            last = stamp;
        }
        #[expect(clippy::cast_precision_loss, reason = "a time")]
        samples.push((last - begun) as f64);
        Ok(())
    };
    let total = Rounds::take(ROUNDS, own, process_start)?;
    let mut rows = vec![total.row("session/to-sync")?];
    for (name, rounds) in names.iter().zip(&steps) {
        rows.push(rounds.row(name)?);
    }
    Ok(rows)
}

/// The time of a function of the program in a stream, until the wait for the stream ends. Several are entered before each wait.
fn host_functions(name: &str, together: u32) -> Result<Measured> {
    let (cuda, peer) = (Cuda::on_device()?, Eventfds::start()?);
    let stream = cuda.stream()?;
    let calls = |number: u32| {
        (0..number).try_for_each(|_| cuda.call_in_stream(stream))?;
        cuda.synchronise_stream(stream)
    };
    let own = |samples: &mut Samples| {
        // The first ones of a round find the worker asleep.
        calls(20)?;
        for _ in 0..400 / together {
            let start = Instant::now();
            calls(together)?;
            samples.push(nanoseconds(start.elapsed()) / f64::from(together));
        }
        Ok(())
    };
    let rounds = Rounds::take(ROUNDS, own, |samples| samples.time(200, || peer.turn()))?;
    cuda.destroy_stream(stream)?;
    rounds.row(name)
}

/// The measured process of `session/start`.
pub(crate) fn print_start() -> Result<()> {
    let cuda = Cuda::load()?;
    let start = Instant::now();
    cuda.initialise()?;
    println!("{}", nanoseconds(start.elapsed()));
    Ok(())
}

/// The measured process of `session/step/`: prints the end of each step.
pub(crate) fn print_steps() -> Result<()> {
    let cuda = Cuda::load()?;
    let mut stamps = vec![monotonic()?];
    cuda.initialise()?;
    stamps.push(monotonic()?);
    cuda.use_device()?;
    stamps.push(monotonic()?);
    let kernel = cuda.kernel(IMAGE, KERNEL)?;
    stamps.push(monotonic()?);
    cuda.launch(kernel, &mut [1, 2, 3])?;
    cuda.synchronise()?;
    stamps.push(monotonic()?);
    println!("{}", serde_json::to_string(&stamps)?);
    Ok(())
}
