//! Clients of other releases, compilers and languages: one program built in many ways, runtimes from 11.8 to 13.5, and packages
//! for Python programs.

use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};

use crate::process::output_of;
use crate::python::Python;
use crate::toolchain::{self, Toolkit};
use crate::wheels::{self, Packages};
use crate::{debian, paths, programs};

/// A major release of CUDA: a program built for it runs with every shared runtime of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Release {
    /// Built with the headers of 11.8.
    Cuda11,
    /// Built with the headers of 12.9.
    Cuda12,
    /// Built with 13.5.
    Cuda13,
}

/// A runtime library that programs link.
#[derive(Debug, Clone, Copy)]
pub struct Runtime {
    /// The release whose programs it runs.
    pub release: Release,
    /// The wheel's version.
    pub version: &'static str,
}

/// The first and the last runtime of each major release, and those between them with changes.
pub const RUNTIMES: &[Runtime] = &[
    Runtime { release: Release::Cuda12, version: "12.0.146" },
    Runtime { release: Release::Cuda12, version: "12.1.105" },
    Runtime { release: Release::Cuda12, version: "12.4.127" },
    Runtime { release: Release::Cuda12, version: "12.6.77" },
    Runtime { release: Release::Cuda12, version: "12.8.90" },
    Runtime { release: Release::Cuda12, version: "12.9.79" },
    Runtime { release: Release::Cuda13, version: "13.0.96" },
    Runtime { release: Release::Cuda13, version: "13.2.86" },
    Runtime { release: Release::Cuda13, version: "13.4.92" },
    Runtime { release: Release::Cuda13, version: "13.5.37" },
];

/// The oldest runtime. Its programs are built for the long tests only.
pub const OLDEST_RUNTIME: Runtime = Runtime { release: Release::Cuda11, version: "11.8.89" };

impl Runtime {
    /// The folder of its shared library.
    ///
    /// # Errors
    /// When it is neither in the cache nor can be downloaded.
    pub fn libraries(&self) -> Result<PathBuf> {
        let (wheel, folder) = match self.release {
            Release::Cuda11 => ("nvidia-cuda-runtime-cu11", "nvidia/cuda_runtime/lib"),
            Release::Cuda12 => ("nvidia-cuda-runtime-cu12", "nvidia/cuda_runtime/lib"),
            Release::Cuda13 => ("nvidia-cuda-runtime", "nvidia/cu13/lib"),
        };
        let version = self.version;
        let installed = wheels::install(
            &format!("runtime-{version}"),
            &format!("the CUDA runtime {version}"),
            &[&format!("{wheel}=={version}")],
        )?;
        Ok(installed.join(folder))
    }

    /// The version in the runtime's own form: 12040 for 12.4.
    ///
    /// # Errors
    /// When the wheel's version is not made of numbers.
    pub fn number(&self) -> Result<u32> {
        let mut numbers = self.version.split('.').map(str::parse::<u32>);
        let mut next = || numbers.next().context("a version has three numbers");
        Ok(next()?? * 1000 + next()?? * 10)
    }
}

/// A program of `tests/clients`, built in one way.
#[derive(Debug, Clone, Copy)]
pub struct Build {
    /// Its source file.
    pub source: &'static str,
    /// Name of the build.
    pub name: &'static str,
    /// The headers and runtime it is built with.
    pub release: Release,
    /// Flags of the compiler besides the usual ones.
    pub flags: &'static [&'static str],
}

