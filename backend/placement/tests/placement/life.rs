//! The life of a unit: reservation, creation, destruction; and adoption after a restart.

use std::sync::Arc;
use std::time::Duration;

use sluice_placement::fleet::MAX_GPUS;
use sluice_placement::{
    AdminState, Decision, DestructionAnswer, Division, Fleet, Foreign, Geometry, Highest, InstanceIdentity,
    ListedInstance, Occupation, Partition, PlanError, PlanGpu, Policy, RecordPhase, Request, Rules,
    SlicePlacement, Step, UnitId, UnitPhase, UnitRecord, VmId,
};

use crate::geometries::geometry;

const SECOND: Duration = Duration::from_secs(1);

pub(crate) fn uuid(number: u8) -> [u8; 16] {
    [number; 16]
}

pub(crate) fn mig_gpu(number: u8, geometry: &Arc<Geometry>) -> PlanGpu {
    PlanGpu::new(uuid(number), None, Division::Mig(geometry.clone()))
}

pub(crate) fn fleet(gpus: u8) -> Fleet {
    let geometry = Arc::new(geometry("h200-141"));
    Fleet::new(Rules::default(), (0..gpus).map(|number| mig_gpu(number, &geometry)).collect())
}

pub(crate) fn of_profile(vm: u64, profile: u32) -> Request {
    Request { policy: Policy::Mig, profile: Some(profile), ..Request::new(VmId(vm), 1) }
}

pub(crate) fn identity(instance: u32) -> InstanceIdentity {
    InstanceIdentity {
        instance,
        compute_instance: 0,
        uuid: uuid(100 + u8::try_from(instance % 100).unwrap_or(0)),
    }
}

fn make(fleet: &mut Fleet, vm: u64, profile: u32, instance: u32) -> UnitId {
    let (unit, _) = fleet.place(&of_profile(vm, profile)).expect("a place");
    fleet.created(unit, Some(identity(instance))).expect("created");
    fleet.proven_clean(unit).expect("proven");
    unit
}

/// The driver's list if exactly these records exist.
fn listed(record: &UnitRecord) -> ListedInstance {
    let Partition::Instance { profile, placement } = record.partition else { panic!("an instance") };
    let identity = record.identity.clone().unwrap_or(identity(77));
    ListedInstance {
        gpu: record.gpu,
        instance: identity.instance,
        compute_instance: Some(identity.compute_instance),
        uuid: Some(identity.uuid),
        profile,
        placement,
        compute_slices: 1,
    }
}

// Promise: P6
#[test]
fn slices_are_held_from_the_reservation_until_the_instance_is_gone() {
    let mut fleet = fleet(1);
    let (unit, decision) = fleet.place(&of_profile(1, 0)).expect("the whole GPU");
    assert!(matches!(decision, Decision::Open { gpu: 0, .. }));
    let full = fleet.gpus()[0].state().occupied();
    assert_eq!(full, 0xff);

    // No VM gets into it, in any phase; steps out of turn are refused and change nothing.
    let taken = |fleet: &mut Fleet| {
        assert!(fleet.place(&of_profile(2, 19)).is_err());
        assert_eq!(fleet.reserve(&of_profile(2, 0), decision), Err(PlanError::Taken));
        assert_eq!(fleet.gpus()[0].state().occupied(), full);
    };
    taken(&mut fleet);
    assert_eq!(fleet.proven_clean(unit), Err(PlanError::Phase));
    assert_eq!(fleet.created(unit, None), Err(PlanError::Phase));
    let epoch = fleet.created(unit, Some(identity(1))).expect("created");
    assert_eq!(fleet.created(unit, Some(identity(1))), Err(PlanError::Phase));
    assert_eq!(fleet.abandon(unit), Err(PlanError::Phase));
    taken(&mut fleet);
    assert_eq!(fleet.unit(unit).map(|unit| unit.phase.clone()), Some(UnitPhase::Unproven));
    fleet.proven_clean(unit).expect("proven");
    assert_eq!(fleet.close(unit, SECOND), Err(PlanError::InUse));
    assert_eq!(fleet.leave(VmId(1)), Ok(Some(unit)));
    assert_eq!(fleet.close(unit, SECOND), Ok(false));
    taken(&mut fleet);
    assert_eq!(fleet.closing_answer(unit, SECOND, DestructionAnswer::Gone), Ok(Step::DestroyInstance));
    taken(&mut fleet);
    assert_eq!(fleet.closing_answer(unit, SECOND, DestructionAnswer::Gone), Ok(Step::Gone));
    assert_eq!(fleet.gpus()[0].state(), &Occupation::default());

    // The same UUID comes back, but not the epoch, nor the number of the unit.
    let (again, _) = fleet.place(&of_profile(1, 0)).expect("the whole GPU again");
    assert_ne!(again, unit);
    assert!(fleet.created(again, Some(identity(1))).expect("created") > epoch);
}

