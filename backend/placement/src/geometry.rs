//! The geometry of a GPU: its possible divisions, as its driver reports them, and the remainder in a given state.
//!
//! Nothing here knows a GPU model: slices, profiles and positions are values that NVML gave, and a geometry that contradicts
//! itself is refused ([`GeometryError`]) rather than interpreted. Sizes are bounded, so that a driver that answers nonsense
//! costs neither memory nor time.

pub use crate::axis::Placement;
use crate::configurations::{Configurations, Shape};

/// Longest axis: slices are bits of a word.
pub const MAX_SLICES: u8 = 64;
/// Most profiles of a GPU. Drivers know 17 today.
pub const MAX_PROFILES: usize = 32;

/// Engines beside the multiprocessors that come with an instance.
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
    /// The driver's number for it.
    pub id: u32,
    /// Memory slices that it occupies.
    pub memory_slices: u8,
    /// Compute slices that it consumes.
    pub compute_slices: u8,
    /// Most instances of it at a time.
    pub instances: u16,
    /// Where it can lie. Empty if the driver does not say, as some do when no more fits: then it fits nowhere.
    pub placements: Vec<Placement>,
    /// Memory of an instance.
    pub memory_bytes: u64,
    /// Multiprocessors of an instance. Not proportional to compute slices on real GPUs.
    pub multiprocessors: u32,
    /// Its other engines.
    pub attributes: Attributes,
}

/// Why a GPU is not divided by us.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GeometryError {
    /// No slice at all, or more than we can count.
    #[error("an axis of {0} slices; 1 to {MAX_SLICES} are supported")]
    Slices(u8),
    /// No profile at all, or more than we expect.
    #[error("{0} profiles; 1 to {MAX_PROFILES} are supported")]
    Profiles(usize),
    /// One number for two profiles.
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
    /// So many instances of it need more compute slices than the whole GPU has.
    #[error("profile {0}: its instances need more compute slices than the largest profile has")]
    Compute(u32),
    /// More divisions than we can count.
    #[error("more ways to divide the GPU than can be counted")]
    Rich,
    /// Instances that exist overlap, leave the axis, or have more compute slices than there are.
    #[error("the instance at slice {0} overlaps another, leaves the axis, or exceeds the compute slices")]
    Occupied(u8),
}

/// What a VM needs of an instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    /// Exactly this profile, by the driver's number.
    Profile(u32),
    /// Any that is large enough.
    Size {
        /// Bytes of memory, the driver's own included.
        memory_bytes: u64,
        /// Multiprocessors; 0 for any number.
        multiprocessors: u32,
    },
}

/// How a GPU is divided at the moment: all that decides what still fits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct State {
    pub(crate) occupied: u64,
    pub(crate) compute: u8,
    pub(crate) optical_flow: u16,
    pub(crate) counts: [u8; MAX_PROFILES],
}

impl State {
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
    /// Takes what the driver reports about an empty GPU, or says where it contradicts itself.
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
        let mut shapes: Vec<Shape> = Vec::new();
        for profile in &profiles {
            let shape = Shape { placements: profile.placements.clone(), compute: profile.compute_slices };
            if !shapes.contains(&shape) {
                shapes.push(shape);
            }
        }
        // Of the other engines only this one is known to be rationed: one profile "with media engines" at a time. If the
        // driver allows more instances than there are accelerators, they share them, and it rations nothing.
        let whole = profiles.iter().map(|profile| profile.attributes.optical_flow).max().unwrap_or(0);
        let rationed = profiles.iter().all(|profile| {
            u32::from(profile.instances) * u32::from(profile.attributes.optical_flow) <= u32::from(whole)
        });
        let configurations = Configurations::new(slices, compute, &shapes).ok_or(GeometryError::Rich)?;
        Ok(Self { slices, compute, optical_flow: rationed.then_some(whole), profiles, configurations })
    }

    /// [`Self::new`] where the axis ends with the last slice that any profile can occupy: drivers do not report its length.
    pub fn from_profiles(profiles: Vec<Profile>) -> Result<Self, GeometryError> {
        let ends = profiles.iter().flat_map(|profile| &profile.placements);
        let slices = ends.map(|placement| placement.start.saturating_add(placement.size)).max().unwrap_or(0);
        Self::new(slices, profiles)
    }

    /// Memory slices.
    pub const fn slices(&self) -> u8 {
        self.slices
    }

    /// Compute slices.
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

    /// The profiles that satisfy a need, the one that takes least of the GPU first.
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

    /// Where a profile fits now, from the left.
    pub fn free(&self, state: &State, profile: usize) -> impl Iterator<Item = Placement> + use<'_> {
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

    /// The state with one instance more. The position must be one of [`Self::free`].
    pub fn with(&self, state: &State, profile: usize, placement: Placement) -> State {
        let mut next = *state;
        next.occupied |= placement.mask();
        next.compute += self.profiles[profile].compute_slices;
        next.optical_flow = next.optical_flow.saturating_add(self.profiles[profile].attributes.optical_flow);
        next.counts[profile] += 1;
        next
    }

    /// The state with one instance more that exists already: of a known profile or not, at any position.
    pub(crate) fn with_existing(
        &self,
        state: &State,
        profile: Option<usize>,
        placement: Placement,
        compute: u8,
    ) -> Result<State, GeometryError> {
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

    /// N: how many sets of instances can still be added, the empty set included. It looks at slices only, not at limits
    /// per profile or at media engines: it measures, and [`Self::free`] decides.
    pub fn remaining(&self, state: &State) -> u128 {
        self.configurations.count(state.occupied, self.compute - state.compute)
    }

    /// Of the positions where a profile fits, the one that costs fewest remaining configurations, with that cost; of
    /// several, the highest.
    pub fn best(&self, state: &State, profile: usize) -> Option<(Placement, u128)> {
        let before = self.remaining(state);
        self.free(state, profile)
            .map(|placement| (placement, before - self.remaining(&self.with(state, profile, placement))))
            .min_by_key(|(placement, loss)| (*loss, std::cmp::Reverse(placement.start)))
    }
}
