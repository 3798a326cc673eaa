//! The reports of the arbiter: on the unit, on its VMs, and on the cost of scrubbing.

use std::{io, time::Duration};

use sluice_messages::control::{FromArbiter, ToArbiter};
use tokio::time::timeout;

use super::{ArbiterReports, Unit};
use crate::{channel::Channel, records::unit_event::UnitEvent, records::usage::WorkReport};

/// Time limit for a report, before it counts as unknown.
const DESCRIBE: Duration = Duration::from_secs(1);

/// The memory of a unit, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct UnitReport {
    pub(crate) total: u64,
    pub(crate) lent: u64,
    pub(crate) clean: u64,
    pub(crate) dirty: u64,
    pub(crate) headroom: u64,
    pub(crate) suspect: u64,
}

/// The memory of a VM on a unit, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct VmReport {
    pub(crate) epoch: u64,
    pub(crate) lent: u64,
    pub(crate) headroom: u64,
    pub(crate) dirty: u64,
    pub(crate) holders: u32,
    pub(crate) time: TimeReport,
    pub(crate) work: WorkReport,
}

/// The GPU time of a VM on a unit in its epoch, in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct TimeReport {
    pub(crate) used: u64,
    pub(crate) overlapped: u64,
    pub(crate) waited: u64,
    pub(crate) turns: u64,
}

/// The cost of scrubbing a unit's memory since the start of its arbiter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct UpkeepReport {
    /// Chunks, bytes and nanoseconds of scrubbing.
    pub(crate) scrubs: u64,
    pub(crate) scrubbed: u64,
    pub(crate) took: u64,
    /// The difference between the driver's figure and the ledger's, in bytes.
    pub(crate) drift: u64,
}

impl Unit {
    /// The last report on a VM.
    pub(crate) fn last_of_vm(&self, vm: u32) -> Option<VmReport> {
        self.heard.borrow().vms.get(&vm).map(|(_, report)| *report)
    }

    /// Requests a report on a VM, without waiting for it.
    pub(crate) fn ask_vm(&self, vm: u32) {
        self.tell(ToArbiter::DescribeVm { vm });
    }

    /// The last report on the unit.
    pub(crate) fn last(&self) -> Option<UnitReport> {
        self.heard.borrow().unit.map(|(_, report)| report)
    }

    /// Bytes of guest memory that a VM had pinned for the unit in the last report.
    pub(crate) fn pinned(&self, vm: u32) -> u64 {
        self.heard.borrow().pinned.get(&vm).copied().unwrap_or(0)
    }

    /// The last report on scrubbing.
    pub(crate) fn upkeep(&self) -> Option<UpkeepReport> {
        self.heard.borrow().upkeep
    }

    /// Requests a report on the unit; `None` if there is no answer in time.
    pub(crate) async fn describe(&self) -> Option<UnitReport> {
        self.ask(|heard| heard.unit).await
    }

    /// Requests a report on a VM; `None` if there is no answer in time.
    pub(crate) async fn describe_vm(&self, vm: u32) -> Option<VmReport> {
        self.tell(ToArbiter::DescribeVm { vm });
        self.ask(|heard| heard.vms.get(&vm).copied()).await
    }

    /// Waits until the arbiter has answered all requests so far; returns a report that came meanwhile. It answers in order, so
    /// that its answer to a last request, which it always has, follows those to all others. A report that is only newer than the
    /// request may answer an earlier one, and be older.
    async fn ask<T>(&self, find: impl Fn(&ArbiterReports) -> Option<(u64, T)>) -> Option<T> {
        let before = self.heard.borrow().count;
        if !self.running.borrow().as_ref()?.post(ToArbiter::DescribeUnit {}, Vec::new()) {
            return None;
        }
        let asked = self.asked.get() + 1;
        self.asked.set(asked);
        let answered = async {
            loop {
                let reported = self.reported.notified();
                if self.heard.borrow().answered >= asked {
                    return;
                }
                reported.await;
            }
        };
        if timeout(DESCRIBE, answered).await.is_err() {
            // The answer is late, or lost: an arbiter drops what is not read. Later requests do not wait for it.
            let mut heard = self.heard.borrow_mut();
            heard.answered = heard.answered.max(asked);
            return None;
        }
        find(&self.heard.borrow()).filter(|(count, _)| *count > before).map(|(_, report)| report)
    }

