//! The client's side of [`crate::turns`]: the process that measures on request.

use crate::{cuda::Cuda, measure::nanoseconds, program};
use anyhow::{Result, bail};
use std::time::{Duration, Instant};

/// Answers requests until the input ends.
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
