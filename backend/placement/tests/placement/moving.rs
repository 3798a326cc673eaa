//! Moves: draining, making room, undoing fragmentation, and suggestions from load.

use std::collections::BTreeMap;
use std::sync::Arc;

use proptest::prelude::*;
use sluice_placement::moves::MAX_MOVES;
use sluice_placement::{
    AdminState, AffinityTarget, AntiAffinity, Decision, Division, DrainTarget, Fleet, Forecast, Occupation,
    Partition, Pin, PlanError, PlanGpu, Policy, RebalancePolicy, Rebalancer, Refusal, Request, Rules,
    ShortResource, Smoothing, Strictness, Suggestion, UnitId, VmId,
};

use crate::geometries::geometry;
use crate::life::{fleet, identity, mig_gpu, of_profile, uuid};

const GIB: u64 = 1 << 30;

/// Places an idle VM at a pinned position, and then removes the pin.
fn put(fleet: &mut Fleet, vm: u64, profile: u32, gpu: usize, start: u8) -> UnitId {
    let pinned = Request { pin: Some(Pin { gpu, start: Some(start) }), ..of_profile(vm, profile) };
    let decision = fleet.decide(&pinned).expect("the position is free");
    let unit = fleet.reserve(&of_profile(vm, profile), decision).expect("the position");
    fleet.created(unit, Some(identity(u32::try_from(unit.0).unwrap_or(0)))).expect("created");
    unit
}

/// Ends a unit that its VM has left.
fn end(fleet: &mut Fleet, unit: UnitId) {
    let now = std::time::Duration::ZERO;
    if !fleet.close(unit, now).expect("an empty unit") {
        fleet.closing_answer(unit, now, sluice_placement::DestructionAnswer::Gone).expect("compute instance");
        fleet.closing_answer(unit, now, sluice_placement::DestructionAnswer::Gone).expect("instance");
    }
}

// Promise: P14
#[test]
fn drain_moves_idle_vms_and_lists_busy_and_stuck_ones() {
    let mut fleet = fleet(2);
    put(&mut fleet, 1, 9, 0, 0);
    put(&mut fleet, 2, 19, 0, 4);
    put(&mut fleet, 3, 19, 0, 5);
    fleet.set_idle(VmId(3), false).expect("a VM");
    // A VM that must not be in the only place with room.
    put(&mut fleet, 4, 14, 1, 4);
    let unit = fleet.home(VmId(2)).expect("a unit");
    let plan = fleet.drain(DrainTarget::Gpu(0));
    assert_eq!((plan.busy.as_slice(), plan.stuck.len(), plan.moves.len()), (&[VmId(3)][..], 0, 2));
    // A move that was planned before its place was closed is refused.
    fleet.set_gpu_admin_state(1, AdminState::Draining).expect("a GPU");
    assert_eq!(fleet.follow(&plan.moves[0]), Err(PlanError::Taken));
    fleet.set_gpu_admin_state(1, AdminState::Open).expect("a GPU");
    for one in &plan.moves {
        let moved = fleet.follow(one).expect("as planned");
        assert!(moved.emptied && one.to.gpu == 1);
        end(&mut fleet, moved.from);
    }
    assert!(fleet.unit(unit).is_none() && fleet.consistent());
    assert_eq!(fleet.gpus()[0].state().occupied(), 1 << 5);
    // The same plan cannot be followed twice, and a busy VM does not move.
    assert_eq!(fleet.follow(&plan.moves[0]), Err(PlanError::UnknownUnit));
    assert_eq!(fleet.relocate(VmId(3), Decision::Join(UnitId(1))), Err(PlanError::Busy));

    // No room elsewhere: reported for each.
    fleet.set_idle(VmId(3), true).expect("a VM");
    fleet.set_gpu_admin_state(1, AdminState::Draining).expect("a GPU");
    assert_eq!(fleet.drain(DrainTarget::Gpu(0)).stuck, [(VmId(3), Refusal::Unavailable)]);
    assert_eq!(fleet.drain(DrainTarget::Gpu(9)), sluice_placement::DrainPlan::default());
}

