#![expect(unsafe_code, reason = "runs in a new process between fork and exec, in its copy of this one")]

//! The start of one program with only its intended resources.
//!
//! A child gets its descriptors, at [`FIRST`] and up, and a pipe of its own as standard error, so that no open file
//! is shared with another process; a fixed environment; a process group of its own; no way to gain privileges, and of root's
//! only those that its program needs; limits of its resources. It must never get any other resource of the launcher:
//! it closes every other descriptor, whatever its flags were, before it waits for its own.
//!
//! A start has two parts. [`prepare`] forks a process that confines itself and waits; [`Prepared::run`] gives it its descriptors, and it
//! executes its program. The first part takes most of the time and needs nothing of a VM, so it can be done ahead.

use std::{
    ffi::{CStr, OsString},
    io::{self, IoSliceMut},
    mem::MaybeUninit,
    os::{
        fd::{AsRawFd, RawFd},
        unix::process::CommandExt,
    },
    path::PathBuf,
    process::{Command, Stdio},
};

use rustix::{
    fd::{BorrowedFd, OwnedFd},
    net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg},
    process::{DumpableBehavior, Pid, PidfdFlags, Signal, WaitOptions},
    thread::{CapabilitySet, CapabilitySets},
};
use sluice_messages::inventory::Visible;
use sluice_shared_memory::socket;

use super::{
    confinement::{Confined, Confinement},
    files::FileList,
    limits::ResourceLimits,
};

/// Number of a child's first descriptor: its control socket.
pub(crate) const FIRST: RawFd = 3;

/// Largest number of descriptors of a child.
const GIVEN: usize = 3;

/// Number of the socket on which a child gets its descriptors, after the last of these.
const GATE: RawFd = FIRST + 3;

/// Name of a process that waits for its descriptors.
const NAME: &CStr = c"sluice-ready";

/// A program that the launcher may start, all from its own command line and environment.
#[derive(Debug)]
pub(crate) struct Program {
    /// Absolute path of the program.
    pub(crate) path: PathBuf,
    /// Arguments, without the name.
    pub(crate) arguments: Vec<OsString>,
    /// The whole environment.
    pub(crate) environment: Vec<(OsString, OsString)>,
    /// Limits of its resources.
    pub(crate) limits: ResourceLimits,
    /// Capabilities that it keeps if it runs as root, in the host's user namespace.
    pub(crate) capabilities: CapabilitySet,
    /// Its confinement beside its user, limits and filter, if the host permits one.
    pub(crate) confinement: Option<Confinement>,
    /// True if the kernel kills it when the launcher dies.
    pub(crate) end_with_launcher: bool,
}

/// The properties of a child beside its program, its user and its descriptors.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ChildShape {
    /// Additional arguments.
    pub(crate) arguments: Vec<OsString>,
    /// The devices that its driver shows it.
    pub(crate) visible: Visible,
    /// True if its standard output, to which drivers print output of kernels, is discarded; otherwise it goes to
    /// standard error, as its log always does.
    pub(crate) silent: bool,
    /// True if it queries the users of processes that connect to it.
    pub(crate) tells_users_apart: bool,
}

/// A process that has its user, its limits and its confinement, and waits for its descriptors before it executes its program. Until
/// then it has nothing of any VM, and it ends when this value is dropped.
#[derive(Debug)]
pub(crate) struct Prepared {
    pub(crate) pid: u32,
    pub(crate) pidfd: OwnedFd,
    /// The files that it sees; `None` if it sees the host's.
    files: Option<FileList>,
    /// The socket on which it gets its descriptors and reports an error. Exec closes the other end.
    gate: OwnedFd,
}

