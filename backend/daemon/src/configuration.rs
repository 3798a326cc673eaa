//! What `sluiced` is told at its start: flags, or a TOML file whose values flags override.

use std::{
    fmt,
    path::{Path, PathBuf},
    str::FromStr,
};

use anyhow::{Context as _, Result, bail, ensure};
use serde::Deserialize;
use sluice_protocol::limits;

/// Session starts per second and VM that are let through in the long run, unless configured.
const STARTS_PER_SECOND: u32 = 200;

/// The command line of `sluiced`.
#[derive(Debug, Default, clap::Parser)]
#[command(
    name = "sluiced",
    version,
    about = "The host daemon of Sluice: has a virtio-gpu device started for each VM, and a worker for each guest process."
)]
pub struct Arguments {
    /// Read the configuration from this TOML file; flags override it
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Where sockets are put: vm-ID.sock for each VM, and the control socket
    #[arg(long, value_name = "DIR")]
    pub runtime_dir: Option<PathBuf>,
    /// Where sluice-launcher, sluice-device and sluice-worker are [default: beside this program]
    #[arg(long, value_name = "DIR")]
    pub libexec: Option<PathBuf>,
    /// Absolute path of the CUDA driver library that workers load
    #[arg(long, value_name = "PATH")]
    pub driver: Option<PathBuf>,
    /// Bytes of device memory each session may use; 0 for all there is
    #[arg(long, value_name = "BYTES")]
    pub memory: Option<u64>,
    /// Runs of guest pages that each worker maps one by one; what goes beyond is copied. 0 to copy all
    #[arg(long, value_name = "N")]
    pub mapped_runs: Option<u32>,
    /// A VM: its number and how its device is started, for instance `1`, `1,scanouts=1`, or `1,direct` for programs of
    /// this host; repeatable
    #[arg(long = "vm", value_name = "ID[,direct][,scanouts=0|1]")]
    pub vms: Vec<VmSpec>,
    /// The socket that answers `sluice status` [default: control.sock in the runtime directory]
    #[arg(long, value_name = "PATH")]
    pub control: Option<PathBuf>,
    /// Session starts per second and VM in the long run; more have to wait
    #[arg(long, value_name = "N")]
    pub starts_per_second: Option<u32>,
    /// Run each worker as a user of its own from this range of ids; needs root
    #[arg(long, value_name = "FIRST:COUNT")]
    pub worker_uids: Option<UidRange>,
    /// A cgroup v2 directory delegated to Sluice, in which each worker gets a group of its own
    #[arg(long, value_name = "DIR")]
    pub cgroup: Option<PathBuf>,
    /// Standard input is a socket to a supervisor: say `ready` on it, and end everything when it closes
    #[arg(long)]
    pub supervised: bool,
    /// Remove the runtime directory with all it contains at the end
    #[arg(long, requires = "supervised")]
    pub ephemeral: bool,
}

/// The configuration file.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
struct File {
    runtime_dir: Option<PathBuf>,
    libexec: Option<PathBuf>,
    driver: Option<PathBuf>,
    memory: Option<u64>,
    mapped_runs: Option<u32>,
    vm: Vec<VmSpec>,
    control: Option<PathBuf>,
    starts_per_second: Option<u32>,
    worker_uids: Option<UidRange>,
    cgroup: Option<PathBuf>,
}

/// A checked configuration.
#[derive(Debug)]
pub struct Configuration {
    /// Where sockets are put.
    pub runtime_dir: PathBuf,
    /// Where the programs are.
    pub libexec: PathBuf,
    /// The driver library that workers load; absolute.
    pub driver: String,
    /// Bytes of device memory of a session; 0 for all there is.
    pub memory: u64,
    /// Runs of guest pages that a worker maps one by one.
    pub mapped_runs: u32,
    /// The VMs, ids unique.
    pub vms: Vec<VmSpec>,
    /// The control socket.
    pub control: PathBuf,
    /// Session starts per second and VM.
    pub starts_per_second: u32,
    /// Users for workers.
    pub worker_uids: Option<UidRange>,
    /// Where cgroups are made.
    pub cgroup: Option<PathBuf>,
    /// Whether standard input is a supervisor.
    pub supervised: bool,
    /// Whether the runtime directory is removed at the end.
    pub ephemeral: bool,
}

