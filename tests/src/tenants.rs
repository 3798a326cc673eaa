//! Several VMs on one device, without machines: `sluiced` itself, started by the test, and programs of this host that connect
//! to the device of one VM or another.
//!
//! Owns a software GPU of its own in memory and all processes that use it. Requests to `sluiced` go through the management API
//! and the command line tool, as an operator's.

use std::fs;
use std::os::fd::OwnedFd;
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::Value;
use sluice_api::client::Client;
use sluice_api::supervision::wait_ready;
use sluice_api::v1::{ProjectRequest, VmRequest};
use sluice_kit::processes::end_supervised;
use tempfile::TempDir;

use crate::direct::{TIMEOUT, descendants};
use crate::management;
use crate::paths::Binaries;
use crate::process::{Background, Finished, kill, output_of, run, tail};

/// Memory of the default model of the software GPU at scale 1, in MiB.
const MODEL_MIB: u64 = 143_771;

/// Properties of a set of tenants.
#[derive(Debug, Clone)]
pub struct Options {
    /// Size of the device, roughly, in MiB.
    pub device_mib: u64,
    /// The projects by their names.
    pub projects: Vec<(String, ProjectRequest)>,
    /// The VMs by their numbers.
    pub vms: Vec<(u32, VmRequest)>,
    /// Further arguments of `sluiced`.
    pub arguments: Vec<String>,
    /// Further variables of its environment.
    pub environment: Vec<(String, String)>,
    /// A program to start in place of `sluice-worker`.
    pub worker: Option<PathBuf>,
    /// A program to start in place of `sluice-device`.
    pub device: Option<PathBuf>,
}

impl Options {
    /// VMs for programs of this host with these limits in MiB, 0 for the whole device; numbers from 1 on.
    #[must_use]
    pub fn with_limits(device_mib: u64, limits_mib: &[u64]) -> Self {
        let vm = |limit: &u64| VmRequest {
            direct: true,
            memory_bytes: (*limit > 0).then_some(limit << 20),
            ..VmRequest::default()
        };
        Self {
            device_mib,
            projects: Vec::new(),
            vms: (1..).zip(limits_mib.iter().map(vm)).collect(),
            arguments: Vec::new(),
            environment: Vec::new(),
            worker: None,
            device: None,
        }
    }

    /// The same options without one VM.
    #[must_use]
    pub fn without(&self, vm: u32) -> Self {
        let mut options = self.clone();
        options.vms.retain(|(number, _)| *number != vm);
        options
    }
}

/// Memory of a unit by state, in bytes, as its arbiter reports it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Unit {
    /// Bytes in custody.
    pub total: u64,
    /// Bytes on loan.
    pub lent: u64,
    /// Clean bytes.
    pub clean: u64,
    /// Bytes waiting to be scrubbed.
    pub dirty: u64,
    /// Bytes released for the driver, and no longer in custody.
    pub headroom: u64,
    /// Bytes that are never lent again.
    pub suspect: u64,
}

impl Unit {
    /// True if the parts add up to the whole, for a unit that had `nominal` bytes without use.
    #[must_use]
    pub fn is_whole(&self, nominal: u64) -> bool {
        self.lent + self.clean + self.dirty + self.suspect == self.total
            && self.total + self.headroom == nominal
    }
}

/// Memory of a VM on a unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Charge {
    /// Epoch of the VM.
    pub epoch: u64,
    /// Bytes lent.
    pub lent: u64,
    /// Bytes the driver has taken for it.
    pub headroom: u64,
    /// Bytes given back and not clean yet.
    pub dirty: u64,
    /// Number of workers not known to be gone.
    pub holders: u64,
}

/// A running `sluiced` with its VMs. Dropping it ends all processes.
#[derive(Debug)]
pub struct Tenants {
    binaries: Binaries,
    daemon: Background,
    lifeline: Option<UnixStream>,
    folder: TempDir,
    state: TempDir,
    scale: u64,
}

