//! Custody requests of many workers, in any order with deaths, fences and driver results: for any bytes, the arbiter's sums and
//! states agree after each step, and no memory is lent that another VM can reach or whose bytes are in it.
//!
//! The input is a program: an operation byte, then its operands. The model around it knows which processes can reach which chunk, and
//! each process writes to a chunk for as long as it can reach it.

#![no_main]

use libfuzzer_sys::fuzz_target;
use sluice_arbiter::{
    chunks::ChunkState,
    custody::{Custody, Effect, Estimates, Task, TaskOutcome, UnitSettings, mix},
    ids::{ChunkId, Class, VmKey, WorkerId},
};
use sluice_fuzz::input::Input;
use sluice_messages::{
    control::{self, ArbiterEvent, FromArbiter, ToArbiter},
    custody::{CLASSES, CustodyAnswer, CustodyRequest, UNIT},
};
use std::collections::{BTreeMap, BTreeSet, HashMap};

const MIB: u64 = 1 << 20;
const ESTIMATES: Estimates = Estimates { context: 6 * MIB, margin: 4 * MIB };
const RESERVE: u64 = 4 * MIB;
/// Bytes of a unit.
const TOTALS: [u64; 3] = [40 * MIB, 358 * MIB, 2200 * MIB];
/// Operations of one input.
const OPERATIONS: usize = 400;
/// The bytes of a VM that the model does not know.
const UNKNOWN: VmKey = VmKey { vm: u32::MAX, epoch: 0 };

/// A number of bytes: some units, some that are none, and the largest ones.
fn bytes(input: &mut Input<'_>) -> u64 {
    match input.byte() {
        0 => 0,
        value @ 1..=199 => u64::from(value) * MIB,
        value @ 200..=239 => u64::from(value) * 4097,
        value => u64::MAX - u64::from(255 - value) * MIB,
    }
}

/// The true state of a chunk.
#[derive(Clone, Debug)]
struct Real {
    class: Class,
    /// The VM whose bytes may be in it.
    content: Option<VmKey>,
    /// Processes that can reach it until they are gone.
    reach: BTreeSet<WorkerId>,
}

#[derive(Debug)]
struct Process {
    vm: VmKey,
    leases: BTreeMap<u64, ChunkId>,
    /// Bytes of its requests for growth, by serial.
    grows: HashMap<u64, u64>,
    dead: bool,
    /// Bytes that its driver has taken.
    driver: u64,
}

struct World {
    custody: Custody,
    now: u64,
    total: u64,
    free: u64,
    /// VMs whose drivers' bytes may be among the free ones.
    dirt: BTreeSet<VmKey>,
    chunks: HashMap<ChunkId, Real>,
    processes: BTreeMap<WorkerId, Process>,
    /// Memory that left custody while these processes hold it.
    held: Vec<(u64, BTreeSet<WorkerId>)>,
    /// The driver's task and its chunks.
    task: Option<(Task, Vec<Real>)>,
    escrow: u64,
    next_worker: u64,
    shares: u128,
}

impl World {
    fn new(total: u64) -> World {
        let settings = UnitSettings { unit: 0, reserve: RESERVE, estimates: ESTIMATES };
        let mut world = World {
            custody: Custody::new(settings, total),
            now: 0,
            total,
            free: total,
            dirt: BTreeSet::new(),
            chunks: HashMap::new(),
            processes: BTreeMap::new(),
            held: Vec::new(),
            task: None,
            escrow: u64::MAX,
            next_worker: 1,
            shares: 0,
        };
        world.work(1);
        world.custody.command(ToArbiter::Escrow { ancestor: 1, bytes: u64::MAX }, 0);
        world.custody.set_nominal();
        world.work(8);
        for vm in 1..4 {
            world.vm(VmKey { vm, epoch: 1 }, 0);
            world.start(VmKey { vm, epoch: 1 });
        }
        world.settle();
        world
    }

    fn vm(&mut self, key: VmKey, limit: u64) {
        let message = ToArbiter::Vm {
            vm: key.vm,
            epoch: key.epoch,
            limit,
            guaranteed: limit / 4,
            headroom: if key.vm == 1 { 40 * MIB } else { 0 },
            pinned: MIB,
            ancestors: 1,
        };
        self.custody.command(message, self.now);
    }

