//! Manual pages of the programs that people call, from what these say of their command lines themselves.

use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use clap::CommandFactory as _;
use clap_mangen::Man;
use sluice_daemon::configuration;

use crate::Arguments;

/// Writes them.
pub(crate) fn write(directory: &Path) -> Result<()> {
    ensure!(directory.is_dir(), "there is no directory {}", directory.display());
    clap_mangen::generate_to(Arguments::command(), directory).context("writing manual pages")?;
    let mut page = Vec::new();
    Man::new(configuration::Arguments::command()).section("8").render(&mut page)?;
    std::fs::write(directory.join("sluiced.8"), page).context("writing the daemon's manual page")
}
