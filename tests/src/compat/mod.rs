//! The tests of public clients, natively on the software GPU and remoted.
//!
//! `cargo xtask compat` and the tests `compat::` call it. It owns the cache of clients and results, and never changes a client.
//!
//! Clients and their tests come from PyPI by name and version, into the cache. Each file of tests is a process of its own and a result of its own,
//! kept by the packages, the command and the built programs; so an interrupted run goes on where it was. Tests that fail natively are
//! no fault of the remoting, and are subtracted; those that are known are listed with their causes ([`expectations`]).

pub mod clients;
pub mod expectations;
pub mod results;

use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};

use crate::host;
use crate::paths::{self, Binaries, HOST_PROGRAMS};
use crate::process::{kill, output_of, run as run_process, with_environment};
use crate::progress;
use crate::wheels;

use clients::{CompatClient, FOLDER, PACKAGES, TOOLKIT, TestSource};
use results::{Outcomes, ResultCache, contents, files, read};

/// The scale of both ways' device: 1.2 GiB, as `sluice run` makes it by itself. Tests that fill a device must find the same one.
const SCALE: &str = "115";
/// The software GPU's assembler.
const ASSEMBLER: &str = "softgpu-ptxas";
/// A variable of the processes of one run.
const MARK: &str = "COMPAT_RUN";
const DOWNLOAD: Duration = Duration::from_secs(900);

/// A client with its files.
#[derive(Debug)]
pub struct Installed {
    client: &'static CompatClient,
    python: PathBuf,
    packages: PathBuf,
}

/// Tests that run in one process: a file, or some tests of it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Batch {
    /// The file.
    pub file: PathBuf,
    /// The chosen tests, in pytest's form without the file (`TestClass::test_name`); all if there are none.
    pub tests: Vec<String>,
    /// An expression on the names of tests (`pytest -k`); none if it is empty.
    pub keyword: String,
}

/// The outcomes of a batch both ways.
#[derive(Debug)]
pub struct BothWays {
    /// Straight on the software GPU.
    pub native: Outcomes,
    /// Through Sluice.
    pub remoted: Outcomes,
}

/// The programs of both ways, and the results that depend on them.
#[derive(Debug)]
pub struct CompatRunner {
    installed: Installed,
    binaries: Binaries,
    cache: ResultCache,
    /// Hashes of the programs on which a native and a remoted result depend.
    built: [u64; 2],
}

/// Fetches a client, unless it is in the cache.
///
/// # Errors
/// When it is neither in the cache nor can be downloaded.
pub fn install(client: &'static CompatClient) -> Result<Installed> {
    let name = format!("compat-{}", client.name);
    let packages = wheels::install(&name, client.name, client.packages)?;
    let installed = Installed { client, python: wheels::python()?, packages };
    // With the archives of sources among its tests.
    for (source, ..) in client.tests {
        installed.place(*source)?;
    }
    Ok(installed)
}