    fn start(&mut self, vm: VmKey) {
        let id = WorkerId(self.next_worker);
        self.next_worker += 1;
        if self.custody.add_worker(id, vm, 1, 0) {
            let (leases, grows) = (BTreeMap::new(), HashMap::new());
            self.processes.insert(id, Process { vm, leases, grows, dead: false, driver: 0 });
        }
    }

    fn lent_to(&self, vm: VmKey) -> u64 {
        let of = |process: &&Process| process.vm == vm && !process.dead;
        let leases = self.processes.values().filter(of).flat_map(|process| process.leases.values());
        leases.collect::<BTreeSet<_>>().into_iter().map(|id| self.chunks[id].class.bytes()).sum()
    }

    /// Carries out all effects, and checks all sums.
    fn settle(&mut self) {
        self.custody.serve_waiters(self.now);
        self.custody.serve_growth(self.now);
        while let Some(effect) = self.custody.effect() {
            match effect {
                Effect::Lend { worker, lease, chunk, bytes, .. } => self.lend(worker, lease, chunk, bytes),
                Effect::Answer { worker, answer: CustodyAnswer::Granted { serial, .. } } => {
                    self.granted(worker, serial);
                }
                Effect::Tell(FromArbiter::Event { kind, .. }) => {
                    assert_ne!(kind, ArbiterEvent::LedgerBroken as u32, "a step that cannot be was tried");
                }
                Effect::Answer { worker, .. } | Effect::Kill { worker } => {
                    assert!(self.processes.contains_key(&worker), "a message for an unknown process");
                }
                Effect::Tell(_) => {}
            }
        }
        self.check();
    }

    fn lend(&mut self, id: WorkerId, lease: u64, chunk: ChunkId, bytes: u64) {
        let vm = self.processes[&id].vm;
        let before = self.lent_to(vm);
        let process = self.processes.get_mut(&id).expect("only known processes are lent to");
        assert!(!process.dead, "a chunk is lent to a dead process");
        assert!(process.leases.insert(lease, chunk).is_none(), "a lease number is used again");
        let real = self.chunks.get_mut(&chunk).expect("only chunks in custody are lent");
        assert_eq!(real.class.bytes(), bytes);
        let processes = &self.processes;
        assert!(real.reach.iter().all(|other| processes[other].vm == vm), "another VM can still reach it");
        assert!(real.content.is_none_or(|content| content == vm), "another VM's bytes are in it");
        real.content = Some(vm);
        real.reach.insert(id);
        // A second open costs nothing, even if the limit was lowered meanwhile.
        if self.lent_to(vm) > before {
            assert!(self.lent_to(vm) <= self.custody.ledger().limit(vm), "over the limit");
            assert!(self.custody.ledger().ancestor(1).0 <= self.escrow, "an ancestor is exceeded");
        }
    }

    /// The driver takes the memory at once.
    fn granted(&mut self, id: WorkerId, serial: u64) {
        let process = self.processes.get_mut(&id).expect("a known process");
        let Some(bytes) = process.grows.remove(&serial) else { return };
        let vm = process.vm;
        assert!(self.dirt.iter().all(|other| *other == vm), "memory is granted with another VM's in it");
        let account = self.custody.ledger().account(vm).expect("an account");
        assert!(account.charged() <= self.custody.ledger().limit(vm), "a grant exceeds the quota");
        let took = bytes.min(self.free);
        process.driver += took;
        self.free -= took;
    }

    fn check(&self) {
        self.custody.check().expect("sums and states agree");
        for (key, account) in self.custody.ledger().accounts() {
            assert_eq!(account.lent, self.lent_to(key), "the charge is not what is leased");
        }
        let chunks: u64 = self.chunks.values().map(|real| real.class.bytes()).sum();
        let away = match &self.task {
            Some((Task::Scrub(_), _)) | None => 0,
            Some((_, reals)) => reals.iter().map(|real| real.class.bytes()).sum(),
        };
        let held: u64 = self.held.iter().map(|(bytes, _)| bytes).sum();
        let drivers: u64 = self.processes.values().map(|process| process.driver).sum();
        assert_eq!(chunks + away + held + drivers + self.free, self.total, "memory is lost or made up");
    }

