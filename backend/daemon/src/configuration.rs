//! Configuration of `sluiced`: flags, or a TOML file whose values flags override. In one file: the table of all settings.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail, ensure};
use serde::Deserialize;
use sluice_api::{ByteSize, v1::Rebalance};
use sluice_messages::{
    control::Verify,
    launch::{NumberRange, SocketMode, VmLimits, device_socket, stream_socket},
};
use sluice_protocol::limits;

/// Session starts per second and VM in the long run, unless configured: each starts a process and its driver, for up to a
/// second of processor time.
const STARTS_PER_SECOND: u32 = 20;
/// Session starts of a VM that need not wait, unless configured: the processes of a parallel program start at once.
const STARTS_AT_ONCE: u32 = 64;
/// Bytes of a unit left to its driver beside what contexts take, unless configured.
const RESERVE: ByteSize = ByteSize(32 << 20);
/// Numbers for VMs, unless configured.
const VM_NUMBERS: NumberRange = NumberRange { first: 1, count: 4096 };
/// Default size of a log in bytes, and its minimum: one change is a line of up to some hundred KiB.
const LOG: ByteSize = ByteSize(64 << 20);
const SMALLEST_LOG: ByteSize = ByteSize(4 << 20);
/// All VMs of a unit together have its memory and no more, in thousandths.
const NO_OVERCOMMITMENT: u32 = 1000;
/// Switches scrubbing off. It is an environment variable with a name that is not set by accident, and no setting, so that no
/// configuration can carry it to a host with tenants.
const UNSAFE_NO_SCRUB: &str = "SLUICE_UNSAFE_NO_SCRUB";

