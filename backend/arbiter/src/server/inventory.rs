//! The inventory's listings: unknown processes, memory that drivers took, reported time, and the probe that finds out to which
//! process the driver books chunks.

use super::{MESSAGES, Server};
use crate::{
    booking::{self, BookingProbe, ProbeReading, ProbeStep, Sizes},
    ids::{VmKey, WorkerId},
    inventory::{ListedProcess, News},
};
use rustix::{fd::OwnedFd, io::Errno};
use sluice_messages::{
    control::{ArbiterEvent, Figures, FromArbiter, NO_USER, ToArbiter},
    custody::CustodyRequest,
};
use sluice_runtime::endable::EndableProcess;
use std::collections::{HashMap, HashSet};

/// Looks in a row without any bytes per process, after which a new probe finds out about the figures.
const ABSENT: u32 = 3;

impl Server {
    pub(super) fn receive_listing(&mut self) {
        for _ in 0..MESSAGES {
            let now = self.now();
            let Some(inventory) = &mut self.inventory else { return };
            match inventory.receive(now) {
                Ok(Some(News::Listed(id, false))) => self.custody.worker_gone(id),
                Ok(Some(News::Listed(id, true))) => self.custody.still_listed(id, now),
                Ok(Some(News::Memory { total, used })) => self.reconcile(total, used),
                Ok(Some(News::Processes(list))) => self.compare(&list),
                Ok(None) => {}
                Err(Errno::AGAIN | Errno::INTR) => return,
                Err(error) => {
                    tracing::warn!(%error, "the inventory has ended; memory of dead workers stays with their VMs");
                    self.inventory = None;
                }
            }
        }
    }

    fn reconcile(&mut self, total: u64, used: u64) {
        let Some(known) = self.custody.known() else { return };
        if let Some(drift) = self.audit.reconcile(known, used, total, !self.custody.is_idle()) {
            tracing::warn!(known, used, drift, "the device's figure differs from the ledger");
            self.send_to_daemon(FromArbiter::Event {
                kind: ArbiterEvent::Drift as u32,
                vm: 0,
                process: 0,
                bytes: drift,
            });
        }
    }

    /// Reports VMs that used more time than they are charged, if the driver reports the time of processes.
    fn compare_time(&mut self, list: &[ListedProcess], workers: &HashMap<u32, WorkerId>) {
        let busy: Option<Vec<(u32, u32)>> =
            list.iter().map(|listed| Some((listed.process, listed.busy?))).collect();
        let all = busy.iter().flatten().map(|(_, busy)| *busy).sum();
        let of_workers: Option<Vec<(WorkerId, u32)>> = busy.map(|busy| {
            busy.iter().filter_map(|(process, busy)| Some((*workers.get(process)?, *busy))).collect()
        });
        for (key, missing) in self.time.compare(of_workers.as_deref().map(|round| (round, all))) {
            tracing::warn!(vm = key.vm, ?missing, "a VM used more time than its workers report");
            let kind = ArbiterEvent::Undercharged as u32;
            self.send_to_daemon(FromArbiter::Event { kind, vm: key.vm, process: 0, bytes: 0 });
        }
    }

    /// Books the bytes of drivers to their workers, compares the time, and finds unknown processes.
    fn compare(&mut self, list: &[ListedProcess]) {
        let workers: HashMap<u32, WorkerId> =
            self.custody.processes().map(|(id, process)| (process, id)).collect();
        let own = rustix::process::getpid().as_raw_nonzero().get().unsigned_abs();
        let listed: HashSet<u32> = list.iter().map(|listed| listed.process).collect();
        self.foreign_processes
            .retain(|process, _| listed.contains(process) && !workers.contains_key(process));
        self.compare_time(list, &workers);
        let now = self.now();
        let judges = self.figures == Figures::Used;
        for ListedProcess { process, bytes, asked, .. } in list.iter().filter(|listed| listed.process != own)
        {
            if let Some(id) = workers.get(process) {
                self.custody.set_booked(*id, bytes.filter(|_| judges), *asked, now);
                continue;
            }
            // A worker may be listed just before the arbiter gets it, or just after it is gone.
            match self.foreign_processes.get_mut(process) {
                None => {
                    self.foreign_processes.insert(*process, false);
                }
                Some(reported @ false) => {
                    *reported = true;
                    tracing::warn!(process, ?bytes, "an unknown process uses the device");
                    let kind = ArbiterEvent::ForeignProcess as u32;
                    let bytes = bytes.unwrap_or(0);
                    self.send_to_daemon(FromArbiter::Event { kind, vm: 0, process: *process, bytes });
                }
                Some(true) => {}
            }
        }
        if judges {
            self.custody.judge();
        }
        self.continue_booking_probe(list, own);
    }

