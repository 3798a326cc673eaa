//! VMs: `sluice create, update, show, list, delete, fence, readmit, drain`.

use anyhow::{Result, ensure};
use sluice_api::{
    ByteSize,
    client::Client,
    v1::{
        ArenaPolicy, FenceRequest, FenceStep, Isolation, MemoryShareRequest, Placement, Policy, RulesRequest,
        SettingsRequest as _, TimeShareRequest, Vm, VmRequest,
    },
};

use crate::{
    api::{Api, plain, words},
    settings::SettingOptions,
    table::{Table, bytes, limit, text},
};

/// Shares and limits of a VM, or of the VMs of a size.
#[derive(Debug, clap::Args)]
pub(crate) struct ShareOptions {
    /// Quota of device memory on each unit, for instance 16GiB
    #[arg(long, value_name = "SIZE")]
    pub(crate) memory: Option<ByteSize>,
    #[command(flatten)]
    pub(crate) share: SettingOptions<MemoryShareRequest>,
    #[command(flatten)]
    pub(crate) time: SettingOptions<TimeShareRequest>,
}

fn number(size: Option<ByteSize>) -> Option<u64> {
    size.map(|size| size.0)
}

/// Properties of a VM that can be changed.
#[derive(Debug, clap::Args)]
struct TermOptions {
    /// Named size, which supplies the values not given here
    #[arg(long, value_name = "NAME")]
    size: Option<String>,
    #[command(flatten)]
    share: ShareOptions,
    #[command(flatten)]
    rules: SettingOptions<RulesRequest>,
    /// Memory of the guest, for the arguments of its VMM
    #[arg(long, value_name = "SIZE")]
    guest_memory: Option<ByteSize>,
}

impl TermOptions {
    /// A request with these terms; `request` supplies the rest.
    fn over(&self, request: VmRequest) -> VmRequest {
        let ShareOptions { memory, share, time } = &self.share;
        VmRequest {
            size: self.size.clone().or(request.size),
            memory_bytes: number(*memory).or(request.memory_bytes),
            share: share.0.or(request.share),
            time: time.0.or(request.time),
            rules: self.rules.0.or(request.rules),
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
    terms: TermOptions,
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
    #[arg(long, value_parser = words::<Isolation>(["shared", "strict", "exclusive-gpu"]))]
    isolation: Option<Isolation>,
    /// Ordinals of the GPUs that it gets together, each whole, for instance 0,1. Needs an operator
    #[arg(long, value_name = "N,N…", value_delimiter = ',')]
    gpus: Vec<u32>,
    /// Displays of the graphics device: 1 for guest kernels before 6.12
    #[arg(long, value_name = "N")]
    scanouts: Option<u8>,
    /// Serve programs of this host, which connect to the device themselves; there is no VM
    #[arg(long)]
    direct: bool,
    #[command(flatten)]
    arena: ArenaOptions,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Update {
    #[command(flatten)]
    api: Api,
    /// Name of the VM, or ORGANISATION/NAME if several organisations have a VM of that name
    name: String,
    #[command(flatten)]
    terms: TermOptions,
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
pub(crate) struct FenceOptions {
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
pub(crate) struct FenceTarget {
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

/// Growth of the memory that a guest process shares with its worker.
#[derive(Debug, Default, clap::Args)]
pub(crate) struct ArenaOptions {
    /// Growth of the memory that each guest process shares with its worker: fixed keeps the rest of the guest's memory from a
    /// compromised worker
    #[arg(long, value_parser = words::<ArenaPolicy>(["growing", "fixed"]))]
    arena: Option<ArenaPolicy>,
    /// Size of a fixed arena [default: 64MiB]
    #[arg(long, value_name = "SIZE")]
    arena_size: Option<ByteSize>,
}

impl ArenaOptions {
    /// A request with these options; `request` supplies the rest.
    pub(crate) fn over(&self, request: VmRequest) -> VmRequest {
        VmRequest {
            arena: self.arena.unwrap_or(request.arena),
            arena_bytes: number(self.arena_size).or(request.arena_bytes),
            ..request
        }
    }
}

/// Creates a VM, or changes it to match the command line.
pub(crate) fn create(arguments: &Create) -> Result<()> {
    let placement = Placement {
        policy: arguments.policy.unwrap_or_default(),
        isolation: arguments.isolation.unwrap_or_default(),
        gpus: arguments.gpus.clone(),
        ..Placement::default()
    };
    let request = arguments.arena.over(VmRequest {
        organisation: arguments.organisation.clone(),
        project: arguments.project.clone(),
        scanouts: arguments.scanouts.unwrap_or_default(),
        direct: arguments.direct,
        placement: Some(placement).filter(|placement| *placement != Placement::default()),
        ..VmRequest::default()
    });
    let request = arguments.terms.over(request);
    let put = arguments.api.ask(|api| api.put_vm(&arguments.name, &request))?;
    let done = if put.made { "made" } else { "there already, with these properties" };
    arguments.api.print(&put.object, |vm| format!("VM {} is {done}\n\n{}", text(&vm.id), connect(vm)))
}

/// Changes only the named properties of a VM.
pub(crate) fn update(arguments: &Update) -> Result<()> {
    let vm = arguments.api.ask(|api| api.vm(&arguments.name))?;
    let request = arguments.terms.over(kept(vm, arguments.terms.size.is_some()));
    let put = arguments.api.ask(|api| api.put_vm(&arguments.name, &request))?;
    arguments.api.print(&put.object, describe)
}

/// A request that leaves a VM as it is. With a new size, it omits the values that a size supplies.
fn kept(vm: Vm, resized: bool) -> VmRequest {
    let own = VmRequest {
        size: vm.size,
        placement: Some(vm.placement),
        organisation: vm.organisation,
        project: vm.project,
        scanouts: vm.scanouts,
        direct: vm.direct,
        arena: vm.arena,
        arena_bytes: vm.arena_bytes,
        rules: RulesRequest::keeping(vm.rules),
        guest_memory_bytes: vm.guest_memory_bytes,
        ..VmRequest::default()
    };
    if resized {
        return own;
    }
    VmRequest {
        // No request says that there is no quota.
        memory_bytes: Some(vm.memory_bytes).filter(|bytes| *bytes > 0),
        share: MemoryShareRequest::keeping(vm.share),
        time: TimeShareRequest::keeping(vm.time),
        ..own
    }
}

pub(crate) fn show(arguments: &One) -> Result<()> {
    let vm = arguments.api.ask(|api| api.vm(&arguments.name))?;
    arguments.api.print(&vm, |vm| format!("{}\n{}", describe(vm), connect(vm)))
}

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
                text(&vm.time.weight),
                text(&vm.time.priority),
            ]);
        }
        table.to_string()
    })
}