/// Command line of `sluiced`.
#[derive(Debug, Default, clap::Parser)]
#[command(
    name = "sluiced",
    version,
    about = "The host daemon of Sluice: starts a virtio-gpu device for each VM, and a worker for each guest process."
)]
pub struct Arguments {
    /// Configuration file in TOML; flags override it
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Directory for sockets: vm-ID.sock for each VM, and those of the management API
    #[arg(long, value_name = "DIR")]
    pub runtime_dir: Option<PathBuf>,
    /// Directory of sluice-launcher, sluice-device, sluice-worker, sluice-arbiter and sluice-inventory [default: beside this program]
    #[arg(long, value_name = "DIR")]
    pub libexec: Option<PathBuf>,
    /// Absolute path of the CUDA driver library that workers load
    #[arg(long, value_name = "PATH")]
    pub driver: Option<PathBuf>,
    /// Runs of guest pages that each worker maps one by one; the rest is copied. 0 copies all
    #[arg(long, value_name = "N")]
    pub mapped_runs: Option<u32>,
    /// Operations that the driver takes for one stream before it makes its caller wait
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(2..))]
    pub driver_queue: Option<u64>,
    /// Absolute path of the driver's management library (NVML), which the inventory reads
    #[arg(long, value_name = "PATH")]
    pub nvml: Option<PathBuf>,
    /// Number of devices whose memory is lent to VMs, if NVML does not report it; 0 for VMs without devices
    #[arg(long, value_name = "N")]
    pub units: Option<u32>,
    /// Device memory of each VM that does not specify it, for instance 16GiB; 0 for all of the device
    #[arg(long, value_name = "SIZE")]
    pub memory: Option<ByteSize>,
    /// Numbers for VMs, for instance `1000:4096` [default: 1:4096]
    #[arg(long, value_name = "FIRST:COUNT")]
    pub vm_numbers: Option<NumberRange>,
    /// Socket of the management API [default: api.sock in the runtime directory]
    #[arg(long, value_name = "PATH")]
    pub api: Option<PathBuf>,
    /// Read-only socket of the management API [default: api-read.sock in the runtime directory]
    #[arg(long, value_name = "PATH")]
    pub api_read: Option<PathBuf>,
    /// Group that may connect to the sockets of VMs, if VMMs run as other users
    #[arg(long, value_name = "GID")]
    pub vm_socket_gid: Option<u32>,
    /// Mode of the sockets of VMs, in the form of chmod [default: 0660 with a group, else 0600]
    #[arg(long, value_name = "MODE")]
    pub vm_socket_mode: Option<SocketMode>,
    /// Directory for data that must outlive sluiced, fences above all [default: the runtime directory]
    #[arg(long, value_name = "DIR")]
    pub state_dir: Option<PathBuf>,
    /// Directory for the audit log, the events and the receipts of scrubs [default: the state directory]
    #[arg(long, value_name = "DIR")]
    pub log_directory: Option<PathBuf>,
    /// Accept memory of VMs that their VMM can shrink, and with that end their device, if the VMM cannot seal it, as
    /// Cloud Hypervisor cannot
    #[arg(long)]
    pub trust_vmm_memory: bool,
    /// Clear memory inside a worker each time its guest frees it, too
    #[arg(long)]
    pub scrub_every_free: bool,
    /// Read back every scrubbed byte, instead of samples
    #[arg(long)]
    pub verify_all: bool,
    /// Limit of session starts per second and VM in the long run; further starts wait [default: 20]
    #[arg(long, value_name = "N")]
    pub starts_per_second: Option<u32>,
    /// Session starts of a VM that need not wait, if it has not started any for a while [default: 64]
    #[arg(long, value_name = "N")]
    pub starts_at_once: Option<u32>,
    /// Keep a worker ready for the next session of each VM
    #[arg(long)]
    pub warm_workers: bool,
    /// Range of user ids: run each worker as a user of its own; needs root, and a cgroup directory
    #[arg(long, value_name = "FIRST:COUNT")]
    pub worker_uids: Option<NumberRange>,
    /// Delegated cgroup v2 directory, in which each VM and each worker gets a group of its own
    #[arg(long, value_name = "DIR")]
    pub cgroup: Option<PathBuf>,
    /// Socket of a launcher that is a service of its own, so that this program needs no privilege. Without it, sluiced starts a launcher
    #[arg(long, value_name = "PATH")]
    pub launcher: Option<PathBuf>,
    /// Become the launcher, for its own service: standard input is the socket of --launcher
    #[arg(long, conflicts_with_all = ["launcher", "check_reload", "supervised"])]
    pub run_launcher: bool,
    /// Check if a sluiced with this configuration can take over the running VMs and processes, and exit
    #[arg(long)]
    pub check_reload: bool,
    /// Print a description of this program, for documentation and packages, and exit
    #[arg(long, value_name = "FORM", hide = true)]
    pub describe: Option<Description>,
    /// Treat standard input as a socket to a supervisor: write `ready` to it, and stop everything when it closes
    #[arg(long)]
    pub supervised: bool,
    /// Remove the runtime directory with all it contains at the end
    #[arg(long, requires = "supervised")]
    pub ephemeral: bool,
    /// Directory to remove at the end as well; repeatable
    #[arg(long, value_name = "DIR", requires = "supervised")]
    pub scratch: Vec<PathBuf>,
}

/// A description that `sluiced` prints.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Description {
    /// The manual page.
    Manual,
    /// The management API, as OpenAPI.
    Openapi,
}

/// The configuration file.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
struct File {
    runtime_dir: Option<PathBuf>,
    libexec: Option<PathBuf>,
    driver: Option<PathBuf>,
    mapped_runs: Option<u32>,
    driver_queue: Option<u64>,
    nvml: Option<PathBuf>,
    units: Option<u32>,
    memory: Option<ByteSize>,
    reserve: Option<ByteSize>,
    overcommit_permille: Option<u32>,
    share_unmeasured_between_organisations: bool,
    share_with_host_memory_access: bool,
    rebalance: Rebalance,
    vm_numbers: Option<NumberRange>,
    access: Vec<RoleAccess>,
    api: Option<PathBuf>,
    api_read: Option<PathBuf>,
    vm_socket_gid: Option<u32>,
    vm_socket_mode: Option<SocketMode>,
    state_dir: Option<PathBuf>,
    log_directory: Option<PathBuf>,
    audit_log_size: Option<ByteSize>,
    receipts_size: Option<ByteSize>,
    trust_vmm_memory: bool,
    scrub_every_free: bool,
    verify: Option<VerifyWord>,
    starts_per_second: Option<u32>,
    starts_at_once: Option<u32>,
    warm_workers: bool,
    worker_uids: Option<NumberRange>,
    cgroup: Option<PathBuf>,
    launcher: Option<PathBuf>,
    vm_limits: FileLimits,
    fence: FencePolicy,
}

