//! The units: an arbiter for each whole device or instance, what they report, and what follows from it.
//!
//! The daemon starts them, and placement opens and closes those of instances. Owns the channels to arbiters and inventory, the escrows
//! of projects and organisations, and the last readings. It never decides who is on a unit.

pub(crate) mod balancing;
pub(crate) mod custodian;
pub(crate) mod escrow;
pub(crate) mod inventory;
pub(crate) mod sampling;
pub(crate) mod set;
pub(crate) mod unit;
pub(crate) mod xid;
