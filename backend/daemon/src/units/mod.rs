//! The units: an arbiter for each whole device or instance, and its reports.
//!
//! The daemon starts them, and placement opens and closes those of instances. It owns the channels to arbiters and inventory,
//! the escrows of projects and organisations, and the last reports. It never chooses the unit of a VM.

pub(crate) mod balancing;
pub(crate) mod escrow;
pub(crate) mod inventory;
pub(crate) mod set;
pub(crate) mod unit;
pub(crate) mod xid;