pub(crate) fn delete(arguments: &One) -> Result<()> {
    arguments.api.ask(|api| api.delete_vm(&arguments.name))?;
    arguments.api.say(|| format!("VM {} is gone", plain(&arguments.name)))
}

pub(crate) fn fence(arguments: &FenceOptions) -> Result<()> {
    let request = FenceRequest { reason: arguments.reason.clone() };
    let vm = arguments.api.ask(|api| api.fence_vm(&arguments.name, &request))?;
    arguments.api.print(&vm, stands)?;
    ensure!(
        vm.fence.step == FenceStep::Quarantined,
        "it is not quarantined yet; `sluice show` shows its state"
    );
    ensure!(vm.fence.clean, "its memory is not clean yet; see the runbook of SluiceFenceUnclean");
    Ok(())
}

/// Readmits a VM, a unit or a GPU.
pub(crate) fn readmit(arguments: &FenceTarget) -> Result<()> {
    let api = &arguments.api;
    match (&arguments.name, arguments.unit, arguments.gpu) {
        (Some(name), ..) => api.print(&api.ask(|api| api.readmit_vm(name))?, stands),
        (None, Some(unit), _) => {
            let unit = api.ask(|api| api.readmit_unit(unit))?;
            api.print(&unit, |unit| format!("unit {} is {}", unit.unit, unit.state))
        }
        // The command line guarantees that one of the three is given.
        (None, None, gpu) => {
            let gpu = api.ask(|api| api.readmit_gpu(gpu.unwrap_or_default()))?;
            api.print(&gpu, |gpu| format!("GPU {} is {}", gpu.gpu, gpu.state))
        }
    }
}

