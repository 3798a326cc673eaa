//! Paths: the checkout, the cache of downloads, and the programs that cargo built.

use std::env;
use std::fs::{self, File};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};

/// The root of the checkout.
#[must_use]
pub fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("the tests crate lies in a folder of the workspace")
        .to_path_buf()
}

/// Downloads and files made from them: `SLUICE_CACHE`, or `.cache` in the checkout. Safe to delete.
///
/// # Errors
/// When the folder cannot be created.
pub fn cache() -> Result<PathBuf> {
    let cache = env::var_os("SLUICE_CACHE").map_or_else(|| workspace().join(".cache"), PathBuf::from);
    fs::create_dir_all(&cache).with_context(|| format!("creating {}", cache.display()))?;
    Ok(cache)
}

/// Holds a lock of the cache until dropped, so that parallel test processes prepare a file only once.
///
/// # Errors
/// When the lock file cannot be created or locked.
pub fn cache_lock(name: &str) -> Result<File> {
    let path = cache()?.join(format!("{name}.lock"));
    let file = File::create(&path).with_context(|| format!("creating {}", path.display()))?;
    file.lock().with_context(|| format!("locking {}", path.display()))?;
    Ok(file)
}

/// The programs of a host, all in one folder: the command line, the daemon, and those that the daemon runs.
pub const HOST_PROGRAMS: [&str; 7] = [
    "sluice",
    "sluiced",
    "sluice-launcher",
    "sluice-device",
    "sluice-worker",
    "sluice-arbiter",
    "sluice-inventory",
];

/// The programs and libraries that cargo built, all in one folder.
#[derive(Debug, Clone)]
pub struct Binaries {
    folder: PathBuf,
}

impl Binaries {
    /// The folder named by `SLUICE_BINARIES`, or the profile folder of the running program.
    ///
    /// # Errors
    /// When the running program's own path is unknown.
    pub fn locate() -> Result<Self> {
        if let Some(folder) = env::var_os("SLUICE_BINARIES") {
            return Ok(Self { folder: folder.into() });
        }
        let own = env::current_exe().context("finding this program's own path")?;
        let mut folder = own.parent().context("this program's path has no folder")?.to_path_buf();
        if folder.ends_with("deps") {
            folder.pop();
        }
        Ok(Self { folder })
    }

    /// The programs in a given folder.
    #[must_use]
    pub const fn at(folder: PathBuf) -> Self {
        Self { folder }
    }

    /// The folder.
    #[must_use]
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// A program or library by its file name.
    ///
    /// # Errors
    /// When it has not been built; the message says how to build it.
    pub fn get(&self, file: &str) -> Result<PathBuf> {
        let path = self.folder.join(file);
        if path.exists() {
            return Ok(path);
        }
        bail!(
            "{} has not been built: run `cargo build --workspace` with the same profile, or name the folder in SLUICE_BINARIES",
            path.display()
        )
    }
}
