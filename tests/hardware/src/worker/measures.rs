//! Durations of calls, as a program sees them.

use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::Worker;
use crate::kernels::Image;
use crate::measure::quantile;
use crate::stop::Answer;

impl Worker {
    /// Times from the launch of an empty kernel to its end, with pauses between.
    pub(super) fn latency(&mut self, time: Duration) -> Answer<Value> {
        const PAUSE: Duration = Duration::from_millis(5);
        let empty = self.function(Image::Work, c"empty")?;
        // The first launch loads the code.
        self.launch(empty, [1, 1, 0], &[])?;
        self.cuda.synchronize()?;
        let (mut times, end) = (Vec::new(), Instant::now() + time);
        while Instant::now() < end {
            let start = Instant::now();
            self.launch(empty, [1, 1, 0], &[])?;
            self.cuda.synchronize()?;
            times.push(start.elapsed().as_secs_f64() * 1e3);
            thread::sleep(PAUSE);
        }
        let [median, p99, largest] = [0.5, 0.99, 1.0].map(|share| quantile(&times, share));
        Ok(json!({ "median_ms": median, "p99_ms": p99, "largest_ms": largest, "count": times.len() }))
    }
}
