//! One placement unit: the limits of its VMs, and the messages to its arbiter.
//!
//! The set of units serves it; the VMs, the registry and the sampling of usage ask it. It owns the limits of each VM on the unit, and
//! sends them to every new arbiter of the unit: an arbiter that has died took only its loans with it, and the next one takes the
//! unit's memory again and scrubs it. It must never decide about memory: it sends the VMs and their limits, and the arbiter decides
//! alone.
//!
//! The life of its arbiter:
//!
//! ```text
//!            start, or adopt that of the last daemon              Ready
//!  (none) ─────────────────────────────────────────▶ started ───────────────▶ lending: VMs get sessions
//!    ▲                                                  │ READY passes          │ HUNG passes, it ends,
//!    │                                                  │ or it ends            │ or its socket closes
//!    │     its process is gone                          ▼                       │
//!    └─────────────────────────────────────────────── ending ◀──────────────────┘
//!                     the daemon's end: SIGTERM, and SIGKILL after END; a failure: SIGKILL
//! ```

mod arbiter;
mod probing;
mod reports;

use std::{
    cell::{Cell, RefCell},
    collections::BTreeMap,
    io,
    os::fd::OwnedFd,
    rc::Rc,
    time::{Duration, Instant},
};

use sluice_messages::{
    control::{Figures, HostAccess, NeededAbility, TimeShare, ToArbiter},
    figures::{UnitBytes, Upkeep, VmTime, WorkCounts},
    inventory::{Visible, WHOLE},
};
use sluice_runtime::process::Identity;
use sluice_shared_memory::socket;
use tokio::{
    sync::{Notify, watch},
    time::timeout,
};

use crate::{
    channel::SendQueue,
    configuration::Configuration,
    handover::{launching::Launching, process::LaunchedProcess},
    records::state::checkpoint::Checkpoint,
    records::unit_event::UnitEventSender,
    records::usage,
    units::inventory::Inventory,
};
pub(crate) use arbiter::{UnitError, socket_name};
pub(crate) use reports::VmReport;

/// The device or instance of a unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct UnitPlace {
    /// Ordinal of the device, in the inventory's order.
    pub(crate) device: u32,
    /// The GPU instance that the unit is, or [`WHOLE`].
    pub(crate) instance: u32,
    /// The devices that are visible to the drivers of the unit's arbiter and of its VMs' workers.
    pub(crate) visible: Visible,
}

impl UnitPlace {
    /// A whole device, by its ordinal alone.
    pub(crate) const fn device(device: u32) -> Self {
        Self { device, instance: WHOLE, visible: Visible::Host }
    }

    /// True if it is a whole device.
    pub(crate) const fn is_whole(&self) -> bool {
        self.instance == WHOLE
    }

    /// True if an event on an instance of a device concerns the unit.
    pub(crate) const fn is_hit(&self, device: u32, instance: u32) -> bool {
        self.device == device && (self.instance == instance || self.instance == WHOLE || instance == WHOLE)
    }

    /// Ordinal of the device among those visible to the driver.
    const fn ordinal(&self) -> u32 {
        match self.visible {
            Visible::Host => self.device,
            Visible::Gpu(_) | Visible::Ordinal(_) | Visible::Instance(_) => 0,
        }
    }
}

/// A unit.
#[derive(Debug)]
pub(crate) struct Unit {
    number: u32,
    place: UnitPlace,
    configuration: Rc<Configuration>,
    launching: Rc<Launching>,
    inventory: Option<Rc<Inventory>>,
    checkpoint: Rc<Checkpoint>,
    event_sender: UnitEventSender,
    running: RefCell<Option<SendQueue<ToArbiter>>>,
    process: Cell<Option<Identity>>,
    /// Bytes that can be lent, while there is an arbiter that lends.
    lends: watch::Sender<Option<u64>>,
    /// Bytes of a context and of the margin beside it, as measured by its arbiter; 0 if unknown.
    least: Cell<u64>,
    terms: RefCell<BTreeMap<u32, VmTerms>>,
    escrows: RefCell<BTreeMap<u32, u64>>,
    latest: RefCell<ArbiterReports>,
    reported: Notify,
    /// The serial of the last request for a report.
    serial: Cell<u64>,
    /// Messages about an earlier epoch.
    stale: Cell<u64>,
    /// True if its arbiter is of an earlier daemon.
    adopted: Cell<bool>,
    /// The arbiter's decision whether it uses the driver's bytes per process, once it is known.
    figures: watch::Sender<Option<Figures>>,
    /// The time since which that decision is pending, while it is.
    unknown_since: Cell<Instant>,
    /// The host memory that its kernels reach, once its arbiter has reported it.
    host_access: watch::Sender<Option<HostAccess>>,
    /// The ability that the driver lacks by the last probe, with its CUresult.
    lacking: Cell<Option<(NeededAbility, u32)>>,
    /// True once a probe of the present arbiter has found that the driver lacks no ability.
    serves_sessions: watch::Sender<bool>,
}

