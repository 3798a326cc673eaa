//! The launcher's records of processes, and the tokens of their events.

use std::{path::PathBuf, time::Instant};

use rustix::fd::OwnedFd;
use sluice_runtime::child_log::ChildLog;

use crate::role::ChildRole;

pub(crate) const CONTROL: u64 = 0;
pub(crate) const LIFELINE: u64 = 1;
pub(crate) const SERVICE: u64 = 2;
pub(crate) const FIRST_CHILD: u64 = 3;
/// Token flag of a child's log, with the child's key.
pub(crate) const LOG: u64 = 1 << 63;

#[derive(Debug)]
pub(crate) struct Child {
    pub(crate) role: ChildRole,
    pub(crate) pid: u32,
    pub(crate) pidfd: OwnedFd,
    pub(crate) uid: Option<u32>,
    pub(crate) cgroup: Option<PathBuf>,
    /// `None` after the child has closed its end.
    pub(crate) log: Option<ChildLog>,
    /// The time at which its log is read again, if it is paused.
    pub(crate) quiet_until: Option<Instant>,
}

/// A process of an earlier launcher that continues, or another one with a user id for workers.
#[derive(Debug)]
pub(crate) struct Survivor {
    pub(crate) process: u32,
    pub(crate) pidfd: OwnedFd,
    pub(crate) uid: Option<u32>,
    /// True for a worker that `sluiced` has named.
    pub(crate) worker: bool,
    pub(crate) cgroup: Option<PathBuf>,
}

/// The properties of a VM's device.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct DeviceSpec {
    /// True if programs of this host connect to the device directly, without a VM.
    pub(crate) direct: bool,
    /// Number of displays of its device, 0 or 1.
    pub(crate) scanouts: u8,
    /// Bytes of the only arena of each session; `None` if arenas grow.
    pub(crate) fixed_arena: Option<u64>,
}
