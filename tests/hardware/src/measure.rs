//! Durations of calls.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::stop::Answer;

/// The middle of some figures; 0 if there are none.
pub(crate) fn median(figures: &mut [f64]) -> f64 {
    figures.sort_by(f64::total_cmp);
    figures.get(figures.len() / 2).copied().unwrap_or(0.0)
}

/// The figure at a share of the sorted figures, such as 0.99; 0 if there are none.
pub(crate) fn quantile(figures: &[f64], share: f64) -> f64 {
    sluice_kit::figures::quantile(figures, share).unwrap_or(0.0)
}

/// Rounds to a hundredth.
pub(crate) fn rounded(figure: f64) -> f64 {
    (figure * 100.0).round() / 100.0
}

/// Duration of an action in microseconds, with its result.
pub(crate) fn timed<T>(action: impl FnOnce() -> Answer<T>) -> Answer<(T, f64)> {
    let start = Instant::now();
    let result = action()?;
    Ok((result, start.elapsed().as_secs_f64() * 1e6))
}

/// Median and largest of some durations in microseconds.
pub(crate) fn summary(figures: &mut [f64]) -> Value {
    let middle = median(figures);
    json!({ "median_us": rounded(middle), "largest_us": rounded(figures.last().copied().unwrap_or(0.0)) })
}

/// A duration in milliseconds.
pub(crate) fn milliseconds(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}
