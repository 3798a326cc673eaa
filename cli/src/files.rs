//! The paths of Sluice's programs and libraries.

use std::{
    env, io,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result};

/// Directory of packaged programs.
const PROGRAMS: &str = "/usr/libexec/sluice";
/// Directory of packaged libraries.
const LIBRARIES: &str = "/usr/lib/sluice";

/// The shim, which programs load instead of the driver.
pub(crate) const SHIM: InstalledFile = InstalledFile { file: "libsluice_guest.so", folder: LIBRARIES };
/// The management library that monitors load instead of the driver's.
pub(crate) const SHIM_NVML: InstalledFile =
    InstalledFile { file: "libsluice_guest_nvml.so", folder: LIBRARIES };
/// The software GPU's management library.
const SOFTGPU_NVML: InstalledFile = InstalledFile { file: "libsoftgpu_nvml.so", folder: LIBRARIES };
/// The software GPU.
const SOFTGPU: InstalledFile = InstalledFile { file: "libsoftgpu_cuda.so", folder: LIBRARIES };
pub(crate) const SLUICED: InstalledFile = InstalledFile { file: "sluiced", folder: PROGRAMS };
/// Programs that the daemon starts and finds beside itself.
const STARTED: [InstalledFile; 5] = [
    InstalledFile { file: "sluice-launcher", folder: PROGRAMS },
    InstalledFile { file: "sluice-device", folder: PROGRAMS },
    InstalledFile { file: "sluice-worker", folder: PROGRAMS },
    InstalledFile { file: "sluice-arbiter", folder: PROGRAMS },
    InstalledFile { file: "sluice-inventory", folder: PROGRAMS },
];

/// A file of Sluice.
#[derive(Clone, Copy, Debug)]
pub(crate) struct InstalledFile {
    file: &'static str,
    /// Directory of its installation.
    folder: &'static str,
}

impl InstalledFile {
    pub(crate) fn find(self) -> Result<PathBuf> {
        let folders = match env::var_os("SLUICE_LIBEXEC") {
            Some(folder) => vec![std::path::absolute(folder).context("SLUICE_LIBEXEC")?],
            None => {
                let program = env::current_exe().context("cannot find the path of sluice itself")?;
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
            "{} is missing: there is no {tried}\n  build all of Sluice with `cargo build --workspace` (with --release, if \
             sluice is), or name the directory of {0} with SLUICE_LIBEXEC",
            self.file
        )
    }
}

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
        let library = SOFTGPU.find().context("no driver to compute on (--driver names one)")?;
        let nvml = asked_nvml.map_or_else(|| SOFTGPU_NVML.find(), Ok)?;
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
