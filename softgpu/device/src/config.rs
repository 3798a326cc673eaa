//! The configuration of the soft device: a TOML file and environment variables, read by both CUDA and NVML.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Deserialize;

use crate::model::{MODELS, Model};
use crate::sys;

/// The granularity at which kernels may access mapped memory. Copies and fills keep to one allocation in any case.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum MemoryPolicy {
    /// A mapped page is accessible as a whole, as with a GPU's MMU.
    #[default]
    Mmu,
    /// Only the requested bytes are accessible: finds use after free and small overruns.
    Strict,
}

/// The processes to which NVML books a chunk that one process made and another has imported.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Booking {
    /// The process that made it.
    #[default]
    Owner,
    /// The processes that imported it, and its maker while there is none.
    Importer,
    /// All of them.
    Both,
    /// No process.
    Nowhere,
}

/// An ability of NVIDIA's drivers that this one is to lack, so that a program for a worse GPU can be tested.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lack {
    /// `cuMemImportFromShareableHandle` refuses the memory of another process.
    Import,
    /// It does so in processes that are confined to an instance.
    ImportInInstances,
    /// `cuMemAddressReserve` ignores the address that its caller wants.
    FixedAddresses,
    /// `cuMemHostRegister` refuses all memory.
    Registration,
    /// Atomic operations of kernels on host memory are not atomic for the host (attribute 86), and so host and device may not access
    /// managed memory at the same time (attribute 89).
    HostAtomics,
    /// No GPU reaches the memory of another.
    PeerAccess,
}

impl Lack {
    const ALL: [(&'static str, Lack); 6] = [
        ("import", Lack::Import),
        ("import-in-instances", Lack::ImportInInstances),
        ("fixed-addresses", Lack::FixedAddresses),
        ("registration", Lack::Registration),
        ("host-atomics", Lack::HostAtomics),
        ("peer-access", Lack::PeerAccess),
    ];
}

/// A property of some machines that this device reports, although its kernels do not have it, so that a program for such a machine
/// can be tested.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Has {
    /// Kernels access all memory of their process (attribute 88).
    PageableMemoryAccess,
    /// They do so through the host's page tables (attribute 100).
    HostPageTables,
}

impl Has {
    const ALL: [(&'static str, Has); 2] =
        [("pageable-memory-access", Has::PageableMemoryAccess), ("host-page-tables", Has::HostPageTables)];
}

/// Random times by which each operation starts late. The default is no delay.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StartDelay {
    /// The longest of them.
    pub longest: Duration,
    /// An operation has the same time in all runs of a program with this seed; `None` means another seed for each run.
    pub seed: Option<u64>,
}

impl StartDelay {
    /// Parses microseconds, with or without a comma and a seed.
    fn parse(text: &str) -> Option<StartDelay> {
        let (microseconds, seed) = match text.split_once(',') {
            Some((microseconds, seed)) => (microseconds, Some(seed.trim().parse().ok()?)),
            None => (text, None),
        };
        let longest = Duration::from_micros(microseconds.trim().parse().ok()?);
        Some(StartDelay { longest, seed })
    }
}

/// The whole configuration, with defaults resolved.
#[derive(Debug, Clone)]
pub struct Config {
    /// The directory that holds the devices.
    pub state: PathBuf,
    /// True if that directory is the default one, which must be private.
    pub private: bool,
    /// Number of devices.
    pub devices: u32,
    /// The model; `None` means the model of an existing device, or the default for a new one.
    pub model: Option<&'static Model>,
    /// Divisor of every memory size; `None` as for the model.
    pub scale: Option<u64>,
    /// Threads that execute kernels; 0 means one per core.
    pub threads: usize,
    /// Byte that fills a new device.
    pub fill: Option<u8>,
    /// Granularity of memory protection.
    pub memory: MemoryPolicy,
    /// True if a new device is divided into instances. It has none at first.
    pub mig: bool,
    /// True if an instance gets the UUID of the last one of its number, false if it gets a new one each time.
    pub same_uuids: bool,
    /// True if devices report that their memory corrects errors.
    pub ecc: bool,
    /// NUMA nodes of the devices, in their order; later devices have no known node.
    pub nodes: Vec<u32>,
    /// Exact device memory that each context takes for itself; `None` means that of a real driver, scaled.
    pub context_bytes: Option<u64>,
    /// Rule by which NVML books chunks.
    pub booking: Booking,
    /// Abilities that the driver lacks.
    pub lacks: Vec<Lack>,
    /// Properties that the device reports although it does not have them.
    pub has: Vec<Has>,
    /// Time after which a kernel is ended; `None` means no limit.
    pub time_limit: Option<Duration>,
    /// Unfinished operations of a stream at which the next one waits; `None` means no limit.
    pub queue_depth: Option<u64>,
    /// The times by which operations start late.
    pub start_delay: StartDelay,
    /// Time from the end of a process to that at which its memory is free again.
    pub late_free: Duration,
    /// Bytes of the host's memory that a device keeps while no process computes on it; `None` means all that it has.
    pub idle_bytes: Option<u64>,
}

/// The configuration cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file named by `SLUICE_SOFTGPU_CONFIG` cannot be read.
    #[error("cannot read {path}: {source}")]
    Read {
        /// The file.
        path: PathBuf,
        /// Cause of the failure.
        source: std::io::Error,
    },
    /// The file is not valid TOML, or has unknown keys.
    #[error("{path}: {source}")]
    Parse {
        /// The file.
        path: PathBuf,
        /// Cause of the failure.
        source: Box<toml::de::Error>,
    },
    /// A value is invalid.
    #[error("{key} = {value:?} is invalid, expected {expected}")]
    Value {
        /// The setting.
        key: &'static str,
        /// The invalid value.
        value: String,
        /// Description of valid values.
        expected: String,
    },
    /// Neither `/dev/shm` nor `$XDG_RUNTIME_DIR` can be used.
    #[error("no directory for the device; set SLUICE_SOFTGPU_STATE to a directory on a tmpfs")]
    NoState,
}