/// The unpacked source archive of a package.
fn unpack(python: &Path, source: &str) -> Result<PathBuf> {
    let _lock = paths::cache_lock("compat-sources")?;
    let folder = paths::cache()?.join("compat-sources").join(source);
    let archives = folder.join("archives");
    let unpacked = folder.join("unpacked");
    if !unpacked.exists() {
        progress::step(format!("downloading the source of {source}"));
        std::fs::create_dir_all(&archives)?;
        let mut pip = Command::new(python);
        pip.args(["-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]);
        pip.args(["--no-binary", ":all:", "--dest"]).arg(&archives).arg(source);
        output_of(&mut pip, DOWNLOAD)?;
        let archive = std::fs::read_dir(&archives)?.next().context("pip left no archive")??.path();
        let unfinished = folder.join("unfinished");
        std::fs::create_dir_all(&unfinished)?;
        let mut tar = Command::new("tar");
        tar.args(["--strip-components=1", "-xzf"]).arg(&archive).arg("-C").arg(&unfinished);
        output_of(&mut tar, DOWNLOAD)?;
        std::fs::rename(&unfinished, &unpacked)?;
    }
    Ok(unpacked)
}

/// A hash of the programs and libraries on which the results of a way depend.
fn built(binaries: &Binaries, native: bool) -> Result<u64> {
    let guest = ["libsluice_guest.so", "libsluice_guest_nvml.so"];
    let softgpu = ["libsoftgpu_cuda.so", "libsoftgpu_nvml.so", ASSEMBLER];
    let names = softgpu.iter().chain(guest.iter().chain(&HOST_PROGRAMS).filter(|_| !native));
    contents(&names.map(|name| binaries.get(name)).collect::<Result<Vec<_>>>()?)
}

impl CompatRunner {
    /// Prepares to run tests of a client with these programs.
    ///
    /// # Errors
    /// When a program is missing, or the folder of results cannot be made.
    pub fn new(installed: Installed, binaries: &Binaries) -> Result<CompatRunner> {
        let cache = ResultCache::at(results_of(installed.client)?)?;
        let built = [built(binaries, true)?, built(binaries, false)?];
        Ok(CompatRunner { installed, binaries: binaries.clone(), cache, built })
    }

    /// All files of tests of the client, each as a batch.
    ///
    /// # Errors
    /// When a folder of tests is missing.
    pub fn batches(&self) -> Result<Vec<Batch>> {
        let mut batches = Vec::new();
        for (source, folder, beginning) in self.installed.client.tests {
            let found = files(&self.installed.place(*source)?.join(folder), beginning)?;
            let keyword = self.installed.client.keyword;
            let batch = |file| Batch { file, tests: Vec::new(), keyword: keyword.to_owned() };
            batches.extend(found.into_iter().map(batch));
        }
        Ok(batches)
    }

    /// The outcomes of a batch both ways, from the cache if they are there.
    ///
    /// # Errors
    /// When a run leaves no readable report.
    pub fn run(&self, batch: &Batch) -> Result<BothWays> {
        let [native, remoted] = [true, false].map(|native| {
            let key = self.key(batch, native)?;
            self.cache.get(key, || self.installed.run(batch, &self.binaries, native))
        });
        Ok(BothWays { native: native?, remoted: remoted? })
    }

    /// A hash of everything on which the result of a batch depends.
    fn key(&self, batch: &Batch, native: bool) -> Result<u64> {
        let CompatClient { packages, environment, unittest, prelude, seconds, .. } = self.installed.client;
        let [for_native, for_remoted] = self.built;
        let built = if native { for_native } else { for_remoted };
        let mut hasher = DefaultHasher::new();
        (packages, environment, unittest, prelude, seconds, native, built, SCALE).hash(&mut hasher);
        let [plugin, start] =
            ["compat_report.py", "sitecustomize.py"].map(|name| paths::workspace().join(FOLDER).join(name));
        contents(&[batch.file.clone(), plugin, start])?.hash(&mut hasher);
        batch.hash(&mut hasher);
        Ok(hasher.finish())
    }
}

/// The folder of a client's results.
///
/// # Errors
/// When there is no cache.
pub fn results_of(client: &CompatClient) -> Result<PathBuf> {
    Ok(paths::cache()?.join("compat-results").join(client.name))
}

impl Installed {
    /// The folder of tests of a source.
    fn place(&self, source: TestSource) -> Result<PathBuf> {
        match source {
            TestSource::Packages => Ok(self.packages.clone()),
            TestSource::Archive(source) => unpack(&self.python, source),
            TestSource::Tree => Ok(paths::workspace()),
        }
    }

    /// Runs a batch.
    fn run(&self, batch: &Batch, binaries: &Binaries, native: bool) -> Result<Outcomes> {
        let scratch = tempfile::tempdir().context("a folder for a report")?;
        let report = scratch.path().join("report");
        let device = host::own_device()?;
        let mut command = Command::new(binaries.get("sluice")?);
        command.arg("run").args(native.then_some("--native")).arg("--").arg(&self.python);
        command.args(["-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider", "-p", "compat_report"]);
        if self.client.unittest {
            // By their files, because the packages of the tests are found under other names than their folders'.
            command.args(["-o", "python_functions=", "--import-mode=importlib"]);
        }
        let folder = batch.file.parent().context("a test has a folder")?;
        command.arg("--rootdir").arg(folder).current_dir(scratch.path());
        if batch.tests.is_empty() {
            command.arg(&batch.file);
        }
        for test in &batch.tests {
            let mut name = batch.file.clone().into_os_string();
            name.push("::");
            name.push(test);
            command.arg(name);
        }
        if !batch.keyword.is_empty() {
            command.args(["-k", &batch.keyword]);
        }
        let path = [self.packages.clone(), paths::workspace().join(FOLDER)];
        command.env("PYTHONPATH", std::env::join_paths(path)?).env("PYTHONDONTWRITEBYTECODE", "1");
        command.env("COMPAT_PACKAGES", &self.packages);
        command.env("COMPAT_REPORT", &report).env("COMPAT_PRELUDE", self.client.prelude);
        // Some clients keep compiled kernels in the home of the user, or in the folder for temporary files: each run has its own.
        command.env("HOME", scratch.path()).env("XDG_CACHE_HOME", scratch.path());
        command.env("TMPDIR", scratch.path());
        command.env("SLUICE_SOFTGPU_SCALE", SCALE);
        let toolkit = scratch.path().join("toolkit");
        std::fs::create_dir_all(toolkit.join("bin"))?;
        std::os::unix::fs::symlink(binaries.get(ASSEMBLER)?, toolkit.join("bin/ptxas"))?;
        for (name, value) in self.client.environment {
            let value = value.replace(PACKAGES, &self.packages.display().to_string());
            command.env(name, value.replace(TOOLKIT, &toolkit.display().to_string()));
        }
        if native {
            command.env("SLUICE_SOFTGPU_STATE", device.path());
        }
        let mark = scratch.path().display().to_string();
        command.env(MARK, &mark);
        let finished = run_process(&mut command, Duration::from_secs(self.client.seconds));
        // The client outlives `sluice run` when that is ended at the limit, and so may its own children.
        for (process, _) in with_environment(&format!("{MARK}={mark}")) {
            kill(process);
        }
        let end = match finished {
            // 1: a test failed. 5: no test was collected.
            Ok(finished) if matches!(finished.status.code(), Some(0 | 1 | 5)) => None,
            Ok(finished) => {
                let last = finished.stderr.lines().rev().find(|line| !line.trim().is_empty());
                Some(format!("{}: {}", finished.status, last.unwrap_or_default()))
            }
            Err(error) => Some(format!("{error:#}").lines().next().unwrap_or_default().to_owned()),
        };
        let text = match std::fs::read_to_string(&report) {
            Ok(text) => text,
            // No test began: its end is the outcome.
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => String::new(),
            Err(error) => return Err(error).context("reading a report"),
        };
        read(&text, end.as_deref())
    }
}

/// Fetches the clients of which every change runs some tests. One that cannot be fetched is named with the reason.
///
/// # Errors
/// When the expectations name no such client.
pub fn prepare() -> Result<Vec<(&'static str, anyhow::Error)>> {
    let mut missing = Vec::new();
    for name in expectations::Expectations::load()?.clients() {
        let client = clients::client(name)?;
        if let Err(error) = install(client) {
            missing.push((client.name, error));
        }
    }
    Ok(missing)
}

/// True if an installation failed because the package index could not be reached.
#[must_use]
pub fn is_unreachable(error: &anyhow::Error) -> bool {
    // pip tells only in its warnings that it had no connection; its error is then that there is no such version.
    format!("{error:#}").contains("connection broken by")
}

/// Runs a client's part of every change's tests; the faults that it finds, none if all is well.
///
/// # Errors
/// When a run leaves no readable report, or the expectations do not fit the client's files.
pub fn check(installed: Installed, binaries: &Binaries) -> Result<Vec<String>> {
    let client = installed.client;
    let expectations = expectations::Expectations::load()?;
    let runner = CompatRunner::new(installed, binaries)?;
    let files = runner.batches()?;
    let (mut faults, mut passed) = (Vec::new(), 0);
    for part in expectations.subset_of(client.name) {
        let batch = part.batch(&files)?;
        let outcomes = runner.run(&batch)?;
        passed += results::count(&outcomes.remoted).passed;
        faults.extend(expectations.faults(client.name, &outcomes.native, &outcomes.remoted));
    }
    ensure!(passed > 0, "no test of {} passed", client.name);
    Ok(faults)
}
