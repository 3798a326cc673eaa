//! Several VMs on one device, without machines: `sluiced` itself, started by the test, and programs of this host that speak
//! to the device of one VM or another.
//!
//! Owns a software GPU of its own in memory and everything that was started for it. What is asked of `sluiced` goes through
//! the management API and the command line tool, as an operator would.

use std::fs;
use std::io::Read as _;
use std::os::fd::OwnedFd;
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::Value;
use tempfile::TempDir;

use crate::direct::{PATIENCE, descendants};
use crate::management;
use crate::paths::Binaries;
use crate::process::{Background, Finished, kill, output_of, run, tail};

/// Bytes of an H200 by scale 1, in MiB: what the software GPU divides.
const MODEL_MIB: u64 = 143_771;

/// What a set of tenants is made of.
#[derive(Debug, Clone)]
pub struct Options {
    /// Bytes of the device, roughly, in MiB.
    pub device_mib: u64,
    /// The VMs as `sluiced --vm` takes them, `direct` added; numbers from 1 on.
    pub vms: Vec<String>,
    /// Further arguments of `sluiced`.
    pub arguments: Vec<String>,
    /// Further variables of its environment.
    pub environment: Vec<(String, String)>,
    /// A program that is started in place of `sluice-worker`.
    pub worker: Option<PathBuf>,
}

impl Options {
    /// VMs with these limits in MiB, 0 for the whole device.
    #[must_use]
    pub fn with_limits(device_mib: u64, limits_mib: &[u64]) -> Self {
        let vm = |(index, limit): (usize, &u64)| match limit {
            0 => format!("{},direct", index + 1),
            limit => format!("{},direct,memory={limit}MiB", index + 1),
        };
        Self {
            device_mib,
            vms: limits_mib.iter().enumerate().map(vm).collect(),
            arguments: Vec::new(),
            environment: Vec::new(),
            worker: None,
        }
    }

    /// The same without a VM.
    #[must_use]
    pub fn without(&self, vm: u32) -> Self {
        let mut options = self.clone();
        options.vms.retain(|text| text.split(',').next() != Some(&vm.to_string()));
        options
    }
}

/// Bytes of a unit by what they are, as its arbiter says.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Unit {
    /// In custody.
    pub total: u64,
    /// Lent.
    pub lent: u64,
    /// Clean.
    pub clean: u64,
    /// Waiting to be scrubbed.
    pub dirty: u64,
    /// Released for the driver, and no longer in custody.
    pub headroom: u64,
    /// Never lent again.
    pub suspect: u64,
}

impl Unit {
    /// Whether the parts are the whole, of a unit that had `nominal` bytes when nobody used it.
    #[must_use]
    pub fn is_whole(&self, nominal: u64) -> bool {
        self.lent + self.clean + self.dirty + self.suspect == self.total
            && self.total + self.headroom == nominal
    }
}

/// What a VM has of a unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Charge {
    /// Its epoch.
    pub epoch: u64,
    /// Bytes lent.
    pub lent: u64,
    /// Bytes the driver has taken for it.
    pub headroom: u64,
    /// Bytes given back and not clean yet.
    pub dirty: u64,
    /// Workers not known to be gone.
    pub holders: u64,
}

/// A running `sluiced` with its VMs. Dropping it ends everything.
#[derive(Debug)]
pub struct Tenants {
    binaries: Binaries,
    daemon: Background,
    lifeline: Option<UnixStream>,
    folder: TempDir,
    state: TempDir,
    scale: u64,
}

impl Tenants {
    /// Starts `sluiced` and waits until memory can be lent.
    ///
    /// # Errors
    /// When something is not built or does not start; the message holds what it said.
    pub fn start(binaries: &Binaries, options: &Options) -> Result<Self> {
        let folder = tempfile::Builder::new().prefix("sluice-tenants-").tempdir().context("a folder")?;
        // Device memory belongs in memory, and each set of tenants has a device of its own.
        let state =
            tempfile::Builder::new().prefix("sluice-tenants-").tempdir_in("/dev/shm").context("a device")?;
        let libexec = folder.path().join("libexec");
        fs::create_dir(&libexec)?;
        for program in ["sluiced", "sluice-launcher", "sluice-device", "sluice-arbiter", "sluice-inventory"] {
            symlink(binaries.get(program)?, libexec.join(program))?;
        }
        let worker = options.worker.clone().map_or_else(|| binaries.get("sluice-worker"), Ok)?;
        symlink(worker, libexec.join("sluice-worker"))?;
        symlink(binaries.get("sluice-worker")?, libexec.join("sluice-worker.real"))?;
        let libraries = folder.path().join("lib");
        fs::create_dir(&libraries)?;
        symlink(binaries.get("libsluice_guest.so")?, libraries.join("libcuda.so.1"))?;
        symlink(binaries.get("libsluice_guest_nvml.so")?, libraries.join("libnvidia-ml.so.1"))?;
        let scale = MODEL_MIB / options.device_mib.max(1);
        let (daemon, lifeline) = launch(binaries, options, folder.path(), state.path(), scale)?;
        let mut tenants =
            Self { binaries: binaries.clone(), daemon, lifeline: Some(lifeline), folder, state, scale };
        tenants.wait_ready().with_context(|| tail(&tenants.daemon.printed(), 40))?;
        Ok(tenants)
    }

