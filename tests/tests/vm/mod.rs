//! The whole path in virtual machines: stock QEMU, stock kernels, the shim as an ordinary user's library, device and
//! workers with their filters on, the software GPU.
//!
//! Booting is the main cost here, so a test makes all checks that one machine allows. Times are printed, never judged: the
//! guest's processor is emulated and the host may be busy.

mod stage;

mod attackers;
mod devices;
mod failures;
mod memory;
mod monitors;
mod programs;
mod restarts;
