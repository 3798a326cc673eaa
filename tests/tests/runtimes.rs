//! Unmodified clients: the vendor's runtimes from 11.8 to 13.5, static and shared, images packed in every way, and programs
//! in Python, each natively on the software GPU and through device and worker.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use sluice_tests::clients::{
    self, Build, IMAGES, OLDEST_RUNTIME, PRINTING, RELOCATABLE, RUNTIMES, Release, UNUSABLE,
};
use sluice_tests::direct::TIMEOUT;
use sluice_tests::host::own_device;
use sluice_tests::paths::{self, Binaries};
use sluice_tests::process::{Finished, run};
use sluice_tests::programs::{passed, program};

/// A program with its environment.
#[derive(Debug, Clone)]
struct Client {
    /// Options of `sluice run`, for the remoted run.
    options: &'static [&'static str],
    words: Vec<OsString>,
    environment: Vec<(&'static str, OsString)>,
}

impl Client {
    fn new(program: impl Into<OsString>) -> Self {
        Self { options: &[], words: vec![program.into()], environment: Vec::new() }
    }

    /// Uses devices as small as the program allows: all memory of each is taken and cleared before a session starts.
    const fn on_small_devices(mut self) -> Self {
        self.options = &["--memory", "64MiB"];
        self
    }

    fn argument(mut self, word: impl Into<OsString>) -> Self {
        self.words.push(word.into());
        self
    }

    fn set(mut self, name: &'static str, value: impl Into<OsString>) -> Self {
        self.environment.push((name, value.into()));
        self
    }

    /// Runs it on a backend of its own (`sluice run`), or straight on the driver (`sluice run --native`).
    fn run(&self, native: bool) -> Result<Finished> {
        let mut command = Command::new(Binaries::locate()?.get("sluice")?);
        command.arg("run").args(if native { &["--native"] } else { self.options });
        command.arg("--").args(&self.words);
        // A run on a backend makes a device of its own and removes it.
        let device = native.then(own_device).transpose()?;
        command.envs(device.iter().map(|device| ("SLUICE_SOFTGPU_STATE", device.path())));
        // The test's own environment must not influence the runtime.
        command
            .env_remove("LD_LIBRARY_PATH")
            .envs(self.environment.iter().map(|(name, value)| (name, value)));
        run(&mut command, TIMEOUT)
    }

    /// Runs it both ways; it must pass and print the same. Returns the output.
    fn passes_both_ways(&self) -> Result<String> {
        let native = self.run(true)?;
        passed(&native).context("natively")?;
        let remoted = self.run(false)?;
        passed(&remoted).context("remoted")?;
        ensure!(native.stdout == remoted.stdout, "natively\n{}\nremoted\n{}", native.stdout, remoted.stdout);
        println!("{:?}: native {:?}, remoted {:?}", self.words, native.elapsed, remoted.elapsed);
        Ok(remoted.stdout)
    }

    /// Runs it both ways; both times it must end by itself, and print `error` and no other error.
    fn fails_both_ways(&self, error: &str) -> Result<()> {
        for native in [true, false] {
            let Finished { status, stdout, stderr, .. } = self.run(native)?;
            ensure!(
                status.code() == Some(1) && stdout.contains(error) && stdout.ends_with("FAIL\n"),
                "native: {native}, {status}, {error} expected\n{stdout}\n{stderr}"
            );
        }
        Ok(())
    }
}

/// Every runtime, with a build of its release: static if it exists, and each shared one.
fn runtimes() -> Result<Vec<(String, Client)>> {
    let mut all = Vec::new();
    for (release, number) in [(Release::Cuda12, 12090), (Release::Cuda13, 13050)] {
        let client = Client::new(Build::with_static_runtime(release).path()?);
        all.push((format!("runtime {number}, "), client));
    }
    for runtime in RUNTIMES {
        let client = Client::new(Build::with_shared_runtime(runtime.release).path()?)
            .set("LD_LIBRARY_PATH", runtime.libraries()?);
        all.push((format!("runtime {}, ", runtime.number()?), client));
    }
    Ok(all)
}

// Promise: C10
#[test]
fn every_runtime_starts_and_computes() -> Result<()> {
    for (first, client) in runtimes()? {
        let printed = client.passes_both_ways().with_context(|| first.clone())?;
        ensure!(printed.starts_with(&first), "{first} expected\n{printed}");
        ensure!(printed.contains(" 1 device(s)"), "one device expected\n{printed}");
    }
    Ok(())
}

