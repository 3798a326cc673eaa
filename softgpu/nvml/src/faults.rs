//! Faults that tests inject by lines of two files. Removing a line ends its effect.
//!
//! ```text
//! faults                                        health
//! fail nvmlGpuInstanceDestroy 19                uncorrected 3
//! hang nvmlDeviceCreateGpuInstanceWithPlacement corrected 5
//! hide bytes                                    remapped 1 2
//!                                               pending 1
//!                                               recovery 1
//! ```
//! `hang *` applies to all calls. A call that hangs continues when its line is removed. `faults` in the state directory applies
//! to all devices; in a device's directory it applies to that device, and to calls that create, destroy and switch instances.
//! `hide bytes` in a device's directory makes the device list its processes without their bytes, as NVML does if it does not know
//! them. A device for which `nvmlDeviceSetMigMode` fails is switched when that line is removed, as by a reset.

use sluice_nvml_abi::{Health, Result, Status};
use std::path::Path;
use std::thread::sleep;
use std::time::Duration;

/// Interval at which a call that hangs checks whether it still must.
const LOOK: Duration = Duration::from_millis(10);

/// Applies the injected faults to a call, before its other work.
pub(crate) fn before(state: &Path, call: &str) -> Result {
    loop {
        // The file rarely exists; this read is then the only cost.
        let Ok(text) = std::fs::read_to_string(state.join("faults")) else { return Ok(()) };
        let mut hangs = false;
        for line in text.lines() {
            let words: Vec<_> = line.split_whitespace().collect();
            match words[..] {
                ["fail", name, code] if name == call => {
                    return Err(code.parse().map_or(Status::UNKNOWN, Status));
                }
                ["hang", name] => hangs |= name == call || name == "*",
                _ => {}
            }
        }
        if !hangs {
            return Ok(());
        }
        sleep(LOOK);
    }
}

/// True if a device lists its processes without their bytes.
pub(crate) fn hides_bytes(directory: &Path) -> bool {
    let text = std::fs::read_to_string(directory.join("faults")).unwrap_or_default();
    text.lines().any(|line| line.split_whitespace().eq(["hide", "bytes"]))
}

/// Reads the health of a device; values that the file does not set are those of a healthy device.
pub(crate) fn health(directory: &Path) -> Health {
    let mut health = Health::default();
    let text = std::fs::read_to_string(directory.join("health")).unwrap_or_default();
    for line in text.lines() {
        let mut words = line.split_whitespace();
        let key = words.next();
        let mut number = || words.next().and_then(|word| word.parse::<u32>().ok()).unwrap_or(0);
        match key {
            Some("corrected") => health.corrected = number().into(),
            Some("uncorrected") => health.uncorrected = number().into(),
            Some("remapped") => health.remapped = (number(), number()),
            Some("pending") => health.pending = number() != 0,
            Some("recovery") => health.recovery = number(),
            _ => {}
        }
    }
    health
}
