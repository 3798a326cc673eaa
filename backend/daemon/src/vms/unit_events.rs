//! The handler of unit events: it decides the consequences for VMs when something happens on a unit.
//!
//! The other modules send unit events, which are handled one after the other; those modules also carry out its decisions. It
//! must never wait for a process: a later event may be the one that protects a tenant.

use std::{
    cell::RefCell,
    collections::BTreeMap,
    rc::Rc,
    sync::Arc,
    time::{Duration, Instant},
};

use sluice_api::v1::FencedBy;
use sluice_messages::control::{ArbiterEvent, HostAccess, NeededAbility};
use tokio::{
    sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel},
    time::sleep,
};

use crate::{
    configuration::FencePolicy,
    records::event_counter::{EventCounter, RecordedIn},
    records::journal::{Journal, Subject},
    records::state::checkpoint::Checkpoint,
    records::unit_event::UnitEvent,
    units::escrow::Escrows,
    units::set::Units,
    units::xid::XidClass,
    vms::set::VmSet,
    vms::strikes::StrikeCounter,
};

/// Time until an excess escrow is requested again.
const AGAIN: Duration = Duration::from_secs(1);

/// The handler of unit events.
#[derive(Debug)]
pub(crate) struct UnitEvents {
    units: Rc<Units>,
    vm_set: Rc<VmSet>,
    checkpoint: Rc<Checkpoint>,
    policy: FencePolicy,
    strikes: RefCell<StrikeCounter>,
    journal: Arc<Journal>,
    /// True if arbiters of an earlier daemon already lend.
    adopted: bool,
    counter: RefCell<EventCounter>,
    /// Errors that GPUs have reported, by class.
    faults: RefCell<BTreeMap<XidClass, u64>>,
}

impl UnitEvents {
    pub(crate) fn new(
        units: Rc<Units>,
        vm_set: Rc<VmSet>,
        checkpoint: Rc<Checkpoint>,
        policy: FencePolicy,
        journal: Arc<Journal>,
        adopted: bool,
    ) -> Rc<Self> {
        Rc::new(Self {
            units,
            vm_set,
            checkpoint,
            policy,
            strikes: RefCell::new(StrikeCounter::new(policy)),
            journal,
            adopted,
            counter: RefCell::new(EventCounter::new(Instant::now())),
            faults: RefCell::default(),
        })
    }

    /// Events since the start: kind, VM, count.
    pub(crate) fn counts(&self) -> Vec<(&'static str, u32, u64)> {
        self.counter.borrow().counts()
    }

    /// Errors of a class that GPUs have reported since the start.
    pub(crate) fn faults(&self, class: XidClass) -> u64 {
        self.faults.borrow().get(&class).copied().unwrap_or(0)
    }

    /// Handles unit events until all senders are dropped.
    pub(crate) async fn serve(
        self: Rc<Self>,
        mut events: UnboundedReceiver<UnitEvent>,
        limits: Vec<(u32, u64)>,
    ) {
        let (escrows, wanted) = unbounded_channel();
        let units = self.units.numbers();
        let book = if self.adopted { self.take_stock(limits).await } else { Escrows::new(limits, &units) };
        for (ancestor, unit, bytes) in book.all() {
            self.escrow(unit, ancestor, bytes);
        }
        let receive = async {
            while let Some(event) = events.recv().await {
                self.on_message(event, &escrows);
            }
        };
        tokio::join!(receive, self.move_escrows(book, wanted));
    }

