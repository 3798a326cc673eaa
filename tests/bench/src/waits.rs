//! Waits for kernels of a known length, and the way of a launch to the driver and back. Both need the null driver's kernels.

use crate::{
    cuda::{Cuda, IMAGE},
    measure::{Rounds, Samples, is_wanted, nanoseconds, warm_up},
};
use anyhow::{Context as _, Result};
use rustix::time::{ClockId, clock_gettime};
use sluice_tests::performance::Measured;
use std::time::{Duration, Instant};

const ROUNDS: usize = 7;
/// Lengths of kernels, as in names of rows.
const LENGTHS: [(&str, Duration); 4] = [
    ("0us", Duration::ZERO),
    ("100us", Duration::from_micros(100)),
    ("1ms", Duration::from_millis(1)),
    ("10ms", Duration::from_millis(10)),
];
/// Pause after which a worker sleeps.
const IDLE: Duration = Duration::from_millis(20);

/// Every row whose name contains one of `filter`, or all.
pub(crate) fn measure_all(cuda: &Cuda, filter: &[String]) -> Result<Vec<Measured>> {
    let mut rows = Vec::new();
    for kind in ["stream", "event", "context"] {
        for (word, length) in LENGTHS {
            let name = format!("wait/{kind}/{word}");
            if is_wanted(filter, &name) {
                rows.push(wait(cuda, &name, kind, length)?);
            }
        }
    }
    for (state, pause) in [("awake", Duration::ZERO), ("asleep", IDLE)] {
        let names = ["to-driver", "back"].map(|step| format!("step/{state}/{step}"));
        if names.iter().any(|name| is_wanted(filter, name)) {
            rows.extend(steps(cuda, &names, pause)?);
        }
    }
    Ok(rows)
}

/// The time of a launch and the wait for its end, beyond the length of the kernel.
fn wait(cuda: &Cuda, name: &str, kind: &str, length: Duration) -> Result<Measured> {
    let kernel = cuda.kernel(IMAGE, c"last_p1")?;
    let (stream, event) = (cuda.stream()?, cuda.event()?);
    let times = if length < Duration::from_millis(10) { 40 } else { 8 };
    let step = || {
        cuda.launch_on(stream, kernel, &mut [u64::try_from(length.as_nanos())?])?;
        match kind {
            "stream" => cuda.synchronise_stream(stream),
            "event" => cuda.synchronise_event(event, stream),
            _ => cuda.synchronise(),
        }
    };
    let own = |samples: &mut Samples| {
        warm_up(step)?;
        for _ in 0..times {
            let start = Instant::now();
            step()?;
            let beyond = start.elapsed().checked_sub(length).context("the wait ended before the kernel")?;
            samples.push(nanoseconds(beyond));
        }
        Ok(())
    };
    let rounds = Rounds::alone(ROUNDS, own)?;
    cuda.destroy_event(event)?;
    cuda.destroy_stream(stream)?;
    rounds.row(name)
}

/// The times from a launch to the driver's call, and from there to the end of the wait.
fn steps(cuda: &Cuda, names: &[String; 2], pause: Duration) -> Result<Vec<Measured>> {
    let kernel = cuda.kernel(IMAGE, c"stamp_p1")?;
    let memory = cuda.allocate(8)?;
    let (mut there, mut back) = (Rounds::default(), Rounds::default());
    for _ in 0..ROUNDS {
        let [mut to_driver, mut from_driver] = <[Samples; 2]>::default();
        for sample in 0..if pause.is_zero() { 520 } else { 20 } {
            std::thread::sleep(pause);
            let begun = monotonic()?;
            cuda.launch(kernel, &mut [memory])?;
            cuda.synchronise()?;
            let ended = monotonic()?;
            let mut stamp = [0; 8];
            cuda.copy_out(&mut stamp, memory)?;
            let stamp = u64::from_ne_bytes(stamp);
            let span = |from: u64, to: u64| -> Result<f64> {
                let span = to.checked_sub(from).context("the driver was called outside of the wait")?;
                Ok(nanoseconds(Duration::from_nanos(span)))
            };
            // The first ones without a pause find the worker asleep.
            if sample >= 20 || !pause.is_zero() {
                to_driver.push(span(begun, stamp)?);
                from_driver.push(span(stamp, ended)?);
            }
        }
        there.push(to_driver, Samples::default());
        back.push(from_driver, Samples::default());
    }
    cuda.free(memory)?;
    Ok(vec![there.row(&names[0])?, back.row(&names[1])?])
}

/// Nanoseconds of the clock that all processes share.
pub(crate) fn monotonic() -> Result<u64> {
    let time = clock_gettime(ClockId::Monotonic);
    Ok(u64::try_from(time.tv_sec)? * 1_000_000_000 + u64::try_from(time.tv_nsec)?)
}
