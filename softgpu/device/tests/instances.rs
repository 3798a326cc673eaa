//! Instances of a device, seen by several processes. An open device stands for a process here: locks belong to open files.

use softgpu_device::{
    AttachError, Client, Config, Confinement, Device, GpuInstance, InstanceError, PAGE_BYTES, Use,
};
use std::collections::BTreeMap;
use std::sync::Arc;

struct Place(
    #[expect(dead_code, reason = "removed at the end")] tempfile::TempDir,
    BTreeMap<&'static str, String>,
);

impl Place {
    fn new(settings: &[(&'static str, &str)]) -> Place {
        let directory = tempfile::Builder::new().prefix("softgpu-mig-").tempdir_in("/dev/shm").unwrap();
        let mut variables = BTreeMap::from([
            ("SLUICE_SOFTGPU_STATE", directory.path().display().to_string()),
            ("SLUICE_SOFTGPU_SCALE", "512".to_owned()),
            ("SLUICE_SOFTGPU_MODEL", "H100-80".to_owned()),
            ("SLUICE_SOFTGPU_MIG", "1".to_owned()),
        ]);
        variables.extend(settings.iter().map(|(name, value)| (*name, (*value).to_owned())));
        Place(directory, variables)
    }

    fn open(&self) -> Arc<Device> {
        let config = Config::from_variables(&|name| self.1.get(name).map(Into::into)).unwrap();
        Arc::new(Device::open(&config, 0).unwrap())
    }
}

/// Creates a GPU instance with one compute instance of its full size.
fn whole(device: &Device, profile: u32, start: u32) -> (GpuInstance, Confinement) {
    let instance = device.create_instance(profile, Some(start)).unwrap();
    let known = device.geometry().unwrap().profile(profile).unwrap();
    let full = known.compute.iter().find(|kind| kind.multiprocessors == known.multiprocessors).unwrap();
    let compute = device.create_compute(instance.epoch, full.index, None).unwrap();
    (instance.clone(), Confinement { epoch: instance.epoch, gpu: instance.id, compute: compute.id })
}

// Promise: P40
#[test]
fn instances_belong_to_the_device_and_outlive_their_creator() {
    let place = Place::new(&[]);
    let (instance, confinement) = whole(&place.open(), 9, 4);
    assert_eq!((instance.id, instance.start), (2, 4));
    let device = place.open();
    let found = device.instances();
    assert_eq!((found.len(), found[0].epoch, found[0].compute.len()), (1, instance.epoch, 1));
    // The only position is taken, and so are those that overlap it.
    assert!(matches!(device.create_instance(9, Some(4)), Err(InstanceError::Full)));
    assert!(matches!(device.create_instance(14, Some(4)), Err(InstanceError::Full)));
    assert!(matches!(device.create_instance(14, Some(1)), Err(InstanceError::Invalid)));
    assert!(matches!(device.create_instance(77, None), Err(InstanceError::Invalid)));
    assert_eq!(
        (device.capacity(9).unwrap(), device.capacity(19).unwrap(), device.capacity(0).unwrap()),
        (1, 4, 0)
    );
    let used = place.open().attach_confined(confinement).unwrap();
    assert!(matches!(device.destroy_compute(instance.epoch, 0), Err(InstanceError::InUse)));
    assert!(matches!(device.destroy_instance(instance.epoch), Err(InstanceError::InUse)));
    assert!(matches!(device.divide(false), Err(InstanceError::InUse)));
    drop(used);
    device.destroy_compute(instance.epoch, 0).unwrap();
    assert!(matches!(place.open().attach_confined(confinement), Err(AttachError::Gone)));
    device.destroy_instance(instance.epoch).unwrap();
    assert!(matches!(device.destroy_instance(instance.epoch), Err(InstanceError::Gone)));
    device.divide(false).unwrap();
    assert!(matches!(device.create_instance(9, None), Err(InstanceError::Undivided)));
}

// Promise: P40
#[test]
fn one_instance_has_the_media_engines_and_all_slices_are_counted() {
    let place = Place::new(&[]);
    let device = place.open();
    whole(&device, 20, 0);
    assert!(matches!(device.create_instance(20, Some(1)), Err(InstanceError::Full)));
    assert_eq!(device.places(20).unwrap(), [] as [u32; 0], "the maximum number exists");
    assert_eq!(device.capacity(19).unwrap(), 6);
    // Two instances with half of the memory fill it, and leave one compute slice unusable.
    device.reset().unwrap();
    assert!(device.is_divided() && device.instances().is_empty());
    whole(&device, 9, 0);
    whole(&device, 9, 4);
    for profile in &device.geometry().unwrap().profiles {
        assert_eq!(device.capacity(profile.id).unwrap(), 0, "{}", profile.name);
    }
}

// Promise: P41
#[test]
fn instance_has_its_own_memory_and_no_other() {
    let place = Place::new(&[]);
    let device = place.open();
    let (one, in_one) = whole(&device, 19, 0);
    let (other, in_other) = whole(&device, 15, 2);
    assert!(matches!(place.open().attach(Client::Cuda), Err(AttachError::Divided)));
    let (a, b) =
        (place.open().attach_confined(in_one).unwrap(), place.open().attach_confined(in_other).unwrap());
    let pages = |bytes: u64| bytes / PAGE_BYTES;
    assert_eq!((pages(a.total_bytes()), pages(b.total_bytes())), (9984 / 2 / 512, 20096 / 2 / 512));
    let all = a.allocate(a.total_bytes(), Use::Chunk).unwrap();
    assert!(a.allocate(1, Use::Chunk).is_err(), "an instance cannot exceed its memory");
    assert_eq!((a.free_bytes(), b.free_bytes()), (0, b.total_bytes()));
    assert_eq!(device.instance_memory(&one).1, a.total_bytes());
    assert_eq!(device.instance_memory(&other).1, 0);
    let theirs = b.allocate(3 * PAGE_BYTES, Use::Heap).unwrap();
    let inside = |instance: &GpuInstance, runs: &[softgpu_device::Run]| {
        let range = device.instance_pages(instance);
        runs.iter().all(|run| range.contains(&run.first) && run.first + run.count <= range.end)
    };
    assert!(inside(&one, all.runs()) && inside(&other, theirs.runs()));
    // Only owners in the same instance can import an export.
    let exported = all.export().unwrap();
    assert!(b.import(&exported).is_err());
    let neighbour = place.open().attach_confined(in_one).unwrap();
    assert_eq!(neighbour.import(&exported).unwrap().bytes(), a.total_bytes());
    let confined: Vec<_> = device.processes().iter().filter_map(|process| process.confinement).collect();
    assert_eq!(confined.len(), 3);
    assert_eq!(confined.iter().filter(|there| **there == in_one).count(), 2);
}

// Promise: P40
#[test]
fn ids_and_configured_uuids_are_reused_but_epochs_never() {
    for (setting, same) in [("new", false), ("same", true)] {
        let place = Place::new(&[("SLUICE_SOFTGPU_MIG_UUIDS", setting)]);
        let device = place.open();
        let mut seen = Vec::new();
        for _ in 0..2 {
            let (instance, _) = whole(&device, 19, 3);
            seen.push((instance.epoch, instance.id, device.instances()[0].compute[0].uuid));
            device.destroy_compute(instance.epoch, 0).unwrap();
            device.destroy_instance(instance.epoch).unwrap();
        }
        assert_ne!(seen[0].0, seen[1].0);
        assert_eq!(seen[0].1, seen[1].1);
        assert_eq!(seen[0].2 == seen[1].2, same);
    }
}

// Promise: P40
#[test]
fn concurrent_changes_from_many_processes_are_serialised() {
    let place = Place::new(&[]);
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                let device = place.open();
                for _ in 0..50 {
                    match device.create_instance(19, None) {
                        Ok(instance) => device.destroy_instance(instance.epoch).unwrap(),
                        Err(InstanceError::Full) => {}
                        Err(error) => panic!("{error}"),
                    }
                    let mut starts: Vec<_> = device.instances().iter().map(|there| there.start).collect();
                    starts.sort_unstable();
                    let before = starts.len();
                    starts.dedup();
                    assert_eq!(starts.len(), before, "two instances overlap");
                }
            });
        }
    });
    assert!(place.open().instances().is_empty());
}

// Promise: P40
#[test]
fn every_model_accepts_every_profile_at_every_position() {
    for model in ["A100-40", "A100-80", "H100-80", "H200-141", "A30-24"] {
        let place = Place::new(&[("SLUICE_SOFTGPU_MODEL", model)]);
        let device = place.open();
        for profile in &device.geometry().unwrap().profiles {
            assert_eq!(device.places(profile.id).unwrap(), profile.starts, "{model} {}", profile.name);
            for start in &profile.starts {
                let (instance, confinement) = whole(&device, profile.id, *start);
                let owner = place.open().attach_confined(confinement).unwrap();
                assert!(owner.allocate(owner.total_bytes(), Use::Chunk).is_ok(), "{model} {}", profile.name);
                drop(owner);
                device.destroy_compute(instance.epoch, 0).unwrap();
                device.destroy_instance(instance.epoch).unwrap();
            }
            let fits = device.capacity(profile.id).unwrap();
            for _ in 0..fits {
                device.create_instance(profile.id, None).unwrap();
            }
            assert!(matches!(device.create_instance(profile.id, None), Err(InstanceError::Full)));
            assert_eq!(fits, profile.instances, "{model} {}", profile.name);
            device.reset().unwrap();
        }
    }
}
