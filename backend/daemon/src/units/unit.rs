//! One placement unit: its arbiter, and the messages to the arbiter.
//!
//! It owns the limits of each VM on the unit, and sends them to every new arbiter of the unit: an arbiter that has died took
//! nothing with it but its loans, and the next one takes the unit's memory again and sweeps it. The daemon never decides about
//! memory: it reports the VMs and their limits, and the arbiter decides alone.

use std::{
    cell::{Cell, RefCell},
    collections::BTreeMap,
    fs::OpenOptions,
    io,
    os::{
        fd::{AsFd as _, OwnedFd},
        unix::fs::OpenOptionsExt as _,
    },
    path::PathBuf,
    rc::Rc,
    time::{Duration, Instant},
};

use rustix::process::Signal;
use sluice_messages::{
    control::{ArbiterSetup, Figures, FromArbiter, Shares, ToArbiter, ToLauncher, WorkerSetup, codec},
    inventory::{Visible, WHOLE},
};
use sluice_runtime::{
    process::{Identity, kill, signal},
    rate::TokenBucket,
};
use sluice_shared_memory::socket;
use tokio::{
    io::unix::AsyncFd,
    sync::{Notify, watch},
    time::{interval, sleep, timeout},
};

use crate::{
    channel::{Channel, SendQueue, send_queue},
    configuration::Configuration,
    handover::launching::{Launching, set_up_worker},
    handover::watched::{gone, watch},
    records::notice::{Notice, Notices},
    records::state::{adoption::ArbiterRecord, checkpoint::Checkpoint},
    records::usage,
    records::usage::WorkReport,
    units::inventory::Inventory,
};

/// How long an arbiter may take for an answer, once it lends, before it counts as hung. Drivers have long calls.
const HUNG: Duration = Duration::from_secs(20);
/// How long it may take to take all memory and clear it, before it counts as hung.
const READY: Duration = Duration::from_secs(120);
/// How often it is asked what it has.
const PULSE: Duration = Duration::from_millis(500);
/// How long a description may take before it is called unknown.
const DESCRIBE: Duration = Duration::from_secs(1);
/// How long it may take to end when asked to.
const END: Duration = Duration::from_secs(2);
/// How long a killed one may take to go away.
const KILLED: Duration = Duration::from_secs(5);
/// How long a probe may take; its arbiter ends it before.
const PROBE: Duration = Duration::from_secs(20);
/// A placement that depends on the result of a probe waits for it so long after the unit's start.
const PROBED: Duration = Duration::from_secs(5);
/// Probes at once, where one has shown nothing, and per second in the long run.
const PROBES: (u32, f64) = (3, 1.0 / 30.0);
/// How long after a probe the next may begin: by then the arbiter has taken back what was lent.
const NEXT_PROBE: Duration = Duration::from_secs(2);
/// Restarts at once, and per second in the long run.
const RESTARTS: (u32, f64) = (3, 0.2);

/// Files for the receipts of a unit: as many as fit into one message.
const RECEIPTS: usize = 4;

/// Where a unit is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    /// Ordinal of the device, as the inventory counts it.
    pub(crate) device: u32,
    /// The GPU instance that the unit is, or [`WHOLE`].
    pub(crate) instance: u32,
    /// What the drivers of the unit's arbiter and of its VMs' workers are shown.
    pub(crate) visible: Visible,
}

impl Place {
    /// All of a device, by its ordinal alone.
    pub(crate) const fn device(device: u32) -> Self {
        Self { device, instance: WHOLE, visible: Visible::Host }
    }

    /// Whether it is all of a device.
    pub(crate) const fn is_whole(&self) -> bool {
        self.instance == WHOLE
    }

    /// Whether what happens to an instance of a device happens to the unit.
    pub(crate) const fn is_hit(&self, device: u32, instance: u32) -> bool {
        self.device == device && (self.instance == instance || self.instance == WHOLE || instance == WHOLE)
    }

