//! Faults of the driver for tests: `SLUICE_NULL_FAULTS` names a file, and while that exists its text is the fault.
//!
//! `sync-blocks`: a wait for a stream does not end. `sync-fails`: each wait for a stream fails. `info-fails`:
//! the driver does not report its free memory. `info-fails-once`: it fails so only the first time after a chunk was made.

use std::{
    path::PathBuf,
    sync::{LazyLock, atomic::AtomicBool},
};

static FILE: LazyLock<Option<PathBuf>> =
    LazyLock::new(|| std::env::var_os("SLUICE_NULL_FAULTS").map(PathBuf::from));

/// True if a fault that happens once has happened.
pub(super) static FAILED: AtomicBool = AtomicBool::new(false);

/// True if the fault of this name is active.
pub(super) fn plays(fault: &str) -> bool {
    let text = FILE.as_ref().and_then(|file| std::fs::read_to_string(file).ok());
    text.is_some_and(|text| text.trim() == fault)
}
