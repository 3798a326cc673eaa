//! A software GPU's own count of memory, independent of all processes that use it.

use std::ffi::OsString;
use std::path::Path;

use anyhow::Result;
use softgpu_device::{Config, Device, Held};

/// A device that is only read.
#[derive(Debug)]
pub struct Counted(Device);

impl Counted {
    /// The first device of a folder, by the scale with which it was made.
    ///
    /// # Errors
    /// When the folder has no device.
    pub fn open(state: &Path, scale: u64) -> Result<Self> {
        let scale = scale.to_string();
        let variable = |name: &str| match name {
            "SLUICE_SOFTGPU_STATE" => Some(state.as_os_str().to_owned()),
            "SLUICE_SOFTGPU_SCALE" => Some(OsString::from(&scale)),
            _ => None,
        };
        Ok(Self(Device::open(&Config::from_variables(&variable)?, 0)?))
    }

    /// Memory that processes hold together, including chunks on loan. `None` if it changes while it is counted: memory that moves
    /// from one process to another would count twice.
    #[must_use]
    pub fn held_by(&self, processes: &[u32]) -> Option<Held> {
        let held = self.0.held_together(processes);
        (self.0.held_together(processes) == held).then_some(held)
    }
}
