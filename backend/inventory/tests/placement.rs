//! Plans that are carried out: decisions of the placer, made by the inventory on the software GPU's management library.

use crate::common::*;
use rustix::fd::OwnedFd;
use sluice_kit::figures::Random;
use sluice_messages::control::{FromInventory, ToInventory};
use sluice_messages::inventory::Instance;
use sluice_placement::{
    Attributes, Decision, Division, Fleet, Geometry, InstanceIdentity, Partition, PlaceError, PlanGpu,
    Policy, Refusal, Request, Rules, SlicePlacement, Strictness, UnitId, VmId,
    destruction::{DestructionAnswer, Step},
};
use std::{collections::BTreeMap, sync::Arc, time::Duration};

/// The inventory's report, in the placer's form.
fn geometry(socket: &OwnedFd) -> Geometry {
    let profile = |(profile, _, places): (sluice_messages::inventory::InstanceProfile, String, Vec<_>)| {
        let placements: Vec<_> = places
            .iter()
            .map(|place: &sluice_messages::inventory::InstancePlace| SlicePlacement {
                start: place.start,
                size: place.size,
            })
            .collect();
        sluice_placement::Profile {
            id: profile.id,
            memory_slices: placements[0].size,
            compute_slices: u8::try_from(profile.slices).unwrap(),
            instances: u16::try_from(profile.instances).unwrap(),
            placements,
            memory_bytes: profile.memory,
            multiprocessors: profile.multiprocessors,
            attributes: Attributes {
                copy_engines: profile.engines.copy.into(),
                decoders: profile.engines.decoder.into(),
                encoders: profile.engines.encoder.into(),
                jpeg: profile.engines.jpeg.into(),
                optical_flow: profile.engines.ofa.into(),
            },
        }
    };
    Geometry::from_profiles(kinds(socket).into_iter().map(profile).collect()).unwrap()
}

/// Arrivals, each with the number of arrivals after which it leaves.
fn trace(profiles: &[u32], seed: u64) -> Vec<(u32, u64)> {
    let mut random = Random(seed);
    let mut lifetime = || 1 + (0..12).take_while(|_| random.below(4) != 0).count() as u64;
    let lifetimes: Vec<_> = (0..500).map(|_| lifetime()).collect();
    let mut random = Random(seed ^ 0x5eed);
    lifetimes
        .into_iter()
        .map(|lifetime| (profiles[usize::try_from(random.below(profiles.len() as u64)).unwrap()], lifetime))
        .collect()
}

fn create(socket: &OwnedFd, profile: u32, start: u8, size: u8) -> Result<Instance, u32> {
    let request = ToInventory::Create { serial: 1, unit: 0, profile, start: start.into(), size: size.into() };
    match ask(socket, request) {
        FromInventory::Instance { instance, .. } => Ok(instance),
        FromInventory::Failed { error, .. } => Err(error),
        other => panic!("{other:?}"),
    }
}

fn destroy(socket: &OwnedFd, instance: &Instance) -> DestructionAnswer {
    const NOT_FOUND: u32 = 6;
    let Instance { gpu, profile, start, size, .. } = *instance;
    let request = ToInventory::Destroy { serial: 2, unit: 0, instance: gpu, profile, start, size };
    match ask(socket, request) {
        FromInventory::Done { .. } | FromInventory::Failed { error: NOT_FOUND, .. } => {
            DestructionAnswer::Gone
        }
        other => panic!("{other:?}"),
    }
}

