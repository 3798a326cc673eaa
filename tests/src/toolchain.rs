//! NVIDIA's own CUDA compiler, from its wheels on PyPI, pinned. Stays in the cache; never part of the tree or a package.

use std::fs;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};

use crate::paths;
use crate::process::output_of;
use crate::progress;
use crate::wheels;

/// Compiler, optimiser, headers and static runtime of one toolkit release; they must fit together.
const WHEELS: &[&str] = &[
    "nvidia-cuda-nvcc==13.5.37",
    "nvidia-nvvm==13.5.37",
    "nvidia-cuda-crt==13.5.37",
    "nvidia-cuda-runtime==13.5.37",
    "nvidia-cuda-cccl==13.3.5.0.6",
];

/// Runtime and headers of CUDA 12; its wheels hold no compiler driver, so the one above compiles against them.
const WHEELS_12: &[&str] = &["nvidia-cuda-runtime-cu12==12.9.79", "nvidia-cuda-nvcc-cu12==12.9.86"];

/// Runtime and headers of CUDA 11.8, for the compiler above. The wheels hold the shared runtime only.
const WHEELS_11: &[&str] = &["nvidia-cuda-runtime-cu11==11.8.89", "nvidia-cuda-nvcc-cu11==11.8.89"];

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
        let root = wheels::install("cuda", "the CUDA compiler", WHEELS)?.join("nvidia/cu13");
        ensure!(root.join("bin/nvcc").exists(), "the wheels brought no nvcc under {}", root.display());
        Ok(Self { root })
    }

    /// The same compiler with the headers and runtimes of CUDA 12.
    ///
    /// # Errors
    /// When a part is neither in the cache nor can be downloaded.
    pub fn fetch_12() -> Result<Self> {
        Self::fetch_older(12, WHEELS_12)
    }

    /// The same compiler with the headers and the shared runtime of CUDA 11.8.
    ///
    /// # Errors
    /// When a part is neither in the cache nor can be downloaded.
    pub fn fetch_11() -> Result<Self> {
        Self::fetch_older(11, WHEELS_11)
    }

    fn fetch_older(release: u32, wheels: &[&str]) -> Result<Self> {
        let compiler = Self::fetch()?.root;
        let what = format!("headers and runtimes of CUDA {release}");
        let parts = wheels::install(&format!("cuda{release}"), &what, wheels)?.join("nvidia");
        let folder = format!("toolkit{release}");
        let _lock = paths::cache_lock(&folder)?;
        let root = paths::cache()?.join(&folder);
        let stamp = root.join("parts");
        let wanted = identity_with(wheels);
        if fs::read_to_string(&stamp).is_ok_and(|have| have == wanted) {
            return Ok(Self { root });
        }
        progress::step(format!("putting a CUDA {release} toolkit together"));
        if root.exists() {
            fs::remove_dir_all(&root).with_context(|| format!("removing the old {}", root.display()))?;
        }
        let runtime = parts.join("cuda_runtime");
        link_all(&compiler.join("bin"), &root.join("bin"))?;
        // The compiler driver finds its parts and its profile relative to its real path.
        fs::remove_file(root.join("bin/nvcc"))?;
        fs::hard_link(compiler.join("bin/nvcc"), root.join("bin/nvcc")).context("linking nvcc")?;
        symlink(compiler.join("nvvm"), root.join("nvvm")).context("linking the optimiser")?;
        link_all(&runtime.join("include"), &root.join("include"))?;
        link_all(&parts.join("cuda_nvcc/include"), &root.join("include"))?;
        link_all(&runtime.join("lib"), &root.join("lib"))?;
        fs::write(&stamp, wanted).context("marking the toolkit as complete")?;
        Ok(Self { root })
    }

    /// Compiles or links one program with these flags.
    ///
    /// # Errors
    /// When the compiler does not accept it.
    pub fn compile_with(&self, flags: &[&str], source: &Path, to: &Path) -> Result<()> {
        // The wheels lack the link for development, and their folder stays unchanged.
        let links = tempfile::tempdir().context("a folder for a link")?;
        symlink(self.shared_runtime()?, links.path().join("libcudart.so"))
            .context("linking the shared runtime")?;
        let mut nvcc = Command::new(self.root.join("bin/nvcc"));
        nvcc.args(flags).arg("-L").arg(links.path()).arg(source).arg("-o").arg(to);
        output_of(&mut nvcc, COMPILE).map(drop)
    }

    /// The assembler, `ptxas`.
    #[must_use]
    pub fn assembler(&self) -> PathBuf {
        self.root.join("bin/ptxas")
    }

    /// The shared runtime, by the name under which programs ask for it.
    ///
    /// # Errors
    /// When the toolkit has none.
    pub fn shared_runtime(&self) -> Result<PathBuf> {
        fs::read_dir(self.root.join("lib"))?
            .flatten()
            .map(|entry| entry.path())
            .find(|path| path.file_name().is_some_and(|name| name.as_bytes().starts_with(b"libcudart.so.")))
            .context("the toolkit has no shared runtime")
    }

    /// Fills a folder so that clang accepts it as a toolkit of CUDA 12.
    ///
    /// # Errors
    /// When it cannot be filled.
    pub(crate) fn disguise_for_clang(&self, folder: &Path) -> Result<()> {
        let parts = wheels::install("cuda12", "headers and runtimes of CUDA 12", WHEELS_12)?.join("nvidia");
        link_all(&self.root.join("include"), &folder.join("include"))?;
        // Clang always includes it; it belongs to a library that is not installed here.
        fs::write(folder.join("include/curand_mtgp32_kernel.h"), "")?;
        symlink(self.root.join("lib"), folder.join("lib64"))?;
        symlink(parts.join("cuda_nvcc/nvvm"), folder.join("nvvm"))?;
        fs::create_dir(folder.join("bin"))?;
        symlink(parts.join("cuda_nvcc/bin/ptxas"), folder.join("bin/ptxas"))?;
        let packer = folder.join("bin/fatbinary");
        fs::write(
            &packer,
            PACKER.replace("FATBINARY", &self.root.join("bin/fatbinary").display().to_string()),
        )?;
        fs::set_permissions(&packer, fs::Permissions::from_mode(0o755))?;
        Ok(())
    }
}

