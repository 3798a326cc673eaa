//! The unit's time: a thread that gives and takes permits.
//!
//! It waits for eventfds, reads the reports of workers, calls the [`Scheduler`], and writes permits. It makes no driver call
//! and shares nothing with custody but the loop that tells it which workers exist, so that neither delays the other.
//!
//! A report is not verified. It can only cost the worker's own VM: a worker that reports waiting work has turns and pays for
//! them; one that reports work under way pays for that; one that reports neither loses its permit to one that does. A worker
//! can hide only work that it submits without a permit and does not report. The driver slices processes, so such work has at
//! most the share of work that outlasts a turn: a part beside the VM whose turn it is. A worker that reports such work is
//! ended. If a worker does not report it, the driver's own figures show it, and [`Time::compare`] charges the VM.

use crate::{
    ids::{VmKey, WorkerId},
    measured::{self, Comparison},
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
    control::{FromArbiter, Priority, TimeShare},
    custody::page,
    figures::VmTime,
};
use sluice_protocol::limits;
use sluice_runtime::clock::nanoseconds as now;
use sluice_scheduler::{
    Nanos,
    scheduler::{Figures, Permit, Scheduler, Seen, Settings, Slot, Terms},
    watchdog::{self, Watchdog},
};
use std::{
    collections::BTreeMap,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread,
};

/// Rounds in which a decision is repeated if it closed permits: a worker may just have begun.
const LOOKS: u32 = 3;
/// A worker that rings more often than this …
const RINGS: u32 = 1_000;
/// … within this time is muted for the same time …
const RINGS_IN: Nanos = 100_000_000;
/// … and polled at this interval instead.
const MUTED_LOOK: Nanos = 2_000_000;

/// The source of an event; for a worker's eventfd, the worker's number, which begins at 1, shifted.
const KICK: u64 = 0;
const TIMER: u64 = 1;

/// The loop's handle of the thread.
#[derive(Debug)]
pub(crate) struct Time {
    shared: Arc<SharedTime>,
}

#[derive(Debug)]
struct SharedTime {
    state: Mutex<TimeState>,
    epoll: OwnedFd,
    /// The eventfd that wakes the thread.
    kick: OwnedFd,
    /// The eventfd that wakes the loop.
    news: OwnedFd,
}

#[derive(Debug)]
struct TimeState {
    scheduler: Scheduler,
    vms: BTreeMap<VmKey, TimedVm>,
    workers: BTreeMap<WorkerId, TimedWorker>,
    /// Workers to be ended, with the reason.
    wrong: Vec<(WorkerId, EndReason)>,
    /// Workers whose eventfds are muted, until this time. They are polled instead.
    muted: BTreeMap<WorkerId, Nanos>,
}

#[derive(Debug)]
struct TimedVm {
    slot: Slot,
    members: Vec<WorkerId>,
    fenced: bool,
    /// Forgotten when its last worker leaves.
    leaves: bool,
    hang: Option<Nanos>,
    /// True if it needs a look: it was active at the last look, or it rang.
    stirs: bool,
    /// The time up to which its use is charged.
    metered: Nanos,
    /// `None` while the driver does not report time.
    comparison: Option<Comparison>,
}

#[derive(Debug)]
struct TimedWorker {
    vm: VmKey,
    page: Arc<Page>,
    report: Arc<Report>,
    wake_fd: OwnedFd,
    permit: u32,
    /// The busy time that is charged already.
    busy: Duration,
    dog: Watchdog,
    /// It must be ended.
    is_wrong: bool,
    /// The work it had submitted when it was first seen without a permit; `None` while it has one.
    without: Option<u64>,
    rings: (Nanos, u32),
}

/// The reason for ending a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EndReason {
    /// None of its work completes, and its VM's policy requires this or another VM waits.
    Hung,
    /// It submits without a permit.
    Trespass,
}

fn ring(eventfd: &OwnedFd) {
    // The write fails only if the counter is full, so the eventfd is signalled already.
    if let Err(error) = rustix::io::write(eventfd, &1_u64.to_ne_bytes()) {
        tracing::debug!(%error, "cannot write an eventfd");
    }
}

fn hush(eventfd: &OwnedFd) {
    match rustix::io::read(eventfd, &mut [0; 8]) {
        Ok(_) | Err(Errno::AGAIN | Errno::INTR) => {}
        Err(error) => tracing::error!(%error, "cannot read an eventfd"),
    }
}

fn quiet_eventfd() -> Result<OwnedFd, Errno> {
    eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
}

