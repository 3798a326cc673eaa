//! State that must outlive the daemon.
//!
//! [`mod@file`] is the format: versioned, checksummed, whole or not at all. [`checkpoint`] is its content: fences, quarantines,
//! arbiters, and the [`objects`] that clients of the management API have made. [`adoption`] is about processes, which outlive
//! the daemon but not the machine.

pub(crate) mod adoption;
pub(crate) mod checkpoint;
pub(crate) mod file;
pub(crate) mod objects;
