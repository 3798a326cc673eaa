//! The phase `custody`: attacks on the custody of device memory, and the proof that each would be seen.
//!
//! The runner calls its steps as any other. Each starts daemons of its own from the bundle, on the machine's driver, with two VMs whose
//! programs are processes of this host: VM 1 attacks or fails, VM 2 searches or computes on. A step that ends without failure notes the
//! verdict `held`.

mod canary;
mod escape;
mod faults;
mod scrub;

use crate::step::{Question, Step};
use crate::stop::{Answer, Stop};

/// Name of the phase.
pub(crate) const PHASE: &str = "custody";

/// All steps, in order of worth.
pub(crate) const SUBJECTS: &[&[Question]] =
    &[canary::QUESTIONS, faults::QUESTIONS, scrub::QUESTIONS, escape::QUESTIONS];

/// Steps that a short run leaves out: they differ from others in one detail.
pub(crate) const LONG: &[&str] = &[
    "canary-native",
    "canary-free",
    "canary-exit",
    "canary-kill-worker",
    "canary-fault",
    "canary-fence",
    "canary-removal",
    "escape-deepbind",
    "escape-pools",
    "escape-graphs",
    "escape-arrays",
    "escape-managed",
    "escape-ipc",
    "escape-limits",
    "escape-modules",
    "escape-local",
    "escape-tiny",
    "escape-frees",
    "escape-threads",
    "escape-processes",
    "fence-idle",
];

/// Number of the VM that attacks or fails.
const FIRST: u32 = 1;
/// Number of the VM beside it.
const SECOND: u32 = 2;

/// Ends a step whose promise was kept.
fn held(step: &Step) -> Answer {
    step.note("verdict", "held")
}

/// Ends a step whose promise was broken.
fn broken(reason: impl std::fmt::Display) -> Stop {
    Stop::failed(format!("the promise is broken: {reason}"))
}

/// Ends a step that proves nothing.
fn void(reason: impl std::fmt::Display) -> Stop {
    Stop::failed(format!("void: {reason}"))
}
