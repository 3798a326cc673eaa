//! A VM whose workers do whatever the protocol allows, beside other VMs: they are served in time.

use super::*;

/// A grant or a loan, with its time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Answered {
    Granted(Millis, WorkerId, u64),
    Lent(Millis, WorkerId, u64),
    Refused(Millis, WorkerId, u64),
}

/// A unit, and the answers that its workers got.
struct Unit {
    world: World,
    answered: Vec<Answered>,
    told: Vec<(Millis, FromArbiter)>,
    /// The largest number of effects of one turn.
    most: usize,
}

impl Unit {
    fn new(total: u64) -> Unit {
        Unit { world: begun(total), answered: Vec::new(), told: Vec::new(), most: 0 }
    }

    fn worker(&mut self, vm: u32) -> WorkerId {
        let id = WorkerId(self.world.next_worker);
        self.world.act(&Op::Worker { vm, epoch: 1 });
        id
    }

    fn request(&mut self, id: WorkerId, request: impl FnOnce(u64) -> CustodyRequest) -> u64 {
        let serial = self.world.serial();
        let request = request(serial);
        if let CustodyRequest::Give { lease } = request {
            self.world.workers.get_mut(&id).unwrap().leases.remove(&lease);
        }
        self.world.custody.request(id, request, self.world.now);
        serial
    }

    fn take(&mut self, id: WorkerId, bytes: u64) -> u64 {
        self.request(id, |serial| CustodyRequest::Take { serial, bytes })
    }

    /// Requests growth of an image of this many bytes.
    fn grow(&mut self, id: WorkerId, bytes: u64) -> u64 {
        self.request(id, |serial| CustodyRequest::Grow { serial, reason: 1, bytes, spent: 0 })
    }

    fn grown(&mut self, id: WorkerId, serial: u64) {
        self.request(id, |_| CustodyRequest::Grown { serial });
    }

    /// One turn of the server loop. Returns the time at which the next one is due.
    fn turn(&mut self) -> Option<Millis> {
        let now = self.world.now;
        let waiters = self.world.custody.serve_waiters(now);
        let due = waiters.into_iter().chain(self.world.custody.serve_growth(now)).min();
        self.most = self.most.max(self.world.custody.effects());
        while let Some(effect) = self.world.custody.effect() {
            match effect {
                Effect::Lend { worker, serial, lease, chunk, bytes, .. } => {
                    self.world.lend(worker, lease, chunk, bytes);
                    self.answered.push(Answered::Lent(now, worker, serial));
                }
                Effect::Answer { worker, answer: CustodyAnswer::Granted { serial, .. } } => {
                    self.answered.push(Answered::Granted(now, worker, serial));
                }
                Effect::Answer { worker, answer: CustodyAnswer::Refused { serial, .. } } => {
                    self.answered.push(Answered::Refused(now, worker, serial));
                }
                Effect::Tell(message) => self.told.push((now, message)),
                Effect::Kill { worker } => self.world.workers.get_mut(&worker).unwrap().ended = true,
                Effect::Answer { .. } => {}
            }
        }
        self.world.begin();
        self.world.end();
        self.world.check();
        due
    }

    /// Lets some milliseconds pass, with turns as the server loop has them.
    fn pass(&mut self, millis: Millis) {
        for _ in 0..millis {
            (0..4).for_each(|_| _ = self.turn());
            self.world.now += 1;
        }
    }

    fn granted(&self, serial: u64) -> Option<Millis> {
        self.answered.iter().find_map(|answered| match *answered {
            Answered::Granted(at, _, granted) if granted == serial => Some(at),
            _ => None,
        })
    }

    fn lent(&self, serial: u64) -> Option<Millis> {
        self.answered.iter().find_map(|answered| match *answered {
            Answered::Lent(at, _, lent) if lent == serial => Some(at),
            _ => None,
        })
    }

    /// Takes all memory for a worker.
    fn take_all(&mut self, id: WorkerId) {
        for bytes in CLASS_BYTES.into_iter().rev() {
            loop {
                let serial = self.take(id, bytes);
                while !self.answered.iter().any(|answered| {
                    matches!(*answered, Answered::Lent(_, _, is) | Answered::Refused(_, _, is) if is == serial)
                }) {
                    self.pass(10);
                }
                if self.lent(serial).is_none() {
                    break;
                }
            }
        }
    }

    fn give_all(&mut self, id: WorkerId) {
        let leases: Vec<u64> = self.world.workers[&id].leases.keys().copied().collect();
        for lease in leases {
            self.request(id, |_| CustodyRequest::Give { lease });
        }
    }
}

/// A worker that always has a grant: it requests the next one each second, and ends the last one when it has that.
struct Chain {
    worker: WorkerId,
    held: Option<u64>,
    next: Option<u64>,
    asked: Millis,
}

