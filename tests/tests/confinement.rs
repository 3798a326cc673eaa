//! The confinement of workers, in a host as it is installed: namespaces, a root with the files of a list, and the kernel's own rules.

#![expect(unsafe_code, reason = "System V memory has no safe calls")]

use std::collections::BTreeSet;
use std::fs;
use std::net::TcpListener;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use sluice_kit::processes::Process;
use sluice_tests::direct::TIMEOUT;
use sluice_tests::paths::Binaries;
use sluice_tests::process::tail;
use sluice_tests::programs;
use sluice_tests::reach::{ATTEMPTS, Targets};
use sluice_tests::tenants::{Options, Tenants};

/// A System V memory segment. Drop removes it.
struct Segment(i32);

impl Segment {
    fn make(key: i32) -> Result<Self> {
        // SAFETY: no pointers.
        let number = unsafe { libc::shmget(key, 4096, libc::IPC_CREAT | libc::IPC_EXCL | 0o600) };
        ensure!(number >= 0, "no segment: {}", std::io::Error::last_os_error());
        Ok(Self(number))
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        // SAFETY: the command takes no buffer.
        unsafe { libc::shmctl(self.0, libc::IPC_RMID, std::ptr::null_mut()) };
    }
}

// Promise: F90
#[test]
fn worker_without_filters_reaches_nothing_of_its_host() -> Result<()> {
    let binaries = Binaries::locate()?;
    let program = programs::program("vector_add")?;
    let mut options = Options::with_limits(192, &[64, 64]);
    options.worker = Some(binaries.get("sluice-hostile-worker")?);
    let tenants = Tenants::start(&binaries, &options)?;

    let number = std::process::id();
    let abstract_name = format!("sluice-reach-{number}");
    let _named = UnixListener::bind_addr(&SocketAddr::from_abstract_name(&abstract_name)?)?;
    let port = TcpListener::bind("127.0.0.1:0")?;
    let sleeper = Process(Command::new("sleep").arg("600").spawn().context("a process")?);
    let segment = i32::try_from(number)?;
    let _segment = Segment::make(segment)?;
    let targets = Targets {
        abstract_name,
        socket: tenants.folder().join("run/api.sock"),
        port: port.local_addr()?.port(),
        process: i32::try_from(sleeper.0.id())?,
        segment,
        file: PathBuf::from("/etc/passwd"),
    };
    for (name, attempt) in ATTEMPTS {
        attempt(&targets).with_context(|| format!("outside, {name} is refused, too"))?;
    }

    targets.write(&tenants.liar_folder())?;
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
