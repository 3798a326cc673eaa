//! `cargo xtask compat`: the tests of public clients, natively on the software GPU and remoted.
//!
//! Clients and their tests come from PyPI by name and version, into the cache. Each file of tests is a process of its own and a result of its own,
//! kept by the packages, the command and the built programs; so an interrupted run goes on where it was. Tests that fail natively are
//! no fault of the remoting, and are subtracted.

mod clients;
mod results;

use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use clap::Args;
use sluice_tests::host;
use sluice_tests::paths::{self, Binaries, HOST_PROGRAMS};
use sluice_tests::process::{output_of, run as run_process};
use sluice_tests::progress;
use sluice_tests::wheels;

use crate::cargo::build_release;
use clients::{CLIENTS, CompatClient, FOLDER, PACKAGES, TestSource};
use results::{Outcomes, ResultCache, Tally, contents, files, only_remoted, read, tally};

const DOWNLOAD: Duration = Duration::from_secs(900);
/// Remoted failures that are printed for each client.
const PRINTED: usize = 50;

/// Run tests of public clients natively and remoted.
#[derive(Debug, Args)]
pub(crate) struct CompatOptions {
    /// Names of clients; all of them if none is given.
    names: Vec<String>,
    /// List the clients and their usual times.
    #[arg(long)]
    list: bool,
    /// Run only files of tests whose name contains this text; may be repeated.
    #[arg(long, value_name = "TEXT")]
    only: Vec<String>,
    /// Run again although there are results.
    #[arg(long)]
    fresh: bool,
}

/// Runs clients; false if a test fails remoted alone.
pub(crate) fn run(options: &CompatOptions) -> Result<bool> {
    if options.list {
        for client in CLIENTS {
            println!("{:<14} {:>4} min  {}", client.name, client.minutes, client.packages.join(" "));
        }
        return Ok(true);
    }
    for name in &options.names {
        ensure!(CLIENTS.iter().any(|client| client.name == name), "no client {name}; see --list");
    }
    let binaries = build_release()?;
    let chosen = |client: &&CompatClient| {
        options.names.is_empty() || options.names.iter().any(|name| name == client.name)
    };
    let mut good = true;
    for client in CLIENTS.iter().filter(chosen) {
        good &= run_client(client, &binaries, options).with_context(|| client.name)?;
    }
    Ok(good)
}

/// A client with its files.
struct Installed {
    client: &'static CompatClient,
    python: PathBuf,
    packages: PathBuf,
}

fn install(client: &'static CompatClient) -> Result<Installed> {
    let name = format!("compat-{}", client.name);
    let packages = wheels::install(&name, client.name, client.packages)?;
    Ok(Installed { client, python: wheels::python()?, packages })
}