impl Time {
    /// Starts the thread.
    ///
    /// # Errors
    /// The kernel's error if it cannot create a thread or descriptor.
    pub(crate) fn start() -> Result<Time, std::io::Error> {
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        let (kick, news) = (quiet_eventfd()?, quiet_eventfd()?);
        let timer =
            timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK)?;
        epoll::add(&epoll, &kick, EventData::new_u64(KICK), EventFlags::IN)?;
        epoll::add(&epoll, &timer, EventData::new_u64(TIMER), EventFlags::IN)?;
        let state = Mutex::new(TimeState::new(Settings::default(), now()));
        let shared = Arc::new(SharedTime { state, epoll, kick, news });
        let thread = Arc::clone(&shared);
        thread::Builder::new().name("time".to_owned()).spawn(move || {
            // The thread's state is not used after a panic: the process ends.
            let ended = catch_unwind(AssertUnwindSafe(|| thread.run(&timer)));
            tracing::error!(?ended, "the time thread has ended; the process ends");
            std::process::exit(1);
        })?;
        Ok(Time { shared })
    }

    fn change<R>(&self, change: impl FnOnce(&mut TimeState, Nanos) -> R) -> R {
        let result = change(&mut self.shared.lock(), now());
        ring(&self.shared.kick);
        result
    }

    /// A descriptor that is readable when [`Time::wrong`] has news.
    pub(crate) fn news(&self) -> BorrowedFd<'_> {
        self.shared.news.as_fd()
    }

    /// Workers to be ended, since the last call.
    pub(crate) fn wrong(&self) -> Vec<(WorkerId, EndReason)> {
        hush(&self.shared.news);
        core::mem::take(&mut self.shared.lock().wrong)
    }

    /// Adds a VM and ends other epochs of its number.
    pub(crate) fn admit(&self, key: VmKey) {
        self.change(|state, now| state.admit(key, now));
    }

    /// Sets a VM's share.
    pub(crate) fn set(&self, key: VmKey, shares: TimeShare) {
        self.change(|state, now| state.set(key, shares, now));
    }

    /// Gives a VM no more turns.
    pub(crate) fn fence(&self, key: VmKey) {
        self.change(|state, _| state.fence(key));
    }

    /// Removes a VM.
    pub(crate) fn forget(&self, key: VmKey) {
        self.change(|state, now| state.forget(key, now));
    }

    /// Adds a worker of a VM. Returns its eventfd.
    pub(crate) fn join(
        &self,
        id: WorkerId,
        vm: VmKey,
        page: Arc<Page>,
        report: Arc<Report>,
    ) -> Result<OwnedFd, PageError> {
        let wake_fd = quiet_eventfd()?;
        let theirs =
            wake_fd.try_clone().map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::MFILE))?;
        let edge = EventFlags::IN | EventFlags::ET;
        epoll::add(&self.shared.epoll, &wake_fd, EventData::new_u64((id.0 + 1) << 1), edge)?;
        let worker = TimedWorker {
            vm,
            page,
            report,
            wake_fd,
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

    /// Passes the driver's figures of one round: the percentage of the time in which kernels of each worker ran, and of all
    /// processes together; `None` if unknown. Charges the VMs that used more time than was charged, and returns those whose workers
    /// hide time, with the difference.
    pub(crate) fn compare(&self, round: Option<(&[(WorkerId, u32)], u32)>) -> Vec<(VmKey, Duration)> {
        self.change(|state, now| state.compare(round, now))
    }

    /// Removes a worker whose process is gone.
    pub(crate) fn leave(&self, id: WorkerId) {
        self.change(|state, now| state.leave(id, now));
    }

    /// A VM's use of the unit's time.
    pub(crate) fn describe(&self, vm: u32) -> Option<FromArbiter> {
        // A query also makes the thread decide anew.
        let (key, figures) = self.change(|state, now| {
            state.observe(now);
            let (key, known) = state.vms.iter().rev().find(|(key, _)| key.vm == vm)?;
            Some((*key, state.scheduler.figures(known.slot)))
        })?;
        let Figures { used, overlapped, waited, turns } = figures;
        let time = VmTime { used, overlapped, waited, turns };
        Some(FromArbiter::Time { vm, epoch: key.epoch, time })
    }
}

impl SharedTime {
    fn lock(&self) -> MutexGuard<'_, TimeState> {
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
                    wake_fd => state.rung(WorkerId((wake_fd >> 1) - 1), now, &self.epoll),
                }
            }
            let due = state.unmute(now, &self.epoll);
            let due = state.decide(now).into_iter().chain(due).min();
            if !state.wrong.is_empty() {
                ring(&self.news);
            }
            drop(state);
            // A time of 0 disarms the timer.
            let due = Duration::from_nanos(due.map_or(0, |due| due.max(1)));
            let it_value = Timespec::try_from(due).unwrap_or(Timespec { tv_sec: i64::MAX, tv_nsec: 0 });
            let it_interval = Timespec { tv_sec: 0, tv_nsec: 0 };
            timerfd_settime(timer, TimerfdTimerFlags::ABSTIME, &Itimerspec { it_interval, it_value })?;
        }
    }
}