    fn on_message(&self, event: UnitEvent, escrows: &UnboundedSender<Want>) {
        match event {
            UnitEvent::ArbiterEnded { unit } => {
                self.event("arbiter-ended", 0, || format!("unit {unit}: all its workers are ended"));
                self.end_workers(unit);
            }
            UnitEvent::Arbiter { unit, kind, vm, process, bytes } => {
                let Some(kind) = ArbiterEvent::from_number(kind) else { return };
                self.event(name(kind), vm, || format!("unit {unit}, process {process}, {bytes} bytes"));
                self.on_arbiter_event(unit, kind, vm);
            }
            UnitEvent::Escrow { unit, ancestor, bytes } => {
                // The receiver is gone while the daemon ends.
                _ = escrows.send(Want::Part { unit, ancestor, bytes });
            }
            UnitEvent::Ancestor { ancestor, bytes } => _ = escrows.send(Want::Limit { ancestor, bytes }),
            UnitEvent::UnitGone { unit } => _ = escrows.send(Want::Gone { unit }),
            UnitEvent::Unmeasured { unit } => self.event("figures-missing", 0, || {
                format!(
                    "unit {unit}: its driver does not report how much memory each process has; growth is charged as granted, and VMs of other organisations are placed on it only if the configuration allows it"
                )
            }),
            UnitEvent::HostAccess { unit, access, shared } => {
                let (by, rule) = (
                    match access {
                        HostAccess::None => return,
                        HostAccess::Pageable => "HMM, attribute 88",
                        HostAccess::HostPageTables => "the host's page tables, attribute 100",
                    },
                    if shared {
                        "share-with-host-memory-access in the configuration lets VMs share it"
                    } else {
                        "no further VM is placed beside another; VMs that share it already stay"
                    },
                );
                self.event("host-memory-reachable", 0, || {
                    format!("unit {unit}: its kernels can reach all host memory of their worker ({by}); {rule}")
                });
            }
            UnitEvent::Unfit { unit, ability, error } => {
                let reason = match ability {
                    NeededAbility::Import => "cannot import memory that another process exports",
                    NeededAbility::FixedAddresses => "does not reserve the addresses that it is asked for",
                    NeededAbility::Registration => {
                        "cannot pin guest memory of as many pieces as `mapped-runs` in the configuration allows"
                    }
                };
                let reason = format!("its driver {reason} (CUresult {error})");
                if self.has_adopted_sessions(unit) {
                    // Programs that began before still compute. The unit is probed again.
                    tracing::error!(unit, reason, "new sessions will fail; the unit is quarantined once it has none");
                    return self.event("unit-unfit", 0, || format!("unit {unit}: {reason}; its sessions continue"));
                }
                self.quarantine(unit, &reason);
            }
            UnitEvent::Xid { unit, xid, process, instance } => self.on_xid(unit, xid, process, instance),
            UnitEvent::Crowd { vm } => self.event("device-crowd", vm, || {
                "its device let a crowd of threads wait on its socket, and was killed".to_owned()
            }),
            UnitEvent::Hung { vm, process } => {
                self.event("hung", vm, || format!("process {process} was killed and still exists"));
                self.fence(vm, "a killed worker of it still exists");
                // A probe of the arbiter shows if the device hangs, or if only the process is slow.
                let of_vm = self.vm_set.get(vm).map(|vm| vm.units().to_vec());
                of_vm.unwrap_or_else(|| self.units.iter().collect()).iter().for_each(|unit| unit.probe());
            }
        }
    }

    fn on_arbiter_event(&self, unit: u32, kind: ArbiterEvent, vm: u32) {
        let fence = |reason| self.fence(vm, reason);
        match kind {
            ArbiterEvent::Abuse | ArbiterEvent::Headroom if vm != 0 => {
                // The offence of a VM that is gone is counted as an event only.
                let Some(host_name) = self.vm_set.get(vm).map(|vm| vm.subject().host_name()) else { return };
                if self.strikes.borrow_mut().note(&host_name, Instant::now()) {
                    fence("its workers broke the rules of custody too often");
                }
            }
            ArbiterEvent::LedgerBroken if vm == 0 => self.quarantine(unit, "its ledger is inconsistent"),
            ArbiterEvent::LedgerBroken => fence("the ledger of its memory is inconsistent"),
            ArbiterEvent::Undercharged if self.policy.undercharged => {
                fence("it used more GPU time than its workers reported");
            }
            ArbiterEvent::Stuck => {
                fence("the driver does not release a killed process of it");
                if let Some(unit) = self.units.get(unit) {
                    unit.probe();
                }
            }
            ArbiterEvent::ProbeFailed => self.quarantine(unit, "the device fails its arbiter's probe"),
            // Logged and counted only: lost chunks are found already, unclean chunks are not lent, and growth is within its
            // limit.
            ArbiterEvent::Abuse
            | ArbiterEvent::Headroom
            | ArbiterEvent::Drift
            | ArbiterEvent::Leak
            | ArbiterEvent::ScrubFailed
            | ArbiterEvent::ForeignProcess
            | ArbiterEvent::Growing
            | ArbiterEvent::Hung
            | ArbiterEvent::Undercharged
            | ArbiterEvent::ReceiptsLost => {}
        }
    }

    fn fence(&self, vm: u32, reason: &str) {
        if let Some(vm) = self.vm_set.get(vm) {
            vm.fence(FencedBy::Policy, reason);
        }
    }

