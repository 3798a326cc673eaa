//! The units: an arbiter for each whole device or instance, its reports, and the consequences.
//!
//! The daemon starts them, and placement opens and closes those of instances. It owns the channels to arbiters and inventory,
//! the escrows of projects and organisations, and the last readings. It never decides which VM is on a unit.

pub(crate) mod balancing;
pub(crate) mod custodian;
pub(crate) mod escrow;
pub(crate) mod inventory;
pub(crate) mod sampling;
pub(crate) mod set;
pub(crate) mod unit;
pub(crate) mod xid;
