//! Decides what follows for VMs when something happens on a unit.
//!
//! Rooms report by notices, one after the other; what is decided here is carried out by the rooms. It must never wait for a
//! process: a notice behind it may be the one that protects a tenant.

use std::{cell::RefCell, collections::BTreeMap, rc::Rc, time::Instant};

use sluice_protocol::control::ArbiterEvent;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use crate::{
    configuration::Configuration, escrow::Escrows, notice::Notice, rate::TokenBucket, unit::Unit, vm::Vm,
};

/// Events told of at once, and per second in the long run; all are counted.
const EVENTS: (u32, f64) = (20, 0.5);

/// The one who decides.
#[derive(Debug)]
pub(crate) struct Custodian {
    units: Rc<[Rc<Unit>]>,
    vms: Vec<Rc<Vm>>,
    events: RefCell<BTreeMap<(&'static str, u32), u64>>,
    told: RefCell<TokenBucket>,
}

impl Custodian {
    pub(crate) fn new(units: Rc<[Rc<Unit>]>, vms: Vec<Rc<Vm>>) -> Rc<Self> {
        Rc::new(Self {
            units,
            vms,
            events: RefCell::new(BTreeMap::new()),
            told: RefCell::new(TokenBucket::new(EVENTS.1, EVENTS.0, Instant::now())),
        })
    }

    /// Events since the start, for people: their kind, the VM they are about, how many there were.
    pub(crate) fn events(&self) -> Vec<serde_json::Value> {
        let event = |((kind, vm), count): (&(&'static str, u32), &u64)| serde_json::json!({ "kind": kind, "vm": vm, "count": count });
        self.events.borrow().iter().map(event).collect()
    }

    /// Hears notices until nobody is left who could give one.
    pub(crate) async fn serve(
        self: Rc<Self>,
        mut notices: UnboundedReceiver<Notice>,
        configuration: &Configuration,
    ) {
        let (escrows, wanted) = unbounded_channel();
        let limits = configuration.ancestors.iter().map(|ancestor| (ancestor.id, ancestor.memory.0));
        let book = Escrows::new(limits, self.units.len());
        for (ancestor, unit, bytes) in book.all() {
            self.units[unit].escrow(ancestor, bytes);
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
                self.vms.iter().for_each(|vm| vm.end_workers());
            }
            Notice::Arbiter { unit, kind, vm, process, bytes } => {
                let Some(kind) = ArbiterEvent::from_number(kind) else { return };
                self.event(name(kind), vm, || format!("unit {unit}, process {process}, {bytes} bytes"));
            }
            Notice::Escrow { unit, ancestor, bytes } => {
                // Heard by nobody while everything ends.
                _ = escrows.send(Want { unit, ancestor, bytes });
            }
            Notice::Xid { unit, xid, process } => {
                self.event("xid", 0, || format!("unit {unit}: Xid {xid}, process {process}"));
            }
        }
    }

    /// Counts an event, and tells of it as often as is useful.
    fn event(&self, kind: &'static str, vm: u32, what: impl FnOnce() -> String) {
        *self.events.borrow_mut().entry((kind, vm)).or_insert(0) += 1;
        if self.told.borrow_mut().take(Instant::now()).is_ok() {
            let what = what();
            if vm == 0 { tracing::warn!(kind, "{what}") } else { tracing::warn!(kind, vm, "{what}") }
        }
    }

    /// Gives units what they want of what others do not need, one wish after the other.
    async fn move_escrows(&self, mut book: Escrows, mut wanted: UnboundedReceiver<Want>) {
        while let Some(Want { unit, ancestor, bytes }) = wanted.recv().await {
            let Some(index) = usize::try_from(unit).ok().filter(|index| *index < self.units.len()) else {
                continue;
            };
            let mut missing = book.grow(ancestor, index, bytes);
            for other in (0..self.units.len()).filter(|other| *other != index) {
                if missing == 0 {
                    break;
                }
                self.take_escrow(&mut book, ancestor, other, missing).await;
                missing = book.grow(ancestor, index, bytes);
            }
            self.units[index].escrow(ancestor, book.share(ancestor, index));
        }
    }

    /// Takes up to `bytes` of what a unit may lend and has not lent.
    async fn take_escrow(&self, book: &mut Escrows, ancestor: u32, unit: usize, bytes: u64) {
        let before = book.share(ancestor, unit);
        let after = before.saturating_sub(bytes);
        self.units[unit].escrow(ancestor, after);
        // Said after it, so what is lent now can only become less, until it is below the new escrow.
        let lent = async {
            let mut sum = 0_u64;
            for vm in self.vms.iter().filter(|vm| vm.is_of(ancestor)) {
                sum = sum.saturating_add(self.units[unit].describe_vm(vm.id()).await?.lent);
            }
            Some(sum)
        };
        let after = lent.await.map_or(before, |lent| lent.max(after).min(before));
        self.units[unit].escrow(ancestor, after);
        book.shrink(ancestor, unit, after);
    }
}

/// A unit wants more of an ancestor's limit.
#[derive(Debug)]
struct Want {
    unit: u32,
    ancestor: u32,
    bytes: u64,
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
    }
}