/// The answer at start covers every device, in order.
// Promise: C10
#[test]
fn every_runtime_starts_on_several_devices() -> Result<()> {
    for (first, client) in runtimes()? {
        for devices in [2, 4] {
            let client = client.clone().on_small_devices().set("SLUICE_SOFTGPU_DEVICES", devices.to_string());
            let printed = client.passes_both_ways().with_context(|| first.clone())?;
            ensure!(
                printed.contains(&format!(" {devices} device(s)"))
                    && printed.matches("alone in its identity").count() == devices,
                "{devices} devices expected\n{printed}"
            );
        }
    }
    Ok(())
}

/// Memory, variables and kernels of a device other than the driver's first.
// Promise: C1
#[test]
fn program_computes_on_a_device_that_is_not_the_first() -> Result<()> {
    let client = Client::new(Build::with_static_runtime(Release::Cuda13).path()?)
        .on_small_devices()
        .set("SLUICE_SOFTGPU_DEVICES", "3");
    for visible in ["1", "2,0"] {
        client.clone().set("CUDA_VISIBLE_DEVICES", visible).passes_both_ways().context(visible)?;
    }
    Ok(())
}

// Promise: C100
#[test]
fn variables_of_the_driver_have_the_same_effect_natively_and_remoted() -> Result<()> {
    let lines = |mode: u32, ptx: u32, code: u32, blocking: bool| {
        let (complete, fault) = if blocking {
            let lines = "complete after the launch: 0\ncomplete after the fill: 0\nafter two launches of a graph: 2 7\n\
                         held: 600 600 600\nfree: 0\n";
            (lines, 700)
        } else {
            ("", 0)
        };
        format!(
            "loading mode: {mode}\nPTX: {ptx}\nmachine code: {code}\n{complete}launch of a fault: {fault}\n\
             synchronisation: 700\nPASS\n"
        )
    };
    let program = program("environment")?;
    for (name, value, expected) in [
        ("CUDA_MODULE_LOADING", "DEFAULT", lines(2, 0, 0, false)),
        ("CUDA_MODULE_LOADING", "EAGER", lines(1, 0, 0, false)),
        ("CUDA_LAUNCH_BLOCKING", "1", lines(2, 0, 0, true)),
        ("CUDA_DISABLE_PTX_JIT", "1", lines(2, 223, 0, false)),
        ("CUDA_FORCE_PTX_JIT", "1", lines(2, 0, 209, false)),
        ("CUDA_CACHE_DISABLE", "1", lines(2, 0, 0, false)),
    ] {
        let printed = Client::new(&program).set(name, value).passes_both_ways().context(name)?;
        ensure!(printed == expected, "{name}={value}\n{printed}");
    }
    Ok(())
}

// Promise: C100
#[test]
fn devices_are_chosen_by_numbers_and_names_natively_and_remoted() -> Result<()> {
    // The same devices in all runs, because their names are made with them.
    let state = tempfile::tempdir_in("/dev/shm").context("a folder for devices")?;
    let client = Client::new(program("device_query")?)
        .argument("names")
        .on_small_devices()
        .set("SLUICE_SOFTGPU_STATE", state.path())
        .set("SLUICE_SOFTGPU_SCALE", "256")
        .set("SLUICE_SOFTGPU_DEVICES", "3");
    let seen = |variable: &'static str, value: &str| -> Result<Vec<String>> {
        let printed = client.clone().set(variable, value).passes_both_ways().context(value.to_owned())?;
        Ok(printed.lines().filter(|line| *line != "PASS").map(str::to_owned).collect())
    };
    let all = seen("CUDA_DEVICE_ORDER", "PCI_BUS_ID")?;
    let [first, second, third] = all.as_slice() else { anyhow::bail!("three devices expected: {all:?}") };
    for (list, expected) in [
        ("2,0".to_owned(), vec![third, first]),
        (format!("GPU-{second},GPU-{first}"), vec![second, first]),
        (format!("GPU-{}", &third[..13]), vec![third]),
        (format!("1,GPU-{first},7,2"), vec![second, first]),
        (format!("GPU-{second},none,0"), vec![second]),
    ] {
        let chosen = seen("CUDA_VISIBLE_DEVICES", &list)?;
        ensure!(chosen.iter().eq(expected.iter().copied()), "{list}: {chosen:?} of {all:?}");
    }
    Ok(())
}

