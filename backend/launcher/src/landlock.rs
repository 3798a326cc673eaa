#![expect(unsafe_code, reason = "system calls between fork and exec")]

//! The rules of the kernel's Landlock for a process: the files of its list, no port of the network, no abstract socket of another
//! process. They hold beside the process's namespaces, and where the host permits none.

use std::{io, os::fd::AsRawFd as _, path::Path};

use ::landlock::{
    ABI, Access as _, AccessFs, AccessNet, BitFlags, PathBeneath, PathFd, Ruleset, RulesetAttr as _,
    RulesetCreatedAttr as _, Scope,
};
use rustix::{
    fd::{BorrowedFd, OwnedFd},
    fs::{Mode, OFlags},
};

use super::files::Access;

/// The newest version with which these rules were tested. A kernel with an older one enforces what it has.
const VERSION: ABI = ABI::V6;

fn rights(access: Access) -> BitFlags<AccessFs> {
    let read = AccessFs::ReadFile | AccessFs::ReadDir;
    match access {
        Access::Read => read,
        Access::Execute => read | AccessFs::Execute,
        Access::Device => AccessFs::ReadFile | AccessFs::WriteFile | AccessFs::IoctlDev,
        Access::Write => AccessFs::from_all(VERSION) & !(AccessFs::Execute | AccessFs::IoctlDev),
    }
}

/// Rules that allow only these files, or all files of a directory, and signals to others if `signals`. `None` if the kernel has no
/// Landlock.
pub(super) fn rules<'a>(
    files: impl IntoIterator<Item = (&'a Path, Access)>,
    signals: bool,
) -> io::Result<Option<OwnedFd>> {
    let mut scope = BitFlags::from(Scope::AbstractUnixSocket);
    if !signals {
        scope |= Scope::Signal;
    }
    let make = || {
        let mut rules = Ruleset::default()
            .handle_access(AccessFs::from_all(VERSION))?
            .handle_access(AccessNet::from_all(VERSION))?
            .scope(scope)?
            .create()?;
        for (path, access) in files {
            let beneath = PathBeneath::new(PathFd::new(path).map_err(io::Error::other)?, rights(access));
            rules = rules.add_rule(beneath)?;
        }
        Ok::<_, Box<dyn std::error::Error + Send + Sync>>(rules)
    };
    Ok(make().map_err(io::Error::other)?.into())
}

/// Adds the directory of the calling process in `/proc` to its rules, and enters them. The process can gain no privileges any more.
/// Async-signal-safe.
pub(super) fn enter(rules: BorrowedFd<'_>) -> io::Result<()> {
    /// `LANDLOCK_RULE_PATH_BENEATH` of `linux/landlock.h`.
    const PATH_BENEATH: libc::c_int = 1;
    /// `struct landlock_path_beneath_attr` there.
    #[repr(C, packed)]
    struct Beneath {
        access: u64,
        directory: libc::c_int,
    }
    let directory = rustix::fs::open(c"/proc/self", OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
    let beneath = Beneath { access: rights(Access::Read).bits(), directory: directory.as_raw_fd() };
    let pointer = std::ptr::from_ref(&beneath);
    // SAFETY: the kernel reads the structure, which has the layout for this kind of rule; both descriptors are open.
    let added =
        unsafe { libc::syscall(libc::SYS_landlock_add_rule, rules.as_raw_fd(), PATH_BENEATH, pointer, 0) };
    // SAFETY: no pointers; the descriptor is open.
    let entered =
        added == 0 && unsafe { libc::syscall(libc::SYS_landlock_restrict_self, rules.as_raw_fd(), 0) } == 0;
    if entered { Ok(()) } else { Err(io::Error::last_os_error()) }
}
