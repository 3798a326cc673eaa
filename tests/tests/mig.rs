//! VMs on MIG instances that are made for them, on a software GPU: what each sees, and that the slices come back.

use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};
use sluice_tests::direct::PATIENCE;
use sluice_tests::management;
use sluice_tests::paths::Binaries;
use sluice_tests::process::{Background, kill};
use sluice_tests::programs;
use tempfile::TempDir;

const MIB: u64 = 1 << 20;

/// `sluiced` without a VM, and a software H100 in MIG mode.
struct Host {
    daemon: Option<Background>,
    binaries: Binaries,
    folder: TempDir,
    device: TempDir,
}

impl Host {
    fn start() -> Result<Self> {
        let binaries = Binaries::locate()?;
        let folder = tempfile::tempdir().context("a folder for sockets")?;
        let device = tempfile::tempdir_in("/dev/shm").context("a folder for a device")?;
        let libraries = folder.path().join("lib");
        std::fs::create_dir(&libraries)?;
        symlink(binaries.get("libsluice_guest.so")?, libraries.join("libcuda.so.1"))?;
        for needed in
            ["sluice-arbiter", "sluice-inventory", "sluice-device", "sluice-worker", "sluice-launcher"]
        {
            binaries.get(needed)?;
        }
        let daemon = Some(launch(&binaries, folder.path(), device.path())?);
        let host = Self { daemon, binaries, folder, device };
        host.wait_for("it is ready", |host| Ok(host.api("GET", "/readyz", None)?.0 == 200))?;
        Ok(host)
    }

    /// Ends the daemon as a crash does, and starts the next.
    fn restart(&mut self) -> Result<()> {
        // It is killed, and gone before the next begins.
        if let Some(daemon) = self.daemon.take() {
            kill(daemon.id());
        }
        self.daemon = Some(launch(&self.binaries, self.folder.path(), self.device.path())?);
        self.wait_for("it is ready again", |host| Ok(host.api("GET", "/readyz", None)?.0 == 200))
    }

    fn printed(&self) -> String {
        self.daemon.as_ref().map(Background::printed).unwrap_or_default()
    }

    fn wait_for(&self, what: &str, wanted: impl Fn(&Self) -> Result<bool>) -> Result<()> {
        let start = Instant::now();
        while !wanted(self).unwrap_or(false) {
            ensure!(start.elapsed() < PATIENCE, "not in time: {what}\n{}", self.printed());
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }

    fn api(&self, method: &str, path: &str, body: Option<&Value>) -> Result<(u16, Value)> {
        management::ask(&self.folder.path().join("run/api.sock"), method, path, body)
    }

    fn put(&self, vm: &str, placement: &Value) -> Result<Value> {
        let wanted = json!({ "direct": true, "placement": placement });
        let (status, vm) = self.api("PUT", &format!("/v1/vms/{vm}"), Some(&wanted))?;
        ensure!(status == 201, "{vm}\n{}", self.printed());
        Ok(vm)
    }

    /// How many instances of each kind could still be made.
    fn capacity(&self) -> Result<Value> {
        let (_, capacity) = self.api("GET", "/v1/capacity", None)?;
        Ok(capacity["instances"].clone())
    }

    fn units(&self) -> Result<Vec<Value>> {
        let (_, units) = self.api("GET", "/v1/units", None)?;
        Ok(units["units"].as_array().context("units")?.clone())
    }

    /// A program in a VM that has taken all memory it could have.
    fn holder(&self, program: &Path, vm: &Value, pattern: u32) -> Result<Holder> {
        let mut command = Command::new(program);
        command.arg(pattern.to_string()).stdin(Stdio::piped()).stdout(Stdio::piped());
        command.env("LD_LIBRARY_PATH", self.folder.path().join("lib")).env("SLUICE_TRANSPORT", "direct");
        command.env("SLUICE_SOCKET", vm["connect"]["socket"].as_str().context("a socket")?);
        let mut child = command.spawn().context("starting a program")?;
        let input = child.stdin.take().context("piped")?;
        let output = BufReader::new(child.stdout.take().context("piped")?);
        let mut holder = Holder { child, input, output, total: 0, multiprocessors: 0, held: 0 };
        let seen = holder.line()?;
        let numbers: Vec<u64> =
            seen.split(' ').map(str::parse).collect::<Result<_, _>>().with_context(|| seen.clone())?;
        let [1, total, multiprocessors] = numbers[..] else { anyhow::bail!("{seen}") };
        let held = holder.line()?;
        let held = held.strip_prefix("holding ").with_context(|| held.clone())?.parse()?;
        (holder.total, holder.multiprocessors, holder.held) = (total, multiprocessors, held);
        Ok(holder)
    }
}

fn launch(binaries: &Binaries, folder: &Path, device: &Path) -> Result<Background> {
    let mut command = Command::new(binaries.get("sluiced")?);
    command.arg("--runtime-dir").arg(folder.join("run")).arg("--libexec").arg(binaries.folder());
    command.arg("--driver").arg(binaries.get("libsoftgpu_cuda.so")?);
    command.arg("--nvml").arg(binaries.get("libsoftgpu_nvml.so")?).args(["--vm-numbers", "1:100"]);
    command.env("SLUICE_SOFTGPU_STATE", device).env("SLUICE_SOFTGPU_SCALE", "128");
    command.env("SLUICE_SOFTGPU_MODEL", "H100-80").env("SLUICE_SOFTGPU_MIG", "1").env("SLUICE_LOG", "info");
    Background::start("sluiced", &mut command, &folder.join("log"))
}

struct Holder {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
    total: u64,
    multiprocessors: u64,
    held: u64,
}

impl Holder {
    fn line(&mut self) -> Result<String> {
        let mut line = String::new();
        self.output.read_line(&mut line)?;
        Ok(line.trim_end().to_owned())
    }