    fn on_xid(&self, device: u32, xid: u32, process: u32, instance: u32) {
        let class = XidClass::of(xid);
        *self.faults.borrow_mut().entry(class).or_default() += 1;
        let hit: Vec<_> = self.units.iter().filter(|unit| unit.place().is_hit(device, instance)).collect();
        let numbers: Vec<_> = hit.iter().map(|unit| unit.number()).collect();
        self.event("xid", 0, || {
            format!("device {device}, units {numbers:?}: Xid {xid} ({class:?}), process {process}")
        });
        if let Some(reason) = class.quarantine() {
            for unit in numbers {
                self.quarantine(unit, &format!("Xid {xid}: {reason}"));
            }
        } else if class == XidClass::Session && process != 0 {
            // NVML names no process: then no session is ended, because the process at fault may have ended already. CUDA
            // itself reports the error to it.
            self.end_session(xid, process, &numbers);
        }
    }

    /// Ends the session of a process that caused an error. A process that is no worker is a foreign process, which the arbiter
    /// reports.
    fn end_session(&self, xid: u32, process: u32, units: &[u32]) {
        let vms = self.vm_set.all();
        let mut on_units = vms.iter().filter(|vm| units.iter().any(|unit| vm.is_on(*unit)));
        if let Some(vm) = on_units.find(|vm| vm.end_worker(process)) {
            self.event("session-fault", vm.id(), || format!("Xid {xid}: worker {process} is ended"));
        }
    }

    /// Takes a unit out of service until an operator readmits it: its workers are ended, and none is started.
    fn quarantine(&self, unit: u32, reason: &str) {
        if !self.checkpoint.set_quarantine(unit, reason) {
            return;
        }
        self.end_workers(unit);
        tracing::error!(unit, reason, "the unit is quarantined");
        self.journal.note("unit-quarantined", None, format!("unit {unit}: {reason}"));
    }

    /// True if a unit of an earlier daemon has sessions.
    fn has_adopted_sessions(&self, unit: u32) -> bool {
        let is_adopted = self.units.get(unit).is_some_and(|unit| unit.is_adopted());
        is_adopted && self.vm_set.all().iter().any(|vm| vm.is_on(unit) && !vm.is_idle())
    }

    /// Ends the workers of every VM on a unit, and of no other.
    fn end_workers(&self, unit: u32) {
        self.vm_set.all().iter().filter(|vm| vm.is_on(unit)).for_each(|vm| vm.end_workers());
    }

    /// Sends a unit the escrow of an ancestor, if the unit still exists.
    fn escrow(&self, unit: u32, ancestor: u32, bytes: u64) {
        if let Some(unit) = self.units.get(unit) {
            unit.escrow(ancestor, bytes);
        }
    }

    /// Counts an event, and records it at a limited rate: the events of one VM or organisation do not displace those of others.
    pub(crate) fn event(&self, kind: &'static str, vm: u32, what: impl FnOnce() -> String) {
        let subject = self.vm_set.get(vm).map(|vm| vm.subject().clone());
        let owner = subject.as_ref().and_then(Subject::owner);
        let recorded = self.counter.borrow_mut().count(kind, vm, owner, Instant::now());
        if recorded == (RecordedIn { journal: None, log: false }) {
            return;
        }
        let what = what();
        if let Some(count) = recorded.journal {
            self.journal.note(kind, subject, format!("{what} (number {count} of its kind)"));
        }
        if recorded.log {
            if vm == 0 {
                tracing::warn!(kind, detail = %what, "a unit reports an event")
            } else {
                tracing::warn!(kind, vm, detail = %what, "a unit reports an event of a VM")
            }
        }
    }

    /// At first, the escrow of each unit is the memory that it has charged; it must request more. No unit lends more meanwhile,
    /// because it may lend nothing to an ancestor before it has received an escrow; the escrow of an adopted arbiter is
    /// withdrawn first.
    async fn take_stock(&self, limits: Vec<(u32, u64)>) -> Escrows {
        let mut book = Escrows::new([], &[]);
        for (ancestor, limit) in limits {
            self.units.iter().for_each(|unit| unit.escrow(ancestor, 0));
            let mut shares = BTreeMap::new();
            for unit in self.units.numbers() {
                // For a unit that does not answer, only the limit is known.
                shares.insert(unit, self.charged(ancestor, unit).await.unwrap_or(limit));
            }
            book.restore(ancestor, limit, shares);
        }
        book
    }