    /// Ordinal of the device, as drivers count those that they are shown.
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
    place: Place,
    configuration: Rc<Configuration>,
    launching: Rc<Launching>,
    inventory: Option<Rc<Inventory>>,
    checkpoint: Rc<Checkpoint>,
    notices: Notices,
    running: RefCell<Option<SendQueue<ToArbiter>>>,
    process: Cell<Option<Identity>>,
    /// Bytes that can be lent, while there is an arbiter that lends.
    lends: watch::Sender<Option<u64>>,
    /// Bytes of a context and of the margin beside it, as its arbiter measured; 0 where that is not known.
    least: Cell<u64>,
    terms: RefCell<BTreeMap<u32, Terms>>,
    escrows: RefCell<BTreeMap<u32, u64>>,
    heard: RefCell<Heard>,
    reported: Notify,
    /// Messages of an epoch that is over.
    stale: Cell<u64>,
    /// Whether its arbiter is of a daemon before.
    adopted: Cell<bool>,
    /// Whether its arbiter uses the driver's bytes per process, once it has said so.
    figures: watch::Sender<Option<Figures>>,
    /// The time since which it is unknown whether they can be used, while it is.
    unknown_since: Cell<Instant>,
}

/// What a VM may have of a unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Terms {
    /// Its epoch.
    pub(crate) epoch: u64,
    /// Whether it is fenced and gets nothing.
    pub(crate) fenced: bool,
    /// Bytes of chunks; 0 for all of the unit.
    pub(crate) limit: u64,
    /// Of these, kept for it.
    pub(crate) guaranteed: u64,
    /// Bytes the driver may take for it; 0 for no limit.
    pub(crate) headroom: u64,
    /// Bytes of guest memory it may have pinned; 0 for no limit.
    pub(crate) pinned: u64,
    /// Its project and organisation, as in the message.
    pub(crate) ancestors: u64,
    /// What it may have of the unit's time.
    pub(crate) shares: Shares,
}

/// What an arbiter last said, with a count of how often it has.
#[derive(Debug, Default)]
struct Heard {
    count: u64,
    unit: Option<(u64, UnitReport)>,
    vms: BTreeMap<u32, (u64, VmReport)>,
    times: BTreeMap<u32, TimeReport>,
    work: BTreeMap<u32, WorkReport>,
    pinned: BTreeMap<u32, u64>,
    upkeep: Option<UpkeepReport>,
}

impl Heard {
    /// What was said of an epoch of a VM is not said of the next, nor of the next VM of the number.
    fn forget(&mut self, vm: u32) {
        self.vms.remove(&vm);
        self.times.remove(&vm);
        self.work.remove(&vm);
        self.pinned.remove(&vm);
    }
}

/// What a unit has, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct UnitReport {
    pub(crate) total: u64,
    pub(crate) lent: u64,
    pub(crate) clean: u64,
    pub(crate) dirty: u64,
    pub(crate) headroom: u64,
    pub(crate) suspect: u64,
}

/// What a VM has of a unit, in bytes.
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

/// What a VM had of a unit's time in its epoch, in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct TimeReport {
    pub(crate) used: u64,
    pub(crate) overlapped: u64,
    pub(crate) waited: u64,
    pub(crate) turns: u64,
}

/// What it took to keep a unit's memory since its arbiter was started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct UpkeepReport {
    /// Chunks, bytes and nanoseconds of scrubbing.
    pub(crate) scrubs: u64,
    pub(crate) scrubbed: u64,
    pub(crate) took: u64,
    /// Bytes by which the driver's figure is another than the ledger's.
    pub(crate) drift: u64,
}

/// A worker, as arbiters are told of it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Borrower {
    pub(crate) vm: u32,
    pub(crate) epoch: u64,
    pub(crate) process: u32,
    pub(crate) session: u32,
    pub(crate) user: u32,
}

