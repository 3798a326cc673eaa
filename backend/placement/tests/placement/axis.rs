//! Geometry and the number of remaining configurations.

use std::collections::BTreeSet;

use proptest::prelude::*;
use sluice_placement::{Attributes, Geometry, GeometryError, Occupation, Profile, SlicePlacement};

use crate::geometries::{geometry, keys, plain, reported};

/// All sets of placed instances reachable from a state, by exhaustive search; the state's own, empty one included.
pub(crate) fn reachable(
    geometry: &Geometry,
    profiles: &[usize],
    from: &Occupation,
) -> BTreeSet<Vec<(usize, u8)>> {
    let (mut seen, mut stack) = (BTreeSet::new(), vec![(Vec::new(), *from)]);
    while let Some((placed, state)) = stack.pop() {
        if !seen.insert(placed.clone()) {
            continue;
        }
        for &profile in profiles {
            for placement in geometry.free(&state, profile) {
                let mut more = placed.clone();
                more.push((profile, placement.start));
                more.sort_unstable();
                stack.push((more, geometry.with(&state, profile, placement)));
            }
        }
    }
    seen
}

pub(crate) fn state_of(geometry: &Geometry, placed: &[(usize, u8)]) -> Occupation {
    placed.iter().fold(Occupation::default(), |state, &(profile, start)| {
        let size = geometry.profiles()[profile].memory_slices;
        geometry.with(&state, profile, SlicePlacement { start, size })
    })
}

// Promise: P1
#[test]
fn geometry_is_built_from_the_driver_report_of_every_model() {
    for key in keys() {
        let geometry = geometry(&key);
        assert!(geometry.remaining(&Occupation::default()) > 1, "{key}");
    }
    let a30 = geometry("a30-24");
    assert_eq!((a30.slices(), a30.compute()), (4, 4));
    let hopper = geometry("h200-141");
    assert_eq!((hopper.slices(), hopper.compute()), (8, 7));
    assert_eq!(hopper.remaining(&Occupation::default()), 723);
}

// Promise: P2
#[test]
fn remaining_configurations_equal_exhaustive_search() {
    for (key, all) in [("h200-141", 723), ("a30-24", 26)] {
        let geometry = geometry(key);
        let profiles: Vec<usize> = plain(key, &geometry).into_iter().map(|(_, index)| index).collect();
        let states = reachable(&geometry, &profiles, &Occupation::default());
        assert_eq!(states.len(), all, "{key}");
        for placed in &states {
            let state = state_of(&geometry, placed);
            let found = reachable(&geometry, &profiles, &state).len();
            assert_eq!(geometry.remaining(&state), found as u128, "{key} {placed:?}");
        }
    }
}

// Promise: P1
#[test]
fn second_profile_with_media_engines_has_no_free_placement() {
    let geometry = geometry("a30-24");
    let (small, large) = (geometry.index(21).expect("1g+me"), geometry.index(6).expect("2g+me"));
    let placement = geometry.free(&Occupation::default(), small).next().expect("a place");
    let state = geometry.with(&Occupation::default(), small, placement);
    assert_eq!(geometry.free(&state, large).count(), 0);
    assert_eq!(geometry.free(&state, small).count(), 0);
    let plain = geometry.index(5).expect("2g");
    assert_eq!(geometry.free(&state, plain).count(), 1);
}

fn profile(id: u32, size: u8, compute: u8, instances: u16, starts: &[u8]) -> Profile {
    Profile {
        id,
        memory_slices: size,
        compute_slices: compute,
        instances,
        placements: starts.iter().map(|&start| SlicePlacement { start, size }).collect(),
        memory_bytes: u64::from(size) << 30,
        multiprocessors: u32::from(compute) * 16,
        attributes: Attributes::default(),
    }
}

