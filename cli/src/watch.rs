//! `sluice watch`: a view of units and VMs that refreshes itself, as `top` shows processes.

use std::{
    collections::BTreeMap,
    io::IsTerminal as _,
    thread,
    time::{Duration, Instant},
};

use anyhow::Result;
use sluice_api::{
    client::Client,
    v1::{Unit, Vm},
};

use crate::{
    api::{Api, print},
    look::units_table,
    table::{Table, bytes, limit, text},
    terminal::terminal_lines,
    vms::{lent, state},
};

/// Width of a bar, in cells.
const BAR: u32 = 20;

#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    api: Api,
    /// Show the table once and exit
    #[arg(long)]
    once: bool,
    /// Seconds between two refreshes
    #[arg(long, value_name = "SECONDS", default_value_t = 1.0, value_parser = interval)]
    interval: f64,
    /// Sort key
    #[arg(long, value_parser = ["name", "memory", "time"], default_value = "memory")]
    sort: String,
}

fn interval(text: &str) -> Result<f64, String> {
    let seconds: f64 = text.parse().map_err(|_| "not a number".to_owned())?;
    if (0.1..=3600.0).contains(&seconds) { Ok(seconds) } else { Err("must be from 0.1 to 3600".to_owned()) }
}

/// State at one refresh.
struct Look {
    units: Vec<Unit>,
    vms: Vec<Vm>,
    at: Instant,
    /// Seconds of GPU time by VM.
    time: BTreeMap<String, f64>,
}

/// Shows the live table.
pub(crate) fn watch(arguments: &Arguments) -> Result<()> {
    let on_terminal = std::io::stdout().is_terminal();
    let mut before: Option<Look> = None;
    loop {
        let now = look(&arguments.api)?;
        if arguments.api.json {
            let both = serde_json::json!({ "units": now.units, "vms": now.vms });
            print(&format!("{both}\n"))?;
        } else {
            let frame = frame(&now, before.as_ref(), &arguments.sort);
            print(&if on_terminal && !arguments.once { redraw(&frame, terminal_lines()) } else { frame })?;
        }
        if arguments.once {
            return Ok(());
        }
        before = Some(now);
        thread::sleep(Duration::from_secs_f64(arguments.interval));
    }
}

fn look(api: &Api) -> Result<Look> {
    let (units, vms) = (api.ask(Client::units)?.units, api.ask(Client::vms)?.vms);
    let time = vms.iter().map(|vm| (vm.id.clone(), vm.units.iter().map(|unit| unit.gpu_seconds).sum()));
    Ok(Look { time: time.collect(), units, vms, at: Instant::now() })
}

/// One refresh as text.
fn frame(now: &Look, before: Option<&Look>, sort: &str) -> String {
    let used = |name: &str| {
        let before = before?;
        let passed = now.at.duration_since(before.at).as_secs_f64();
        // A unit whose counters restarted counts as unused.
        let used = (now.time.get(name)? - before.time.get(name)?).max(0.0);
        (passed > 0.0).then(|| used / passed)
    };
    let mut vms: Vec<(&Vm, Option<f64>)> = now.vms.iter().map(|vm| (vm, used(&vm.id))).collect();
    match sort {
        "memory" => vms.sort_by_key(|(vm, _)| std::cmp::Reverse(lent(vm))),
        "time" => vms.sort_by(|(_, one), (_, other)| other.unwrap_or(0.0).total_cmp(&one.unwrap_or(0.0))),
        _ => {}
    }
    let sessions: usize = vms.iter().map(|(vm, _)| vm.sessions.len()).sum();
    let mut table = Table::new(&[
        "VM",
        "STATE",
        ">SESSIONS",
        "MEMORY",
        ">LENT",
        ">OF",
        ">GPU TIME",
        ">WEIGHT",
        "PRIORITY",
    ]);
    for (vm, used) in &vms {
        let lent = lent(vm);
        let may = if vm.memory_bytes == 0 { total(&now.units) } else { vm.memory_bytes };
        table.row([
            text(&vm.id),
            state(vm),
            vm.sessions.len().to_string(),
            bar(lent, may),
            bytes(lent),
            limit(vm.memory_bytes),
            used.map_or("-".to_owned(), |used| format!("{:.1} %", used * 100.0)),
            text(&vm.time.weight),
            text(&vm.time.priority),
        ]);
    }
    let title = format!("{} VMs, {sessions} sessions on {} units", vms.len(), now.units.len());
    format!("{title}\n\n{}\n{table}", units_table(&now.units))
}

