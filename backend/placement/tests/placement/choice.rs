//! The choice of a VM's place: policies, classes, wishes, and refusals.

use std::sync::Arc;
use std::time::Duration;

use sluice_placement::{
    AdminState, AffinityTarget, AntiAffinity, Class, Decision, Division, Fleet, Partition, Pin, PlanError,
    PlanGpu, Policy, Refusal, Request, Rules, Strictness, UnitId, VmId,
};

use crate::geometries::geometry;
use crate::life::{of_profile, uuid};

const GIB: u64 = 1 << 30;

fn whole(number: u8, numa: u32, memory: u64) -> PlanGpu {
    PlanGpu::new(
        uuid(number),
        Some(numa),
        Division::Whole { memory_bytes: memory * GIB, multiprocessors: 132 },
    )
}

fn mig(number: u8, numa: u32) -> PlanGpu {
    PlanGpu::new(uuid(number), Some(numa), Division::Mig(Arc::new(geometry("h200-141"))))
}

fn request(vm: u64, gib: u64) -> Request {
    Request::new(VmId(vm), gib * GIB)
}

fn time_slice(vm: u64, gib: u64) -> Request {
    Request { policy: Policy::TimeSlice, ..request(vm, gib) }
}

fn anti_affinity(from: AffinityTarget, never: bool) -> Vec<AntiAffinity> {
    vec![AntiAffinity { from, never }]
}

/// Profile and start of a decision for an instance.
fn instance(decision: Result<Decision, Refusal>) -> (usize, u32, u8) {
    match decision {
        Ok(Decision::Open { gpu, partition: Partition::Instance { profile, placement }, .. }) => {
            (gpu, profile, placement.start)
        }
        other => panic!("{other:?}"),
    }
}

// Promise: P9
#[test]
fn quota_gets_the_smallest_profile_that_holds_it_with_its_overhead() {
    let fleet = Fleet::new(Rules::default(), vec![mig(0, 0)]);
    let profile = |request: &Request| instance(fleet.decide(request)).1;
    let own = |gib| Request { policy: Policy::Mig, ..request(1, gib) };
    // Of the H200's: 16, 32.5, 69.75 and 140 GiB.
    assert_eq!(profile(&own(16)), 19);
    assert_eq!(profile(&Request { overhead_bytes: 1, ..own(16) }), 15);
    assert_eq!(profile(&own(32)), 15);
    assert_eq!(profile(&Request { multiprocessors: 27, ..own(32) }), 14);
    assert_eq!(profile(&Request { multiprocessors: 61, ..own(32) }), 5);
    assert_eq!(profile(&own(33)), 9);
    assert_eq!(profile(&own(70)), 0);
    assert_eq!(fleet.decide(&own(141)), Err(Refusal::TooLarge { largest_bytes: 140 * GIB }));
    assert_eq!(
        fleet.decide(&Request { multiprocessors: 133, ..own(1) }),
        Err(Refusal::TooLarge { largest_bytes: 0 })
    );
    // A requested profile is refused if it is too small.
    let small = Request { profile: Some(19), ..own(17) };
    assert_eq!(fleet.decide(&small), Err(Refusal::TooLarge { largest_bytes: 16 * GIB }));
}

// Promise: P9
#[test]
fn larger_instance_is_given_only_if_the_request_allows_it() {
    let mut fleet = Fleet::new(Rules::default(), vec![mig(0, 0)]);
    // All positions of small instances with 32 GiB except the last are taken; 7g would need all.
    for vm in 0..2 {
        fleet.place(&of_profile(vm, 9)).expect("a half");
    }
    let wish = Request { policy: Policy::Mig, ..request(9, 10) };
    assert_eq!(fleet.decide(&wish), Err(Refusal::NoRoom));
    // One compute slice and no memory slice is left.
    assert_eq!(fleet.decide(&Request { allow_larger: true, ..wish }), Err(Refusal::NoRoom));

    // On slice 7 no 1g can start, but one of two slices can on 6 and 7.
    let mut fleet = Fleet::new(Rules::default(), vec![mig(0, 0)]);
    fleet.place(&Request { pin: Some(Pin { gpu: 0, start: Some(0) }), ..of_profile(1, 9) }).expect("3g at 0");
    fleet.place(&of_profile(2, 19)).expect("1g");
    fleet.place(&of_profile(3, 19)).expect("1g");
    assert!(fleet.decide(&Request { policy: Policy::Mig, ..request(9, 10) }).is_ok());
}