    /// Lends memory to a probe, in an account of its own: no VM is charged for it, and its memory serves others once the driver
    /// no longer lists it, as with every worker.
    pub(super) fn begin_booking_probe(&mut self, process: u32, socket: OwnedFd, ended_by: EndableProcess) {
        let one_is_left = self.custody.current(booking::NO_VM).is_some();
        if self.inventory.is_none() || one_is_left {
            // The probe ends when its socket closes.
            tracing::info!(process, one_is_left, "a probe is refused");
            return self.closers.of(booking::NO_VM).close(vec![socket]);
        }
        self.booking_probes += 1;
        let sizes = Sizes { context: self.context_bytes, margin: self.custody.margin() };
        let vm = VmKey { vm: booking::NO_VM, epoch: self.booking_probes };
        let (limit, no) = (sizes.quota(), 0);
        let account = ToArbiter::Vm {
            vm: vm.vm,
            epoch: vm.epoch,
            limit,
            guaranteed: no,
            headroom: no,
            pinned: no,
            ancestors: no,
        };
        self.command(account, Vec::new());
        let worker = WorkerId(self.next_worker);
        let books = self.figures == Figures::Unknown;
        self.booking_probe = Some(BookingProbe::new((worker, process), vm, sizes, books, self.now()));
        if books {
            // The figures may soon be used, so growth must be within the quota whatever they show.
            self.custody.set_figures(true, false);
        }
        match self.adopt(vm, (process, NO_USER), socket, ended_by) {
            Ok(()) if self.links.contains_key(&worker) => {}
            Ok(()) => self.end_booking_probe("there is no room for it"),
            Err(error) => self.end_booking_probe(&error.to_string()),
        }
    }

    /// Passes the figures of a look to the present probe.
    fn continue_booking_probe(&mut self, list: &[ListedProcess], own: u32) {
        let (capacity, _) = self.custody.ledger().totals();
        let chunks = [core::mem::replace(&mut self.chunks_then, capacity), capacity];
        if self.figures == Figures::Used {
            let absent = !list.is_empty() && list.iter().all(|listed| listed.bytes.is_none());
            self.absent = if absent { self.absent.saturating_add(1) } else { 0 };
            if self.absent >= ABSENT {
                tracing::warn!("the driver no longer reports bytes per process");
                self.set_figures(Figures::Unknown);
                self.custody.set_figures(false, false);
            }
        }
        let Some(probe) = &mut self.booking_probe else { return };
        let bytes = |process| list.iter().find(|listed| listed.process == process).map(|listed| listed.bytes);
        let reading = ProbeReading { made: bytes(own).flatten(), chunks, probe: bytes(probe.process()) };
        let id = probe.worker();
        let step = probe.evaluate(reading);
        tracing::debug!(?reading, ?step, "a look beside a probe");
        self.follow_probe(id, step);
    }

    /// Carries out the consequence of a look, or of a request of the probe.
    pub(super) fn follow_probe(&mut self, id: WorkerId, step: ProbeStep) {
        match step {
            ProbeStep::Wait => {}
            ProbeStep::Lend(serial, bytes) => {
                self.custody.request(id, CustodyRequest::Take { serial, bytes }, self.now());
            }
            ProbeStep::Used => self.dismiss(),
            ProbeStep::Found(booking) => {
                tracing::info!(?booking, "the driver's booking of lent memory is known");
                self.set_figures(booking.figures());
                self.custody.set_figures(self.figures == Figures::Used, booking.counts_imports());
                self.dismiss();
            }
        }
    }

    fn set_figures(&mut self, figures: Figures) {
        self.figures = figures;
        self.absent = 0;
    }

    /// Ends a probe without a result: the use of figures stays unknown.
    pub(super) fn end_booking_probe(&mut self, why: &str) {
        if self.booking_probe.as_ref().is_some_and(BookingProbe::books) {
            tracing::warn!(why, "the driver's booking of lent memory is still unknown");
            self.custody.set_figures(false, false);
        } else {
            tracing::warn!(why, "a probe has not used lent memory");
        }
        self.dismiss();
    }

    /// Closes the link to a probe, so that it ends.
    fn dismiss(&mut self) {
        let Some(probe) = self.booking_probe.take() else { return };
        self.custody.worker_left(probe.worker());
        let VmKey { vm, epoch } = probe.vm();
        self.command(ToArbiter::Forget { vm, epoch }, Vec::new());
    }
}
