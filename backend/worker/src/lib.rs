//! Runs the CUDA calls of one guest process on the real driver.
//!
//! One worker is one session. It is guest code in all but name: nothing outside may rest on its honesty, and it is never
//! used for a second session. What it shares with the guest is in [`session`]; what it may touch for it in [`address`].
//!
//! | thread | does | never |
//! |---|---|---|
//! | dispatcher | takes records off the ring, submits work | waits for the GPU |
//! | completion | publishes what is done | |
//! | feeder | submits what a closed permit held up | |
//! | memory, modules | what may wait: contexts, memory, images | |
//! | custody | takes in what the lenders of memory say | waits for anything else |
//! | control | maps guest pages, ends the process with the device | |

mod address;
mod arenas;
mod completion;
mod console;
mod control;
#[cfg(test)]
mod cost;
mod custody;
mod dispatcher;
mod event_clock;
mod exit;
#[cfg(any(test, fuzzing))]
pub mod harness;
mod helper;
mod lanes;
mod local;
mod memory;
mod notice;
mod objects;
mod provision;
mod queue;
mod session;
mod spin;
mod submit;
mod table;
mod time;

pub use arenas::AttachError;
pub use control::{RunError, run};
pub use sluice_driver::DriverError;
