//! The nightly compiler, for checks that the pinned one cannot do: miri, sanitizers, fuzzing.

use std::process::Command;
use std::time::Duration;

use anyhow::{Result, bail, ensure};
use sluice_tests::progress::step;
use sluice_tests::{paths, process};

use crate::cargo::works;

/// The toolchain: the nightly of this day.
const TOOLCHAIN: &str = "nightly-2026-05-20";
/// The only platform of the sanitizers' builds.
pub(crate) const TARGET: &str = "x86_64-unknown-linux-gnu";
/// Time limit of a download.
const DOWNLOAD: Duration = Duration::from_secs(900);

/// Its cargo, in the root of the checkout.
pub(crate) fn cargo() -> Command {
    let mut command = Command::new("rustup");
    command.args(["run", TOOLCHAIN, "cargo"]).current_dir(paths::workspace());
    // The pinned cargo that started us has set these; they would win over the toolchain named here.
    command.env_remove("CARGO").env_remove("RUSTC").env_remove("RUSTDOC").env_remove("RUSTUP_TOOLCHAIN");
    command
}

/// Installs it with what miri needs, unless it is there.
pub(crate) fn ensure_installed() -> Result<()> {
    if is_installed() {
        return Ok(());
    }
    ensure!(works("rustup", ["--version"]), "rustup is not installed");
    step(format!("installing the toolchain {TOOLCHAIN} (rustup)"));
    let mut install = Command::new("rustup");
    install.args(["toolchain", "install", TOOLCHAIN, "--no-self-update"]);
    install.args(["--profile", "minimal", "--component", "miri,rust-src"]);
    process::output_of(&mut install, DOWNLOAD)?;
    if !is_installed() {
        bail!("{TOOLCHAIN} was installed and has no miri");
    }
    Ok(())
}

fn is_installed() -> bool {
    works("rustup", ["run", TOOLCHAIN, "cargo", "miri", "--version"])
}

/// The reason to skip what needs it, if it is missing; it is installed first if that is allowed.
pub(crate) fn missing(may_install: bool) -> Option<String> {
    if !may_install && !is_installed() {
        return Some(format!("{TOOLCHAIN} is not installed; `cargo xtask setup` installs it"));
    }
    ensure_installed().err().map(|error| format!("{TOOLCHAIN} cannot be installed: {error:#}"))
}