/// Limits of each VM on the host.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
struct FileLimits {
    memory: Option<ByteSize>,
    swap: Option<ByteSize>,
    huge_pages: Option<ByteSize>,
    tasks: Option<u32>,
    worker_tasks: Option<u32>,
    cpu_weight: Option<u32>,
}

impl FileLimits {
    fn check(&self) -> Result<VmLimits> {
        let usual = VmLimits::default();
        let limits = VmLimits {
            memory: self.memory.map(|bytes| bytes.0),
            swap: self.swap.map_or(usual.swap, |bytes| bytes.0),
            huge_pages: self.huge_pages.map_or(usual.huge_pages, |bytes| bytes.0),
            tasks: self.tasks.unwrap_or(usual.tasks),
            worker_tasks: self.worker_tasks.unwrap_or(usual.worker_tasks),
            cpu_weight: self.cpu_weight.unwrap_or(usual.cpu_weight),
        };
        match limits.first_invalid() {
            None => Ok(limits),
            Some((name, value)) => bail!("{name} in [vm-limits] cannot be {value}"),
        }
    }
}

/// Amount of scrubbed memory that is read back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum VerifyWord {
    Sampled,
    All,
}

/// Amount of misbehaviour after which a VM is fenced.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct FencePolicy {
    /// Fence a VM if this many of its workers break a rule of custody …
    pub count: u32,
    /// … within this many seconds.
    pub seconds: u32,
    /// True to fence a VM at once if it used more GPU time, by the driver's figures, than its workers report. Off by
    /// default: the figures of hardware drivers for processes that take turns have not been measured.
    pub undercharged: bool,
}

impl Default for FencePolicy {
    fn default() -> Self {
        Self { count: 3, seconds: 60, undercharged: false }
    }
}

/// A role in the management API.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Role {
    /// All rights.
    Admin,
    /// Manages VMs and units of all owners, but not quotas.
    Operator,
    /// Manages VMs of one organisation or project.
    Tenant,
    /// Reads everything.
    ReadOnly,
}

/// Users and groups with a role.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RoleAccess {
    /// The role.
    pub role: Role,
    /// These users …
    #[serde(default)]
    pub uids: Vec<u32>,
    /// … and the members of these groups.
    #[serde(default)]
    pub gids: Vec<u32>,
    /// Organisation of a tenant …
    #[serde(default)]
    pub organisation: Option<String>,
    /// … or its project.
    #[serde(default)]
    pub project: Option<String>,
}

impl RoleAccess {
    fn check(&self) -> Result<()> {
        ensure!(!(self.uids.is_empty() && self.gids.is_empty()), "an [[access]] has neither uids nor gids");
        let scopes = usize::from(self.organisation.is_some()) + usize::from(self.project.is_some());
        match self.role {
            Role::Tenant => {
                ensure!(scopes == 1, "an [[access]] for a tenant names one organisation or one project")
            }
            _ => ensure!(scopes == 0, "only an [[access]] for a tenant names an organisation or project"),
        }
        Ok(())
    }
}

/// Starts and ends all other processes.
pub(crate) const LAUNCHER: &str = "sluice-launcher";
/// Serves the VMM of one VM.
pub(crate) const DEVICE: &str = "sluice-device";
/// Serves one session of a VM.
pub(crate) const WORKER: &str = "sluice-worker";
/// Owns the memory of one unit.
pub(crate) const ARBITER: &str = "sluice-arbiter";
/// Reads the state of the GPUs.
pub(crate) const INVENTORY: &str = "sluice-inventory";

