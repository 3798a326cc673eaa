//! The table of clients.

use anyhow::{Context as _, Result};

/// A client: packages from PyPI, pinned, and the tests that they bring.
#[derive(Debug)]
pub struct CompatClient {
    /// Its name in commands and in the data of its tests.
    pub name: &'static str,
    /// All packages, with their dependencies.
    pub packages: &'static [&'static str],
    /// Files of tests: where they are, the folder there, and the beginning of their names.
    pub tests: &'static [(TestSource, &'static str, &'static str)],
    /// Variables of its environment.
    pub environment: &'static [(&'static str, &'static str)],
    /// The tests are classes of unittest, and functions beside them are none.
    pub unittest: bool,
    /// An expression on the names of tests (`pytest -k`); all run if it is empty.
    pub keyword: &'static str,
    /// Python code that runs at the start of each process of the client.
    pub prelude: &'static str,
    /// Longest time of a file of tests, in seconds.
    pub seconds: u64,
    /// The usual time for all of it on two cores, both ways together.
    pub minutes: u32,
}

/// The place of tests.
#[derive(Debug, Clone, Copy)]
pub enum TestSource {
    /// In the packages.
    Packages,
    /// In the source archive of a package, by its name and version.
    Archive(&'static str),
    /// In this tree, for packages that bring none.
    Tree,
}

/// In a value of the environment this stands for the folder of the packages.
pub const PACKAGES: &str = "PACKAGES";
/// In a value of the environment this stands for a folder that looks like a toolkit: its `bin/ptxas` is the software GPU's assembler.
pub const TOOLKIT: &str = "TOOLKIT";
/// The place of the compiler for kernels among the packages, for clients that load it by its name.
const NVRTC_LIBRARY: (&str, &str) = ("LD_LIBRARY_PATH", "PACKAGES/nvidia/cuda_nvrtc/lib");
/// A device of capability 12.0.
const MODEL_OF_12_0: (&str, &str) = ("SLUICE_SOFTGPU_MODEL", "RTX5090-32");
/// The scale that gives this model the memory of the default one.
const SCALE_OF_12_0: (&str, &str) = ("SLUICE_SOFTGPU_SCALE", "26");
/// The folder of tests in this tree, and of the plugin that reports outcomes.
pub const FOLDER: &str = "tests/clients/compat";

/// pytest and NumPy with their dependencies, and more packages.
macro_rules! with_pytest {
    ($($package:literal),* $(,)?) => {
        &["pytest==9.2.0", "iniconfig==2.3.1", "packaging==26.4", "pluggy==1.7.0", "pygments==2.21.0",
          "numpy==2.4.6", $($package),*]
    };
}

/// The client with this name.
///
/// # Errors
/// When there is none.
pub fn client(name: &str) -> Result<&'static CompatClient> {
    CLIENTS.iter().find(|client| client.name == name).with_context(|| format!("no client {name}"))
}

