//! A relay for a vhost-user connection that another process has made.
//!
//! By the conventions for back-end programs a manager may start one with a socket that is connected already. The vhost-user
//! library only takes connections from a listener, so two threads join such a socket to a listener of our own and pass messages
//! and descriptors on. Queue kicks do not travel here, so the cost is negligible.

use rustix::{
    fd::{AsFd, BorrowedFd, OwnedFd},
    io::{Errno, IoSlice, IoSliceMut},
    net::{
        RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
        SendAncillaryMessage, SendFlags, Shutdown, recvmsg, sendmsg, shutdown, sockopt::socket_acceptconn,
    },
};
use std::{
    io,
    mem::MaybeUninit,
    os::unix::net::{UnixListener, UnixStream},
    sync::Arc,
};

/// Largest number of descriptors in one message; a memory table has eight at most.
const DESCRIPTORS: usize = 64;

/// Returns a listener whose first connection is this socket, or the socket itself if it listens.
///
/// # Errors
/// The kernel's error of a call.
pub fn listener(socket: OwnedFd) -> io::Result<UnixListener> {
    if socket_acceptconn(&socket)? {
        return Ok(UnixListener::from(socket));
    }
    // In a directory that no other user can enter, so that the first connection is ours.
    let mut name = [0; 8];
    rustix::rand::getrandom(&mut name, rustix::rand::GetRandomFlags::empty())?;
    let folder = std::env::temp_dir().join(format!("sluice-device-{:016x}", u64::from_ne_bytes(name)));
    std::os::unix::fs::DirBuilderExt::mode(&mut std::fs::DirBuilder::new(), 0o700).create(&folder)?;
    let path = folder.join("socket");
    let made = UnixListener::bind(&path).and_then(|listener| Ok((listener, UnixStream::connect(&path)?)));
    // Neither is needed once connected; on failure an empty directory remains.
    let _ = std::fs::remove_file(&path);
    let _ = std::fs::remove_dir(&folder);
    let (listener, inner) = made?;
    let (outer, inner) = (Arc::new(socket), Arc::new(OwnedFd::from(inner)));
    for (from, to) in [(&outer, &inner), (&inner, &outer)] {
        let (from, to) = (Arc::clone(from), Arc::clone(to));
        std::thread::Builder::new().name("relay".into()).spawn(move || {
            let result = pass_all(&from, &to);
            if let Err(error) = result {
                tracing::debug!(%error, "a relay has ended");
            }
            // The end of one side is passed to the other.
            let _ = shutdown(&*to, Shutdown::Both);
            let _ = shutdown(&*from, Shutdown::Both);
        })?;
    }
    Ok(listener)
}

/// Passes all messages on until the end.
fn pass_all(from: &OwnedFd, to: &OwnedFd) -> Result<(), Errno> {
    let mut buffer = vec![0; 64 << 10];
    loop {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let got =
            match recvmsg(from, &mut [IoSliceMut::new(&mut buffer)], &mut control, RecvFlags::CMSG_CLOEXEC) {
                Ok(got) => got,
                Err(Errno::INTR) => continue,
                Err(error) => return Err(error),
            };
        let descriptors: Vec<OwnedFd> = control
            .drain()
            .filter_map(|message| match message {
                RecvAncillaryMessage::ScmRights(descriptors) => Some(descriptors),
                _ => None,
            })
            .flatten()
            .collect();
        if got.flags.contains(ReturnFlags::CTRUNC) {
            return Err(Errno::MSGSIZE);
        }
        if got.bytes == 0 {
            return Ok(());
        }
        let borrowed: Vec<BorrowedFd<'_>> = descriptors.iter().map(AsFd::as_fd).collect();
        pass(to, buffer.get(..got.bytes).unwrap_or_default(), &borrowed)?;
    }
}

/// Passes one piece on; descriptors travel with its first byte.
fn pass(to: &OwnedFd, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> Result<(), Errno> {
    let mut left = bytes;
    let mut descriptors = descriptors;
    while !left.is_empty() {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !descriptors.is_empty() && !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
            return Err(Errno::MSGSIZE);
        }
        match sendmsg(to, &[IoSlice::new(left)], &mut control, SendFlags::NOSIGNAL) {
            Ok(sent) => {
                left = left.get(sent..).unwrap_or_default();
                descriptors = &[];
            }
            Err(Errno::INTR) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}