// Promise: P14
#[test]
fn drain_finds_room_that_one_by_one_placement_does_not() {
    // On the other GPU slices 0 to 3 are free, and five of seven compute slices. By quota, the VM of two slices goes first.
    let mut fleet = fleet(2);
    put(&mut fleet, 1, 9, 1, 4);
    put(&mut fleet, 2, 14, 0, 0);
    put(&mut fleet, 3, 19, 0, 2);
    put(&mut fleet, 4, 19, 0, 3);
    let plan = fleet.drain(DrainTarget::Gpu(0));
    assert_eq!((plan.stuck.len(), plan.moves.len()), (0, 3));
    let mut sorted: Vec<VmId> = plan.moves.iter().map(|one| one.vm).collect();
    sorted.sort_unstable();
    assert_eq!(sorted, [VmId(2), VmId(3), VmId(4)]);
    for one in &plan.moves {
        fleet.follow(one).expect("as planned");
    }
    assert!(fleet.consistent());
}

// Promise: P14
#[test]
fn vm_moves_between_a_whole_gpu_and_an_instance() {
    let geometry = Arc::new(geometry("h200-141"));
    let whole = Division::Whole { memory_bytes: 140 * GIB, multiprocessors: 132 };
    let gpus = vec![PlanGpu::new(uuid(0), None, whole), mig_gpu(1, &geometry)];
    let mut fleet = Fleet::new(Rules::default(), gpus);
    let request = Request { policy: Policy::TimeSlice, ..Request::new(VmId(1), GIB) };
    let (shared, _) = fleet.place(&request).expect("the whole GPU");
    fleet.place(&Request { vm: VmId(2), ..request.clone() }).expect("beside it");
    let plan = fleet.drain(DrainTarget::Unit(shared));
    // Both go into one new shared instance.
    assert_eq!(plan.moves.len(), 2);
    for one in &plan.moves {
        assert!(matches!(one.to.partition, Partition::Instance { profile: 19, .. }) && one.to.shared);
        fleet.follow(one).expect("as planned");
    }
    assert_eq!(fleet.home(VmId(1)), fleet.home(VmId(2)));
    end(&mut fleet, shared);
    let plan = fleet.drain(DrainTarget::Gpu(1));
    for one in &plan.moves {
        assert_eq!((one.to.gpu, one.to.partition), (0, Partition::Whole));
        fleet.follow(one).expect("as planned");
    }
    assert_eq!((plan.moves.len(), fleet.consistent()), (2, true));
}

// Promise: P14
#[test]
fn move_that_is_refused_changes_nothing() {
    let mut fleet = fleet(1);
    let from = put(&mut fleet, 1, 9, 0, 0);
    let before = format!("{fleet:?}");
    let Some(Partition::Instance { placement, .. }) = fleet.unit(from).map(|unit| unit.partition) else {
        panic!()
    };
    let own =
        Decision::Open { gpu: 0, partition: Partition::Instance { profile: 9, placement }, shared: false };
    for refused in [Decision::Join(from), Decision::Join(UnitId(99)), own] {
        assert!(fleet.relocate(VmId(1), refused).is_err());
        assert_eq!(format!("{fleet:?}"), before);
    }
}

