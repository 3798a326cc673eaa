//! The messages between the backend's processes.
//!
//! Devices, workers, arbiters, the inventory, the launcher and `sluiced` communicate over SEQPACKET sockets of their own. [`channel`]
//! is one end of such a socket, [`control`] has the fixed-size messages and the setups, [`custody`] the messages for lending
//! memory and the pages beside them, [`figures`] the counts and sums of arbiters, [`inventory`] the values that describe devices, and [`launch`] those on the
//! launcher's command line. Guests do not compile this crate.
//!
//! A worker or a device may have been taken over, so this crate decodes hostile bytes. It contains no unsafe code, never
//! indexes without a check, and allocates nothing whose size a message chooses.

#![forbid(unsafe_code)]
#![warn(
    clippy::indexing_slicing,
    clippy::arithmetic_side_effects,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic
)]

pub mod channel;
pub mod control;
pub mod custody;
pub mod figures;
pub mod inventory;
pub mod launch;
