//! The launcher: the one process that forks. `sluice-launcher` runs [`server`]; `sluiced` asks it by messages only.
//!
//! Owns the processes, users, cgroups and logs of devices, workers, arbiters and the inventory. It starts only the programs, users and
//! VMs of its own command line, and never reads a byte that a guest has written other than to copy it to the log.

pub mod server;

pub(crate) mod cgroup;
pub(crate) mod child_log;
pub(crate) mod spawn;
