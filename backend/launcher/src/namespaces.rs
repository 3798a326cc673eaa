#![expect(unsafe_code, reason = "runs in a new process between fork and exec, in its copy of this one")]

//! The namespaces of a confined process: it sees no network, no IPC object, no abstract socket and no file but those of its
//! [`Root`].
//!
//! They belong to a user namespace of its own in which its user and group are mapped to themselves. So the launcher needs no
//! right over the host's namespaces (`CAP_SYS_ADMIN`), and the process keeps none: exec takes the capabilities of
//! the new user namespace away again. A process that needs a capability over the host, or the numbers of other users, stays in the
//! host's user namespace; then the launcher needs that right.

use std::{ffi::CStr, io};

use rustix::{
    fs::{CWD, Mode, OFlags},
    io::Errno,
    mount::{MountFlags, MountPropagationFlags, UnmountFlags},
    process::DumpableBehavior,
    thread::UnshareFlags,
};

use super::root::{HOST, NO_DEVICES, NO_EXEC, NO_SUID, READ_ONLY, Root, Step};

/// A directory of every host, covered by the new file system until that becomes the root.
const COVERED: &CStr = c"/proc";
/// Options of the file system of the root: room for directories, links, mount points and a page for each file with other contents than
/// on the host, of which there are two for each instance of each GPU.
const OPTIONS: &CStr = c"mode=0755,size=1m,nr_inodes=1k";

/// The user namespace of a process that gets other namespaces of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum UserNamespace {
    /// One of its own: no capability counts outside of it, and all other users are one.
    Own,
    /// The host's.
    Host,
}

/// The user and the group of a process, as the kernel reads them.
#[derive(Debug)]
struct IdMaps {
    user: String,
    group: String,
}

/// The namespaces of one process.
#[derive(Debug)]
pub(super) struct Namespaces {
    root: Root,
    /// `None` if the process stays in the host's user namespace.
    mapping: Option<IdMaps>,
}

