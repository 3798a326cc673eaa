//! The tasks of the scrubber thread, and the checks that the driver still works.

use super::{BATCH, MEASURE, RunError, Server};
use crate::{
    custody::{Millis, Task},
    scrub::{Done as TaskDone, Fault, News as ScrubberNews, ScrubWork},
    unit::Piece,
};
use sluice_messages::{
    control::{ArbiterEvent, FromArbiter},
    figures::Upkeep,
};
use std::time::Duration;

/// Time limit of the driver for a task, or a probe of the device; and for the first tasks, which take all memory.
const TASK: Duration = Duration::from_secs(20);
const FIRST_TASKS: Duration = Duration::from_secs(120);
/// Milliseconds after which a turn of the loop comes at the latest, with some to spare. What is beyond them is time for which this process, and
/// with it the thread that calls the driver, did not run.
const TURN: Millis = 2 * MEASURE;
/// Bytes that must be clean before lending begins.
const FIRST_CLEAN: u64 = 32 << 20;
/// Bounds of the intended time of one scrub: a taker that waits may have to wait for it.
const BATCH_TIME: [Duration; 2] = [Duration::from_millis(2), Duration::from_millis(10)];

/// The driver's present work on the scrubber thread, and the time that it takes.
#[derive(Debug, Default)]
pub(super) struct DriverWork {
    /// A task is under way.
    task: bool,
    /// A probe is under way. It comes after the task, so its time begins when the task ends.
    probe: bool,
    /// Milliseconds since the start of the task, or else of the probe, for which this process ran.
    took: Millis,
    /// The time of the last turn.
    turn: Millis,
}

impl DriverWork {
    fn begin_task(&mut self) {
        (self.task, self.took) = (true, 0);
    }

    fn end_task(&mut self) {
        (self.task, self.took) = (false, 0);
    }

    /// False if a probe is under way already.
    fn begin_probe(&mut self) -> bool {
        if !self.task && !self.probe {
            self.took = 0;
        }
        !core::mem::replace(&mut self.probe, true)
    }

    /// Notes a turn of the loop. True if the driver has taken longer than `limit`.
    fn is_late(&mut self, now: Millis, limit: Duration) -> bool {
        let passed = now.saturating_sub(core::mem::replace(&mut self.turn, now)).min(TURN);
        self.took += passed;
        (self.task || self.probe) && u128::from(self.took) > limit.as_millis()
    }
}

impl Server {
    pub(super) fn submit(&mut self, task: Task) {
        self.away = match &task {
            Task::Scrub(orders) => orders.iter().map(|order| order.chunk).collect(),
            Task::Release(chunks) | Task::Remake { chunks, .. } | Task::Move { chunks } => chunks.clone(),
            Task::Take { .. } | Task::Measure => Vec::new(),
        };
        let pieces: Vec<Piece> = self
            .away
            .iter()
            .filter_map(|chunk| self.pieces.get_mut(chunk.0 as usize).and_then(Option::take))
            .collect();
        assert_eq!(pieces.len(), self.away.len(), "a chunk that is not lent is here or with the scrubber");
        self.driver_work.begin_task();
        self.scrubber.submit(ScrubWork { task, pieces });
    }

    /// Ends the arbiter if the driver failed or hangs: memory that cannot be proven clean is useless.
    pub(super) fn check_driver(&mut self) -> Result<(), RunError> {
        let limit = self.timeout();
        let now = self.now();
        let hangs = self.driver_work.is_late(now, limit);
        let failed = match self.fault.take() {
            Some(fault) => RunError::Driver(fault),
            None if hangs => RunError::Hung(limit),
            None => return Ok(()),
        };
        // If scrubs fail although the device works, the next arbiter may get sound chunks from the driver; no event is sent.
        if !matches!(failed, RunError::Driver(Fault::Scrubs(_))) {
            let kind = ArbiterEvent::ProbeFailed as u32;
            self.send_to_daemon(FromArbiter::Event { kind, vm: 0, process: 0, bytes: 0 });
            self.flush();
        }
        Err(failed)
    }

    const fn timeout(&self) -> Duration {
        if self.announced.is_some() { TASK } else { FIRST_TASKS }
    }

    /// Requests a probe of the device.
    pub(super) fn probe(&mut self) {
        if self.driver_work.begin_probe() {
            self.scrubber.probe();
        }
    }

