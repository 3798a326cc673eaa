//! The confinement of the processes that a launcher starts: namespaces, a root with the files of a list, and the kernel's own rules.

use std::collections::BTreeSet;
use std::fs::{self, Permissions};
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use rustix::thread::CapabilitySet;
use sluice_kit::processes::{Process, make_program};
use sluice_messages::control::{FromLauncher, ToLauncher};
use sluice_messages::inventory::Visible;
use sluice_shared_memory::socket;
use sluice_tests::cgroups::Delegated;
use sluice_tests::direct::TIMEOUT;
use sluice_tests::paths::Binaries;
use sluice_tests::process::tail;
use sluice_tests::programs;
use sluice_tests::reach::{ATTEMPTS, ATTEMPTS_WITHOUT_ANY_FILTER, Host, INTRUDER_BYTES, Targets};
use sluice_tests::tenants::{Options, Tenants};
use tempfile::TempDir;

// Promise: F90, F100
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
    let mut programs: Vec<_> = [(1, "first"), (1, "second"), (2, "third")]
        .into_iter()
        .map(|(vm, name)| tenants.spawn(vm, name, &hold, &["1000"]))
        .collect::<Result<_>>()?;
    // A worker that serves has its confinement.
    for program in &mut programs {
        program.wait_for_line("holding", TIMEOUT)?;
    }
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

/// A launcher that starts `sluice-intruder` in each role, without any filter.
struct Launcher {
    process: Process,
    control: OwnedFd,
    lifeline: UnixStream,
    folder: TempDir,
    _device: TempDir,
}

/// An intruder.
struct Intruder {
    process: u32,
    control: OwnedFd,
}

impl Launcher {
    fn start(binaries: &Binaries, extra: &[&str]) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let device = tempfile::tempdir_in("/dev/shm")?;
        // Every user may execute the copies.
        fs::set_permissions(folder.path(), Permissions::from_mode(0o755))?;
        let copy = |name: &str| -> Result<PathBuf> {
            let path = folder.path().join(name);
            make_program(&binaries.get(name)?, &path);
            fs::set_permissions(&path, Permissions::from_mode(0o755))?;
            Ok(path)
        };
        let intruder = copy("sluice-intruder")?;
        let run = folder.path().join("run");
        fs::create_dir(&run)?;
        let (control, theirs) = socket::pair()?;
        let (lifeline, its_lifeline) = UnixStream::pair()?;
        let mut command = Command::new(binaries.get("sluice-launcher")?);
        for role in ["--device", "--worker", "--arbiter", "--inventory"] {
            command.arg(role).arg(&intruder);
        }
        command.arg("--driver").arg(copy("libsoftgpu_cuda.so")?);
        command.arg("--nvml").arg(copy("libsoftgpu_nvml.so")?);
        command.arg("--socket-dir").arg(&run).args(["--vm-numbers", "1:3", "--units", "1", "--supervised"]);
        command.args(extra).env("SLUICE_SOFTGPU_STATE", device.path()).env("SLUICE_SECCOMP", "off");
        command.stdin(Stdio::from(theirs)).stdout(Stdio::from(OwnedFd::from(its_lifeline)));
        let process = Process(command.spawn().context("the launcher")?);
        Ok(Self { process, control, lifeline, folder, _device: device })
    }

    fn ask(&self, request: ToLauncher) -> Result<Intruder> {
        socket::send(&self.control, &request.encode(), &[])?;
        let mut bytes = [0; sluice_messages::control::BYTES];
        let received = socket::receive(&self.control, &mut bytes)?.context("the launcher is gone")?;
        let (message, descriptors) = received;
        match FromLauncher::decode(message)? {
            FromLauncher::Started { process, .. } => {
                let control = descriptors.into_iter().next().context("a control socket")?;
                Ok(Intruder { process, control })
            }
            answer => bail!("{request:?}: {answer:?}"),
        }
    }

    /// A process of each role: three devices, of which the second is that of programs, a worker, an arbiter, and an inventory.
    fn roles(&self) -> Result<Vec<(&'static str, Intruder)>> {
        let visible = Visible::Host;
        let requests = [
            ("device", ToLauncher::StartDevice { vm: 1, scanouts: 0, direct: false, fixed_arena: 0 }),
            (
                "device of programs",
                ToLauncher::StartDevice { vm: 2, scanouts: 0, direct: true, fixed_arena: 0 },
            ),
            (
                "device of another VM",
                ToLauncher::StartDevice { vm: 3, scanouts: 0, direct: false, fixed_arena: 0 },
            ),
            ("worker", ToLauncher::StartWorker { vm: 1, session: 1, visible }),
            ("arbiter", ToLauncher::StartArbiter { unit: 0, visible }),
            ("inventory", ToLauncher::StartInventory {}),
        ];
        requests.into_iter().map(|(role, request)| Ok((role, self.ask(request)?))).collect()
    }

    /// Ends it with all processes that it started, and waits for that.
    fn end(mut self) -> Result<()> {
        drop((self.control, self.lifeline));
        let status = self.process.0.wait()?;
        ensure!(status.success(), "the launcher: {status}");
        Ok(())
    }

    fn socket_of(&self, vm: u32) -> PathBuf {
        self.folder.path().join(format!("run/vm-{vm}.sock"))
    }
}

impl Intruder {
    fn reached(&self, targets: &Targets) -> Result<BTreeSet<String>> {
        socket::send(&self.control, &serde_json::to_vec(targets)?, &[])?;
        let mut bytes = [0; INTRUDER_BYTES];
        let (answer, _) = socket::receive(&self.control, &mut bytes)?.context("the intruder is gone")?;
        Ok(serde_json::from_slice(answer)?)
    }

