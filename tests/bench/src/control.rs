//! The control plane's rows: a daemon as a service manager starts it, with five hundred VMs, 64 of them with a session.
//!
//! Its state is on a disk, and a service manager keeps its sockets, so that it has all the costs of an operator's daemon.

use crate::{
    measure::{Rounds, Samples, is_wanted, nanoseconds, single},
    scale,
    turns::Client,
};
use anyhow::{Context as _, Result, bail, ensure};
use sluice_api::{client, http, v1::VmRequest};
use sluice_tests::{
    direct::{TIMEOUT, cpu_ticks},
    paths::Binaries,
    performance::Measured,
    process::Background,
};
use std::{
    collections::BTreeMap,
    ffi::OsString,
    fs::{self, File},
    io::{Read as _, Write as _},
    os::unix::{
        fs::symlink,
        net::{UnixDatagram, UnixListener, UnixStream},
    },
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};
use tempfile::TempDir;

/// Maximum size of an answer, in bytes.
const ANSWER: u64 = 64 << 20;
/// Total number of VMs.
const VMS: usize = 500;
/// Number of VMs with a session.
const ACTIVE: usize = 64;
/// Number of rounds of list and scrape, each with its yardstick.
const ROUNDS: usize = 60;
/// Time for which the idle daemon is observed.
const IDLE: Duration = Duration::from_secs(10);
/// Scale of the H200: two gigabytes, of which each VM may have a chunk, beside the driver's memory for sessions.
const SCALE: &str = "64";

/// Every row whose name contains one of `filter`, or all.
pub(crate) fn measure_all(binaries: &Binaries, me: &Path, filter: &[String]) -> Result<Vec<Measured>> {
    const NAMES: [&str; 6] =
        ["api/create", "api/list-500", "api/scrape-500", "daemon/memory", "daemon/idle", "daemon/wake-ups"];
    let wanted = |name: &str| is_wanted(filter, name);
    let at_scale = scale::NAMES.iter().any(|name| wanted(name));
    if !at_scale && !NAMES.iter().any(|name| wanted(name)) {
        return Ok(Vec::new());
    }
    let service = Service::start(binaries)?;
    let (mut rows, mut clients) = (Vec::new(), Vec::new());
    for number in 1..=ACTIVE {
        let socket = service.create(&format!("active-{number}"))?;
        clients.push(Client::start(&mut service.client(me, &socket))?);
        if at_scale && scale::VMS.contains(&number) {
            rows.extend(scale::measure(service.daemon.id(), &mut clients)?);
        }
    }
    if NAMES.iter().any(|name| wanted(name)) {
        rows.push(service.creations()?);
        rows.push(service.answers("api/list-500", "/v1/vms")?);
        rows.push(service.answers("api/scrape-500", "/metrics")?);
        rows.extend(service.idle()?);
    }
    drop(clients);
    service.stop()?;
    Ok(rows.into_iter().filter(|row| wanted(&row.name)).collect())
}

/// `sluiced`, and the keeper of its sockets.
struct Service {
    daemon: Background,
    /// On a disk, as `/var/lib` is.
    folder: TempDir,
    /// In memory, as `/run` is.
    runtime: TempDir,
    _device: TempDir,
}

