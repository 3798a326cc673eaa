//! A service manager with the functions that `sluiced` needs: it keeps the sockets that a program gives it, and passes them to
//! the next program (`NOTIFY_SOCKET` and `LISTEN_FDS` of systemd).

#![expect(unsafe_code, reason = "gives a program descriptors by number, between fork and exec")]

use std::{
    ffi::OsStr,
    io,
    os::{
        fd::{AsRawFd as _, OwnedFd},
        unix::{net::UnixDatagram, process::CommandExt as _},
    },
    path::{Path, PathBuf},
    process::Command,
    sync::{Arc, Mutex, MutexGuard},
    thread,
};

use sluice_shared_memory::socket;

use crate::wait::{eventually, until};

/// A service manager.
#[derive(Debug)]
pub struct ServiceManager {
    socket: PathBuf,
    notifications: Arc<Mutex<Notifications>>,
}

/// The effect of all messages received so far.
#[derive(Debug, Default)]
pub struct Notifications {
    /// The number of messages that a program is ready.
    pub ready: u32,
    /// The number of messages that a program is alive.
    pub alive: u32,
    barriers: u32,
    /// Sockets by name; several may have one name.
    kept: Vec<(String, OwnedFd)>,
}

impl ServiceManager {
    /// Listens on a socket for the whole life of the process.
    pub fn new(path: &Path) -> Self {
        let socket = UnixDatagram::bind(path).expect("a socket for notifications");
        let notifications = Arc::<Mutex<Notifications>>::default();
        let shared = Arc::clone(&notifications);
        thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(Some((message, sockets))) = socket::receive(&socket, &mut bytes) {
                shared.lock().expect("unpoisoned").take_in(&String::from_utf8_lossy(message), sockets);
            }
        });
        Self { socket: path.to_owned(), notifications }
    }

    /// The effect of all messages sent before the call: waits until they are received.
    pub fn notifications(&self) -> MutexGuard<'_, Notifications> {
        let current = || self.notifications.lock().expect("unpoisoned");
        let before = current().barriers;
        let socket = UnixDatagram::unbound().expect("a socket");
        socket.send_to(b"BARRIER=1", &self.socket).expect("sent");
        eventually("the service manager has received all messages", || current().barriers > before);
        current()
    }

    /// The names of the kept sockets, sorted.
    pub fn names(&self) -> Vec<String> {
        let mut names: Vec<_> = self.notifications().kept.iter().map(|(name, _)| name.clone()).collect();
        names.sort();
        names
    }

    /// Drops all kept sockets, as at the stop of a service.
    pub fn drop_all(&self) {
        self.notifications().kept.clear();
    }

    /// A copy of the newest socket with a name, once it is kept.
    pub fn kept(&self, name: &str) -> OwnedFd {
        let copy = || {
            let notifications = self.notifications();
            let (_, socket) = notifications.kept.iter().rfind(|(kept, _)| kept == name)?;
            Some(socket.try_clone().expect("a copy"))
        };
        until(copy, Option::is_some).expect("the socket is kept")
    }

    /// A command for a program that gets the kept sockets.
    pub fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let notifications = self.notifications();
        // LISTEN_PID must be the process id of the program: the shell sets its own and then becomes the program.
        let mut command = Command::new("sh");
        command.args(["-c", "LISTEN_PID=$$ exec \"$0\" \"$@\""]).arg(program);
        command.env("NOTIFY_SOCKET", &self.socket);
        let names: Vec<&str> = notifications.kept.iter().map(|(name, _)| name.as_str()).collect();
        if !names.is_empty() {
            command.env("LISTEN_FDS", names.len().to_string()).env("LISTEN_FDNAMES", names.join(":"));
        }
        // Copies stay open until the command has started. Their high numbers are no targets of the loop below.
        let copy = |socket| rustix::io::fcntl_dupfd_cloexec(socket, 500).expect("a copy");
        let sockets: Vec<OwnedFd> = notifications.kept.iter().map(|(_, socket)| copy(socket)).collect();
        let give = move || {
            for (target, socket) in (3..).zip(&sockets) {
                // SAFETY: no pointers; the new process has no other use for the number.
                if unsafe { libc::dup2(socket.as_raw_fd(), target) } < 0 {
                    return Err(io::Error::last_os_error());
                }
            }
            Ok(())
        };
        // SAFETY: the closure only makes system calls, and allocates nothing.
        unsafe { command.pre_exec(give) };
        command
    }
}

impl Notifications {
    fn take_in(&mut self, message: &str, mut sockets: Vec<OwnedFd>) {
        let has = |line: &str| message.lines().any(|of_message| of_message == line);
        let name = message.lines().find_map(|line| line.strip_prefix("FDNAME=")).unwrap_or_default();
        if has("FDSTORE=1") {
            self.kept.extend(sockets.pop().map(|socket| (name.to_owned(), socket)));
        } else if has("FDSTOREREMOVE=1") {
            self.kept.retain(|(kept, _)| kept != name);
        }
        self.ready += u32::from(has("READY=1"));
        self.alive += u32::from(has("WATCHDOG=1"));
        self.barriers += u32::from(has("BARRIER=1"));
    }
}
