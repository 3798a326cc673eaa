//! The VMs: each one's device, sessions, fence and limits.
//!
//! The registry makes and changes VMs; placement chooses their units. It owns the tasks that serve their devices. Nothing here
//! decides about a unit, and nothing here speaks HTTP.

pub mod vm;

pub(crate) mod audit;
pub(crate) mod conduct;
pub(crate) mod context;
pub(crate) mod fence;
pub(crate) mod fencing;
pub(crate) mod limits;
pub(crate) mod roster;
