//! Executable graphs, for the dispatcher and the module helper. Nothing here looks at the guest's memory or at the ring.
//!
//! The dispatcher resolves a plan of the guest ([`plan`]): ids become objects of the driver, addresses ranges that were looked up. The
//! module helper builds the driver's graph of it and keeps the executable ([`executables`]). The dispatcher keeps the guest's description
//! ([`records`]), so that it can check again whether the memory and the functions that an executable uses still exist, and so that the
//! executable can be made anew. A launch is one operation of the submitter.
//!
//! The driver's executable is used by one thread at a time: launches that were posted before a change are submitted before it, and none
//! is accepted until it has ended.

pub(crate) mod executables;
pub(crate) mod plan;
pub(crate) mod records;
