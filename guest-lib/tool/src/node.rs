//! The search for virtio devices and their render nodes, and their description. It reads from the kernel and changes nothing.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use rustix::fd::AsFd as _;
use rustix::fs::{Mode as Permissions, OFlags};
use sluice_guest_node::{DeviceKind, Mode, Node};

/// Kinds of devices, by their numbers in virtio's specification.
pub(crate) const GPU: &str = "0x0010";
pub(crate) const VSOCK: &str = "0x0013";

/// Devices of one kind on the virtio bus; `root` is `/` outside tests.
pub(crate) fn virtio(root: &Path, kind: &str) -> Vec<PathBuf> {
    let entries = fs::read_dir(root.join("sys/bus/virtio/devices")).into_iter().flatten().flatten();
    let is_kind =
        |path: &PathBuf| fs::read_to_string(path.join("device")).is_ok_and(|text| text.trim() == kind);
    let mut devices: Vec<PathBuf> = entries.map(|entry| entry.path()).filter(is_kind).collect();
    devices.sort();
    devices
}

/// Names of the render nodes of a device. The kernel places them below the device, or below its parent.
pub(crate) fn render_nodes(root: &Path, gpu: &Path) -> Vec<String> {
    let Ok(gpu) = gpu.canonicalize() else { return Vec::new() };
    let entries = fs::read_dir(root.join("sys/class/drm")).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries
        .filter(|entry| {
            let device = entry.path().join("device").canonicalize();
            device.is_ok_and(|device| device == gpu || Some(device.as_path()) == gpu.parent())
        })
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .filter(|name| name.starts_with("renderD"))
        .collect();
    names.sort();
    names
}

/// The kind of device behind a node.
///
/// # Errors
/// The kernel's, when it cannot be opened.
pub(crate) fn look(path: &Path) -> Result<DeviceKind> {
    let node = rustix::fs::open(path, OFlags::RDWR | OFlags::CLOEXEC, Permissions::empty())
        .with_context(|| format!("{} cannot be opened", path.display()))?;
    Ok(Node::new(node.as_fd()).kind())
}

/// A description of a kind.
pub(crate) const fn whose(kind: DeviceKind) -> &'static str {
    match kind {
        DeviceKind::Sluice { .. } => "a Sluice device",
        DeviceKind::OtherVirtio => "a virtio GPU that is not Sluice's",
        DeviceKind::Other => "not a virtio GPU",
    }
}

/// The mode by which programs reach a device, and its reason.
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
    fn file_that_is_not_a_graphics_device_is_of_another_kind() {
        assert_eq!(look(Path::new("/dev/null")).unwrap(), DeviceKind::Other);
        assert!(look(Path::new("/dev/dri/none")).is_err());
    }
}