    fn look(&mut self) -> Result<()> {
        self.input.write_all(b"\n")?;
        let line = self.line()?;
        ensure!(line == "as it should be", "{line}");
        Ok(())
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Two VMs on one GPU, each on an instance that was made for it: it sees the memory and the multiprocessors of that one, has
/// all of it whatever the other does, and is where it was after a crash of the daemon. The slices of a VM that is deleted
/// are free again.
// Promise: P21, P23
#[test]
fn vms_have_instances_of_their_own_and_give_them_back() -> Result<()> {
    let program = programs::hostile("instance")?;
    let mut host = Host::start()?;
    let empty = host.capacity()?;
    ensure!(host.units()?.is_empty(), "{:?}", host.units()?);

    let small = host.put("small", &json!({ "policy": "mig", "profile": "2g.20gb" }))?;
    let large = host.put("large", &json!({ "policy": "mig", "profile": "3g.40gb" }))?;
    ensure!(small["placed"]["profile"] == "2g.20gb" && large["placed"]["kind"] == "mig", "{small} {large}");
    ensure!(host.capacity()? != empty, "nothing was made");
    let (status, refused) = host.api(
        "PUT",
        "/v1/vms/whole",
        Some(&json!({ "direct": true, "placement": { "policy": "mig", "profile": "7g.80gb" } })),
    )?;
    ensure!(status == 409 && refused["code"] == "placement-unavailable", "{refused}");

    let mut two = host.holder(&program, &small, 2)?;
    let mut three = host.holder(&program, &large, 3)?;
    ensure!((two.multiprocessors, three.multiprocessors) == (32, 60), "{}", two.multiprocessors);
    ensure!(two.total < three.total && two.held > 0 && three.held > two.held, "{} {}", two.held, three.held);
    // All that is lent is held, by each at once.
    ensure!(two.total - two.held <= 16 * MIB && three.total - three.held <= 16 * MIB, "{}", two.held);
    two.look()?;
    three.look()?;
    drop(two);
    three.look()?;
    drop(three);

    let before: Vec<Value> = host.units()?.into_iter().map(|unit| unit["uuid"].clone()).collect();
    host.restart()?;
    let after: Vec<Value> = host.units()?.into_iter().map(|unit| unit["uuid"].clone()).collect();
    ensure!(before == after && after.len() == 2, "{before:?} {after:?}");
    let (_, again) = host.api("GET", "/v1/vms/small", None)?;
    ensure!(again["placed"] == small["placed"], "{again}");
    host.holder(&program, &again, 4)?.look()?;

    for vm in ["small", "large"] {
        ensure!(host.api("DELETE", &format!("/v1/vms/{vm}"), None)?.0 == 204, "{vm} is not deleted");
    }
    host.wait_for("the slices are free", |host| Ok(host.units()?.is_empty() && host.capacity()? == empty))
}
