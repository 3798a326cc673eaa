//! A service manager, as far as `sluiced` needs one: it keeps sockets that it is given, and passes them to the process that
//! follows (`NOTIFY_SOCKET` and `LISTEN_FDS` of systemd).

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

/// Descriptors that can be passed on.
const MOST: usize = 64;

/// Perhaps many of one name.
type Kept = Mutex<Vec<(String, OwnedFd)>>;

/// A service manager.
#[derive(Debug)]
pub struct Keeper {
    socket: PathBuf,
    kept: Arc<Kept>,
}

impl Keeper {
    /// Listens on a socket; it is heard as long as the process lives.
    ///
    /// # Errors
    /// When there is no such socket.
    pub fn new(path: &Path) -> Result<Self> {
        let socket = UnixDatagram::bind(path).context("a socket for notifications")?;
        let kept = Arc::<Kept>::default();
        std::thread::spawn({
            let kept = Arc::clone(&kept);
            move || while hear(&socket, &kept) {}
        });
        Ok(Self { socket: path.to_owned(), kept })
    }

    /// Names of what is kept.
    #[must_use]
    pub fn names(&self) -> Vec<String> {
        let kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let mut names: Vec<_> = kept.iter().map(|(name, _)| name.clone()).collect();
        names.sort();
        names
    }

    /// A command for a program that is given what is kept.
    #[must_use]
    pub fn command(&self, program: &Path) -> Command {
        let kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let names: Vec<_> = kept.iter().map(|(name, _)| name.clone()).collect();
        // The shell's own number is what the program gets that it becomes, and so it is told whom the sockets are for.
        let mut command = Command::new("sh");
        command.args(["-c", "LISTEN_PID=$$ exec \"$0\" \"$@\""]).arg(program);
        command.env("NOTIFY_SOCKET", &self.socket);
        if !names.is_empty() {
            command.env("LISTEN_FDS", names.len().to_string()).env("LISTEN_FDNAMES", names.join(":"));
        }
        // Copies that stay open until the program has been started, whatever is forgotten meanwhile.
        let sockets: Vec<OwnedFd> = kept.iter().filter_map(|(_, socket)| socket.try_clone().ok()).collect();
        let give = move || {
            // Out of the way first, so that none is overwritten before it is copied.
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
