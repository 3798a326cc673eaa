//! VMs: `sluice create, update, show, list, delete, fence, readmit, drain`.

use anyhow::{Result, ensure};
use sluice_api::{
    ByteSize,
    client::Client,
    v1::{FenceRequest, FenceStep, Isolation, Placement, Policy, Priority, SizeRequest, Vm, VmRequest},
};

use crate::{
    api::{Api, plain, words},
    table::{Table, bytes, limit, text},
};

/// Shares and limits of a VM, or of the VMs of a size.
#[derive(Debug, Default, clap::Args)]
pub(crate) struct Share {
    /// Quota of device memory on each unit, for instance 16GiB
    #[arg(long, value_name = "SIZE")]
    memory: Option<ByteSize>,
    /// Part of --memory that is guaranteed
    #[arg(long, value_name = "SIZE")]
    guaranteed: Option<ByteSize>,
    /// Allowance beside the quota, to which memory the driver takes is charged first [default: 0]
    #[arg(long, value_name = "SIZE")]
    headroom: Option<ByteSize>,
    /// Limit of pinned guest memory
    #[arg(long, value_name = "SIZE")]
    pinned: Option<ByteSize>,
    /// Share of GPU time relative to other VMs; 100 is usual
    #[arg(long, value_name = "N")]
    weight: Option<u32>,
    /// Scheduling priority
    #[arg(long, value_parser = words::<Priority>(["low", "normal", "high"]))]
    priority: Option<Priority>,
    /// Upper limit of a unit's time, in thousandths
    #[arg(long, value_name = "N")]
    cap: Option<u32>,
    /// Guaranteed part of a unit's time in thousandths, available on demand
    #[arg(long, value_name = "N")]
    guarantee: Option<u32>,
}

impl Share {
    /// A size with these shares.
    pub(crate) fn size(&self) -> SizeRequest {
        SizeRequest {
            memory_bytes: self.memory.unwrap_or_default().0,
            guaranteed_bytes: number(self.guaranteed),
            headroom_bytes: number(self.headroom),
            pinned_bytes: number(self.pinned),
            weight: self.weight,
            priority: self.priority,
            cap_permille: self.cap,
            guarantee_permille: self.guarantee,
            policy: None,
            profile: None,
            replicas: None,
        }
    }
}

fn number(size: Option<ByteSize>) -> Option<u64> {
    size.map(|size| size.0)
}

/// Properties of a VM that can be changed.
#[derive(Debug, clap::Args)]
struct Terms {
    /// Named size, which supplies the values not given here
    #[arg(long, value_name = "NAME")]
    size: Option<String>,
    #[command(flatten)]
    share: Share,
    /// Seconds from a fence to automatic readmission
    #[arg(long, value_name = "SECONDS")]
    readmit_after: Option<u32>,
    /// Seconds without a completion of submitted work after which a worker is killed
    #[arg(long, value_name = "SECONDS")]
    hang_after: Option<u32>,
    /// Memory of the guest, for the arguments of its VMM
    #[arg(long, value_name = "SIZE")]
    guest_memory: Option<ByteSize>,
}

impl Terms {
    /// A request with these terms; `request` supplies the rest.
    fn over(&self, request: VmRequest) -> VmRequest {
        let Share { memory, guaranteed, headroom, pinned, weight, priority, cap, guarantee } = self.share;
        VmRequest {
            size: self.size.clone().or(request.size),
            memory_bytes: number(memory).or(request.memory_bytes),
            guaranteed_bytes: number(guaranteed).or(request.guaranteed_bytes),
            headroom_bytes: number(headroom).or(request.headroom_bytes),
            pinned_bytes: number(pinned).or(request.pinned_bytes),
            weight: weight.or(request.weight),
            priority: priority.or(request.priority),
            cap_permille: cap.or(request.cap_permille),
            guarantee_permille: guarantee.or(request.guarantee_permille),
            readmit_after_seconds: self.readmit_after.or(request.readmit_after_seconds),
            hang_after_seconds: self.hang_after.or(request.hang_after_seconds),
            guest_memory_bytes: number(self.guest_memory).or(request.guest_memory_bytes),
            ..request
        }
    }
}

