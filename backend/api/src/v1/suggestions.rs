//! `/v1/placement/suggestions`: which VMs had better be on other units, and what load is expected.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::UnitKind;

/// What load suggests.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Suggestions {
    /// What the configuration says is done about it.
    pub policy: Rebalance,
    /// How far is looked ahead.
    pub horizon_seconds: u32,
    /// Load of the units that VMs are on; nothing where the policy is `off`.
    pub units: Vec<UnitLoad>,
    /// Moves that would help; nothing where the policy is `off`.
    pub suggestions: Vec<Suggestion>,
}

/// What is done about overloaded units.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
#[schema(as = RebalanceWord)]
pub enum Rebalance {
    /// Nothing, and load is not looked at.
    #[default]
    Off,
    /// Moves are suggested.
    Suggest,
    /// Those for load are made, too, of VMs without a session.
    Apply,
}

/// Load of a unit. 1 is all that it has.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct UnitLoad {
    /// The unit.
    pub unit: u32,
    /// The part of its time that its VMs use, smoothed.
    pub gpu_time_ratio: f64,
    /// The same, as it is expected at the horizon.
    pub gpu_time_ratio_ahead: f64,
    /// The part of its memory that is lent, smoothed.
    pub memory_ratio: f64,
    /// The same, as it is expected at the horizon.
    pub memory_ratio_ahead: f64,
}

/// A move that would help.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Suggestion {
    /// The VM.
    pub vm: String,
    /// The unit it is on.
    pub from: u32,
    /// Where it would be better.
    pub to: Place,
    /// What it is about.
    pub reason: Reason,
    /// The same for people.
    pub why: String,
    /// Whether the VM has no session and can move at once.
    pub idle: bool,
    /// What is won: the part of a unit by which the worse of both is relieved, or by which remaining configurations grow.
    pub gain_ratio: f64,
}

/// A place for a VM.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Place {
    /// The GPU.
    pub gpu: u32,
    /// What its unit is.
    pub kind: UnitKind,
    /// The unit, where it is there already.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unit: Option<u32>,
    /// The kind of instance, by the driver's name or number.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub profile: Option<String>,
    /// The first memory slice of the instance.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub start: Option<u8>,
}

/// What a suggestion is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Reason {
    /// Its unit has not enough time for its VMs.
    GpuTime,
    /// Its unit has not enough memory for its VMs.
    Memory,
    /// Its instance lies where larger ones could be.
    Fragmentation,
}
