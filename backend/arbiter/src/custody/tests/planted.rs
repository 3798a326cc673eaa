//! Planted contradictions, each of which the audit has to find: an audit that always found none would pass every
//! other test.

use super::*;
use crate::audit::Audit;

/// A VM with two workers: the first has a lease, the second has none.
fn world() -> (World, WorkerId, WorkerId) {
    let mut world = begun(358 * MIB);
    let (vm, epoch) = (1, 1);
    world.act(&Op::Worker { vm, epoch });
    let mut of_vm = world.workers.iter().filter(|(_, worker)| worker.vm == VmKey { vm, epoch });
    let (one, two) = (*of_vm.next().unwrap().0, *of_vm.next().unwrap().0);
    let take = CustodyRequest::Take { serial: 1, bytes: 2 * MIB };
    world.custody.request(one, take, world.now);
    for _ in 0..20 {
        world.act(&Op::Begin);
        world.act(&Op::End);
        world.settle();
    }
    assert_eq!(world.custody.workers[&one].leases.len(), 1, "it has its lease");
    (world, one, two)
}

// Promise: Q21
#[test]
fn custody_audit_finds_each_planted_contradiction() {
    type Plant = fn(&mut Custody, WorkerId, WorkerId);
    let planted: [(&str, Plant); 12] = [
        ("a chunk can be reached from two VMs", |custody, one, _| {
            custody.workers.get_mut(&one).unwrap().vm = VmKey { vm: 2, epoch: 1 };
        }),
        ("a chunk can be reached from two VMs", |custody, one, _| {
            custody.workers.remove(&one);
        }),
        ("a lease on no chunk", |custody, _, two| {
            custody.workers.get_mut(&two).unwrap().leases.insert(4711, ChunkId(u32::MAX));
        }),
        ("a worker's sum is not that of its leases", |custody, _, two| {
            custody.workers.get_mut(&two).unwrap().lent += UNIT;
        }),
        ("a worker's sum is not that of its leases", |custody, _, two| {
            custody.workers.get_mut(&two).unwrap().held += UNIT;
        }),
        ("a worker's numbers of leases on its chunks are not those of its leases", |custody, one, _| {
            let worker = custody.workers.get_mut(&one).unwrap();
            worker.imported.values_mut().for_each(|leases| *leases += 1);
        }),
        ("a chunk's number of leases is not that of its workers", |custody, one, _| {
            let worker = custody.workers.get_mut(&one).unwrap();
            worker.leases.clear();
            worker.imported.values_mut().for_each(|leases| *leases = 0);
            (worker.lent, worker.held) = (0, 0);
        }),
        ("a worker that ends is not listed, or one that does not is", |custody, _, two| {
            custody.ending.insert((VmKey { vm: 1, epoch: 1 }, two));
        }),
        ("a worker that ends is not listed, or one that does not is", |custody, _, two| {
            custody.workers.get_mut(&two).unwrap().life = WorkerState::Ending;
        }),
        ("a VM's grants are not those of its workers", |custody, _, two| {
            custody.workers.get_mut(&two).unwrap().granted += UNIT;
        }),
        ("the unit's sum is not that of its chunks", |custody, _, _| custody.ledger.grow(UNIT).unwrap()),
        ("a VM's sum is not that of its chunks", |custody, _, _| {
            custody.ledger.charge(VmKey { vm: 1, epoch: 1 }, UNIT).unwrap();
        }),
    ];
    for (expected, plant) in planted {
        let (mut world, one, two) = world();
        let mut audit = Audit::default();
        assert_eq!(audit.run(&world.custody, 0), None, "before it is planted");
        plant(&mut world.custody, one, two);
        assert_eq!(audit.run(&world.custody, 5), Some(Broken(expected)));
        assert_eq!(audit.run(&world.custody, 10), None, "{expected}: once");
    }
}
