//! Samples of a row and of its yardstick, round by round, and the figures that summarise them.

use anyhow::{Context as _, Result, ensure};
use sluice_kit::figures;
use sluice_tests::performance::{
    Measured, Yardstick,
    table::{self, RowKind},
};
use std::{
    sync::LazyLock,
    time::{Duration, Instant},
};

/// Pause before a row and before its yardstick: by then the worker that was measured before sleeps.
const REST: Duration = Duration::from_millis(10);

/// The longest wait until this machine is idle; one with other work is measured as it is.
const SETTLING: Duration = Duration::from_secs(10);
/// Time over which the machine is judged, and the largest part of it that its processors may work.
const JUDGED: Duration = Duration::from_millis(200);
const BUSY: f64 = 0.1;

/// True if a row is asked for.
pub(crate) fn is_wanted(filter: &[String], name: &str) -> bool {
    filter.is_empty() || filter.iter().any(|part| name.contains(part.as_str()))
}

/// Waits until this machine is idle, for a while: a backend that has just started clears all memory of its device, which takes a second of
/// one processor.
pub(crate) fn settle() -> Result<()> {
    let start = Instant::now();
    while start.elapsed() < SETTLING {
        let before = processor_ticks()?;
        std::thread::sleep(JUDGED);
        let after = processor_ticks()?;
        #[expect(clippy::cast_precision_loss, reason = "hundredths of seconds")]
        if ((after.busy - before.busy) as f64) < BUSY * (after.all - before.all) as f64 {
            return Ok(());
        }
    }
    Ok(())
}

/// The kernel may wake a worker on the processor of its program, and takes some ticks of its clock to part the two.
const WARMING: Duration = Duration::from_millis(30);

/// Repeats a step until its processes have a processor each, where the machine has enough.
pub(crate) fn warm_up(mut step: impl FnMut() -> Result<()>) -> Result<()> {
    let start = Instant::now();
    while start.elapsed() < WARMING {
        step()?;
    }
    Ok(())
}

/// Clock ticks of all processors together since the start of the machine.
struct ProcessorTicks {
    busy: u64,
    all: u64,
}

/// The first line of `/proc/stat`, of proc_stat(5): user, nice, system, idle, iowait and others.
fn processor_ticks() -> Result<ProcessorTicks> {
    let text = std::fs::read_to_string("/proc/stat")?;
    let line = text
        .lines()
        .next()
        .and_then(|line| line.strip_prefix("cpu "))
        .context("no line of all processors")?;
    let ticks = line.split_whitespace().map(str::parse).collect::<Result<Vec<u64>, _>>()?;
    let idle: u64 = ticks.iter().skip(3).take(2).sum();
    // The time of guests, from the ninth figure on, is a part of the user's.
    let all: u64 = ticks.iter().take(8).sum();
    Ok(ProcessorTicks { busy: all - idle, all })
}

/// Samples of one quantity, in one unit.
#[derive(Default)]
pub(crate) struct Samples(Vec<f64>);

impl Samples {
    /// Adds the nanoseconds that `body` takes, once per call. The end of a sample is the start of the next, and the time to read the
    /// clock is not counted.
    pub(crate) fn time(&mut self, times: usize, mut body: impl FnMut() -> Result<()>) -> Result<()> {
        self.0.reserve(times);
        let mut start = Instant::now();
        for _ in 0..times {
            body()?;
            let end = Instant::now();
            self.push((nanoseconds(end - start) - *CLOCK).max(0.0));
            start = end;
        }
        Ok(())
    }

    /// Adds samples of `together` calls, each sample the mean of its calls: for a body that is shorter than a reading of the clock.
    pub(crate) fn time_together(
        &mut self,
        times: usize,
        together: u32,
        mut body: impl FnMut() -> Result<()>,
    ) -> Result<()> {
        for _ in 0..times {
            let start = Instant::now();
            (0..together).try_for_each(|_| body())?;
            self.push(nanoseconds(start.elapsed()) / f64::from(together));
        }
        Ok(())
    }

    /// Adds one sample.
    pub(crate) fn push(&mut self, value: f64) {
        self.0.push(value);
    }

    /// Adds the samples of a list.
    pub(crate) fn extend(&mut self, samples: Vec<f64>) {
        self.0.extend(samples);
    }

    /// The samples as rates in GB/s: `bytes` bytes per sample of nanoseconds.
    pub(crate) fn rates(&self, bytes: usize) -> Samples {
        #[expect(clippy::cast_precision_loss, reason = "a rate")]
        Samples(self.0.iter().map(|nanoseconds| bytes as f64 / nanoseconds).collect())
    }

    fn quantile(&self, share: f64) -> f64 {
        figures::quantile(&self.0, share).unwrap_or(f64::NAN)
    }
}

/// Nanoseconds that one reading of the clock takes.
static CLOCK: LazyLock<f64> = LazyLock::new(|| {
    const READINGS: u32 = 1000;
    let start = Instant::now();
    (0..READINGS).for_each(|_| _ = std::hint::black_box(Instant::now()));
    nanoseconds(start.elapsed()) / f64::from(READINGS)
});

/// A time in nanoseconds.
pub(crate) fn nanoseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e9
}