/// The file as written; every key is optional.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct File {
    state: Option<PathBuf>,
    devices: Option<u32>,
    nodes: Option<Vec<u32>>,
    device: FileDevice,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct FileDevice {
    model: Option<String>,
    scale: Option<u64>,
    threads: Option<usize>,
    fill: Option<toml::Value>,
    memory: Option<String>,
    context_bytes: Option<u64>,
    mig: Option<bool>,
    mig_uuids: Option<String>,
    ecc: Option<bool>,
    booking: Option<String>,
    lacks: Option<Vec<String>>,
    has: Option<Vec<String>>,
    time_limit_seconds: Option<u64>,
    queue_depth: Option<u64>,
    start_delay: Option<toml::Value>,
    late_free: Option<u64>,
    idle_bytes: Option<toml::Value>,
}

/// The scale of a device that is created without one: the default model with 2.2 GiB.
pub(crate) const DEFAULT_SCALE: u64 = 64;
const MAX_DEVICES: u32 = 16;
/// Storage that an idle device in the default directory keeps, so that short programs one after the other find it again.
const IDLE_BYTES: u64 = 64 << 20;

impl Config {
    /// Reads the file named by `SLUICE_SOFTGPU_CONFIG`, if any, and then the variables, which override it.
    ///
    /// # Errors
    /// A file or a value cannot be used; there is no fallback.
    pub fn from_environment() -> Result<Config, ConfigError> {
        Config::from_variables(&|name| std::env::var_os(name))
    }

