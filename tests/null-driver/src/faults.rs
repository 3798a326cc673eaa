//! Faults that a test has the driver play: `SLUICE_NULL_FAULTS` names a file, and while that exists its text is the fault.
//!
//! `sync-blocks`: a wait for a stream does not end. `sync-fails`: each wait for a stream fails. `info-fails`:
//! the driver does not say what is free.

use std::{path::PathBuf, sync::LazyLock};

static FILE: LazyLock<Option<PathBuf>> =
    LazyLock::new(|| std::env::var_os("SLUICE_NULL_FAULTS").map(PathBuf::from));

/// Whether the fault of this name is played.
pub(super) fn plays(fault: &str) -> bool {
    let text = FILE.as_ref().and_then(|file| std::fs::read_to_string(file).ok());
    text.is_some_and(|text| text.trim() == fault)
}
