//! What there is and what is used: `sluice status, gpus, units, usage`.

use anyhow::Result;
use serde_json::{Value, json};

use crate::{
    api::{Api, Refusal, plain},
    table::{Table, bytes, items, text},
    vms::lent,
};

#[derive(Debug, clap::Args)]
pub(crate) struct Asked {
    #[command(flatten)]
    api: Api,
}

/// Shows what a sluiced is and has.
pub(crate) fn status(arguments: &Asked) -> Result<()> {
    let api = &arguments.api;
    let mut status = api.get("/v1/host")?;
    for (path, list) in [("/v1/units", "units"), ("/v1/vms", "vms")] {
        status[list] = api.get(path)?[list].take();
    }
    let (ready, cause) = readiness(api)?;
    status["ready"] = json!(ready);
    status["not_ready_because"] = json!(cause);
    api.print(&status, |status| {
        let vms = items(&status["vms"]);
        let sessions: usize = vms.iter().map(|vm| items(&vm["sessions"]).len()).sum();
        let lent = vms.iter().map(lent).fold(0, u64::saturating_add);
        let mut shown = format!(
            "sluiced {} (process {}) is {}\n{} VMs, {sessions} sessions, {} lent\n",
            text(&status["version"]),
            text(&status["process"]),
            if ready { "ready" } else { "NOT ready" },
            vms.len(),
            bytes(&lent.into()),
        );
        for cause in &cause {
            shown.push_str(&format!("  because: {}\n", plain(cause)));
        }
        if status["scrub"] == false {
            shown.push_str("SCRUBBING IS OFF: what one tenant leaves behind reaches the next\n");
        }
        shown + "\n" + &units_table(&status["units"])
    })
}

/// Whether the daemon does what it is there for, and why not.
pub(crate) fn readiness(api: &Api) -> Result<(bool, Vec<String>)> {
    match api.get("/readyz") {
        Ok(_) => Ok((true, Vec::new())),
        Err(error) => match error.downcast_ref::<Refusal>() {
            Some(refusal) => Ok((false, refusal.causes().to_vec())),
            None => Err(error),
        },
    }
}

/// Lists GPUs.
pub(crate) fn gpus(arguments: &Asked) -> Result<()> {
    let gpus = arguments.api.get("/v1/gpus")?;
    arguments.api.print(&gpus, |gpus| {
        let mut table = Table::new(&[">GPU", "NAME", "STATE", "MIG", "UUID", "UNITS"]);
        for gpu in items(&gpus["gpus"]) {
            let units: Vec<String> = items(&gpu["units"]).iter().map(text).collect();
            let mig = match (gpu["mig"] == true, gpu["mig_pending"].as_bool()) {
                (_, Some(true)) => "on after a reset",
                (_, Some(false)) => "off after a reset",
                (true, None) => "on",
                (false, None) => "off",
            };
            let (number, name, state) = (text(&gpu["gpu"]), text(&gpu["name"]), text(&gpu["state"]));
            table.row([number, name, state, mig.to_owned(), text(&gpu["uuid"]), units.join(" ")]);
        }
        let silent = "the driver's management library does not answer: what it would say is unknown\n";
        format!("{table}{}", if gpus["inventory"] == true { "" } else { silent })
    })
}

/// Lists units.
pub(crate) fn units(arguments: &Asked) -> Result<()> {
    let units = arguments.api.get("/v1/units")?;
    arguments.api.print(&units, |units| units_table(&units["units"]))
}

/// Units and their memory.
pub(crate) fn units_table(units: &Value) -> String {
    let mut table = Table::new(&[
        ">UNIT", ">GPU", "KIND", "STATE", ">LENT", ">CLEAN", ">DIRTY", ">SUSPECT", ">TOTAL", "REASON",
    ]);
    for unit in items(units) {
        let memory = &unit["memory"];
        table.row([
            text(&unit["unit"]),
            text(&unit["gpu"]),
            text(&unit["kind"]),
            text(&unit["state"]),
            bytes(&memory["lent_bytes"]),
            bytes(&memory["clean_bytes"]),
            bytes(&memory["dirty_bytes"]),
            bytes(&memory["suspect_bytes"]),
            bytes(&memory["total_bytes"]),
            unit["reason"].as_str().map(plain).unwrap_or_default(),
        ]);
    }
    table.to_string()
}

/// Shows what was used.
pub(crate) fn usage(arguments: &Asked) -> Result<()> {
    let usage = arguments.api.get("/v1/usage")?;
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
        let lists = [("organisation", "organisations"), ("project", "projects"), ("VM", "vms")];
        let all =
            lists.iter().flat_map(|(who, list)| items(&usage[*list]).iter().map(move |used| (*who, used)));
        let host = (!usage["host"].is_null()).then_some(("host", &usage["host"]));
        for (who, used) in host.into_iter().chain(all) {
            let number = |field: &str| used[field].as_f64().unwrap_or(0.0);
            table.row([
                who.to_owned(),
                text(&used["id"]),
                format!("{:.1} s", number("gpu_seconds")),
                memory_time(number("memory_byte_seconds")),
                format!("{:.0} s", number("seconds")),
                text(&used["sessions"]),
                text(&used["launches"]),
                text(&used["copies"]),
                bytes(&used["copied_bytes"]),
                text(&used["calls"]),
            ]);
        }
        table.to_string()
    })
}

/// Memory over time, in a unit that shows something.
fn memory_time(byte_seconds: f64) -> String {
    let gib_seconds = byte_seconds / f64::from(1 << 30);
    if gib_seconds < 360.0 {
        format!("{gib_seconds:.2} GiB·s")
    } else {
        format!("{:.2} GiB·h", gib_seconds / 3600.0)
    }
}