    /// The bytes that the arbiter of a unit charges to an ancestor: memory lent to its VMs, and the driver's share.
    async fn charged(&self, ancestor: u32, unit: u32) -> Option<u64> {
        let arbiter = self.units.get(unit)?;
        let mut sum = 0_u64;
        for vm in self.vm_set.all().iter().filter(|vm| vm.is_of(ancestor) && vm.is_on(unit)) {
            let report = arbiter.describe_vm(vm.id()).await?;
            sum = sum.saturating_add(report.lent).saturating_add(report.headroom);
        }
        Some(sum)
    }

    /// Moves escrow from units that do not need it to units that request it, one request after the other.
    async fn move_escrows(&self, mut book: Escrows, mut wanted: UnboundedReceiver<Want>) {
        loop {
            let over = !book.excess().is_empty();
            let want = tokio::select! {
                want = wanted.recv() => want,
                // Memory that is still lent cannot be taken; it comes back gradually.
                () = sleep(AGAIN), if over => {
                    self.take_excess(&mut book).await;
                    continue;
                }
            };
            match want {
                Some(Want::Part { unit, ancestor, bytes }) => {
                    self.give_part(&mut book, unit, ancestor, bytes).await
                }
                Some(Want::Limit { ancestor, bytes: 0 }) => {
                    book.remove(ancestor);
                    self.units.iter().for_each(|unit| unit.forget_ancestor(ancestor));
                }
                Some(Want::Limit { ancestor, bytes }) => {
                    let is_new = !book.knows(ancestor);
                    let units = self.units.numbers();
                    book.limit(ancestor, bytes, &units);
                    if is_new {
                        for unit in self.units.iter() {
                            unit.escrow(ancestor, book.share(ancestor, unit.number()));
                        }
                    }
                    self.take_excess(&mut book).await;
                }
                Some(Want::Gone { unit }) => book.forget_unit(unit),
                None => return,
            }
        }
    }

    async fn give_part(&self, book: &mut Escrows, unit: u32, ancestor: u32, bytes: u64) {
        if self.units.get(unit).is_none() {
            return;
        }
        let mut missing = book.grow(ancestor, unit, bytes);
        for other in self.units.numbers().into_iter().filter(|other| *other != unit) {
            if missing == 0 {
                break;
            }
            self.take_escrow(book, ancestor, other, missing).await;
            missing = book.grow(ancestor, unit, bytes);
        }
        self.escrow(unit, ancestor, book.share(ancestor, unit));
    }

    /// Takes the escrow above the limit of its ancestor from units.
    async fn take_excess(&self, book: &mut Escrows) {
        for (ancestor, _) in book.excess() {
            for unit in self.units.numbers() {
                let left = book.excess().into_iter().find(|(over, _)| *over == ancestor);
                let Some((_, excess)) = left else { break };
                self.take_escrow(book, ancestor, unit, excess).await;
            }
        }
    }

    /// Takes up to `bytes` of the escrow that a unit has not charged.
    async fn take_escrow(&self, book: &mut Escrows, ancestor: u32, unit: u32, bytes: u64) {
        let Some(room) = self.units.get(unit) else { return book.forget_unit(unit) };
        let before = book.share(ancestor, unit);
        let after = before.saturating_sub(bytes);
        room.escrow(ancestor, after);
        // Read after the new escrow was sent, so the charge can only fall until it is below the new escrow.
        let charged = self.charged(ancestor, unit);
        let after = charged.await.map_or(before, |charged| charged.max(after).min(before));
        room.escrow(ancestor, after);
        book.shrink(ancestor, unit, after);
    }
}

/// A change of the escrows of an ancestor.
#[derive(Debug)]
enum Want {
    /// A unit needs this escrow in total.
    Part { unit: u32, ancestor: u32, bytes: u64 },
    /// The limit has changed; 0 if the ancestor is gone.
    Limit { ancestor: u32, bytes: u64 },
    /// A unit is gone.
    Gone { unit: u32 },
}

/// The name of an event.
fn name(event: ArbiterEvent) -> &'static str {
    match event {
        ArbiterEvent::Abuse => "abuse",
        ArbiterEvent::LedgerBroken => "ledger-broken",
        ArbiterEvent::Drift => "drift",
        ArbiterEvent::Leak => "leak",
        ArbiterEvent::ScrubFailed => "scrub-failed",
        ArbiterEvent::ForeignProcess => "foreign-process",
        ArbiterEvent::Headroom => "headroom",
        ArbiterEvent::Stuck => "stuck",
        ArbiterEvent::Growing => "growing",
        ArbiterEvent::Hung => "hung",
        ArbiterEvent::Undercharged => "undercharged",
        ArbiterEvent::ReceiptsLost => "receipts-lost",
        ArbiterEvent::ProbeFailed => "probe-failed",
    }
}