/// A checked configuration.
#[derive(Debug)]
pub struct Configuration {
    /// Directory for sockets.
    pub runtime_dir: PathBuf,
    /// Directory of the programs.
    pub libexec: PathBuf,
    /// Driver library that workers load; absolute path.
    pub driver: String,
    /// Runs of guest pages that a worker maps one by one.
    pub mapped_runs: u32,
    /// Operations that the driver takes for one stream before it makes its caller wait.
    pub driver_queue: u64,
    /// Management library of the driver; absolute path.
    pub nvml: Option<PathBuf>,
    /// Memory that all VMs of a unit may have together, in thousandths of the unit's memory.
    pub overcommit_permille: u32,
    /// True if VMs of several organisations may share a unit whose driver does not report the memory of each process.
    /// No driver reports it for a MIG instance.
    pub share_unmeasured_between_organisations: bool,
    /// True if several VMs may share a unit whose kernels can reach host memory.
    pub share_with_host_memory_access: bool,
    /// Reaction to overloaded units.
    pub rebalance: Rebalance,
    /// Number of devices whose memory is lent, if configured.
    pub units: Option<u32>,
    /// Bytes of a unit left to its driver beside the memory of contexts.
    pub reserve: u64,
    /// Device memory of each VM that does not specify it.
    pub memory: ByteSize,
    /// Numbers for VMs.
    pub vm_numbers: NumberRange,
    /// Roles in the management API. Root and the user of this process may do everything.
    pub access: Vec<RoleAccess>,
    /// Socket of the management API.
    pub api: PathBuf,
    /// Read-only socket of the management API.
    pub api_read: PathBuf,
    /// Group that may connect to the sockets of VMs.
    pub vm_socket_gid: Option<u32>,
    /// Mode of the sockets of VMs.
    pub vm_socket_mode: SocketMode,
    /// Directory for data that must outlive the daemon.
    pub state_dir: PathBuf,
    /// Directory for the audit log and the receipts of scrubs.
    pub log_directory: PathBuf,
    /// Size of the audit log, in bytes.
    pub audit_log_size: u64,
    /// Size of each unit's receipts of scrubs, in bytes.
    pub receipts_size: u64,
    /// True to accept memory of VMs that their VMM can shrink.
    pub trust_vmm_memory: bool,
    /// True to clear memory inside workers as well.
    pub scrub_every_free: bool,
    /// Amount of scrubbed memory that is read back.
    pub verify: Verify,
    /// True if memory is scrubbed. False only in tests that show the effect of scrubbing.
    pub scrub: bool,
    /// Policy for fencing VMs.
    pub fence: FencePolicy,
    /// Session starts per second and VM.
    pub starts_per_second: u32,
    /// Session starts of a VM that need not wait.
    pub starts_at_once: u32,
    /// True if each VM keeps a worker ready for its next session.
    pub warm_workers: bool,
    /// User ids for workers.
    pub worker_uids: Option<NumberRange>,
    /// Directory for cgroups.
    pub cgroup: Option<PathBuf>,
    /// Socket of a launcher that is a service of its own.
    pub launcher: Option<PathBuf>,
    /// Limits of each VM's cgroup.
    pub vm_limits: VmLimits,
    /// True if standard input is a supervisor.
    pub supervised: bool,
    /// True to remove the runtime directory at the end.
    pub ephemeral: bool,
    /// Further directories to remove at the end.
    pub scratch: Vec<PathBuf>,
}

impl Configuration {
    /// Checks that the programs of Sluice are installed.
    ///
    /// # Errors
    /// A message for people with the path of the first missing program.
    pub fn require_programs(&self) -> Result<()> {
        for name in [LAUNCHER, DEVICE, WORKER, ARBITER, INVENTORY] {
            let program = self.libexec.join(name);
            ensure!(program.exists(), "the program {} does not exist (see --libexec)", program.display());
        }
        Ok(())
    }

