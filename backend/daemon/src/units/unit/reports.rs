//! The reports of the arbiter: on the unit, on its VMs, and on the cost of scrubbing.

use std::{
    io,
    time::{Duration, Instant},
};

use sluice_messages::{
    control::{FromArbiter, ToArbiter},
    figures::{UnitBytes, Upkeep, VmTime, WorkCounts},
};
use sluice_runtime::clock;

use super::{ArbiterReports, Unit};
use crate::{channel::Channel, records::unit_event::UnitEvent, time_limit::answer_within};

/// Time limit for a report, before it counts as unknown.
pub(super) const DESCRIBE: Duration = Duration::from_secs(1);

/// The memory of a VM on a unit, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct VmReport {
    pub(crate) epoch: u64,
    pub(crate) lent: u64,
    pub(crate) headroom: u64,
    pub(crate) dirty: u64,
    pub(crate) holders: u32,
    pub(crate) time: VmTime,
    pub(crate) work: WorkCounts,
}

impl Unit {
    /// The last report on a VM.
    pub(crate) fn last_of_vm(&self, vm: u32) -> Option<VmReport> {
        self.latest.borrow().vms.get(&vm).map(|(_, report)| *report)
    }

    /// Requests a report on a VM, without waiting for it.
    pub(crate) fn ask_vm(&self, vm: u32) {
        self.tell(ToArbiter::DescribeVm { serial: self.next_serial(), vm });
    }

    /// The last report on the unit.
    pub(crate) fn last(&self) -> Option<UnitBytes> {
        self.latest.borrow().unit.map(|(_, _, report)| report)
    }

    /// The time since the last report on the unit.
    pub(crate) fn age(&self) -> Duration {
        self.latest.borrow().unit.map_or(Duration::ZERO, |(_, at, _)| at.elapsed())
    }

    /// Bytes of guest memory that a VM had pinned for the unit in the last report.
    pub(crate) fn pinned(&self, vm: u32) -> u64 {
        self.latest.borrow().pinned.get(&vm).copied().unwrap_or(0)
    }

    /// The last report on scrubbing.
    pub(crate) fn upkeep(&self) -> Option<Upkeep> {
        self.latest.borrow().upkeep
    }

    /// Requests a report on the unit; `None` if there is no answer in time.
    pub(crate) async fn describe(&self) -> Option<UnitBytes> {
        self.ask(
            |serial| ToArbiter::DescribeUnit { serial },
            |latest| latest.unit.map(|(of, _, report)| (of, report)),
        )
        .await
    }

    /// Requests a report on a VM; `None` if there is no answer in time, or it is not about the present epoch.
    pub(crate) async fn describe_vm(&self, vm: u32) -> Option<VmReport> {
        self.ask(|serial| ToArbiter::DescribeVm { serial, vm }, |latest| latest.vms.get(&vm).copied()).await
    }

    /// A serial higher than that of each earlier request, those of earlier daemons included: the clock is ahead of every count.
    fn next_serial(&self) -> u64 {
        let serial = clock::nanoseconds().max(self.serial.get() + 1);
        self.serial.set(serial);
        serial
    }

    /// Sends a request and waits for its answer, or for that to a later one: the arbiter answers in order, and drops the oldest answers
    /// if they are not read.
    async fn ask<T>(
        &self,
        request: impl FnOnce(u64) -> ToArbiter,
        find: impl Fn(&ArbiterReports) -> Option<(u64, T)>,
    ) -> Option<T> {
        let serial = self.next_serial();
        if !self.running.borrow().as_ref()?.post(request(serial), Vec::new()) {
            return None;
        }
        let answered = async {
            loop {
                let reported = self.reported.notified();
                if self.latest.borrow().answered >= serial {
                    return;
                }
                reported.await;
            }
        };
        answer_within(DESCRIBE, answered).await?;
        find(&self.latest.borrow()).filter(|(of, _)| *of >= serial).map(|(_, report)| report)
    }