/// On a device whose atomic operations on host memory are not atomic for the host, calls that move managed memory are refused.
// Promise: C124
#[test]
fn managed_memory_without_concurrent_access_is_neither_prefetched_nor_given_to_a_device() -> Result<()> {
    let program = program("managed")?;
    Client::new(&program).passes_both_ways()?;
    Client::new(&program).set("SLUICE_SOFTGPU_LACKS", "host-atomics").passes_both_ways().map(drop)
}

/// A guest refuses managed variables of a device with native atomic operations on host memory, and the program asks for none there.
// Promise: C128
#[test]
fn managed_variables_follow_the_turns_of_program_and_work() -> Result<()> {
    let program = program("managed_variables")?;
    Client::new(&program).passes_both_ways()?;
    let printed = Client::new(&program).set("SLUICE_SOFTGPU_LACKS", "host-atomics").passes_both_ways()?;
    ensure!(printed.contains("launches of a graph"), "no variable was used:\n{printed}");
    Ok(())
}

/// A runtime that sees any property differently from the answer at its start must refuse to work; otherwise the tests
/// above would prove nothing.
// Promise: C10
#[test]
fn runtime_refuses_a_handshake_answer_that_differs_in_one_field() -> Result<()> {
    let preloaded = clients::skewed_runtime()?;
    for release in [Release::Cuda12, Release::Cuda13] {
        let program = Build::with_static_runtime(release).path()?;
        let skewed = |what: &str| {
            Client::new("env")
                .argument(format!("LD_PRELOAD={}", preloaded.display()))
                .argument(format!("SKEW={what}"))
                .argument(&program)
                .set("SLUICE_SOFTGPU_DEVICES", "2")
                .on_small_devices()
        };
        skewed("nothing").passes_both_ways()?;
        for what in [
            "driver",
            "process",
            "thread",
            "interface",
            "table",
            "entry",
            "uuid",
            "domain",
            "bus",
            "device",
            "order",
        ] {
            skewed(what)
                .fails_both_ways("cudaGetDeviceCount(&devices): 103 ")
                .with_context(|| format!("{release:?}, another {what}"))?;
        }
    }
    Ok(())
}

// Promise: C11
#[test]
fn images_of_every_packing_load() -> Result<()> {
    for build in IMAGES.iter().chain([&RELOCATABLE]) {
        Client::new(build.path()?).passes_both_ways().context(build.name)?;
    }
    Ok(())
}

// Promise: C11
#[test]
fn images_that_cannot_run_are_refused_with_the_drivers_error() -> Result<()> {
    for build in UNUSABLE {
        let client = Client::new(build.path()?);
        client.fails_both_ways(": 209 cudaErrorNoKernelImageForDevice").context(build.name)?;
    }
    Ok(())
}

/// A kernel's output does not reach the guest yet; but the driver prints it in the worker, whose filter must allow that.
#[test]
fn kernel_that_prints_does_not_end_its_session() -> Result<()> {
    let client = Client::new(PRINTING.path()?);
    let native = client.run(true)?;
    passed(&native)?;
    ensure!(native.stdout.contains("thread 7 of block 3\n"), "{}", native.stdout);
    passed(&client.run(false)?)
}

// Promise: C10
#[test]
#[ignore = "for the full tier: installs clang"]
fn programs_built_by_clang_compute() -> Result<()> {
    Client::new(clients::built_by_clang(true)?).passes_both_ways()?;
    let shared = clients::built_by_clang(false)?;
    for runtime in RUNTIMES.iter().filter(|runtime| runtime.release == Release::Cuda12) {
        Client::new(&shared)
            .set("LD_LIBRARY_PATH", runtime.libraries()?)
            .passes_both_ways()
            .context(runtime.version)?;
    }
    Ok(())
}

