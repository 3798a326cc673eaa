#![expect(unsafe_code, reason = "takes over descriptors that the service manager passes by number")]

//! The service manager (systemd), if one started this process: it receives this process's status, keeps sockets for it, and
//! passes them to the next process when this one is killed.
//!
//! A kept socket does not close with this process, so that the processes at its other end (devices, arbiters, the launcher)
//! notice nothing, and the next daemon continues the conversation. The store keeps sockets only: the peer of each is in
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
use sluice_runtime::closer::Closers;

use crate::channel::discard_stranger;

/// The variable with the address of the service manager's socket.
const NOTIFY: &str = "NOTIFY_SOCKET";
/// The start of the names of sockets to devices; the VM's number follows.
const DEVICE: &str = "device-";
/// The owner, no VM, of sockets whose VM is unknown.
const ORPHANS: u32 = 0;
/// Variables that are not passed on to children.
pub(crate) const VARIABLES: [&str; 6] =
    [NOTIFY, "LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES", "WATCHDOG_PID", "WATCHDOG_USEC"];

/// The service manager, if there is one.
#[derive(Debug)]
pub(crate) struct FdStore {
    keeps: bool,
    passed: RefCell<BTreeMap<String, OwnedFd>>,
    /// Close the sockets of devices that were not taken.
    closers: Closers,
}

/// The name of the socket to a VM's device.
pub(crate) fn device_name(vm: u32) -> String {
    format!("{DEVICE}{vm}")
}

impl FdStore {
    /// Takes over the descriptors that were passed to this process.
    pub(crate) fn new(closers: Closers) -> io::Result<Self> {
        let mut passed = BTreeMap::new();
        for (number, name) in sd_notify::listen_fds_with_names()? {
            // SAFETY: passed to this process under this number, as the protocol of systemd defines; no other code here uses it.
            let descriptor = unsafe { OwnedFd::from_raw_fd(number) };
            rustix::io::fcntl_setfd(&descriptor, FdFlags::CLOEXEC)?;
            if let Some(other) = passed.insert(name.clone(), descriptor) {
                discard(&name, other, &closers);
            }
        }
        Ok(Self { keeps: std::env::var_os(NOTIFY).is_some(), passed: RefCell::new(passed), closers })
    }

    /// True if the service manager keeps sockets.
    pub(crate) fn keeps(&self) -> bool {
        self.keeps
    }

    /// Takes the descriptor that was passed under a name.
    pub(crate) fn take(&self, name: &str) -> Option<OwnedFd> {
        self.passed.borrow_mut().remove(name)
    }

    /// True if a descriptor was passed under a name and not taken yet.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.passed.borrow().contains_key(name)
    }

    /// True if a socket to a process was passed: an earlier daemon has left running processes.
    pub(crate) fn has_processes(&self) -> bool {
        let leads =
            |name: &String| name == "launcher" || name.starts_with(DEVICE) || name.starts_with("unit-");
        self.passed.borrow().keys().any(leads)
    }

    /// Closes all descriptors that were passed and not taken.
    pub(crate) fn drop_rest(&self) {
        let rest = std::mem::take(&mut *self.passed.borrow_mut());
        for (name, descriptor) in rest {
            self.forget(&name);
            discard(&name, descriptor, &self.closers);
        }
    }

    /// Gives a socket to the store, in place of an earlier one of its name: a service manager keeps many of one name, and
    /// passes and drops them all.
    pub(crate) fn keep(&self, name: &str, socket: BorrowedFd<'_>) {
        let passed = self.take(name);
        self.forget(name);
        if let Some(passed) = passed {
            discard(name, passed, &self.closers);
        }
        if self.keeps {
            let states = [NotifyState::FdStore, NotifyState::FdName(name)];
            log_failure(sd_notify::notify_with_fds(&states, &[socket.as_fd()]));
        }
    }

    /// Drops the sockets of a name from the store. The service manager closes its copies apart from its own loop (systemd: in a process or a
    /// thread for each), so either side may have the last copy.
    pub(crate) fn forget(&self, name: &str) {
        if self.keeps {
            log_failure(sd_notify::notify(&[NotifyState::FdStoreRemove, NotifyState::FdName(name)]));
        }
    }

    /// Reports that this process is ready.
    pub(crate) fn ready(&self) {
        if self.keeps {
            log_failure(sd_notify::notify(&[NotifyState::Ready]));
        }
    }

    /// Reports that this process is stopping.
    pub(crate) fn stopping(&self) {
        if self.keeps {
            log_failure(sd_notify::notify(&[NotifyState::Stopping]));
        }
    }

    /// Reports regularly that this process lives, if the service manager requests it. From the one thread on which everything
    /// depends: if that thread hangs, no report is sent.
    pub(crate) async fn live(&self) {
        let Some(limit) = sd_notify::watchdog_enabled().filter(|limit| *limit > Duration::ZERO) else {
            return;
        };
        let mut turn = tokio::time::interval(limit / 3);
        loop {
            turn.tick().await;
            log_failure(sd_notify::notify(&[NotifyState::Watchdog]));
        }
    }
}

impl FdStore {
    /// Closes the socket of a process that was started for an earlier daemon, whichever its VM is.
    pub(crate) fn discard_orphan(&self, socket: OwnedFd) {
        discard_stranger(socket, &self.closers.of(ORPHANS));
    }
}

/// Closes a passed descriptor that nothing uses. A guest may have taken over the device at the other end of a socket.
fn discard(name: &str, descriptor: OwnedFd, closers: &Closers) {
    if let Some(vm) = name.strip_prefix(DEVICE).and_then(|number| number.parse().ok()) {
        discard_stranger(descriptor, &closers.of(vm));
    }
}

fn log_failure(result: io::Result<()>) {
    if let Err(error) = result {
        tracing::warn!(%error, "cannot notify the service manager");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    use sluice_kit::wait::{eventually, hung_up};
    use sluice_shared_memory::socket;

    // Promise: F116
    #[test]
    #[cfg(not(miri))]
    fn socket_of_a_device_that_no_daemon_took_is_closed_on_the_thread_of_its_vm() {
        let closers = Closers::new(2);
        let store = FdStore::new(closers.clone()).expect("no descriptors");
        let pairs = [7, 8, 9].map(|vm| (vm, socket::pair().expect("a pair")));
        let [seven, eight, nine] = pairs.map(|(vm, (ours, theirs))| {
            store.passed.borrow_mut().insert(device_name(vm), ours);
            theirs
        });
        let hang = |vm: u32| {
            let (open, gate) = mpsc::channel::<()>();
            closers.of(vm).run(1, move || _ = gate.recv());
            open
        };
        let (open_seven, open_eight) = (hang(7), hang(8));
        let (next, _theirs) = socket::pair().expect("a pair");
        store.keep(&device_name(7), next.as_fd());
        store.drop_rest();
        assert!(![&seven, &eight, &nine].into_iter().any(hung_up), "the event loop has closed a socket");
        drop(open_seven);
        eventually("the sockets of two VMs are closed", || hung_up(&seven) && hung_up(&nine));
        assert!(!hung_up(&eight), "the event loop has closed a socket");
        drop(open_eight);
        eventually("the socket of the last VM is closed", || hung_up(&eight));
    }
}
