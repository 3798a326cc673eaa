//! `sluiced`, the one process per host that knows every VM and session, and the launcher that starts processes for it.
//!
//! Two programs come from this crate:
//!
//! - **`sluiced`** ([`daemon`]): serves the management API ([`api`]), has a device started for each VM, and answers
//!   devices that want a worker for a session ([`vm`]). It must never parse a guest byte, load a GPU library or sit on the
//!   data path: killed, it leaves devices and workers running.
//! - **`sluice-launcher`** ([`launcher`]): the only process that forks. It reads fixed-size messages, and starts only
//!   the programs, users and VMs of its own command line.
//!
//! Descriptors flow down, requests flow up, on one SEQPACKET socket per authority ([`channel`]).

pub mod api;
pub mod channel;
pub mod configuration;
pub mod daemon;
pub mod launcher;
pub mod rate;
pub mod vm;

mod audit;
mod balancing;
mod cgroup;
mod child_log;
mod conduct;
mod custodian;
mod escrow;
mod fault;
mod fence;
mod fencing;
mod inventory;
mod journal;
mod keeper;
mod launching;
mod limits;
mod metrics;
mod notice;
mod outbox;
mod placer;
mod placing;
mod priority;
mod process;
mod registry;
mod roster;
mod sampling;
mod spawn;
mod state;
mod trail;
mod unit;
mod units;
mod usage;
mod watched;
mod xid;
