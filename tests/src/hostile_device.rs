//! The messages between a test and `sluice-hostile-device`, which it plays the guest of.

use serde::{Deserialize, Serialize};

use crate::reach::Targets;

/// Largest length of an order.
pub const ORDER_BYTES: usize = 16 << 10;

/// Outcome of an attempt that has the device ended, which sends no report of it.
pub const ENDED: &str = "ended";

/// An order to a hostile device. One message; descriptors may come with it.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Order {
    /// Name of the attempt.
    pub attempt: String,
    /// Processes of others: `sluiced`, the launcher, the arbiter, the inventory, the neighbour's device and worker.
    pub processes: Vec<u32>,
    /// Sessions of the neighbour.
    pub sessions: Vec<u32>,
    /// The neighbour's epoch.
    pub epoch: u64,
    /// The things that a device without a filter tries to reach.
    pub targets: Option<Targets>,
}

/// The report of a hostile device.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Report {
    /// Things that the device has seen.
    pub outcome: String,
}
