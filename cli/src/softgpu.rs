//! The software GPU of one `sluice run` or `sluice host`: a device of its own, as large as needed.
//!
//! All memory of a device is in the custody of one arbiter, so two backends cannot share one. The device is in memory, so it is no
//! larger than requested, and goes with the backend. A user who names a device in the environment gets that one.

use std::{ffi::OsString, fs::Permissions, os::unix::fs::PermissionsExt as _, path::PathBuf};

use anyhow::{Context as _, Result, ensure};
use sluice_api::ByteSize;
use softgpu_device::{Config, MODELS, PAGE_BYTES};
use tempfile::TempDir;

/// Device memory of a program without `--memory`.
const DEFAULT: u64 = 1 << 30;
/// Memory of driver and arbiter beside an eighth of the whole: contexts, code, and room to grow.
const KEPT: u64 = 96 << 20;

/// A device for one backend. Dropping it removes its files.
pub(crate) struct SoftDevice {
    directory: Option<TempDir>,
    scale: Option<u64>,
}

impl SoftDevice {
    /// Makes a device of which a VM can have `memory` bytes; 0 for the default.
    pub(crate) fn make(memory: ByteSize) -> Result<Self> {
        let config = Config::from_environment().context("bad configuration of the software GPU")?;
        let model = config.model.unwrap_or(&MODELS[0]);
        let wanted = if memory.0 > 0 { memory.0 } else { DEFAULT };
        let bytes = wanted.saturating_add(wanted / 8).saturating_add(KEPT);
        let scale = match config.scale {
            Some(scale) => {
                let has = model.pages(scale).saturating_mul(PAGE_BYTES);
                ensure!(
                    has > memory.0,
                    "the software GPU has {} at the scale of the environment, less than --memory {memory}",
                    ByteSize(has)
                );
                None
            }
            None => {
                let scale = model.scale_for(bytes);
                let whole = model.pages(1).saturating_mul(PAGE_BYTES);
                ensure!(
                    scale.is_some(),
                    "a {} has no more than {}: --memory {memory} exceeds that",
                    model.name,
                    ByteSize(whole)
                );
                scale
            }
        };
        if !config.private {
            return Ok(Self { directory: None, scale });
        }
        let parent = config.state.parent().context("the software GPU has no directory")?;
        if scale.is_some() {
            let free = rustix::fs::statvfs(parent)
                .with_context(|| format!("cannot read the free space of {}", parent.display()))?;
            let free = free.f_bavail.saturating_mul(free.f_frsize);
            ensure!(
                free > bytes,
                "{} has no room for a device of {}: {} are free",
                parent.display(),
                ByteSize(bytes),
                ByteSize(free)
            );
        }
        let directory = tempfile::Builder::new()
            .prefix("sluice-gpu-")
            .permissions(Permissions::from_mode(0o700))
            .tempdir_in(parent)
            .context("cannot make a directory for the software GPU")?;
        Ok(Self { directory: Some(directory), scale })
    }

    /// Variables by which the driver finds it.
    pub(crate) fn variables(&self) -> Vec<(&'static str, OsString)> {
        let state = self.directory.as_ref().map(|state| ("SLUICE_SOFTGPU_STATE", state.path().into()));
        let scale = self.scale.map(|scale| ("SLUICE_SOFTGPU_SCALE", scale.to_string().into()));
        state.into_iter().chain(scale).collect()
    }

    /// The directory that sluiced removes if this process is killed.
    pub(crate) fn scratch(&self) -> Option<PathBuf> {
        self.directory.as_ref().map(|directory| directory.path().to_owned())
    }
}
