//! Runs the CUDA calls of one guest process on the real driver.
//!
//! One worker is one session. It counts as guest code: nothing outside may depend on its honesty, and it is never used for a
//! second session. The memory shared with the guest is in [`session`]; the addresses that it may access for the guest are in
//! [`memory::address`].
//!
//! | thread | does | never |
//! |---|---|---|
//! | dispatcher | takes records off the ring, submits work | waits for the GPU |
//! | completion | publishes complete work | |
//! | submitter | submits the work that a closed permit delayed | |
//! | memory, modules | run what may wait: contexts, memory, images | |
//! | custody | receives the messages of the arbiters | waits for anything else |
//! | control | maps guest pages, ends the process with the device | |

mod arenas;
mod control;
mod dispatch;
#[cfg(any(test, fuzzing))]
pub mod harness;
mod helper;
mod memory;
mod modules;
mod probe;
mod session;
mod submit;

pub use arenas::AttachError;
pub use control::{RunError, run};
pub use memory::custody::CustodyError;
pub use probe::{ProbeError, probe};
pub use sluice_driver::DriverError;