    pub(super) async fn hear(&self, channel: &Channel<FromArbiter, ToArbiter>) -> io::Result<()> {
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
            FromArbiter::Vm { vm, epoch, lent, headroom, dirty, holders } => {
                // Only for VMs in its state, and only for their present epoch.
                if self.is_current(vm, epoch) {
                    self.note(|heard, count| {
                        let time = heard.times.get(&vm).copied().unwrap_or_default();
                        let work = heard.work.get(&vm).copied().unwrap_or_default();
                        let report = VmReport { epoch, lent, headroom, dirty, holders, time, work };
                        heard.vms.insert(vm, (count, report));
                    });
                } else {
                    self.stale.set(self.stale.get() + 1);
                }
            }
            FromArbiter::Time { vm, epoch, used, overlapped, waited, turns } => {
                if self.is_current(vm, epoch) {
                    let report = TimeReport { used, overlapped, waited, turns };
                    self.heard.borrow_mut().times.insert(vm, report);
                }
            }
            FromArbiter::Work { vm, epoch, launches, copies, copied, calls } => {
                if self.is_current(vm, epoch) {
                    let report = WorkReport { launches, copies, copied, calls };
                    self.heard.borrow_mut().work.insert(vm, report);
                }
            }
            FromArbiter::Unit { total, lent, clean, dirty, headroom, suspect } => {
                let report = UnitReport { total, lent, clean, dirty, headroom, suspect };
                let asked = self.asked.get();
                self.note(|heard, count| {
                    heard.unit = Some((count, report));
                    // An adopted arbiter may also answer the last daemon.
                    heard.answered = asked.min(heard.answered + 1);
                });
            }
            FromArbiter::Pinned { vm, epoch, bytes } => {
                if self.is_current(vm, epoch) {
                    self.heard.borrow_mut().pinned.insert(vm, bytes);
                }
            }
            FromArbiter::Upkeep { scrubs, scrubbed, took, drift, figures } => {
                self.set_figures(figures);
                self.heard.borrow_mut().upkeep = Some(UpkeepReport { scrubs, scrubbed, took, drift });
            }
            FromArbiter::WantEscrow { ancestor, bytes } => {
                _ = self.event_sender.send(UnitEvent::Escrow { unit, ancestor, bytes });
            }
            FromArbiter::Event { kind, vm, process, bytes } => {
                _ = self.event_sender.send(UnitEvent::Arbiter { unit, kind, vm, process, bytes });
            }
        }
    }

    pub(super) fn note(&self, enter: impl FnOnce(&mut ArbiterReports, u64)) {
        let mut heard = self.heard.borrow_mut();
        heard.count += 1;
        let count = heard.count;
        enter(&mut heard, count);
        self.reported.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use std::{path::Path, rc::Rc};

    use tokio::task::{LocalSet, spawn_local, yield_now};

    use super::*;
    use crate::{
        channel::send_queue,
        configuration::{Arguments, Configuration},
        handover::{fd_store::FdStore, launching::Launching},
        records::state::{adoption::Adoption, checkpoint::Checkpoint},
        units::unit::UnitPlace,
    };

    /// A unit whose arbiter the test plays.
    fn unit(directory: &Path) -> Rc<Unit> {
        let arguments = Arguments {
            runtime_dir: Some(directory.to_owned()),
            driver: Some("/dev/null".into()),
            ..Arguments::default()
        };
        let configuration = Rc::new(Configuration::load(arguments).expect("a configuration"));
        let fd_store = Rc::new(FdStore::new().expect("no descriptors"));
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
            let reports =
                |lent| FromArbiter::Unit { total: 9, lent, clean: 0, dirty: 0, headroom: 0, suspect: 0 };
            // An answer to the last daemon.
            unit.on_message(reports(1));
            let first = ask();
            yield_now().await;
            let second = ask();
            yield_now().await;
            unit.on_message(reports(2));
            assert_eq!(first.await.expect("a task").map(|report| report.lent), Some(2));
            assert!(!second.is_finished(), "it has the report that was made before its request");
            unit.on_message(reports(3));
            assert_eq!(second.await.expect("a task").map(|report| report.lent), Some(3));
            // The first of these two answers is lost.
            let late = ask();
            yield_now().await;
            tokio::time::advance(DESCRIBE / 2).await;
            let next = ask();
            yield_now().await;
            assert_eq!(late.await.expect("a task").map(|report| report.lent), None);
            unit.on_message(reports(4));
            assert_eq!(next.await.expect("a task").map(|report| report.lent), Some(4));
        };
        LocalSet::new().run_until(test).await;
    }
}
