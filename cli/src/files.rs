//! The paths of Sluice's programs and libraries.

use std::{
    env, io,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result};

/// Where packages put programs.
const PROGRAMS: &str = "/usr/libexec/sluice";
/// Where packages put libraries.
const LIBRARIES: &str = "/usr/lib/sluice";

/// The shim programs load instead of the driver.
pub(crate) const SHIM: Part = Part { file: "libsluice_guest.so", package: "sluice-guest", folder: LIBRARIES };
/// The management library monitors load instead of the driver's.
pub(crate) const SHIM_NVML: Part =
    Part { file: "libsluice_guest_nvml.so", package: "sluice-guest-nvml", folder: LIBRARIES };
/// The software GPU's management library.
const SOFTGPU_NVML: Part = Part { file: "libsoftgpu_nvml.so", package: "softgpu-nvml", folder: LIBRARIES };
/// The software GPU.
const SOFTGPU: Part = Part { file: "libsoftgpu_cuda.so", package: "softgpu-cuda", folder: LIBRARIES };
/// The daemon.
pub(crate) const SLUICED: Part = Part { file: "sluiced", package: "sluice-daemon", folder: PROGRAMS };
/// What the daemon starts, found beside it.
const STARTED: [Part; 5] = [
    Part { file: "sluice-launcher", package: "sluice-daemon", folder: PROGRAMS },
    Part { file: "sluice-device", package: "sluice-device", folder: PROGRAMS },
    Part { file: "sluice-worker", package: "sluice-worker", folder: PROGRAMS },
    Part { file: "sluice-arbiter", package: "sluice-arbiter", folder: PROGRAMS },
    Part { file: "sluice-inventory", package: "sluice-inventory", folder: PROGRAMS },
];

/// A file of Sluice.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Part {
    file: &'static str,
    /// The cargo package it is built from.
    package: &'static str,
    /// Where it is installed.
    folder: &'static str,
}

impl Part {
    /// Finds the file.
    pub(crate) fn find(self) -> Result<PathBuf> {
        let folders = match env::var_os("SLUICE_LIBEXEC") {
            Some(folder) => vec![std::path::absolute(folder).context("SLUICE_LIBEXEC")?],
            None => {
                let program = env::current_exe().context("cannot tell where sluice itself is")?;
                let own = program.parent().unwrap_or(Path::new("/")).to_owned();
                vec![own, self.folder.into()]
            }
        };
        let candidates = folders.iter().map(|folder| folder.join(self.file));
        candidates.clone().find(|path| path.exists()).with_context(|| {
            let tried: Vec<String> = candidates.map(|path| path.display().to_string()).collect();
            self.missing(&tried.join(" or "))
        })
    }

    fn missing(self, tried: &str) -> String {
        format!(
            "{} is missing: there is no {tried}\n  build it with `cargo build -p {}` (with --release, if sluice is), \
             or name the directory it is in with SLUICE_LIBEXEC",
            self.file, self.package
        )
    }
}

/// The daemon, with everything it needs in its directory.
pub(crate) fn daemon() -> Result<PathBuf> {
    let daemon = SLUICED.find()?;
    for part in STARTED {
        let path = daemon.with_file_name(part.file);
        anyhow::ensure!(path.exists(), part.missing(&path.display().to_string()));
    }
    Ok(daemon)
}

/// What to compute on.
pub(crate) struct Driver {
    /// The driver library.
    pub(crate) library: PathBuf,
    /// Its management library, if there is one.
    pub(crate) nvml: Option<PathBuf>,
    /// Whether it is the software GPU that comes with Sluice.
    pub(crate) embedded: bool,
}

/// The driver that was asked for, or the software GPU.
pub(crate) fn driver(asked: Option<&Path>, nvml: Option<&Path>) -> Result<Driver> {
    let asked_nvml = nvml.map(|path| named(path, "--nvml")).transpose()?;
    let Some(path) = asked else {
        let library = SOFTGPU.find().context("no driver to compute on (--driver names one)")?;
        let nvml = asked_nvml.map_or_else(|| SOFTGPU_NVML.find(), Ok)?;
        return Ok(Driver { library, nvml: Some(nvml), embedded: true });
    };
    Ok(Driver { library: named(path, "--driver")?, nvml: asked_nvml, embedded: false })
}

/// A library by the path somebody gave.
fn named(path: &Path, option: &str) -> Result<PathBuf> {
    match path.canonicalize() {
        Ok(path) => Ok(path),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            anyhow::bail!("there is no driver library {} ({option})", path.display())
        }
        Err(error) => Err(error).with_context(|| format!("cannot use the driver library {}", path.display())),
    }
}
