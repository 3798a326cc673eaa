//! Cgroups of VMs in the whole system: in a directory of the kernel's own tree, without controllers, because a host has them only once,
//! and in a machine with controllers.

use std::fs;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use rustix::process::Signal;
use sluice_kit::wait::until;
use sluice_tests::cgroups::Delegated;
use sluice_tests::debian::{Kernel, Series};
use sluice_tests::direct::TIMEOUT;
use sluice_tests::image::Image;
use sluice_tests::paths::{Binaries, HOST_PROGRAMS};
use sluice_tests::process::signal;
use sluice_tests::programs;
use sluice_tests::tenants::{Options, Tenants};
use sluice_tests::vm::{Guest, GuestCommand, Machine};

/// The cgroup of a process.
fn group_of(process: u32) -> Result<String> {
    let text = fs::read_to_string(format!("/proc/{process}/cgroup")).context("a process")?;
    Ok(text.lines().find_map(|line| line.strip_prefix("0::")).context("a cgroup")?.to_owned())
}

// Promise: F86
#[test]
fn processes_of_a_vm_are_in_its_cgroup_and_leave_none() -> Result<()> {
    let Some(delegated) = Delegated::or_skip()? else { return Ok(()) };
    let directory = delegated.directory().to_str().context("UTF-8")?.to_owned();
    let mut options = Options::with_limits(256, &[64, 64]);
    options.arguments = vec!["--cgroup".to_owned(), directory];
    let tenants = Tenants::start(&Binaries::locate()?, &options)?;
    tenants.wait_settled()?;
    let neighbour = programs::compile_all()?.into_iter().find(|program| program.name == "neighbour");
    let neighbour = neighbour.context("the neighbour")?.path;
    let start = |vm: u32, name: &str| -> Result<_> {
        let mut program = tenants.spawn(vm, name, &neighbour, &["forever"])?;
        program.wait_for_line("computing", TIMEOUT)?;
        Ok(program)
    };
    let (mut one, mut two, mut other) = (start(1, "one")?, start(1, "two")?, start(2, "other")?);
    for vm in [1, 2] {
        let device = group_of(tenants.device(vm)?)?;
        ensure!(device.contains(&format!("/vm-{vm}/device-")), "{device}");
        let mut groups = Vec::new();
        for worker in tenants.workers(vm)? {
            let group = group_of(worker)?;
            ensure!(group.contains(&format!("/vm-{vm}/worker-")), "{group}");
            groups.push(group);
        }
        groups.sort();
        groups.dedup();
        ensure!(groups.len() == if vm == 1 { 2 } else { 1 }, "workers share a cgroup: {groups:?}");
    }
    // A guest process that is killed: its device ends its worker by the cgroup, and no other.
    let workers = |vm: u32| {
        let prefix = format!("vm-{vm}/worker-");
        delegated.groups().into_iter().filter(|group| group.starts_with(&prefix)).count()
    };
    ensure!(workers(1) == 2, "{:?}", delegated.groups());
    signal(one.id(), Signal::KILL)?;
    one.wait(TIMEOUT)?.context("it ends")?;
    ensure!(
        until(|| tenants.workers(1).map_or(0, |workers| workers.len()), |left| *left == 1) == 1,
        "a worker is left"
    );
    for program in [&mut two, &mut other] {
        ensure!(program.is_running()?, "a neighbour ended\n{}", program.printed());
    }
    // A fenced VM: the arbiter ends its workers by their cgroups.
    tenants.fence(1)?;
    two.wait(TIMEOUT)?.context("it ends")?;
    ensure!(
        until(|| tenants.workers(1).map_or(1, |workers| workers.len()), |left| *left == 0) == 0,
        "a worker is left"
    );
    signal(other.id(), Signal::USR1)?;
    let status = other.wait(TIMEOUT)?.context("the neighbour ends")?;
    ensure!(status.success(), "the neighbour noticed:\n{}", other.printed());
    tenants.stop()?;
    let left = delegated.groups();
    ensure!(left.is_empty(), "left behind: {left:?}");
    Ok(())
}

