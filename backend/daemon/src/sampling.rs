//! Looks at what every VM has, again and again, for usage and for those who ask.
//!
//! Nobody is waited for: what an arbiter said since the last look counts, and it is asked again for the next. A VM without a
//! session and without memory is not asked about.

use std::{collections::BTreeMap, rc::Rc, time::Duration};

use tokio::time::{MissedTickBehavior, interval};

use crate::{
    registry::Registry,
    unit::{VmReport, WorkReport},
    usage::{Figures, Sample},
};

/// How often.
const EVERY: Duration = Duration::from_secs(1);
/// After so many looks what was used is written down.
const WRITE: u32 = 5;

/// What of a VM is in its usage already.
#[derive(Clone, Debug, Default)]
pub(crate) struct Counted {
    /// Sessions.
    sessions: u64,
    /// By unit: what it counts.
    done: BTreeMap<u32, Done>,
}

/// What a unit counts of a VM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Done {
    /// Nanoseconds of its time.
    time: u64,
    work: WorkReport,
}

impl Done {
    fn of(report: &VmReport) -> Self {
        Self { time: report.time.used, work: report.work }
    }

    /// What has come to it: all of it where the unit has begun to count anew.
    fn since(self, before: Self) -> Self {
        self.combine(before, |now, before| now.checked_sub(before).unwrap_or(now))
    }

    fn and(self, other: Self) -> Self {
        self.combine(other, u64::saturating_add)
    }

    fn combine(self, other: Self, with: impl Fn(u64, u64) -> u64) -> Self {
        Self { time: with(self.time, other.time), work: self.work.combine(other.work, &with) }
    }
}

/// Looks for ever.
pub(crate) async fn serve(registry: Rc<Registry>) {
    let mut turn = interval(EVERY);
    turn.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut looks = 0_u32;
    loop {
        turn.tick().await;
        registry.take_stock();
        looks = looks.wrapping_add(1);
        if looks.is_multiple_of(WRITE) {
            registry.write_usage().await;
        }
    }
}

impl Registry {
    /// Adds up what VMs have had since the last look, and asks what they have now.
    pub(crate) fn take_stock(&self) {
        let elapsed = self.usage.elapsed();
        let mut samples = Vec::new();
        let mut counted = self.counted.borrow_mut();
        let mut still = BTreeMap::new();
        for vm in self.roster.all() {
            let mut has = Counted { sessions: vm.begun(), done: BTreeMap::new() };
            let before = counted.remove(&vm.id()).unwrap_or_default();
            let (mut lent, mut other, mut done) = (0_u64, 0_u64, Done::default());
            for unit in self.units.iter() {
                let Some(report) = unit.last_of_vm(vm.id()) else { continue };
                lent = lent.saturating_add(report.lent);
                other = other.saturating_add(report.dirty).saturating_add(report.headroom);
                // What an adopted arbiter has counted before this daemon is in the figures already, but for some seconds.
                let now = Done::of(&report);
                match before.done.get(&unit.number()) {
                    Some(before) => done = done.and(now.since(*before)),
                    None if unit.is_adopted() => {}
                    None => done = done.and(now),
                }
                has.done.insert(unit.number(), now);
            }
            let subject = vm.subject().clone();
            #[expect(clippy::cast_precision_loss, reason = "a figure that is multiplied by a measured time")]
            let lent_bytes = lent as f64;
            samples.push(Sample {
                vm: subject.id,
                organisation: subject.organisation,
                project: subject.project,
                figures: Figures {
                    byte_seconds: lent_bytes * elapsed,
                    gpu_seconds: Duration::from_nanos(done.time).as_secs_f64(),
                    launches: done.work.launches,
                    copies: done.work.copies,
                    copied: done.work.copied,
                    calls: done.work.calls,
                    seconds: elapsed,
                    sessions: has.sessions.saturating_sub(before.sessions),
                },
            });
            // A session may have come and gone between two looks.
            let began = has.sessions > before.sessions;
            still.insert(vm.id(), has);
            if lent > 0 || other > 0 || vm.sessions_left() > 0 || began {
                self.units.iter().for_each(|unit| unit.ask_vm(vm.id()));
            }
        }
        *counted = still;
        self.usage.add(samples);
    }

    /// The last look of this daemon.
    pub(crate) async fn sample(&self) {
        self.take_stock();
        self.write_usage().await;
    }

    async fn write_usage(&self) {
        if let Err(error) = self.usage.write().await {
            tracing::error!("what was used cannot be written down: {error}");
        }
    }
}
