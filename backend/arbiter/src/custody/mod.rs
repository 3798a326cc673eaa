//! The arbiter's decisions: the memory that each worker gets, and the next task of the driver.
//!
//! The server loop reports each event to [`Custody`] ([`Custody::request`], [`Custody::worker_died`], [`Custody::finished`], …), does
//! the [`Effect`]s that it returns, and gives the driver the task of [`Custody::plan`]. Custody owns the whole state of a unit's
//! memory: the accounts, the chunks, the workers, and the order in which takers wait. It must never call a driver, own a
//! descriptor or read a clock, so that its promises are tested over any order of messages and deaths.
//!
//! - [`vms`]: VMs, as `sluiced` sets, fences and forgets them;
//! - [`workers`]: workers, from their arrival until the driver no longer lists them;
//! - [`lending`]: takes, gives, shares, and takers that wait;
//! - [`lines`]: the order in which waiting requests are served;
//! - [`moving`]: the move of memory from one VM to another;
//! - [`growth`]: memory that drivers of workers take for themselves, and the ballast released for it;
//! - [`leak_detector`]: workers that take and never give;
//! - [`tasks`]: the driver's next task, and its consequences when it is done;
//! - [`checking`]: the check that sums and states agree.

mod checking;
mod growth;
mod leak_detector;
mod lending;
mod lines;
mod moving;
mod tasks;
#[cfg(test)]
mod tests;
mod vms;
mod workers;

use crate::{
    chunks::Chunks,
    ids::{ChunkId, Class, VmKey, WorkerId},
    ledger::{Broken, Ledger},
};
pub use growth::Estimates;
use growth::Growth;
use lending::{LeaseShare, Waiter};
use lines::Lines;
use sluice_driver::Code;
use sluice_messages::{
    control::{ArbiterEvent, FromArbiter},
    custody::{CustodyAnswer, UNIT},
};
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};
pub use tasks::{Reason, ScrubOrder, Task, TaskOutcome, mix};

/// Milliseconds since the arbiter's start.
pub type Millis = u64;

/// An action for the server loop. Actions are done in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Export a chunk and send it to a worker.
    Lend {
        /// The worker that made the request.
        worker: WorkerId,
        /// The request's serial.
        serial: u64,
        /// The new lease's number.
        lease: u64,
        /// The chunk to export.
        chunk: ChunkId,
        /// The chunk's size in bytes.
        bytes: u64,
        /// True if more chunks follow for the same request.
        more: bool,
    },
    /// Send an answer without a descriptor.
    Answer {
        /// The worker to answer.
        worker: WorkerId,
        /// The answer to send.
        answer: CustodyAnswer,
    },
    /// Kill a worker by its pidfd.
    Kill {
        /// The worker to kill.
        worker: WorkerId,
    },
    /// Send a message to `sluiced`.
    Tell(FromArbiter),
}

/// The stage of a worker's life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum WorkerState {
    Alive,
    /// It broke the protocol or closed its socket: its messages are ignored; its process still lives.
    Ending,
    /// Its process has ended; the driver may still list it.
    Dead {
        since: Millis,
        reported: bool,
    },
}

/// Milliseconds within which a worker gives back a chunk after a recall. Then its idle bytes count no longer, for it may have none.
const RECALL_OVERDUE: Millis = 2_000;

/// Recalls of a worker's idle chunks.
#[derive(Clone, Copy, Debug)]
struct Recall {
    /// Time of the first one, or of the last chunk that came back since.
    since: Millis,
    /// Time of the last one.
    last: Millis,
}

impl Recall {
    /// The time at which the worker's idle bytes count no longer.
    const fn overdue(self) -> Millis {
        self.since.saturating_add(RECALL_OVERDUE)
    }
}