impl Chain {
    fn new(unit: &mut Unit, worker: WorkerId) -> Chain {
        let next = Some(unit.grow(worker, 0));
        Chain { worker, held: None, next, asked: unit.world.now }
    }

    fn step(&mut self, unit: &mut Unit) {
        if self.next.is_some_and(|next| unit.granted(next).is_some())
            && let Some(held) = core::mem::replace(&mut self.held, self.next.take())
        {
            unit.grown(self.worker, held);
        }
        if self.next.is_none() && unit.world.now >= self.asked + 1_000 {
            self.next = Some(unit.grow(self.worker, 0));
            self.asked = unit.world.now;
        }
    }
}

// Promise: Q30
#[test]
fn memory_changes_vm_within_three_seconds_beside_endless_grants_of_a_third_vm() {
    let mut unit = Unit::new(358 * MIB);
    let (chained, taker, giver) = (unit.worker(1), unit.worker(2), unit.worker(3));
    let mut chain = Chain::new(&mut unit, chained);
    unit.pass(10);
    unit.take_all(giver);
    unit.give_all(giver);
    for _ in 0..150 {
        unit.pass(10);
        chain.step(&mut unit);
    }
    let (asked, serial) = (unit.world.now, unit.take(taker, 32 * MIB));
    for _ in 0..300 {
        unit.pass(10);
        chain.step(&mut unit);
    }
    let lent = unit.lent(serial).map(|at| at - asked);
    println!("a chunk that VM 3 had was lent to VM 2 after {lent:?} ms");
    assert!(lent.is_some_and(|after| after <= 3_000), "{lent:?}");
    // The memory of a fenced VM gets clean, too.
    unit.world.custody.command(ToArbiter::Fence { vm: 3, epoch: 1 }, unit.world.now);
    let workers: Vec<WorkerId> =
        unit.world.workers.iter().filter(|(_, w)| w.vm.vm == 3).map(|(id, _)| *id).collect();
    for id in workers {
        unit.world.die(id);
        unit.world.gone(id);
    }
    let fenced = unit.world.now;
    let dirty = |unit: &mut Unit| {
        unit.told.clear();
        unit.world.custody.command(ToArbiter::DescribeVm { serial: 1, vm: 3 }, unit.world.now);
        unit.pass(10);
        let dirty = unit.told.iter().find_map(|(_, told)| match told {
            FromArbiter::Vm { dirty, holders, .. } => Some((*dirty, *holders)),
            _ => None,
        });
        dirty.expect("the arbiter describes VM 3")
    };
    while dirty(&mut unit) != (0, 0) {
        chain.step(&mut unit);
        assert!(unit.world.now - fenced < 5_000, "{:?} of VM 3 is not clean", dirty(&mut unit));
    }
    assert!(
        unit.granted(chain.held.unwrap()).is_some_and(|at| at + 5_000 > unit.world.now),
        "the chain goes on"
    );
}

// Promise: Q30
#[test]
fn drivers_grow_beside_endless_grants_and_endless_moves_of_memory() {
    let mut unit = Unit::new(358 * MIB);
    let (chained, grows) = (unit.worker(1), unit.worker(1));
    let mut chain = Chain::new(&mut unit, chained);
    unit.pass(10);
    // Two VMs that take all memory from each other, again and again.
    let movers = [unit.worker(2), unit.worker(3)];
    let (mut waits, mut asked, mut longest, mut count) = (None, 0, 0, 0);
    for round in 0..4_000_usize {
        unit.pass(5);
        chain.step(&mut unit);
        let mover = movers[round / 400 % 2];
        if round % 400 == 0 {
            unit.give_all(movers[(round / 400 + 1) % 2]);
        }
        unit.take(mover, 32 * MIB);
        match waits {
            None => {
                waits = Some(unit.grow(grows, 0));
                asked = unit.world.now;
            }
            Some(serial) => {
                if let Some(at) = unit.granted(serial) {
                    longest = longest.max(at - asked);
                    count += 1;
                    unit.grown(grows, serial);
                    waits = None;
                }
            }
        }
    }
    longest = longest.max(waits.map_or(0, |_| unit.world.now - asked));
    // The second mover gets only memory that the first one had.
    let moved =
        unit.answered.iter().filter(|is| matches!(is, Answered::Lent(_, id, _) if *id == movers[1])).count();
    println!("{count} grants in 20 s beside {moved} moved chunks; the longest waited {longest} ms");
    assert!(moved > 5, "memory changed its VM {moved} times");
    assert!(longest <= 4_000 && count > 10, "{count} grants; the longest waited {longest} ms");
}

