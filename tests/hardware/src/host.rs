//! Sluice's own processes for a step: `sluiced` with VMs whose programs are processes of this host (the transport DIRECT).
//!
//! All VMs are on the first GPU. Requests go through the management API, as an operator's. The daemon ends in order when the step
//! ends, because it watches the step's end of a socket.

use std::io::ErrorKind;
use std::os::fd::OwnedFd;
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use sluice_api::client::{CallError, Client};
use sluice_api::supervision::wait_ready;
use sluice_api::v1::{FenceRequest, Placement, UnitMemory, Vm, VmRequest};
use sluice_kit::processes::end_supervised;

use crate::bundle::Bundle;
use crate::running::{PATIENCE, Running, part_of_step};
use crate::step::Step;
use crate::stop::{Answer, Stop};
use crate::worker::Peer;

/// Pause between two looks at the API.
const LOOK: Duration = Duration::from_millis(2);

/// The way of a program to the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    /// Directly.
    Native,
    /// Through Sluice.
    Remoted,
}

impl Side {
    /// Both, in the order of measurements.
    pub(crate) const BOTH: [Side; 2] = [Side::Native, Side::Remoted];

    /// Key of its note.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Side::Native => "native",
            Side::Remoted => "remoted",
        }
    }
}

/// Memory of a VM on its unit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Charge {
    /// Bytes lent.
    pub(crate) lent: u64,
    /// Bytes that the driver takes for it.
    pub(crate) driver: u64,
    /// Bytes given back and not clean yet.
    pub(crate) dirty: u64,
    /// Workers that the driver may still know.
    pub(crate) holders: u32,
}

impl Charge {
    /// True if the VM has nothing of the unit.
    pub(crate) fn is_nothing(&self) -> bool {
        self.lent + self.dirty == 0 && self.holders == 0
    }
}

/// A running daemon with its VMs. Dropping it ends its processes.
#[derive(Debug)]
pub(crate) struct Host {
    /// `None` if there are only the folders of libraries.
    daemon: Option<Child>,
    lifeline: Option<UnixStream>,
    folder: PathBuf,
    bundle: Bundle,
    client: Client,
}

/// A VM for programs of this host, with all memory of the unit.
pub(crate) fn vm() -> VmRequest {
    let placement = Placement { gpus: vec![0], ..Placement::default() };
    VmRequest { direct: true, placement: Some(placement), ..VmRequest::default() }
}

/// A VM with a quota in bytes.
pub(crate) fn vm_with(quota: u64) -> VmRequest {
    VmRequest { memory_bytes: Some(quota), ..vm() }
}

impl Host {
    /// Starts the daemon with these VMs, numbered from 1, and waits until the unit lends.
    pub(crate) fn start(step: &Step, vms: &[VmRequest]) -> Answer<Host> {
        Host::start_with(step, vms, &[], "")
    }

    /// As [`Host::start`], with further variables of the daemon's environment, and lines of its configuration.
    pub(crate) fn start_with(
        step: &Step,
        vms: &[VmRequest],
        variables: &[(&str, &str)],
        settings: &str,
    ) -> Answer<Host> {
        /// Two VMs share the GPU also where its kernels reach host memory, or where the driver has no figures per process: both VMs
        /// are ours.
        const SETTINGS: &str =
            "share-with-host-memory-access = true\nshare-unmeasured-between-organisations = true\n";
        let mut host = Host::without_daemon(step)?;
        let configuration = host.folder.join("sluiced.toml");
        std::fs::write(&configuration, format!("{SETTINGS}{settings}"))?;
        let (lifeline, theirs) = UnixStream::pair()?;
        let mut command = Command::new(host.bundle.program("sluiced"));
        command.arg("--supervised").arg("--ephemeral").arg("--config").arg(&configuration);
        command.arg("--runtime-dir").arg(host.folder.join("run")).args(step.libraries().arguments());
        command.arg("--libexec").arg(host.bundle.program(""));
        command.envs(variables.iter().copied());
        let mut command = part_of_step(&command)?;
        let command = command.stdin(Stdio::from(OwnedFd::from(theirs))).stdout(Stdio::null());
        host.daemon = Some(command.spawn()?);
        // The command holds the other end as well, until it has another input.
        command.stdin(Stdio::null());
        host.lifeline = Some(lifeline);
        host.wait_ready()?;
        for (number, request) in (1..).zip(vms) {
            host.put(number, request)?;
        }
        host.wait("the unit lends memory", |host| {
            let unit = host.client.unit(0).map_err(refusal)?;
            if let Some(reason) = unit.reason {
                return Err(Stop::failed(format!("the unit is in quarantine: {reason}")));
            }
            Ok(unit.memory.is_some_and(|memory| memory.clean_bytes > 0))
        })?;
        Ok(host)
    }