    pub(super) async fn receive(&self, channel: &Channel<FromArbiter, ToArbiter>) -> io::Result<()> {
        while let Some((message, _)) = channel.receive().await? {
            self.on_message(message);
        }
        Ok(())
    }

    fn on_message(&self, message: FromArbiter) {
        let unit = self.number;
        // The receiver of unit events is gone while the daemon ends.
        match message {
            FromArbiter::Ready { bytes, context, margin, host_access } => {
                tracing::info!(unit, bytes, context, margin, ?host_access, "the unit lends memory");
                self.set_host_access(host_access);
                self.least.set(context.saturating_add(margin));
                self.lends.send_replace(Some(bytes));
                if let Some(process) = self.process.get() {
                    self.record(process, Some(bytes));
                }
            }
            FromArbiter::Vm { serial, vm, epoch, lent, headroom, dirty, holders } => {
                let mut latest = self.latest.borrow_mut();
                // Only for VMs in its state, and only for their present epoch.
                if self.is_current(vm, epoch) {
                    let time = latest.times.get(&vm).copied().unwrap_or_default();
                    let work = latest.work.get(&vm).copied().unwrap_or_default();
                    let report = VmReport { epoch, lent, headroom, dirty, holders, time, work };
                    latest.vms.insert(vm, (serial, report));
                } else {
                    self.stale.set(self.stale.get() + 1);
                }
                self.answered(&mut latest, serial);
            }
            FromArbiter::Time { vm, epoch, time } => {
                if self.is_current(vm, epoch) {
                    self.latest.borrow_mut().times.insert(vm, time);
                }
            }
            FromArbiter::Work { vm, epoch, work } => {
                if self.is_current(vm, epoch) {
                    self.latest.borrow_mut().work.insert(vm, work);
                }
            }
            FromArbiter::Unit { serial, memory } => {
                let mut latest = self.latest.borrow_mut();
                latest.unit = Some((serial, Instant::now(), memory));
                self.answered(&mut latest, serial);
            }
            FromArbiter::Pinned { vm, epoch, bytes } => {
                if self.is_current(vm, epoch) {
                    self.latest.borrow_mut().pinned.insert(vm, bytes);
                }
            }
            FromArbiter::Upkeep { upkeep, figures } => {
                self.set_figures(figures);
                self.latest.borrow_mut().upkeep = Some(upkeep);
            }
            FromArbiter::WantEscrow { ancestor, bytes } => {
                _ = self.event_sender.send(UnitEvent::Escrow { unit, ancestor, bytes });
            }
            FromArbiter::Event { kind, vm, process, bytes } => {
                _ = self.event_sender.send(UnitEvent::Arbiter { unit, kind, vm, process, bytes });
            }
        }
    }

