//! A way from a guest to its device: the features of the device, the VMM that passes them on, and the features left in the guest.

use std::fmt;
use std::path::Path;

use anyhow::Result;

use crate::debian::{Kernel, Series};
use crate::matrix::{self, Place};
use crate::qemu::Qemu;
use crate::vm::{Gpu, Machine};

/// The newer QEMU's device, which passes on all features.
const GENERIC: &str = "vhost-user-test-device-pci";

/// The protocol between the guest's library and the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Blobs and contexts of a capset.
    Full,
    /// 3D resources.
    Legacy,
    /// 2D resources, no contexts.
    Flat,
}

impl Mode {
    /// All modes.
    pub const ALL: [Self; 3] = [Self::Full, Self::Legacy, Self::Flat];

    /// Its name in `SLUICE_TRANSPORT` and `SLUICE_DEVICE_MODE`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Full => "full",
            Self::Legacy => "legacy",
            Self::Flat => "2d",
        }
    }

    /// True if a guest whose device has this mode can also be used in `other`.
    #[must_use]
    pub fn serves(self, other: Self) -> bool {
        self == other || (self, other) == (Self::Full, Self::Legacy)
    }
}

impl fmt::Display for Mode {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        to.write_str(self.name())
    }
}

/// A way from a guest to its device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Way {
    /// The mode that is left in the guest.
    pub mode: Mode,
    qemu: Qemu,
}

impl Way {
    /// The installed QEMU and its own vhost-user graphics device.
    ///
    /// # Panics
    /// For FULL, which stock QEMU does not pass on.
    #[must_use]
    pub fn stock(mode: Mode) -> Self {
        assert!(mode != Mode::Full, "stock QEMU passes on no blobs");
        Self { mode, qemu: Qemu::Installed }
    }

    /// A newer QEMU, whose generic device passes on all features.
    ///
    /// # Errors
    /// When there is no newer QEMU.
    pub fn newer(mode: Mode) -> Result<Self> {
        Ok(Self { mode, qemu: Qemu::newer()? })
    }

    /// The variable of the device's environment that leaves this mode.
    #[must_use]
    pub fn environment(&self) -> Option<(&'static str, &'static str)> {
        let all = Self { mode: Mode::Legacy, qemu: Qemu::Installed };
        (*self != all).then_some(("SLUICE_DEVICE_MODE", self.mode.name()))
    }

    /// The machine with the device on this socket.
    #[must_use]
    pub fn machine(&self, machine: Machine, socket: &Path) -> Machine {
        let gpu = match self.qemu {
            Qemu::Installed => Gpu::VhostUser(socket.to_path_buf()),
            Qemu::Unpacked(_) => Gpu::Generic(socket.to_path_buf()),
        };
        Machine { gpu, qemu: self.qemu.clone(), ..machine }
    }

    /// Notes in the matrix that programs ran.
    ///
    /// # Errors
    /// When the note cannot be written, or QEMU does not print its version.
    pub fn ran(&self, kernel: &Kernel) -> Result<()> {
        matrix::ran(self.place(kernel.series), &self.qemu.version()?, &kernel.version)
    }

    /// Notes in the matrix the reason why no program could run.
    ///
    /// # Errors
    /// When the note cannot be written.
    pub fn not_run(&self, series: Series, reason: &str) -> Result<()> {
        matrix::not_run(self.place(series), reason)
    }

    /// Notes in the matrix that there is no newer QEMU.
    ///
    /// # Errors
    /// When the note cannot be written.
    pub fn no_newer(mode: Mode, series: Series) -> Result<()> {
        matrix::not_run(place(mode, GENERIC, series), "no such QEMU could be had")
    }

    fn place(&self, series: Series) -> Place {
        let device = match self.qemu {
            Qemu::Installed => "vhost-user-gpu-pci",
            Qemu::Unpacked(_) => GENERIC,
        };
        place(self.mode, device, series)
    }
}

fn place(mode: Mode, device: &str, series: Series) -> Place {
    Place::new(
        &mode.name().to_uppercase(),
        &format!("QEMU, `{device}`"),
        &format!("{series}, {}", series.distribution()),
    )
}
