//! The settings of a unit, the terms of a VM, and the observations and answers that pass between the caller and the scheduler.

use crate::Nanos;

pub(super) const MICROSECOND: Nanos = 1_000;
pub(super) const MILLISECOND: Nanos = 1_000_000;

/// Settings for sharing a unit.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// Length of a turn while other VMs wait.
    pub quantum: Nanos,
    /// Estimated work that a VM may have under way while it is alone.
    pub alone: Nanos,
    /// After a turn: time in which its remaining work is assumed to occupy the device, and is charged alone.
    pub tail: Nanos,
    /// Longest wait for work that a turn left behind, if it is expected to end by then. So no VM is charged for another
    /// one's work, and a kernel is not sliced needlessly.
    pub hold: Nanos,
    /// Time in which a VM must begin its turn before the next one is admitted.
    pub begin: Nanos,
    /// Time in which it must begin before its permit closes.
    pub late: Nanos,
    /// Number of VMs with long kernels under way after their turns at which another VM with long kernels is kept
    /// out, so that VMs with short kernels share the device with few.
    pub hogs: usize,
    /// Longest time for which it is kept out.
    pub hog_patience: Nanos,
    /// Time without a turn after which a priority has one in any case.
    pub starvation: Nanos,
    /// Time without a turn after which a VM whose work does not end has one in any case; it doubles each time, up to
    /// `stuck_most`.
    pub stuck: Nanos,
    /// The longest such time.
    pub stuck_most: Nanos,
}

impl Settings {
    /// Settings with this quantum and values that follow from it.
    #[must_use]
    pub const fn with_quantum(quantum: Nanos) -> Settings {
        Settings {
            quantum,
            alone: 20 * MILLISECOND,
            tail: quantum / 4,
            hold: 2 * quantum,
            begin: quantum / 4,
            late: 8 * quantum,
            hogs: 2,
            hog_patience: 25 * quantum,
            starvation: 50 * quantum,
            stuck: 50 * quantum,
            stuck_most: 5_000 * quantum,
        }
    }
}

impl Default for Settings {
    fn default() -> Settings {
        Settings::with_quantum(2 * MILLISECOND)
    }
}

/// Number of priorities; the highest is the last.
pub const CLASSES: usize = 3;

/// A VM's terms.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Terms {
    /// Its weight relative to other VMs, at least 1.
    pub weight: u32,
    /// Its priority, below [`CLASSES`].
    pub class: usize,
    /// Thousandths of the time that it never exceeds in the long run.
    pub cap: u32,
    /// Thousandths of the time that it gets while it has work. Those of all VMs together have to be less than 1000.
    pub guarantee: u32,
}

impl Default for Terms {
    fn default() -> Terms {
        Terms { weight: 100, class: 1, cap: WHOLE, guarantee: 0 }
    }
}

pub(super) const WHOLE: u32 = 1000;

/// The observed state of a VM's workers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    /// Number of workers with work that waits for a permit, or for earlier work to end.
    pub waiting: u32,
    /// Number of workers with work under way. A driver slices processes, so the VM has this many parts of the device
    /// while other VMs also have work under way.
    pub flying: u32,
    /// Number of pieces of work submitted so far; only a change of it matters.
    pub begun: u64,
}

/// A VM's permit to submit work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Permit {
    /// Submit no work; report when work waits, and when no work is under way any more.
    Closed,
    /// Submit, with at most this much estimated work under way.
    Open {
        /// Largest estimated work under way.
        window: Nanos,
        /// True if another VM waits, so the worker must report when it has no work.
        tell: bool,
    },
}

/// Figures of a VM's use; they never decrease.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Figures {
    /// Time that it is charged.
    pub used: Nanos,
    /// The part of `used` in which other VMs were charged, too.
    pub overlapped: Nanos,
    /// Time in which it waited for a turn.
    pub waited: Nanos,
    /// Number of turns.
    pub turns: u64,
}
