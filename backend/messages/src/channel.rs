//! One end of a socket between two backend processes.
//!
//! Every process uses [`receive`], so the rules for a message are written once: it has one size, carries its own number of
//! descriptors, and the first one has our version. Callers are blocking threads, threads behind `epoll` or `poll`, and
//! `sluiced`'s event loop.

pub use crate::control::Message;

use crate::control::{BYTES, SETUP_BYTES, VersionError, codec, same_version};
use core::marker::PhantomData;
use rustix::{
    fd::{AsFd, BorrowedFd, OwnedFd},
    io::Errno,
};
use sluice_protocol::field::FieldError;
use sluice_shared_memory::socket;

/// The result of trying to receive a message.
#[derive(Debug)]
pub enum Received<M> {
    /// A message, with its number of descriptors.
    Message(M, Vec<OwnedFd>),
    /// A non-blocking socket is empty.
    Empty,
    /// The peer has closed its end, or died.
    Closed,
}

impl<M> Received<M> {
    /// The message; `None` if there is none, which on a blocking socket means that the peer is gone.
    #[must_use]
    pub fn message(self) -> Option<(M, Vec<OwnedFd>)> {
        match self {
            Received::Message(message, descriptors) => Some((message, descriptors)),
            Received::Empty | Received::Closed => None,
        }
    }
}

