use super::*;

const VM: VmKey = VmKey { vm: 1, epoch: 1 };

// Promise: Q21
#[test]
fn ledger_check_finds_each_planted_contradiction() {
    type Plant = fn(&mut Ledger, &mut HashMap<VmKey, u64>);
    const OTHER: VmKey = VmKey { vm: 2, epoch: 1 };
    let planted: [(&str, Plant); 11] = [
        ("the unit's sum is not that of its VMs", |ledger, _| ledger.lent += UNIT),
        ("the unit's sum is not that of its VMs", |ledger, _| {
            ledger.accounts.get_mut(&VM).unwrap().lent = u64::MAX;
            ledger.accounts.insert(OTHER, Account { lent: u64::MAX, ..Account::default() });
        }),
        ("the unit's sum is not that of its chunks", |ledger, _| ledger.capacity -= UNIT),
        ("a VM's sum is not that of its chunks", |_, lent| *lent.get_mut(&VM).unwrap() += UNIT),
        ("a VM's sum is not that of its chunks", |_, lent| lent.clear()),
        ("a VM's driver share is not that of its workers", |ledger, _| {
            ledger.set_driver(VM, 0, UNIT).unwrap();
        }),
        ("chunks are lent to an unknown VM", |_, lent| _ = lent.insert(OTHER, UNIT)),
        ("the sums over all VMs are not those of their accounts", |ledger, _| ledger.sums.promised += 1),
        ("the sums over all VMs are not those of their accounts", |ledger, _| {
            ledger.accounts.get_mut(&VM).unwrap().granted = 4 * UNIT;
        }),
        ("an ancestor's sum is not that of its VMs", |ledger, _| {
            ledger.ancestors.get_mut(&7).unwrap().used -= UNIT;
        }),
        ("an ancestor's sum is not that of its VMs", |ledger, _| {
            ledger.accounts.get_mut(&VM).unwrap().terms.ancestors = [0, 0];
        }),
    ];
    for (expected, plant) in planted {
        let mut ledger = Ledger::default();
        ledger.grow(4 * UNIT).unwrap();
        ledger.set_escrow(7, u64::MAX);
        let terms = MemoryTerms { limit: 4 * UNIT, ancestors: [7, 0], ..MemoryTerms::default() };
        ledger.set_terms(VM, terms).unwrap();
        ledger.charge(VM, 2 * UNIT).unwrap();
        ledger.set_driver(VM, 0, UNIT).unwrap();
        let mut lent = HashMap::from([(VM, 2 * UNIT)]);
        assert_eq!(
            ledger.check(&lent, &HashMap::from([(VM, UNIT)]), 4 * UNIT),
            Ok(()),
            "before it is planted"
        );
        plant(&mut ledger, &mut lent);
        assert_eq!(ledger.check(&lent, &HashMap::from([(VM, UNIT)]), 4 * UNIT), Err(Broken(expected)));
    }
}

// Promise: Q21
#[test]
fn sums_hold_when_a_vm_with_a_guarantee_is_closed_and_forgotten() {
    let mut ledger = Ledger::default();
    ledger.grow(4 * UNIT).unwrap();
    ledger.set_nominal(4 * UNIT);
    ledger.set_terms(VM, MemoryTerms { guaranteed: 3 * UNIT, ..MemoryTerms::default() }).unwrap();
    ledger.charge(VM, UNIT).unwrap();
    assert_eq!(ledger.spare(), UNIT);
    ledger.close(VM);
    ledger.close(VmKey { vm: 9, epoch: 1 });
    assert_eq!(ledger.spare(), 3 * UNIT, "nothing is kept for it any more");
    assert!(!ledger.forget(VM), "it has something");
    ledger.refund(VM, UNIT).unwrap();
    assert!(ledger.forget(VM) && !ledger.forget(VM));
    // An open account still has its guarantee in the sums.
    ledger.set_terms(VM, MemoryTerms { guaranteed: 3 * UNIT, ..MemoryTerms::default() }).unwrap();
    assert_eq!(ledger.spare(), UNIT);
    assert!(ledger.forget(VM));
    assert_eq!(ledger.spare(), 4 * UNIT);
    assert_eq!(ledger.check(&HashMap::new(), &HashMap::new(), 4 * UNIT), Ok(()));
}

