//! The state of the host and its usage: `sluice status, gpus, units, usage`.

use anyhow::Result;
use serde::Serialize;
use sluice_api::{
    client::Client,
    v1::{Host, HostMemoryAccess, Unit, Vm},
};

use crate::{
    api::{Api, ApiRefusal, plain},
    table::{Table, bytes, text},
    vms::lent,
};

/// Age in seconds up to which a unit's figures are shown without it.
const FRESH: u64 = 2;

#[derive(Debug, clap::Args)]
pub(crate) struct LookArguments {
    #[command(flatten)]
    api: Api,
}

/// The output of `sluice status`.
#[derive(Debug, Serialize)]
struct Status {
    #[serde(flatten)]
    host: Host,
    units: Vec<Unit>,
    vms: Vec<Vm>,
    ready: bool,
    not_ready_because: Vec<String>,
}

/// Shows the state of sluiced.
pub(crate) fn status(arguments: &LookArguments) -> Result<()> {
    let api = &arguments.api;
    let host = api.ask(Client::host)?;
    let (units, vms) = (api.ask(Client::units)?.units, api.ask(Client::vms)?.vms);
    let (ready, not_ready_because) = readiness(api)?;
    let status = Status { host, units, vms, ready, not_ready_because };
    api.print(&status, |Status { host, units, vms, ready, not_ready_because }| {
        let sessions: usize = vms.iter().map(|vm| vm.sessions.len()).sum();
        let lent = vms.iter().map(lent).fold(0, u64::saturating_add);
        let mut shown = format!(
            "sluiced {} (process {}) is {}\n{} VMs, {sessions} sessions, {} lent\n",
            text(&host.version),
            host.process,
            if *ready { "ready" } else { "NOT ready" },
            vms.len(),
            bytes(lent),
        );
        for cause in not_ready_because {
            shown.push_str(&format!("  because: {cause}\n"));
        }
        if !host.scrub {
            shown.push_str("SCRUBBING IS OFF: a tenant can read memory of the previous one\n");
        }
        shown + "\n" + &units_table(units)
    })
}

/// True if the daemon is ready, and the causes if it is not.
pub(crate) fn readiness(api: &Api) -> Result<(bool, Vec<String>)> {
    match api.ask(Client::readiness) {
        Ok(_) => Ok((true, Vec::new())),
        Err(error) => match error.downcast_ref::<ApiRefusal>() {
            Some(refusal) => Ok((false, refusal.causes().collect())),
            None => Err(error),
        },
    }
}

pub(crate) fn gpus(arguments: &LookArguments) -> Result<()> {
    let gpus = arguments.api.ask(Client::gpus)?;
    arguments.api.print(&gpus, |gpus| {
        let mut table = Table::new(&[">GPU", "NAME", "STATE", "MIG", "UUID", "UNITS"]);
        for gpu in &gpus.gpus {
            let units: Vec<String> = gpu.units.iter().map(u32::to_string).collect();
            let mig = match (gpu.mig, gpu.mig_pending) {
                (_, Some(true)) => "on after a reset",
                (_, Some(false)) => "off after a reset",
                (true, None) => "on",
                (false, None) => "off",
            };
            let (number, name, state) = (text(&gpu.gpu), text(&gpu.name), text(&gpu.state));
            table.row([number, name, state, mig.to_owned(), text(&gpu.uuid), units.join(" ")]);
        }
        let silent = "the driver's management library does not answer: its part of the state is unknown\n";
        format!("{table}{}", if gpus.inventory { "" } else { silent })
    })
}

pub(crate) fn units(arguments: &LookArguments) -> Result<()> {
    let units = arguments.api.ask(Client::units)?;
    arguments.api.print(&units, |units| units_table(&units.units))
}