    /// The driver starts its next task.
    fn begin(&mut self, measure: bool) {
        if self.task.is_some() {
            return;
        }
        let Some(task) = self.custody.plan(64 * MIB, measure) else { return };
        let reals = match &task {
            Task::Scrub(orders) => orders.iter().map(|order| self.chunks[&order.chunk].clone()).collect(),
            Task::Release(chunks) | Task::Remake { chunks, .. } | Task::Move { chunks } => {
                chunks.iter().map(|id| self.chunks.remove(id).expect("a chunk in custody")).collect()
            }
            Task::Take { .. } | Task::Measure => Vec::new(),
        };
        for real in &reals {
            if matches!(task, Task::Release(_) | Task::Remake { .. }) {
                assert!(real.reach.is_empty(), "memory in use goes back to the driver");
                assert!(real.content.is_none(), "bytes of a VM go back to the driver");
            }
        }
        self.task = Some((task, reals));
    }

    /// The driver completes its task; the scrub fails, or processes hold what is moved, if `bad`.
    fn end(&mut self, bad: bool) {
        let Some((task, reals)) = self.task.take() else { return };
        let sum = |reals: &[Real]| -> u64 { reals.iter().map(|real| real.class.bytes()).sum() };
        let (outcome, made) = match task {
            Task::Scrub(orders) => {
                let mut results = Vec::new();
                for (order, before) in orders.iter().zip(&reals) {
                    let real = self.chunks.get_mut(&order.chunk).expect("a scrubbed chunk stays");
                    // Processes that could reach it then or now have written to it again.
                    if !bad && real.reach.is_empty() && before.reach.is_empty() {
                        real.content = None;
                    }
                    results.push((order.chunk, !bad));
                }
                (TaskOutcome::Scrubbed(results), Vec::new())
            }
            Task::Release(_) => {
                self.free += sum(&reals);
                (TaskOutcome::Released { free: self.free }, Vec::new())
            }
            Task::Take { leave, most } => {
                let made = mix(self.free.saturating_sub(leave).min(most));
                self.free -= made.iter().map(|class| class.bytes()).sum::<u64>();
                if self.free < UNIT {
                    self.dirt.clear();
                }
                (TaskOutcome::Taken { made: made.clone(), free: self.free }, made)
            }
            Task::Remake { into, .. } => {
                let bytes = sum(&reals);
                assert!(bytes.is_multiple_of(into.bytes()), "bytes are lost");
                let made = vec![into; usize::try_from(bytes / into.bytes()).expect("few chunks")];
                (TaskOutcome::Remade { made: made.clone(), free: self.free }, made)
            }
            Task::Move { .. } => {
                let mut made = Vec::new();
                for real in &reals {
                    let living = |id: &&WorkerId| self.processes.get(id).is_some_and(|one| !one.dead);
                    let holders: BTreeSet<WorkerId> = real.reach.iter().filter(living).copied().collect();
                    if bad && !holders.is_empty() {
                        self.held.push((real.class.bytes(), holders));
                    } else {
                        made.push(real.class);
                    }
                }
                let back = made.iter().map(|class| class.bytes()).sum();
                (TaskOutcome::Moved { back, made: made.clone(), free: self.free }, made)
            }
            Task::Measure => (TaskOutcome::Measured { free: self.free }, Vec::new()),
        };
        let ids = self.custody.finished(outcome);
        assert_eq!(ids.len(), made.len());
        for (id, class) in ids.into_iter().zip(made) {
            // Fresh memory may hold the bytes of any VM.
            let real = Real { class, content: Some(UNKNOWN), reach: BTreeSet::new() };
            assert!(self.chunks.insert(id, real).is_none(), "a chunk number is used twice");
        }
    }

    /// The driver does up to this many tasks, until there are no more than measurements.
    fn work(&mut self, tasks: usize) {
        let mut idle = 0;
        for number in 0..tasks {
            self.begin(number % 4 == 0);
            idle = if matches!(self.task, None | Some((Task::Measure, _))) { idle + 1 } else { 0 };
            if idle == 8 {
                break;
            }
            self.end(false);
            self.settle();
        }
        self.end(false);
    }

