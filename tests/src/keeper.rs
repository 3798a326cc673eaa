//! A service manager with the functions that `sluiced` needs: it keeps sockets that it is given, and passes them to the next
//! process (`NOTIFY_SOCKET` and `LISTEN_FDS` of systemd).

#![expect(unsafe_code, reason = "gives a program descriptors by number, between fork and exec")]

use std::io::{self, IoSliceMut};
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::net::UnixDatagram;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context as _, Result};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};

/// Maximum number of descriptors that can be passed on.
const MOST: usize = 64;

/// Kept sockets by name; several may have one name.
type Kept = Mutex<Vec<(String, OwnedFd)>>;

/// A service manager.
#[derive(Debug)]
pub struct Keeper {
    socket: PathBuf,
    kept: Arc<Kept>,
}

impl Keeper {
    /// Listens on a socket for the whole life of the process.
    ///
    /// # Errors
    /// When the socket cannot be made.
    pub fn new(path: &Path) -> Result<Self> {
        let socket = UnixDatagram::bind(path).context("a socket for notifications")?;
        let kept = Arc::<Kept>::default();
        std::thread::spawn({
            let kept = Arc::clone(&kept);
            move || while hear(&socket, &kept) {}
        });
        Ok(Self { socket: path.to_owned(), kept })
    }

    /// Names of the kept sockets.
    #[must_use]
    pub fn names(&self) -> Vec<String> {
        let kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let mut names: Vec<_> = kept.iter().map(|(name, _)| name.clone()).collect();
        names.sort();
        names
    }

    /// A command for a program that gets the kept sockets.
    #[must_use]
    pub fn command(&self, program: &Path) -> Command {
        let kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let names: Vec<_> = kept.iter().map(|(name, _)| name.clone()).collect();
        // LISTEN_PID must be the program's process id, which is the shell's, because the shell becomes the program.
        let mut command = Command::new("sh");
        command.args(["-c", "LISTEN_PID=$$ exec \"$0\" \"$@\""]).arg(program);
        command.env("NOTIFY_SOCKET", &self.socket);
        if !names.is_empty() {
            command.env("LISTEN_FDS", names.len().to_string()).env("LISTEN_FDNAMES", names.join(":"));
        }
        // Copies that stay open until the program has started, even if the keeper drops a socket meanwhile.
        let sockets: Vec<OwnedFd> = kept.iter().filter_map(|(_, socket)| socket.try_clone().ok()).collect();
        let give = move || {
            // First to high numbers, so that none is overwritten before it is copied.
            let mut high = [0; MOST];
            for (slot, socket) in high.iter_mut().zip(&sockets) {
                // SAFETY: no pointers; a copy of a descriptor of this process.
                *slot = unsafe { libc::fcntl(socket.as_raw_fd(), libc::F_DUPFD, 500) };
            }
            for (target, socket) in (3..).zip(high.iter().take(sockets.len())) {
                // SAFETY: no pointers; both are this child's own.
                if unsafe { libc::dup2(*socket, target) } < 0 {
                    return Err(io::Error::last_os_error());
                }
                // SAFETY: no pointers; the copy made above.
                unsafe { libc::close(*socket) };
            }
            Ok(())
        };
        // SAFETY: it makes system calls on copied values only.
        unsafe { command.pre_exec(give) };
        command
    }
}

fn hear(socket: &UnixDatagram, kept: &Kept) -> bool {
    let mut bytes = [0; 4096];
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let received =
        recvmsg(socket, &mut [IoSliceMut::new(&mut bytes)], &mut ancillary, RecvFlags::CMSG_CLOEXEC);
    let Ok(message) = received else { return false };
    let mut sockets = Vec::new();
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(descriptors) = message {
            sockets.extend(descriptors);
        }
    }
    let text = String::from_utf8_lossy(&bytes[..message.bytes]).into_owned();
    let name = text.lines().find_map(|line| line.strip_prefix("FDNAME=")).unwrap_or_default().to_owned();
    let mut kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
    if text.contains("FDSTORE=1") {
        kept.extend(sockets.pop().map(|socket| (name, socket)));
    } else if text.contains("FDSTOREREMOVE=1") {
        kept.retain(|(known, _)| *known != name);
    }
    true
}