    /// The folders of libraries alone, for programs beside Sluice.
    pub(crate) fn without_daemon(step: &Step) -> Answer<Host> {
        let bundle = Bundle::beside_program()?;
        let folder = tempfile::Builder::new().prefix("host-").tempdir_in(step.temporary()?)?.keep();
        for (side, [driver, management]) in [
            (Side::Remoted, [Some(bundle.library()), Some(bundle.management_library())]),
            (Side::Native, [Some(step.libraries().driver.clone()), step.libraries().nvml.clone()]),
        ] {
            let libraries = folder.join(side.name());
            std::fs::create_dir(&libraries)?;
            for (name, library) in [("libcuda", driver), ("libnvidia-ml", management)] {
                for ending in ["so.1", "so"] {
                    library
                        .as_ref()
                        .map(|library| symlink(library, libraries.join(format!("{name}.{ending}"))))
                        .transpose()?;
                }
            }
        }
        let client = Client::at(folder.join("run/api.sock"));
        Ok(Host { daemon: None, lifeline: None, folder, bundle, client })
    }

    fn wait_ready(&mut self) -> Answer {
        let Some(lifeline) = &mut self.lifeline else { return Ok(()) };
        lifeline.set_read_timeout(Some(PATIENCE))?;
        wait_ready(lifeline).map_err(|error| match error.kind() {
            ErrorKind::UnexpectedEof => {
                Stop::failed("sluiced ended before it was ready; its log has the reason")
            }
            ErrorKind::InvalidData => Stop::failed(format!("sluiced is not ready: {error}")),
            _ => error.into(),
        })
    }

    /// The programs and libraries.
    pub(crate) fn bundle(&self) -> &Bundle {
        &self.bundle
    }

    /// The command of a program in a VM, or beside Sluice on the driver itself.
    pub(crate) fn command(&self, vm: Option<u32>, program: &Path) -> Command {
        let mut command = Command::new(program);
        let side = vm.map_or(Side::Native, |_| Side::Remoted);
        let mut search = self.libraries(side).into_os_string();
        if let Some(before) = std::env::var_os("LD_LIBRARY_PATH").filter(|before| !before.is_empty()) {
            search.push(":");
            search.push(before);
        }
        command.env("LD_LIBRARY_PATH", search);
        if let Some(vm) = vm {
            let socket = self.folder.join(format!("run/vm-{vm}.sock"));
            command.env("SLUICE_TRANSPORT", "direct").env("SLUICE_SOCKET", socket);
        }
        command
    }

    /// Starts a CUDA program of the bundle in a VM, or beside Sluice.
    pub(crate) fn spawn(&self, vm: Option<u32>, program: &str, arguments: &[&str]) -> Answer<Running> {
        self.spawn_with(vm, program, arguments, &[])
    }

    /// As [`Host::spawn`], with further variables of the program's environment.
    pub(crate) fn spawn_with(
        &self,
        vm: Option<u32>,
        program: &str,
        arguments: &[&str],
        variables: &[(&str, &str)],
    ) -> Answer<Running> {
        let path = self.bundle.programs.join(program);
        if !path.exists() {
            return Err(Stop::not_asked(format!("the bundle has no program {program}")));
        }
        let place = vm.map_or("native".to_owned(), |vm| format!("VM {vm}"));
        let mut command = self.command(vm, &path);
        command.args(arguments).envs(variables.iter().copied());
        Running::start(&format!("{program} {} ({place})", arguments.join(" ")), &command)
    }

    /// Starts a process that has the driver of its side loaded and serves commands.
    pub(crate) fn peer(&self, vm: Option<u32>) -> Answer<Peer> {
        let mut command = self.command(vm, &std::env::current_exe()?);
        let side = vm.map_or(Side::Native, |_| Side::Remoted);
        command.args(["worker", "--driver"]).arg(self.libraries(side).join("libcuda.so.1"));
        Peer::spawn(&mut command)
    }

    /// Folder of the libraries of a side.
    pub(crate) fn libraries(&self, side: Side) -> PathBuf {
        self.folder.join(side.name())
    }

