//! Seccomp filters of the backend processes, with a reason per rule.
//!
//! A process enters its filter once, after it has opened and loaded all that it needs and before it reads a byte that a guest could
//! have chosen. A system call that is not in the list of its role kills it at once (`SIGSYS`), in every thread: a process that
//! makes such a call has been taken over, or was changed without changing its list.
//!
//! Each role is a file: [`device`], [`arbiter`], [`worker`], [`worker_settled`], [`inventory`], [`launcher`]; the rules for
//! all processes are in [`common`]. This crate never opens a file and does not depend on the work of the processes.

mod arbiter;
mod common;
mod device;
mod filter;
mod inventory;
mod launcher;
mod worker;
mod worker_settled;

pub use filter::{FilterProfile, Rule, SandboxError};

/// The role of a process that enters its filter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// `sluice-device`: no files, no programs, no sockets; connections come through a listener it has already.
    Device,
    /// `sluice-device` to which programs connect directly: it may query their users.
    DirectDevice,
    /// `sluice-arbiter`: a driver for all its life, and the right to end workers.
    Arbiter,
    /// `sluice-worker` before its driver is initialised: it may open files and load code, as a driver does.
    Worker,
    /// `sluice-worker` with a driver that needs no more files: entered on top of [`Role::Worker`].
    WorkerSettled,
    /// `sluice-inventory`: opens devices and files for as long as it lives; no programs, no network.
    Inventory,
    /// The launcher. Its children inherit its filter, so this is a list of calls that none of them may make.
    Launcher,
}

impl Role {
    /// The list of the role.
    #[must_use]
    pub fn profile(self) -> FilterProfile {
        match self {
            Role::Device => device::profile(),
            Role::DirectDevice => device::direct(),
            Role::Arbiter => arbiter::profile(),
            Role::Worker => worker::profile(),
            Role::WorkerSettled => worker_settled::profile(),
            Role::Inventory => inventory::profile(),
            Role::Launcher => launcher::profile(),
        }
    }
}

/// Enters a role's filter, in all threads and for ever; gives up privileges through programs, and debugging and dumps.
///
/// With `SLUICE_SECCOMP=log` the kernel logs a forbidden call instead of killing the process, `SLUICE_SECCOMP=off` does
/// nothing; both are for development and log a warning.
///
/// # Errors
/// [`SandboxError`] if the kernel refuses; the caller must not continue.
pub fn enter(role: Role) -> Result<(), SandboxError> {
    filter::enter(role)
}
