//! Where VMs are: `sluice move, mig, suggestions`.

use anyhow::Result;
use serde_json::json;

use crate::{
    api::{Api, plain},
    table::{Table, items, text},
    vms::path,
};

#[derive(Debug, clap::Args)]
pub(crate) struct Move {
    #[command(flatten)]
    api: Api,
    /// The VM
    name: String,
    /// To an instance of its own, or a unit that is shared by time-slice [default: the best of both]
    #[arg(long, value_parser = ["mig", "time-slice"])]
    kind: Option<String>,
    /// To this GPU [default: the best]
    #[arg(long, value_name = "N")]
    gpu: Option<u32>,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Mig {
    #[command(flatten)]
    api: Api,
    /// The GPU
    gpu: u32,
    /// Whether it is to be divided
    #[arg(value_parser = ["on", "off"])]
    mode: String,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Suggestions {
    #[command(flatten)]
    api: Api,
}

/// Moves a VM that has no session.
pub(crate) fn relocate(arguments: &Move) -> Result<()> {
    let kind = arguments.kind.iter().map(|kind| format!("kind={kind}"));
    let gpu = arguments.gpu.iter().map(|gpu| format!("gpu={gpu}"));
    let query: Vec<String> = kind.chain(gpu).collect();
    let mark = if query.is_empty() { "" } else { "?" };
    let place = format!("{}/move{mark}{}", path(&arguments.name), query.join("&"));
    let (vm, _) = arguments.api.ask("POST", &place, None)?;
    arguments.api.print(&vm, |vm| {
        let placed = &vm["placed"];
        let (unit, gpu) = (text(&placed["unit"]), text(&placed["gpu"]));
        format!("VM {} is on unit {unit} of GPU {gpu} ({})", text(&vm["id"]), text(&placed["kind"]))
    })
}

/// Switches a GPU to MIG mode, or out of it.
pub(crate) fn mig(arguments: &Mig) -> Result<()> {
    let wanted = json!({ "enabled": arguments.mode == "on" });
    let (gpu, _) = arguments.api.ask("PUT", &format!("/v1/gpus/{}/mig", arguments.gpu), Some(&wanted))?;
    arguments.api.print(&gpu, |gpu| {
        let divided = |on: bool| if on { "divided into instances" } else { "not divided" };
        let number = text(&gpu["gpu"]);
        match gpu["mig_pending"].as_bool() {
            Some(on) => format!("GPU {number} is {} from its next reset on: reset it", divided(on)),
            None => {
                format!("GPU {number} is {}; it takes VMs when it is readmitted", divided(gpu["mig"] == true))
            }
        }
    })
}

/// Says which VMs had better be on other units.
pub(crate) fn suggestions(arguments: &Suggestions) -> Result<()> {
    let answer = arguments.api.get("/v1/placement/suggestions")?;
    arguments.api.print(&answer, |answer| {
        if answer["policy"] == "off" {
            return "load is not looked at: the setting `rebalance` is off".to_owned();
        }
        let percent = |value: &serde_json::Value| format!("{:.0} %", value.as_f64().unwrap_or(0.0) * 100.0);
        let mut units = Table::new(&[">UNIT", ">GPU TIME", ">EXPECTED", ">MEMORY", ">EXPECTED"]);
        for unit in items(&answer["units"]) {
            let ratio = |field: &str| percent(&unit[field]);
            units.row([
                text(&unit["unit"]),
                ratio("gpu_time_ratio"),
                ratio("gpu_time_ratio_ahead"),
                ratio("memory_ratio"),
                ratio("memory_ratio_ahead"),
            ]);
        }
        let mut moves = Table::new(&["VM", ">FROM", ">TO GPU", "KIND", ">UNIT", "NOW", ">GAIN", "WHY"]);
        for one in items(&answer["suggestions"]) {
            let to = &one["to"];
            moves.row([
                text(&one["vm"]),
                text(&one["from"]),
                text(&to["gpu"]),
                text(&to["kind"]),
                text(&to["unit"]),
                if one["idle"] == true { "yes" } else { "when idle" }.to_owned(),
                percent(&one["gain_ratio"]),
                one["why"].as_str().map(plain).unwrap_or_default(),
            ]);
        }
        if items(&answer["suggestions"]).is_empty() {
            return format!("{units}\nnothing would be better elsewhere\n");
        }
        format!("{units}\n{moves}")
    })
}