// Promise: Q20
#[test]
fn ledger_sums_beyond_u64_are_refused_and_do_not_wrap() {
    let mut ledger = Ledger::default();
    ledger.grow(u64::MAX - 1).unwrap();
    assert!(ledger.grow(2).is_err());
    let terms =
        MemoryTerms { limit: u64::MAX, guaranteed: u64::MAX, ancestors: [7, 0], ..MemoryTerms::default() };
    ledger.set_terms(VM, terms).unwrap();
    ledger.set_terms(VmKey { vm: 2, epoch: 1 }, terms).unwrap();
    assert_eq!(ledger.spare(), 0, "what is guaranteed does not wrap either");
    ledger.set_escrow(7, u64::MAX);
    ledger.set_terms(VmKey { vm: 2, epoch: 1 }, MemoryTerms { guaranteed: 0, ..terms }).unwrap();
    ledger.charge(VM, UNIT).unwrap();
    assert!(matches!(ledger.charge(VM, u64::MAX), Err(LendRefusal::Limit(_))));
    assert!(matches!(ledger.charge(VM, u64::MAX - UNIT), Err(LendRefusal::Limit(_))));
    assert_eq!(ledger.account(VM).unwrap().lent, UNIT);
    assert!(ledger.pin(VM, u64::MAX));
    assert!(!ledger.pin(VM, 1));
    assert!(ledger.refund(VM, UNIT + 1).is_err());
    assert!(ledger.refund(VM, u64::MAX).is_err());
    assert!(ledger.set_terms(VM, MemoryTerms { ancestors: [8, 0], ..terms }).is_err(), "it has something");
    ledger.refund(VM, UNIT).unwrap();
    assert!(!ledger.forget(VM), "its pinned memory is not accounted for yet");
    ledger.unpin(VM, u64::MAX).unwrap();
    assert!(ledger.forget(VM));
}

// Promise: Q25
#[test]
fn memory_that_a_vm_keeps_counts_for_its_project_and_its_organisation() {
    let mut ledger = Ledger::default();
    ledger.grow(8 * UNIT).unwrap();
    ledger.set_escrow(7, 2 * UNIT);
    ledger.set_escrow(9, 4 * UNIT);
    let terms = MemoryTerms { limit: 8 * UNIT, ancestors: [7, 9], ..MemoryTerms::default() };
    ledger.set_terms(VM, terms).unwrap();
    let second = VmKey { vm: 2, epoch: 1 };
    ledger.set_terms(second, terms).unwrap();
    ledger.charge(VM, 2 * UNIT).unwrap();
    // A worker gives its chunks back, keeps them mapped, and their memory does not come back from the driver.
    ledger.refund(VM, 2 * UNIT).unwrap();
    ledger.shrink(2 * UNIT).unwrap();
    ledger.keep(VM, 2 * UNIT).unwrap();
    assert_eq!([7, 9].map(|id| ledger.ancestor(id).0), [2 * UNIT; 2]);
    assert_eq!(
        ledger.charge(second, UNIT),
        Err(LendRefusal::Ancestor(7, 3 * UNIT)),
        "the project has its sum"
    );
    let (lent, drivers) = (HashMap::new(), HashMap::new());
    assert_eq!(ledger.check(&lent, &drivers, 6 * UNIT), Ok(()));
    assert!(ledger.set_terms(VM, MemoryTerms { ancestors: [7, 8], ..terms }).is_err(), "it keeps memory");
    ledger.release(VM, UNIT).unwrap();
    ledger.charge(second, UNIT).unwrap();
    assert_eq!([7, 9].map(|id| ledger.ancestor(id).0), [2 * UNIT; 2]);
    ledger.release(VM, UNIT).unwrap();
    assert!(ledger.release(VM, UNIT).is_err(), "it keeps no more");
    assert_eq!([7, 9].map(|id| ledger.ancestor(id).0), [UNIT; 2]);
    assert_eq!(ledger.check(&HashMap::from([(second, UNIT)]), &drivers, 6 * UNIT), Ok(()));
}