    fn wait_ready(&mut self) -> Result<()> {
        let lifeline = self.lifeline.as_mut().context("just started")?;
        lifeline.set_read_timeout(Some(PATIENCE))?;
        let mut line = [0; 64];
        let length = lifeline.read(&mut line).context("sluiced is not ready in time")?;
        ensure!(&line[..length] == b"ready\n", "sluiced has ended before it was ready");
        self.wait_for_unit(|unit| unit.is_some_and(|unit| unit.clean > 0)).map(drop)
    }

    /// The folder of sockets, logs and what lies beside the programs (`libexec`).
    #[must_use]
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// The folder of the software GPU's files.
    #[must_use]
    pub fn device_files(&self) -> PathBuf {
        self.state.path().to_owned()
    }

    /// What the software GPU's memory was divided by.
    #[must_use]
    pub const fn scale(&self) -> u64 {
        self.scale
    }

    /// Process id of `sluiced`.
    #[must_use]
    pub fn daemon(&self) -> u32 {
        self.daemon.id()
    }

    /// What `sluiced` and its processes have said.
    #[must_use]
    pub fn printed(&self) -> String {
        self.daemon.printed()
    }

    /// A program in a VM, to be configured further.
    #[must_use]
    pub fn command(&self, vm: u32, program: &Path, arguments: &[&str]) -> Command {
        let mut command = Command::new(program);
        command
            .args(arguments)
            .env("LD_LIBRARY_PATH", self.folder.path().join("lib"))
            .env("SLUICE_TRANSPORT", "direct")
            .env("SLUICE_SOCKET", self.folder.path().join(format!("run/vm-{vm}.sock")));
        command
    }

    /// Runs a program in a VM to its end.
    ///
    /// # Errors
    /// When it does not end in time.
    pub fn run(&self, vm: u32, program: &Path, arguments: &[&str]) -> Result<Finished> {
        run(&mut self.command(vm, program, arguments), PATIENCE)
    }