#[derive(Debug)]
struct Worker {
    vm: VmKey,
    /// The process number, as in the inventory's list.
    process: u32,
    /// The user of the guest process that it serves; `NO_USER` in a VM.
    user: u32,
    /// The guest's own number of its process.
    guest: u32,
    life: WorkerState,
    /// Its leases with their chunks.
    leases: BTreeMap<u64, ChunkId>,
    /// Bytes of its leases.
    lent: u64,
    /// Bytes of its leased chunks, each counted once; and their largest sum since the last look at its booked bytes.
    held: u64,
    peak: u64,
    /// Time of its last loan.
    borrowed: Millis,
    /// Bytes that it reports as idle.
    idle: u64,
    pinned: u64,
    /// Every chunk of which it ever got a descriptor, with its number of leases on it.
    imported: BTreeMap<ChunkId, u32>,
    shares: BTreeSet<u128>,
    /// Number of leases in these.
    shared: usize,
    /// Number of requests that wait for an answer, and of those among them that are for growth.
    waiting: usize,
    wishes: usize,
    /// The recall of its idle chunks, if there was one.
    recalled: Option<Recall>,
    /// Bytes that its driver was granted, margin included, and that no measured figure has replaced.
    granted: u64,
    /// Bytes of the margins of all its grants.
    margins: u64,
    /// The part of these that the worker reports as given back by its driver, and the time of its last report.
    returned: u64,
    shrank: Millis,
    /// Bytes granted in place of `returned` ones since a figure confirmed the last: the driver may have kept some of those, because
    /// it allocates in blocks.
    reused: u64,
    /// Serials of the grants that it has not ended.
    grants: HashSet<u64>,
    /// Time at which its last grant began or ended.
    grew: Millis,
    /// The inventory's figure of its driver's bytes, and the time at which it was asked for.
    booked: Booked,
    seen: Millis,
    /// Bytes that its VM is charged for its driver.
    charged: u64,
    /// Its parts of its VM's [`Account::granted`](crate::ledger::Account::granted) and
    /// [`Account::doubtful`](crate::ledger::Account::doubtful).
    counted: (u64, u64),
    leak_detector: leak_detector::LeakDetector,
}

/// The inventory's figure of a worker's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Booked {
    /// It does not list the worker yet, or no longer does.
    Unlisted,
    /// It lists the worker without a figure: at least a context, because a process without one is not listed.
    AtLeast(u64),
    /// It reports this many bytes.
    Bytes(u64),
}

impl Worker {
    /// Adds a lease on a chunk of this many bytes.
    fn add_lease(&mut self, lease: u64, chunk: ChunkId, bytes: u64) {
        self.leases.insert(lease, chunk);
        self.lent = self.lent.saturating_add(bytes);
        let leases = self.imported.entry(chunk).or_default();
        if *leases == 0 {
            self.held = self.held.saturating_add(bytes);
        }
        *leases = leases.saturating_add(1);
    }

    /// Ends such a lease.
    fn end_lease(&mut self, lease: u64, chunk: ChunkId, bytes: u64) {
        self.leases.remove(&lease);
        self.lent = self.lent.saturating_sub(bytes);
        let leases = self.imported.entry(chunk).or_default();
        *leases = leases.saturating_sub(1);
        if *leases == 0 {
            self.held = self.held.saturating_sub(bytes);
        }
    }

    fn idle(&self) -> u64 {
        self.idle.min(self.lent)
    }

    /// Bytes to charge its VM for its driver: the grants, or its measured bytes if these are more.
    fn charge(&self) -> u64 {
        self.charge_for(self.granted)
    }

    /// The charge with this many bytes granted besides, if the driver has kept what the worker reports as given back.
    fn charge_with(&self, bytes: u64) -> u64 {
        self.charge_for(self.granted.saturating_add(self.reused).saturating_add(bytes))
    }

    /// The bytes to charge in addition if the driver has kept what the worker reports as given back.
    fn doubtful(&self) -> u64 {
        self.charge_with(0) - self.charge()
    }

    /// The charge for grants. Charges are whole units, as chunks are.
    fn charge_for(&self, granted: u64) -> u64 {
        granted.max(self.taken()).checked_next_multiple_of(UNIT).unwrap_or(u64::MAX)
    }

    /// True if the inventory's figure includes all growth that was granted.
    fn is_settled(&self) -> bool {
        self.grants.is_empty() && self.seen > self.grew
    }

    /// Bytes that its driver has taken at least.
    fn taken(&self) -> u64 {
        match self.booked {
            Booked::Unlisted => 0,
            Booked::AtLeast(bytes) | Booked::Bytes(bytes) => bytes,
        }
    }

    /// Bytes that the inventory books to it, without estimates.
    fn booked_bytes(&self) -> u64 {
        if let Booked::Bytes(bytes) = self.booked { bytes } else { 0 }
    }
}