impl Unit {
    pub(crate) fn new(
        number: u32,
        place: Place,
        configuration: Rc<Configuration>,
        launching: Rc<Launching>,
        inventory: Option<Rc<Inventory>>,
        checkpoint: Rc<Checkpoint>,
        notices: Notices,
    ) -> Rc<Self> {
        Rc::new(Self {
            number,
            place,
            configuration,
            launching,
            inventory,
            checkpoint,
            notices,
            running: RefCell::new(None),
            process: Cell::new(None),
            lends: watch::Sender::new(None),
            least: Cell::new(0),
            terms: RefCell::new(BTreeMap::new()),
            escrows: RefCell::new(BTreeMap::new()),
            heard: RefCell::new(Heard::default()),
            reported: Notify::new(),
            stale: Cell::new(0),
            adopted: Cell::new(false),
            figures: watch::Sender::new(None),
            unknown_since: Cell::new(Instant::now()),
        })
    }

    pub(crate) fn number(&self) -> u32 {
        self.number
    }

    /// Where it is.
    pub(crate) fn place(&self) -> Place {
        self.place
    }

    /// How many messages were of an epoch that is over.
    pub(crate) fn stale(&self) -> u64 {
        self.stale.get()
    }

    /// Its arbiter's process, if one runs.
    pub(crate) fn process(&self) -> Option<u32> {
        self.process.get().map(|process| process.process)
    }

    /// Its arbiter as one that counts, if one runs.
    pub(crate) fn arbiter(&self) -> Option<usage::Arbiter> {
        self.process.get().map(|process| usage::Arbiter { process, adopted: self.adopted.get() })
    }

    /// Whether growth is charged to the VM whose it is, by the driver's bytes per process. Of a whole device its arbiter finds out
    /// whether it can be, soon after its start; until then it is not.
    pub(crate) fn has_figures(&self) -> bool {
        self.place.is_whole() && *self.figures.borrow() == Some(Figures::Used)
    }

    /// An arbiter says whether it uses the driver's figures. That they cannot be used is told of once, whatever is started anew.
    fn set_figures(&self, figures: Figures) {
        let before = self.figures.send_replace(Some(figures));
        if figures == Figures::Unknown && matches!(before, Some(Figures::Used | Figures::Unused)) {
            self.unknown_since.set(Instant::now());
        }
        if figures == Figures::Unknown || !self.place.is_whole() {
            return;
        }
        let measured = figures == Figures::Used;
        if self.checkpoint.set_measured(self.number, measured) && !measured {
            // The notice has no receiver while the daemon ends.
            _ = self.notices.send(Notice::Unmeasured { unit: self.number });
        }
    }

    /// Waits until its arbiter knows whether it can use the driver's figures, but no longer than [`PROBED`] after it began to find out.
    pub(crate) async fn probed(&self) {
        let mut figures = self.figures.subscribe();
        let known = figures.wait_for(|figures| matches!(figures, Some(Figures::Used | Figures::Unused)));
        _ = timeout(PROBED.saturating_sub(self.unknown_since.get().elapsed()), known).await;
    }

    /// Has a probe started whenever the arbiter does not know whether it can use the driver's figures. Nobody waits for it.
    async fn probe_figures(&self) {
        // Of a part of a device there are none, and without an inventory nobody could ask for them.
        if !self.place.is_whole() || self.inventory.is_none() {
            return std::future::pending().await;
        }
        let mut figures = self.figures.subscribe();
        let mut probes = TokenBucket::new(PROBES.1, PROBES.0, Instant::now());
        while figures.wait_for(|figures| *figures == Some(Figures::Unknown)).await.is_ok() {
            if let Err(wait) = probes.take(Instant::now()) {
                sleep(wait).await;
                continue;
            }
            if let Err(error) = self.probe_once().await {
                tracing::warn!("a probe of unit {} cannot be made: {error}", self.number);
            }
            // What it has shown.
            self.describe().await;
            sleep(NEXT_PROBE).await;
        }
    }

