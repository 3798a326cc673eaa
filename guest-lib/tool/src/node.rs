#![expect(unsafe_code, reason = "ioctls of the virtio_gpu driver")]
#![expect(clippy::cast_possible_truncation, reason = "lengths of small structures")]

//! One render node: whose it is, and what its driver can do. Asks the kernel, and makes nothing.

use std::fmt;
use std::path::Path;

use anyhow::{Context as _, Result};
use rustix::fd::{AsFd as _, OwnedFd};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::ioctl::{self, Opcode, Updater};
use sluice_protocol::doorbell::Capset;

/// The structures of the driver, as `drm.h` and `virtgpu_drm.h` define them.
mod abi {
    /// DRM_IOCTL_VERSION.
    #[derive(Default)]
    #[repr(C)]
    pub(super) struct Version {
        pub(super) numbers: [i32; 3],
        pub(super) name_length: u64,
        pub(super) name: u64,
        pub(super) rest: [u64; 4],
    }

    /// DRM_IOCTL_VIRTGPU_GETPARAM. `value` is the address of an `int`.
    #[derive(Default)]
    #[repr(C)]
    pub(super) struct Parameter {
        pub(super) parameter: u64,
        pub(super) value: u64,
    }

    pub(super) const HAS_3D: u64 = 1;
    pub(super) const HAS_BLOBS: u64 = 3;
    pub(super) const HAS_CONTEXTS: u64 = 6;

    /// DRM_IOCTL_VIRTGPU_GET_CAPS.
    #[derive(Default)]
    #[repr(C)]
    pub(super) struct GetCaps {
        pub(super) id: u32,
        pub(super) version: u32,
        pub(super) address: u64,
        pub(super) size: u32,
        pub(super) pad: u32,
    }
}

const VERSION: Opcode = ioctl::opcode::read_write::<abi::Version>(b'd', 0x00);
const GETPARAM: Opcode = ioctl::opcode::read_write::<abi::Parameter>(b'd', 0x43);
const GET_CAPS: Opcode = ioctl::opcode::read_write::<abi::GetCaps>(b'd', 0x49);

/// How the driver lets a program reach the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// Blobs and contexts.
    Full,
    /// 3D resources, under QEMU's vhost-user-gpu.
    Legacy,
    /// 2D resources, under VMMs that pass no feature of the device.
    TwoD,
}

impl fmt::Display for Way {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        to.write_str(match self {
            Self::Full => "FULL: the VMM passes blobs and contexts",
            Self::Legacy => "LEGACY: the VMM passes 3D, and no blobs (QEMU's vhost-user-gpu)",
            Self::TwoD => "2D: the VMM passes no feature of the device (Cloud Hypervisor)",
        })
    }
}

/// What a node is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Node {
    /// A Sluice device, which speaks this version of the calls.
    Sluice { version: u32, way: Way },
    /// A virtio GPU of somebody else's.
    OtherVirtio,
    /// Another graphics device.
    Other,
}

impl fmt::Display for Node {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Sluice { version, way } => write!(to, "a Sluice device, version {version}, {way}"),
            Self::OtherVirtio => to.write_str("a virtio GPU that is not Sluice's"),
            Self::Other => to.write_str("not a virtio GPU"),
        }
    }
}

/// Looks at a node.
///
/// # Errors
/// The kernel's, when it cannot be opened.
pub(crate) fn look(path: &Path) -> Result<Node> {
    let node = rustix::fs::open(path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
        .with_context(|| format!("{} cannot be opened", path.display()))?;
    Ok(recognise(&node))
}

fn recognise(node: &OwnedFd) -> Node {
    let mut name = [0u8; 16];
    let mut version = abi::Version {
        name_length: name.len() as u64,
        name: address(name.as_mut_ptr()),
        ..abi::Version::default()
    };
    // SAFETY: the structure of this ioctl; its one address names `name_length` bytes that may be written.
    let answered = unsafe { call::<VERSION, _>(node, &mut version) };
    if answered.is_err() || !name.starts_with(b"virtio_gpu") {
        return Node::Other;
    }
    let mut body = [0u8; Capset::BYTES];
    let mut caps = abi::GetCaps {
        id: Capset::ID,
        address: address(body.as_mut_ptr()),
        size: body.len() as u32,
        ..abi::GetCaps::default()
    };
    // SAFETY: the structure of this ioctl; its address names `size` bytes that may be written.
    let answered = unsafe { call::<GET_CAPS, _>(node, &mut caps) };
    let Some(capset) = answered.ok().and_then(|()| Capset::decode(&body)) else { return Node::OtherVirtio };
    let has = |parameter: u64| {
        let mut value = 0i32;
        let mut get = abi::Parameter { parameter, value: address(&raw mut value) };
        // SAFETY: the structure of this ioctl; its address names an int that may be written.
        let answered = unsafe { call::<GETPARAM, _>(node, &mut get) };
        answered.is_ok() && value == 1
    };
    let way = if !has(abi::HAS_3D) {
        Way::TwoD
    } else if has(abi::HAS_BLOBS) && has(abi::HAS_CONTEXTS) {
        Way::Full
    } else {
        Way::Legacy
    };
    Node::Sluice { version: capset.version, way }
}

/// The number at which an address is passed to the kernel.
fn address<T>(value: *const T) -> u64 {
    value.expose_provenance() as u64
}

/// Calls the driver until it is not interrupted.
///
/// # Safety
/// `T` is the structure of ioctl `OPCODE`, and every address in it is valid for what the driver does with it.
unsafe fn call<const OPCODE: Opcode, T>(node: &OwnedFd, value: &mut T) -> Result<(), Errno> {
    loop {
        // SAFETY: the caller says that this is the structure of the ioctl.
        let request = unsafe { Updater::<OPCODE, T>::new(value) };
        // SAFETY: the caller says that the addresses in it are valid.
        match unsafe { ioctl::ioctl(node.as_fd(), request) } {
            Err(Errno::INTR | Errno::AGAIN) => {}
            result => return result,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_graphics_device_is_said_to_be_none() {
        assert_eq!(look(Path::new("/dev/null")).unwrap(), Node::Other);
        assert!(look(Path::new("/dev/dri/none")).is_err());
    }
}
