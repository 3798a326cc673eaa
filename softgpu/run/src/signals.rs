#![expect(unsafe_code, reason = "signal masks, a signalfd and their undoing in a child")]

//! Signals as events: a supervisor reads them from a descriptor, and the programs it starts do not inherit the mask.

use std::{
    io,
    mem::MaybeUninit,
    os::{
        fd::{AsFd, BorrowedFd, FromRawFd as _, OwnedFd},
        unix::process::CommandExt as _,
    },
    process::Command,
};

/// Signals that a supervisor handles.
const TAKEN: [libc::c_int; 6] =
    [libc::SIGTERM, libc::SIGHUP, libc::SIGINT, libc::SIGQUIT, libc::SIGUSR1, libc::SIGUSR2];

/// Blocked signals, to be read.
#[derive(Debug)]
pub struct Signals {
    descriptor: OwnedFd,
    before: libc::sigset_t,
}

impl Signals {
    /// Blocks the signals of this thread, which must be the only one, and delivers them as events.
    ///
    /// # Errors
    /// The error of the system call.
    pub fn take() -> io::Result<Self> {
        let mut set = MaybeUninit::uninit();
        // SAFETY: the call fills the set it is given.
        unsafe { libc::sigemptyset(set.as_mut_ptr()) };
        for signal in TAKEN {
            // SAFETY: the set is filled, and the signal exists.
            unsafe { libc::sigaddset(set.as_mut_ptr(), signal) };
        }
        let mut before = MaybeUninit::uninit();
        // SAFETY: both are sets; the call reads the first and fills the second.
        if unsafe { libc::sigprocmask(libc::SIG_BLOCK, set.as_ptr(), before.as_mut_ptr()) } != 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the set is filled; -1 asks for a new descriptor.
        let descriptor = unsafe { libc::signalfd(-1, set.as_ptr(), libc::SFD_CLOEXEC | libc::SFD_NONBLOCK) };
        if descriptor < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(Self {
            // SAFETY: just made, and owned by nothing else.
            descriptor: unsafe { OwnedFd::from_raw_fd(descriptor) },
            // SAFETY: filled by the successful call above.
            before: unsafe { before.assume_init() },
        })
    }

    /// Gives a child the signal mask that this process had before.
    pub fn spare(&self, command: &mut Command) {
        let before = self.before;
        let restore = move || {
            // SAFETY: reads a filled set; the old one is not requested.
            match unsafe { libc::sigprocmask(libc::SIG_SETMASK, &raw const before, std::ptr::null_mut()) } {
                0 => Ok(()),
                _ => Err(io::Error::last_os_error()),
            }
        };
        // SAFETY: the hook makes one system call on a copied value; it neither allocates nor locks.
        unsafe { command.pre_exec(restore) };
    }

    /// The next signal that has arrived.
    ///
    /// # Errors
    /// The descriptor cannot be read.
    pub fn next(&self) -> io::Result<Option<Signal>> {
        let mut bytes = [0; size_of::<libc::signalfd_siginfo>()];
        match rustix::io::read(&self.descriptor, &mut bytes) {
            Ok(read) if read == bytes.len() => {}
            Ok(_) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => return Ok(None),
            Err(error) => return Err(error.into()),
        }
        // SAFETY: the kernel has filled as many bytes as the structure has, and every bit pattern is valid.
        let information: libc::signalfd_siginfo = unsafe { std::mem::transmute(bytes) };
        Ok(Some(Signal {
            number: information.ssi_signo.cast_signed(),
            by_kernel: information.ssi_code == libc::SI_KERNEL,
        }))
    }
}

impl Signals {
    /// The next signal that requests the end of this process, if one has arrived; earlier signals are dropped.
    ///
    /// # Errors
    /// The descriptor cannot be read.
    pub fn ending(&self) -> io::Result<Option<Signal>> {
        while let Some(signal) = self.next()? {
            if signal.ends() {
                return Ok(Some(signal));
            }
        }
        Ok(None)
    }
}

impl AsFd for Signals {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }
}

/// A signal that has arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Signal {
    number: libc::c_int,
    by_kernel: bool,
}

impl Signal {
    /// Its number.
    #[must_use]
    pub fn number(self) -> libc::c_int {
        self.number
    }

    /// True if the terminal sent it to the whole foreground process group, the program included.
    #[must_use]
    pub fn is_from_terminal(self) -> bool {
        self.by_kernel
    }

    /// True if a service manager or a person requests the end of this process.
    fn ends(self) -> bool {
        matches!(self.number, libc::SIGTERM | libc::SIGHUP | libc::SIGINT | libc::SIGQUIT)
    }
}

/// Ends this process by the signal that ended its program. Returns if the signal does not end a process.
pub(crate) fn die_of(signal: libc::c_int) {
    // The program has left its core if one was enabled; a core of this process would hide it.
    let none = rustix::process::Rlimit { current: Some(0), maximum: Some(0) };
    if rustix::process::setrlimit(rustix::process::Resource::Core, none).is_err() {
        return;
    }
    let mut set = MaybeUninit::uninit();
    // SAFETY: the call fills the set it is given.
    unsafe { libc::sigemptyset(set.as_mut_ptr()) };
    // SAFETY: the set is filled; an invalid number is refused.
    unsafe { libc::sigaddset(set.as_mut_ptr(), signal) };
    // SAFETY: the default action touches no memory of ours.
    unsafe { libc::signal(signal, libc::SIG_DFL) };
    // A signal that is raised while blocked is delivered when it is unblocked.
    // SAFETY: no pointers.
    unsafe { libc::raise(signal) };
    // SAFETY: reads a filled set; the old one is not requested.
    unsafe { libc::sigprocmask(libc::SIG_UNBLOCK, set.as_ptr(), std::ptr::null_mut()) };
}