// Promise: P9
#[test]
fn strict_vm_neither_joins_a_unit_nor_is_joined() {
    for strictness in [Strictness::Unit, Strictness::Gpu] {
        let mut fleet = Fleet::new(Rules::default(), vec![whole(0, 0, 140), mig(1, 0)]);
        let strict = Request { strictness, ..time_slice(1, 4) };
        let (unit, decision) = fleet.place(&strict).expect("a place");
        assert_eq!(decision, Decision::Open { gpu: 0, partition: Partition::Whole, shared: false });
        // Not by choice, not by force.
        let (other, _) = fleet.place(&time_slice(2, 4)).expect("another place");
        assert_ne!(other, unit);
        assert_eq!(fleet.reserve(&time_slice(3, 4), Decision::Join(unit)), Err(PlanError::Taken));
        // Nor does it join others.
        assert_eq!(
            fleet.reserve(&Request { vm: VmId(4), ..strict }, Decision::Join(other)),
            Err(PlanError::Taken)
        );
    }
}

// Promise: P9
#[test]
fn vm_that_excludes_others_from_its_gpu_gets_an_empty_gpu() {
    let mut fleet = Fleet::new(Rules::default(), vec![mig(0, 0), mig(1, 0)]);
    fleet.place(&of_profile(1, 19)).expect("a small one");
    let alone = Request { strictness: Strictness::Gpu, policy: Policy::Mig, ..request(2, 4) };
    // The whole other GPU, although a slice would hold it.
    assert_eq!(instance(fleet.decide(&alone)), (1, 0, 0));
    fleet.place(&alone).expect("a GPU");
    assert_eq!(fleet.decide(&Request { vm: VmId(3), ..alone.clone() }), Err(Refusal::NoRoom));
    fleet.leave(VmId(1)).expect("left");
    // The instance of the one that left is still there.
    assert_eq!(fleet.decide(&Request { vm: VmId(3), ..alone }), Err(Refusal::NoRoom));
}

// Promise: P10
#[test]
fn vms_with_anti_affinity_are_placed_on_different_gpus() {
    let gpus = || vec![mig(0, 0), mig(1, 0), mig(2, 0)];
    // By group, by naming the other, and by having been named.
    let group = anti_affinity(AffinityTarget::Group(7), true);
    let cases = [
        (group.clone(), group),
        (vec![], anti_affinity(AffinityTarget::Vm(VmId(1)), true)),
        (anti_affinity(AffinityTarget::Vm(VmId(2)), true), vec![]),
    ];
    for (first, second) in cases {
        let mut fleet = Fleet::new(Rules::default(), gpus());
        fleet.place(&Request { anti_affinity: first, ..of_profile(1, 19) }).expect("a place");
        let wish = Request { anti_affinity: second, ..of_profile(2, 19) };
        assert_eq!(instance(fleet.decide(&wish)).0, 1, "{wish:?}");
        // Any other VM is packed beside the first.
        assert_eq!(instance(fleet.decide(&of_profile(3, 19))).0, 0);
    }
    // A strict rule refuses rather than place beside them; a preference is given up.
    let mut fleet = Fleet::new(Rules::default(), vec![mig(0, 0)]);
    fleet
        .place(&Request {
            anti_affinity: anti_affinity(AffinityTarget::Group(7), false),
            ..of_profile(1, 19)
        })
        .expect("a place");
    let never = Request { anti_affinity: anti_affinity(AffinityTarget::Group(7), true), ..of_profile(2, 19) };
    assert_eq!(fleet.decide(&never), Err(Refusal::AntiAffinity));
    let prefer = Request { anti_affinity: anti_affinity(AffinityTarget::Group(7), false), ..never.clone() };
    assert_eq!(instance(fleet.decide(&prefer)).0, 0);
    let mut fleet = Fleet::new(Rules::default(), gpus());
    fleet.place(&Request { vm: VmId(1), ..prefer.clone() }).expect("a place");
    assert_eq!(instance(fleet.decide(&prefer)).0, 1);
    let crowd = Request { anti_affinity: vec![prefer.anti_affinity[0]; 65], ..prefer };
    assert_eq!(fleet.decide(&crowd), Err(Refusal::TooManyRules));
}

