//! `sluice-device`: the program of [`sluice_device::program`].

#![expect(unsafe_code, reason = "takes over inherited descriptors")]

fn main() -> anyhow::Result<()> {
    // SAFETY: the parent passes ownership of the descriptors to the process, and no other code uses them.
    unsafe { sluice_device::program::main() }
}