// Promise: P15
#[test]
fn room_is_made_by_the_fewest_moves_of_idle_vms() {
    let mut fleet = fleet(2);
    // Both halves of both GPUs are broken by one small instance each.
    for (vm, gpu, start) in [(1, 0, 0), (2, 0, 4), (3, 1, 0), (4, 1, 4)] {
        put(&mut fleet, vm, 19, gpu, start);
    }
    let wish = of_profile(9, 9);
    assert_eq!(fleet.decide(&wish), Err(Refusal::NoRoom));
    let moves = fleet.make_room(&wish, 3).expect("one move is enough");
    assert_eq!(moves.len(), 1);
    let moved = fleet.follow(&moves[0]).expect("as planned");
    end(&mut fleet, moved.from);
    assert!(fleet.decide(&wish).is_ok());

    // A whole GPU needs two more.
    let all = of_profile(9, 0);
    let moves = fleet.make_room(&all, MAX_MOVES).expect("few moves");
    assert!((1..=2).contains(&moves.len()), "{moves:?}");
    for one in &moves {
        let moved = fleet.follow(one).expect("as planned");
        end(&mut fleet, moved.from);
    }
    fleet.place(&all).expect("a whole GPU");
    assert!(fleet.consistent());
    // A request for more than there is.
    assert_eq!(fleet.make_room(&of_profile(10, 0), MAX_MOVES), None);
}

// Promise: P15
#[test]
fn busy_and_anti_affine_vms_are_not_moved_to_make_room() {
    let wish = of_profile(9, 9);
    let mut full = fleet(1);
    put(&mut full, 1, 19, 0, 0);
    put(&mut full, 2, 19, 0, 4);
    assert!(full.make_room(&wish, 1).is_some());
    full.set_idle(VmId(1), false).expect("a VM");
    assert_eq!(full.make_room(&wish, 1).expect("the other one")[0].vm, VmId(2));
    full.set_idle(VmId(2), false).expect("a VM");
    assert_eq!(full.make_room(&wish, MAX_MOVES), None);

    // The only other GPU holds a VM that the first must be apart from.
    let mut two = fleet(2);
    let anti_affinity = vec![AntiAffinity { from: AffinityTarget::Group(1), never: true }];
    for (vm, gpu) in [(1, 0), (2, 1)] {
        let pin = Some(Pin { gpu, start: Some(6) });
        let request = Request { anti_affinity: anti_affinity.clone(), ..of_profile(vm, 19) };
        let decision = two.decide(&Request { pin, ..request.clone() }).expect("free");
        let unit = two.reserve(&request, decision).expect("free");
        two.created(unit, Some(identity(1))).expect("created");
    }
    assert_eq!(two.make_room(&of_profile(9, 0), MAX_MOVES), None);
}

// Promise: P15
#[test]
fn no_plan_moves_exclusive_or_anti_affine_vms_together() {
    // A VM with a GPU of its own stays alone.
    let mut alone = fleet(2);
    let strict = Request { strictness: Strictness::Gpu, policy: Policy::Mig, ..Request::new(VmId(1), GIB) };
    alone.place(&strict).expect("a GPU");
    put(&mut alone, 2, 19, 1, 0);
    assert_eq!(alone.make_room(&of_profile(9, 0), MAX_MOVES), None);
    assert!(alone.tidy(4, 0).iter().all(|one| one.vm == VmId(2) && one.to.gpu == 1));
    assert_eq!(alone.drain(DrainTarget::Gpu(0)).stuck, [(VmId(1), Refusal::NoRoom)]);

    // Two that would both be packed on the third GPU without the rule.
    let mut anti_affinity = fleet(3);
    let away = vec![AntiAffinity { from: AffinityTarget::Group(1), never: true }];
    for (vm, gpu) in [(1, 0), (2, 1)] {
        let request = Request { anti_affinity: away.clone(), ..of_profile(vm, 19) };
        let pinned = Request { pin: Some(Pin { gpu, start: Some(6) }), ..request.clone() };
        let decision = anti_affinity.decide(&pinned).expect("free");
        let unit = anti_affinity.reserve(&request, decision).expect("free");
        anti_affinity.created(unit, Some(identity(1))).expect("created");
    }
    put(&mut anti_affinity, 3, 9, 2, 4);
    for one in anti_affinity.tidy(8, 0) {
        let moved = anti_affinity.follow(&one).expect("as planned");
        end(&mut anti_affinity, moved.from);
        let homes = [VmId(1), VmId(2)]
            .map(|vm| anti_affinity.home(vm).and_then(|unit| anti_affinity.unit(unit)).map(|unit| unit.gpu));
        assert_ne!(homes[0], homes[1]);
    }
}

