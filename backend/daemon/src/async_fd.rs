#![expect(unsafe_code, reason = "the event loop registers a descriptor by its number")]

//! Descriptors in the daemon's event loop.

use std::{io, os::fd::OwnedFd};

use tokio::io::unix::{AsyncFd, AsyncFdRegisterError};

/// Registers a descriptor.
pub(crate) fn watch(descriptor: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    try_watch(descriptor).map_err(|(_, error)| error)
}

/// Registers a descriptor, or returns it with the error.
pub(crate) fn try_watch(descriptor: OwnedFd) -> Result<AsyncFd<OwnedFd>, (OwnedFd, io::Error)> {
    // SAFETY: an OwnedFd names one open descriptor, the same for as long as it lives, and AsyncFd owns it.
    unsafe { AsyncFd::register(descriptor) }.map_err(AsyncFdRegisterError::into_parts)
}

/// Returns when the process of a pidfd has ended.
pub(crate) async fn gone(pidfd: &AsyncFd<OwnedFd>) {
    if let Err(error) = pidfd.readable().await {
        tracing::error!(%error, "cannot watch a process");
    }
}