// Promise: P10
#[test]
fn numa_local_gpus_are_preferred_and_closed_gpus_are_not_used() {
    let mut fleet = Fleet::new(Rules::default(), vec![mig(0, 0), mig(1, 1), mig(2, 1)]);
    let near = Request { numa: Some(1), ..of_profile(1, 19) };
    assert_eq!(instance(fleet.decide(&near)).0, 1);
    assert_eq!(instance(fleet.decide(&Request { numa: Some(5), ..near.clone() })).0, 0);
    fleet.set_gpu_admin_state(1, AdminState::Quarantined).expect("a GPU");
    assert_eq!(instance(fleet.decide(&near)).0, 2);
    fleet.set_gpu_admin_state(2, AdminState::Draining).expect("a GPU");
    // Far is better than none.
    assert_eq!(instance(fleet.decide(&near)).0, 0);
    fleet.set_gpu_admin_state(0, AdminState::Draining).expect("a GPU");
    assert_eq!(fleet.decide(&near), Err(Refusal::Unavailable));
}

// Promise: P10
#[test]
fn pinned_request_gets_exactly_its_gpu_and_slice() {
    let mut fleet = Fleet::new(Rules::default(), vec![mig(0, 0), mig(1, 0)]);
    let pinned = |vm, start| Request { pin: Some(Pin { gpu: 1, start }), ..of_profile(vm, 19) };
    assert_eq!(instance(fleet.decide(&pinned(1, Some(2)))), (1, 19, 2));
    assert_eq!(instance(fleet.decide(&pinned(1, None))).0, 1);
    fleet.place(&pinned(1, Some(2))).expect("slice 2");
    assert_eq!(fleet.decide(&pinned(2, Some(2))), Err(Refusal::NoRoom));
    assert_eq!(fleet.decide(&pinned(2, Some(7))), Err(Refusal::NoRoom));
    assert_eq!(
        fleet.decide(&Request { pin: Some(Pin { gpu: 9, start: None }), ..of_profile(2, 19) }),
        Err(Refusal::Unavailable)
    );
    assert_eq!(fleet.decide(&of_profile(1, 19)), Err(Refusal::AlreadyPlaced));
}

// Promise: P11
#[test]
fn shared_unit_accepts_vms_up_to_its_memory_time_and_weight() {
    let mut fleet = Fleet::new(Rules::default(), vec![whole(0, 0, 100)]);
    let guaranteed =
        |vm, gib, permille| Request { class: Class::Guaranteed { permille }, ..time_slice(vm, gib) };
    let (unit, _) = fleet.place(&guaranteed(1, 40, 600)).expect("the first");
    // There is memory enough, but not time.
    assert_eq!(fleet.decide(&guaranteed(2, 40, 401)), Err(Refusal::NoRoom));
    assert_eq!(fleet.decide(&guaranteed(2, 61, 100)), Err(Refusal::NoRoom));
    assert_eq!(fleet.place(&guaranteed(2, 40, 400)), Ok((unit, Decision::Join(unit))));
    assert_eq!(fleet.decide(&time_slice(3, 21)), Err(Refusal::NoRoom));
    assert_eq!(fleet.decide(&time_slice(3, 20)), Ok(Decision::Join(unit)));
    assert_eq!(fleet.decide(&time_slice(3, 101)), Err(Refusal::TooLarge { largest_bytes: 100 * GIB }));

    // As many as fit into memory, and as many as fit into time, are taken.
    for (gib, permille, fit) in [(7, 10, 14), (20, 10, 5), (1, 125, 8), (100, 1000, 1)] {
        let mut fleet = Fleet::new(Rules::default(), vec![whole(0, 0, 100)]);
        let taken = (1..).take_while(|vm| fleet.place(&guaranteed(*vm, gib, permille)).is_ok()).count();
        assert_eq!(taken, fit, "{gib} GiB and {permille} of a thousand each");
        assert!(fleet.consistent());
    }

    // Overcommitted by half: burstable VMs may exceed the memory, guaranteed ones not.
    let rules = Rules { overcommit_permille: 1500, weight_limit: 3, ..Rules::default() };
    let mut fleet = Fleet::new(rules, vec![whole(0, 0, 100)]);
    for vm in 1..=2 {
        fleet.place(&time_slice(vm, 60)).expect("burstable");
    }
    assert_eq!(fleet.decide(&guaranteed(3, 31, 0)), Err(Refusal::NoRoom));
    let floor = Request { class: Class::Burstable { floor_bytes: 101 * GIB }, ..time_slice(3, 30) };
    fleet.place(&floor).expect("its floor is within its quota");
    assert_eq!(fleet.decide(&time_slice(4, 0)), Err(Refusal::NoRoom), "no weight is left");
    assert!(fleet.consistent());
}

