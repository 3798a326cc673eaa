//! Seccomp filters of the backend processes, with a reason per rule.
//!
//! A process enters its filter once, after it has opened and loaded what it needs and before it reads a byte that a guest could
//! have chosen. A system call that is not in the list of its role ends it at once (`SIGSYS`), in every thread: a process that
//! makes such a call has been taken over, or was changed without changing its list.
//!
//! Each role is a file: [`device`], [`arbiter`], [`worker`], [`worker_settled`], [`inventory`], [`launcher`]; the rules that
//! every process needs are in [`common`]. This crate never opens anything and knows nothing of the work of the processes.

mod arbiter;
mod common;
mod device;
mod filter;
mod inventory;
mod launcher;
mod worker;
mod worker_settled;

pub use filter::{Profile, Rule, SandboxError};

/// Which process enters its filter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// `sluice-device`: no files, no programs, no sockets; connections come through a listener it has already.
    Device,
    /// `sluice-device` to which programs connect themselves: it may ask which user's they are.
    DirectDevice,
    /// `sluice-arbiter`: a driver for all its life, and the right to end workers.
    Arbiter,
    /// `sluice-worker` before its driver is initialised: may open files and load code, for a driver does.
    Worker,
    /// `sluice-worker` with a driver that needs no more files: entered on top of [`Role::Worker`].
    WorkerSettled,
    /// `sluice-inventory`: opens devices and files for as long as it lives; no programs, no network.
    Inventory,
    /// The launcher. What it starts inherits its filter, so this is a list of what none of them may do.
    Launcher,
}

impl Role {
    /// The role's list.
    #[must_use]
    pub fn profile(self) -> Profile {
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

/// Enters a role's filter, in all threads and for ever; gives up privileges by programs, and being debugged or dumped.
///
/// `SLUICE_SECCOMP=log` has the kernel log what it would kill for, `SLUICE_SECCOMP=off` does nothing; both are for
/// development and say so.
///
/// # Errors
/// [`SandboxError`] when the kernel refuses; the caller must not go on.
pub fn enter(role: Role) -> Result<(), SandboxError> {
    filter::enter(role)
}
