//! The interface of a transport: the operations that the session needs of it, and the reasons for which they may fail.

use rustix::{fd::OwnedFd, io::Errno};
use sluice_guest_node::Mode;
use sluice_protocol::{calls, doorbell::Doorbell, session::HostCall};
use sluice_shared_memory::{Reservation, mapping::MapError, ranges::Range};
use std::time::Duration;

/// Memory that the device knows by an id.
#[derive(Debug)]
pub struct TransportResource {
    /// The id, for [`Doorbell::Open`] and [`Doorbell::Attach`].
    pub id: u32,
    /// The transport's own reference to it.
    pub(super) token: Token,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum Token {
    /// A handle of the guest kernel.
    Handle(u32),
    /// A range of this process' memory file.
    Range(Range),
    /// Private memory of this process.
    Private,
}

/// The reason for which the device cannot be reached, or no longer.
#[derive(Debug, thiserror::Error)]
pub enum TransportError {
    /// The system has no device.
    #[error("no Sluice device")]
    NoDevice,
    /// The system has a device that this user may not open.
    #[error("{path} cannot be opened: {error} (is this user in the group that owns it?)")]
    Denied {
        /// Its path.
        path: String,
        /// The kernel's answer.
        error: Errno,
    },
    /// The host of the device has another version of the calls.
    #[error(
        "the host speaks version {0} of the calls, and this library version {ours}; install the host's version of the \
         guest's package",
        ours = calls::VERSION
    )]
    Version(u32),
    /// The value of an environment variable is not valid.
    #[error("{name} is {value:?}, which is not {expected}")]
    Setting {
        /// Its name.
        name: &'static str,
        /// Its value.
        value: String,
        /// The valid values.
        expected: &'static str,
    },
    /// The device of this system cannot be used in the mode that was asked for.
    #[error(
        "SLUICE_TRANSPORT={wanted} is not possible: the virtual machine's device has no more than {best}"
    )]
    Mode {
        /// The mode that was asked for.
        wanted: Mode,
        /// The best mode of the device.
        best: Mode,
    },
    /// The device is gone, or the program closed a descriptor of this library.
    #[error("the device is gone, or its descriptor was closed by the program")]
    Lost,
    /// The device sent an unexpected answer.
    #[error("the device answered {what} with {kind:#x}")]
    Answer {
        /// The request.
        what: &'static str,
        /// The type word of its answer.
        kind: u32,
    },
    /// The vhost-user connection cannot be set up.
    #[error("vhost-user {what}: {error}")]
    VhostUser {
        /// The step that failed.
        what: &'static str,
        /// The library's answer.
        error: String,
    },
    /// The kernel refused a step.
    #[error("{what}: {error}")]
    System {
        /// The step that failed.
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
    fn create(
        &self,
        reservation: &Reservation,
        at: u64,
        bytes: u64,
    ) -> Result<TransportResource, TransportError>;

    /// The file and the offset in it of the pages of a resource, for a second mapping in this process; `None` if the device has a copy
    /// of the memory instead of the memory.
    ///
    /// # Errors
    /// [`TransportError`]
    fn file_pages(&self, _resource: &TransportResource) -> Result<Option<(OwnedFd, u64)>, TransportError> {
        Ok(None)
    }

    /// Destroys a resource whose memory the caller no longer uses, and unmaps only afterwards: until then a host without shared memory
    /// may write to it.
    ///
    /// # Errors
    /// [`TransportError`]; the resource then lives as long as this process.
    fn destroy(&self, resource: TransportResource) -> Result<(), TransportError>;

    /// Sends a doorbell and does not wait for anything. Allocates nothing.
    ///
    /// # Errors
    /// [`TransportError`], mostly [`TransportError::Lost`].
    fn submit(&self, doorbell: Doorbell) -> Result<(), TransportError>;

    /// Sends a record that was published in the ring, or holds it for a while to send it with others; called in the ring's order.
    /// With shared memory there is nothing to do.
    ///
    /// # Errors
    /// [`TransportError`], mostly [`TransportError::Lost`].
    fn posted(&self, _record: &[u8]) -> Result<(), TransportError> {
        Ok(())
    }

    /// Sends held records; called before a thread waits for the worker.
    ///
    /// # Errors
    /// [`TransportError`], mostly [`TransportError::Lost`].
    fn flush(&self) -> Result<(), TransportError> {
        Ok(())
    }

    /// Sends the return of a host function that was stored in the session page. With shared memory there is nothing to do: the worker
    /// looks there.
    ///
    /// # Errors
    /// [`TransportError`], mostly [`TransportError::Lost`].
    fn host_function_returned(&self, _call: HostCall) -> Result<(), TransportError> {
        Ok(())
    }

    /// Sleeps until the worker wakes this session, at most `timeout`. A return proves nothing: the caller checks its condition
    /// and sleeps again.
    ///
    /// # Errors
    /// [`TransportError`], mostly [`TransportError::Lost`].
    fn wait(&self, timeout: Duration) -> Result<(), TransportError>;
}