// Promise: P15
#[test]
fn tidy_wins_back_configurations_and_then_suggests_nothing() {
    let mut fleet = fleet(2);
    for (vm, gpu, start) in [(1, 0, 0), (2, 0, 4), (3, 1, 2)] {
        put(&mut fleet, vm, 19, gpu, start);
    }
    let remaining = |fleet: &Fleet| -> u128 {
        fleet.gpus().iter().filter_map(|gpu| Some(gpu.geometry()?.remaining(gpu.state()))).sum()
    };
    let before = remaining(&fleet);
    let moves = fleet.tidy(8, 10);
    assert!(!moves.is_empty() && moves.len() <= 3);
    let mut last = before;
    for one in &moves {
        let moved = fleet.follow(one).expect("as planned");
        end(&mut fleet, moved.from);
        assert!(remaining(&fleet) > last);
        last = remaining(&fleet);
    }
    assert!(fleet.tidy(8, 10).is_empty());
    assert!(fleet.gpus().iter().any(|gpu| *gpu.state() == Occupation::default()), "packed on one GPU");
    assert!(fleet.tidy(0, 0).is_empty());
}

fn shared_gpus(count: u8) -> Fleet {
    let gpu = |number| {
        PlanGpu::new(uuid(number), None, Division::Whole { memory_bytes: 100 * GIB, multiprocessors: 132 })
    };
    Fleet::new(Rules::default(), (0..count).map(gpu).collect())
}

fn time_slice(vm: u64, gib: u64) -> Request {
    Request { policy: Policy::TimeSlice, ..Request::new(VmId(vm), gib * GIB) }
}

/// Feeds the same demands `samples` times; returns all suggestions, with the number of the sample.
fn feed(
    rebalancer: &mut Rebalancer,
    policy: &RebalancePolicy,
    fleet: &Fleet,
    demands: &[(u64, f64)],
    samples: usize,
) -> Vec<(usize, Suggestion)> {
    let demands: BTreeMap<VmId, f64> = demands.iter().map(|&(vm, demand)| (VmId(vm), demand)).collect();
    (0..samples)
        .flat_map(|at| rebalancer.observe(policy, fleet, &demands).into_iter().map(move |one| (at, one)))
        .collect()
}

// Promise: P12
#[test]
fn overloaded_unit_gets_one_suggestion_per_cooldown() {
    let mut fleet = shared_gpus(2);
    for vm in 1..=3 {
        fleet.place(&time_slice(vm, 30)).expect("a place");
    }
    let hot = fleet.home(VmId(1)).expect("a unit");
    let policy = RebalancePolicy { enabled: true, ..RebalancePolicy::default() };
    let mut rebalancer = Rebalancer::default();
    let demands = [(1, 0.7), (2, 0.5), (3, 0.1)];
    let suggested = feed(&mut rebalancer, &policy, &fleet, &demands, 1000);
    // Only after the load has lasted; once per cool-down; the move that leaves the worse unit best off.
    let first = &suggested[0];
    assert_eq!(first.0, 19);
    assert_eq!((first.1.vm, first.1.from, first.1.now), (VmId(1), hot, true));
    assert!((first.1.before - 1.3).abs() < 0.01 && (first.1.after - 0.7).abs() < 0.01, "{first:?}");
    assert_eq!(suggested.iter().map(|one| one.0).collect::<Vec<_>>(), [19, 619]);

    // After the move, there is no further suggestion.
    fleet.relocate(VmId(1), first.1.to).expect("as suggested");
    assert!(feed(&mut rebalancer, &policy, &fleet, &demands, 2000).is_empty());
    // With the policy off, there is none.
    let off = RebalancePolicy { enabled: false, ..policy };
    assert!(feed(&mut Rebalancer::default(), &off, &shared_gpus(2), &demands, 100).is_empty());
}

