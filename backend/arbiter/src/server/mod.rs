//! The server loop: one thread that receives from `sluiced`, workers, the scrubber and the inventory, and passes each event to
//! [`Custody`].
//!
//! The program's main function calls it. It owns every descriptor of the arbiter: sockets, processes, timers, and the thread of the
//! driver. It must never decide about memory, which is custody's part.
//!
//! It waits only in `epoll_wait`, and makes no driver call but the export of a chunk that is lent. It receives a bounded number
//! of messages per turn from each party.

mod daemon;
mod inventory;
mod links;
mod tasks;
mod workers;

use crate::{
    audit::Audit,
    booking::BookingProbe,
    custody::{Custody, Estimates, Millis, Task, UnitSettings},
    ids::{ChunkId, VmKey, WorkerId},
    inventory::Inventory,
    receipts::Receipts,
    rounds::Rounds,
    scrub::{Fault, Rules, ScrubberThread},
    time::Time,
    unit::{OpenUnit, Piece, UnitError},
    usage::UsageCounters,
};
use links::WorkerLink;
use rustix::{
    buffer::spare_capacity,
    event::{
        Timespec,
        epoll::{self, CreateFlags, Event, EventData, EventFlags},
    },
    fd::{AsFd as _, BorrowedFd, OwnedFd},
    fs::{OFlags, fcntl_getfl, fcntl_setfl},
    io::Errno,
    rand::{GetRandomFlags, getrandom},
};
use sluice_driver::Driver;
use sluice_messages::{
    channel::{self, Channel, SetupError},
    control::{ArbiterEvent, ArbiterSetup, Figures, FromArbiter, HostAccess, ToArbiter},
    custody::UNIT,
    figures::Upkeep,
    inventory::WHOLE,
};
use sluice_runtime::closer::Closers;
use sluice_sandbox::{DriverList, DriverListError, Role, SandboxError};
use std::{
    collections::{HashMap, VecDeque},
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};
use tasks::DriverWork;

