//! The handler of unit events: it decides the consequences for VMs when something happens on a unit.
//!
//! The other modules send notices, which are handled one after the other; those modules also carry out its decisions. It must
//! never wait for a process: a later notice may be the one that protects a tenant.

use std::{
    cell::RefCell,
    collections::BTreeMap,
    rc::Rc,
    sync::Arc,
    time::{Duration, Instant},
};

use sluice_api::v1::FencedBy;
use sluice_messages::control::ArbiterEvent;
use sluice_runtime::rate::TokenBucket;
use tokio::{
    sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel},
    time::sleep,
};

use crate::{
    configuration::FencePolicy, records::journal::Journal, records::notice::Notice,
    records::state::checkpoint::Checkpoint, units::escrow::Escrows, units::set::Units, units::xid::Class,
    vms::conduct::Conduct, vms::roster::Roster,
};

/// Events told of at once, and per second in the long run; all are counted.
const EVENTS: (u32, f64) = (20, 0.5);

/// How long until what may not be had any more is asked for again.
const AGAIN: Duration = Duration::from_secs(1);

/// The one who decides.
#[derive(Debug)]
pub(crate) struct Custodian {
    units: Rc<Units>,
    roster: Rc<Roster>,
    checkpoint: Rc<Checkpoint>,
    policy: FencePolicy,
    conduct: RefCell<Conduct>,
    journal: Arc<Journal>,
    /// Whether arbiters of a daemon before lend already.
    adopted: bool,
    events: RefCell<BTreeMap<(&'static str, u32), Tally>>,
    told: RefCell<TokenBucket>,
    /// Errors that GPUs have reported, by class.
    faults: RefCell<BTreeMap<Class, u64>>,
}

impl Custodian {
    pub(crate) fn new(
        units: Rc<Units>,
        roster: Rc<Roster>,
        checkpoint: Rc<Checkpoint>,
        policy: FencePolicy,
        journal: Arc<Journal>,
        adopted: bool,
    ) -> Rc<Self> {
        Rc::new(Self {
            units,
            roster,
            checkpoint,
            policy,
            conduct: RefCell::new(Conduct::new(policy)),
            journal,
            adopted,
            events: RefCell::new(BTreeMap::new()),
            told: RefCell::new(TokenBucket::new(EVENTS.1, EVENTS.0, Instant::now())),
            faults: RefCell::default(),
        })
    }

    /// Events since the start: their kind, the VM they are about, how many there were.
    pub(crate) fn counts(&self) -> Vec<(&'static str, u32, u64)> {
        self.events.borrow().iter().map(|((kind, vm), tally)| (*kind, *vm, tally.count)).collect()
    }

    /// Errors of a class that GPUs have reported since the start.
    pub(crate) fn faults(&self, class: Class) -> u64 {
        self.faults.borrow().get(&class).copied().unwrap_or(0)
    }

    /// Hears notices until nobody is left who could give one.
    pub(crate) async fn serve(
        self: Rc<Self>,
        mut notices: UnboundedReceiver<Notice>,
        limits: Vec<(u32, u64)>,
    ) {
        let (escrows, wanted) = unbounded_channel();
        let units = self.units.numbers();
        let book = if self.adopted { self.take_stock(limits).await } else { Escrows::new(limits, &units) };
        for (ancestor, unit, bytes) in book.all() {
            self.escrow(unit, ancestor, bytes);
        }
        let hear = async {
            while let Some(notice) = notices.recv().await {
                self.heed(notice, &escrows);
            }
        };
        tokio::join!(hear, self.move_escrows(book, wanted));
    }

    fn heed(&self, notice: Notice, escrows: &UnboundedSender<Want>) {
        match notice {
            Notice::ArbiterEnded { unit } => {
                self.event("arbiter-ended", 0, || format!("unit {unit}: every worker of it is ended"));
                self.end_workers(unit);
            }
            Notice::Arbiter { unit, kind, vm, process, bytes } => {
                let Some(kind) = ArbiterEvent::from_number(kind) else { return };
                self.event(name(kind), vm, || format!("unit {unit}, process {process}, {bytes} bytes"));
                self.heed_arbiter(unit, kind, vm);
            }
            Notice::Escrow { unit, ancestor, bytes } => {
                // Heard by nobody while everything ends.
                _ = escrows.send(Want::Part { unit, ancestor, bytes });
            }
            Notice::Ancestor { ancestor, bytes } => _ = escrows.send(Want::Limit { ancestor, bytes }),
            Notice::UnitGone { unit } => _ = escrows.send(Want::Gone { unit }),
            Notice::Unmeasured { unit } => self.event("figures-missing", 0, || {
                format!(
                    "unit {unit}: its driver does not say how much memory each process has; growth is charged as granted, and VMs of other organisations come to it only if the configuration says so"
                )
            }),
            Notice::Xid { unit, xid, process, instance } => self.heed_xid(unit, xid, process, instance),
            Notice::Hung { vm, process } => {
                self.event("hung", vm, || format!("process {process} was killed and is still there"));
                self.fence(vm, "a killed worker of it is still there");
                // Whether its devices hang or the process is only slow is theirs to show.
                let of_vm = self.roster.get(vm).map(|vm| vm.units().to_vec());
                of_vm.unwrap_or_else(|| self.units.iter().collect()).iter().for_each(|unit| unit.probe());
            }
        }
    }