    /// Has the arbiter lend memory to a process that is there for nothing else, and waits for its end.
    async fn probe_once(&self) -> io::Result<()> {
        let request = ToLauncher::StartProbe { unit: self.number, visible: self.place.visible };
        let started = self.launching.start(request).await.map_err(io::Error::other)?;
        let probe = Probe(watch(started.pidfd)?);
        let setup = WorkerSetup {
            vm: 0,
            session: 0,
            driver: self.configuration.driver.clone(),
            mapped_runs: 0,
            devices: 1,
            scrub_every_free: false,
            identity: self.place.visible.uuid(),
        };
        let (custody, theirs) = socket::pair()?;
        set_up_worker(&started.socket, &setup, [(self.place.ordinal(), custody.as_fd())])?;
        let message = ToArbiter::Prober { process: started.process };
        let pidfd = probe.0.get_ref().try_clone()?;
        let posted =
            self.running.borrow().as_ref().is_some_and(|queue| queue.post(message, vec![theirs, pidfd]));
        if posted && timeout(PROBE, gone(&probe.0)).await.is_err() {
            return Err(io::Error::other("it does not end"));
        }
        Ok(())
    }

    /// Bytes that can be lent; `None` while nothing can.
    pub(crate) fn lendable(&self) -> Option<u64> {
        *self.lends.borrow()
    }

    /// The bytes of quota and headroom below which no session of a VM can start; 0 where that is not known.
    pub(crate) const fn least_quota(&self) -> u64 {
        self.least.get()
    }

    /// Says what a VM may have, from now on and to every arbiter that follows.
    pub(crate) fn admit(&self, vm: u32, terms: Terms) {
        let before = self.terms.borrow_mut().insert(vm, terms);
        if let Some(Terms { epoch, .. }) = before.filter(|before| before.epoch != terms.epoch) {
            self.tell(ToArbiter::Forget { vm, epoch });
            self.heard.borrow_mut().forget(vm);
        }
        self.tell_terms(vm, &terms);
    }

    /// Says that a VM is gone, to this arbiter and to every one that follows. One that has its number since, and with it a
    /// later epoch, stays.
    pub(crate) fn forget(&self, vm: u32, epoch: u64) {
        let mut terms = self.terms.borrow_mut();
        if terms.get(&vm).is_some_and(|terms| terms.epoch > epoch) {
            return;
        }
        if let Some(Terms { epoch, .. }) = terms.remove(&vm) {
            self.tell(ToArbiter::Forget { vm, epoch });
        }
        drop(terms);
        self.heard.borrow_mut().forget(vm);
    }

    /// What a VM had of the unit when its arbiter was last asked.
    pub(crate) fn last_of_vm(&self, vm: u32) -> Option<VmReport> {
        self.heard.borrow().vms.get(&vm).map(|(_, report)| *report)
    }

    /// Whether a VM is known here, and in this epoch.
    fn is_current(&self, vm: u32, epoch: u64) -> bool {
        self.terms.borrow().get(&vm).is_some_and(|terms| terms.epoch == epoch)
    }

    /// Asks what a VM has, without waiting for the answer.
    pub(crate) fn ask_vm(&self, vm: u32) {
        self.tell(ToArbiter::DescribeVm { vm });
    }

    /// What the unit had when its arbiter was last asked.
    pub(crate) fn last(&self) -> Option<UnitReport> {
        self.heard.borrow().unit.map(|(_, report)| report)
    }

    /// Bytes of guest memory that a VM had pinned for the unit when its arbiter was last asked.
    pub(crate) fn pinned(&self, vm: u32) -> u64 {
        self.heard.borrow().pinned.get(&vm).copied().unwrap_or(0)
    }

    /// What it has taken to keep the unit's memory.
    pub(crate) fn upkeep(&self) -> Option<UpkeepReport> {
        self.heard.borrow().upkeep
    }

    /// Says that a VM gets nothing any more.
    pub(crate) fn fence(&self, vm: u32) {
        let epoch = {
            let mut all = self.terms.borrow_mut();
            let Some(terms) = all.get_mut(&vm).filter(|terms| !terms.fenced) else { return };
            terms.fenced = true;
            terms.epoch
        };
        self.tell(ToArbiter::Fence { vm, epoch });
    }

