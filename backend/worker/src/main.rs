//! `sluice-worker`: the program of [`sluice_worker::program`].

#![expect(unsafe_code, reason = "takes over the control socket")]

fn main() -> std::process::ExitCode {
    // SAFETY: the launcher passes ownership of the control socket to the process, and no other code uses it.
    unsafe { sluice_worker::program::main() }
}
