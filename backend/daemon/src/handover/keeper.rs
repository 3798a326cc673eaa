#![expect(unsafe_code, reason = "takes over descriptors that whoever started this process passes by number")]

//! The service manager (systemd), if one started this process: it receives this process's status, keeps sockets for it, and
//! passes them to the next process when this one is killed.
//!
//! A kept socket does not close with this process, so that the processes at its other end (devices, arbiters, the launcher)
//! notice nothing, and the next daemon continues the conversation. Nothing else is kept: the peer of each socket is in
//! [`crate::records::state::adoption`].

use std::{
    cell::RefCell,
    collections::BTreeMap,
    io,
    os::fd::{AsFd as _, BorrowedFd, FromRawFd as _, OwnedFd},
    time::Duration,
};

use rustix::io::FdFlags;
use sd_notify::NotifyState;

/// Where the service manager listens.
const NOTIFY: &str = "NOTIFY_SOCKET";
/// Variables that are for this process alone.
pub(crate) const VARIABLES: [&str; 6] =
    [NOTIFY, "LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES", "WATCHDOG_PID", "WATCHDOG_USEC"];

/// The service manager, if there is one.
#[derive(Debug)]
pub(crate) struct Keeper {
    keeps: bool,
    passed: RefCell<BTreeMap<String, OwnedFd>>,
}

impl Keeper {
    /// Takes over what was passed to this process.
    pub(crate) fn new() -> io::Result<Self> {
        let mut passed = BTreeMap::new();
        for (number, name) in sd_notify::listen_fds_with_names()? {
            // SAFETY: passed to this process by this number, by a protocol that says so; nothing else here knows of it.
            let descriptor = unsafe { OwnedFd::from_raw_fd(number) };
            rustix::io::fcntl_setfd(&descriptor, FdFlags::CLOEXEC)?;
            passed.insert(name, descriptor);
        }
        Ok(Self { keeps: std::env::var_os(NOTIFY).is_some(), passed: RefCell::new(passed) })
    }

    /// Whether what is given to it is kept.
    pub(crate) fn keeps(&self) -> bool {
        self.keeps
    }

    /// Takes what was passed under a name.
    pub(crate) fn take(&self, name: &str) -> Option<OwnedFd> {
        self.passed.borrow_mut().remove(name)
    }

    /// Whether something was passed under a name and not taken yet.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.passed.borrow().contains_key(name)
    }

    /// Whether a socket to a process was passed: a daemon before has left something that runs.
    pub(crate) fn has_processes(&self) -> bool {
        let leads =
            |name: &String| name == "launcher" || name.starts_with("device-") || name.starts_with("unit-");
        self.passed.borrow().keys().any(leads)
    }

    /// Lets go of everything that was passed and not taken.
    pub(crate) fn drop_rest(&self) {
        let rest = std::mem::take(&mut *self.passed.borrow_mut());
        for name in rest.keys() {
            self.forget(name);
        }
    }

    /// Gives a socket to be kept, in place of what was kept under its name: a service manager keeps many of one name, and passes
    /// and forgets them all.
    pub(crate) fn keep(&self, name: &str, socket: BorrowedFd<'_>) {
        self.passed.borrow_mut().remove(name);
        self.forget(name);
        if self.keeps {
            let states = [NotifyState::FdStore, NotifyState::FdName(name)];
            said(sd_notify::notify_with_fds(&states, &[socket.as_fd()]));
        }
    }

    /// Says that what was given under a name need not be kept any more.
    pub(crate) fn forget(&self, name: &str) {
        if self.keeps {
            said(sd_notify::notify(&[NotifyState::FdStoreRemove, NotifyState::FdName(name)]));
        }
    }

    /// Says that this process does what it is there for.
    pub(crate) fn ready(&self) {
        if self.keeps {
            said(sd_notify::notify(&[NotifyState::Ready]));
        }
    }

    /// Says that this process is ending.
    pub(crate) fn stopping(&self) {
        if self.keeps {
            said(sd_notify::notify(&[NotifyState::Stopping]));
        }
    }

    /// Says again and again that this process lives, if somebody wants to hear it. From the one thread that everything depends
    /// on: where that hangs, nothing is said.
    pub(crate) async fn live(&self) {
        let Some(limit) = sd_notify::watchdog_enabled().filter(|limit| *limit > Duration::ZERO) else {
            return;
        };
        let mut turn = tokio::time::interval(limit / 3);
        loop {
            turn.tick().await;
            said(sd_notify::notify(&[NotifyState::Watchdog]));
        }
    }
}

fn said(result: io::Result<()>) {
    if let Err(error) = result {
        tracing::warn!("the service manager cannot be told: {error}");
    }
}