    fn die(&mut self, id: WorkerId) {
        let process = self.processes.get_mut(&id).expect("a process");
        process.dead = true;
        process.leases.clear();
        process.grows.clear();
        self.custody.worker_died(id, self.now);
    }

    /// The driver no longer lists a dead process: its memory is free.
    fn gone(&mut self, id: WorkerId) {
        let process = self.processes.remove(&id).expect("a dead process");
        self.free += process.driver;
        if process.driver > 0 {
            self.dirt.insert(process.vm);
        }
        let away = self.task.iter_mut().flat_map(|(_, reals)| reals);
        for real in self.chunks.values_mut().chain(away) {
            real.reach.remove(&id);
        }
        let (mut back, vm) = (0, process.vm);
        self.held.retain_mut(|(bytes, holders)| {
            holders.remove(&id);
            back += if holders.is_empty() { *bytes } else { 0 };
            !holders.is_empty()
        });
        if back > 0 {
            self.free += back;
            self.dirt.insert(vm);
        }
        self.custody.worker_gone(id);
    }

    fn pick(&self, index: u8, dead: bool) -> Option<WorkerId> {
        let of: Vec<WorkerId> =
            self.processes.iter().filter(|(_, one)| one.dead == dead).map(|(id, _)| *id).collect();
        of.get(usize::from(index) % of.len().max(1)).copied()
    }

    /// A worker sends a request, as the server loop passes it on.
    fn request(&mut self, id: WorkerId, request: CustodyRequest) {
        assert_eq!(CustodyRequest::decode(&request.encode()), Ok(request), "another request arrives");
        if !self.custody.listens(id) {
            return;
        }
        let process = self.processes.get_mut(&id).expect("a process");
        match request {
            CustodyRequest::Give { lease } => drop(process.leases.remove(&lease)),
            CustodyRequest::Grow { serial, bytes, .. } => drop(process.grows.insert(serial, bytes)),
            CustodyRequest::Share { .. } => {
                self.shares += 1;
                self.custody.set_next_share(self.shares);
            }
            _ => {}
        }
        let _ = self.custody.exceeds(id, &request);
        self.custody.request(id, request, self.now);
    }

    /// A request whose values have a meaning, most of the time.
    fn asked(&self, id: WorkerId, input: &mut Input<'_>) -> Option<CustodyRequest> {
        let leases = &self.processes[&id].leases;
        let kind = input.byte();
        let value = input.byte();
        let lease = leases.keys().nth(usize::from(value) % leases.len().max(1)).copied();
        let serial = u64::from(value % 16);
        Some(match kind % 16 {
            0..=3 => CustodyRequest::Take { serial, bytes: CLASSES[usize::from(kind / 16) % 3] },
            4 => CustodyRequest::Take { serial, bytes: bytes(input) },
            5 => CustodyRequest::Give { lease: lease? },
            6 => CustodyRequest::Give { lease: value.into() },
            7 => CustodyRequest::Idle { bytes: bytes(input) },
            8 => CustodyRequest::Grow {
                serial,
                reason: u32::from(kind / 16) % 5,
                bytes: bytes(input),
                spent: bytes(input),
            },
            9 => CustodyRequest::Grown { serial },
            10 => CustodyRequest::Share { serial, share: u128::from(kind / 16) % 4, lease: lease? },
            11 => CustodyRequest::Open { serial, share: u128::from(kind / 16) % 8 },
            12 => CustodyRequest::Unshare { share: value.into() },
            13 => match value % 2 {
                0 => CustodyRequest::Pin { serial, bytes: bytes(input) },
                _ => CustodyRequest::Unpin { bytes: bytes(input) },
            },
            14 => CustodyRequest::Shrunk { reason: u32::from(kind / 16) % 5, bytes: bytes(input) },
            _ => match value % 4 {
                0 => CustodyRequest::Process { serial, index: u32::from(kind / 16) },
                1 => CustodyRequest::Hello { process: value.into() },
                _ => CustodyRequest::decode(&input.array::<{ control::BYTES }>()).ok()?,
            },
        })
    }

