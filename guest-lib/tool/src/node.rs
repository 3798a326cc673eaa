//! One render node, in words. Asks the kernel, and makes nothing.

use std::path::Path;

use anyhow::{Context as _, Result};
use rustix::fd::AsFd as _;
use rustix::fs::{Mode as Permissions, OFlags};
use sluice_guest_node::{Kind, Mode, Node};

/// Looks at a node.
///
/// # Errors
/// The kernel's, when it cannot be opened.
pub(crate) fn look(path: &Path) -> Result<Kind> {
    let node = rustix::fs::open(path, OFlags::RDWR | OFlags::CLOEXEC, Permissions::empty())
        .with_context(|| format!("{} cannot be opened", path.display()))?;
    Ok(Node::new(node.as_fd()).kind())
}

/// Whose it is.
pub(crate) const fn whose(kind: Kind) -> &'static str {
    match kind {
        Kind::Sluice { .. } => "a Sluice device",
        Kind::OtherVirtio => "a virtio GPU that is not Sluice's",
        Kind::Other => "not a virtio GPU",
    }
}

/// How programs reach a device, and why so.
pub(crate) const fn way(mode: Mode) -> &'static str {
    match mode {
        Mode::Full => "FULL: the VMM passes blobs and contexts",
        Mode::Legacy => "LEGACY: the VMM passes 3D, and no blobs (QEMU's vhost-user-gpu)",
        Mode::Flat => "2D: the VMM passes no feature of the device (Cloud Hypervisor)",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_graphics_device_is_said_to_be_none() {
        assert_eq!(look(Path::new("/dev/null")).unwrap(), Kind::Other);
        assert!(look(Path::new("/dev/dri/none")).is_err());
    }
}