impl TimeState {
    fn new(settings: Settings, now: Nanos) -> TimeState {
        TimeState {
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
        self.vms.entry(key).or_insert_with(|| TimedVm {
            slot: scheduler.add(Terms::default(), now),
            members: Vec::new(),
            fenced: false,
            leaves: false,
            hang: None,
            stirs: false,
            metered: now,
            comparison: None,
        });
    }

    fn set(&mut self, key: VmKey, shares: TimeShare, now: Nanos) {
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

    fn join(&mut self, id: WorkerId, worker: TimedWorker, now: Nanos) {
        self.admit(worker.vm, now);
        if let Some(vm) = self.vms.get_mut(&worker.vm) {
            vm.members.push(id);
            vm.stirs = true;
        }
        self.workers.insert(id, worker);
    }

    fn leave(&mut self, id: WorkerId, now: Nanos) {
        // Use since the last look is charged to the worker's VM.
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
            self.vms.values_mut().for_each(|vm| vm.comparison = None);
            return Vec::new();
        };
        let mut percent: BTreeMap<VmKey, u32> = BTreeMap::new();
        for (id, busy) in round {
            if let Some(worker) = self.workers.get(id) {
                *percent.entry(worker.vm).or_default() += busy;
            }
        }
        let mut hidden = Vec::new();
        for (key, vm) in &mut self.vms {
            let charged = self.scheduler.figures(vm.slot).used;
            // Two processes that both ran all the time had half of the device each.
            let part =
                u64::from(percent.get(key).copied().unwrap_or(0)) * measured::WHOLE / u64::from(all.max(100));
            let comparison = vm.comparison.get_or_insert(Comparison::begin(charged, now));
            let Some(missing) = comparison.add(part, charged, now) else { continue };
            self.scheduler.correct(vm.slot, missing.time);
            if missing.is_large {
                hidden.push((*key, Duration::from_nanos(missing.time)));
            }
        }
        hidden
    }

    /// Handles the signal of a worker's eventfd.
    fn rung(&mut self, id: WorkerId, now: Nanos, epoll: &OwnedFd) {
        let Some(worker) = self.workers.get_mut(&id) else { return };
        let (since, rings) = &mut worker.rings;
        if now.saturating_sub(*since) >= RINGS_IN {
            (*since, *rings) = (now, 0);
        }
        *rings += 1;
        if *rings > RINGS {
            let none = epoll::modify(
                epoll,
                &worker.wake_fd,
                EventData::new_u64((id.0 + 1) << 1),
                EventFlags::empty(),
            );
            if let Err(error) = none {
                tracing::error!(%error, "cannot mute a worker's eventfd");
            }
            self.muted.insert(id, now + RINGS_IN);
        }
        if let Some(vm) = self.vms.get_mut(&worker.vm) {
            vm.stirs = true;
            self.scheduler.alive(vm.slot, now);
        }
    }

    /// Watches eventfds again that were muted long enough, and polls the other muted workers. Returns the time of the next call.
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
            if let Err(error) =
                epoll::modify(epoll, &worker.wake_fd, EventData::new_u64((id.0 + 1) << 1), edge)
            {
                tracing::error!(%error, "cannot watch a muted worker's eventfd again");
            }
            false
        });
        (!self.muted.is_empty()).then(|| now + MUTED_LOOK)
    }

    /// Reads the workers' reports. VMs that were inactive and did not ring cannot have begun work: they have no permit.
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
                // Work whose end is observed late may turn out to have ended earlier.
                worker.busy = worker.busy.max(reported.busy);
                if has_permit {
                    worker.without = None;
                } else {
                    let before = *worker.without.get_or_insert(reported.submitted);
                    let trespasses = reported.submitted.wrapping_sub(before) > limits::WITHOUT_PERMIT;
                    if trespasses && !worker.is_wrong {
                        worker.is_wrong = true;
                        self.wrong.push((*id, EndReason::Trespass));
                    }
                }
                worker.dog.see(reported.begun, reported.ended, now);
                let policy = watchdog::WatchdogPolicy { ending: vm.fenced, limit: vm.hang };
                if worker.dog.state(policy, now) == watchdog::WorkState::Hung && !worker.is_wrong {
                    worker.is_wrong = true;
                    self.wrong.push((*id, EndReason::Hung));
                }
            }
            if quiet == Some(vm.slot) {
                // The workers of one VM work at the same time, and may report anything.
                let passed = Duration::from_nanos(now.saturating_sub(vm.metered));
                let used = used.min(passed);
                self.scheduler.metered(vm.slot, Nanos::try_from(used.as_nanos()).unwrap_or(Nanos::MAX));
            }
            vm.metered = now;
            vm.stirs = seen.waiting > 0 || seen.flying > 0;
            self.scheduler.see(vm.slot, seen, now);
        }
    }

    /// Gives and takes permits. Returns the time of the next call if no worker rings.
    fn decide(&mut self, now: Nanos) -> Option<Nanos> {
        let mut due = None;
        for _ in 0..LOOKS {
            self.observe(now);
            due = self.scheduler.turn(now);
            if !self.publish() {
                break;
            }
            // A worker that submits writes its report and then reads its permit.
            fence(Ordering::SeqCst);
        }
        let dogs = self.workers.values().filter(|worker| !worker.is_wrong).filter_map(|worker| {
            let vm = self.vms.get(&worker.vm)?;
            worker.dog.due(watchdog::WatchdogPolicy { ending: vm.fenced, limit: vm.hang })
        });
        due.into_iter().chain(dogs).min()
    }

    /// Writes permits. `true` if some were closed, or require the worker to report from now on.
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
