//! How the time of one placement unit is shared between VMs.
//!
//! Start-time fair queueing per VM. Each VM has a *virtual time*, which grows by the unit's time it is charged, divided by
//! its weight; whoever is furthest behind has the next turn. Time in which a VM wants nothing earns nothing: it starts again
//! no earlier than where the one before it started. What it took too much it owes: its virtual time stays ahead.
//!
//! A turn is a *permit* for a quantum. Nobody can take a kernel back from a device, so a permit that closes leaves work
//! behind; the next VM is admitted at once, beside it, and the driver slices the two. While work of several VMs is under
//! way, each is charged its part of the time, and a long kernel's owner pays for it by the turns it does not get later. So a
//! kernel of any length delays others by a quantum, not by its length.
//!
//! A VM that is alone keeps its permit, and nothing is decided until somebody else wants a turn.
//!
//! Rooms:
//! - [`scheduler`]: whose turn it is;
//! - [`estimate`]: how long work takes that is about to be submitted;
//! - [`watchdog`]: whether anything of what a worker has submitted ends.
//!
//! Everything here is told the time by its caller, waits for nothing, and allocates only when a VM is added.

pub mod estimate;
pub mod scheduler;
pub mod watchdog;

/// Nanoseconds since some moment that the caller chose.
pub type Nanos = u64;
