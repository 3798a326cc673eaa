//! A virtual socket device in user space, for QEMU on hosts whose kernel has none: rust-vmm's, as published.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use sluice_protocol::limits::STREAM_AHEAD_BYTES;

use crate::direct::TIMEOUT;
use crate::paths;
use crate::process::{Background, output_of};
use crate::progress;

const PACKAGE: &str = "vhost-device-vsock";
const VERSION: &str = "0.3.0";
/// The one expected difference to native output: no memory is shared.
pub const UNIFIED: (&str, &str) = ("unified addressing 1", "unified addressing 0");
/// Long, because it has some hundred dependencies; it is built once.
const BUILD: Duration = Duration::from_secs(900);

/// The program; built the first time, from the cache after that.
///
/// # Errors
/// When it is neither in the cache nor can be downloaded and built.
pub fn program() -> Result<PathBuf> {
    let _lock = paths::cache_lock(PACKAGE)?;
    let folder = paths::cache()?.join(format!("{PACKAGE}-{VERSION}"));
    let program = folder.join("bin").join(PACKAGE);
    if !program.exists() {
        progress::step(format!("building {PACKAGE} {VERSION}"));
        let work = tempfile::tempdir_in(paths::cache()?).context("creating a folder to build in")?;
        let mut install = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        install
            .args(["install", "--locked", "--version", VERSION, PACKAGE, "--root"])
            .arg(work.path().join("root"));
        // A target folder of its own, apart from the builds of other programs.
        install.env("CARGO_TARGET_DIR", work.path().join("target"));
        install.env_remove("RUSTFLAGS").current_dir(work.path());
        output_of(&mut install, BUILD)?;
        let built = work.path().join("root");
        ensure!(built.join("bin").join(PACKAGE).exists(), "cargo install left no {PACKAGE}");
        fs::rename(&built, &folder).with_context(|| format!("putting {} in its place", folder.display()))?;
    }
    Ok(program)
}

/// Starts it for one VM: connections of the guest to port N of the host arrive at the socket `uds_N`; QEMU connects to
/// `socket`.
///
/// # Errors
/// When it does not start.
pub fn start(program: &Path, uds: &Path, socket: &Path, log: &Path) -> Result<Background> {
    let (uds, socket_path) = (uds.display(), socket.display());
    let vm = format!("guest-cid=3,uds-path={uds},socket={socket_path},tx-buffer-size={STREAM_AHEAD_BYTES}");
    let mut device = Background::start(PACKAGE, Command::new(program).args(["--vm", &vm]), log)?;
    let deadline = std::time::Instant::now() + TIMEOUT;
    while !socket.exists() {
        ensure!(
            device.is_running()? && std::time::Instant::now() < deadline,
            "{PACKAGE} does not listen:\n{}",
            device.printed()
        );
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(device)
}

/// QEMU's arguments for memory shared with a vhost-user device, and for that device: its virtual socket.
#[must_use]
pub fn arguments(memory_mib: u32, socket: &Path) -> Vec<String> {
    let memory = format!("memory-backend-memfd,id=mem0,size={memory_mib}M,share=on");
    let chardev = format!("socket,id=vsock,path={}", socket.display());
    [
        "-object",
        &memory,
        "-machine",
        "memory-backend=mem0",
        "-m",
        &format!("{memory_mib}M"),
        "-chardev",
        &chardev,
    ]
    .into_iter()
    .chain(["-device", "vhost-user-vsock-pci,chardev=vsock"])
    .map(str::to_owned)
    .collect()
}
