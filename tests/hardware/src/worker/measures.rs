//! Durations of calls, as a program sees them.

use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::Worker;
use crate::driver::HostSpan;
use crate::kernels::Image;
use crate::measure::{quantile, timed};
use crate::stop::{Answer, Stop};
use crate::system::{Area, Pages};

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

    /// A call that the worker answers, in microseconds.
    pub(super) fn calls(&self, times: u32) -> Answer<Value> {
        let calls = (0..times).map(|_| Ok(timed(|| self.memory())?.1)).collect::<Answer<Vec<_>>>()?;
        Ok(json!({ "us": quantile(&calls, 0.5), "p99_us": quantile(&calls, 0.99) }))
    }

    /// The cost of a launch for its caller, of a launch with its end, and launches per second until the last is complete.
    pub(super) fn launches(&mut self, times: u32) -> Answer<Value> {
        /// Launches in a burst: few enough that the queue never fills.
        const BURST: u32 = 64;
        let empty = self.function(Image::Work, c"empty")?;
        let launch = || self.launch(empty, [1, 1, 0], &[]);
        launch()?;
        self.cuda.synchronize()?;
        let (mut costs, mut ends) = (Vec::new(), Vec::new());
        for _ in 0..times / BURST {
            costs.push(timed(|| (0..BURST).try_for_each(|_| launch()))?.1 / f64::from(BURST));
            self.cuda.synchronize()?;
            ends.push(timed(|| launch().and_then(|()| self.cuda.synchronize()))?.1);
        }
        let (_, took) =
            timed(|| (0..times).try_for_each(|_| launch()).and_then(|()| self.cuda.synchronize()))?;
        Ok(json!({
            "launch_us": quantile(&costs, 0.5), "launch_and_wait_us": quantile(&ends, 0.5),
            "launches_per_second": f64::from(times) / took * 1e6,
        }))
    }

    /// Copies in both directions, in microseconds. The bytes must come back as they were.
    pub(super) fn copies(&self, bytes: u64, pinned: bool, times: u32) -> Answer<Value> {
        let length = usize::try_from(bytes).map_err(|_| Stop::failed("too many bytes"))?;
        let device = self.cuda.allocate(length)?;
        let pinned = pinned.then(|| self.cuda.pin(bytes)).transpose()?;
        let area = Area::pages(length, Pages::Small)?;
        let span = pinned.as_ref().map_or_else(|| HostSpan::from(&area), |pinned| pinned.span());
        // Pages are touched for the first time by the first copy.
        self.cuda.fill(device, bytes & !3, 0x5a5a_1234)?;
        self.cuda.copy_out(span, device)?;
        let (mut inwards, mut outwards) = (Vec::new(), Vec::new());
        for _ in 0..times {
            inwards.push(timed(|| self.cuda.copy_in(device, span))?.1);
            outwards.push(timed(|| self.cuda.copy_out(span, device))?.1);
        }
        let mut last = [0; 4];
        self.cuda.read(device + (bytes & !3) - 4, &mut last)?;
        self.cuda.free(device)?;
        if u32::from_ne_bytes(last) != 0x5a5a_1234 {
            return Err(Stop::failed(format!("{bytes} bytes came back changed")));
        }
        Ok(json!({ "in_us": quantile(&inwards, 0.5), "out_us": quantile(&outwards, 0.5) }))
    }

    /// Allocations, a few at a time as in programs, and their frees, in microseconds.
    pub(super) fn allocations(&self, bytes: u64, times: u32) -> Answer<Value> {
        const TOGETHER: u64 = 256 << 20;
        let length = usize::try_from(bytes).map_err(|_| Stop::failed("too many bytes"))?;
        let together = (TOGETHER / bytes.max(1)).clamp(1, 16);
        let (mut allocate, mut free) = (Vec::new(), Vec::new());
        for _ in 0..u64::from(times).div_ceil(together) {
            let mut all = Vec::new();
            let allocated: Answer = (0..together).try_for_each(|_| {
                let (at, took) = timed(|| self.cuda.allocate(length))?;
                all.push(at);
                allocate.push(took);
                Ok(())
            });
            // Also after a refusal: the command may be tried again.
            for at in all {
                free.push(timed(|| self.cuda.free(at))?.1);
            }
            allocated?;
        }
        Ok(json!({ "allocate_us": quantile(&allocate, 0.5), "free_us": quantile(&free, 0.5) }))
    }

    /// Loads and unloads of a small module, in microseconds.
    pub(super) fn loads(&mut self, times: u32) -> Answer<Value> {
        let mut loads = Vec::new();
        for _ in 0..times {
            loads.push(timed(|| self.module(Image::Small))?.1);
            self.unload(Image::Small)?;
        }
        Ok(json!({ "load_us": quantile(&loads, 0.5) }))
    }
}
