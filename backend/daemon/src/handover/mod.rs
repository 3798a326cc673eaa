//! Handover from one `sluiced` to the next.
//!
//! The daemon uses it at its start and its end. It owns the descriptors that the service manager keeps, and the client of the
//! launcher. It never makes decisions about VMs.

pub(crate) mod fd_store;
pub(crate) mod launching;