    /// Like [`Config::from_environment`], with another source of variables.
    ///
    /// # Errors
    /// The same as those of [`Config::from_environment`].
    pub fn from_variables(variable: &dyn Fn(&str) -> Option<OsString>) -> Result<Config, ConfigError> {
        // As in a shell's `${NAME:-}`, an empty variable is none.
        let variable = &|name: &str| variable(name).filter(|value| !value.is_empty());
        let file = match variable("SLUICE_SOFTGPU_CONFIG") {
            Some(path) => read(Path::new(&path))?,
            None => File::default(),
        };
        let text = |name: &str| variable(name).map(|value| value.to_string_lossy().into_owned());

        let explicit = variable("SLUICE_SOFTGPU_STATE").map(PathBuf::from).or(file.state);
        let private = explicit.is_none();
        let state = match explicit {
            Some(path) => path,
            None => default_state(variable).ok_or(ConfigError::NoState)?,
        };
        let model = match text("SLUICE_SOFTGPU_MODEL").or(file.device.model) {
            Some(key) => Some(Model::find(&key).ok_or_else(|| {
                let known: Vec<_> = MODELS.iter().map(|model| model.key).collect();
                invalid("model", &key, &format!("one of {}", known.join(", ")))
            })?),
            None => None,
        };
        let memory = match text("SLUICE_SOFTGPU_MEMORY").or(file.device.memory).as_deref() {
            None | Some("mmu") => MemoryPolicy::Mmu,
            Some("strict") => MemoryPolicy::Strict,
            Some(other) => return Err(invalid("memory", other, "mmu or strict")),
        };
        let fill = match text("SLUICE_SOFTGPU_FILL").or(file.device.fill.map(written)) {
            None => None,
            Some(text) if text == "none" => None,
            Some(text) => Some(byte(&text).ok_or_else(|| invalid("fill", &text, "none or a byte"))?),
        };
        let idle_bytes = match text("SLUICE_SOFTGPU_IDLE_BYTES").or(file.device.idle_bytes.map(written)) {
            // The content of a named directory is that of its user.
            None => private.then_some(IDLE_BYTES),
            Some(text) if text == "all" => None,
            Some(text) => Some(
                text.trim().parse().map_err(|_| invalid("idle_bytes", &text, "all or a number of bytes"))?,
            ),
        };
        let switch = |name: &str, file: Option<bool>| match text(name).as_deref() {
            None => file.unwrap_or(false),
            Some("0" | "false") => false,
            Some(_) => true,
        };
        let mig = switch("SLUICE_SOFTGPU_MIG", file.device.mig);
        if let Some(model) = model.filter(|model| mig && model.division.is_none()) {
            return Err(invalid("mig", "true", &format!("false: {} cannot be divided", model.key)));
        }
        let ecc = switch("SLUICE_SOFTGPU_ECC", file.device.ecc);
        let same_uuids = match text("SLUICE_SOFTGPU_MIG_UUIDS").or(file.device.mig_uuids).as_deref() {
            None | Some("new") => false,
            Some("same") => true,
            Some(other) => return Err(invalid("mig_uuids", other, "new or same")),
        };
        let booking = match text("SLUICE_SOFTGPU_BOOKING").or(file.device.booking).as_deref() {
            None | Some("owner") => Booking::Owner,
            Some("importer") => Booking::Importer,
            Some("both") => Booking::Both,
            Some("nowhere") => Booking::Nowhere,
            Some(other) => return Err(invalid("booking", other, "owner, importer, both or nowhere")),
        };
        let lacks = choices("lacks", text("SLUICE_SOFTGPU_LACKS"), file.device.lacks, &Lack::ALL)?;
        let has = choices("has", text("SLUICE_SOFTGPU_HAS"), file.device.has, &Has::ALL)?;
        let queue_depth = number("queue_depth", text("SLUICE_SOFTGPU_QUEUE_DEPTH"), file.device.queue_depth)?;
        if queue_depth == Some(0) {
            return Err(invalid("queue_depth", "0", "at least 1"));
        }
        let start_delay = match text("SLUICE_SOFTGPU_START_DELAY").or(file.device.start_delay.map(written)) {
            None => StartDelay::default(),
            Some(text) => StartDelay::parse(&text)
                .ok_or_else(|| invalid("start_delay", &text, "microseconds, or microseconds,seed"))?,
        };
        let late_free = number("late_free", text("SLUICE_SOFTGPU_LATE_FREE"), file.device.late_free)?;
        let time_limit = number(
            "time_limit_seconds",
            text("SLUICE_SOFTGPU_TIME_LIMIT_SECONDS"),
            file.device.time_limit_seconds,
        )?;
        if time_limit == Some(0) {
            return Err(invalid("time_limit_seconds", "0", "at least 1"));
        }
        let nodes = match text("SLUICE_SOFTGPU_NODES") {
            None => file.nodes.unwrap_or_default(),
            Some(list) => list
                .split(',')
                .map(|node| node.trim().parse().map_err(|_| invalid("nodes", &list, "numbers")))
                .collect::<Result<_, _>>()?,
        };
        let scale = number("scale", text("SLUICE_SOFTGPU_SCALE"), file.device.scale)?;
        if scale == Some(0) {
            return Err(invalid("scale", "0", "at least 1"));
        }
        let devices = number("devices", text("SLUICE_SOFTGPU_DEVICES"), file.devices)?.unwrap_or(1);
        if devices > MAX_DEVICES {
            return Err(invalid("devices", &devices.to_string(), "at most 16"));
        }
        let threads = number("threads", text("SLUICE_SOFTGPU_THREADS"), file.device.threads)?.unwrap_or(0);
        let context_bytes =
            number("context_bytes", text("SLUICE_SOFTGPU_CONTEXT_BYTES"), file.device.context_bytes)?;
        Ok(Config {
            state,
            private,
            devices,
            model,
            scale,
            threads,
            fill,
            memory,
            mig,
            same_uuids,
            ecc,
            nodes,
            context_bytes,
            booking,
            lacks,
            has,
            time_limit: time_limit.map(Duration::from_secs),
            queue_depth,
            start_delay,
            late_free: Duration::from_millis(late_free.unwrap_or(0)),
            idle_bytes,
        })
    }
}

