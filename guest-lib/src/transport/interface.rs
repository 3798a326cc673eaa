//! The interface of a transport: the operations that the session needs of it, and the reasons for which they may fail.

use rustix::io::Errno;
use sluice_guest_node::Mode;
use sluice_protocol::{calls, doorbell::Doorbell};
use sluice_shared_memory::{Reservation, mapping::MapError, ranges::Range};
use std::time::Duration;

/// Memory that the device knows by an id.
#[derive(Debug)]
pub struct Resource {
    /// The id, for [`Doorbell::Open`] and [`Doorbell::Attach`].
    pub id: u32,
    /// How its transport finds it again.
    pub(super) token: Token,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum Token {
    /// A handle of the guest kernel.
    Handle(u32),
    /// A range of this process' memory file.
    Range(Range),
    /// Memory of this process alone.
    Private,
}

/// Why the device cannot be reached, or not any more.
#[derive(Debug, thiserror::Error)]
pub enum TransportError {
    /// There is none in this system.
    #[error("no Sluice device")]
    NoDevice,
    /// There is one that this user may not open.
    #[error("{path} cannot be opened: {error} (is this user in the group that owns it?)")]
    Denied {
        /// Its path.
        path: String,
        /// The kernel's answer.
        error: Errno,
    },
    /// There is one, of a host that speaks another version of the calls.
    #[error(
        "the host speaks version {0} of the calls, and this library version {ours}; install the host's version of the \
         guest's package",
        ours = calls::VERSION
    )]
    Version(u32),
    /// The setting of an environment variable means nothing.
    #[error("{name} is {value:?}, which is not {expected}")]
    Setting {
        /// Its name.
        name: &'static str,
        /// Its value.
        value: String,
        /// What it may be.
        expected: &'static str,
    },
    /// The device of this system cannot be used in the mode that was asked for.
    #[error(
        "SLUICE_TRANSPORT={wanted} is not possible: the virtual machine's device has no more than {best}"
    )]
    Mode {
        /// What was asked for.
        wanted: Mode,
        /// The best that it can.
        best: Mode,
    },
    /// The device is gone, or the program closed a descriptor of this library.
    #[error("the device is gone, or its descriptor was closed by the program")]
    Lost,
    /// The device does not speak as expected.
    #[error("the device answered {what} with {kind:#x}")]
    Answer {
        /// To which request.
        what: &'static str,
        /// The type word of its answer.
        kind: u32,
    },
    /// The vhost-user connection cannot be set up.
    #[error("vhost-user {what}: {error}")]
    VhostUser {
        /// Which step.
        what: &'static str,
        /// The library's answer.
        error: String,
    },
    /// The kernel refuses.
    #[error("{what}: {error}")]
    System {
        /// Which step.
        what: &'static str,
        /// The kernel's answer.
        error: Errno,
    },
    /// The memory cannot be mapped.
    #[error(transparent)]
    Map(#[from] MapError),
    /// A resource is larger than one may be, empty, or not made of whole pages.
    #[error("a resource of {0:#x} bytes is not possible")]
    Size(u64),
    /// No memory is left for a resource.
    #[error("no room for {0:#x} bytes")]
    Exhausted(u64),
}

/// A way to the device. Any thread may use it at any time, but only one may wait.
pub trait Transport: Send + Sync {
    /// Creates a resource of `bytes` (whole pages), zeroed, mapped read-write into `reservation` at exactly `at`, and not
    /// inherited by forked children.
    ///
    /// # Errors
    /// [`TransportError`]; nothing is left behind.
    fn create(&self, reservation: &Reservation, at: u64, bytes: u64) -> Result<Resource, TransportError>;

    /// Destroys a resource which the caller has unmapped.
    ///
    /// # Errors
    /// [`TransportError`]; the resource then lives as long as this process.
    fn destroy(&self, resource: Resource) -> Result<(), TransportError>;

    /// Sends a doorbell and does not wait for anything. Allocates nothing.
    ///
    /// # Errors
    /// [`TransportError`], mostly [`TransportError::Lost`].
    fn submit(&self, doorbell: Doorbell) -> Result<(), TransportError>;

    /// A record was published in the ring; called in the ring's order. Where memory is shared there is nothing to do.
    ///
    /// # Errors
    /// [`TransportError`], mostly [`TransportError::Lost`].
    fn posted(&self, _record: &[u8]) -> Result<(), TransportError> {
        Ok(())
    }

    /// Sleeps until the worker wakes this session, at most `timeout`. Returning proves nothing: the caller looks whether
    /// there is something, and sleeps again.
    ///
    /// # Errors
    /// [`TransportError`], mostly [`TransportError::Lost`].
    fn wait(&self, timeout: Duration) -> Result<(), TransportError>;
}
