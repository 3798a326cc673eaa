//! The start of threads of the shim in a foreign process.

use sluice_shared_memory::signals::{BlockedSignals, OF_INSTRUCTIONS};

/// Bytes of the stack of a thread that runs functions of the program: the usual size of a program's threads.
const PROGRAM_STACK: usize = 8 << 20;

/// Starts a thread of the shim with a small stack and all signals blocked.
pub(crate) fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> std::io::Result<()> {
    start(name, 256 << 10, &[], body)
}

/// Starts a thread of the shim that runs functions of the program.
pub(crate) fn spawn_for_program(name: &str, body: impl FnOnce() + Send + 'static) -> std::io::Result<()> {
    start(name, PROGRAM_STACK, &OF_INSTRUCTIONS, body)
}

fn start(
    name: &str,
    stack: usize,
    open: &[i32],
    body: impl FnOnce() + Send + 'static,
) -> std::io::Result<()> {
    // The new thread inherits the mask.
    let _blocked = BlockedSignals::new(open);
    std::thread::Builder::new().name(name.into()).stack_size(stack).spawn(body).map(drop)
}
