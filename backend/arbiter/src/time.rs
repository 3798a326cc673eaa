//! The unit's time: a thread that gives and takes permits.
//!
//! It waits for eventfds, reads the reports of workers, calls the [`Scheduler`], and writes permits. It makes no driver call
//! and shares nothing with custody but the loop that tells it which workers exist, so that neither delays the other.
//!
//! A report is not verified. It can only cost the worker's own VM: a worker that reports waiting work has turns and pays for
//! them; one that reports work under way pays for that; one that reports neither loses its permit to one that does. A worker
//! can hide only work that it submits without a permit and does not report. The driver slices processes, so such work has at
//! most the share of work that outlasts a turn: a part beside the VM whose turn it is. A worker that reports such work is
//! ended. If a worker does not report it, the driver's own figures show it, and [`Time::compare`] returns the VM.

use crate::{
    ids::{VmKey, WorkerId},
    page::{Page, PageError, Report},
};
use core::{
    sync::atomic::{Ordering, fence},
    time::Duration,
};
use rustix::{
    buffer::spare_capacity,
    event::{
        EventfdFlags,
        epoll::{self, CreateFlags, Event, EventData, EventFlags},
        eventfd,
    },
    fd::{AsFd as _, BorrowedFd, OwnedFd},
    io::Errno,
    time::{
        Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create,
        timerfd_settime,
    },
};
use sluice_messages::{
    control::{FromArbiter, Priority, Shares},
    custody::page,
};
use sluice_protocol::limits;
use sluice_runtime::clock::nanoseconds as now;
use sluice_scheduler::{
    Nanos,
    scheduler::{Permit, Scheduler, Seen, Settings, Slot, Terms},
    watchdog::{self, Watchdog},
};
use std::{
    collections::BTreeMap,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread,
};

/// How often what was decided is looked at again, when permits were closed meanwhile: a worker may just have begun.
const LOOKS: u32 = 3;
/// A worker that rings more often than so many times …
const RINGS: u32 = 1_000;
/// … in this time is not heard for as long again …
const RINGS_IN: Nanos = 100_000_000;
/// … and looked at so often instead.
const MUTED_LOOK: Nanos = 2_000_000;

/// What a VM is charged is compared with what the driver saw over such a time. That samples the device some times a second, so
/// only a difference of a quarter of the time counts.
const COMPARED: Nanos = 5_000_000_000;
/// Rounds further apart than this say nothing of the time between.
const ROUND: Nanos = 2_000_000_000;

/// What an event is about; bells of workers have their numbers, which begin at 1, shifted.
const KICK: u64 = 0;
const TIMER: u64 = 1;

/// The loop's end.
#[derive(Debug)]
pub(crate) struct Time {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    epoll: OwnedFd,
    /// Wakes the thread.
    kick: OwnedFd,
    /// Wakes the loop.
    news: OwnedFd,
}

#[derive(Debug)]
struct State {
    scheduler: Scheduler,
    vms: BTreeMap<VmKey, Vm>,
    workers: BTreeMap<WorkerId, Worker>,
    /// Workers to be ended.
    wrong: Vec<(WorkerId, Ended)>,
    /// Workers whose bells are not heard, and until when. They are looked at now and then instead.
    muted: BTreeMap<WorkerId, Nanos>,
}

#[derive(Debug)]
struct Vm {
    slot: Slot,
    members: Vec<WorkerId>,
    fenced: bool,
    /// Forgotten when its last worker is gone.
    leaves: bool,
    hang: Option<Nanos>,
    /// Whether it is to be looked at: it did something when last looked at, or it rang.
    stirs: bool,
    /// When what it used was last taken note of.
    metered: Nanos,
    compared: Option<Compared>,
}

#[derive(Debug)]
struct Worker {
    vm: VmKey,
    page: Arc<Page>,
    report: Arc<Report>,
    bell: OwnedFd,
    permit: u32,
    /// What was taken note of.
    busy: Duration,
    dog: Watchdog,
    /// It is to be ended.
    is_wrong: bool,
    /// What it had submitted when it was first seen without a permit, since it has none.
    without: Option<u64>,
    rings: (Nanos, u32),
}