/// Drains a VM, a unit or a GPU.
pub(crate) fn drain(arguments: &FenceTarget) -> Result<()> {
    let api = &arguments.api;
    match (&arguments.name, arguments.unit, arguments.gpu) {
        (Some(name), ..) => {
            let vm = api.ask(|api| api.drain_vm(name))?;
            api.print(&vm, |vm| {
                format!("VM {} begins no new session; {} are running", text(&vm.id), vm.sessions.len())
            })
        }
        (None, Some(unit), _) => {
            api.ask(|api| api.drain_unit(unit))?;
            api.say(|| format!("unit {unit} gets no new VM"))
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
        (true, true) => ", and its memory is clean",
        (true, false) => ", and its memory is NOT clean",
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
        format!("{}, of which {} kept for it", limit(vm.memory_bytes), bytes(vm.share.guaranteed_bytes)),
    );
    line("weight", format!("{}, priority {}", vm.time.weight, vm.time.priority));
    line("placement", format!("{}, {}", vm.placement.policy, vm.placement.isolation));
    let arena = vm.arena_bytes.map_or("-".to_owned(), bytes);
    line("arena", format!("{}, {arena}", vm.arena));
    line("device", vm.device_process.map_or("-".to_owned(), |process| format!("process {process}")));
    for session in &vm.sessions {
        let worker = session.worker.map_or("no worker yet".to_owned(), |pid| format!("worker {pid}"));
        line("session", format!("{}, {worker}", session.session));
    }
    for unit in &vm.units {
        line(
            "unit",
            format!(
                "{}: {} lent, {} of the driver, {} to be scrubbed, {:.3} s of GPU time",
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
    use sluice_api::v1::{MemoryShare, Priority, TimeShare};

    use super::*;

    /// A VM of the API, also for the tests of other modules.
    pub(crate) fn vm() -> Vm {
        serde_json::from_value(json!({
            "id": "a", "number": 1, "state": "running", "draining": false,
            "fence": { "step": "active", "epoch": 1, "clean": false, "reason": "" },
            "memory_bytes": 64, "guaranteed_bytes": 0, "headroom_bytes": 0, "pinned_bytes": 0, "weight": 100, "priority": "normal",
            "cap_permille": 0, "guarantee_permille": 0, "placement": {}, "scanouts": 0, "direct": false, "arena": "growing",
            "readmit_after_seconds": 0, "hang_after_seconds": 0, "created": 0, "sessions": [], "units": [],
            "connect": { "socket": "/s", "qemu": [], "cloud_hypervisor": [], "vsock": { "socket": "/v", "cloud_hypervisor": [],
                "firecracker": { "guest_cid": 3, "uds_path": "/f" }, "vhost_device_vsock": [], "qemu": [] } },
        }))
        .expect("a VM")
    }

    // Promise: A20
    #[test]
    fn update_keeps_fields_that_it_does_not_name() {
        let placement = Placement { isolation: Isolation::Strict, ..Placement::default() };
        let vm = Vm {
            time: TimeShare { weight: 300, priority: Priority::High, ..TimeShare::default() },
            size: Some("small".to_owned()),
            placement: placement.clone(),
            scanouts: 1,
            arena: ArenaPolicy::Fixed,
            arena_bytes: Some(64 << 20),
            ..vm()
        };
        let own = VmRequest {
            size: Some("small".to_owned()),
            scanouts: 1,
            arena: ArenaPolicy::Fixed,
            arena_bytes: Some(64 << 20),
            placement: Some(placement),
            ..VmRequest::default()
        };
        assert_eq!(kept(vm.clone(), true), own);
        assert_eq!(
            kept(vm, false),
            VmRequest {
                memory_bytes: Some(64),
                share: MemoryShareRequest::keeping(MemoryShare::default()),
                time: TimeShareRequest {
                    weight: Some(300),
                    priority: Some(Priority::High),
                    ..TimeShareRequest::keeping(TimeShare::default())
                },
                ..own
            }
        );
    }

    #[test]
    fn words_with_shell_characters_are_quoted() {
        assert_eq!(quoted("socket,id=sluice,path=/run/a.sock"), "socket,id=sluice,path=/run/a.sock");
        assert_eq!(quoted("queue_sizes=[1024,16]"), "'queue_sizes=[1024,16]'");
        assert_eq!(quoted("it's"), r"'it'\''s'");
    }
}