    fn namespace(&self, kind: &str) -> Result<PathBuf> {
        fs::read_link(format!("/proc/{}/ns/{kind}", self.process)).context("a namespace")
    }

    fn status(&self, name: &str) -> Result<String> {
        let status = fs::read_to_string(format!("/proc/{}/status", self.process))?;
        let value = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        Ok(value.context("a line of the status")?.trim().to_owned())
    }

    fn user(&self) -> Result<u32> {
        Ok(self.status("Uid")?.split_whitespace().next().context("a user")?.parse()?)
    }
}

/// The things that an intruder of each role reaches, by role. Each thing can be reached from outside.
fn reached_by_role(launcher: &Launcher, roles: &[(&'static str, Intruder)]) -> Result<Vec<BTreeSet<String>>> {
    let mut host = Host::make()?;
    host.targets.socket = launcher.socket_of(3);
    for (name, attempt) in ATTEMPTS.into_iter().chain(ATTEMPTS_WITHOUT_ANY_FILTER) {
        attempt(&host.targets).with_context(|| format!("outside, {name} is refused, too"))?;
    }
    let reached = roles.iter().map(|(role, intruder)| {
        let reached = intruder.reached(&host.targets).with_context(|| format!("the {role}"))?;
        println!("{role}: {reached:?}");
        Ok(reached)
    });
    reached.collect()
}

// Promise: F93, F100
#[test]
fn process_of_each_role_without_filters_reaches_nothing_of_its_host() -> Result<()> {
    let binaries = Binaries::locate()?;
    let launcher = Launcher::start(&binaries, &[])?;
    let roles = launcher.roles()?;
    let capabilities = rustix::thread::capabilities(None)?.effective;
    let may_administer = capabilities.contains(CapabilitySet::SYS_ADMIN);
    if rustix::process::geteuid().is_root() && !(may_administer && may_map_root()?) {
        sluice_skip::skip("root without CAP_SYS_ADMIN and CAP_SETFCAP gives no namespaces");
        return Ok(());
    }
    for ((role, intruder), reached) in roles.iter().zip(reached_by_role(&launcher, &roles)?) {
        // The device of programs sees the users of its host, and only a privileged launcher gives it namespaces in spite of that.
        let namespaces = *role != "device of programs" || may_administer;
        // Without cgroups a device and an arbiter end workers by signals.
        let allowed: &[&str] = match *role {
            _ if !namespaces => &["shared-segment", "signal", "socket"],
            "worker" | "inventory" => &[],
            _ => &["signal"],
        };
        ensure!(reached.iter().eq(allowed), "the {role} reaches {reached:?}");
        for kind in ["mnt", "net", "ipc"].iter().filter(|_| namespaces) {
            let own = is_own(&intruder.namespace(kind)?, kind)?;
            ensure!(!own, "the {role} has the {kind} namespace of the host");
        }
    }
    drop(roles);
    launcher.end()
}

// Promise: F93
#[test]
fn devices_and_arbiters_are_users_of_their_own_beside_workers_that_are() -> Result<()> {
    const FIRST: u32 = 4_000_000;
    let map = fs::read_to_string("/proc/self/uid_map")?;
    if !rustix::process::geteuid().is_root() || map.split_whitespace().nth(2) != Some("4294967295") {
        sluice_skip::skip("only root of the host may start processes of other users");
        return Ok(());
    }
    let Some(cgroup) = Delegated::or_skip()? else { return Ok(()) };
    let binaries = Binaries::locate()?;
    let directory = cgroup.directory().to_str().context("UTF-8")?;
    let uids = format!("{FIRST}:64");
    let launcher = Launcher::start(&binaries, &["--worker-uids", &uids, "--cgroup", directory])?;
    let roles = launcher.roles()?;
    let mut users = BTreeSet::new();
    for ((role, intruder), reached) in roles.iter().zip(reached_by_role(&launcher, &roles)?) {
        // The inventory stays root, which not every launcher can map into a user namespace.
        let namespaces = *role != "inventory" || may_map_root()?;
        let allowed: &[&str] = if namespaces { &[] } else { &["shared-segment", "socket"] };
        ensure!(reached.iter().eq(allowed), "the {role} reaches {reached:?}");
        let user = intruder.user()?;
        if *role == "inventory" {
            ensure!(user == 0, "the inventory is user {user}");
        } else {
            ensure!((FIRST..FIRST + 64).contains(&user), "the {role} is user {user}");
            ensure!(users.insert(user), "the {role} shares user {user}");
        }
        ensure!(intruder.status("CapEff")? == "0000000000000000", "the {role} has capabilities");
        // The device of programs tells their users apart, and sees the users of its host for that.
        let namespaces = namespaces && *role != "device of programs";
        for kind in ["user", "mnt", "net", "ipc"].iter().filter(|_| namespaces) {
            ensure!(
                !is_own(&intruder.namespace(kind)?, kind)?,
                "the {role} has the {kind} namespace of the host"
            );
        }
    }
    drop(roles);
    launcher.end()
}

/// True if this process can map root into a user namespace.
fn may_map_root() -> Result<bool> {
    Ok(rustix::thread::capabilities(None)?.effective.contains(CapabilitySet::SETFCAP))
}

/// True if a namespace is that of this process.
fn is_own(namespace: &Path, kind: &str) -> Result<bool> {
    Ok(fs::read_link(format!("/proc/self/ns/{kind}"))? == namespace)
}
