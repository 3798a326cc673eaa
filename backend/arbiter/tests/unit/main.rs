//! The real arbiter on the software GPU, with workers in processes of their own. The tests play `sluiced` and the
//! inventory.
//!
//! Runs: many at once

mod booking;
mod bounds;
// Runs: alone
mod crowd;
mod death;
mod faults;
// Runs: alone
mod figures;
mod host;
mod instances;
mod lending;
mod returning;
mod time;
mod usage;
mod watch;
mod worker;

pub(crate) const MIB: u64 = 1 << 20;
