//! Runs the CUDA calls of one guest process on the real driver.
//!
//! One worker is one session. It is guest code in all but name: nothing outside may rest on its honesty, and it is never
//! used for a second session. What it shares with the guest is in [`session`]; what it may touch for it in [`memory::address`].
//!
//! | thread | does | never |
//! |---|---|---|
//! | dispatcher | takes records off the ring, submits work | waits for the GPU |
//! | completion | publishes what is done | |
//! | feeder | submits what a closed permit held up | |
//! | memory, modules | what may wait: contexts, memory, images | |
//! | custody | takes in what the lenders of memory say | waits for anything else |
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
