//! Python wheels from PyPI, pinned, unpacked into the cache; they never enter the tree or a package.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result};

use crate::paths;
use crate::process::output_of;
use crate::progress;

const DOWNLOAD: Duration = Duration::from_secs(900);

/// Packages in Python, with the Python that runs them.
#[derive(Debug, Clone)]
pub struct Packages {
    /// The folder of the packages, for `PYTHONPATH`.
    pub folder: PathBuf,
    /// The Python they were installed for.
    pub python: PathBuf,
}

impl Packages {
    /// Names and versions of the packages.
    ///
    /// # Errors
    /// When they are not complete.
    pub(crate) fn identity(&self) -> Result<String> {
        let stamp = self.folder.join("wheels");
        fs::read_to_string(&stamp).with_context(|| format!("reading {}", stamp.display()))
    }
}

/// The folder `name` of the cache with exactly these wheels; downloaded the first time, from the cache after that. Dependencies
/// are not included.
///
/// # Errors
/// When they are neither in the cache nor can be downloaded.
pub fn install(name: &str, what: &str, wheels: &[&str]) -> Result<PathBuf> {
    let _lock = paths::cache_lock("wheels")?;
    let folder = paths::cache()?.join(name);
    let stamp = folder.join("wheels");
    let wanted = wheels.join("\n");
    if fs::read_to_string(&stamp).is_ok_and(|have| have == wanted) {
        return Ok(folder);
    }
    progress::step(format!("downloading {what} (wheels from PyPI)"));
    if folder.exists() {
        fs::remove_dir_all(&folder).with_context(|| format!("removing the old {}", folder.display()))?;
    }
    let mut pip = Command::new(python()?);
    pip.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-compile"]);
    pip.arg("--target").arg(&folder).args(wheels);
    output_of(&mut pip, DOWNLOAD)?;
    fs::write(&stamp, wanted).context("marking the wheels as complete")?;
    Ok(folder)
}

/// A Python of our own in the cache, so that no other one is changed.
///
/// # Errors
/// When this host has no Python that can make an environment with pip.
pub fn python() -> Result<PathBuf> {
    let folder = paths::cache()?.join("python");
    let python = folder.join("bin/python");
    let works = |python: &Path| {
        output_of(Command::new(python).args(["-m", "pip", "--version"]), Duration::from_secs(60)).is_ok()
    };
    if works(&python) {
        return Ok(python);
    }
    // The system's own first: setup installed its venv module. Another Python in the path may lack the module.
    let mut last = None;
    for base in ["/usr/bin/python3", "python3"] {
        let mut venv = Command::new(base);
        venv.args(["-m", "venv", "--clear"]).arg(&folder);
        match output_of(&mut venv, Duration::from_secs(300)) {
            Ok(_) if works(&python) => return Ok(python),
            Ok(_) => {}
            Err(error) => last = Some(error),
        }
    }
    Err(last.unwrap_or_else(|| anyhow::anyhow!("the new environment has no pip")))
        .context("creating a Python environment (Debian: install python3-venv)")
}