    pub(super) fn receive_from_scrubber(&mut self) {
        while let Some(news) = self.scrubber.news() {
            match news {
                ScrubberNews::Done(done) => {
                    self.driver_work.end_task();
                    self.done(done);
                }
                ScrubberNews::Probed => {
                    self.driver_work.probe = false;
                    tracing::info!("the device passed a probe");
                }
                ScrubberNews::Failed(fault) => self.fault = Some(fault),
            }
        }
    }

    fn done(&mut self, done: TaskDone) {
        let scrubbed = matches!(done.outcome, crate::custody::TaskOutcome::Scrubbed(_));
        let taken = matches!(done.outcome, crate::custody::TaskOutcome::Taken { .. });
        if let Some((time, bytes)) = done.scrubbed {
            let took = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
            let done =
                Upkeep { scrubs: done.pieces.len() as u64, scrubbed: bytes, took, ..Upkeep::default() };
            self.upkeep = self.upkeep.combine(done, u64::saturating_add);
            self.adapt(time, bytes);
        }
        if done.receipts_lost > 0 {
            let kind = ArbiterEvent::ReceiptsLost as u32;
            self.send_to_daemon(FromArbiter::Event { kind, vm: 0, process: 0, bytes: done.receipts_lost });
        }
        let made = self.custody.finished(done.outcome);
        let places = if scrubbed { core::mem::take(&mut self.away) } else { made };
        for (chunk, piece) in places.into_iter().zip(done.pieces) {
            let index = chunk.0 as usize;
            if self.pieces.len() <= index {
                self.pieces.resize_with(index + 1, || None);
            }
            if let Some(place) = self.pieces.get_mut(index) {
                *place = Some(piece);
            }
        }
        if taken && !self.taken {
            self.taken = true;
            self.custody.set_nominal();
        }
        self.announce();
    }

    /// Adapts the bytes of one scrub to the intended time.
    fn adapt(&mut self, time: Duration, bytes: u64) {
        tracing::debug!(bytes, ?time, "chunks are scrubbed");
        if time > BATCH_TIME[1] {
            self.batch = (self.batch / 2).max(BATCH[0]);
        } else if time < BATCH_TIME[0] && bytes >= self.batch / 2 {
            self.batch = (self.batch * 2).min(BATCH[1]);
        }
    }

    /// Reports the bytes that can be lent: once there is clean memory, and again if the unit turns out to have more.
    fn announce(&mut self) {
        let bytes = self.custody.ledger().nominal();
        if !self.taken || self.announced == Some(bytes) {
            return;
        }
        if self.announced.is_some() || self.custody.clean_bytes() >= FIRST_CLEAN.min(bytes) {
            if self.announced.replace(bytes).is_some() {
                self.audit.measure_again();
            }
            let (context, margin, host_access) =
                (self.context_bytes, self.custody.margin(), self.host_access);
            tracing::info!(bytes, context, ?host_access, "the unit lends");
            self.send_to_daemon(FromArbiter::Ready { bytes, context, margin, host_access });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STEP: Millis = MEASURE;
    const LIMIT: Millis = 20_000;

    fn is_late(work: &mut DriverWork, now: Millis) -> bool {
        work.is_late(now, Duration::from_millis(LIMIT))
    }

    // Promise: P65
    #[test]
    fn time_for_which_the_arbiter_did_not_run_is_not_the_drivers() {
        let mut work = DriverWork::default();
        work.begin_task();
        assert!(!is_late(&mut work, 100 * LIMIT), "a turn is late by a minute and more");
        let mut now = 100 * LIMIT;
        for _ in 0..(LIMIT - TURN) / STEP {
            now += STEP;
            assert!(!is_late(&mut work, now), "{now}");
        }
        assert!(is_late(&mut work, now + STEP), "a task that does not end is late");
    }

    #[test]
    fn time_of_a_probe_begins_at_the_end_of_the_task_before_it() {
        let mut work = DriverWork::default();
        let mut now = 0;
        let mut turns = |work: &mut DriverWork, count: Millis| {
            (0..count).any(|_| {
                now += STEP;
                is_late(work, now)
            })
        };
        assert!(!turns(&mut work, 3 * LIMIT / STEP), "there is no work");
        work.begin_task();
        assert!(!turns(&mut work, LIMIT / STEP));
        assert!(work.begin_probe());
        assert!(!work.begin_probe(), "one is under way");
        work.end_task();
        assert!(!turns(&mut work, LIMIT / STEP));
        work.probe = false;
        assert!(!turns(&mut work, LIMIT / STEP), "the probe has ended");
        assert!(work.begin_probe());
        assert!(!turns(&mut work, LIMIT / STEP));
        assert!(turns(&mut work, 1));
    }
}