impl Configuration {
    /// Merges flags and file, and checks the result.
    ///
    /// # Errors
    /// What is missing or contradictory, for a person.
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
        ensure!(driver.is_absolute(), "the driver's path {} is not absolute", driver.display());
        ensure!(driver.exists(), "there is no driver library {}", driver.display());
        let driver = driver.into_os_string().into_string().map_err(|path| {
            anyhow::anyhow!("the driver's path {} is not valid UTF-8", path.to_string_lossy())
        })?;
        let libexec = match arguments.libexec.or(file.libexec) {
            Some(directory) => std::path::absolute(directory)?,
            None => beside_this_program()?,
        };
        let vms = if arguments.vms.is_empty() { file.vm } else { arguments.vms };
        ensure!(!vms.is_empty(), "no VM: give --vm, or [[vm]] in the file of --config");
        let mut ids: Vec<u32> = vms.iter().map(|vm| vm.id).collect();
        ids.sort_unstable();
        if let Some(twice) = ids.windows(2).find(|pair| pair[0] == pair[1]) {
            bail!("VM {} is given twice", twice[0]);
        }
        let starts_per_second =
            arguments.starts_per_second.or(file.starts_per_second).unwrap_or(STARTS_PER_SECOND);
        ensure!(starts_per_second > 0, "starts-per-second is 0: no session could ever start");
        let worker_uids = arguments.worker_uids.or(file.worker_uids);
        if worker_uids.is_some() {
            ensure!(rustix::process::geteuid().is_root(), "worker-uids needs root");
        }
        let control = arguments.control.or(file.control).unwrap_or_else(|| runtime_dir.join("control.sock"));
        Ok(Self {
            control: std::path::absolute(control)?,
            runtime_dir,
            libexec,
            driver,
            memory: arguments.memory.or(file.memory).unwrap_or(0),
            mapped_runs: arguments.mapped_runs.or(file.mapped_runs).unwrap_or(limits::MAPPED_RUNS),
            vms,
            starts_per_second,
            worker_uids,
            cgroup: arguments.cgroup.or(file.cgroup),
            supervised: arguments.supervised,
            ephemeral: arguments.ephemeral,
        })
    }

    /// Where the device of VM `id` listens.
    #[must_use]
    pub fn device_socket(&self, id: u32) -> PathBuf {
        device_socket(&self.runtime_dir, id)
    }
}

/// Where in `directory` the device of VM `id` listens.
#[must_use]
pub fn device_socket(directory: &Path, id: u32) -> PathBuf {
    directory.join(format!("vm-{id}.sock"))
}

fn read(path: &Path) -> Result<File> {
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    toml::from_str(&text).with_context(|| format!("{} is not a configuration", path.display()))
}

fn beside_this_program() -> Result<PathBuf> {
    let program = std::env::current_exe().context("cannot tell where this program is")?;
    Ok(program.parent().context("this program has no directory")?.to_owned())
}

/// One VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VmSpec {
    /// Its number.
    pub id: u32,
    /// Whether there is no VM: programs of this host connect to the device themselves.
    #[serde(default)]
    pub direct: bool,
    /// Displays of its device, 0 or 1.
    #[serde(default, deserialize_with = "scanouts")]
    pub scanouts: u8,
}

fn scanouts<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<u8, D::Error> {
    match u8::deserialize(deserializer)? {
        count @ 0..=1 => Ok(count),
        count => Err(serde::de::Error::custom(format!("scanouts is {count}; it can be 0 or 1"))),
    }
}

/// Why a value of the command line or the file cannot be taken.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ValueError {
    /// Not a VM.
    #[error("{0:?} is not a VM: its number, then `,direct` or `,scanouts=0|1`")]
    Vm(String),
    /// Not a range of user ids.
    #[error("{0:?} is not a range of user ids: the first, which is not 0, `:`, and how many")]
    Uids(String),
}

impl FromStr for VmSpec {
    type Err = ValueError;

    fn from_str(text: &str) -> Result<Self, ValueError> {
        let error = || ValueError::Vm(text.to_owned());
        let mut parts = text.split(',');
        let id = parts.next().and_then(|id| id.parse().ok()).ok_or_else(error)?;
        let mut spec = Self { id, direct: false, scanouts: 0 };
        for part in parts {
            match part {
                "direct" => spec.direct = true,
                "scanouts=0" => spec.scanouts = 0,
                "scanouts=1" => spec.scanouts = 1,
                _ => return Err(error()),
            }
        }
        Ok(spec)
    }
}