    /// Merges flags and file, and checks the result.
    ///
    /// # Errors
    /// A message for people about a missing or contradictory setting.
    pub fn load(arguments: Arguments) -> Result<Self> {
        let file = match &arguments.config {
            Some(path) => read(path)?,
            None => File::default(),
        };
        let required = |value: Option<PathBuf>, flag: &str| {
            value.with_context(|| {
                format!("no {flag}: give --{flag}, or {flag} = \"…\" in the file of --config")
            })
        };
        let runtime_dir =
            std::path::absolute(required(arguments.runtime_dir.or(file.runtime_dir), "runtime-dir")?)?;
        let driver = required(arguments.driver.or(file.driver), "driver")?;
        is_library(&driver, "driver")?;
        let nvml = arguments.nvml.or(file.nvml);
        nvml.as_deref().map_or(Ok(()), |nvml| is_library(nvml, "management"))?;
        let driver = driver.into_os_string().into_string().map_err(|path| {
            anyhow::anyhow!("the driver's path {} is not valid UTF-8", path.to_string_lossy())
        })?;
        let libexec = match arguments.libexec.or(file.libexec) {
            Some(directory) => std::path::absolute(directory)?,
            None => beside_this_program()?,
        };
        for access in &file.access {
            access.check()?;
        }
        let units = arguments.units.or(file.units);
        ensure!(units.unwrap_or(0) <= limits::DEVICES, "units can be {} at most", limits::DEVICES);
        let overcommit_permille = file.overcommit_permille.unwrap_or(NO_OVERCOMMITMENT);
        ensure!(
            (1..=NO_OVERCOMMITMENT).contains(&overcommit_permille),
            "overcommit-permille is {overcommit_permille}: it can be 1 to {NO_OVERCOMMITMENT}, because device memory cannot be \
             swapped, and other VMs could use up the quota of a VM"
        );
        ensure!(file.fence.count > 0 && file.fence.seconds > 0, "count and seconds in [fence] cannot be 0");
        let starts_per_second =
            arguments.starts_per_second.or(file.starts_per_second).unwrap_or(STARTS_PER_SECOND);
        ensure!(starts_per_second > 0, "starts-per-second is 0: no session could ever start");
        let starts_at_once = arguments.starts_at_once.or(file.starts_at_once).unwrap_or(STARTS_AT_ONCE);
        ensure!(starts_at_once > 0, "starts-at-once is 0: no session could ever start");
        let cgroup = arguments.cgroup.or(file.cgroup);
        let worker_uids = arguments.worker_uids.or(file.worker_uids);
        let launcher = arguments.launcher.or(file.launcher).filter(|_| !arguments.run_launcher);
        if launcher.is_some() {
            ensure!(!arguments.supervised, "a supervised sluiced starts its own launcher");
        } else if worker_uids.is_some() {
            ensure!(rustix::process::geteuid().is_root(), "worker-uids needs root");
            workers_can_be_ended(cgroup.as_deref())?;
        }
        let vm_socket_gid = arguments.vm_socket_gid.or(file.vm_socket_gid);
        ensure!(vm_socket_gid != Some(u32::MAX), "vm-socket-gid cannot be 4294967295, which means no group");
        let usual = if vm_socket_gid.is_some() { SocketMode::GROUP } else { SocketMode::default() };
        let state_dir = arguments.state_dir.or(file.state_dir).unwrap_or_else(|| runtime_dir.clone());
        let log_directory =
            arguments.log_directory.or(file.log_directory).unwrap_or_else(|| state_dir.clone());
        let audit_log_size = file.audit_log_size.unwrap_or(LOG);
        let receipts_size = file.receipts_size.unwrap_or(LOG);
        for (name, size) in [("audit-log-size", audit_log_size), ("receipts-size", receipts_size)] {
            ensure!(size >= SMALLEST_LOG, "{name} is less than 4MiB");
        }
        let api = arguments.api.or(file.api).unwrap_or_else(|| runtime_dir.join("api.sock"));
        let api_read =
            arguments.api_read.or(file.api_read).unwrap_or_else(|| runtime_dir.join("api-read.sock"));
        let all = arguments.verify_all || file.verify == Some(VerifyWord::All);
        Ok(Self {
            vm_socket_gid,
            vm_socket_mode: arguments.vm_socket_mode.or(file.vm_socket_mode).unwrap_or(usual),
            state_dir: std::path::absolute(state_dir)?,
            log_directory: std::path::absolute(log_directory)?,
            audit_log_size: audit_log_size.0,
            receipts_size: receipts_size.0,
            runtime_dir,
            libexec,
            driver,
            mapped_runs: arguments.mapped_runs.or(file.mapped_runs).unwrap_or(limits::MAPPED_RUNS),
            driver_queue: arguments.driver_queue.or(file.driver_queue).unwrap_or(limits::DRIVER_QUEUE),
            nvml,
            units,
            overcommit_permille,
            share_unmeasured_between_organisations: file.share_unmeasured_between_organisations,
            share_with_host_memory_access: file.share_with_host_memory_access,
            rebalance: file.rebalance,
            reserve: file.reserve.unwrap_or(RESERVE).0,
            memory: arguments.memory.or(file.memory).unwrap_or_default(),
            vm_numbers: arguments.vm_numbers.or(file.vm_numbers).unwrap_or(VM_NUMBERS),
            access: file.access,
            api: std::path::absolute(api)?,
            api_read: std::path::absolute(api_read)?,
            trust_vmm_memory: arguments.trust_vmm_memory || file.trust_vmm_memory,
            scrub_every_free: arguments.scrub_every_free || file.scrub_every_free,
            verify: if all { Verify::All } else { Verify::Sampled },
            scrub: std::env::var_os(UNSAFE_NO_SCRUB).is_none_or(|value| value != "1"),
            fence: file.fence,
            starts_per_second,
            starts_at_once,
            warm_workers: arguments.warm_workers || file.warm_workers,
            worker_uids,
            cgroup,
            launcher: launcher.map(std::path::absolute).transpose()?,
            vm_limits: file.vm_limits.check()?,
            supervised: arguments.supervised,
            ephemeral: arguments.ephemeral,
            scratch: arguments.scratch,
        })
    }

