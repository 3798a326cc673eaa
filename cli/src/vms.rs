//! VMs: `sluice create, update, show, list, delete, fence, readmit, drain`.

use anyhow::{Result, ensure};
use serde_json::{Map, Value, json};
use sluice_daemon::configuration::Size;

use crate::{
    api::{Api, part, plain},
    table::{Table, bytes, items, limit, sum, text},
};

/// What a VM, or VMs of a size, may have.
#[derive(Debug, Default, clap::Args)]
pub(crate) struct Share {
    /// Device memory it may have of each unit, for instance 16GiB
    #[arg(long, value_name = "SIZE")]
    pub(crate) memory: Option<Size>,
    /// Of that, what is kept for it
    #[arg(long, value_name = "SIZE")]
    guaranteed: Option<Size>,
    /// Memory beside the quota, to which what the driver takes is charged first [default: 0]
    #[arg(long, value_name = "SIZE")]
    headroom: Option<Size>,
    /// Guest memory it may have pinned
    #[arg(long, value_name = "SIZE")]
    pinned: Option<Size>,
    /// Share of GPU time in relation to others; 100 is usual
    #[arg(long, value_name = "N")]
    weight: Option<u32>,
    /// Whose work goes first
    #[arg(long, value_parser = ["low", "normal", "high"])]
    priority: Option<String>,
    /// Thousandths of a unit's time that it never exceeds
    #[arg(long, value_name = "N")]
    cap: Option<u32>,
    /// Thousandths of a unit's time that it has whenever it wants them
    #[arg(long, value_name = "N")]
    guarantee: Option<u32>,
}

impl Share {
    /// Enters what was given into a request.
    pub(crate) fn enter(&self, request: &mut Map<String, Value>) {
        let size = |size: Option<Size>| size.map(|size| size.0.into());
        let given = [
            ("memory_bytes", size(self.memory)),
            ("guaranteed_bytes", size(self.guaranteed)),
            ("headroom_bytes", size(self.headroom)),
            ("pinned_bytes", size(self.pinned)),
            ("weight", self.weight.map(Into::into)),
            ("priority", self.priority.clone().map(Into::into)),
            ("cap_permille", self.cap.map(Into::into)),
            ("guarantee_permille", self.guarantee.map(Into::into)),
        ];
        enter(request, given);
    }
}

fn enter<const N: usize>(request: &mut Map<String, Value>, given: [(&str, Option<Value>); N]) {
    for (field, value) in given {
        if let Some(value) = value {
            request.insert(field.to_owned(), value);
        }
    }
}

/// What can be changed of a VM.
#[derive(Debug, clap::Args)]
struct Terms {
    /// A named size, which gives what is not said here
    #[arg(long, value_name = "NAME")]
    size: Option<String>,
    #[command(flatten)]
    share: Share,
    /// Seconds after which it is admitted again when it was fenced
    #[arg(long, value_name = "SECONDS")]
    readmit_after: Option<u32>,
    /// Seconds after which work of which nothing ends makes its worker be ended
    #[arg(long, value_name = "SECONDS")]
    hang_after: Option<u32>,
    /// Memory of the guest, for the arguments of its VMM
    #[arg(long, value_name = "SIZE")]
    guest_memory: Option<Size>,
}

impl Terms {
    fn enter(&self, request: &mut Map<String, Value>) {
        self.share.enter(request);
        enter(
            request,
            [
                ("size", self.size.clone().map(Into::into)),
                ("readmit_after_seconds", self.readmit_after.map(Into::into)),
                ("hang_after_seconds", self.hang_after.map(Into::into)),
                ("guest_memory_bytes", self.guest_memory.map(|size| size.0.into())),
            ],
        );
    }
}