/// A script in place of the packer: clang names images in a form that newer packers do not accept.
const PACKER: &str = r#"#!/bin/bash
arguments=()
for argument in "$@"; do
    if [[ $argument =~ ^--image=profile=(sm|compute)_([0-9a-z]+),file=(.*)$ ]]; then
        [ "${BASH_REMATCH[1]}" = sm ] && kind=elf || kind=ptx
        argument="--image3=kind=$kind,sm=${BASH_REMATCH[2]},file=${BASH_REMATCH[3]}"
    fi
    arguments+=("$argument")
done
exec FATBINARY "${arguments[@]}"
"#;

/// Flags for compiling programs. The image has machine code and PTX, and a software GPU runs the PTX. Machine code for Ampere and
/// Hopper matters in a bundle: a driver that is older than this compiler refuses its PTX. A change makes compiled programs stale.
pub const COMPILE_FLAGS: &[&str] = &[
    "-O2",
    "-std=c++17",
    "--threads=2",
    "-gencode=arch=compute_80,code=[compute_80,sm_80]",
    "-gencode=arch=compute_90,code=sm_90",
];

/// Flags for linking programs.
pub(crate) const LINK_FLAGS: &[&str] = &["-cudart=static"];

/// Flags for linking the programs of a bundle.
pub(crate) const BUNDLE_FLAGS: &[&str] = &["-cudart=shared", "-Xlinker=-rpath=$ORIGIN"];

/// The wheels and the flags; a change makes compiled programs stale.
pub(crate) fn identity(flags: &[&str]) -> String {
    format!("{WHEELS:?}{flags:?}")
}

/// The wheels of both releases; a change makes compiled programs stale.
pub(crate) fn identity_12() -> String {
    identity_with(WHEELS_12)
}

/// As [`identity_12`], for CUDA 11.8.
pub(crate) fn identity_11() -> String {
    identity_with(WHEELS_11)
}

fn identity_with(older: &[&str]) -> String {
    format!("{WHEELS:?}{older:?}")
}

/// Fills a folder with links to the contents of another.
fn link_all(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to).with_context(|| format!("creating {}", to.display()))?;
    for entry in fs::read_dir(from).with_context(|| format!("reading {}", from.display()))? {
        let entry = entry?;
        symlink(entry.path(), to.join(entry.file_name()))
            .with_context(|| format!("linking {}", entry.path().display()))?;
    }
    Ok(())
}
