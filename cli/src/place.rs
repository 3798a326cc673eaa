//! Placement of VMs: `sluice move, mig, suggestions`.

use anyhow::Result;
use sluice_api::{
    client::Client,
    v1::{MigModeRequest, MoveQuery, Rebalance, UnitKind},
};

use crate::{
    api::{Api, plain, words},
    table::{Table, text},
};

#[derive(Debug, clap::Args)]
pub(crate) struct Move {
    #[command(flatten)]
    api: Api,
    /// Name of the VM
    name: String,
    /// Kind of the new unit: an instance of its own, or a unit shared by time-slice [default: the best of both]
    #[arg(long, value_parser = words::<UnitKind>(["mig", "time-slice"]))]
    kind: Option<UnitKind>,
    /// Ordinal of the new GPU [default: the best]
    #[arg(long, value_name = "N")]
    gpu: Option<u32>,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Mig {
    #[command(flatten)]
    api: Api,
    /// Ordinal of the GPU
    gpu: u32,
    /// MIG mode
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
    let to = MoveQuery { kind: arguments.kind, gpu: arguments.gpu };
    let vm = arguments.api.ask(|api| api.move_vm(&arguments.name, &to))?;
    arguments.api.print(&vm, |vm| {
        let placed = vm.placed.as_ref();
        let unit = text(&placed.map(|placed| placed.unit));
        let gpu = text(&placed.map(|placed| placed.gpu));
        let kind = text(&placed.map(|placed| placed.kind));
        format!("VM {} is on unit {unit} of GPU {gpu} ({kind})", text(&vm.id))
    })
}

/// Switches the MIG mode of a GPU.
pub(crate) fn mig(arguments: &Mig) -> Result<()> {
    let wanted = MigModeRequest { enabled: arguments.mode == "on" };
    let gpu = arguments.api.ask(|api| api.put_gpu_mig(arguments.gpu, &wanted))?;
    arguments.api.print(&gpu, |gpu| {
        let divided = |on: bool| if on { "divided into instances" } else { "not divided" };
        let number = gpu.gpu;
        match gpu.mig_pending {
            Some(on) => format!("GPU {number} is {} after its next reset: reset it", divided(on)),
            None => format!("GPU {number} is {}; it takes VMs when it is readmitted", divided(gpu.mig)),
        }
    })
}

/// Shows suggested moves of VMs.
pub(crate) fn suggestions(arguments: &Suggestions) -> Result<()> {
    let answer = arguments.api.ask(Client::suggestions)?;
    arguments.api.print(&answer, |answer| {
        if answer.policy == Rebalance::Off {
            return "load is not observed: the setting `rebalance` is off".to_owned();
        }
        let percent = |ratio: f64| format!("{:.0} %", ratio * 100.0);
        let mut units = Table::new(&[">UNIT", ">GPU TIME", ">EXPECTED", ">MEMORY", ">EXPECTED"]);
        for unit in &answer.units {
            units.row([
                text(&unit.unit),
                percent(unit.gpu_time_ratio),
                percent(unit.gpu_time_ratio_ahead),
                percent(unit.memory_ratio),
                percent(unit.memory_ratio_ahead),
            ]);
        }
        let mut moves = Table::new(&["VM", ">FROM", ">TO GPU", "KIND", ">UNIT", "NOW", ">GAIN", "WHY"]);
        for one in &answer.suggestions {
            moves.row([
                text(&one.vm),
                text(&one.from),
                text(&one.to.gpu),
                text(&one.to.kind),
                text(&one.to.unit),
                if one.idle { "yes" } else { "when idle" }.to_owned(),
                percent(one.gain_ratio),
                plain(&one.why),
            ]);
        }
        if answer.suggestions.is_empty() {
            return format!("{units}\nno move would help\n");
        }
        format!("{units}\n{moves}")
    })
}
