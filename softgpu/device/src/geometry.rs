//! The division of the models into instances: the table in `data/mig-geometry.toml`, parsed once.
//!
//! Nothing here depends on a device: sizes are those of the hardware, before scaling.

use std::sync::OnceLock;

use serde::Deserialize;

/// The possible divisions of a model.
#[derive(Debug)]
pub struct Geometry {
    /// Memory slices: instances occupy ranges of these.
    pub memory_slices: u32,
    /// Compute slices that all instances together can have at most.
    pub compute_slices: u32,
    /// Profiles of GPU instances.
    pub profiles: Vec<Profile>,
    key: String,
}

/// A profile of GPU instances.
#[derive(Debug)]
pub struct Profile {
    /// Name, for example `1g.10gb`.
    pub name: String,
    /// Id among the profiles of the model.
    pub id: u32,
    /// Index among all profiles (`NVML_GPU_INSTANCE_PROFILE_*`).
    pub index: u32,
    /// Possible first memory slices of an instance.
    pub starts: Vec<u32>,
    /// Memory slices.
    pub size: u32,
    /// Compute slices.
    pub slices: u32,
    /// Maximum number of instances.
    pub instances: u32,
    /// Memory in MiB.
    pub memory_mib: u64,
    /// Multiprocessors.
    pub multiprocessors: u32,
    /// Engines for copies, decoding, encoding, images and optical flow.
    pub engines: [u32; 5],
    /// True if the instance has the media engines of which a GPU has only one set.
    pub media: bool,
    /// Profiles of compute instances in it.
    pub compute: Vec<ComputeProfile>,
}

/// A profile of compute instances in a GPU instance.
#[derive(Debug)]
pub struct ComputeProfile {
    /// Index (`NVML_COMPUTE_INSTANCE_PROFILE_*`), which is also its id.
    pub index: u32,
    /// Compute slices.
    pub slices: u32,
    /// Possible first compute slices, counted within the GPU instance.
    pub starts: Vec<u32>,
    /// Maximum number of instances.
    pub instances: u32,
    /// Multiprocessors.
    pub multiprocessors: u32,
}

/// `NVML_COMPUTE_INSTANCE_PROFILE_1_SLICE_REV1`.
const ONE_SLICE_REVISED: u32 = 7;

impl Geometry {
    /// Returns a row of the table.
    #[must_use]
    pub fn find(key: &str) -> Option<&'static Geometry> {
        all().iter().find(|geometry| geometry.key.eq_ignore_ascii_case(key))
    }

    /// Finds a profile by its id.
    #[must_use]
    pub fn profile(&self, id: u32) -> Option<&Profile> {
        self.profiles.iter().find(|profile| profile.id == id)
    }
}

impl Profile {
    /// Name of a device with this GPU instance profile and this compute instance profile, as CUDA shows it.
    #[must_use]
    pub fn title(&self, kind: &ComputeProfile) -> String {
        if kind.multiprocessors == self.multiprocessors {
            format!("MIG {}", self.name)
        } else {
            format!("MIG {}c.{}", kind.slices, self.name)
        }
    }

    /// Finds a compute instance profile by its index.
    #[must_use]
    pub fn compute(&self, index: u32) -> Option<&ComputeProfile> {
        self.compute.iter().find(|compute| compute.index == index)
    }
}

#[derive(Deserialize)]
struct ProfileTable {
    ci: Vec<ComputeRow>,
    gpu: Vec<GpuRow>,
}

#[derive(Deserialize)]
struct ComputeRow {
    compute: u32,
    nvml: u32,
    size: u32,
    starts: Vec<u32>,
    max: u32,
    full: bool,
}

#[derive(Deserialize)]
struct GpuRow {
    key: String,
    memory_slices: u32,
    compute_slices: u32,
    gi: Vec<ProfileRow>,
}

#[derive(Deserialize)]
struct ProfileRow {
    name: String,
    id: u32,
    nvml: u32,
    starts: Vec<u32>,
    size: u32,
    compute: u32,
    max: u32,
    mem: u64,
    sm: u32,
    ce: u32,
    dec: u32,
    enc: u32,
    jpg: u32,
    ofa: u32,
}

fn all() -> &'static [Geometry] {
    static ALL: OnceLock<Vec<Geometry>> = OnceLock::new();
    ALL.get_or_init(|| {
        let table: ProfileTable = toml::from_str(include_str!("../data/mig-geometry.toml"))
            .expect("the table is a part of this library, and the tests read it");
        table.gpu.into_iter().map(|gpu| geometry(gpu, &table.ci)).collect()
    })
}