fn total(units: &[Unit]) -> u64 {
    let memory = units.iter().filter_map(|unit| unit.memory.as_ref());
    memory.map(|memory| memory.total_bytes).fold(0, u64::saturating_add)
}

fn bar(part: u64, whole: u64) -> String {
    let cells = u128::from(part).saturating_mul(u128::from(BAR)).div_ceil(u128::from(whole.max(1)));
    let cells = usize::try_from(cells).unwrap_or(usize::MAX).min(BAR as usize);
    format!("[{}{}]", "|".repeat(cells), " ".repeat(BAR as usize - cells))
}

/// A frame over the last one, cut to the height of the terminal so that it does not scroll.
fn redraw(frame: &str, lines: Option<usize>) -> String {
    let lines = lines.unwrap_or(usize::MAX).saturating_sub(1).max(1);
    let mut drawn = "\x1b[H".to_owned();
    for line in frame.lines().take(lines) {
        drawn.push_str(line);
        drawn.push_str("\x1b[K\n");
    }
    drawn.push_str("\x1b[J");
    drawn
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use sluice_api::v1::{Session, VmUnit};

    use super::*;

    fn look(lent: u64, seconds: f64, at: Instant) -> Look {
        let vm = |name: &str, lent: u64| Vm {
            id: name.to_owned(),
            memory_bytes: 100 << 20,
            sessions: vec![Session { session: 1, worker: None }],
            units: vec![VmUnit {
                unit: 0,
                lent_bytes: lent,
                headroom_bytes: 0,
                dirty_bytes: 0,
                holders: 0,
                gpu_seconds: 0.0,
            }],
            ..crate::vms::tests::vm()
        };
        let unit = json!({ "unit": 0, "gpu": 0, "kind": "time-slice", "state": "lending", "figures_per_process": true, "vms": 2,
            "stale_epoch_messages": 0 });
        Look {
            units: vec![serde_json::from_value(unit).expect("a unit")],
            vms: vec![vm("a", lent), vm("b", 90 << 20)],
            at,
            time: BTreeMap::from([("a".to_owned(), seconds), ("b".to_owned(), 1.0)]),
        }
    }

    // Promise: A20
    #[test]
    fn watch_frame_shows_memory_and_time_used_since_the_last_frame() {
        let start = Instant::now();
        let (before, now) = (look(0, 1.0, start), look(50 << 20, 1.5, start + Duration::from_secs(2)));
        let first = frame(&before, None, "memory");
        assert!(first.contains("2 VMs, 2 sessions on 1 units"), "{first}");
        let shown = frame(&now, Some(&before), "memory");
        let line = |name: &str| {
            let line = shown.lines().position(|line| line.starts_with(name)).expect("a line");
            (line, shown.lines().nth(line).unwrap_or_default())
        };
        let (a, b) = (line("a "), line("b "));
        assert!(a.1.contains("[||||||||||          ]") && a.1.contains("25.0 %"), "{shown}");
        assert!(b.1.contains("0.0 %") && b.0 < a.0, "the one with more memory comes first: {shown}");
        let shown = frame(&now, Some(&before), "time");
        assert!(shown.find("\na ") < shown.find("\nb "), "{shown}");
    }

    #[test]
    fn watch_frame_is_cut_to_the_lines_of_the_terminal() {
        let drawn = redraw("1\n2\n3\n4\n", Some(3));
        assert_eq!(drawn, "\x1b[H1\x1b[K\n2\x1b[K\n\x1b[J");
        assert_eq!(
            (bar(0, 10), bar(99, 10)),
            (format!("[{}]", " ".repeat(20)), format!("[{}]", "|".repeat(20)))
        );
    }
}
