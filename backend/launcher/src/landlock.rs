#![expect(unsafe_code, reason = "system calls between fork and exec")]

//! The rules of the kernel's Landlock for a process: the files of its list, no port of the network, no abstract socket of another
//! process. They hold beside the process's namespaces, and where the host permits none.

use std::{ffi::CStr, io, os::fd::AsRawFd as _};

use ::landlock::{
    ABI, Access as _, AccessFs, AccessNet, BitFlags, PathBeneath, PathFd, Ruleset, RulesetAttr as _,
    RulesetCreatedAttr as _, Scope,
};
use rustix::{
    fd::{BorrowedFd, OwnedFd},
    fs::{Mode, OFlags},
};

use super::files::{Access, ListedFile, OWN_THREADS};

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
    files: impl IntoIterator<Item = &'a ListedFile>,
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
        for file in files {
            let opened = PathFd::new(&file.path).map_err(io::Error::other)?;
            let beneath = PathBeneath::new(opened, rights(file.access));
            rules = rules.add_rule(beneath)?;
        }
        Ok::<_, Box<dyn std::error::Error + Send + Sync>>(rules)
    };
    Ok(make().map_err(io::Error::other)?.into())
}

/// Adds the directory of the calling process in `/proc` to its rules, with the right to name threads if `names_threads`, and enters them. The
/// process can gain no privileges any more. Async-signal-safe.
pub(super) fn enter(rules: BorrowedFd<'_>, names_threads: bool) -> io::Result<()> {
    add_own(rules, c"/proc/self", rights(Access::Read))?;
    if names_threads {
        let write = BitFlags::from(AccessFs::WriteFile);
        // A kernel without a rule about truncation does not know the right, either.
        add_own(rules, OWN_THREADS, write | AccessFs::Truncate)
            .or_else(|_| add_own(rules, OWN_THREADS, write))?;
    }
    // SAFETY: no pointers; the descriptor is open.
    match unsafe { libc::syscall(libc::SYS_landlock_restrict_self, rules.as_raw_fd(), 0) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Adds a directory of the calling process to its rules.
fn add_own(rules: BorrowedFd<'_>, path: &CStr, rights: BitFlags<AccessFs>) -> io::Result<()> {
    /// `LANDLOCK_RULE_PATH_BENEATH` of `linux/landlock.h`.
    const PATH_BENEATH: libc::c_int = 1;
    /// `struct landlock_path_beneath_attr` there.
    #[repr(C, packed)]
    struct Beneath {
        access: u64,
        directory: libc::c_int,
    }
    let directory = rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
    let beneath = Beneath { access: rights.bits(), directory: directory.as_raw_fd() };
    let pointer = std::ptr::from_ref(&beneath);
    // SAFETY: the kernel reads the structure, which has the layout for this kind of rule; both descriptors are open.
    match unsafe { libc::syscall(libc::SYS_landlock_add_rule, rules.as_raw_fd(), PATH_BENEATH, pointer, 0) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
