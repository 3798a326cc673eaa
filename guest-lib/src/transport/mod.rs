//! How the shim reaches the device: a way to make memory both sides see, to send doorbells, and to sleep.
//!
//! [`direct`] is for containers and tests, where this process is its own vhost-user front-end; [`drm`] is for virtual
//! machines, where the kernel's `virtio_gpu` driver carries everything; [`vsock`] is for virtual machines whose kernel has
//! no such driver, and shares nothing: it sends what the other side has to see. What flows through the memory is none of
//! the business of the others.
//!
//! The descriptors belong to a foreign program, which may close any of them: they live at high numbers and are checked
//! before use (`held`). Nothing here handles or sends a signal.

pub mod direct;
pub mod drm;
mod held;
mod queue;
mod ram;
pub mod vsock;

pub(crate) use held::abandon;

use rustix::io::Errno;
use sluice_protocol::{calls, doorbell::Doorbell};
use sluice_shared_memory::{Reservation, mapping::MapError};
use std::time::Duration;

/// Memory that the device knows by an id.
#[derive(Debug)]
pub struct Resource {
    /// The id, for [`Doorbell::Open`] and [`Doorbell::Attach`].
    pub id: u32,
    /// How its transport finds it again.
    token: Token,
}

#[derive(Clone, Copy, Debug)]
enum Token {
    /// A handle of the guest kernel.
    Handle(u32),
    /// A range of this process' memory file.
    Range(ram::Range),
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
        wanted: drm::Mode,
        /// The best that it can.
        best: drm::Mode,
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

/// Opens the way that `SLUICE_TRANSPORT` names: `direct` (to the socket `SLUICE_SOCKET`); `drm`, a render node, in the best
/// mode that it can, or in one of them, `full`, `legacy` or `2d`; `vsock` (through the socket `SLUICE_SOCKET` if there is such
/// a name, else a virtual socket); or `auto`, which is `direct` if there is a socket's name, else the first of `drm` and
/// `vsock` that finds a device.
///
/// # Errors
/// [`TransportError::NoDevice`] when the system has none; others when there is one that cannot be used.
pub fn open() -> Result<Box<dyn Transport>, TransportError> {
    let socket = std::env::var_os("SLUICE_SOCKET").filter(|socket| !socket.is_empty());
    let kind = std::env::var("SLUICE_TRANSPORT").unwrap_or_default();
    match (kind.as_str(), socket) {
        ("" | "auto" | "direct", Some(socket)) => Ok(Box::new(direct::Direct::connect(socket.as_ref())?)),
        ("direct", None) => Err(TransportError::Setting {
            name: "SLUICE_SOCKET",
            value: String::new(),
            expected: "the path of a device's socket",
        }),
        ("" | "auto", None) => match drm::Drm::open(None) {
            Ok(drm) => Ok(Box::new(drm)),
            // What keeps this user from the one it may not open is worth more than that there is no other.
            Err(error) => match vsock::Vsock::open() {
                Ok(vsock) => Ok(Box::new(vsock)),
                Err(TransportError::NoDevice) => Err(error),
                Err(other) => Err(other),
            },
        },
        ("drm", _) => Ok(Box::new(drm::Drm::open(None)?)),
        ("full", _) => Ok(Box::new(drm::Drm::open(Some(drm::Mode::Full))?)),
        ("legacy", _) => Ok(Box::new(drm::Drm::open(Some(drm::Mode::Legacy))?)),
        ("2d", _) => Ok(Box::new(drm::Drm::open(Some(drm::Mode::Flat))?)),
        ("vsock", Some(socket)) => Ok(Box::new(vsock::Vsock::connect(socket.as_ref())?)),
        ("vsock", None) => Ok(Box::new(vsock::Vsock::open()?)),
        _ => Err(TransportError::Setting {
            name: "SLUICE_TRANSPORT",
            value: kind,
            expected: "direct, drm, full, legacy, 2d, vsock or auto",
        }),
    }
}
