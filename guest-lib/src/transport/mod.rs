//! Transports, by which the shim reaches the device: they make memory that both sides see, send doorbells, and sleep.
//!
//! The session calls it. It owns every descriptor of this library. It never looks at the data that flows through the memory.
//!
//! [`direct`] is for containers and tests, where this process is its own vhost-user front-end; [`drm`] is for virtual machines,
//! where the kernel's `virtio_gpu` driver carries everything; [`vsock`] is for virtual machines whose kernel has no such
//! driver, and shares no memory: it sends the data that the other side has to see.
//!
//! The descriptors belong to a foreign program, which may close any of them: they live at high numbers and are checked before
//! use (`held`). Nothing here handles or sends a signal.

pub mod direct;
pub mod drm;
mod held;
mod interface;
mod queue;
mod ram;
mod signals;
pub mod vsock;

pub(crate) use held::abandon;
pub use interface::{Transport, TransportError, TransportResource};

/// Opens the transport that `SLUICE_TRANSPORT` names: `direct` (to the socket `SLUICE_SOCKET`); `drm`, a render node in its best
/// mode, or in one mode, `full`, `legacy` or `2d`; `vsock` (through the socket `SLUICE_SOCKET` if that is set, else a virtual
/// socket); or `auto`, which is `direct` if `SLUICE_SOCKET` is set, else the first of `drm` and
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
            // The reason for which a render node cannot be opened is worth more than the lack of a virtual socket.
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
