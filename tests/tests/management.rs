//! The management library in the guests of two VMs at once, on memory that an arbiter lends.

use std::collections::BTreeMap;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use sluice_api::v1::VmRequest;
use sluice_kit::wait::until;
use sluice_tests::direct::TIMEOUT;
use sluice_tests::holder::Holder;
use sluice_tests::management::make_vms;
use sluice_tests::paths::{Binaries, HOST_PROGRAMS};
use sluice_tests::process::{Background, output_of};
use sluice_tests::programs;
use tempfile::TempDir;

const MIB: u64 = 1 << 20;
const MEMORY: [u64; 2] = [1024 * MIB, 512 * MIB];

/// `sluiced` with two DIRECT VMs for programs of this host, and a software GPU of its own.
struct Host {
    _daemon: Background,
    folder: TempDir,
    _device: TempDir,
}

impl Host {
    fn start() -> Result<Self> {
        let binaries = Binaries::locate()?;
        let folder = tempfile::tempdir().context("a folder for sockets")?;
        let device = tempfile::tempdir_in("/dev/shm").context("a folder for a device")?;
        let libraries = folder.path().join("lib");
        std::fs::create_dir(&libraries)?;
        for (file, name) in
            [("libsluice_guest.so", "libcuda.so.1"), ("libsluice_guest_nvml.so", "libnvidia-ml.so.1")]
        {
            symlink(binaries.get(file)?, libraries.join(name))?;
        }
        let mut command = Command::new(binaries.get("sluiced")?);
        command.arg("--runtime-dir").arg(folder.path().join("run"));
        command.arg("--driver").arg(binaries.get("libsoftgpu_cuda.so")?);
        command.arg("--nvml").arg(binaries.get("libsoftgpu_nvml.so")?);
        command.arg("--libexec").arg(binaries.folder());
        for needed in HOST_PROGRAMS {
            binaries.get(needed)?;
        }
        command.env("SLUICE_SOFTGPU_STATE", device.path()).env("SLUICE_LOG", "info");
        let daemon = Background::start("sluiced", &mut command, &folder.path().join("log"))?;
        let wanted = |memory| VmRequest { direct: true, memory_bytes: Some(memory), ..VmRequest::default() };
        let vms: Vec<_> = (1..).zip(MEMORY.map(wanted)).collect();
        let start = Instant::now();
        // The first line is of its first unit, which has to be there before its API is.
        while !daemon.printed().contains("lends") {
            ensure!(start.elapsed() < TIMEOUT, "no memory is lent\n{}", daemon.printed());
            std::thread::sleep(Duration::from_millis(20));
        }
        make_vms(&folder.path().join("run/api.sock"), &vms)?;
        Ok(Self { _daemon: daemon, folder, _device: device })
    }

    /// The output of the guest's tool in a VM.
    fn smi(&self, vm: u32, arguments: &[&str]) -> Result<String> {
        let mut command = Command::new(Binaries::locate()?.get("sluice-smi")?);
        self.in_vm(command.args(arguments), vm);
        output_of(&mut command, TIMEOUT)
    }

    fn in_vm(&self, command: &mut Command, vm: u32) {
        command.env("LD_LIBRARY_PATH", self.folder.path().join("lib"));
        command.env("SLUICE_TRANSPORT", "direct");
        command.env("SLUICE_SOCKET", self.folder.path().join(format!("run/vm-{vm}.sock")));
    }

    /// A program in a VM that holds `mebibytes` MiB.
    fn holder(&self, program: &Path, vm: u32, mebibytes: u64) -> Result<Holder> {
        let mut command = Command::new(program);
        self.in_vm(command.arg(mebibytes.to_string()), vm);
        let mut holder = Holder::start(&mut command)?;
        holder.expect("ready")?;
        Ok(holder)
    }
}

/// A process's view of its device.
#[derive(Debug, PartialEq, Eq)]
struct View {
    total: u64,
    used: u64,
    processes: BTreeMap<u32, u64>,
}

