//! Remaining capacity, and fragmentation.

use std::sync::Arc;

use sluice_placement::batch::Answer;
use sluice_placement::{AdminState, Fleet, Need, Occupation, Pin, Request, Rules, SlicePlacement};

use crate::axis::{reachable, state_of};
use crate::geometries::{geometry, plain};
use crate::life::{mig_gpu, of_profile};

// Promise: P13
#[test]
fn capacity_equals_exhaustive_search() {
    for key in ["h200-141", "a30-24"] {
        let geometry = geometry(key);
        let profiles: Vec<usize> = plain(key, &geometry).into_iter().map(|(_, index)| index).collect();
        for placed in reachable(&geometry, &profiles, &Occupation::default()) {
            let state = state_of(&geometry, &placed);
            for &profile in &profiles {
                let most = reachable(&geometry, &[profile], &state).iter().map(Vec::len).max();
                let more = geometry.more(&state, profile);
                assert_eq!(
                    Some(more),
                    most.map(|most| u32::try_from(most).unwrap_or(0)),
                    "{key} {placed:?} {profile}"
                );
            }
        }
    }
}

// Promise: P13
#[test]
fn capacity_counts_open_gpus_only() {
    let geometry = Arc::new(geometry("h200-141"));
    let mut fleet = Fleet::new(Rules::default(), (0..3).map(|number| mig_gpu(number, &geometry)).collect());
    let count = |fleet: &Fleet, profile| {
        fleet.capacity().iter().find(|more| more.profile == profile).map(|more| more.count)
    };
    assert_eq!((count(&fleet, 19), count(&fleet, 9), count(&fleet, 0)), (Some(21), Some(6), Some(3)));
    fleet.place(&of_profile(1, 9)).expect("a half");
    assert_eq!((count(&fleet, 19), count(&fleet, 9), count(&fleet, 0)), (Some(18), Some(5), Some(2)));
    fleet.set_gpu_admin_state(2, AdminState::Draining).expect("a GPU");
    assert_eq!((count(&fleet, 19), count(&fleet, 9), count(&fleet, 0)), (Some(11), Some(3), Some(1)));

    let mixture = |profiles: &[u32]| profiles.iter().map(|&id| Need::Profile(id)).collect::<Vec<_>>();
    assert!(matches!(fleet.would_fit(&mixture(&[0, 9])), Answer::Fits(_)));
    assert_eq!(fleet.would_fit(&mixture(&[0, 0])), Answer::Impossible);
    // As a need by size: three of 60 GiB are three halves.
    let large = Need::Size { memory_bytes: 60 << 30, multiprocessors: 0 };
    assert!(matches!(fleet.would_fit(&[large; 3]), Answer::Fits(_)));
    assert_eq!(fleet.would_fit(&[large; 4]), Answer::Impossible);
    assert!(matches!(fleet.would_fit(&[]), Answer::Fits(_)));
}

// Promise: P13
#[test]
fn fragmentation_is_the_loss_against_the_best_arrangement() {
    let plain_geometry = geometry("h200-141");
    let geometry = Arc::new(plain_geometry);
    let profiles: Vec<usize> = plain("h200-141", &geometry).into_iter().map(|(_, index)| index).collect();
    // All 723 states, against the best of those with the same profiles.
    let states = reachable(&geometry, &profiles, &Occupation::default());
    let kinds = |placed: &[(usize, u8)]| placed.iter().map(|pair| pair.0).collect::<Vec<_>>();
    let mut worst: f64 = 0.0;
    for placed in &states {
        let state = state_of(&geometry, placed);
        let same = states.iter().filter(|other| kinds(other) == kinds(placed));
        let best = same.map(|other| geometry.remaining(&state_of(&geometry, other))).max().unwrap_or(0);
        let movable: Vec<(usize, SlicePlacement)> = placed
            .iter()
            .map(|&(profile, start)| {
                (profile, SlicePlacement { start, size: geometry.profiles()[profile].memory_slices })
            })
            .collect();
        let expected = 1.0 - geometry.remaining(&state) as f64 / best as f64;
        let found = geometry.fragmentation(&state, &movable);
        assert!(
            (found - expected).abs() < 1e-5 && (0.0..=1.0).contains(&found),
            "{placed:?} {found} {expected}"
        );
        worst = worst.max(found);
    }
    assert!(worst > 0.5, "{worst}");

    // Through the plan.
    let mut fleet = Fleet::new(Rules::default(), vec![mig_gpu(0, &geometry)]);
    assert_eq!(fleet.fragmentation(0), Some(0.0));
    let at = |vm, start| Request { pin: Some(Pin { gpu: 0, start: Some(start) }), ..of_profile(vm, 19) };
    fleet.place(&at(1, 1)).expect("slice 1");
    let one = fleet.fragmentation(0).expect("divided");
    fleet.place(&at(2, 4)).expect("slice 4");
    let two = fleet.fragmentation(0).expect("divided");
    assert!(one < two && 0.3 < two && two < 1.0, "{one} {two}");
    assert_eq!(fleet.fragmentation(1), None);
}
