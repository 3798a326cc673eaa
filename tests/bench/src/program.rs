//! The rows of whole programs, remoted and native in turns: a loop that is bound by its launches, a step of a training, and a loop that
//! reads a token after each of its steps.

use crate::{
    cuda::Cuda,
    measure::{Rounds, Samples, is_wanted, nanoseconds, warm_up},
    turns::Client,
};
use anyhow::{Context as _, Result, bail};
use sluice_tests::{paths::Binaries, performance::Measured};
use std::{
    path::Path,
    process::Command,
    time::{Duration, Instant},
};

const ROUNDS: usize = 9;
/// Number of steps in a round.
const STEPS: usize = 4;

/// A kernel of about as many nanoseconds as its parameter says: on the null driver by its name, on the software GPU by its loop.
const IMAGE: &core::ffi::CStr = c".version 7.0\n.target sm_70\n.address_size 64\n\
    .visible .entry last_p1(.param .u64 time)\n{\n.reg .u64 %left;\n.reg .pred %more;\n\
    ld.param.u64 %left, [time];\nshr.u64 %left, %left, 4;\n\
    again:\nsetp.gt.u64 %more, %left, 0;\n@!%more bra over;\nsub.u64 %left, %left, 1;\nbra again;\nover:\nret;\n}\n";

/// A program: in each step it copies a batch to the device, launches kernels, and reads the result.
struct Program {
    name: &'static str,
    /// Bytes of the batch.
    batch: usize,
    kernels: usize,
    /// Length of a kernel.
    kernel: Duration,
    /// Bytes of the result; without one, the program waits for its stream.
    result: usize,
}

static PROGRAMS: [Program; 3] = [
    Program { name: "launch-loop", batch: 0, kernels: 1000, kernel: Duration::from_micros(2), result: 0 },
    Program {
        name: "training-step",
        batch: 256 << 10,
        kernels: 200,
        kernel: Duration::from_micros(100),
        result: 4,
    },
    Program { name: "token-loop", batch: 0, kernels: 30, kernel: Duration::from_micros(20), result: 4 },
];

/// The rows on the null driver, whose kernels take a fixed time and no processor, against that time.
pub(crate) fn timed(cuda: &Cuda, filter: &[String]) -> Result<Vec<Measured>> {
    wanted("timed", filter)
        .map(|(program, name)| {
            let kernels = u32::try_from(program.kernels)? * program.kernel;
            let rounds = Rounds::take(
                ROUNDS,
                |samples| add(samples, vec![steps(cuda, program.name, STEPS)?]),
                |samples| add(samples, vec![vec![nanoseconds(kernels)]]),
            )?;
            rounds.row(&name)
        })
        .collect()
}

/// The rows on the software GPU, remoted and native in turns.
pub(crate) fn measure_all(binaries: &Binaries, me: &Path, filter: &[String]) -> Result<Vec<Measured>> {
    let client = |native: bool| -> Result<Client> {
        let mut command = Command::new(binaries.get("sluice")?);
        command.arg("run").args(native.then_some("--native")).arg("--").arg(me).arg("turns");
        Client::start(&mut command)
    };
    let mut clients = None;
    wanted("softgpu", filter)
        .map(|(program, name)| {
            let [remoted, native] = match &mut clients {
                Some(clients) => clients,
                none => none.insert([client(false)?, client(true)?]),
            };
            let request = format!("{} 0 {STEPS}", program.name);
            let rounds = Rounds::take(
                ROUNDS,
                |samples| add(samples, remoted.ask(&request)?),
                |samples| add(samples, native.ask(&request)?),
            )?;
            rounds.row(&name)
        })
        .collect()
}

/// The programs whose rows are asked for, with the names of the rows on a device.
fn wanted(device: &str, filter: &[String]) -> impl Iterator<Item = (&'static Program, String)> {
    PROGRAMS
        .iter()
        .map(move |program| (program, format!("program/{device}/{}", program.name)))
        .filter(|(_, name)| is_wanted(filter, name))
}

fn add(samples: &mut Samples, answer: Vec<Vec<f64>>) -> Result<()> {
    answer.into_iter().for_each(|list| samples.extend(list));
    Ok(())
}

/// The times of so many steps of a program in steady state.
pub(crate) fn steps(cuda: &Cuda, name: &str, times: usize) -> Result<Vec<f64>> {
    let Some(program) = PROGRAMS.iter().find(|program| program.name == name) else {
        bail!("no such measurement: {name}")
    };
    let length = u64::try_from(program.kernel.as_nanos())?;
    let kernel = cuda.kernel(IMAGE, c"last_p1")?;
    let device = cuda.allocate(program.batch.max(program.result).max(1))?;
    let (batch, mut result) = (vec![1; program.batch], vec![0; program.result]);
    let mut step = || {
        if !batch.is_empty() {
            cuda.copy_in(device, &batch)?;
        }
        (0..program.kernels).try_for_each(|_| cuda.launch(kernel, &mut [length]))?;
        match result.is_empty() {
            true => cuda.synchronise(),
            false => cuda.copy_out(&mut result, device),
        }
    };
    warm_up(&mut step)?;
    let mut samples = Vec::with_capacity(times);
    for _ in 0..times {
        let start = Instant::now();
        step()?;
        samples.push(nanoseconds(start.elapsed()));
    }
    cuda.free(device).context("the memory of a program")?;
    Ok(samples)
}
