//! The scheduler: it shares the time of one placement unit between VMs.
//!
//! Start-time fair queueing per VM. Each VM has a *virtual time*, which grows by the unit's time it is charged, divided by its
//! weight; the VM furthest behind has the next turn. A VM that requests no time earns nothing: it starts again no earlier than
//! the start of the last turn. A VM that took too much is in debt: its virtual time stays ahead.
//!
//! A turn is a *permit* for a quantum. A kernel cannot be taken back from a device, so a permit that closes leaves work behind;
//! the next VM is admitted at once, beside it, and the driver slices the two. While work of several VMs is under way, each is
//! charged its part of the time, and a long kernel's owner pays for it by the turns it does not get later. So a kernel of any
//! length delays others by a quantum, not by its length.
//!
//! A VM that is alone keeps its permit, with no decisions until another VM requests a turn.
//!
//! Modules:
//! - [`scheduler`]: the order of turns;
//! - [`estimate`]: the duration of work that is about to be submitted;
//! - [`watchdog`]: a check that submitted work of a worker ends.
//!
//! The caller passes the time; this crate waits for nothing, and allocates only when a VM is added.

pub mod estimate;
pub mod scheduler;
pub mod watchdog;

/// Nanoseconds since a moment that the caller chose.
pub type Nanos = u64;