// Promise: A46
#[test]
fn unit_is_shared_by_as_many_vms_as_each_of_them_allows() {
    let mut fleet = Fleet::new(Rules::default(), vec![whole(0, 0, 100)]);
    let of = |vm, replicas| Request { replicas, ..time_slice(vm, 10) };
    for request in [of(1, 3), of(2, 0)] {
        fleet.place(&request).expect("there is room");
    }
    assert_eq!(fleet.decide(&of(3, 2)), Err(Refusal::NoRoom), "the request allows one neighbour at most");
    fleet.place(&of(3, 4)).expect("the third");
    assert_eq!(fleet.decide(&of(4, 4)), Err(Refusal::NoRoom), "the first allows three");
    fleet.leave(VmId(1)).expect("it is there");
    fleet.place(&of(4, 4)).expect("the third again");
    assert!(fleet.consistent());
}

// Promise: P47
#[test]
fn shared_instance_refuses_another_organisation_unless_rules_allow_it() {
    let of = |vm, organisation| Request { organisation, profile: Some(0), ..time_slice(vm, 10) };
    let with = |share_unmeasured| {
        let rules = Rules { share_unmeasured, ..Rules::default() };
        let mut fleet = Fleet::new(rules, vec![mig(0, 0)]);
        fleet.place(&of(1, Some(7))).expect("an instance is opened");
        fleet
    };
    let mut anti_affinity = with(false);
    anti_affinity.place(&of(2, Some(7))).expect("it is of the same organisation");
    for stranger in [of(3, Some(8)), of(3, None)] {
        assert_eq!(anti_affinity.decide(&stranger), Err(Refusal::Organisation));
        let any = Request { policy: Policy::Any, ..stranger.clone() };
        assert_eq!(anti_affinity.decide(&any), Err(Refusal::Organisation));
        assert!(with(true).place(&stranger).is_ok());
    }
    // A whole GPU is shared by all organisations: its figures are per process.
    let mut whole = Fleet::new(Rules::default(), vec![whole(0, 0, 100)]);
    for vm in 0..2 {
        whole.place(&Request { organisation: Some(vm), ..time_slice(vm, 10) }).expect("there is room");
    }
    assert!(anti_affinity.consistent() && whole.consistent());
}

