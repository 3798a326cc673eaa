//! Placement in the daemon: it answers requests for units and carries plans out.
//!
//! The registry calls it; the searches themselves are [`sluice_placement`], which knows no process. It owns the fleet as it is,
//! and the list of changes that are under way. It never speaks to a worker or a device.

pub(crate) mod placer;
pub(crate) mod placing;
pub(crate) mod rebalancing;