/// Memory of chunks that left custody and did not come back, because some process still holds it.
#[derive(Debug)]
struct KeptMemory {
    vm: VmKey,
    bytes: u64,
    /// The processes that are known to have had access. After these are gone, another process may still hold it.
    importers: Vec<WorkerId>,
    /// The time at which it was missed first.
    since: Millis,
    /// True once it was reported.
    reported: bool,
}

/// The settings of a unit.
#[derive(Clone, Copy, Debug)]
pub struct UnitSettings {
    /// The unit's number.
    pub unit: u32,
    /// Bytes that stay free in the driver beside its own use.
    pub reserve: u64,
    /// The estimated cost of growth.
    pub estimates: Estimates,
}

/// The whole state of a unit's arbiter.
#[derive(Debug)]
pub struct Custody {
    settings: UnitSettings,
    ledger: Ledger,
    chunks: Chunks,
    workers: HashMap<WorkerId, Worker>,
    /// Workers of each VM, in order of arrival.
    members: BTreeMap<VmKey, Vec<WorkerId>>,
    /// Those of them that are not alive.
    ending: BTreeSet<(VmKey, WorkerId)>,
    /// Chunks that workers share, by number.
    shares: HashMap<u128, LeaseShare>,
    waiters: Lines<Class, Waiter>,
    /// The last request for more escrow of each ancestor.
    escrow_requests: BTreeMap<u32, lending::EscrowRequest>,
    growth: Growth,
    kept: Vec<KeptMemory>,
    /// Bytes of the unit before any was lent: in custody, and free in the driver.
    whole: Option<u64>,
    /// Bytes of suspect chunks.
    suspect_bytes: u64,
    /// VMs to be forgotten once they have no memory left.
    leaving: BTreeSet<VmKey>,
    /// The driver's present task.
    busy: Option<tasks::Busy>,
    /// The largest class of which a taker was refused a chunk although the unit had enough bytes.
    wanted: Option<Class>,
    /// True if a chunk was taken since the last look at free memory.
    taken_from: bool,
    next_lease: u64,
    /// The number of the next share: random, and used once.
    next_share: Option<u128>,
    /// State changed for which a taker may wait.
    recheck: bool,
    /// The first time at which a request no longer waits for reports of idle bytes.
    reports_end: Option<Millis>,
    /// State changed since the last audit.
    changed: bool,
    /// VMs whose pages are to be written.
    touched: BTreeSet<VmKey>,
    effects: VecDeque<Effect>,
    /// Number of messages of old epochs.
    stale: u64,
    /// Time of the next look for memory that only grows.
    look_at: Millis,
    /// True if the inventory's figures of workers are used, or will be if the present probe succeeds.
    figures_judge: bool,
    /// True if these include memory lent to them.
    imports_booked: bool,
    /// True if some request waits for the next figures.
    look_wanted: bool,
}

impl Custody {
    /// An empty unit with `free` bytes free in the driver.
    #[must_use]
    pub fn new(settings: UnitSettings, free: u64) -> Custody {
        Custody {
            settings,
            ledger: Ledger::default(),
            chunks: Chunks::default(),
            workers: HashMap::new(),
            members: BTreeMap::new(),
            ending: BTreeSet::new(),
            shares: HashMap::new(),
            waiters: Lines::default(),
            escrow_requests: BTreeMap::new(),
            growth: Growth::new(free),
            kept: Vec::new(),
            whole: None,
            suspect_bytes: 0,
            leaving: BTreeSet::new(),
            busy: None,
            wanted: None,
            taken_from: false,
            next_lease: 1,
            next_share: None,
            recheck: false,
            reports_end: None,
            changed: true,
            touched: BTreeSet::new(),
            effects: VecDeque::new(),
            stale: 0,
            look_at: 0,
            figures_judge: false,
            imports_booked: false,
            look_wanted: false,
        }
    }

    /// The number of actions that wait.
    #[must_use]
    pub fn effects(&self) -> usize {
        self.effects.len()
    }

    /// VMs with open accounts.
    pub fn vms(&self) -> impl Iterator<Item = VmKey> {
        self.ledger.accounts().filter(|(_, account)| !account.closed).map(|(key, _)| key)
    }

    /// The next action.
    pub fn effect(&mut self) -> Option<Effect> {
        self.effects.pop_front()
    }

