//! The setup: installs the prerequisites for booting a guest and compiling a CUDA program.

use anyhow::Result;
use sluice_tests::debian::{self, Kernel, Series};
use sluice_tests::packages;
use sluice_tests::programs::{self, Program};

use crate::nightly;

/// Installs missing prerequisites.
pub(crate) fn run() -> Result<bool> {
    prepare()?;
    if let Err(error) = nightly::ensure_installed() {
        println!("setup: the nightly compiler is not available, checks that need it are skipped: {error:#}");
    }
    println!("setup: complete");
    Ok(true)
}

/// Installs missing prerequisites for another command; returns the compiled programs.
pub(crate) fn prepare() -> Result<Vec<Program>> {
    debian::ensure_packages()?;
    packages::ensure_tools()?;
    for series in Series::USUAL {
        Kernel::fetch(series)?;
    }
    if let Err(error) = debian::promtool() {
        println!("setup: promtool is not available, alert rules are not checked: {error:#}");
    }
    programs::compile_all()
}