/// All clients.
pub const CLIENTS: &[CompatClient] = &[
    CompatClient {
        name: "cuda-bindings",
        packages: with_pytest![
            "cuda-bindings==12.9.10",
            "cuda-pathfinder==1.9.0",
            "nvidia-cuda-nvrtc-cu12==12.9.86",
        ],
        tests: &[(TestSource::Tree, FOLDER, "test_cuda_bindings")],
        environment: &[NVRTC_LIBRARY],
        unittest: false,
        keyword: "",
        prelude: "",
        seconds: 120,
        minutes: 1,
    },
    CompatClient {
        name: "cupy",
        packages: with_pytest![
            "cupy-cuda12x==14.2.0",
            "cuda-pathfinder==1.9.0",
            "nvidia-cuda-nvrtc-cu12==12.9.86",
            "nvidia-cuda-runtime-cu12==12.9.79",
        ],
        tests: &[(TestSource::Tree, FOLDER, "test_cupy")],
        // The software GPU executes PTX only, and no compiled code of the accelerators.
        environment: &[
            ("CUPY_COMPILE_WITH_PTX", "1"),
            ("CUPY_ACCELERATORS", ""),
            // The wheel's compiled sort has PTX for 12.0 only.
            MODEL_OF_12_0,
            SCALE_OF_12_0,
            ("CUDA_PATH", "PACKAGES/nvidia/cuda_runtime"),
            NVRTC_LIBRARY,
        ],
        unittest: false,
        keyword: "",
        prelude: "",
        seconds: 600,
        minutes: 5,
    },
    CompatClient {
        name: "numba-cuda",
        // Without nvJitLink it links PTX by the driver; with it, machine code, which the software GPU does not execute.
        packages: with_pytest![
            "numba-cuda==0.30.4",
            "numba==0.68.1",
            "llvmlite==0.50.0",
            "cuda-bindings==12.9.10",
            "cuda-core==1.2.2",
            "cuda-pathfinder==1.9.1",
            "cuda-toolkit==12.9.2.0",
            "nvidia-cuda-cccl-cu12==12.9.27",
            "nvidia-cuda-nvcc-cu12==12.9.86",
            "nvidia-cuda-nvrtc-cu12==12.9.86",
            "nvidia-cuda-runtime-cu12==12.9.79",
            "filecheck==1.0.6",
            "cffi==2.1.1",
            "pycparser==3.12",
        ],
        tests: &[
            (TestSource::Packages, "numba_cuda/numba/cuda/tests/cudadrv", "test_"),
            (TestSource::Packages, "numba_cuda/numba/cuda/tests/cudapy", "test_"),
            (TestSource::Packages, "numba_cuda/numba/cuda/tests/doc_examples", "test_"),
            (TestSource::Packages, "numba_cuda/numba/cuda/tests/nrt", "test_"),
        ],
        environment: &[("COMPAT_MODULES", "PACKAGES/numba_cuda")],
        unittest: true,
        keyword: "",
        prelude: "",
        seconds: 900,
        minutes: 120,
    },
    CompatClient {
        name: "warp",
        packages: with_pytest!["warp-lang==1.19.0"],
        tests: &[
            (TestSource::Packages, "warp/tests", "test_"),
            (TestSource::Packages, "warp/tests/cuda", "test_"),
            (TestSource::Packages, "warp/tests/matrix", "test_"),
            (TestSource::Packages, "warp/tests/geometry", "test_"),
            (TestSource::Packages, "warp/tests/tile", "test_"),
        ],
        environment: &[],
        unittest: true,
        // Tests of its CPU device make no call of CUDA.
        keyword: "not cpu",
        // The software GPU executes PTX only.
        prelude: "import warp; warp.config.cuda_output = 'ptx'; warp.config.quiet = True",
        seconds: 300,
        minutes: 120,
    },
    CompatClient {
        name: "tinygrad",
        packages: with_pytest![
            "tinygrad==0.14.0",
            "nvidia-cuda-nvrtc-cu12==12.9.86",
            "nvidia-cuda-runtime-cu12==12.9.79",
        ],
        tests: &[
            (TestSource::Archive("tinygrad==0.14.0"), "test", "test_"),
            (TestSource::Tree, FOLDER, "test_tinygrad"),
        ],
        environment: &[
            ("DEV", "CUDA"),
            // For the headers of numbers of 16 bits.
            ("CUDA_PATH", "PACKAGES/nvidia/cuda_runtime"),
            NVRTC_LIBRARY,
        ],
        unittest: false,
        keyword: "",
        prelude: "",
        seconds: 600,
        minutes: 5,
    },
    CompatClient {
        name: "taichi",
        packages: with_pytest![
            "taichi==1.7.4",
            "colorama==0.4.6",
            "dill==0.4.1",
            "rich==15.0.0",
            "markdown-it-py==4.3.0",
            "mdurl==0.1.2",
        ],
        tests: &[(TestSource::Tree, FOLDER, "test_taichi")],
        environment: &[],
        unittest: false,
        keyword: "",
        prelude: "",
        seconds: 300,
        minutes: 3,
    },
    CompatClient {
        name: "openmm",
        packages: with_pytest![
            "openmm==8.6.1",
            "openmm-cuda-13==8.6.1",
            "nvidia-cuda-nvrtc==13.5.37",
            "nvidia-cufft==12.5.0.14",
        ],
        tests: &[(TestSource::Tree, FOLDER, "test_openmm")],
        environment: &[],
        unittest: false,
        keyword: "",
        prelude: "",
        seconds: 900,
        minutes: 30,
    },
    CompatClient {
        name: "catboost",
        packages: with_pytest![
            "catboost==1.2.10",
            "scipy==1.17.1",
            "pandas==3.1.1",
            "python-dateutil==4.0.0",
            "six==1.17.0",
        ],
        tests: &[(TestSource::Tree, FOLDER, "test_catboost")],
        environment: &[],
        unittest: false,
        keyword: "",
        prelude: "",
        seconds: 600,
        minutes: 5,
    },
    CompatClient {
        name: "xgboost",
        packages: with_pytest!["xgboost==3.2.0", "scipy==1.17.1"],
        tests: &[(TestSource::Tree, FOLDER, "test_xgboost")],
        // Its wheel has PTX for 12.0 only.
        environment: &[MODEL_OF_12_0, SCALE_OF_12_0],
        unittest: false,
        keyword: "",
        prelude: "",
        seconds: 600,
        minutes: 1,
    },
    CompatClient {
        name: "jax",
        packages: with_pytest![
            "jax==0.10.2",
            "jaxlib==0.10.2",
            "jax-cuda13-plugin==0.10.2",
            "jax-cuda13-pjrt==0.10.2",
            "ml-dtypes==0.6.0",
            "opt-einsum==3.4.0",
            "scipy==1.17.1",
            "nvidia-cuda-runtime==13.4.92",
            "nvidia-cudnn-jit-cu13==9.27.0.42",
        ],
        tests: &[(TestSource::Tree, FOLDER, "test_jax")],
        environment: &[
            ("JAX_PLATFORMS", "cuda,cpu"),
            // It asks libraries for their versions that no test here uses, and that are three gigabytes.
            ("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1"),
            ("CUDA_ROOT", "TOOLKIT"),
            ("LD_LIBRARY_PATH", "PACKAGES/nvidia/cu13/lib:PACKAGES/nvidia/cudnn_jit/lib"),
            // The wheel's compiled sort has PTX for 12.0 only.
            MODEL_OF_12_0,
            SCALE_OF_12_0,
        ],
        unittest: false,
        keyword: "",
        // It looks for a node of NVIDIA's kernel module, which a guest does not have.
        prelude: "import jax._src.hardware_utils as nodes; nodes.has_visible_nvidia_gpu = lambda: True",
        seconds: 900,
        minutes: 2,
    },
];