    /// VMs with changed figures since the last call.
    pub fn touched(&mut self) -> BTreeSet<VmKey> {
        core::mem::take(&mut self.touched)
    }

    /// The figures in the custody pages of a VM: its quota, the bytes of it in use, the driver's share included, and whether
    /// its drivers may use their margins.
    #[must_use]
    pub fn figures(&self, key: VmKey) -> (u64, u64, bool) {
        let Some(account) = self.ledger.account(key) else { return (0, 0, false) };
        let used = account.charged().saturating_sub(account.idle);
        (self.ledger.limit(key), used, self.growth.is_open(key))
    }

    /// Fixes the quota of a VM without a limit, and the bytes that the unit has in all.
    pub fn set_nominal(&mut self) {
        let (capacity, _) = self.ledger.totals();
        self.ledger.set_nominal(capacity);
        self.whole = Some(capacity.saturating_add(self.growth.free()));
    }

    /// Bytes that a grant lets a driver take beyond the requested ones.
    #[must_use]
    pub const fn margin(&self) -> u64 {
        self.settings.estimates.margin
    }

    /// The unit's number.
    #[must_use]
    pub const fn unit(&self) -> u32 {
        self.settings.unit
    }

    /// True if a worker has this lease on a chunk.
    #[must_use]
    pub fn holds(&self, id: WorkerId, lease: u64, chunk: ChunkId) -> bool {
        self.workers.get(&id).is_some_and(|worker| worker.leases.get(&lease) == Some(&chunk))
    }

    /// Bytes that can be lent to any VM at once.
    #[must_use]
    pub fn clean_bytes(&self) -> u64 {
        let of = |class: Class| self.chunks.clean_free(class).count() as u64 * class.bytes();
        Class::ALL.into_iter().map(of).sum()
    }

    /// Known bytes of the device: chunks, and memory of workers' drivers. `None` while memory moves, and while the use of some
    /// driver is unknown.
    #[must_use]
    pub fn known(&self) -> Option<u64> {
        let unknown = |worker: &Worker| match worker.booked {
            Booked::AtLeast(_) => true,
            Booked::Unlisted => worker.granted > 0,
            // A figure may be older than the worker's last growth.
            Booked::Bytes(_) => !worker.is_settled(),
        };
        // Scrubs and measurements move no memory; measurements are as frequent as the inventory's figures, and may always coincide.
        if self.moves() || self.workers.values().any(unknown) {
            return None;
        }
        let chunks = self.chunks.iter().map(|(_, chunk)| chunk.class.bytes());
        let kept = self.kept.iter().map(|kept| kept.bytes);
        let drivers = self.workers.values().map(Worker::taken);
        Some(chunks.chain(kept).chain(drivers).fold(0, u64::saturating_add))
    }

    /// The ledger.
    #[must_use]
    pub const fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    /// The chunks.
    #[must_use]
    pub const fn chunks(&self) -> &Chunks {
        &self.chunks
    }

    /// The number of messages of old epochs that were dropped.
    #[must_use]
    pub const fn stale(&self) -> u64 {
        self.stale
    }

    fn event(&mut self, kind: ArbiterEvent, vm: u32, process: u32, bytes: u64) {
        let kind = kind as u32;
        self.effects.push_back(Effect::Tell(FromArbiter::Event { kind, vm, process, bytes }));
    }

    /// Reports a violated invariant in the log and as an event. State is unchanged.
    fn broken(&mut self, vm: u32, broken: Broken) {
        tracing::error!(vm, %broken, "the ledger contradicts itself");
        self.event(ArbiterEvent::LedgerBroken, vm, 0, 0);
    }

    fn report_if_broken(&mut self, key: VmKey, done: Result<(), Broken>) {
        if let Err(broken) = done {
            self.broken(key.vm, broken);
        }
    }

    fn answer(&mut self, worker: WorkerId, answer: CustodyAnswer) {
        self.effects.push_back(Effect::Answer { worker, answer });
    }

    fn refuse(&mut self, worker: WorkerId, serial: u64, error: Code) {
        self.answer(worker, CustodyAnswer::Refused { serial, error });
    }

    /// True if state changed since the last call; for the audit.
    pub fn changed(&mut self) -> bool {
        core::mem::take(&mut self.changed)
    }
}

fn class_of(bytes: u64) -> Option<Class> {
    Class::of(bytes)
}