// Promise: P1
#[test]
fn inconsistent_or_oversized_geometry_is_refused() {
    let whole = profile(0, 8, 7, 1, &[0]);
    let with = |other: Profile| Geometry::new(8, vec![whole.clone(), other]).map(|_| ());
    assert_eq!(with(profile(1, 1, 1, 7, &[0, 1, 2, 3, 4, 5, 6])), Ok(()));
    assert_eq!(with(profile(1, 4, 3, 2, &[0, 5])), Err(GeometryError::Position(1, 5)));
    assert_eq!(with(profile(1, 4, 3, 2, &[0, 255])), Err(GeometryError::Position(1, 255)));
    assert_eq!(with(profile(1, 4, 3, 2, &[4, 4])), Err(GeometryError::Position(1, 4)));
    assert_eq!(with(profile(1, 0, 1, 1, &[0])), Err(GeometryError::Nothing(1)));
    assert_eq!(with(profile(1, 1, 0, 1, &[0])), Err(GeometryError::Nothing(1)));
    assert_eq!(with(profile(1, 1, 1, 0, &[0])), Err(GeometryError::Nothing(1)));
    assert_eq!(with(profile(1, 1, 1, 8, &[0])), Err(GeometryError::Compute(1)));
    assert_eq!(with(profile(0, 1, 1, 1, &[0])), Err(GeometryError::Twice(0)));
    // The size of a position differs from the profile's.
    let mut odd = profile(1, 2, 1, 1, &[0]);
    odd.placements[0].size = 3;
    assert_eq!(with(odd), Err(GeometryError::Position(1, 0)));
    // Nonsense of any size costs nothing.
    assert_eq!(Geometry::new(0, vec![whole.clone()]), Err(GeometryError::Slices(0)));
    assert_eq!(Geometry::new(65, vec![whole.clone()]), Err(GeometryError::Slices(65)));
    assert_eq!(Geometry::new(8, vec![]), Err(GeometryError::Profiles(0)));
    let many = (0..33).map(|id| profile(id, 1, 1, 1, &[0])).collect();
    assert_eq!(Geometry::new(8, many), Err(GeometryError::Profiles(33)));
    // 31 shapes that may start at each of 64 slices have more subsets than the counter holds.
    let starts: Vec<u8> = (0..64).collect();
    let mut rich: Vec<Profile> =
        (1..32).map(|id| profile(id, 1, 1 + u8::try_from(id).unwrap_or(0) % 2, 32, &starts)).collect();
    rich.push(profile(0, 64, 64, 1, &[0]));
    for (id, profile) in rich.iter_mut().enumerate().take(31) {
        // Each has other starts, so that no two have one shape.
        profile.placements.rotate_left(id);
        profile.placements.truncate(64 - id);
    }
    assert_eq!(Geometry::new(64, rich), Err(GeometryError::Rich));
    // The longest supported axis.
    let long = vec![profile(0, 64, 64, 1, &[0]), profile(1, 1, 1, 64, &starts)];
    assert_eq!(
        Geometry::new(64, long).map(|geometry| geometry.remaining(&Occupation::default())),
        Ok((1 << 64) + 1)
    );
}

// Promise: P1
#[test]
fn geometry_does_not_depend_on_the_order_of_the_report() {
    let (slices, profiles) = reported("h100-80");
    let mut profiles: Vec<Profile> = profiles.into_iter().map(|(_, profile)| profile).collect();
    let one = Geometry::new(slices, profiles.clone());
    profiles.reverse();
    for profile in &mut profiles {
        profile.placements.reverse();
    }
    assert_eq!(one, Geometry::new(slices, profiles));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    // Promise: P2
    #[test]
    fn remaining_count_equals_exhaustive_search_on_any_small_geometry(
        slices in 1_u8..7,
        shapes in prop::collection::vec((1_u8..5, 1_u8..4, any::<u8>()), 1..4),
        blocked in any::<u64>(),
    ) {
        let mut profiles = vec![profile(0, slices, 4, 1, &[0])];
        for (id, (size, compute, starts)) in shapes.into_iter().enumerate() {
            let starts: Vec<u8> =
                (0..slices).filter(|start| starts >> start & 1 == 1 && start + size <= slices).collect();
            let size = size.min(slices);
            // As many instances as compute allows: the count has no other limit.
            profiles.push(profile(u32::try_from(id).unwrap_or(0) + 1, size, compute, u16::from(4 / compute), &starts));
        }
        // Two profiles of one shape count once.
        profiles.dedup_by(|a, b| a.placements == b.placements && a.compute_slices == b.compute_slices);
        let unique: Vec<Profile> = profiles.iter().enumerate()
            .filter(|(at, one)| !profiles[..*at].iter().any(|other|
                other.placements == one.placements && other.compute_slices == one.compute_slices))
            .map(|(_, one)| one.clone()).collect();
        let geometry = Geometry::new(slices, unique).expect("a geometry");
        let all: Vec<usize> = (0..geometry.profiles().len()).collect();
        // Start from a reachable state: the one that the bits choose.
        let states = reachable(&geometry, &all, &Occupation::default());
        let placed = states.iter().nth(usize::try_from(blocked % states.len() as u64).unwrap_or(0)).expect("a state");
        let state = state_of(&geometry, placed);
        prop_assert_eq!(geometry.remaining(&state), reachable(&geometry, &all, &state).len() as u128);
    }
}