    /// Says what a project or organisation may have of the unit.
    pub(crate) fn escrow(&self, ancestor: u32, bytes: u64) {
        self.escrows.borrow_mut().insert(ancestor, bytes);
        self.tell(ToArbiter::Escrow { ancestor, bytes });
    }

    /// Has the arbiter try whether the device works; it reports when it does not.
    pub(crate) fn probe(&self) {
        self.tell(ToArbiter::Probe {});
    }

    /// A project or organisation is gone, and no VM is in it.
    pub(crate) fn forget_ancestor(&self, ancestor: u32) {
        if self.escrows.borrow_mut().remove(&ancestor).is_some() {
            self.tell(ToArbiter::Escrow { ancestor, bytes: 0 });
        }
    }

    /// Waits, not longer than `limit`, until the unit lends.
    pub(crate) async fn ready(&self, limit: Duration) -> bool {
        let mut lends = self.lends.subscribe();
        let ready = async { lends.wait_for(Option::is_some).await.is_ok() };
        timeout(limit, ready).await.unwrap_or(false)
    }

    /// Introduces a worker; returns its end of the custody socket, or `None` when there is no arbiter.
    pub(crate) fn introduce(&self, borrower: Borrower, pidfd: &OwnedFd) -> io::Result<Option<OwnedFd>> {
        let running = self.running.borrow();
        let Some(queue) = running.as_ref().filter(|_| self.lends.borrow().is_some()) else {
            return Ok(None);
        };
        let (ours, theirs) = socket::pair()?;
        let Borrower { vm, epoch, process, session, user } = borrower;
        let message = ToArbiter::Worker { vm, epoch, process, session, user };
        Ok(queue.post(message, vec![theirs, pidfd.try_clone()?]).then_some(ours))
    }

    /// What the unit has now; `None` when its arbiter does not say.
    pub(crate) async fn describe(&self) -> Option<UnitReport> {
        let asked = self.heard.borrow().count;
        self.tell(ToArbiter::DescribeUnit {});
        self.hear_of(asked, |heard| heard.unit).await
    }

    /// What a VM has of the unit now; `None` when the arbiter does not say.
    pub(crate) async fn describe_vm(&self, vm: u32) -> Option<VmReport> {
        let asked = self.heard.borrow().count;
        self.tell(ToArbiter::DescribeVm { vm });
        self.hear_of(asked, |heard| heard.vms.get(&vm).copied()).await
    }

    /// Waits for a report that came after the first `asked`.
    async fn hear_of<T>(&self, asked: u64, find: impl Fn(&Heard) -> Option<(u64, T)>) -> Option<T> {
        let fresh = async {
            loop {
                let reported = self.reported.notified();
                if let Some((count, report)) = find(&self.heard.borrow())
                    && count > asked
                {
                    return report;
                }
                reported.await;
            }
        };
        if self.running.borrow().is_none() {
            return None;
        }
        timeout(DESCRIBE, fresh).await.ok()
    }

    fn tell(&self, message: ToArbiter) {
        if let Some(queue) = self.running.borrow().as_ref() {
            // One that is gone is followed by one that is told everything.
            _ = queue.post(message, Vec::new());
        }
    }

    fn tell_terms(&self, vm: u32, terms: &Terms) {
        let &Terms { epoch, fenced, limit, guaranteed, headroom, pinned, ancestors, shares } = terms;
        self.tell(ToArbiter::Vm { vm, epoch, limit, guaranteed, headroom, pinned, ancestors });
        let Shares { weight, priority, cap, guarantee, hang } = shares;
        let priority = priority as u32;
        self.tell(ToArbiter::Shares { vm, epoch, weight, priority, cap, guarantee, hang });
        if fenced {
            self.tell(ToArbiter::Fence { vm, epoch });
        }
    }

