//! Where VMs go: requests are answered and plans carried out.
//!
//! The registry asks for places; the searches themselves are [`sluice_placement`], which knows no process. Owns the fleet as it is, and
//! which changes of it are under way. It never speaks to a worker or a device.

pub(crate) mod placer;
pub(crate) mod placing;
pub(crate) mod rebalancing;
