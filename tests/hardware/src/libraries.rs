//! The places of the driver's libraries.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};

/// Folders in which distributions, containers and NVIDIA's installer place the libraries.
const FOLDERS: &[&str] = &[
    "/usr/lib/x86_64-linux-gnu",
    "/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
    "/usr/local/nvidia/lib64",
    "/usr/local/cuda/compat",
    "/run/opengl-driver/lib",
    "/usr/lib/wsl/lib",
];

/// Absolute paths of the libraries. NVML may be absent: then only the steps that need it are refused.
#[derive(Clone, Debug)]
pub(crate) struct Libraries {
    pub(crate) driver: PathBuf,
    pub(crate) nvml: Option<PathBuf>,
}

impl Libraries {
    /// Takes the given paths, or searches.
    pub(crate) fn find(driver: Option<PathBuf>, nvml: Option<PathBuf>) -> Result<Libraries> {
        let driver = match driver {
            Some(path) => std::path::absolute(path).context("the driver's path")?,
            None => {
                search("libcuda.so.1").context("libcuda.so.1 is in no folder of the loader: use --driver")?
            }
        };
        let nvml = match nvml {
            Some(path) => Some(std::path::absolute(path).context("NVML's path")?),
            None => search("libnvidia-ml.so.1"),
        };
        Ok(Libraries { driver, nvml })
    }

    /// The command-line arguments that pass the paths to a child.
    pub(crate) fn arguments(&self) -> Vec<OsString> {
        let mut arguments = vec![OsString::from("--driver"), self.driver.clone().into()];
        if let Some(nvml) = &self.nvml {
            arguments.extend([OsString::from("--nvml"), nvml.clone().into()]);
        }
        arguments
    }
}

/// True if this driver is the software GPU under any name: the file names a variable of its configuration.
pub(crate) fn is_software_gpu(driver: &Path) -> bool {
    const NAME: &[u8] = b"SLUICE_SOFTGPU_STATE";
    // A file that cannot be read is reported by the step that loads it.
    let is_file = std::fs::metadata(driver).is_ok_and(|metadata| metadata.is_file());
    let bytes = if is_file { std::fs::read(driver).unwrap_or_default() } else { Vec::new() };
    bytes.windows(NAME.len()).any(|window| window == NAME)
}

fn search(name: &str) -> Option<PathBuf> {
    let mut folders: Vec<PathBuf> = std::env::var_os("LD_LIBRARY_PATH")
        .map(|paths| std::env::split_paths(&paths).collect())
        .unwrap_or_default();
    folders.extend(FOLDERS.iter().map(PathBuf::from));
    folders.extend(configured(Path::new("/etc/ld.so.conf.d")));
    folders
        .into_iter()
        .filter(|folder| folder.is_absolute())
        .map(|folder| folder.join(name))
        .find(|path| path.exists())
}

/// The folders that the loader's configuration names.
fn configured(folder: &Path) -> Vec<PathBuf> {
    // An unreadable file names no folder, as for the loader itself.
    let files = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let texts = files.filter_map(|file| std::fs::read_to_string(file.path()).ok());
    texts.flat_map(|text| text.lines().map(|line| PathBuf::from(line.trim())).collect::<Vec<_>>()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn software_gpu_is_known_by_its_contents() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("libcuda.so.1");
        std::fs::write(&path, b"\x7fELF..SLUICE_SOFTGPU_STATE..").unwrap();
        assert!(is_software_gpu(&path));
        std::fs::write(&path, b"\x7fELF..SLUICE_SOFTGPU..").unwrap();
        assert!(!is_software_gpu(&path));
        assert!(!is_software_gpu(Path::new("/dev/zero")));
        assert!(!is_software_gpu(&folder.path().join("absent")));
    }
}