/// What a VM is charged beside what the driver saw.
#[derive(Clone, Copy, Debug)]
struct Compared {
    since: Nanos,
    last: Nanos,
    /// What it was charged by `since`.
    used: Nanos,
    /// What the driver saw.
    seen: Nanos,
}

/// Why a worker is to be ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ended {
    /// Nothing of its work ends, and its VM's policy says so or somebody waits for it.
    Hung,
    /// It submits without a permit.
    Trespass,
}

fn ring(eventfd: &OwnedFd) {
    // It fails only when it was rung already.
    if let Err(error) = rustix::io::write(eventfd, &1_u64.to_ne_bytes()) {
        tracing::debug!(%error, "eventfd not written");
    }
}

fn hush(eventfd: &OwnedFd) {
    match rustix::io::read(eventfd, &mut [0; 8]) {
        Ok(_) | Err(Errno::AGAIN | Errno::INTR) => {}
        Err(error) => tracing::error!(%error, "eventfd not read"),
    }
}

fn quiet_eventfd() -> Result<OwnedFd, Errno> {
    eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
}

impl Time {
    /// Starts the thread.
    ///
    /// # Errors
    /// When the kernel has no thread or descriptor.
    pub(crate) fn start() -> Result<Time, std::io::Error> {
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        let (kick, news) = (quiet_eventfd()?, quiet_eventfd()?);
        let timer =
            timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK)?;
        epoll::add(&epoll, &kick, EventData::new_u64(KICK), EventFlags::IN)?;
        epoll::add(&epoll, &timer, EventData::new_u64(TIMER), EventFlags::IN)?;
        let state = Mutex::new(State::new(Settings::default(), now()));
        let shared = Arc::new(Shared { state, epoll, kick, news });
        let thread = Arc::clone(&shared);
        thread::Builder::new().name("time".to_owned()).spawn(move || {
            // Nothing of the thread's state is used after a panic: the process ends.
            let ended = catch_unwind(AssertUnwindSafe(|| thread.run(&timer)));
            tracing::error!(?ended, "nobody shares out the unit's time");
            std::process::exit(1);
        })?;
        Ok(Time { shared })
    }

    fn change<R>(&self, change: impl FnOnce(&mut State, Nanos) -> R) -> R {
        let result = change(&mut self.shared.lock(), now());
        ring(&self.shared.kick);
        result
    }

    /// Readable when [`Time::wrong`] has news.
    pub(crate) fn news(&self) -> BorrowedFd<'_> {
        self.shared.news.as_fd()
    }

    /// Workers to be ended, since this was last asked.
    pub(crate) fn wrong(&self) -> Vec<(WorkerId, Ended)> {
        hush(&self.shared.news);
        core::mem::take(&mut self.shared.lock().wrong)
    }

    /// There is such a VM; others of its number are over.
    pub(crate) fn admit(&self, key: VmKey) {
        self.change(|state, now| state.admit(key, now));
    }

    /// What a VM may have.
    pub(crate) fn set(&self, key: VmKey, shares: Shares) {
        self.change(|state, now| state.set(key, shares, now));
    }

    /// A VM gets no turn any more.
    pub(crate) fn fence(&self, key: VmKey) {
        self.change(|state, _| state.fence(key));
    }

    /// A VM is over.
    pub(crate) fn forget(&self, key: VmKey) {
        self.change(|state, now| state.forget(key, now));
    }

    /// A worker of a VM. Returns its bell.
    pub(crate) fn join(
        &self,
        id: WorkerId,
        vm: VmKey,
        page: Arc<Page>,
        report: Arc<Report>,
    ) -> Result<OwnedFd, PageError> {
        let bell = quiet_eventfd()?;
        let theirs =
            bell.try_clone().map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::MFILE))?;
        let edge = EventFlags::IN | EventFlags::ET;
        epoll::add(&self.shared.epoll, &bell, EventData::new_u64((id.0 + 1) << 1), edge)?;
        let worker = Worker {
            vm,
            page,
            report,
            bell,
            permit: 0,
            busy: Duration::ZERO,
            dog: Watchdog::default(),
            is_wrong: false,
            without: None,
            rings: (0, 0),
        };
        self.change(|state, now| state.join(id, worker, now));
        Ok(theirs)
    }

    /// What the driver says of a round: for how much of the time kernels of workers ran, in percent, and those of everybody
    /// together; `None` where it does not say. Returns which VMs used more than they are charged, and how much more.
    pub(crate) fn compare(&self, round: Option<(&[(WorkerId, u32)], u32)>) -> Vec<(VmKey, Duration)> {
        self.change(|state, now| state.compare(round, now))
    }

    /// A worker's process is gone.
    pub(crate) fn leave(&self, id: WorkerId) {
        self.change(|state, now| state.leave(id, now));
    }

    /// What a VM had of the unit's time.
    pub(crate) fn describe(&self, vm: u32) -> Option<FromArbiter> {
        // Whoever looks may see what is to be done about it.
        let (key, figures) = self.change(|state, now| {
            state.observe(now);
            let (key, known) = state.vms.iter().rev().find(|(key, _)| key.vm == vm)?;
            Some((*key, state.scheduler.figures(known.slot)))
        })?;
        Some(FromArbiter::Time {
            vm,
            epoch: key.epoch,
            used: figures.used,
            overlapped: figures.overlapped,
            waited: figures.waited,
            turns: figures.turns,
        })
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self, timer: &OwnedFd) -> Result<(), Errno> {
        let mut events: Vec<Event> = Vec::with_capacity(64);
        loop {
            events.clear();
            match epoll::wait(&self.epoll, spare_capacity(&mut events), None) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return Err(error),
            }
            let mut state = self.lock();
            let now = now();
            for event in &events {
                match event.data.u64() {
                    KICK => hush(&self.kick),
                    TIMER => hush(timer),
                    bell => state.rung(WorkerId((bell >> 1) - 1), now, &self.epoll),
                }
            }
            let due = state.unmute(now, &self.epoll);
            let due = state.decide(now).into_iter().chain(due).min();
            if !state.wrong.is_empty() {
                ring(&self.news);
            }
            drop(state);
            // 0 disarms it.
            let due = Duration::from_nanos(due.map_or(0, |due| due.max(1)));
            let it_value = Timespec::try_from(due).unwrap_or(Timespec { tv_sec: i64::MAX, tv_nsec: 0 });
            let it_interval = Timespec { tv_sec: 0, tv_nsec: 0 };
            timerfd_settime(timer, TimerfdTimerFlags::ABSTIME, &Itimerspec { it_interval, it_value })?;
        }
    }
}