    fn heed_arbiter(&self, unit: u32, kind: ArbiterEvent, vm: u32) {
        let fence = |reason| self.fence(vm, reason);
        match kind {
            ArbiterEvent::Abuse | ArbiterEvent::Headroom if vm != 0 => {
                if self.conduct.borrow_mut().note(vm, Instant::now()) {
                    fence("its workers broke the rules of custody again and again");
                }
            }
            ArbiterEvent::LedgerBroken if vm == 0 => self.quarantine(unit, "its ledger contradicts itself"),
            ArbiterEvent::LedgerBroken => fence("the ledger of its memory contradicts itself"),
            ArbiterEvent::Undercharged if self.policy.undercharged => {
                fence("it used more GPU time than its workers say");
            }
            ArbiterEvent::Stuck => {
                fence("its driver does not let go of a killed process");
                if let Some(unit) = self.units.get(unit) {
                    unit.probe();
                }
            }
            ArbiterEvent::ProbeFailed => self.quarantine(unit, "the device fails its arbiter's probe"),
            // Told of and counted: what was lost is found already, what is not clean is not lent, and what grows is within
            // its limit.
            ArbiterEvent::Abuse
            | ArbiterEvent::Headroom
            | ArbiterEvent::Drift
            | ArbiterEvent::Leak
            | ArbiterEvent::ScrubFailed
            | ArbiterEvent::Stranger
            | ArbiterEvent::Growing
            | ArbiterEvent::Hung
            | ArbiterEvent::Undercharged
            | ArbiterEvent::ReceiptsLost => {}
        }
    }

    fn fence(&self, vm: u32, reason: &str) {
        if let Some(vm) = self.roster.get(vm) {
            vm.fence(FencedBy::Policy, reason);
        }
    }

    fn heed_xid(&self, device: u32, xid: u32, process: u32, instance: u32) {
        let class = Class::of(xid);
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
        } else if class == Class::Session {
            self.end_session(xid, process, &numbers);
        }
    }

    /// Ends the session whose doing an error is, where that is known. NVML names no process; CUDA itself has told the one at
    /// fault, which is known here only where there is no other worker on the units.
    fn end_session(&self, xid: u32, process: u32, units: &[u32]) {
        let vms = self.roster.all();
        let on_units = vms.iter().filter(|vm| units.iter().any(|unit| vm.is_on(*unit)));
        let workers: Vec<_> =
            on_units.flat_map(|vm| vm.worker_numbers().into_iter().map(move |worker| (vm, worker))).collect();
        let at_fault = match (process, workers.as_slice()) {
            (0, [only]) => Some(only),
            (0, _) => None,
            // One that is no worker is a stranger, whom the arbiter reports.
            _ => workers.iter().find(|(_, worker)| *worker == process),
        };
        if let Some((vm, worker)) = at_fault {
            self.event("session-fault", vm.id(), || format!("Xid {xid}: worker {worker} is ended"));
            _ = vm.end_worker(*worker);
        }
    }

    /// Takes a unit out of service until an operator says otherwise: its workers are ended, and none is started.
    fn quarantine(&self, unit: u32, reason: &str) {
        if !self.checkpoint.set_quarantine(unit, reason) {
            return;
        }
        self.end_workers(unit);
        tracing::error!("unit {unit} is quarantined: {reason}");
        self.journal.note("unit-quarantined", None, format!("unit {unit}: {reason}"));
    }

    /// Ends the workers of every VM that is on a unit, and of no other.
    fn end_workers(&self, unit: u32) {
        self.roster.all().iter().filter(|vm| vm.is_on(unit)).for_each(|vm| vm.end_workers());
    }

    /// Says what an ancestor may have of a unit, if that is still there.
    fn escrow(&self, unit: u32, ancestor: u32, bytes: u64) {
        if let Some(unit) = self.units.get(unit) {
            unit.escrow(ancestor, bytes);
        }
    }