    /// Creates a VM.
    pub(crate) fn put(&self, vm: u32, request: &VmRequest) -> Answer {
        self.client.put_vm(&vm.to_string(), request).map(drop).map_err(refusal)
    }

    /// Deletes a VM and waits until it does not exist.
    pub(crate) fn delete(&self, vm: u32) -> Answer {
        self.client.delete_vm(&vm.to_string()).map_err(refusal)
    }

    /// Fences a VM; the answer comes when everything is taken from it.
    pub(crate) fn fence(&self, vm: u32) -> Answer<Vm> {
        self.client.fence_vm(&vm.to_string(), &FenceRequest::default()).map_err(refusal)
    }

    /// Readmits a fenced VM.
    pub(crate) fn readmit(&self, vm: u32) -> Answer {
        self.client.readmit_vm(&vm.to_string()).map(drop).map_err(refusal)
    }

    /// A VM.
    pub(crate) fn vm(&self, vm: u32) -> Answer<Vm> {
        self.client.vm(&vm.to_string()).map_err(refusal)
    }

    /// Memory of a VM.
    pub(crate) fn charge(&self, vm: u32) -> Answer<Charge> {
        Ok(self.vm(vm)?.units.first().map_or_else(Charge::default, |unit| Charge {
            lent: unit.lent_bytes,
            driver: unit.headroom_bytes,
            dirty: unit.dirty_bytes,
            holders: unit.holders,
        }))
    }

    /// Seconds of the GPU that a VM was charged.
    pub(crate) fn charged_seconds(&self, vm: u32) -> Answer<f64> {
        Ok(self.vm(vm)?.units.first().map_or(0.0, |unit| unit.gpu_seconds))
    }

    /// The workers of a VM.
    pub(crate) fn workers(&self, vm: u32) -> Answer<Vec<u32>> {
        Ok(self.vm(vm)?.sessions.iter().filter_map(|session| session.worker).collect())
    }

    /// Memory of the unit.
    pub(crate) fn unit(&self) -> Answer<UnitMemory> {
        let memory = self.client.unit(0).map_err(refusal)?.memory;
        memory.ok_or_else(|| Stop::failed("the arbiter does not answer"))
    }

    /// Waits until no memory is lent or dirty. Then the driver gets some time to give back its own memory, part of which it may keep.
    /// Returns the unit.
    pub(crate) fn settled(&self) -> Answer<UnitMemory> {
        const DRIVER: Duration = Duration::from_secs(1);
        self.wait("no memory is lent or dirty", |host| {
            let unit = host.unit()?;
            Ok(unit.lent_bytes + unit.dirty_bytes == 0)
        })?;
        let start = Instant::now();
        loop {
            let unit = self.unit()?;
            if unit.headroom_bytes == 0 || start.elapsed() > DRIVER {
                return Ok(unit);
            }
            std::thread::sleep(LOOK);
        }
    }

    /// Waits for a state; returns the time that it took.
    pub(crate) fn wait(&self, state: &str, mut holds: impl FnMut(&Host) -> Answer<bool>) -> Answer<Duration> {
        let start = Instant::now();
        while !holds(self)? {
            if start.elapsed() > PATIENCE {
                return Err(Stop::failed(format!("not within {PATIENCE:?}: {state}; {}", self.state())));
            }
            std::thread::sleep(LOOK);
        }
        Ok(start.elapsed())
    }

    /// The unit and the first VM, for messages.
    fn state(&self) -> String {
        format!("unit {:?}, VM 1 {:?}", self.unit(), self.charge(1))
    }

    /// Ends the daemon in order and waits until all its processes are gone.
    pub(crate) fn stop(mut self) -> Answer {
        self.close()?;
        let status = self.daemon.take().map(|mut daemon| daemon.wait()).transpose()?;
        match status {
            Some(status) if !status.success() => Err(Stop::failed(format!("sluiced ended with {status}"))),
            _ => Ok(()),
        }
    }

    fn close(&mut self) -> Answer {
        let Some(lifeline) = self.lifeline.take() else { return Ok(()) };
        end_supervised(lifeline, PATIENCE)
            .map_err(|error| Stop::failed(format!("Sluice's processes do not end: {error}")))
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        if let Err(stop) = self.close() {
            eprintln!("{stop}");
        }
        // The runner kills the group in any case.
        if let Some(mut daemon) = self.daemon.take() {
            let _ = daemon.kill();
            let _ = daemon.wait();
        }
    }
}

/// A request that the API refused.
fn refusal(error: CallError) -> Stop {
    Stop::failed(format!("sluiced: {error}"))
}