/// The folder that a test and a lying worker share, in that of the software GPU's files: a worker writes nowhere else.
#[must_use]
pub fn liar_folder(state: &Path) -> PathBuf {
    state.join("liar")
}

impl Tenants {
    /// Starts `sluiced` and waits until memory can be lent.
    ///
    /// # Errors
    /// When a program is not built or does not start; the message holds its output.
    pub fn start(binaries: &Binaries, options: &Options) -> Result<Self> {
        let folder = tempfile::Builder::new().prefix("sluice-tenants-").tempdir().context("a folder")?;
        // Device memory belongs in memory, and each set of tenants has a device of its own.
        let state =
            tempfile::Builder::new().prefix("sluice-tenants-").tempdir_in("/dev/shm").context("a device")?;
        let libexec = folder.path().join("libexec");
        fs::create_dir(&libexec)?;
        for program in ["sluiced", "sluice-launcher", "sluice-arbiter", "sluice-inventory"] {
            symlink(binaries.get(program)?, libexec.join(program))?;
        }
        let worker = options.worker.clone().map_or_else(|| binaries.get("sluice-worker"), Ok)?;
        symlink(worker, libexec.join("sluice-worker"))?;
        let device = options.device.clone().map_or_else(|| binaries.get("sluice-device"), Ok)?;
        symlink(device, libexec.join("sluice-device"))?;
        fs::create_dir(liar_folder(state.path()))?;
        let libraries = folder.path().join("lib");
        fs::create_dir(&libraries)?;
        symlink(binaries.get("libsluice_guest.so")?, libraries.join("libcuda.so.1"))?;
        symlink(binaries.get("libsluice_guest_nvml.so")?, libraries.join("libnvidia-ml.so.1"))?;
        let scale = MODEL_MIB / options.device_mib.max(1);
        let (daemon, lifeline) = launch(binaries, options, folder.path(), state.path(), scale)?;
        let mut tenants =
            Self { binaries: binaries.clone(), daemon, lifeline: Some(lifeline), folder, state, scale };
        tenants.wait_ready(options).with_context(|| tail(&tenants.daemon.printed(), 40))?;
        Ok(tenants)
    }

    fn wait_ready(&mut self, options: &Options) -> Result<()> {
        let lifeline = self.lifeline.as_mut().context("just started")?;
        lifeline.set_read_timeout(Some(TIMEOUT))?;
        wait_ready(lifeline).context("sluiced is not ready")?;
        let socket = self.folder.path().join("run/api.sock");
        for (name, wanted) in &options.projects {
            Client::at(&socket)
                .put_project(name, wanted)
                .with_context(|| format!("making project {name}"))?;
        }
        management::make_vms(&socket, &options.vms)?;
        self.wait_for_unit(|unit| unit.is_some_and(|unit| unit.clean > 0)).map(drop)
    }

    /// The folder of sockets, logs and the programs' folder (`libexec`).
    #[must_use]
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// The folder that the test shares with a lying worker.
    #[must_use]
    pub fn liar_folder(&self) -> PathBuf {
        liar_folder(self.state.path())
    }

    /// The folder of the software GPU's files.
    #[must_use]
    pub fn device_files(&self) -> PathBuf {
        self.state.path().to_owned()
    }

    /// The divisor of the software GPU's memory.
    #[must_use]
    pub const fn scale(&self) -> u64 {
        self.scale
    }

    /// Process id of `sluiced`.
    #[must_use]
    pub fn daemon(&self) -> u32 {
        self.daemon.id()
    }

    /// The log of `sluiced` and its processes.
    #[must_use]
    pub fn printed(&self) -> String {
        self.daemon.printed()
    }

    /// The socket of a VM's device.
    #[must_use]
    pub fn socket(&self, vm: u32) -> PathBuf {
        self.folder.path().join(format!("run/vm-{vm}.sock"))
    }

