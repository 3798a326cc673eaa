//! The setup: everything that must be installed before a guest can boot and a CUDA program can be compiled.

use anyhow::Result;
use sluice_tests::debian::{self, Kernel, Series};
use sluice_tests::packages;
use sluice_tests::programs::{self, Program};

/// Sets up; does nothing that is already done.
pub(crate) fn run() -> Result<bool> {
    prepare()?;
    println!("setup: everything is there");
    Ok(true)
}

/// The same for a command that goes on, with the programs it can use.
pub(crate) fn prepare() -> Result<Vec<Program>> {
    debian::ensure_packages()?;
    packages::ensure_tools()?;
    for series in Series::USUAL {
        Kernel::fetch(series)?;
    }
    if let Err(error) = debian::promtool() {
        println!("setup: promtool cannot be had, alert rules are not checked: {error:#}");
    }
    programs::compile_all()
}