fn geometry(gpu: GpuRow, rows: &[ComputeRow]) -> Geometry {
    // Multiprocessors of one slice, in the profile with the fewest.
    let slice = gpu.gi.iter().filter(|row| row.compute == 1).map(|row| row.sm).min().unwrap_or(0);
    let profiles = gpu
        .gi
        .into_iter()
        .map(|row| Profile {
            compute: compute(&row, rows, slice),
            media: row.name.contains("+me"),
            name: row.name,
            id: row.id,
            index: row.nvml,
            starts: row.starts,
            size: row.size,
            slices: row.compute,
            instances: row.max,
            memory_mib: row.mem,
            multiprocessors: row.sm,
            engines: [row.ce, row.dec, row.enc, row.jpg, row.ofa],
        })
        .collect();
    Geometry { memory_slices: gpu.memory_slices, compute_slices: gpu.compute_slices, profiles, key: gpu.key }
}

fn compute(profile: &ProfileRow, rows: &[ComputeRow], slice: u32) -> Vec<ComputeProfile> {
    let mut list: Vec<_> = rows
        .iter()
        .filter(|row| row.compute == profile.compute)
        .map(|row| ComputeProfile {
            index: row.nvml,
            slices: row.size,
            starts: row.starts.clone(),
            instances: row.max,
            multiprocessors: if row.full && profile.compute > 1 {
                profile.sm
            } else {
                (slice * row.size).min(profile.sm)
            },
        })
        .collect();
    if profile.compute == 1 && profile.sm > slice {
        // One slice with more than a slice's multiprocessors: the whole instance is a profile of its own.
        list.push(ComputeProfile {
            index: ONE_SLICE_REVISED,
            slices: 1,
            starts: vec![0],
            instances: 1,
            multiprocessors: profile.sm,
        });
    }
    list
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::MODELS;

    #[test]
    fn table_fits_the_models() {
        for model in MODELS {
            let geometry = model.division.map(|row| Geometry::find(row).expect(row));
            // A model with a row of its own has it.
            assert!(geometry.is_some() || Geometry::find(model.key).is_none(), "{}", model.key);
            let Some(geometry) = geometry else { continue };
            for profile in &geometry.profiles {
                let name = &profile.name;
                assert!(
                    profile.starts.iter().all(|start| start + profile.size <= geometry.memory_slices),
                    "{name}"
                );
                assert!(profile.slices <= geometry.compute_slices, "{name}");
                // The memory of the profile fits in its slices.
                let slices = model.memory_mib * u64::from(profile.size) / u64::from(geometry.memory_slices);
                assert!(
                    profile.memory_mib <= slices,
                    "{name} of {}: {} in {slices}",
                    model.key,
                    profile.memory_mib
                );
                let full: Vec<_> = profile
                    .compute
                    .iter()
                    .filter(|kind| {
                        (kind.slices, kind.multiprocessors) == (profile.slices, profile.multiprocessors)
                    })
                    .collect();
                assert_eq!(full.len(), 1, "{name} of {}: one compute profile fills it", model.key);
            }
        }
    }

    #[test]
    fn double_memory_profile_of_hopper_has_a_full_size_compute_profile() {
        let full = |key| {
            let profile = Geometry::find(key).and_then(|geometry| geometry.profile(15)).unwrap();
            profile.compute.iter().find(|kind| kind.multiprocessors == profile.multiprocessors).unwrap().index
        };
        assert_eq!((full("H100-80"), full("A100-80")), (7, 0));
    }

    #[test]
    fn hopper_has_723_configurations() {
        let geometry = Geometry::find("H100-80").unwrap();
        let plain: Vec<_> = geometry.profiles.iter().filter(|profile| !profile.media).collect();
        assert_eq!(configurations(&plain, 0, 0, geometry), 723);
    }

    /// Counts the sets of instances that fit beside `occupied`, each once: an instance follows the last one in order.
    fn configurations(profiles: &[&Profile], occupied: u32, slices: u32, geometry: &Geometry) -> u32 {
        fn from(rest: &[(u32, u32, u32)], occupied: u32, slices: u32, most: u32) -> u32 {
            let mut count = 1;
            for (index, (start, size, compute)) in rest.iter().enumerate() {
                let mask = ((1 << size) - 1) << start;
                if occupied & mask == 0 && slices + compute <= most {
                    count += from(&rest[index + 1..], occupied | mask, slices + compute, most);
                }
            }
            count
        }
        let all: Vec<_> = profiles
            .iter()
            .flat_map(|profile| profile.starts.iter().map(|start| (*start, profile.size, profile.slices)))
            .collect();
        from(&all, occupied, slices, geometry.compute_slices)
    }
}
