//! A device, its driver's slices, workers with latencies, and an arbiter around the real scheduler. Simulated time.

use sluice_scheduler::{
    Nanos,
    estimate::{Estimates, WorkKind},
    scheduler::{Figures, Permit, Scheduler, Seen, Settings, Slot, Terms},
};
use std::collections::{BTreeMap, VecDeque};

pub(crate) const US: Nanos = 1_000;
pub(crate) const MS: Nanos = 1_000_000;
pub(crate) const SECOND: Nanos = 1_000_000_000;

/// The driver's slice between processes, and the cost of a switch.
const SLICE: Nanos = 1024 * US;
const SWITCH: Nanos = 20 * US;
/// Time until a worker sees its permit, and until the arbiter receives a worker's signal.
const LATENCY: Nanos = 30 * US;
/// Interval in which a waiting worker repeats its signal.
const HEARTBEAT: Nanos = 10 * MS;
/// The assumed duration of unknown work.
const UNKNOWN: Nanos = MS;

/// The behaviour of a worker's program.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Program {
    /// Kernels of a length without end.
    Backlog(Nanos),
    /// One kernel of a length in each period, from a first time on.
    Periodic { cost: Nanos, period: Nanos, first: Nanos },
    /// Idle until a time, then kernels without end.
    From(Nanos, Nanos),
    /// A kernel, then a pause after its end.
    Synchronous { cost: Nanos, think: Nanos },
    /// Reports that it waits and never submits work.
    Pretender,
    /// Kernels without end, of a worker that a signal stops from one time to another.
    Stopped { from: Nanos, to: Nanos, cost: Nanos },
}

#[derive(Clone, Copy, Debug)]
struct Job {
    left: Nanos,
    cost: Nanos,
    arrived: Nanos,
    estimate: Nanos,
}

#[derive(Debug)]
struct Worker {
    vm: usize,
    program: Program,
    queue: VecDeque<Job>,
    /// Jobs on the device.
    flying: VecDeque<Job>,
    estimated: Nanos,
    begun: u64,
    permit: Permit,
    /// The time at which it sees the arbiter's last permit.
    sees: Option<(Nanos, Permit)>,
    next: Nanos,
    rings: Option<Nanos>,
    beats: Nanos,
    busy_since: Nanos,
    busy: Nanos,
    metered: Nanos,
    last_end: Nanos,
}

/// The results of a VM at the end.
#[derive(Clone, Debug, Default)]
pub(crate) struct Outcome {
    /// Its device time in each second.
    pub(crate) seconds: Vec<Nanos>,
    pub(crate) total: Nanos,
    pub(crate) responses: Vec<Nanos>,
    pub(crate) figures: Figures,
}

/// The index, in a sorted list of `count` values, of the value that `part` of 100 do not exceed.
pub(crate) const fn place(count: usize, part: usize) -> usize {
    let place = count * part / 100;
    if place < count { place } else { count - 1 }
}

impl Outcome {
    pub(crate) fn percentile(&self, part: usize) -> f64 {
        let mut sorted = self.responses.clone();
        sorted.sort_unstable();
        sorted[place(sorted.len(), part)] as f64 / MS as f64
    }
}

/// A unit, its VMs and their workers.
pub(crate) struct Unit {
    now: Nanos,
    scheduler: Scheduler,
    slots: Vec<Slot>,
    workers: Vec<Worker>,
    estimates: Estimates,
    written: BTreeMap<usize, Permit>,
    due: Option<Nanos>,
    on: usize,
    slice_end: Nanos,
    switching: Nanos,
    outcomes: Vec<Outcome>,
    second: Nanos,
    pub(crate) switches: u64,
    pub(crate) busy: Nanos,
    pub(crate) decisions: u64,
}

impl Unit {
    pub(crate) fn new(settings: Settings) -> Unit {
        Unit {
            now: 0,
            scheduler: Scheduler::new(settings, 0),
            slots: Vec::new(),
            workers: Vec::new(),
            estimates: Estimates::default(),
            written: BTreeMap::new(),
            due: None,
            on: 0,
            slice_end: 0,
            switching: 0,
            outcomes: Vec::new(),
            second: SECOND,
            switches: 0,
            busy: 0,
            decisions: 0,
        }
    }

    pub(crate) fn vm(&mut self, terms: Terms, programs: &[Program]) -> usize {
        let vm = self.slots.len();
        self.slots.push(self.scheduler.add(terms, self.now));
        self.outcomes.push(Outcome::default());
        for program in programs {
            let next = match *program {
                Program::Periodic { first, .. } => first,
                Program::From(start, _) => start,
                _ => 0,
            };
            self.workers.push(Worker {
                vm,
                program: *program,
                queue: VecDeque::new(),
                flying: VecDeque::new(),
                estimated: 0,
                begun: 0,
                permit: Permit::Closed,
                sees: None,
                next,
                rings: None,
                beats: 0,
                busy_since: 0,
                busy: 0,
                metered: 0,
                last_end: 0,
            });
        }
        vm
    }