/// The limits of a VM on a unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct VmTerms {
    /// Its epoch.
    pub(crate) epoch: u64,
    /// True if it is fenced and gets nothing.
    pub(crate) fenced: bool,
    /// Bytes of chunks; 0 for all of the unit.
    pub(crate) limit: u64,
    /// Part of `limit` that is guaranteed.
    pub(crate) guaranteed: u64,
    /// Bytes beside the quota, to which the driver share is charged first.
    pub(crate) headroom: u64,
    /// Bytes of guest memory it may have pinned; 0 for no limit.
    pub(crate) pinned: u64,
    /// Its project and organisation, as in the message.
    pub(crate) ancestors: u64,
    /// Its share of the unit's time.
    pub(crate) shares: TimeShare,
}

/// An arbiter's last reports. Those on the unit and on VMs have the serials of the requests that they answer.
#[derive(Debug, Default)]
struct ArbiterReports {
    /// The serial of the last request that was answered.
    answered: u64,
    unit: Option<(u64, Instant, UnitBytes)>,
    vms: BTreeMap<u32, (u64, VmReport)>,
    times: BTreeMap<u32, VmTime>,
    work: BTreeMap<u32, WorkCounts>,
    pinned: BTreeMap<u32, u64>,
    upkeep: Option<Upkeep>,
}

impl ArbiterReports {
    /// A report on an epoch of a VM does not apply to the next epoch, nor to the next VM of the number.
    fn forget(&mut self, vm: u32) {
        self.vms.remove(&vm);
        self.times.remove(&vm);
        self.work.remove(&vm);
        self.pinned.remove(&vm);
    }
}

/// A worker, in the form for arbiters.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Borrower {
    pub(crate) vm: u32,
    pub(crate) epoch: u64,
    pub(crate) session: u32,
    pub(crate) user: u32,
}

impl Unit {
    pub(crate) fn new(
        number: u32,
        place: UnitPlace,
        configuration: Rc<Configuration>,
        launching: Rc<Launching>,
        inventory: Option<Rc<Inventory>>,
        checkpoint: Rc<Checkpoint>,
        event_sender: UnitEventSender,
    ) -> Rc<Self> {
        Rc::new(Self {
            number,
            place,
            configuration,
            launching,
            inventory,
            checkpoint,
            event_sender,
            running: RefCell::new(None),
            process: Cell::new(None),
            lends: watch::Sender::new(None),
            least: Cell::new(0),
            terms: RefCell::new(BTreeMap::new()),
            escrows: RefCell::new(BTreeMap::new()),
            latest: RefCell::new(ArbiterReports::default()),
            reported: Notify::new(),
            serial: Cell::new(0),
            stale: Cell::new(0),
            adopted: Cell::new(false),
            figures: watch::Sender::new(None),
            unknown_since: Cell::new(Instant::now()),
            host_access: watch::Sender::new(None),
            lacking: Cell::new(None),
            serves_sessions: watch::Sender::new(false),
        })
    }

    pub(crate) fn number(&self) -> u32 {
        self.number
    }

    /// Its device or instance.
    pub(crate) fn place(&self) -> UnitPlace {
        self.place
    }

    /// The number of messages about an earlier epoch.
    pub(crate) fn stale(&self) -> u64 {
        self.stale.get()
    }

    /// The process of its arbiter, if one runs.
    pub(crate) fn process(&self) -> Option<u32> {
        self.process.get().map(|process| process.process)
    }

    /// True if its arbiter is of an earlier daemon.
    pub(crate) fn is_adopted(&self) -> bool {
        self.adopted.get()
    }

    /// The identity of its arbiter's count, if one runs.
    pub(crate) fn arbiter(&self) -> Option<usage::Arbiter> {
        self.process.get().map(|process| usage::Arbiter { process, adopted: self.adopted.get() })
    }

    /// Bytes that can be lent; `None` while the unit does not lend.
    pub(crate) fn lendable(&self) -> Option<u64> {
        *self.lends.borrow()
    }

    /// The bytes of quota and headroom below which no session of a VM can start; 0 if unknown.
    pub(crate) const fn least_quota(&self) -> u64 {
        self.least.get()
    }

