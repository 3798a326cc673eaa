//! Cost of answers on the largest plan: 64 GPUs. The bounds are those of a slow machine, in time of its processors: other work of
//! the machine does not count. A host that takes a processor away from a virtual machine may count, so the least of some runs is judged.

use std::sync::Arc;
use std::time::Duration;

use sluice_kit::figures::{Random, processor_time};
use sluice_placement::batch::{Answer, CandidateGpu, Item, pack};
use sluice_placement::fleet::MAX_GPUS;
use sluice_placement::moves::MAX_MOVES;
use sluice_placement::{
    Attributes, DrainTarget, Fleet, Geometry, Need, Occupation, Profile, Rules, SlicePlacement, VmId,
};

use crate::geometries::geometry;
use crate::life::{identity, mig_gpu, of_profile};

/// Runs `run`, which does the same each time; fails if it takes longer than `bound` in each of some runs.
fn within<T>(bound: Duration, name: &str, mut run: impl FnMut() -> T) -> T {
    for _ in 0..5 {
        let start = processor_time();
        let result = run();
        let took = processor_time() - start;
        println!("{name}: {took:?}");
        if took <= bound {
            return result;
        }
    }
    panic!("{name} takes longer than {bound:?}");
}

// Promise: P16
#[test]
fn decisions_on_the_largest_plan_take_20_ms_and_searches_3_s_at_most() {
    let (moment, second) = (Duration::from_millis(20), Duration::from_secs(3));
    let geometry = Arc::new(geometry("h200-141"));
    let gpus = (0..MAX_GPUS).map(|number| mig_gpu(u8::try_from(number).unwrap_or(0), &geometry));
    let mut fleet = Fleet::new(Rules::default(), gpus.collect());
    let mut random = Random(1);
    let kinds = [19, 19, 19, 15, 14, 9];
    let mut vms = 0_u64;
    while let Ok((unit, _)) = fleet.place(&of_profile(vms, kinds[(random.next_u64() % 6) as usize])) {
        fleet.created(unit, Some(identity(1))).expect("created");
        vms += 1;
    }
    let whole = of_profile(9999, 0);
    within(moment, "a refusal", || assert!(fleet.decide(&whole).is_err()));
    within(second, "no room to be made", || assert!(fleet.make_room(&whole, MAX_MOVES).is_none()));
    // A third leaves.
    for vm in (0..vms).step_by(3).map(VmId) {
        let unit = fleet.leave(vm).expect("left").expect("empty");
        fleet.close(unit, Duration::ZERO).expect("closing");
        for _ in 0..2 {
            fleet
                .closing_answer(unit, Duration::ZERO, sluice_placement::DestructionAnswer::Gone)
                .expect("closing");
        }
    }
    println!("{} VMs", fleet.units().count());
    within(moment, "a decision", || assert!(fleet.decide(&of_profile(9999, 19)).is_ok()));
    within(second, "room for a whole GPU", || assert!(fleet.make_room(&whole, MAX_MOVES).is_some()));
    within(second, "eight moves that tidy up", || assert!(!fleet.tidy(8, 1).is_empty()));
    within(second, "a drain", || assert!(!fleet.drain(DrainTarget::Gpu(3)).moves.is_empty()));
    within(moment, "capacity", || assert!(!fleet.capacity().is_empty()));
    within(second, "fragmentation of all", || {
        (0..MAX_GPUS).filter_map(|gpu| fleet.fragmentation(gpu)).sum::<f64>()
    });
}

// Promise: P16
#[test]
fn solver_on_mixtures_near_the_limit_answers_within_10_s() {
    let geometry = geometry("h200-141");
    let mut random = Random(7);
    let (mut fit, mut not, mut unknown) = (0, 0, 0);
    for gpus in [4, 8, 16, 32, 64] {
        for _ in 0..12 {
            // Every second GPU has a small instance at a random position.
            let small = geometry.index(19).expect("1g");
            let slots: Vec<CandidateGpu<'_>> = (0..gpus)
                .map(|at| {
                    let placement = SlicePlacement { start: (random.next_u64() % 7) as u8, size: 1 };
                    let state = Occupation::default();
                    let state = if at % 2 == 0 { state } else { geometry.with(&state, small, placement) };
                    CandidateGpu { geometry: &geometry, state }
                })
                .collect();
            // At random until the slices, or the compute slices, are used up or no filling was found for the rest.
            let (mut slices, mut compute, mut tries) = (gpus / 2, gpus / 2, 0);
            let mut items: Vec<Item> = Vec::new();
            while tries < 20 {
                let id = [19, 15, 14, 9, 5][(random.next_u64() % 5) as usize];
                let profile = &geometry.profiles()[geometry.index(id).expect("a profile")];
                let more = slices + usize::from(profile.memory_slices);
                let more_compute = compute + usize::from(profile.compute_slices);
                if more > gpus * 8 || more_compute > gpus * 7 {
                    tries += 1;
                    continue;
                }
                (slices, compute) = (more, more_compute);
                items.push(Need::Profile(id).into());
            }
            match within(Duration::from_secs(10), "a mixture", || pack(&slots, &items)) {
                Answer::Fits(_) => fit += 1,
                Answer::Impossible => not += 1,
                Answer::Unknown => unknown += 1,
            }
        }
    }
    println!("{fit} fit, {not} do not, {unknown} unknown");
    assert!(fit > 0 && not > 0);
}

// Promise: P16
#[test]
fn solver_on_the_largest_geometries_and_requests_answers_in_bounded_time() {
    // 64 slices, nearly any start, and a hundred kinds of wishes: an answer of any kind arrives in time.
    let starts = |size: u8, step: usize| {
        (0..=64 - size).step_by(step).map(|start| SlicePlacement { start, size }).collect::<Vec<_>>()
    };
    let profile = |id: u32, size: u8, compute: u8, step: usize| Profile {
        id,
        memory_slices: size,
        compute_slices: compute,
        instances: 64 / u16::from(compute),
        placements: starts(size, step),
        memory_bytes: u64::from(size) << 30,
        multiprocessors: u32::from(compute),
        attributes: Attributes::default(),
    };
    let sizes = [(1, 3), (2, 5), (3, 4), (5, 7), (7, 2), (11, 13), (64, 64)];
    let profiles =
        sizes.iter().zip(0..).map(|(&(size, compute), id)| profile(id, size, compute, 1 + id as usize % 3));
    let second = Duration::from_secs(3);
    let geometry =
        within(second, "geometry", || Geometry::new(64, profiles.clone().collect()).expect("a geometry"));
    let slots = vec![CandidateGpu { geometry: &geometry, state: Occupation::default() }; 64];
    let wishes = |kinds: u32, each: usize| {
        let size = |at| Need::Size {
            memory_bytes: (1 << 30) + u64::from(at) * (100 << 20),
            multiprocessors: at % 7,
        };
        (0..kinds).flat_map(|at| vec![Item::from(size(at)); each]).collect::<Vec<Item>>()
    };
    for (kinds, each) in [(1, 1024), (16, 40), (512, 2)] {
        let items = wishes(kinds, each);
        within(second * 10, &format!("{kinds} kinds"), || pack(&slots, &items));
    }
    let state = within(second, "the best of many", || {
        (0..20).fold(Occupation::default(), |state, _| match geometry.best(&state, 1) {
            Some((placement, _)) => geometry.with(&state, 1, placement),
            None => state,
        })
    });
    assert!(state.occupied() != 0);
}
