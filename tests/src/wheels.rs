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

/// The folder `name` of the cache with exactly these wheels in it; downloaded the first time, from the cache after that.
/// Nothing they depend on comes with them.
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

/// What [`install`] has put into a folder.
///
/// # Errors
/// When it is not complete.
pub(crate) fn identity(folder: &Path) -> Result<String> {
    let stamp = folder.join("wheels");
    fs::read_to_string(&stamp).with_context(|| format!("reading {}", stamp.display()))
}

/// A Python of our own in the cache, so that nothing is installed into anybody's.
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
    // The system's own first: setup installed its venv module. Another Python in the path may lack one.
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