/// The unpacked source archive of a package.
fn unpack(python: &Path, source: &str) -> Result<PathBuf> {
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

/// The programs and libraries on which the results of a way depend.
fn built(binaries: &Binaries, native: bool) -> Result<u64> {
    let guest = ["libsluice_guest.so", "libsluice_guest_nvml.so"];
    let softgpu = ["libsoftgpu_cuda.so", "libsoftgpu_nvml.so"];
    let names = softgpu.iter().chain(guest.iter().chain(&HOST_PROGRAMS).filter(|_| !native));
    contents(&names.map(|name| binaries.get(name)).collect::<Result<Vec<_>>>()?)
}

fn run_client(client: &'static CompatClient, binaries: &Binaries, options: &CompatOptions) -> Result<bool> {
    let installed = install(client)?;
    let folder = paths::cache()?.join("compat-results").join(client.name);
    if options.fresh && folder.exists() {
        std::fs::remove_dir_all(&folder).with_context(|| format!("removing {}", folder.display()))?;
    }
    let cache = ResultCache::at(folder)?;
    let mut tests = Vec::new();
    for (source, folder, beginning) in client.tests {
        tests.extend(files(&installed.place(*source)?.join(folder), beginning)?);
    }
    tests.retain(|path| {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        options.only.is_empty() || options.only.iter().any(|text| name.contains(text))
    });
    ensure!(!tests.is_empty(), "no file of tests matches");
    let ways = [built(binaries, true)?, built(binaries, false)?];
    let (mut all, mut failures) = ([Tally::default(), Tally::default()], Vec::new());
    for (index, file) in tests.iter().enumerate() {
        let started = Instant::now();
        let mut outcomes = Vec::new();
        for (native, programs) in [true, false].into_iter().zip(ways) {
            let key = installed.key(file, native, programs)?;
            outcomes.push(cache.get(key, || installed.run(file, binaries, native))?);
        }
        let [native, remoted] = &outcomes[..] else { bail!("two ways have two results") };
        let differences = only_remoted(native, remoted);
        let name = file.file_stem().unwrap_or_default().display();
        println!(
            "[{}/{}] {name}: natively {}, remoted {}, {:.0} s{}",
            index + 1,
            tests.len(),
            words(&tally(native)),
            words(&tally(remoted)),
            started.elapsed().as_secs_f64(),
            if differences.is_empty() { "" } else { "  DIFFERENT" }
        );
        for (sum, one) in all.iter_mut().zip([tally(native), tally(remoted)]) {
            sum.passed += one.passed;
            sum.failed += one.failed;
            sum.skipped += one.skipped;
        }
        failures.extend(differences);
    }
    let [native, remoted] = &all;
    println!("{}: natively {}; remoted {}", client.name, words(native), words(remoted));
    println!("{}: {} tests fail remoted only", client.name, failures.len());
    for (test, reason) in failures.iter().take(PRINTED) {
        println!("  {test}: {reason}");
    }
    if failures.len() > PRINTED {
        println!("  and {} more", failures.len() - PRINTED);
    }
    Ok(failures.is_empty())
}

fn words(tally: &Tally) -> String {
    format!("{} passed, {} failed, {} skipped", tally.passed, tally.failed, tally.skipped)
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

    /// A hash of everything on which the result of a file depends.
    fn key(&self, file: &Path, native: bool, programs: u64) -> Result<u64> {
        let CompatClient { packages, environment, unittest, prelude, seconds, .. } = self.client;
        let mut hasher = DefaultHasher::new();
        (packages, environment, unittest, prelude, seconds, native, programs).hash(&mut hasher);
        let plugin = paths::workspace().join(FOLDER).join("compat_report.py");
        contents(&[file.to_owned(), plugin])?.hash(&mut hasher);
        file.hash(&mut hasher);
        Ok(hasher.finish())
    }

    /// Runs a file of tests.
    fn run(&self, file: &Path, binaries: &Binaries, native: bool) -> Result<Outcomes> {
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
        let folder = file.parent().context("a test has a folder")?;
        command.arg("--rootdir").arg(folder).arg(file).current_dir(scratch.path());
        let path = [self.packages.clone(), paths::workspace().join(FOLDER)];
        command.env("PYTHONPATH", std::env::join_paths(path)?).env("PYTHONDONTWRITEBYTECODE", "1");
        command.env("COMPAT_REPORT", &report).env("COMPAT_PRELUDE", self.client.prelude);
        // Compiled kernels are kept by some clients in the home of the user: each run has its own.
        command.env("HOME", scratch.path()).env("XDG_CACHE_HOME", scratch.path());
        for (name, value) in self.client.environment {
            command.env(name, value.replace(PACKAGES, &self.packages.display().to_string()));
        }
        if native {
            command.env("SLUICE_SOFTGPU_STATE", device.path());
        }
        let end = match run_process(&mut command, Duration::from_secs(self.client.seconds)) {
            // 1: a test failed. 5: no test was collected.
            Ok(finished) if matches!(finished.status.code(), Some(0 | 1 | 5)) => None,
            Ok(finished) => {
                let last = finished.stderr.lines().rev().find(|line| !line.trim().is_empty());
                Some(format!("{}: {}", finished.status, last.unwrap_or_default()))
            }
            Err(error) => Some(format!("{error:#}").lines().next().unwrap_or_default().to_owned()),
        };
        let text = std::fs::read_to_string(&report).unwrap_or_default();
        read(&text, end.as_deref())
    }
}