// Promise: P47
#[test]
fn unmeasured_gpu_refuses_another_organisation_unless_rules_allow_it() {
    let of = |vm, organisation| Request { organisation, ..time_slice(vm, 10) };
    let with = |share_unmeasured| {
        let rules = Rules { share_unmeasured, ..Rules::default() };
        let mut fleet = Fleet::new(rules, vec![whole(0, 0, 100), whole(1, 0, 100)]);
        for gpu in 0..2 {
            fleet.set_gpu_measured(gpu, false).expect("it is there");
        }
        let unit = fleet.place(&of(1, Some(7))).expect("a GPU is opened").0;
        let other = Request { strictness: Strictness::Unit, ..of(2, Some(8)) };
        fleet.place(&other).expect("the other GPU");
        (fleet, unit)
    };
    let (mut anti_affinity, unit) = with(false);
    assert_eq!(anti_affinity.decide(&of(3, Some(7))), Ok(Decision::Join(unit)));
    for stranger in [of(3, Some(8)), of(3, None)] {
        assert_eq!(anti_affinity.decide(&stranger), Err(Refusal::Organisation));
        assert!(with(true).0.place(&stranger).is_ok());
    }
    // A VM that is there already stays; the rule applies when it moves.
    anti_affinity.set_gpu_measured(0, true).expect("it is there");
    anti_affinity.place(&of(3, Some(8))).expect("its driver reports it again");
    anti_affinity.set_gpu_measured(0, false).expect("it is there");
    assert_eq!((anti_affinity.home(VmId(1)), anti_affinity.home(VmId(3))), (Some(unit), Some(unit)));
    let emptied = anti_affinity.leave(VmId(2)).expect("it is there").expect("it was alone");
    assert_eq!(anti_affinity.close(emptied, Duration::ZERO), Ok(true));
    let alone = anti_affinity.place(&of(4, Some(9))).expect("a GPU of its own").0;
    assert_eq!(anti_affinity.relocate(VmId(3), Decision::Join(alone)), Err(PlanError::Taken));
    assert!(anti_affinity.consistent());
}

// Promise: P48
#[test]
fn unit_whose_kernels_reach_host_memory_serves_one_vm_unless_rules_allow_more() {
    for (gpu, profile) in [(whole(0, 0, 100), None), (mig(0, 0), Some(0))] {
        let of = |vm| Request { profile, ..time_slice(vm, 10) };
        let with = |share_unconfined| {
            let rules = Rules { share_unconfined, ..Rules::default() };
            let mut fleet = Fleet::new(rules, vec![gpu.clone()]);
            fleet.set_gpu_confined(0, false).expect("it is there");
            let unit = fleet.place(&of(1)).expect("the first VM").0;
            (fleet, unit)
        };
        let (mut fleet, unit) = with(false);
        assert!(!fleet.shares(0));
        assert_eq!(fleet.decide(&of(2)), Err(Refusal::HostAccess));
        let (mut allowed, shared) = with(true);
        assert!(allowed.shares(0));
        assert_eq!(allowed.place(&of(2)).expect("the rules allow it").0, shared);

        // Once the GPU is confined, a second VM joins; it stays when that changes, and a third is refused.
        fleet.set_gpu_confined(0, true).expect("it is there");
        assert_eq!(fleet.place(&of(2)).expect("kernels reach no host memory").0, unit);
        fleet.set_gpu_confined(0, false).expect("it is there");
        assert_eq!((fleet.home(VmId(1)), fleet.home(VmId(2))), (Some(unit), Some(unit)));
        assert_eq!(fleet.decide(&of(3)), Err(Refusal::HostAccess));
        assert!(fleet.consistent() && allowed.consistent());
    }
}

// Promise: P48
#[test]
fn vm_moves_to_no_unit_of_another_vm_whose_kernels_reach_host_memory() {
    let mut fleet = Fleet::new(Rules::default(), vec![whole(0, 0, 100), whole(1, 0, 100), whole(2, 0, 100)]);
    for gpu in 0..3 {
        fleet.set_gpu_confined(gpu, false).expect("it is there");
    }
    let first = fleet.place(&time_slice(1, 10)).expect("the first GPU").0;
    let second = fleet.place(&time_slice(2, 10)).expect("the second GPU").0;
    assert_ne!(first, second);
    // A VM that requests a unit of its own has one.
    let strict = Request { strictness: Strictness::Unit, ..time_slice(3, 10) };
    fleet.place(&strict).expect("the third GPU");
    fleet.set_idle(VmId(1), true).expect("it is there");
    assert_eq!(fleet.decide_move(&time_slice(1, 10)), Err(Refusal::HostAccess));
    assert_eq!(fleet.relocate(VmId(1), Decision::Join(second)), Err(PlanError::Taken));
    assert!(fleet.consistent());
}