    /// Runs the simulation; returns the results of each VM.
    pub(crate) fn run(mut self, length: Nanos) -> (Vec<Outcome>, Unit) {
        while self.now < length {
            self.fill();
            self.submit();
            if self.rung() || self.due.is_some_and(|due| due <= self.now) {
                self.decide();
                continue;
            }
            let next = self.next_event().min(length).max(self.now + 1);
            self.execute(next);
        }
        for (vm, outcome) in self.outcomes.iter_mut().enumerate() {
            outcome.figures = self.scheduler.figures(self.slots[vm]);
        }
        (core::mem::take(&mut self.outcomes), self)
    }

    fn stopped(worker: &Worker, now: Nanos) -> bool {
        matches!(worker.program, Program::Stopped { from, to, .. } if (from..to).contains(&now))
    }

    /// Adds the work that programs want to submit.
    fn fill(&mut self) {
        let now = self.now;
        for (index, worker) in self.workers.iter_mut().enumerate() {
            let empty = worker.queue.is_empty();
            let job = |cost, arrived| Job { left: cost, cost, arrived, estimate: 0 };
            match worker.program {
                Program::Backlog(cost) | Program::From(_, cost) | Program::Stopped { cost, .. } => {
                    while now >= worker.next && worker.queue.len() < 64 {
                        worker.queue.push_back(job(cost, now));
                    }
                }
                Program::Pretender => {
                    if worker.queue.is_empty() {
                        worker.queue.push_back(job(MS, now));
                    }
                }
                Program::Periodic { cost, period, .. } => {
                    while worker.next <= now {
                        worker.queue.push_back(job(cost, worker.next));
                        worker.next += period;
                    }
                }
                Program::Synchronous { cost, think } => {
                    if worker.queue.is_empty() && worker.flying.is_empty() && now >= worker.last_end + think {
                        worker.queue.push_back(job(cost, now));
                    }
                }
            }
            // Waiting work is seen when the permit is closed; only later work needs a signal.
            let closed = self.written.get(&index).is_none_or(|permit| *permit == Permit::Closed);
            if empty && closed && !worker.queue.is_empty() && !Unit::stopped(worker, now) {
                worker.beats = now + HEARTBEAT;
                worker.rings.get_or_insert(now + LATENCY);
            }
        }
    }

    /// Workers act on the permits that they see.
    fn submit(&mut self) {
        let now = self.now;
        for index in 0..self.workers.len() {
            let worker = &mut self.workers[index];
            if Unit::stopped(worker, now) {
                continue;
            }
            if let Some((at, permit)) = worker.sees
                && at <= now
            {
                worker.permit = permit;
                worker.sees = None;
            }
            if let Permit::Open { window, .. } = worker.permit
                && !matches!(worker.program, Program::Pretender)
            {
                while worker.estimated < window
                    && let Some(mut job) = worker.queue.pop_front()
                {
                    let known = Nanos::from(self.estimates.of(WorkKind::new(index as u64, job.cost)));
                    job.estimate = if known == 0 { UNKNOWN } else { known };
                    if worker.flying.is_empty() {
                        worker.busy_since = now;
                    }
                    worker.estimated += job.estimate;
                    worker.begun += 1;
                    worker.flying.push_back(job);
                }
            }
            if worker.permit == Permit::Closed && !worker.queue.is_empty() && now >= worker.beats {
                worker.beats = now + HEARTBEAT;
                worker.rings.get_or_insert(now + LATENCY);
            }
        }
        // An idle device starts with any work that comes.
        if self.workers[self.on].flying.is_empty() {
            self.switch();
        }
    }

    fn rung(&mut self) -> bool {
        let now = self.now;
        let mut rung = false;
        for worker in &mut self.workers {
            if worker.rings.is_some_and(|at| at <= now) {
                worker.rings = None;
                rung = true;
                self.scheduler.alive(self.slots[worker.vm], now);
            }
        }
        rung
    }

