//! The batch solver against exhaustive search.

use std::collections::BTreeSet;

use proptest::prelude::*;
use sluice_placement::batch::{Answer, CandidateGpu, Item, Position, WorkBounds, pack, pack_within};
use sluice_placement::{Geometry, Need, Occupation};

use crate::axis::{reachable, state_of};
use crate::geometries::{geometry, plain};

/// All multisets of profiles whose sizes sum up to at most `slices` slices: those that fit, and many that do not.
fn multisets(geometry: &Geometry, profiles: &[usize], slices: u8) -> Vec<Vec<usize>> {
    let mut all = vec![Vec::new()];
    for &profile in profiles {
        let size = geometry.profiles()[profile].memory_slices;
        let mut longer = Vec::new();
        for set in &all {
            let used: u8 = set.iter().map(|&index: &usize| geometry.profiles()[index].memory_slices).sum();
            for count in 0..=(slices - used) / size {
                let mut set = set.clone();
                set.extend((0..count).map(|_| profile));
                longer.push(set);
            }
        }
        all = longer;
    }
    all
}

/// True if the positions are legal, one after the other.
fn legal(slots: &[CandidateGpu<'_>], wanted: &[usize], positions: &[Position]) -> bool {
    let mut states: Vec<Occupation> = slots.iter().map(|slot| slot.state).collect();
    wanted.len() == positions.len()
        && wanted.iter().zip(positions).all(|(&profile, position)| {
            let geometry = slots[position.slot].geometry;
            let state = &mut states[position.slot];
            let free = geometry.free(state, position.profile).any(|free| free == position.placement);
            let fits = free && position.profile == profile;
            if fits {
                *state = geometry.with(state, position.profile, position.placement);
            }
            fits
        })
}

fn items(geometry: &Geometry, profiles: &[usize]) -> Vec<Item> {
    profiles.iter().map(|&index| Need::Profile(geometry.profiles()[index].id).into()).collect()
}

// Promise: P3
#[test]
fn solver_equals_exhaustive_search_on_all_states() {
    for key in ["h200-141", "a30-24"] {
        let geometry = geometry(key);
        let profiles: Vec<usize> = plain(key, &geometry).into_iter().map(|(_, index)| index).collect();
        let wanted = multisets(&geometry, &profiles, geometry.slices() + 1);
        let (mut fit, mut refused) = (0, 0);
        for placed in reachable(&geometry, &profiles, &Occupation::default()) {
            let state = state_of(&geometry, &placed);
            let possible: BTreeSet<Vec<usize>> = reachable(&geometry, &profiles, &state)
                .into_iter()
                .map(|set| {
                    let mut profiles: Vec<usize> = set.into_iter().map(|(profile, _)| profile).collect();
                    profiles.sort_unstable();
                    profiles
                })
                .collect();
            let slots = [CandidateGpu { geometry: &geometry, state }];
            for set in &wanted {
                let mut sorted = set.clone();
                sorted.sort_unstable();
                // The search GPU by GPU alone gives the same result.
                let by_gpu = WorkBounds { positions: 0, patterns: u32::MAX };
                let same = pack_within(&slots, &items(&geometry, set), by_gpu);
                assert_eq!(
                    matches!(same, Answer::Fits(_)),
                    possible.contains(&sorted),
                    "{key} {placed:?} {set:?}"
                );
                if let Answer::Fits(positions) = same {
                    assert!(legal(&slots, set, &positions), "{key} {placed:?} {set:?} {positions:?}");
                }
                match pack(&slots, &items(&geometry, set)) {
                    Answer::Fits(positions) => {
                        assert!(possible.contains(&sorted), "{key} {placed:?} {set:?}");
                        assert!(legal(&slots, set, &positions), "{key} {placed:?} {set:?} {positions:?}");
                        fit += 1;
                    }
                    Answer::Impossible => {
                        assert!(!possible.contains(&sorted), "{key} {placed:?} {set:?}");
                        refused += 1;
                    }
                    Answer::Unknown => panic!("gave up on {key} {placed:?} {set:?}"),
                }
            }
        }
        println!("{key}: {fit} fit, {refused} do not");
        assert!(fit > 0 && refused > 0);
    }
}

// Promise: P3
#[test]
fn solver_fits_a_batch_that_one_by_one_placement_refuses() {
    let geometry = geometry("h200-141");
    let slots = [CandidateGpu { geometry: &geometry, state: Occupation::default() }];
    let kinds: std::collections::BTreeMap<String, usize> = plain("h200-141", &geometry).into_iter().collect();
    let wanted: Vec<usize> = ["1g", "1g", "2g", "3g"].iter().map(|&kind| kinds[kind]).collect();
    assert!(matches!(pack(&slots, &items(&geometry, &wanted)), Answer::Fits(_)));
}

// Promise: P3
#[test]
fn solver_over_16_gpus_decides_or_answers_unknown_at_its_work_limit() {
    let hopper = geometry("h200-141");
    let small = geometry("a30-24");
    let slots: Vec<CandidateGpu<'_>> = (0..16)
        .map(|at| CandidateGpu {
            geometry: if at % 4 == 0 { &small } else { &hopper },
            state: Occupation::default(),
        })
        .collect();
    let of = |id: u32, count: usize| vec![Item::from(Need::Profile(id)); count];
    // Twelve GPUs hold 12 whole ones, or 24 halves; the small GPUs have no profile 9.
    assert!(matches!(pack(&slots, &of(9, 24)), Answer::Fits(_)));
    assert_eq!(pack(&slots, &of(9, 25)), Answer::Impossible);
    // 14 is 2g there and 1g here: 36 and 16.
    assert!(matches!(pack(&slots, &of(14, 52)), Answer::Fits(_)));
    assert_eq!(pack(&slots, &of(14, 53)), Answer::Impossible);
    let mixed: Vec<Item> = [of(5, 8), of(9, 12), of(19, 12), of(15, 4)].concat();
    assert!(matches!(pack(&slots, &mixed), Answer::Fits(_)));
    assert_eq!(pack_within(&slots, &mixed, WorkBounds { positions: 3, patterns: 3 }), Answer::Unknown);
    assert_eq!(pack(&slots, &of(19, 1025)), Answer::Unknown);
    // Tiles exactly, in two ways to fill a GPU, eight times each.
    let slots = [CandidateGpu { geometry: &hopper, state: Occupation::default() }; 16];
    let tight: Vec<Item> = [of(9, 16), of(14, 8), of(15, 16), of(19, 16)].concat();
    assert!(matches!(pack(&slots, &tight), Answer::Fits(_)));
    assert_eq!(pack(&slots, &[tight, of(19, 1)].concat()), Answer::Impossible);
    // A wish with one permitted GPU.
    let bound = Item { need: Need::Profile(0), slots: 1 << 1 };
    assert!(matches!(pack(&slots, std::slice::from_ref(&bound)), Answer::Fits(found) if found[0].slot == 1));
    assert_eq!(pack(&slots, &[bound.clone(), bound]), Answer::Impossible);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    // Promise: P3
    #[test]
    fn search_by_instance_and_by_gpu_agree_on_several_gpus(
        gpus in prop::collection::vec((any::<bool>(), any::<prop::sample::Index>()), 1..4),
        wishes in prop::collection::vec((0_usize..6, prop::option::weighted(0.2, 0_u64..16)), 0..14),
    ) {
        let (hopper, small) = (geometry("h200-141"), geometry("a30-24"));
        let of = |small_one: bool| if small_one { (&small, "a30-24") } else { (&hopper, "h200-141") };
        let slots: Vec<CandidateGpu<'_>> = gpus.iter().map(|(small_one, index)| {
            let (geometry, key) = of(*small_one);
            let profiles: Vec<usize> = plain(key, geometry).into_iter().map(|(_, index)| index).collect();
            let states: Vec<_> = reachable(geometry, &profiles, &Occupation::default()).into_iter().collect();
            // Half of them are empty.
            let placed = if index.index(2) == 0 { &states[0] } else { index.get(&states) };
            CandidateGpu { geometry, state: state_of(geometry, placed) }
        }).collect();
        let items: Vec<Item> = wishes.iter().map(|&(wish, slots)| {
            let need = match wish {
                0 => Need::Profile(19),
                1 => Need::Profile(14),
                2 => Need::Profile(9),
                3 => Need::Size { memory_bytes: 20 << 30, multiprocessors: 0 },
                4 => Need::Size { memory_bytes: 5 << 30, multiprocessors: 20 },
                _ => Need::Profile(15),
            };
            Item { need, slots: slots.unwrap_or(u64::MAX) }
        }).collect();
        let by_instance = pack_within(&slots, &items, WorkBounds { positions: 300_000, patterns: 0 });
        let by_gpu = pack_within(&slots, &items, WorkBounds { positions: 0, patterns: u32::MAX });
        prop_assert_ne!(&by_gpu, &Answer::Unknown);
        if by_instance != Answer::Unknown {
            prop_assert_eq!(matches!(by_instance, Answer::Fits(_)), matches!(by_gpu, Answer::Fits(_)));
        }
        for answer in [by_instance, by_gpu] {
            let Answer::Fits(positions) = answer else { continue };
            prop_assert_eq!(positions.len(), items.len());
            let mut states: Vec<Occupation> = slots.iter().map(|slot| slot.state).collect();
            for (item, position) in items.iter().zip(&positions) {
                let geometry = slots[position.slot].geometry;
                prop_assert!(item.slots >> position.slot & 1 == 1);
                prop_assert!(geometry.suitable(item.need).contains(&position.profile));
                let state = &mut states[position.slot];
                prop_assert!(geometry.free(state, position.profile).any(|free| free == position.placement));
                *state = geometry.with(state, position.profile, position.placement);
            }
        }
    }
}