// Promise: P6
#[test]
fn abandoned_creation_frees_its_slices_and_its_vm() {
    let mut fleet = fleet(2);
    let (unit, _) = fleet.place(&of_profile(1, 9)).expect("a place");
    assert_eq!(fleet.abandon(unit), Ok(vec![VmId(1)]));
    assert!(fleet.home(VmId(1)).is_none() && fleet.unit(unit).is_none());
    assert!(fleet.gpus().iter().all(|gpu| *gpu.state() == Occupation::default()));
    assert_eq!(fleet.abandon(unit), Err(PlanError::UnknownUnit));
    assert!(fleet.consistent());
}

// Promise: P7
#[test]
fn quarantined_instance_keeps_its_slices_until_an_audit_sees_it_go() {
    let mut fleet = fleet(1);
    let unit = make(&mut fleet, 1, 9, 3);
    let occupied = fleet.gpus()[0].state().occupied();
    fleet.leave(VmId(1)).expect("left");
    fleet.close(unit, Duration::ZERO).expect("closing");
    let mut now = Duration::ZERO;
    loop {
        match fleet.closing_step(unit, now).expect("closing") {
            Step::WaitUntil(then) => now = then,
            Step::Quarantined => break,
            _ => drop(fleet.closing_answer(unit, now, DestructionAnswer::InUse).expect("closing")),
        }
    }
    assert_eq!(now, Duration::from_secs(10));
    assert_eq!(fleet.gpus()[0].state().occupied(), occupied);
    assert_eq!(fleet.records()[0].phase, RecordPhase::Quarantined);
    assert!(fleet.place(&of_profile(2, 0)).is_err());
    assert_eq!(fleet.audit_closing(now), [unit]);
    fleet.closing_answer(unit, now, DestructionAnswer::Gone).expect("compute instance");
    fleet.closing_answer(unit, now, DestructionAnswer::Gone).expect("instance");
    assert_eq!(fleet.gpus()[0].state(), &Occupation::default());
    assert!(fleet.audit_closing(now).is_empty());
}

// Promise: P8
#[test]
fn restart_adopts_recorded_instances_and_treats_others_as_foreign() {
    let mut before = fleet(2);
    let ready = make(&mut before, 1, 9, 1);
    let lost = make(&mut before, 2, 14, 2);
    let closing = make(&mut before, 3, 19, 3);
    before.leave(VmId(3)).expect("left");
    before.close(closing, SECOND).expect("closing");
    let (unfinished, _) = before.place(&of_profile(4, 15)).expect("a place");
    let records = before.records();
    let record = |unit| records.iter().find(|record| record.unit == unit).expect("a record");

    // The closing one has lost its compute instance; a foreign one was made; one is gone.
    let half_gone = ListedInstance { compute_instance: None, uuid: None, ..listed(record(closing)) };
    let others = ListedInstance {
        gpu: uuid(1),
        instance: 5,
        compute_instance: Some(0),
        uuid: Some(uuid(9)),
        profile: 9,
        placement: SlicePlacement { start: 0, size: 4 },
        compute_slices: 3,
    };
    let list = [others, listed(record(ready)), half_gone, listed(record(unfinished))];
    let mut after = fleet(2);
    let matches = after.adopt(&records, &list, before.highest(), SECOND).expect("adopted");
    assert_eq!(matches.adopted.iter().map(|pair| pair.1).collect::<Vec<_>>(), [1, 2]);
    assert_eq!(matches.unconfirmed.iter().map(|pair| pair.1).collect::<Vec<_>>(), [3]);
    assert_eq!(matches.foreign, [0]);
    assert_eq!(matches.lost.iter().map(|at| records[*at].unit).collect::<Vec<_>>(), [lost]);
    assert!(after.consistent());

    // Adopted under a new epoch, with its VM; the closing one goes on closing; foreign slices are taken.
    let highest = before.highest().epoch;
    assert!(after.units().all(|unit| unit.epoch > highest));
    assert_eq!(after.unit(ready).map(|unit| unit.phase.clone()), Some(UnitPhase::Ready));
    assert_eq!(after.closing_step(closing, SECOND), Ok(Step::DestroyCompute));
    after.rejoin(ready, of_profile(1, 9), false).expect("the VM is back");
    assert_eq!(after.home(VmId(1)), Some(ready));
    let kept = listed(record(unfinished)).placement.mask();
    assert_eq!(after.gpus()[1].state().occupied(), 0x0f | kept, "theirs, and the unconfirmed one");
    assert_eq!(after.gpus()[1].foreign().len(), 2);
    assert!(after.units().all(|unit| unit.gpu == 0));
    // Numbers go on from the highest.
    let (new, _) = after.place(&of_profile(9, 19)).expect("a place");
    assert!(new.0 > before.highest().unit);
}