fn look(holder: &mut Holder) -> Result<View> {
    let line = holder.ask()?;
    let numbers: Vec<u64> =
        line.split(' ').map(str::parse).collect::<Result<_, _>>().with_context(|| line.clone())?;
    let [total, used, ref processes @ ..] = numbers[..] else { anyhow::bail!("{line}") };
    let processes = processes
        .chunks_exact(2)
        .map(|pair| Ok((u32::try_from(pair[0])?, pair[1])))
        .collect::<Result<_>>()?;
    Ok(View { total, used, processes })
}

/// Each sees its own VM's quota as the device's size, all processes of its VM with their memory, and nothing of the other
/// VM; a killed process disappears.
// Promise: C103, G10
#[test]
fn each_vm_sees_its_quota_and_its_own_processes() -> Result<()> {
    let programs = programs::compile_all()?;
    let program = programs.iter().find(|program| program.name == "management").context("the program")?;
    let host = Host::start()?;
    let mut one = host.holder(&program.path, 1, 33)?;
    let mut two = host.holder(&program.path, 1, 70)?;
    let mut stranger = host.holder(&program.path, 2, 5)?;

    // Between two looks the driver may take or give back some of its own memory.
    let views = until(
        || Ok::<_, anyhow::Error>((look(&mut one)?, look(&mut two)?)),
        |views| !matches!(views, Ok((one, two)) if one != two),
    )?;
    ensure!(views.0 == views.1, "{views:?}");
    let (view, _) = views;
    ensure!(view.total == MEMORY[0] && view.used == view.processes.values().sum::<u64>(), "{view:?}");
    let held = |holder: &Holder| view.processes.get(&holder.id()).copied().unwrap_or(0);
    ensure!(view.processes.len() == 2 && held(&one) >= 33 * MIB && held(&two) >= 70 * MIB, "{view:?}");

    let view = look(&mut stranger)?;
    let own = BTreeMap::from([(stranger.id(), view.used)]);
    ensure!(view == View { total: MEMORY[1], used: view.used, processes: own }, "{view:?}");
    ensure!((5 * MIB..33 * MIB).contains(&view.used), "{view:?}");

    // The tool for people and scripts shows the same.
    let bytes = |bytes: u64| bytes / MIB;
    let query = "--query-gpu=index,memory.total,memory.used";
    let shows_the_same = until(
        || -> Result<bool> {
            let printed = host.smi(1, &[query, "--format=csv,noheader,nounits"])?;
            let programs = host.smi(1, &["--query-compute-apps=pid,used_memory", "--format=csv,noheader"])?;
            let view = look(&mut two)?;
            println!("{printed}{programs}{view:?}");
            let of_program = |(process, held): (&u32, &u64)| format!("{process}, {} MiB\n", bytes(*held));
            let lines: Vec<String> = view.processes.iter().map(of_program).collect();
            Ok(printed == format!("0, {}, {}\n", bytes(view.total), bytes(view.used))
                && lines.iter().all(|line| programs.contains(line))
                && programs.lines().count() == lines.len())
        },
        |same| !matches!(same, Ok(false)),
    )?;
    ensure!(shows_the_same, "the tool shows other figures than the library");
    let table = host.smi(2, &[])?;
    ensure!(table.contains("MiB /    512MiB") && !table.contains(&one.id().to_string()), "{table}");
    let list = host.smi(2, &["-L"])?;
    ensure!(list.starts_with("GPU 0: ") && list.contains("(UUID: GPU-"), "{list}");
    let report = host.smi(2, &["-q", "-d", "MEMORY"])?;
    ensure!(report.contains("Total                                     : 512 MiB\n"), "{report}");

    drop(one);
    let start = Instant::now();
    loop {
        let view = look(&mut two)?;
        if view.processes == BTreeMap::from([(two.id(), view.used)]) {
            return Ok(());
        }
        ensure!(start.elapsed() < TIMEOUT, "{view:?}");
        std::thread::sleep(Duration::from_millis(10));
    }
}
