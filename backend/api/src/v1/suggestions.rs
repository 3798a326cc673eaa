//! `/v1/placement/suggestions`: expected load of units, and suggested moves of VMs.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::UnitKind;

/// Load of units, and moves that would improve it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Suggestions {
    /// Configured reaction to load.
    pub policy: Rebalance,
    /// Horizon of the forecast, in seconds.
    pub horizon_seconds: u32,
    /// Load of the units that have VMs. Empty if the policy is `off`.
    pub units: Vec<UnitLoad>,
    /// Suggested moves. Empty if the policy is `off`.
    pub suggestions: Vec<Suggestion>,
}

/// Reaction to overloaded units.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
#[schema(as = RebalancePolicy)]
pub enum Rebalance {
    /// Load is not measured, and no move is suggested.
    #[default]
    Off,
    /// Moves are suggested.
    Suggest,
    /// Moves are suggested. Those for load are also made, of VMs without a session.
    Apply,
}

/// Load of a unit, as ratios. 1 is the whole unit.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct UnitLoad {
    /// Number of the unit.
    pub unit: u32,
    /// Part of its time that its VMs use, smoothed.
    pub gpu_time_ratio: f64,
    /// Part of its time that its VMs are expected to use at the horizon.
    pub gpu_time_ratio_ahead: f64,
    /// Part of its memory that is lent, smoothed.
    pub memory_ratio: f64,
    /// Part of its memory that is expected to be lent at the horizon.
    pub memory_ratio_ahead: f64,
}

/// A suggested move of a VM.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Suggestion {
    /// Name of the VM.
    pub vm: String,
    /// Number of its current unit.
    pub from: u32,
    /// Suggested place.
    pub to: Place,
    /// Reason for the move.
    pub reason: Reason,
    /// Explanation for people.
    pub why: String,
    /// True if the VM has no session and can move at once.
    pub idle: bool,
    /// Gain: the part of a unit by which the more loaded of both units is relieved, or by which the remaining configurations grow.
    pub gain_ratio: f64,
}

/// A place for a VM.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Place {
    /// Ordinal of the GPU.
    pub gpu: u32,
    /// Kind of the unit.
    pub kind: UnitKind,
    /// Number of the unit, if it exists already.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unit: Option<u32>,
    /// MIG profile, by its name or its number in the driver.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub profile: Option<String>,
    /// First memory slice of the instance.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub start: Option<u8>,
}

/// Reason for a suggested move.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Reason {
    /// The unit has too little time for its VMs.
    GpuTime,
    /// The unit has too little memory for its VMs.
    Memory,
    /// The instance occupies a position that larger instances need.
    Fragmentation,
}
