//! SEQPACKET sockets between backend processes: one message, a fixed number of descriptors.

use rustix::{
    fd::{AsFd, BorrowedFd, OwnedFd},
    io::{Errno, IoSlice, IoSliceMut},
    net::{
        AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
        SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg, sendmsg,
        socketpair,
    },
};
use std::mem::MaybeUninit;

/// Largest number of descriptors in one message.
pub const DESCRIPTORS: usize = 4;

/// Creates a connected pair, close-on-exec.
///
/// # Errors
/// The kernel's, for instance if there are no descriptors left.
pub fn pair() -> Result<(OwnedFd, OwnedFd), Errno> {
    socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
}

/// Sends one message with its descriptors.
///
/// # Errors
/// EINVAL for more than [`DESCRIPTORS`]; the kernel's: EPIPE if the peer is gone, EAGAIN if a non-blocking socket is full.
pub fn send(socket: impl AsFd, message: &[u8], descriptors: &[BorrowedFd<'_>]) -> Result<(), Errno> {
    // The buffer is rounded up for alignment and would take more.
    if descriptors.len() > DESCRIPTORS {
        return Err(Errno::INVAL);
    }
    if descriptors.is_empty() {
        // A worker's filter permits no call that could pass a descriptor on.
        let sent = rustix::net::send(socket, message, SendFlags::NOSIGNAL)?;
        return if sent == message.len() { Ok(()) } else { Err(Errno::MSGSIZE) };
    }
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(Errno::INVAL);
    }
    let sent = sendmsg(socket, &[IoSlice::new(message)], &mut control, SendFlags::NOSIGNAL)?;
    if sent == message.len() { Ok(()) } else { Err(Errno::MSGSIZE) }
}

/// A message with its descriptors.
pub type Received<'b> = (&'b [u8], Vec<OwnedFd>);

/// Receives one message into `buffer`; `None` if the peer is gone. A message cut short, or with descriptors beyond
/// [`DESCRIPTORS`], is an error, and its descriptors are closed.
///
/// # Errors
/// The kernel's; EAGAIN if a non-blocking socket is empty; EMSGSIZE for a message that was cut.
pub fn receive(socket: impl AsFd, buffer: &mut [u8]) -> Result<Option<Received<'_>>, Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS))];
    let mut descriptors = Vec::with_capacity(DESCRIPTORS);
    let message = take_in(socket, buffer, &mut space, &mut descriptors)?;
    // Rounding for alignment leaves room for more descriptors than allowed, so they are counted.
    if descriptors.len() > DESCRIPTORS {
        return Err(Errno::MSGSIZE);
    }
    Ok(message.map(|message| (message, descriptors)))
}

/// As [`receive`], for a caller that must not wait for the close of a hostile peer's descriptors: all received ones are in
/// `descriptors`, also with an error.
///
/// # Errors
/// As [`receive`], except for the number of descriptors.
pub fn receive_from_stranger<'b>(
    socket: impl AsFd,
    buffer: &'b mut [u8],
    descriptors: &mut Vec<OwnedFd>,
) -> Result<Option<&'b [u8]>, Errno> {
    /// Linux's limit of descriptors in one message.
    const MOST: usize = 253;
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST))];
    take_in(socket, buffer, &mut space, descriptors)
}

fn take_in<'b>(
    socket: impl AsFd,
    buffer: &'b mut [u8],
    space: &mut [MaybeUninit<u8>],
    descriptors: &mut Vec<OwnedFd>,
) -> Result<Option<&'b [u8]>, Errno> {
    let mut control = RecvAncillaryBuffer::new(space);
    let got = recvmsg(socket, &mut [IoSliceMut::new(buffer)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
    let before = descriptors.len();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(fds) = message {
            descriptors.extend(fds);
        }
    }
    if got.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC) {
        return Err(Errno::MSGSIZE);
    }
    if got.bytes == 0 && descriptors.len() == before {
        return Ok(None);
    }
    Ok(Some(&buffer[..got.bytes]))
}
