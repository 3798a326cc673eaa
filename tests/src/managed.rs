//! A host as with the service: `sluiced` without configured VMs, managed by its API, on software H100s.
//!
//! With a service manager that keeps its sockets ([`ServiceManager`]), a new daemon continues after a kill.

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use sluice_kit::processes::make_program;
use sluice_kit::service_manager::ServiceManager;
use tempfile::TempDir;

use crate::direct::TIMEOUT;
use crate::holder::Holder;
use crate::management;
use crate::paths::{Binaries, HOST_PROGRAMS};
use crate::process::{Background, Finished, kill, run};

/// Properties of a host.
#[derive(Debug)]
pub struct Options<'a> {
    /// Number of GPUs.
    pub gpus: u32,
    /// True if the GPUs are in MIG mode from the start.
    pub mig: bool,
    /// Text of the configuration file.
    pub file: &'a str,
    /// True if a service manager keeps the daemon's sockets.
    pub kept: bool,
    /// More environment variables of the daemon.
    pub environment: &'a [(&'static str, &'a str)],
}

impl Default for Options<'_> {
    fn default() -> Self {
        Self { gpus: 1, mig: true, file: "", kept: false, environment: &[] }
    }
}

/// The configuration of the software GPU, in the folder of the device.
const DRIVER_FILE: &str = "driver.toml";

/// A running host.
#[derive(Debug)]
pub struct Host {
    daemon: Option<Background>,
    program: PathBuf,
    manager: Option<ServiceManager>,
    variables: Vec<(&'static str, String)>,
    binaries: Binaries,
    folder: TempDir,
    device: TempDir,
}

impl Host {
    /// Starts a host and waits until it is ready.
    ///
    /// # Errors
    /// When a program is missing or the daemon does not become ready.
    pub fn start(options: &Options<'_>) -> Result<Self> {
        let binaries = Binaries::locate()?;
        let folder = tempfile::tempdir().context("a folder for sockets")?;
        let device = tempfile::tempdir_in("/dev/shm").context("a folder for a device")?;
        let libraries = folder.path().join("lib");
        std::fs::create_dir(&libraries)?;
        symlink(binaries.get("libsluice_guest.so")?, libraries.join("libcuda.so.1"))?;
        for needed in HOST_PROGRAMS {
            binaries.get(needed)?;
        }
        std::fs::write(folder.path().join("sluice.toml"), options.file)?;
        std::fs::write(device.path().join(DRIVER_FILE), "")?;
        let manager = options.kept.then(|| ServiceManager::new(&folder.path().join("notify.sock")));
        let mut variables = vec![
            ("SLUICE_SOFTGPU_STATE", device.path().display().to_string()),
            ("SLUICE_SOFTGPU_CONFIG", device.path().join(DRIVER_FILE).display().to_string()),
            ("SLUICE_SOFTGPU_SCALE", "128".to_owned()),
            ("SLUICE_SOFTGPU_DEVICES", options.gpus.to_string()),
            ("SLUICE_SOFTGPU_MODEL", "H100-80".to_owned()),
            ("SLUICE_SOFTGPU_MIG", u8::from(options.mig).to_string()),
        ];
        variables.extend(options.environment.iter().map(|(name, value)| (*name, (*value).to_owned())));
        let program = binaries.get("sluiced")?;
        let mut host = Self { daemon: None, program, manager, variables, binaries, folder, device };
        host.launch()?;
        Ok(host)
    }

    fn launch(&mut self) -> Result<()> {
        let mut command = match &self.manager {
            Some(manager) => manager.command(&self.program),
            None => Command::new(&self.program),
        };
        let folder = self.folder.path();
        command.arg("--config").arg(folder.join("sluice.toml"));
        command.arg("--runtime-dir").arg(folder.join("run")).arg("--libexec").arg(self.binaries.folder());
        command.arg("--driver").arg(self.binaries.get("libsoftgpu_cuda.so")?);
        command.arg("--nvml").arg(self.binaries.get("libsoftgpu_nvml.so")?).args(["--vm-numbers", "1:100"]);
        command.envs(self.variables.iter().map(|(name, value)| (name, value))).env("SLUICE_LOG", "info");
        self.daemon = Some(Background::start("sluiced", &mut command, &folder.join("log"))?);
        self.wait_for("it is ready", |host| Ok(host.api("GET", "/readyz", None)?.0 == 200))
    }

    /// Kills the daemon, as in a crash, and starts the next.
    ///
    /// # Errors
    /// When the next does not become ready.
    pub fn restart(&mut self) -> Result<()> {
        // The kill completes before the next daemon starts.
        if let Some(daemon) = self.daemon.take() {
            kill(daemon.id());
        }
        self.launch()
    }