impl Build {
    const fn of_first(name: &'static str, release: Release, flags: &'static [&'static str]) -> Self {
        Self { source: FIRST, name, release, flags }
    }

    /// A program with the runtime in it. The packages of 11.8 have none to link.
    #[must_use]
    pub const fn with_static_runtime(release: Release) -> Self {
        match release {
            Release::Cuda11 => Self::with_shared_runtime(release),
            Release::Cuda12 => Self::of_first("static-12", release, &[STATIC, PTX_AND_CODE]),
            Release::Cuda13 => Self::of_first("static-13", release, &[STATIC, PTX_AND_CODE]),
        }
    }

    /// A program that loads the runtime of its release that is first on the library path.
    #[must_use]
    pub const fn with_shared_runtime(release: Release) -> Self {
        match release {
            // Its headers know neither newer host compilers nor where this compiler keeps the device's runtime.
            Release::Cuda11 => Self::of_first(
                "shared-11",
                release,
                &[SHARED, PTX_AND_CODE, "-allow-unsupported-compiler", "-cudadevrt=none"],
            ),
            Release::Cuda12 => Self::of_first("shared-12", release, &[SHARED, PTX_AND_CODE]),
            Release::Cuda13 => Self::of_first("shared-13", release, &[SHARED, PTX_AND_CODE]),
        }
    }

    /// The executable, from the cache if it is there.
    ///
    /// # Errors
    /// When the compiler cannot be fetched or does not accept the program.
    pub fn path(&self) -> Result<PathBuf> {
        let folder = paths::workspace().join("tests");
        let (source, common) = (folder.join("clients").join(self.source), folder.join("programs/check.h"));
        let _lock = paths::cache_lock("clients")?;
        let built = paths::cache()?.join("clients");
        fs::create_dir_all(&built).with_context(|| format!("creating {}", built.display()))?;
        let parts = match self.release {
            Release::Cuda11 => toolchain::identity_11(),
            Release::Cuda12 | Release::Cuda13 => toolchain::identity_12(),
        };
        let way = format!("{self:?}{parts}");
        programs::cached(&built, self.name, &[&source, &common], &way, |unfinished| {
            let toolkit = match self.release {
                Release::Cuda11 => Toolkit::fetch_11()?,
                Release::Cuda12 => Toolkit::fetch_12()?,
                Release::Cuda13 => Toolkit::fetch()?,
            };
            toolkit.compile_with(&[&["-O2", "-std=c++17"], self.flags].concat(), &source, unfinished)
        })
    }
}

/// The source of the program that is built in many ways.
const FIRST: &str = "first.cu";
const STATIC: &str = "-cudart=static";
const SHARED: &str = "-cudart=shared";
const PTX_AND_CODE: &str = "-gencode=arch=compute_80,code=[compute_80,sm_80]";

/// Images packed and built in every way that a device without machine code of its own can run.
pub const IMAGES: &[Build] = &[
    image("compress-none", &[STATIC, PTX_AND_CODE, "--compress-mode=none"]),
    image("compress-size", &[STATIC, PTX_AND_CODE, "--compress-mode=size"]),
    image("compress-speed", &[STATIC, PTX_AND_CODE, "--compress-mode=speed"]),
    image("compress-balance", &[STATIC, PTX_AND_CODE, "--compress-mode=balance"]),
    image("compress-default", &[STATIC, PTX_AND_CODE, "--compress-mode=default"]),
    image("ptx-only", &[STATIC, "-gencode=arch=compute_80,code=compute_80"]),
    image("ptx-older", &[STATIC, "-gencode=arch=compute_75,code=compute_75"]),
    image("two-architectures", &[STATIC, PTX_AND_CODE, "-gencode=arch=compute_90,code=[compute_90,sm_90]"]),
    image("per-thread-stream", &[STATIC, PTX_AND_CODE, "-default-stream=per-thread"]),
    image("debug", &[STATIC, PTX_AND_CODE, "-G"]),
];

/// An image without PTX, and one with PTX of a newer architecture only: a software GPU that executes PTX up to 8.0 can run
/// neither.
pub const UNUSABLE: &[Build] = &[
    image("code-only", &[STATIC, "-gencode=arch=compute_80,code=sm_80"]),
    image("newer-only", &[STATIC, "-gencode=arch=compute_90,code=[compute_90,sm_90]"]),
];

/// Relocatable device code, linked when it is loaded: its wrapper has another version.
pub const RELOCATABLE: Build = image("relocatable", &[STATIC, PTX_AND_CODE, "-rdc=true"]);

/// A program whose kernel prints.
pub const PRINTING: Build = Build { source: "printing.cu", ..image("printing", &[STATIC, PTX_AND_CODE]) };

const fn image(name: &'static str, flags: &'static [&'static str]) -> Build {
    Build::of_first(name, Release::Cuda13, flags)
}

/// Downloads and builds all runtimes and programs that the tests of every change need.
///
/// # Errors
/// When a part can neither be downloaded nor built.
pub fn prepare() -> Result<()> {
    for runtime in RUNTIMES {
        runtime.libraries()?;
    }
    for release in [Release::Cuda12, Release::Cuda13] {
        Build::with_static_runtime(release).path()?;
        Build::with_shared_runtime(release).path()?;
    }
    IMAGES
        .iter()
        .chain(UNUSABLE)
        .chain([&RELOCATABLE, &PRINTING])
        .try_for_each(|build| build.path().map(drop))?;
    skewed_runtime()?;
    guest_monitors().map(drop)
}

/// Downloads and installs the further prerequisites of the long tests.
///
/// # Errors
/// When a part can neither be downloaded nor installed.
pub fn prepare_all() -> Result<()> {
    prepare()?;
    built_by_clang(true)?;
    built_by_clang(false)?;
    python_packages().map(drop)
}

/// A library to preload that shows a runtime one property differently from the driver's report (`tests/clients/skew.c`).
///
/// # Errors
/// When it cannot be compiled.
pub fn skewed_runtime() -> Result<PathBuf> {
    let source = paths::workspace().join("tests/clients/skew.c");
    let _lock = paths::cache_lock("clients")?;
    let built = paths::cache()?.join("clients");
    fs::create_dir_all(&built).with_context(|| format!("creating {}", built.display()))?;
    programs::cached(&built, "skew.so", &[&source], "", |unfinished| {
        let mut compiler = Command::new("gcc");
        compiler.args(["-O1", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror"]);
        compiler.arg(&source).arg("-o").arg(unfinished);
        output_of(&mut compiler, Duration::from_secs(60)).map(drop)
    })
}

/// A program that calls cuFFT (`tests/clients/transform.cu`), and the folder of cuFFT's library.
///
/// # Errors
/// When cuFFT is neither in the cache nor can be downloaded, or the compiler does not accept the program.
pub fn transforms() -> Result<(PathBuf, PathBuf)> {
    const WHEEL: &str = "nvidia-cufft==12.5.0.14";
    let cufft = wheels::install("cufft", "cuFFT", &[WHEEL])?.join("nvidia/cu13");
    let toolkit = Toolkit::fetch()?;
    let folder = paths::workspace().join("tests");
    let (source, common) = (folder.join("clients/transform.cu"), folder.join("programs/check.h"));
    let _lock = paths::cache_lock("clients")?;
    let built = paths::cache()?.join("clients");
    fs::create_dir_all(&built).with_context(|| format!("creating {}", built.display()))?;
    let way = format!("{}{WHEEL}", toolchain::identity_12());
    let program = programs::cached(&built, "transforms", &[&source, &common], &way, |unfinished| {
        let headers = format!("-I{}", cufft.join("include").display());
        let library = format!("-Xlinker={}", cufft.join("lib/libcufft.so.12").display());
        let flags = ["-O2", "-std=c++17", STATIC, PTX_AND_CODE, &headers, &library];
        toolkit.compile_with(&flags, &source, unfinished)
    })?;
    Ok((program, cufft.join("lib")))
}

/// The same program built by clang for the runtime of CUDA 12.9, in a folder laid out like a toolkit.
///
/// # Errors
/// When clang cannot be installed or does not accept the program.
pub fn built_by_clang(with_static_runtime: bool) -> Result<PathBuf> {
    debian::ensure(&["clang-19"])?;
    let toolkit = Toolkit::fetch_12()?;
    let folder = paths::workspace().join("tests");
    let (source, common) = (folder.join("clients").join(FIRST), folder.join("programs/check.h"));
    let _lock = paths::cache_lock("clients")?;
    let built = paths::cache()?.join("clients");
    fs::create_dir_all(&built).with_context(|| format!("creating {}", built.display()))?;
    let (name, libraries) = if with_static_runtime {
        ("clang-static", ["-lcudart_static", "-ldl", "-lrt", "-lpthread"].as_slice())
    } else {
        ("clang-shared", ["-l:libcudart.so.12"].as_slice())
    };
    programs::cached(&built, name, &[&source, &common], &toolchain::identity_12(), |unfinished| {
        let disguise = tempfile::tempdir().context("a folder for a toolkit")?;
        toolkit.disguise_for_clang(disguise.path())?;
        let mut clang = Command::new("clang++-19");
        clang.args(["-O2", "-x", "cuda", "--cuda-gpu-arch=sm_80", "--cuda-include-ptx=sm_80"]);
        clang.arg(format!("--cuda-path={}", disguise.path().display()));
        clang.arg(&source).arg("-L").arg(disguise.path().join("lib64")).args(libraries);
        clang.arg("-o").arg(unfinished);
        output_of(&mut clang, Duration::from_secs(300)).map(drop)
    })
}

/// cuda-python's bindings and CuPy.
///
/// # Errors
/// When they are neither in the cache nor can be downloaded.
pub fn python_packages() -> Result<Packages> {
    const WHEELS: &[&str] = &[
        "cuda-bindings==12.9.10",
        "cuda-pathfinder==1.9.0",
        "cupy-cuda12x==14.2.0",
        "numpy==2.4.6",
        "nvidia-cuda-nvrtc-cu12==12.9.86",
        "nvidia-cuda-runtime-cu12==12.9.79",
    ];
    let folder = wheels::install("python-clients", "cuda-python and CuPy", WHEELS)?;
    ensure!(folder.join("cupy").is_dir(), "the wheels brought no CuPy under {}", folder.display());
    Ok(Packages { folder, python: wheels::python()? })
}

/// The folder of cuBLAS's library for [`python_packages`].
///
/// # Errors
/// When it is neither in the cache nor can be downloaded.
pub fn cublas() -> Result<PathBuf> {
    let folder = wheels::install("cublas", "cuBLAS", &["nvidia-cublas-cu12==12.9.1.4"])?;
    Ok(folder.join("nvidia/cublas/lib"))
}

/// Monitors with their dependencies.
///
/// # Errors
/// When they are neither in the cache nor can be downloaded.
pub fn monitors() -> Result<Packages> {
    const WHEELS: &[&str] = &[
        "blessed==1.52.0",
        "gpustat==1.1.1",
        "jinxed==2.1.0",
        "nvidia-ml-py==13.615.71",
        "nvitop==1.7.2",
        "psutil==7.2.2",
        "wcwidth==0.9.4",
    ];
    let folder = wheels::install("monitors", "nvidia-ml-py, gpustat and nvitop", WHEELS)?;
    Ok(Packages { folder, python: wheels::python()? })
}

/// The same monitors with a Python, for a guest.
///
/// # Errors
/// As [`monitors`], and when there is no Python for guests.
pub fn guest_monitors() -> Result<Python> {
    Python::with("monitors", &monitors()?)
}
