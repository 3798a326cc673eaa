//! Samples of measurements, and the figures that summarise them.

use crate::Row;
use sluice_kit::figures;
use std::time::Instant;

/// Samples of one quantity, in one unit.
#[derive(Default)]
pub(crate) struct Samples(Vec<f64>);

impl Samples {
    /// Adds the nanoseconds that `body` takes, once per call.
    pub(crate) fn time(&mut self, times: usize, mut body: impl FnMut()) {
        for _ in 0..times {
            let start = Instant::now();
            body();
            self.push(start.elapsed().as_secs_f64() * 1e9);
        }
    }

    /// Adds one sample.
    pub(crate) fn push(&mut self, value: f64) {
        self.0.push(value);
    }

    /// The samples as rates in GB/s: `bytes` bytes per sample of nanoseconds.
    pub(crate) fn rates(&self, bytes: usize) -> Samples {
        #[expect(clippy::cast_precision_loss, reason = "a rate")]
        Samples(self.0.iter().map(|nanoseconds| bytes as f64 / nanoseconds).collect())
    }

    /// The median.
    pub(crate) fn median(&self) -> f64 {
        self.quantile(0.5)
    }

    fn quantile(&self, share: f64) -> f64 {
        figures::quantile(&self.0, share).unwrap_or(f64::NAN)
    }
}

/// A row for which less is better: medians, in `unit`, which is `scale` of the samples.
pub(crate) fn lower(
    name: &str,
    unit: &str,
    scale: f64,
    own: &Samples,
    baseline: &str,
    yardstick: &Samples,
) -> Row {
    row(
        name,
        unit,
        own.quantile(0.5) * scale,
        own.quantile(0.99) * scale,
        baseline,
        yardstick.quantile(0.5) * scale,
        "lower",
    )
}

/// A row for which more is better: medians of rates. The p99 is the rate that 99 % of the samples exceed.
pub(crate) fn higher(name: &str, unit: &str, own: &Samples, baseline: &str, yardstick: &Samples) -> Row {
    row(name, unit, own.quantile(0.5), own.quantile(0.01), baseline, yardstick.quantile(0.5), "higher")
}

fn row(
    name: &str,
    unit: &str,
    value: f64,
    p99: f64,
    baseline: &str,
    baseline_value: f64,
    better: &str,
) -> Row {
    Row {
        name: name.to_owned(),
        value,
        unit: unit.to_owned(),
        p99,
        baseline: baseline.to_owned(),
        baseline_value,
        ratio: value / baseline_value,
        better: better.to_owned(),
    }
}
