//! Runs the CUDA calls of one guest process on the real driver.
//!
//! The launcher starts a worker for each session that a device wants. It counts as guest code: nothing outside may depend on its
//! honesty, and it is never used for a second session.
//!
//! | thread | does | never |
//! |---|---|---|
//! | dispatcher | takes records off the ring, submits work | waits for a context that works |
//! | completion | publishes complete work | submits work |
//! | submitter | submits the work that a closed permit delayed | reads the ring |
//! | memory, modules | serve calls that may wait: contexts, memory, images, graphs | take a record off the ring |
//! | custody | receives the messages of the arbiters | waits for anything else |
//! | control | maps guest pages, ends the process with the device | calls the driver |
//! | console | collects the text that kernels print | writes to a file |
//! | of the driver | have the guest run functions of its program | call the driver |
//!
//! [`dispatch`] decodes and checks calls. [`submit`] gives work to the driver, marks its end and publishes it. [`helper`] has the
//! two helper threads' queues; [`memory`] and [`modules`] serve their calls, and [`graphs`] has executable graphs.
//! [`session`] has the memory shared with the guest and the tables of objects, [`arenas`] the guest pages that the driver uses,
//! [`control`] the messages of the device.
//!
//! Folders from top to bottom: dispatch, modules, submit, memory, helper, graphs, session.

mod arenas;
mod control;
mod current;
mod dispatch;
mod graphs;
#[cfg(any(test, fuzzing))]
pub mod harness;
mod helper;
mod memory;
mod modules;
mod probe;
pub mod program;
mod resources;
mod session;
mod submit;

pub use arenas::AttachError;
pub use control::{RunError, run};
pub use memory::custody::CustodyError;
pub use probe::{ProbeError, probe};
pub use sluice_driver::DriverError;
