//! The paths of installed programs and libraries.

use std::env;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};

/// Directory of packaged libraries.
const LIBRARIES: &str = "/usr/lib/sluice";

/// A file that comes with the running program.
#[derive(Clone, Copy, Debug)]
pub struct InstalledFile {
    /// Name of the file.
    pub file: &'static str,
    /// Directory of its installation.
    pub folder: &'static str,
}

impl InstalledFile {
    /// The CUDA driver of the software GPU.
    pub const SOFTGPU: Self = Self { file: "libsoftgpu_cuda.so", folder: LIBRARIES };
    /// Its management library.
    pub const SOFTGPU_NVML: Self = Self { file: "libsoftgpu_nvml.so", folder: LIBRARIES };

    /// Finds the file: in the directory named by `SLUICE_LIBEXEC`, or else beside the running program or where it is installed.
    ///
    /// # Errors
    /// There is no such file; the message names the places, and the remedy.
    pub fn find(self) -> Result<PathBuf> {
        let folders = match env::var_os("SLUICE_LIBEXEC") {
            Some(folder) => vec![std::path::absolute(folder).context("SLUICE_LIBEXEC")?],
            None => {
                let program = env::current_exe().context("cannot find the path of this program")?;
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

    /// The message about a missing file. `tried` are the places where it could be.
    #[must_use]
    pub fn missing(self, tried: &str) -> String {
        format!(
            "{} is missing: there is no {tried}\n  build all of Sluice with `cargo build --workspace` (with --release, if \
             this program is), or name the directory of {0} with SLUICE_LIBEXEC",
            self.file
        )
    }
}
