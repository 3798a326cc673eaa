//! Placement in the daemon: it answers requests for units, and opens and closes them by plan.
//!
//! The registry calls it; the searches themselves are [`sluice_placement`], which depends on no process. It owns the current
//! fleet, and the list of changes in progress. It never sends to a worker or a device.

pub(crate) mod placer;
pub(crate) mod survey;
