//! Handover from one `sluiced` to the next.
//!
//! The daemon uses it at its start and its end. It owns the descriptors that the service manager keeps, the client of the
//! launcher, and the processes that the launcher starts. It never makes decisions about VMs.

pub(crate) mod command;
pub(crate) mod fd_store;
pub(crate) mod launching;
pub(crate) mod process;
pub(crate) mod running;
mod service;
