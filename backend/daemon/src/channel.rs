//! One end of a SEQPACKET socket to another backend process, for the daemon's event loop.

use std::{
    io,
    marker::PhantomData,
    os::fd::{AsFd as _, OwnedFd},
};

use rustix::{fd::BorrowedFd, io::Errno, net::sockopt};
use sluice_messages::{
    channel::{self, Message, ReceiveError, Received},
    control,
};
use sluice_runtime::{closer::Closer, peer_time::PeerTime};
use sluice_shared_memory::socket;
use tokio::{
    io::{Interest, unix::AsyncFd},
    sync::{
        Notify,
        mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel},
    },
};

use crate::async_fd::try_watch;

/// A socket on which `In` is received and `Out` is sent.
#[derive(Debug)]
pub(crate) struct Channel<In, Out> {
    socket: AsyncFd<OwnedFd>,
    messages: PhantomData<fn(In) -> Out>,
}

impl<In: Message, Out: Message> Channel<In, Out> {
    /// Takes over a connected socket.
    ///
    /// # Errors
    /// The kernel's.
    pub(crate) fn new(socket: OwnedFd) -> io::Result<Self> {
        Self::try_new(socket).map_err(|(_, error)| error)
    }

    /// As [`Channel::new`], but an error comes with the socket.
    fn try_new(socket: OwnedFd) -> Result<Self, (OwnedFd, io::Error)> {
        match rustix::io::ioctl_fionbio(&socket, true) {
            Ok(()) => Ok(Self { socket: try_watch(socket)?, messages: PhantomData }),
            Err(error) => Err((socket, error.into())),
        }
    }

    /// Closes the socket for both sides, even if another process has it open.
    pub(crate) fn shut(&self) {
        // It may be closed already.
        _ = rustix::net::shutdown(self.socket.get_ref(), rustix::net::Shutdown::Both);
    }

    /// The next message; `None` if the peer is gone.
    ///
    /// # Errors
    /// The kernel's; `InvalidData` for anything except a message with its descriptors.
    pub(crate) async fn receive(&self) -> io::Result<Option<(In, Vec<OwnedFd>)>> {
        let read = |socket: &OwnedFd| match channel::receive(socket) {
            Ok(Received::Message(message, descriptors)) => Ok(Some((message, descriptors))),
            Ok(Received::Closed) => Ok(None),
            Ok(Received::Empty) => Err(io::ErrorKind::WouldBlock.into()),
            Err(ReceiveError::Failed(error)) => Err(error.into()),
            Err(error) => Err(io::Error::new(io::ErrorKind::InvalidData, error)),
        };
        self.socket.async_io(Interest::READABLE, read).await
    }

    /// Sends a message with its descriptors.
    ///
    /// # Errors
    /// The kernel's; `BrokenPipe` if the peer is gone.
    pub(crate) async fn send(&self, message: &Out, descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
        self.send_setup(&message.encode(), descriptors).await
    }

    /// Sends the encoded setup, the first message of a connection.
    ///
    /// # Errors
    /// As [`Channel::send`].
    pub(crate) async fn send_setup(&self, setup: &[u8], descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
        let write = |socket: &OwnedFd| Ok(socket::send(socket, setup, descriptors)?);
        self.socket.async_io(Interest::WRITABLE, write).await
    }
}

/// A socket to a peer that a guest can take over.
#[derive(Debug)]
pub(crate) struct StrangerChannel<In, Out> {
    /// It is there until this is dropped.
    channel: Option<Channel<In, Out>>,
    /// Closes the socket, and the descriptors that come.
    closer: Closer,
    time: PeerTime,
    /// Notified when calls on the socket have taken too much time.
    crowded: Notify,
}

impl<In, Out> Drop for StrangerChannel<In, Out> {
    /// The close wakes all that wait at the other end. They can be a crowd in any process to which the peer has passed its end.
    fn drop(&mut self) {
        if let Some(channel) = self.channel.take() {
            discard_stranger(channel.socket.into_inner(), &self.closer);
        }
    }
}

impl<In: Message, Out: Message> StrangerChannel<In, Out> {
    /// Takes over a connected socket, which `closer` closes.
    ///
    /// # Errors
    /// The kernel's.
    pub(crate) fn new(socket: OwnedFd, closer: Closer) -> io::Result<Self> {
        match Channel::try_new(socket) {
            Ok(channel) => {
                Ok(Self { channel: Some(channel), closer, time: PeerTime::new(), crowded: Notify::new() })
            }
            Err((socket, error)) => {
                discard_stranger(socket, &closer);
                Err(error)
            }
        }
    }

