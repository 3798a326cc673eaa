//! The settings of a VM in the form that units, arbiters and the launcher use.

use std::time::Duration;

use sluice_api::{
    ByteSize,
    v1::{self, MemoryShare, Priority, Rules},
};
use sluice_messages::control::{self, TimeShare};

/// A VM in the form that units, arbiters and the launcher use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct VmSpec {
    /// Number of the VM.
    pub(crate) id: u32,
    /// True for programs of this host, which connect to the device themselves; there is no VM.
    pub(crate) direct: bool,
    /// Displays of its device, 0 or 1.
    pub(crate) scanouts: u8,
    /// Bytes of the only arena of each of its sessions; `None` if arenas grow.
    pub(crate) fixed_arena: Option<u64>,
    /// Quota of device memory on each unit; 0 for all of it.
    pub(crate) memory: ByteSize,
    /// Number of its project; 0 for none.
    pub(crate) project: u32,
    /// Number of its organisation; 0 for none.
    pub(crate) organisation: u32,
    /// Limits of memory beside the quota, and within it.
    pub(crate) share: MemoryShare,
    /// Share of a unit's time.
    pub(crate) time: v1::TimeShare,
    /// Rules for the fences that Sluice sets by itself.
    pub(crate) rules: Rules,
    /// Creation time, in seconds since 1970.
    pub(crate) created: u64,
}

/// The time share of a VM in the form that arbiters receive.
pub(crate) fn shares(spec: &VmSpec) -> TimeShare {
    let time = spec.time;
    TimeShare {
        weight: time.weight,
        priority: match time.priority {
            Priority::Low => control::Priority::Low,
            Priority::Normal => control::Priority::Normal,
            Priority::High => control::Priority::High,
        },
        cap: if time.cap_permille == 0 { TimeShare::default().cap } else { time.cap_permille },
        guarantee: time.guarantee_permille,
        hang: spec.rules.hang_after_seconds.saturating_mul(1000),
    }
}

/// The project and the organisation of a VM in the form that arbiters receive.
pub(crate) const fn ancestors(spec: &VmSpec) -> u64 {
    ((spec.organisation as u64) << 32) | spec.project as u64
}

/// Time from a fence to the automatic readmission of a VM, if configured.
pub(crate) fn hold_off(spec: &VmSpec) -> Option<Duration> {
    let seconds = spec.rules.readmit_after_seconds;
    (seconds > 0).then(|| Duration::from_secs(seconds.into()))
}