    /// A program in a VM, to be configured further.
    #[must_use]
    pub fn command(&self, vm: u32, program: &Path, arguments: &[&str]) -> Command {
        let mut command = Command::new(program);
        command
            .args(arguments)
            .env("LD_LIBRARY_PATH", self.folder.path().join("lib"))
            .env("SLUICE_TRANSPORT", "direct")
            .env("SLUICE_SOCKET", self.socket(vm));
        command
    }

    /// Runs a program in a VM to its end.
    ///
    /// # Errors
    /// When it does not end in time.
    pub fn run(&self, vm: u32, program: &Path, arguments: &[&str]) -> Result<Finished> {
        run(&mut self.command(vm, program, arguments), TIMEOUT)
    }

    /// Starts a program in a VM.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn spawn(&self, vm: u32, name: &str, program: &Path, arguments: &[&str]) -> Result<Background> {
        let log = self.folder.path().join(format!("{name}.log"));
        Background::start(name, &mut self.command(vm, program, arguments), &log)
    }

    /// Runs a command of the command line tool.
    ///
    /// # Errors
    /// When it fails.
    pub fn operate(&self, verb: &str, arguments: &[&str]) -> Result<String> {
        let mut command = Command::new(self.binaries.get("sluice")?);
        command.arg(verb).arg("--dir").arg(self.folder.path().join("run")).args(arguments);
        output_of(&mut command, TIMEOUT)
    }

    /// The management API's present answer at a path.
    ///
    /// # Errors
    /// When it does not answer, or the object does not exist.
    pub fn look(&self, path: &str) -> Result<Value> {
        let (status, answer) = management::ask(&self.folder.path().join("run/api.sock"), "GET", path, None)?;
        ensure!(status == 200, "{path}: {status} {answer}");
        Ok(answer)
    }

    /// A VM in the management API.
    ///
    /// # Errors
    /// As [`Self::look`].
    pub fn vm(&self, vm: u32) -> Result<Value> {
        self.look(&format!("/v1/vms/{vm}"))
    }

    /// Seconds of the first unit's time that a VM was charged.
    ///
    /// # Errors
    /// As [`Self::look`]; when the VM has no figure.
    pub fn gpu_seconds(&self, vm: u32) -> Result<f64> {
        let vm = self.vm(vm)?;
        vm["units"][0]["gpu_seconds"].as_f64().with_context(|| format!("no GPU time in {vm}"))
    }

    /// The first unit, if its arbiter lends.
    ///
    /// # Errors
    /// When `sluiced` does not answer.
    pub fn unit(&self) -> Result<Option<Unit>> {
        self.unit_of(0)
    }

    /// A unit by its number, if its arbiter lends.
    ///
    /// # Errors
    /// When `sluiced` does not answer.
    pub fn unit_of(&self, number: usize) -> Result<Option<Unit>> {
        let unit = self.look(&format!("/v1/units/{number}"))?;
        let number = |key: &str| unit["memory"][key].as_u64();
        Ok((|| {
            Some(Unit {
                total: number("total_bytes")?,
                lent: number("lent_bytes")?,
                clean: number("clean_bytes")?,
                dirty: number("dirty_bytes")?,
                headroom: number("headroom_bytes")?,
                suspect: number("suspect_bytes")?,
            })
        })())
    }

    /// Process id of a unit's arbiter.
    ///
    /// # Errors
    /// When `sluiced` does not answer, or none runs.
    pub fn arbiter(&self, unit: usize) -> Result<u32> {
        process_in(&self.look(&format!("/v1/units/{unit}"))?["arbiter_process"])
    }

    /// Process id of a VM's device.
    ///
    /// # Errors
    /// When `sluiced` does not answer, or none runs.
    pub fn device(&self, vm: u32) -> Result<u32> {
        process_in(&self.vm(vm)?["device_process"])
    }

    /// The number of unexpected events of a kind, as the management API counts them.
    ///
    /// # Errors
    /// When `sluiced` does not answer.
    pub fn counted(&self, kind: &str, vm: u32) -> Result<u64> {
        let host = self.look("/v1/host")?;
        let events = host["events"].as_array().context("events")?;
        let count = events.iter().find(|event| event["kind"] == kind && event["vm"] == vm);
        Ok(count.and_then(|event| event["count"].as_u64()).unwrap_or(0))
    }

    /// Memory of a VM on the first unit.
    ///
    /// # Errors
    /// When `sluiced` does not answer, or the VM does not exist.
    pub fn charge(&self, vm: u32) -> Result<Charge> {
        self.charge_on(vm, 0)
    }

    /// Memory of a VM on a unit.
    ///
    /// # Errors
    /// When `sluiced` does not answer, or the VM or unit does not exist.
    pub fn charge_on(&self, vm: u32, unit: usize) -> Result<Charge> {
        let vm = self.vm(vm)?;
        let units = vm["units"].as_array().context("units")?;
        let of =
            units.iter().find(|of| of["unit"] == unit).with_context(|| format!("no unit {unit} in {vm}"))?;
        let number = |key: &str| of[key].as_u64().with_context(|| format!("no {key} in {of}"));
        Ok(Charge {
            epoch: vm["fence"]["epoch"].as_u64().context("an epoch")?,
            lent: number("lent_bytes")?,
            headroom: number("headroom_bytes")?,
            dirty: number("dirty_bytes")?,
            holders: number("holders")?,
        })
    }

    /// Waits until the unit is as wanted; returns the unit and the time it took.
    ///
    /// # Errors
    /// When it is not within [`TIMEOUT`].
    pub fn wait_for_unit(&self, wanted: impl Fn(Option<Unit>) -> bool) -> Result<(Option<Unit>, Duration)> {
        let start = Instant::now();
        loop {
            // A missing answer means that sluiced is still starting.
            let unit = self.unit().unwrap_or(None);
            if wanted(unit) {
                return Ok((unit, start.elapsed()));
            }
            if start.elapsed() > TIMEOUT {
                bail!("the unit stays {unit:?}\n{}", tail(&self.printed(), 40));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Waits until no memory is lent or dirty, and the driver has no memory that it does not need.
    ///
    /// # Errors
    /// When that does not happen in time.
    pub fn wait_settled(&self) -> Result<(Unit, Duration)> {
        let (unit, took) =
            self.wait_for_unit(|unit| unit.is_some_and(|unit| unit.lent + unit.dirty + unit.headroom == 0))?;
        Ok((unit.context("a unit")?, took))
    }

    /// Waits until a VM's memory is as wanted; returns the time it took.
    ///
    /// # Errors
    /// When that does not happen in time.
    pub fn wait_for_charge(&self, vm: u32, wanted: impl Fn(Charge) -> bool) -> Result<Duration> {
        let start = Instant::now();
        loop {
            let charge = self.charge(vm);
            if charge.as_ref().is_ok_and(|charge| wanted(*charge)) {
                return Ok(start.elapsed());
            }
            if start.elapsed() > TIMEOUT {
                bail!("VM {vm} stays at {charge:?}\n{}", tail(&self.printed(), 40));
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Fences a VM and waits until it has no memory.
    ///
    /// # Errors
    /// When `sluiced` refuses or does not answer.
    pub fn fence(&self, vm: u32) -> Result<()> {
        self.operate("fence", &[&vm.to_string()]).map(drop)
    }

    /// Readmits a fenced VM.
    ///
    /// # Errors
    /// When `sluiced` refuses or does not answer.
    pub fn readmit(&self, vm: u32) -> Result<()> {
        self.operate("readmit", &[&vm.to_string()]).map(drop)
    }

    /// Live processes of the backend by program name.
    ///
    /// # Errors
    /// When `/proc` cannot be read.
    pub fn processes(&self, name: &str) -> Result<Vec<u32>> {
        descendants(self.daemon.id(), name)
    }

    /// Live workers of a VM, as `sluiced` reports them.
    ///
    /// # Errors
    /// When `sluiced` does not answer.
    pub fn workers(&self, vm: u32) -> Result<Vec<u32>> {
        let vm = self.vm(vm)?;
        let sessions = vm["sessions"].as_array().context("sessions")?;
        Ok(sessions.iter().filter_map(|session| u32::try_from(session["worker"].as_u64()?).ok()).collect())
    }

    /// Kills `sluiced`, then closes the lifeline, and waits until all its processes have ended.
    ///
    /// # Errors
    /// When a process remains.
    pub fn kill_daemon(&mut self) -> Result<()> {
        kill(self.daemon.id());
        self.daemon.wait(TIMEOUT)?.context("sluiced is gone")?;
        self.end_lifeline()
    }

    /// Starts `sluiced` again after its end, on the same device.
    ///
    /// # Errors
    /// When it does not start.
    pub fn start_again(&mut self, options: &Options) -> Result<()> {
        fs::remove_dir_all(self.folder.path().join("run")).ok();
        let (daemon, lifeline) =
            launch(&self.binaries, options, self.folder.path(), self.state.path(), self.scale)?;
        self.daemon = daemon;
        self.lifeline = Some(lifeline);
        self.wait_ready(options).with_context(|| tail(&self.daemon.printed(), 40))
    }

    /// Ends `sluiced` in order and starts it again with other options, on the same device.
    ///
    /// # Errors
    /// When it does not end or start.
    pub fn restart(&mut self, options: &Options) -> Result<()> {
        self.end_lifeline()?;
        self.daemon.wait(TIMEOUT)?.context("sluiced ends when its supervisor goes")?;
        self.start_again(options)
    }

    /// Ends all processes in order and waits until they are gone.
    ///
    /// # Errors
    /// When a process remains.
    pub fn stop(mut self) -> Result<()> {
        self.end_lifeline()?;
        let status = self.daemon.wait(TIMEOUT)?.context("sluiced ends when its supervisor goes")?;
        ensure!(status.success(), "sluiced ended with {status}\n{}", tail(&self.printed(), 40));
        Ok(())
    }

    fn end_lifeline(&mut self) -> Result<()> {
        let Some(lifeline) = self.lifeline.take() else { return Ok(()) };
        end_supervised(lifeline, TIMEOUT).context("the backend does not end")
    }
}

impl Drop for Tenants {
    fn drop(&mut self) {
        if let Err(error) = self.end_lifeline() {
            eprintln!("{error:#}");
        }
    }
}

fn process_in(value: &Value) -> Result<u32> {
    let process = value.as_u64().and_then(|process| u32::try_from(process).ok());
    process.context("the process does not run")
}

fn launch(
    binaries: &Binaries,
    options: &Options,
    folder: &Path,
    state: &Path,
    scale: u64,
) -> Result<(Background, UnixStream)> {
    let (lifeline, theirs) = UnixStream::pair()?;
    let mut command = Command::new(binaries.get("sluiced")?);
    command.arg("--supervised").arg("--runtime-dir").arg(folder.join("run"));
    command.arg("--libexec").arg(folder.join("libexec"));
    command.arg("--driver").arg(binaries.get("libsoftgpu_cuda.so")?);
    command.arg("--nvml").arg(binaries.get("libsoftgpu_nvml.so")?);
    command.args(&options.arguments);
    command.env("SLUICE_SOFTGPU_STATE", state).env("SLUICE_SOFTGPU_SCALE", scale.to_string());
    command.envs(options.environment.iter().map(|(name, value)| (name, value)));
    let daemon = Background::start_service(
        "sluiced",
        &mut command,
        &folder.join("sluiced.log"),
        Stdio::from(OwnedFd::from(theirs)),
    )?;
    Ok((daemon, lifeline))
}