impl Service {
    fn start(binaries: &Binaries) -> Result<Self> {
        let folder = tempfile::Builder::new().prefix("sluice-bench-").tempdir()?;
        let in_memory = || tempfile::Builder::new().prefix("sluice-bench-").tempdir_in("/dev/shm");
        let (runtime, device) = (in_memory()?, in_memory()?);
        let libraries = folder.path().join("lib");
        fs::create_dir(&libraries)?;
        symlink(binaries.get("libsluice_guest.so")?, libraries.join("libcuda.so.1"))?;
        let notify = folder.path().join("notify");
        let keeper = UnixDatagram::bind(&notify)?;
        std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            // Sockets kept here close at once: no other daemon follows this one.
            while keeper.recv(&mut bytes).is_ok() {}
        });
        let mut command = Command::new(binaries.get("sluiced")?);
        command.arg("--runtime-dir").arg(runtime.path());
        command.arg("--state-dir").arg(folder.path().join("state"));
        command.arg("--libexec").arg(binaries.folder());
        command.arg("--driver").arg(binaries.get("libsoftgpu_cuda.so")?);
        command.arg("--nvml").arg(binaries.get("libsoftgpu_nvml.so")?);
        command.args(["--vm-numbers", "1000:1000"]).env("NOTIFY_SOCKET", notify);
        command.env("SLUICE_SOFTGPU_STATE", device.path()).env("SLUICE_SOFTGPU_SCALE", SCALE);
        // One device has no room for the quotas of 500 VMs.
        command.env("SLUICE_SOFTGPU_DEVICES", "2");
        let daemon = Background::start("sluiced", &mut command, &folder.path().join("sluiced.log"))?;
        let service = Self { daemon, folder, runtime, _device: device };
        let start = Instant::now();
        // Ready, and its unit lends.
        while service.get("/readyz").is_err() {
            ensure!(start.elapsed() < TIMEOUT, "sluiced is not ready: {}", service.daemon.printed());
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(service)
    }

    fn stop(mut self) -> Result<()> {
        let status = self.daemon.terminate(TIMEOUT)?;
        ensure!(status.success(), "sluiced ended with {status}: {}", self.daemon.printed());
        Ok(())
    }

    /// A program in a VM.
    fn client(&self, me: &Path, socket: &Path) -> Command {
        let mut command = Command::new(me);
        command.arg("turns").env("LD_LIBRARY_PATH", self.folder.path().join("lib"));
        command.env("SLUICE_TRANSPORT", "direct").env("SLUICE_SOCKET", socket);
        command
    }

    fn api(&self) -> PathBuf {
        self.runtime.path().join("api.sock")
    }

    /// The body of an answer, unparsed.
    fn get(&self, path: &str) -> Result<Vec<u8>> {
        let answer = http::request(&self.api(), "GET", path, None)?;
        ensure!(answer.status == 200, "{path} is answered with {}", answer.status);
        Ok(answer.read(ANSWER)?)
    }

    /// Creates a VM; returns when a VMM can connect.
    fn create(&self, id: &str) -> Result<PathBuf> {
        let request = VmRequest { direct: true, memory_bytes: Some(8 << 20), ..VmRequest::default() };
        let put = client::Client::at(self.api()).put_vm(id, &request)?;
        ensure!(put.made, "VM {id} was there before");
        let socket = PathBuf::from(put.object.connect.socket);
        drop(UnixStream::connect(&socket).with_context(|| format!("{}", socket.display()))?);
        Ok(socket)
    }

    /// The time to create a VM until its VMM can connect, with a growing number of others, against the unavoidable cost: two changes
    /// flushed to the same disk and the start of a process.
    fn creations(&self) -> Result<Measured> {
        let mut rounds = Rounds::default();
        let path = self.folder.path().join("yardstick");
        for number in ACTIVE..VMS {
            let [mut own, mut yardstick] = <[Samples; 2]>::default();
            let start = Instant::now();
            self.create(&format!("vm-{number}"))?;
            own.push(nanoseconds(start.elapsed()));
            let start = Instant::now();
            for _ in 0..2 {
                let mut file = File::create(&path)?;
                file.write_all(&[b'.'; 4096])?;
                file.sync_all()?;
            }
            ensure!(Command::new("true").status()?.success(), "cannot start true");
            yardstick.push(nanoseconds(start.elapsed()));
            rounds.push(own, yardstick);
        }
        rounds.row("api/create")
    }

    /// The time from a request to the last byte of its answer, against an answer of the same size that is ready in memory.
    fn answers(&self, name: &str, path: &str) -> Result<Measured> {
        let length = self.get(path)?.len();
        let socket = self.folder.path().join("yardstick.sock");
        let listener = UnixListener::bind(&socket)?;
        std::thread::spawn(move || {
            let bytes = vec![b'.'; length];
            for mut client in listener.incoming().flatten() {
                let mut request = [0; 512];
                // A client that has gone gets no answer.
                let _ = client.read(&mut request).and_then(|_| client.write_all(&bytes));
            }
        });
        let own = |samples: &mut Samples| samples.time(1, || self.get(path).map(drop));
        let yardstick = |samples: &mut Samples| {
            samples.time(1, || {
                let mut stream = UnixStream::connect(&socket)?;
                stream.write_all(b"GET")?;
                let mut answer = Vec::new();
                stream.read_to_end(&mut answer)?;
                Ok(())
            })
        };
        let rounds = Rounds::take(ROUNDS, own, yardstick)?;
        fs::remove_file(&socket)?;
        rounds.row(name)
    }

    /// Memory and activity of the daemon without requests.
    fn idle(&self) -> Result<Vec<Measured>> {
        let process = self.daemon.id();
        let (ticks, switches, start) = (cpu_ticks(process)?, switches(process)?, Instant::now());
        std::thread::sleep(IDLE);
        let elapsed = start.elapsed().as_secs_f64();
        #[expect(clippy::cast_precision_loss, reason = "small figures")]
        let (ticks, switches) =
            ((cpu_ticks(process)? - ticks) as f64, more(&switches, &self::switches(process)?) as f64);
        #[expect(clippy::cast_precision_loss, reason = "small figures")]
        let hertz = rustix::param::clock_ticks_per_second() as f64;
        #[expect(clippy::cast_precision_loss, reason = "small figures")]
        let resident = resident_kibibytes(process)? as f64 / 1024.0;
        Ok(vec![
            single("daemon/memory-500", resident)?,
            single("daemon/idle-500", ticks / hertz / elapsed * 100.0)?,
            single("daemon/wake-ups-500", switches / elapsed)?,
        ])
    }
}

/// The number of context switches of each thread of a process.
fn switches(process: u32) -> Result<BTreeMap<OsString, u64>> {
    let mut threads = BTreeMap::new();
    for thread in fs::read_dir(format!("/proc/{process}/task"))? {
        let thread = thread?;
        match field(&thread.path().join("status"), "voluntary_ctxt_switches:") {
            Ok(switches) => _ = threads.insert(thread.file_name(), switches),
            // The thread has ended since the list was read.
            Err(_) if !thread.path().exists() => {}
            Err(error) => return Err(error),
        }
    }
    Ok(threads)
}

/// The growth of the threads' counts; a thread that has ended is left out.
fn more(before: &BTreeMap<OsString, u64>, after: &BTreeMap<OsString, u64>) -> u64 {
    after.iter().map(|(thread, count)| count - before.get(thread).copied().unwrap_or(0)).sum()
}

fn resident_kibibytes(process: u32) -> Result<u64> {
    field(Path::new(&format!("/proc/{process}/status")), "VmRSS:")
}

fn field(path: &Path, name: &str) -> Result<u64> {
    let text = fs::read_to_string(path)?;
    let Some(rest) = text.lines().find_map(|line| line.strip_prefix(name)) else {
        bail!("{} has no {name}", path.display());
    };
    let number = rest.split_whitespace().next().context("a number")?;
    Ok(number.parse()?)
}