impl State {
    fn new(settings: Settings, now: Nanos) -> State {
        State {
            scheduler: Scheduler::new(settings, now),
            vms: BTreeMap::new(),
            workers: BTreeMap::new(),
            wrong: Vec::new(),
            muted: BTreeMap::new(),
        }
    }

    fn admit(&mut self, key: VmKey, now: Nanos) {
        let older: Vec<VmKey> =
            self.vms.keys().filter(|other| other.vm == key.vm && other.epoch < key.epoch).copied().collect();
        older.into_iter().for_each(|older| self.forget(older, now));
        let scheduler = &mut self.scheduler;
        self.vms.entry(key).or_insert_with(|| Vm {
            slot: scheduler.add(Terms::default(), now),
            members: Vec::new(),
            fenced: false,
            leaves: false,
            hang: None,
            stirs: false,
            metered: now,
            compared: None,
        });
    }

    fn set(&mut self, key: VmKey, shares: Shares, now: Nanos) {
        let Some(vm) = self.vms.get_mut(&key) else { return };
        vm.hang = (shares.hang > 0).then(|| Nanos::from(shares.hang) * 1_000_000);
        let terms = Terms {
            weight: shares.weight.clamp(1, limits::WEIGHT),
            class: match shares.priority {
                Priority::Low => 0,
                Priority::Normal => 1,
                Priority::High => 2,
            },
            cap: shares.cap.clamp(1, 1000),
            guarantee: shares.guarantee.min(1000),
        };
        self.scheduler.set(vm.slot, terms, now);
    }

    fn fence(&mut self, key: VmKey) {
        if let Some(vm) = self.vms.get_mut(&key) {
            vm.fenced = true;
            self.scheduler.fence(vm.slot);
        }
    }