#[derive(Debug, clap::Args)]
pub(crate) struct Create {
    #[command(flatten)]
    api: Api,
    /// Its name: letters, digits, '.', '_' and '-'; no other VM of its organisation has it
    name: String,
    #[command(flatten)]
    terms: Terms,
    /// Its organisation
    #[arg(long, value_name = "NAME")]
    organisation: Option<String>,
    /// Its project
    #[arg(long, value_name = "NAME")]
    project: Option<String>,
    /// On what kind of unit it may be
    #[arg(long, value_parser = ["mig", "time-slice", "any"])]
    policy: Option<String>,
    /// With whom it may be there: with others by turns, on a unit of its own, on a GPU of its own
    #[arg(long, value_parser = ["shared", "strict", "strict-plus"])]
    isolation: Option<String>,
    /// Displays of its graphics device: 1 for guest kernels before 6.12
    #[arg(long, value_name = "N")]
    scanouts: Option<u8>,
    /// There is no VM: programs of this host connect to the device themselves
    #[arg(long)]
    direct: bool,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Update {
    #[command(flatten)]
    api: Api,
    /// Its name, or ORGANISATION/NAME where several organisations have one of that name
    name: String,
    #[command(flatten)]
    terms: Terms,
}

#[derive(Debug, clap::Args)]
pub(crate) struct One {
    #[command(flatten)]
    api: Api,
    /// Its name, or ORGANISATION/NAME where several organisations have one of that name
    name: String,
}

#[derive(Debug, clap::Args)]
pub(crate) struct List {
    #[command(flatten)]
    api: Api,
    /// Only those of this organisation
    #[arg(long, value_name = "NAME")]
    organisation: Option<String>,
    /// Only those of this project
    #[arg(long, value_name = "NAME")]
    project: Option<String>,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Fence {
    #[command(flatten)]
    api: Api,
    /// The VM
    name: String,
    /// Why, for the log
    #[arg(long, value_name = "TEXT")]
    reason: Option<String>,
}

/// A VM, or a unit or GPU instead.
#[derive(Debug, clap::Args)]
pub(crate) struct Target {
    #[command(flatten)]
    api: Api,
    /// The VM
    #[arg(required_unless_present_any = ["unit", "gpu"])]
    name: Option<String>,
    /// A unit instead
    #[arg(long, value_name = "N", conflicts_with_all = ["name", "gpu"])]
    unit: Option<u32>,
    /// A GPU instead
    #[arg(long, value_name = "N", conflicts_with = "name")]
    gpu: Option<u32>,
}

pub(crate) fn path(name: &str) -> String {
    format!("/v1/vms/{}", part(name))
}

/// Makes a VM, or changes it to be as said.
pub(crate) fn create(arguments: &Create) -> Result<()> {
    let mut request = Map::new();
    arguments.terms.enter(&mut request);
    let mut placement = Map::new();
    enter(
        &mut placement,
        [
            ("policy", arguments.policy.clone().map(Into::into)),
            ("isolation", arguments.isolation.clone().map(Into::into)),
        ],
    );
    enter(
        &mut request,
        [
            ("organisation", arguments.organisation.clone().map(Into::into)),
            ("project", arguments.project.clone().map(Into::into)),
            ("scanouts", arguments.scanouts.map(Into::into)),
            ("direct", arguments.direct.then_some(true.into())),
            ("placement", (!placement.is_empty()).then_some(placement.into())),
        ],
    );
    let (vm, made) = arguments.api.ask("PUT", &path(&arguments.name), Some(&request.into()))?;
    let done = if made { "made" } else { "there already, and is as said" };
    arguments.api.print(&vm, |vm| format!("VM {} is {done}\n\n{}", text(&vm["id"]), connect(vm)))
}

/// Changes what was said of a VM, and nothing else of it.
pub(crate) fn update(arguments: &Update) -> Result<()> {
    let path = path(&arguments.name);
    let vm = arguments.api.get(&path)?;
    let mut request = kept(&vm, arguments.terms.size.is_some());
    arguments.terms.enter(&mut request);
    let (vm, _) = arguments.api.ask("PUT", &path, Some(&request.into()))?;
    arguments.api.print(&vm, describe)
}

/// A request that leaves a VM as it is. With a new size, what a size gives is left to it.
fn kept(vm: &Value, resized: bool) -> Map<String, Value> {
    let sized = [
        "memory_bytes",
        "guaranteed_bytes",
        "headroom_bytes",
        "pinned_bytes",
        "weight",
        "priority",
        "cap_permille",
        "guarantee_permille",
    ];
    let own = [
        "size",
        "placement",
        "organisation",
        "project",
        "scanouts",
        "direct",
        "readmit_after_seconds",
        "hang_after_seconds",
        "guest_memory_bytes",
    ];
    let sized = if resized { &[] } else { &sized[..] };
    let fields = sized.iter().chain(&own).map(|field| ((*field).to_owned(), vm[*field].clone()));
    // What is answered as 0 was not said, and where it could be said 0 is the same.
    fields.filter(|(_, value)| !value.is_null() && value.as_u64() != Some(0)).collect()
}

/// Shows a VM.
pub(crate) fn show(arguments: &One) -> Result<()> {
    let vm = arguments.api.get(&path(&arguments.name))?;
    arguments.api.print(&vm, |vm| format!("{}\n{}", describe(vm), connect(vm)))
}

/// Lists VMs.
pub(crate) fn list(arguments: &List) -> Result<()> {
    let mut list = arguments.api.get("/v1/vms")?;
    for (field, wanted) in [("organisation", &arguments.organisation), ("project", &arguments.project)] {
        if let (Some(wanted), Some(vms)) = (wanted, list["vms"].as_array_mut()) {
            vms.retain(|vm| vm[field] == **wanted);
        }
    }
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
        for vm in items(&list["vms"]) {
            table.row([
                text(&vm["id"]),
                state(vm),
                text(&vm["organisation"]),
                text(&vm["project"]),
                bytes(&lent(vm).into()),
                limit(&vm["memory_bytes"]),
                items(&vm["sessions"]).len().to_string(),
                text(&vm["weight"]),
                text(&vm["priority"]),
            ]);
        }
        table.to_string()
    })
}

