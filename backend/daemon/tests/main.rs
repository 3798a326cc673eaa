//! `sluiced` and the launcher as processes; the other processes are stand-ins.

mod adoption;
mod api;
mod common;
#[cfg(feature = "fault-points")]
mod crash;
mod daemon;
mod fence;
mod launcher;
mod metrics;
mod placing;
mod ready;
mod services;
mod users;
mod warm;