// Promise: P12
#[test]
fn peaks_small_gains_and_lone_vms_suggest_nothing() {
    let mut fleet = shared_gpus(2);
    for vm in 1..=2 {
        fleet.place(&time_slice(vm, 40)).expect("a place");
    }
    let policy = RebalancePolicy { enabled: true, ..RebalancePolicy::default() };
    // A short peak, repeatedly.
    let mut rebalancer = Rebalancer::default();
    for _ in 0..20 {
        assert!(feed(&mut rebalancer, &policy, &fleet, &[(1, 0.9), (2, 0.9)], 3).is_empty());
        assert!(feed(&mut rebalancer, &policy, &fleet, &[(1, 0.1), (2, 0.1)], 30).is_empty());
    }
    // One VM has nearly all of the load: a move of either helps little.
    let lopsided = feed(&mut Rebalancer::default(), &policy, &fleet, &[(1, 1.0), (2, 0.1)], 100);
    assert!(lopsided.is_empty(), "{lopsided:?}");
    // One VM alone.
    fleet.leave(VmId(2)).expect("left");
    assert!(feed(&mut Rebalancer::default(), &policy, &fleet, &[(1, 5.0)], 100).is_empty());
    // Invalid measurements.
    fleet.place(&time_slice(2, 40)).expect("a place");
    let nonsense = [(1, f64::NAN), (2, f64::INFINITY), (77, 9.0)];
    assert!(feed(&mut Rebalancer::default(), &policy, &fleet, &nonsense, 100).is_empty());
}

// Promise: P12
#[test]
fn rising_load_is_suggested_earlier_with_a_forecast() {
    let mut fleet = shared_gpus(2);
    for vm in 1..=2 {
        fleet.place(&time_slice(vm, 40)).expect("a place");
    }
    let policy = RebalancePolicy { enabled: true, hold: 3, ..RebalancePolicy::default() };
    let blind = RebalancePolicy { horizon: 0, ..policy };
    let first = |policy: &RebalancePolicy| {
        let mut rebalancer = Rebalancer::default();
        (0..200).find(|&at| {
            let demand = 0.2 + f64::from(at) * 0.005;
            !feed(&mut rebalancer, policy, &fleet, &[(1, demand), (2, demand)], 1).is_empty()
        })
    };
    let (seen, late) = (first(&policy).expect("suggested"), first(&blind).expect("suggested"));
    assert!(seen + 5 <= late, "{seen} {late}");
}

// Promise: P12
#[test]
fn overloaded_unit_beside_a_full_one_gets_no_suggestion() {
    let mut fleet = shared_gpus(2);
    fleet.place(&time_slice(1, 50)).expect("a place");
    fleet.place(&time_slice(2, 50)).expect("a place");
    fleet.place(&time_slice(3, 90)).expect("the other GPU");
    let policy = RebalancePolicy { enabled: true, ..RebalancePolicy::default() };
    let demands = [(1, 0.8), (2, 0.8), (3, 0.0)];
    assert!(feed(&mut Rebalancer::default(), &policy, &fleet, &demands, 100).is_empty());
}

