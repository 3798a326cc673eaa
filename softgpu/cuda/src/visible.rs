//! The devices that a program sees: those of `CUDA_VISIBLE_DEVICES`, out of the GPUs and the instances of divided GPUs. A divided
//! GPU is never visible as a whole; without instances it is not visible at all.
//!
//! An entry is an index into all visible devices, the UUID of a GPU or a prefix of it (`GPU-…`), the same of an instance
//! (`MIG-…`), or an instance by its ids in a GPU (`MIG-GPU-…/1/0`). The first entry that matches no device, or more than one,
//! ends the list. A device that is listed twice makes the list empty.

use std::sync::Arc;

use sluice_cuda_frontend::environment::{DeviceNames, Environment};
use softgpu_device::{Confinement, Device};

/// Maximum number of devices that one process sees.
pub(crate) const MOST: usize = 16;

/// A device as a program sees it.
#[derive(Clone)]
pub(crate) struct Face {
    pub(crate) device: Arc<Device>,
    /// The instance, if the device is not a whole GPU.
    pub(crate) confinement: Option<Confinement>,
    pub(crate) name: String,
    pub(crate) uuid: [u8; 16],
    pub(crate) multiprocessors: u32,
}

impl Face {
    fn names(&self) -> DeviceNames {
        let identity = self.device.identity();
        let gpu = format!("GPU-{}", uuid_text(&identity.uuid));
        let (prefix, whole) = match self.confinement {
            None => (gpu, None),
            Some(there) => (
                format!("MIG-{}", uuid_text(&self.uuid)),
                Some(format!("MIG-{gpu}/{}/{}", there.gpu, there.compute)),
            ),
        };
        // All devices have one model and one clock, and an instance follows its GPU; so no device is the fastest.
        let bus = (0, i32::try_from(identity.index).unwrap_or(i32::MAX), 0);
        DeviceNames { prefixes: vec![prefix], whole, speed: 0, bus }
    }
}

/// The devices that the environment makes visible, in its order.
pub(crate) fn chosen(devices: &[Arc<Device>], environment: &Environment) -> Vec<Face> {
    let all: Vec<_> = devices.iter().flat_map(faces).collect();
    let names: Vec<_> = all.iter().map(Face::names).collect();
    environment.visible(&names).into_iter().take(MOST).map(|index| all[index].clone()).collect()
}

/// The visible devices of a GPU.
fn faces(device: &Arc<Device>) -> Vec<Face> {
    let identity = device.identity();
    // Most devices are not divided, and the table of divisions takes milliseconds to parse.
    let geometry = device.is_divided().then(|| device.geometry()).flatten();
    let Some(geometry) = geometry else {
        return vec![Face {
            device: Arc::clone(device),
            confinement: None,
            name: identity.model.name.to_owned(),
            uuid: identity.uuid,
            multiprocessors: identity.model.multiprocessors,
        }];
    };
    let mut instances = device.instances();
    instances.sort_unstable_by_key(|instance| instance.id);
    let mut faces = Vec::new();
    for instance in instances {
        let Some(profile) = geometry.profile(instance.profile) else { continue };
        let mut parts = instance.compute;
        parts.sort_unstable_by_key(|part| part.id);
        for part in parts {
            let Some(kind) = profile.compute(part.profile) else { continue };
            faces.push(Face {
                device: Arc::clone(device),
                confinement: Some(Confinement { epoch: instance.epoch, gpu: instance.id, compute: part.id }),
                name: format!("{} {}", identity.model.name, profile.title(kind)),
                uuid: part.uuid,
                multiprocessors: kind.multiprocessors,
            });
        }
    }
    faces
}

fn uuid_text(uuid: &[u8; 16]) -> String {
    let digits = format!("{:032x}", u128::from_be_bytes(*uuid));
    format!("{}-{}-{}-{}-{}", &digits[..8], &digits[8..12], &digits[12..16], &digits[16..20], &digits[20..])
}

#[cfg(test)]
mod tests {
    use super::*;
    use softgpu_device::Config;

    fn devices(directory: &tempfile::TempDir) -> Vec<Arc<Device>> {
        let state = directory.path().to_str().unwrap().to_owned();
        let config = Config::from_variables(&|name| match name {
            "SLUICE_SOFTGPU_STATE" => Some(state.clone().into()),
            "SLUICE_SOFTGPU_SCALE" => Some("4096".into()),
            "SLUICE_SOFTGPU_MODEL" => Some("H200-141".into()),
            _ => None,
        })
        .unwrap();
        (0..3).map(|index| Arc::new(Device::open(&config, index).unwrap())).collect()
    }

