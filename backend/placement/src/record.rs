//! The records of units that are kept over a restart.

use serde::{Deserialize, Serialize};

use crate::axis::Placement;

/// The UUID of a GPU.
pub type GpuUuid = [u8; 16];

/// A unit of the plan. Never given twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct UnitId(pub u64);

/// What a unit is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Spot {
    /// The whole GPU.
    Whole,
    /// A MIG instance.
    Instance {
        /// Profile, by the driver's number.
        profile: u32,
        /// Position.
        #[serde(with = "placement")]
        placement: Placement,
    },
}

mod placement {
    //! A position as `[start, size]`.
    use super::Placement;
    use serde::{Deserialize as _, Deserializer, Serialize as _, Serializer};

    pub(super) fn serialize<S: Serializer>(placement: &Placement, to: S) -> Result<S::Ok, S::Error> {
        [placement.start, placement.size].serialize(to)
    }

    pub(super) fn deserialize<'a, D: Deserializer<'a>>(from: D) -> Result<Placement, D::Error> {
        <[u8; 2]>::deserialize(from).map(|[start, size]| Placement { start, size })
    }
}

/// What the driver calls an instance.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    /// Number of the GPU instance.
    pub instance: u32,
    /// Number of the compute instance.
    pub compute_instance: u32,
    /// UUID of the MIG device. It can come back on a later instance.
    pub uuid: [u8; 16],
}

/// What is remembered of a unit over a restart.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// Its number.
    pub unit: UnitId,
    /// Its GPU.
    pub gpu: GpuUuid,
    /// What it is made of.
    pub spot: Spot,
    /// Whether several VMs may be in it.
    pub shared: bool,
    /// Where it stood.
    pub phase: RecordPhase,
    /// What the driver calls it, once it exists.
    pub identity: Option<Identity>,
    /// Its epoch.
    pub epoch: u64,
}

/// [`Phase`](crate::fleet::Phase), as it is remembered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RecordPhase {
    /// See [`Phase::Reserved`](crate::fleet::Phase::Reserved).
    Reserved,
    /// See [`Phase::Unproven`](crate::fleet::Phase::Unproven).
    Unproven,
    /// See [`Phase::Ready`](crate::fleet::Phase::Ready).
    Ready,
    /// See [`Phase::Closing`](crate::fleet::Phase::Closing).
    Closing,
    /// Found indestructible.
    Quarantined,
}
