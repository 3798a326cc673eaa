//! Calls of cargo.

use std::env;
use std::ffi::OsStr;
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::Value;
use sluice_tests::paths;
use sluice_tests::progress::step;

/// The pinned cargo, in the root of the checkout.
pub(crate) fn cargo() -> Command {
    let mut command = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(paths::workspace());
    command
}

/// Cargo of the nightly toolchain, for what the pinned one cannot do.
pub(crate) fn nightly_cargo() -> Command {
    let mut command = Command::new("rustup");
    command.args(["run", "nightly", "cargo"]).current_dir(paths::workspace());
    // Set by the pinned cargo that started us; they would win over the toolchain named here.
    command.env_remove("CARGO").env_remove("RUSTC").env_remove("RUSTDOC").env_remove("RUSTUP_TOOLCHAIN");
    command
}

/// Puts programs that were installed into the cache on the search path of a command.
pub(crate) fn with_tools(command: &mut Command) -> Result<&mut Command> {
    let mut search = vec![paths::cache()?.join("tools/bin")];
    search.extend(env::split_paths(&env::var_os("PATH").unwrap_or_default()));
    Ok(command.env("PATH", env::join_paths(search)?))
}

/// Builds a cargo subcommand from crates.io into the cache, unless it is there or installed elsewhere.
pub(crate) fn ensure_tool(name: &str, version: &str) -> Result<()> {
    let mut present = cargo();
    present.args([name, "--version"]).stdout(Stdio::null()).stderr(Stdio::null());
    if with_tools(&mut present)?.status().is_ok_and(|status| status.success()) {
        return Ok(());
    }
    let package = format!("cargo-{name}");
    step(format!("building {package} {version}"));
    let mut install = cargo();
    // Without optimisation: it is built once and runs for seconds.
    install.args(["install", "--quiet", "--locked", "--debug", "--version", version, &package, "--root"]);
    install.arg(paths::cache()?.join("tools")).env("CARGO_PROFILE_DEV_DEBUG", "0");
    install.env("CARGO_TARGET_DIR", target_folder()?.join("tools"));
    run_visibly(&mut install)
}

/// Where cargo puts what it builds.
pub(crate) fn target_folder() -> Result<PathBuf> {
    let metadata = cargo()
        .args(["metadata", "--no-deps", "--format-version=1"])
        .stderr(Stdio::inherit())
        .output()
        .context("starting cargo metadata")?;
    ensure!(metadata.status.success(), "cargo metadata: {}", metadata.status);
    let metadata: Value = serde_json::from_slice(&metadata.stdout).context("reading cargo metadata")?;
    Ok(metadata["target_directory"].as_str().context("cargo metadata names a target directory")?.into())
}

/// Runs a command that shows its own progress.
pub(crate) fn run_visibly(command: &mut Command) -> Result<()> {
    let name = sluice_tests::process::display(command);
    let status = command.status().with_context(|| format!("starting {name}"))?;
    ensure!(status.success(), "{name}: {status}");
    Ok(())
}

/// Whether a command can be run at all, and quietly succeeds.
pub(crate) fn works<I: AsRef<OsStr>>(program: &str, arguments: impl IntoIterator<Item = I>) -> bool {
    let mut command = Command::new(program);
    command.args(arguments).env_remove("RUSTUP_TOOLCHAIN").stdout(Stdio::null()).stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success())
}

/// One compiled test binary.
#[derive(Debug, Clone)]
pub(crate) struct TestBinary {
    /// As tests are named: the crate of unit tests, the file of integration tests.
    pub name: String,
    /// The executable.
    pub path: PathBuf,
    /// The package's folder, in which cargo runs its tests.
    pub folder: PathBuf,
}

/// Builds tests with `command`, a `cargo test --no-run` with its options, and says what came out.
pub(crate) fn build_tests(command: &mut Command) -> Result<Vec<TestBinary>> {
    command.args(["--no-run", "--message-format=json-render-diagnostics"]).stdout(Stdio::piped());
    let name = sluice_tests::process::display(command);
    let mut child = command.spawn().with_context(|| format!("starting {name}"))?;
    let messages = BufReader::new(child.stdout.take().context("standard output is piped")?);
    let mut binaries = Vec::new();
    for line in messages.lines() {
        let message: Value = serde_json::from_str(&line?).context("reading cargo's messages")?;
        binaries.extend(test_binary(&message));
    }
    let status = child.wait()?;
    if !status.success() {
        bail!("{name}: {status}");
    }
    binaries.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(binaries)
}

fn test_binary(message: &Value) -> Option<TestBinary> {
    let is_test = message["profile"]["test"].as_bool()?;
    let path = message["executable"].as_str()?;
    let manifest = Path::new(message["manifest_path"].as_str()?);
    is_test.then_some(TestBinary {
        name: message["target"]["name"].as_str()?.replace('-', "_"),
        path: path.into(),
        folder: manifest.parent()?.to_path_buf(),
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn only_test_binaries_are_taken_from_cargos_messages() {
        let message = |test: bool| {
            json!({"reason": "compiler-artifact", "profile": {"test": test}, "executable": "/t/deps/vm-1",
                   "manifest_path": "/w/tests/Cargo.toml", "target": {"name": "sluice-protocol"}})
        };
        let binary = test_binary(&message(true)).unwrap();
        assert_eq!(
            (binary.name.as_str(), binary.folder.as_path()),
            ("sluice_protocol", Path::new("/w/tests"))
        );
        assert!(test_binary(&message(false)).is_none());
        assert!(test_binary(&json!({"reason": "build-finished", "success": true})).is_none());
    }
}