/// Makes a process for a program, as this user or the launcher's. `log` becomes its standard error.
///
/// Only the caller waits for children, so the process id cannot belong to another process when the pidfd is opened.
pub(crate) fn prepare(
    program: &Program,
    shape: &ChildShape,
    uid: Option<u32>,
    log: OwnedFd,
) -> io::Result<Prepared> {
    let launcher = rustix::process::getpid();
    let (limits, end_with_launcher) = (program.limits, program.end_with_launcher);
    let confinement = program.confinement.as_ref();
    let confine = |all: &Confinement| all.confine(shape.visible, uid, shape.tells_users_apart);
    let (confined, files) = confinement.map(confine).transpose()?.unzip();
    // In a user namespace of its own none would count.
    let apart = confined.as_ref().is_some_and(Confined::has_own_users);
    let capabilities = if apart { CapabilitySet::empty() } else { program.capabilities };
    let (gate, its_gate) = socket::pair()?;
    // Beyond the numbers of the child's descriptors.
    let its_gate = rustix::io::fcntl_dupfd_cloexec(its_gate, GATE)?;

    let mut command = Command::new(&program.path);
    command.args(&program.arguments).args(&shape.arguments);
    command.env_clear().envs(program.environment.iter().map(|(name, value)| (name, value)));
    command.envs(confinement.into_iter().flat_map(Confinement::variables));
    if let Some(devices) = shape.visible.variable() {
        // Set before the driver reads it: it reads this once, and later code cannot widen it.
        command.env("CUDA_VISIBLE_DEVICES", devices);
    }
    let output = if shape.silent { Stdio::null() } else { Stdio::from(log.try_clone()?) };
    command.stdin(Stdio::null()).stdout(output).stderr(Stdio::from(log)).process_group(0);
    if let Some(uid) = uid {
        // Set before the hook runs; supplementary groups are dropped with it.
        command.uid(uid).gid(uid);
    }
    let its_number = its_gate.as_raw_fd();
    let hook = move || {
        confined.as_ref().map_or(Ok(()), Confined::separate)?;
        keep_capabilities(capabilities)?;
        limits.set(uid.is_some() || apart)?;
        bind(end_with_launcher.then_some(launcher))?;
        confined.as_ref().map_or(Ok(()), Confined::restrict)?;
        wait(its_number)
    };
    // SAFETY: the hook makes system calls on values made before; it neither allocates nor locks.
    unsafe { command.pre_exec(hook) };
    // SAFETY: the launcher has one thread. The new process executes the command and otherwise ends.
    let pid = match unsafe { libc::fork() } {
        0 => fail(&command.exec(), its_number),
        pid => Pid::from_raw(pid).ok_or_else(io::Error::last_os_error)?,
    };
    match rustix::process::pidfd_open(pid, PidfdFlags::empty()) {
        Ok(pidfd) => Ok(Prepared { pid: pid.as_raw_nonzero().get().cast_unsigned(), pidfd, files, gate }),
        Err(error) => {
            rustix::process::kill_process(pid, Signal::KILL)?;
            rustix::process::waitpid(Some(pid), WaitOptions::empty())?;
            Err(error.into())
        }
    }
}

impl Prepared {
    /// True if a process of this program and shape would see the same files now.
    pub(crate) fn sees_present_files(&self, program: &Program, shape: &ChildShape) -> bool {
        let present = program.confinement.as_ref().map(|all| all.list(shape.visible)).transpose();
        present.is_ok_and(|present| present == self.files)
    }