/// Ends a VM.
pub(crate) fn delete(arguments: &One) -> Result<()> {
    arguments.api.ask("DELETE", &path(&arguments.name), None)?;
    arguments.api.print(&json!({}), |_| format!("VM {} is gone", plain(&arguments.name)))
}

/// Fences a VM.
pub(crate) fn fence(arguments: &Fence) -> Result<()> {
    let mut request = Map::new();
    enter(&mut request, [("reason", arguments.reason.clone().map(Into::into))]);
    let path = format!("{}/fence", path(&arguments.name));
    let (vm, _) = arguments.api.ask("POST", &path, Some(&request.into()))?;
    arguments.api.print(&vm, stands)?;
    let fence = &vm["fence"];
    ensure!(fence["step"] == "quarantined", "it is not quarantined yet; `sluice show` says when it is");
    ensure!(fence["clean"] == true, "not everything of it is clean; see the runbook of SluiceFenceUnclean");
    Ok(())
}

/// Lets a VM in again, or has VMs come to a unit or GPU again.
pub(crate) fn readmit(arguments: &Target) -> Result<()> {
    let api = &arguments.api;
    match (&arguments.name, arguments.unit, arguments.gpu) {
        (Some(name), ..) => {
            let (vm, _) = api.ask("POST", &format!("{}/readmit", path(name)), None)?;
            api.print(&vm, stands)
        }
        (None, Some(unit), _) => {
            let (unit, _) = api.ask("POST", &format!("/v1/units/{unit}/readmit"), None)?;
            api.print(&unit, |unit| format!("unit {} is {}", text(&unit["unit"]), text(&unit["state"])))
        }
        // One of them is there: the command line says so.
        (None, None, gpu) => {
            let gpu = gpu.unwrap_or_default();
            let (gpu, _) = api.ask("POST", &format!("/v1/gpus/{gpu}/readmit"), None)?;
            api.print(&gpu, |gpu| format!("GPU {} is {}", text(&gpu["gpu"]), text(&gpu["state"])))
        }
    }
}

/// Lets a VM begin no session any more, or has a unit or GPU emptied.
pub(crate) fn drain(arguments: &Target) -> Result<()> {
    let api = &arguments.api;
    match (&arguments.name, arguments.unit, arguments.gpu) {
        (Some(name), ..) => {
            let (vm, _) = api.ask("POST", &format!("{}/drain", path(name)), None)?;
            api.print(&vm, |vm| {
                let running = items(&vm["sessions"]).len();
                format!("VM {} begins no session any more; {running} run", text(&vm["id"]))
            })
        }
        (None, Some(unit), _) => {
            api.ask("POST", &format!("/v1/units/{unit}/drain"), None)?;
            api.print(&json!({}), |_| format!("no VM comes to unit {unit} any more"))
        }
        (None, None, gpu) => {
            let gpu = gpu.unwrap_or_default();
            let (gpu, _) = api.ask("POST", &format!("/v1/gpus/{gpu}/drain"), None)?;
            api.print(&gpu, |gpu| format!("GPU {} is {}", text(&gpu["gpu"]), text(&gpu["state"])))
        }
    }
}

/// Device memory lent to a VM on all units.
pub(crate) fn lent(vm: &Value) -> u64 {
    sum(items(&vm["units"]).iter().map(|unit| &unit["lent_bytes"]))
}

/// Whether a VM has its device, or what keeps it from the GPU.
pub(crate) fn state(vm: &Value) -> String {
    let step = &vm["fence"]["step"];
    match vm["draining"] == true {
        _ if *step != "active" => text(step),
        true => "draining".to_owned(),
        false => text(&vm["state"]),
    }
}