// Promise: Q30
#[test]
fn drivers_grow_in_memory_that_living_workers_of_another_vm_gave_back() {
    let mut unit = Unit::new(358 * MIB);
    let (chained, grows, giver) = (unit.worker(1), unit.worker(2), unit.worker(3));
    unit.pass(10);
    unit.take_all(giver);
    unit.give_all(giver);
    let (mut chain, mut longest) = (Chain::new(&mut unit, chained), 0);
    for beside_a_chain in [false, true] {
        for _ in 0..8 {
            let (asked, serial) = (unit.world.now, unit.grow(grows, 16 * MIB));
            while !unit.answered.iter().any(|answered| {
                matches!(*answered, Answered::Granted(_, _, is) | Answered::Refused(_, _, is) if is == serial)
            }) {
                unit.pass(10);
                if beside_a_chain {
                    chain.step(&mut unit);
                }
            }
            assert!(unit.granted(serial).is_some(), "refused after {} ms", unit.world.now - asked);
            longest = longest.max(unit.world.now - asked);
            unit.grown(grows, serial);
        }
    }
    println!("the longest of 16 grants took {longest} ms");
    assert!(longest <= 4_000, "{longest} ms");
}

// Promise: Q30
#[test]
fn requests_of_512_growing_workers_are_answered_in_bounded_turns() {
    let mut unit = Unit::new(2200 * MIB);
    let crowd: Vec<WorkerId> = (0..limits::SESSIONS).map(|_| unit.worker(1)).collect();
    let one = unit.worker(2);
    unit.pass(1);
    let mut serials = Vec::new();
    for _ in 0..limits::GROWTHS {
        serials.extend(crowd.iter().map(|id| unit.grow(*id, 0)));
    }
    let serial = unit.grow(one, 0);
    unit.most = 0;
    let started = Instant::now();
    unit.turn();
    let took = started.elapsed();
    (0..20).for_each(|_| _ = unit.turn());
    assert!(unit.granted(serial).is_some(), "VM 2 is not behind the {} requests of VM 1", serials.len());
    unit.pass(2_000);
    println!(
        "a turn with {} requests took {took:?}; the most effects of a turn were {}",
        serials.len(),
        unit.most
    );
    assert!(unit.most <= 128, "{} effects in one turn", unit.most);
    let open = serials.iter().filter(|serial| unit.granted(**serial).is_none()).count();
    assert_eq!(open, 0, "every request is granted");
}

// Promise: Q30
#[test]
fn worker_with_more_growth_requests_than_an_honest_one_is_killed() {
    let mut unit = Unit::new(358 * MIB);
    let (greedy, honest) = (unit.worker(1), unit.worker(2));
    for number in 0..=limits::GROWTHS {
        unit.grow(honest, 0);
        unit.grow(greedy, 0);
        let ended = unit.world.custody.workers[&greedy].life == WorkerState::Ending;
        assert_eq!(ended, number == limits::GROWTHS, "after {} requests", number + 1);
        if number == limits::GROWTHS / 2 {
            // An honest worker ends its grants.
            unit.pass(1);
            let granted: Vec<u64> = unit
                .answered
                .iter()
                .filter_map(|answered| match *answered {
                    Answered::Granted(_, id, serial) if id == honest => Some(serial),
                    _ => None,
                })
                .collect();
            granted.into_iter().for_each(|serial| unit.grown(honest, serial));
        }
    }
    assert_eq!(unit.world.custody.workers[&honest].life, WorkerState::Alive);
}

// Promise: Q25
#[test]
fn escrow_is_requested_once_in_500_ms_with_the_largest_bytes() {
    let mut unit = Unit::new(358 * MIB);
    unit.world.act(&Op::Escrow(0));
    let crowd: Vec<WorkerId> = (0..20).map(|index| unit.worker(1 + index % 2)).collect();
    for (index, id) in crowd.iter().enumerate() {
        unit.grow(*id, (index as u64 + 1) * 8 * MIB);
        unit.take(*id, 2 * MIB);
    }
    unit.told.clear();
    let began = unit.world.now;
    for _ in 0..100 {
        unit.pass(10);
        // `sluiced` has no more to give.
        unit.world.custody.command(ToArbiter::Escrow { ancestor: 1, bytes: 0 }, unit.world.now);
    }
    let wanted: Vec<(Millis, u64)> = unit
        .told
        .iter()
        .filter_map(|(at, told)| match told {
            FromArbiter::WantEscrow { ancestor: 1, bytes } => Some((*at - began, *bytes)),
            _ => None,
        })
        .collect();
    println!(
        "{} requests in a second, the first are {:?}",
        wanted.len(),
        wanted.iter().take(8).collect::<Vec<_>>()
    );
    assert!(wanted.len() <= 6, "{} requests in a second", wanted.len());
    let largest = wanted.iter().map(|(_, bytes)| *bytes).max();
    assert!(
        wanted.iter().any(|(at, bytes)| *at < 10 && Some(*bytes) == largest),
        "the largest is not put off"
    );
    assert!(wanted.iter().any(|(at, _)| *at >= 500), "it is repeated, because `sluiced` may have been away");
}