/// The reason why a message was not received.
#[derive(Debug, thiserror::Error)]
pub enum ReceiveError {
    /// The message is longer than any valid one, or this process has no room for the descriptors.
    #[error("the message is cut short")]
    Cut,
    /// The bytes are not a valid message.
    #[error("cannot decode the message: {0}")]
    Malformed(#[from] FieldError),
    /// The message has the wrong number of descriptors.
    #[error("the message came with {0} descriptors instead of {1}")]
    Descriptors(usize, usize),
    /// The peer has another version.
    #[error(transparent)]
    Version(#[from] VersionError),
    /// The kernel's error of the call.
    #[error(transparent)]
    Failed(#[from] Errno),
}

/// Receives one message.
///
/// # Errors
/// [`ReceiveError`]. After all but the last kind the socket remains usable, and received descriptors are closed.
pub fn receive<M: Message>(socket: impl AsFd) -> Result<Received<M>, ReceiveError> {
    let mut buffer = [0; BYTES];
    loop {
        return match socket::receive(&socket, &mut buffer) {
            Ok(Some((bytes, descriptors))) => {
                Ok(Received::Message(decode(bytes, descriptors.len())?, descriptors))
            }
            Ok(None) => Ok(Received::Closed),
            Err(Errno::INTR) => continue,
            Err(error) => without_message(error),
        };
    }
}

/// Receives one message of a hostile peer, for a caller that must not wait for the close of its descriptors: all received ones are added
/// to `descriptors`, also with an error.
///
/// # Errors
/// As [`receive`].
pub fn receive_from_stranger<M: Message>(
    socket: impl AsFd,
    descriptors: &mut Vec<OwnedFd>,
) -> Result<Received<M>, ReceiveError> {
    let mut buffer = [0; BYTES];
    let before = descriptors.len();
    match socket::receive_from_stranger(socket, &mut buffer, descriptors) {
        Ok(Some(bytes)) => {
            let message = decode(bytes, descriptors.len().saturating_sub(before))?;
            Ok(Received::Message(message, Vec::new()))
        }
        Ok(None) => Ok(Received::Closed),
        // The caller tries again in its next round.
        Err(Errno::INTR) => Ok(Received::Empty),
        Err(error) => without_message(error),
    }
}

fn decode<M: Message>(bytes: &[u8], descriptors: usize) -> Result<M, ReceiveError> {
    let message = M::decode(bytes)?;
    // The bytes of another version may have another meaning.
    message.version().map_or(Ok(()), same_version)?;
    if descriptors == message.descriptors() {
        Ok(message)
    } else {
        Err(ReceiveError::Descriptors(descriptors, message.descriptors()))
    }
}

fn without_message<M>(error: Errno) -> Result<Received<M>, ReceiveError> {
    match error {
        Errno::AGAIN => Ok(Received::Empty),
        // The peer left without reading all messages.
        Errno::CONNRESET => Ok(Received::Closed),
        Errno::MSGSIZE => Err(ReceiveError::Cut),
        error => Err(ReceiveError::Failed(error)),
    }
}

/// One end of a connected SEQPACKET socket, which receives `In` and sends `Out`.
#[derive(Debug)]
pub struct Channel<In, Out> {
    socket: OwnedFd,
    messages: PhantomData<fn(In) -> Out>,
}

impl<In: Message, Out: Message> Channel<In, Out> {
    /// Takes over a connected socket, blocking or not.
    #[must_use]
    pub const fn new(socket: OwnedFd) -> Self {
        Self { socket, messages: PhantomData }
    }

    /// Receives one message.
    ///
    /// # Errors
    /// As [`receive`].
    pub fn receive(&self) -> Result<Received<In>, ReceiveError> {
        receive(&self.socket)
    }

    /// As [`receive_from_stranger`].
    ///
    /// # Errors
    /// As [`receive`].
    pub fn receive_from_stranger(
        &self,
        descriptors: &mut Vec<OwnedFd>,
    ) -> Result<Received<In>, ReceiveError> {
        receive_from_stranger(&self.socket, descriptors)
    }

    /// Sends a message with its descriptors.
    ///
    /// # Errors
    /// The kernel's: PIPE if the peer is gone, AGAIN if a non-blocking socket is full.
    pub fn send(&self, message: &Out, descriptors: &[BorrowedFd<'_>]) -> Result<(), Errno> {
        debug_assert_eq!(descriptors.len(), message.descriptors(), "{message:?}");
        let bytes = message.encode();
        loop {
            match socket::send(&self.socket, &bytes, descriptors) {
                Err(Errno::INTR) => {}
                sent => return sent,
            }
        }
    }
}

impl<In, Out> From<Channel<In, Out>> for OwnedFd {
    fn from(channel: Channel<In, Out>) -> OwnedFd {
        channel.socket
    }
}

impl<In, Out> AsFd for Channel<In, Out> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// The reason why a process has no setup.
#[derive(Debug, thiserror::Error)]
pub enum SetupError {
    /// The peer has closed its end, or died.
    #[error("the control socket closed before the setup came")]
    Closed,
    /// The setup is malformed, or has another version.
    #[error("cannot decode the setup: {0}")]
    Codec(#[from] codec::CodecError),
    /// The kernel's error of the call.
    #[error("cannot receive from the control socket: {0}")]
    Failed(#[from] Errno),
}

/// Waits for the setup that comes before all messages, and for its descriptors.
///
/// # Errors
/// [`SetupError`] if no valid setup comes.
pub fn receive_setup<S: bincode::Decode<()>>(socket: impl AsFd) -> Result<(S, Vec<OwnedFd>), SetupError> {
    let mut buffer = vec![0; SETUP_BYTES];
    loop {
        match socket::receive(&socket, &mut buffer) {
            Ok(Some((bytes, descriptors))) => return Ok((codec::decode(bytes)?, descriptors)),
            Ok(None) | Err(Errno::CONNRESET) => return Err(SetupError::Closed),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, clippy::panic, reason = "tests")]

    use super::*;
    use crate::control::{FromLauncher, ToDevice, ToWorker, VERSION};

    fn pair<In: Message, Out: Message>() -> (Channel<In, Out>, OwnedFd) {
        let (ours, theirs) = socket::pair().unwrap();
        rustix::io::ioctl_fionbio(&ours, true).unwrap();
        (Channel::new(ours), theirs)
    }

    #[test]
    fn message_arrives_with_its_descriptors() {
        let (sender, theirs) = pair::<FromLauncher, ToDevice>();
        let (one, other) = socket::pair().unwrap();
        sender.send(&ToDevice::Worker { session: 7, grouped: false }, &[one.as_fd(), other.as_fd()]).unwrap();
        let Ok(Received::Message(message, descriptors)) = receive::<ToDevice>(&theirs) else {
            panic!("no message")
        };
        assert_eq!(message, ToDevice::Worker { session: 7, grouped: false });
        assert_eq!(descriptors.len(), 2);
    }

    #[test]
    fn empty_socket_is_not_a_closed_one() {
        let (receiver, theirs) = pair::<ToDevice, FromLauncher>();
        assert!(matches!(receiver.receive(), Ok(Received::Empty)));
        drop(theirs);
        assert!(matches!(receiver.receive(), Ok(Received::Closed)));
    }

    #[test]
    fn peer_that_left_without_reading_is_closed() {
        let (receiver, theirs) = pair::<ToDevice, FromLauncher>();
        receiver.send(&FromLauncher::Settled {}, &[]).unwrap();
        drop(theirs);
        assert!(matches!(receiver.receive(), Ok(Received::Closed)));
    }

    #[test]
    fn message_with_other_descriptors_is_refused_and_the_next_one_is_received() {
        let (receiver, theirs) = pair::<ToDevice, FromLauncher>();
        let (one, _other) = socket::pair().unwrap();
        socket::send(&theirs, &ToDevice::Worker { session: 7, grouped: false }.encode(), &[one.as_fd()])
            .unwrap();
        socket::send(&theirs, &ToDevice::Resume {}.encode(), &[]).unwrap();
        assert!(matches!(receiver.receive(), Err(ReceiveError::Descriptors(1, 2))));
        assert!(matches!(receiver.receive(), Ok(Received::Message(ToDevice::Resume {}, _))));
    }

    #[test]
    fn bytes_that_are_no_message_are_refused() {
        let (receiver, theirs) = pair::<ToDevice, FromLauncher>();
        for bytes in [&[0xff; BYTES][..], &[0; BYTES - 1]] {
            socket::send(&theirs, bytes, &[]).unwrap();
            assert!(matches!(receiver.receive(), Err(ReceiveError::Malformed(_))));
        }
        socket::send(&theirs, &[0; BYTES + 1], &[]).unwrap();
        assert!(matches!(receiver.receive(), Err(ReceiveError::Cut)));
    }

    #[test]
    fn first_message_of_another_version_is_refused() {
        let (receiver, theirs) = pair::<ToWorker, FromLauncher>();
        let (one, other) = socket::pair().unwrap();
        for (version, is_ours) in [(VERSION, true), (VERSION + 1, false)] {
            let begin = ToWorker::Begin { version, session: 1 };
            socket::send(&theirs, &begin.encode(), &[one.as_fd(), other.as_fd()]).unwrap();
            match receiver.receive() {
                Ok(Received::Message(message, _)) => assert!(is_ours && message == begin),
                Err(ReceiveError::Version(VersionError { theirs })) => assert!(!is_ours && theirs == version),
                other => panic!("{other:?}"),
            }
        }
    }

    #[test]
    fn descriptors_of_a_stranger_are_left_to_the_caller() {
        let (receiver, theirs) = pair::<ToDevice, FromLauncher>();
        let (one, _other) = socket::pair().unwrap();
        let many = vec![one.as_fd(); socket::DESCRIPTORS];
        socket::send(&theirs, &ToDevice::Resume {}.encode(), &many).unwrap();
        let mut descriptors = Vec::new();
        let received = receiver.receive_from_stranger(&mut descriptors);
        assert!(matches!(received, Err(ReceiveError::Descriptors(..))));
        assert_eq!(descriptors.len(), many.len());
    }
}
