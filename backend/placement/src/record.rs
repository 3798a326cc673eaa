//! The records of units that are kept over a restart.

use serde::{Deserialize, Serialize};

use crate::axis::SlicePlacement;

/// The UUID of a GPU.
pub type GpuUuid = [u8; 16];

/// A unit of the plan. Numbers are never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct UnitId(pub u64);

/// The part of a GPU that a unit is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Partition {
    /// The whole GPU.
    Whole,
    /// A MIG instance.
    Instance {
        /// Profile, by the driver's number.
        profile: u32,
        /// Position on the axis of slices.
        #[serde(with = "placement")]
        placement: SlicePlacement,
    },
}

mod placement {
    //! A position as `[start, size]`.
    use super::SlicePlacement;
    use serde::{Deserialize as _, Deserializer, Serialize as _, Serializer};

    pub(super) fn serialize<S: Serializer>(placement: &SlicePlacement, to: S) -> Result<S::Ok, S::Error> {
        [placement.start, placement.size].serialize(to)
    }

    pub(super) fn deserialize<'a, D: Deserializer<'a>>(from: D) -> Result<SlicePlacement, D::Error> {
        <[u8; 2]>::deserialize(from).map(|[start, size]| SlicePlacement { start, size })
    }
}

/// The driver's identifiers of an instance.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct InstanceIdentity {
    /// Number of the GPU instance.
    pub instance: u32,
    /// Number of the compute instance.
    pub compute_instance: u32,
    /// UUID of the MIG device. It can come back on a later instance.
    pub uuid: [u8; 16],
}

/// The record of a unit that is kept over a restart.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UnitRecord {
    /// Its number.
    pub unit: UnitId,
    /// Its GPU.
    pub gpu: GpuUuid,
    /// The whole GPU, or the instance.
    #[serde(alias = "spot")]
    pub partition: Partition,
    /// True if several VMs may share it.
    pub shared: bool,
    /// Its phase.
    pub phase: RecordPhase,
    /// The driver's identifiers, once it exists.
    pub identity: Option<InstanceIdentity>,
    /// Its epoch.
    pub epoch: u64,
}

/// [`UnitPhase`](crate::fleet::UnitPhase) in a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RecordPhase {
    /// See [`UnitPhase::Reserved`](crate::fleet::UnitPhase::Reserved).
    Reserved,
    /// See [`UnitPhase::Unproven`](crate::fleet::UnitPhase::Unproven).
    Unproven,
    /// See [`UnitPhase::Ready`](crate::fleet::UnitPhase::Ready).
    Ready,
    /// See [`UnitPhase::Closing`](crate::fleet::UnitPhase::Closing).
    Closing,
    /// Its destruction failed.
    Quarantined,
}
