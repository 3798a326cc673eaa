//! The QEMUs that tests use: the installed one, and a newer one beside it.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result};

use crate::debian;
use crate::process::output_of;

const QUICK: Duration = Duration::from_secs(60);
const LIBRARIES: &str = "usr/lib/x86_64-linux-gnu";

/// A QEMU that can be started.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Qemu {
    /// The installed QEMU of the system.
    #[default]
    Installed,
    /// Unpacked from packages, with all its libraries.
    Unpacked(PathBuf),
}

impl Qemu {
    /// A QEMU that passes every feature of a vhost-user device on to the guest: 10.2 or newer.
    ///
    /// # Errors
    /// When it is neither in the cache nor can be downloaded.
    pub fn newer() -> Result<Self> {
        debian::newer_qemu().map(Self::Unpacked)
    }

    /// A command that starts it, without the arguments of a machine.
    #[must_use]
    pub fn command(&self) -> Command {
        match self {
            Self::Installed => Command::new("qemu-system-x86_64"),
            Self::Unpacked(root) => {
                // By its own loader, because this system's C library may be too old for it.
                let mut command = Command::new(root.join(LIBRARIES).join("ld-linux-x86-64.so.2"));
                command.arg("--library-path").arg(root.join(LIBRARIES));
                command.arg(root.join("usr/bin/qemu-system-x86_64"));
                let data = ["usr/share/qemu", "usr/share/seabios", "usr/lib/ipxe/qemu"];
                command.args(data.iter().flat_map(|data| [OsString::from("-L"), root.join(data).into()]));
                command.env("QEMU_MODULE_DIR", root.join(LIBRARIES).join("qemu"));
                command
            }
        }
    }

    /// The version that it prints.
    ///
    /// # Errors
    /// When it does not start or prints no version.
    pub fn version(&self) -> Result<String> {
        let text = output_of(self.command().arg("--version"), QUICK)?;
        let version = debian::qemu_version(&text);
        Ok(version.with_context(|| format!("no version in {text:?}"))?.to_owned())
    }
}