/// Starts `sluiced` with the root's controllers. Its workers of VM 1 are hostile.
const HOST: &str = "set -e; mount -t cgroup2 none /sys/fs/cgroup; cd /sys/fs/cgroup; mkdir sluice; echo +memory +pids > cgroup.subtree_control
echo $$ > sluice/cgroup.procs; mkdir -m 0700 /dev/shm/sluice-softgpu-0 /run/sluice; mkdir /dev/shm/sluice-softgpu-0/liar; cd /usr/libexec/sluice
export SLUICE_SOFTGPU_SCALE=256
exec ./sluiced --driver $PWD/libsoftgpu_cuda.so --nvml $PWD/libsoftgpu_nvml.so --cgroup /sys/fs/cgroup/sluice --runtime-dir /run/sluice 2> /run/sluiced.log";
/// Waits until memory can be lent, makes both VMs, and prints their variables for programs.
const VMS: &str = "PATH=$PATH:/usr/libexec/sluice; for i in $(seq 120); do sluice units 2> /dev/null | grep -q lending && break; sleep 1; done
for name in web-1 web-2; do sluice create $name --direct --memory 64MiB | tail -n 1; done; [ -S /run/sluice/vm-2.sock ] || { tail -n 20 /run/sluiced.log; exit 1; }";

// Promise: F86
#[test]
fn memory_and_thread_bombs_are_held_by_controllers() -> Result<()> {
    let binaries = Binaries::locate()?;
    let kernel = Kernel::fetch(Series::V6_12)?;
    let mut programs = programs::compile_all()?;
    programs.retain(|program| program.name == "vector_add");
    let mut image = Image::with_sluice(&kernel, &binaries, &programs)?;
    for file in HOST_PROGRAMS.into_iter().chain(["libsoftgpu_cuda.so", "libsoftgpu_nvml.so"]) {
        image.program(&binaries.get(file)?, &format!("usr/libexec/sluice/{file}"))?;
    }
    image.program(&binaries.get("sluice-hostile-worker")?, "usr/libexec/sluice/sluice-worker")?;
    let guest =
        Guest::boot(&Machine { cpus: 2, memory_mib: 2048, ..Machine::new("limits") }, &kernel, &image)?;
    let root = |script: &str| GuestCommand::script(script).user("root").limit(Duration::from_secs(240));
    let run = |script: &str| -> Result<String> {
        Ok(guest.start(&root(script))?.wait()?.expect_success().with_context(|| script.to_owned())?.stdout)
    };
    let daemon = guest.start(&root(HOST))?;
    let made = run(VMS)?;
    let variables: Vec<&str> = made.lines().collect();
    let [ours, neighbour] = variables[..] else { anyhow::bail!("{made}") };
    let neighbour = format!("env {neighbour} vector_add");
    let group = "/sys/fs/cgroup/sluice/vm-1";
    for (bomb, sign) in [
        // The worker and no other process of its VM ends.
        ("memory-bomb", format!("grep '^oom_group_kill [1-9]' {group}/memory.events")),
        ("thread-bomb", "grep '^held' /dev/shm/sluice-softgpu-0/liar/report".to_owned()),
    ] {
        let script = format!(
            "echo {bomb} > /dev/shm/sluice-softgpu-0/liar/attack; timeout 200 env {ours} vector_add > /dev/null 2>&1 &
             for i in $(seq 200); do {sign} && exit 0; sleep 1; done; cat {group}/memory.*; exit 1"
        );
        let attack = guest.start(&root(&script))?;
        ensure!(run(&neighbour)?.contains("PASS"), "the neighbour of a {bomb}");
        println!(
            "{bomb}: {}",
            attack.wait()?.expect_success().with_context(|| bomb.to_owned())?.stdout.trim()
        );
        ensure!(run(&neighbour)?.contains("PASS"), "the neighbour after a {bomb}");
    }
    let devices = run(&format!("cat {group}/device-*/cgroup.procs"))?;
    ensure!(devices.lines().count() == 1, "the device of the VM: {devices:?}");
    daemon.signal(Signal::TERM)?;
    daemon.wait()?.expect_success()?;
    guest.kill()
}