    fn environment(visible: Option<&str>) -> Environment {
        Environment::read(&|name| visible.filter(|_| name == "CUDA_VISIBLE_DEVICES").map(Into::into))
    }

    // Promise: P42
    #[test]
    fn visible_devices_follow_the_documented_rules() {
        let directory = tempfile::tempdir().unwrap();
        let devices = devices(&directory);
        let indexes = |variable: Option<&str>| -> Vec<u32> {
            chosen(&devices, &environment(variable)).iter().map(|face| face.device.identity().index).collect()
        };
        let uuid = format!("GPU-{}", uuid_text(&devices[1].identity().uuid));
        let nobody = [] as [u32; 0];
        for (variable, expected) in [
            (None, &[0, 1, 2][..]),
            (Some(""), &nobody),
            (Some("-1"), &nobody),
            (Some("2,0"), &[2, 0]),
            (Some(" 2 , 0"), &[2, 0]),
            (Some("1,-1,0"), &[1]),
            (Some("0,7,1"), &[0]),
            (Some("0,,1"), &[0]),
            (Some("1,1"), &nobody),
            (Some(&uuid), &[1]),
            (Some(&uuid[..20]), &[1]),
            (Some(&format!("{uuid},0")), &[1, 0]),
            (Some(&format!("{uuid},1")), &nobody),
            (Some("GPU-"), &nobody),
            (Some("GPU-nonsense"), &nobody),
            (Some("MIG-"), &nobody),
            (Some(&uuid.replace("GPU", "MIG")), &nobody),
        ] {
            assert_eq!(indexes(variable), expected, "{variable:?}");
        }
    }

    // Promise: P42
    #[test]
    fn divided_gpu_is_visible_only_as_its_instances() {
        let directory = tempfile::tempdir().unwrap();
        let devices = devices(&directory);
        devices[1].divide(true).unwrap();
        let named = |variable: Option<&str>| -> Vec<String> {
            chosen(&devices, &environment(variable)).into_iter().map(|face| face.name).collect()
        };
        let gpu = format!("GPU-{}", uuid_text(&devices[1].identity().uuid));
        let whole = "NVIDIA H200";
        // A divided GPU without instances is not visible.
        assert_eq!(named(None), [whole, whole]);
        assert_eq!(named(Some(&gpu)), [] as [&str; 0]);
        // An instance without a compute instance is not usable by a program.
        let instance = devices[1].create_instance(9, Some(4)).unwrap();
        assert_eq!(named(None), [whole, whole]);
        let all = devices[1].create_compute(instance.epoch, 2, None).unwrap();
        let small = devices[1].create_instance(19, Some(0)).unwrap();
        let part = devices[1].create_compute(small.epoch, 0, None).unwrap();
        let (large, little) = ("NVIDIA H200 MIG 3g.71gb", "NVIDIA H200 MIG 1g.18gb");
        assert_eq!(named(None), [whole, large, little, whole]);
        let uuid = |uuid: &[u8; 16]| format!("MIG-{}", uuid_text(uuid));
        let nobody = [] as [&str; 0];
        for (variable, expected) in [
            (uuid(&all.uuid), &[large][..]),
            (uuid(&part.uuid)[..16].to_owned(), &[little]),
            (format!("{},{}", uuid(&part.uuid), uuid(&all.uuid)), &[little, large]),
            (format!("MIG-{gpu}/2/0"), &[large]),
            (format!("MIG-{gpu}/2/1"), &nobody),
            ("MIG-".to_owned(), &nobody),
            (gpu.clone(), &nobody),
            ("1,3".to_owned(), &[large, whole]),
            (format!("{},{}", uuid(&all.uuid), uuid(&all.uuid)), &nobody),
        ] {
            assert_eq!(named(Some(&variable)), expected, "{variable}");
        }
        let faces = chosen(&devices, &environment(Some(&uuid(&all.uuid))));
        assert_eq!((faces[0].uuid, faces[0].multiprocessors), (all.uuid, 60));
        // A compute instance that is a part of its GPU instance has a name that contains its size.
        devices[1].destroy_compute(instance.epoch, all.id).unwrap();
        devices[1].create_compute(instance.epoch, 0, Some(1)).unwrap();
        assert_eq!(named(Some("1")), ["NVIDIA H200 MIG 1c.3g.71gb"]);
    }
}