// Promise: P8
#[test]
fn instance_that_differs_from_its_record_in_one_field_is_foreign() {
    let mut before = fleet(1);
    make(&mut before, 1, 9, 1);
    let records = before.records();
    let ours = listed(&records[0]);
    let resembling = [
        ListedInstance { gpu: uuid(1), ..ours },
        ListedInstance { instance: 2, ..ours },
        ListedInstance { uuid: Some(uuid(0)), ..ours },
        ListedInstance { uuid: None, compute_instance: None, ..ours },
        ListedInstance { compute_instance: Some(1), ..ours },
        ListedInstance { profile: 5, ..ours },
        ListedInstance { placement: SlicePlacement { start: 0, size: 4 }, ..ours },
    ];
    for other in resembling {
        let mut after = fleet(2);
        let matches = after.adopt(&records, &[other], before.highest(), SECOND).expect("adopted");
        assert_eq!((matches.adopted.len(), matches.lost.len()), (0, 1), "{other:?}");
        assert_eq!((matches.foreign, after.units().count()), (vec![0], 0), "{other:?}");
        let gpu = usize::from(other.gpu[0]);
        assert_eq!(after.gpus()[gpu].state().occupied(), other.placement.mask());
    }
    // An instance is adopted once, however often it was recorded.
    let twice = [records[0].clone(), records[0].clone()];
    let mut after = fleet(1);
    let matches = after.adopt(&twice, &[ours], before.highest(), SECOND).expect("adopted");
    assert_eq!((matches.adopted.len(), matches.lost.len(), after.units().count()), (1, 1, 1));
    let twice = after.adopt(&records, &[ours, ours], Highest::default(), SECOND);
    assert!(matches!(twice, Err(PlanError::Listed(_))));
}

// Promise: P8
#[test]
fn gpu_with_overlapping_foreign_instances_is_quarantined() {
    // Two foreign instances that overlap: this GPU gets nothing new, the other one does.
    let overlap = |instance, size| ListedInstance {
        gpu: uuid(0),
        instance,
        compute_instance: None,
        uuid: None,
        profile: 9,
        placement: SlicePlacement { start: 0, size },
        compute_slices: 1,
    };
    let mut fleet = fleet(2);
    fleet.adopt(&[], &[overlap(1, 4), overlap(2, 8)], Highest::default(), SECOND).expect("adopted");
    assert_eq!(fleet.gpus()[0].admin_state, AdminState::Quarantined);
    assert!(matches!(fleet.decide(&of_profile(1, 19)), Ok(Decision::Open { gpu: 1, .. })));
    assert!(fleet.consistent());

    // A foreign instance reported in place of ours is refused, and the previous list stays.
    make(&mut fleet, 1, 0, 1);
    let foreign = |start, size, compute_slices| Foreign {
        instance: 8,
        profile: None,
        placement: SlicePlacement { start, size },
        compute_slices,
    };
    assert!(matches!(fleet.set_foreign(1, vec![foreign(3, 1, 1)]), Err(PlanError::Geometry(_))));
    assert!(fleet.gpus()[1].foreign().is_empty());
    for absurd in
        [foreign(7, 2, 1), foreign(255, 1, 1), foreign(0, 255, 1), foreign(0, 0, 1), foreign(0, 1, 8)]
    {
        assert!(matches!(fleet.set_foreign(1, vec![absurd]), Err(PlanError::Geometry(_))), "{absurd:?}");
    }
    assert_eq!(fleet.set_foreign(7, vec![]), Err(PlanError::UnknownGpu));
    let geometry = Arc::new(geometry("a30-24"));
    let many: Vec<PlanGpu> = (0..100).map(|number| mig_gpu(number, &geometry)).collect();
    assert_eq!(Fleet::new(Rules::default(), many).gpus().len(), MAX_GPUS);
}

