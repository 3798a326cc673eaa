//! The confinement of workers, in a host as it is installed: namespaces, a root with the files of a list, and the kernel's own rules.

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use sluice_tests::direct::TIMEOUT;
use sluice_tests::paths::Binaries;
use sluice_tests::process::tail;
use sluice_tests::programs;
use sluice_tests::reach::{ATTEMPTS, Host};
use sluice_tests::tenants::{Options, Tenants};

// Promise: F90
#[test]
fn worker_without_filters_reaches_nothing_of_its_host() -> Result<()> {
    let binaries = Binaries::locate()?;
    let program = programs::program("vector_add")?;
    let mut options = Options::with_limits(192, &[64, 64]);
    options.worker = Some(binaries.get("sluice-hostile-worker")?);
    let tenants = Tenants::start(&binaries, &options)?;

    let host = Host::make()?;
    for (name, attempt) in ATTEMPTS {
        attempt(&host.targets).with_context(|| format!("outside, {name} is refused, too"))?;
    }

    host.targets.write(&tenants.liar_folder())?;
    fs::write(tenants.liar_folder().join("attack"), "reach-out")?;
    let _liar = tenants.spawn(1, "liar", &program, &[])?;
    let start = Instant::now();
    let report = loop {
        let report = fs::read_to_string(tenants.liar_folder().join("report")).unwrap_or_default();
        if report.contains("done ") {
            break report;
        }
        ensure!(start.elapsed() < TIMEOUT, "{report}\n{}", tail(&tenants.printed(), 40));
        std::thread::sleep(Duration::from_millis(10));
    };
    println!("{report}");
    ensure!(report.lines().filter(|line| line.starts_with("refused ")).count() == ATTEMPTS.len(), "{report}");
    // The neighbour of such a worker computes.
    let ran = tenants.run(2, &program, &[])?;
    ensure!(ran.status.success(), "{}\n{}", ran.stdout, ran.stderr);
    tenants.stop()
}

// Promise: F90
#[test]
fn each_worker_has_namespaces_of_its_own_and_no_capability() -> Result<()> {
    let binaries = Binaries::locate()?;
    let hold = programs::program("hold")?;
    let tenants = Tenants::start(&binaries, &Options::with_limits(192, &[64, 64]))?;
    let programs: Vec<_> = [(1, "first"), (1, "second"), (2, "third")]
        .into_iter()
        .map(|(vm, name)| tenants.spawn(vm, name, &hold, &["600"]))
        .collect::<Result<_>>()?;
    let start = Instant::now();
    let workers = loop {
        let workers = [tenants.workers(1)?, tenants.workers(2)?].concat();
        if workers.len() == programs.len() {
            break workers;
        }
        ensure!(start.elapsed() < TIMEOUT, "{workers:?}\n{}", tail(&tenants.printed(), 40));
        std::thread::sleep(Duration::from_millis(10));
    };
    for kind in ["user", "mnt", "net", "ipc"] {
        let of = |process: &str| fs::read_link(format!("/proc/{process}/ns/{kind}")).context("a namespace");
        let mut all: BTreeSet<PathBuf> = BTreeSet::from([of("self")?]);
        for worker in &workers {
            ensure!(all.insert(of(&worker.to_string())?), "a worker shares its {kind} namespace");
        }
    }
    for worker in workers {
        let status = fs::read_to_string(format!("/proc/{worker}/status"))?;
        for set in ["CapPrm", "CapEff", "CapBnd", "CapAmb"] {
            let value = status.lines().find_map(|line| line.strip_prefix(set)?.strip_prefix(':'));
            ensure!(value.map(str::trim) == Some("0000000000000000"), "{set} of a worker: {value:?}");
        }
        let root = fs::read_dir(format!("/proc/{worker}/root/etc"))?;
        let names: Vec<_> = root.map(|entry| Ok(entry?.file_name())).collect::<Result<_>>()?;
        ensure!(names.iter().all(|name| name == "ld.so.cache"), "a worker sees {names:?} in /etc");
    }
    tenants.stop()
}