/// Units and their memory.
pub(crate) fn units_table(units: &[Unit]) -> String {
    let mut table = Table::new(&[
        ">UNIT", ">GPU", "KIND", "STATE", ">LENT", ">CLEAN", ">DIRTY", ">SUSPECT", ">TOTAL", "REASON",
    ]);
    for unit in units {
        let memory = unit.memory.as_ref();
        table.row([
            text(&unit.unit),
            text(&unit.gpu),
            text(&unit.kind),
            text(&unit.state),
            bytes(memory.map(|memory| memory.lent_bytes)),
            bytes(memory.map(|memory| memory.clean_bytes)),
            bytes(memory.map(|memory| memory.dirty_bytes)),
            bytes(memory.map(|memory| memory.suspect_bytes)),
            bytes(memory.map(|memory| memory.total_bytes)),
            remarks(unit),
        ]);
    }
    table.to_string()
}

/// The reason of a quarantine, or the age of old figures, or the host memory that kernels reach.
fn remarks(unit: &Unit) -> String {
    let reason = unit.reason.as_deref().map(plain);
    let age = unit.memory.as_ref().map_or(0, |memory| memory.age_seconds);
    let old = (age > FRESH).then(|| format!("the figures are {age} s old"));
    reason.or(old).unwrap_or_else(|| match unit.host_memory_access {
        None | Some(HostMemoryAccess::None) => String::new(),
        Some(HostMemoryAccess::Pageable) => "kernels reach host memory (HMM)".to_owned(),
        Some(HostMemoryAccess::HostPageTables) => "kernels reach host memory (ATS)".to_owned(),
    })
}

/// Shows the usage.
pub(crate) fn usage(arguments: &LookArguments) -> Result<()> {
    let usage = arguments.api.ask(Client::usage)?;
    arguments.api.print(&usage, |usage| {
        let mut table = Table::new(&[
            "WHO",
            "NAME",
            ">GPU TIME",
            ">MEMORY TIME",
            ">EXISTED",
            ">SESSIONS",
            ">LAUNCHES",
            ">COPIES",
            ">COPIED",
            ">CALLS",
        ]);
        let host = usage.host.iter().map(|used| ("host", used));
        let organisations = usage.organisations.iter().map(|used| ("organisation", used));
        let projects = usage.projects.iter().map(|used| ("project", used));
        let vms = usage.vms.iter().map(|used| ("VM", used));
        for (who, used) in host.chain(organisations).chain(projects).chain(vms) {
            table.row([
                who.to_owned(),
                text(&used.id),
                format!("{:.1} s", used.gpu_seconds),
                memory_time(used.memory_byte_seconds),
                format!("{:.0} s", used.seconds),
                text(&used.sessions),
                text(&used.launches),
                text(&used.copies),
                bytes(used.copied_bytes),
                text(&used.calls),
            ]);
        }
        table.to_string()
    })
}

/// Memory over time, in GiB·s or GiB·h.
fn memory_time(byte_seconds: f64) -> String {
    let gib_seconds = byte_seconds / f64::from(1 << 30);
    if gib_seconds < 360.0 {
        format!("{gib_seconds:.2} GiB·s")
    } else {
        format!("{:.2} GiB·h", gib_seconds / 3600.0)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn figures_that_are_old_are_shown_with_their_age() {
        let shown = |age: u64| {
            let bytes = 1 << 20;
            let unit = json!({
                "unit": 0, "gpu": 0, "kind": "time-slice", "state": "lending", "figures_per_process": true, "vms": 0,
                "memory": {
                    "total_bytes": bytes, "lent_bytes": 0, "clean_bytes": bytes, "dirty_bytes": 0, "headroom_bytes": 0,
                    "suspect_bytes": 0, "age_seconds": age,
                },
                "stale_epoch_messages": 0,
            });
            units_table(&[serde_json::from_value(unit).expect("a unit")])
        };
        assert!(!shown(FRESH).contains("old"), "{}", shown(FRESH));
        assert!(shown(FRESH + 1).contains("the figures are 3 s old"), "{}", shown(FRESH + 1));
    }
}