    /// Counts an event, and tells of it as often as is useful: what one VM brings about does not push out what others do.
    pub(crate) fn event(&self, kind: &'static str, vm: u32, what: impl FnOnce() -> String) {
        let now = Instant::now();
        let count = {
            let mut events = self.events.borrow_mut();
            let tally = events.entry((kind, vm)).or_insert_with(|| Tally::new(now));
            tally.count += 1;
            tally.told.take(now).is_ok().then_some(tally.count)
        };
        let logged = self.told.borrow_mut().take(now).is_ok();
        if count.is_none() && !logged {
            return;
        }
        let what = what();
        if let Some(count) = count {
            let subject = self.roster.get(vm).map(|vm| vm.subject().clone());
            self.journal.note(kind, subject, format!("{what} (number {count} of its kind)"));
        }
        if logged {
            if vm == 0 { tracing::warn!(kind, "{what}") } else { tracing::warn!(kind, vm, "{what}") }
        }
    }

    /// What units have lent is what they may lend, to begin with: more they have to ask for. Nothing is lent anew meanwhile, since a unit
    /// may lend nothing of an ancestor until it is told how much; what an adopted arbiter was told before is taken back first.
    async fn take_stock(&self, limits: Vec<(u32, u64)>) -> Escrows {
        let mut book = Escrows::new([], &[]);
        for (ancestor, limit) in limits {
            self.units.iter().for_each(|unit| unit.escrow(ancestor, 0));
            let mut shares = BTreeMap::new();
            for unit in self.units.numbers() {
                // Of one that does not answer nothing is known but the limit.
                shares.insert(unit, self.lent(ancestor, unit).await.unwrap_or(limit));
            }
            book.restore(ancestor, limit, shares);
        }
        book
    }

    /// What a unit has lent to the VMs of an ancestor.
    async fn lent(&self, ancestor: u32, unit: u32) -> Option<u64> {
        let room = self.units.get(unit)?;
        let mut sum = 0_u64;
        for vm in self.roster.all().iter().filter(|vm| vm.is_of(ancestor) && vm.is_on(unit)) {
            sum = sum.saturating_add(room.describe_vm(vm.id()).await?.lent);
        }
        Some(sum)
    }

    /// Gives units what they want of what others do not need, one wish after the other.
    async fn move_escrows(&self, mut book: Escrows, mut wanted: UnboundedReceiver<Want>) {
        loop {
            let over = !book.excess().is_empty();
            let want = tokio::select! {
                want = wanted.recv() => want,
                // What is still lent cannot be taken; it comes back by and by.
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

    /// Takes from units what their ancestors may not have any more.
    async fn take_excess(&self, book: &mut Escrows) {
        for (ancestor, _) in book.excess() {
            for unit in self.units.numbers() {
                let left = book.excess().into_iter().find(|(over, _)| *over == ancestor);
                let Some((_, excess)) = left else { break };
                self.take_escrow(book, ancestor, unit, excess).await;
            }
        }
    }

    /// Takes up to `bytes` of what a unit may lend and has not lent.
    async fn take_escrow(&self, book: &mut Escrows, ancestor: u32, unit: u32, bytes: u64) {
        let Some(room) = self.units.get(unit) else { return book.forget_unit(unit) };
        let before = book.share(ancestor, unit);
        let after = before.saturating_sub(bytes);
        room.escrow(ancestor, after);
        // Said after it, so what is lent now can only become less, until it is below the new escrow.
        let lent = self.lent(ancestor, unit);
        let after = lent.await.map_or(before, |lent| lent.max(after).min(before));
        room.escrow(ancestor, after);
        book.shrink(ancestor, unit, after);
    }
}

/// How often something has happened.
#[derive(Debug)]
struct Tally {
    count: u64,
    told: TokenBucket,
}

impl Tally {
    fn new(now: Instant) -> Self {
        Self { count: 0, told: TokenBucket::new(EVENTS.1, EVENTS.0, now) }
    }
}

/// A wish about the escrows of an ancestor.
#[derive(Debug)]
enum Want {
    /// A unit wants so much in all.
    Part { unit: u32, ancestor: u32, bytes: u64 },
    /// The limit is another; 0 when the ancestor is gone.
    Limit { ancestor: u32, bytes: u64 },
    /// A unit is gone.
    Gone { unit: u32 },
}

/// What an event is called.
fn name(event: ArbiterEvent) -> &'static str {
    match event {
        ArbiterEvent::Abuse => "abuse",
        ArbiterEvent::LedgerBroken => "ledger-broken",
        ArbiterEvent::Drift => "drift",
        ArbiterEvent::Leak => "leak",
        ArbiterEvent::ScrubFailed => "scrub-failed",
        ArbiterEvent::Stranger => "stranger",
        ArbiterEvent::Headroom => "headroom",
        ArbiterEvent::Stuck => "stuck",
        ArbiterEvent::Growing => "growing",
        ArbiterEvent::Hung => "hung",
        ArbiterEvent::Undercharged => "undercharged",
        ArbiterEvent::ReceiptsLost => "receipts-lost",
        ArbiterEvent::ProbeFailed => "probe-failed",
    }
}