fn stands(vm: &Value) -> String {
    let fence = &vm["fence"];
    let clean = match (fence["step"] == "quarantined", fence["clean"] == true) {
        (true, true) => ", and everything of it is clean",
        (true, false) => ", and NOT everything of it is clean",
        (false, _) => "",
    };
    format!("VM {} is {} in epoch {}{clean}", text(&vm["id"]), text(&fence["step"]), text(&fence["epoch"]))
}

fn describe(vm: &Value) -> String {
    let mut lines = vec![format!("VM {} (number {}) is {}", text(&vm["id"]), text(&vm["number"]), state(vm))];
    let mut line = |title: &str, value: String| lines.push(format!("  {title:<16} {value}"));
    if let Some(why) = vm["failure"].as_str() {
        line("failure", plain(why));
    }
    if vm["fence"]["step"] != "active" {
        line("fenced for", text(&vm["fence"]["reason"]));
        line("fenced by", text(&vm["fence"]["by"]));
    }
    for (title, field) in
        [("size", "size"), ("organisation", "organisation"), ("project", "project"), ("owner", "owner_uid")]
    {
        if !vm[field].is_null() {
            line(title, text(&vm[field]));
        }
    }
    line(
        "memory",
        format!("{}, of which {} kept for it", limit(&vm["memory_bytes"]), bytes(&vm["guaranteed_bytes"])),
    );
    line("weight", format!("{}, priority {}", text(&vm["weight"]), text(&vm["priority"])));
    let placement = &vm["placement"];
    line("placement", format!("{}, {}", text(&placement["policy"]), text(&placement["isolation"])));
    line(
        "device",
        vm["device_process"].as_u64().map_or("-".to_owned(), |process| format!("process {process}")),
    );
    for session in items(&vm["sessions"]) {
        let worker =
            session["worker"].as_u64().map_or("no worker yet".to_owned(), |pid| format!("worker {pid}"));
        line("session", format!("{}, {worker}", text(&session["session"])));
    }
    for unit in items(&vm["units"]) {
        line(
            "unit",
            format!(
                "{}: {} lent, {} of the driver's, {} to be scrubbed, {:.3} s of GPU time",
                text(&unit["unit"]),
                bytes(&unit["lent_bytes"]),
                bytes(&unit["headroom_bytes"]),
                bytes(&unit["dirty_bytes"]),
                unit["gpu_seconds"].as_f64().unwrap_or(0.0)
            ),
        );
    }
    lines.join("\n") + "\n"
}

/// What a VMM needs, to be copied into a shell.
fn connect(vm: &Value) -> String {
    let connect = &vm["connect"];
    let words = |list: &Value| {
        let words = items(list).iter().filter_map(Value::as_str).map(quoted);
        words.collect::<Vec<_>>().join(" ")
    };
    let socket = text(&connect["socket"]);
    if vm["direct"] == true {
        return format!("SLUICE_TRANSPORT=direct SLUICE_SOCKET={socket}\n");
    }
    format!(
        "socket            {socket}\nqemu              {}\ncloud-hypervisor  {}\nvsock             {}\n",
        words(&connect["qemu"]),
        words(&connect["cloud_hypervisor"]),
        text(&connect["vsock"]["socket"])
    )
}

/// A word as a shell takes it.
fn quoted(word: &str) -> String {
    let harmless = |c: char| c.is_ascii_alphanumeric() || "-_=,.:/@%+".contains(c);
    if !word.is_empty() && word.chars().all(harmless) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    // Promise: A20
    #[test]
    fn an_update_leaves_what_it_does_not_name() {
        let vm = json!({ "id": "a", "memory_bytes": 64, "guaranteed_bytes": 0, "weight": 300, "priority": "high", "size": "small",
            "placement": { "policy": "any", "isolation": "strict" }, "scanouts": 1, "direct": false, "cap_permille": 0, "state": "running" });
        let request = kept(&vm, false);
        assert_eq!(
            Value::from(request),
            json!({ "memory_bytes": 64, "weight": 300, "priority": "high", "size": "small", "scanouts": 1, "direct": false,
                "placement": { "policy": "any", "isolation": "strict" } })
        );
        let request = kept(&vm, true);
        assert!(!request.contains_key("memory_bytes") && request.contains_key("placement"), "{request:?}");
    }

    #[test]
    fn words_are_quoted_for_a_shell() {
        assert_eq!(quoted("socket,id=sluice,path=/run/a.sock"), "socket,id=sluice,path=/run/a.sock");
        assert_eq!(quoted("queue_sizes=[1024,16]"), "'queue_sizes=[1024,16]'");
        assert_eq!(quoted("it's"), r"'it'\''s'");
    }
}
