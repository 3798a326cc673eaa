//! NVIDIA's own CUDA compiler, from its wheels on PyPI, pinned. Stays in the cache; never enters the tree or a package.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};

use crate::paths;
use crate::process::output_of;
use crate::progress;

/// Compiler, optimiser, headers and static runtime of one toolkit release; they must fit together.
const WHEELS: &[&str] = &[
    "nvidia-cuda-nvcc==13.5.37",
    "nvidia-nvvm==13.5.37",
    "nvidia-cuda-crt==13.5.37",
    "nvidia-cuda-runtime==13.5.37",
    "nvidia-cuda-cccl==13.3.5.0.6",
];

const DOWNLOAD: Duration = Duration::from_secs(900);
const COMPILE: Duration = Duration::from_secs(300);

/// An unpacked toolkit.
#[derive(Debug, Clone)]
pub struct Toolkit {
    root: PathBuf,
}

impl Toolkit {
    /// The pinned toolkit; downloaded the first time, from the cache after that.
    ///
    /// # Errors
    /// When it is neither in the cache nor can be downloaded.
    pub fn fetch() -> Result<Self> {
        let _lock = paths::cache_lock("toolkit")?;
        let folder = paths::cache()?.join("cuda");
        let stamp = folder.join("wheels");
        let wanted = WHEELS.join("\n");
        if fs::read_to_string(&stamp).is_ok_and(|have| have == wanted) {
            return Ok(Self { root: folder.join("nvidia/cu13") });
        }
        progress::step("downloading the CUDA compiler (wheels from PyPI)");
        if folder.exists() {
            fs::remove_dir_all(&folder).with_context(|| format!("removing the old {}", folder.display()))?;
        }
        let python = python_with_pip()?;
        let mut pip = Command::new(python);
        pip.args([
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            "--no-deps",
            "--no-compile",
        ]);
        pip.arg("--target").arg(&folder).args(WHEELS);
        output_of(&mut pip, DOWNLOAD)?;
        let root = folder.join("nvidia/cu13");
        ensure!(root.join("bin/nvcc").exists(), "the wheels brought no nvcc under {}", root.display());
        fs::write(&stamp, wanted).context("marking the toolkit as complete")?;
        Ok(Self { root })
    }

    /// Compiles one program: static runtime; machine code and PTX in the image, and PTX is what a software GPU can run.
    ///
    /// # Errors
    /// When the compiler does not accept it.
    pub fn compile(&self, source: &Path, to: &Path) -> Result<()> {
        let mut nvcc = Command::new(self.root.join("bin/nvcc"));
        nvcc.args(COMPILE_FLAGS).arg(source).arg("-o").arg(to);
        output_of(&mut nvcc, COMPILE).map(drop)
    }
}

/// How programs are compiled; part of what decides whether a compiled program is still good.
pub const COMPILE_FLAGS: &[&str] =
    &["-O2", "-std=c++17", "-cudart=static", "-gencode=arch=compute_80,code=[compute_80,sm_80]"];

/// The wheels, for the same purpose.
pub(crate) fn identity() -> String {
    format!("{WHEELS:?}{COMPILE_FLAGS:?}")
}

/// A Python of our own in the cache, so that nothing is installed into anybody's.
fn python_with_pip() -> Result<PathBuf> {
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
