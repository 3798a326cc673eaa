//! The kinds of devices behind nodes, and the modes of a session that their drivers support.

use std::fmt;

/// The features of a driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Abilities {
    /// 3D resources.
    pub three_d: bool,
    /// Guest blobs.
    pub blobs: bool,
    /// Contexts of a capset.
    pub contexts: bool,
}

/// The commands that carry a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Guest blobs, contexts of a capset, a timeline of fences per ring.
    Full,
    /// 3D resources with guest backing, one timeline of fences for all: what stock QEMU passes.
    Legacy,
    /// 2D resources with guest backing, and no contexts: what stock Cloud Hypervisor passes.
    Flat,
}

impl Mode {
    /// The modes that a driver supports, the best first.
    #[must_use]
    pub const fn of(abilities: Abilities) -> &'static [Mode] {
        match abilities {
            Abilities { three_d: false, .. } => &[Mode::Flat],
            Abilities { blobs: true, contexts: true, .. } => &[Mode::Full, Mode::Legacy],
            Abilities { .. } => &[Mode::Legacy],
        }
    }
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Mode::Full => "full",
            Mode::Legacy => "legacy",
            Mode::Flat => "2d",
        })
    }
}

/// The kind of device behind a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceKind {
    /// A Sluice device.
    Sluice {
        /// The version of the calls on the host.
        version: u32,
        /// The features of the driver for it.
        abilities: Abilities,
    },
    /// A virtio GPU that is not Sluice's.
    OtherVirtio,
    /// Another graphics device, or none.
    Other,
}