    /// Makes the daemon hand over to another binary: a copy of itself.
    ///
    /// # Errors
    /// When it does not end, or the next does not become ready.
    pub fn upgrade_to_copy(&mut self) -> Result<()> {
        let copy = self.folder.path().join("sluiced");
        make_program(&self.program, &copy);
        self.end_with(Signal::USR1)?;
        self.program = copy;
        self.launch()
    }

    /// Ends the daemon and all its children in order.
    ///
    /// # Errors
    /// When it does not end.
    pub fn stop(mut self) -> Result<()> {
        self.end_with(Signal::TERM)
    }

    fn end_with(&mut self, signal: Signal) -> Result<()> {
        let Some(mut daemon) = self.daemon.take() else { return Ok(()) };
        let process = Pid::from_raw(daemon.id().cast_signed()).context("a process")?;
        kill_process(process, signal).context("a signal")?;
        ensure!(daemon.wait(TIMEOUT)?.is_some(), "sluiced does not end\n{}", daemon.printed());
        Ok(())
    }

    /// Sets the configuration of the software GPU for processes that start from now on.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn configure_driver(&self, text: &str) -> Result<()> {
        std::fs::write(self.device.path().join(DRIVER_FILE), text).context("the configuration of the driver")
    }

    /// The output of the daemon.
    #[must_use]
    pub fn printed(&self) -> String {
        self.daemon.as_ref().map(Background::printed).unwrap_or_default()
    }

    /// The entries of the audit log.
    ///
    /// # Errors
    /// When it cannot be read.
    pub fn audit(&self) -> Result<Vec<Value>> {
        let text = std::fs::read_to_string(self.folder.path().join("run/audit.log"))?;
        text.lines().map(|line| serde_json::from_str(line).with_context(|| line.to_owned())).collect()
    }

    /// Waits until `wanted` returns true; an error counts as false.
    ///
    /// # Errors
    /// When it does not return true in time.
    pub fn wait_for(&self, what: &str, wanted: impl Fn(&Self) -> Result<bool>) -> Result<()> {
        let start = Instant::now();
        while !wanted(self).unwrap_or(false) {
            ensure!(start.elapsed() < TIMEOUT, "not in time: {what}\n{}", self.printed());
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }

    /// Sends a request to the management API: the status and the body of its answer.
    ///
    /// # Errors
    /// When there is no answer.
    pub fn api(&self, method: &str, path: &str, body: Option<&Value>) -> Result<(u16, Value)> {
        management::ask(&self.folder.path().join("run/api.sock"), method, path, body)
    }

    /// Makes a VM with a placement.
    ///
    /// # Errors
    /// When it is not made.
    pub fn put(&self, vm: &str, placement: &Value) -> Result<Value> {
        self.put_with(vm, json!({ "placement": placement }))
    }

    /// Makes a VM.
    ///
    /// # Errors
    /// When it is not made.
    pub fn put_with(&self, vm: &str, mut wanted: Value) -> Result<Value> {
        wanted["direct"] = true.into();
        let (status, vm) = self.api("PUT", &format!("/v1/vms/{vm}"), Some(&wanted))?;
        ensure!(status == 201, "{vm}\n{}", self.printed());
        Ok(vm)
    }

    /// Sends a request that must succeed.
    ///
    /// # Errors
    /// When it does not succeed.
    pub fn done(&self, method: &str, path: &str, body: Option<&Value>) -> Result<Value> {
        let (status, answer) = self.api(method, path, body)?;
        ensure!((200..300).contains(&status), "{method} {path}: {status} {answer}\n{}", self.printed());
        Ok(answer)
    }

    /// Sends a request that must be refused.
    ///
    /// # Errors
    /// When it is not refused with that code.
    pub fn refused(&self, method: &str, path: &str, body: Option<&Value>, code: &str) -> Result<Value> {
        let (_, answer) = self.api(method, path, body)?;
        ensure!(answer["code"] == code, "{method} {path}: {answer}\n{}", self.printed());
        Ok(answer)
    }

    /// Drains a GPU, and waits until it is empty.
    ///
    /// # Errors
    /// When it does not become empty in time.
    pub fn empty(&self, gpu: u32) -> Result<()> {
        self.done("POST", &format!("/v1/gpus/{gpu}/drain"), None)?;
        self.wait_for("it is empty", |host| {
            let units = host.units()?;
            Ok(units.iter().all(|unit| unit["gpu"] != gpu || (unit["kind"] != "mig" && unit["vms"] == 0)))
        })
    }

    /// Switches the MIG mode of a GPU.
    ///
    /// # Errors
    /// When the request fails.
    pub fn switch(&self, gpu: u32, on: bool) -> Result<Value> {
        self.done("PUT", &format!("/v1/gpus/{gpu}/mig"), Some(&json!({ "enabled": on })))
    }

    /// The number of instances of each kind that could still be made.
    ///
    /// # Errors
    /// When there is no answer.
    pub fn capacity(&self) -> Result<Value> {
        let (_, capacity) = self.api("GET", "/v1/capacity", None)?;
        Ok(capacity["instances"].clone())
    }

    /// The number of instances of one slice that could still be made.
    ///
    /// # Errors
    /// When there is no answer.
    pub fn slices(&self) -> Result<u64> {
        let capacity = self.capacity()?;
        let one = capacity.as_array().and_then(|all| all.iter().find(|one| one["name"] == "1g.10gb"));
        one.and_then(|one| one["count"].as_u64()).with_context(|| capacity.to_string())
    }

    /// Makes calls of a device's management library fail or hang; an empty text ends that.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn fault(&self, gpu: u32, lines: &str) -> Result<()> {
        std::fs::write(self.device.path().join(format!("gpu{gpu}/faults")), lines).context("faults")
    }