#[derive(Debug, clap::Args)]
pub(crate) struct Create {
    #[command(flatten)]
    api: Api,
    /// Name of the VM, unique in its organisation: letters, digits, '.', '_' and '-'
    name: String,
    #[command(flatten)]
    terms: Terms,
    /// Organisation of the VM
    #[arg(long, value_name = "NAME")]
    organisation: Option<String>,
    /// Project of the VM
    #[arg(long, value_name = "NAME")]
    project: Option<String>,
    /// Kind of unit
    #[arg(long, value_parser = words::<Policy>(["mig", "time-slice", "any"]))]
    policy: Option<Policy>,
    /// Isolation from other VMs: a unit shared by turns, a unit of its own, or a GPU of its own
    #[arg(long, value_parser = words::<Isolation>(["shared", "strict", "strict-plus"]))]
    isolation: Option<Isolation>,
    /// Displays of the graphics device: 1 for guest kernels before 6.12
    #[arg(long, value_name = "N")]
    scanouts: Option<u8>,
    /// Serve programs of this host, which connect to the device themselves; there is no VM
    #[arg(long)]
    direct: bool,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Update {
    #[command(flatten)]
    api: Api,
    /// Name of the VM, or ORGANISATION/NAME if several organisations have a VM of that name
    name: String,
    #[command(flatten)]
    terms: Terms,
}

#[derive(Debug, clap::Args)]
pub(crate) struct One {
    #[command(flatten)]
    api: Api,
    /// Name of the VM, or ORGANISATION/NAME if several organisations have a VM of that name
    name: String,
}

#[derive(Debug, clap::Args)]
pub(crate) struct List {
    #[command(flatten)]
    api: Api,
    /// Show only VMs of this organisation
    #[arg(long, value_name = "NAME")]
    organisation: Option<String>,
    /// Show only VMs of this project
    #[arg(long, value_name = "NAME")]
    project: Option<String>,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Fence {
    #[command(flatten)]
    api: Api,
    /// Name of the VM
    name: String,
    /// Reason, for the log
    #[arg(long, value_name = "TEXT")]
    reason: Option<String>,
}

/// A VM, a unit or a GPU.
#[derive(Debug, clap::Args)]
pub(crate) struct Target {
    #[command(flatten)]
    api: Api,
    /// Name of the VM
    #[arg(required_unless_present_any = ["unit", "gpu"])]
    name: Option<String>,
    /// Number of a unit, instead of a VM
    #[arg(long, value_name = "N", conflicts_with_all = ["name", "gpu"])]
    unit: Option<u32>,
    /// Ordinal of a GPU, instead of a VM
    #[arg(long, value_name = "N", conflicts_with = "name")]
    gpu: Option<u32>,
}

/// Creates a VM, or changes it to match the command line.
pub(crate) fn create(arguments: &Create) -> Result<()> {
    let placement = Placement {
        policy: arguments.policy.unwrap_or_default(),
        isolation: arguments.isolation.unwrap_or_default(),
        ..Placement::default()
    };
    let request = arguments.terms.over(VmRequest {
        organisation: arguments.organisation.clone(),
        project: arguments.project.clone(),
        scanouts: arguments.scanouts.unwrap_or_default(),
        direct: arguments.direct,
        placement: Some(placement).filter(|placement| *placement != Placement::default()),
        ..VmRequest::default()
    });
    let put = arguments.api.ask(|api| api.put_vm(&arguments.name, &request))?;
    let done = if put.made { "made" } else { "there already, and is as said" };
    arguments.api.print(&put.object, |vm| format!("VM {} is {done}\n\n{}", text(&vm.id), connect(vm)))
}

/// Changes the named properties of a VM, and no others.
pub(crate) fn update(arguments: &Update) -> Result<()> {
    let vm = arguments.api.ask(|api| api.vm(&arguments.name))?;
    let request = arguments.terms.over(kept(vm, arguments.terms.size.is_some()));
    let put = arguments.api.ask(|api| api.put_vm(&arguments.name, &request))?;
    arguments.api.print(&put.object, describe)
}

/// A request that leaves a VM as it is. With a new size, it omits the values that a size supplies.
fn kept(vm: Vm, resized: bool) -> VmRequest {
    // What is answered as 0 was not said, and where it could be said 0 is the same.
    let bytes = |bytes: u64| Some(bytes).filter(|bytes| *bytes > 0);
    let number = |number: u32| Some(number).filter(|number| *number > 0);
    let own = VmRequest {
        size: vm.size,
        placement: Some(vm.placement),
        organisation: vm.organisation,
        project: vm.project,
        scanouts: vm.scanouts,
        direct: vm.direct,
        readmit_after_seconds: number(vm.readmit_after_seconds),
        hang_after_seconds: number(vm.hang_after_seconds),
        guest_memory_bytes: vm.guest_memory_bytes,
        ..VmRequest::default()
    };
    if resized {
        return own;
    }
    VmRequest {
        memory_bytes: bytes(vm.memory_bytes),
        guaranteed_bytes: bytes(vm.guaranteed_bytes),
        headroom_bytes: bytes(vm.headroom_bytes),
        pinned_bytes: bytes(vm.pinned_bytes),
        weight: number(vm.weight),
        priority: Some(vm.priority),
        cap_permille: number(vm.cap_permille),
        guarantee_permille: number(vm.guarantee_permille),
        ..own
    }
}

/// Shows a VM.
pub(crate) fn show(arguments: &One) -> Result<()> {
    let vm = arguments.api.ask(|api| api.vm(&arguments.name))?;
    arguments.api.print(&vm, |vm| format!("{}\n{}", describe(vm), connect(vm)))
}

/// Lists VMs.
pub(crate) fn list(arguments: &List) -> Result<()> {
    let mut list = arguments.api.ask(Client::vms)?;
    let is_of = |wanted: &Option<String>, has: &Option<String>| wanted.is_none() || wanted == has;
    list.vms.retain(|vm| {
        is_of(&arguments.organisation, &vm.organisation) && is_of(&arguments.project, &vm.project)
    });
    arguments.api.print(&list, |list| {
        let mut table = Table::new(&[
            "NAME",
            "STATE",
            "ORGANISATION",
            "PROJECT",
            ">MEMORY",
            ">OF",
            ">SESSIONS",
            ">WEIGHT",
            "PRIORITY",
        ]);
        for vm in &list.vms {
            table.row([
                text(&vm.id),
                state(vm),
                text(&vm.organisation),
                text(&vm.project),
                bytes(lent(vm)),
                limit(vm.memory_bytes),
                vm.sessions.len().to_string(),
                text(&vm.weight),
                text(&vm.priority),
            ]);
        }
        table.to_string()
    })
}

/// Deletes a VM.
pub(crate) fn delete(arguments: &One) -> Result<()> {
    arguments.api.ask(|api| api.delete_vm(&arguments.name))?;
    arguments.api.say(|| format!("VM {} is gone", plain(&arguments.name)))
}

/// Fences a VM.
pub(crate) fn fence(arguments: &Fence) -> Result<()> {
    let request = FenceRequest { reason: arguments.reason.clone() };
    let vm = arguments.api.ask(|api| api.fence_vm(&arguments.name, &request))?;
    arguments.api.print(&vm, stands)?;
    ensure!(
        vm.fence.step == FenceStep::Quarantined,
        "it is not quarantined yet; `sluice show` says when it is"
    );
    ensure!(vm.fence.clean, "not everything of it is clean; see the runbook of SluiceFenceUnclean");
    Ok(())
}

/// Readmits a VM, a unit or a GPU.
pub(crate) fn readmit(arguments: &Target) -> Result<()> {
    let api = &arguments.api;
    match (&arguments.name, arguments.unit, arguments.gpu) {
        (Some(name), ..) => api.print(&api.ask(|api| api.readmit_vm(name))?, stands),
        (None, Some(unit), _) => {
            let unit = api.ask(|api| api.readmit_unit(unit))?;
            api.print(&unit, |unit| format!("unit {} is {}", unit.unit, unit.state))
        }
        // One of them is there: the command line says so.
        (None, None, gpu) => {
            let gpu = api.ask(|api| api.readmit_gpu(gpu.unwrap_or_default()))?;
            api.print(&gpu, |gpu| format!("GPU {} is {}", gpu.gpu, gpu.state))
        }
    }
}

/// Drains a VM, a unit or a GPU.
pub(crate) fn drain(arguments: &Target) -> Result<()> {
    let api = &arguments.api;
    match (&arguments.name, arguments.unit, arguments.gpu) {
        (Some(name), ..) => {
            let vm = api.ask(|api| api.drain_vm(name))?;
            api.print(&vm, |vm| {
                format!("VM {} begins no session any more; {} run", text(&vm.id), vm.sessions.len())
            })
        }
        (None, Some(unit), _) => {
            api.ask(|api| api.drain_unit(unit))?;
            api.say(|| format!("no VM comes to unit {unit} any more"))
        }
        (None, None, gpu) => {
            let gpu = api.ask(|api| api.drain_gpu(gpu.unwrap_or_default()))?;
            api.print(&gpu, |gpu| format!("GPU {} is {}", gpu.gpu, gpu.state))
        }
    }
}

/// Device memory lent to a VM on all units.
pub(crate) fn lent(vm: &Vm) -> u64 {
    vm.units.iter().map(|unit| unit.lent_bytes).fold(0, u64::saturating_add)
}

/// State of a VM's device, or of its fence or drain.
pub(crate) fn state(vm: &Vm) -> String {
    match vm.fence.step {
        FenceStep::Active if vm.draining => "draining".to_owned(),
        FenceStep::Active => vm.state.to_string(),
        step => step.to_string(),
    }
}

fn stands(vm: &Vm) -> String {
    let fence = &vm.fence;
    let clean = match (fence.step == FenceStep::Quarantined, fence.clean) {
        (true, true) => ", and everything of it is clean",
        (true, false) => ", and NOT everything of it is clean",
        (false, _) => "",
    };
    format!("VM {} is {} in epoch {}{clean}", text(&vm.id), fence.step, fence.epoch)
}

fn describe(vm: &Vm) -> String {
    let mut lines = vec![format!("VM {} (number {}) is {}", text(&vm.id), vm.number, state(vm))];
    let mut line = |title: &str, value: String| lines.push(format!("  {title:<16} {value}"));
    if let Some(why) = &vm.failure {
        line("failure", plain(why));
    }
    if vm.fence.step != FenceStep::Active {
        line("fenced for", text(&vm.fence.reason));
        line("fenced by", text(&vm.fence.by));
    }
    for (title, name) in [("size", &vm.size), ("organisation", &vm.organisation), ("project", &vm.project)] {
        if name.is_some() {
            line(title, text(name));
        }
    }
    if let Some(owner) = vm.owner_uid {
        line("owner", owner.to_string());
    }
    line(
        "memory",
        format!("{}, of which {} kept for it", limit(vm.memory_bytes), bytes(vm.guaranteed_bytes)),
    );
    line("weight", format!("{}, priority {}", vm.weight, vm.priority));
    line("placement", format!("{}, {}", vm.placement.policy, vm.placement.isolation));
    line("device", vm.device_process.map_or("-".to_owned(), |process| format!("process {process}")));
    for session in &vm.sessions {
        let worker = session.worker.map_or("no worker yet".to_owned(), |pid| format!("worker {pid}"));
        line("session", format!("{}, {worker}", session.session));
    }
    for unit in &vm.units {
        line(
            "unit",
            format!(
                "{}: {} lent, {} of the driver's, {} to be scrubbed, {:.3} s of GPU time",
                unit.unit,
                bytes(unit.lent_bytes),
                bytes(unit.headroom_bytes),
                bytes(unit.dirty_bytes),
                unit.gpu_seconds
            ),
        );
    }
    lines.join("\n") + "\n"
}

/// Connection data for a VMM, in a form for the shell.
fn connect(vm: &Vm) -> String {
    let connect = &vm.connect;
    let words = |list: &[String]| list.iter().map(|word| quoted(word)).collect::<Vec<_>>().join(" ");
    let socket = text(&connect.socket);
    if vm.direct {
        return format!("SLUICE_TRANSPORT=direct SLUICE_SOCKET={socket}\n");
    }
    format!(
        "socket            {socket}\nqemu              {}\ncloud-hypervisor  {}\nvsock             {}\n",
        words(&connect.qemu),
        words(&connect.cloud_hypervisor),
        text(&connect.vsock.socket)
    )
}

/// Quotes a word for the shell.
fn quoted(word: &str) -> String {
    let harmless = |c: char| c.is_ascii_alphanumeric() || "-_=,.:/@%+".contains(c);
    if !word.is_empty() && word.chars().all(harmless) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', r"'\''"))
}

#[cfg(test)]
pub(crate) mod tests {
    use serde_json::json;

