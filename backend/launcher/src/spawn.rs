#![expect(unsafe_code, reason = "runs in a new process between fork and exec, in its copy of this one")]

//! The start of one program with only its intended resources.
//!
//! A child gets its descriptors, at [`FIRST`] and up, and a pipe of its own as standard error, so that no open file
//! is shared with another process; a fixed environment; a process group of its own; no way to gain privileges, and of root's
//! only those that its program needs; no core dumps; a limit on descriptors. It must never get any other resource of the launcher:
//! every other descriptor closes at exec, whatever its flags were.

use std::{
    ffi::OsString,
    io,
    os::{
        fd::{AsRawFd, RawFd},
        unix::process::CommandExt,
    },
    path::PathBuf,
    process::{Command, Stdio},
};

use rustix::{
    fd::{BorrowedFd, OwnedFd},
    fs::{Mode, OFlags},
    process::{Pid, PidfdFlags, Resource, Rlimit, Signal},
    thread::{CapabilitySet, CapabilitySets},
};
use sluice_messages::inventory::Visible;

use super::confinement::{Confined, Confinement};

/// Number of a child's first descriptor: its control socket.
pub(crate) const FIRST: RawFd = 3;

/// Largest number of descriptors of a child.
const GIVEN: usize = 3;

/// The number after a child's last possible descriptor.
const BEYOND: RawFd = FIRST + 3;

/// A program that the launcher may start, all from its own command line and environment.
#[derive(Debug)]
pub(crate) struct Program {
    /// Absolute path of the program.
    pub(crate) path: PathBuf,
    /// Arguments, without the name.
    pub(crate) arguments: Vec<OsString>,
    /// The whole environment.
    pub(crate) environment: Vec<(OsString, OsString)>,
    /// Limit of open descriptors.
    pub(crate) descriptors: u64,
    /// Capabilities that it keeps if it runs as root, in the host's user namespace.
    pub(crate) capabilities: CapabilitySet,
    /// Its confinement beside its user, limits and filter, if the host permits one.
    pub(crate) confinement: Option<Confinement>,
    /// True if the kernel kills it when the launcher dies.
    pub(crate) end_with_launcher: bool,
}

/// A child that was just started.
#[derive(Debug)]
pub(crate) struct Started {
    pub(crate) pid: u32,
    /// The pidfd of the process.
    pub(crate) pidfd: OwnedFd,
}

/// Keeps the numbers of children's descriptors in use in this process. Otherwise a descriptor that a start depends on (above
/// all the pipe through which the standard library gets the error of exec) could get one of them and be overwritten.
#[derive(Debug)]
pub(crate) struct ReservedNumbers(#[expect(dead_code, reason = "held open")] Vec<OwnedFd>);

impl ReservedNumbers {
    /// Reserves the numbers.
    pub(crate) fn take() -> io::Result<Self> {
        let mut held = Vec::with_capacity(GIVEN);
        loop {
            let null = rustix::fs::open("/dev/null", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
            if null.as_raw_fd() >= BEYOND {
                return Ok(Self(held));
            }
            held.push(null);
        }
    }
}

/// Resources of one child beyond those of its program.
#[derive(Debug, Default)]
pub(crate) struct Given<'a> {
    /// Additional arguments.
    pub(crate) arguments: &'a [OsString],
    /// The devices that its driver shows it.
    pub(crate) visible: Visible,
    /// True if its standard output, to which drivers print output of kernels, is discarded; otherwise it goes to
    /// standard error, as its log always does.
    pub(crate) silent: bool,
    /// The user it runs as; `None` for the launcher's.
    pub(crate) uid: Option<u32>,
    /// True if it queries the users of processes that connect to it.
    pub(crate) tells_users_apart: bool,
    /// The open `cgroup.procs` of its cgroup.
    pub(crate) cgroup: Option<BorrowedFd<'a>>,
    /// Its descriptors, from [`FIRST`] on.
    pub(crate) descriptors: &'a [BorrowedFd<'a>],
}

