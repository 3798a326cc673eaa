//! The geometry of a GPU: its possible divisions, as its driver reports them, and the remainder in a given state.
//!
//! This module has no table of GPU models: slices, profiles and positions are values of NVML, and a geometry that contradicts
//! itself is refused ([`GeometryError`]), not interpreted. Sizes are bounded, so a driver that answers nonsense costs neither
//! memory nor time.

pub use crate::axis::SlicePlacement;
use crate::configurations::{Configurations, SliceShape};

/// Maximum length of an axis: slices are bits of a word.
pub const MAX_SLICES: u8 = 64;
/// Maximum number of profiles of a GPU. Present drivers have 17.
pub const MAX_PROFILES: usize = 32;

/// Engines of an instance beside its multiprocessors.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Attributes {
    /// Copy engines.
    pub copy_engines: u16,
    /// Video decoders.
    pub decoders: u16,
    /// Video encoders.
    pub encoders: u16,
    /// JPEG decoders.
    pub jpeg: u16,
    /// Optical flow accelerators.
    pub optical_flow: u16,
}

/// A kind of instance.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Profile {
    /// Its number in the driver.
    pub id: u32,
    /// Memory slices of an instance.
    pub memory_slices: u8,
    /// Compute slices of an instance.
    pub compute_slices: u8,
    /// Maximum number of instances at a time.
    pub instances: u16,
    /// Possible positions. Empty if the driver reports none, as some do when no more fits: then it fits nowhere.
    pub placements: Vec<SlicePlacement>,
    /// Memory of an instance.
    pub memory_bytes: u64,
    /// Multiprocessors of an instance. Not proportional to compute slices on real GPUs.
    pub multiprocessors: u32,
    /// Its other engines.
    pub attributes: Attributes,
}

/// The reason why Sluice does not divide a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GeometryError {
    /// No slice, or more than [`MAX_SLICES`].
    #[error("an axis of {0} slices; 1 to {MAX_SLICES} are supported")]
    Slices(u8),
    /// No profile, or more than [`MAX_PROFILES`].
    #[error("{0} profiles; 1 to {MAX_PROFILES} are supported")]
    Profiles(usize),
    /// Two profiles have this number.
    #[error("profile {0} is reported twice")]
    Twice(u32),
    /// A profile without memory, compute or instances.
    #[error("profile {0} has no memory, no compute slice or no instance")]
    Nothing(u32),
    /// A position that is not on the axis, is listed twice, or is not of the profile's size.
    #[error(
        "profile {0} cannot lie at slice {1}: the position is off the axis, repeated, or of another size"
    )]
    Position(u32, u8),
    /// The profile's number of instances needs more compute slices than the whole GPU has.
    #[error("profile {0}: its instances need more compute slices than the largest profile has")]
    Compute(u32),
    /// The number of divisions overflows.
    #[error("more ways to divide the GPU than can be counted")]
    Rich,
    /// Existing instances overlap, leave the axis, or have more compute slices than the GPU.
    #[error("the instance at slice {0} overlaps another, leaves the axis, or exceeds the compute slices")]
    Occupied(u8),
}

/// The need of a VM for an instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    /// Exactly this profile, by the driver's number.
    Profile(u32),
    /// Any profile that is large enough.
    Size {
        /// Bytes of memory, including the driver's own.
        memory_bytes: u64,
        /// Multiprocessors; 0 for any number.
        multiprocessors: u32,
    },
}

/// The occupation of a GPU, which decides what still fits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Occupation {
    pub(crate) occupied: u64,
    pub(crate) compute: u8,
    pub(crate) optical_flow: u16,
    pub(crate) counts: [u8; MAX_PROFILES],
}

impl Occupation {
    /// Occupied slices as bits.
    pub const fn occupied(&self) -> u64 {
        self.occupied
    }

    /// Compute slices in use.
    pub const fn compute(&self) -> u8 {
        self.compute
    }
}

/// A GPU's checked geometry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Geometry {
    slices: u8,
    compute: u8,
    /// Optical flow accelerators of the GPU, if instances do not share them.
    optical_flow: Option<u16>,
    profiles: Vec<Profile>,
    configurations: Configurations,
}

impl Geometry {
    /// Checks the driver's report about an empty GPU; an error names the contradiction.
    pub fn new(slices: u8, mut profiles: Vec<Profile>) -> Result<Self, GeometryError> {
        if slices == 0 || slices > MAX_SLICES {
            return Err(GeometryError::Slices(slices));
        }
        if profiles.is_empty() || profiles.len() > MAX_PROFILES {
            return Err(GeometryError::Profiles(profiles.len()));
        }
        // The largest profile is the whole GPU.
        let compute = profiles.iter().map(|profile| profile.compute_slices).max().unwrap_or(0);
        for profile in &mut profiles {
            let id = profile.id;
            profile.placements.sort_unstable();
            if profile.memory_bytes == 0
                || profile.compute_slices == 0
                || profile.instances == 0
                || compute > 64
            {
                return Err(GeometryError::Nothing(id));
            }
            if u32::from(profile.instances) * u32::from(profile.compute_slices) > u32::from(compute) {
                return Err(GeometryError::Compute(id));
            }
            for (index, placement) in profile.placements.iter().enumerate() {
                let repeated = index > 0 && profile.placements[index - 1] == *placement;
                if !placement.within(slices) || placement.size != profile.memory_slices || repeated {
                    return Err(GeometryError::Position(id, placement.start));
                }
            }
        }
        profiles.sort_by_key(|profile| profile.id);
        if let Some(pair) = profiles.windows(2).find(|pair| pair[0].id == pair[1].id) {
            return Err(GeometryError::Twice(pair[0].id));
        }
        let mut shapes: Vec<SliceShape> = Vec::new();
        for profile in &profiles {
            let shape =
                SliceShape { placements: profile.placements.clone(), compute: profile.compute_slices };
            if !shapes.contains(&shape) {
                shapes.push(shape);
            }
        }
        // Of the other engines only optical flow is known to be rationed: one profile "with media engines" at a time. If the driver
        // allows more instances than there are accelerators, they share them, and it is not rationed.
        let whole = profiles.iter().map(|profile| profile.attributes.optical_flow).max().unwrap_or(0);
        let rationed = profiles.iter().all(|profile| {
            u32::from(profile.instances) * u32::from(profile.attributes.optical_flow) <= u32::from(whole)
        });
        let configurations = Configurations::new(slices, compute, &shapes).ok_or(GeometryError::Rich)?;
        Ok(Self { slices, compute, optical_flow: rationed.then_some(whole), profiles, configurations })
    }

