//! Where VMs are: `sluice move, mig`.

use anyhow::Result;
use serde_json::json;

use crate::{
    api::Api,
    table::text,
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