/// Starts a program. Returns when it has been executed. `log` becomes its standard error.
///
/// Takes [`ReservedNumbers`] because it is wrong without. Only the caller waits for children, so the process id cannot belong to
/// another process when the pidfd is opened.
pub(crate) fn start(
    _reserved: &ReservedNumbers,
    program: &Program,
    given: &Given<'_>,
    log: OwnedFd,
) -> io::Result<Started> {
    let mut sources: [RawFd; GIVEN] = [-1; GIVEN];
    for (slot, descriptor) in sources.iter_mut().zip(given.descriptors) {
        *slot = descriptor.as_raw_fd();
    }
    let count = given.descriptors.len().min(GIVEN);
    let cgroup = given.cgroup.map(|door| door.as_raw_fd());
    let launcher = rustix::process::getpid();
    let (limit, end_with_launcher) = (program.descriptors, program.end_with_launcher);
    let confinement = program.confinement.as_ref();
    let confine = |all: &Confinement| all.confine(given.visible, given.uid, given.tells_users_apart);
    let confined = confinement.map(confine).transpose()?;
    // In a user namespace of its own none would count.
    let apart = confined.as_ref().is_some_and(Confined::has_own_users);
    let capabilities = if apart { CapabilitySet::empty() } else { program.capabilities };

    let mut command = Command::new(&program.path);
    command.args(&program.arguments).args(given.arguments);
    command.env_clear().envs(program.environment.iter().map(|(name, value)| (name, value)));
    command.envs(confinement.into_iter().flat_map(Confinement::variables));
    // The filters of our processes end one that maps code, so the software GPU interprets kernels there.
    command.env("SLUICE_SOFTGPU_JIT", "0");
    if let Some(devices) = given.visible.variable() {
        // Set before the driver reads it: it reads this once, and later code cannot widen it.
        command.env("CUDA_VISIBLE_DEVICES", devices);
    }
    let output = if given.silent { Stdio::null() } else { Stdio::from(log.try_clone()?) };
    command.stdin(Stdio::null()).stdout(output).stderr(Stdio::from(log)).process_group(0);
    if let Some(uid) = given.uid {
        // Set before the hook runs; supplementary groups are dropped with it.
        command.uid(uid).gid(uid);
    }
    let prepare = move || {
        join(cgroup)?;
        confined.as_ref().map_or(Ok(()), Confined::separate)?;
        keep_capabilities(capabilities)?;
        prepare(&sources[..count], limit, end_with_launcher.then_some(launcher))?;
        confined.as_ref().map_or(Ok(()), Confined::restrict)
    };
    // SAFETY: the hook makes system calls on values made before; it neither allocates nor locks.
    unsafe { command.pre_exec(prepare) };
    let mut child = command.spawn()?;
    let pid = child.id();
    let pidfd = Pid::from_raw(pid.cast_signed())
        .ok_or(rustix::io::Errno::SRCH)
        .and_then(|pid| rustix::process::pidfd_open(pid, PidfdFlags::empty()));
    match pidfd {
        Ok(pidfd) => Ok(Started { pid, pidfd }),
        Err(error) => {
            child.kill()?;
            child.wait()?;
            Err(error.into())
        }
    }
}

/// Moves the calling process into a cgroup. The kernel checks the rights of the process that opened the file.
fn join(cgroup: Option<RawFd>) -> io::Result<()> {
    let Some(door) = cgroup else { return Ok(()) };
    // SAFETY: one byte of a constant; the descriptor is the parent's, which waits for this child to exec.
    match unsafe { libc::write(door, c"0".as_ptr().cast(), 1) } {
        1 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Drops all but these capabilities from those of the program after exec. A process without root has none to drop and gets
/// none. Async-signal-safe.
fn keep_capabilities(keep: CapabilitySet) -> io::Result<()> {
    let sets = rustix::thread::capabilities(None)?;
    if !sets.effective.contains(CapabilitySet::SETPCAP) {
        return Ok(());
    }
    for bit in 0..u64::BITS {
        let capability = CapabilitySet::from_bits_retain(1 << bit);
        if keep.contains(capability) {
            continue;
        }
        match rustix::thread::remove_capability_from_bounding_set(capability) {
            Ok(()) => {}
            // Beyond the last capability of this kernel.
            Err(rustix::io::Errno::INVAL) => break,
            Err(error) => return Err(error.into()),
        }
    }
    rustix::thread::clear_ambient_capability_set()?;
    rustix::thread::set_capabilities(None, CapabilitySets { inheritable: CapabilitySet::empty(), ..sets })?;
    Ok(())
}

/// Runs in the child. Async-signal-safe.
fn prepare(sources: &[RawFd], limit: u64, end_with: Option<Pid>) -> io::Result<()> {
    // Marks all descriptors to close at exec, including the standard library's pipe, which must stay open until then.
    // SAFETY: no pointers; descriptors keep working until exec.
    let closed =
        unsafe { libc::syscall(libc::SYS_close_range, FIRST, libc::c_uint::MAX, libc::CLOSE_RANGE_CLOEXEC) };
    if closed != 0 {
        return Err(io::Error::last_os_error());
    }
    for (&source, target) in sources.iter().zip(FIRST..) {
        // The copy does not close at exec. It replaces a placeholder of `ReservedNumbers`.
        // SAFETY: no pointers; both are this child's own numbers.
        if unsafe { libc::dup2(source, target) } < 0 {
            return Err(io::Error::last_os_error());
        }
    }
    unblock_signals()?;
    ignore_broken_pipes()?;
    let bound = |resource, limit: u64| {
        let hard = rustix::process::getrlimit(resource).maximum.map_or(limit, |hard| hard.min(limit));
        rustix::process::setrlimit(resource, Rlimit { current: Some(hard), maximum: Some(hard) })
    };
    bound(Resource::Nofile, limit)?;
    bound(Resource::Core, 0)?;
    rustix::thread::set_no_new_privs(true)?;
    if let Some(launcher) = end_with {
        rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
        // The launcher may have died before the line above.
        if rustix::process::getppid() != Some(launcher) {
            return Err(io::Error::from(rustix::io::Errno::SRCH));
        }
    }
    Ok(())
}

/// A child may outlive the launcher, which reads its log: a write then fails, but does not end the child.
fn ignore_broken_pipes() -> io::Result<()> {
    // SAFETY: no handler of ours runs; the disposition is the child's own.
    match unsafe { libc::signal(libc::SIGPIPE, libc::SIG_IGN) } {
        libc::SIG_ERR => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

fn unblock_signals() -> io::Result<()> {
    let mut none = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: the pointer is to a signal set, which the call fills.
    unsafe { libc::sigemptyset(none.as_mut_ptr()) };
    // SAFETY: the set was filled by the call above; the old one is not asked for.
    match unsafe { libc::sigprocmask(libc::SIG_SETMASK, none.as_ptr(), std::ptr::null_mut()) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
