//! Faults that tests inject: two files of lines, read when they matter and without effect once removed.
//!
//! ```text
//! faults                                        health
//! fail nvmlGpuInstanceDestroy 19                uncorrected 3
//! hang nvmlDeviceCreateGpuInstanceWithPlacement corrected 5
//! hide bytes                                    remapped 1 2
//!                                               pending 1
//!                                               recovery 1
//! ```
//! `hang *` is for all calls. A call that hangs goes on when its line is gone. `faults` is in the state directory, and holds
//! for all devices; in a device's directory it holds for that device, and for calls that make, unmake and switch instances.
//! `hide bytes` in a device's directory makes the device list its processes without their bytes, as NVML does if it does not
//! know them. A device for which `nvmlDeviceSetMigMode` fails is switched when that line is gone, as by a reset.

use sluice_cuda_abi::nvml::{Health, Result, Status};
use std::path::Path;
use std::thread::sleep;
use std::time::Duration;

/// How often a call that hangs looks whether it still does.
const LOOK: Duration = Duration::from_millis(10);

/// What happens to a call before anything else.
pub(crate) fn before(state: &Path, call: &str) -> Result {
    loop {
        // Nearly always there is none, and then this is all that the call costs more.
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

/// Whether a device lists its processes without their bytes.
pub(crate) fn hides_bytes(directory: &Path) -> bool {
    let text = std::fs::read_to_string(directory.join("faults")).unwrap_or_default();
    text.lines().any(|line| line.split_whitespace().eq(["hide", "bytes"]))
}

/// How a device is; well, where nothing else is said.
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