    /// Keeps an arbiter running until `stop` says so. Returns then, or, where `give_up` is set, when there can be none.
    pub(crate) async fn serve(
        self: Rc<Self>,
        mut stop: watch::Receiver<bool>,
        give_up: bool,
    ) -> Result<(), UnitError> {
        let mut restarts = TokenBucket::new(RESTARTS.1, RESTARTS.0, Instant::now());
        loop {
            let arbiter = tokio::select! {
                arbiter = self.start() => arbiter,
                _ = stop.wait_for(|stop| *stop) => return Ok(()),
            };
            let mut stopped = false;
            match arbiter {
                Ok(arbiter) => {
                    tokio::select! {
                        result = self.converse(&arbiter) => {
                            let why = result.unwrap_or_else(|error| error.to_string());
                            tracing::error!("the arbiter of unit {}: {why}; it is started again", self.number);
                        }
                        _ = stop.wait_for(|stop| *stop) => stopped = true,
                    }
                    self.end(&arbiter, stopped).await;
                }
                Err(error) => tracing::error!("cannot start the arbiter of unit {}: {error}", self.number),
            }
            if stopped {
                return Ok(());
            }
            while let Err(wait) = restarts.take(Instant::now()) {
                if give_up {
                    return Err(UnitError { unit: self.number });
                }
                tokio::select! {
                    () = sleep(wait) => {}
                    _ = stop.wait_for(|stop| *stop) => return Ok(()),
                }
            }
        }
    }

    /// The arbiter that the daemon before has left, which lends and goes on lending.
    fn adopt(&self) -> io::Result<Option<Arbiter>> {
        let record = self.launching.adoption().take_arbiter(self.number);
        let socket = self.launching.keeper().take(&socket_name(self.number));
        let (Some(ArbiterRecord { process, lends: Some(lends) }), Some(socket)) = (record, socket) else {
            return Ok(None);
        };
        let Some(pidfd) = process.open() else { return Ok(None) };
        let (pidfd, channel) = (watch(pidfd)?, Channel::new(socket)?);
        tracing::info!("unit {}: arbiter adopted: process {}", self.number, process.process);
        self.process.set(Some(process));
        self.lends.send_replace(Some(lends));
        self.record(process, Some(lends));
        self.adopted.set(true);
        Ok(Some(Arbiter { pidfd, channel, receipts: None }))
    }

    /// Notes the arbiter for the daemon that follows.
    fn record(&self, process: Identity, lends: Option<u64>) {
        let unit = self.number;
        self.launching.adoption().note(|all| _ = all.arbiters.insert(unit, ArbiterRecord { process, lends }));
    }

    async fn start(&self) -> io::Result<Arbiter> {
        if let Some(arbiter) = self.adopt()? {
            return Ok(arbiter);
        }
        let receipts = self.open_receipts()?;
        let started = self
            .launching
            .start(ToLauncher::StartArbiter { unit: self.number, visible: self.place.visible })
            .await
            .map_err(io::Error::other)?;
        tracing::info!("unit {}: arbiter is process {}", self.number, started.process);
        let process = Identity::behind(started.process, &started.pidfd)
            .ok_or_else(|| io::Error::other("it has ended at once"))?;
        self.launching.keeper().keep(&socket_name(self.number), started.socket.as_fd());
        let (pidfd, channel) = (watch(started.pidfd)?, Channel::new(started.socket)?);
        let arbiter = Arbiter { pidfd, channel, receipts: Some(receipts) };
        // Should this daemon be killed, the next one has to adopt it, or to end it, for it holds the unit's memory.
        self.checkpoint.set_arbiter(self.number, Some(process));
        self.record(process, None);
        self.process.set(Some(process));
        Ok(arbiter)
    }

    /// The files for receipts of scrubs: appended to, never read by us, and never lost with a process.
    fn open_receipts(&self) -> io::Result<Vec<OwnedFd>> {
        let open = |path| OpenOptions::new().append(true).create(true).mode(0o600).open(path);
        receipts(&self.configuration, self.number)
            .into_iter()
            .map(|path| open(path).map(OwnedFd::from))
            .collect()
    }