    use super::*;

    /// A VM as the API shows it, for the tests of others.
    pub(crate) fn vm() -> Vm {
        serde_json::from_value(json!({
            "id": "a", "number": 1, "state": "running", "configured": false, "draining": false,
            "fence": { "step": "active", "epoch": 1, "clean": false, "reason": "" },
            "memory_bytes": 64, "guaranteed_bytes": 0, "headroom_bytes": 0, "pinned_bytes": 0, "weight": 100, "priority": "normal",
            "cap_permille": 0, "guarantee_permille": 0, "placement": {}, "scanouts": 0, "direct": false, "readmit_after_seconds": 0,
            "hang_after_seconds": 0, "created": 0, "sessions": [], "units": [],
            "connect": { "socket": "/s", "qemu": [], "cloud_hypervisor": [], "vsock": { "socket": "/v", "cloud_hypervisor": [],
                "firecracker": { "guest_cid": 3, "uds_path": "/f" }, "vhost_device_vsock": [], "qemu": [] } },
        }))
        .expect("a VM")
    }

    // Promise: A20
    #[test]
    fn an_update_leaves_what_it_does_not_name() {
        let placement = Placement { isolation: Isolation::Strict, ..Placement::default() };
        let vm = Vm {
            weight: 300,
            priority: Priority::High,
            size: Some("small".to_owned()),
            placement: placement.clone(),
            scanouts: 1,
            ..vm()
        };
        let own = VmRequest {
            size: Some("small".to_owned()),
            scanouts: 1,
            placement: Some(placement),
            ..VmRequest::default()
        };
        assert_eq!(kept(vm.clone(), true), own);
        assert_eq!(
            kept(vm, false),
            VmRequest { memory_bytes: Some(64), weight: Some(300), priority: Some(Priority::High), ..own }
        );
    }

    #[test]
    fn words_are_quoted_for_a_shell() {
        assert_eq!(quoted("socket,id=sluice,path=/run/a.sock"), "socket,id=sluice,path=/run/a.sock");
        assert_eq!(quoted("queue_sizes=[1024,16]"), "'queue_sizes=[1024,16]'");
        assert_eq!(quoted("it's"), r"'it'\''s'");
    }
}