    fn socket(&self) -> io::Result<&AsyncFd<OwnedFd>> {
        self.channel.as_ref().map(|channel| &channel.socket).ok_or_else(|| io::ErrorKind::BrokenPipe.into())
    }

    /// Returns once the peer has let a crowd wait on the socket: each further call would take time of all VMs.
    pub(crate) async fn crowded(&self) {
        self.crowded.notified().await;
    }

    fn measure<R>(&self, call: impl FnOnce() -> R) -> R {
        let result = self.time.measure(call);
        if self.time.is_over() {
            self.crowded.notify_one();
        }
        result
    }

    /// The next message; `None` if the peer is gone.
    ///
    /// # Errors
    /// As [`Channel::receive`].
    pub(crate) async fn receive(&self) -> io::Result<Option<In>> {
        let read = |socket: &OwnedFd| match self.measure(|| read_from_stranger(socket, &self.closer)) {
            Ok(Received::Message(message, _)) => Ok(Some(message)),
            Ok(Received::Closed) => Ok(None),
            Ok(Received::Empty) => Err(io::ErrorKind::WouldBlock.into()),
            Err(ReceiveError::Failed(error)) => Err(error.into()),
            Err(error) => Err(io::Error::new(io::ErrorKind::InvalidData, error)),
        };
        self.socket()?.async_io(Interest::READABLE, read).await
    }

    /// Sends a message with its descriptors.
    ///
    /// # Errors
    /// The kernel's; `BrokenPipe` if the peer is gone, or is to end for its crowd.
    pub(crate) async fn send(&self, message: &Out, descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
        let bytes = message.encode();
        let write = |socket: &OwnedFd| {
            if self.time.is_over() {
                return Err(io::ErrorKind::BrokenPipe.into());
            }
            Ok(self.measure(|| socket::send(socket, &bytes, descriptors))?)
        };
        self.socket()?.async_io(Interest::WRITABLE, write).await
    }

    /// Takes no more messages of the peer, whose calls fail from now on.
    pub(crate) fn refuse_messages(&self) {
        if let Some(channel) = &self.channel {
            refuse_messages(channel.socket.get_ref(), &self.closer, &self.time);
        }
        if self.time.is_over() {
            self.crowded.notify_one();
        }
    }
}

/// Has `closer` take the messages that are left on a socket to a peer that a guest can take over, and close it: the close wakes all
/// that wait at the other end, and closes what was not received.
pub(crate) fn discard_stranger(socket: OwnedFd, closer: &Closer) {
    let received = closer.clone();
    closer.run(1, move || refuse_messages(&socket, &received, &PeerTime::new()));
}

/// Takes no more messages from a socket. `closer` closes the descriptors of messages that were not received: with them, the close of
/// this socket could wait for their last close. `time` is the peer's.
fn refuse_messages(socket: &OwnedFd, closer: &Closer, time: &PeerTime) {
    /// Bytes of the sender's buffer that every message takes at least, also an empty one.
    const LEAST: usize = 256;
    // It may be closed already.
    _ = time.measure(|| rustix::net::shutdown(socket, rustix::net::Shutdown::Read));
    // Both ends have buffers of the same size. An empty message looks like the end, so the messages are counted.
    let most = sockopt::socket_send_buffer_size(socket).unwrap_or_default() / LEAST;
    for _ in 0..most {
        let mut descriptors = Vec::new();
        let mut buffer = [0; control::BYTES];
        let read = time.measure(|| socket::receive_from_stranger(socket, &mut buffer, &mut descriptors));
        close_of_stranger(descriptors, closer);
        // If a crowd waits, the rest stays unread: each read would wake it. So does the rest for which the closer has no room.
        if !matches!(read, Ok(_) | Err(Errno::MSGSIZE | Errno::CONNRESET | Errno::INTR))
            || time.is_over()
            || closer.is_full()
        {
            break;
        }
    }
}

/// Receives a message of a peer that a guest can take over; `closer` closes its descriptors.
fn read_from_stranger<In: Message>(socket: &OwnedFd, closer: &Closer) -> Result<Received<In>, ReceiveError> {
    let mut descriptors = Vec::new();
    let received = channel::receive_from_stranger(socket, &mut descriptors);
    close_of_stranger(descriptors, closer);
    received
}

