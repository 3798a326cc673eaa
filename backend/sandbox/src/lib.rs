//! Seccomp filters of the backend processes, with a reason per rule.
//!
//! A process enters its filter once, after it has opened and loaded all that it needs and before it reads a byte that a guest could
//! have chosen. A system call that is not in the list of its role kills it at once (`SIGSYS`), in every thread: a process that
//! makes such a call has been taken over, or was changed without changing its list.
//!
//! A process that loads a driver has two lists: that of its role has the calls of Sluice's own code, and [`driver`] has those of
//! the driver. NVIDIA's driver has a list of requests per branch ([`ioctls`]). Its system calls were never traced, so a call that is on neither list
//! fails with EPERM there, with a line of log ([`refusal`]), and only calls of an attacker ([`attacks`]) kill.
//!
//! Each role is a file: [`device`], [`arbiter`], [`worker`], [`inventory`], [`launcher`]; the rules for all processes are in [`common`].
//! This crate does not depend on the work of the processes.

mod arbiter;
mod attacks;
mod common;
mod device;
mod driver;
mod filter;
mod inventory;
pub mod ioctls;
mod launcher;
mod refusal;
mod worker;

pub use driver::{DriverBranch, DriverList, DriverListError, further_libraries, nvidia_version};
pub use filter::{AllowList, FilterProfile, Otherwise, Rule, SandboxError};

/// The role of a process that enters its filter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// `sluice-device`: no files, no programs, no sockets; connections come through a listener it has already.
    Device,
    /// `sluice-device` to which programs connect directly: it may query their users.
    DirectDevice,
    /// `sluice-arbiter`: a driver for all its life, and the right to end workers.
    Arbiter(DriverList),
    /// `sluice-worker` before its driver is initialised, and with NVIDIA's driver also after: it may open files and load code.
    Worker(DriverList),
    /// `sluice-worker` with a driver that needs no more files: entered on top of [`Role::Worker`].
    WorkerSettled,
    /// `sluice-inventory`: opens devices and files for as long as it lives; no programs, no network.
    Inventory(DriverList),
    /// The launcher. Its children inherit its filter, so this is a list of calls that none of them may make.
    Launcher,
}

impl Role {
    /// Every role, with every list of a driver.
    #[must_use]
    pub fn all() -> Vec<Role> {
        let mut roles = vec![Role::Device, Role::DirectDevice, Role::WorkerSettled, Role::Launcher];
        for list in DriverList::all() {
            roles.extend([Role::Arbiter(list), Role::Worker(list), Role::Inventory(list)]);
        }
        roles
    }

    /// The list of the role.
    #[must_use]
    pub fn profile(self) -> FilterProfile {
        match self {
            Role::Device => device::profile(),
            Role::DirectDevice => device::direct(),
            Role::Arbiter(list) => arbiter::profile(list),
            Role::Worker(list) => worker::profile(list),
            Role::WorkerSettled => worker::settled(),
            Role::Inventory(list) => inventory::profile(list),
            Role::Launcher => launcher::profile(),
        }
    }
}

/// Enters a role's filter, in all threads and for ever; gives up privileges through programs, and debugging and dumps.
///
/// With `SLUICE_SECCOMP=log` the kernel logs a forbidden call instead of refusing it or killing the process, and `SLUICE_SECCOMP=off` does
/// nothing; both are for development and log a warning.
///
/// # Errors
/// [`SandboxError`] if the kernel refuses; the caller must not continue.
pub fn enter(role: Role) -> Result<(), SandboxError> {
    let one_heap = matches!(role, Role::Device | Role::DirectDevice);
    filter::enter(&role, &role.profile(), one_heap)
}

/// Sets the log to which a refused call of a driver leaves a line, if that is not standard error. The first one counts.
pub fn log_refusals_to(log: rustix::fd::BorrowedFd<'static>) {
    refusal::set_log(log);
}