    /// Socket of the device of VM `id`.
    #[must_use]
    pub fn device_socket(&self, id: u32) -> PathBuf {
        device_socket(&self.runtime_dir, id)
    }

    /// Socket of the device of VM `id` for guests that share no memory.
    #[must_use]
    pub fn stream_socket(&self, id: u32) -> PathBuf {
        stream_socket(&self.runtime_dir, id)
    }
}

fn read(path: &Path) -> Result<File> {
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    toml::from_str(&text).with_context(|| format!("{} is not a valid configuration", path.display()))
}

/// Workers that are users of their own are ended by their cgroups, because no process that serves them may signal other users.
fn workers_can_be_ended(cgroup: Option<&Path>) -> Result<()> {
    let cgroup = cgroup
        .context("worker-uids needs a delegated cgroup directory (cgroup), by which workers are ended")?;
    let file = cgroup.join("cgroup.kill");
    ensure!(
        file.exists(),
        "worker-uids needs a cgroup directory of version 2, of Linux 5.14 or newer: {} does not exist",
        file.display()
    );
    Ok(())
}

fn is_library(path: &Path, what: &str) -> Result<()> {
    ensure!(path.is_absolute(), "the {what} library's path {} is not absolute", path.display());
    ensure!(path.exists(), "the {what} library {} does not exist", path.display());
    Ok(())
}

fn beside_this_program() -> Result<PathBuf> {
    let program = std::env::current_exe().context("cannot find the path of this program")?;
    Ok(program.parent().context("this program has no directory")?.to_owned())
}