    fn answered(&self, latest: &mut ArbiterReports, serial: u64) {
        latest.answered = latest.answered.max(serial);
        self.reported.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use std::{path::Path, rc::Rc};

    use sluice_runtime::closer::Closers;
    use tokio::task::{LocalSet, spawn_local, yield_now};

    use super::*;
    use crate::{
        channel::send_queue,
        configuration::{Arguments, Configuration},
        handover::{fd_store::FdStore, launching::Launching},
        records::state::{adoption::Adoption, checkpoint::Checkpoint},
        units::unit::{UnitPlace, arbiter::HUNG},
    };

    /// A unit whose arbiter the test plays.
    fn unit(directory: &Path) -> Rc<Unit> {
        let arguments = Arguments {
            runtime_dir: Some(directory.to_owned()),
            driver: Some("/dev/null".into()),
            ..Arguments::default()
        };
        let configuration = Rc::new(Configuration::load(arguments).expect("a configuration"));
        let fd_store = Rc::new(FdStore::new(Closers::new(1)).expect("no descriptors"));
        let adoption = Rc::new(Adoption::open(directory, false));
        let launching = Rc::new(Launching::new(Rc::clone(&configuration), None, fd_store, adoption));
        let checkpoint = Rc::new(Checkpoint::open(directory).expect("a checkpoint"));
        let (events, _heard) = tokio::sync::mpsc::unbounded_channel();
        Unit::new(0, UnitPlace::device(0), configuration, launching, None, checkpoint, events)
    }

    // Promise: P20
    #[tokio::test]
    async fn report_that_answers_an_earlier_request_is_not_taken_for_a_later_one() {
        let test = async {
            // Only the test lets time pass.
            tokio::time::pause();
            let directory = tempfile::tempdir().expect("a directory");
            let unit = unit(directory.path());
            let (queue, _queued) = send_queue();
            *unit.running.borrow_mut() = Some(queue);
            let ask = || {
                let unit = Rc::clone(&unit);
                spawn_local(async move { unit.describe().await })
            };
            let reports = |serial, lent| FromArbiter::Unit {
                serial,
                memory: UnitBytes { total: 9, lent, ..UnitBytes::default() },
            };
            // An answer to the last daemon comes first, before any request and between the others.
            let last_daemon = clock::nanoseconds();
            unit.on_message(reports(last_daemon, 1));
            let first = ask();
            yield_now().await;
            let of_first = unit.serial.get();
            let second = ask();
            yield_now().await;
            let of_second = unit.serial.get();
            unit.on_message(reports(last_daemon, 1));
            yield_now().await;
            assert!(!first.is_finished(), "it has the report that was made for the last daemon");
            unit.on_message(reports(of_first, 2));
            assert_eq!(first.await.expect("a task").map(|report| report.lent), Some(2));
            assert!(!second.is_finished(), "it has the report that was made before its request");
            unit.on_message(reports(of_second, 3));
            assert_eq!(second.await.expect("a task").map(|report| report.lent), Some(3));
            // The first of these two answers is lost, and the other serves both.
            let late = ask();
            yield_now().await;
            let next = ask();
            yield_now().await;
            unit.on_message(reports(unit.serial.get(), 4));
            for lost in [late, next] {
                assert_eq!(lost.await.expect("a task").map(|report| report.lent), Some(4));
            }
            // An answer about a VM that is not known here ends the wait, and is none.
            let of_vm = Rc::clone(&unit);
            let of_vm = spawn_local(async move { of_vm.describe_vm(7).await });
            yield_now().await;
            let serial = unit.serial.get();
            unit.on_message(FromArbiter::Vm {
                serial,
                vm: 7,
                epoch: 0,
                lent: 0,
                headroom: 0,
                dirty: 0,
                holders: 0,
            });
            assert_eq!(of_vm.await.expect("a task"), None);
            assert_eq!(unit.stale(), 1);
        };
        LocalSet::new().run_until(test).await;
    }

    // Promise: P65
    #[tokio::test]
    async fn arbiter_is_hung_after_its_own_silence_and_not_after_a_stop_of_the_daemon() {
        let test = async {
            // Only the test lets time pass.
            tokio::time::pause();
            let directory = tempfile::tempdir().expect("a directory");
            let unit = unit(directory.path());
            let (queue, _queued) = send_queue();
            *unit.running.borrow_mut() = Some(queue);
            unit.lends.send_replace(Some(0));
            let watched = Rc::clone(&unit);
            let watched = spawn_local(async move { watched.watch_pulse().await });
            let passes = async |time| {
                yield_now().await;
                tokio::time::advance(time).await;
                yield_now().await;
            };
            // A request is open in each stop, so that it has a wait of that length for its answer.
            for _ in 0..4 {
                passes(HUNG * 2).await;
                passes(Duration::ZERO).await;
            }
            assert!(!watched.is_finished(), "four stops count as four answers that did not come in time");
            let serial = unit.serial.get();
            unit.on_message(FromArbiter::Unit {
                serial,
                memory: UnitBytes { total: 9, ..UnitBytes::default() },
            });
            // From here on, time passes to the next limit whenever the unit waits.
            let began = tokio::time::Instant::now();
            let why = watched.await.expect("a task");
            assert!((HUNG..HUNG * 2).contains(&began.elapsed()), "{why} after {:?}", began.elapsed());
        };
        LocalSet::new().run_until(test).await;
    }
}
