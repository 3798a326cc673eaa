//! Instances that are requested together, and the GPUs on which they may be.

use crate::geometry::{Geometry, Need, Occupation, SlicePlacement};

/// A GPU that may be used.
#[derive(Clone, Copy, Debug)]
pub struct CandidateGpu<'a> {
    /// Its possible divisions.
    pub geometry: &'a Geometry,
    /// Its occupied slices.
    pub state: Occupation,
}

/// A requested instance.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Item {
    /// Its required size or profile.
    pub need: Need,
    /// Permitted slots, as bits; all by default.
    pub slots: u64,
}

impl From<Need> for Item {
    fn from(need: Need) -> Self {
        Self { need, slots: u64::MAX }
    }
}

/// The position of an instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Position {
    /// Index of the slot.
    pub slot: usize,
    /// Index of the profile in the slot's geometry.
    pub profile: usize,
    /// Position on the axis.
    pub placement: SlicePlacement,
}

/// Equal wishes.
pub(crate) struct WishKind {
    pub(crate) item: Item,
    pub(crate) count: u16,
    /// Per slot, the suitable profiles.
    pub(crate) profiles: Vec<Vec<usize>>,
    /// The fewest slices that a suitable profile occupies on any slot.
    pub(crate) least_slices: u32,
    pub(crate) least_compute: u32,
}

impl WishKind {
    pub(crate) fn new(item: Item, slots: &[CandidateGpu<'_>]) -> Self {
        let profiles: Vec<Vec<usize>> = slots
            .iter()
            .enumerate()
            .map(|(at, slot)| {
                let allowed = at < 64 && item.slots >> at & 1 == 1;
                if allowed { slot.geometry.suitable(item.need) } else { Vec::new() }
            })
            .collect();
        let least = |of: fn(&crate::Profile) -> u8| {
            let all = profiles.iter().zip(slots).flat_map(|(profiles, slot)| {
                profiles.iter().map(move |&index| u32::from(of(&slot.geometry.profiles()[index])))
            });
            all.min().unwrap_or(0)
        };
        let (least_slices, least_compute) =
            (least(|profile| profile.memory_slices), least(|profile| profile.compute_slices));
        Self { item, count: 0, profiles, least_slices, least_compute }
    }
}