/// The reason why an arbiter ends.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// A system call failed.
    #[error(transparent)]
    Kernel(#[from] Errno),
    /// No setup was received.
    #[error(transparent)]
    Setup(#[from] SetupError),
    /// There are no files for receipts of scrubs, or they cannot be used.
    #[error("cannot use the files for receipts of scrubs: {0}")]
    Receipts(Errno),
    /// The device cannot be used.
    #[error(transparent)]
    Unit(#[from] UnitError),
    /// A thread cannot be started.
    #[error("cannot start a thread: {0}")]
    Thread(#[from] std::io::Error),
    /// The process cannot be confined.
    #[error("cannot enter the seccomp filter: {0}")]
    Sandbox(#[from] SandboxError),
    /// No filter fits the driver.
    #[error(transparent)]
    List(#[from] DriverListError),
    /// The driver failed.
    #[error(transparent)]
    Driver(#[from] Fault),
    /// The driver did not complete a task in time.
    #[error("the driver did not complete a task within {0:?}")]
    Hung(Duration),
    /// The loop cannot enter the driver's context.
    #[error("cannot use the driver's context: CUresult {0}")]
    Context(u32),
}

/// Events taken from the kernel at once: enough for all workers that a unit may have, so that none is passed over.
const EVENTS: usize = 8192;
/// Most threads that close descriptors of workers, one for each VM whose close has not ended.
const CLOSING_THREADS: usize = 64;
/// Messages received from `sluiced` or the inventory per turn.
const MESSAGES: usize = 64;
/// Milliseconds between measurements of the driver's free memory.
const MEASURE: Millis = 500;
/// Bytes of one scrub: the least, which is also the first, and the most. It adapts to the time that scrubs take.
const BATCH: [u64; 2] = [32 << 20, 1 << 30];

/// The source of an event, in the kernel's 64 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum EventToken {
    Control,
    ScrubberThread,
    Inventory,
    Time,
    Worker(WorkerId),
    Process(WorkerId),
}

impl EventToken {
    fn encode(self) -> EventData {
        EventData::new_u64(match self {
            EventToken::Control => 0,
            EventToken::ScrubberThread => 1,
            EventToken::Inventory => 2,
            EventToken::Time => 3,
            EventToken::Worker(id) => id.0 << 2 | 3,
            EventToken::Process(id) => id.0 << 2 | 2,
        })
    }

    fn decode(data: EventData) -> EventToken {
        match data.u64() {
            0 => EventToken::Control,
            1 => EventToken::ScrubberThread,
            2 => EventToken::Inventory,
            3 => EventToken::Time,
            // Workers are numbered from 1.
            other if other & 3 == 3 => EventToken::Worker(WorkerId(other >> 2)),
            other => EventToken::Process(WorkerId(other >> 2)),
        }
    }
}

/// Serves a unit over `control` until `sluiced` and all workers are gone.
///
/// # Errors
/// [`RunError`] when the unit cannot be served.
pub fn run(control: OwnedFd) -> Result<(), RunError> {
    let (setup, descriptors): (ArbiterSetup, _) = channel::receive_setup(&control)?;
    let receipts = Receipts::new(descriptors, setup.receipts).map_err(RunError::Receipts)?;
    let span = tracing::info_span!("arbiter", unit = setup.unit);
    let _entered = span.enter();
    // The filter forbids setting the flags of a standard stream, and this socket may be one.
    unblock(control.as_fd())?;
    let driver = Path::new(&setup.driver);
    sluice_sandbox::enter(Role::Arbiter(DriverList::of_library(driver)?))?;
    let unit = OpenUnit::open(driver, setup.device, setup.identity)?;
    unit.enter().map_err(RunError::Context)?;
    Server::new(control, unit, &setup, receipts)?.serve()
}

struct Server {
    started: Instant,
    epoll: OwnedFd,
    control: Option<Channel<ToArbiter, FromArbiter>>,
    /// Messages that `sluiced` has not read yet.
    outbox: VecDeque<FromArbiter>,
    driver: Arc<Driver>,
    scrubber: ScrubberThread,
    time: Time,
    custody: Custody,
    usage: UsageCounters,
    /// Chunks by number, except those that the scrubber has.
    pieces: Vec<Option<Piece>>,
    /// Numbers of the chunks that the scrubber has.
    away: Vec<ChunkId>,
    driver_work: DriverWork,
    /// The driver's failure.
    fault: Option<Fault>,
    links: HashMap<WorkerId, WorkerLink>,
    /// Workers with events to be served.
    rounds: Rounds,
    /// Workers with a request that waits for a look, and the millisecond in which such requests were last continued.
    held: Vec<WorkerId>,
    held_at: Millis,
    /// Time of the last look for ended workers of a VM.
    looked: HashMap<VmKey, Millis>,
    /// A queue per VM of what workers have sent, and of their sockets.
    closers: Closers,
    /// Number of workers refused for lack of descriptors, and the time of the last log line about it.
    refusals: u64,
    refusal_told: Option<Millis>,
    next_worker: u64,
    /// The unit's device and instance in the inventory.
    listed: (u32, u32),
    inventory: Option<Inventory>,
    audit: Audit,
    changed: bool,
    batch: u64,
    measured: Millis,
    /// Workers with messages for which the kernel lacked resources, and the time at which they are sent again.
    retrying: Vec<WorkerId>,
    retry: Option<Millis>,
    /// Time of the last look for workers that do not read their answers.
    stalls_looked: Millis,
    context_bytes: u64,
    host_access: HostAccess,
    upkeep: Upkeep,
    /// Unknown processes: seen once (`false`) or reported (`true`).
    foreign_processes: HashMap<u32, bool>,
    /// The use of the driver's bytes per process, and looks in a row without any such bytes.
    figures: Figures,
    absent: u32,
    /// The probe that finds out about the figures, and the number of probes so far.
    booking_probe: Option<BookingProbe>,
    booking_probes: u64,
    /// Bytes of all chunks at the last look at all processes.
    chunks_then: u64,
    /// True once the unit's memory is taken.
    taken: bool,
    /// The bytes that can be lent, as last reported to `sluiced`.
    announced: Option<u64>,
}

impl Server {
    fn new(
        control: OwnedFd,
        unit: OpenUnit,
        setup: &ArbiterSetup,
        receipts: Receipts,
    ) -> Result<Server, RunError> {
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        epoll::add(&epoll, &control, EventToken::Control.encode(), EventFlags::IN)?;
        let free = unit.free().map_err(RunError::Context)?;
        let (context_bytes, host_access) = (unit.context_bytes(), unit.host_access());
        let estimates = Estimates { context: context_bytes, margin: margin(free) };
        let settings = UnitSettings { unit: setup.unit, reserve: setup.reserve, estimates };
        let rules = Rules { unit: setup.unit, scrub: setup.scrub, verify: setup.verify, receipts };
        if !setup.scrub {
            tracing::warn!("memory is NOT scrubbed between tenants. NOT FOR PRODUCTION");
        }
        let driver = unit.driver();
        let scrubber = ScrubberThread::start(unit, rules)?;
        epoll::add(&epoll, scrubber.wake(), EventToken::ScrubberThread.encode(), EventFlags::IN)?;
        let time = Time::start()?;
        epoll::add(&epoll, time.news(), EventToken::Time.encode(), EventFlags::IN)?;
        Ok(Server {
            started: Instant::now(),
            epoll,
            control: Some(Channel::new(control)),
            outbox: VecDeque::new(),
            driver,
            scrubber,
            time,
            custody: Custody::new(settings, free),
            usage: UsageCounters::default(),
            pieces: Vec::new(),
            away: Vec::new(),
            driver_work: DriverWork::default(),
            fault: None,
            links: HashMap::new(),
            rounds: Rounds::default(),
            held: Vec::new(),
            held_at: 0,
            looked: HashMap::new(),
            closers: Closers::new(CLOSING_THREADS),
            refusals: 0,
            refusal_told: None,
            next_worker: 1,
            listed: (setup.listed, setup.instance),
            inventory: None,
            audit: Audit::default(),
            changed: true,
            batch: BATCH[0],
            measured: 0,
            retrying: Vec::new(),
            retry: None,
            stalls_looked: 0,
            context_bytes,
            host_access,
            upkeep: Upkeep::default(),
            foreign_processes: HashMap::new(),
            // No driver reports the bytes of each process on a part of a device.
            figures: if setup.instance == WHOLE { Figures::Unknown } else { Figures::Unused },
            absent: 0,
            booking_probe: None,
            booking_probes: 0,
            chunks_then: 0,
            taken: false,
            announced: None,
        })
    }

    fn now(&self) -> Millis {
        u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    fn serve(mut self) -> Result<(), RunError> {
        let mut events: Vec<Event> = Vec::with_capacity(EVENTS);
        loop {
            let timeout = self.turn();
            self.check_driver()?;
            if self.control.is_none() && !self.custody.serves() {
                tracing::info!("sluiced and all workers are gone; the arbiter ends");
                return Ok(());
            }
            events.clear();
            let timeout = match (self.rounds.is_empty(), self.held.is_empty()) {
                (false, _) => 0,
                (true, false) => timeout.min(1),
                (true, true) => timeout,
            };
            let timeout = Timespec {
                tv_sec: i64::try_from(timeout / 1000).unwrap_or(i64::MAX),
                tv_nsec: i64::try_from(timeout % 1000 * 1_000_000).unwrap_or(0),
            };
            match epoll::wait(&self.epoll, spare_capacity(&mut events), Some(&timeout)) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
            for event in &events {
                self.handle(EventToken::decode(event.data), event.flags);
            }
            self.serve_workers();
        }
    }

    /// Does all that follows from received events. Returns the milliseconds until the next thing is due.
    fn turn(&mut self) -> Millis {
        let now = self.now();
        let mut due = vec![now.saturating_add(MEASURE)];
        due.extend(self.custody.serve_waiters(now));
        due.extend(self.custody.serve_growth(now));
        self.follow();
        let measure = now.saturating_sub(self.measured) >= MEASURE;
        if let Some(task) = self.custody.plan(self.batch, measure) {
            if task == Task::Measure {
                self.measured = now;
            }
            self.submit(task);
        }
        self.changed |= self.custody.changed();
        if now >= self.audit.due(self.changed) {
            self.changed = false;
            if let Some(broken) = self.audit.run(&self.custody, now) {
                tracing::error!(%broken, "the audit found a contradiction");
                let kind = ArbiterEvent::LedgerBroken as u32;
                self.send_to_daemon(FromArbiter::Event { kind, vm: 0, process: 0, bytes: 0 });
            }
        }
        due.push(self.audit.due(self.changed));
        due.push(self.custody.watch_growth(now));
        if let Some(until) = self.booking_probe.as_ref().map(BookingProbe::until) {
            due.push(until);
            if until <= now {
                self.end_booking_probe("the probe takes too long");
            }
        }
        if let Some(inventory) = &mut self.inventory {
            if self.custody.takes_look_wish() {
                inventory.request_look();
            }
            due.push(inventory.poll(self.custody.unconfirmed(), now));
        }
        if self.retry.take_if(|retry| *retry <= now).is_some() {
            self.retry_sends();
        }
        due.extend(self.retry);
        if now.saturating_sub(self.stalls_looked) >= MEASURE {
            self.stalls_looked = now;
            self.end_stalled(now);
        }
        self.follow();
        self.flush();
        due.into_iter().min().unwrap_or(now).saturating_sub(now)
    }

    fn handle(&mut self, token: EventToken, flags: EventFlags) {
        match token {
            EventToken::Control => self.receive_from_daemon(),
            EventToken::ScrubberThread => self.receive_from_scrubber(),
            EventToken::Inventory => self.receive_listing(),
            EventToken::Time => self.end_wrong(),
            EventToken::Worker(id) => {
                if let Some(link) = self.links.get(&id) {
                    self.rounds.add(link.vm, id, flags);
                }
            }
            EventToken::Process(id) => self.reap(id),
        }
    }
}

/// Bytes that a grant lets a driver take beyond the requested ones: a real driver's blocks are up to some tens of MiB, and on
/// a small device a margin must not use up the quotas.
fn margin(free: u64) -> u64 {
    (free / 1024).clamp(UNIT, 64 << 20).next_multiple_of(UNIT)
}

/// 128 random bits.
fn random() -> u128 {
    let mut bytes = [0; 16];
    // The kernel returns up to 256 bytes at once, and its generator is initialised long before an arbiter starts.
    match getrandom(&mut bytes, GetRandomFlags::empty()) {
        Ok(16) => u128::from_le_bytes(bytes),
        other => {
            tracing::error!(?other, "cannot get a random number; no chunk can be shared");
            // No share has this number, so none is created.
            0
        }
    }
}

fn unblock(descriptor: BorrowedFd<'_>) -> Result<(), Errno> {
    fcntl_setfl(descriptor, fcntl_getfl(descriptor)? | OFlags::NONBLOCK)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn token_encoding_round_trips() {
        let ids = [1, 2, 3, 1 << 40].map(WorkerId);
        let workers = ids.into_iter().flat_map(|id| [EventToken::Worker(id), EventToken::Process(id)]);
        for token in
            [EventToken::Control, EventToken::ScrubberThread, EventToken::Inventory, EventToken::Time]
                .into_iter()
                .chain(workers)
        {
            assert_eq!(EventToken::decode(token.encode()), token);
        }
    }
}
