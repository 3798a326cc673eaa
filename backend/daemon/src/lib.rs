//! `sluiced`, the one process per host that has the state of every VM and session.
//!
//! It ([`daemon`]) serves the management API ([`api`]), has the launcher start a device for each VM, and answers devices that
//! request a worker for a session ([`vms::vm`]). The [`registry`] carries out each change that a request makes, in [`vms`], in
//! [`units`] (GPUs, MIG instances and their arbiters) and in [`placement`]. [`records`] writes state, usage and logs;
//! [`handover`] starts processes and adopts those of the daemon before. It must never parse a guest byte, load a GPU library or sit on the data path:
//! if it is killed, devices and workers keep running.
//!
//! Descriptors flow down, requests flow up, on one SEQPACKET socket per authority.
//!
//! Folders from top to bottom: daemon, api, registry, placement, vms, units, handover, records.

pub mod api;
pub mod configuration;
pub mod daemon;
pub mod vms;

mod async_fd;
mod caller;
mod channel;
mod fault;
mod fence;
mod handover;
mod placement;
mod priority;
mod records;
mod registry;
mod spec;
mod time_limit;
mod units;
