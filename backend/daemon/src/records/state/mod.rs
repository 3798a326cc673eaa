//! State that must outlive the daemon.
//!
//! The registry, the VMs and the units write it, and the next daemon reads it at its start. It owns the state file. It must never act
//! on the state: it neither starts nor ends a process.
//!
//! [`mod@file`] is the format: versioned, checksummed, whole or not at all. [`checkpoint`] is its content: fences, quarantines,
//! arbiters, and the [`objects`] that clients of the management API have made. [`adoption`] is about processes, which outlive
//! the daemon but not the machine.

pub(crate) mod adoption;
pub(crate) mod checkpoint;
pub(crate) mod file;
pub(crate) mod objects;