/// The samples of a row and of its yardstick by rounds. The yardstick has none if the row has no yardstick.
#[derive(Default)]
pub(crate) struct Rounds(Vec<[Samples; 2]>);

impl Rounds {
    /// Measures a row and its yardstick in turns. Neither runs while the other is timed.
    pub(crate) fn take(
        number: usize,
        mut own: impl FnMut(&mut Samples) -> Result<()>,
        mut yardstick: impl FnMut(&mut Samples) -> Result<()>,
    ) -> Result<Self> {
        let mut rounds = Self::default();
        for _ in 0..number {
            let [mut one, mut other] = <[Samples; 2]>::default();
            std::thread::sleep(REST);
            own(&mut one)?;
            std::thread::sleep(REST);
            yardstick(&mut other)?;
            rounds.push(one, other);
        }
        Ok(rounds)
    }

    /// Measures a row without a yardstick.
    pub(crate) fn alone(number: usize, own: impl FnMut(&mut Samples) -> Result<()>) -> Result<Self> {
        Self::take(number, own, |_| Ok(()))
    }

    /// Adds a round.
    pub(crate) fn push(&mut self, own: Samples, yardstick: Samples) {
        self.0.push([own, yardstick]);
    }

    /// The same rounds with other samples.
    pub(crate) fn map(&self, change: impl Fn(&Samples) -> Samples) -> Self {
        Self(self.0.iter().map(|round| round.each_ref().map(&change)).collect())
    }

    /// The row of this name, whose kind says its unit and yardstick.
    pub(crate) fn row(&self, name: &str) -> Result<Measured> {
        let kind = table::kind(name).with_context(|| format!("{name} is not in the table of rows"))?;
        let [value, p99, p999] = self.figures(kind, 0);
        let yardstick = kind.yardstick.map(|yardstick| {
            let [value, p99, p999] = self.figures(kind, 1);
            let ratios: Vec<f64> =
                self.0.iter().map(|[own, other]| own.quantile(0.5) / other.quantile(0.5)).collect();
            let [ratio, ratio_low, ratio_high] = spread(&ratios);
            Yardstick { name: yardstick.to_owned(), value, p99, p999, ratio, ratio_low, ratio_high }
        });
        let row = Measured { name: name.to_owned(), unit: kind.unit.to_owned(), value, p99, p999, yardstick };
        ensure!(row.value.is_finite(), "{name} has no samples");
        let ratio = row.yardstick.as_ref().map_or(1.0, |yardstick| yardstick.ratio);
        ensure!(ratio.is_finite(), "the yardstick of {name} took no time");
        Ok(row)
    }

    /// The median of the medians of a side's rounds, and the figures that 99 % and 99.9 % of all its samples keep.
    fn figures(&self, kind: &RowKind, side: usize) -> [f64; 3] {
        let medians: Vec<f64> = self.0.iter().map(|round| round[side].quantile(0.5)).collect();
        let all = Samples(self.0.iter().flat_map(|round| round[side].0.iter().copied()).collect());
        let worst = |share: f64| all.quantile(if kind.is_rate() { 1.0 - share } else { share });
        [Samples(medians).quantile(0.5), worst(0.99), worst(0.999)].map(|figure| figure * kind.scale())
    }
}

/// The median and the quartiles.
pub(crate) fn spread(figures: &[f64]) -> [f64; 3] {
    [0.5, 0.25, 0.75].map(|share| figures::quantile(figures, share).unwrap_or(f64::NAN))
}

/// A row of one figure, in the unit of its kind.
pub(crate) fn single(name: &str, figure: f64) -> Result<Measured> {
    let mut rounds = Rounds::default();
    let scale = table::kind(name).map_or(1.0, RowKind::scale);
    rounds.push(Samples(vec![figure / scale]), Samples::default());
    rounds.row(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rounds(of: &[(&[f64], &[f64])]) -> Rounds {
        Rounds(of.iter().map(|(own, other)| [Samples(own.to_vec()), Samples(other.to_vec())]).collect())
    }

    #[test]
    fn ratio_is_the_median_of_the_rounds_and_not_of_all_samples() {
        let row = rounds(&[(&[2e3], &[1e3]), (&[40e3], &[10e3]), (&[9e3], &[3e3])]).row("call/sync").unwrap();
        let yardstick = row.yardstick.unwrap();
        assert_eq!((row.value, yardstick.value), (9.0, 3.0));
        assert_eq!([yardstick.ratio, yardstick.ratio_low, yardstick.ratio_high], [3.0, 2.0, 4.0]);
    }

    #[test]
    fn worst_rate_is_the_lowest() {
        let samples: Vec<f64> = (1..=1000).map(f64::from).collect();
        let row = rounds(&[(&samples, &[1.0])]).row("custody/scrub-rate").unwrap();
        assert_eq!([row.value, row.p99, row.p999], [501.0, 11.0, 2.0]);
    }

    #[test]
    fn row_outside_of_the_table_and_row_without_samples_are_refused() {
        assert!(rounds(&[(&[1.0], &[1.0])]).row("call").is_err());
        assert!(Rounds::default().row("call/sync").is_err());
    }
}