    fn decide(&mut self) {
        let now = self.now;
        self.decisions += 1;
        if let Some(quiet) = self.scheduler.quiet() {
            let mut used = 0;
            for worker in self.workers.iter_mut().filter(|worker| self.slots[worker.vm] == quiet) {
                let busy = worker.busy + if worker.flying.is_empty() { 0 } else { now - worker.busy_since };
                used += busy - worker.metered;
            }
            self.scheduler.metered(quiet, used);
        }
        for worker in &mut self.workers {
            worker.metered = worker.busy + if worker.flying.is_empty() { 0 } else { now - worker.busy_since };
        }
        for vm in 0..self.slots.len() {
            let mut seen = Seen::default();
            for worker in self.workers.iter().filter(|worker| worker.vm == vm) {
                seen.waiting += u32::from(!worker.queue.is_empty());
                seen.flying += u32::from(!worker.flying.is_empty());
                seen.begun += worker.begun;
            }
            self.scheduler.see(self.slots[vm], seen, now);
        }
        self.due = self.scheduler.turn(now);
        assert!(self.due.is_none_or(|due| due > now), "nothing is due at once");
        for index in 0..self.workers.len() {
            let permit = self.scheduler.permit(self.slots[self.workers[index].vm]);
            if self.written.insert(index, permit) != Some(permit) {
                let worker = &mut self.workers[index];
                worker.sees = Some((now + LATENCY, permit));
                worker.beats = now + HEARTBEAT;
            }
        }
    }

    fn next_event(&self) -> Nanos {
        let on = &self.workers[self.on];
        let mut next = Nanos::MAX;
        if let Some(job) = on.flying.front() {
            let start = self.now.max(self.switching);
            next = next.min(start + job.left);
            if self.others_fly() {
                next = next.min(self.slice_end.max(self.now + 1));
            }
        }
        for worker in &self.workers {
            if let Program::Stopped { to, .. } = worker.program
                && Unit::stopped(worker, self.now)
            {
                next = next.min(to);
                continue;
            }
            let arrives = match worker.program {
                Program::Periodic { .. } | Program::From(..) => Some(worker.next),
                Program::Synchronous { think, .. } => Some(worker.last_end + think),
                Program::Stopped { from, .. } => Some(from),
                _ => None,
            };
            let sees = worker.sees.map(|(at, _)| at);
            let beats = (worker.permit == Permit::Closed && !worker.queue.is_empty()).then_some(worker.beats);
            for at in [arrives, sees, worker.rings, beats].into_iter().flatten() {
                if at > self.now {
                    next = next.min(at);
                }
            }
        }
        self.due.map_or(next, |due| next.min(due))
    }

    fn others_fly(&self) -> bool {
        self.workers.iter().enumerate().any(|(index, other)| index != self.on && !other.flying.is_empty())
    }

    /// The device runs until `to`, which is no later than its next event.
    fn execute(&mut self, to: Nanos) {
        let from = self.now.max(self.switching);
        if to > from
            && let Some(job) = self.workers[self.on].flying.front_mut()
        {
            let ran = job.left.min(to - from);
            job.left -= ran;
            self.busy += ran;
            let vm = self.workers[self.on].vm;
            self.outcomes[vm].total += ran;
            let second = (from / SECOND) as usize;
            let seconds = &mut self.outcomes[vm].seconds;
            seconds.resize(seconds.len().max(second + 1), 0);
            seconds[second] += ran;
        }
        self.now = to;
        while to >= self.second {
            self.second += SECOND;
        }
        self.end_jobs();
        if self.now >= self.slice_end {
            if self.others_fly() {
                self.switch();
            } else {
                self.slice_end += SLICE * (1 + (self.now - self.slice_end) / SLICE);
            }
        }
        if self.workers[self.on].flying.is_empty() {
            self.switch();
        }
    }

    fn end_jobs(&mut self) {
        let now = self.now;
        let on = self.on;
        let worker = &mut self.workers[on];
        if worker.flying.front().is_some_and(|job| job.left == 0) {
            let job = worker.flying.pop_front().unwrap();
            worker.estimated -= job.estimate;
            let began = worker.last_end.max(worker.busy_since);
            self.estimates.learn(WorkKind::new(on as u64, job.cost), now - began);
            worker.last_end = now;
            self.outcomes[worker.vm].responses.push(now - job.arrived);
            if worker.flying.is_empty() {
                worker.busy += now - worker.busy_since;
                let tells = !matches!(worker.permit, Permit::Open { tell: false, .. });
                let open = matches!(worker.permit, Permit::Open { .. });
                if tells && !Unit::stopped(worker, now) && (worker.queue.is_empty() || !open) {
                    worker.rings.get_or_insert(now + LATENCY);
                }
            }
        }
    }

    /// The next process gets the device.
    fn switch(&mut self) {
        let count = self.workers.len();
        let next = (1..=count).map(|step| (self.on + step) % count);
        if let Some(next) = next.into_iter().find(|index| !self.workers[*index].flying.is_empty())
            && next != self.on
        {
            self.on = next;
            self.switching = self.now + SWITCH;
            self.slice_end = self.switching + SLICE;
            self.switches += 1;
        } else if self.slice_end <= self.now {
            self.slice_end = self.now + SLICE;
        }
    }
}
