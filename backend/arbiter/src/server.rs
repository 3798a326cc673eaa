//! The server loop: one thread that receives from `sluiced`, workers, the scrubber and the inventory, and passes each event to
//! [`Custody`].
//!
//! It waits only in `epoll_wait`, and makes no driver call but the export of a chunk that is lent. It receives a bounded number
//! of messages per turn from each party.

use crate::{
    audit::Audit,
    booking::{self, Next, Sight, Sizes, Trial},
    closer::Closer,
    custody::{Custody, Effect, Estimates, Millis, Settings, Task},
    ids::{ChunkId, VmKey, WorkerId},
    inventory::{Inventory, Listed, News},
    page::{Page, PageError, Report},
    receipts::Receipts,
    rounds::Rounds,
    scrub::{Done as TaskDone, Fault, Hand, News as HandNews, Rules, Work},
    tally::{Tally, Work as Done},
    time::{Ended, Time},
    unit::{Piece, Unit, UnitError},
    workers::{Heard, Link, Message, Sent},
};
use rustix::{
    buffer::spare_capacity,
    event::{
        PollFd, PollFlags, Timespec,
        epoll::{self, CreateFlags, Event, EventData, EventFlags},
        poll,
    },
    fd::{AsFd as _, BorrowedFd, OwnedFd},
    fs::{OFlags, fcntl_getfl, fcntl_setfl},
    io::Errno,
    process::{Resource, getrlimit},
    rand::{GetRandomFlags, getrandom},
};
use sluice_driver::Driver;
use sluice_messages::{
    channel::{self, Channel, ReceiveError, Received, SetupError},
    control::{self, ArbiterEvent, ArbiterSetup, Figures, FromArbiter, NO_USER, Priority, Shares, ToArbiter},
    custody::{Answer, Request, UNIT},
    inventory::WHOLE,
};
use sluice_sandbox::{Role, SandboxError};
use std::{
    collections::{BTreeMap, HashMap, HashSet, VecDeque},
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

/// Why an arbiter ends.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// The kernel refuses.
    #[error(transparent)]
    Kernel(#[from] Errno),
    /// There is no setup.
    #[error(transparent)]
    Setup(#[from] SetupError),
    /// The files for receipts of scrubs cannot be used, or there are none.
    #[error("receipts of scrubs: {0}")]
    Receipts(Errno),
    /// The device cannot be used.
    #[error(transparent)]
    Unit(#[from] UnitError),
    /// No thread.
    #[error("the scrubber does not start: {0}")]
    Thread(#[from] std::io::Error),
    /// The process cannot be confined.
    #[error("cannot enter the filter: {0}")]
    Sandbox(#[from] SandboxError),
    /// The driver fails.
    #[error(transparent)]
    Driver(#[from] Fault),
    /// The driver does not end what it was asked for.
    #[error("the driver does not end a task within {0:?}")]
    Hung(Duration),
    /// The driver has no context for the loop.
    #[error("the context cannot be used: CUresult {0}")]
    Context(u32),
}

/// Events taken from the kernel at once: of all workers that a unit may have, so that none is passed over.
const EVENTS: usize = 8192;
/// How long workers are served before the loop looks for news.
const ROUND: Duration = Duration::from_millis(1);
/// Requests of a worker, and messages to it, per turn of its own.
const REQUESTS: usize = 16;
const SAID: usize = 64;
/// Looks in a row without any bytes after which figures are found out about anew.
const ABSENT: u32 = 3;
/// Effects that follow from requests before they are carried out; those of one request may be more.
const EFFECTS: usize = 64;
/// Descriptors that a worker takes: socket, process and bell; and those that the arbiter and its driver have themselves.
const WORKER_DESCRIPTORS: usize = 3;
const OWN_DESCRIPTORS: usize = 96;
/// Messages of `sluiced` or the inventory per turn.
const MESSAGES: usize = 64;
/// Messages to `sluiced` that wait while it does not read; then the oldest are dropped.
const BACKLOG: usize = 4096;
/// Milliseconds between looks at what the driver has free.
const MEASURE: Millis = 500;
/// Milliseconds until a send is tried again that failed for want of room elsewhere.
const RETRY: Millis = 2;
/// How long the driver may take for a task, a probe of the device included; and for the first ones, which take all memory.
const TASK: Duration = Duration::from_secs(20);
const FIRST_TASKS: Duration = Duration::from_secs(120);
/// Bytes that must be clean before lending begins.
const FIRST_CLEAN: u64 = 32 << 20;
/// Bytes of one scrub at first; then by how long they take.
const BATCH: [u64; 2] = [32 << 20, 1 << 30];
/// How long one scrub should take: a taker that waits may have to wait for it.
const BATCH_TIME: [Duration; 2] = [Duration::from_millis(2), Duration::from_millis(10)];

/// What an event is about, in the kernel's 64 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Token {
    Control,
    Hand,
    Inventory,
    Time,
    Worker(WorkerId),
    Process(WorkerId),
}

impl Token {
    fn encode(self) -> EventData {
        EventData::new_u64(match self {
            Token::Control => 0,
            Token::Hand => 1,
            Token::Inventory => 2,
            Token::Time => 3,
            Token::Worker(id) => id.0 << 2 | 3,
            Token::Process(id) => id.0 << 2 | 2,
        })
    }

    fn decode(data: EventData) -> Token {
        match data.u64() {
            0 => Token::Control,
            1 => Token::Hand,
            2 => Token::Inventory,
            3 => Token::Time,
            // Workers are numbered from 1.
            other if other & 3 == 3 => Token::Worker(WorkerId(other >> 2)),
            other => Token::Process(WorkerId(other >> 2)),
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
    // Afterwards the flags of a standard stream cannot be set, and this socket may be one.
    unblock(control.as_fd())?;
    sluice_sandbox::enter(Role::Arbiter)?;
    let unit = Unit::open(Path::new(&setup.driver), setup.device, setup.identity)?;
    unit.enter().map_err(RunError::Context)?;
    Server::new(control, unit, &setup, receipts)?.serve()
}

struct Server {
    started: Instant,
    epoll: OwnedFd,
    control: Option<Channel<ToArbiter, FromArbiter>>,
    /// What `sluiced` has not read yet.
    outbox: VecDeque<FromArbiter>,
    driver: Arc<Driver>,
    hand: Hand,
    time: Time,
    custody: Custody,
    tally: Tally,
    /// Chunks by their numbers; those the hand has are not here.
    pieces: Vec<Option<Piece>>,
    /// Whose chunks the hand has.
    away: Vec<ChunkId>,
    /// Since when the hand has a task; and a probe, which it comes to after the task.
    working: Option<Instant>,
    probing: Option<Instant>,
    /// How the driver has failed.
    fault: Option<Fault>,
    links: HashMap<WorkerId, Link>,
    /// Workers that are to be served.
    rounds: Rounds,
    /// Workers with a request that waits for a look, and the millisecond in which such requests were last gone on with.
    held: Vec<WorkerId>,
    held_at: Millis,
    /// When it was last seen which workers of a VM have ended.
    looked: HashMap<VmKey, Millis>,
    closer: Closer,
    /// Workers that were not served for want of descriptors, and when that was last said.
    refusals: u64,
    refusal_told: Option<Millis>,
    next_worker: u64,
    /// Which device of the inventory's the unit is, and which instance of it.
    listed: (u32, u32),
    inventory: Option<Inventory>,
    audit: Audit,
    changed: bool,
    batch: u64,
    measured: Millis,
    /// Links with something left to say, for want of room elsewhere.
    retry: Option<Millis>,
    context_bytes: u64,
    scrubs: Scrubs,
    /// Unknown processes that were seen once (`false`) or reported.
    strangers: HashMap<u32, bool>,
    /// Whether the driver's bytes per process are used, and looks in a row in which there were none.
    figures: Figures,
    absent: u32,
    /// The probe by which that is found out, and how many there were.
    trial: Option<Trial>,
    trials: u64,
    /// Bytes of chunks at the last look at all processes.
    chunks_then: u64,
    /// The unit's memory is taken, so lending may begin; and it was said.
    taken: bool,
    ready: bool,
}

/// What was scrubbed.
#[derive(Clone, Copy, Debug, Default)]
struct Scrubs {
    chunks: u64,
    bytes: u64,
    took: Duration,
}

impl Scrubs {
    fn add(&mut self, chunks: usize, bytes: u64, took: Duration) {
        self.chunks = self.chunks.saturating_add(chunks as u64);
        self.bytes = self.bytes.saturating_add(bytes);
        self.took = self.took.saturating_add(took);
    }
}

impl Server {
    fn new(
        control: OwnedFd,
        unit: Unit,
        setup: &ArbiterSetup,
        receipts: Receipts,
    ) -> Result<Server, RunError> {
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        epoll::add(&epoll, &control, Token::Control.encode(), EventFlags::IN)?;
        let free = unit.free().map_err(RunError::Context)?;
        let context_bytes = unit.context_bytes();
        let estimates = Estimates { context: context_bytes, margin: margin(free) };
        let settings = Settings { unit: setup.unit, reserve: setup.reserve, estimates };
        let rules = Rules { unit: setup.unit, scrub: setup.scrub, verify: setup.verify, receipts };
        if !setup.scrub {
            tracing::warn!("memory is NOT scrubbed between tenants. NOT FOR PRODUCTION");
        }
        let driver = unit.driver();
        let hand = Hand::start(unit, rules)?;
        epoll::add(&epoll, hand.wake(), Token::Hand.encode(), EventFlags::IN)?;
        let time = Time::start()?;
        epoll::add(&epoll, time.news(), Token::Time.encode(), EventFlags::IN)?;
        Ok(Server {
            started: Instant::now(),
            epoll,
            control: Some(Channel::new(control)),
            outbox: VecDeque::new(),
            driver,
            hand,
            time,
            custody: Custody::new(settings, free),
            tally: Tally::default(),
            pieces: Vec::new(),
            away: Vec::new(),
            working: None,
            probing: None,
            fault: None,
            links: HashMap::new(),
            rounds: Rounds::default(),
            held: Vec::new(),
            held_at: 0,
            looked: HashMap::new(),
            closer: Closer::start()?,
            refusals: 0,
            refusal_told: None,
            next_worker: 1,
            listed: (setup.listed, setup.instance),
            inventory: None,
            audit: Audit::default(),
            changed: true,
            batch: BATCH[0],
            measured: 0,
            retry: None,
            context_bytes,
            scrubs: Scrubs::default(),
            strangers: HashMap::new(),
            // Of a part of a device no driver says which process has how much.
            figures: if setup.instance == WHOLE { Figures::Unknown } else { Figures::Unused },
            absent: 0,
            trial: None,
            trials: 0,
            chunks_then: 0,
            taken: false,
            ready: false,
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
                tracing::info!("nobody is left to ask for anything");
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
                self.handle(Token::decode(event.data), event.flags);
            }
            self.serve_workers();
        }
    }

    /// Everything that follows from what was heard. Returns the milliseconds until something is due.
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
                tracing::error!(%broken, "the audit fails");
                let kind = ArbiterEvent::LedgerBroken as u32;
                self.tell(FromArbiter::Event { kind, vm: 0, process: 0, bytes: 0 });
            }
        }
        due.push(self.audit.due(self.changed));
        due.push(self.custody.watch_growth(now));
        if let Some(until) = self.trial.as_ref().map(Trial::until) {
            due.push(until);
            if until <= now {
                self.end_trial("the probe takes too long");
            }
        }
        if let Some(inventory) = &mut self.inventory {
            due.push(inventory.poll(self.custody.unconfirmed(), now));
        }
        if let Some(retry) = self.retry.take_if(|retry| *retry <= now) {
            let _ = retry;
            let waiting: Vec<WorkerId> =
                self.links.iter().filter(|(_, link)| !link.is_clear()).map(|(id, _)| *id).collect();
            for id in waiting {
                self.say(id);
            }
        }
        due.extend(self.retry);
        self.follow();
        self.flush();
        due.into_iter().min().unwrap_or(now).saturating_sub(now)
    }

    fn handle(&mut self, token: Token, flags: EventFlags) {
        match token {
            Token::Control => self.hear_daemon(),
            Token::Hand => self.hear_hand(),
            Token::Inventory => self.hear_inventory(),
            Token::Time => self.end_wrong(),
            Token::Worker(id) => {
                if let Some(link) = self.links.get(&id) {
                    self.rounds.add(link.vm, id, flags);
                }
            }
            Token::Process(id) => self.bury(id),
        }
    }

    /// Serves workers in turn, for a bounded time.
    fn serve_workers(&mut self) {
        let now = self.now();
        if self.held_at < now {
            self.held_at = now;
            for id in core::mem::take(&mut self.held) {
                if let Some(link) = self.links.get(&id) {
                    self.rounds.add(link.vm, id, EventFlags::IN);
                }
            }
        }
        let began = Instant::now();
        while let Some((id, flags)) = self.rounds.next() {
            if flags.contains(EventFlags::OUT) {
                self.say(id);
            }
            self.hear_worker(id, flags.intersects(EventFlags::HUP | EventFlags::ERR));
            if began.elapsed() >= ROUND {
                break;
            }
        }
    }

    // `sluiced`.

    fn hear_daemon(&mut self) {
        for _ in 0..MESSAGES {
            let Some(control) = &self.control else { return };
            match control.receive() {
                Ok(Received::Message(message, descriptors)) => self.command(message, descriptors),
                Ok(Received::Empty) => return,
                Ok(Received::Closed) => return self.without_daemon(),
                Err(ReceiveError::Failed(error)) => {
                    tracing::error!(%error, "the control socket fails");
                    return self.without_daemon();
                }
                // Where there is no room for its descriptors, the worker that a message is about sees its socket close.
                Err(error) => tracing::error!(%error, "sluiced sent no message that can be used"),
            }
        }
    }

    /// The unit goes on with what it was told.
    fn without_daemon(&mut self) {
        tracing::warn!("sluiced is gone");
        if let Some(control) = self.control.take() {
            // Closing it takes it out of the set.
            drop(control);
        }
        self.outbox.clear();
    }

    fn command(&mut self, message: ToArbiter, descriptors: Vec<OwnedFd>) {
        let now = self.now();
        match message {
            ToArbiter::DescribeUnit {} => {
                let Scrubs { chunks, bytes, took } = self.scrubs;
                let took = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
                let drift = self.audit.drift();
                let figures = self.figures;
                self.tell(FromArbiter::Upkeep { scrubs: chunks, scrubbed: bytes, took, drift, figures });
                self.custody.command(message, now);
            }
            ToArbiter::Worker { vm, epoch, process, session, user } => {
                if let Ok([socket, pidfd]) = <[OwnedFd; 2]>::try_from(descriptors)
                    && let Err(error) = self.adopt(VmKey { vm, epoch }, (process, user), socket, pidfd)
                {
                    tracing::error!(vm, session, %error, "a worker cannot be served");
                }
            }
            ToArbiter::Probe {} => self.probe(),
            ToArbiter::Prober { process } => {
                if let Ok([socket, pidfd]) = <[OwnedFd; 2]>::try_from(descriptors) {
                    self.try_booking(process, socket, pidfd);
                }
            }
            ToArbiter::Inventory {} => {
                let Some(socket) = descriptors.into_iter().next() else { return };
                let watched = unblock(socket.as_fd()).and_then(|()| {
                    epoll::add(&self.epoll, &socket, Token::Inventory.encode(), EventFlags::IN)
                });
                match watched {
                    Ok(()) => self.inventory = Some(Inventory::new(socket, self.listed)),
                    Err(error) => tracing::error!(%error, "the inventory cannot be asked"),
                }
            }
            ToArbiter::Shares { vm, epoch, weight, priority, cap, guarantee, hang } => {
                let priority = Priority::from_number(priority).unwrap_or_default();
                self.time.set(VmKey { vm, epoch }, Shares { weight, priority, cap, guarantee, hang });
            }
            other => {
                match other {
                    ToArbiter::Vm { vm, epoch, .. } => {
                        self.time.admit(VmKey { vm, epoch });
                        self.tally.forget_before(VmKey { vm, epoch });
                    }
                    ToArbiter::Fence { vm, epoch } => self.time.fence(VmKey { vm, epoch }),
                    ToArbiter::Forget { vm, epoch } => {
                        self.time.forget(VmKey { vm, epoch });
                        self.tally.forget_before(VmKey { vm, epoch: epoch.saturating_add(1) });
                    }
                    ToArbiter::DescribeVm { vm } => {
                        if let Some(time) = self.time.describe(vm) {
                            self.tell(time);
                        }
                        self.describe_work(vm, now);
                    }
                    _ => {}
                }
                self.custody.command(other, now);
            }
        }
    }

    /// Says what the workers of a VM say they have done.
    fn describe_work(&mut self, vm: u32, now: Millis) {
        for (id, link) in self.links.iter().filter(|(_, link)| link.vm.vm == vm) {
            self.tally.see(*id, link.report.work(), now);
        }
        let Some(key) = self.custody.current(vm) else { return };
        let Done { launches, copies, copied, calls } = self.tally.of(key);
        self.tell(FromArbiter::Work { vm, epoch: key.epoch, launches, copies, copied, calls });
    }

    /// Serves a worker. On an error nothing of it is left: it enters custody last.
    fn adopt(
        &mut self,
        vm: VmKey,
        (process, user): (u32, u32),
        socket: OwnedFd,
        pidfd: OwnedFd,
    ) -> Result<(), PageError> {
        if !self.custody.admits(vm) {
            tracing::warn!(vm = vm.vm, epoch = vm.epoch, "a worker of an old epoch is not served");
            self.closer.close(vec![socket]);
            return Ok(());
        }
        if !self.has_place(vm) {
            self.closer.close(vec![socket]);
            self.refused(vm);
            return Ok(());
        }
        let id = WorkerId(self.next_worker);
        self.next_worker += 1;
        let pages = unblock(socket.as_fd()).map_err(PageError::from).and_then(|()| {
            let (page, descriptor) = Page::new(vm.epoch)?;
            let (report, theirs) = Report::new()?;
            Ok((page, report, [descriptor, theirs]))
        });
        let (page, report, [descriptor, theirs]) = match pages {
            Ok(pages) => pages,
            Err(error) => {
                self.closer.close(vec![socket]);
                return Err(error);
            }
        };
        let mut link = Link::new(vm, socket, pidfd, Arc::new(page), Arc::new(report));
        let bell = match self.enlist(id, &link) {
            Ok(bell) => bell,
            Err(error) => {
                if let Some(socket) = link.close() {
                    self.unwatch(socket.as_fd());
                    self.closer.close(vec![socket]);
                }
                return Err(error);
            }
        };
        // It was asked above, and nothing happened since.
        let entered = self.custody.add_worker(id, vm, process, user);
        debug_assert!(entered, "the VM is open");
        let (limit, used, open) = self.custody.figures(vm);
        link.page.write(limit, used, open);
        let welcome =
            Answer::Welcome { unit: self.custody.unit(), epoch: vm.epoch, limit, version: control::VERSION };
        let sent = [descriptor.as_fd(), theirs.as_fd(), bell.as_fd()];
        // A fresh socket has room for one message.
        if link.send(&welcome, &sent) != Sent::Yes {
            tracing::warn!(vm = vm.vm, process, "a worker cannot be welcomed");
        }
        self.links.insert(id, link);
        self.tally.join(id, vm, self.now());
        Ok(())
    }

    /// Has a worker's socket and process watched, and its time counted. Returns its bell.
    fn enlist(&mut self, id: WorkerId, link: &Link) -> Result<OwnedFd, PageError> {
        if let Some(socket) = link.socket() {
            epoll::add(&self.epoll, socket, Token::Worker(id).encode(), EventFlags::IN)?;
        }
        epoll::add(&self.epoll, link.pidfd(), Token::Process(id).encode(), EventFlags::IN)?;
        self.time.join(id, link.vm, Arc::clone(&link.page), Arc::clone(&link.report)).inspect_err(|_| {
            self.unwatch(link.pidfd());
        })
    }

    /// Takes a descriptor out of the set.
    fn unwatch(&self, descriptor: BorrowedFd<'_>) {
        match epoll::delete(&self.epoll, descriptor) {
            // It never came in, or was taken out before.
            Ok(()) | Err(Errno::NOENT) => {}
            Err(error) => tracing::error!(%error, "a descriptor is still watched"),
        }
    }

    /// Hears a worker no more.
    fn shut(&mut self, id: WorkerId) {
        if let Some(socket) = self.links.get_mut(&id).and_then(Link::close) {
            self.unwatch(socket.as_fd());
            self.closer.close(vec![socket]);
        }
    }

    /// Whether there are descriptors for another worker of a VM. Half of them are set aside for the VMs of the unit in equal
    /// parts, so that no number of workers of others keeps a VM from its first ones.
    fn has_place(&self, vm: VmKey) -> bool {
        let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        let limit = usize::try_from(limit).unwrap_or(usize::MAX);
        let places = limit.saturating_sub(OWN_DESCRIPTORS.min(limit / 2)) / WORKER_DESCRIPTORS;
        let mut workers: BTreeMap<VmKey, usize> = self.custody.vms().map(|vm| (vm, 0)).collect();
        let part = places / 2 / workers.len().max(1);
        for link in self.links.values() {
            *workers.entry(link.vm).or_default() += 1;
        }
        let free = places.saturating_sub(self.links.len());
        let own = workers.remove(&vm).unwrap_or(0);
        let aside: usize = workers.values().map(|count| part.saturating_sub(*count)).sum();
        free > if own < part { 0 } else { aside }
    }

    /// A VM has as many workers as there are descriptors for: said once a second.
    fn refused(&mut self, vm: VmKey) {
        self.refusals += 1;
        let now = self.now();
        if self.refusal_told.is_none_or(|told| now.saturating_sub(told) >= 1000) {
            self.refusal_told = Some(now);
            tracing::warn!(
                vm = vm.vm,
                in_all = self.refusals,
                "there are no descriptors for another worker of a VM: it is not served"
            );
        }
    }

    fn tell(&mut self, message: FromArbiter) {
        if self.control.is_none() {
            return;
        }
        if self.outbox.len() >= BACKLOG {
            self.outbox.pop_front();
        }
        self.outbox.push_back(message);
    }

    /// Sends `sluiced` what it has room for.
    fn flush(&mut self) {
        let Some(control) = &self.control else { return };
        let waited = !self.outbox.is_empty();
        while let Some(message) = self.outbox.front() {
            match control.send(message, &[]) {
                Ok(()) => {
                    self.outbox.pop_front();
                }
                Err(Errno::AGAIN | Errno::NOBUFS | Errno::NOMEM) => break,
                // Reading says so, too.
                Err(_) => self.outbox.clear(),
            }
        }
        if waited {
            let mut flags = EventFlags::IN;
            flags.set(EventFlags::OUT, !self.outbox.is_empty());
            if let Err(error) = epoll::modify(&self.epoll, control, Token::Control.encode(), flags) {
                tracing::error!(%error, "the control socket cannot be watched");
            }
        }
    }

    // Workers.

    fn hear_worker(&mut self, id: WorkerId, hung_up: bool) {
        let mut strange = Vec::new();
        for _ in 0..REQUESTS {
            let now = self.now();
            let Some(link) = self.links.get_mut(&id) else { break };
            let heard = hung_up || (link.is_clear() && self.custody.listens(id));
            // What follows from one request may be thousands of messages.
            if !heard || self.custody.effects() >= EFFECTS {
                break;
            }
            let (request, since) = match link.held.take() {
                Some(held) => held,
                None => match link.hear(&mut strange) {
                    Heard::Request(request) => (request, now),
                    Heard::Nothing => break,
                    Heard::Left => {
                        self.custody.worker_left(id);
                        break;
                    }
                    Heard::Abuse(how) => {
                        self.custody.abuse(id, how);
                        break;
                    }
                },
            };
            if let (Request::Take { serial, .. }, Some(trial)) = (request, &mut self.trial)
                && trial.worker() == id
            {
                trial.takes(serial, self.inventory.as_ref().is_some_and(Inventory::is_looking));
                self.inventory.as_mut().into_iter().for_each(Inventory::hurry);
                continue;
            }
            if self.custody.exceeds(id, &request) && !self.sees_ends(id, since, now) {
                if let Some(link) = self.links.get_mut(&id) {
                    link.held = Some((request, since));
                    self.held.push(id);
                }
                break;
            }
            if matches!(request, Request::Share { share: 0, .. }) {
                self.custody.set_next_share(random());
            }
            self.custody.request(id, request, now);
        }
        self.closer.close(strange);
        self.follow();
        self.watch(id);
    }

    /// What exceeds the VM's limit may be asked for because another worker has ended: that is heard of first, in whatever order
    /// the kernel reports it. Looks at most once per VM and millisecond: `false` for a request since which nobody looked, and
    /// which has to wait for the next.
    fn sees_ends(&mut self, id: WorkerId, since: Millis, now: Millis) -> bool {
        let Some(vm) = self.links.get(&id).map(|link| link.vm) else { return true };
        match self.looked.get(&vm) {
            Some(last) if *last > since => return true,
            Some(last) if *last == now => return false,
            _ => {}
        }
        self.looked.retain(|_, last| *last == now);
        self.looked.insert(vm, now);
        self.see_ends(vm);
        true
    }

    fn see_ends(&mut self, vm: VmKey) {
        let (mut workers, mut polled) = (Vec::new(), Vec::new());
        for (id, link) in self.links.iter().filter(|(_, link)| link.vm == vm) {
            workers.push((*id, false));
            polled.push(PollFd::from_borrowed_fd(link.pidfd(), PollFlags::IN));
            if let Some(socket) = link.socket() {
                workers.push((*id, true));
                polled.push(PollFd::from_borrowed_fd(socket, PollFlags::empty()));
            }
        }
        match poll(&mut polled, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })) {
            Ok(_) => {}
            Err(error) => return tracing::error!(%error, "it cannot be seen which workers have ended"),
        }
        let ready: Vec<bool> = polled.iter().map(|polled| !polled.revents().is_empty()).collect();
        for ((id, _), _) in workers.iter().zip(&ready).filter(|((_, socket), ready)| **ready && *socket) {
            self.custody.worker_left(*id);
        }
        for ((id, _), _) in workers.iter().zip(&ready).filter(|((_, socket), ready)| **ready && !*socket) {
            self.bury(*id);
        }
    }

    /// Hears a worker while it may say something, and learns when it reads again.
    fn watch(&mut self, id: WorkerId) {
        let Some(link) = self.links.get_mut(&id) else { return };
        let mut wanted = EventFlags::empty();
        wanted.set(EventFlags::IN, link.is_clear() && link.held.is_none() && self.custody.listens(id));
        wanted.set(EventFlags::OUT, !link.is_clear());
        if wanted == link.interest {
            return;
        }
        if let Some(socket) = link.socket() {
            match epoll::modify(&self.epoll, socket, Token::Worker(id).encode(), wanted) {
                Ok(()) => link.interest = wanted,
                Err(error) => tracing::error!(%error, "a worker's socket cannot be watched"),
            }
        }
    }

    /// A worker's process has ended: nothing more is learnt from it, so nothing of it stays open.
    fn bury(&mut self, id: WorkerId) {
        let now = self.now();
        self.shut(id);
        if let Some(link) = self.links.remove(&id) {
            // Others have the same file open, so closing it would leave it in the set.
            self.unwatch(link.pidfd());
            self.tally.see(id, link.report.work(), now);
        }
        self.tally.leave(id);
        self.time.leave(id);
        self.custody.worker_died(id, now);
        if self.trial.as_ref().is_some_and(|trial| trial.worker() == id) {
            self.end_trial("the probe has ended");
        }
    }

    /// Ends workers of whose work nothing ends, and those that submit without a permit.
    fn end_wrong(&mut self) {
        for (id, why) in self.time.wrong() {
            match why {
                Ended::Hung => self.custody.hung(id),
                Ended::Trespass => self.custody.abuse(id, "submits work without a permit"),
            }
        }
        self.follow();
    }

    /// Does what was decided.
    fn follow(&mut self) {
        for vm in self.custody.touched() {
            let (limit, used, open) = self.custody.figures(vm);
            for link in self.links.values().filter(|link| link.vm == vm) {
                link.page.write(limit, used, open);
            }
        }
        let mut spoken: HashSet<WorkerId> = HashSet::new();
        while let Some(effect) = self.custody.effect() {
            let (worker, message) = match effect {
                Effect::Lend { worker, serial, lease, chunk, bytes, more } => {
                    (worker, Message::Lend { serial, lease, chunk, bytes, more })
                }
                Effect::Answer { worker, answer } => (worker, Message::Plain(answer)),
                Effect::Kill { worker } => {
                    if let Some(link) = self.links.get(&worker) {
                        link.kill();
                    }
                    self.shut(worker);
                    continue;
                }
                Effect::Tell(message) => {
                    self.tell(message);
                    continue;
                }
            };
            if let Some(link) = self.links.get_mut(&worker) {
                link.push(message);
                spoken.insert(worker);
            }
        }
        for id in spoken {
            self.say(id);
        }
    }

    /// Says what is to be said to a worker, as far as it reads and its turn goes.
    fn say(&mut self, id: WorkerId) {
        let now = self.now();
        for _ in 0..SAID {
            let Some(link) = self.links.get_mut(&id) else { break };
            let Some(message) = link.front() else { break };
            let sent = match message {
                Message::Plain(answer) => link.send(&answer, &[]),
                Message::Lend { serial, lease, chunk, bytes, more } => {
                    let piece = self.pieces.get(chunk.0 as usize).and_then(Option::as_ref);
                    match piece.filter(|_| self.custody.holds(id, lease, chunk)) {
                        // It was given back before it was sent.
                        None => Sent::Yes,
                        Some(piece) => match self.driver.chunk_export(piece.handle()) {
                            Ok(descriptor) => {
                                let lent = Answer::Lent { serial, lease, bytes, more };
                                link.send(&lent, &[descriptor.as_fd()])
                            }
                            Err(code) => {
                                tracing::error!(code, "a chunk cannot be exported");
                                link.pop();
                                self.custody.not_sent(id, serial, lease);
                                continue;
                            }
                        },
                    }
                }
            };
            match sent {
                Sent::Yes => link.pop(),
                Sent::Full => {
                    if link.stalls(now) {
                        self.custody.abuse(id, "does not read its answers");
                    }
                    self.retry = Some(self.retry.map_or(now + RETRY, |retry| retry.min(now + RETRY)));
                    break;
                }
                Sent::Gone => {
                    self.shut(id);
                    self.custody.worker_left(id);
                    break;
                }
            }
        }
        self.watch(id);
    }

    // The scrubber.

    fn submit(&mut self, task: Task) {
        self.away = match &task {
            Task::Scrub(orders) => orders.iter().map(|order| order.chunk).collect(),
            Task::Release(chunks) | Task::Remake { chunks, .. } | Task::Move { chunks } => chunks.clone(),
            Task::Take { .. } | Task::Measure => Vec::new(),
        };
        let pieces: Vec<Piece> = self
            .away
            .iter()
            .filter_map(|chunk| self.pieces.get_mut(chunk.0 as usize).and_then(Option::take))
            .collect();
        assert_eq!(pieces.len(), self.away.len(), "a chunk that is not lent is here or with the hand");
        self.working = Some(Instant::now());
        self.hand.submit(Work { task, pieces });
    }

    /// Ends the arbiter when the driver has failed or hangs: memory that cannot be proven clean is no use to anybody.
    fn check_driver(&mut self) -> Result<(), RunError> {
        let limit = self.patience();
        let hangs = self.driver_since().is_some_and(|since| since.elapsed() > limit);
        let failed = match self.fault.take() {
            Some(fault) => RunError::Driver(fault),
            None if hangs => RunError::Hung(limit),
            None => return Ok(()),
        };
        // Chunks that fail although the device works are what the next arbiter may get from the driver whole.
        if !matches!(failed, RunError::Driver(Fault::Scrubs(_))) {
            let kind = ArbiterEvent::ProbeFailed as u32;
            self.tell(FromArbiter::Event { kind, vm: 0, process: 0, bytes: 0 });
            self.flush();
        }
        Err(failed)
    }

    /// Since when the driver is busy with one thing.
    fn driver_since(&self) -> Option<Instant> {
        // The probe comes after the task, so its time begins with that one's end.
        self.working.or(self.probing)
    }

    const fn patience(&self) -> Duration {
        if self.ready { TASK } else { FIRST_TASKS }
    }

    /// Tries whether the device works.
    fn probe(&mut self) {
        if self.probing.is_none() {
            self.probing = Some(Instant::now());
            self.hand.probe();
        }
    }

    fn hear_hand(&mut self) {
        while let Some(news) = self.hand.news() {
            match news {
                HandNews::Done(done) => {
                    self.working = None;
                    self.probing = self.probing.map(|_| Instant::now());
                    self.done(done);
                }
                HandNews::Probed => {
                    self.probing = None;
                    tracing::info!("the device passes a probe");
                }
                HandNews::Failed(fault) => self.fault = Some(fault),
            }
        }
    }

    fn done(&mut self, done: TaskDone) {
        let scrubbed = matches!(done.outcome, crate::custody::Outcome::Scrubbed(_));
        let taken = matches!(done.outcome, crate::custody::Outcome::Taken { .. });
        if let Some((time, bytes)) = done.scrubbed {
            self.scrubs.add(done.pieces.len(), bytes, time);
            self.adapt(time, bytes);
        }
        if done.receipts_lost > 0 {
            let kind = ArbiterEvent::ReceiptsLost as u32;
            self.tell(FromArbiter::Event { kind, vm: 0, process: 0, bytes: done.receipts_lost });
        }
        let made = self.custody.finished(done.outcome);
        let places = if scrubbed { core::mem::take(&mut self.away) } else { made };
        for (chunk, piece) in places.into_iter().zip(done.pieces) {
            let index = chunk.0 as usize;
            if self.pieces.len() <= index {
                self.pieces.resize_with(index + 1, || None);
            }
            if let Some(place) = self.pieces.get_mut(index) {
                *place = Some(piece);
            }
        }
        if taken && !self.taken {
            self.taken = true;
            self.custody.set_nominal();
        }
        self.announce();
    }

    /// Scrubs as much at a time as takes neither long nor no time.
    fn adapt(&mut self, time: Duration, bytes: u64) {
        tracing::debug!(bytes, ?time, "scrubbed");
        if time > BATCH_TIME[1] {
            self.batch = (self.batch / 2).max(BATCH[0]);
        } else if time < BATCH_TIME[0] && bytes >= self.batch / 2 {
            self.batch = (self.batch * 2).min(BATCH[1]);
        }
    }

    /// Says that lending begins, once there is something to lend.
    fn announce(&mut self) {
        if self.ready || !self.taken {
            return;
        }
        let (capacity, _) = self.custody.ledger().totals();
        if self.custody.clean_bytes() >= FIRST_CLEAN.min(capacity) {
            self.ready = true;
            tracing::info!(bytes = capacity, context = self.context_bytes, "lending begins");
            let (context, margin) = (self.context_bytes, self.custody.margin());
            self.tell(FromArbiter::Ready { bytes: capacity, context, margin });
        }
    }

    // The inventory.

    fn hear_inventory(&mut self) {
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
                    tracing::warn!(%error, "the inventory is gone; memory of the dead stays with their VMs");
                    self.inventory = None;
                }
            }
        }
    }

    fn reconcile(&mut self, total: u64, used: u64) {
        let Some(known) = self.custody.known() else { return };
        if let Some(drift) = self.audit.reconcile(known, used, total, !self.custody.is_idle()) {
            tracing::warn!(known, used, drift, "the device has other figures than the ledger");
            self.tell(FromArbiter::Event {
                kind: ArbiterEvent::Drift as u32,
                vm: 0,
                process: 0,
                bytes: drift,
            });
        }
    }

    /// Tells of VMs that used more time than they are charged, where the driver says what processes used.
    fn compare_time(&mut self, list: &[Listed], workers: &HashMap<u32, WorkerId>) {
        let busy: Option<Vec<(u32, u32)>> =
            list.iter().map(|listed| Some((listed.process, listed.busy?))).collect();
        let all = busy.iter().flatten().map(|(_, busy)| *busy).sum();
        let of_workers: Option<Vec<(WorkerId, u32)>> = busy.map(|busy| {
            busy.iter().filter_map(|(process, busy)| Some((*workers.get(process)?, *busy))).collect()
        });
        for (key, missing) in self.time.compare(of_workers.as_deref().map(|round| (round, all))) {
            tracing::warn!(vm = key.vm, ?missing, "a VM used more time than its workers say");
            let kind = ArbiterEvent::Undercharged as u32;
            self.tell(FromArbiter::Event { kind, vm: key.vm, process: 0, bytes: 0 });
        }
    }

    /// Books what drivers took to their workers, compares the time, and finds processes that are no workers.
    fn compare(&mut self, list: &[Listed]) {
        let workers: HashMap<u32, WorkerId> =
            self.custody.processes().map(|(id, process)| (process, id)).collect();
        let own = rustix::process::getpid().as_raw_nonzero().get().unsigned_abs();
        let listed: HashSet<u32> = list.iter().map(|listed| listed.process).collect();
        self.strangers.retain(|process, _| listed.contains(process) && !workers.contains_key(process));
        self.compare_time(list, &workers);
        let now = self.now();
        let judges = self.figures == Figures::Used;
        for Listed { process, bytes, .. } in list.iter().filter(|listed| listed.process != own) {
            if let Some(id) = workers.get(process) {
                self.custody.set_booked(*id, bytes.filter(|_| judges), now);
                continue;
            }
            // A worker may be listed just before we hear of it, or just after it is gone.
            match self.strangers.get_mut(process) {
                None => {
                    self.strangers.insert(*process, false);
                }
                Some(reported @ false) => {
                    *reported = true;
                    tracing::warn!(process, ?bytes, "a process uses the device that is no worker");
                    let kind = ArbiterEvent::Stranger as u32;
                    let bytes = bytes.unwrap_or(0);
                    self.tell(FromArbiter::Event { kind, vm: 0, process: *process, bytes });
                }
                Some(true) => {}
            }
        }
        if judges {
            self.custody.judge();
        }
        self.see_booking(list, own);
    }

    // Whom the driver books memory to.

    /// Lends memory to a probe, of an account of its own: it is on the bill of no VM, and what was lent to it serves another when the
    /// driver does not know it any more, as with every worker.
    fn try_booking(&mut self, process: u32, socket: OwnedFd, pidfd: OwnedFd) {
        let one_is_left = self.custody.current(booking::NO_VM).is_some();
        if self.figures != Figures::Unknown || self.inventory.is_none() || one_is_left {
            // It ends when its socket closes.
            tracing::info!(process, one_is_left, "a probe is not served");
            return self.closer.close(vec![socket]);
        }
        self.trials += 1;
        let sizes = Sizes { context: self.context_bytes, margin: self.custody.margin() };
        let vm = VmKey { vm: booking::NO_VM, epoch: self.trials };
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
        self.trial = Some(Trial::new((worker, process), vm, sizes, self.now()));
        match self.adopt(vm, (process, NO_USER), socket, pidfd) {
            Ok(()) if self.links.contains_key(&worker) => {}
            Ok(()) => self.end_trial("there is no room for it"),
            Err(error) => self.end_trial(&error.to_string()),
        }
    }

    /// Compares the figures of a look with what a probe has by now.
    fn see_booking(&mut self, list: &[Listed], own: u32) {
        // Chunks that were made since the last look may be younger than the list.
        let (capacity, _) = self.custody.ledger().totals();
        let chunks = core::mem::replace(&mut self.chunks_then, capacity).min(capacity);
        if self.figures == Figures::Used {
            let absent = !list.is_empty() && list.iter().all(|listed| listed.bytes.is_none());
            self.absent = if absent { self.absent.saturating_add(1) } else { 0 };
            if self.absent >= ABSENT {
                tracing::warn!("the driver says no bytes per process any more");
                self.set_figures(Figures::Unknown);
            }
        }
        let Some(trial) = &mut self.trial else { return };
        let bytes = |process| list.iter().find(|listed| listed.process == process).map(|listed| listed.bytes);
        let sight = Sight { made: bytes(own).flatten(), chunks, probe: bytes(trial.process()) };
        let id = trial.worker();
        match trial.sees(sight) {
            Next::Wait => {}
            Next::Lend(serial, bytes) => {
                self.custody.request(id, Request::Take { serial, bytes }, self.now());
            }
            Next::Found(booking) => {
                tracing::info!(?booking, ?sight, "it is found out to whom the driver books memory");
                self.custody.set_imports_booked(booking.counts_imports());
                self.set_figures(booking.figures());
                self.dismiss();
            }
        }
    }

    fn set_figures(&mut self, figures: Figures) {
        self.figures = figures;
        self.absent = 0;
    }

    /// A probe has shown nothing: it stays unknown whether figures can be used.
    fn end_trial(&mut self, why: &str) {
        tracing::warn!(why, "it is not found out to whom the driver books memory");
        self.dismiss();
    }

    /// Ends a probe.
    fn dismiss(&mut self) {
        let Some(trial) = self.trial.take() else { return };
        self.custody.worker_left(trial.worker());
        let VmKey { vm, epoch } = trial.vm();
        self.command(ToArbiter::Forget { vm, epoch }, Vec::new());
    }
}

/// Bytes that a grant lets a driver take beyond what was asked for: a real driver's blocks are up to some tens of MiB, and on
/// a small device a margin must not use up the quotas.
fn margin(free: u64) -> u64 {
    (free / 1024).clamp(UNIT, 64 << 20).next_multiple_of(UNIT)
}

/// 128 random bits.
fn random() -> u128 {
    let mut bytes = [0; 16];
    // Up to 256 bytes the kernel gives whole, and it has been random since long before there was an arbiter.
    match getrandom(&mut bytes, GetRandomFlags::empty()) {
        Ok(16) => u128::from_le_bytes(bytes),
        other => {
            tracing::error!(?other, "the kernel has no random number: nothing can be shared");
            // No share has this number, so none is made.
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
    fn tokens_are_told_apart() {
        let ids = [1, 2, 3, 1 << 40].map(WorkerId);
        let workers = ids.into_iter().flat_map(|id| [Token::Worker(id), Token::Process(id)]);
        for token in [Token::Control, Token::Hand, Token::Inventory, Token::Time].into_iter().chain(workers) {
            assert_eq!(Token::decode(token.encode()), token);
        }
    }
}
