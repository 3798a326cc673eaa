//! `sluiced`, the one process per host that knows every VM and session, and the launcher that starts processes for it.
//!
//! Two programs come from this crate:
//!
//! - **`sluiced`** ([`daemon`]): serves the management API ([`api`]), has a device started for each VM, and answers
//!   devices that want a worker for a session ([`vms::vm`]). It must never parse a guest byte, load a GPU library or sit on the
//!   data path: killed, it leaves devices and workers running.
//! - **`sluice-launcher`** ([`launcher::server`]): the only process that forks. It reads fixed-size messages, and starts only
//!   the programs, users and VMs of its own command line.
//!
//! Descriptors flow down, requests flow up, on one SEQPACKET socket per authority.

pub mod api;
pub mod configuration;
pub mod daemon;
pub mod error;
pub mod launcher;
pub mod rate;
pub mod vms;

mod caller;
mod channel;
mod fault;
mod handover;
mod placement;
mod priority;
mod process;
mod records;
mod registry;
mod units;
