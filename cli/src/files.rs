//! The paths of Sluice's programs and libraries.

use std::{
    io,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result};
use softgpu_run::InstalledFile;

/// Directory of packaged programs.
const PROGRAMS: &str = "/usr/libexec/sluice";
/// Directory of packaged libraries.
const LIBRARIES: &str = "/usr/lib/sluice";

/// The shim, which programs load instead of the driver.
pub(crate) const SHIM: InstalledFile = InstalledFile { file: "libsluice_guest.so", folder: LIBRARIES };
/// The management library that monitors load instead of the driver's.
pub(crate) const SHIM_NVML: InstalledFile =
    InstalledFile { file: "libsluice_guest_nvml.so", folder: LIBRARIES };
pub(crate) const SLUICED: InstalledFile = InstalledFile { file: "sluiced", folder: PROGRAMS };
/// Programs that the daemon starts and finds beside itself.
const STARTED: [InstalledFile; 5] = [
    InstalledFile { file: "sluice-launcher", folder: PROGRAMS },
    InstalledFile { file: "sluice-device", folder: PROGRAMS },
    InstalledFile { file: "sluice-worker", folder: PROGRAMS },
    InstalledFile { file: "sluice-arbiter", folder: PROGRAMS },
    InstalledFile { file: "sluice-inventory", folder: PROGRAMS },
];

/// The daemon; its directory must hold every program that it starts.
pub(crate) fn daemon() -> Result<PathBuf> {
    let daemon = SLUICED.find()?;
    for part in STARTED {
        let path = daemon.with_file_name(part.file);
        anyhow::ensure!(path.exists(), part.missing(&path.display().to_string()));
    }
    Ok(daemon)
}

/// The driver to compute on.
pub(crate) struct InstalledDriver {
    /// The driver library.
    pub(crate) library: PathBuf,
    /// Its management library, if there is one.
    pub(crate) nvml: Option<PathBuf>,
    /// True for the software GPU of Sluice.
    pub(crate) embedded: bool,
}

/// The driver of the options, or else the software GPU.
pub(crate) fn driver(asked: Option<&Path>, nvml: Option<&Path>) -> Result<InstalledDriver> {
    let asked_nvml = nvml.map(|path| named(path, "--nvml")).transpose()?;
    let Some(path) = asked else {
        let library =
            InstalledFile::SOFTGPU.find().context("no driver to compute on (--driver names one)")?;
        let nvml = asked_nvml.map_or_else(|| InstalledFile::SOFTGPU_NVML.find(), Ok)?;
        return Ok(InstalledDriver { library, nvml: Some(nvml), embedded: true });
    };
    Ok(InstalledDriver { library: named(path, "--driver")?, nvml: asked_nvml, embedded: false })
}

/// A library by a path of the user.
fn named(path: &Path, option: &str) -> Result<PathBuf> {
    match path.canonicalize() {
        Ok(path) => Ok(path),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            anyhow::bail!("there is no driver library {} ({option})", path.display())
        }
        Err(error) => Err(error).with_context(|| format!("cannot use the driver library {}", path.display())),
    }
}