// Promise: P20
#[test]
fn rule_about_a_vm_holds_for_its_further_gpus() {
    let mut fleet = Fleet::new(Rules::default(), vec![whole(0, 0, 100), whole(1, 0, 100)]);
    let on = |gpu| Some(Pin { gpu, start: None });
    fleet.place(&Request { pin: on(0), ..time_slice(1, 10) }).expect("its first GPU");
    fleet
        .place(&Request { pin: on(1), part_of: Some(VmId(1)), ..time_slice(2, 10) })
        .expect("its second GPU");
    let other =
        Request { anti_affinity: anti_affinity(AffinityTarget::Vm(VmId(1)), true), ..time_slice(3, 10) };
    assert_eq!(fleet.decide(&other), Err(Refusal::AntiAffinity));
}

// Promise: P11
#[test]
fn guaranteed_vms_are_packed_and_burstable_vms_join_the_lighter_unit() {
    let gpus = vec![whole(0, 0, 100), whole(1, 0, 100), whole(2, 0, 100)];
    let mut fleet = Fleet::new(Rules::default(), gpus);
    let guaranteed =
        |vm, gib, permille| Request { class: Class::Guaranteed { permille }, ..time_slice(vm, gib) };
    let place = |fleet: &mut Fleet, request: &Request| -> UnitId { fleet.place(request).expect("a place").0 };
    let full = place(&mut fleet, &guaranteed(1, 60, 500));
    let light = place(&mut fleet, &Request { weight: 1, ..guaranteed(2, 50, 500) });
    assert_ne!(full, light);
    // The fuller unit that still has room; a third GPU is not opened.
    assert_eq!(fleet.decide(&guaranteed(3, 30, 300)), Ok(Decision::Join(full)));
    // A burstable VM avoids the heavier unit.
    place(&mut fleet, &Request { weight: 9, ..guaranteed(4, 5, 0) });
    assert_eq!(fleet.home(VmId(4)), Some(full));
    assert_eq!(fleet.decide(&time_slice(5, 10)), Ok(Decision::Join(light)));
}

// Promise: P11
#[test]
fn policy_chooses_the_kind_of_unit() {
    let guaranteed = Class::Guaranteed { permille: 100 };
    let open = |decision: Result<Decision, Refusal>| match decision {
        Ok(Decision::Open { gpu, shared, .. }) => (gpu, shared),
        other => panic!("{other:?}"),
    };
    let mut fleet = Fleet::new(Rules::default(), vec![whole(0, 0, 140), mig(1, 0)]);
    assert_eq!(open(fleet.decide(&Request { policy: Policy::Mig, ..request(1, 4) })), (1, false));
    assert_eq!(open(fleet.decide(&time_slice(1, 4))), (0, true));
    assert_eq!(open(fleet.decide(&Request { class: guaranteed, ..request(1, 4) })), (1, false));
    // A burstable VM joins present VMs.
    let (unit, _) = fleet.place(&time_slice(1, 4)).expect("a place");
    assert_eq!(fleet.decide(&request(2, 4)), Ok(Decision::Join(unit)));
    // Time-slice inside an instance if there is no whole GPU.
    let mut fleet = Fleet::new(Rules::default(), vec![mig(0, 0)]);
    let (unit, decision) = fleet.place(&time_slice(1, 4)).expect("a place");
    assert!(matches!(
        decision,
        Decision::Open { shared: true, partition: Partition::Instance { profile: 19, .. }, .. }
    ));
    assert_eq!(fleet.decide(&time_slice(2, 4)), Ok(Decision::Join(unit)));
    // No GPU is in the required mode.
    let fleet = Fleet::new(Rules::default(), vec![whole(0, 0, 140)]);
    assert_eq!(fleet.decide(&Request { policy: Policy::Mig, ..request(1, 4) }), Err(Refusal::Mode));
    assert_eq!(fleet.decide(&of_profile(1, 19)), Err(Refusal::Mode));
}

// Promise: P4
#[test]
fn gpus_are_filled_before_others_are_opened() {
    let mut fleet = Fleet::new(Rules::default(), (0..4).map(|number| mig(number, 0)).collect());
    for vm in 0..7 {
        fleet.place(&of_profile(vm, 19)).expect("a place");
        assert!(fleet.gpus()[1..].iter().all(|gpu| gpu.state().occupied() == 0), "VM {vm}");
    }
    assert_eq!(instance(fleet.decide(&of_profile(7, 19))).0, 1);
}