    /// Tells an arbiter everything and listens to it, to its end. Returns what became of it.
    async fn converse(&self, arbiter: &Arbiter) -> io::Result<String> {
        // It takes the unit's memory only when the next daemon would know of it. Where that cannot be written it is said by who
        // keeps the checkpoint.
        _ = self.checkpoint.written().await;
        let setup = ArbiterSetup {
            unit: self.number,
            driver: self.configuration.driver.clone(),
            device: self.place.ordinal(),
            identity: self.place.visible.uuid(),
            listed: self.place.device,
            instance: self.place.instance,
            verify: self.configuration.verify,
            scrub: self.configuration.scrub,
            reserve: self.configuration.reserve,
            receipts: self.configuration.receipts_size / RECEIPTS as u64,
        };
        let setup = codec::encode(&setup).map_err(io::Error::other)?;
        let (queue, mut queued) = send_queue();
        // One that was adopted has its setup.
        if let Some(files) = &arbiter.receipts {
            let files: Vec<_> = files.iter().map(|file| file.as_fd()).collect();
            arbiter.channel.send_setup(&setup, &files).await?;
        }
        *self.running.borrow_mut() = Some(queue);
        self.tell_inventory();
        for (&ancestor, &bytes) in self.escrows.borrow().iter() {
            self.tell(ToArbiter::Escrow { ancestor, bytes });
        }
        for (&vm, terms) in self.terms.borrow().iter() {
            self.tell_terms(vm, terms);
        }
        if arbiter.receipts.is_none() {
            // The daemon before may have been killed before it could say so.
            for (vm, epoch) in self.checkpoint.gone(|vm| self.terms.borrow().contains_key(&vm)) {
                self.tell(ToArbiter::Forget { vm, epoch });
            }
        }
        Ok(tokio::select! {
            result = self.hear(&arbiter.channel) => { result?; "its socket is closed".to_owned() }
            result = queued.send(&arbiter.channel) => { result?; "its socket is closed".to_owned() }
            why = self.watch_pulse() => why,
            () = self.follow_inventory() => unreachable!("an inventory is followed for ever"),
            () = self.probe_figures() => unreachable!("a unit has its sender of figures"),
            () = gone(&arbiter.pidfd) => "it has ended".to_owned(),
        })
    }

    fn tell_inventory(&self) {
        let client = self.inventory.as_ref().and_then(|inventory| inventory.client());
        match (client, self.running.borrow().as_ref()) {
            (Some(client), Some(queue)) => {
                _ = queue.post(ToArbiter::Inventory {}, vec![client]);
            }
            (None, Some(_)) if self.inventory.is_none() => tracing::warn!(
                "unit {}: without NVML nobody can tell that a worker's memory is free again: what a VM had stays its own",
                self.number
            ),
            _ => {}
        }
    }

    /// Gives the arbiter a socket of each new inventory.
    async fn follow_inventory(&self) {
        let Some(inventory) = &self.inventory else { return std::future::pending().await };
        let mut generation = inventory.generation();
        loop {
            if generation.changed().await.is_err() {
                return std::future::pending().await;
            }
            self.tell_inventory();
        }
    }

    /// Returns when the arbiter does not do what it is there for.
    async fn watch_pulse(&self) -> String {
        if !self.ready(READY).await {
            return "it does not become ready".to_owned();
        }
        let mut pulse = interval(PULSE);
        let mut answered = Instant::now();
        loop {
            pulse.tick().await;
            match self.describe().await {
                Some(_) => answered = Instant::now(),
                None if answered.elapsed() > HUNG => return format!("it has not answered for {HUNG:?}"),
                None => {}
            }
        }
    }

    async fn hear(&self, channel: &Channel<FromArbiter, ToArbiter>) -> io::Result<()> {
        while let Some((message, _)) = channel.receive().await? {
            self.heed(message);
        }
        Ok(())
    }