/// Processes one VM may have at once: its device and a worker per session.
pub const PROCESSES_PER_VM: usize = limits::SESSIONS + 1;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn configuration_file_with_an_unknown_field_is_refused() {
        let good = "runtime-dir = \"/run/x\"\nworker-uids = \"5:6\"\nmemory = 7\nreserve = \"2GiB\"\n[fence]\ncount = 9\n";
        let file: File = toml::from_str(good).expect("a configuration");
        assert_eq!((file.memory, file.reserve), (Some(ByteSize(7)), Some(ByteSize(2 << 30))));
        assert_eq!(file.fence, FencePolicy { count: 9, ..FencePolicy::default() });
        for bad in [
            "verify = \"some\"",
            "[fence]\ntimes = 3",
            "memory = -1",
            "driverr = \"x\"",
            "[[vm]]\nid = 1",
            "[[organisation]]\nid = 1\nmemory = 5",
            "[[project]]\nid = 1\nmemory = 5",
            "worker-uids = \"0:1\"",
        ] {
            assert!(toml::from_str::<File>(bad).is_err(), "{bad:?} is accepted");
        }
    }

    #[test]
    fn flags_override_the_file() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("sluiced.toml");
        let text = "runtime-dir = \"/run/x\"\ndriver = \"/dev/null\"\nmemory = 5\n";
        std::fs::write(&path, text).expect("written");
        let arguments = Arguments { config: Some(path), memory: Some(ByteSize(7)), ..Arguments::default() };
        let configuration = Configuration::load(arguments).expect("a configuration");
        assert_eq!(configuration.memory, ByteSize(7));
        assert_eq!(configuration.device_socket(9), Path::new("/run/x/vm-9.sock"));
        assert_eq!(configuration.api, Path::new("/run/x/api.sock"));
    }

    #[test]
    fn number_out_of_its_range_is_refused() {
        let load = |text: &str| {
            let directory = tempfile::tempdir().expect("a directory");
            let path = directory.path().join("sluiced.toml");
            let text = format!("runtime-dir = \"/run/x\"\ndriver = \"/dev/null\"\n{text}");
            std::fs::write(&path, text).expect("written");
            Configuration::load(Arguments { config: Some(path), ..Arguments::default() })
        };
        load("units = 16\n").expect("a configuration");
        for bad in ["units = 17\n", "overcommit-permille = 0\n"] {
            assert!(load(bad).is_err(), "{bad:?} is accepted");
        }
    }

    // Promise: A45
    #[test]
    fn overcommitment_beyond_the_memory_of_a_unit_is_refused() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("sluiced.toml");
        let load = |permille: u32| {
            let text = format!(
                "runtime-dir = \"/run/x\"\ndriver = \"/dev/null\"\novercommit-permille = {permille}\n"
            );
            std::fs::write(&path, text).expect("written");
            Configuration::load(Arguments { config: Some(path.clone()), ..Arguments::default() })
        };
        for permille in [1, 999, 1000] {
            assert_eq!(load(permille).expect("a configuration").overcommit_permille, permille);
        }
        for permille in [1001, 1500, u32::MAX] {
            let error = format!("{:#}", load(permille).expect_err("too much"));
            assert!(error.contains("swapped") && error.contains(&permille.to_string()), "{error}");
        }
    }

    // Promise: F86
    #[test]
    fn limits_of_vms_come_from_the_file_and_have_bounds() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("sluiced.toml");
        let load = |limits: &str| {
            let text = format!("runtime-dir = \"/run/x\"\ndriver = \"/dev/null\"\n[vm-limits]\n{limits}");
            std::fs::write(&path, text).expect("written");
            Configuration::load(Arguments { config: Some(path.clone()), ..Arguments::default() })
        };
        assert_eq!(load("").expect("a configuration").vm_limits, VmLimits::default());
        let some = load("memory = \"8GiB\"\nswap = \"1GiB\"\ncpu-weight = 50\n").expect("a configuration");
        let expected =
            VmLimits { memory: Some(8 << 30), swap: 1 << 30, cpu_weight: 50, ..VmLimits::default() };
        assert_eq!(some.vm_limits, expected);
        for (bad, named) in [
            ("memory = \"1MiB\"", "memory in [vm-limits] cannot be 1048576"),
            ("tasks = 1", "tasks"),
            ("worker-tasks = 0", "worker-tasks"),
            ("cpu-weight = 0", "cpu-weight"),
            ("processes = 5", "unknown field"),
        ] {
            let error = format!("{:#}", load(bad).expect_err("a limit out of its range"));
            assert!(error.contains(named), "{bad}: {error}");
        }
    }

    // Promise: F86
    #[test]
    fn users_of_workers_without_a_cgroup_directory_are_refused() {
        if !rustix::process::geteuid().is_root() {
            sluice_skip::skip("only root may give workers users of their own");
            return;
        }
        let load = |cgroup: Option<&Path>| {
            let worker_uids = Some(NumberRange { first: 5, count: 6 });
            let (runtime_dir, driver) = (Some("/run/x".into()), Some("/dev/null".into()));
            let cgroup = cgroup.map(Path::to_owned);
            Configuration::load(Arguments {
                runtime_dir,
                driver,
                worker_uids,
                cgroup,
                ..Arguments::default()
            })
        };
        let directory = tempfile::tempdir().expect("a directory");
        for cgroup in [None, Some(directory.path())] {
            let error = load(cgroup).expect_err("workers that cannot be ended").to_string();
            assert!(error.contains("worker-uids needs a") && error.contains("cgroup"), "{error}");
        }
        std::fs::write(directory.path().join("cgroup.kill"), "").expect("written");
        assert!(load(Some(directory.path())).is_ok());
    }

    #[test]
    fn missing_setting_is_named() {
        let missing = |arguments| format!("{:#}", Configuration::load(arguments).expect_err("incomplete"));
        assert!(missing(Arguments::default()).contains("--runtime-dir"));
        let arguments = Arguments {
            runtime_dir: Some("/x".into()),
            driver: Some("/nowhere.so".into()),
            ..Arguments::default()
        };
        assert!(missing(arguments).contains("/nowhere.so"));
    }
}