/// Has `closer` close descriptors of a peer that a guest can take over.
fn close_of_stranger(descriptors: Vec<OwnedFd>, closer: &Closer) {
    for descriptor in &descriptors {
        // Otherwise one socket could occupy a thread for hours. Only sockets have this option.
        _ = sockopt::set_socket_linger(descriptor, None);
    }
    closer.close(descriptors);
}

/// Messages for a peer, in order. The sender never waits for the peer: if the peer does not read, the task that waits for its
/// answers ends it.
#[derive(Clone, Debug)]
pub(crate) struct SendQueue<Out>(UnboundedSender<(Out, Vec<OwnedFd>)>);

/// The end of a [`SendQueue`] from which messages are sent.
#[derive(Debug)]
pub(crate) struct Queued<Out>(UnboundedReceiver<(Out, Vec<OwnedFd>)>);

/// Makes both ends of a queue.
pub(crate) fn send_queue<Out>() -> (SendQueue<Out>, Queued<Out>) {
    let (sender, receiver) = unbounded_channel();
    (SendQueue(sender), Queued(receiver))
}

impl<Out> SendQueue<Out> {
    /// Queues a message; returns false if the peer is known to be gone.
    pub(crate) fn post(&self, message: Out, descriptors: Vec<OwnedFd>) -> bool {
        self.0.send((message, descriptors)).is_ok()
    }
}

impl<Out: Message> Queued<Out> {
    /// Sends the queued messages until the peer is gone, which is not an error.
    pub(crate) async fn send<In: Message>(&mut self, channel: &Channel<In, Out>) -> io::Result<()> {
        while let Some((message, descriptors)) = self.0.recv().await {
            let descriptors: Vec<_> = descriptors.iter().map(|descriptor| descriptor.as_fd()).collect();
            match channel.send(&message, &descriptors).await {
                Err(error) if error.kind() == io::ErrorKind::BrokenPipe => return Ok(()),
                result => result?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{fs::File, io::Read as _, sync::mpsc};

    use sluice_kit::wait::{TIMEOUT, eventually, hung_up, readable};
    use sluice_messages::control::{FromDevice, ToDevice};
    use sluice_runtime::closer::{Closers, FULL};

    // Promise: F116
    #[tokio::test]
    #[cfg(not(miri))]
    async fn socket_of_a_stranger_is_closed_by_the_closer_only() {
        let (ours, theirs) = socket::pair().expect("a pair");
        let (kept, sent) = rustix::pipe::pipe().expect("a pipe");
        let closer = Closers::new(1).of(1);
        let channel = StrangerChannel::<FromDevice, ToDevice>::new(ours, closer.clone()).expect("a channel");
        // A message that is never received.
        socket::send(&theirs, &[0; control::BYTES], &[sent.as_fd()]).expect("sent");
        drop(sent);
        // The thread is at other work, as with a crowd of an earlier device.
        let (open, gate) = mpsc::channel::<()>();
        closer.run(1, move || gate.recv().expect("the test goes on"));
        drop(channel);
        assert!(!hung_up(&theirs), "the event loop has closed the socket");
        open.send(()).expect("the closer waits");
        assert!(readable(&theirs, TIMEOUT) && hung_up(&theirs));
        assert_eq!(File::from(kept).read(&mut [0]).expect("the end of the pipe"), 0);
    }

    // Promise: F118
    #[tokio::test]
    #[cfg(not(miri))]
    async fn messages_of_a_stranger_stay_unread_while_its_queue_is_full() {
        let (ours, theirs) = socket::pair().expect("a pair");
        let (_, sent) = rustix::pipe::pipe().expect("a pipe");
        let closer = Closers::new(1).of(1);
        let channel = StrangerChannel::<FromDevice, ToDevice>::new(ours, closer.clone()).expect("a channel");
        let (open, gate) = mpsc::channel::<()>();
        closer.run(FULL - 1, move || gate.recv().expect("the test goes on"));
        let messages = 5;
        for _ in 0..messages {
            socket::send(&theirs, &[0; control::BYTES], &[sent.as_fd()]).expect("sent");
        }
        channel.refuse_messages();
        let mut unread = 0;
        let socket = channel.socket().expect("open").get_ref();
        while socket::receive_from_stranger(socket, &mut [0; control::BYTES], &mut Vec::new())
            .is_ok_and(|read| read.is_some())
        {
            unread += 1;
        }
        assert_eq!(unread, messages - 1);
        open.send(()).expect("the closer waits");
        eventually("the descriptors are closed", || !closer.is_full());
    }
}
