//! The notices that other modules of the daemon send to the [`crate::units::custodian`], which decides about VMs and units.

use tokio::sync::mpsc::UnboundedSender;

/// Something has happened that is about more than the room it happened in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Notice {
    /// The arbiter of a unit has ended, and what it lent is lent no more.
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
        /// Bytes it is about.
        bytes: u64,
    },
    /// An ancestor has not enough on a unit.
    Escrow {
        /// The unit.
        unit: u32,
        /// The project or organisation.
        ancestor: u32,
        /// Bytes that would do.
        bytes: u64,
    },
    /// What a project or organisation may have of all units has changed; 0 for one that is gone.
    Ancestor {
        /// The project or organisation.
        ancestor: u32,
        /// Bytes it may have.
        bytes: u64,
    },
    /// A unit that was opened is closed.
    UnitGone {
        /// The unit.
        unit: u32,
    },
    /// The driver of a unit does not say how much memory each process has.
    Unmeasured {
        /// The unit.
        unit: u32,
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
    /// A worker was killed and is still there.
    Hung {
        /// The VM.
        vm: u32,
        /// The process.
        process: u32,
    },
}

/// Where notices go.
pub(crate) type Notices = UnboundedSender<Notice>;