// Promise: P12
#[test]
fn demand_of_a_moved_vm_is_scaled_to_the_size_of_its_unit() {
    let gpu = |number, multiprocessors, gib| {
        let division = Division::Whole { memory_bytes: gib * GIB, multiprocessors };
        PlanGpu::new(uuid(number), None, division)
    };
    // Two VMs that together use all of a small GPU; the other one is four times as large.
    for resource in [ShortResource::Time, ShortResource::Memory] {
        let mut fleet = Fleet::new(Rules::default(), vec![gpu(0, 30, 40), gpu(1, 120, 160)]);
        for vm in 1..=2 {
            let pin = Some(Pin { gpu: 0, start: None });
            fleet.place(&Request { pin, ..time_slice(vm, 20) }).expect("a place");
        }
        // The VMs rejoin without their pins, so they may move.
        for vm in 1..=2 {
            let from = fleet.leave(VmId(vm)).expect("there");
            let unit = from.or(fleet.home(VmId(3 - vm))).expect("a unit");
            fleet.rejoin(unit, time_slice(vm, 20), true).expect("again");
        }
        let policy = RebalancePolicy { enabled: true, resource, ..RebalancePolicy::default() };
        let mut rebalancer = Rebalancer::default();
        let suggested = feed(&mut rebalancer, &policy, &fleet, &[(1, 0.5), (2, 0.5)], 40);
        let [(_, one)] = suggested[..] else { panic!("{suggested:?}") };
        assert!((one.before - 1.0).abs() < 0.01 && (one.after - 0.5).abs() < 0.01, "{one:?}");
        let unit = fleet.unit(one.from).expect("a unit");
        assert!((rebalancer.load(&policy, unit, 0) - 1.0).abs() < 0.01);
        // It stands until it is followed, or the unit has cooled down.
        assert_eq!(rebalancer.standing(), [one]);
        let mut cooled = rebalancer.clone();
        feed(&mut cooled, &policy, &fleet, &[(1, 0.1), (2, 0.1)], 100);
        assert_eq!(cooled.standing(), []);
        fleet.relocate(one.vm, one.to).expect("as suggested");
        feed(&mut rebalancer, &policy, &fleet, &[(1, 0.5), (2, 0.5)], 1);
        assert_eq!(rebalancer.standing(), []);
        // Its demand is a quarter of that, relative to the larger one.
        let there = fleet.home(one.vm).and_then(|home| fleet.unit(home)).expect("a unit");
        let load = rebalancer.load(&policy, there, 0);
        assert!(load > 0.12 && load < 0.3, "{load}");
    }
}

proptest! {
    // Promise: P12
    #[test]
    fn any_suggestion_can_be_followed_and_reaches_its_gain(
        vms in proptest::collection::vec((1_u64..60, 0.0..1.5_f64), 1..8),
        noise in proptest::collection::vec(-0.3..0.3_f64, 60),
    ) {
        let mut fleet = shared_gpus(3);
        let mut demands = Vec::new();
        for (vm, (gib, demand)) in (1..).zip(&vms) {
            if fleet.place(&time_slice(vm, *gib)).is_ok() {
                demands.push((vm, *demand));
            }
        }
        let policy = RebalancePolicy { enabled: true, hold: 5, cooldown: 20, ..RebalancePolicy::default() };
        let mut rebalancer = Rebalancer::default();
        for noise in noise {
            let now: Vec<_> = demands.iter().map(|(vm, demand)| (*vm, (demand + noise).max(0.0))).collect();
            for (_, one) in feed(&mut rebalancer, &policy, &fleet, &now, 1) {
                prop_assert!(one.before - one.after >= policy.gain, "{one:?}");
                prop_assert_eq!(fleet.home(one.vm), Some(one.from));
                let mut followed = fleet.clone();
                prop_assert!(followed.relocate(one.vm, one.to).is_ok() && followed.consistent(), "{one:?}");
            }
            prop_assert!(rebalancer.standing().len() <= fleet.units().count());
        }
    }

    // Promise: P12
    #[test]
    fn forecast_of_any_samples_stays_within_its_bound(
        samples in proptest::collection::vec(0.0..10.0_f64, 1..200),
        ahead in 0_u32..2000,
    ) {
        let smoothing = Smoothing::default();
        let mut forecast = Forecast::default();
        samples.iter().for_each(|sample| forecast.observe(&smoothing, *sample));
        let expected = forecast.ahead(&smoothing, ahead);
        let most = samples.iter().fold(0.0_f64, |most, sample| most.max(*sample));
        // The trend is damped: its sum is bounded by the largest step that it could have learned from.
        let bound = most * (1.0 + 2.0 / (1.0 - smoothing.damping));
        prop_assert!((0.0..=bound).contains(&expected), "{expected} of {most}");
        prop_assert_eq!(forecast.samples() as usize, samples.len());
    }
}