impl fmt::Display for VmSpec {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let direct = if self.direct { ",direct" } else { "" };
        write!(formatter, "{}{direct},scanouts={}", self.id, self.scanouts)
    }
}

/// User ids for workers, one each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct UidRange {
    /// The first.
    pub first: u32,
    /// How many.
    pub count: u32,
}

impl UidRange {
    /// The ids.
    pub fn ids(self) -> impl Iterator<Item = u32> {
        self.first..self.first.saturating_add(self.count)
    }
}

impl FromStr for UidRange {
    type Err = ValueError;

    fn from_str(text: &str) -> Result<Self, ValueError> {
        let parse = || {
            let (first, count) = text.split_once(':')?;
            let (first, count): (u32, u32) = (first.parse().ok()?, count.parse().ok()?);
            // 0 is root; the last id of all means "no change" to the kernel.
            (first > 0 && count > 0 && first.checked_add(count).is_some()).then_some(Self { first, count })
        };
        parse().ok_or_else(|| ValueError::Uids(text.to_owned()))
    }
}

impl TryFrom<String> for UidRange {
    type Error = ValueError;

    fn try_from(text: String) -> Result<Self, ValueError> {
        text.parse()
    }
}

impl fmt::Display for UidRange {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}:{}", self.first, self.count)
    }
}

/// Processes one VM may have at once: its device and a worker per session.
pub const PROCESSES_PER_VM: usize = limits::SESSIONS + 1;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vm_is_read_and_written_alike() {
        for text in ["1,scanouts=0", "7,direct,scanouts=1", "4294967295,direct,scanouts=0"] {
            assert_eq!(text.parse::<VmSpec>().expect("a VM").to_string(), text);
        }
        assert_eq!("3".parse(), Ok(VmSpec { id: 3, direct: false, scanouts: 0 }));
        for text in ["", "x", "-1", "1,", "1,scanouts=2", "4294967296", "1, direct"] {
            assert!(text.parse::<VmSpec>().is_err(), "{text:?} was taken");
        }
    }

    #[test]
    fn root_is_never_a_worker() {
        assert_eq!("1000:5".parse::<UidRange>().map(|range| range.ids().count()), Ok(5));
        for text in ["0:5", "1000:0", "1000", "4294967295:1", "a:b", ":"] {
            assert!(text.parse::<UidRange>().is_err(), "{text:?} was taken");
        }
    }

    #[test]
    fn the_file_refuses_what_it_does_not_know() {
        let good = "runtime-dir = \"/run/x\"\nworker-uids = \"5:6\"\n[[vm]]\nid = 1\ndirect = true\n";
        let file: File = toml::from_str(good).expect("a configuration");
        assert_eq!(file.vm, [VmSpec { id: 1, direct: true, scanouts: 0 }]);
        for bad in [
            "driverr = \"x\"",
            "[[vm]]\nid = 1\nscanouts = 2",
            "[[vm]]\ndirect = true",
            "worker-uids = \"0:1\"",
        ] {
            assert!(toml::from_str::<File>(bad).is_err(), "{bad:?} was taken");
        }
    }

    #[test]
    fn flags_override_the_file() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("sluiced.toml");
        let text = "runtime-dir = \"/run/x\"\ndriver = \"/dev/null\"\nmemory = 5\n[[vm]]\nid = 9\n";
        std::fs::write(&path, text).expect("written");
        let arguments = Arguments { config: Some(path), memory: Some(7), ..Arguments::default() };
        let configuration = Configuration::load(arguments).expect("a configuration");
        assert_eq!(configuration.memory, 7);
        assert_eq!(configuration.device_socket(9), Path::new("/run/x/vm-9.sock"));
        assert_eq!(configuration.control, Path::new("/run/x/control.sock"));
    }

    #[test]
    fn what_is_missing_is_named() {
        let missing = |arguments| format!("{:#}", Configuration::load(arguments).expect_err("incomplete"));
        assert!(missing(Arguments::default()).contains("--runtime-dir"));
        let arguments = Arguments {
            runtime_dir: Some("/x".into()),
            driver: Some("/nowhere.so".into()),
            ..Arguments::default()
        };
        assert!(missing(arguments).contains("/nowhere.so"));
        let arguments = Arguments {
            runtime_dir: Some("/x".into()),
            driver: Some("/dev/null".into()),
            ..Arguments::default()
        };
        assert!(missing(arguments).contains("--vm"));
    }
}