    fn forget(&mut self, key: VmKey, now: Nanos) {
        self.fence(key);
        if let Some(vm) = self.vms.get_mut(&key) {
            vm.leaves = true;
        }
        self.drop_if_empty(key, now);
    }

    fn drop_if_empty(&mut self, key: VmKey, now: Nanos) {
        if let Some(vm) = self.vms.get(&key).filter(|vm| vm.leaves && vm.members.is_empty()) {
            self.scheduler.remove(vm.slot, now);
            self.vms.remove(&key);
        }
    }

    fn join(&mut self, id: WorkerId, worker: Worker, now: Nanos) {
        self.admit(worker.vm, now);
        if let Some(vm) = self.vms.get_mut(&worker.vm) {
            vm.members.push(id);
            vm.stirs = true;
        }
        self.workers.insert(id, worker);
    }

    fn leave(&mut self, id: WorkerId, now: Nanos) {
        // What it did since the last look is its VM's to pay.
        self.observe(now);
        let Some(worker) = self.workers.remove(&id) else { return };
        self.muted.remove(&id);
        if let Some(vm) = self.vms.get_mut(&worker.vm) {
            vm.members.retain(|member| *member != id);
            vm.stirs = true;
        }
        self.drop_if_empty(worker.vm, now);
    }

    fn compare(&mut self, round: Option<(&[(WorkerId, u32)], u32)>, now: Nanos) -> Vec<(VmKey, Duration)> {
        self.observe(now);
        let Some((round, all)) = round else {
            self.vms.values_mut().for_each(|vm| vm.compared = None);
            return Vec::new();
        };
        let mut percent: BTreeMap<VmKey, u32> = BTreeMap::new();
        for (id, busy) in round {
            if let Some(worker) = self.workers.get(id) {
                *percent.entry(worker.vm).or_default() += busy;
            }
        }
        let mut short = Vec::new();
        for (key, vm) in &mut self.vms {
            let used = self.scheduler.figures(vm.slot).used;
            let fresh = Compared { since: now, last: now, used, seen: 0 };
            // What a round says is of the last second at most.
            let known = vm.compared.filter(|known| now.saturating_sub(known.last) <= ROUND);
            let mut compared = known.unwrap_or(fresh);
            // Two processes that both ran all the time had half of the device each.
            let part = u64::from(percent.get(key).copied().unwrap_or(0)) * 1000 / u64::from(all.max(100));
            compared.seen += now.saturating_sub(compared.last) / 1000 * part;
            compared.last = now;
            let is_due = now.saturating_sub(compared.since) >= COMPARED;
            let missing = compared.seen.saturating_sub(used.saturating_sub(compared.used));
            if is_due && missing > COMPARED / 4 {
                short.push((*key, Duration::from_nanos(missing)));
            }
            vm.compared = (!is_due).then_some(compared);
        }
        short
    }

    /// A worker rings.
    fn rung(&mut self, id: WorkerId, now: Nanos, epoll: &OwnedFd) {
        let Some(worker) = self.workers.get_mut(&id) else { return };
        let (since, rings) = &mut worker.rings;
        if now.saturating_sub(*since) >= RINGS_IN {
            (*since, *rings) = (now, 0);
        }
        *rings += 1;
        if *rings > RINGS {
            let none =
                epoll::modify(epoll, &worker.bell, EventData::new_u64((id.0 + 1) << 1), EventFlags::empty());
            if let Err(error) = none {
                tracing::error!(%error, "a bell cannot be silenced");
            }
            self.muted.insert(id, now + RINGS_IN);
        }
        if let Some(vm) = self.vms.get_mut(&worker.vm) {
            vm.stirs = true;
            self.scheduler.alive(vm.slot, now);
        }
    }

    /// Hears bells again that were silenced for long enough, and looks at the others' workers. Returns when to do so again.
    fn unmute(&mut self, now: Nanos, epoll: &OwnedFd) -> Option<Nanos> {
        self.muted.retain(|id, until| {
            let Some(worker) = self.workers.get(id) else { return false };
            if now < *until {
                if let Some(vm) = self.vms.get_mut(&worker.vm) {
                    vm.stirs = true;
                    self.scheduler.alive(vm.slot, now);
                }
                return true;
            }
            let edge = EventFlags::IN | EventFlags::ET;
            if let Err(error) = epoll::modify(epoll, &worker.bell, EventData::new_u64((id.0 + 1) << 1), edge)
            {
                tracing::error!(%error, "a bell cannot be heard again");
            }
            false
        });
        (!self.muted.is_empty()).then(|| now + MUTED_LOOK)
    }

