//! Handover from one `sluiced` to the next, and the descriptors that the event loop watches for it.
//!
//! The daemon uses it at its start and its end. It owns the descriptors that the service manager keeps, and the client of the
//! launcher. It never decides about VMs.

pub(crate) mod keeper;
pub(crate) mod launching;
pub(crate) mod watched;