impl Namespaces {
    /// Namespaces for a process with this user and group, or the launcher's.
    pub(super) fn new(root: Root, users: UserNamespace, uid: Option<u32>) -> Self {
        let own = || (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
        let (user, group) = uid.map_or_else(own, |uid| (uid, uid));
        let mapping = || IdMaps { user: format!("{user} {user} 1"), group: format!("{group} {group} 1") };
        Self { root, mapping: (users == UserNamespace::Own).then(mapping) }
    }

    /// True if there is a user namespace among them.
    pub(super) const fn has_own_users(&self) -> bool {
        self.mapping.is_some()
    }

    /// Moves the calling process, which has its user and group already, into the namespaces. Async-signal-safe. The
    /// reason for an error goes to standard error.
    pub(super) fn enter(&self) -> io::Result<()> {
        let visible = UnshareFlags::NEWNS | UnshareFlags::NEWNET | UnshareFlags::NEWIPC;
        let Some(mapping) = &self.mapping else {
            create(visible)?;
            return self.make_root();
        };
        // The files of a process that has changed its user belong to root, until it can be dumped again. Exec resets this.
        step(c"dump", c"itself", rustix::process::set_dumpable_behavior(DumpableBehavior::Dumpable))?;
        create(UnshareFlags::NEWUSER | visible)?;
        // A process without privileges may map its group only if it cannot drop groups that deny it access.
        write(c"/proc/self/setgroups", b"deny")?;
        write(c"/proc/self/uid_map", mapping.user.as_bytes())?;
        write(c"/proc/self/gid_map", mapping.group.as_bytes())?;
        self.make_root()
    }

    fn make_root(&self) -> io::Result<()> {
        let alone = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
        step(c"separate the mounts of", c"/", rustix::mount::mount_change(c"/", alone))?;
        let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
        step(
            c"mount over",
            COVERED,
            rustix::mount::mount(c"tmpfs", COVERED, c"tmpfs", flags, Some(OPTIONS)),
        )?;
        step(c"enter", COVERED, rustix::process::chdir(COVERED))?;
        step(c"make", c".host", rustix::fs::mkdirat(CWD, c".host", Mode::RWXU))?;
        step(c"make a root of", COVERED, rustix::process::pivot_root(c".", c".host"))?;
        step(c"enter", c"/", rustix::process::chdir(c"/"))?;
        for one in self.root.steps() {
            apply(one)?;
        }
        step(c"unmount", c"/.host", rustix::mount::unmount(HOST, UnmountFlags::DETACH))?;
        step(c"remove", c"/.host", rustix::fs::unlinkat(CWD, HOST, rustix::fs::AtFlags::REMOVEDIR))?;
        step(c"protect", c"/", set_attributes(c"/", READ_ONLY | NO_SUID | NO_DEVICES | NO_EXEC, 0))
    }
}

/// Moves the calling process into new namespaces.
fn create(flags: UnshareFlags) -> io::Result<()> {
    // SAFETY: the flags leave the table of descriptors shared with no thread: this process has one thread.
    step(c"create namespaces for", c"itself", unsafe { rustix::thread::unshare_unsafe(flags) })
}

fn apply(one: &Step) -> io::Result<()> {
    let readable = Mode::RWXU | Mode::RGRP | Mode::XGRP | Mode::ROTH | Mode::XOTH;
    match one {
        Step::Directory(path) => step(c"make", path, rustix::fs::mkdirat(CWD, path.as_c_str(), readable)),
        Step::File { path, contents } => {
            let flags = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::CLOEXEC;
            let file = step(c"make", path, rustix::fs::open(path.as_c_str(), flags, Mode::RUSR))?;
            // All or nothing: the files are small, and the file system has room for them.
            step(c"write", path, rustix::io::write(file, contents).map(drop))
        }
        Step::Link { target, path } => {
            step(c"link", path, rustix::fs::symlinkat(target.as_c_str(), CWD, path.as_c_str()))
        }
        Step::Bind { source, path, attributes } => {
            // With the mounts below: the host may have hidden something by one.
            step(c"bind", source, rustix::mount::mount_bind_recursive(source.as_c_str(), path.as_c_str()))?;
            step(c"protect", path, set_attributes(path, *attributes, libc::AT_RECURSIVE))
        }
    }
}

/// Adds attributes to those of a mount, and with `AT_RECURSIVE` to those of all mounts below it.
fn set_attributes(path: &CStr, attributes: u64, flags: libc::c_int) -> Result<(), Errno> {
    /// `struct mount_attr` of `linux/mount.h`.
    #[repr(C)]
    struct MountAttributes {
        set: u64,
        clear: u64,
        propagation: u64,
        user_namespace: u64,
    }
    let attributes = MountAttributes { set: attributes, clear: 0, propagation: 0, user_namespace: 0 };
    // SAFETY: the path is a C string, and the structure has the stated size; the kernel writes to neither.
    let result = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            libc::AT_FDCWD,
            path.as_ptr(),
            flags,
            std::ptr::from_ref(&attributes),
            size_of::<MountAttributes>(),
        )
    };
    if result == 0 {
        Ok(())
    } else {
        Err(Errno::from_io_error(&io::Error::last_os_error()).unwrap_or(Errno::IO))
    }
}

fn write(path: &CStr, bytes: &[u8]) -> io::Result<()> {
    let file = step(c"open", path, rustix::fs::open(path, OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty()))?;
    step(c"write", path, rustix::io::write(file, bytes).map(drop))
}

/// Reports a failed step on standard error, because exec's caller gets no more than the error's number.
fn step<T>(action: &CStr, path: &CStr, result: Result<T, Errno>) -> io::Result<T> {
    result.map_err(|error| {
        let parts = [c"the new process cannot ", action, c" ", path, c"\n"];
        for part in parts {
            // An error here changes nothing: the process is about to report the first one and to end.
            _ = rustix::io::write(rustix::stdio::stderr(), part.to_bytes());
        }
        error.into()
    })
}
