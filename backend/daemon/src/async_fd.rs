#![expect(unsafe_code, reason = "the event loop registers a descriptor by its number")]

//! Descriptors in the daemon's event loop.

use std::{io, os::fd::OwnedFd};

use tokio::io::unix::AsyncFd;

/// Registers a descriptor.
pub(crate) fn watch(descriptor: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: an OwnedFd names one open descriptor, the same for as long as it lives, and AsyncFd owns it.
    unsafe { AsyncFd::register(descriptor) }.map_err(Into::into)
}

/// Returns when the process of a pidfd has ended.
pub(crate) async fn gone(pidfd: &AsyncFd<OwnedFd>) {
    if let Err(error) = pidfd.readable().await {
        tracing::error!(%error, "cannot watch a process");
    }
}
