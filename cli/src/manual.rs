//! Manual pages, generated from the command line's own descriptions.

use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use clap::CommandFactory as _;

use crate::Arguments;

/// Writes the pages.
pub(crate) fn write(directory: &Path) -> Result<()> {
    ensure!(directory.is_dir(), "there is no directory {}", directory.display());
    clap_mangen::generate_to(Arguments::command(), directory).context("writing manual pages")
}