    /// The units in the API.
    ///
    /// # Errors
    /// When there is no answer.
    pub fn units(&self) -> Result<Vec<Value>> {
        let (_, units) = self.api("GET", "/v1/units", None)?;
        Ok(units["units"].as_array().context("units")?.clone())
    }

    /// The process of a unit's arbiter.
    ///
    /// # Errors
    /// When there is none.
    pub fn arbiter(&self, unit: usize) -> Result<u32> {
        let units = self.units()?;
        let process = units.get(unit).and_then(|unit| unit["arbiter_process"].as_u64());
        Ok(u32::try_from(process.context("an arbiter")?)?)
    }

    /// A command that runs a program in a VM, as the API shows it.
    fn command(&self, program: &Path, vm: &Value) -> Result<Command> {
        let mut command = Command::new(program);
        command.env("LD_LIBRARY_PATH", self.folder.path().join("lib")).env("SLUICE_TRANSPORT", "direct");
        command.env("SLUICE_SOCKET", vm["connect"]["socket"].as_str().context("a socket")?);
        Ok(command)
    }

    /// Runs a program in a VM to its end.
    ///
    /// # Errors
    /// When it cannot be started, or does not end in time.
    pub fn run(&self, program: &Path, vm: &Value) -> Result<Finished> {
        run(&mut self.command(program, vm)?, TIMEOUT)
    }

    /// As [`Self::run`], with the devices of `CUDA_VISIBLE_DEVICES` only.
    ///
    /// # Errors
    /// As [`Self::run`].
    pub fn run_on(&self, program: &Path, vm: &Value, visible: &str) -> Result<Finished> {
        run(self.command(program, vm)?.env("CUDA_VISIBLE_DEVICES", visible), TIMEOUT)
    }

    /// Starts a program in a VM that allocates all memory it can get.
    ///
    /// # Errors
    /// When it cannot be started, or does not print its figures.
    pub fn holder(&self, program: &Path, vm: &Value, pattern: u32) -> Result<InstanceHolder> {
        let mut command = self.command(program, vm)?;
        command.arg(pattern.to_string());
        let mut holder = Holder::start(&mut command)?;
        let seen = holder.line()?;
        let numbers: Vec<u64> =
            seen.split(' ').map(str::parse).collect::<Result<_, _>>().with_context(|| seen.clone())?;
        let [1, total, multiprocessors] = numbers[..] else { anyhow::bail!("{seen}") };
        let held = holder.line()?;
        let held = held.strip_prefix("holding ").with_context(|| held.clone())?.parse()?;
        Ok(InstanceHolder { holder, total, multiprocessors, held })
    }
}

/// A program in a VM that has allocated all memory it could get.
#[derive(Debug)]
pub struct InstanceHolder {
    holder: Holder,
    /// Total bytes of memory that it sees.
    pub total: u64,
    /// Number of multiprocessors that it sees.
    pub multiprocessors: u64,
    /// Bytes that it has allocated.
    pub held: u64,
}

impl InstanceHolder {
    /// Makes it check its memory.
    ///
    /// # Errors
    /// When the contents are wrong.
    pub fn look(&mut self) -> Result<()> {
        self.holder.look()
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        if let Err(error) = self.end_with(Signal::TERM) {
            eprintln!("{error:#}");
        }
    }
}