    fn act(&mut self, operation: u8, input: &mut Input<'_>) {
        let key = |byte: u8| VmKey { vm: u32::from(byte % 3) + 1, epoch: u64::from(byte / 3 % 2) + 1 };
        match operation {
            0..=127 => {
                let Some(id) = self.pick(operation, false) else { return };
                if let Some(request) = self.asked(id, input) {
                    self.request(id, request);
                }
            }
            128..=159 => self.begin(operation % 4 == 0),
            160..=191 => self.end(operation == 191),
            192..=207 => self.start(key(operation - 192)),
            208..=215 => {
                let (vm, limit) = (key(operation - 208), bytes(input));
                self.vm(vm, limit);
            }
            216..=219 => {
                // Never below the used bytes, as sluiced promises.
                self.escrow = bytes(input).max(self.custody.ledger().ancestor(1).0);
                self.custody.command(ToArbiter::Escrow { ancestor: 1, bytes: self.escrow }, self.now);
            }
            220 | 221 => {
                let VmKey { vm, epoch } = key(input.byte());
                let fence = operation == 220;
                let message =
                    if fence { ToArbiter::Fence { vm, epoch } } else { ToArbiter::Forget { vm, epoch } };
                self.custody.command(message, self.now);
            }
            222..=231 => {
                if let Some(id) = self.pick(input.byte(), false) {
                    self.die(id);
                }
            }
            232..=241 => {
                if let Some(id) = self.pick(input.byte(), true) {
                    self.gone(id);
                }
            }
            242..=245 => {
                for (id, process) in self.processes.iter().filter(|(_, process)| !process.dead) {
                    self.custody.set_booked(*id, Some(process.driver), self.now, self.now);
                }
                self.custody.judge();
            }
            246 => {
                if let Some(id) = self.pick(input.byte(), false) {
                    self.custody.worker_left(id);
                }
            }
            247 => {
                let unconfirmed: Vec<WorkerId> = self.custody.unconfirmed().map(|(id, _)| id).collect();
                unconfirmed.into_iter().for_each(|id| self.custody.still_listed(id, self.now));
            }
            248 => {
                let vm = u32::from(input.byte()) % 4;
                self.custody.command(ToArbiter::DescribeVm { serial: 1, vm }, self.now);
            },
            249 => self.custody.command(ToArbiter::DescribeUnit { serial: 1 }, self.now),
            250 => {
                let bits = input.byte();
                self.custody.set_figures(bits & 1 != 0, bits & 2 != 0);
            }
            251 => drop(self.custody.watch_growth(self.now)),
            _ => self.now += u64::from(input.byte()) * 16,
        }
    }

    /// All processes end and all tasks are done: no charge is left, and all memory in custody is clean.
    fn finish(mut self) {
        while let Some(id) = self.pick(0, false) {
            self.die(id);
            self.settle();
        }
        assert_eq!(self.custody.ledger().totals().1, 0, "a charge is left after all deaths");
        while let Some(id) = self.pick(0, true) {
            self.gone(id);
            self.settle();
        }
        self.end(false);
        self.work(300);
        assert!(self.held.is_empty());
        for (_, account) in self.custody.ledger().accounts() {
            let left = [account.lent, account.kept, account.driver, account.idle, account.pinned];
            assert_eq!(left, [0; 5], "a charge is left");
        }
        for (id, real) in &self.chunks {
            match self.custody.chunks().get(*id).expect("a chunk of the model").state {
                ChunkState::Clean => assert!(real.content.is_none(), "a clean chunk has bytes of a VM"),
                state => assert_eq!(state, ChunkState::Suspect, "not clean after everything was scrubbed"),
            }
        }
    }
}

fuzz_target!(|program: &[u8]| {
    let mut input = Input(program);
    let Some(total) = input.next() else { return };
    let mut world = World::new(TOTALS[usize::from(total) % TOTALS.len()]);
    for _ in 0..OPERATIONS {
        let Some(operation) = input.next() else { break };
        world.act(operation, &mut input);
        world.settle();
    }
    world.finish();
});
