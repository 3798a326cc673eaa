//! The table of settings, which help texts and pages show. [`Config`](crate::Config) gives them their meaning.

/// A setting of the software GPU: a variable of the environment, and for most also a key of the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Setting {
    /// The variable.
    pub variable: &'static str,
    /// The key in the file that `SLUICE_SOFTGPU_CONFIG` names, with its table; `None` if it is a variable only.
    pub key: Option<&'static str>,
    /// The valid values.
    pub values: &'static str,
    /// The value without the variable.
    pub default: &'static str,
    /// The effect.
    pub meaning: &'static str,
}

const fn setting(
    variable: &'static str,
    key: &'static str,
    [values, default]: [&'static str; 2],
    meaning: &'static str,
) -> Setting {
    Setting { variable, key: Some(key), values, default, meaning }
}

const fn variable(
    variable: &'static str,
    [values, default]: [&'static str; 2],
    meaning: &'static str,
) -> Setting {
    Setting { variable, key: None, values, default, meaning }
}

/// Every setting. A variable overrides the file, and an empty variable counts as none.
pub const SETTINGS: &[Setting] = &[
    variable("SLUICE_SOFTGPU_CONFIG", ["a path", "none"], "TOML file with settings."),
    setting(
        "SLUICE_SOFTGPU_STATE",
        "state",
        ["a directory", "`/dev/shm/sluice-softgpu-UID`, or a directory in `$XDG_RUNTIME_DIR`"],
        "Directory of the devices, which all processes with the same directory share. It should be on a tmpfs.",
    ),
    setting("SLUICE_SOFTGPU_DEVICES", "devices", ["0 to 16", "1"], "Number of devices."),
    setting(
        "SLUICE_SOFTGPU_NODES",
        "nodes",
        ["numbers, separated by commas", "none"],
        "NUMA nodes of the devices, in their order.",
    ),
    setting(
        "SLUICE_SOFTGPU_MODEL",
        "device.model",
        ["a model of the table", "`SLUICE-141`, or that of the existing device"],
        "GPU that a new device imitates.",
    ),
    setting(
        "SLUICE_SOFTGPU_SCALE",
        "device.scale",
        ["1 or more", "64, or that of the existing device"],
        "Divisor of the model's memory.",
    ),
    setting(
        "SLUICE_SOFTGPU_THREADS",
        "device.threads",
        ["0 or more", "0: one per processor"],
        "Threads that execute kernels.",
    ),
    setting(
        "SLUICE_SOFTGPU_MEMORY",
        "device.memory",
        ["`mmu`, `strict`", "`mmu`"],
        "Granularity at which kernels may access memory: mapped pages, as on a GPU, or the exact bytes of an allocation, which finds \
         small overruns and use after free.",
    ),
    setting(
        "SLUICE_SOFTGPU_FILL",
        "device.fill",
        ["`none`, a byte", "`none`: zeroes"],
        "Content of a new device.",
    ),
    setting(
        "SLUICE_SOFTGPU_TIME_LIMIT_SECONDS",
        "device.time_limit_seconds",
        ["1 or more", "none"],
        "Time after which a kernel ends with `CUDA_ERROR_LAUNCH_TIMEOUT`.",
    ),
    setting(
        "SLUICE_SOFTGPU_QUEUE_DEPTH",
        "device.queue_depth",
        ["1 or more", "none"],
        "Unfinished operations of a stream at which the next call waits.",
    ),
    setting(
        "SLUICE_SOFTGPU_START_DELAY",
        "device.start_delay",
        ["microseconds, or microseconds`,`seed", "0"],
        "Longest of the random times by which each operation of a stream starts late, to find programs that rely on an order which they \
         did not ask for. With a seed, a program that makes its streams and their work in the same order in each run has the same \
         times in each.",
    ),
    setting(
        "SLUICE_SOFTGPU_CONTEXT_BYTES",
        "device.context_bytes",
        ["bytes", "that of a real driver, scaled"],
        "Device memory that each context takes for itself.",
    ),
    setting(
        "SLUICE_SOFTGPU_MIG",
        "device.mig",
        ["`0`, `1`", "`0`"],
        "`1` divides a new device into MIG instances, of which it has none at first.",
    ),
    setting(
        "SLUICE_SOFTGPU_MIG_UUIDS",
        "device.mig_uuids",
        ["`new`, `same`", "`new`"],
        "`same` gives an instance the UUID of the last one of its number.",
    ),
    setting(
        "SLUICE_SOFTGPU_ECC",
        "device.ecc",
        ["`0`, `1`", "`0`"],
        "`1` reports that the memory corrects errors.",
    ),
    setting(
        "SLUICE_SOFTGPU_BOOKING",
        "device.booking",
        ["`owner`, `importer`, `both`, `nowhere`", "`owner`"],
        "Processes to which NVML books memory that one process made and another has imported.",
    ),
    setting(
        "SLUICE_SOFTGPU_LATE_FREE",
        "device.late_free",
        ["milliseconds", "0"],
        "Time from the end of a process to that at which its memory is free again.",
    ),
    setting(
        "SLUICE_SOFTGPU_IDLE_BYTES",
        "device.idle_bytes",
        ["bytes, `all`", "67108864 in the default directory, `all` in a named one"],
        "Memory of the host that a device keeps while no process computes on it. Memory beyond it loses its content: the next owner finds \
         bytes of 0xd5.",
    ),
    setting(
        "SLUICE_SOFTGPU_LACKS",
        "device.lacks",
        [
            "`import`, `import-in-instances`, `fixed-addresses`, `registration`, `host-atomics`, `peer-access`",
            "none",
        ],
        "Abilities of NVIDIA's drivers that this one lacks, to test programs for worse GPUs.",
    ),
    setting(
        "SLUICE_SOFTGPU_HAS",
        "device.has",
        ["`pageable-memory-access`, `host-page-tables`", "none"],
        "Properties that the device reports, although its kernels do not have them.",
    ),
    variable(
        "SLUICE_SOFTGPU_JIT",
        ["`0`, `1`", "`1`"],
        "`0` executes everything in the interpreter, without machine code.",
    ),
    variable(
        "SLUICE_SOFTGPU_LOG",
        ["empty, `1`", "empty"],
        "`1` explains errors on standard error: the place of a fault, the reason for a refused image, the name of a call that is not \
         supported.",
    ),
];

/// Settings that this crate does not read: the driver and the engine do.
#[cfg(test)]
const ELSEWHERE: [&str; 2] = ["SLUICE_SOFTGPU_JIT", "SLUICE_SOFTGPU_LOG"];

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::collections::BTreeSet;

    use super::*;
    use crate::Config;

    #[test]
    fn table_has_exactly_the_variables_that_are_read() {
        let read = RefCell::new(BTreeSet::new());
        let config = Config::from_variables(&|name| {
            read.borrow_mut().insert(name.to_owned());
            (name == "SLUICE_SOFTGPU_STATE").then(|| "/a".into())
        });
        assert!(config.is_ok());
        let listed = SETTINGS.iter().map(|setting| setting.variable.to_owned());
        let listed: BTreeSet<String> = listed.filter(|name| !ELSEWHERE.contains(&name.as_str())).collect();
        assert_eq!(read.into_inner(), listed);
    }

    #[test]
    fn keys_of_the_table_are_keys_of_the_file() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("softgpu.toml");
        for key in SETTINGS.iter().filter_map(|setting| setting.key) {
            let value = match key {
                "state" => "\"/a\"",
                "nodes" => "[1]",
                "device.model" => "\"T4-16\"",
                "device.memory" => "\"mmu\"",
                "device.fill" => "\"none\"",
                "device.mig" | "device.ecc" => "false",
                "device.mig_uuids" => "\"new\"",
                "device.booking" => "\"owner\"",
                "device.lacks" | "device.has" => "[]",
                _ => "1",
            };
            std::fs::write(&path, format!("{key} = {value}\n")).unwrap();
            let config = Config::from_variables(&|name| match name {
                "SLUICE_SOFTGPU_CONFIG" => Some(path.clone().into()),
                "SLUICE_SOFTGPU_STATE" if key != "state" => Some("/a".into()),
                _ => None,
            });
            assert!(config.is_ok(), "{key}: {config:?}");
        }
    }
}
