//! Capacity: the number of VMs that would still fit, and the share of the remaining configurations that is lost to
//! fragmentation.

use std::collections::{BTreeMap, HashSet};

use crate::batch::{Answer, CandidateGpu, Item, pack};
use crate::fleet::{AdminState, Fleet, Partition};
use crate::geometry::{Geometry, Need, Occupation, SlicePlacement};

/// Maximum number of arrangements considered for the fragmentation of one GPU. An axis of 8 slices has 723.
const MAX_ARRANGEMENTS: usize = 20_000;

impl Geometry {
    /// The number of further instances of a profile that fit, if no other instance is added.
    pub fn more(&self, state: &Occupation, profile: usize) -> u32 {
        let of = &self.profiles()[profile];
        // Its positions are equally long: repeatedly taking the leftmost free one is optimal.
        let (mut state, mut count) = (*state, 0);
        let mut end = 0;
        while let Some(placement) = self.free(&state, profile).find(|placement| placement.start >= end) {
            end = placement.start.saturating_add(of.memory_slices);
            state = self.with(&state, profile, placement);
            count += 1;
        }
        count
    }

    /// The share of remaining configurations that is lost by the arrangement of instances: 1 - N(state) / N of the best
    /// arrangement of the same instances. 0: no arrangement is better; towards 1: they block nearly everything.
    ///
    /// `movable` are instances by profile and position; everything else in the state stays in place.
    pub fn fragmentation(&self, state: &Occupation, movable: &[(usize, SlicePlacement)]) -> f64 {
        let now = self.remaining(state);
        let mut base = *state;
        for &(profile, placement) in movable {
            base = self.without(&base, profile, placement);
        }
        let mut profiles: Vec<usize> = movable.iter().map(|pair| pair.0).collect();
        // The largest first: these have the fewest positions.
        profiles.sort_by_key(|&index| (std::cmp::Reverse(self.profiles()[index].memory_slices), index));
        let mut best = now;
        let mut seen = HashSet::new();
        self.arrange(&base, &profiles, &mut best, &mut seen);
        if best == 0 { 0.0 } else { 1.0 - ratio(now, best) }
    }

    fn arrange(
        &self,
        state: &Occupation,
        left: &[usize],
        best: &mut u128,
        seen: &mut HashSet<(Occupation, usize)>,
    ) {
        if seen.len() >= MAX_ARRANGEMENTS || !seen.insert((*state, left.len())) {
            return;
        }
        let Some((&profile, rest)) = left.split_first() else {
            *best = (*best).max(self.remaining(state));
            return;
        };
        for placement in self.free(state, profile) {
            self.arrange(&self.with(state, profile, placement), rest, best, seen);
        }
    }

    /// The state without one instance, which must be part of it.
    pub(crate) fn without(
        &self,
        state: &Occupation,
        profile: usize,
        placement: SlicePlacement,
    ) -> Occupation {
        let of = &self.profiles()[profile];
        let mut next = *state;
        next.occupied &= !placement.mask();
        next.compute = next.compute.saturating_sub(of.compute_slices);
        next.optical_flow = next.optical_flow.saturating_sub(of.attributes.optical_flow);
        next.counts[profile] = next.counts[profile].saturating_sub(1);
        next
    }
}

/// A ratio of counts, to a millionth.
fn ratio(part: u128, whole: u128) -> f64 {
    let millionths = part.saturating_mul(1_000_000) / whole.max(1);
    f64::from(u32::try_from(millionths).unwrap_or(1_000_000)) / 1e6
}

/// The number of further instances of a profile that would fit on all GPUs together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct More {
    /// Profile, by the driver's number.
    pub profile: u32,
    /// Memory of an instance; it differs between GPU models.
    pub memory_bytes: u64,
    /// Number of instances.
    pub count: u32,
}

impl Fleet {
    /// The number of further instances of each profile that would fit on the open GPUs, each kind alone.
    pub fn capacity(&self) -> Vec<More> {
        let mut more: BTreeMap<(u32, u64), u32> = BTreeMap::new();
        for slot in self.slots() {
            for (index, profile) in slot.geometry.profiles().iter().enumerate() {
                *more.entry((profile.id, profile.memory_bytes)).or_default() +=
                    slot.geometry.more(&slot.state, index);
            }
        }
        more.into_iter()
            .map(|((profile, memory_bytes), count)| More { profile, memory_bytes, count })
            .collect()
    }

    /// The positions at which a mixture of instances would fit on the open GPUs now, all together. In a [`Answer::Fits`] slots
    /// are indices into the list of [`Self::mig_gpus`].
    pub fn would_fit(&self, mixture: &[Need]) -> Answer {
        let items: Vec<Item> = mixture.iter().copied().map(Item::from).collect();
        pack(&self.slots(), &items)
    }

    /// The GPUs that take new MIG instances.
    pub fn mig_gpus(&self) -> Vec<usize> {
        (0..self.gpus().len())
            .filter(|&gpu| {
                self.gpus()[gpu].admin_state == AdminState::Open && self.gpus()[gpu].geometry().is_some()
            })
            .collect()
    }

    /// Fragmentation of a GPU; `None` if it is not divided. All instances of known profiles count as movable, because their
    /// positions were chosen.
    pub fn fragmentation(&self, gpu: usize) -> Option<f64> {
        let of = self.gpus().get(gpu)?;
        let geometry = of.geometry()?;
        let ours = self.units().filter(|unit| unit.gpu == gpu).filter_map(|unit| match unit.partition {
            Partition::Instance { profile, placement } => Some((geometry.index(profile)?, placement)),
            Partition::Whole => None,
        });
        let foreign = of
            .foreign()
            .iter()
            .filter_map(|foreign| Some((geometry.index(foreign.profile?)?, foreign.placement)));
        let movable: Vec<(usize, SlicePlacement)> = ours.chain(foreign).collect();
        Some(geometry.fragmentation(of.state(), &movable))
    }

    pub(crate) fn slots(&self) -> Vec<CandidateGpu<'_>> {
        self.mig_gpus()
            .into_iter()
            .filter_map(|gpu| {
                let gpu = &self.gpus()[gpu];
                Some(CandidateGpu { geometry: gpu.geometry()?, state: *gpu.state() })
            })
            .collect()
    }
}