    /// Starts a program in a VM.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn spawn(&self, vm: u32, name: &str, program: &Path, arguments: &[&str]) -> Result<Background> {
        let log = self.folder.path().join(format!("{name}.log"));
        Background::start(name, &mut self.command(vm, program, arguments), &log)
    }

    /// Asks `sluiced` something by the command line tool.
    ///
    /// # Errors
    /// When it says no.
    pub fn operate(&self, verb: &str, arguments: &[&str]) -> Result<String> {
        let mut command = Command::new(self.binaries.get("sluice")?);
        command.arg(verb).arg("--dir").arg(self.folder.path().join("run")).args(arguments);
        output_of(&mut command, PATIENCE)
    }

    /// What the management API shows at a path, as of now.
    ///
    /// # Errors
    /// When it does not answer, or there is no such thing.
    pub fn look(&self, path: &str) -> Result<Value> {
        let (status, answer) = management::ask(&self.folder.path().join("run/api.sock"), "GET", path, None)?;
        ensure!(status == 200, "{path}: {status} {answer}");
        Ok(answer)
    }

    /// A VM as the management API shows it.
    ///
    /// # Errors
    /// As there.
    pub fn vm(&self, vm: u32) -> Result<Value> {
        self.look(&format!("/v1/vms/{vm}"))
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

    /// How often what should not happen has happened, as the management API counts it.
    ///
    /// # Errors
    /// When `sluiced` does not answer.
    pub fn counted(&self, kind: &str, vm: u32) -> Result<u64> {
        let host = self.look("/v1/host")?;
        let events = host["events"].as_array().context("events")?;
        let count = events.iter().find(|event| event["kind"] == kind && event["vm"] == vm);
        Ok(count.and_then(|event| event["count"].as_u64()).unwrap_or(0))
    }

    /// What a VM has of the first unit.
    ///
    /// # Errors
    /// When `sluiced` does not answer, or knows no such VM.
    pub fn charge(&self, vm: u32) -> Result<Charge> {
        self.charge_on(vm, 0)
    }

    /// What a VM has of a unit.
    ///
    /// # Errors
    /// When `sluiced` does not answer, or knows no such VM or unit.
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

    /// Waits until the unit is as wanted; says how long it took.
    ///
    /// # Errors
    /// When it is not within [`PATIENCE`].
    pub fn wait_for_unit(&self, wanted: impl Fn(Option<Unit>) -> bool) -> Result<(Option<Unit>, Duration)> {
        let start = Instant::now();
        loop {
            // Without an answer, sluiced is starting.
            let unit = self.unit().unwrap_or(None);
            if wanted(unit) {
                return Ok((unit, start.elapsed()));
            }
            if start.elapsed() > PATIENCE {
                bail!("the unit stays {unit:?}\n{}", tail(&self.printed(), 40));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Waits until nothing is lent, nothing is dirty, and the driver has nothing that it does not need.
    ///
    /// # Errors
    /// When that does not come.
    pub fn wait_settled(&self) -> Result<(Unit, Duration)> {
        let (unit, took) =
            self.wait_for_unit(|unit| unit.is_some_and(|unit| unit.lent + unit.dirty + unit.headroom == 0))?;
        Ok((unit.context("a unit")?, took))
    }

    /// Waits until what a VM has is as wanted; says how long it took.
    ///
    /// # Errors
    /// When that does not come.
    pub fn wait_for_charge(&self, vm: u32, wanted: impl Fn(Charge) -> bool) -> Result<Duration> {
        let start = Instant::now();
        loop {
            let charge = self.charge(vm);
            if charge.as_ref().is_ok_and(|charge| wanted(*charge)) {
                return Ok(start.elapsed());
            }
            if start.elapsed() > PATIENCE {
                bail!("VM {vm} stays at {charge:?}\n{}", tail(&self.printed(), 40));
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Fences a VM and waits until it has nothing any more.
    ///
    /// # Errors
    /// When `sluiced` does not.
    pub fn fence(&self, vm: u32) -> Result<()> {
        self.operate("fence", &[&vm.to_string()]).map(drop)
    }

    /// Admits a fenced VM again.
    ///
    /// # Errors
    /// When `sluiced` does not.
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

    /// Live workers of a VM, as `sluiced` knows them.
    ///
    /// # Errors
    /// When it does not answer.
    pub fn workers(&self, vm: u32) -> Result<Vec<u32>> {
        let vm = self.vm(vm)?;
        let sessions = vm["sessions"].as_array().context("sessions")?;
        Ok(sessions.iter().filter_map(|session| u32::try_from(session["worker"].as_u64()?).ok()).collect())
    }

    /// Kills `sluiced`, then lets go of what is left, and waits until all of it is gone.
    ///
    /// # Errors
    /// When something stays behind.
    pub fn kill_daemon(&mut self) -> Result<()> {
        kill(self.daemon.id());
        self.daemon.wait(PATIENCE)?.context("sluiced is gone")?;
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
        self.wait_ready().with_context(|| tail(&self.daemon.printed(), 40))
    }

    /// Ends `sluiced` in order and starts it again with other options, on the same device.
    ///
    /// # Errors
    /// When it does not end or start.
    pub fn restart(&mut self, options: &Options) -> Result<()> {
        self.end_lifeline()?;
        self.daemon.wait(PATIENCE)?.context("sluiced ends when its supervisor goes")?;
        self.start_again(options)
    }

    /// Ends everything in order and waits until it is gone.
    ///
    /// # Errors
    /// When something stays behind.
    pub fn stop(mut self) -> Result<()> {
        self.end_lifeline()?;
        let status = self.daemon.wait(PATIENCE)?.context("sluiced ends when its supervisor goes")?;
        ensure!(status.success(), "sluiced ended with {status}\n{}", tail(&self.printed(), 40));
        Ok(())
    }

    /// The end of file on our side means that nobody holds the other end any more.
    fn end_lifeline(&mut self) -> Result<()> {
        let Some(mut lifeline) = self.lifeline.take() else { return Ok(()) };
        lifeline.shutdown(std::net::Shutdown::Write)?;
        lifeline.set_read_timeout(Some(PATIENCE))?;
        let mut rest = [0; 64];
        loop {
            match lifeline.read(&mut rest) {
                Ok(0) => return Ok(()),
                Ok(_) => {}
                Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => return Ok(()),
                Err(error) => return Err(error).context("the backend does not end"),
            }
        }
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
    process.context("no process runs there")
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
    for vm in &options.vms {
        command.arg("--vm").arg(vm);
    }
    command.args(&options.arguments);
    command.env("SLUICE_SOFTGPU_STATE", state).env("SLUICE_SOFTGPU_SCALE", scale.to_string());
    command.envs(options.environment.iter().map(|(name, value)| (name, value)));
    let daemon = Background::start_with(
        "sluiced",
        &mut command,
        &folder.join("sluiced.log"),
        Stdio::from(OwnedFd::from(theirs)),
    )?;
    Ok((daemon, lifeline))
}
