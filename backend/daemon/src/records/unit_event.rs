//! The unit events that other modules of the daemon send to [`crate::vms::unit_events`], which decides about VMs and units.

use sluice_messages::control::{HostAccess, NeededAbility};
use tokio::sync::mpsc::UnboundedSender;

/// An event that concerns more than the module that detected it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum UnitEvent {
    /// The arbiter of a unit has ended, and its loans with it.
    ArbiterEnded {
        /// The unit.
        unit: u32,
    },
    /// An arbiter reports an event.
    Arbiter {
        /// The unit.
        unit: u32,
        /// An [`sluice_messages::control::ArbiterEvent`].
        kind: u32,
        /// The VM, or 0.
        vm: u32,
        /// The process, or 0.
        process: u32,
        /// The bytes of the event.
        bytes: u64,
    },
    /// A project or organisation needs more escrow on a unit.
    Escrow {
        /// The unit.
        unit: u32,
        /// The project or organisation.
        ancestor: u32,
        /// Bytes that suffice.
        bytes: u64,
    },
    /// The limit of a project or organisation has changed; 0 if it is gone.
    Ancestor {
        /// The project or organisation.
        ancestor: u32,
        /// Its limit in bytes.
        bytes: u64,
    },
    /// A unit is closed.
    UnitGone {
        /// The unit.
        unit: u32,
    },
    /// The driver of a unit does not report the memory of each process.
    Unmeasured {
        /// The unit.
        unit: u32,
    },
    /// Kernels on a unit reach host memory that CUDA was never given.
    HostAccess {
        /// The unit.
        unit: u32,
        /// The memory that they reach.
        access: HostAccess,
        /// True if the configuration allows several VMs on the unit all the same.
        shared: bool,
    },
    /// The driver of a unit refuses an ability that each session needs.
    Unfit {
        /// The unit.
        unit: u32,
        /// The ability.
        ability: NeededAbility,
        /// The driver's CUresult.
        error: u32,
    },
    /// A device reports an error.
    Xid {
        /// The unit.
        unit: u32,
        /// The number of the error.
        xid: u32,
        /// The process, or 0.
        process: u32,
        /// The GPU instance, or [`WHOLE`](sluice_messages::inventory::WHOLE).
        instance: u32,
    },
    /// A device was killed because it let a crowd wait on its socket.
    Crowd {
        /// The VM.
        vm: u32,
    },
    /// A worker was killed and still exists.
    Hung {
        /// The VM.
        vm: u32,
        /// The process.
        process: u32,
    },
}

/// The sending end for unit events.
pub(crate) type UnitEventSender = UnboundedSender<UnitEvent>;