/// The placer on one GPU, with each decision carried out. Returns the number of accepted arrivals.
fn planned(socket: &OwnedFd, geometry: &Arc<Geometry>, arrivals: &[(u32, u64)]) -> usize {
    let gpu = PlanGpu::new([1; 16], None, Division::Mig(Arc::clone(geometry)));
    let mut fleet = Fleet::new(Rules::default(), vec![gpu]);
    let mut there: BTreeMap<u64, (UnitId, Instance)> = BTreeMap::new();
    let mut leaving: BTreeMap<u64, Vec<u64>> = BTreeMap::new();
    let mut accepted = 0;
    let capacity = |profile| match ask(socket, ToInventory::Capacity { serial: 3, unit: 0, profile }) {
        FromInventory::Capacity { count, .. } => count,
        other => panic!("{other:?}"),
    };
    for (now, (profile, lifetime)) in (0..).zip(arrivals) {
        for vm in leaving.remove(&now).unwrap_or_default() {
            let (unit, instance) = there.remove(&vm).unwrap();
            assert_eq!(fleet.leave(VmId(vm)).unwrap(), Some(unit));
            fleet.close(unit, Duration::ZERO).unwrap();
            let mut step = fleet.closing_step(unit, Duration::ZERO).unwrap();
            while step != Step::Gone {
                assert!(matches!(step, Step::DestroyCompute | Step::DestroyInstance), "{step:?}");
                // Both at once; the second time there is none left.
                step = fleet.closing_answer(unit, Duration::ZERO, destroy(socket, &instance)).unwrap();
            }
        }
        let wish = Request {
            policy: Policy::Mig,
            strictness: Strictness::Unit,
            profile: Some(*profile),
            ..Request::new(VmId(now), 1)
        };
        match fleet.place(&wish) {
            Ok((unit, Decision::Open { partition: Partition::Instance { profile, placement }, .. })) => {
                let made = create(socket, profile, placement.start, placement.size);
                let made = made.unwrap_or_else(|error| panic!("{profile} at {placement:?}: {error}"));
                let identity =
                    InstanceIdentity { instance: made.gpu, compute_instance: made.compute, uuid: made.uuid };
                fleet.created(unit, Some(identity)).unwrap();
                fleet.proven_clean(unit).unwrap();
                there.insert(now, (unit, made));
                leaving.entry(now + lifetime).or_default().push(now);
                accepted += 1;
            }
            Ok(other) => panic!("{other:?}"),
            Err(PlaceError::Refused(Refusal::NoRoom)) => {
                assert_eq!(capacity(*profile), 0, "the driver has room for {profile}");
            }
            Err(error) => panic!("{error}"),
        }
        for more in fleet.capacity() {
            assert_eq!(more.count, capacity(more.profile), "profile {} after {now} arrivals", more.profile);
        }
        let listed = instances(socket);
        let mut known: Vec<_> = there.values().map(|(_, instance)| *instance).collect();
        known.sort_unstable_by_key(|instance| instance.start);
        assert_eq!(listed, known);
    }
    for (_, instance) in there.values() {
        destroy(socket, instance);
    }
    accepted
}

/// First fit: the lowest place that the driver does not refuse. Returns the number of accepted arrivals.
fn first_fit(socket: &OwnedFd, geometry: &Geometry, arrivals: &[(u32, u64)]) -> usize {
    let mut leaving: BTreeMap<u64, Vec<Instance>> = BTreeMap::new();
    let mut accepted = 0;
    for (now, (profile, lifetime)) in (0..).zip(arrivals) {
        for instance in leaving.remove(&now).unwrap_or_default() {
            destroy(socket, &instance);
        }
        let places = &geometry.profiles()[geometry.index(*profile).unwrap()].placements;
        let made = places.iter().find_map(|place| create(socket, *profile, place.start, place.size).ok());
        if let Some(made) = made {
            leaving.entry(now + lifetime).or_default().push(made);
            accepted += 1;
        }
    }
    for instance in leaving.into_values().flatten() {
        destroy(socket, &instance);
    }
    accepted
}

// Promise: P46
#[test]
fn planned_instances_are_created_and_more_fit_than_by_first_fit() {
    let state = state();
    let inventory = Inventory::start_with(state.path(), &DIVIDED);
    let socket = &inventory.control;
    let geometry = Arc::new(geometry(socket));
    assert_eq!((geometry.slices(), geometry.compute()), (8, 7));
    let (mut planned_all, mut first_all) = (0, 0);
    for (mix, seed) in [
        // All profiles alike, mostly small ones, no whole GPU, and those with media engines in addition.
        (&[19, 15, 14, 9, 5, 0][..], 1),
        (&[19, 19, 19, 19, 15, 14, 9], 2),
        (&[19, 15, 14, 9, 5], 3),
        (&[19, 20, 15, 14, 9], 4),
    ] {
        let arrivals = trace(mix, seed);
        let (planned, first) =
            (planned(socket, &geometry, &arrivals), first_fit(socket, &geometry, &arrivals));
        println!("{mix:?}: {planned} of {} planned, {first} by first fit", arrivals.len());
        planned_all += planned;
        first_all += first;
        assert!(instances(socket).is_empty());
    }
    // Single histories differ by a few in both directions; their sum does not.
    assert!(planned_all > first_all, "{planned_all} planned, {first_all} by first fit");
    assert!(inventory.ends());
}
