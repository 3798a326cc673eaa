//! A short look ahead from recent history: double exponential smoothing with a damped trend.
//!
//! Level and trend follow the samples with weights of their own; a forecast extends the trend, each step less than the one before,
//! since load that rises for a minute does not rise for ever.

/// Weights of the smoothing.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Smoothing {
    /// Weight of a new sample in the level, 0 to 1.
    pub level: f64,
    /// Weight of a new difference in the trend, 0 to 1.
    pub trend: f64,
    /// Factor of the trend for each step ahead, 0 to 1.
    pub damping: f64,
}

impl Default for Smoothing {
    fn default() -> Self {
        Self { level: 0.4, trend: 0.2, damping: 0.9 }
    }
}

/// One quantity's recent history.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Forecast {
    level: f64,
    trend: f64,
    samples: u32,
}

impl Forecast {
    /// Adds the next of samples at equal distances. NaN, infinite and negative samples are left out.
    pub fn observe(&mut self, smoothing: &Smoothing, sample: f64) {
        if !sample.is_finite() || sample < 0.0 {
            return;
        }
        if self.samples == 0 {
            self.level = sample;
        } else {
            let expected = self.level + smoothing.damping * self.trend;
            let level = smoothing.level * sample + (1.0 - smoothing.level) * expected;
            self.trend = smoothing.trend * (level - self.level)
                + (1.0 - smoothing.trend) * smoothing.damping * self.trend;
            self.level = level;
        }
        self.samples = self.samples.saturating_add(1);
    }

    /// The value expected `samples` samples ahead; 0 ahead is the smoothed present. Never negative.
    pub fn ahead(&self, smoothing: &Smoothing, samples: u32) -> f64 {
        let (mut factor, mut sum) = (1.0, 0.0);
        for _ in 0..samples.min(1000) {
            factor *= smoothing.damping;
            sum += factor;
        }
        (self.level + sum * self.trend).max(0.0)
    }

    /// Number of samples so far.
    pub const fn samples(&self) -> u32 {
        self.samples
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Promise: P12
    #[test]
    fn forecast_follows_a_trend_and_damps_outliers() {
        let smoothing = Smoothing::default();
        let feed = |samples: &[f64]| {
            let mut forecast = Forecast::default();
            samples.iter().for_each(|sample| forecast.observe(&smoothing, *sample));
            forecast
        };
        let constant = feed(&[0.5; 50]);
        assert!((constant.ahead(&smoothing, 20) - 0.5).abs() < 1e-9);

        let rising: Vec<f64> = (0..50).map(|at| 0.2 + 0.01 * f64::from(at)).collect();
        let rising = feed(&rising);
        let (now, soon) = (rising.ahead(&smoothing, 0), rising.ahead(&smoothing, 10));
        assert!(now > 0.6 && soon > now + 0.02 && soon < now + 0.1, "{now} {soon}");

        // One outlier moves the forecast by less than itself; twenty samples later it is forgotten.
        let mut outlier = [0.2; 50];
        outlier[49] = 1.0;
        assert!(feed(&outlier).ahead(&smoothing, 10) < 1.0);
        outlier[49] = 0.2;
        outlier[29] = 1.0;
        assert!((feed(&outlier).ahead(&smoothing, 10) - 0.2).abs() < 0.02);

        // Falling load does not become negative, and nonsense changes nothing.
        assert!(feed(&[1.0, 0.5, 0.1, 0.0, 0.0]).ahead(&smoothing, 1000) >= 0.0);
        let mut odd = constant;
        [f64::NAN, f64::INFINITY, -1.0].iter().for_each(|sample| odd.observe(&smoothing, *sample));
        assert_eq!(odd, constant);
    }
}
