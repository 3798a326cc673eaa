//! Containers: no VM, no graphics device, namespaces and a root of their own, and a device's socket mounted into it. The tests use
//! the kernel's own tools in place of a container engine.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use rustix::process::Signal;
use sluice_tests::direct::{Backend, TIMEOUT};
use sluice_tests::matrix::{self, Place};
use sluice_tests::paths::Binaries;
use sluice_tests::process::{Background, Finished, run, signal};
use sluice_tests::programs::{passed, program};

/// A root with the host's programs and libraries, read-only, the guest's library, a program and a socket; then the program. The
/// arguments are the library, the socket and the program, followed by the program's arguments.
const ENTER: &str = r#"
set -e
root=$(mktemp -d)
mount -t tmpfs none "$root"
mkdir "$root/usr" "$root/dev" "$root/proc" "$root/sluice"
mount --rbind -o ro /usr "$root/usr"
for name in bin lib lib64; do ln -s "usr/$name" "$root/$name"; done
touch "$root/dev/null" "$root/sluice/libcuda.so.1" "$root/sluice/socket" "$root/sluice/program"
mount --bind /dev/null "$root/dev/null"
mount --bind "$1" "$root/sluice/libcuda.so.1"
mount --bind "$2" "$root/sluice/socket"
mount --bind "$3" "$root/sluice/program"
mount -t proc proc "$root/proc"
shift 3
cd "$root"
exec chroot "$root" /sluice/program "$@"
"#;

/// A container in which every namespace is unshared.
fn unshared() -> Command {
    let mut command = Command::new("unshare");
    // The container is killed with its starter, as by an engine.
    command.args(["--mount", "--pid", "--fork", "--net", "--ipc", "--uts", "--kill-child"]);
    if !rustix::process::geteuid().is_root() {
        command.arg("--map-root-user");
    }
    command
}

/// The reason why containers cannot run here, if they cannot.
fn missing() -> Option<String> {
    match run(unshared().args(["mount", "-t", "tmpfs", "none", "/tmp"]), TIMEOUT) {
        Ok(finished) if finished.status.success() => None,
        Ok(finished) => Some(finished.stderr),
        Err(error) => Some(format!("{error:#}")),
    }
}

struct Engine {
    backend: Backend,
    library: PathBuf,
    transport: &'static str,
    logs: tempfile::TempDir,
}

impl Engine {
    fn new(backend: Backend, transport: &'static str) -> Result<Self> {
        let library = Binaries::locate()?.get("libsluice_guest.so")?;
        let logs = tempfile::tempdir().context("a folder for logs")?;
        Ok(Self { backend, library, transport, logs })
    }

    fn command(&self, program: &Path, arguments: &[&str]) -> Result<Command> {
        let mut command = unshared();
        command.args(["sh", "-c", ENTER, "container"]).arg(&self.library);
        command.arg(self.backend.socket()?).arg(program).args(arguments);
        command.env("LD_LIBRARY_PATH", "/sluice").env("SLUICE_TRANSPORT", self.transport);
        // The script makes the container's root in a temporary folder, which outlives the container's mount on it.
        command.env("SLUICE_SOCKET", "/sluice/socket").env("TMPDIR", self.logs.path());
        Ok(command)
    }

    fn run(&self, program: &Path, arguments: &[&str]) -> Result<Finished> {
        run(&mut self.command(program, arguments)?, TIMEOUT)
    }

    fn spawn(&self, name: &str, program: &Path, arguments: &[&str]) -> Result<Background> {
        let log = self.logs.path().join(name);
        Background::start(name, &mut self.command(program, arguments)?, &log)
    }
}

/// Containers on one device, one after the other and at once; each ends alone.
fn containers(engine: &Engine) -> Result<()> {
    let (add, hold) = (program("vector_add")?, program("hold")?);
    let device = engine.backend.device()?;
    let inside = engine.run(Path::new("/bin/ls"), &["/dev", "/sluice"])?;
    ensure!(inside.stdout.contains("null") && !inside.stdout.contains("dri"), "{inside:?}");
    for _ in 0..3 {
        passed(&engine.run(&add, &[])?)?;
    }
    engine.backend.wait_for_workers(0)?;
    let mut held = Vec::new();
    for number in 0..3 {
        let mut container = engine.spawn(&format!("container-{number}"), &hold, &["1000"])?;
        container.wait_for_line("holding", TIMEOUT)?;
        held.push(container);
        engine.backend.wait_for_workers(number + 1)?;
    }
    passed(&engine.run(&add, &[])?).context("beside others")?;
    for (number, mut container) in held.into_iter().enumerate() {
        signal(container.id(), Signal::KILL)?;
        container.wait(TIMEOUT)?.context("it is killed")?;
        engine.backend.wait_for_workers(2 - number)?;
        passed(&engine.run(&add, &[])?).context("after another's end")?;
    }
    ensure!(engine.backend.device()? == device, "the device is the same process");
    let place = Place::new(&engine.transport.to_uppercase(), "none: containers", "the host's");
    matrix::ran(place, "", "")
}

// Promise: V25
#[test]
fn containers_share_a_device_and_end_alone() -> Result<()> {
    if let Some(reason) = missing() {
        sluice_skip::skip(&format!("no containers here: {reason}"));
        return Ok(());
    }
    let backend = Backend::start(&Binaries::locate()?, None)?;
    let engine = Engine::new(backend, "direct")?;
    containers(&engine)?;
    let engine = Engine::new(engine.backend.over_stream()?, "vsock")?;
    containers(&engine)?;
    engine.backend.stop()
}
