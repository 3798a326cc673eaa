//! Clients that measure on request: each is started once, on its own path to the GPU, and then asked in turns, so that
//! other load of the machine hits all of them.
//!
//! A request is a line on standard input, the answer a line of JSON with the samples in nanoseconds.

use crate::{cuda::Cuda, measure::nanoseconds, program};
use anyhow::{Context as _, Result, bail};
use std::{
    io::{BufRead as _, BufReader, Write as _},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    time::{Duration, Instant},
};

/// A client process.
pub(crate) struct Client {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Client {
    /// Starts a client by a command that runs this program's [`serve`].
    pub(crate) fn start(command: &mut Command) -> Result<Self> {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let input = child.stdin.take().context("standard input is piped")?;
        let output = BufReader::new(child.stdout.take().context("standard output is piped")?);
        let mut client = Self { child, input, output };
        client.ask("start 0 0")?;
        Ok(client)
    }

    /// Process id of the client.
    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    /// Requests a measurement.
    pub(crate) fn ask(&mut self, request: &str) -> Result<Vec<Vec<f64>>> {
        writeln!(self.input, "{request}").context("a client has ended")?;
        let mut line = String::new();
        self.output.read_line(&mut line)?;
        serde_json::from_str(&line).with_context(|| format!("{request}: {line:?}"))
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        if writeln!(self.input, "end 0 0").is_err() {
            // The client has ended already.
        }
        if let Err(error) = self.child.wait() {
            eprintln!("a client: {error}");
        }
    }
}

/// The client's side: answers requests until the input ends.
pub(crate) fn serve() -> Result<()> {
    let cuda = Cuda::on_device()?;
    for line in std::io::stdin().lines() {
        let line = line?;
        let words: Vec<&str> = line.split(' ').collect();
        let [what, size, times] = words[..] else { bail!("not a request: {line}") };
        let (size, times): (usize, usize) = (size.parse()?, times.parse()?);
        let samples = match what {
            "start" => Vec::new(),
            "end" => return Ok(()),
            "memory" => memory(&cuda, size, times)?,
            "calls" => vec![calls(&cuda, Duration::from_millis(size as u64), times)?],
            "paced" => vec![paced(&cuda, size, Duration::from_micros(times as u64))?],
            program => vec![program::steps(&cuda, program, times)?],
        };
        println!("{}", serde_json::to_string(&samples)?);
    }
    Ok(())
}

/// The times of allocations, and of their frees.
fn memory(cuda: &Cuda, size: usize, times: usize) -> Result<Vec<Vec<f64>>> {
    let (mut allocate, mut free) = (Vec::new(), Vec::new());
    // A few at a time, as in programs, and never more than the device's memory.
    let together = ((256 << 20) / size).clamp(1, 16);
    for _ in 0..times.div_ceil(together) {
        let mut all = Vec::with_capacity(together);
        for _ in 0..together {
            let start = Instant::now();
            all.push(cuda.allocate(size)?);
            allocate.push(nanoseconds(start.elapsed()));
        }
        for address in all {
            let start = Instant::now();
            cuda.free(address)?;
            free.push(nanoseconds(start.elapsed()));
        }
    }
    Ok(vec![allocate, free])
}

/// The times of calls to the worker, in groups of `together`, for a time of `long`.
fn calls(cuda: &Cuda, long: Duration, together: usize) -> Result<Vec<f64>> {
    let mut samples = Vec::new();
    let end = Instant::now() + long;
    while Instant::now() < end {
        let start = Instant::now();
        (0..together).try_for_each(|_| cuda.memory_info().map(drop))?;
        #[expect(clippy::cast_precision_loss, reason = "a mean")]
        samples.push(nanoseconds(start.elapsed()) / together as f64);
    }
    Ok(samples)
}

/// The times of so many calls to the worker, one in each period.
fn paced(cuda: &Cuda, number: usize, period: Duration) -> Result<Vec<f64>> {
    let mut samples = Vec::new();
    let mut next = Instant::now();
    for _ in 0..number {
        std::thread::sleep(next.saturating_duration_since(Instant::now()));
        next += period;
        let start = Instant::now();
        cuda.memory_info()?;
        samples.push(nanoseconds(start.elapsed()));
    }
    Ok(samples)
}
