//! GPU models for tests, from the data that the software GPU uses.

use serde::Deserialize;
use sluice_placement::{Attributes, Geometry, Profile, SlicePlacement};

#[derive(Deserialize)]
struct Document {
    gpu: Vec<Model>,
}

#[derive(Deserialize)]
struct Model {
    key: String,
    memory_slices: u8,
    gi: Vec<Row>,
}

#[derive(Clone, Deserialize)]
struct Row {
    kind: String,
    id: u32,
    starts: Vec<u8>,
    size: u8,
    compute: u8,
    max: u16,
    mem: u64,
    sm: u32,
    ce: u16,
    dec: u16,
    enc: u16,
    jpg: u16,
    ofa: u16,
}

fn document() -> Document {
    let text =
        std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/data/mig-geometry.toml"))
            .expect("the data of GPU models");
    toml::from_str(&text).expect("GPU models")
}

pub(crate) fn keys() -> Vec<String> {
    document().gpu.into_iter().map(|model| model.key).collect()
}

/// The report of a driver about a model.
pub(crate) fn reported(key: &str) -> (u8, Vec<(String, Profile)>) {
    let model = document().gpu.into_iter().find(|model| model.key == key).expect("a known model");
    let profiles = model.gi.into_iter().map(|row| {
        let placements = row.starts.iter().map(|&start| SlicePlacement { start, size: row.size }).collect();
        let attributes = Attributes {
            copy_engines: row.ce,
            decoders: row.dec,
            encoders: row.enc,
            jpeg: row.jpg,
            optical_flow: row.ofa,
        };
        let profile = Profile {
            id: row.id,
            memory_slices: row.size,
            compute_slices: row.compute,
            instances: row.max,
            placements,
            memory_bytes: row.mem << 20,
            multiprocessors: row.sm,
            attributes,
        };
        (row.kind, profile)
    });
    (model.memory_slices, profiles.collect())
}

/// The geometry of a model.
pub(crate) fn geometry(key: &str) -> Geometry {
    let (slices, profiles) = reported(key);
    Geometry::new(slices, profiles.into_iter().map(|(_, profile)| profile).collect()).expect("a geometry")
}

/// The profiles without media variants, which occupy the same slots, as indices; with their kinds.
pub(crate) fn plain(key: &str, geometry: &Geometry) -> Vec<(String, usize)> {
    let (_, profiles) = reported(key);
    profiles
        .into_iter()
        .filter(|(kind, _)| !kind.contains('+'))
        .map(|(kind, profile)| (kind, geometry.index(profile.id).expect("a profile")))
        .collect()
}
