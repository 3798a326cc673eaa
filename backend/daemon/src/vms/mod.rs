//! The VMs: the device, sessions, fence and limits of each.
//!
//! The registry creates and changes VMs; placement chooses their units. It owns the tasks that serve their devices, and the
//! handler of unit events, which fences VMs and quarantines units. Nothing here places a VM or uses HTTP.

pub mod vm;

pub(crate) mod context;
pub(crate) mod fence_task;
pub(crate) mod limits;
pub(crate) mod orphans;
pub(crate) mod set;
pub(crate) mod strikes;
pub(crate) mod unit_events;
