//! Faults that a test has the driver play: `SLUICE_NULL_FAULTS` names a file, and while that exists its text is the fault.
//!
//! `sync-blocks`: a wait for a stream does not end. `sync-fails`: each wait for a stream fails. `info-fails`:
//! the driver does not say what is free. `info-fails-once`: it does not say so the first time after a chunk was made.

use std::{
    path::PathBuf,
    sync::{LazyLock, atomic::AtomicBool},
};

static FILE: LazyLock<Option<PathBuf>> =
    LazyLock::new(|| std::env::var_os("SLUICE_NULL_FAULTS").map(PathBuf::from));

/// Whether a fault that is played once was.
pub(super) static FAILED: AtomicBool = AtomicBool::new(false);

/// Whether the fault of this name is played.
pub(super) fn plays(fault: &str) -> bool {
    let text = FILE.as_ref().and_then(|file| std::fs::read_to_string(file).ok());
    text.is_some_and(|text| text.trim() == fault)
}