    fn heed(&self, message: FromArbiter) {
        let unit = self.number;
        // Notices are heard by nobody while everything ends.
        match message {
            FromArbiter::Ready { bytes, context, margin } => {
                tracing::info!(unit, bytes, context, margin, "a unit lends");
                self.least.set(context.saturating_add(margin));
                self.lends.send_replace(Some(bytes));
                if let Some(process) = self.process.get() {
                    self.record(process, Some(bytes));
                }
            }
            FromArbiter::Vm { vm, epoch, lent, headroom, dirty, holders } => {
                // Only of VMs that it was told of, and only of what they are now.
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
                self.note(|heard, count| heard.unit = Some((count, report)));
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
                _ = self.notices.send(Notice::Escrow { unit, ancestor, bytes });
            }
            FromArbiter::Event { kind, vm, process, bytes } => {
                _ = self.notices.send(Notice::Arbiter { unit, kind, vm, process, bytes });
            }
        }
    }

    fn note(&self, enter: impl FnOnce(&mut Heard, u64)) {
        let mut heard = self.heard.borrow_mut();
        heard.count += 1;
        let count = heard.count;
        enter(&mut heard, count);
        self.reported.notify_waiters();
    }

    /// Ends an arbiter, in order where it can be, and says that what it lent is lent no more.
    async fn end(&self, arbiter: &Arbiter, orderly: bool) {
        *self.running.borrow_mut() = None;
        self.process.set(None);
        self.adopted.set(false);
        self.lends.send_replace(None);
        self.figures.send_replace(None);
        self.unknown_since.set(Instant::now());
        self.launching.keeper().forget(&socket_name(self.number));
        arbiter.channel.shut();
        self.launching.adoption().note(|all| _ = all.arbiters.remove(&self.number));
        {
            let mut heard = self.heard.borrow_mut();
            heard.pinned.clear();
            heard.upkeep = None;
            heard.unit = None;
            heard.vms.clear();
            heard.times.clear();
            heard.work.clear();
        }
        if !orderly {
            // Heard by nobody while everything ends.
            _ = self.notices.send(Notice::ArbiterEnded { unit: self.number });
        } else {
            signal(arbiter.pidfd.as_fd(), Signal::TERM);
            if timeout(END, gone(&arbiter.pidfd)).await.is_ok() {
                return self.checkpoint.set_arbiter(self.number, None);
            }
        }
        kill(arbiter.pidfd.as_fd());
        match timeout(KILLED, gone(&arbiter.pidfd)).await {
            Ok(()) => self.checkpoint.set_arbiter(self.number, None),
            Err(_) => tracing::error!("the arbiter of unit {} was killed and is still there", self.number),
        }
    }
}

/// A running arbiter.
#[derive(Debug)]
struct Arbiter {
    pidfd: AsyncFd<OwnedFd>,
    channel: Channel<FromArbiter, ToArbiter>,
    /// What it writes receipts to; one that was adopted has it already.
    receipts: Option<Vec<OwnedFd>>,
}

/// A running probe: it is of no use to anybody who does not wait for it.
#[derive(Debug)]
struct Probe(AsyncFd<OwnedFd>);

impl Drop for Probe {
    fn drop(&mut self) {
        kill(self.0.get_ref().as_fd());
    }
}

/// What the socket of a unit's arbiter is kept as.
pub(crate) fn socket_name(unit: u32) -> String {
    format!("unit-{unit}")
}

impl Drop for Arbiter {
    /// One that nobody talks to must not hold the unit's memory.
    fn drop(&mut self) {
        kill(self.pidfd.as_fd());
    }
}

/// The files in which a unit's receipts of scrubs are, one after the other and round and round.
fn receipts(configuration: &Configuration, unit: u32) -> [PathBuf; RECEIPTS] {
    std::array::from_fn(|number| {
        let number = if number == 0 { String::new() } else { format!(".{number}") };
        configuration.log_directory.join(format!("scrub-unit-{unit}{number}.log"))
    })
}

/// A unit's arbiter cannot be kept running.
#[derive(Debug, thiserror::Error)]
#[error("the arbiter of unit {unit} keeps ending")]
pub(crate) struct UnitError {
    unit: u32,
}