fn invalid(key: &'static str, value: &str, expected: &str) -> ConfigError {
    ConfigError::Value { key, value: value.to_owned(), expected: expected.to_owned() }
}

fn read(path: &Path) -> Result<File, ConfigError> {
    let text = std::fs::read_to_string(path)
        .map_err(|source| ConfigError::Read { path: path.to_owned(), source })?;
    toml::from_str(&text)
        .map_err(|source| ConfigError::Parse { path: path.to_owned(), source: Box::new(source) })
}

/// A value of the file as a variable would have it.
fn written(value: toml::Value) -> String {
    match value {
        toml::Value::String(text) => text,
        other => other.to_string(),
    }
}

fn number<T: std::str::FromStr>(
    key: &'static str,
    text: Option<String>,
    file: Option<T>,
) -> Result<Option<T>, ConfigError> {
    match text {
        Some(text) => text.trim().parse().map(Some).map_err(|_| invalid(key, &text, "a number")),
        None => Ok(file),
    }
}

/// A list of known names, which a variable separates by commas.
fn choices<T: Copy>(
    key: &'static str,
    text: Option<String>,
    file: Option<Vec<String>>,
    all: &[(&'static str, T)],
) -> Result<Vec<T>, ConfigError> {
    let listed = text.map(|list| list.split(',').map(str::to_owned).collect());
    let names: Vec<String> = listed.or(file).unwrap_or_default();
    let choice = |name: &str| {
        let known = all.iter().find(|(known, _)| *known == name).map(|(_, choice)| *choice);
        let expected = || all.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(", ");
        known.ok_or_else(|| invalid(key, name, &expected()))
    };
    names.iter().map(|name| name.trim()).filter(|name| !name.is_empty()).map(choice).collect()
}

fn byte(text: &str) -> Option<u8> {
    match text.strip_prefix("0x") {
        Some(hexadecimal) => u8::from_str_radix(hexadecimal, 16).ok(),
        None => text.parse().ok(),
    }
}

/// A directory of this user on a tmpfs. `/dev/shm` is usually the larger one.
fn default_state(variable: &dyn Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    let shm = Path::new("/dev/shm");
    if sys::writable(shm) {
        return Some(shm.join(format!("sluice-softgpu-{}", sys::user())));
    }
    variable("XDG_RUNTIME_DIR").map(|path| Path::new(&path).join("sluice-softgpu"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(pairs: &[(&str, &str)]) -> Result<Config, ConfigError> {
        Config::from_variables(&|name| {
            pairs.iter().find(|(key, _)| *key == name).map(|(_, value)| OsString::from(value))
        })
    }

    #[test]
    fn lacking_abilities_are_a_list_of_known_names() {
        let lacks = |list| with(&[("SLUICE_SOFTGPU_STATE", "/a"), ("SLUICE_SOFTGPU_LACKS", list)]);
        assert_eq!(lacks("").unwrap().lacks, []);
        assert_eq!(lacks("import, registration").unwrap().lacks, [Lack::Import, Lack::Registration]);
        let refused = lacks("import,wings").unwrap_err().to_string();
        assert!(refused.contains("wings") && refused.contains("fixed-addresses"), "{refused}");
    }

    #[test]
    fn reported_properties_are_a_list_of_known_names() {
        let has = |list| with(&[("SLUICE_SOFTGPU_STATE", "/a"), ("SLUICE_SOFTGPU_HAS", list)]);
        assert_eq!(with(&[("SLUICE_SOFTGPU_STATE", "/a")]).unwrap().has, []);
        assert_eq!(has("host-page-tables").unwrap().has, [Has::HostPageTables]);
        assert!(has("import").unwrap_err().to_string().contains("pageable-memory-access"));
    }

    #[test]
    fn variables_override_the_file() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("softgpu.toml");
        std::fs::write(&path, "state = \"/a\"\n[device]\nmodel = \"A100-40\"\nscale = 8\nfill = 0xA5\n")
            .unwrap();
        let path = path.to_str().unwrap();
        let config = with(&[("SLUICE_SOFTGPU_CONFIG", path), ("SLUICE_SOFTGPU_SCALE", "16")]).unwrap();
        assert_eq!(config.state, Path::new("/a"));
        assert_eq!(config.model.unwrap().key, "A100-40");
        assert_eq!(config.scale, Some(16));
        assert_eq!(config.fill, Some(0xA5));
    }

    #[test]
    fn empty_variable_is_none() {
        let default = with(&[("XDG_RUNTIME_DIR", "/a")]).unwrap();
        let empty =
            with(&[("XDG_RUNTIME_DIR", "/a"), ("SLUICE_SOFTGPU_STATE", ""), ("SLUICE_SOFTGPU_MODEL", "")])
                .unwrap();
        assert_eq!((empty.state, empty.model), (default.state, default.model));
    }

    #[test]
    fn start_delay_has_a_seed_or_none() {
        let delay = |text| with(&[("SLUICE_SOFTGPU_START_DELAY", text)]).map(|config| config.start_delay);
        let some = |seed| StartDelay { longest: Duration::from_millis(1), seed };
        assert_eq!(delay("1000").unwrap(), some(None));
        assert_eq!(delay("1000,7").unwrap(), some(Some(7)));
        assert_eq!(delay("0,7").unwrap().longest, Duration::ZERO);
        assert_eq!(with(&[]).unwrap().start_delay, StartDelay::default());
        assert!(delay("1000,").is_err() && delay("1000,x").is_err() && delay("soon").is_err());
    }

    #[test]
    fn context_bytes_are_taken_from_the_configuration() {
        assert_eq!(with(&[]).unwrap().context_bytes, None);
        assert_eq!(with(&[("SLUICE_SOFTGPU_CONTEXT_BYTES", "0")]).unwrap().context_bytes, Some(0));
        assert!(with(&[("SLUICE_SOFTGPU_CONTEXT_BYTES", "much")]).is_err());
    }

    #[test]
    fn named_directories_keep_all_storage_unless_told_otherwise() {
        let named = |bytes| {
            with(&[("SLUICE_SOFTGPU_STATE", "/a"), ("SLUICE_SOFTGPU_IDLE_BYTES", bytes)]).unwrap().idle_bytes
        };
        assert_eq!((named(""), named("all"), named("0")), (None, None, Some(0)));
        assert_eq!(with(&[("XDG_RUNTIME_DIR", "/a")]).unwrap().idle_bytes, Some(IDLE_BYTES));
    }

    #[test]
    fn invalid_values_are_refused() {
        assert!(with(&[("SLUICE_SOFTGPU_MODEL", "GTX")]).is_err());
        assert!(with(&[("SLUICE_SOFTGPU_SCALE", "0")]).is_err());
        assert!(with(&[("SLUICE_SOFTGPU_TIME_LIMIT_SECONDS", "0")]).is_err());
        assert!(with(&[("SLUICE_SOFTGPU_MEMORY", "loose")]).is_err());
        assert!(with(&[("SLUICE_SOFTGPU_FILL", "256")]).is_err());
        assert!(with(&[("SLUICE_SOFTGPU_DEVICES", "17")]).is_err());
        assert!(with(&[("SLUICE_SOFTGPU_MODEL", "A10-24"), ("SLUICE_SOFTGPU_MIG", "1")]).is_err());
        assert!(with(&[("SLUICE_SOFTGPU_MIG_UUIDS", "old")]).is_err());
        assert!(with(&[("SLUICE_SOFTGPU_NODES", "0,x")]).is_err());
        assert!(with(&[("SLUICE_SOFTGPU_BOOKING", "me")]).is_err());
        assert!(with(&[("SLUICE_SOFTGPU_IDLE_BYTES", "some")]).is_err());
    }
}
