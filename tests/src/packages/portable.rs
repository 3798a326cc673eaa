//! The guest's programs, linked against a C library so old that every distribution in use has a newer one.
//!
//! The compiler is the pinned one; only the linker differs: zig's, which has the symbols of every version of glibc. The linker and
//! the cargo command that uses it are wheels from PyPI, in the cache.

use std::env;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};

use crate::paths::{self, Binaries};
use crate::process::output_of;
use crate::progress::step;
use crate::wheels;

use super::SINCE;

const WHEELS: &[&str] = &["cargo-zigbuild==0.24.0", "ziglang==0.15.2"];
/// The cargo packages of the guest.
const BUILT: [&str; 3] = ["sluice-guest", "sluice-guest-nvml", "sluice-guest-tool"];
const BUILDING: Duration = Duration::from_secs(1500);
const MACHINE: &str = "x86_64-unknown-linux-gnu";

/// Builds them beside `others`; returns the folder.
///
/// # Errors
/// When the linker is not available, or the build fails.
pub fn portable(others: &Binaries) -> Result<Binaries> {
    let tools = wheels::install("zig", "a linker for old versions of glibc", WHEELS)?;
    let target = others.folder().parent().context("programs lie in a folder of the target directory")?;
    step(format!("building for guests with glibc {SINCE} or newer"));
    let mut search = vec![tools.join("bin")];
    search.extend(env::split_paths(&env::var_os("PATH").unwrap_or_default()));
    let mut build = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    build.args(["zigbuild", "--release", "--locked", "--quiet"]).arg(format!("--target={MACHINE}.{SINCE}"));
    build.args(BUILT.map(|package| format!("--package={package}")));
    build.arg("--target-dir").arg(target).current_dir(paths::workspace());
    build.env("PATH", env::join_paths(search)?).env("CARGO_ZIGBUILD_ZIG_PATH", tools.join("ziglang/zig"));
    build.env("CARGO_ZIGBUILD_CACHE_DIR", tools.join("cache"));
    output_of(&mut build, BUILDING)?;
    let folder = target.join(MACHINE).join("release");
    ensure!(Path::new(&folder).is_dir(), "cargo zigbuild left no {}", folder.display());
    Ok(Binaries::at(folder))
}
