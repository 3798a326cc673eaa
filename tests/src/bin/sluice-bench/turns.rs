//! Clients that measure on request: started once, each on a path of its own to the GPU, and then asked in turns, so that
//! whatever else the machine does hits all of them.
//!
//! A request is a line on standard input, the answer a line of JSON with the samples in nanoseconds.

use crate::{cuda::Cuda, measure::Samples};
use anyhow::{Context as _, Result, bail};
use std::{
    io::{BufRead as _, BufReader, Write as _},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    time::{Duration, Instant},
};

/// A client.
pub(crate) struct Client {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Client {
    /// Starts one by a command that runs this program's [`serve`].
    pub(crate) fn start(command: &mut Command) -> Result<Self> {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let input = child.stdin.take().context("standard input is piped")?;
        let output = BufReader::new(child.stdout.take().context("standard output is piped")?);
        let mut client = Self { child, input, output };
        client.ask("start 0 0")?;
        Ok(client)
    }

    /// Has it measure something.
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
            // It has ended already.
        }
        if let Err(error) = self.child.wait() {
            eprintln!("a client: {error}");
        }
    }
}

/// The client's side: answers until it is told to end.
pub(crate) fn serve() -> Result<()> {
    let cuda = Cuda::load()?;
    cuda.initialise()?;
    cuda.use_device()?;
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
            other => bail!("no such measurement: {other}"),
        };
        println!("{}", serde_json::to_string(&samples)?);
    }
    Ok(())
}

/// Allocations, then their frees.
fn memory(cuda: &Cuda, size: usize, times: usize) -> Result<Vec<Vec<f64>>> {
    let (mut allocate, mut free) = (Vec::new(), Vec::new());
    // A few at a time, as programs have it, and never more than the device has.
    let together = ((256 << 20) / size).clamp(1, 16);
    for _ in 0..times.div_ceil(together) {
        let mut all = Vec::with_capacity(together);
        for _ in 0..together {
            let start = Instant::now();
            all.push(cuda.allocate(size)?);
            allocate.push(start.elapsed().as_secs_f64() * 1e9);
        }
        for address in all {
            let start = Instant::now();
            cuda.free(address)?;
            free.push(start.elapsed().as_secs_f64() * 1e9);
        }
    }
    Ok(vec![allocate, free])
}

/// Calls that must cross, in groups of `together`, for as long as this.
fn calls(cuda: &Cuda, long: Duration, together: usize) -> Result<Vec<f64>> {
    let mut samples = Vec::new();
    let end = Instant::now() + long;
    while Instant::now() < end {
        let start = Instant::now();
        (0..together).try_for_each(|_| cuda.memory_info().map(drop))?;
        #[expect(clippy::cast_precision_loss, reason = "a mean")]
        samples.push(start.elapsed().as_secs_f64() * 1e9 / together as f64);
    }
    Ok(samples)
}

/// Samples that came in lists.
pub(crate) fn gather(into: &mut Samples, samples: Vec<f64>) {
    samples.into_iter().for_each(|sample| into.push(sample));
}
