//! Cgroups of VMs in the whole system: a directory of the kernel's own tree, without controllers, because a host has them only once.

use std::fs;

use anyhow::{Context as _, Result, ensure};
use rustix::process::Signal;
use sluice_kit::wait::until;
use sluice_tests::cgroups::Delegated;
use sluice_tests::direct::TIMEOUT;
use sluice_tests::paths::Binaries;
use sluice_tests::process::signal;
use sluice_tests::programs;
use sluice_tests::tenants::{Options, Tenants};

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