// Promise: P8
#[test]
fn whole_gpu_is_adopted_after_a_restart_unless_its_mode_changed() {
    let whole = || Division::Whole { memory_bytes: 1 << 36, multiprocessors: 132 };
    let plan = |division: Division| Fleet::new(Rules::default(), vec![PlanGpu::new(uuid(0), None, division)]);
    let mut before = plan(whole());
    let (unit, decision) = before.place(&Request::new(VmId(1), 1 << 30)).expect("a place");
    assert_eq!(decision, Decision::Open { gpu: 0, partition: Partition::Whole, shared: true });
    before.created(unit, None).expect("in service");
    let records = before.records();

    let mut after = plan(whole());
    let matches = after.adopt(&records, &[], before.highest(), SECOND).expect("adopted");
    assert!(matches.lost.is_empty());
    assert_eq!(after.unit(unit).map(|unit| unit.partition), Some(Partition::Whole));
    let mut after = plan(Division::Mig(Arc::new(geometry("h200-141"))));
    let matches = after.adopt(&records, &[], before.highest(), SECOND).expect("adopted");
    assert_eq!((matches.lost.len(), after.units().count()), (1, 0));
}

// Promise: P6
#[test]
fn gpu_changes_its_mode_only_while_it_is_empty() {
    let mut fleet = fleet(1);
    let whole = Division::Whole { memory_bytes: 1 << 36, multiprocessors: 132 };
    let unit = make(&mut fleet, 1, 9, 1);
    assert_eq!(fleet.set_division(0, whole.clone()), Err(PlanError::InUse));
    fleet.leave(VmId(1)).expect("left");
    fleet.close(unit, SECOND).expect("closing");
    assert_eq!(fleet.set_division(0, whole.clone()), Err(PlanError::InUse));
    for _ in 0..2 {
        fleet.closing_answer(unit, SECOND, DestructionAnswer::Gone).expect("closing");
    }
    assert_eq!(fleet.set_division(0, whole.clone()), Ok(()));
    assert_eq!(fleet.set_division(1, whole), Err(PlanError::UnknownGpu));
    let decision = fleet.decide(&Request::new(VmId(1), 1 << 30));
    assert_eq!(decision, Ok(Decision::Open { gpu: 0, partition: Partition::Whole, shared: true }));
}

// Promise: P1
#[test]
fn geometry_is_replaced_only_if_existing_instances_have_a_place_in_it() {
    // Some drivers report no places for a profile of which no more fits.
    let full = Arc::new(geometry("h200-141"));
    let profiles = full.profiles().to_vec();
    let mut less = profiles.clone();
    for profile in less.iter_mut().filter(|profile| profile.id == 9) {
        profile.placements.clear();
    }
    let less = Arc::new(Geometry::from_profiles(less).expect("a geometry"));
    assert_eq!(less.slices(), 8);
    let mut before = fleet(1);
    let unit = make(&mut before, 1, 9, 1);
    let mut after = Fleet::new(Rules::default(), vec![mig_gpu(0, &less)]);
    let records = before.records();
    after.adopt(&records, &[listed(&records[0])], before.highest(), SECOND).expect("adopted");
    assert_eq!(after.gpus()[0].state().occupied(), before.gpus()[0].state().occupied());
    assert!(after.decide(&of_profile(2, 9)).is_err());
    after.set_geometry(0, full).expect("the present instance has a place");
    assert_eq!(after.gpus()[0].state(), before.gpus()[0].state());
    assert!(after.decide(&of_profile(2, 9)).is_ok() && after.consistent());

    // A geometry without a place for a present instance is refused.
    let without: Vec<_> = profiles.into_iter().filter(|profile| profile.id != 9).collect();
    let without = Arc::new(Geometry::from_profiles(without).expect("a geometry"));
    assert_eq!(after.set_geometry(0, without.clone()), Err(PlanError::InUse));
    assert!(after.unit(unit).is_some());
    let mut empty = fleet(1);
    assert_eq!(empty.set_geometry(0, without), Ok(()));
    assert!(Geometry::from_profiles(vec![]).is_err());
}
