//! Manual pages, generated from the command line's own descriptions.

use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use clap::Command;

/// Writes the pages.
pub(crate) fn write(command: Command, directory: &Path) -> Result<()> {
    ensure!(directory.is_dir(), "there is no directory {}", directory.display());
    clap_mangen::generate_to(command, directory).context("writing manual pages")
}