// Promise: Q31
#[test]
fn deaths_beside_an_open_grant_of_their_vm_delay_others_for_a_tenth_of_the_time() {
    let mut unit = Unit::new(2200 * MIB);
    let (holder, honest) = (unit.worker(1), unit.worker(2));
    let victims: Vec<WorkerId> = (0..40).map(|_| unit.worker(1)).collect();
    let mut chain = Chain::new(&mut unit, holder);
    unit.pass(10);
    let (mut waited, mut longest) = (0, 0);
    let began = unit.world.now;
    for victim in victims {
        // Always beside a grant that has just begun.
        while chain.next.is_some()
            || unit.granted(chain.held.unwrap()).is_none_or(|at| at + 100 < unit.world.now)
        {
            unit.pass(10);
            chain.step(&mut unit);
        }
        unit.world.die(victim);
        unit.world.gone(victim);
        let (asked, serial) = (unit.world.now, unit.grow(honest, 0));
        while unit.granted(serial).is_none() {
            unit.pass(1);
            assert!(unit.world.now - asked < 10_000, "its growth is not granted");
        }
        let after = unit.world.now - 1 - asked;
        unit.grown(honest, serial);
        (waited, longest) = (waited + after, longest.max(after));
    }
    let time = unit.world.now - began;
    println!("40 deaths in {time} ms delayed the growth of VM 2 for {waited} ms, at most {longest}");
    assert!(longest <= limits::DEATH_MILLISECONDS + 10, "{longest} ms");
    assert!(waited <= time / 10 + limits::DEATH_MILLISECONDS + 40 * 10, "{waited} of {time} ms");
}

// Promise: F83
#[test]
fn takers_that_wait_are_served_vm_by_vm_in_bounded_turns() {
    let mut unit = Unit::new(2200 * MIB);
    unit.world.act(&Op::Escrow(0));
    let crowd: Vec<WorkerId> = (0..16).map(|_| unit.worker(1)).collect();
    let one = unit.worker(2);
    unit.pass(1);
    for _ in 0..16 {
        crowd.iter().for_each(|id| _ = unit.take(*id, UNIT));
    }
    let serial = unit.take(one, UNIT);
    unit.pass(1);
    assert_eq!(unit.lent(serial), None, "there is no escrow");
    unit.world.escrow = u64::MAX;
    unit.world.custody.command(ToArbiter::Escrow { ancestor: 1, bytes: u64::MAX }, unit.world.now);
    unit.most = 0;
    let lent = |unit: &Unit| unit.answered.iter().filter(|is| matches!(is, Answered::Lent(..))).count();
    let before = lent(&unit);
    unit.turn();
    assert!(unit.lent(serial).is_some(), "VM 2 is not behind the takers of VM 1");
    assert!(unit.most <= 128 && lent(&unit) > before + 1, "{} effects in one turn", unit.most);
    unit.pass(500);
    assert_eq!(lent(&unit), before + 257, "every taker is served");
}

// Promise: Q28
#[test]
fn opening_a_share_costs_the_same_with_few_and_with_many_leases() {
    let chunks = 4_096;
    // A worker with this many leases besides opens a share of its last chunks, and gives them back.
    let time = |leases: usize| {
        let times = least_times(1, || {
            let mut custody = all_clean(leases);
            let id = add_vm(&mut custody, 1);
            for serial in 0..leases as u64 {
                custody.request(id, CustodyRequest::Take { serial, bytes: UNIT }, 0);
            }
            let lease = custody.next_lease - 1;
            let last = lease + 1 - chunks as u64..=lease;
            custody.set_next_share(7);
            custody.request(id, CustodyRequest::Share { serial: 0, share: 0, lease: *last.start() }, 0);
            for lease in last.clone().skip(1) {
                custody.request(id, CustodyRequest::Share { serial: 0, share: 7, lease }, 0);
            }
            while custody.effect().is_some() {}
            let started = Instant::now();
            custody.request(id, CustodyRequest::Open { serial: 1, share: 7 }, 0);
            last.for_each(|lease| custody.request(id, CustodyRequest::Give { lease }, 0));
            let took = started.elapsed();
            assert_eq!(custody.effects(), chunks, "each chunk is lent once more");
            assert_eq!(custody.check(), Ok(()));
            vec![took]
        });
        times[0]
    };
    let (few, many) = (time(chunks), time(16 * chunks));
    println!(
        "to open {chunks} chunks and give them back takes {few:?}, beside 15 times as many leases {many:?}"
    );
    if cfg!(debug_assertions) {
        sluice_skip::skip("the time is meaningful only in optimised code");
        return;
    }
    assert!(many < 6 * few, "{few:?} and {many:?}");
}
