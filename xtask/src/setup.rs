//! The setup: installs the prerequisites for booting a guest and compiling a CUDA program.

use std::panic::resume_unwind;
use std::thread::{self, JoinHandle};

use anyhow::{Context as _, Result};
use sluice_tests::debian::{self, Kernel, Series};
use sluice_tests::programs::{self, Program};
use sluice_tests::{clients, compat, packages};

use crate::nightly;

/// Installs missing prerequisites.
pub(crate) fn run() -> Result<bool> {
    prepare()?;
    fetch_nightly();
    println!("setup: complete");
    Ok(true)
}

/// Installs missing prerequisites for another command; returns the compiled programs.
pub(crate) fn prepare() -> Result<Vec<Program>> {
    install()?;
    fetch()
}

/// Installs packages of the system.
fn install() -> Result<()> {
    debian::ensure_packages()?;
    packages::ensure_tools()
}

/// Fills the cache.
fn fetch() -> Result<Vec<Program>> {
    for series in Series::USUAL {
        Kernel::fetch(series)?;
    }
    if let Err(error) = debian::promtool() {
        println!("setup: promtool is not available, alert rules are not checked: {error:#}");
    }
    programs::compile_all()
}

fn fetch_nightly() {
    if let Err(error) = nightly::ensure_installed() {
        println!("setup: the nightly compiler is not available, checks that need it are skipped: {error:#}");
    }
}

/// The prerequisites of a run of tests.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Wanted {
    /// Those of the full tier.
    pub all_clients: bool,
    /// The clients' own tests: gigabytes, which no other tests use.
    pub compat: bool,
    /// The nightly compiler.
    pub nightly: bool,
}

/// A setup that fills the cache while its caller builds: most of its time is that of the network and of single processes.
#[derive(Debug)]
pub(crate) struct Setup(JoinHandle<Result<()>>);

impl Setup {
    /// Installs packages of the system, which checks and builds may use, and starts the rest.
    pub(crate) fn start(wanted: Wanted) -> Self {
        let installed = install();
        Self(thread::spawn(move || {
            installed.context("setting up")?;
            wanted.fetch()
        }))
    }

    /// Waits until everything is there.
    pub(crate) fn finish(self) -> Result<()> {
        self.0.join().unwrap_or_else(|panic| resume_unwind(panic))
    }
}

impl Wanted {
    fn fetch(self) -> Result<()> {
        if self.nightly {
            fetch_nightly();
        }
        fetch().context("setting up")?;
        let clients = if self.all_clients { clients::prepare_all() } else { clients::prepare() };
        clients.context("setting up the clients")?;
        if self.compat {
            for (client, error) in compat::prepare().context("setting up the clients' own tests")? {
                println!("setup: the client {client} is not available: {error:#}");
            }
        }
        Ok(())
    }
}