    /// As [`Self::new`], with an axis up to the last slice that any profile can occupy: drivers do not report its length.
    pub fn from_profiles(profiles: Vec<Profile>) -> Result<Self, GeometryError> {
        let ends = profiles.iter().flat_map(|profile| &profile.placements);
        let slices = ends.map(|placement| placement.start.saturating_add(placement.size)).max().unwrap_or(0);
        Self::new(slices, profiles)
    }

    /// Number of memory slices.
    pub const fn slices(&self) -> u8 {
        self.slices
    }

    /// Number of compute slices.
    pub const fn compute(&self) -> u8 {
        self.compute
    }

    /// The profiles, by their number.
    pub fn profiles(&self) -> &[Profile] {
        &self.profiles
    }

    /// The index of a profile in [`Self::profiles`].
    pub fn index(&self, id: u32) -> Option<usize> {
        self.profiles.binary_search_by_key(&id, |profile| profile.id).ok()
    }

    /// The profiles that satisfy a need, the smallest first.
    pub fn suitable(&self, need: Need) -> Vec<usize> {
        match need {
            Need::Profile(id) => self.index(id).into_iter().collect(),
            Need::Size { memory_bytes, multiprocessors } => {
                let mut found: Vec<usize> = (0..self.profiles.len())
                    .filter(|&index| {
                        let profile = &self.profiles[index];
                        profile.memory_bytes >= memory_bytes && profile.multiprocessors >= multiprocessors
                    })
                    .collect();
                found.sort_by_key(|&index| {
                    let Profile { memory_slices, compute_slices, attributes, memory_bytes, id, .. } =
                        &self.profiles[index];
                    (*memory_slices, *compute_slices, attributes.optical_flow, *memory_bytes, *id)
                });
                found
            }
        }
    }

    /// The free positions of a profile, from the left.
    pub fn free(&self, state: &Occupation, profile: usize) -> impl Iterator<Item = SlicePlacement> + use<'_> {
        let state = *state;
        let profile_of = &self.profiles[profile];
        let room = u32::from(state.compute) + u32::from(profile_of.compute_slices) <= u32::from(self.compute)
            && u16::from(state.counts[profile]) < profile_of.instances
            && self.optical_flow.is_none_or(|whole| {
                state.optical_flow.saturating_add(profile_of.attributes.optical_flow) <= whole
            });
        let placements = if room { profile_of.placements.as_slice() } else { &[] };
        placements.iter().copied().filter(move |placement| state.occupied & placement.mask() == 0)
    }

    /// The state with one more instance. The position must be one of [`Self::free`].
    pub fn with(&self, state: &Occupation, profile: usize, placement: SlicePlacement) -> Occupation {
        let mut next = *state;
        next.occupied |= placement.mask();
        next.compute += self.profiles[profile].compute_slices;
        next.optical_flow = next.optical_flow.saturating_add(self.profiles[profile].attributes.optical_flow);
        next.counts[profile] += 1;
        next
    }

    /// The state with one more existing instance: of a known profile or not, at any position.
    pub(crate) fn with_existing(
        &self,
        state: &Occupation,
        profile: Option<usize>,
        placement: SlicePlacement,
        compute: u8,
    ) -> Result<Occupation, GeometryError> {
        let error = GeometryError::Occupied(placement.start);
        if !placement.within(self.slices) || state.occupied & placement.mask() != 0 {
            return Err(error);
        }
        let mut next = *state;
        next.occupied |= placement.mask();
        next.compute = next.compute.checked_add(compute).filter(|&sum| sum <= self.compute).ok_or(error)?;
        if let Some(index) = profile {
            next.optical_flow =
                next.optical_flow.saturating_add(self.profiles[index].attributes.optical_flow);
            next.counts[index] = next.counts[index].checked_add(1).ok_or(error)?;
        }
        Ok(next)
    }

    /// N: the number of sets of instances that can still be added, the empty set included. It regards only slices, not limits per
    /// profile or media engines: it measures, and [`Self::free`] decides.
    pub fn remaining(&self, state: &Occupation) -> u128 {
        self.configurations.count(state.occupied, self.compute - state.compute)
    }

    /// Of the free positions of a profile, the one that costs fewest remaining configurations, with that cost; of several, the
    /// highest.
    pub fn best(&self, state: &Occupation, profile: usize) -> Option<(SlicePlacement, u128)> {
        let before = self.remaining(state);
        self.free(state, profile)
            .map(|placement| (placement, before - self.remaining(&self.with(state, profile, placement))))
            .min_by_key(|(placement, loss)| (*loss, std::cmp::Reverse(placement.start)))
    }
}
