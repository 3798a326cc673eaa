//! A Python for guests: Debian's own and packages from PyPI in one tree, compiled ahead, because an emulated processor
//! takes many times longer to compile than to run them. Stays in the cache; only some images contain it.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result};

use crate::process::output_of;
use crate::wheels::Packages;
use crate::{debian, paths, progress};

/// The interpreter and the modules that monitors use, with their libraries beyond C's own.
const DEBIAN: &[&str] = &[
    "python3.11-minimal",
    "libpython3.11-minimal",
    "libpython3.11-stdlib",
    "libexpat1",
    "libffi8",
    "libncursesw6",
    "libtinfo6",
    "ncurses-base",
    "zlib1g",
];
/// Parts of those packages that no guest needs.
const SUPERFLUOUS: &[&str] =
    &["usr/share", "usr/lib/binfmt.d", "usr/lib/python3.11/pydoc_data", "usr/lib/python3.11/test"];
/// Folder in which Debian's Python searches packages.
const PACKAGES: &str = "usr/lib/python3/dist-packages";
const COMPILE: Duration = Duration::from_secs(300);

/// An unpacked Python.
#[derive(Debug, Clone)]
pub struct Python {
    root: PathBuf,
}

impl Python {
    /// The interpreter in a guest.
    pub const INTERPRETER: &str = "usr/bin/python3.11";

    /// A Python with these packages; downloaded and compiled the first time, from the cache after that.
    ///
    /// # Errors
    /// When it is neither in the cache nor can be downloaded.
    pub fn with(name: &str, packages: &Packages) -> Result<Self> {
        let _lock = paths::cache_lock("guest-python")?;
        let folder = paths::cache()?.join(format!("guest-python-{name}"));
        let (root, stamp) = (folder.join("root"), folder.join("wanted"));
        let wanted = format!("{DEBIAN:?}{}", packages.identity()?);
        if fs::read_to_string(&stamp).is_ok_and(|have| have == wanted) {
            return Ok(Self { root });
        }
        progress::step(format!("putting a Python for guests together ({name})"));
        if folder.exists() {
            fs::remove_dir_all(&folder).with_context(|| format!("removing the old {}", folder.display()))?;
        }
        fs::create_dir_all(&root).with_context(|| format!("creating {}", root.display()))?;
        debian::unpack_packages(DEBIAN, &root)?;
        for superfluous in SUPERFLUOUS {
            match fs::remove_dir_all(root.join(superfluous)) {
                // Not every version of a package has all of them.
                Err(error) if error.kind() == ErrorKind::NotFound => {}
                result => result.with_context(|| format!("removing {superfluous}"))?,
            }
        }
        let python = Self { root };
        let into = python.root.join(PACKAGES);
        fs::create_dir_all(&into)?;
        let mut copy = Command::new("cp");
        output_of(copy.arg("--recursive").arg(packages.folder.join(".")).arg(&into), COMPILE)?;
        python.compile()?;
        fs::write(&stamp, wanted).context("marking the Python as complete")?;
        Ok(python)
    }

    /// The root of its tree, laid out as in a guest.
    #[must_use]
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Folders of its shared libraries.
    #[must_use]
    pub fn libraries(&self) -> [PathBuf; 2] {
        ["lib/x86_64-linux-gnu", "usr/lib/x86_64-linux-gnu"].map(|folder| self.root.join(folder))
    }

    /// Compiles all modules with the interpreter itself, which works here as well.
    fn compile(&self) -> Result<()> {
        let mut compile = Command::new(self.root.join(Self::INTERPRETER));
        // Files in an image have no times, so a compiled module must be valid without its source's time.
        compile.args(["-S", "-m", "compileall", "-qq", "--invalidation-mode", "unchecked-hash"]);
        compile.args(["usr/lib/python3.11", PACKAGES]).current_dir(&self.root);
        compile.env("PYTHONHOME", self.root.join("usr")).env(
            "LD_LIBRARY_PATH",
            std::env::join_paths(self.libraries()).context("a folder with a colon in its name")?,
        );
        output_of(&mut compile, COMPILE).map(drop).context("compiling Python's modules")
    }
}