    /// Executes the program, in the cgroup of this open `cgroup.procs`, with these descriptors from [`FIRST`] on. Returns when it has
    /// been executed.
    pub(crate) fn run(
        &self,
        cgroup: Option<BorrowedFd<'_>>,
        descriptors: &[BorrowedFd<'_>],
    ) -> io::Result<()> {
        let joins = u8::from(cgroup.is_some());
        let given: Vec<_> = cgroup.into_iter().chain(descriptors.iter().copied()).collect();
        let mut failed = socket::send(&self.gate, &[joins], &given).err();
        let mut number = [0; size_of::<i32>()];
        loop {
            match rustix::io::read(&self.gate, &mut number[..]) {
                // Exec has closed the other end, or the end of the process.
                Ok(0) => return failed.map_or(Ok(()), |error| Err(error.into())),
                Ok(_) => return Err(io::Error::from_raw_os_error(i32::from_ne_bytes(number))),
                Err(rustix::io::Errno::INTR) => {}
                // It has ended without reading the message; its own comes behind this error.
                Err(error) if failed.is_none() => failed = Some(error),
                Err(error) => return Err(error.into()),
            }
        }
    }
}

/// Ends a process whose program cannot be executed, with a message to the launcher.
fn fail(error: &io::Error, gate: RawFd) -> ! {
    let number = error.raw_os_error().unwrap_or(libc::EIO).to_ne_bytes();
    // The first is closed if the hook has got to its end, and is the second then.
    for gate in [gate, GATE] {
        // SAFETY: four bytes of an array.
        if unsafe { libc::write(gate, number.as_ptr().cast(), number.len()) } > 0 {
            break;
        }
    }
    // SAFETY: runs no code of the launcher, whose copy this process is.
    unsafe { libc::_exit(1) }
}

/// Makes a socket [`GATE`], closes all descriptors of the launcher, and takes those that come with the message of [`Prepared::run`].
/// Async-signal-safe.
fn wait(gate: RawFd) -> io::Result<()> {
    let done = |result: libc::c_int| {
        if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    };
    rustix::thread::set_name(NAME)?;
    // Its user may not inspect it.
    rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable)?;
    if gate != GATE {
        // SAFETY: no pointers; from here to exec this process uses no other descriptor of the launcher.
        done(unsafe { libc::dup3(gate, GATE, libc::O_CLOEXEC) })?;
    }
    for number in FIRST..GATE {
        // In use, so that none of the descriptors that come gets a number that another one needs.
        // SAFETY: no pointers; as above.
        done(unsafe { libc::dup3(libc::STDIN_FILENO, number, libc::O_CLOEXEC) })?;
    }
    // SAFETY: no pointers; as above.
    let closed = unsafe { libc::syscall(libc::SYS_close_range, GATE + 1, libc::c_uint::MAX, 0) };
    if closed != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: it is open, and stays so until exec.
    let gate = unsafe { BorrowedFd::borrow_raw(GATE) };
    let mut room = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(GIVEN + 1))];
    let mut rights = RecvAncillaryBuffer::new(&mut room);
    let mut joins = [0];
    let received = rustix::io::retry_on_intr(|| {
        recvmsg(gate, &mut [IoSliceMut::new(&mut joins)], &mut rights, RecvFlags::CMSG_CLOEXEC)
    })?;
    if received.bytes == 0 {
        // SAFETY: the launcher has no use for this process, or is gone itself.
        unsafe { libc::_exit(0) }
    }
    let given = rights.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(descriptors) => Some(descriptors),
        _ => None,
    });
    let mut given = given.flatten();
    if joins[0] != 0 {
        join(&given.next().ok_or(rustix::io::Errno::BADMSG)?)?;
    }
    for (source, target) in given.zip(FIRST..GATE) {
        // The copy does not close at exec.
        // SAFETY: no pointers; both are this process's own numbers.
        done(unsafe { libc::dup2(source.as_raw_fd(), target) })?;
    }
    Ok(())
}

/// Moves the calling process into a cgroup. The kernel checks the rights of the process that opened the file.
fn join(procs: &OwnedFd) -> io::Result<()> {
    Ok(rustix::io::write(procs, b"0").map(drop)?)
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

/// Sets the signals of the calling process, takes its way to privileges, and sets its end with the launcher. Async-signal-safe.
fn bind(end_with: Option<Pid>) -> io::Result<()> {
    unblock_signals()?;
    ignore_broken_pipes()?;
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
    let mut none = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: the pointer is to a signal set, which the call fills.
    unsafe { libc::sigemptyset(none.as_mut_ptr()) };
    // SAFETY: the set was filled by the call above; the old one is not asked for.
    match unsafe { libc::sigprocmask(libc::SIG_SETMASK, none.as_ptr(), std::ptr::null_mut()) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
