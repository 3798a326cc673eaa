//! Launches and calls of a program that computes for a time in between: the worker polls, naps or sleeps by then.

use crate::{
    cuda::{Cuda, IMAGE, KERNEL},
    measure::{Rounds, Samples, is_wanted, nanoseconds, warm_up},
};
use anyhow::Result;
use sluice_tests::performance::Measured;
use std::time::{Duration, Instant};

/// The gaps, as in names of rows.
const GAPS: [(&str, Duration); 9] = [
    ("0us", Duration::ZERO),
    ("10us", Duration::from_micros(10)),
    ("30us", Duration::from_micros(30)),
    ("60us", Duration::from_micros(60)),
    ("100us", Duration::from_micros(100)),
    ("300us", Duration::from_micros(300)),
    ("1ms", Duration::from_millis(1)),
    ("3ms", Duration::from_millis(3)),
    ("20ms", Duration::from_millis(20)),
];
const ROUNDS: usize = 5;
/// Limits of the samples in a round: many for quantiles, few where gaps are long.
const SAMPLES: (u128, u128) = (20, 300);
/// Time of the gaps in a round, together.
const ROUND: Duration = Duration::from_millis(300);

/// Every row whose name contains one of `filter`, or all.
pub(crate) fn measure_all(cuda: &Cuda, filter: &[String]) -> Result<Vec<Measured>> {
    let kernel = cuda.kernel(IMAGE, KERNEL)?;
    let mut rows = Vec::new();
    for (word, gap) in GAPS {
        let name = format!("gap/launch/{word}");
        if is_wanted(filter, &name) {
            rows.push(row(&name, gap, || cuda.launch(kernel, &mut [1, 2, 3]))?);
            cuda.synchronise()?;
        }
        let name = format!("gap/call/{word}");
        if is_wanted(filter, &name) {
            rows.push(row(&name, gap, || cuda.memory_info().map(drop))?);
        }
    }
    Ok(rows)
}

fn row(name: &str, gap: Duration, call: impl Fn() -> Result<()>) -> Result<Measured> {
    let times = ROUND.as_nanos().checked_div(gap.as_nanos()).unwrap_or(SAMPLES.1).clamp(SAMPLES.0, SAMPLES.1);
    let own = |samples: &mut Samples| {
        warm_up(|| {
            compute(gap);
            call()
        })?;
        for _ in 0..times {
            compute(gap);
            let start = Instant::now();
            call()?;
            samples.push(nanoseconds(start.elapsed()));
        }
        Ok(())
    };
    Rounds::alone(ROUNDS, own)?.row(name)
}

/// Keeps the processor, as a program between two calls does.
fn compute(time: Duration) {
    let start = Instant::now();
    while start.elapsed() < time {
        std::hint::spin_loop();
    }
}