    /// Sets the limits of a VM, for this arbiter and for every later one.
    pub(crate) fn admit(&self, vm: u32, terms: VmTerms) {
        let before = self.terms.borrow_mut().insert(vm, terms);
        if let Some(VmTerms { epoch, .. }) = before.filter(|before| before.epoch != terms.epoch) {
            self.tell(ToArbiter::Forget { vm, epoch });
            self.latest.borrow_mut().forget(vm);
        }
        self.tell_terms(vm, &terms);
    }

    /// Removes a VM, for this arbiter and for every later one. A newer VM with its number, and hence a later epoch, stays.
    pub(crate) fn forget(&self, vm: u32, epoch: u64) {
        let mut terms = self.terms.borrow_mut();
        if terms.get(&vm).is_some_and(|terms| terms.epoch > epoch) {
            return;
        }
        if let Some(VmTerms { epoch, .. }) = terms.remove(&vm) {
            self.tell(ToArbiter::Forget { vm, epoch });
        }
        drop(terms);
        self.latest.borrow_mut().forget(vm);
    }

    /// True if a VM is known here, in this epoch.
    fn is_current(&self, vm: u32, epoch: u64) -> bool {
        self.terms.borrow().get(&vm).is_some_and(|terms| terms.epoch == epoch)
    }

    /// Fences a VM: it gets nothing any more.
    pub(crate) fn fence(&self, vm: u32) {
        let epoch = {
            let mut all = self.terms.borrow_mut();
            let Some(terms) = all.get_mut(&vm).filter(|terms| !terms.fenced) else { return };
            terms.fenced = true;
            terms.epoch
        };
        self.tell(ToArbiter::Fence { vm, epoch });
    }

    /// Sets the escrow of a project or organisation on the unit.
    pub(crate) fn escrow(&self, ancestor: u32, bytes: u64) {
        self.escrows.borrow_mut().insert(ancestor, bytes);
        self.tell(ToArbiter::Escrow { ancestor, bytes });
    }

    /// Makes the arbiter test the device; it reports a failure.
    pub(crate) fn probe(&self) {
        self.tell(ToArbiter::Probe {});
    }

    /// Removes a project or organisation without VMs.
    pub(crate) fn forget_ancestor(&self, ancestor: u32) {
        if self.escrows.borrow_mut().remove(&ancestor).is_some() {
            self.tell(ToArbiter::Escrow { ancestor, bytes: 0 });
        }
    }

    /// Waits until the unit lends, at most for `limit`.
    pub(crate) async fn ready(&self, limit: Duration) -> bool {
        let mut lends = self.lends.subscribe();
        let ready = async { lends.wait_for(Option::is_some).await.is_ok() };
        timeout(limit, ready).await.unwrap_or(false)
    }

    /// Introduces a worker; returns its end of the custody socket, or `None` if there is no arbiter.
    pub(crate) fn introduce(
        &self,
        borrower: Borrower,
        worker: &LaunchedProcess,
    ) -> io::Result<Option<OwnedFd>> {
        let running = self.running.borrow();
        let Some(queue) = running.as_ref().filter(|_| self.lends.borrow().is_some()) else {
            return Ok(None);
        };
        let (ours, theirs) = socket::pair()?;
        let Borrower { vm, epoch, session, user } = borrower;
        let (process, cgroup_kill) = (worker.number(), worker.cgroup_kill());
        let grouped = cgroup_kill.is_some();
        let message = ToArbiter::Worker { vm, epoch, process, session, user, grouped };
        let mut descriptors = vec![theirs, worker.pidfd().try_clone()?];
        descriptors.extend(cgroup_kill.map(OwnedFd::try_clone).transpose()?);
        Ok(queue.post(message, descriptors).then_some(ours))
    }

    fn tell(&self, message: ToArbiter) {
        if let Some(queue) = self.running.borrow().as_ref() {
            // If it is gone, its successor receives the full state.
            _ = queue.post(message, Vec::new());
        }
    }

    fn tell_terms(&self, vm: u32, terms: &VmTerms) {
        let &VmTerms { epoch, fenced, limit, guaranteed, headroom, pinned, ancestors, shares } = terms;
        self.tell(ToArbiter::Vm { vm, epoch, limit, guaranteed, headroom, pinned, ancestors });
        self.tell(ToArbiter::TimeShare { vm, epoch, share: shares });
        if fenced {
            self.tell(ToArbiter::Fence { vm, epoch });
        }
    }
}