    /// Looks at what workers report. VMs that did nothing and did not ring cannot have begun: they have no permit.
    fn observe(&mut self, now: Nanos) {
        let quiet = self.scheduler.quiet();
        for vm in self.vms.values_mut() {
            let has_permit = self.scheduler.permit(vm.slot) != Permit::Closed;
            if !vm.stirs && !has_permit {
                continue;
            }
            let (mut seen, mut used) = (Seen::default(), Duration::ZERO);
            for id in &vm.members {
                let Some(worker) = self.workers.get_mut(id) else { continue };
                let reported = worker.report.read(now);
                seen.waiting += u32::from(reported.waiting);
                seen.flying += u32::from(reported.begun != reported.ended);
                seen.begun = seen.begun.wrapping_add(reported.begun);
                used = used.saturating_add(reported.busy.saturating_sub(worker.busy));
                // An end that is seen late may turn out to have been early.
                worker.busy = worker.busy.max(reported.busy);
                if has_permit {
                    worker.without = None;
                } else {
                    let before = *worker.without.get_or_insert(reported.submitted);
                    let trespasses = reported.submitted.wrapping_sub(before) > limits::WITHOUT_PERMIT;
                    if trespasses && !worker.is_wrong {
                        worker.is_wrong = true;
                        self.wrong.push((*id, Ended::Trespass));
                    }
                }
                worker.dog.see(reported.begun, reported.ended, now);
                let policy = watchdog::Policy { ending: vm.fenced, limit: vm.hang };
                if worker.dog.state(policy, now) == watchdog::State::Hung && !worker.is_wrong {
                    worker.is_wrong = true;
                    self.wrong.push((*id, Ended::Hung));
                }
            }
            if quiet == Some(vm.slot) {
                // Workers of one VM work at the same time, and may say anything.
                let passed = Duration::from_nanos(now.saturating_sub(vm.metered));
                let used = used.min(passed);
                self.scheduler.metered(vm.slot, Nanos::try_from(used.as_nanos()).unwrap_or(Nanos::MAX));
            }
            vm.metered = now;
            vm.stirs = seen.waiting > 0 || seen.flying > 0;
            self.scheduler.see(vm.slot, seen, now);
        }
    }

    /// Gives and takes permits. Returns when to do so again, if nobody rings.
    fn decide(&mut self, now: Nanos) -> Option<Nanos> {
        let mut due = None;
        for _ in 0..LOOKS {
            self.observe(now);
            due = self.scheduler.turn(now);
            if !self.publish() {
                break;
            }
            // A worker that submits writes its report and then looks at its permit.
            fence(Ordering::SeqCst);
        }
        let dogs = self.workers.values().filter(|worker| !worker.is_wrong).filter_map(|worker| {
            let vm = self.vms.get(&worker.vm)?;
            worker.dog.due(watchdog::Policy { ending: vm.fenced, limit: vm.hang })
        });
        due.into_iter().chain(dogs).min()
    }

    /// Writes permits. `true` when some were closed, or have to be told of from now on.
    fn publish(&mut self) -> bool {
        let mut tightened = false;
        for vm in self.vms.values() {
            let permit = match self.scheduler.permit(vm.slot) {
                Permit::Closed => 0,
                Permit::Open { window, tell } => {
                    let window = u32::try_from(window / 1000).unwrap_or(0).clamp(1, page::TELL - 1);
                    if tell { window | page::TELL } else { window }
                }
            };
            for id in &vm.members {
                let Some(worker) = self.workers.get_mut(id).filter(|worker| worker.permit != permit) else {
                    continue;
                };
                let told_before = worker.permit == 0 || worker.permit & page::TELL != 0;
                tightened |= !told_before && (permit == 0 || permit & page::TELL != 0)
                    || worker.permit != 0 && permit == 0;
                worker.permit = permit;
                worker.page.permit(permit);
            }
        }
        tightened
    }
}