/// A program of the oldest runtime, which loads its image by another way than newer ones.
// Promise: C10, C125
#[test]
#[ignore = "for the full tier: downloads a toolkit of CUDA 11.8"]
fn program_of_the_oldest_runtime_computes() -> Result<()> {
    let (libraries, built) =
        match (OLDEST_RUNTIME.libraries(), Build::with_shared_runtime(Release::Cuda11).path()) {
            (Ok(libraries), Ok(built)) => (libraries, built),
            (Err(error), _) | (_, Err(error)) => {
                sluice_skip::skip(&format!("no program of CUDA 11.8 here: {error:#}"));
                return Ok(());
            }
        };
    for devices in ["1", "2"] {
        let client = Client::new(&built)
            .set("LD_LIBRARY_PATH", &libraries)
            .set("SLUICE_SOFTGPU_DEVICES", devices)
            .on_small_devices();
        let printed = client.passes_both_ways()?;
        ensure!(
            printed.starts_with("runtime 11080, ") && printed.contains(&format!(" {devices} device(s)")),
            "{printed}"
        );
    }
    Ok(())
}

// Promise: C127
#[test]
#[ignore = "for the full tier: downloads 220 MB of cuFFT"]
fn transforms_of_cufft_are_the_same_natively_and_remoted() -> Result<()> {
    match clients::transforms() {
        Ok((built, libraries)) => {
            Client::new(built).set("LD_LIBRARY_PATH", libraries).passes_both_ways().map(drop)
        }
        Err(error) => {
            sluice_skip::skip(&format!("no cuFFT here: {error:#}"));
            Ok(())
        }
    }
}

fn python(script: &str) -> Result<Client> {
    let packages = clients::python_packages()?;
    Ok(Client::new(&packages.python)
        .argument(client_source(script))
        .set("CUDA_PATH", packages.folder.join("nvidia/cuda_runtime"))
        .set("LD_LIBRARY_PATH", packages.folder.join("nvidia/cuda_nvrtc/lib"))
        .set("PYTHONPATH", packages.folder)
        .set("PYTHONDONTWRITEBYTECODE", "1"))
}

fn client_source(name: &str) -> PathBuf {
    paths::workspace().join("tests/clients").join(name)
}

// Promise: C10
#[test]
#[ignore = "for the full tier: downloads 200 MB of wheels"]
fn cuda_python_computes() -> Result<()> {
    python("driver.py")?.passes_both_ways().map(drop)
}

/// CuPy compiles its kernels when it needs them: to PTX, because it has no machine code for a software GPU, and without its
/// library of compiled kernels.
// Promise: C10
#[test]
#[ignore = "for the full tier: downloads 200 MB of wheels"]
fn cupy_computes() -> Result<()> {
    let kernels = tempfile::tempdir().context("a folder for compiled kernels")?;
    python("cupy_basic.py")?
        .set("CUPY_COMPILE_WITH_PTX", "1")
        .set("CUPY_ACCELERATORS", "")
        .set("CUPY_CACHE_DIR", kernels.path())
        .passes_both_ways()
        .map(drop)
}

/// On a device of the capability for which cuBLAS has kernels as PTX.
// Promise: C140
#[test]
#[ignore = "for the full tier: downloads 550 MB of cuBLAS"]
fn routines_of_cublas_are_the_same_natively_and_remoted() -> Result<()> {
    let kernels = tempfile::tempdir().context("a folder for compiled kernels")?;
    let packages = clients::python_packages()?;
    let mut libraries = OsString::from(packages.folder.join("nvidia/cuda_nvrtc/lib"));
    libraries.push(":");
    libraries.push(clients::cublas()?);
    python("cupy_cublas.py")?
        .set("LD_LIBRARY_PATH", libraries)
        .set("SLUICE_SOFTGPU_MODEL", "RTX5090-32")
        .set("CUPY_COMPILE_WITH_PTX", "1")
        .set("CUPY_ACCELERATORS", "")
        .set("CUPY_CACHE_DIR", kernels.path())
        .passes_both_ways()
        .map(drop)
}

/// On a device of its own, whose memory no other test takes while two answers are compared.
// Promise: G10, G11
#[test]
fn monitors_agree_with_the_driver() -> Result<()> {
    let packages = clients::monitors()?;
    let state = tempfile::tempdir_in("/dev/shm").context("a folder for a device")?;
    Client::new(&packages.python)
        .argument(client_source("monitors.py"))
        .set("PYTHONPATH", packages.folder)
        .set("PYTHONDONTWRITEBYTECODE", "1")
        .set("SLUICE_SOFTGPU_STATE", state.path())
        // The same device both ways, and a small one, because all of its memory is taken.
        .set("SLUICE_SOFTGPU_SCALE", "256")
        .passes_both_ways()
        .map(drop)
}
